"""Windows of a text: of bytes, and of a tokenizer's tokens."""

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from geomon.sweep import text_windows

WORDS = ("red", "green", "blue", "black", "white")


@given(
    st.binary(min_size=1, max_size=400).filter(bytes.strip), st.integers(1, 8), st.integers(1, 20)
)
@settings(deadline=None)
def test_windows_of_bytes_are_stretches_of_the_text_that_do_not_overlap(
    tmp_path_factory, text, sequences, length
):
    file = tmp_path_factory.getbasetemp() / "text"
    file.write_bytes(text)
    windows, at, longest = [], 0, min(length, len(text))
    for row in text_windows(file, "bytes", sequences, length).tolist():
        windows.append(bytes(row))
        at = text.index(windows[-1], at) + len(row)  # each after the one before
    assert {len(window) for window in windows} == {longest}
    assert len(windows) == min(sequences, len(text) // longest)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer of words, which adds a token before and one after."""
    path = tmp_path_factory.mktemp("model")
    table = {word: number for number, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}
    words = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


# Words of a text, and its windows of 12 tokens without overlap.
@pytest.mark.parametrize(("words", "count"), [(5, 1), (40, 3), (45, 3), (46, 4), (4000, 4)])
def test_windows_of_a_tokenizer_are_evenly_spread_over_the_text(
    tokenizer, tmp_path, caplog, words, count
):
    generator = torch.Generator().manual_seed(words)
    text = " ".join(WORDS[n] for n in torch.randint(5, (words,), generator=generator))
    (tmp_path / "text").write_text(text)
    with caplog.at_level(logging.WARNING):
        ids = text_windows(tmp_path / "text", str(tokenizer), 4, 12)
    stretch = len(text) // count
    parts = [text[n * stretch : (n + 1) * stretch].split() for n in range(count)]
    shortest = min(12, min(map(len, parts)) + 2)
    expected = [
        [1, *(WORDS.index(w) + 3 if w in WORDS else 0 for w in part[: shortest - 2]), 2]
        for part in parts
    ]
    assert ids.tolist() == expected
    few = f"{count} of 4 sequences: the text has no more without overlap"
    assert caplog.messages == ([few] if count < 4 else [])


def test_64_windows_of_128_tokens_are_cut_by_default(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 32)  # just enough
    windows = text_windows(tmp_path / "text", "bytes")
    assert windows.tolist() == [[*range(128)], [*range(128, 256)]] * 32


def test_a_text_may_hold_bytes_that_are_no_text_and_more_tokens_than_the_model_takes(
    tokenizer, tmp_path, caplog
):
    settings = tokenizer / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 8}))
    (tmp_path / "text").write_bytes(b"red \xff green " * 8)
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        ids = text_windows(tmp_path / "text", str(tokenizer), 2, 7)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert ids.tolist() == [[1, 3, 0, 4, 3, 0, 2]] * 2
    assert caplog.messages == []  # a text of that length never meets the model


def test_code_beside_a_tokenizer_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("red")
    Path("own.py").write_text("open('has_run', 'w').close(); Own = None")
    settings = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    Path("tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="cannot be loaded"):
        text_windows("text", ".")
    assert not Path("has_run").exists()


def test_without_transformers_a_tokenizer_is_refused_with_what_to_install(
    tokenizer, tmp_path, monkeypatch
):
    (tmp_path / "text").write_text("red")
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = r"^models of transformers need that package .*: pip install"
    with pytest.raises(ImportError, match=words):
        text_windows(tmp_path / "text", str(tokenizer))


def test_a_tokenizer_that_cannot_be_loaded_is_said_in_one_line(tmp_path):
    (tmp_path / "text").write_text("red")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot be loaded \(.*--tokenizer bytes") as caught:
        text_windows(tmp_path / "text", str(tmp_path))
    assert "\n" not in str(caught.value)
