"""The report of runs: one page of HTML that holds everything it needs and works without network."""

from geomon.show.report.content import Run
from geomon.show.report.page import render, write_report

__all__ = ["Run", "render", "write_report"]
