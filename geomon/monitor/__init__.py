"""WHEN: at which steps a model is read, and who does what then."""

from geomon.monitor.callback import CallbackSession
from geomon.monitor.monitor import Monitor
from geomon.monitor.options import CallbackOptions, check_count, show_callback_options
from geomon.monitor.planning.schedule import every, log_spaced

__all__ = [
    "CallbackOptions",
    "CallbackSession",
    "Monitor",
    "check_count",
    "every",
    "log_spaced",
    "show_callback_options",
]
