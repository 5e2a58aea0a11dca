"""The monitor: `with monitor(step): model(x)`.

It conducts the other parts: the planner decides when, windows see passes, the executor measures
them, and the outbox records and shows finished readings. None of them ends a run. The monitor's
verbs (enter, log, probe, close) are the only place that charges time and guards errors.
"""

import atexit
import contextlib
import functools
import importlib
import math
import multiprocessing
import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from html import escape
from pathlib import Path
from typing import Any, Self, SupportsIndex, Unpack

from geomon.analysis import Inputs
from geomon.capture import (
    ModelParts,
    NotSeenError,
    Snapshot,
    in_cuda_graph,
    without_modes,
)
from geomon.distributed import (
    RankFailedError,
    RankGroup,
    RanksLostError,
)
from geomon.failures import failures, ignored
from geomon.metrics import in_modes
from geomon.monitor.device import MeasuringDevice
from geomon.monitor.executor import ReadingExecutor
from geomon.monitor.held_out import HeldOut, is_loader
from geomon.monitor.job_factory import CHECK_ROWS, JobFactory
from geomon.monitor.jobs import ReadingJob
from geomon.monitor.model_blocks import ModelBlocks
from geomon.monitor.options import (
    MonitorOptions,
    check_options,
    check_step,
    documented,
)
from geomon.monitor.outbox import Outbox
from geomon.monitor.passes import Passes
from geomon.monitor.planner import Account, Due
from geomon.monitor.probe_loss import ProbeLoss
from geomon.monitor.run_description import describe_run
from geomon.monitor.setup import connect, make_planner, open_record
from geomon.monitor.warnings import Warnings
from geomon.monitor.weight_looks import WeightLooks
from geomon.note import Note
from geomon.note_kinds import NoteKind
from geomon.record import LOSS, Reading, Readings, Sink, printable, read, text_of, with_noun

_RATES = {"lr", "learning_rate"}  # names of learning rates among logged values
_NOTHING = nullcontext()  # returned for a step that is not due
# Modules that the first reading would otherwise load inside a step, which takes a second.
_LOADED_FIRST = ("torch._dynamo", "faiss", "scipy.special")


