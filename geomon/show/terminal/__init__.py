"""Shows runs in the terminal: an overview and a chart, live or printed."""

from geomon.show.terminal.overview import spark, view
from geomon.show.terminal.watch import watch

__all__ = ["spark", "view", "watch"]
