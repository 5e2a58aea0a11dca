"""Analysis of a record: curves over training, their phase, and a run in words."""

from geomon.analysis.curves import Curve, curve_of, mean_abs_over_heads, single_source
from geomon.analysis.phase import Phase, find_phase
from geomon.analysis.summary import summarise

__all__ = [
    "Curve",
    "Phase",
    "curve_of",
    "find_phase",
    "mean_abs_over_heads",
    "single_source",
    "summarise",
]
