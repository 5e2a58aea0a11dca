"""A resume with other settings breaks curves: lines end there, and words speak of the rest."""

from itertools import pairwise

import pytest

from geomon import Readings
from geomon.analysis import FactLog, facts_of
from geomon.show import charts
from geomon.show.collect import dimension_panel
from geomon.show.figures import draw
from support.readings import TEXTS, reading_of

VALUES = {0: 2.0, 10: 4.0, 20: 6.0, 30: 12.0, 40: 11.0, 50: 10.0}
JOINED = [*pairwise(VALUES.values())]


def resumed(tokens):
    """A run that was resumed at step 30 with so many tokens instead of 1,024."""
    start = {"model": "Synthetic", "metrics": TEXTS, "tokens": 1024, "from_step": 0}
    runs = [start, {**start, "tokens": tokens, "from_step": 30}]
    readings = [
        reading_of({"twonn/layer_01": v, "twonn/mean": v, "twonn/mean/margin": 0.1}, step)
        for step, v in VALUES.items()
    ]
    return Readings(runs, readings)


@pytest.mark.parametrize(("tokens", "is_broken"), [(1024, False), (4096, True)])
def test_lines_end_at_a_break_and_begin_anew_behind_a_mark(tokens, is_broken):
    readings = resumed(tokens)
    place = draw("dimension", readings).axes[0]
    chart = charts.draw(dimension_panel(readings))
    expected = {pair for pair in JOINED if pair != (6.0, 12.0) or not is_broken}
    drawn = [line.get_ydata() for line in place.lines if len({*line.get_xdata()}) > 1]
    written = [line.y for line in chart.data if line.mode == "lines+markers"]
    for rows in (drawn, written):
        assert {pair for row in rows for pair in pairwise(map(float, row))} == expected
    marks = [text.get_text() for text in place.texts]
    assert ("other settings" in marks) == is_broken
    assert ("other settings" in chart.to_json()) == is_broken


@pytest.mark.parametrize(
    ("tokens", "word", "start"), [(1024, "expanding", 0), (4096, "falling", 30)]
)
def test_facts_are_of_what_follows_the_last_break(tokens, word, start):
    (fact,) = facts_of(resumed(tokens))
    assert (fact.phase.start.step, fact.phase.last.step) == (start, 50)
    assert tokens == 1024 or fact.word in (word, "compressing")
    assert tokens == 4096 or fact.phase.start.value == 2.0


@pytest.mark.parametrize(("tokens", "starts"), [(1024, [0] * 6), (4096, [0, 0, 0, 30, 30, 30])])
def test_facts_of_readings_as_they_come_begin_anew_at_a_break(tokens, starts):
    readings, found = resumed(tokens), []
    log = FactLog(readings.runs)
    for each in readings:
        log.add([each])
        (fact,) = log.facts()
        found.append(fact.phase.start.step)
    assert found == starts
