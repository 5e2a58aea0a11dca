"""Runs in the terminal: an application, a view that is printed, a line per reading."""

from geomon.show.terminal.live import follow, print_view
from geomon.show.terminal.overview import format_line, spark, view

__all__ = ["follow", "format_line", "print_view", "spark", "view"]
