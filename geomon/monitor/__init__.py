"""WHEN: the steps where a model is read, and which part does what then."""

from geomon.monitor.jobs import measure_alone
from geomon.monitor.monitor import Monitor
from geomon.monitor.options import CallbackOptions, check_count, documented
from geomon.monitor.planner import DEFAULT_SHARE, Account, Due, Planner
from geomon.monitor.schedule import every, log_spaced
from geomon.monitor.session import CallbackSession

__all__ = [
    "Account",
    "CallbackOptions",
    "CallbackSession",
    "DEFAULT_SHARE",
    "Due",
    "Monitor",
    "Planner",
    "check_count",
    "documented",
    "every",
    "log_spaced",
    "measure_alone",
]
