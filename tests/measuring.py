"""One call that measures a snapshot, for tests and benchmarks of metrics."""

from collections.abc import Mapping

from geomon.capture.snapshot import Snapshot
from geomon.metrics import Evaluator, Metric
from geomon.metrics.evaluate import Evaluation


def evaluate(
    snapshot: Snapshot,
    metrics: Mapping[str, Metric],
    *,
    rows: int,
    batches: int,
    strict: bool = False,
) -> Evaluation:
    """Every metric at every layer of a snapshot."""
    return Evaluator(metrics, batches, strict).evaluate(snapshot.layers, rows)
