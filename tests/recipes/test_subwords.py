"""Subwords of a text: their vocabulary, their ids, and what a run keeps of them."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.enwik8 import subwords
from recipes.enwik8.data import DataError
from recipes.enwik8.installed_text import InstalledText, Package
from recipes.enwik8.subwords import (
    encode,
    keep,
    load_kept,
    pieces_of,
    prepare,
    subwords_of,
    train_vocabulary,
)

WORDS = [f"{head}{tail}" for head in ("geo", "moné", "dim", "日本") for tail in ("a", "ing", "s")]
TEXT = "\n".join(
    " ".join(random.Random(line).choices(WORDS, k=9)) for line in range(400)
).encode()  # fmt: skip


@pytest.fixture(scope="module")
def corpus():
    return subwords_of(TEXT, "words", 280)


def joined(corpus):
    return np.concatenate(corpus.parts)


def test_ids_give_the_text_back(corpus):
    assert corpus.decode(joined(corpus)).encode() == TEXT
    assert corpus.vocabulary_size == 280
    assert joined(corpus).dtype == np.uint16
    assert corpus.tokens == len(joined(corpus)) < 0.7 * len(TEXT)


@given(st.text())
def test_text_that_the_vocabulary_has_not_seen_comes_back(corpus, text):
    ids = encode(corpus.tokenizer, text.encode())
    assert corpus.decode(ids) == text


def test_parts_are_90_5_and_5_per_cent_of_the_bytes(corpus):
    sizes = [len(corpus.decode(part).encode()) for part in corpus.parts]
    assert sizes == list(corpus.sizes)
    assert sum(sizes) == len(TEXT)
    np.testing.assert_allclose(np.array(sizes) / len(TEXT), [0.9, 0.05, 0.05], atol=1e-3)
    tokens = [len(corpus.train), len(corpus.validation)]
    assert corpus.tokens_per_byte == (tokens[0] / sizes[0], tokens[1] / sizes[1])


def test_bytes_that_are_no_text_are_replaced():
    corpus = subwords_of(b"caf\xe9 " * 100, "latin", 260)
    assert corpus.decode(joined(corpus)) == "caf\ufffd " * 100
    assert sum(corpus.sizes) == 100 * len("caf\ufffd ".encode())


@given(st.text(alphabet="aé日\n😀"), st.integers(1, 8))
def test_pieces_are_the_text(text, size):
    pieces = list(pieces_of(text.encode(), size))
    assert "".join(pieces) == text
    assert all(pieces)
    assert max((len(piece.encode()) for piece in pieces), default=0) <= 4 * size + 3


def test_a_sample_of_a_long_text_comes_from_all_over_it():
    letters = "abcdefghijklmnopqrst"
    text = "".join(f"{letter * 4}\n" * 10_000 for letter in letters).encode()
    vocabulary = train_vocabulary(text, 300, sample=len(text) // 2).get_vocab()
    assert {token[0] for token in vocabulary if len(token) == 4} == set(letters)
    vocabulary = train_vocabulary(text, 300, sample=len(text) // 30).get_vocab()
    found = {token[0] for token in vocabulary if len(token) == 4}
    assert found < set(letters)
    assert max(found) > "j"


def test_what_is_kept_is_what_was_made(corpus, tmp_path):
    keep(corpus, tmp_path)
    found = load_kept(tmp_path)
    assert found.sha256() == corpus.sha256()
    assert (found.source, found.sizes, found.text_sha256) == (
        corpus.source, corpus.sizes, corpus.text_sha256,
    )  # fmt: skip
    for one, other in zip(found.parts, corpus.parts, strict=True):
        np.testing.assert_array_equal(one, other)
    assert found.decode(found.test) == corpus.decode(corpus.test)
    assert len(list(tmp_path.iterdir())) == 3  # nothing temporary


@pytest.mark.parametrize("name", ["vocabulary.json", "ids.npy", "corpus.json"])
@pytest.mark.parametrize("share", [None, 0, 0.5])
def test_what_is_kept_by_half_is_not_taken(corpus, tmp_path, name, share):
    keep(corpus, tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    path.unlink()
    if share is not None:
        path.write_bytes(content[: int(share * len(content))])
    assert load_kept(tmp_path) is None


def prepared(tmp_path, data, *, reuse=False, minimum=10):
    return prepare(
        data, text="bytes", vocabulary=300, folder=tmp_path / "run", reuse=reuse, minimum=minimum
    )


def test_a_resumed_run_takes_the_ids_it_has(tmp_path, monkeypatch):
    monkeypatch.delenv("ENWIK8", raising=False)
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_bytes(TEXT)
    other.write_bytes(TEXT[1:])
    first = prepared(tmp_path, text)
    assert "bytes, from" in first.source
    monkeypatch.setattr(subwords, "subwords_of", lambda *_: pytest.fail("made again"))
    assert prepared(tmp_path, None, reuse=True).sha256() == first.sha256()
    assert prepared(tmp_path, text, reuse=True).sha256() == first.sha256()
    with pytest.raises(DataError, match="needs the text of the earlier run"):
        prepared(tmp_path, other, reuse=True)


def test_ids_that_were_lost_are_made_again_and_equal(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(TEXT)
    first = prepared(tmp_path, text)
    (tmp_path / "run" / "text" / "ids.npy").unlink()
    assert prepared(tmp_path, text, reuse=True).sha256() == first.sha256()


def test_a_short_text_is_an_error(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(TEXT)
    with pytest.raises(DataError, match=r"too short: .* tokens; expected at least 99,999"):
        prepared(tmp_path, text, minimum=99_999)


def test_without_a_file_the_installed_packages_are_read_and_their_licences_listed(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("ENWIK8", raising=False)
    taken, left_out = Package("one", "1.2", "MIT", 3, len(TEXT)), Package("two", "3", None)
    found = InstalledText(TEXT, [taken], [left_out])
    monkeypatch.setattr(subwords, "installed_text", lambda *, limit: found)
    corpus = prepared(tmp_path, None)
    path = tmp_path / "run" / "text" / "licences.json"
    listed = json.loads(path.read_text())
    assert listed["taken"] == [
        {"name": "one", "version": "1.2", "licence": "MIT", "files": 3, "size": len(TEXT)}
    ]
    assert [package["name"] for package in listed["left_out"]] == ["two"]
    assert "3 sources and documents of 1 installed packages" in corpus.source
    assert str(path) in corpus.source
    assert "\n" not in corpus.source
    assert corpus.decode(joined(corpus)).encode() == TEXT
