"""Arrays next to a record: data for figures that no single value holds, in numpy files.

Each reading may have one file, such as `arrays/step_000128_probe.npz` for a probe at step 128.
Files are written whole or not at all: a killed run leaves no half file under that name.
"""

import functools
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geomon.failures import failures, ignored
from geomon.record import tags
from geomon.record.paths import check_regular


class ArrayPlace(NamedTuple):
    """The place that an array describes.

    Attributes:
        stack: Name of the stack; "" for the only one.
        name: Name of the array, such as "mean_query".
        layer: Depth.
    """

    stack: str
    name: str
    layer: int


# Arrays of one reading.
Arrays = Mapping[ArrayPlace, NDArray[Any]]

_FILE = re.compile(r"step_(?P<step>\d+)_(?P<source>inline|probe)\.npz")
# Readings with arrays are at least this far apart, as a share of the step: a run that is read every
# 10 steps has some hundred files instead of ten thousand.
_APART = 0.05


@dataclass(frozen=True)
class ArrayFolder:
    """Folder of the arrays of a run's readings.

    Attributes:
        path: Path of the folder, which need not exist.
        stack: Name of the stack whose arrays are read, under the tags of a model with one stack;
            None for all stacks.
    """

    path: Path
    stack: str | None = None

    @classmethod
    def of_record(cls, record: Path) -> "ArrayFolder":
        """Return the folder that belongs to a record such as `readings.jsonl`."""
        return cls(record.with_name(f"arrays{record.stem.removeprefix('readings')}"))

    def of_stack(self, stack: str) -> "ArrayFolder":
        """Select the arrays of one stack."""
        return replace(self, stack=stack)

    def steps(self, source: str) -> list[int]:
        """List the steps that have arrays from this source, ascending."""
        return sorted(int(name["step"]) for name in self._names() if name["source"] == source)

    def takes(self, step: int, source: str) -> bool:
        """Return whether to keep a step's arrays: it must be 5 % beyond the last such step."""
        before = [known for known in self.steps(source) if known < step]
        return not before or step - before[-1] >= _APART * before[-1]

    def write(self, step: int, source: str, arrays: Arrays) -> None:
        """Write the arrays of a reading, replacing earlier ones of the same step.

        If the file cannot be written, an OSError is raised and earlier content is unchanged.
        """
        path = self._file(step, source)
        self.path.mkdir(exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.unlink(missing_ok=True)
        content = _archive({"|".join(map(str, place)): arrays[place] for place in arrays})
        try:
            with part.open("xb") as file:  # fails on an existing link or pipe of that name
                file.write(content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def read(self, step: int, source: str) -> dict[str, NDArray[Any]]:
        """Read the arrays of a reading, by tag.

        Raises FileNotFoundError if there are none, and ValueError if the file is damaged.
        """
        path = self._file(step, source)
        found: dict[str, NDArray[Any]] = {}
        try:
            check_regular(path)
            with zipfile.ZipFile(path), np.load(path) as file:  # any other file is refused
                for key in (key for key in file.files if "|" in key):
                    stack, name, layer = key.rsplit("|", 2)
                    if self.stack in (None, stack):
                        shown = "" if self.stack else stack
                        found[tags.in_stack(tags.layer_tag(name, int(layer)), shown)] = file[key]
        except failures(FileNotFoundError):
            raise FileNotFoundError(
                f"no arrays of step {step} at {path}: a Monitor with a directory and arrays=True "
                "keeps them"
            ) from None
        except failures() as error:  # a damaged archive raises many kinds
            raise ValueError(
                f"{path} cannot be read ({error}): move it away, the record works without it"
            ) from error
        return found

    def remove_parts(self) -> None:
        """Remove unfinished files of a killed process."""
        for part in self.path.glob(".step_*.npz.part"):
            with ignored(OSError):
                part.unlink()

    def move(self, target: "ArrayFolder", first: int = 0) -> None:
        """Move arrays from step `first` on into another folder; other files stay."""
        for name in self._names():
            if int(name["step"]) >= first:
                target.path.mkdir(exist_ok=True)
                (self.path / name.string).rename(target.path / name.string)

    def _file(self, step: int, source: str) -> Path:
        """Return the path of a reading's file; raises FileNotFoundError for an unknown source."""
        name = f"step_{step:06d}_{source}.npz"
        if not _FILE.fullmatch(name):
            raise FileNotFoundError(f"no arrays of source {source!r}: expected inline or probe")
        return self.path / name

    def _names(self) -> list[re.Match[str]]:
        """Match the names of all array files."""
        found = (_FILE.fullmatch(path.name) for path in self.path.glob("step_*.npz"))
        return [name for name in found if name]


def _archive(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Build a zip archive of .npy files, as `np.savez` does, which takes five times as long."""
    entries: list[bytes] = []
    directory: list[bytes] = []
    start = 0  # of the next entry
    for name, array in arrays.items():
        content = _header(array.dtype, array.shape) + array.tobytes()
        path = f"{name}.npy".encode()
        # Version 2.0, name in UTF-8, stored, 1980-01-01 0:00; packed and plain size; no extras.
        facts = 20, 0x800, 0, 0, 0x21, zlib.crc32(content), len(content), len(content)
        about = struct.pack("<5H3L2H", *facts, len(path), 0)
        entry = b"".join((b"PK\3\4", about, path, content))
        entries.append(entry)
        place = struct.pack("<3H2L", 0, 0, 0, 0, start)  # no comment, first disk, no attributes
        directory += (b"PK\1\2", struct.pack("<H", 20), about, place, path)
        start += len(entry)
    size, count = sum(map(len, directory)), len(entries)
    end = struct.pack("<4H2LH", 0, 0, count, count, size, start, 0)
    return b"".join((*entries, *directory, b"PK\5\6", end))


@functools.lru_cache
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Build the start of a .npy file, the same for all layers."""
    file = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    facts = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, facts)
    return file.getvalue()
