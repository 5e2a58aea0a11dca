"""geomon: watch the geometry of a transformer's representations while it trains."""

from importlib.metadata import version

from geomon.description import describe
from geomon.metrics import METRICS, MORE_METRICS, select
from geomon.metrics.intervals import with_interval
from geomon.metrics.last_tokens import at_last
from geomon.monitor import Monitor, every, log_spaced
from geomon.one_shot import geometry, measure
from geomon.record import Reading, Readings, Sink, read
from geomon.record.sinks import Memory
from geomon.show.loggers import TensorBoard, WandB
from geomon.sweep import scan

__version__ = version("geomon")

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
    "at_last",
    "describe",
    "every",
    "geometry",
    "log_spaced",
    "measure",
    "read",
    "scan",
    "select",
    "with_interval",
]
