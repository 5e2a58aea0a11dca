"""The monitor: `with monitor(step): model(x)`.

It connects planner, window, executor, record and sinks, and lets none of them end a run.
"""

import atexit
import contextlib
import math
import multiprocessing
import multiprocessing.util
import os
import platform
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, SupportsIndex, Unpack

import msgspec
import torch
from torch import nn

from geomon.capture import Window, derive_seed, extra_pass, find_anatomy
from geomon.capture.snapshot import HOST, NotSeenError, Snapshot, explain_missing
from geomon.distributed import (
    RankFailedError,
    RankGroup,
    RanksLostError,
    find_ranks,
    join_ranks,
)
from geomon.metrics import Evaluator, check_metrics
from geomon.monitor.held_out import HeldOut, is_loader
from geomon.monitor.measuring.device import MeasuringDevice
from geomon.monitor.measuring.executor import ReadingExecutor
from geomon.monitor.measuring.jobs import ProbeHistory, ReadingJob
from geomon.monitor.options import (
    MonitorOptions,
    check_options,
    check_step,
    show_monitor_options,
)
from geomon.monitor.planning.budget import Budget
from geomon.monitor.planning.planner import ReadingPlanner
from geomon.monitor.planning.schedule import Schedule, first_steps
from geomon.monitor.probe_loss import ProbeLoss
from geomon.monitor.settings import flat_settings
from geomon.monitor.writing.logged import LoggedValues
from geomon.monitor.writing.output import ReadingWriter, Warnings
from geomon.monitor.writing.reactions import Reactions
from geomon.note import Note
from geomon.record import Reading, Readings, Record, read
from geomon.record.printable import printable, text_of

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
        self._modules = tuple(model.modules())  # of which the anatomy was found
        self._names = [block.name for block in self._anatomy.blocks]  # as the run began
        schedule = options["schedule"]
        assert callable(schedule)  # of what is checked
        self._evaluator = Evaluator(
            check_metrics(options["metrics"]), options["batches"], options["queries"],
            options["strict"],
            keeps_arrays=options["arrays"] and options["directory"] is not None,
        )  # fmt: skip
        self._views = self._evaluator.views
        self._measuring_device = MeasuringDevice(options["device"], model)
        self._source = "inline" if options["probe"] is None else "probe"
        self._group = self._join_ranks() if options["gather"] else find_ranks()
        if options["budget"] is not None and self._group.members < self._group.size:
            raise ValueError(
                "a budget is one decision for all ranks, which they share where their rows are "
                "gathered: use gather=True, or budget=None"
            )
        self._warnings = Warnings(self._group, strict=options["strict"])
        record = self._make_record(options["directory"])
        share = options["budget"]
        assert not isinstance(share, str)  # of what is checked
        self._budget = Budget(share, options["tokens"])
        self._writer = ReadingWriter(
            record, options["sinks"], self._warnings, sink_timeout=options["sink_timeout"],
            affords=self._budget.affords,
        )  # fmt: skip
        self._reactions = Reactions(
            options["alerts"], options["on_phase"], options["on_alert"], self._warnings
        )
        self._record = record
        self._planner = ReadingPlanner(
            _guard_schedule(schedule, self._warnings, strict=options["strict"]),
            self._budget, self._group, source=self._source,
            layers=len(self._anatomy.blocks) + 1,
        )  # fmt: skip
        self._executor = ReadingExecutor(self._budget, background=self._in_background())
        self._process = os.getpid()  # that of the last step: a fork leaves its parent's to it
        _close_at_exit(self)
        self._opened: tuple[Window, int] | None = None  # the window that is open, and its step
        self._checked = False  # whether the first window has been checked for what is missing
        self._logged = LoggedValues(options["log"], self._warnings)
        function = options["probe_loss"]
        self._probe_loss = None if function is None else ProbeLoss(function, self._warnings)
        self._pending: list[int] = []  # steps of the readings that are not published yet
        self._entered: int | None = None  # the step whose `with` is open, where inputs are probed
        self._published: int | None = None  # step of the last reading that has been
        self._latest: Reading | None = None  # that reading, with what it has been written with
        # The last readings of the monitor's own inputs (a sweep hands it on from one monitor to the
        # next), and of those that are given to `probe`. A function of the model may run it on other
        # inputs each time.
        own = options["probe"]
        self.probe_history = ProbeHistory(same_inputs=isinstance(own, HeldOut) or not callable(own))
        self._given_history = ProbeHistory(same_inputs=False)

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
        if not self._is_own:
            self._process = os.getpid()
            self._executor.forget()
            self._pending.clear()
            self._opened = None
        self._sweep(number)
        if number != self._planner.step:
            self._publish_finished(wait=False)
            self._logged.forget_before(number, self._pending)
        with self._budget.charge(), self._warnings.guard():
            if not self._budget.begun:
                self._begin(number)
            if self._planner.advance(number):
                if self._executor.busy:
                    self._executor.advance()
                    self._publish_finished()
                self._planner.settle(busy=self._executor.busy)

    def pause(self) -> None:
        """Let the window that is open see nothing, and leave nothing on the model, for a while.

        What it has seen is measured when its `with` ends, unless it sees more after `proceed`.
        """
        if self._opened is not None:
            with self._budget.charge():
                self._opened[0].close()

    def proceed(self) -> None:
        """Let the window that `pause` has stopped see calls again."""
        if self._opened is not None:
            with self._budget.charge():
                self._opened[0].__enter__()

    def charge(self) -> AbstractContextManager[None]:
        """Return a context manager whose time counts as geomon's (see `overhead`)."""
        return self._budget.charge()

    def log(self, step: SupportsIndex | None = None, /, **values: Any) -> None:
        """Put values into the reading of a step, under `training/<name>`: the loss, say.

        At steps that are not read nothing is done. Values given inside the `with` are in time, and
        so are those given before it with their step, `log(step, loss=loss)`. A reading waits for
        the names of the option `log` until the next step: their values may come after the `with`.
        A tensor is copied where it is, without its graph, and read when the reading is recorded.
        With several ranks the values of the first one are recorded.

        Args:
            step: Number of optimizer updates already in the weights; None for the last step that
                the monitor was called with.
            values: Numbers, or tensors of one number; None for a value that there is not.

        Raises:
            TypeError: The step is no whole number.
            ValueError: The step is below 0, or None before the first one.
        """
        present = self._planner.step
        number = present if step is None else check_step(step)
        if number is None:
            raise ValueError(
                "no step to log values of: give it, log(step, loss=loss), or log inside "
                "`with monitor(step)`"
            )
        if not self._takes_values(number):
            return
        with self._budget.charge():
            if number == self._published and number not in self._pending:
                # Of accumulated batches the first is read: the others' values are not late.
                late = [name for name in values if not self._logged.has(number, name)]
                self._warn_of_late(late)
                return
            self._logged.put(number, values)
            self._publish_finished()

    def lacks_values(self, step: int) -> bool:
        """Whether a reading of a step waits for values of the option `log`.

        Args:
            step: Number of optimizer updates already in the weights.
        """
        return step in self._pending and not self._logged.is_complete(step)

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
        the layers are shared out to be measured. Of a loader, which the monitor's `probe` may be,
        each rank reads batches of its own.

        Args:
            step: Number of optimizer updates already in the weights.
            inputs: A tensor, a dict of keyword arguments, a tuple of arguments, or a function of
                the model; None takes the monitor's `probe`.

        Raises:
            TypeError: The step is no whole number.
            ValueError: There are no inputs, here or in the monitor, or the step is below 0.
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
        self.advance(number)
        if not self.is_due(number, source="probe", force=True):
            return

        def capture() -> list[Snapshot]:
            if isinstance(inputs, HeldOut):
                return self._pass_held_out(inputs, number)
            return [self._pass(inputs, number, (), self._rows(), loss=self._probe_loss)]

        copies = not isinstance(inputs, HeldOut)
        self._read(
            number, "probe", capture, began=time.perf_counter(), copies=copies, history=history
        )

    def __enter__(self) -> Self:
        """Return the monitor, which is closed at the end of the `with`."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the monitor, however the `with` ends."""
        self.close()

    def __repr__(self) -> str:
        options = self._options
        parts = [
            type(self._model).__name__,
            f"{len(self._anatomy.blocks)} blocks",
            f"{len(options['metrics'])} metrics",
            f"schedule={text_of(options['schedule'])}",
            "no record" if self.path is None else f"record={str(self.path)!r}",
            "nothing read yet" if self._latest is None else f"last step {self._latest.step:,}",
        ]
        return printable(f"Monitor({', '.join(parts)})")

    def _repr_html_(self) -> str:
        """Show what has been recorded so far in a notebook."""
        recorded = Readings([], [] if self._latest is None else [self._latest])
        if self.path is not None and self.path.is_file():
            recorded = read(self.path)
        return f"<p>{escape(repr(self))}</p>{recorded._repr_html_()}"

    @property
    def latest(self) -> Reading | None:
        """The last reading that was recorded; None before the first, and on other ranks."""
        return self._latest

    @property
    def path(self) -> Path | None:
        """Path of the record; None where nothing is recorded, and on other ranks."""
        return None if self._record is None else self._record.path

    def close(self) -> None:
        """Finish what is being measured, and close record and sinks; may be called more than once.

        Where a program ends without it, it is called then.
        """
        if self._is_own:
            with self._budget.charge():
                self._end()

    @property
    def _is_own(self) -> bool:
        """Whether no other process has made the last step: a fork has copies of its parent's."""
        return self._process == os.getpid()

    def _end(self) -> None:
        self._flush()
        if self._published is not None:
            self._logged.warn_of_absent()
        if self._published == 0 and self._planner.step and self._budget.limited:
            self._warnings.warn(
                f"within the budget of {self._options['budget']:.6g} of the time nothing could be "
                "read after step 0: read the last step in any case, with monitor(step, force=True) "
                "or monitor.probe(step, inputs), or give a larger budget",
                kind="step 0 alone",
            )
        self._writer.close()

    def _flush(self) -> None:
        """Finish what is being measured, and record it."""
        self._sweep(None)
        self._executor.close()
        self._publish_finished(wait=False)

    def __del__(self) -> None:
        # Sinks may be somebody else's too by now; what has been begun is recorded.
        if hasattr(self, "_executor") and self._is_own:
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

    def settle_last_reading(self) -> bool:
        """Decide whether the last reading of a run is made; a collective.

        It is made within the budget; on few rows where it is the only one after step 0. Callbacks
        ask before they force it.
        """
        paid = False
        with self._warnings.guard():
            decision = self._planner.decide_last()
            if decision.paid:
                self._executor.finish()  # what is left stands on the rows that were chosen for it
                self._budget.rows = decision.rows
            paid = decision.paid
        return paid  # noqa: RET504  (False where the other ranks are lost)

    def modules_around_blocks(self) -> tuple[nn.Module, ...]:
        """The model and the modules in it that hold blocks: a training calls one of them."""
        self._renew_anatomy()
        blocks = [block.module for block in self._anatomy.blocks]
        inside = {module for block in blocks for module in block.modules()}
        return tuple(
            module
            for module in self._model.modules()
            if module not in inside and not inside.isdisjoint(module.modules())
        )

    def describe(self) -> dict[str, Any]:
        """Describe the run for its record: versions, model, layers, metrics, numbers of rows."""
        options, metrics = self._options, self._evaluator.metrics
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
            "metrics": {name: msgspec.to_builtins(metric.text) for name, metric in metrics.items()},
            "schedule": text_of(options["schedule"]),
            "tokens": options["tokens"],
            "batches": options["batches"],
            "queries": options["queries"],
            "seed": options["seed"],
            "world_size": self._group.size,
            "gather": self._group.connected,
            "device": str(self._measuring_device.device),
            **flat_settings(options["settings"]),
        }

    # -- capturing -------------------------------------------------------------------------------

    @contextmanager
    def _watching(self, step: int) -> Iterator[None]:
        with self._budget.charge():
            rows = self._group.rows_of(self._rows())
            window = self._window(self._options["seed"], step, *self._place(), rows=rows)
            self._opened = window, step
        with window:
            yield
        if not self._is_own:
            return

        def capture() -> list[Snapshot]:
            return [window.snapshot(self._home())]

        self._read(step, "inline", capture, began=time.perf_counter() - window.seconds)

    @contextmanager
    def _probing(self, step: int) -> Iterator[None]:
        self._entered = step
        try:
            self.probe(step)
            yield  # what is logged here is of this step
        finally:
            self._entered = None
            self._publish_finished()

    def _pass(
        self,
        inputs: Any,
        step: int,
        place: tuple[object, ...],
        rows: int,
        *,
        around: Sequence[nn.Module] | None = None,
        windows: int = 1,
        loss: ProbeLoss | None = None,
    ) -> Snapshot:
        """Make one extra pass. The same inputs give the same rows: readings differ by the weights.

        Args:
            inputs: What the model is called with, or a batch.
            step: Number of optimizer updates already in the weights.
            place: What the sample of the rows depends on besides the seed.
            rows: Number of rows of hidden states to keep.
            around: For a batch, the modules that may be called on it.
            windows: Number of passes that share the memory of a reading.
            loss: Computes the loss of the pass; None for none.
        """
        window = self._window(self._options["seed"], *place, rows=rows, windows=windows)
        self._opened = window, step
        made = extra_pass(self._model, inputs, window, around=around, loss=loss)
        if loss is not None:  # a validation that the training asks for, like its own forward pass
            self._budget.leave_out(max(0.0, made.seconds - window.seconds))
        snapshot = window.snapshot(self._home())
        info = replace(snapshot.info, loss=made.loss)
        if made.left_out:
            text = "of each batch the model was given all but {left_out}, by what forward() takes"
            note = Note("parts of a batch", text, numbers={"left_out": made.left_out})
            info = replace(info, notes=[*info.notes, note])
        return replace(snapshot, info=info)

    def _pass_held_out(self, held_out: HeldOut, step: int) -> list[Snapshot]:
        """Make an extra pass over each held-out batch; at first, take the batches."""
        around = (self._model, *self.modules_around_blocks())
        wanted = self._options["tokens"] * self._options["batches"]

        def look(batch: Any) -> tuple[int, int]:
            rows = self._group.rows_of(wanted) or 1
            snapshot = self._pass(batch, step, self._place(), rows, around=around)
            if snapshot.is_empty:  # more batches would show no more
                return wanted, wanted
            numbers = snapshot.layers[0].captured.get("sequences")
            sequences = wanted if numbers is None else len(numbers.unique())
            return snapshot.info.tokens, sequences

        held_out.settle(self._model, self._group, wanted, look)
        shares = held_out.shares(self._group.rows_of(self._rows()))
        passes = []
        for number, (batch, rows) in enumerate(zip(held_out.batches, shares, strict=True)):
            place = (*self._place(), "batch", number) if number else self._place()
            one = self._pass(
                batch, step, place, rows, around=around, windows=len(shares), loss=self._probe_loss
            )
            passes.append(one)
        return passes

    def _place(self) -> tuple[int, ...]:
        """What samples of ranks depend on; the first one's are those of a single process."""
        return (self._group.place,) if self._group.place else ()

    def _sweep(self, step: int | None) -> None:
        """Close a window that Ctrl-C has left open, half open or half closed."""
        if self._opened is None:
            return
        window, opened_at = self._opened
        if opened_at != step or not window.settled:
            window.close()
            self._opened = None

    def _window(self, *seed_of: object, rows: int, windows: int = 1) -> Window:
        self._renew_anatomy()
        most = self._options["max_capture_mb"]
        return Window(
            self._anatomy, self._views, rows=rows, seed=derive_seed(*seed_of),
            max_mb=None if most is None else most / windows,
            extra_layers=self._options["extra_layers"], charge=self._budget.charge,
        )  # fmt: skip

    def _renew_anatomy(self) -> None:
        """Find the anatomy again where modules of the model have come, gone or been replaced.

        Adapters are put around projections, merged and taken off, blocks are added or wrapped: what
        was found before would be looked at in place of what the model runs. Where no blocks are
        found any more, those found before are expected, and a reading says that they did not run.
        """
        modules = tuple(self._model.modules())
        if list(map(id, modules)) == list(map(id, self._modules)):
            return
        self._modules = modules
        with contextlib.suppress(ValueError):
            self._anatomy = find_anatomy(self._model, self._options["blocks"])

    def _home(self) -> torch.device:
        """Where the rows of a pass stay: those that are sent to other ranks go by the host."""
        return HOST if self._group.connected else self._measuring_device.device

    def _rows(self) -> int:
        """Number of rows of hidden states that a reading keeps, over all splits and ranks."""
        return self._budget.rows * self._options["batches"]

    def _takes_part(self) -> bool:
        """Whether this rank's training forward is watched."""
        return self._group.connected or self._group.rank == 0

    # -- from a snapshot to a reading ------------------------------------------------------------

    def _read(
        self,
        step: int,
        source: str,
        capture: Callable[[], list[Snapshot]],
        *,
        began: float,
        copies: bool = True,
        history: ProbeHistory | None = None,
    ) -> None:
        """Make a reading of what is captured, or begin to."""
        self._planner.mark_read(step, source)
        with self._warnings.guard():
            with self._budget.charge():
                job = self._make_job(step, source, capture, began, copies=copies, history=history)
            if job is not None:
                self._pending.append(step)
                with self._budget.charge():  # the training may wait for an earlier reading
                    self._executor.submit(job)
        self._publish_finished()

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
        left_out = self._budget.left_out

        def taken() -> float:
            return time.perf_counter() - began - (self._budget.left_out - left_out)

        try:
            passes = capture()
            self._check(passes[0])
        except (RanksLostError, RankFailedError):  # raised on all ranks alike
            raise
        except Exception as error:  # several ranks fail together
            passes = error
        seconds = taken()
        if not self._takes_part() or self._planner.is_recorded(step, source):
            if isinstance(passes, Exception):
                raise passes
            return None
        try:
            return ReadingJob(
                step, source, passes, self._group, self._evaluator,
                tokens=self._options["tokens"], rows=self._budget.rows, seconds=seconds,
                copies=copies, history=history, place=self._measuring_device,
            )  # fmt: skip
        finally:
            self._budget.learn_capture(taken())

    def _check(self, snapshot: Snapshot) -> None:
        """Warn of what was expected in the first snapshot and is missing."""
        if snapshot.is_empty:  # there is nothing to check, and nothing to record if all ranks' are
            return
        missing = None if self._checked else explain_missing(snapshot, self._views)
        if missing is not None and self._options["strict"]:
            raise NotSeenError(missing)
        if missing is not None:
            self._warnings.warn(missing, kind="not seen")
        self._checked = True

    def _publish_finished(self, *, wait: bool = True) -> None:
        """Record and show the readings that are finished, in order.

        Args:
            wait: Whether the present step's reading waits for values that are to be logged.
        """
        while self._is_own and (job := self._executor.first_finished()) is not None:
            if wait and self._waits(job):
                return
            with self._warnings.guard():
                self._publish(job)

    def _waits(self, job: ReadingJob) -> bool:
        """Whether values may still be logged that belong into a reading."""
        if job.failed or job.step != self._planner.step:
            return False
        return job.step == self._entered or not self._logged.is_complete(job.step)

    def _publish(self, job: ReadingJob) -> None:
        """Record a reading, and show it. After Ctrl-C it is recorded by the next call, and once."""
        with self._budget.charge():
            try:
                reading = self._record_result(job)
            except Exception:
                self._remove(job)
                raise
            self._remove(job)
            if reading is not None:
                self._latest = reading
                self._writer.show(reading)
        if reading is not None:
            self._react(reading)

    def _react(self, reading: Reading) -> None:
        """Call the user's functions; their time is the training's, except in calls of geomon."""
        began, spent = time.perf_counter(), self._budget.spent
        try:
            self._reactions.call(reading)
        finally:
            taken = time.perf_counter() - began - (self._budget.spent - spent)
            self._budget.leave_out(max(0.0, taken))

    def _record_result(self, job: ReadingJob) -> Reading | None:
        reading = job.result()
        if reading is None:
            return None
        reading = msgspec.structs.replace(
            reading,
            # Before the first hardly any training time has passed.
            overhead=math.nan if self._published is None else self.overhead,
            training=reading.training | self._logged.read(reading.step),
            notes=(*self._run_notes(), *job.notes),
        )
        self._published = reading.step
        notes = (*reading.notes, *self._reactions.find_alerts(reading))
        for note in notes:
            words = f"alert: {note.words()}" if note.is_alert else note.words()
            self._warnings.warn(words, kind=f"{note.stack}: {note.kind}")
        reading = msgspec.structs.replace(reading, notes=notes)
        self._writer.record(reading, job.arrays)
        return reading

    def _remove(self, job: ReadingJob) -> None:
        """Remove the first finished job, which is recorded or has failed."""
        if job.step in self._pending:
            self._pending.remove(job.step)
        self._executor.remove_first()

    def _takes_values(self, step: int) -> bool:
        """Whether a reading of a step is made, being made or due: it may hold logged values."""
        present = self._planner.step
        if step in self._pending or step == self._published:
            return True
        if present is None or step > present or step == self._entered:
            return True
        watched = self._opened is not None and self._opened[1] == step
        return step == present and (watched or self._planner.is_wanted)

    def _warn_of_late(self, late: Sequence[str]) -> None:
        """Warn of values whose reading is recorded without them, and have later readings wait."""
        if not late:
            return
        names = ", ".join(map(repr, late))
        option = "log=(" + "".join(f"{name!r}, " for name in late).rstrip() + ")"
        self._warnings.warn(
            f"{names} of step {self._published} came after its reading was recorded, and later "
            f"readings wait for it: log inside `with monitor(step)`, or give Monitor {option}",
            kind=f"late {names}",
        )
        self._logged.wait_for(late)

    # -- the run ---------------------------------------------------------------------------------

    def _run_notes(self) -> list[Note]:
        """Notes that hold for every reading."""
        notes = []
        if (reason := self._group.why_not_connected) is not None:
            text = "rows of the ranks are not gathered, those of rank 0 are measured: {reason}"
            notes.append(Note("not gathered", text, numbers={"reason": reason}))
        names = [block.name for block in self._anatomy.blocks]
        if names != self._names:
            text = (
                "the blocks of the model are not those that the run began with: {now} now, {then} "
                "then"
            )
            numbers = {"now": len(names), "then": len(self._names)}
            notes.append(Note("other blocks", text, numbers=numbers))
        if (reason := self._measuring_device.why_host) is not None:
            text = "measured on the host: {reason}"
            notes.append(Note("measured on the host", text, numbers={"reason": reason}))
        return notes

    def _join_ranks(self) -> RankGroup:
        """The ranks, connected if all were built with the same options; a collective."""
        options = self._options
        schedule = options["schedule"]
        assert callable(schedule)  # of what is checked
        compared = {
            "schedule": first_steps(schedule),
            "metrics": list(options["metrics"]),
            "probe": options["probe"] is not None,
            "layers": [block.name for block in self._anatomy.blocks],
            **{name: options[name] for name in ("tokens", "batches", "queries", "budget", "seed")},
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
        recorded = self._writer.begin(step, self.describe())
        if recorded and self._record is not None and self._reactions.wants_history:
            path = self._record.path
            self._warnings.attempt(
                lambda: self._reactions.recall(r for r in read(path) if r.step < step),
                f"{path} could not be read: phases and alerts begin anew",
            )
        self._planner.skip_recorded(recorded)
        self._planner.skip_recorded(self._group.broadcast(recorded))

    def _in_background(self) -> bool:
        """Whether rows are measured in the background."""
        wanted = self._options["background"]
        device = next((p.device.type for p in self._model.parameters()), "cpu")
        chosen = device not in ("cpu", "meta") if wanted is None else wanted
        # A metric of the user's own may draw random numbers of the training, whose states are put
        # back around it: not while the training draws.
        return chosen and not self._evaluator.has_own_metrics and not self._group.connected


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
