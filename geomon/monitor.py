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
from typing import Any

import torch
from torch import nn

from geomon import tags
from geomon.anatomy import Anatomy, find_anatomy
from geomon.capture import Window
from geomon.evaluate import evaluate
from geomon.layer import Snapshot
from geomon.metrics import METRICS, Metric, check_metrics, views_of
from geomon.notes import Note
from geomon.probing import extra_pass
from geomon.record import Reading, Record
from geomon.schedule import Schedule, check_schedule, log_spaced
from geomon.sinks import Sink

log = logging.getLogger("geomon")

__version__ = "0.1.0"


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
        directory: Where `readings.jsonl` is written; None for no record.
        sinks: Where readings go besides.
        seed: Of the private generator that draws rows, together with the step.
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
        self._rank, self._world_size = _place_among_ranks()
        self._record = Record(directory) if directory is not None and self._rank == 0 else None
        self._done: set[tuple[int, str]] = set()  # by this process: the same on every rank
        self._recorded: set[tuple[int, str]] = set()  # before it, in the record
        self._warned: set[str] = set()
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
            return self._inline(step) if self._rank == 0 else nullcontext()
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
        # Only the first rank knows the record: were it to skip a probe's pass that the others run,
        # a sharded model would hang. With many ranks the pass is run again, and not recorded twice.
        return self._world_size > 1 or (step, source) not in self._recorded

    def probe(self, step: int, inputs: Any = None) -> None:
        """Read the geometry on fixed inputs in an extra pass.

        The pass runs without autograd, in eval mode, with the random state forked; every module's
        training flag is restored. With many ranks all run the pass (a sharded model hangs
        otherwise) and the first one measures.

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
        with self._guard(step, "probe"):
            snapshot = self._look(inputs)
            self._take(step, "probe", snapshot, began)

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
        window = self._window(f"{self._seed} {step}")
        with ExitStack() as stack:
            opened = False
            with self._guard(step, "inline"):
                stack.enter_context(window)
                opened = True
            yield
        if opened:
            began = time.perf_counter() - window.seconds
            with self._guard(step, "inline"):
                self._take(step, "inline", window.snapshot(), began)

    @contextmanager
    def _probing(self, step: int) -> Iterator[None]:
        self.probe(step)
        yield

    def _look(self, inputs: Any) -> Snapshot:
        """An extra pass on `inputs` under a window."""
        # The same inputs, the same rows: readings then differ by the weights alone.
        window = self._window(f"{self._seed}")
        extra_pass(self._model, inputs, window)
        return window.snapshot()

    def _window(self, draw: str) -> Window:
        seed = int.from_bytes(hashlib.sha256(draw.encode()).digest()[:7], "big")
        rows = self._tokens * self._batches
        return Window(self._anatomy, self._views, rows=rows, seed=seed)

    # -- from a snapshot to a reading ----------------------------------------------------------

    def _take(self, step: int, source: str, snapshot: Snapshot, began: float) -> None:
        """Measure a snapshot, record the reading, then show it."""
        self._done.add((step, source))
        if self._rank > 0 or (step, source) in self._recorded:
            return
        result = evaluate(
            snapshot,
            self._metrics,
            rows=self._tokens,
            batches=self._batches,
            strict=self._strict,
        )
        notes = snapshot.notes + result.notes
        if snapshot.tokens < self._tokens:
            notes.append(
                Note(
                    "few rows",
                    f"estimates stand on {snapshot.tokens} rows, fewer than tokens={self._tokens}: "
                    "the intrinsic dimension is low on few rows",
                )
            )
        for note in notes:
            self._warn(note.text, kind=note.kind)
        seconds = time.perf_counter() - began
        values = {**result.values, tags.SECONDS: seconds}
        first = self._spent == 0  # before the first reading no training time has passed
        self._spent += seconds
        if not first:
            values[tags.OVERHEAD] = self.overhead
        reading = Reading(
            step=step,
            time=time.time(),
            seconds=seconds,
            source=source,
            mode=snapshot.mode,
            tokens=snapshot.tokens,
            world_size=self._world_size,
            dtype=snapshot.dtype,
            values=values,
            notes=[note.text for note in notes],
        )
        self._hand_out(reading)

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

    def _begin(self, step: int) -> None:
        """The first step that is read: open the record, and learn what it holds already."""
        self._started = time.perf_counter()
        if self._record is not None:
            record = self._record
            self._safely(
                lambda: self._recorded.update(record.begin(step, self._describe())),
                f"{record.path} could not be opened",
            )

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
        }

    # -- a reading that goes wrong never ends a run -----------------------------------------------

    @contextmanager
    def _guard(self, step: int, source: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._strict:
                raise
            self._done.add((step, source))
            self._warn(f"a reading failed and is left out: {type(error).__name__}: {error}")

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
        """Say it once in the log; the record has notes with every reading."""
        kind = message if kind is None else kind
        if kind not in self._warned:
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
    """
    seen: list[Reading] = []

    class _Once:
        def write(self, reading: Reading) -> None:
            seen.append(reading)

        def close(self) -> None: ...

    monitor = Monitor(
        model, metrics=metrics, tokens=tokens, batches=batches, probe=inputs, directory=None,
        sinks=[_Once()], seed=seed, strict=True, blocks=blocks,
    )  # fmt: skip
    monitor.probe(0)
    return {tag: value for tag, value in seen[0].values.items() if not tag.startswith("geomon/")}


def check_counts(**counts: int) -> None:
    """Raise a `ValueError` for a count that is not a whole number of at least 1."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is a whole number of at least 1, got {value!r}")


def _place_among_ranks() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
