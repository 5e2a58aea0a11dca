"""A run in the terminal."""

from geomon.show.terminal.overview import format_line, spark, view

__all__ = ["format_line", "spark", "view"]
