"""Runs five trainings once each, and from their middle on with each fault and each change.

Each run after the common first steps is a fork of their process. Three monitors watch it: one reads
every step, two look as a run of this length plans it at the costs of two sizes of batches.
"""

import json
import math
import os
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from geomon import Memory, Monitor, Reading, Readings, read
from geomon.analysis import WATCHED
from geomon.record import RaisedAlert, Record
from recipes.enwik8.text import Text
from recipes.faults.kinds import EachStep, nothing
from recipes.faults.training import BATCHES, EACH_STEP, make_step, plan, quiet
from recipes.faults.trainings import LENGTH, Task, new_task
from recipes.faults.unseen import CELLS, FAULT_STEP, WATCHED_STEPS, Cell
from recipes.study.files import write_json
from recipes.study.training import begin_training, finish_training, is_finished, without_margins

_OF_ALERTS = (*WATCHED, "effective_rank", "massive_share")
# From this step on every step is read by the first monitor.
_FIRST_READ = 150
# Folder of the records of the common steps, and file of the losses.
PREFIX, _LOSSES = "first steps", "losses.json"
# Losses that are so far apart from those without the fault are harm, in nats; and the last steps
# whose mean loss is compared.
HARM, _LAST = 0.05, 30


class _Kept(Memory):
    """Keeps what a monitor shows, to be written as a record by the process that ends the run."""

    def __init__(self) -> None:
        super().__init__()
        self.description: Mapping[str, Any] = {}

    def describe(self, description: Mapping[str, Any]) -> None:
        """Receive the description of the run."""
        self.description = description

    def save(self, folder: Path, first: int) -> None:
        """Write what came from a step on as a record."""
        record = Record(folder)
        record.begin(first, self.description)
        lines: list[Reading | RaisedAlert] = [*self.readings, *self.alerts]
        for line in sorted(lines, key=lambda line: line.step):
            if line.step >= first:
                if isinstance(line, Reading):
                    record.write(line)
                else:
                    record.write_alert(line)
        record.close()


Watches = dict[str, tuple[Monitor, _Kept]]  # by the name of the record


def _monitors_of(task: Task) -> Watches:
    """Attach monitors that look at every step, and as each plan does."""
    looks: dict[str, tuple[Collection[int], Collection[int]]] = {
        EACH_STEP: (range(_FIRST_READ, LENGTH), ())
    }
    looks |= {name: plan(costs, LENGTH) for name, costs in BATCHES.items()}
    found = {}
    for name, (read_at, checked_at) in looks.items():
        kept = _Kept()
        monitor = Monitor(
            task.model, metrics=without_margins(*_OF_ALERTS), schedule=read_at.__contains__,
            checks=checked_at.__contains__ if checked_at else None, seed=0, background=False,
            budget=None, log=("loss", "gradient_norm"), arrays=False, sinks=[kept], directory=None,
        )  # fmt: skip
        found[name] = monitor, kept
    return found


def _train(
    task: Task,
    monitors: Sequence[Monitor],
    steps: range,
    generator: torch.Generator,
    each_step: EachStep = nothing,
) -> list[float]:
    """Make some steps, and return their losses."""
    losses = []
    for step in steps:
        each_step(step - FAULT_STEP)
        loss, norm = make_step(task, monitors, step, generator)
        losses.append(loss)
        for monitor in monitors:
            monitor.log(step, loss=loss, gradient_norm=norm, lr=task.rate(step))
    return losses


def run(training: str, given: Text, folder: Path, cells: Sequence[Cell] = CELLS) -> None:
    """Make the runs of a training one after the other; complete ones in the folder are kept.

    Args:
        training: Name of the training.
        given: Text of those that need one.
        folder: Folder of all runs.
        cells: Runs; only the runs of this training are made.
    """
    description = {"training": training, "sha256": given.sha256()}
    places = {cell: folder / training / cell.what for cell in cells if cell.training == training}
    missing = [cell for cell, place in places.items() if begin_training(place, description)]
    if not missing:
        return
    with quiet():
        task = new_task(training, given)
        watches = _monitors_of(task)
        generator = torch.Generator().manual_seed(0)
        monitors = [monitor for monitor, _ in watches.values()]
        losses = _train(task, monitors, range(FAULT_STEP), generator)
        first = folder / training / PREFIX
        if begin_training(first, description):
            write_json(first / _LOSSES, losses)
            _in_fork(partial(_save, watches, first, 0))
            finish_training(first, description)
        for cell in missing:
            _in_fork(partial(_finish, cell, task, watches, generator, places[cell]))
            finish_training(places[cell], description)


