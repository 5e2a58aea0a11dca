"""Analysis of a record: curves over training, their phases, facts, and a run in words."""

from geomon.analysis.alerts import (
    RULES,
    Alert,
    AlertWatch,
    Inputs,
    alert_opening,
    check_alerts,
    first_alerts,
)
from geomon.analysis.bands import (
    FEWEST_READINGS,
    MOST_READINGS,
    QUIET_READINGS,
    SLOW_STRIDE,
    WATCHED,
    Bands,
    Distance,
    WatchedMetric,
    continue_line,
    measure_distance,
    start_of_window,
)
from geomon.analysis.chance import chance_limit, heads_limit
from geomon.analysis.curves import Curve, curve_of, measured, plain_curve, single_source
from geomon.analysis.differences import Difference, compare
from geomon.analysis.facts import Fact, FactLog, facts_of, null_of
from geomon.analysis.numbers import number, significant
from geomon.analysis.phase import Phase, find_phase
from geomon.analysis.profile import bulge, is_far_above, layers_of, peak_depth, profile_of
from geomon.analysis.quantities import Quantity, logged, loss_unit, quantities_of
from geomon.analysis.summary import alert_sentences, bands_so_far, summarise

__all__ = [
    "Alert",
    "AlertWatch",
    "Bands",
    "Curve",
    "Difference",
    "Distance",
    "Fact",
    "FactLog",
    "Inputs",
    "FEWEST_READINGS",
    "Phase",
    "QUIET_READINGS",
    "Quantity",
    "RULES",
    "SLOW_STRIDE",
    "WATCHED",
    "MOST_READINGS",
    "WatchedMetric",
    "alert_opening",
    "alert_sentences",
    "bands_so_far",
    "bulge",
    "chance_limit",
    "check_alerts",
    "compare",
    "continue_line",
    "curve_of",
    "facts_of",
    "find_phase",
    "first_alerts",
    "heads_limit",
    "is_far_above",
    "layers_of",
    "logged",
    "loss_unit",
    "measure_distance",
    "measured",
    "null_of",
    "number",
    "peak_depth",
    "plain_curve",
    "profile_of",
    "quantities_of",
    "significant",
    "single_source",
    "start_of_window",
    "summarise",
]
