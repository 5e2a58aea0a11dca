"""The report of runs: one page of HTML that holds everything it needs and works without network."""

from geomon.show.report.content import Run, load_runs
from geomon.show.report.page import render, write_report

__all__ = ["Run", "load_runs", "render", "write_report"]
