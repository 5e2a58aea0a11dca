"""A job measures one reading, layer by layer, from the snapshots of one rank or of all."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager

import torch

from geomon.analysis import Inputs
from geomon.capture import (
    ATTENTION_QUERIES,
    HOST,
    NotSeenError,
    Snapshot,
    explain_missing,
)
from geomon.distributed import RankFailedError, RankGroup, gather
from geomon.failures import failures
from geomon.metrics import Evaluator, LayerValues
from geomon.monitor.device import MeasuringDevice
from geomon.monitor.layer_queue import Call, LayerQueue
from geomon.monitor.moves import Moves
from geomon.note import Note
from geomon.note_kinds import NoteKind
from geomon.record import Arrays, Reading, tags

# Source of a reading of few columns, which only alerts look at.
CHECK = "check"


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
        self.seconds = 0.0
        self.arrays: Arrays = {}
        self._group, self._evaluator, self._rows = group, evaluator, rows
        self._same_inputs = same_inputs
        self._layers = LayerQueue(evaluator, rows, place, moves)
        self._outcome: Future[Reading | None] = Future()

    def begin(self, passes: Sequence[Snapshot] | Exception, seconds: float) -> None:
        """Gather the rows of all ranks, given each pass's snapshot or an error; a collective.

        Raises RankFailedError if a rank lacks a snapshot or has different layers (a single rank
        raises its own exception), RanksLostError if a rank does not answer, and NotSeenError if no
        rank saw a block.
        """
        began = time.perf_counter()
        self._gathered = gather(
            passes, (self.step, self.source), self._group,
            rows=self._rows * self._evaluator.splits, queries=ATTENTION_QUERIES,
            same_inputs=self._same_inputs,
        )  # fmt: skip
        if self._gathered.empty:
            assert not isinstance(passes, Exception)
            missing = explain_missing(passes[0], self._evaluator.views)
            raise NotSeenError(missing or "no block ran")
        self._layers.begin(self._gathered.parts)
        self.seconds = seconds + time.perf_counter() - began

    @property
    def is_collective(self) -> bool:
        """Whether other ranks take part, so that it must be measured immediately."""
        return self._group.members > 1

    @property
    def finished(self) -> bool:
        """Whether the reading is made or has failed, so that `result` can be called."""
        return self._outcome.done()

    @property
    def failed(self) -> bool:
        """Whether the job has failed, so that `result` raises."""
        return self.finished and self._outcome.exception() is not None

    @property
    def notes(self) -> list[Note]:
        """Notes on where and why its rows were measured; more may be added."""
        return self._layers.notes

    def wait(self) -> None:
        """Wait until the job is finished."""
        wait([self._outcome])

    def measure(self, at_once: int | None = None, call: Call | None = None) -> None:
        """Measure the remaining layers and make the reading; errors are kept for `result`.

        If the host measures, it does so by `call(function, *args)`, which may use another process.
        """
        self._layers.call = call
        try:
            while left := self._layers.left:
                began = time.perf_counter()
                self._layers.measure(at_once or left)
                self.seconds += time.perf_counter() - began
        except failures() as error:
            self.fail(error)
        self.finish()

    def alongside_training(self) -> AbstractContextManager[None]:
        """Return a context manager for measuring in this thread while another thread trains."""
        return self._layers.alongside_training()

    def fail(self, error: BaseException) -> None:
        """Give the reading up, for this reason."""
        self._layers.give_up(error)

    def finish(self) -> None:
        """Make the reading once every layer is measured or the job has failed; a collective.

        An error is kept for `result`. A second call does nothing.
        """
        if self.finished:
            return
        began = time.perf_counter()
        try:
            measured = self._all_layers()
            reading = None if measured is None else self._make_reading(measured, began)
        except failures() as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(reading)

    def result(self) -> Reading | None:
        """Return the reading on the first rank (None on others), or raise what prevented it."""
        return self._outcome.result()

    def _make_reading(self, measured: Sequence[LayerValues], began: float) -> Reading:
        info = self._gathered.info
        evaluation = self._layers.combine(measured)
        tokens = min(info.tokens, self._rows * self._evaluator.splits)
        self.arrays = evaluation.arrays
        notes = (*info.notes, *evaluation.notes, *self._notes_on_rows(tokens), *self._layers.notes)
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
        error = self._layers.failure
        if self._group.members == 1:
            if error is not None:
                raise error
            return self._layers.measured
        rank = self._group.rank
        reason = None if error is None else f"rank {rank}: {type(error).__name__}: {error}"
        shares = self._group.gather((reason, self._layers.measured))
        if reason is not None:
            raise RankFailedError(reason) from error
        if shares is None:
            return None
        failures = [why for why, _ in shares if why is not None]
        if failures:
            raise RankFailedError(failures[0])
        return self._gathered.interleave([layers for _, layers in shares])

    def _notes_on_rows(self, tokens: int) -> list[Note]:
        if not 0 < tokens < self._rows:
            return []
        text = (
            "only {rows} rows here (tokens={asked} asked for more): with so few, the intrinsic "
            "dimension comes out too low"
        )
        return [Note(NoteKind.FEW_ROWS, text, numbers={"rows": tokens, "asked": self._rows})]


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


__all__ = ["CHECK", "ReadingJob", "measure_alone"]
