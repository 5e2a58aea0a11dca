"""The report on runs: a single HTML page that works offline."""

from geomon.show.report.page import render, write_report

__all__ = ["render", "write_report"]
