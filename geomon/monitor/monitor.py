"""The monitor: `with monitor(step): model(x)`.

It joins schedule, window, metrics, record and sinks, and lets none of them end a run.
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from geomon.capture.anatomy.blocks import Anatomy, find_anatomy
from geomon.capture.probe import extra_pass
from geomon.capture.sampling import drawing_seed
from geomon.capture.selfcheck import NotSeenError, complaint
from geomon.capture.snapshot import Snapshot
from geomon.capture.window import Window
from geomon.distributed.gather import share_of_rows
from geomon.distributed.group import Ranks, find_ranks, join_ranks, refusal
from geomon.metrics.cautions import Note
from geomon.metrics.table import METRICS, Metric, check_metrics, views_of
from geomon.monitor.background import Background
from geomon.monitor.budget import Budget
from geomon.monitor.executor import Measuring
from geomon.monitor.jobs import UnderWay
from geomon.monitor.options import check_counts
from geomon.monitor.output import Outlet
from geomon.monitor.planner import Agenda
from geomon.monitor.schedule import Schedule, check_schedule, log_spaced
from geomon.monitor.together import Found, measure_together
from geomon.record import tags
from geomon.record.reading import Reading, Record
from geomon.record.sinks import Sink

__version__ = "0.1.0"


class Monitor:
    """Reads the geometry of a model's representations at scheduled steps.

    Args:
        model: Any module that contains a transformer.
        metrics: From a name to a function of views; `METRICS` are all that geomon has.
        schedule: From a step to whether a reading is due; step 0 always is. A step that is due and
            that training jumps over is read at the next one.
        tokens: Rows in one batch of the estimate.
        batches: Largest number of such batches, for the deviation of each estimate.
        probe: Fixed inputs: at due steps they are passed through the model in an extra pass, in
            eval mode, instead of watching the training forward. A tensor, a dict of keyword
            arguments, a tuple of arguments, or a function of the model.
        directory: Where `readings.jsonl` is written, by the first rank; None for no record.
        sinks: Where readings go besides, on the first rank.
        budget: Largest share of the time since the first step that geomon may take, 0.01 for one
            per cent; None follows the schedule whatever it costs. A reading that is due is put off
            until it can be paid, and measured layer by layer as time allows; where it would cost
            more than a hundred steps' allowance it stands on fewer rows, and says so. What is
            forced (an explicit `probe`) is read in any case.
        gather: With several ranks, whether a reading is that of the rows of all: each keeps its
            share of them, the layers are shared out to be measured, and the first rank records.
            Every rank builds the monitor, once `torch.distributed` is initialised, and calls it
            with the same steps. A rank that does not answer within ten minutes ends the gathering,
            never the run. If False the first rank measures its own rows and nothing is said between
            ranks.
        background: Whether rows are measured in a thread while the training goes on; None does so
            where the model is on an accelerator, which leaves the processor idle. Gathered rows are
            measured at once.
        max_capture_mb: Largest memory of what one reading keeps of a pass, in millions of bytes:
            fewer rows, queries and keys are kept if need be, attention that does not fit is left
            out, and the reading says so. None for no limit.
        seed: Of the private generator that draws rows, together with the step and the rank.
        strict: Raise what goes wrong in a reading, instead of a warning and a missing value.
        blocks: Overrides the search for the blocks: a regular expression of their names, or the
            modules.

    Raises:
        ValueError: No blocks in the model, an unknown view, a schedule that never fires, a number
            out of range, or a directory that cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        metrics: Mapping[str, Metric] = METRICS,
        schedule: Schedule | None = None,
        tokens: int = 4096,
        batches: int = 2,
        probe: Any = None,
        directory: str | os.PathLike[str] | None = "geomon",
        sinks: Sequence[Sink] = (),
        budget: float | None = None,
        gather: bool = True,
        background: bool | None = None,
        max_capture_mb: float | None = None,
        seed: int = 0,
        strict: bool = False,
        blocks: str | Sequence[nn.Module] | None = None,
    ) -> None:
        check_counts(tokens=tokens, batches=batches)
        self._model = model
        self._metrics = check_metrics(metrics)
        schedule = check_schedule(log_spaced() if schedule is None else schedule)
        self._tokens = tokens
        self._batches = batches
        self._probe_inputs = probe
        self._budget = Budget(budget, tokens)
        if max_capture_mb is not None and not max_capture_mb > 0:
            raise ValueError(f"max_capture_mb is a number above 0, or None, got {max_capture_mb!r}")
        self._max_mb = max_capture_mb
        self._seed = seed
        self._strict = strict
        self._anatomy: Anatomy = find_anatomy(model, blocks)
        self._views = views_of(self._metrics)
        self._notes: list[Note] = []  # of every reading
        self._all_seen = False  # by the first window, or said that not
        self._ranks = self._join() if gather else find_ranks()
        if budget is not None and self._ranks.size > 1 and not self._ranks.linked:
            raise ValueError(
                "a budget is one decision for all ranks, which they share where their rows are "
                "gathered: use gather=True, or budget=None"
            )
        self._outlet = Outlet(sinks, self._ranks, strict=strict)
        self._outlet.record = self._make_record(directory)
        self._agenda = Agenda(
            schedule, self._budget, self._ranks, self._outlet.from_first, tokens=tokens,
            layers=self._own_layers,
        )  # fmt: skip
        self._schedule = schedule
        self._begun = False
        self._handed_out = False
        behind = Background() if self._is_behind(background) else None
        self._measuring = Measuring(self._budget, behind, self._outlet, self._hand_out)

    def __call__(self, step: int, *, force: bool = False) -> AbstractContextManager[None]:
        """A context manager around the forward pass of a step; does nothing where none is due.

        With `probe` inputs, the extra pass runs when the context is entered and the forward pass
        itself is left alone.

        Args:
            step: Number of optimizer updates already in the weights.
            force: Read whatever the schedule and the budget say (the last step of a run, say).
        """
        source = "inline" if self._probe_inputs is None else "probe"
        if not self.due(step, source=source, force=force):
            return nullcontext()
        if source == "inline":
            takes_part = self._ranks.linked or self._ranks.rank == 0
            return self._inline(step) if takes_part else nullcontext()
        return self._probing(step)

    def due(self, step: int, *, source: str = "inline", force: bool = False) -> bool:
        """Whether a reading from `source` is to be made at `step`: due, paid for, and not made yet.

        Every step of the training passes here, so what an earlier one left to do is gone on with.

        Args:
            step: Number of optimizer updates already in the weights.
            source: "inline" or "probe".
            force: Whatever the schedule and the budget say.
        """
        if self._agenda.go_to(step):
            self._measuring.go_on()
        if not self._agenda.wants(step, force=force):
            return False
        if not self._begun:
            self._begin(step)
        return self._agenda.admits(step, source, force=force, busy=self._measuring.busy)

    def probe(self, step: int, inputs: Any = None) -> None:
        """Read the geometry on fixed inputs in an extra pass, whatever the schedule and budget say.

        The pass runs without autograd, in eval mode, with the random state forked; every module's
        training flag is restored. With many ranks all run the pass (a sharded model hangs
        otherwise), on inputs that are the same for all: the rows are those of the first rank, and
        the layers are shared out to be measured.

        Args:
            step: Number of optimizer updates already in the weights.
            inputs: As the monitor's `probe`; None takes those.

        Raises:
            ValueError: No inputs, here or in the monitor.
        """
        inputs = self._probe_inputs if inputs is None else inputs
        if inputs is None:
            raise ValueError(
                "no inputs to probe: give them here, probe(step, inputs), or to the monitor, "
                "Monitor(model, probe=inputs)"
            )
        if not self.due(step, source="probe", force=True):
            return
        began = time.perf_counter()
        self._take(step, "probe", lambda: self._look(inputs), began)

    def close(self) -> None:
        """Finish what is being measured, and close the sinks; may be called more than once."""
        self._measuring.close()
        self._outlet.close()

    @property
    def overhead(self) -> float:
        """Share of the time since the first step that geomon took; NaN before the first step."""
        return self._budget.overhead

    def affords(self, seconds: float) -> bool:
        """Whether `seconds` more of geomon's time would stay within the budget."""
        return self._budget.affords(seconds)

    def affords_reading(self) -> bool:
        """Whether one more reading would stay within the budget, for all ranks; a collective.

        Adapters ask before the last reading of a run, which they would else force.
        """
        return self._agenda.affords_reading()

    # -- the two ways to look ------------------------------------------------------------------

    @contextmanager
    def _inline(self, step: int) -> Iterator[None]:
        rows = self._agenda.rows * self._batches
        own = share_of_rows(rows, self._ranks) if self._ranks.linked else rows
        # Ranks draw different places; the first one's are those of a single process.
        place = (self._ranks.rank,) if self._ranks.rank else ()
        window = self._window(self._seed, step, *place, rows=own)
        failure: Exception | None = None
        with ExitStack() as stack:
            try:
                stack.enter_context(window)
            except Exception as error:
                failure = error
            yield

        def look() -> Snapshot:
            if failure is not None:
                raise failure
            return self._checked(window.snapshot())

        self._take(step, "inline", look, time.perf_counter() - window.seconds)

    @contextmanager
    def _probing(self, step: int) -> Iterator[None]:
        self.probe(step)
        yield

    def _look(self, inputs: Any) -> Snapshot:
        """An extra pass on `inputs` under a window."""
        # The same inputs, the same rows: readings then differ by the weights alone.
        window = self._window(self._seed, rows=self._agenda.rows * self._batches)
        extra_pass(self._model, inputs, window)
        return self._checked(window.snapshot())

    def _checked(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot; of the first one, what was expected in it and not seen is said."""
        unseen = None if self._all_seen else complaint(snapshot, self._views)
        if unseen is not None and self._strict:
            raise NotSeenError(unseen)
        if unseen is not None:
            self._outlet.warn(unseen, kind="not seen")
        self._all_seen = True
        return snapshot

    def _window(self, *of: object, rows: int) -> Window:
        seed = drawing_seed(*of)
        return Window(self._anatomy, self._views, rows=rows, seed=seed, max_mb=self._max_mb)

    def _own_layers(self) -> int:
        """Layers that this process measures of one reading, about."""
        layers = len(self._anatomy.blocks) + 1
        return -(-layers // self._ranks.size) if self._ranks.linked else layers

    # -- from what was seen to a reading ---------------------------------------------------------

    def _take(self, step: int, source: str, look: Callable[[], Snapshot], began: float) -> None:
        """Look, and have measured what was seen."""
        self._agenda.take(step, source)
        with self._outlet.guard():
            if self._ranks.linked:
                self._measure_together(step, source, look, began)
                return
            snapshot = look()
            # Without a line the other ranks do not know what the record holds.
            if self._ranks.rank > 0 or (step, source) in self._agenda.recorded:
                return
            reading = UnderWay(
                step, source, snapshot, self._metrics, rows=self._tokens, batches=self._batches,
                strict=self._strict, seconds=time.perf_counter() - began,
            )  # fmt: skip
            self._budget.looked(reading.seconds)
            self._measuring.start(reading)

    def _measure_together(
        self, step: int, source: str, look: Callable[[], Snapshot], began: float
    ) -> None:
        """Measure the rows of all ranks; a collective."""
        seen: Snapshot | Exception
        try:
            seen = look()
        except Exception as error:
            seen = error
        self._budget.looked(time.perf_counter() - began)
        looked = time.perf_counter()
        found = measure_together(
            seen, (step, source), self._ranks, self._metrics, rows=self._agenda.rows,
            batches=self._batches, strict=self._strict, copies=source == "probe",
        )  # fmt: skip
        taken = time.perf_counter() - looked
        self._budget.spend(taken)
        self._budget.learn(self._agenda.rows, taken / self._own_layers())
        if found is not None:
            self._hand_out(step, source, found, time.perf_counter() - began)

    def _hand_out(self, step: int, source: str, found: Found, seconds: float) -> None:
        """Make a reading of what was found, and record and show it."""
        began = time.perf_counter()
        notes = self._notes + found.notes
        if found.tokens < self._tokens:
            notes.append(
                Note(
                    "few rows",
                    f"estimates stand on {found.tokens} rows, fewer than tokens={self._tokens}: "
                    "the intrinsic dimension is low on few rows",
                )
            )
        for note in notes:
            self._outlet.warn(note.text, kind=note.kind)
        values = {**found.values, tags.SECONDS: seconds}
        if self._handed_out:  # before the first reading hardly any training time has passed
            values[tags.OVERHEAD] = self.overhead
        self._handed_out = True
        reading = Reading(
            step=step,
            time=time.time(),
            seconds=seconds,
            source=source,
            mode=found.mode,
            tokens=found.tokens,
            world_size=self._ranks.size,
            dtype=found.dtype,
            values=values,
            notes=[note.text for note in notes],
        )
        self._outlet.write(reading)
        self._budget.spend(time.perf_counter() - began)

    # -- the ranks and the record ----------------------------------------------------------------

    def _join(self) -> Ranks:
        """The ranks, with a line between them where their rows can be gathered; a collective."""
        ranks = find_ranks()
        why = refusal(self._model) if ranks.size > 1 else None
        if why is None:
            return join_ranks()
        text = f"rows of the ranks are not gathered, those of rank 0 are measured: {why}"
        self._notes.append(Note("not gathered", text))
        return ranks

    def _make_record(self, directory: str | os.PathLike[str] | None) -> Record | None:
        """The record, on the first rank; where it cannot be made all ranks raise the same."""
        record: Record | None = None
        failure: ValueError | None = None
        if directory is not None and self._ranks.rank == 0:
            try:
                record = Record(directory)
            except ValueError as error:
                failure = error
        failure = self._outlet.from_first(failure)
        if failure is not None:
            raise failure
        return record

    def _begin(self, step: int) -> None:
        """The first step that is read: learn what the record holds already."""
        self._begun = True
        self._budget.begin()
        self._agenda.recorded = self._outlet.from_first(self._outlet.begin(step, self._describe()))

    def _describe(self) -> dict[str, Any]:
        """The line that describes the run."""
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        return {
            "geomon": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "model": type(self._model).__name__,
            "parameters": parameters,
            "layers": [block.name for block in self._anatomy.blocks],
            "metrics": list(self._metrics),
            "schedule": repr(self._schedule),
            "tokens": self._tokens,
            "batches": self._batches,
            "seed": self._seed,
            "world_size": self._ranks.size,
            "gather": self._ranks.linked,
        }

    def _is_behind(self, wanted: bool | None) -> bool:
        """Whether what was seen is measured in the background."""
        device = next((p.device.type for p in self._model.parameters()), "cpu")
        chosen = device not in ("cpu", "meta") if wanted is None else wanted
        return chosen and not self._ranks.linked