def _in_fork(function: Callable[[], object]) -> None:
    """Call a function in a fork, and wait for it.

    Raises:
        RuntimeError: If the function raised; its traceback is printed.
    """
    process = os.fork()
    if not process:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(process, 0)[1]:
        raise RuntimeError("a run failed: its error is printed above")


def _finish(
    cell: Cell, task: Task, watches: Watches, generator: torch.Generator, place: Path
) -> None:
    """Make the steps from the fault or the change on, and write what was seen."""
    each_step = cell.plant(task)
    steps = WATCHED_STEPS if cell.fault else LENGTH - FAULT_STEP
    monitors = [monitor for monitor, _ in watches.values()]
    middle, end = FAULT_STEP + WATCHED_STEPS, FAULT_STEP + steps
    losses = _train(task, monitors, range(FAULT_STEP, middle), generator, each_step)
    held_out = task.held_out_loss()
    losses += _train(task, monitors, range(middle, end), generator, each_step)
    _save(watches, place, FAULT_STEP)
    write_json(place / _LOSSES, {"losses": losses, "held_out": held_out})


def _save(watches: Watches, place: Path, first: int) -> None:
    for name, (monitor, kept) in watches.items():
        monitor.close()
        kept.save(place / name, first)


# -- what was noticed ------------------------------------------------------------------------------


class Seen(NamedTuple):
    """An alert.

    Attributes:
        step: Its step.
        place: Stack and depth of the layer that it names first; None if it names none.
        kind: Name of its rule.
        words: Its sentence.
    """

    step: int
    place: tuple[str, int] | None
    kind: str
    words: str


@dataclass(frozen=True)
class Ran:
    """A run with what its records hold.

    Attributes:
        cell: The run.
        seen: Alerts from the fault or the change on, by record.
        losses: Losses of the steps from there on.
        held_out: Loss of a batch that no step was made on, after 110 steps.
    """

    cell: Cell
    seen: dict[str, list[Seen]]
    losses: list[float]
    held_out: float

    def delay(self, record: str, within: int = WATCHED_STEPS) -> int | None:
        """Return the steps from the fault to the first alert; None if none came."""
        found = (one.step - FAULT_STEP for one in self.seen[record])
        return next((delay for delay in found if delay < within), None)

    def is_located(self, record: str, within: int = WATCHED_STEPS) -> bool | None:
        """Whether the first layer that alerts named is the block's; None if none was named."""
        near = [one for one in self.seen[record] if one.step - FAULT_STEP < within]
        named = next((one.place for one in near if one.place), None)
        fault = self.cell.fault
        if fault is None or not fault.local or named is None:
            return None
        return named == self.cell.place

    def harm(self, twin: "Ran") -> float:
        """Distance of the losses from those without the fault, the larger of the two."""
        last = slice(WATCHED_STEPS - _LAST, WATCHED_STEPS)
        means = [sum(ran.losses[last]) / _LAST for ran in (self, twin)]
        apart = abs(means[0] - means[1]), abs(self.held_out - twin.held_out)
        return max(math.inf if math.isnan(each) else each for each in apart)


def read_runs(folder: Path, cells: Sequence[Cell] = CELLS) -> list[Ran]:
    """Read all complete runs of a folder."""
    return [_read(cell, place) for cell in cells if is_finished(place := folder / cell.folder)]


def _read(cell: Cell, place: Path) -> Ran:
    seen = {name: seen_in(read(place / name)) for name in (EACH_STEP, *BATCHES)}
    found = json.loads((place / _LOSSES).read_text())
    losses = [math.nan if loss is None else loss for loss in found["losses"]]
    return Ran(cell, seen, losses, found["held_out"])


def seen_in(readings: Readings) -> list[Seen]:
    """List the alerts of a record."""
    found = []
    for alert in readings.alerts:
        note = alert.note
        layers = [*note.layers, *(layer for layer, _ in note.heads)]
        place = (note.stack, layers[0]) if layers else None
        found.append(Seen(alert.step, place, note.kind, note.words()))
    return found
