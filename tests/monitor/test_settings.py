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
from geomon.monitor import CallbackSession
from geomon.monitor.settings import flat_settings, readable_items


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


def test_settings_stand_in_the_description_under_their_paths(tmp_path):
    given = {
        "rate": 0.1, "deep": {"a": {"b": 1, "c": {"d": 2}}}, "model": Config(),
        "data": argparse.Namespace(length=32), 1: "one", (2, 3): 4, "held": Failing(),
    }  # fmt: skip
    expected = {
        "training/rate": 0.1, "training/deep/a/b": 1, "training/model/width": 64,
        "training/model/rate": 0.5, "training/data/length": 32, "training/1": "one",
        "training/(2, 3)": 4, "training/held/known": 1,
    }  # fmt: skip
    assert flat_settings(given) == expected
    assert len(flat_settings({f"many_{n}": n for n in range(200)})) == 100
    assert dict(readable_items(None)) == {}
    monitor = Monitor(PlainDecoder(), settings=given, directory=tmp_path)
    assert monitor.describe().items() >= expected.items()
    monitor.close()
    with pytest.raises(TypeError, match="settings is a dict"):
        Monitor(PlainDecoder(), settings=[3])


def test_settings_that_cannot_be_read_end_no_training(tmp_path):
    session = CallbackSession({"settings": Failing()}, "GeometryMonitor")
    session.start(PlainDecoder(), 0, tmp_path, [])
    assert session.monitor.describe()["training/known"] == 1
    session.finish()


@pytest.mark.parametrize(
    ("given", "stands"),
    [
        (np.float32(0.5), 0.5), (np.bool_(True), True), (torch.tensor(2), 2), (True, True),
        (Colour.RED, "red"), (math.inf, "inf"), (-math.inf, "-inf"), ("x" * 300, "x" * 200),
        pytest.param(2**1023, 2**1023, id="long"), ("/srv/someone/data/enwik8", "enwik8"),
        ("~/data/enwik8/", "enwik8"),
        ("C:\\data\\enwik8", "enwik8"), ("gpt2/medium", "gpt2/medium"), ("\ud800", "?"),
        ("https://host/a?page=2", "https://host/a?page=2"),
    ],
)  # fmt: skip
def test_a_setting_of_any_type_stands_as_json_has_it(given, stands):
    flat = flat_settings({"one": given})
    assert flat == {"training/one": stands}
    assert type(flat["training/one"]) is type(stands)
    json.dumps(flat, allow_nan=False)


@pytest.mark.parametrize(
    "value",
    [
        None, pytest.param(2**1024, id="huge"), (1, 2), torch.ones(2),
        torch.ones((), device="meta"), torch.nn.Identity(), b"bytes", Config,
        # Secrets, by how they look.
        "postgres://me:word@host/runs", "https://host/a?token=b", "https://host/a?x=1&api_key=b",
        "hf_abc", "sk-abc", "-----BEGIN PRIVATE KEY-----", "--login hf_abc", "Bearer abc",
        "a1" * 20,
    ],
)  # fmt: skip
def test_what_is_no_number_and_no_text_and_what_looks_like_a_secret_is_left_out(value):
    assert flat_settings({"one": value, "deep": {"two": value}, "other": 1}) == {
        "training/other": 1
    }


@pytest.mark.parametrize(
    "path",
    [
        "hub_token", "api_key", "wandb.apikey", "PASSWORD", "db-credentials", "apiKeys/openai",
        "clientSecret", "headers/Authorization", "APIKey", "secrets/a/b", "hf_abcdef",
    ],
)  # fmt: skip
def test_any_part_of_its_path_makes_a_text_a_secret(path):
    given = "some text"
    for name in reversed(path.split("/")):
        given = {name: given}
    assert flat_settings(given | {"other": "text"}) == {"training/other": "text"}


@pytest.mark.parametrize(
    ("words", "numbers_stand"),
    [
        ("secret secrets password passwords passwd pwd passphrase credential credentials auth "
         "authorization authentication bearer cookie cookies private", False),
        ("token tokens key keys pass sig signature jwt webhook", True),
    ],
    ids=["whatever it is", "texts"],
)  # fmt: skip
def test_a_word_for_a_secret_makes_a_text_one_and_some_a_number_too(words, numbers_stand):
    names = [f"my_{word}" for word in words.split()]
    assert flat_settings(dict.fromkeys(names, "some text")) == {}
    kept = {f"training/{name}": 1 for name in names if numbers_stand}
    assert flat_settings(dict.fromkeys(names, 1)) == kept


def test_numbers_and_names_that_speak_of_tokens_are_no_secrets():
    given = {"num_tokens": 8, "tokenizer": "bytes"}
    assert flat_settings(given) == {f"training/{name}": value for name, value in given.items()}
    assert flat_settings({"password": 1234, "credentials": {"value": 5}}) == {}
