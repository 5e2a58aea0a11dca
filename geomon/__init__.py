"""geomon: watch the geometry of a transformer's representations while it trains."""

from geomon.description import describe
from geomon.matrix import geometry
from geomon.metrics.table import METRICS, MORE_METRICS, select
from geomon.monitor.monitor import Monitor, __version__
from geomon.monitor.schedule import every, log_spaced
from geomon.one_shot import measure
from geomon.record.reading import Reading, Readings, read
from geomon.record.sinks import Memory, Sink, TensorBoard, WandB

__all__ = [
    "METRICS",
    "MORE_METRICS",
    "Memory",
    "Monitor",
    "Reading",
    "Readings",
    "Sink",
    "TensorBoard",
    "WandB",
    "__version__",
    "describe",
    "every",
    "geometry",
    "log_spaced",
    "measure",
    "read",
    "select",
]
