"""Analysis of a record: curves over training, their phases, facts, and a run in words."""

from geomon.analysis.curves import Curve, curve_of, single_source
from geomon.analysis.facts import Fact, facts_of, null_of
from geomon.analysis.phase import Phase, find_phase
from geomon.analysis.summary import summarise

__all__ = [
    "Curve",
    "Fact",
    "Phase",
    "curve_of",
    "facts_of",
    "find_phase",
    "null_of",
    "single_source",
    "summarise",
]
