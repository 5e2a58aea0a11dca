"""Text as subwords, with a vocabulary trained on the text (by default, installed packages)."""

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.enwik8.text import InputError, Text, find_text, load, part_ends

LIMIT = 400_000_000  # bytes of text
_SAMPLE = 32 << 20  # bytes for training the vocabulary
_PIECE = 1 << 14  # bytes that are encoded at once
_BATCH = 512  # pieces that are encoded side by side

_SUFFIXES = frozenset({".py", ".pyi", ".md", ".rst", ".txt"})
_LARGEST = 1_000_000  # bytes; larger files are mostly tables
_NO_SOURCES = re.compile(r"__pycache__|(dist|site)-packages|.*\.(dist|egg)-info")
_FREE = re.compile(
    r"(?<![a-z])(?:0BSD|A?GPL|LGPL|General Public License|Apache|Artistic|Boost|BSD|BSL-1\.0|CC0"
    r"|CNRI|EPL|HPND|ISCL?|LLVM|MIT|MPL|Mozilla|NCSA|OFL|PSF|Public Domain|Python|Unlicense|X11"
    r"|Zlib)(?![a-z]{2})",
    re.IGNORECASE,
)
_NOT_FREE = re.compile(
    r"proprietary|commercial|commons clause|EULA|all rights reserved|LicenseRef", re.IGNORECASE
)


def load_tokens(
    data: str | None, *, vocabulary: int, clean: bool, folder: Path, keeps: bool
) -> Text:
    """Load a text as characters or subwords, and keep the ids of subwords for a resume.

    Args:
        data: File with text. None reads `$ENWIK8` or its default, or for subwords the installed
            packages.
        vocabulary: Number of subwords; 0 for characters.
        clean: Whether to remove the markup of a Wikipedia dump.
        folder: Folder for the ids. For installed packages it also lists their licences.
        keeps: Whether to load the ids that the folder holds.

    Raises:
        InputError: If the file cannot be used, or the vocabulary is out of range.
    """
    if not vocabulary:
        return load(data, clean=clean)
    if keeps:
        kept = np.load(folder / "text.npz")
        return Text(**{name: kept[name] if kept[name].ndim else kept[name].item() for name in kept})
    if not 257 <= vocabulary <= 1 << 16:
        raise InputError(f"--vocabulary {vocabulary}: give 257 to 65536, or 0 for characters")
    folder.mkdir(parents=True, exist_ok=True)
    if data or os.environ.get("ENWIK8"):
        raw, source = find_text(data, limit=LIMIT, clean=clean)
    else:
        raw, licences = installed_text()
        listed = folder / "licences.json"
        listed.write_text(json.dumps(licences, indent=1) + "\n")
        count = sum(licence is not None for licence in licences.values())
        source = f"text, {len(raw):,} bytes, from {count} packages whose licences {listed} names"
    middle, end = part_ends(raw)
    train, validation = raw[:middle], raw[middle:end]
    tokenizer = train_tokenizer(train, vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids, held_out = encode(tokenizer, train), encode(tokenizer, validation)
    each = len(validation) / max(1, len(held_out))
    text = Text(source, tokenizer.get_vocab_size(), ids, held_out, each)
    np.savez(folder / "text.npz", **vars(text))
    return text


def train_tokenizer(text: bytes, vocabulary: int) -> Tokenizer:
    """Train byte-level BPE on pieces from the whole text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, show_progress=False, special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    every = math.ceil(len(text) / _SAMPLE) or 1
    tokenizer.train_from_iterator(islice(pieces_of(text), 0, None, every), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: bytes) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Encode a text piece by piece, as uint16."""
    pieces, ids = pieces_of(text), [np.empty(0, np.uint16)]
    while batch := list(islice(pieces, _BATCH)):
        encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        ids += [np.array(piece.ids, np.uint16) for piece in encoded]
    return np.concatenate(ids)


def pieces_of(text: bytes) -> Iterator[str]:
    """Yield a text in pieces of about 16 KiB, made of whole lines unless these are very long."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + _PIECE - 1, start + 4 * _PIECE) + 1 or start + _PIECE
        yield text[start:end].decode(errors="replace")
        start = end


def installed_text() -> tuple[bytes, dict[str, str | None]]:
    """Read the sources and documents of Python and of the installed packages with a free licence.

    Equal files are read once. Files are ordered by checksum, which mixes the packages, so a
    held-out file may resemble a training file.

    Returns:
        The text, and the licence of each package by name and version (None if it is not free).
    """
    library = Path(sysconfig.get_path("stdlib"))
    licences: dict[str, str | None] = {f"Python {platform.python_version()}": "PSF-2.0"}
    paths = [Path(folder, name) for folder, _, names in os.walk(library) for name in names]
    paths = [path for path in paths if not _is_no_source(path.relative_to(library))]
    for package in importlib.metadata.distributions(path=sys.path):
        licence = free_licence(package.metadata)
        licences.setdefault(f"{package.name} {package.version}", licence)
        files = package.files if licence and package.files else []
        paths += [Path(str(file.locate())) for file in files if not _is_no_source(Path(file))]
    contents = {hashlib.sha256(content).digest(): content for content in map(_content, paths)}
    parts, size = [], 0
    for _, content in sorted(contents.items()):
        size += len(content) + 3
        if content and size <= LIMIT:
            parts.append(content)
    return b"\n\n\n".join(parts), licences


def free_licence(metadata: Any) -> str | None:
    """Return the free licence that metadata names, or None.

    The licence expression comes first, then the classifiers, then the first line of the old field
    (a long licence text starts with its name).
    """
    classifiers = [
        each.rpartition(" :: ")[2]
        for each in metadata.get_all("Classifier") or []
        if each.startswith("License :: ") and each != "License :: OSI Approved"
    ]
    old = (metadata["License"] or "").strip().partition("\n")[0]
    name = metadata["License-Expression"] or ", ".join(classifiers) or old
    is_free = len(name) < 200 and _FREE.search(name) and not _NOT_FREE.search(name)
    return name if is_free else None


def _is_no_source(path: Path) -> bool:
    return path.suffix not in _SUFFIXES or any(map(_NO_SOURCES.fullmatch, path.parts))


def _content(path: Path) -> bytes:
    """Read a text file; return b"" if it is missing, too large or not text."""
    try:
        content = path.read_bytes().strip() if path.stat().st_size <= _LARGEST else b""
        content.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if b"\0" in content else content
