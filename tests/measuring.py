"""One call that measures a snapshot, for tests and benchmarks of metrics."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from geomon.capture.snapshot import Snapshot
from geomon.metrics import Evaluator, check_metrics
from geomon.note import Note
from geomon.record.columns import tagged


class Measured(NamedTuple):
    """Values by tag, and notes on them."""

    values: dict[str, float]
    notes: list[Note]


def evaluate(
    snapshot: Snapshot,
    metrics: Mapping[str, Callable[..., Any]],
    *,
    rows: int,
    batches: int,
    queries: int | None = None,
    strict: bool = False,
) -> Measured:
    """Every metric at every layer of a snapshot."""
    evaluator = Evaluator(check_metrics(metrics), batches, queries, strict)
    found = evaluator.evaluate(snapshot.layers, rows)
    return Measured(tagged(found.stacks), found.notes)
