"""Capture: watch one forward pass, and keep sampled rows of each layer as a `Snapshot`."""

from geomon.capture.anatomy import find_anatomy
from geomon.capture.calling.calls import FirstCall, in_cuda_graph
from geomon.capture.calling.probe import extra_pass
from geomon.capture.tap import Plans
from geomon.capture.tokens.sampling import ATTENTION_QUERIES, derive_seed
from geomon.capture.unchanged import extra_passes
from geomon.capture.window import Window

__all__ = [
    "FirstCall",
    "ATTENTION_QUERIES",
    "Plans",
    "Window",
    "derive_seed",
    "extra_pass",
    "extra_passes",
    "find_anatomy",
    "in_cuda_graph",
]
