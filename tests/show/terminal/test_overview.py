import math
import re
import time

import pytest
from rich.console import Console
from tagged import alert_of, reading_of, with_values

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


def row(lines, start):
    return next(text for text in lines if text.startswith(start))


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_it_fits_the_terminal_and_cuts_no_word(make_readings, width):
    note = " ".join(f"word{n}" for n in range(60))
    lines = shown(make_readings(layers=24, heads=16, notes=[note]), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "intrinsic dimension 5.3 ± 0.1, compressing since step 256, 28 % below its peak 7.4" in (
        text
    )
    assert "distinct tokens 4.9 ± 0.1, falling since step 0, 85 % below 32.1" in text
    assert note in text
    assert "…" not in text or width == 40  # of the rows below


def test_each_row_says_the_last_value_the_history_and_the_first(make_readings):
    curves = {
        "twonn/mean": [2, 3, 4, 6, 8, 7, 6, 5, 4.5],
        "twonn_distinct/mean": [31, 20, 18, 11, 7.5, 6.2, 5.9, 5.3, 4.2],
        "attention_entropy/mean": [4.0, 3.2, 3.1, 3.0, 2.8, 2.4, 2.0, 1.8, 1.0],
    }
    lines = shown(make_readings(curves=curves), 100)
    assert lines[0].startswith("step 1,500 · 60 s ago · probe, eval mode")
    assert [re.split(r"  +", line) for line in lines[-5:]] == [
        ["intrinsic dimension", "4.5 ± 0.1", "▁▂▃▆█▇▆▅▄", "from 2.0"],
        ["distinct tokens", "4.2 ± 0.1", "█▅▅▃▂▂▁▁▁", "from 31.0"],
        ["attention entropy (nats)", "1.0", "█▆▆▆▅▄▃▃▁", "from 4.0"],
        ["|cosine of mean query and mean key|", "0.70", "▁▂▃▄▅▅▆▇█", "from 0.10"],
        ["anisotropy by layer", "0.11 to 0.11", "▁▃█▃▁", "highest 0.60 at layer 2"],
    ]


@pytest.mark.parametrize(
    ("values", "margin"),
    [
        ([5.36, 5.44, 5.41, 5.35], 0.0),
        ([5.0, 5.4, 4.9, 5.2, 5.5, 5.1], 0.35),  # within twice the margin
        ([1201.0, 1210.0, 1205.0], 0.0),
        ([0.0, 0.0], 0.0),
    ],
)
def test_noise_is_drawn_flat(values, margin):
    assert set(spark(values, 10, margin)) == {"▄"}


def test_sparks_go_from_the_least_to_the_most_and_keep_both_ends():
    assert spark([], 10) == spark([1.0], 0) == ""
    assert spark(list(range(80)), 8) == "▁▂▃▄▅▆▇█"
    assert spark([8, 0], 2) == "█▁"
    assert spark([-1.0, 1.0], 2) == "▁█"
    assert spark([3.0, 1.0, 2.0], 5) == "█▁▅"
    assert spark([5.0, *[1.0] * 70, 3.0], 9) == "█▁▁▁▁▁▁▁▅"


def test_what_was_not_measured_is_left_out_but_the_dimension(make_readings):
    lines = shown(make_readings(without=ALL))
    assert lines[1:] == ["intrinsic dimension: not measured."]
    assert shown(Readings([], [])) == ["no readings yet"]


def test_one_reading_and_missing_numbers_do_no_harm(make_readings):
    first = make_readings((0,))
    assert "too few readings to tell" in "\n".join(shown(first))
    empty = [
        with_values(first[0], dict.fromkeys(first[0].values.keys() - {"geomon/seconds"}, math.nan))
    ]
    assert len(shown(empty)) == 2


def test_a_plain_line(make_readings):
    readings = make_readings()
    assert format_line(readings[4], readings) == (
        "step 128: intrinsic dimension 7.3 ± 0.1 (expanding), distinct tokens 7.5 ± 0.1, attention "
        "entropy (nats) 2.8, |cosine of mean query and mean key| 0.40"
    )
    assert "(compressing)" in format_line(readings[8], readings)


def test_a_plain_line_without_the_usual_metrics_counts_values(make_readings):
    reading = with_values(make_readings((0,))[0], {"peak_norm/mean": 2.0})
    assert format_line(reading, [reading]) == "step 0: 2 values"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (119, "119 s"), (130, "2 min"), (7100, "118 min"), (7300, "2 h"),
     (172_000, "48 h"), (180_000, "2 d"), (-5, "0 s")],
)  # fmt: skip
def test_the_age_of_a_reading_has_a_unit_that_fits(make_readings, monkeypatch, seconds, words):
    reading = make_readings((0,))[0]
    monkeypatch.setattr("geomon.show.terminal.overview.time.time", lambda: reading.time + seconds)
    assert shown([reading])[0].startswith(f"step 0 · {words} ago · probe, eval mode")


def test_the_share_of_the_time_stands_in_the_heading(make_readings):
    def heading(share):
        return shown(make_readings(curves={"geomon/overhead": [share] * 9}))[0]

    assert heading(0.0999).endswith("eval mode · geomon 10.0 % of the time")
    assert heading(0.1).endswith("eval mode · geomon 10 % of the time")
    assert heading(math.nan).endswith("eval mode")


def test_alerts_take_the_headline_and_each_kind_is_shown_in_full_the_gravest_first(make_readings):
    readings = list(make_readings(notes=["first", "second"]))
    for index, kind in ((2, "massive_rows"), (5, "massive_rows"), (6, "rank_collapse")):
        words = f"{kind.replace('_', ' ')} (layer {index}): look there (geomon alerts {kind})"
        notes = (*readings[index].notes, alert_of(kind, words))
        readings[index] = with_values(readings[index], readings[index].values, notes=notes)
    lines = shown(readings, width=100)
    assert lines[1].startswith(
        "Alerts: rank collapse at step 512, massive rows at step 32. twonn 5.3"
    )
    assert lines[-3:] == [
        "Alert at step 512: rank collapse (layer 6): look there (geomon alerts rank_collapse)",
        "Alert at step 32 (first of 2): massive rows (layer 2): look there (geomon alerts "
        "massive_rows)",
        "note (and 1 more): second",
    ]
    assert "alert" not in "".join(shown(make_readings(notes=["first"]))).lower()
    assert format_line(readings[2], readings).endswith(
        "alert: massive rows (layer 2): look there (geomon alerts massive_rows)"
    )


def test_the_loss_stands_beside_the_geometry_where_it_is_logged():
    def reading(step, loss):
        values = {"twonn/mean": 5.0, "training/loss": loss, "training/encoder_mean": 9.0}
        return reading_of(values, step)

    readings = [reading(0, 4.25), reading(10, 2.5), reading(20, math.nan)]
    assert format_line(readings[1], readings).endswith("training loss 2.5")
    assert "loss" not in format_line(readings[2], readings)
    lines = shown(readings)
    row = next(line for line in lines if line.startswith("training loss"))
    assert "2.5" in row
    assert row.endswith("from 4.2, known to step 10")
    row = next(line for line in shown(readings[:2]) if line.startswith("training loss"))
    assert row.endswith("from 4.2")
    assert not [line for line in shown([reading(0, math.nan)]) if "loss" in line]
