"""Pages of a long run of a large model look at what they show, not at every value of every reading.

Of a record of 5,000 readings of 8,000 values each microsecond of a value is 40 s of a page: no page
makes the tags of all values.
"""

import pytest
from shown import write

from geomon.analysis import summarise
from geomon.record import export, read
from geomon.show.figures import geometry_figure
from geomon.show.figures.layers import map_figure
from geomon.show.report import Run
from geomon.show.report.content import build_content, build_panels
from geomon.show.terminal import view

PAGES = {
    "summary": lambda run, folder: summarise(run),
    "report": lambda run, folder: [
        make([Run("a", folder, run)]) for make in (build_content, build_panels)
    ],
    "figure": lambda run, folder: geometry_figure(run),
    "map": lambda run, folder: map_figure(run, "anisotropy"),
    "watch": lambda run, folder: view(run),
    "parquet": lambda run, folder: export.export(run, folder / "values.parquet"),
    "csv": lambda run, folder: export.export(run, folder / "values.csv"),
}


@pytest.mark.parametrize("page", PAGES)
def test_no_page_makes_the_tags_of_all_values(page, make_readings, monkeypatch, tmp_path):
    run = read(write(tmp_path, make_readings(layers=12, heads=16)))
    monkeypatch.setattr("geomon.record.reading.tagged", lambda stacks: pytest.fail("all tags"))
    PAGES[page](run, tmp_path)
