"""SWEEP: read the checkpoints of a model, one after another, into one record."""

from geomon.sweep.checkpoints import Checkpoint, find_checkpoints
from geomon.sweep.sweep import scan

__all__ = ["Checkpoint", "find_checkpoints", "scan"]
