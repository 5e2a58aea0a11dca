"""A metric of a user's own is on every page where a curve or a profile can be chosen."""

import contextlib
import io

import pytest
from shown import write
from tagged import TEXTS, with_values

from geomon.record import Readings
from geomon.record.headline import Charts
from geomon.show.collect import cards_of
from geomon.show.figures import draw
from geomon.show.report import Run
from geomon.show.report.content import build_panels
from geomon.show.terminal import watch

TITLE, LABEL, NULL = "largest norm", "largest norm (m)", 3.25
TEXT = {"title": TITLE, "unit": "m"}


@pytest.fixture
def run(make_readings):
    """A run that measures a metric of which the record has a title and a unit alone."""
    own = {f"peak_norm/layer_{layer:02d}": 3.0 + layer for layer in range(5)}
    own |= {"peak_norm/mean": 5.5, "peak_norm/mean/margin": 0.25, "peak_norm/null": NULL}
    own |= {"gride/null": 3.0, "anisotropy/null": 0.1}
    described = {"model": "Synthetic", "metrics": {**TEXTS, "peak_norm": TEXT}}
    readings = [with_values(each, {**each.values, **own}) for each in make_readings()]
    wider = {**readings[1].values, "peak_norm/mean/margin": 0.5, "twonn/mean/margin": 0.5}
    readings[1] = with_values(readings[1], wider)
    return Readings([described], readings)


def look_at_report(run, folder):
    panels = build_panels([Run("a", folder, run)])
    assert next(iter(panels.others)) == TITLE  # means come before what stands for parts
    curve, profile = panels.others[TITLE], panels.depth[LABEL]
    assert curve.label == LABEL
    (line,) = curve.lines
    assert (line.y[-1], line.high[-1], curve.null) == (5.5, 5.75, (NULL, f"noise: {NULL:.2g}"))
    assert (list(profile.lines[-1].y), profile.null) == ([3, 4, 5, 6, 7], curve.null)
    assert panels.maps[LABEL].label == LABEL
    others = {**panels.training, **panels.others}  # neither a part nor an extreme has that null
    assert not [name for name, each in others.items() if each.null and name != TITLE]


def look_at_watch(run, folder):
    write(folder, run, metrics=run.runs[0]["metrics"])

    def printed(metric, layer=None):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            watch([folder], metric=metric, layer=layer, once=True)
        return output.getvalue()

    assert f"{LABEL}  5.5 ± 0.2  noise: {NULL:.2g}" in printed("peak_norm")
    assert f"{LABEL}, layer 4  7" in printed("peak_norm", 4)
    (title,) = [line for line in printed("gride/k1").splitlines() if "scale 1" in line][-1:]
    assert "noise" not in title  # it is of another part


def look_at_loggers(run, folder):
    charts = Charts(("peak_norm",))
    charts.describe(run.runs[0])
    assert charts.select(run[-1])["geomon/peak_norm"] == 5.5
    title = f"{TITLE}, mean over layers (m)"
    assert charts.layout(run[-1])["geomon"][title] == ["Margin", ["geomon/peak_norm"] * 3]
    panels = dict(cards_of(run, ("peak_norm",)))
    curve, profile = (panels[name] for name in (f"8 {TITLE}", f"9 {TITLE} over depth"))
    assert (curve.label, curve.lines[0].high[-1], curve.null[0]) == (LABEL, 5.75, NULL)
    assert (profile.label, list(profile.lines[-1].y)) == (LABEL, [3, 4, 5, 6, 7])


def look_at_figures(run, folder):
    (panel, *_) = draw("profiles", run, "peak_norm").axes
    assert panel.get_ylabel() == LABEL
    assert f"noise: {NULL:.2g}" in [text.get_text() for text in panel.texts]
    panel, bar = draw("map", run, "peak_norm").axes
    assert panel.get_title(loc="left").endswith(TITLE)
    assert bar.get_ylabel() == LABEL


PAGES = [look_at_report, look_at_watch, look_at_loggers, look_at_figures]


@pytest.mark.parametrize("look", PAGES, ids=lambda look: look.__name__)
def test_a_metric_is_called_by_its_title_with_unit_margin_and_null(look, run, tmp_path):
    look(run, tmp_path)
