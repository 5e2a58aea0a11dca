"""The monitor: `with monitor(step): model(x)`.

It conducts the other parts: the planner decides when, windows see passes, the executor measures
them, and the outbox records and shows finished readings. None of them ends a run. The monitor's
verbs (enter, log, probe, close) are the only place that charges time and guards errors.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib
import math
import multiprocessing
import multiprocessing.util
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from html import escape
from pathlib import Path
from typing import Any, Self, SupportsIndex, Unpack

import msgspec
import torch
from torch import nn

from geomon.analysis import WATCHED, Inputs
from geomon.capture import (
    HOST,
    ModelParts,
    NotSeenError,
    Snapshot,
    explain_missing,
    in_cuda_graph,
    without_modes,
)
from geomon.distributed import (
    Mesh,
    RankFailedError,
    RankGroup,
    RanksLostError,
    find_place,
    find_ranks,
    join_ranks,
)
from geomon.failures import failures, ignored
from geomon.metrics import Evaluator, check_metrics, in_modes, searched_by
from geomon.monitor.device import MeasuringDevice
from geomon.monitor.executor import ReadingExecutor
from geomon.monitor.held_out import HeldOut, describe_probe, is_loader
from geomon.monitor.jobs import CHECK, ReadingJob
from geomon.monitor.model_blocks import ModelBlocks
from geomon.monitor.moves import Moves, WeightWatch
from geomon.monitor.options import (
    AUTO,
    MonitorOptions,
    check_options,
    check_step,
    documented,
)
from geomon.monitor.outbox import Outbox
from geomon.monitor.passes import Passes
from geomon.monitor.planner import DEFAULT_SHARE, Account, Due, Planner
from geomon.monitor.probe_loss import ProbeLoss
from geomon.monitor.schedule import Schedule, first_steps, log_spaced
from geomon.monitor.warnings import Warnings
from geomon.note import Note
from geomon.note_kinds import NoteKind
from geomon.record import LOSS, Reading, Readings, Record, Sink, printable, read, text_of
from geomon.version import __version__

_RATES = {"lr", "learning_rate"}  # names of learning rates among logged values
_NOTHING = nullcontext()  # returned for a step that is not due
# Rows of hidden states that a check looks at.
_CHECK_ROWS = 1024
# Modules that the first reading would otherwise load inside a step, which takes a second.
_LOADED_FIRST = ("torch._dynamo", "faiss", "scipy.special")
# Longest text of a setting in the description of a run.
_LONGEST = 200


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
        self._parts = ModelParts(model)
        self._model = self._parts.root
        if options["probe"] is not None:
            self._parts.check_probe(options["probe"])
        self._evaluator = Evaluator(
            check_metrics(options["metrics"]), options["splits"], options["queries"],
            options["strict"],
            keeps_arrays=options["arrays"] and options["directory"] is not None,
        )  # fmt: skip
        self._quick_evaluator = Evaluator(
            {name: m for name, m in self._evaluator.metrics.items() if name in WATCHED},
            splits=1, has_margins=False,
        )  # fmt: skip
        self._device = MeasuringDevice(options["device"], self._model)
        self._source = "inline" if options["probe"] is None else "probe"
        self._group = self._join_ranks()
        self.warnings = Warnings(self._group, strict=options["strict"])
        self.account = Account()
        loss = options["probe_loss"]
        self.passes = Passes(
            ModelBlocks(self._parts, self._group, options["blocks"]), options,
            views=self._evaluator.views, group=self._group, device=self._device,
            in_background=self._in_background(), account=self.account,
            loss=None if loss is None else ProbeLoss(loss, self.warnings),
        )  # fmt: skip
        self.planner = self._make_planner()
        self._record = self._make_record(options["directory"])
        way = options["background"] if isinstance(options["background"], str) else True
        self._executor = ReadingExecutor(background=self._in_background() and way)
        self.outbox = Outbox(
            self._record, options, self._executor, self.planner, self.account, self.warnings,
            functools.partial(_notes_of_run, self.passes, self._group, self._device),
        )  # fmt: skip
        self._weights = WeightWatch(self._model)
        self._moves: Moves | None = None  # of the last look
        self._process = os.getpid()
        self._has_failed = False  # whether it was closed because of an error
        self._is_verified = False  # whether the first window was looked at for missing views
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
            due = self._due(self._source, force=force)
            if due is Due.NOTHING:
                return _NOTHING
            number = check_step(step)
            self._watch_weights(number)
            if self._source == "probe":
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
            if self.planner.step is None and self._record is not None:
                self._record.check_alone()
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
        self._parts.check_probe(inputs)
        with self.charge():
            self.advance(step)
            number = check_step(step)
            if self._due("probe", force=True) is Due.READING:
                self._watch_weights(number)
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
        return None if self._record is None else self._record.path

    def describe(self) -> dict[str, Any]:
        """Describe the run for its record: versions, model, layers, metrics, numbers of rows."""
        options, metrics = self._options, self._evaluator.metrics
        return {
            "geomon": __version__,
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
            "schedule": text_of(options["schedule"] or "within the budget"),
            "probe": describe_probe(options["probe"]),
            "tokens": options["tokens"],
            "splits": options["splits"],
            "queries": options["queries"],
            "seed": options["seed"],
            "world_size": self._group.size,
            "gather": self._group.connected,
            "mesh": self._group.mesh.words(),
            "device": str(self._device.device),
            "search": searched_by(self._device.device),
            **_settings(options["settings"], "training"),
        }

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
            window = self.passes.open_for_check(step, self._quick_evaluator.views, _CHECK_ROWS)
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
                job = ReadingJob(
                    step, CHECK, RankGroup(), self._quick_evaluator, rows=_CHECK_ROWS,
                    place=self._device, inputs=inputs, moves=self._moves,
                )  # fmt: skip
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

    def _watch_weights(self, step: int) -> None:
        """Look how far the weights have moved, and on the first rank for those that do not."""
        self._moves = None
        is_alerted = self._group.rank == 0 and "unmoved_weights" in self._options["alerts"]
        if not (is_alerted or "weight_moves" in self._evaluator.views):
            return
        failed = "how far weights move is not measured"
        self.warnings.attempt(lambda: self._look_at_weights(step), failed, once=True)
        news = self._weights.news()
        if is_alerted:
            self.outbox.alarms.watch_weights(news)

    def _look_at_weights(self, step: int) -> None:
        self._moves = self._weights.look(step, self.passes.blocks.places)

    def _watch_losses(self, step: int, values: Mapping[str, Any]) -> None:
        """Look for a loss that jumps or is not finite, on the first rank."""
        if self._group.rank == 0:
            self.warnings.attempt(
                lambda: self.outbox.alarms.watch_losses(step, values),
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
        job = ReadingJob(
            step, source, self._group, self._evaluator, rows=self._options["tokens"],
            place=self._device, same_inputs=same_inputs, inputs=inputs, moves=self._moves,
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
        if snapshot.is_empty:  # nothing to verify, and nothing to record if all ranks' are empty
            return
        missing = None if self._is_verified else explain_missing(snapshot, self._evaluator.views)
        if missing is not None:
            if self._options["strict"]:
                raise NotSeenError(missing)
            self.warnings.warn(missing)
        self._is_verified = True

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

    def _join_ranks(self) -> RankGroup:
        """Return the ranks, connected if built with the same options (then a collective)."""
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
        compared = {
            "schedule": first_steps(schedule) if callable(schedule) else None,
            "metrics": list(options["metrics"]),
            "probe": options["probe"] is not None,
            **{name: options[name] for name in ("tokens", "splits", "queries", "budget", "seed")},
        }
        return join_ranks(place, compared, timeout=options["rank_timeout"])

    def _make_planner(self) -> Planner:
        """Make the planner for a schedule, a share of the time, or both."""
        schedule, budget = self._options["schedule"], self._options["budget"]
        # All ranks make a probe's passes, at the same steps.
        agree = self._group.members == self._group.size or self._source == "inline"
        if not agree and budget not in (AUTO, None):
            raise ValueError(
                "a budget needs one decision for all ranks, which is possible only if their rows "
                "are gathered: use gather=True, or budget=None"
            )
        share = DEFAULT_SHARE if schedule is None and agree else None
        share = share if budget == AUTO else budget  # type: ignore[assignment]
        if schedule is None and share is None:
            schedule = log_spaced()
        if schedule is not None:
            schedule = _guard_schedule("schedule", schedule, self.warnings)  # type: ignore[arg-type]
        checks = self._schedule_of_checks()
        return Planner(schedule, share, checks, self._group, self.account, source=self._source)

    def _schedule_of_checks(self) -> Schedule | str | None:
        """Return when to check; a single rank makes checks, so it must have the whole model."""
        asked, group = self._options["checks"], self._group
        watches = self._options["alerts"] and self._quick_evaluator.metrics
        if self._source != "inline" or not watches or group.rank or not group.own.is_whole:
            return None
        return _guard_schedule("checks", asked, self.warnings) if callable(asked) else asked  # type: ignore[return-value]

    def _make_record(self, directory: str | os.PathLike[str] | None) -> Record | None:
        """Make the record on the first rank; if that fails, all ranks raise the same error."""
        record: Record | None = None
        failure: ValueError | None = None
        if directory is not None and self._group.rank == 0:
            try:
                record = Record(directory)
            except failures(ValueError) as error:
                failure = error
        with self.warnings.guard():
            failure = self._group.broadcast(failure)
        if failure is not None:
            raise failure
        return record

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
        if self._parts.stages and self._group.connected:
            return self._group.mesh.block_names()
        return self.passes.blocks.names

    def _in_background(self) -> bool:
        """Whether rows are measured in the background."""
        wanted = self._options["background"]
        chosen = self._device.of_model != HOST if wanted is None else bool(wanted)
        # A user's own metric may draw random numbers. Their states are restored around it, which
        # must not happen while the training draws.
        return chosen and not self._evaluator.has_own_metrics and not self._group.connected


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


def _guard_schedule(option: str, schedule: Schedule, warnings: Warnings) -> Schedule:
    """Wrap a schedule so that steps where it raises are not due."""

    def guarded(step: int) -> bool:
        due: list[bool] = []
        warnings.attempt(
            lambda: due.append(schedule(step)),
            f"the function passed as {option} failed: steps at which it fails are not read",
            once=True,
        )
        return any(due)

    return guarded


def _settings(settings: Mapping[str, Any], before: str) -> dict[str, bool | int | float | str]:
    """Flatten settings for the description of a run; everything but numbers becomes text."""
    found: dict[str, bool | int | float | str] = {}
    for name, value in settings.items():
        path = f"{before}/{name}"
        if isinstance(value, Mapping):
            found |= _settings(value, path)
        elif isinstance(value, bool | int | float) and abs(value) < 2**63:
            found[path] = value  # the record writes NaN and infinity as text, which JSON lacks
        else:
            found[path] = text_of(value)[:_LONGEST]
    return found


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
