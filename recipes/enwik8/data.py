"""Text for the character-level language model: a file, enwik8, or what Python carries.

Vocabulary: enwik8 is the first 100,000,000 bytes of the English Wikipedia's dump of March 2006;
a *prefix* is its first so many bytes; a *corpus* is text as the model reads it, one id per byte.
"""

import bz2
import gzip
import hashlib
import lzma
import os
import platform
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

import numpy as np
import pooch
import requests
from filelock import FileLock
from numpy.typing import ArrayLike, NDArray

from recipes.enwik8.builtin_text import builtin_text
from recipes.enwik8.clean import clean

URL = "http://mattmahoney.net/dc/enwik8.zip"
Text = Literal["bytes", "clean"]

_MIB = 1 << 20
_DUMP = b"<mediawiki"  # of Wikipedia begins so
_CONNECT_SECONDS = 5
_READ_SECONDS = 30
_UNREADABLE = (EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)


class DataError(ValueError):
    """The text asked for cannot be used; one line says what came, what should have, what to do."""


@dataclass(frozen=True)
class Published:
    """Published size and checksums, by which a copy of a file or of its beginning is known."""

    size: int  # bytes
    sha1: str
    mebibyte_sha256: str  # of the first 1,048,576 bytes


ENWIK8 = Published(
    size=100_000_000,
    sha1="57b8363b814821dc9d47aa4d41f58733519076b2",
    mebibyte_sha256="4fb5efa9f35df431737731bf3c8f38a467b69731940ff82a4ee0e218aae58834",
)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text split into training, validation and test data.

    Attributes:
        source: One line a person can read: what text this is, from where, how many bytes, and
            for the fallback why.
        symbols: The distinct byte values in ascending order; symbol ``i`` has id ``i``.
        train: Ids of the first 90 % of the bytes, 1-D, uint8.
        validation: Ids of the next 5 %.
        test: Ids of the last 5 %.
    """

    source: str
    symbols: bytes
    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    test: NDArray[np.uint8]

    @property
    def vocabulary_size(self) -> int:
        """The number of distinct symbols; 205 for the bytes of the whole of enwik8."""
        return len(self.symbols)

    def sha256(self) -> str:
        """Return the checksum of the whole text, as the model reads it."""
        digest = hashlib.sha256(self.symbols)
        for part in (self.train, self.validation, self.test):
            digest.update(part.data)
        return digest.hexdigest()

    def decode(self, ids: ArrayLike) -> str:
        """Return the text that ``ids`` stand for; bytes that are no UTF-8 show as U+FFFD."""
        table = np.frombuffer(self.symbols, np.uint8)
        return table[np.asarray(ids, np.intp)].tobytes().decode(errors="replace")


class _Found(NamedTuple):
    raw: bytes
    source: str
    markup: bool


class _UnreachableError(Exception):
    """The download did not come about; the message says why."""


def load(
    data: str | Path | None = None,
    *,
    text: Text = "bytes",
    cache: Path | None = None,
    minimum: int = 200_000,
    url: str = URL,
    published: Published = ENWIK8,
) -> Corpus:
    """Return the first text found: ``data``, ``$ENWIK8``, the cache, a download, Python's own.

    A file that is named may hold any text, plain or packed (gzip, bzip2, xz, or a zip that holds
    one file), of which the first 100,000,000 bytes are taken; `Corpus.source` says whether it is
    enwik8, known by its checksum, or by that of its first MiB. If it cannot be used, that is an
    error: only a failed connection leads to the text that Python carries.

    Args:
        data: A file with text. ``$ENWIK8`` is read the same way.
        text: ``"bytes"`` takes the file as it is, ``"clean"`` the prose that `clean` leaves of
            a dump of Wikipedia; other text is taken as it is. Either way the split 90/5/5 and the
            symbols are those of the bytes then used.
        cache: The folder for the download; by default ``$GEOMON_CACHE`` or the platform's.
        minimum: The fewest bytes to accept, after cleaning.
        url: Where to download from.
        published: Size and checksums of the file to download.

    Raises:
        DataError: If ``text`` is unknown, a named file is missing or cannot be unpacked, a download
            fails its checksum twice, the cache cannot be written, or the text is short.
    """
    raw, source = find_text(data, text=text, cache=cache, url=url, published=published)
    if len(raw) < max(minimum, 1):
        raise DataError(
            f"too short: {source}; expected at least {max(minimum, 1):,} bytes of text;"
            " give a longer text or a smaller minimum"
        )
    return corpus_of(raw, source)


def is_named(data: str | Path | None) -> bool:
    """Return whether ``data`` or ``$ENWIK8`` names a file, which then is the text."""
    return data is not None or bool(os.environ.get("ENWIK8"))


def find_text(
    data: str | Path | None = None,
    *,
    text: Text = "bytes",
    cache: Path | None = None,
    url: str = URL,
    published: Published = ENWIK8,
    limit: int | None = None,
) -> tuple[bytes, str]:
    """Return the bytes that `load` splits, and one line that says what text this is.

    Args:
        data: A file with text. ``$ENWIK8`` is read the same way.
        text: ``"bytes"`` or ``"clean"``.
        cache: The folder for the download.
        url: Where to download from.
        published: Size and checksums of the file to download.
        limit: The most bytes to take of a file that is named; by default the size of enwik8.

    Raises:
        DataError: As `load` does, but not for a short text.
    """
    if text not in get_args(Text):
        raise DataError(f"text={text!r} is unknown; give 'bytes' or 'clean'")
    raw, source, markup = _find(data, cache, url, published, limit or published.size)
    if text == "clean" and markup:
        raw = clean(raw)
        source += f"; {len(raw):,} bytes of prose after cleaning"
    return raw, source


def _find(
    data: str | Path | None, cache: Path | None, url: str, published: Published, limit: int
) -> _Found:
    if data is not None:
        return _local(data, "", published, limit)
    if named := os.environ.get("ENWIK8"):
        return _local(named, "ENWIK8=", published, limit)
    folder = Path(cache or os.environ.get("GEOMON_CACHE") or pooch.os_cache("geomon")).expanduser()
    try:
        raw = _published(folder, url, published)
    except _UnreachableError as reason:
        return _carried(f"{url} could not be downloaded: {reason}")
    return _Found(raw, f"enwik8, all {len(raw):,} bytes, from {folder / 'enwik8'}", markup=True)


def _carried(reason: str) -> _Found:
    raw = builtin_text()
    source = (
        f"text that Python {platform.python_version()} carries (its reference and its docstrings),"
        f" {len(raw):,} bytes; not enwik8, since {reason}"
    )
    return _Found(raw, source, markup=False)


def corpus_of(raw: bytes, source: str) -> Corpus:
    """Split a text 90/5/5, and number its symbols.

    Args:
        raw: The text.
        source: One line that says what text this is.
    """
    symbols = bytes(value for value in range(256) if value in raw)
    ids = bytes(max(symbols.find(value), 0) for value in range(256))
    # bytes.translate needs no index array of 8 B a byte; the copy is writable, as torch wants it.
    encoded = np.frombuffer(raw.translate(ids), np.uint8).copy()
    train, validation, test = np.split(encoded, [len(raw) * 90 // 100, len(raw) * 95 // 100])
    return Corpus(source, symbols, train, validation, test)


def _local(path: str | Path, origin: str, published: Published, limit: int) -> _Found:
    path = Path(path).expanduser()
    name = f"{origin}{path}"
    if path.is_dir():
        raise DataError(f"{name} is a folder; give a file with text")
    if not path.exists():
        raise DataError(f"{name} does not exist; give a file with text")
    raw = _read(path, name, limit=limit)
    if _is_published(raw, published):
        source = "enwik8, all"
    elif hashlib.sha256(raw[:_MIB]).hexdigest() == published.mebibyte_sha256:
        source = "enwik8, the first"
    else:
        source = "text,"
    markup = raw.startswith(_DUMP)
    return _Found(raw, f"{source} {len(raw):,} bytes, from {name}", markup=markup)


def _read(path: Path, name: str, *, limit: int) -> bytes:
    """Return up to ``limit`` bytes of a file, unpacked if its first bytes are an archive's."""
    packing = "plain"
    try:
        with path.open("rb") as file:
            packing = _packing(file)
            return _content(file, packing, name, limit)
    except _UNREADABLE as error:
        raise DataError(
            f"cannot read {name} as {packing} data ({_one_line(error)}); if it is truncated,"
            " fetch or pack it again"
        ) from error


