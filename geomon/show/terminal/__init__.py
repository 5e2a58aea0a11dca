"""Shows runs in the terminal: an overview, live or printed, and a line for each reading."""

from geomon.show.terminal.overview import Printer, format_line, spark, view
from geomon.show.terminal.watch import watch

__all__ = ["Printer", "format_line", "spark", "view", "watch"]
