"""SWEEP: read the checkpoints of a model, one after another, into one record."""

from geomon.sweep.checkpoints import (
    Checkpoint,
    hub_checkpoints,
    lightning_checkpoints,
    trainer_checkpoints,
)
from geomon.sweep.inputs import text_windows
from geomon.sweep.named import find_named, read_inputs
from geomon.sweep.sweep import scan

__all__ = [
    "Checkpoint",
    "find_named",
    "hub_checkpoints",
    "lightning_checkpoints",
    "read_inputs",
    "scan",
    "text_windows",
    "trainer_checkpoints",
]
