"""Text for a language model: a file, a download of enwik8, or text that comes with Python.

enwik8 is the first 100,000,000 bytes of the English Wikipedia's dump of March 2006.
"""

import ast
import bz2
import contextlib
import gzip
import hashlib
import html
import inspect
import lzma
import os
import platform
import re
import sys
import sysconfig
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pooch
import requests
import torch
from numpy.typing import NDArray
from torch import Tensor

URL = "http://mattmahoney.net/dc/enwik8.zip"
SIZE = 100_000_000  # bytes of enwik8
SHA1 = "57b8363b814821dc9d47aa4d41f58733519076b2"

_DUMP = b"<mediawiki"  # start of a Wikipedia dump
_CONNECT_SECONDS, _READ_SECONDS = 5, 30
_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open,
}  # fmt: skip
# Folders without sources of the library, or with its tests.
_SKIPPED_FOLDERS = frozenset(
    ("__pycache__", "dist-packages", "idle_test", "lib-dynload", "pydoc_data", "site-packages",
     "test", "tests")
)  # fmt: skip

Ids = NDArray[np.integer[Any]]


class InputError(ValueError):
    """Raised if a request cannot be fulfilled; one line says what was given and what to do."""


@dataclass(frozen=True, eq=False)
class Text:
    """A text as token ids.

    Attributes:
        source: One line on the text and its origin.
        vocabulary: Number of distinct tokens.
        train: Ids of the first 90 % of the text.
        validation: Ids of the next 5 %.
        bytes_per_token: Bytes per token of the validation text; 1 for characters.
    """

    source: str
    vocabulary: int
    train: Ids
    validation: Ids
    bytes_per_token: float = 1.0

    def sha256(self) -> str:
        """Return the checksum of the ids."""
        digest = hashlib.sha256(self.train.data)
        digest.update(self.validation.data)
        return digest.hexdigest()


def load(data: str | Path | None = None, *, minimum: int = 200_000, clean: bool = False) -> Text:
    """Load a text as characters: the file, `$ENWIK8`, enwik8, or text that comes with Python.

    Args:
        data: File with text, plain or packed (gzip, bzip2, xz, or a zip of one file). Defaults to
            None, for the other sources.
        minimum: Fewest bytes to accept. Defaults to 200,000.
        clean: Whether to remove the markup of a Wikipedia dump. Defaults to False.

    Raises:
        InputError: If the file cannot be read, if a download is damaged, or if the text is too
            short.
    """
    raw, source = find_text(data, clean=clean)
    if len(raw) < minimum:
        raise InputError(f"too short: {source}; give a text of at least {minimum:,} bytes")
    return characters(raw, source)


def characters(raw: bytes, source: str) -> Text:
    """Number the distinct bytes of a text in ascending order, and split the text.

    Args:
        raw: The text.
        source: One line on the text.
    """
    symbols, ids = np.unique(np.frombuffer(raw, np.uint8), return_inverse=True)
    train, validation, _ = np.split(ids.astype(np.uint8), part_ends(raw))
    return Text(source, len(symbols), train, validation)