@documented(MonitorOptions)
class Monitor:
    """Reads the geometry of a model's representations while it trains.

    Args:
        model: Any module that contains a transformer. In a pipeline of
            `torch.distributed.pipelining`, the schedule or the stages that this rank runs.
    {options}

    Raises:
        TypeError: If an argument does not exist, or a hook is not callable.
        ValueError: If the model has no blocks, a metric reads an unknown view, the schedule never
            fires, an alert does not exist, a number is out of range, or the directory cannot be
            written.
    """

    _process: int | None = None  # process of the last step: a fork leaves its parent's work alone

    def __init__(self, model: Any, **options: Unpack[MonitorOptions]) -> None:
        self._options = options = check_options(options, type(self).__name__)
        parts = ModelParts(model)
        if options["probe"] is not None:
            parts.check_probe(options["probe"])
        self._jobs = JobFactory(options, parts.root)
        anatomy = parts.find_anatomy(options["blocks"])
        self._group = connect(options, parts, anatomy)
        self.warnings = Warnings(self._group, strict=options["strict"])
        self.account = Account()
        in_background = self._jobs.suit_background(options["background"], self._group)
        loss = options["probe_loss"]
        self.passes = Passes(
            ModelBlocks(parts, self._group, options["blocks"], anatomy), options,
            views=self._jobs.evaluator.views, group=self._group, device=self._jobs.device,
            in_background=in_background, account=self.account,
            loss=None if loss is None else ProbeLoss(loss, self.warnings),
        )  # fmt: skip
        self.planner = make_planner(
            options, self._group, self.account, self.warnings,
            can_check=bool(self._jobs.quick_evaluator.metrics),
        )  # fmt: skip
        record = open_record(options["directory"], self._group, self.warnings)
        way = options["background"] if isinstance(options["background"], str) else True
        self._executor = ReadingExecutor(background=in_background and way)
        self.outbox = Outbox(
            record, options, self._executor, self.planner, self.account, self.warnings,
            functools.partial(_notes_of_run, self.passes, self._group, self._jobs.device),
        )  # fmt: skip
        self._weights = WeightLooks(
            self.passes.blocks, self.outbox.alerts, self.warnings,
            is_alerted=self._group.rank == 0 and "unmoved_weights" in options["alerts"],
            is_measured="weight_moves" in self._jobs.evaluator.views,
        )  # fmt: skip
        self._process = os.getpid()
        self._has_failed = False  # whether it was closed because of an error
        _close_at_exit(self)

    # -- verbs -------------------------------------------------------------------------------------

    def __call__(self, step: SupportsIndex, *, force: bool = False) -> AbstractContextManager[None]:
        """Return a context manager around the forward pass of a step; it does nothing if not due.

        With `probe` inputs, the extra pass runs when the context is entered, and the forward pass
        itself is left alone. While a CUDA graph is captured, no step is due.

        Args:
            step: Number of optimizer updates already in the weights.
            force: Whether to read regardless of schedule and budget, for example at the last step
                of a run. Defaults to False.

        Raises:
            TypeError: If the step is not a whole number.
            ValueError: If the step is below 0.
        """
        if in_cuda_graph():
            return _NOTHING
        with self.charge():
            self.advance(step)
            due = self._due(self.planner.source, force=force)
            if due is Due.NOTHING:
                return _NOTHING
            number = check_step(step)
            self._weights.look(number)
            if self.planner.source == "probe":
                return self._probing(number)
            return self._watching(number) if due is Due.READING else self._checking(number)

    def advance(self, step: SupportsIndex) -> None:
        """Move to a step: publish what earlier steps left, and decide what is due.

        Args:
            step: Number of optimizer updates already in the weights.

        Raises:
            TypeError: If the step is not a whole number.
            ValueError: If the step is below 0, or if another monitor of this program, which was
                made later and is not closed, records in the same folder.
        """
        number = check_step(step)
        if number == self.planner.step and self._is_own():
            self.passes.sweep(number)
            return
        with self.charge():
            if not self._is_own():
                self._process = os.getpid()
                self._executor.forget()
            self.passes.sweep(number)
            if self.planner.step is None:
                self.outbox.check_alone()
            self.outbox.move_to(number)
            with self.warnings.guard():
                if self.planner.step is None or number < self.planner.step:
                    self._begin(number)
                self._group.begin_reading()
                self._executor.resume()
                self.outbox.publish()
                self.planner.advance(number, busy=self._executor.busy)
                if (note := self.planner.explain_few()) is not None:
                    self.outbox.note([note])
                    self.warnings.say(note.words())

    def log(self, step: SupportsIndex | None = None, /, **values: Any) -> None:
        """Put values into the reading of a step as `training/<name>`, such as the loss.

        At steps that are not read this does nothing. Pass values inside the `with`, or before it
        with their step, `log(step, loss=loss)`. A reading waits until the next step for the names
        of the option `log`, so their values may come after the `with`. A tensor is copied on its
        device, without its graph, and read when the reading is recorded. With several ranks, the
        first rank's values are recorded.

        Args:
            step: Number of optimizer updates already in the weights. Defaults to the last step that
                the monitor was called with.
            values: Numbers, or tensors with one element; None for a missing value.

        Raises:
            TypeError: If the step is not a whole number.
            ValueError: If the step is below 0, or None before the first one.
        """
        number = self.planner.step if step is None else check_step(step)
        if number is None:
            raise ValueError(
                "no step to log values for: pass it, log(step, loss=loss), or log inside "
                "`with monitor(step)`"
            )
        if self._is_own() and not in_cuda_graph():
            with self.charge():
                self._watch_losses(number, values)
                for name in values.keys() & _RATES:
                    self.watch_rate(number, values[name])
                self.outbox.log(number, values, watched=self.passes.step == number)

    def probe(self, step: SupportsIndex, inputs: Any = None) -> None:
        """Read the geometry on fixed inputs in an extra pass, regardless of schedule and budget.

        The pass runs without autograd, in eval mode, with the random state forked; every module's
        training flag is restored. State that the model keeps outside of its modules (a global list,
        a Python generator, a counter) cannot be restored. With several ranks, all run the pass (a
        sharded model would hang otherwise) on the same inputs: the first rank's rows are measured,
        and the ranks share the layers. If the monitor's `probe` is a loader, each rank reads
        batches of its own.

        Args:
            step: Number of optimizer updates already in the weights.
            inputs: A tensor, a dict of keyword arguments, a tuple of arguments, or a function of
                the model. Defaults to the monitor's `probe`.

        Raises:
            TypeError: If the step is not a whole number.
            ValueError: If neither the call nor the monitor has inputs, if a pipeline cannot take
                them, or if the step is below 0.
        """
        inputs = self._options["probe"] if inputs is None else inputs
        if inputs is None:
            raise ValueError(
                "no inputs to probe: pass them here, probe(step, inputs), or to the monitor, "
                "Monitor(model, probe=inputs)"
            )
        if is_loader(inputs):
            raise ValueError(
                "a loader is drawn from only once, so that readings can be compared: pass it to "
                "the monitor, Monitor(model, probe=loader), and call probe(step)"
            )
        self.passes.blocks.model.check_probe(inputs)
        with self.charge():
            self.advance(step)
            number = check_step(step)
            if self._due("probe", force=True) is Due.READING:
                self._weights.look(number)
                self._read(
                    number, "probe", lambda: self.passes.run(inputs, number),
                    began=time.perf_counter(), same_inputs=not isinstance(inputs, HeldOut),
                )  # fmt: skip

    def close(self) -> None:
        """Finish what is being measured, and close record and sinks; may be called more than once.

        If it is not called, it runs when the program ends.
        """
        if self._is_own():
            with self.charge():
                self._flush()
                self._say_what_is_missing()
                self.outbox.close()

    def __enter__(self) -> Self:
        """Return the monitor, which is closed at the end of the `with`."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the monitor, however the `with` ends."""
        self.close()

    def __del__(self) -> None:
        # Sinks may be shared with others, so only started readings are finished and recorded.
        if self._is_own():
            with ignored():  # nobody would catch the error of a strict one
                self._flush()

    # -- what is known -----------------------------------------------------------------------------

    def is_due(self, step: int, *, source: str = "inline", force: bool = False) -> bool:
        """Return whether the present step is looked at, by a reading or a check.

        Args:
            step: The step that `advance` has moved to.
            source: "inline" or "probe". Defaults to "inline".
            force: Whether to read regardless of schedule and budget. Defaults to False.
        """
        return step == self.planner.step and self._due(source, force=force) is not Due.NOTHING

    def lacks_values(self, step: int) -> bool:
        """Return whether a reading of a step waits for values of the option `log`.

        Args:
            step: Number of optimizer updates already in the weights.
        """
        return self.outbox.lacks_values(step)

    def watch_loss(self, step: int, loss: Any) -> None:
        """Raise an alert if the loss jumps or is not finite, whether or not its step is read.

        `log` does so itself. It never waits for a device.

        Args:
            step: Number of optimizer updates already in the weights.
            loss: A number, or a tensor with one element; None if it is unknown.
        """
        if self._is_own() and not in_cuda_graph():
            with self.charge():
                self._watch_losses(step, {LOSS: loss})

    def watch_rate(self, step: int, rate: Any) -> None:
        """Note the learning rate of a step, over which the size of updates is watched.

        `log` does so itself if a value is called "lr" or "learning_rate".

        Args:
            step: Number of optimizer updates already in the weights.
            rate: The learning rate; anything but a number is passed over.
        """
        if isinstance(rate, int | float) and math.isfinite(rate):
            self._weights.note_rate(step, float(rate))

    def expect_end(self, step: int | None) -> None:
        """Announce the length of the run, so that readings are spread over all of it.

        Args:
            step: The last step of the run, or None if it is not known.
        """
        self.planner.purse.end = step

    def add_loggers(self, sinks: Sequence[Sink]) -> None:
        """Add sinks that are called in the training's own thread, without a time limit.

        Args:
            sinks: Sinks that write to loggers of the training.
        """
        self.outbox.add_loggers(sinks)

    def charge(self) -> AbstractContextManager[None]:
        """Return a context manager for geomon's own work: it counts time, and hides operations."""
        charge = self.account.charge()
        return _unseen(charge) if in_modes() else charge

    @property
    def overhead(self) -> float:
        """Share of the time since the first step that geomon took; NaN before the first step."""
        return self.account.overhead

    @property
    def latest(self) -> Reading | None:
        """The last recorded reading; None before the first, and on other ranks."""
        return self.outbox.latest

    @property
    def path(self) -> Path | None:
        """Path of the record; None if nothing is recorded, and on other ranks."""
        return self.outbox.path

    def describe(self) -> dict[str, Any]:
        """Describe the run for its record: versions, model, layers, metrics, numbers of rows."""
        return describe_run(
            self._options, self.passes.blocks.model, self._block_names,
            self._jobs.evaluator.metrics, self._group, self._jobs.device,
        )  # fmt: skip

    def __repr__(self) -> str:
        options = self._options
        parts = [
            self.passes.blocks.model.name,
            with_noun(len(self._block_names), "block"),
            with_noun(len(options["metrics"]), "metric"),
            f"schedule={text_of(options['schedule'])}",
            "no record" if self.path is None else f"record={str(self.path)!r}",
            "nothing read yet" if self.latest is None else f"last step {self.latest.step:,}",
        ]
        return printable(f"Monitor({', '.join(parts)})")

    def _repr_html_(self) -> str:
        """Show the recorded readings so far in a notebook."""
        recorded = Readings([], [] if self.latest is None else [self.latest])
        if self.path is not None and self.path.is_file():
            recorded = read(self.path)
        return f"<p>{escape(repr(self))}</p>{recorded._repr_html_()}"

    # -- from a pass to a reading ------------------------------------------------------------------

    def _due(self, source: str, *, force: bool) -> Due:
        if source == "inline" and not self._takes_part():
            return Due.NOTHING
        return self.planner.due(source, force=force)

    def _takes_part(self) -> bool:
        """Whether this rank's training forward is watched."""
        return self._group.connected or self._group.rank == 0

    def _is_own(self) -> bool:
        """Whether this process made the last step; a fork has copies of its parent's monitors."""
        return self._process == os.getpid()

    @contextmanager
    def _watching(self, step: int) -> Iterator[None]:
        with self.charge():
            window = self.passes.open(step)
        with window:
            yield
        if not self._is_own():
            return
        with self.charge():
            began = time.perf_counter() - window.seconds
            inputs, window.inputs = window.inputs, None  # not kept longer than the reading
            capture = functools.partial(self.passes.snapshots, window)
            self._read(step, "inline", capture, began=began, inputs=inputs)

    @contextmanager
    def _checking(self, step: int) -> Iterator[None]:
        """Look at a few values of this rank's rows in the training's forward pass."""
        with self.charge():
            window = self.passes.open_for_check(step, self._jobs.quick_evaluator.views, CHECK_ROWS)
        with window:
            yield
        if not self._is_own():
            return
        with self.charge():
            began = time.perf_counter() - window.seconds
            inputs, window.inputs = window.inputs, None
            with self.warnings.guard():
                passes = self.passes.snapshots(window)
                self._say_what_stays_changed()
                if passes[0].is_empty:
                    self.planner.checks.stop()  # compiled code hides the blocks
                    return
                job = self._jobs.check(step, inputs=inputs, moves=self._weights.moves)
                job.begin(passes, window.seconds)
                self._executor.submit(job)
            self.planner.checks.mark(time.perf_counter() - began)
            self.outbox.publish()

    @contextmanager
    def _probing(self, step: int) -> Iterator[None]:
        self.outbox.open_step = step
        try:
            self.probe(step)
            yield  # values logged here belong to this step
        finally:
            self.outbox.open_step = None
            if self._is_own():
                with self.charge():
                    self.outbox.publish()

    def _watch_losses(self, step: int, values: Mapping[str, Any]) -> None:
        """Look for a loss that jumps or is not finite, on the first rank."""
        if self._group.rank == 0:
            self.warnings.attempt(
                lambda: self.outbox.alerts.watch_losses(step, values),
                "losses are not watched",
                once=True,
            )

    def _read(
        self,
        step: int,
        source: str,
        capture: Callable[[], list[Snapshot]],
        *,
        began: float,
        same_inputs: bool = False,
        inputs: Inputs | None = None,
    ) -> None:
        """Measure what was captured, or start a thread that does."""
        self.planner.mark_read(source)
        job = self._jobs.reading(
            step, source, self._group, same_inputs=same_inputs, inputs=inputs,
            moves=self._weights.moves,
        )  # fmt: skip
        with self.warnings.guard():
            if self._begin_job(job, capture, began):
                self._executor.submit(job)  # the training may wait for an earlier reading
        self.outbox.publish()

    def _begin_job(
        self, job: ReadingJob, capture: Callable[[], list[Snapshot]], began: float
    ) -> bool:
        """Begin the job with the captured passes; return whether this rank measures it."""
        passes: list[Snapshot] | Exception
        left_out = self.account.left_out
        try:
            passes = capture()
            self._verify(passes[0])
        except (RanksLostError, RankFailedError):  # raised on all ranks
            raise
        except failures() as error:  # several ranks must fail together
            passes = error
        self._say_what_stays_changed()
        seconds = time.perf_counter() - began - (self.account.left_out - left_out)
        if not self._takes_part():
            if isinstance(passes, Exception):
                raise passes
            return False
        job.begin(passes, seconds)
        return True

    def _verify(self, snapshot: Snapshot) -> None:
        """Warn about views that are missing although the first snapshot should have them."""
        missing = self.passes.missing_views(snapshot)
        if missing is not None:
            if self._options["strict"]:
                raise NotSeenError(missing)
            self.warnings.warn(missing)

    def _say_what_stays_changed(self) -> None:
        """Say once in a run that an extra pass was made, whether or not it failed."""
        note = self.passes.what_stays_changed
        if note is not None and self.warnings.is_new(note.key):
            self.warnings.warn(note.words())
            self.outbox.note([note])

    def _flush(self) -> None:
        """Finish what is being measured, and record it."""
        self.passes.sweep(None)
        self._executor.finish()
        self._executor.close()
        self.outbox.publish(wait=False)

    # -- the run ---------------------------------------------------------------------------------

    def _begin(self, step: int) -> None:
        """Start at the first step, or go back to an earlier one, and read what the record holds."""
        if self.planner.step is not None:
            self.planner.begin(step, self.outbox.begin(step, self.describe()))
            return
        for name in _LOADED_FIRST:
            with contextlib.suppress(ImportError):  # reported by the code that needs it
                importlib.import_module(name)
        self.account.begin()
        earlier = self.outbox.begin(step, self.describe())
        if self.path is not None:
            folder = self.path.parent
            self.warnings.say(f"the record is {self.path}; to see it: geomon watch {folder}")
        try:
            earlier = self._group.broadcast(earlier)
        finally:  # if the first rank is alone from now on, it still knows its record
            self.planner.begin(step, earlier)

    def _say_what_is_missing(self) -> None:
        """Warn if no step came although nothing failed, or if readings were left out."""
        self._has_failed = self._has_failed or sys.exception() is not None
        if self.planner.step is None and self._takes_part() and not self._has_failed:
            self.warnings.warn(
                "the monitor was given no step, so nothing was read: write `with monitor(step):` "
                "around the forward pass (`with monitor:` only closes it at its end)"
            )
        if left_out := self.planner.left_out:
            due = left_out + self.planner.purse.made
            self.warnings.warn(f"the budget left out {left_out} of {due} readings that were due")

    @property
    def _block_names(self) -> list[str]:
        """Names of the blocks of the whole model, as far as they are known."""
        if self.passes.blocks.model.stages and self._group.connected:
            return self._group.mesh.block_names()
        return self.passes.blocks.names


