"""Inputs of a model: one batch of its own kind, the same at every checkpoint.

Text becomes windows of tokens (of the model's tokenizer, or bytes where there is none). Images and
sounds are drawn by a seed: noise that is smooth at many scales, as photographs and sounds are.
"""

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geomon.sweep.checkpoints import Checkpoint, one_line

# Side of an image where the configuration names none: what nearly all image models are trained on.
_IMAGE_SIDE = 224
# Samples of a sound: two seconds at the rate that speech models are trained on.
_SAMPLES = 32_000
# Names under which configurations hold the largest number of tokens in a sequence.
_LONGEST = ("max_position_embeddings", "n_positions", "max_target_positions")
# Characters for each token of a window: far more than a token has, so that no window comes out
# short, and few enough that a long text is not tokenised whole.
_CHARACTERS = 16
_EMPTY = "the text is empty: name a file with text in it"
# Files of which a tokenizer has at least one, unless its tokens are bytes or characters.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model",
    "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip


class InputError(ValueError):
    """No inputs can be made for a model, whichever of its checkpoints it is."""


class Inputs(NamedTuple):
    """One batch for a model.

    Attributes:
        batch: What the model is called with: a tensor or a dict of keyword arguments.
        notes: Sentences on what the batch holds.
    """

    batch: Any
    notes: list[str]


class InputSize(NamedTuple):
    """Size of the batch that is made.

    Attributes:
        sequences: Largest number of sequences, images or sounds.
        length: Largest number of tokens in a sequence.
        seed: Seed of the private generator that draws images and sounds.
    """

    sequences: int
    length: int
    seed: int


def make_inputs(
    model: nn.Module, checkpoint: Checkpoint, text: bytes | None, size: InputSize
) -> Inputs:
    """Make one batch of the kind that a model reads."""
    if checkpoint.is_file:
        return Inputs(*_byte_windows(model, _require(text), size))
    config: Any = model.config
    name: Any = model.main_input_name
    made: dict[str, Tensor]
    if name == "input_ids":
        made, notes = _words(model, checkpoint, _require(text), size)
    elif name in _DRAWN and text is not None:
        raise InputError(
            f"{type(model).__name__} reads {_kind_of(name)} and no text: leave text (--text) out"
        )
    elif name in _DRAWN:
        made, notes = {name: _DRAWN[name](config, size)}, [_drawn_note(name, size)]
        if config.is_encoder_decoder:
            made["decoder_input_ids"] = _drawn_tokens(config, size)
            notes.append("the tokens of the decoder are random: they continue no text")
    else:
        raise InputError(
            f"{type(model).__name__} reads {name!r}, for which no inputs are made: give them in "
            "Python, scan(..., inputs=...)"
        )
    extra = {"use_cache": False} if _takes(model, "use_cache") else {}
    return Inputs({**made, **extra}, notes)


def digest(value: Any) -> str:
    """Compute a text that two inputs share only if they are equal.

    Args:
        value: A tensor, or tensors and plain values in dicts, lists and tuples. Of a function only
            the name counts.
    """
    return _digest(value).hex()[:32]


