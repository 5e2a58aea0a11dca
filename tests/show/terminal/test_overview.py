"""A run as text: the overview that is printed, and the line for a reading."""

import math
import re
import time

import pytest
from rich.console import Console
from shown import alerted
from tagged import reading_of, with_values

from geomon.record import Readings
from geomon.show.terminal import format_line, spark, view

ALL = ["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy", "geomon"]


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch):
    """The age of a reading does not hang on how long a test takes."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)


def shown(readings, width=80):
    console = Console(width=width, color_system=None, force_terminal=True)
    with console.capture() as capture:
        console.print(view(readings))
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_it_fits_the_terminal_and_cuts_no_word(make_readings, width):
    note = " ".join(f"word{n}" for n in range(60))
    lines = shown(make_readings(layers=24, heads=16, notes=[note]), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert (
        "intrinsic dimension, mean over layers: 5.3 ± 0.1 at step 1,500, compressing, -0.4 ± 0.3 "
        "since step 1,024; peak 7.4 ± 0.1"
    ) in text
    assert note in text
    assert "…" not in text or width == 40  # of the rows below
    assert any("5.3 ± 0.1     ▁▁▂▅██▇▆▅ " in f"{line} " for line in lines)  # value and curve whole


def test_each_row_says_the_last_value_the_history_and_the_first(make_readings):
    curves = {
        "twonn/mean": [2, 3, 4, 6, 8, 7, 6, 5, 4.5],
        "twonn_distinct/mean": [31, 20, 18, 11, 7.5, 6.2, 5.9, 5.3, 4.2],
        "attention_entropy/mean": [4.0, 3.2, 3.1, 3.0, 2.8, 2.4, 2.0, 1.8, 1.0],
        "training/loss": [4.2, 4, 3.8, 3.6, 3.4, 3.2, 3, 2.5, math.nan],
    }
    readings = make_readings(curves=curves)
    wide = with_values(readings[1], readings[1].values | {"twonn/mean/margin": 0.5})
    readings.readings[1] = wide  # of which the last value has nothing
    lines = shown(readings, 160)
    assert lines[0] == "step 1,500 · 60 s ago · probe, eval · geomon 4.0 % of the time"
    assert [re.split(r"  +", line) for line in lines[-6:]] == [
        [
            "intrinsic dimension",
            "4.5 ± 0.1",
            "▁▂▃▆█▇▆▅▄",
            "compressing, -0.5 ± 0.3 since step 1,024",
        ],
        [
            "intrinsic dimension, distinct tokens",
            "4.2 ± 0.1",
            "█▅▅▃▂▂▁▁▁",
            "falling, -1.1 ± 0.3 since step 1,024",
        ],
        ["attention entropy (nats)", "1.0", "█▆▆▆▅▄▃▃▁", "from 4.0"],
        [
            "cosine of mean query and mean key, mean size over heads",
            "0.70",
            "▁▂▃▄▅▅▆▇█",
            "from 0.10",
        ],
        ["training loss", "2.5", "█▇▆▆▅▄▃▁", "from 4.2, known to step 1,024"],
        ["anisotropy by layer", "0.11 to 0.11", "▁▃█▃▁", "highest 0.60 at layer 2"],
    ]


@pytest.mark.parametrize(
    ("values", "margin", "line"),
    [
        ([5.36, 5.44, 5.41, 5.35], 0.0, "▄▄▄▄"),
        ([5.0, 5.15], 0.0, "▁█"),
        ([5.0, 6.0], 0.4, "▁█"),
        ([5.0, 5.4, 4.9, 5.2, 5.5, 5.1], 0.35, "▄▄▄▄▄▄"),  # within twice the margin
        ([0.0, 0.0], 0.0, "▄▄"),
        ([*range(80)], 0.0, "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██"),
        ([8, 0], 0.0, "█▁"),
        ([-1.0, 1.0], 0.0, "▁█"),
        ([3.0, 1.0, 2.0], 0.0, "█▁▅"),
        ([5.0, *[1.0] * 70, 3.0], 0.0, "█▁▁▁▁▁▁▁▁▁▁▁▁▁▁▅"),
    ],
)
def test_sparks_go_from_the_least_to_the_most_keep_both_ends_and_draw_noise_flat(
    values, margin, line
):
    assert spark(values, margin) == line


def test_what_was_not_measured_is_left_out_but_the_dimension(make_readings):
    assert shown(make_readings(without=ALL))[1:] == ["intrinsic dimension: not measured."]
    assert shown(Readings([], [])) == ["no readings yet"]
    first = make_readings((0,))
    said = "\n".join(shown(first))
    assert "since" not in said  # the one value
    empty = dict.fromkeys(first[0].values.keys() - {"geomon/seconds"}, math.nan)
    assert len(shown([with_values(first[0], empty)])) == 2


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7100, "118 min"), (7200, "2 h"),
     (172_000, "48 h"), (172_800, "2 d"), (-5, "0 s")],
)  # fmt: skip
def test_the_age_of_a_reading_has_a_unit_that_fits(make_readings, monkeypatch, seconds, words):
    reading = make_readings((0,), curves={"geomon/overhead": [0.1]})[0]
    monkeypatch.setattr("geomon.show.terminal.overview.time.time", lambda: reading.time + seconds)
    assert shown([reading])[0].startswith(f"step 0 · {words} ago · probe, eval · geomon 10 %")


def test_alerts_take_the_headline_and_each_kind_is_shown_in_full_the_gravest_first(make_readings):
    kinds = [(40, "logit_growth"), (256, "logit_growth"), (512, "rank_collapse")]
    readings = alerted(make_readings(notes=["first", "second"]), kinds)
    lines = shown(readings, width=100)
    assert lines[1].startswith(
        "Alerts: rank collapse at step 512, logit growth at step 40. intrinsic dimension, "
    )
    assert lines[-3:] == [
        "Alert at step 512: rank collapse (layer 2): look there (geomon alerts rank_collapse).",
        "Alert at step 40 (first of 2): logit growth (layer 2): look there (geomon alerts "
        "logit_growth).",
        "note (and 1 more): second",
    ]
    assert "alert" not in "".join(shown(make_readings(notes=["first"]))).lower()
    nothing = shown(alerted(Readings([], []), kinds[:1]), width=100)
    assert nothing[0] == "no readings yet"
    assert nothing[1].startswith("Alert at step 40: logit growth (layer 2): look there")


def test_a_plain_line(make_readings):
    readings = make_readings(curves={"training/loss": [4.0] * 9})
    assert format_line(readings[4], readings) == (
        "step 128: intrinsic dimension 7.3 ± 0.1 (expanding), intrinsic dimension, distinct tokens "
        "7.5 ± 0.1 (falling), attention entropy 2.8, cosine of mean query and mean key, mean size "
        "over heads 0.40, training loss 4.0"
    )
    assert "(compressing)" in format_line(readings[6], readings)
    assert "(expanding)" in format_line(readings[5], readings)
    assert format_line(readings[0], readings).startswith("step 0: intrinsic dimension 2.5 ± 0.1, ")
    later = with_values(readings[8], {"training/loss": 2.0}, step=1600)  # measured no dimension
    assert format_line(later, [*readings, later]) == "step 1600: training loss 2.0"
    own = reading_of({"peak_norm/mean": 2.0})
    assert format_line(own, [own]) == "step 0: 2 values"
