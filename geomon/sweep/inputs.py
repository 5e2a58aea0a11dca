"""Inputs of a text model: one batch of windows of a text, the same at every checkpoint."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from geomon.failures import failures
from geomon.sweep.checkpoints import Checkpoint, one_line

# Names under which configurations hold the largest number of tokens in a sequence.
_LONGEST = ("max_position_embeddings", "n_positions", "max_target_positions")
# Characters per token of a window: far more than a token has, so that no window comes out short,
# but few enough that a long text is not tokenised as a whole.
_CHARACTERS = 16
# A tokenizer has at least one of these files, unless its tokens are bytes or characters.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
# How to pass inputs that cannot be made from a text.
_GIVE = "scan(..., inputs=BATCH) (--inputs FILE, a batch saved by torch.save)"


def make_inputs(
    model: nn.Module, checkpoint: Checkpoint, text: bytes | None, sequences: int, length: int
) -> tuple[Any, list[str]]:
    """Make one batch of a text as the model takes it, and remarks on it.

    A decoder behind an encoder gets the text that follows the encoder's. Raises ValueError if the
    model does not read text, there is none, or its tokens are unknown.
    """
    config: Any = None if checkpoint.is_file else model.config
    if config is not None and model.main_input_name != "input_ids":
        more = ", 'decoder_input_ids': ..." if config.is_encoder_decoder else ""
        raise ValueError(
            f"{type(model).__name__} reads {model.main_input_name}, not text: pass a batch as in "
            f"its training, {{'{model.main_input_name}': ...{more}}}, by {_GIVE}"
        )
    if text is None:
        raise ValueError(
            f"the model reads text: name a text file, text=FILE (--text FILE), or pass tokens by "
            f"{_GIVE}"
        )
    if not text.strip():
        raise ValueError("the text is empty: name a file with text in it")
    tokenizer = None if config is None else _load_tokenizer(checkpoint, config)
    given = (getattr(config, name, None) for name in _LONGEST)
    length = min([length, *(most for most in given if isinstance(most, int) and most > 0)])
    parts = 2 if config is not None and config.is_encoder_decoder else 1
    if tokenizer is None:
        _check_bytes(model, checkpoint)
        windows = _byte_windows(text, sequences, length * parts)
        notes = ["tokens are the bytes of the text, because the model has no tokenizer"]
    else:
        windows, notes = _token_windows(tokenizer, text, sequences, length * parts), []
    if len(windows) < sequences:
        few = f"{len(windows)} of {sequences} sequences: the text has no more without overlap"
        notes.append(few)
    if config is None:
        return windows, notes
    batch: dict[str, Any] = {"input_ids": windows[:, : windows.shape[1] // parts]}
    if parts == 2:
        following = windows[:, windows.shape[1] // 2 :]
        start = getattr(config, "decoder_start_token_id", None) or 0
        begin = torch.full_like(following[:, :1], start)
        batch["decoder_input_ids"] = torch.cat([begin, following[:, :-1]], 1)
    if "use_cache" in inspect.signature(model.forward).parameters:
        batch["use_cache"] = False
    return batch, notes


def _load_tokenizer(checkpoint: Checkpoint, config: Any) -> Any:
    """Load the tokenizer of a checkpoint, or return None if it has none.

    A folder without tokenizer files is skipped, because some classes would then make a tokenizer
    that knows no words. Tokenizers of bytes and of characters need no files.
    """
    source = checkpoint.source
    if checkpoint.base is not None and not _has_tokenizer(Path(source)):
        source = checkpoint.base  # an adapter usually has its model's tokenizer
    without_files = (
        config.model_type == "canine" or getattr(config, "tokenizer_class", None) == "ByT5Tokenizer"
    )
    if Path(source).is_dir() and not _has_tokenizer(Path(source)) and not without_files:
        return None
    auto = importlib.import_module("transformers").AutoTokenizer
    try:
        return auto.from_pretrained(source, revision=checkpoint.revision, trust_remote_code=False)
    except failures() as error:
        raise ValueError(
            f"the tokenizer of {checkpoint.name} cannot be loaded ({one_line(error)}): pass tokens "
            f"by {_GIVE}"
        ) from error


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


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


def _check_bytes(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise an error unless the model has 256 tokens, one per byte."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    known = getattr(getattr(model, "config", None), "vocab_size", next(iter(tables), 0))
    if known != 256:
        beside = "" if checkpoint.is_file else "save its tokenizer in its folder, or "
        raise ValueError(
            f"the model has {known or 'no'} tokens and no tokenizer, so it is unknown which "
            f"characters they represent: {beside}pass token ids by {_GIVE}"
        )


def _byte_windows(text: bytes, count: int, length: int) -> Tensor:
    """Cut a text into evenly spread windows of bytes that do not overlap."""
    length = min(length, len(text))
    count = min(count, len(text) // length)
    places = [n * (len(text) - length) // max(1, count - 1) for n in range(count)]
    rows = [list(text[place : place + length]) for place in places]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


__all__ = ["make_inputs"]
