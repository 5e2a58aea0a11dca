"""Arrays beside a record: what figures need and no single value holds, in files of numpy.

Each reading may have one file, `arrays/step_000128_probe.npz` for the reading of a probe at step
128. It is written whole or not at all: a run that is killed leaves no half file under that name.
"""

import contextlib
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geomon.record import tags
from geomon.record.regular import check_regular


class ArrayPlace(NamedTuple):
    """What an array is of.

    Attributes:
        stack: Name of the stack; "" for the only one.
        name: Name of the array, "mean_query" say.
        layer: Depth.
    """

    stack: str
    name: str
    layer: int


# Arrays of one reading.
Arrays = Mapping[ArrayPlace, NDArray[Any]]

# An entry that every file has: a file without it is somebody else's.
_MARK = "geomon"
_FILE = re.compile(r"step_(?P<step>\d+)_(?P<source>inline|probe)\.npz")
_PART = re.compile(r"\.step_\d+_(inline|probe)\.npz\.part")
# Arrays are kept of readings whose steps are so much apart, as a share of the step: a run that is
# read every 10 steps has some hundred files and not ten thousand.
_APART = 0.05


@dataclass(frozen=True)
class ArrayFolder:
    """Folder of the arrays of a run's readings.

    Attributes:
        path: Path of the folder, which need not be there.
        stack: Name of the stack whose arrays are read, under the tags of a model with one stack;
            None for all stacks.
    """

    path: Path
    stack: str | None = None

    @classmethod
    def beside(cls, record: Path) -> "ArrayFolder":
        """Name the folder that belongs to a record.

        Args:
            record: Path of the record, `readings.jsonl` or an earlier one, `readings.1.jsonl`.
        """
        return cls(record.with_name(f"arrays{record.stem.removeprefix('readings')}"))

    def of_stack(self, stack: str) -> "ArrayFolder":
        """Select the arrays of one stack.

        Args:
            stack: Name of the stack.
        """
        return replace(self, stack=stack)

    def steps(self, source: str) -> list[int]:
        """List the steps of which there are arrays, ascending.

        Args:
            source: "inline" or "probe".
        """
        return sorted(int(name["step"]) for name in self._names() if name["source"] == source)

    def takes(self, step: int, source: str) -> bool:
        """Return whether arrays of a step are kept: it is 5 % beyond the last one that has some.

        Args:
            step: Step of a reading.
            source: Source of the reading.
        """
        before = [known for known in self.steps(source) if known < step]
        return not before or step - before[-1] >= _APART * before[-1]

    def write(self, step: int, source: str, arrays: Arrays) -> None:
        """Write the arrays of a reading, in place of those of the same step.

        Args:
            step: Step of the reading.
            source: Source of the reading.
            arrays: The arrays.

        Raises:
            OSError: The file cannot be written, or one of that name is not geomon's. What was there
                is unchanged.
        """
        path = self._file(step, source)
        self.path.mkdir(exist_ok=True)
        if path.exists() and not _is_own(path):
            raise FileExistsError(f"{path} is not a file of geomon's and is kept")
        part = path.with_name(f".{path.name}.part")
        check_regular(part)
        try:
            with part.open("wb") as file:
                content: dict[str, Any] = {_MARK: _MARK}
                content |= {_key(place): array for place, array in arrays.items()}
                np.savez(file, **content)
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def read(self, step: int, source: str) -> dict[str, NDArray[Any]]:
        """Read the arrays of a reading, by tag.

        Args:
            step: Step of the reading.
            source: Source of the reading.

        Raises:
            FileNotFoundError: There are none.
            ValueError: The file is damaged.
        """
        path = self._file(step, source)
        try:
            check_regular(path)
            with zipfile.ZipFile(path), np.load(path) as file:  # any other file is refused
                found = {_place(key): file[key] for key in file.files if key != _MARK}
        except FileNotFoundError:
            raise FileNotFoundError(
                f"no arrays of step {step} at {path}: a Monitor with a directory and arrays=True "
                "keeps them"
            ) from None
        except Exception as error:  # a damaged archive raises much
            raise ValueError(
                f"{path} cannot be read ({error}): move it away, the record does without it"
            ) from error
        return {
            tags.in_stack(
                tags.layer_tag(place.name, place.layer), "" if self.stack else place.stack
            ): array
            for place, array in found.items()
            if self.stack is None or place.stack == self.stack
        }

    def remove_parts(self) -> None:
        """Remove what a killed process was writing."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                if _PART.fullmatch(name):
                    (self.path / name).unlink()

    def move(self, target: "ArrayFolder", first: int = 0) -> None:
        """Move arrays into another folder; what else is in the folder stays.

        Args:
            target: The other folder.
            first: Step from which arrays are moved.

        Raises:
            OSError: A file cannot be moved.
        """
        for name in self._names():
            if int(name["step"]) < first:
                continue
            target.path.mkdir(exist_ok=True)
            (self.path / name.string).rename(target.path / name.string)

    def _file(self, step: int, source: str) -> Path:
        # A source of another name is none of geomon's: nothing is read or written under it.
        name = f"step_{step:06d}_{source}.npz"
        if not _FILE.fullmatch(name):
            raise FileNotFoundError(f"no arrays of source {source!r}: expected inline or probe")
        return self.path / name

    def _names(self) -> list[re.Match[str]]:
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        return [found for found in map(_FILE.fullmatch, names) if found]


def _key(place: ArrayPlace) -> str:
    """Name the entry of an array in a file."""
    return f"{place.stack}|{place.name}|{place.layer}"


def _place(key: str) -> ArrayPlace:
    stack, name, layer = key.rsplit("|", 2)
    return ArrayPlace(stack, name, int(layer))


def _is_own(path: Path) -> bool:
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as file:
            return f"{_MARK}.npy" in file.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
