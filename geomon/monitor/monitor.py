"""The monitor: `with monitor(step): model(x)`.

It conducts: the planner says when, passes are seen through windows, the executor measures them, the
publisher records and shows what is finished. None of them ends a run.
"""

import contextlib
import dataclasses
import functools
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, SupportsIndex, Unpack

import msgspec
import torch
from torch import nn

from geomon.analysis.alerts import Inputs
from geomon.analysis.bands import WATCHED
from geomon.capture import Window
from geomon.capture.model_parts import ModelParts
from geomon.capture.snapshot import HOST, NotSeenError, Snapshot, explain_missing
from geomon.distributed import (
    RankFailedError,
    RankGroup,
    RanksLostError,
    find_ranks,
    join_ranks,
)
from geomon.distributed.mesh import Mesh, find_place
from geomon.metrics import Evaluator, check_metrics
from geomon.monitor.at_exit import close_at_exit
from geomon.monitor.held_out import HeldOut, is_loader
from geomon.monitor.measuring.device import MeasuringDevice
from geomon.monitor.measuring.executor import ReadingExecutor
from geomon.monitor.measuring.jobs import ProbeHistory, ReadingJob
from geomon.monitor.options import (
    DEFAULT_SHARE,
    MonitorOptions,
    check_options,
    check_step,
    show_monitor_options,
)
from geomon.monitor.passes import Passes
from geomon.monitor.planning.budget import Budget
from geomon.monitor.planning.checks import Checks
from geomon.monitor.planning.planner import ReadingPlanner
from geomon.monitor.planning.schedule import Schedule, first_steps
from geomon.monitor.probe_loss import ProbeLoss
from geomon.monitor.publish import Publisher
from geomon.monitor.settings import flat_settings
from geomon.monitor.writing.logged import LoggedValues
from geomon.monitor.writing.output import ReadingWriter, Warnings
from geomon.monitor.writing.reactions import Reactions
from geomon.note import Note
from geomon.record import Reading, Readings, Record, Sink, read
from geomon.record.printable import printable, text_of

_NOTHING = nullcontext()  # what a step that is not due gets
# Rows of hidden states at which a check looks.
_CHECK_ROWS = 1024


