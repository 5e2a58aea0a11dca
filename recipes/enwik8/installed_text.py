"""Sources and documentation of the packages installed beside this one, for a long training.

Only distributions whose metadata names a free licence are read. The files follow one another in
the order of their checksums: it depends on nothing but the files, and mixes the packages, so that
the training and the held-out part of the text are alike.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

_SUFFIXES = frozenset({".py", ".pyi", ".md", ".rst", ".txt"})
_SEPARATOR = b"\n\n\n"
_LARGEST = 1_000_000  # bytes; larger files are mostly tables
_SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "site-packages"})
_METADATA_FOLDER = re.compile(r"\.(dist|egg)-info$")  # lists, and the same few licences each time
_READERS = 16  # threads; most of the time is the disk's

_FREE = re.compile(
    r"(?<![a-z])(?:0BSD|A?GPL|LGPL|General Public License|Apache|Artistic|Boost|BSD|BSL-1\.0|CC0"
    r"|CNRI|EPL|HPND|ISCL?|LLVM|MIT|MPL|Mozilla|NCSA|OFL|PSF|Public Domain|Python|Unlicense|X11"
    r"|Zlib)(?![a-z]{2})",
    re.IGNORECASE,
)
_OPERATORS = re.compile(r"[()\s]+|\b(?:AND|OR|WITH)\b")
_NOT_FREE = re.compile(
    r"proprietary|commercial|commons clause|EULA|all rights reserved", re.IGNORECASE
)
_SHORT_NAME = 60  # characters; a licence's name is not longer


@dataclass(frozen=True)
class Package:
    """A distribution, and how much of the text is its own.

    Attributes:
        name: As the metadata has it.
        version: As the metadata has it.
        licence: As the metadata names it; None if no free licence is named.
        files: Number of its files in the text.
        size: Bytes of these files.
    """

    name: str
    version: str
    licence: str | None
    files: int = 0
    size: int = 0


class InstalledText(NamedTuple):
    """The text, the packages that it is from, and those without a free licence."""

    raw: bytes
    taken: list[Package]
    left_out: list[Package]

    @property
    def source(self) -> str:
        """One line: how many packages and files, and how many bytes."""
        files = sum(package.files for package in self.taken)
        return (
            f"text, {len(self.raw):,} bytes, from {files:,} sources and documents of "
            f"{len(self.taken)} installed packages with a free licence"
        )


class _File(NamedTuple):
    digest: bytes
    package: int  # its number
    content: bytes


def installed_text(
    *, limit: int = 400_000_000, path: Sequence[str] | None = None, library: Path | None = None
) -> InstalledText:
    """Return the UTF-8 text of the installed packages and of the standard library.

    Equal files occur once. Files of more than 1,000,000 bytes are left out.

    Args:
        limit: The most bytes to return; of more text, files are taken whole, in their order.
        path: Folders to look for distributions; by default those of this Python.
        library: Folder of the standard library; by default that of this Python.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    packages = [Package("Python standard library", platform.python_version(), "PSF-2.0")]
    places = [(0, file) for file in _files_below(library)]
    left_out = []
    for distribution in _distributions(path):
        name, version = distribution.name, distribution.version
        licence = free_licence(distribution.metadata)
        if licence is None:
            left_out.append(Package(name, version, None))
            continue
        places += [(len(packages), file) for file in _files_of(distribution)]
        packages.append(Package(name, version, licence))
    chosen = _within(limit, _read_all(places))
    for file in chosen:
        package = packages[file.package]
        packages[file.package] = replace(
            package, files=package.files + 1, size=package.size + len(file.content)
        )
    raw = _SEPARATOR.join(file.content for file in chosen)
    return InstalledText(raw, [package for package in packages if package.files], left_out)


def free_licence(metadata: importlib.metadata.PackageMetadata) -> str | None:
    """Return the free licence that a distribution's metadata names, None if it names none.

    The licence expression decides if there is one, then the classifiers, then the first line
    of the field that old metadata has, if it is short as a name is. Each part of an expression has
    to be free.
    """
    if expression := _field(metadata, "License-Expression"):
        names = [name for name in _OPERATORS.split(expression) if name]
        return expression if all(map(_is_free, names)) else None
    classifiers = [
        classifier.rpartition(" :: ")[2]
        for classifier in metadata.get_all("Classifier") or []
        if classifier.startswith("License :: ") and classifier != "License :: OSI Approved"
    ]
    if any(map(_NOT_FREE.search, classifiers)):
        return None
    if free := [name for name in classifiers if _is_free(name)]:
        return ", ".join(free)
    name = _field(metadata, "License").strip().partition("\n")[0].strip()
    return name if len(name) <= _SHORT_NAME and _is_free(name) else None


def _is_free(name: str) -> bool:
    return _FREE.search(name) is not None and _NOT_FREE.search(name) is None


def _field(metadata: importlib.metadata.PackageMetadata, name: str) -> str:
    return (metadata.get_all(name) or [""])[0]


def _distributions(path: Sequence[str] | None) -> list[importlib.metadata.Distribution]:
    """Distributions by name; of several with one name the first that Python would import."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(path=list(path or sys.path)):
        if name := _field(distribution.metadata, "Name"):
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution)
    return [found[name] for name in sorted(found)]


def _files_of(distribution: importlib.metadata.Distribution) -> Iterator[Path]:
    """Yield the text files that a distribution has installed, without those on itself."""
    for file in distribution.files or ():
        inside = not any(_METADATA_FOLDER.search(part) for part in file.parts)
        if file.suffix in _SUFFIXES and inside:
            yield Path(str(file.locate()))


def _files_below(library: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = set(subfolders) - _SKIPPED_FOLDERS
        yield from (Path(folder, name) for name in names if Path(name).suffix in _SUFFIXES)


def _read_all(places: Iterable[tuple[int, Path]]) -> list[_File]:
    """Read the files in the order of their checksums, each content once."""
    with ThreadPoolExecutor(_READERS) as readers:
        read = list(readers.map(_read, places))
    first: dict[bytes, _File] = {}
    for file in read:
        if file is not None:
            first.setdefault(file.digest, file)
    return [first[digest] for digest in sorted(first)]


def _read(place: tuple[int, Path]) -> _File | None:
    """Read a file; None if it is missing, too large, blank, or no text."""
    package, path = place
    try:
        if path.stat().st_size > _LARGEST:
            return None
        content = path.read_bytes().strip()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    if not content or b"\0" in content:
        return None
    return _File(hashlib.sha256(content).digest(), package, content)


def _within(limit: int, files: Iterable[_File]) -> list[_File]:
    """Take files from the first until the limit is reached."""
    chosen, size = [], -len(_SEPARATOR)
    for file in files:
        size += len(_SEPARATOR) + len(file.content)
        if size > limit:
            break
        chosen.append(file)
    return chosen
