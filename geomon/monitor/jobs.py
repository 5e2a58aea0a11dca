"""A job measures one reading, layer by layer, from the snapshots of one rank or of all."""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from geomon.analysis import Inputs
from geomon.capture import (
    ATTENTION_QUERIES,
    HOST,
    Layer,
    NotSeenError,
    Snapshot,
    explain_missing,
)
from geomon.distributed import RankFailedError, RankGroup, gather, merge_layers
from geomon.failures import failures
from geomon.metrics import Evaluator, LayerValues, in_modes, in_pieces
from geomon.monitor.device import MeasuringDevice, first_line
from geomon.monitor.moves import Moves
from geomon.note import Note
from geomon.note_kinds import NoteKind
from geomon.record import Arrays, Reading, tags

# Source of a reading of few columns, which only alerts look at.
CHECK = "check"
# Each rank's part of one layer.
_Parts = tuple[Layer, ...]
# Calls a function with arguments, somewhere.
Call = Callable[..., Any]


class ReadingJob:
    """One reading between its snapshot and its values.

    Making a job communicates nothing. With several ranks, beginning and finishing it are
    collectives: the rows of all ranks are gathered, and each rank measures its share of the layers.

    Args:
        step: Number of optimizer updates in the weights that were seen.
        source: "inline", "probe" or "check".
        group: The ranks.
        evaluator: Measures the layers.
        rows: Number of rows of hidden states in one split.
        place: Device that measures the layers.
        same_inputs: Whether all ranks have the same inputs (a probe). Defaults to False.
        inputs: Arguments of the model's call, or None if nobody needs them.
        moves: How the weights have moved since the last look, or None if that is unknown.

    Attributes:
        arrays: Arrays for figures, once the job is finished.
        notes: Notes on where and why its rows were measured.
        finished: Whether the reading is made or has failed, so that `result` can be called.
        done: Set once the next job may finish.
        seconds: Seconds by which the reading delayed the training.
    """

    def __init__(
        self,
        step: int,
        source: str,
        group: RankGroup,
        evaluator: Evaluator,
        *,
        rows: int,
        place: MeasuringDevice,
        same_inputs: bool = False,
        inputs: Inputs | None = None,
        moves: Moves | None = None,
    ) -> None:
        self.step, self.source, self.inputs = step, source, inputs
        self.rows = rows
        self.seconds = 0.0
        self.arrays: Arrays = {}
        self.notes: list[Note] = []
        self.finished, self.done = False, threading.Event()
        self._group, self._evaluator = group, evaluator
        self._place, self._same_inputs = place, same_inputs
        self._moves = moves
        self._measured: list[LayerValues] = []
        self._failing: set[str] = set()  # metrics that fail on the host as well
        self._call: Call | None = None
        self._failure: Exception | None = None
        self._reading: Reading | None = None

    def begin(self, passes: Sequence[Snapshot] | Exception, seconds: float) -> None:
        """Gather the rows of all ranks, given each pass's snapshot or an error; a collective.

        Raises RankFailedError if a rank lacks a snapshot or has different layers (a single rank
        raises its own exception), RanksLostError if a rank does not answer, and NotSeenError if no
        rank saw a block.
        """
        began = time.perf_counter()
        self._gathered = gather(
            passes, (self.step, self.source), self._group,
            rows=self.rows * self._evaluator.splits, queries=ATTENTION_QUERIES,
            same_inputs=self._same_inputs,
        )  # fmt: skip
        if self._gathered.empty:
            assert not isinstance(passes, Exception)
            missing = explain_missing(passes[0], self._evaluator.views)
            raise NotSeenError(missing or "no block ran")
        # All layers, in order; measured ones are empty, because their rows are freed.
        self._parts = self._gathered.parts
        self._device = self._place.device
        why = self._place.why_not([layer for parts in self._parts for layer in parts])
        if why is not None:
            self._go_to_host(why)
        self._ready = self._place.mark_ready()
        self.seconds = seconds + time.perf_counter() - began

    @property
    def is_collective(self) -> bool:
        """Whether other ranks take part, so that it must be measured immediately."""
        return self._group.members > 1

    @property
    def left(self) -> int:
        """Number of layers that this rank still has to measure."""
        return len(self._parts) - len(self._measured)

    @property
    def _left(self) -> list[_Parts]:
        """The layers that are not measured yet."""
        return self._parts[len(self._measured) :]

    @property
    def failed(self) -> bool:
        """Whether the job was given up, so that `result` raises."""
        return self._failure is not None

    def measure(self, at_once: int | None = None, call: Call | None = None) -> None:
        """Measure the remaining layers and make the reading; errors are kept for `result`.

        If the host measures, it does so by `call(function, *args)`, which may use another process.
        """
        self._call = call
        try:
            while self.left > 0:
                self.measure_next(at_once or self.left)
        except failures() as error:
            self.fail(error)
        self.finish()

    def measure_next(self, count: int = 1) -> None:
        """Measure more layers, as many at once as pays, and free their captured views."""
        began = time.perf_counter()
        if self._device == HOST and self._ready is not None:
            self._ready.synchronize()  # copies to the host are queued behind the training's work
        for found in self._measure(self._left[:count]):
            # Only this line marks a layer as measured: an interrupted one is measured again.
            self._measured.append(found)
            self._parts[len(self._measured) - 1] = ()
        self.seconds += time.perf_counter() - began

    def alongside_training(self) -> AbstractContextManager[None]:
        """Return a context manager for measuring in this thread while another thread trains."""
        return self._place.alongside_training(self._ready)

    def _measure(self, layers: Sequence[_Parts]) -> Iterator[LayerValues]:
        """Yield the values of layers in order, several measured at once on the host.

        On the host, this happens outside of the training's torch modes.
        """
        on_host = self._device == HOST
        left = [parts[0] for parts in self._left]
        at_once = self._evaluator.layers_at_once(left, self.rows) if on_host else 1
        if on_host and self._call is not None:
            measure = functools.partial(self._call, _measure_at_once, self._evaluator)
            return (measure(self._whole(parts), self.rows, at_once) for parts in layers)
        return in_pieces(
            self._measure_one, layers, self._evaluator.source_groups, at_once,
            outside=on_host and in_modes(),
        )  # fmt: skip

    def _measure_one(self, parts: _Parts) -> LayerValues:
        """Measure a layer on its device; if that fails, move it and later ones to the host."""
        if self._device == HOST:
            return self._evaluator.measure_layer(self._whole(parts), self.rows)
        try:
            whole = self._whole(parts, self._device)
            found = self._evaluator.measure_layer(whole, self.rows)
        except torch.OutOfMemoryError as error:
            name, why = "", f"{self._device} does not have enough memory ({first_line(error)})"
        else:
            failed = found.failed | found.without_margin
            if failed.keys() <= self._failing:
                return found
            name = min(failed.keys() - self._failing)
            why = f"{name} failed on {self._device} ({first_line(failed[name])})"
        on_host = self._evaluator.measure_layer(self._whole(parts), self.rows)
        self._failing |= on_host.failed.keys() | on_host.without_margin.keys()
        if name not in self._failing:
            self._go_to_host(why)
        return on_host

    def _whole(self, parts: _Parts, device: torch.device = HOST) -> Layer:
        """Join a layer's parts with the rows of all ranks, on a device."""
        layer = merge_layers(parts).to(device)
        return layer if self._moves is None else self._moves.added_to(layer)

    def _go_to_host(self, why: str) -> None:
        """Move the layers that are still to be measured to the host."""
        self._parts[:] = [tuple(layer.to(HOST) for layer in parts) for parts in self._parts]
        self._device = HOST
        text = "measured on the host: {why}"
        self.notes.append(Note(NoteKind.ON_HOST, text, numbers={"why": why}))

    def fail(self, error: BaseException) -> None:
        """Give the reading up, for this reason."""
        self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        del self._parts[len(self._measured) :]

    def finish(self) -> None:
        """Make the reading once every layer is measured or the job has failed; a collective.

        An error is kept for `result`. A second call does nothing.
        """
        if self.finished:
            return
        began = time.perf_counter()
        try:
            measured = self._all_layers()
            if measured is not None:
                self._reading = self._make_reading(measured, began)
        except failures() as error:
            self._failure = error
        self.finished = True
        self.done.set()

    def result(self) -> Reading | None:
        """Return the reading on the first rank (None on others), or raise what prevented it."""
        if self._failure is not None:
            raise self._failure
        return self._reading

    def _make_reading(self, measured: Sequence[LayerValues], began: float) -> Reading:
        info = self._gathered.info
        call = self._call or _call_here
        evaluation = call(self._evaluator.combine, measured, self.rows)
        if self._moves is not None:
            self._moves.complete(evaluation.stacks)
        tokens = min(info.tokens, self.rows * self._evaluator.splits)
        self.arrays = evaluation.arrays
        notes = (*info.notes, *evaluation.notes, *self._notes_on_rows(tokens), *self.notes)
        self.seconds += time.perf_counter() - began
        return Reading(
            step=self.step,
            time=time.time(),
            seconds=self.seconds,
            source=self.source,
            mode=info.mode,
            tokens=tokens,
            world_size=self._group.size,
            dtype=info.dtype,
            stacks=evaluation.stacks,
            training={} if info.loss is None else {tags.PROBE_LOSS: info.loss.value},
            notes=notes,
            fingerprint=evaluation.fingerprint,
            batch=info.token_ids,
        )

    def _all_layers(self) -> list[LayerValues] | None:
        """Return the values of all layers on the first rank, and None on others; a collective."""
        error = self._failure
        if self._group.members == 1:
            if error is not None:
                raise error
            return self._measured
        rank = self._group.rank
        reason = None if error is None else f"rank {rank}: {type(error).__name__}: {error}"
        shares = self._group.gather((reason, self._measured))
        if reason is not None:
            raise RankFailedError(reason) from error
        if shares is None:
            return None
        failures = [why for why, _ in shares if why is not None]
        if failures:
            raise RankFailedError(failures[0])
        return self._gathered.interleave([layers for _, layers in shares])

    def _notes_on_rows(self, tokens: int) -> list[Note]:
        if not 0 < tokens < self.rows:
            return []
        text = (
            "only {rows} rows here (tokens={asked} asked for more): with so few, the intrinsic "
            "dimension comes out too low"
        )
        return [Note(NoteKind.FEW_ROWS, text, numbers={"rows": tokens, "asked": self.rows})]


def measure_alone(snapshot: Snapshot, evaluator: Evaluator, rows: int) -> Reading:
    """Measure one snapshot of this process, without ranks, record or training.

    Args:
        snapshot: The snapshot.
        evaluator: Measures its layers on the host.
        rows: Number of rows of hidden states in one split.

    Returns:
        The reading.

    Raises:
        NotSeenError: If no block was seen, so there is nothing to measure.
        Exception: If the evaluator is strict, any error of a metric.
    """
    place = MeasuringDevice(str(HOST), torch.nn.Identity())
    job = ReadingJob(0, "probe", RankGroup(), evaluator, rows=rows, place=place)
    job.begin([snapshot], 0.0)
    job.measure()
    reading = job.result()
    assert reading is not None
    return reading


def _call_here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _measure_at_once(evaluator: Evaluator, layer: Layer, rows: int, at_once: int) -> LayerValues:
    """Measure a layer, in pieces if several can be measured at once."""
    [values] = in_pieces(
        lambda parts: evaluator.measure_layer(parts[0], rows), [(layer,)],
        evaluator.source_groups, at_once,
    )  # fmt: skip
    return values


__all__ = ["CHECK", "ReadingJob", "measure_alone"]
