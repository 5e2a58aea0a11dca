"""A short run that a monitor watches, told as a list of events, and what has to come of it.

A scenario is a row of a table: options, events, and what sinks, record and log hold in the end.
Facts that hold for every run are checked for each of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from geomon import Memory, Monitor, every, read, select
from support.fingerprint import fingerprint, random_state
from support.models import PlainDecoder, batch

FEW = {"metrics": select("variance"), "tokens": 64, "splits": 1, "schedule": every(1)}
# State of the process that no run may change, whatever its model becomes.
OF_PROCESS = ("call", "slot", "modes", "attention", "class of tensors", "fast path", "grad")


class Shown(Memory):
    """A sink that looks, as it is given a reading, at what the record holds by then."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.folder, self.recorded, self.closed = folder, [], 0

    def write(self, reading):
        super().write(reading)
        if self.folder is not None:
            self.recorded.append(read(self.folder)[-1].step)

    def close(self):
        self.closed += 1


class Watched:
    """A model, the monitor that watches it, and what a user can see of that."""

    def __init__(
        self, folder, patch, *, model=PlainDecoder, ranks=None, sinks=(), first_batch=0, **options
    ):
        self.model, self.patch, self.first_batch = model(), patch, first_batch
        self.folder = options.get("directory", folder)
        self.memory = Shown(self.folder)
        for name in ("find_ranks", "join_ranks") if ranks is not None else ():
            patch.setattr(f"geomon.monitor.setup.{name}", lambda *given, **named: ranks())
        given = FEW | {"directory": folder, "sinks": [*sinks, self.memory]} | options
        self.monitor = Monitor(self.model, **given)

    def step(self, step, *, force=False, inputs=None, **values):
        """Run a step, and log values in it; the weights move."""
        with self.monitor(step, force=force):
            self.model(batch(seed=self.first_batch + int(step)) if inputs is None else inputs)
            if values:
                self.monitor.log(**values)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.001)

    @property
    def shown(self):
        return [reading.step for reading in self.memory.readings]

    @property
    def recorded(self):
        """The last step of the record at the moment when each reading was shown."""
        return self.memory.recorded

    @property
    def record(self):
        return read(self.folder)

    @property
    def abandoned(self):
        return [reading.step for reading in self.record.abandoned]

    @property
    def rewound(self):
        return [run.get("rewound_to") for run in self.record.runs]

    @property
    def logged(self):
        """Values of the training in each reading; None if missing."""
        return [
            {name: None if math.isnan(x) else x for name, x in reading.training.items()}
            for reading in self.memory.readings
        ]

    @property
    def kinds(self):
        return [[note.kind for note in reading.notes] for reading in self.memory.readings]

    @property
    def tokens(self):
        return [reading.tokens for reading in self.memory.readings]

    @property
    def left_out(self):
        return [reading.left_out for reading in self.memory.readings]

    @property
    def alerts(self):
        return [(alert.step, alert.note.kind) for alert in self.memory.alerts]

    @property
    def arrays(self):
        return sorted(path.stem for path in self.folder.glob("arrays/*"))

    @property
    def finite(self):
        """List the metrics that have a value at layer 1, by reading."""
        return [
            sorted(
                tag.partition("/")[0] for tag, x in reading.values.items()
                if tag.endswith("/layer_01") and math.isfinite(x)
            )
            for reading in self.memory.readings
        ]  # fmt: skip


EXTRA = "an extra pass of the model was made: if the model changes anything outside"
Event = int | Callable[[Watched], object]


@dataclass
class Scenario:
    """A row of a table.

    Attributes:
        events: Steps, and functions that take the `Watched`.
        shown: Steps of the readings that sinks get.
        options: Options of the monitor, and of `Watched`.
        said: Words of each message in the log, in order; there are no others.
        found: Expected values of other attributes of `Watched`.
        raises: The error that ends the run, and its words.
        read: Steps of the record in the end, if they are not those that were shown.
        elsewhere: Messages on ranks other than the first, which show and find nothing.
    """

    events: Sequence[Event]
    shown: Sequence[int]
    options: Mapping[str, Any] = field(default_factory=dict)
    said: Sequence[str] = ()
    found: Mapping[str, Any] = field(default_factory=dict)
    raises: tuple[type[BaseException], str] | None = None
    read: Sequence[int] | None = None
    elsewhere: Sequence[str] = ()


def step(number, *, force=False, inputs=None, **values):
    return lambda watched: watched.step(number, force=force, inputs=inputs, **values)


def log(number=None, **values):
    return lambda watched: watched.monitor.log(*[number] * (number is not None), **values)


def advance(number):
    return lambda watched: watched.monitor.advance(number)


def probe(number, inputs=None):
    return lambda watched: watched.monitor.probe(number, inputs)


def check(scenario: Scenario, folder: Path | None, caplog, *, is_first: bool = True) -> Watched:
    """Play a scenario, and hold what came of it against its row and the promises to all runs."""
    caplog.clear()
    if not is_first:
        scenario = replace(scenario, shown=(), found={}, said=scenario.elsewhere)
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(folder, patch, **scenario.options)
        before, random = fingerprint(watched.model), random_state()
        raises = scenario.raises
        with nullcontext() if raises is None else pytest.raises(raises[0], match=raises[1]):
            for event in scenario.events:
                event(watched) if callable(event) else watched.step(event)
            watched.monitor.close()
        watched.monitor.close()
    assert random_state() == random
    for name in OF_PROCESS:
        assert fingerprint(watched.model)[name] == before[name], name
    assert not any(map(sum, fingerprint(watched.model)["hooks"]))
    assert watched.shown == list(scenario.shown)
    assert watched.memory.closed == 1
    if watched.folder is not None and is_first:
        last = {reading.step: reading for reading in watched.memory.readings}
        steps = sorted(last) if scenario.read is None else scenario.read
        assert [reading.step for reading in watched.record] == list(steps)
        for reading in watched.record:
            assert reading.step not in last or reading.line() == last[reading.step].line()
    assert len(caplog.messages) == len(scenario.said), caplog.messages
    for expected, message in zip(scenario.said, caplog.messages, strict=True):
        assert expected in message
        assert "\n" not in message
    for name, expected in scenario.found.items():
        assert getattr(watched, name) == expected, name
    return watched