def _packing(file: BinaryIO) -> str:
    magic = file.read(6)
    file.seek(0)
    signatures = {"gzip": b"\x1f\x8b", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0", "zip": b"PK"}
    return next((name for name, sign in signatures.items() if magic.startswith(sign)), "plain")


def _content(file: BinaryIO, packing: str, name: str, limit: int) -> bytes:
    match packing:
        case "gzip":
            return gzip.GzipFile(fileobj=file).read(limit)
        case "bzip2":
            return bz2.BZ2File(file).read(limit)
        case "xz":
            return lzma.LZMAFile(file).read(limit)
        case "zip":
            with zipfile.ZipFile(file) as archive, archive.open(_only(archive, name)) as content:
                return content.read(limit)
        case _:
            return file.read(limit)


def _only(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) != 1:
        raise DataError(
            f"{name} is a zip of {len(members)} files; expected exactly one, the text: pack that"
            " alone"
        )
    return members[0]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _published(folder: Path, url: str, published: Published) -> bytes:
    """Return the whole file; of processes that start together one downloads, the others wait."""
    raw = _cached(folder, published)
    if raw is not None:
        return raw
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "enwik8.lock"):
            raw = _cached(folder, published)
            return _download(folder, url, published) if raw is None else raw
    except requests.RequestException as error:
        raise _UnreachableError(_reason(error)) from error
    except OSError as error:
        raise DataError(
            f"cannot keep enwik8 in {folder} ({_one_line(error)}); set GEOMON_CACHE to a folder"
            " that can be written, or ENWIK8 to a file"
        ) from error


