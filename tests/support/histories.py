"""Events in the folder of a record, and what readers should find there afterwards.

A history is a row of a table. After each event, who reads the folder and who has followed its file
from the start see the same.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geomon.record import FILE_NAME, Course, Follower, RaisedAlert, Record, read
from support.mishaps import FullDisk
from support.readings import alert_of, reading_of


def reading(step, value=1.0, source="inline", **fields):
    return reading_of({"a/mean": value}, step, source, time=value, **fields)


def alert(step, value=1.0, words="too large"):
    course = Course("a/mean", (step - 1, step), (1.0, math.nan))
    return RaisedAlert(step, value, "check", alert_of("spike", words), (course,))


def points(readings):
    return [(each.step, each.value("a/mean")) for each in readings]


def array_of(folder, step, source=None):
    return float(read(folder).arrays(step, source)["mean_query/layer_01"][0])


def arrays(number):
    return {("", "mean_query", 1): np.full(2, number)}


class Folder:
    """The folder of a run, and who writes and reads there.

    Attributes:
        starts: Number of starts so far: the value of the readings that each writes.
        earlier: Readings that the last start was given as those before it.
        failed: Number of lines that could not be written at once.
    """

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path, self.file, self.patch = path, path / FILE_NAME, patch
        self.follower, self.starts, self.failed = Follower(path), 0, 0
        self.record: Any = None
        self.earlier: Any = None
        self.disk: Any = None

    def attempt(self, action, *given):
        try:
            action(*given)
        except OSError:
            self.failed += 1


def begin(step):
    """Another start, at a step: nothing changes before its first line."""

    def event(folder):
        if folder.record is not None:
            with contextlib.suppress(OSError):
                folder.record.close()
        before = folder.file.read_bytes() if folder.file.exists() else b""
        folder.record, folder.starts = Record(folder.path), folder.starts + 1
        folder.earlier = folder.record.begin(step, {"model": "m"})
        assert folder.file.read_bytes() == before

    return event


def write(*steps, source="inline", notes=(), with_arrays=False):
    def event(folder):
        for step in steps:
            one = reading(step, float(folder.starts), source, notes=notes)
            folder.attempt(folder.record.write, one)
            if with_arrays:
                folder.attempt(folder.record.write_arrays, one, arrays(float(folder.starts)))

    return event


def warn(*steps, words="too large"):
    """Write alerts."""

    def event(folder):
        for step in steps:
            folder.attempt(folder.record.write_alert, alert(step, float(folder.starts), words))

    return event


def close(folder):
    folder.attempt(folder.record.close)


def tear(text):
    """Cut the file in the middle of a line, as a kill does."""

    def event(folder):
        folder.record.close()
        with folder.file.open("a") as file:
            file.write(text)

    return event


def fill_the_disk(free):
    def event(folder):
        folder.disk = FullDisk(folder.patch, free)

    return event


def free_the_disk(folder):
    folder.disk.free = 10**6


Event = Callable[[Folder], object]


@dataclass
class History:
    """A row of a table.

    Attributes:
        events: Functions of the folder.
        points: Steps and values of the readings of the branch that goes on.
        abandoned: Those that were given up.
        alerts: Steps of the alerts of the branch.
        rewound: To which step each start went back; None if it is not asked.
        earlier: Steps that the last start was told of.
        failed: Number of lines that could not be written at once.
        files: Names in the folder, if there is more than the record.
    """

    events: Sequence[Event]
    points: Sequence[tuple[int, float]]
    abandoned: Sequence[tuple[int, float]] = ()
    alerts: Sequence[int] = ()
    rewound: Sequence[int | None] | None = field(default_factory=lambda: [None])
    earlier: Sequence[int] | None = None
    failed: int = 0
    files: Sequence[str] = field(default=(FILE_NAME,))


def check(history: History, path: Path) -> Folder:
    with pytest.MonkeyPatch.context() as patch:
        folder = Folder(path, patch)
        for event in history.events:
            event(folder)
            folder.follower.look()
            if not folder.file.exists():
                continue
            found, followed = read(path), folder.follower.readings()
            assert found.readings == followed.readings
            assert (found.abandoned, found.raised) == (followed.abandoned, followed.raised)
            assert (found.mixed_at, followed.mixed_at) == (None, None)
        folder.attempt(folder.record.close)
    found = read(path)
    assert points(found) == list(history.points)
    assert points(found.abandoned) == list(history.abandoned)
    assert [each.step for each in found.raised] == list(history.alerts)
    assert history.rewound in (None, [run.get("rewound_to") for run in found.runs])
    assert history.earlier in (None, [each.step for each in folder.earlier])
    assert folder.failed == history.failed
    assert sorted(each.name for each in path.iterdir()) == sorted(history.files)
    return folder
