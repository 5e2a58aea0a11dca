import math
from dataclasses import replace

import pytest

from geomon.analysis import summarise
from geomon.record import Readings


def text_of(readings):
    return "\n".join(summarise(readings))


def anisotropy(readings, values, error=0.0):
    """The run with this profile at its last step."""
    last = readings[len(readings) - 1]
    rest = {tag: v for tag, v in last.values.items() if not tag.startswith("anisotropy")}
    profile = {f"anisotropy/layer_{n:02d}": value for n, value in enumerate(values)}
    errors = {f"{tag}/std": error for tag in profile}
    return Readings([], [*readings.readings[:-1], replace(last, values=rest | profile | errors)])


def test_the_run_of_the_definitions_in_words(make_readings):
    assert summarise(make_readings()) == [
        "twonn/mean: 2.5 at step 0, peak 7.4 at step 256, 5.3 at the end (step 1500, 28 % below "
        "the peak).",
        "twonn_distinct/mean fell from 32.1 to 4.9: the first rise of twonn is near-duplicates "
        "(equal tokens at equal positions), not new dimensions.",
        "The scales disagree at the end (since step 256): at the smallest scale the dimension "
        "compresses (-29 %), at scale 32 it grows (+58 %, to 6.0).",
        "attention_entropy/mean: 3.2 nats at step 0, 1.6 at the end (50 % of its start).",
        "Mean |qk_cosine| over heads: 0.10 at step 0, 0.70 at the end; there mean query and mean "
        "key point the same way (above 0.5) in 8 of 16 heads, and opposite ways (below -0.5) in 8.",
        "Anisotropy over depth at the end (step 1500): highest, 0.60, at layer 2, in the middle "
        "(0.11 at layer 0, 0.11 at layer 4); bell-shaped.",
        "geomon took 4.0 % of the run's time: 9 readings, 18 s in all.",
    ]


@pytest.mark.parametrize(
    "curves",
    [
        {"twonn_distinct/mean": [2.5, 3, 4, 5, 6, 7, 7, 7, 7]},  # rises too
        {"twonn/mean": [9, 8, 7, 6, 5, 4, 3, 2.5, 2]},  # no rise to explain
        {"twonn/mean": [2.5, 2.5, 2.6, 2.5, 2.6, 2.5, 2.5, 2.6, 2.5]},  # a rise within its errors
        {"twonn_distinct/mean": [7.5, 7.5, 7.4, 7.5, 7.5, 7.45, 7.0, 6.0, 5.0]},  # falls later only
    ],
)
def test_near_duplicates_are_named_only_where_the_data_says_so(make_readings, curves):
    assert "near-duplicates (" in text_of(make_readings())
    assert "near-duplicates (" not in text_of(make_readings(curves=curves))


def test_a_rise_of_both_variants_is_said(make_readings):
    readings = make_readings(curves={"twonn_distinct/mean": [2.5, 3, 4, 5, 6, 7, 7, 7, 7]})
    assert "not only near-duplicates" in text_of(readings)


@pytest.mark.parametrize(
    ("curve", "words"),
    [
        ([9, 8, 7, 6, 5, 4, 3, 2.5, 2], "never expanded"),
        ([2, 3, 4, 5, 6, 7, 8, 9, 11], "still expanding"),
        ([5, 5.1, 5, 4.9, 5, 5.1, 5, 4.95, 5], "no change above its errors"),
    ],
)
def test_each_course_of_the_dimension_has_its_words(make_readings, curve, words):
    assert words in summarise(make_readings(curves={"twonn/mean": curve}))[0]


@pytest.mark.parametrize(
    "large", [[14, 10, 9, 8, 7, 6, 5, 4.5, 4], [14, 10, 7, 4, 3.2, 3.8, 3.8, 3.8, 3.9]]
)
def test_scales_that_move_together_or_hardly_do_not_disagree(make_readings, large):
    assert "disagree" not in text_of(make_readings(curves={"gride/mean/k32": large}))


@pytest.mark.parametrize(
    ("profile", "error", "words"),
    [
        ([0.2, 0.4, 0.6, 0.4, 0.2], 0, "middle (0.20 at layer 0, 0.20 at layer 4); bell-shaped"),
        ([0.1, 0.2, 0.3, 0.4, 0.5], 0, "0.50 at layer 4); not bell-shaped: it rises with depth."),
        ([0.5, 0.4, 0.3, 0.2, 0.1], 0, "not bell-shaped: it falls with depth"),
        ([0.1, 0.4, 0.7, 0.71, 0.7], 0, "it rises with depth and levels off"),
        ([0.2, 0.6, 0.3, 0.5, 0.2], 0, "higher inside than at both ends, but not one bell"),
        ([0.5, 0.2, 0.1, 0.2, 0.5], 0, "not bell-shaped."),
        ([0.50, 0.51, 0.52, 0.51, 0.50], 0, "flat, 0.50 to 0.52"),
        ([0.2, 0.3, 0.4, 0.3, 0.2], 0.15, "flat, 0.20 to 0.40"),
    ],
)  # fmt: skip
def test_the_profile_is_described_honestly(make_readings, profile, error, words):
    assert words in text_of(anisotropy(make_readings(), profile, error))


def test_what_was_not_measured_is_not_mentioned(make_readings):
    without = ["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy"]
    assert summarise(make_readings(without=without)) == [
        "geomon took 4.0 % of the run's time: 9 readings, 18 s in all."
    ]
    nothing = summarise(make_readings(without=[*without, "geomon"]))
    assert nothing == ["9 readings, none of the metrics that this summary speaks of."]
    assert summarise(Readings([], [])) == ["No readings yet."]


def test_one_reading_and_missing_numbers_do_no_harm(make_readings):
    assert summarise(make_readings((0,)))[0] == "twonn/mean: 2.5 at step 0."
    first = make_readings((0,))[0]
    empty = replace(first, values=dict.fromkeys(first.values, math.nan))
    assert summarise([empty]) == ["1 readings, none of the metrics that this summary speaks of."]


def test_a_run_read_by_two_sources_is_described_from_one(make_readings):
    probe = make_readings()
    inline = make_readings((1500,), curves={"twonn/mean": [99.0]}, source="inline")
    mixed = Readings([], [*probe, *inline])
    assert summarise(mixed) == summarise(probe)