def part_ends(raw: bytes) -> list[int]:
    """Return the ends of the training text (90 %) and of the validation text (95 %)."""
    return [len(raw) * 90 // 100, len(raw) * 95 // 100]


def windows(ids: Ids, starts: Ids, length: int) -> Tensor:
    """Cut windows out of a text, int64 [windows, length]."""
    return torch.from_numpy(ids[starts[:, None] + np.arange(length)].astype(np.int64))


def spread(ids: Ids, length: int, count: int) -> Tensor:
    """Cut evenly spread windows out of a text, int64 [count, length]."""
    if len(ids) < length or not count:
        raise InputError(
            f"{len(ids):,} held-out tokens, and {count} windows of {length}: give a longer text "
            "or a shorter --context"
        )
    return windows(ids, np.linspace(0, len(ids) - length, count).astype(int), length)


def find_text(
    data: str | Path | None = None, *, limit: int = SIZE, clean: bool = False
) -> tuple[bytes, str]:
    """Find a text as `load` does, and return its bytes with one line on their origin."""
    named = data or os.environ.get("ENWIK8")
    if named:
        raw = _read(Path(named).expanduser(), limit)
        kind = "enwik8, all" if _is_enwik8(raw) else "text,"
        source = f"{kind} {len(raw):,} bytes, from {named}"
    else:
        try:
            raw = _download()
            source = f"enwik8, all {len(raw):,} bytes"
        except requests.RequestException as error:
            raw = carried_text()
            source = (
                f"text that Python {platform.python_version()} carries (its reference and its "
                f"docstrings), {len(raw):,} bytes; not enwik8, since {URL} could not be "
                f"downloaded ({type(error).__name__})"
            )
    if clean and raw.startswith(_DUMP):
        raw = prose_of(raw)
        source += f"; {len(raw):,} bytes of prose after cleaning"
    return raw, source


def _is_enwik8(raw: bytes) -> bool:
    return hashlib.sha1(raw, usedforsecurity=False).hexdigest() == SHA1


def _read(path: Path, limit: int) -> bytes:
    """Read a file, and unpack it if it is an archive."""
    try:
        with path.open("rb") as file:
            head = file.read(6)
        if head.startswith(b"PK"):
            with zipfile.ZipFile(path) as archive:
                (name,) = (name for name in archive.namelist() if not name.endswith("/"))
                return archive.read(name)[:limit]
        opener = next((opener for sign, opener in _OPENERS.items() if head.startswith(sign)), open)
        with opener(path, "rb") as file:
            return file.read(limit)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise InputError(
            f"{path} cannot be read ({error}): give a file with text, plain or packed whole by "
            "gzip, bzip2, xz or zip (one file)"
        ) from error


def _download() -> bytes:
    """Return enwik8 from the user's cache, after downloading it on the first call."""
    pooch.get_logger().setLevel("WARNING")
    archive = pooch.retrieve(
        URL, known_hash=None, fname="enwik8.zip",
        path=os.environ.get("GEOMON_CACHE") or pooch.os_cache("geomon"),
        downloader=pooch.HTTPDownloader(
            progressbar=sys.stderr.isatty(), timeout=(_CONNECT_SECONDS, _READ_SECONDS)
        ),
    )  # fmt: skip
    with contextlib.suppress(InputError):
        raw = _read(Path(archive), SIZE + 1)
        if _is_enwik8(raw):
            return raw
    os.unlink(archive)
    raise InputError(
        f"what {URL} gave is not enwik8 (sha1 {SHA1}): try again, or set ENWIK8 to a copy of it"
    )


def carried_text() -> bytes:
    """Return Python's reference topics and the docstrings of its library, each text once.

    Sources are parsed but never imported. CPython 3.11 gives 2.2 MB.
    """
    texts: list[str] = []
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    with contextlib.suppress(ImportError):  # some distributions ship no topics
        from pydoc_data.topics import topics

        texts += [inspect.cleandoc(topics[name]) for name in sorted(topics)]
    for path in sources(Path(sysconfig.get_path("stdlib"))):
        with contextlib.suppress(OSError, SyntaxError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in somebody's strings
            nodes = ast.walk(ast.parse(path.read_bytes()))
            texts += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    return "\n\n\n".join(filter(None, dict.fromkeys(texts))).encode(errors="ignore")


def sources(library: Path) -> Iterator[Path]:
    """Yield the modules of Python's library in an order that is equal on all machines."""
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


# -- prose -----------------------------------------------------------------------------------------

_PAGE = re.compile(rb"<title>([^<]*)</title>|<text\b(?:[^<>]*[^/<>])?>([^<]*)</text>")
_NOT_ARTICLES = re.compile(
    rb"(category|help|image|media|mediawiki|portal|special|talk|template|user|wikipedia):", re.I
)
_DROPPED = "ref|math|nowiki|pre|code|source|gallery|timeline|hiero|score|imagemap"
# Replacements, in order. Rules for brackets match the innermost ones, so they are
# repeated: for links in the captions of images, or templates in templates.
_RULES: list[tuple[int, re.Pattern[str], str]] = [
    (times, re.compile(pattern, re.IGNORECASE | re.MULTILINE), replacement)
    for times, pattern, replacement in (
        (1, r"<!--[\s\S]*?-->", ""),
        (1, rf"<({_DROPPED})\b[^<>]*/>", ""),
        (1, rf"<({_DROPPED})\b[^<>]*>(?:(?!</?\1\b)[\s\S])*+</\1\s*>", ""),
        (6, r"\{\{(?:[^{}]|\{(?!\{)|\}(?!\}))*+\}\}", ""),
        (4, r"\{\|(?:(?!\{\||^[ \t:]*\|\})[\s\S])*+^[ \t:]*\|\}", ""),
        (4, r"<table\b(?:(?!</?table\b)[\s\S])*+</table\s*>", ""),
        (1, r"\[(?:(?:https?|ftp|irc|news|gopher)://|mailto:)[^\s\[\]]*([^\[\]\n]*)\]", r"\1"),
        (5, r"\[\[(?:(?:(?:image|file|media|category)|[a-z]{2,3}(?:-[a-z]+)*|simple|tokipona)\s*:"
            r"(?:[^\[\]]|\[[^\[\]]*\])*+|:?(?:[^\[\]|]*+\|)?+((?:[^\[\]]|\[[^\[\]]*\])*+))\]\]",
         r"\1"),
        (1, r"</?(?:br|p|div|li|ul|ol|dl|dt|dd|tr|hr|blockquote)\b[^<>]*>", "\n"),
        (1, r"</?[a-z][^<>]*>", ""),
        (1, r"'{2,}|\[\[|\]\]|\{\{|\}\}|__[A-Z]+__|~~~+|https?://[^\s<>\[\]]+|&#[0-9]{9,};?", ""),
        (1, r"^\s*(?:\{\||\||!.*\|).*$", ""),
        (3, r"^(==+)[^=\n][^\n]*?\1\s*(?=\Z|(?!\1=)==)", ""),  # headings without text
        (1, r"^=+[ \t]*([^\n]*?)[ \t]*=+[ \t]*$", r"\n\1\n"),
        (1, r"^[*#:; \t]+|[ \t]+$", ""),
        (1, r"[^\S\n]+", " "),
        (1, r" \([ ,;:]*\)|(?<=\() | (?=[),.;:])", ""),
        (1, r"^\W+$", ""),
        (1, r"\n{3,}", "\n\n"),
    )
]  # fmt: skip


def prose_of(raw: bytes) -> bytes:
    r"""Return the prose of the complete articles in a Wikipedia dump or in a prefix of one.

    Redirects, pages other than articles, tables, templates, media, code, formulas, references, and
    links to categories and other languages are removed. Other links, headings, lists and tags are
    reduced to their text. A blank line separates articles.

    Example:
        >>> prose_of(b"<title>A</title><text>'''A''' is a [[letter (alphabet)|letter]].</text>")
        b'A is a letter.\n'
    """
    articles, wanted = [], True
    for title, wikitext in _PAGE.findall(raw):
        if title:
            wanted = not _NOT_ARTICLES.match(title)
        elif wanted and not wikitext.lstrip().lower().startswith(b"#redirect"):
            articles.append(_prose(html.unescape(wikitext.decode(errors="ignore"))))
    return "\n\n".join(filter(None, articles)).encode() + b"\n"


def _prose(wikitext: str) -> str:
    for times, pattern, replacement in _RULES:
        for _ in range(times):
            wikitext = pattern.sub(replacement, wikitext)
    return html.unescape(wikitext).replace("\xa0", " ").strip()
