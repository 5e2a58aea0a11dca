"""The monitor: `with monitor(step): model(x)`.

It joins schedule, window, metrics, record and sinks, and lets none of them end a run.
"""

import hashlib
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from geomon import tags
from geomon.anatomy import Anatomy, find_anatomy
from geomon.capture import Window
from geomon.evaluate import evaluate
from geomon.gather import RankFailedError, share_of_rows
from geomon.layer import Snapshot
from geomon.metrics import METRICS, Metric, check_metrics, views_of
from geomon.notes import Note
from geomon.probing import extra_pass
from geomon.ranks import Ranks, RanksLostError, find_ranks, join_ranks, refusal
from geomon.record import Reading, Record
from geomon.schedule import Schedule, check_schedule, log_spaced
from geomon.selfcheck import NotSeenError, complaint
from geomon.sinks import Sink
from geomon.together import Found, measure_alone, measure_together

log = logging.getLogger("geomon")

_Value = TypeVar("_Value")

__version__ = "0.1.0"

# Steps that are remembered as read: a step comes again at once (accumulated gradients) or never.
_REMEMBERED = 10_000


class Monitor:
    """Reads the geometry of a model's representations at scheduled steps.

    Args:
        model: Any module that contains a transformer.
        metrics: From a name to a function of views; `METRICS` are all that geomon has.
        schedule: From a step to whether a reading is due; step 0 always is.
        tokens: Rows in one batch of the estimate.
        batches: Largest number of such batches, for the deviation of each estimate.
        probe: Fixed inputs: at due steps they are passed through the model in an extra pass, in
            eval mode, instead of watching the training forward. A tensor, a dict of keyword
            arguments, a tuple of arguments, or a function of the model.
        directory: Where `readings.jsonl` is written, by the first rank; None for no record.
        sinks: Where readings go besides, on the first rank.
        gather: With several ranks, whether a reading is that of the rows of all: each keeps its
            share of them, the layers are shared out to be measured, and the first rank records.
            Every rank builds the monitor, once `torch.distributed` is initialised, and calls it
            with the same steps. A rank that does not answer within ten minutes ends the gathering,
            never the run. If False the first rank measures its own rows and nothing is said between
            ranks.
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
        gather: bool = True,
        seed: int = 0,
        strict: bool = False,
        blocks: str | Sequence[nn.Module] | None = None,
    ) -> None:
        check_counts(tokens=tokens, batches=batches)
        self._model = model
        self._metrics = check_metrics(metrics)
        self._schedule = check_schedule(log_spaced() if schedule is None else schedule)
        self._tokens = tokens
        self._batches = batches
        self._probe_inputs = probe
        self._sinks = list(sinks)
        self._seed = seed
        self._strict = strict
        self._anatomy: Anatomy = find_anatomy(model, blocks)
        self._views = views_of(self._metrics)
        self._notes: list[Note] = []  # of every reading
        self._warned: set[str] = set()
        self._all_seen = False  # by the first window, or said that not
        self._ranks = self._join() if gather else find_ranks()
        self._record = self._make_record(directory)
        self._done: dict[tuple[int, str], None] = {}  # by this process: the same on every rank
        self._recorded: set[tuple[int, str]] = set()  # before it, in the record
        self._started: float | None = None
        self._spent = 0.0

    def __call__(self, step: int, *, force: bool = False) -> AbstractContextManager[None]:
        """A context manager around the forward pass of a step; does nothing where none is due.

        With `probe` inputs, the extra pass runs when the context is entered and the forward pass
        itself is left alone.

        Args:
            step: Number of optimizer updates already in the weights.
            force: Read whatever the schedule says (the last step of a run, say).
        """
        source = "inline" if self._probe_inputs is None else "probe"
        if not self.due(step, source=source, force=force):
            return nullcontext()
        if source == "inline":
            takes_part = self._ranks.linked or self._ranks.rank == 0
            return self._inline(step) if takes_part else nullcontext()
        return self._probing(step)

    def due(self, step: int, *, source: str = "inline", force: bool = False) -> bool:
        """Whether a reading from `source` is to be made at `step`: due, and not made already."""
        scheduled = force or step == 0 or self._schedule(step)
        if not scheduled:
            return False
        if self._started is None:
            self._begin(step)
        if (step, source) in self._done:
            return False
        if self._ranks.linked or self._ranks.size == 1:
            return (step, source) not in self._recorded
        # Only the first rank knows the record: were it to skip a probe's pass that the others run,
        # a sharded model would hang. Without a line the pass is run again, and not recorded twice.
        return True

    def probe(self, step: int, inputs: Any = None) -> None:
        """Read the geometry on fixed inputs in an extra pass.

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
        """Flush and close the sinks; may be called more than once."""
        for sink in self._sinks:
            self._safely(sink.close, f"closing {type(sink).__name__} failed")
        self._sinks = []

    @property
    def overhead(self) -> float:
        """Share of the time since the first step that geomon took; NaN before the first step."""
        if self._started is None:
            return math.nan
        return self._spent / max(time.perf_counter() - self._started, 1e-9)

    # -- the two ways to look ------------------------------------------------------------------

    @contextmanager
    def _inline(self, step: int) -> Iterator[None]:
        own = share_of_rows(self._rows, self._ranks) if self._ranks.linked else self._rows
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
        window = self._window(self._seed, rows=self._rows)
        extra_pass(self._model, inputs, window)
        return self._checked(window.snapshot())

    def _checked(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot; of the first one, what was expected in it and not seen is said."""
        unseen = None if self._all_seen else complaint(snapshot, self._views)
        if unseen is not None and self._strict:
            raise NotSeenError(unseen)
        if unseen is not None:
            self._warn(unseen, kind="not seen")
        self._all_seen = True
        return snapshot

    def _window(self, *of: object, rows: int) -> Window:
        return Window(self._anatomy, self._views, rows=rows, seed=_draw(*of))

    @property
    def _rows(self) -> int:
        """Rows of hidden states for a whole reading."""
        return self._tokens * self._batches

    # -- from what was seen to a reading ---------------------------------------------------------

    def _take(self, step: int, source: str, look: Callable[[], Snapshot], began: float) -> None:
        """Look, measure, record the reading, then show it."""
        self._done[step, source] = None
        if len(self._done) > _REMEMBERED:
            del self._done[next(iter(self._done))]
        with self._guard():
            found = self._measure(step, source, look)
            # Without a line the other ranks do not know what the record holds.
            if found is not None and (step, source) not in self._recorded:
                self._hand_out(self._reading(step, source, found, began))

    def _measure(self, step: int, source: str, look: Callable[[], Snapshot]) -> Found | None:
        """What was found, on the first rank; with a line between ranks a collective."""
        if not self._ranks.linked:
            snapshot = look()
            if self._ranks.rank > 0:
                return None
            return measure_alone(
                snapshot, self._metrics, rows=self._tokens, batches=self._batches,
                strict=self._strict,
            )  # fmt: skip
        seen: Snapshot | Exception
        try:
            seen = look()
        except Exception as error:
            seen = error
        return measure_together(
            seen, (step, source), self._ranks, self._metrics, rows=self._tokens,
            batches=self._batches, strict=self._strict, copies=source == "probe",
        )  # fmt: skip

    def _reading(self, step: int, source: str, found: Found, began: float) -> Reading:
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
            self._warn(note.text, kind=note.kind)
        seconds = time.perf_counter() - began
        values = {**found.values, tags.SECONDS: seconds}
        first = self._spent == 0  # before the first reading no training time has passed
        self._spent += seconds
        if not first:
            values[tags.OVERHEAD] = self.overhead
        return Reading(
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

    def _hand_out(self, reading: Reading) -> None:
        """To the record first: what has been shown is never lost."""
        began = time.perf_counter()
        if self._record is not None:
            record = self._record
            self._safely(lambda: record.write(reading), f"{record.path} could not be written")
        for sink in list(self._sinks):
            message = f"{type(sink).__name__} failed and is left out from here on"
            if not self._safely(lambda sink=sink: sink.write(reading), message):  # type: ignore[misc]
                self._sinks.remove(sink)
        self._spent += time.perf_counter() - began

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
        failure = self._from_first(failure)
        if failure is not None:
            raise failure
        return record

    def _begin(self, step: int) -> None:
        """The first step that is read: learn what the record holds already."""
        self._started = time.perf_counter()
        if self._record is not None:
            record = self._record
            self._safely(
                lambda: self._recorded.update(record.begin(step, self._describe())),
                f"{record.path} could not be read and is kept under another name",
            )
        self._recorded = self._from_first(self._recorded)

    def _from_first(self, value: _Value) -> _Value:
        """What the first rank has; this rank's own where there is no line."""
        if self._ranks.linked:
            with self._guard():
                return self._ranks.hand_out(value)
        return value

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

    # -- a reading that goes wrong never ends a run -----------------------------------------------

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except RanksLostError as error:
            self._ranks.part()
            if self._strict:
                raise
            log.warning(
                "rank %d lost the other ranks (%s): their rows are no longer gathered, rank 0 "
                "goes on with its own",
                self._ranks.rank,
                error,
            )
        except Exception as error:
            if self._strict:
                raise
            kind = "" if isinstance(error, RankFailedError) else f"{type(error).__name__}: "
            self._warn(f"a reading failed and is left out: {kind}{error}")

    def _safely(self, action: Callable[[], Any], message: str) -> bool:
        try:
            action()
        except Exception as error:
            if self._strict:
                raise
            self._warn(f"{message}: {type(error).__name__}: {error}")
            return False
        return True

    def _warn(self, message: str, *, kind: str | None = None) -> None:
        """Say it once in the log, on one rank; the record has notes with every reading."""
        kind = message if kind is None else kind
        heard = self._ranks.rank == 0 or not self._ranks.linked
        if heard and kind not in self._warned:
            self._warned.add(kind)
            log.warning(message)


def measure(
    model: nn.Module,
    inputs: Any,
    *,
    metrics: Mapping[str, Metric] = METRICS,
    tokens: int = 4096,
    batches: int = 2,
    seed: int = 0,
    blocks: str | Sequence[nn.Module] | None = None,
) -> dict[str, float]:
    """Measure a model once, without training: `{tag: float}`.

    Args:
        model: Any module that contains a transformer.
        inputs: A tensor, a dict of keyword arguments, a tuple of arguments, or a function of the
            model.
        metrics: As of `Monitor`, and so are the rest.
        tokens: Rows in one batch of the estimate.
        batches: Largest number of such batches.
        seed: Of the private generator that draws rows.
        blocks: Overrides the search for the blocks.

    Raises:
        ValueError: As `Monitor`.
        NotSeenError: Something that the metrics read was not seen in the pass.
    """
    check_counts(tokens=tokens, batches=batches)
    checked = check_metrics(metrics)
    views = views_of(checked)
    window = Window(
        find_anatomy(model, blocks), views, rows=tokens * batches, seed=_draw(seed)
    )  # fmt: skip
    extra_pass(model, inputs, window)
    snapshot = window.snapshot()
    unseen = complaint(snapshot, views)
    if unseen is not None:
        raise NotSeenError(unseen)
    return evaluate(snapshot, checked, rows=tokens, batches=batches, strict=True).values


def _draw(*of: object) -> int:
    """The seed of a private generator."""
    text = " ".join(map(str, of))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def check_counts(**counts: int) -> None:
    """Raise a `ValueError` for a count that is not a whole number of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is a whole number of at least 1, got {value!r}")