def _cached(folder: Path, published: Published) -> bytes | None:
    """Return the cached file, None if it is missing or damaged.

    Every load checks the whole of it: 100 MB take sha1 about 0.1 s, less than the reading, and
    no cheaper check finds damage in the middle.
    """
    try:
        raw = (folder / "enwik8").read_bytes()
    except OSError:
        return None
    return raw if _is_published(raw, published) else None


def _is_published(raw: bytes, published: Published) -> bool:
    return (
        len(raw) == published.size
        and hashlib.sha1(raw, usedforsecurity=False).hexdigest() == published.sha1
    )


def _download(folder: Path, url: str, published: Published) -> bytes:
    """Download, check and cache; what fails the check is deleted and fetched once more."""
    part = folder / "enwik8.zip.part"
    problem = ""
    for _ in range(2):
        _fetch(url, part)
        try:
            raw = _read(part, url, limit=published.size + 1)
        except DataError as error:
            problem = str(error)
        else:
            if _is_published(raw, published):
                _replace(folder / "enwik8", raw)
                part.unlink()
                return raw
            problem = (
                f"what {url} holds has {len(raw):,} bytes and not the sha1 {published.sha1} of"
                f" {published.size:,}"
            )
        part.unlink()
    raise DataError(f"downloaded twice: {problem}; or get enwik8 elsewhere and set ENWIK8 to it")


def _fetch(url: str, part: Path) -> None:
    """Complete ``part``; whatever a server makes of the range, the checksum decides in the end."""
    with part.open("ab") as file:
        headers = {"Accept-Encoding": "identity"}  # a range counts the bytes as stored
        if file.tell():
            headers["Range"] = f"bytes={file.tell()}-"
        download = pooch.HTTPDownloader(
            progressbar=sys.stderr.isatty(), chunk_size=_MIB, headers=headers,
            timeout=(_CONNECT_SECONDS, _READ_SECONDS),
        )  # fmt: skip
        try:
            download(url, file, None)
        except requests.HTTPError as error:
            # The part is complete, or wrong as a whole.
            if error.response.status_code != requests.codes.requested_range_not_satisfiable:
                raise


def _replace(path: Path, raw: bytes) -> None:
    """Write a file so that another process sees all of it or none."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(raw)
    temporary.replace(path)


def _reason(error: requests.RequestException) -> str:
    if isinstance(error, requests.HTTPError):
        return f"the server answered {error.response.status_code}"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off; the next run resumes"
    return "no connection" if isinstance(error, requests.ConnectionError) else _one_line(error)
