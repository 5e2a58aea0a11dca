"""What a description of a run holds of the settings of its training."""

import argparse
import dataclasses
import enum
import json
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from models import PlainDecoder

from geomon import Monitor
from geomon.monitor.settings import flat_settings, readable_items


def test_settings_are_numbers_and_texts_by_their_path(tmp_path):
    given = {
        "rate": 0.1, "deep": {"a": {"b": 1, "c": {"d": 2}}}, "module": torch.nn.Identity(),
        "name": "x" * 300, "flag": True, **{f"many_{n}": n for n in range(200)},
    }  # fmt: skip
    flat = flat_settings(given)
    assert len(flat) == 100
    assert flat["training/deep/a/b"] == 1
    assert flat["training/name"] == "x" * 200
    assert not [name for name in flat if "module" in name or name.endswith("/d")]
    monitor = Monitor(PlainDecoder(), settings={"rate": 0.1, "trial": 3}, directory=tmp_path)
    assert monitor.describe().items() >= {"training/rate": 0.1, "training/trial": 3}.items()
    monitor.close()
    with pytest.raises(TypeError, match="settings is a dict"):
        Monitor(PlainDecoder(), settings=[3])


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Config:
    width: int = 64
    rate: float = 0.5


class Failing(Mapping):
    """A configuration of which one value is missing."""

    def __iter__(self):
        return iter(["known", "missing"])

    def __len__(self):
        return 2

    def __getitem__(self, name):
        if name == "missing":
            raise RuntimeError("Missing mandatory value")
        return 1


@pytest.mark.parametrize(
    ("given", "stands"),
    [
        (np.float32(0.5), 0.5), (np.int64(3), 3), (np.bool_(True), True), (np.float64(0.1), 0.1),
        (np.str_("adam"), "adam"), (torch.tensor(2), 2), (torch.tensor(0.5), 0.5),
        (Colour.RED, "red"), (math.inf, "inf"), (math.nan, "nan"), (-math.inf, "-inf"),
        (2**64, 2**64), ("/srv/someone/data/enwik8", "enwik8"), ("~/data/enwik8/", "enwik8"),
        ("C:\\data\\enwik8", "enwik8"), ("gpt2/medium", "gpt2/medium"), ("\ud800", "?"),
        ("https://example.org/a", "https://example.org/a"),
    ],
)  # fmt: skip
def test_a_setting_of_any_type_stands_as_json_has_it(given, stands):
    flat = flat_settings({"one": given})
    assert flat == {"training/one": stands}
    assert type(flat["training/one"]) is type(stands)
    json.dumps(flat, allow_nan=False)


@pytest.mark.parametrize(
    "given",
    [
        None, pytest.param(10**5000, id="huge"), (1, 2), torch.ones(2),
        torch.ones((), device="meta"), torch.nn.Identity(), b"bytes", lambda: 1, Config,
    ],
)  # fmt: skip
def test_what_is_no_number_and_no_text_is_left_out(given):
    assert flat_settings({"one": given, "other": 1}) == {"training/other": 1}


@pytest.mark.parametrize(
    "path",
    [
        "hub_token", "token", "api_key", "wandb.apikey", "PASSWORD", "secret", "db-credentials",
        "credentials/value", "apiKeys/openai", "wandb/key", "clientSecret", "hfToken", "pwd",
        "headers/Authorization", "APIKey", "secrets/a/b", "hf_abcdef",
    ],
)  # fmt: skip
def test_any_part_of_its_path_makes_a_text_a_secret(path):
    given = "some text"
    for name in reversed(path.split("/")):
        given = {name: given}
    assert flat_settings(given | {"other": "text"}) == {"training/other": "text"}


@pytest.mark.parametrize(
    "value",
    [
        "postgres://me:word@host/runs", "https://host/a?token=b", "https://host/a?x=1&api_key=b",
        "https://host/a?sig=b", "https://host/a?password=b", "hf_abc", "ghp_abc", "sk-abc",
        "-----BEGIN PRIVATE KEY-----", "--login hf_abc", "Bearer abc", "a1" * 20,
    ],
)  # fmt: skip
def test_a_text_that_looks_like_a_secret_is_one(value):
    assert flat_settings({"one": value, "deep": {"two": value}, value: 3}) == {}


def test_numbers_and_names_that_speak_of_tokens_are_no_secrets():
    given = {
        "token": 3, "max_tokens": 512, "num_tokens": 8, "tokens_per_step": 0.5, "vocab_tokens": 9,
        "keys": 4, "key_width": 4, "tokenizer": "bytes", "url": "https://host/a?page=2",
    }  # fmt: skip
    assert flat_settings(given) == {f"training/{name}": value for name, value in given.items()}
    assert flat_settings({"password": 1234, "credentials": {"value": 5}}) == {}


def test_settings_may_be_dataclasses_namespaces_and_have_any_names():
    given = {"model": Config(), "data": argparse.Namespace(length=32), 1: "one", (2, 3): 4}
    assert flat_settings(given) == {
        "training/model/width": 64, "training/model/rate": 0.5, "training/data/length": 32,
        "training/1": "one", "training/(2, 3)": 4,
    }  # fmt: skip


def test_a_value_that_cannot_be_read_ends_no_training():
    assert flat_settings({"deep": Failing()}) == {"training/deep/known": 1}
    assert dict(readable_items(Failing())) == {"known": 1}
    assert dict(readable_items(None)) == {}
