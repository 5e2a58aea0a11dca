import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tagged import alert_of, reading_of, with_values

from geomon.analysis.numbers import number
from geomon.record import Readings
from geomon.show.terminal import format_line, spark, view

ALL = ["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy", "geomon"]


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch):
    """The age of a reading does not hang on how long a test takes."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)


def shown(readings, width=80, encoding="utf-8", narrowed=None):
    console = Console(width=width, color_system=None, force_terminal=True)
    with console.capture() as capture:
        settings = console.options.update(width=width)
        settings.encoding = encoding
        for text in view(readings, width=narrowed).__rich_console__(console, settings):
            console.print(text)
    return capture.get().splitlines()


def row(lines, start):
    return next(text for text in lines if text.startswith(start))


@pytest.mark.parametrize("width", [80, 60, 40])
def test_it_fits_the_terminal_without_wrapping(make_readings, width):
    lines = shown(make_readings(layers=24, heads=16, notes=["a long warning " * 20]), width)
    assert len(lines) <= 14
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [80, 60])
def test_it_shows_the_dimension_its_phase_and_what_else_is_watched(make_readings, width):
    lines = shown(make_readings(), width)
    text = "\n".join(lines)
    assert "intrinsic dimension 5.3 ± 0.1, distinct tokens 4.9 ± 0.1" in lines
    words = " ".join(text.split())
    assert "compressing since step 256, 28 % below its peak 7.4" in words
    assert "distinct tokens: falling since step 0, 85 % below 32.1" in words
    assert "50 % of its start" in row(lines, "attention entropy")
    assert "0.70" in row(lines, "|cosine of mean")
    assert row(lines, "|cosine of mean").endswith("from 0.10")
    assert "step 1,500 · 60 s ago" in text
    assert "4.0 %" in text


def test_the_profile_is_described_by_its_ends_and_its_highest_layer(make_readings):
    profile = row(shown(make_readings()), "anisotropy")
    assert "▁▃█▃▁" in profile
    assert "highest 0.60 at layer 2 of 4" in profile


def test_the_spark_line_follows_the_curve(make_readings):
    assert "▁▁▂▅██▇▆▅" in next(text for text in shown(make_readings()) if "compressing" in text)


@pytest.mark.parametrize(
    ("values", "margin"),
    [
        ([5.36, 5.44, 5.41, 5.35], 0.0),  # all are printed as 5.4
        ([5.0, 5.4, 4.9, 5.2, 5.5, 5.1], 0.35),  # within twice the margin
        ([0.001, 0.004, 0.002], 0.0),  # 0.00
        ([1201.0, 1210.0, 1205.0], 0.0),
    ],
)
def test_noise_is_drawn_flat(values, margin):
    assert set(spark(values, 10, margin)) == {"▄"}


@given(values=st.lists(st.floats(-300, 300), min_size=2, max_size=60), width=st.integers(2, 40))
@settings(deadline=None, max_examples=50)
def test_where_the_printed_ends_agree_so_do_those_of_the_line(values, width):
    ends = [*values, values[0] + 1e-6]
    line = spark(ends, width)
    assert len(line) == min(width, len(ends))
    if number(ends[0]) == number(ends[-1]):
        assert line[0] == line[-1]


def test_the_dimension_of_a_run_that_only_scatters_is_drawn_flat(make_readings):
    scatter = {"twonn/mean": [5.2, 5.4, 5.3, 5.5, 5.2, 5.4, 5.3, 5.2, 5.4]}
    lines = shown(make_readings(curves=scatter, error=0.3))
    assert "▄" * 9 in next(text for text in lines if "steady" in text)


def test_the_width_can_be_given(make_readings):
    assert max(map(len, shown(make_readings(), 80, narrowed=50))) <= 50


def test_what_was_not_measured_is_said(make_readings):
    lines = shown(make_readings(without=ALL))
    assert sum("not measured" in text for text in lines) == 4
    assert shown(Readings([], [])) == ["no readings yet"]


def test_one_reading_and_missing_numbers_do_no_harm(make_readings):
    first = make_readings((0,))
    assert "too few readings to tell" in "\n".join(shown(first))
    empty = [
        with_values(first[0], dict.fromkeys(first[0].values.keys() - {"geomon/seconds"}, math.nan))
    ]
    assert sum("not measured" in text for text in shown(empty)) == 4


def test_the_last_note_is_shown_in_one_line_with_the_count_of_others(make_readings):
    lines = shown(make_readings(notes=["first", "second\nline"]))
    assert lines[-1] == "note (and 1 more): second line"


def test_terminals_without_unicode_get_ascii(make_readings):
    lines = shown(make_readings(), encoding="ascii")
    assert all(text.isascii() for text in lines)


def test_a_plain_line(make_readings):
    readings = make_readings()
    assert format_line(readings[4], readings) == (
        "step 128: intrinsic dimension 7.3 ± 0.1 (expanding), distinct tokens 7.5 ± 0.1, attention "
        "entropy 2.8, |cosine of mean query and mean key| 0.40"
    )
    assert "(compressing)" in format_line(readings[8], readings)


def test_a_plain_line_without_the_usual_metrics_counts_values(make_readings):
    reading = with_values(make_readings((0,))[0], {"peak_norm/mean": 2.0})
    assert format_line(reading, [reading]) == "step 0: 2 values"


def test_sparks():
    assert spark([], 10) == ""
    assert spark([1.0, 1.001], 10) == "▄▄"  # noise is no shape
    assert spark(list(range(80)), 8) == "▁▂▃▄▅▆▇█"
    assert len(spark(list(range(7)), 3)) == 3


def lopsided(readings, profile):
    """The run with this profile of the anisotropy at its last step."""
    last = readings[len(readings) - 1]
    rest = {tag: v for tag, v in last.values.items() if not tag.startswith("anisotropy")}
    ours = {f"anisotropy/layer_{n:02d}": value for n, value in enumerate(profile)}
    return Readings(readings.runs, [*readings.readings[:-1], with_values(last, rest | ours)])


def test_a_profile_stands_between_its_first_and_its_last_value(make_readings):
    run = lopsided(make_readings(), [0.11, 0.32, 0.63, 0.84, 0.45])
    assert row(shown(run), "anisotropy") == (
        "anisotropy by layer 0.11 ▁▃▆█▄ 0.45  highest 0.84 at layer 3 of 4"
    )
    holed = lopsided(make_readings(), [0.11, math.nan, 0.63, 0.84, math.nan])
    assert row(shown(holed), "anisotropy") == (
        "anisotropy by layer 0.11 ▁▆█ 0.84  highest 0.84 at layer 3 of 3"
    )


def test_a_narrow_terminal_gets_shorter_words_before_it_gets_none(make_readings):
    run = lopsided(make_readings(layers=24), [0.1] * 12 + [0.8] + [0.3] * 12)
    found = [row(shown(run, width), "anisotropy") for width in (80, 68, 67, 40)]
    assert [text.rstrip().split("0.30")[-1].strip() for text in found] == [
        "highest 0.80 at layer 12 of 24", "highest 0.80 at layer 12 of 24", "max 0.80 at 12", "",
    ]  # fmt: skip
    assert all(text.count("█") == 1 for text in found[:3])


def test_every_row_starts_with_the_last_value_and_ends_with_the_first(make_readings):
    """Of each curve, not of one: a pair of ends that are exchanged shows in some row."""
    curves = {
        "twonn/mean": [2, 3, 4, 6, 8, 7, 6, 5, 4.5],
        "twonn_distinct/mean": [31, 20, 18, 11, 7.5, 6.2, 5.9, 5.3, 4.2],
        "attention_entropy/mean": [4.0, 3.2, 3.1, 3.0, 2.8, 2.4, 2.0, 1.8, 1.0],
    }
    lines = shown(make_readings(curves=curves), 100)
    assert row(lines, "intrinsic") == "intrinsic dimension 4.5 ± 0.1, distinct tokens 4.2 ± 0.1"
    entropy = row(lines, "attention entropy")
    assert entropy.startswith(f"{'attention entropy':<36}1.0 nats     ")
    assert entropy.endswith("  25 % of its start")
    cosine = row(lines, "|cosine of")
    assert cosine.startswith("|cosine of mean query and mean key| 0.70         ")
    assert cosine.endswith("  from 0.10")


def test_errors_decide_the_decimals(make_readings):
    def value(last, error):
        curves = {"twonn/mean": [last] * 9}
        return (
            row(shown(make_readings(curves=curves, error=error)), "intrinsic")
            .partition(",")[0]
            .split()[2:5]
        )

    assert value(7.256, 0.094) == ["7.26", "±", "0.09"]
    assert value(7.256, 0.096) == ["7.3", "±", "0.1"]
    assert value(123.456, 0.06) == ["123.5", "±", "0.1"]
    assert value(7.256, 0.0)[0] == "7.3"
    assert value(99.6, 0.0)[0] == "99.6"
    assert value(100.4, 0.0)[0] == "100"
    assert value(0.996, 0.0)[0] == "1.00"


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
    def heading(share, width=100):
        return shown(make_readings(curves={"geomon/overhead": [share] * 9}), width)

    assert heading(0.0999)[0].endswith("geomon's share of the time 10.0 %")
    assert heading(0.1)[0].endswith("geomon's share of the time 10 %")
    assert "share" not in heading(math.nan)[0]
    # Where the heading is too long, the share has a line of its own.
    assert heading(0.25, width=60)[:2] == [
        "step 1,500 · 60 s ago · probe, eval mode", "geomon's share of the time 25 %",
    ]  # fmt: skip


def test_a_plain_line_is_of_its_reading_and_of_what_was_before(make_readings):
    curves = {"twonn/mean": [2, 3, 5, 7, 8, 6, 5, 4, 3]}
    readings = make_readings(curves=curves)
    with_profile = with_values(readings[4], readings[4].values | {"anisotropy/mean": 0.256})
    assert format_line(with_profile, readings) == (
        "step 128: intrinsic dimension 8.0 ± 0.1 (expanding), distinct tokens 7.5 ± 0.1, "
        "anisotropy 0.26, attention entropy 2.8, |cosine of mean query and mean key| 0.40"
    )
    assert format_line(readings[0], readings).startswith(
        "step 0: intrinsic dimension 2.0 ± 0.1, distinct tokens 32.1"
    )
    assert format_line(readings[5], []).startswith("step 256: twonn 6.0 ± 0.1, twonn_distinct")


def test_sparks_average_neighbours_and_go_from_the_least_to_the_most():
    assert spark([0, 0, 8, 8], 2) == "▁█"
    assert spark([0, 8, 8, 16], 2) == "▁█"
    assert spark([8, 0], 2) == "█▁"
    assert spark([0.0, 0.0], 2) == "▄▄"
    assert spark([100, 101.9], 2) == "▄▄"  # 1.9 %
    assert spark([100, 102.6], 2) == "▁█"
    assert spark([-1.0, 1.0], 2) == "▁█"
    assert spark([1.0], 0) == ""
    assert spark([3.0, 1.0, 2.0], 5) == "█▁▅"


def test_alerts_take_the_headline_and_the_last_is_shown_in_full(make_readings):
    readings = list(make_readings(notes=["first", "second"]))
    for index, place in ((2, "layer 4"), (5, "layer 3")):
        words = f"rank collapse ({place}): rank 1.2; look there (geomon alerts rank_collapse)"
        notes = (*readings[index].notes, alert_of("rank_collapse", words))
        readings[index] = with_values(readings[index], readings[index].values, notes=notes)
    lines = shown(readings, width=100)
    assert lines[1] == "Alert: rank collapse at step 32"
    assert " ".join(lines[-3:-1]) == (
        "alert at step 256 (and 1 before): rank collapse (layer 3): rank 1.2; look there "
        "(geomon alerts rank_collapse)"
    )
    assert lines[-1] == "note (and 1 more): second"
    assert "alert" not in "".join(shown(make_readings(notes=["first"])))
    assert format_line(readings[2], readings).endswith(
        "alert: rank collapse (layer 4): rank 1.2; look there (geomon alerts rank_collapse)"
    )
    alert = alert_of("not_finite", "not finite: 3 of 8 rows")
    readings[-1] = with_values(readings[-1], readings[-1].values, notes=[alert])
    assert row(shown(readings), "alert").startswith("alert at step 1,500 (and 2 before): not fin")
    assert not any(line.startswith("note") for line in shown(readings))


def test_the_loss_stands_beside_the_geometry_where_it_is_logged():
    def reading(step, loss):
        values = {"twonn/mean": 5.0, "training/loss": loss, "training/encoder_mean": 9.0}
        return reading_of(values, step)

    readings = [reading(0, 4.25), reading(10, 2.5), reading(20, math.nan)]
    assert format_line(readings[1], readings).endswith("loss 2.5")
    assert "loss" not in format_line(readings[2], readings)
    lines = shown(readings)
    row = next(line for line in lines if line.startswith("training loss"))
    assert "2.5" in row
    assert row.endswith("from 4.2, known to step 10")
    row = next(line for line in shown(readings[:2]) if line.startswith("training loss"))
    assert row.endswith("from 4.2")
    assert not [line for line in shown([reading(0, math.nan)]) if "loss" in line]