@contextmanager
def _unseen(charge: AbstractContextManager[None]) -> Iterator[None]:
    """Hide what is charged from the training's torch modes, which would count or change it."""
    with charge, without_modes():
        yield


def _notes_of_run(passes: Passes, group: RankGroup, device: MeasuringDevice) -> list[Note]:
    """Return the notes that hold for every reading."""
    notes = passes.blocks.notes()
    if (reason := group.why_not_connected) is not None:
        text = "rows are not gathered, and only the rows of rank 0 are measured: {reason}"
        notes.append(Note(NoteKind.NOT_GATHERED, text, numbers={"reason": reason}))
    if not group.connected:
        notes += group.own.notes_alone()
    if (reason := device.why_host) is not None:
        text = "measured on the host: {reason}"
        notes.append(Note(NoteKind.ON_HOST, text, numbers={"reason": reason}))
    return notes


# Open monitors, with the process that opened each.
_OPEN: "weakref.WeakKeyDictionary[Monitor, int]" = weakref.WeakKeyDictionary()


def _close_at_exit(monitor: Monitor) -> None:
    """Close a monitor when the program ends, if it still exists then.

    A process of multiprocessing skips atexit handlers, but calls finalizers.
    """
    if os.getpid() not in _OPEN.values():
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, _close_all, exitpriority=0)
    _OPEN[monitor] = os.getpid()


def _close_all() -> None:
    for monitor in list(_OPEN):
        monitor.close()


__all__ = ["Monitor"]
