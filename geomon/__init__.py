"""geomon: watch the geometry of a transformer's representations while it trains.

Names are imported on first use, so that commands that look at a record do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from geomon.version import __version__

if TYPE_CHECKING:
    from geomon.analysis import Phase
    from geomon.description import describe
    from geomon.metrics import METRICS, MORE_METRICS, Metric, at_last, select
    from geomon.monitor import Monitor, every, log_spaced
    from geomon.note_kinds import NoteKind
    from geomon.one_shot import geometry, measure
    from geomon.record import Memory, MetricText, Reading, Readings, Sink, read
    from geomon.show import Logger, MLflow, TensorBoard, Trackio, WandB
    from geomon.sweep import Checkpoint, scan

__all__ = [
    "METRICS",
    "MORE_METRICS",
    "Checkpoint",
    "Logger",
    "MLflow",
    "Memory",
    "Metric",
    "MetricText",
    "Monitor",
    "NoteKind",
    "Phase",
    "Reading",
    "Readings",
    "Sink",
    "TensorBoard",
    "Trackio",
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
]

_MODULES = {
    "Checkpoint": "sweep",
    "Logger": "show",
    "METRICS": "metrics",
    "MLflow": "show",
    "MORE_METRICS": "metrics",
    "Memory": "record",
    "Metric": "metrics",
    "MetricText": "record",
    "Monitor": "monitor",
    "NoteKind": "note_kinds",
    "Phase": "analysis",
    "Reading": "record",
    "Readings": "record",
    "Sink": "record",
    "TensorBoard": "show",
    "Trackio": "show",
    "WandB": "show",
    "at_last": "metrics",
    "describe": "description",
    "every": "monitor",
    "geometry": "one_shot",
    "log_spaced": "monitor",
    "measure": "one_shot",
    "read": "record",
    "scan": "sweep",
    "select": "metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    import_module(f"{__name__}.record").Readings.notebook_form = _show_in_notebook
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _show_in_notebook(readings: "Readings") -> str:
    """Build the page of a run for a notebook, because record imports no folder that draws."""
    html: str = import_module("geomon.show.notebook").html_of(readings)
    return html
