"""Text for the character-level language model: enwik8, a prefix of it, or what Python carries.

Vocabulary: enwik8 is the first 100,000,000 bytes of the English Wikipedia's dump of March 2006;
a *prefix* is its first so many bytes; a *corpus* is text as the model reads it, one id per byte.
"""

import bz2
import gzip
import hashlib
import lzma
import os
import platform
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

import numpy as np
import requests
from filelock import FileLock
from numpy.typing import ArrayLike, NDArray
from platformdirs import user_cache_dir
from tqdm import tqdm

from recipes.enwik8.builtin_text import builtin_text
from recipes.enwik8.clean import clean

URL = "http://mattmahoney.net/dc/enwik8.zip"
Text = Literal["bytes", "clean"]

_MIB = 1 << 20
_CONNECT_SECONDS = 5
_READ_SECONDS = 30
_UNREADABLE = (EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)


class DataError(ValueError):
    """The text asked for cannot be used; one line says what came, what should have, what to do."""


@dataclass(frozen=True)
class Published:
    """What is published about a file, so that a copy of it, or of its beginning, can be checked."""

    size: int  # bytes
    sha1: str
    mebibyte_sha256: str  # of the first 1,048,576 bytes
    head: bytes  # the first bytes themselves, for prefixes shorter than that


