import math
from dataclasses import replace

import pytest
from rich.console import Console

from geomon.record import Readings
from geomon.show.terminal import format_line, spark, view

ALL = ["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy", "geomon"]


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
    assert "5.3 ± 0.1" in row(lines, "intrinsic dimension")
    assert "compressing since step 256: 28 % below the peak 7.4" in text
    assert "falling, from 32.1" in row(lines, "· distinct tokens")
    assert "50 % of its start" in row(lines, "attention entropy")
    assert "0.70" in row(lines, "|cos|")
    assert "from 0.10" in row(lines, "|cos|")
    assert "step 1,500 · 60 s ago" in text
    assert "4.0 %" in text


def test_the_profile_is_described_by_its_ends_and_its_highest_layer(make_readings):
    profile = row(shown(make_readings()), "anisotropy")
    assert "▁▃█▃▁" in profile
    assert "highest 0.60 at layer 2 of 4" in profile


def test_the_spark_line_follows_the_curve(make_readings):
    assert "▁▁▂▅██▇▆▅" in row(shown(make_readings()), "intrinsic dimension")


def test_the_width_can_be_given(make_readings):
    assert max(map(len, shown(make_readings(), 80, narrowed=50))) <= 50


def test_what_was_not_measured_is_said(make_readings):
    lines = shown(make_readings(without=ALL))
    assert sum("not measured" in text for text in lines) == 4
    assert shown(Readings([], [])) == ["no readings yet"]


def test_one_reading_and_missing_numbers_do_no_harm(make_readings):
    first = make_readings((0,))
    assert "too few readings to tell" in "\n".join(shown(first))
    empty = [replace(first[0], values=dict.fromkeys(first[0].values, math.nan))]
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
        "step 128: ID 7.3 ± 0.1 (expanding), distinct 7.5, entropy 2.8, |qk| 0.40"
    )
    assert "(compressing)" in format_line(readings[8], readings)


def test_a_plain_line_without_the_usual_metrics_counts_values(make_readings):
    reading = replace(make_readings((0,))[0], values={"peak_norm/mean": 2.0})
    assert format_line(reading, [reading]) == "step 0: 1 values"


def test_sparks():
    assert spark([], 10) == ""
    assert spark([1.0, 1.001], 10) == "▄▄"  # noise is no shape
    assert spark(list(range(80)), 8) == "▁▂▃▄▅▆▇█"
    assert len(spark(list(range(7)), 3)) == 3