@show_monitor_options
class Monitor:
    """Reads the geometry of a model's representations at scheduled steps.

    Args:
        model: Any module that contains a transformer. In a pipeline of
            `torch.distributed.pipelining` the schedule, or the stages that this rank runs.
    {options}
    """

    _process: int | None = None  # that of the last step: a fork leaves its parent's to it

    def __init__(self, model: Any, **options: Unpack[MonitorOptions]) -> None:
        self._options = options = check_options(options, type(self).__name__)
        self._parts = ModelParts(model)
        self._model = self._parts.root
        if options["probe"] is not None:
            self._parts.check_probe(options["probe"])
        self._evaluator = Evaluator(
            check_metrics(options["metrics"]), options["batches"], options["queries"],
            options["strict"],
            keeps_arrays=options["arrays"] and options["directory"] is not None,
        )  # fmt: skip
        self._checker = Evaluator(
            {name: m for name, m in self._evaluator.metrics.items() if name in WATCHED},
            batches=1, has_margins=False,
        )  # fmt: skip
        self._device = MeasuringDevice(options["device"], self._model)
        self._source = "inline" if options["probe"] is None else "probe"
        self._group = self._join_ranks()
        self.warnings = warnings = Warnings(self._group, strict=options["strict"])
        self.budget = Budget(_share_of(options["budget"], self._group))
        loss = options["probe_loss"]
        self.passes = Passes(
            self._parts, options, views=self._evaluator.views, group=self._group,
            device=self._device, budget=self.budget,
            loss=None if loss is None else ProbeLoss(loss, warnings),
        )  # fmt: skip
        schedule = options["schedule"]
        assert callable(schedule)  # of what is checked
        self.planner = ReadingPlanner(
            _guard_schedule("schedule", schedule, warnings), self.budget, self._group,
            source=self._source,
        )  # fmt: skip
        self._checks = self._plan_checks()
        self._record = self._make_record(options["directory"])
        self._executor = ReadingExecutor(background=self._in_background())
        self._reactions = Reactions(
            options["alerts"], options["on_phase"], options["on_alert"], warnings
        )
        self.writer = ReadingWriter(
            self._record, options["sinks"], warnings, sink_timeout=options["sink_timeout"]
        )
        self.publisher = Publisher(
            self._executor, self.planner, self.writer, self._reactions,
            LoggedValues(options["log"], warnings), self.budget, warnings,
            functools.partial(_notes_of_run, self.passes, self._group, self._device),
        )  # fmt: skip
        self._process = os.getpid()
        self._checked = False  # whether the first window has been checked for what is missing
        # The last readings of the monitor's own inputs (a sweep hands it on from one monitor to the
        # next), and of those that are given to `probe`. A function of the model may run it on other
        # inputs each time.
        self.probe_history = ProbeHistory(same_inputs=not callable(options["probe"]))
        self._given_history = ProbeHistory(same_inputs=False)
        close_at_exit(self)

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
        with self.budget.charge():
            number = check_step(step)
            self.advance(number)
            if not self.is_due(number, source=self._source, force=force):
                return _NOTHING
            if self._source == "probe":
                return self._probing(number)
            is_read = self.planner.is_due(number, "inline", force=force)
            return self._watching(number) if is_read else self._checking(number)

    def advance(self, step: SupportsIndex) -> None:
        """Move to a step: publish what earlier steps left, and decide what is due.

        Args:
            step: Number of optimizer updates already in the weights.
        """
        number = check_step(step)
        if not self._is_own():
            self._process = os.getpid()
            self._executor.forget()
        self.passes.sweep(number)
        if number != self.planner.step:
            self.publisher.move_to(number)
        with self.budget.charge(), self.warnings.guard():
            if not self.budget.begun:
                self._begin(number)
            if self.planner.advance(number):
                self._group.begin_reading()
                self._executor.finish()  # what was interrupted
                self.publisher.publish()
                self.planner.settle(busy=self._executor.busy)

    def log(self, step: SupportsIndex | None = None, /, **values: Any) -> None:
        """Put values into the reading of a step, under `training/<name>`: the loss, say.

        At steps that are not read this does nothing. Give values inside the `with`, or before it
        with their step, `log(step, loss=loss)`. A reading waits until the next step for the names
        of the option `log`, so their values may come after the `with`. A tensor is copied on its
        device, without its graph, and read when the reading is recorded. With several ranks the
        values of the first one are recorded.

        Args:
            step: Number of optimizer updates already in the weights; None for the last step that
                the monitor was called with.
            values: Numbers, or tensors with one element; None for a missing value.

        Raises:
            TypeError: The step is no whole number.
            ValueError: The step is below 0, or None before the first one.
        """
        number = self.planner.step if step is None else check_step(step)
        if number is None:
            raise ValueError(
                "no step to log values of: give it, log(step, loss=loss), or log inside "
                "`with monitor(step)`"
            )
        if self._is_own():
            self.publisher.log(number, values, watched=self.passes.step == number)

    def is_due(self, step: int, *, source: str = "inline", force: bool = False) -> bool:
        """Whether the present step is looked at: a reading due, paid for and not made yet; a check.

        Args:
            step: The step that `advance` has moved to.
            source: "inline" or "probe".
            force: Whether to read whatever the schedule and the budget say.
        """
        if source == "inline" and not self._takes_part():
            return False
        if self.planner.is_due(step, source, force=force):
            return True
        if self._checks is None or source == "probe" or self.planner.is_read(step, source):
            return False
        return self._checks.is_due(step)

    def probe(self, step: SupportsIndex, inputs: Any = None) -> None:
        """Read the geometry on fixed inputs in an extra pass, whatever the schedule and budget say.

        The pass runs without autograd, in eval mode, with the random state forked; every module's
        training flag is restored. With many ranks all run the pass (a sharded model hangs
        otherwise) on the same inputs: the first rank's rows are measured, and the ranks share the
        layers. If the monitor's `probe` is a loader, each rank reads batches of its own.

        Args:
            step: Number of optimizer updates already in the weights.
            inputs: A tensor, a dict of keyword arguments, a tuple of arguments, or a function of
                the model; None takes the monitor's `probe`.

        Raises:
            TypeError: The step is no whole number.
            ValueError: There are no inputs, here or in the monitor, or none that a pipeline takes;
                or the step is below 0.
        """
        number = check_step(step)
        history = self.probe_history if inputs is None else self._given_history
        inputs = self._options["probe"] if inputs is None else inputs
        if inputs is None:
            raise ValueError(
                "no inputs to probe: give them here, probe(step, inputs), or to the monitor, "
                "Monitor(model, probe=inputs)"
            )
        if is_loader(inputs):
            raise ValueError(
                "a loader is drawn from once, so that readings compare: give it to the monitor, "
                "Monitor(model, probe=loader), and call probe(step)"
            )
        self._parts.check_probe(inputs)
        self.advance(number)
        if not self.is_due(number, source="probe", force=True):
            return

        self._read(
            number, "probe", lambda: self.passes.run(inputs, number), began=time.perf_counter(),
            copies=not isinstance(inputs, HeldOut), history=history,
        )  # fmt: skip

    def add_loggers(self, sinks: Sequence[Sink]) -> None:
        """Add sinks that write to the loggers of a trainer, in its own thread, without a limit."""
        self.writer.add_loggers(sinks)

    def lacks_values(self, step: int) -> bool:
        """Whether a reading of a step waits for values of the option `log`."""
        return self.publisher.lacks_values(step)

    def charge(self) -> AbstractContextManager[None]:
        """Return a context manager whose time counts as geomon's."""
        return self.budget.charge()

    def __enter__(self) -> Self:
        """Return the monitor, which is closed at the end of the `with`."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the monitor, however the `with` ends."""
        self.close()

    def __repr__(self) -> str:
        options = self._options
        parts = [
            self._parts.name,
            f"{len(self._block_names)} blocks",
            f"{len(options['metrics'])} metrics",
            f"schedule={text_of(options['schedule'])}",
            "no record" if self.path is None else f"record={str(self.path)!r}",
            "nothing read yet" if self.latest is None else f"last step {self.latest.step:,}",
        ]
        return printable(f"Monitor({', '.join(parts)})")

    def _repr_html_(self) -> str:
        """Show what has been recorded so far in a notebook."""
        recorded = Readings([], [] if self.latest is None else [self.latest])
        if self.path is not None and self.path.is_file():
            recorded = read(self.path)
        return f"<p>{escape(repr(self))}</p>{recorded._repr_html_()}"

    @property
    def latest(self) -> Reading | None:
        """The last reading that was recorded; None before the first, and on other ranks."""
        return self.publisher.latest

    @property
    def path(self) -> Path | None:
        """Path of the record; None where nothing is recorded, and on other ranks."""
        return None if self._record is None else self._record.path

    def close(self) -> None:
        """Finish what is being measured, and close record and sinks; may be called more than once.

        Where a program ends without it, it is called then.
        """
        if self._is_own():
            with self.budget.charge():
                self._flush()
                self.publisher.end()

    def _is_own(self) -> bool:
        """Whether no other process has made the last step: a fork has copies of its parent's."""
        return self._process == os.getpid()

    def _flush(self) -> None:
        """Finish what is being measured, and record it."""
        self.passes.sweep(None)
        self._executor.close()
        self.publisher.publish(wait=False)

    def __del__(self) -> None:
        # Sinks may be somebody else's too by now; what has been begun is recorded.
        if self._is_own():
            with contextlib.suppress(Exception):  # a strict one raises, and nobody would catch it
                self._flush()

    @property
    def overhead(self) -> float:
        """Share of the time since the first step that geomon took; NaN before the first step."""
        return self.budget.overhead

    def expect_end(self, step: int | None) -> None:
        """Let the budget be a share of the time that the whole run is expected to take.

        Args:
            step: The last step of the run; None where it is not known.
        """
        self.budget.expect_end(step)

    def describe(self) -> dict[str, Any]:
        """Describe the run for its record: versions, model, layers, metrics, numbers of rows."""
        options, metrics = self._options, self._evaluator.metrics
        return {
            "geomon": version("geomon"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "model": self._parts.name,
            "parameters": sum(
                parameter.numel()
                for parameter in self._model.parameters()
                if not nn.parameter.is_lazy(parameter)
            ),
            "layers": self._block_names,
            "metrics": {name: msgspec.to_builtins(metric.text) for name, metric in metrics.items()},
            "schedule": text_of(options["schedule"]),
            "tokens": options["tokens"],
            "batches": options["batches"],
            "queries": options["queries"],
            "seed": options["seed"],
            "world_size": self._group.size,
            "gather": self._group.connected,
            "mesh": self._group.mesh.words(),
            "device": str(self._device.device),
            **flat_settings(options["settings"]),
        }

    # -- from a pass to a reading ------------------------------------------------------------------

    @contextmanager
    def _watching(self, step: int) -> Iterator[None]:
        with self.budget.charge():
            window = self.passes.open(step)
        with window:
            yield
        if not self._is_own():
            return
        began = time.perf_counter() - window.seconds
        inputs, window.inputs = window.inputs, None  # kept no longer than the reading
        self._read(
            step, "inline", lambda: self.passes.snapshots(window), began=began, inputs=inputs
        )

    @contextmanager
    def _checking(self, step: int) -> Iterator[None]:
        """Look at few values of the training's forward pass, of this rank's rows."""
        with self.budget.charge():
            window = self.passes.open_for_check(step, self._checker.views, _CHECK_ROWS)
        with window:
            yield
        if self._is_own():
            with self.budget.charge(), self.warnings.guard():
                self._check_values(step, window)

    def _check_values(self, step: int, window: Window) -> None:
        assert self._checks is not None
        began = time.perf_counter() - window.seconds
        snapshot = window.snapshot()
        if snapshot.is_empty:
            self._checks.stop()  # compiled code hides what it would look at
        stacks = self._checker.evaluate(snapshot.layers, _CHECK_ROWS).stacks
        info, seconds = snapshot.info, time.perf_counter() - began
        reading = Reading(
            step, time.time(), seconds, "check", info.mode, info.tokens, 1, info.dtype, stacks
        )
        inputs, window.inputs = window.inputs, None
        alerts, again = self.publisher.publish_check(reading, inputs)
        if alerts:
            self.planner.owe()
        self._checks.add(step, seconds, again=again)

    def _plan_checks(self) -> Checks | None:
        """Decide when checks are made; None where there are none.

        One rank alone makes them, so it has to have the whole model.
        """
        asked, first = self._options["checks"], self._group.rank == 0
        if asked is None or not (first and self._source == "inline" and self._checker.metrics):
            return None
        if not (self._options["alerts"] and self._group.own.is_whole):
            return None
        return Checks(_guard_schedule("checks", asked, self.warnings) if callable(asked) else None)

    @contextmanager
    def _probing(self, step: int) -> Iterator[None]:
        self.publisher.entered = step
        try:
            self.probe(step)
            yield  # what is logged here is of this step
        finally:
            self.publisher.entered = None
            if self._is_own():
                self.publisher.publish()

    def _takes_part(self) -> bool:
        """Whether this rank's training forward is watched."""
        return self._group.connected or self._group.rank == 0

    def _read(
        self,
        step: int,
        source: str,
        capture: Callable[[], list[Snapshot]],
        *,
        began: float,
        copies: bool = False,
        history: ProbeHistory | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        """Make a reading of what is captured, or begin to."""
        self.planner.mark_read(step, source)
        with self.warnings.guard():
            with self.budget.charge():
                job = self._make_job(step, source, capture, began, copies=copies, history=history)
            if job is not None:
                job.inputs = inputs
                self.publisher.expect(step)
                with self.budget.charge():  # the training may wait for an earlier reading
                    self._executor.submit(job)
        self.publisher.publish()

    def _make_job(
        self,
        step: int,
        source: str,
        capture: Callable[[], list[Snapshot]],
        began: float,
        *,
        copies: bool,
        history: ProbeHistory | None,
    ) -> ReadingJob | None:
        """The job of measuring passes; None where another rank measures or has measured them."""
        passes: list[Snapshot] | Exception
        left_out = self.budget.left_out

        try:
            passes = capture()
            self._check(passes[0])
        except (RanksLostError, RankFailedError):  # raised on all ranks alike
            raise
        except Exception as error:  # several ranks fail together
            passes = error
        seconds = time.perf_counter() - began - (self.budget.left_out - left_out)
        if not self._takes_part() or self.planner.is_recorded(step, source):
            if isinstance(passes, Exception):
                raise passes
            return None
        return ReadingJob(
            step, source, passes, self._group, self._evaluator, rows=self._options["tokens"],
            seconds=seconds, copies=copies, history=history, place=self._device,
        )  # fmt: skip

    def _check(self, snapshot: Snapshot) -> None:
        """Warn of what was expected in the first snapshot and is missing."""
        if snapshot.is_empty:  # there is nothing to check, and nothing to record if all ranks' are
            return
        missing = None if self._checked else explain_missing(snapshot, self._evaluator.views)
        if missing is not None:
            if self._options["strict"]:
                raise NotSeenError(missing)
            self.warnings.warn(missing)
        self._checked = True

    # -- the run ---------------------------------------------------------------------------------

    def _join_ranks(self) -> RankGroup:
        """The ranks, connected if all were built with the same options; a collective then."""
        options = self._options
        anatomy = self._parts.find_anatomy(options["blocks"])
        blocks: list[dict[str, tuple[str, ...]]] = [{} for _ in self._parts.modules]
        for stack in anatomy.stacks:
            blocks[stack.part][stack.name] = tuple(block.name for block in stack.blocks)
        place = find_place(self._parts.modules, self._parts.stages)
        place = dataclasses.replace(place, blocks=tuple(blocks))
        if not options["gather"]:
            ranks = find_ranks()
            ranks.mesh = Mesh((place,))
            return ranks
        schedule = options["schedule"]
        assert callable(schedule)  # of what is checked
        compared = {
            "schedule": first_steps(schedule),
            "metrics": list(options["metrics"]),
            "probe": options["probe"] is not None,
            **{name: options[name] for name in ("tokens", "batches", "queries", "budget", "seed")},
        }
        return join_ranks(place, compared, timeout=options["rank_timeout"])

    @property
    def _block_names(self) -> list[str]:
        """Names of the blocks of the whole model, as far as they are known."""
        if self._parts.stages and self._group.connected:
            return self._group.mesh.block_names()
        return self.passes.block_names

    def _make_record(self, directory: str | os.PathLike[str] | None) -> Record | None:
        """The record, on the first rank; where it cannot be made all ranks raise the same."""
        record: Record | None = None
        failure: ValueError | None = None
        if directory is not None and self._group.rank == 0:
            try:
                record = Record(directory)
            except ValueError as error:
                failure = error
        with self.warnings.guard():
            failure = self._group.broadcast(failure)
        if failure is not None:
            raise failure
        return record

    def _begin(self, step: int) -> None:
        """Start at the first step: learn what the record holds already."""
        self.budget.begin(step)
        recorded = self.writer.begin(step, self.describe())
        if self._record is not None:
            path = self._record.path
            self.warnings.attempt(
                lambda: self._reactions.recall(r for r in read(path) if r.step < step),
                f"{path} could not be read: phases and alerts begin anew",
            )
        try:
            recorded = self._group.broadcast(recorded)
        finally:  # a first rank that is alone from here on knows its record
            self.planner.skip_recorded(recorded)

    def _in_background(self) -> bool:
        """Whether rows are measured in the background."""
        wanted = self._options["background"]
        chosen = self._device.of_model != HOST if wanted is None else wanted
        # A metric of the user's own may draw random numbers of the training, whose states are put
        # back around it: not while the training draws.
        return chosen and not self._evaluator.has_own_metrics and not self._group.connected


def _notes_of_run(passes: Passes, group: RankGroup, device: MeasuringDevice) -> list[Note]:
    """Notes that hold for every reading."""
    notes = passes.notes()
    if (reason := group.why_not_connected) is not None:
        text = "rows are not gathered, only those of rank 0 are measured: {reason}"
        notes.append(Note("not gathered", text, numbers={"reason": reason}))
    if not group.connected:
        notes += group.own.notes_alone()
    if (reason := device.why_host) is not None:
        text = "measured on the host: {reason}"
        notes.append(Note("measured on the host", text, numbers={"reason": reason}))
    return notes


def _share_of(budget: float | str | None, group: RankGroup) -> float | None:
    """The share of the time that a monitor may take; None for no limit.

    Raises:
        ValueError: A share is given, and the ranks exchange no decisions.
    """
    if isinstance(budget, str):  # "auto"
        return DEFAULT_SHARE if group.connected else None
    if budget is not None and group.members < group.size:
        raise ValueError(
            "a budget is one decision for all ranks, which they share where their rows are "
            "gathered: use gather=True, or budget=None"
        )
    return budget


def _guard_schedule(option: str, schedule: Schedule, warnings: Warnings) -> Schedule:
    """A schedule that has no reading at the steps where the given one raises."""

    def guarded(step: int) -> bool:
        due: list[bool] = []
        warnings.attempt(
            lambda: due.append(schedule(step)),
            f"the function given as {option} failed: there is no reading at a step where it fails",
            once=True,
        )
        return any(due)

    return guarded


__all__ = ["Monitor"]