ENWIK8 = Published(
    size=100_000_000,
    sha1="57b8363b814821dc9d47aa4d41f58733519076b2",
    mebibyte_sha256="4fb5efa9f35df431737731bf3c8f38a467b69731940ff82a4ee0e218aae58834",
    head=(
        b'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.3/" '
        b'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"'
    ),
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

    A file that is named must be enwik8 or a prefix of it, plain or packed (gzip, bzip2, xz, or a
    zip that holds one file); of a prefix only the first MiB can be checked. If it cannot be used,
    that is an error: only a failed connection leads to the text that Python carries.

    Args:
        data: A file with enwik8 or a prefix of it. ``$ENWIK8`` is read the same way.
        text: ``"bytes"`` takes the file as it is, ``"clean"`` the prose that `clean` leaves of
            it. Either way the split 90/5/5 and the symbols are those of the bytes then used.
        cache: The folder for the download; by default ``$GEOMON_CACHE`` or the platform's.
        minimum: The fewest bytes to accept, after cleaning.
        url: Where to download from.
        published: Size and checksums of the file expected.

    Raises:
        DataError: If ``text`` is unknown, a named file is missing or not what it should be, a
            download fails its checksum twice, the cache cannot be written, or the text is short.
    """
    if text not in get_args(Text):
        raise DataError(f"text={text!r} is unknown; give 'bytes' or 'clean'")
    raw, source, markup = _find(data, cache, url, published)
    if text == "clean" and markup:
        raw = clean(raw)
        source += f"; {len(raw):,} bytes of prose after cleaning"
    if len(raw) < max(minimum, 1):
        raise DataError(
            f"too short: {source}; expected at least {max(minimum, 1):,} bytes of text;"
            " give a longer prefix of enwik8 or a smaller minimum"
        )
    return _corpus(raw, source)


def _find(data: str | Path | None, cache: Path | None, url: str, published: Published) -> _Found:
    if data is not None:
        return _local(data, "", published)
    if named := os.environ.get("ENWIK8"):
        return _local(named, "ENWIK8=", published)
    folder = Path(cache or os.environ.get("GEOMON_CACHE") or user_cache_dir("geomon")).expanduser()
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


def _corpus(raw: bytes, source: str) -> Corpus:
    symbols = bytes(value for value in range(256) if value in raw)
    ids = bytes(max(symbols.find(value), 0) for value in range(256))
    # bytes.translate needs no index array of 8 B a byte; the copy is writable, as torch wants it.
    encoded = np.frombuffer(raw.translate(ids), np.uint8).copy()
    train, validation, test = np.split(encoded, [len(raw) * 90 // 100, len(raw) * 95 // 100])
    return Corpus(source, symbols, train, validation, test)


def _local(path: str | Path, origin: str, published: Published) -> _Found:
    path = Path(path).expanduser()
    name = f"{origin}{path}"
    if path.is_dir():
        raise DataError(f"{name} is a folder; give the file with enwik8 or a prefix of it")
    if not path.exists():
        raise DataError(f"{name} does not exist; give a file with enwik8 or a prefix of it")
    raw = _read(path, name, limit=published.size + 1)
    _check(raw, name, published)
    part = "all" if len(raw) == published.size else "the first"
    return _Found(raw, f"enwik8, {part} {len(raw):,} bytes, from {name}", markup=True)


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
            f"{name} is a zip of {len(members)} files; expected exactly one, enwik8 or a prefix"
            " of it; pack that alone"
        )
    return members[0]


def _check(raw: bytes, name: str, published: Published) -> None:
    """Raise unless ``raw`` is the published file or, as far as can be told, a prefix of it."""
    if not raw:
        raise DataError(f"{name} is empty; give a file with enwik8 or a prefix of it")
    if len(raw) > published.size:
        raise DataError(
            f"{name} is longer than the {published.size:,} bytes of enwik8; give enwik8 or a"
            " prefix of it"
        )
    if len(raw) == published.size:
        _compare(name, "sha1", hashlib.sha1(raw, usedforsecurity=False).hexdigest(), published.sha1)
    elif len(raw) >= _MIB:
        digest = hashlib.sha256(raw[:_MIB]).hexdigest()
        _compare(f"the first MiB of {name}", "sha256", digest, published.mebibyte_sha256)
    elif raw[: len(published.head)] != published.head[: len(raw)]:
        raise DataError(
            f"{name} begins with {raw[:20]!r}, expected {published.head[:20]!r}; give enwik8 or"
            " a prefix of it"
        )


def _compare(name: str, kind: str, digest: str, expected: str) -> None:
    if digest != expected:
        raise DataError(
            f"{name} has the {kind} {digest}, expected {expected}; give enwik8 or a prefix of it"
        )


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
            _check_download(raw, url, published)
        except DataError as error:
            problem = str(error)
            part.unlink()
        else:
            _replace(folder / "enwik8", raw)
            part.unlink()
            return raw
    raise DataError(f"downloaded twice: {problem}; or get enwik8 elsewhere and set ENWIK8 to it")


def _check_download(raw: bytes, url: str, published: Published) -> None:
    if not _is_published(raw, published):
        digest = hashlib.sha1(raw, usedforsecurity=False).hexdigest()
        raise DataError(
            f"what {url} holds has {len(raw):,} bytes and the sha1 {digest}, expected"
            f" {published.size:,} and {published.sha1}"
        )


def _fetch(url: str, part: Path) -> None:
    """Complete ``part``; whatever a server makes of the range, the checksum decides in the end."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}  # a range counts the bytes as stored
    if have:
        headers["Range"] = f"bytes={have}-"
    timeout = (_CONNECT_SECONDS, _READ_SECONDS)
    with requests.get(url, headers=headers, stream=True, timeout=timeout) as response:
        if have and response.status_code == requests.codes.requested_range_not_satisfiable:
            return  # the part is complete, or wrong as a whole
        response.raise_for_status()
        resumed = response.status_code == requests.codes.partial_content
        start = have if resumed else 0
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdecimal() else None
        with (
            part.open("ab" if resumed else "wb") as file,
            tqdm(
                desc="enwik8",
                initial=start,
                total=total,
                unit="B",
                unit_scale=True,
                disable=None,  # shown on a terminal only
            ) as bar,
        ):
            for chunk in response.iter_content(_MIB):
                file.write(chunk)
                bar.update(len(chunk))


def _replace(path: Path, raw: bytes) -> None:
    """Write a file so that another process sees all of it or none."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(raw)
    temporary.replace(path)


def _reason(error: requests.RequestException) -> str:
    if isinstance(error, requests.HTTPError):
        return f"the server answered {error.response.status_code}"
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {_CONNECT_SECONDS} s"
    if isinstance(error, requests.ReadTimeout):
        return f"the server fell silent for {_READ_SECONDS} s"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off; the next run resumes"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    return _one_line(error)
