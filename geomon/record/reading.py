"""The record: what a run measured, one JSON line per reading, on disk before anybody is shown it.

A line either describes the run (`"run"`: versions, model, layers, metrics) or is a reading. Each is
written whole and at once: a killed run keeps every reading, and a resumed one goes on in the same
file.
"""

import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from geomon.record import tags

FILE_NAME = "readings.jsonl"

# Lines kept while the disk is full: a large run's are 100 kB each.
_MOST_WAITING = 100


@dataclass(frozen=True)
class Reading:
    """What was measured at one step.

    Attributes:
        step: Number of optimizer updates in the weights that were seen.
        time: Seconds since the epoch.
        seconds: What the reading took of the training's time.
        source: "inline" (in the training forward) or "probe" (an extra pass on fixed inputs).
        mode: "train" or "eval".
        tokens: Rows of hidden states, over all batches.
        world_size: Number of ranks.
        dtype: Of the hidden states in the model.
        values: By tag; NaN where a value could not be measured.
        notes: What a reader of the values should know.
    """

    step: int
    time: float
    seconds: float
    source: str
    mode: str
    tokens: int
    world_size: int
    dtype: str
    values: Mapping[str, float]
    notes: list[str] = field(default_factory=list)

    def charted(self) -> dict[str, float]:
        """The values that charts show: numbers, without single heads (see `tags.is_charted`)."""
        return {
            tag: value
            for tag, value in self.values.items()
            if tags.is_charted(tag) and not math.isnan(value)
        }

    def line(self) -> str:
        """The reading as one line of JSON; a value that is not a number is null."""
        content = asdict(self)
        content["values"] = {
            tag: value if math.isfinite(value) else None for tag, value in self.values.items()
        }
        return json.dumps(content, allow_nan=False)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Reading":
        """The reading that `line` wrote."""
        names = cls.__dataclass_fields__
        known = {name: content[name] for name in names if name in content}
        known["values"] = {
            tag: math.nan if value is None else float(value)
            for tag, value in content["values"].items()
        }
        return cls(**known)


class Record:
    """Writes `readings.jsonl` in a directory.

    A line that cannot be written (a full disk, a folder that went away) is kept, and written before
    the next one as soon as there is room again; of many such lines the oldest are given up.

    Raises:
        ValueError: The directory cannot be made or written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / FILE_NAME
        self._aside = False  # whether the file that is there belongs to another run
        self._waiting: deque[str] = deque()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a"):
                pass
        except OSError as error:
            raise ValueError(
                f"directory={str(directory)!r} cannot be written ({error.strerror}): give a folder "
                "that can be made and written"
            ) from error

    def begin(self, step: int, description: Mapping[str, Any]) -> set[tuple[int, str]]:
        """Start or go on with the file, and say what it holds already.

        A run that begins at or before the first recorded step is a new one: the old file is kept
        under a name with a number, and so is one that is no record. The line that describes the run
        is written with the first reading.

        Args:
            step: The first step that this run reads.
            description: Of the run, for the line that opens it.

        Returns:
            (step, source) of each reading that the file holds.

        Raises:
            ValueError: The file is no record.
            OSError: The file cannot be read.
        """
        opening = {"run": {**description, "time": time.time(), "from_step": step}}
        self._waiting.append(json.dumps(opening))
        try:
            before = _parse(self.path).readings
        except ValueError:
            self._aside = True
            raise
        self._aside = bool(before) and step <= before[0].step
        return set() if self._aside else {(reading.step, reading.source) for reading in before}

    def write(self, reading: Reading) -> None:
        """Append a reading and flush it.

        Raises:
            OSError: It cannot be written now; it is kept, and tried again with the next one.
        """
        self._waiting.append(reading.line())
        if len(self._waiting) > _MOST_WAITING:
            del self._waiting[1]  # the first may be the line that opens the run
        if self._aside:
            self.path.rename(_free_name(self.path))
            self._aside = False
        while self._waiting:
            self._append(self._waiting[0])
            self._waiting.popleft()

    def close(self) -> None:
        """Nothing is held between lines."""

    def _append(self, line: str) -> None:
        """Add a whole line, or leave the file as it was.

        Unbuffered, so that a line is one write; a line torn by a kill is taken off first.
        """
        content = (line + "\n").encode()
        with self.path.open("a+b", buffering=0) as file:
            end = _mend(file)
            try:
                if file.write(content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise


@dataclass(frozen=True)
class Readings:
    """What a run recorded.

    Attributes:
        runs: Descriptions, one for each start or resume.
        readings: In order of writing.
    """

    runs: list[dict[str, Any]]
    readings: list[Reading]

    def __len__(self) -> int:
        return len(self.readings)

    def __iter__(self) -> Iterator[Reading]:
        return iter(self.readings)

    def __getitem__(self, index: int) -> Reading:
        return self.readings[index]

    def tags(self) -> list[str]:
        """All tags, in order of first appearance."""
        return list(dict.fromkeys(tag for reading in self for tag in reading.values))

    def series(self, tag: str) -> tuple[list[int], list[float]]:
        """Steps and values of a tag, ascending in step, without missing values."""
        found = sorted(
            (reading.step, reading.values[tag])
            for reading in self
            if not math.isnan(reading.values.get(tag, math.nan))
        )
        return [step for step, _ in found], [value for _, value in found]

    def layers(self, metric: str) -> list[int]:
        """Layers at which the metric has values."""
        return layers_of(self.tags(), metric)


def layers_of(names: Iterable[str], metric: str) -> list[int]:
    """Layers that the tags of a metric name, ascending."""
    parsed = filter(None, map(tags.parse, names))
    return sorted({tag.layer for tag in parsed if tag.metric == metric and tag.layer is not None})


def heads(reading: Reading, metric: str) -> list[list[float]]:
    """Values of a metric by layer and head, layers ascending; empty where it has no heads."""
    table: dict[int, dict[int, float]] = {}
    for name, value in reading.values.items():
        tag = tags.parse(name)
        if (
            tag is not None
            and tag.metric == metric
            and tag.layer is not None
            and tag.head is not None
        ):
            table.setdefault(tag.layer, {})[tag.head] = value
    width = max((max(row) + 1 for row in table.values()), default=0)
    return [[table[layer].get(head, math.nan) for head in range(width)] for layer in sorted(table)]


def read(directory: str | os.PathLike[str]) -> Readings:
    """What a run recorded.

    Args:
        directory: The run's folder, or the file itself.

    Raises:
        FileNotFoundError: There is no record.
        ValueError: The file is not a record.
    """
    path = Path(directory)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"no record at {path}: expected the folder of a run, with a {FILE_NAME} in it"
        )
    return _parse(path)


def _parse(path: Path) -> Readings:
    """All whole lines of a record; a last line without its end is being written, or was torn."""
    runs: list[dict[str, Any]] = []
    readings: list[Reading] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                break
            try:
                content = json.loads(line)
                if "run" in content:
                    runs.append(content["run"])
                else:
                    readings.append(Reading.from_json(content))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"line {number} of {path} is not a line of a record ({error}): expected what "
                    "geomon writes; move the file away"
                ) from error
    return Readings(runs, readings)


def _mend(file: FileIO) -> int:
    """Take a torn last line off the end of a file, and say where it ends."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return 0
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return end
    file.seek(0)
    return file.truncate(file.readall().rfind(b"\n") + 1)


def _free_name(path: Path) -> Path:
    number = 1
    while (name := path.with_stem(f"{path.stem}.{number}")).exists():
        number += 1
    return name
