"""Windows of a text, the same at every checkpoint."""

import importlib
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geomon.failures import failures
from geomon.sweep.models import import_transformers, one_line

log = logging.getLogger("geomon.sweep")

# Tokens that are the bytes of the text.
BYTES = "bytes"
# Characters per token of a window: far more than a token has, so that no window comes out short,
# but few enough that a long text is not tokenised as a whole.
_CHARACTERS = 16
# A folder without any of these would give a tokenizer that knows no words.
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
_ADVICE = (
    f"name the folder or hub name of one, --tokenizer NAME, or --tokenizer {BYTES} if tokens are "
    "bytes; or pass a batch, --inputs FILE, saved by torch.save"
)


def text_windows(
    text: str | os.PathLike[str], tokenizer: str, sequences: int = 64, length: int = 128
) -> Tensor:
    """Cut a text into evenly spread windows of tokens that do not overlap.

    Args:
        text: File with the text.
        tokenizer: Folder or hub name of a tokenizer of transformers, or "bytes".
        sequences: Largest number of windows. Defaults to 64.
        length: Largest number of tokens in a window. Defaults to 128.

    Returns:
        Token ids, int64, [sequences, tokens].

    Raises:
        ValueError: If the text is empty, or the tokenizer does not exist.
    """
    content = Path(text).read_bytes()
    if not content.strip():
        raise ValueError("the text is empty: name a file with text in it")
    if tokenizer == BYTES:
        windows = _byte_windows(content, sequences, length)
    else:
        windows = _token_windows(_load_tokenizer(tokenizer), content, sequences, length)
    if len(windows) < sequences:
        few = "%d of %d sequences: the text has no more without overlap"
        log.warning(few, len(windows), sequences)
    return windows


def _load_tokenizer(name: str) -> Any:
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in _FILES):
        raise ValueError(f"there is no tokenizer in {name}: {_ADVICE}")
    import_transformers()
    auto = importlib.import_module("transformers").AutoTokenizer
    try:
        return auto.from_pretrained(name, trust_remote_code=False)
    except failures() as error:
        raise ValueError(
            f"the tokenizer of {name} cannot be loaded ({one_line(error)}): {_ADVICE}"
        ) from error


def _token_windows(tokenizer: Any, text: bytes, count: int, length: int) -> Tensor:
    """Cut a text into evenly spread stretches, and each into a window of tokens."""
    words, most = text.decode(errors="replace"), _CHARACTERS * length
    if len(words) < count * most:
        tokens = len(tokenizer(words, verbose=False)["input_ids"])
        count = max(1, min(count, tokens // length))
    stretch = len(words) // count
    parts = [words[n * stretch : n * stretch + min(stretch, most)] for n in range(count)]
    shortest = min(map(len, tokenizer(parts, truncation=True, max_length=length)["input_ids"]))
    rows = tokenizer(parts, truncation=True, max_length=shortest)["input_ids"]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def _byte_windows(text: bytes, count: int, length: int) -> Tensor:
    """Cut a text into evenly spread windows of bytes that do not overlap."""
    length = min(length, len(text))
    count = min(count, len(text) // length)
    places = [n * (len(text) - length) // max(1, count - 1) for n in range(count)]
    rows = [list(text[place : place + length]) for place in places]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")
