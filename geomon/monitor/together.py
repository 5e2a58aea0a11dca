"""From what was seen to what is measured: by one rank of its own rows, or by all of all rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from geomon.capture.sampling import QUERIES
from geomon.capture.snapshot import Snapshot
from geomon.distributed.gather import Gathered, RankFailedError, gather, in_order
from geomon.distributed.group import Ranks
from geomon.metrics.cautions import Note
from geomon.metrics.evaluate import MeasuredLayer, combined, measure_layer
from geomon.metrics.table import Metric


@dataclass(frozen=True)
class Found:
    """What was measured at one step, and on what it stands.

    Attributes:
        values: By tag.
        notes: Of the snapshot and of the values.
        tokens: Rows of hidden states, over all batches and ranks.
        mode: As of the snapshot, and so is `dtype`.
    """

    values: dict[str, float]
    notes: list[Note]
    tokens: int
    mode: str
    dtype: str


def measure_alone(
    snapshot: Snapshot, metrics: Mapping[str, Metric], *, rows: int, batches: int, strict: bool
) -> Found:
    """Measure every layer of a snapshot; arguments as of `evaluate.evaluate`."""
    measured = [
        measure_layer(layer, metrics, rows=rows, batches=batches, strict=strict)
        for layer in snapshot.layers  # the views of one are let go before the next
    ]
    result = combined(measured, metrics, rows=rows)
    notes = snapshot.notes + result.notes
    return Found(result.values, notes, snapshot.tokens, snapshot.mode, snapshot.dtype)


def measure_together(
    seen: Snapshot | Exception,
    about: tuple[int, str],
    ranks: Ranks,
    metrics: Mapping[str, Metric],
    *,
    rows: int,
    batches: int,
    strict: bool,
    copies: bool,
) -> Found | None:
    """Measure the rows of all ranks, each rank its share of the layers.

    A collective: every rank calls it, also one that has nothing to give.

    Args:
        seen: What this rank saw, or why it saw nothing.
        about: Step and source of the reading.
        ranks: With a line between them.
        metrics: Checked metrics by name.
        rows: Rows of hidden states in one batch.
        batches: Largest number of batches.
        strict: Let a metric that fails fail the reading.
        copies: Whether all ranks were given the same inputs.

    Returns:
        On the first rank what was measured; None on the others.

    Raises:
        RankFailedError: A rank saw nothing (on every rank), or could not measure (on the first
            rank and on that one).
        RanksLostError: A rank does not answer.
    """
    whole = gather(seen, about, ranks, rows=rows * batches, queries=QUERIES, copies=copies)
    measured: list[MeasuredLayer] = []
    failure: Exception | None = None
    try:
        for layer in whole.layers:  # the views of one are let go before the next
            measured.append(
                measure_layer(layer, metrics, rows=rows, batches=batches, strict=strict)
            )
    except Exception as error:  # the others wait for this rank's share
        failure = error
    return collected(whole, measured, ranks, metrics, rows=rows, failure=failure)


def collected(
    whole: Gathered,
    measured: Sequence[MeasuredLayer],
    ranks: Ranks,
    metrics: Mapping[str, Metric],
    *,
    rows: int,
    failure: Exception | None = None,
) -> Found | None:
    """Bring what the ranks measured together on the first one; a collective.

    Args:
        whole: What was gathered.
        measured: This rank's layers, in order.
        ranks: With a line between them.
        metrics: Checked metrics by name.
        rows: Rows of hidden states in one batch.
        failure: Why this rank could not measure its layers.

    Returns:
        On the first rank what was measured; None on the others.

    Raises:
        RankFailedError: On the first rank and on each that failed.
        RanksLostError: A rank does not answer.
    """
    told = None if failure is None else f"rank {ranks.rank}: {type(failure).__name__}: {failure}"
    shares = ranks.collect((told, list(measured)))
    if failure is not None:
        raise RankFailedError(told) from failure
    if shares is None:
        return None
    failures = [why for why, _ in shares if why is not None]
    if failures:
        raise RankFailedError(failures[0])
    result = combined(in_order([layers for _, layers in shares], whole.count), metrics, rows=rows)
    notes = whole.notes + result.notes
    return Found(result.values, notes, whole.tokens, whole.mode, whole.dtype)
