"""Pages of a long run of a large model look at what they show, not at every value of every reading.

Counted are look-ups of single values in Python: of a record of 5,000 readings of 8,000 values each
microsecond of them is 40 s of a page. What is read as columns of an array is not counted.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from geomon.analysis import curve_of, summarise
from geomon.analysis.curves import Curve
from geomon.record import FILE_NAME, Reading, Readings, export, read, tags
from geomon.record.columns import SHORT_FROM, Values
from geomon.show.figures import geometry_figure
from geomon.show.figures.maps import map_figure
from geomon.show.report import Run
from geomon.show.report.content import build_content
from geomon.show.terminal import view

_STEPS = tuple(range(0, 4000, 100))
CURVES = ("twonn/mean", "twonn_distinct/mean", "gride/mean/k32", "geomon/overhead")
PAGES = {
    "summary": lambda run, folder: summarise(run),
    "report": lambda run, folder: build_content([Run("a", folder, run)]),
    "figure": lambda run, folder: geometry_figure(run),
    "map": lambda run, folder: map_figure(run, "anisotropy"),
    "watch": lambda run, folder: view(run),
    "parquet": lambda run, folder: export.export(run, folder / "values.parquet"),
    "csv": lambda run, folder: export.export(run, folder / "values.csv"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A record of 40 readings of 25 layers x 40 heads, in the short form."""
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
        Reading(
            step,
            1.7e9,
            0.1,
            "probe",
            "eval",
            64,
            1,
            "float32",
            dict(zip(names, chance.uniform(0.1, 0.9, len(names)).tolist(), strict=True))
            | {"qk_cosine/null_magnitude": 0.1},  # one that a width of heads has, at every step
        )
        for step in _STEPS
    ]
    (path / FILE_NAME).write_text("".join(f"{each.line()}\n" for each in readings))
    assert len(readings) == len(_STEPS)
    assert len(readings[0].values) > SHORT_FROM
    return path


@pytest.fixture
def looked_up(monkeypatch):
    """Counts look-ups of single values of readings, and walks through all of them."""
    counted = Counter()

    def count(name, size):
        original = getattr(Values, name)

        def counting(self, *arguments):
            counted["values"] += size(self)
            return original(self, *arguments)

        monkeypatch.setattr(Values, name, counting)

    count("__getitem__", lambda values: 1)
    count("get", lambda values: 1)
    count("__iter__", len)
    return counted


@pytest.mark.parametrize("page", PAGES)
def test_no_page_looks_at_every_value_of_every_reading(page, folder, looked_up, tmp_path):
    run = read(folder)
    half = replace(run, readings=run.readings[: len(run) // 2])
    counts = []
    for readings in (half, run):
        looked_up.clear()
        PAGES[page](readings, tmp_path)
        counts.append(looked_up["values"])
    more = len(run) - len(half)
    # The tags of some readings are looked through, whatever their number; of a further reading only
    # single values are.
    assert (counts[1] - counts[0]) / more < len(run[0].values) / 20


def test_margins_of_a_curve_are_computed_once_for_a_page(folder, monkeypatch):
    computed = Counter()
    original = Curve.margins.fget
    assert original is not None

    def margins(self):
        computed[id(self)] += 1
        return original(self)

    monkeypatch.setattr(Curve, "margins", property(margins))
    build_content([Run("a", folder, read(folder))])
    assert computed
    assert max(computed.values()) <= 3


def test_a_curve_of_columns_is_that_of_single_values(make_readings):
    run = make_readings(error=0.3)
    run[3].values["twonn/mean/margin"] = float("nan")
    run[3].values["twonn/mean/std"] = 0.7
    run[4].values["twonn/mean"] = float("nan")
    run[5].values.pop("twonn/mean/margin")
    curve = curve_of(run, "twonn/mean")
    known = [run[index] for index in range(len(run)) if index != 4]
    assert curve.steps == [reading.step for reading in known]
    assert curve.values == [reading.values["twonn/mean"] for reading in known]
    assert curve.errors == [
        0.7 if r is run[3] else 0.0 if r is run[5] else 0.3 / 1.96 for r in known
    ]
    assert len(curve_of(run, "nothing/mean")) == len(curve_of(Readings([], []), "twonn/mean")) == 0
