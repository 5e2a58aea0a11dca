"""The monitor: `with monitor(step): model(x)`.

It connects planner, window, executor, record and sinks, and lets none of them end a run.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import platform
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from typing import Any, SupportsIndex, Unpack

import torch
from torch import nn

from geomon.capture import Window, derive_seed, extra_pass, find_anatomy
from geomon.capture.snapshot import Note, NotSeenError, Snapshot, explain_missing
from geomon.distributed import RankGroup, find_ranks, join_ranks
from geomon.metrics import Evaluator
from geomon.monitor.budget import Budget
from geomon.monitor.executor import ReadingExecutor
from geomon.monitor.jobs import ReadingJob
from geomon.monitor.options import (
    MonitorOptions,
    check_options,
    check_step,
    show_monitor_options,
)
from geomon.monitor.output import ReadingWriter, Warnings
from geomon.monitor.planner import ReadingPlanner
from geomon.monitor.reactions import Reactions
from geomon.monitor.schedule import Schedule, first_steps
from geomon.record import Record, read, tags

_NOTHING = nullcontext()  # what a step that is not due gets


@show_monitor_options
class Monitor:
    """Reads the geometry of a model's representations at scheduled steps.

    Args:
        model: Any module that contains a transformer.
    {options}
    """

    def __init__(self, model: nn.Module, **options: Unpack[MonitorOptions]) -> None:
        self._options = options = check_options(options, type(self).__name__)
        self._model = model
        self._anatomy = find_anatomy(model, options["blocks"])
        self._evaluator = Evaluator(options["metrics"], options["batches"], options["strict"])
        self._views = self._evaluator.views
        self._source = "inline" if options["probe"] is None else "probe"
        self._group = self._join_ranks() if options["gather"] else find_ranks()
        if options["budget"] is not None and self._group.members < self._group.size:
            raise ValueError(
                "a budget is one decision for all ranks, which they share where their rows are "
                "gathered: use gather=True, or budget=None"
            )
        self._warnings = Warnings(self._group, strict=options["strict"])
        record = self._make_record(options["directory"])
        self._writer = ReadingWriter(
            record, options["sinks"], self._warnings, sink_timeout=options["sink_timeout"]
        )
        self._reactions = Reactions(
            options["alerts"], options["on_phase"], options["on_alert"], self._warnings
        )
        self._record = record
        self._budget = Budget(options["budget"], options["tokens"])
        self._planner = ReadingPlanner(
            _guard_schedule(options["schedule"], self._warnings, strict=options["strict"]),
            self._budget, self._group, source=self._source,
            layers=len(self._anatomy.blocks) + 1,
        )  # fmt: skip
        self._executor = ReadingExecutor(self._budget, background=self._in_background())
        self._process = os.getpid()
        _close_at_exit(self)
        self._opened: tuple[Window, int] | None = None  # the window that is open, and its step
        self._checked = False  # whether the first window has been checked for what is missing
        self._published = False  # whether a reading has been

    def __call__(self, step: SupportsIndex, *, force: bool = False) -> AbstractContextManager[None]:
        """Return a context manager around the forward pass of a step; it does nothing if not due.

        With `probe` inputs, the extra pass runs when the context is entered and the forward pass
        itself is left alone.

        Args:
            step: Number of optimizer updates already in the weights.
            force: Whether to read whatever the schedule and the budget say (the last step of a
                run, say).

        Raises:
            TypeError: The step is no whole number.
            ValueError: The step is below 0.
        """
        with self._budget.charge():
            number = check_step(step)
            self.advance(number)
            if not self.is_due(number, source=self._source, force=force):
                return _NOTHING
            inline = self._source == "inline"
            return self._watching(number) if inline else self._probing(number)

    def advance(self, step: SupportsIndex) -> None:
        """Move to a step: measure what earlier steps left, and decide what is due.

        Args:
            step: Number of optimizer updates already in the weights.
        """
        number = check_step(step)
        self._sweep(number)
        with self._budget.charge(), self._warnings.guard():
            if not self._budget.begun:
                self._begin(number)
            if self._planner.advance(number):
                if self._executor.busy:
                    self._executor.advance()
                    self._publish_finished()
                self._planner.settle(busy=self._executor.busy)

    def charge(self) -> AbstractContextManager[None]:
        """Return a context manager whose time counts as geomon's (see `overhead`)."""
        return self._budget.charge()

    def resume(self, step: int) -> None:
        """Take up a training in which a monitor has watched before.

        Args:
            step: The last step that was watched. What is due between it and the next step is owed.
        """
        self._planner.resume(step)

    def is_due(self, step: int, *, source: str = "inline", force: bool = False) -> bool:
        """Whether a reading is to be made at the present step: due, paid for, and not made yet.

        Args:
            step: The step that `advance` has moved to.
            source: "inline" or "probe".
            force: Whether to read whatever the schedule and the budget say.
        """
        if source == "inline" and not self._takes_part():
            return False
        return self._planner.is_due(step, source, force=force)

    def probe(self, step: SupportsIndex, inputs: Any = None) -> None:
        """Read the geometry on fixed inputs in an extra pass, whatever the schedule and budget say.

        The pass runs without autograd, in eval mode, with the random state forked; every module's
        training flag is restored. With many ranks all run the pass (a sharded model hangs
        otherwise), on inputs that are the same for all: the rows are those of the first rank, and
        the layers are shared out to be measured.

        Args:
            step: Number of optimizer updates already in the weights.
            inputs: A tensor, a dict of keyword arguments, a tuple of arguments, or a function of
                the model; None takes the monitor's `probe`.

        Raises:
            TypeError: The step is no whole number.
            ValueError: There are no inputs, here or in the monitor, or the step is below 0.
        """
        number = check_step(step)
        inputs = self._options["probe"] if inputs is None else inputs
        if inputs is None:
            raise ValueError(
                "no inputs to probe: give them here, probe(step, inputs), or to the monitor, "
                "Monitor(model, probe=inputs)"
            )
        self.advance(number)
        if not self.is_due(number, source="probe", force=True):
            return
        # The same inputs, the same rows: readings then differ by the weights alone.
        window = self._window(self._options["seed"], rows=self._rows())

        def capture() -> Snapshot:
            self._opened = window, number
            extra_pass(self._model, inputs, window)
            return window.snapshot()

        self._read(number, "probe", capture, began=time.perf_counter())

    def close(self) -> None:
        """Finish what is being measured, and close record and sinks; may be called more than once.

        Where a program ends without it, it is called then.
        """
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        """Finish what is being measured, and record it."""
        self._sweep(None)
        self._executor.close()
        self._publish_finished()

    def __del__(self) -> None:
        # Sinks may be somebody else's too by now; what has been begun is recorded.
        if hasattr(self, "_executor") and self._process == os.getpid():
            with contextlib.suppress(Exception):  # a strict one raises, and nobody would catch it
                self._flush()

    @property
    def overhead(self) -> float:
        """Share of the time since the first step that geomon took; NaN before the first step."""
        return self._budget.overhead

    def affords(self, seconds: float) -> bool:
        """Whether more of geomon's time would stay within the budget.

        Args:
            seconds: The additional time.
        """
        return self._budget.affords(seconds)

    def affords_reading(self) -> bool:
        """Whether one more reading would stay within the budget, for all ranks; a collective.

        Callbacks ask before the last reading of a run, which they force.
        """
        affords = False
        with self._warnings.guard():
            affords = self._planner.affords_reading()
        return affords  # noqa: RET504  (False where the other ranks are lost)

    def modules_around_blocks(self) -> tuple[nn.Module, ...]:
        """The model and the modules in it that hold blocks: a training calls one of them."""
        blocks = [block.module for block in self._anatomy.blocks]
        inside = {module for block in blocks for module in block.modules()}
        return tuple(
            module
            for module in self._model.modules()
            if module not in inside and not inside.isdisjoint(module.modules())
        )

    # -- capturing -------------------------------------------------------------------------------

    @contextmanager
    def _watching(self, step: int) -> Iterator[None]:
        # Ranks sample different places; the first one's are those of a single process.
        place = (self._group.place,) if self._group.place else ()
        rows = self._group.rows_of(self._rows())
        window = self._window(self._options["seed"], step, *place, rows=rows)
        self._opened = window, step
        with window:
            yield
        self._read(step, "inline", window.snapshot, began=time.perf_counter() - window.seconds)

    @contextmanager
    def _probing(self, step: int) -> Iterator[None]:
        self.probe(step)
        yield

    def _sweep(self, step: int | None) -> None:
        """Close a window that Ctrl-C has left open, half open or half closed."""
        if self._opened is None:
            return
        window, opened_at = self._opened
        if opened_at != step or not window.settled:
            window.close()
            self._opened = None

    def _window(self, *seed_of: object, rows: int) -> Window:
        return Window(
            self._anatomy, self._views, rows=rows, seed=derive_seed(*seed_of),
            max_mb=self._options["max_capture_mb"], extra_layers=self._options["extra_layers"],
        )  # fmt: skip

    def _rows(self) -> int:
        """Number of rows of hidden states that a reading keeps, over all splits and ranks."""
        return self._budget.rows * self._options["batches"]

    def _takes_part(self) -> bool:
        """Whether this rank's training forward is watched."""
        return self._group.connected or self._group.rank == 0

    # -- from a snapshot to a reading ------------------------------------------------------------

    def _read(
        self, step: int, source: str, capture: Callable[[], Snapshot], *, began: float
    ) -> None:
        """Make a reading of what is captured, or begin to."""
        self._planner.mark_read(step, source)
        with self._warnings.guard():
            job = self._make_job(step, source, capture, began)
            if job is not None:
                self._executor.submit(job)
        self._publish_finished()

    def _make_job(
        self, step: int, source: str, capture: Callable[[], Snapshot], began: float
    ) -> ReadingJob | None:
        """The job of measuring a snapshot; None where another rank measures or has measured it."""
        snapshot: Snapshot | Exception
        try:
            snapshot = self._check(capture())
        except Exception as error:  # several ranks fail together
            snapshot = error
        seconds = time.perf_counter() - began
        if not self._takes_part() or self._planner.is_recorded(step, source):
            if isinstance(snapshot, Exception):
                raise snapshot
            return None
        try:
            return ReadingJob(
                step, source, snapshot, self._group, self._evaluator,
                tokens=self._options["tokens"], rows=self._budget.rows, seconds=seconds,
            )  # fmt: skip
        finally:
            self._budget.spend_capture(time.perf_counter() - began)

    def _check(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot; if it is the first, warn of what was expected in it and is missing."""
        if snapshot.is_empty:  # there is nothing to check, and nothing to record if all ranks' are
            return snapshot
        missing = None if self._checked else explain_missing(snapshot, self._views)
        if missing is not None and self._options["strict"]:
            raise NotSeenError(missing)
        if missing is not None:
            self._warnings.warn(missing, kind="not seen")
        self._checked = True
        return snapshot

    def _publish_finished(self) -> None:
        """Record and show the readings that are finished."""
        while (job := self._executor.take_finished()) is not None:
            with self._warnings.guard():
                self._publish(job)

    def _publish(self, job: ReadingJob) -> None:
        began = time.perf_counter()
        reading = job.result()
        if reading is None:
            return
        notes = [*self._run_notes(), *job.notes]
        values = dict(reading.values)
        if self._published:  # before the first reading hardly any training time has passed
            values[tags.OVERHEAD] = self.overhead
        self._published = True
        reading = replace(reading, values=values, notes=[note.text for note in notes])
        notes += self._reactions.find_alerts(reading)
        for note in notes:
            self._warnings.warn(note.text, kind=note.kind)
        reading = replace(reading, notes=[note.text for note in notes])
        self._writer.write(reading)
        self._budget.spend(time.perf_counter() - began)
        self._reactions.call(reading)

    # -- the run ---------------------------------------------------------------------------------

    def _run_notes(self) -> list[Note]:
        """Notes that hold for every reading."""
        reason = self._group.why_not_connected
        if reason is None:
            return []
        text = f"rows of the ranks are not gathered, those of rank 0 are measured: {reason}"
        return [Note("not gathered", text)]

    def _join_ranks(self) -> RankGroup:
        """The ranks, connected if all were built with the same options; a collective."""
        options = self._options
        compared = {
            "schedule": first_steps(options["schedule"]),
            "metrics": list(options["metrics"]),
            "probe": options["probe"] is not None,
            "layers": [block.name for block in self._anatomy.blocks],
            **{name: options[name] for name in ("tokens", "batches", "budget", "seed")},
        }
        return join_ranks(self._model, compared, timeout=options["rank_timeout"])

    def _make_record(self, directory: str | os.PathLike[str] | None) -> Record | None:
        """The record, on the first rank; where it cannot be made all ranks raise the same."""
        record: Record | None = None
        failure: ValueError | None = None
        if directory is not None and self._group.rank == 0:
            try:
                record = Record(directory)
            except ValueError as error:
                failure = error
        with self._warnings.guard():
            failure = self._group.broadcast(failure)
        if failure is not None:
            raise failure
        return record

    def _begin(self, step: int) -> None:
        """Start at the first step: learn what the record holds already."""
        self._budget.begin()
        recorded = self._writer.begin(step, self._describe())
        if recorded and self._record is not None and self._reactions.wants_history:
            path = self._record.path
            self._warnings.attempt(
                lambda: self._reactions.recall(r for r in read(path) if r.step < step),
                f"{path} could not be read: phases and alerts begin anew",
            )
        self._planner.skip_recorded(recorded)
        self._planner.skip_recorded(self._group.broadcast(recorded))

    def _describe(self) -> dict[str, Any]:
        """The description of the run, for the record."""
        options = self._options
        return {
            "geomon": version("geomon"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "model": type(self._model).__name__,
            "parameters": sum(
                parameter.numel()
                for parameter in self._model.parameters()
                if not nn.parameter.is_lazy(parameter)
            ),
            "layers": [block.name for block in self._anatomy.blocks],
            "metrics": list(options["metrics"]),
            "schedule": repr(options["schedule"]),
            "tokens": options["tokens"],
            "batches": options["batches"],
            "seed": options["seed"],
            "world_size": self._group.size,
            "gather": self._group.connected,
        }

    def _in_background(self) -> bool:
        """Whether rows are measured in the background."""
        wanted = self._options["background"]
        device = next((p.device.type for p in self._model.parameters()), "cpu")
        chosen = device not in ("cpu", "meta") if wanted is None else wanted
        return chosen and not self._group.connected


_UNCLOSED: "weakref.WeakSet[Monitor]" = weakref.WeakSet()


def _close_at_exit(monitor: Monitor) -> None:
    """Have a monitor closed when the program ends, if it still exists then.

    A process of multiprocessing ends without the handlers of atexit, and calls finalizers.
    """
    if not any(other._process == monitor._process for other in _UNCLOSED):
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, _close_all, exitpriority=0)
    _UNCLOSED.add(monitor)


def _close_all() -> None:
    for monitor in list(_UNCLOSED):
        if monitor._process == os.getpid():  # a fork has copies of what its parent records
            monitor.close()


def _guard_schedule(schedule: Schedule | None, warnings: Warnings, *, strict: bool) -> Schedule:
    """A schedule that has no reading at the steps where the given one raises."""

    def guarded(step: int) -> bool:
        try:
            return schedule is not None and bool(schedule(step))
        except Exception as error:
            if strict:
                raise
            warnings.warn(
                f"the schedule failed at step {step}, and nothing is read where it does: "
                f"{type(error).__name__}: {error}",
                kind="schedule",
            )
            return False

    return guarded


__all__ = ["Monitor"]
