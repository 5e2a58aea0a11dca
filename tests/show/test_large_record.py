"""Pages of a long run of a large model look at what they show, not at every value of every reading.

Of a record of 5,000 readings of 8,000 values each microsecond of a value is 40 s of a page: no page
makes the tags of all values.
"""

import numpy as np
import pytest
from tagged import reading_of

from geomon.analysis import summarise
from geomon.record import FILE_NAME, export, read, tags
from geomon.show.figures import geometry_figure
from geomon.show.figures.maps import map_figure
from geomon.show.report import Run
from geomon.show.report.content import build_content, build_panels
from geomon.show.terminal import view

_STEPS = tuple(range(0, 4000, 100))
CURVES = ("twonn/mean", "twonn_distinct/mean", "gride/mean/k32", "geomon/overhead")
REPORT = (build_content, build_panels)
PAGES = {
    "summary": lambda run, folder: summarise(run),
    "report": lambda run, folder: [make([Run("a", folder, run)]) for make in REPORT],
    "figure": lambda run, folder: geometry_figure(run),
    "map": lambda run, folder: map_figure(run, "anisotropy"),
    "watch": lambda run, folder: view(run),
    "parquet": lambda run, folder: export.export(run, folder / "values.parquet"),
    "csv": lambda run, folder: export.export(run, folder / "values.csv"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A record of 40 readings of 25 layers x 40 heads."""
    path = tmp_path_factory.mktemp("large")
    places = [
        tags.layer_tag(metric, 1 + n // 40, tags.head_part(n % 40))
        for metric in ("qk_cosine", "qk_dot")
        for n in range(1000)
    ]
    layers = [
        tags.layer_tag(metric, n)
        for metric in ("anisotropy", "attention_entropy")
        for n in range(26)
    ]
    curves = [*CURVES, "twonn/mean/margin", "qk_cosine/null_magnitude"]
    names = [*places, *layers, *curves]
    chance = np.random.default_rng(0)
    readings = [
        reading_of(
            dict(zip(names, chance.uniform(0.1, 0.9, len(names)).tolist(), strict=True))
            | {"qk_cosine/null_magnitude": 0.1},  # one that a width of heads has, at every step
            step,
        )
        for step in _STEPS
    ]
    (path / FILE_NAME).write_text("".join(f"{each.line()}\n" for each in readings))
    assert len(readings) == len(_STEPS)
    return path


@pytest.mark.parametrize("page", PAGES)
def test_no_page_makes_the_tags_of_all_values(page, folder, monkeypatch, tmp_path):
    run = read(folder)
    monkeypatch.setattr("geomon.record.reading.tagged", lambda stacks: pytest.fail("all tags"))
    PAGES[page](run, tmp_path)