def _digest(value: Any) -> bytes:
    found = hashlib.sha256(type(value).__name__.encode())
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        found.update(f"{plain.dtype}{list(plain.shape)}".encode())
        found.update(plain.flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            found.update(_digest(key) + _digest(part))
    elif isinstance(value, list | tuple):
        for part in value:
            found.update(_digest(part))
    elif callable(value):
        found.update(getattr(value, "__qualname__", "").encode())
    else:
        found.update(repr(value).encode())
    return found.digest()


def _require(text: bytes | None) -> bytes:
    if text is None:
        raise InputError("the model reads text: name a file of it, text=FILE (--text FILE)")
    return text


def _takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


# -- text ----------------------------------------------------------------------------------------


def _words(
    model: nn.Module, checkpoint: Checkpoint, text: bytes, size: InputSize
) -> tuple[dict[str, Tensor], list[str]]:
    """Make windows of tokens, and for a decoder beside an encoder the windows that follow them."""
    config: Any = model.config
    pairs = config.is_encoder_decoder
    parts = 2 if pairs else 1
    tokenizer = _load_tokenizer(checkpoint, config)
    own = size._replace(length=_length(config, size) * parts)
    if tokenizer is None:
        windows, notes = _byte_windows(model, text, own)
    else:
        windows, notes = _token_windows(tokenizer, text, own)
    ids = windows[:, : windows.shape[1] // parts]
    if not pairs:
        return {"input_ids": ids}, notes
    following = windows[:, ids.shape[1] :]
    start = getattr(config, "decoder_start_token_id", None)
    begin = torch.full_like(following[:, :1], 0 if start is None else start)
    return {"input_ids": ids, "decoder_input_ids": torch.cat([begin, following[:, :-1]], 1)}, notes


def _length(config: Any, size: InputSize) -> int:
    """Count the tokens of a sequence: as many as asked for, or as the model takes."""
    named = (getattr(config, name, None) for name in _LONGEST)
    return min([size.length, *(value for value in named if isinstance(value, int) and value > 0)])


def _load_tokenizer(checkpoint: Checkpoint, config: Any) -> Any:
    """Load the tokenizer of a checkpoint; None if it has none.

    A folder without the files of a tokenizer is not asked: some classes then make one that knows
    no words. Tokenizers of bytes and of characters need no files.
    """
    source = checkpoint.source
    if checkpoint.base is not None and not _has_tokenizer(Path(source)):
        source = checkpoint.base  # an adapter mostly has that of its model
    folder = Path(source)
    without_files = (
        config.model_type == "canine" or getattr(config, "tokenizer_class", None) == "ByT5Tokenizer"
    )
    if folder.is_dir() and not _has_tokenizer(folder) and not without_files:
        return None
    auto = importlib.import_module("transformers").AutoTokenizer
    try:
        return auto.from_pretrained(source, revision=checkpoint.revision, trust_remote_code=False)
    except Exception as error:
        raise ValueError(
            f"the tokenizer of {checkpoint.name} cannot be loaded "
            f"({one_line(error)}): give the tokens in Python, "
            "scan(..., inputs=...)"
        ) from error


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def _token_windows(tokenizer: Any, text: bytes, size: InputSize) -> tuple[Tensor, list[str]]:
    """Cut a text into stretches, evenly spread over it, and each into a window of tokens."""
    words = text.decode(errors="replace")
    if not words.strip():
        raise InputError(_EMPTY)
    count, most = size.sequences, _CHARACTERS * size.length
    if len(words) < count * most:
        tokens = len(tokenizer(words, verbose=False)["input_ids"])
        count = max(1, min(count, tokens // size.length))
    stretch = len(words) // count
    parts = [words[n * stretch : n * stretch + min(stretch, most)] for n in range(count)]
    shortest = min(len(row) for row in _tokenise(tokenizer, parts, size.length))
    rows = _tokenise(tokenizer, parts, shortest)
    notes = [_few_note(count, size)] if count < size.sequences else []
    return _integers(rows), notes


def _integers(numbers: object) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _tokenise(tokenizer: Any, parts: list[str], length: int) -> list[list[int]]:
    rows: list[list[int]] = tokenizer(parts, truncation=True, max_length=length)["input_ids"]
    return rows


def _byte_windows(model: nn.Module, text: bytes, size: InputSize) -> tuple[Tensor, list[str]]:
    """Cut a text into windows of bytes, evenly spread over it, which do not overlap."""
    if not text:
        raise InputError(_EMPTY)
    vocabulary, kind = _vocabulary(model), "bytes of the text"
    if vocabulary < 256:
        symbols = sorted(set(text))
        if len(symbols) > vocabulary:
            raise InputError(
                f"the text has {len(symbols)} distinct bytes, and the model {vocabulary} tokens: "
                "give the text that the model was trained on, or tokens in Python, scan(..., "
                "inputs=...)"
            )
        text = text.translate(bytes.maketrans(bytes(symbols), bytes(range(len(symbols)))))
        kind = "distinct bytes of the text in ascending order"
    notes = [f"tokens are the {kind}: no tokenizer stands beside the model"]
    length = min(size.length, len(text))
    count = min(size.sequences, len(text) // length)
    if count < size.sequences:
        notes.append(_few_note(count, size))
    places = [n * (len(text) - length) // max(1, count - 1) for n in range(count)]
    return _integers([list(text[place : place + length]) for place in places]), notes


def _vocabulary(model: nn.Module) -> int:
    """Return the number of tokens that a model knows."""
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(known, int):
        return known
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not tables:
        raise InputError(
            f"{type(model).__name__} has no table of embeddings, so no text can be read: give the "
            "inputs in Python, scan(..., inputs=...)"
        )
    return tables[0]


def _few_note(count: int, size: InputSize) -> str:
    return f"{count} of {size.sequences} sequences: the text holds no more without overlap"


# -- images and sounds ---------------------------------------------------------------------------


def _images(config: Any, size: InputSize) -> Tensor:
    side = getattr(config, "image_size", None) or _IMAGE_SIDE
    height, width = (side, side) if isinstance(side, int) else side
    channels = getattr(config, "num_channels", 3)
    return _smooth((size.sequences, channels, height, width), axes=2, seed=size.seed)


def _waves(config: Any, size: InputSize) -> Tensor:
    bins = getattr(config, "num_mel_bins", None)
    if bins is not None:  # the spectrogram of AST under the name of a wave
        return _smooth((size.sequences, config.max_length, bins), axes=2, seed=size.seed)
    return _smooth((size.sequences, _SAMPLES), axes=1, seed=size.seed)


def _spectrograms(config: Any, size: InputSize) -> Tensor:
    frames: int = 2 * config.max_source_positions
    frames_first: int | None = getattr(config, "input_feat_per_channel", None)
    if frames_first is not None:
        return _smooth((size.sequences, min(frames, 400), frames_first), axes=2, seed=size.seed)
    return _smooth((size.sequences, config.num_mel_bins, frames), axes=2, seed=size.seed)


_DRAWN: dict[str, Callable[[Any, InputSize], Tensor]] = {
    "pixel_values": _images,
    "input_values": _waves,
    "input_features": _spectrograms,
}


def _drawn_note(name: str, size: InputSize) -> str:
    return f"the inputs are random {_kind_of(name)} (seed {size.seed}), of mean 0 and deviation 1"


def _kind_of(name: str) -> str:
    return "images" if name == "pixel_values" else "sounds"


def _drawn_tokens(config: Any, size: InputSize) -> Tensor:
    return torch.randint(
        config.vocab_size,
        (size.sequences, _length(config, size)),
        generator=torch.Generator("cpu").manual_seed(size.seed),
        dtype=torch.int64,
        device="cpu",
    )


def _smooth(shape: tuple[int, ...], *, axes: int, seed: int) -> Tensor:
    """Draw noise whose amplitude falls as one over the frequency, along the last axes.

    Each field has mean 0 and deviation 1, as images and sounds have when their processors are done.
    """
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    white = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), **kind)
    over = tuple(range(-axes, 0))
    frequencies = torch.zeros((), **kind)
    for axis in over:
        along = torch.fft.fftfreq(shape[axis], **kind)
        frequencies = frequencies[..., None] + along.square()
    amplitude = frequencies.rsqrt()
    amplitude[(0,) * axes] = 0  # that of the mean
    field = torch.fft.ifftn(torch.fft.fftn(white, dim=over) * amplitude, dim=over).real
    return (field / field.std(dim=over, keepdim=True)).contiguous()


__all__ = ["InputError", "InputSize", "Inputs", "digest", "make_inputs"]
