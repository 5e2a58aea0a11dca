import math

import pytest
from tagged import reading_of, with_values

from geomon.analysis import summarise
from geomon.record import Readings


def text_of(readings):
    return "\n".join(summarise(readings))


def anisotropy(readings, values, error=0.0):
    """The run with this profile at its last step."""
    last = readings[len(readings) - 1]
    rest = {tag: v for tag, v in last.values.items() if not tag.startswith("anisotropy")}
    profile = {f"anisotropy/layer_{n:02d}": value for n, value in enumerate(values)}
    errors = {f"{tag}/margin": error for tag in profile}
    return Readings(
        readings.runs, [*readings.readings[:-1], with_values(last, rest | profile | errors)]
    )


def test_the_run_of_the_definitions_in_words(make_readings):
    assert summarise(make_readings()) == [
        "intrinsic dimension 5.3 ± 0.1, compressing since step 256, 28 % below its peak 7.4 "
        "(between steps 128 and 256); distinct tokens 4.9 ± 0.1, falling since step 0, 85 % below "
        "32.1.",
        "At step 0: intrinsic dimension 2.5 ± 0.1, distinct tokens 32.1 ± 0.1.",
        "intrinsic dimension rose from 2.5 to 7.4 between steps 0 and 256, distinct tokens fell "
        "from 32.1 to 6.2: the rise is near-duplicates (equal tokens at equal positions), not new "
        "dimensions.",
        "attention entropy: 3.2 nats at step 0, 1.6 nats at step 1,500 (50 % of its start).",
        "cosine of mean query and mean key, mean size over heads: 0.10 at step 0, 0.70 at step "
        "1,500. At the end it is above 0.5 in 8 of 16 heads, and below -0.5 in 8.",
        "anisotropy over depth at step 1,500: highest, 0.60, at layer 2, in the middle (0.11 at "
        "layer 0, 0.11 at layer 4); bell-shaped.",
        "geomon took 4.0 % of the time until step 1,500.",
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
    assert "near-duplicates (" in text_of(make_readings((0, 16)))
    assert "near-duplicates (" not in text_of(make_readings(curves=curves))


LOW, BELL = "; not bell-shaped", "; bell-shaped."
INSIDE = "; higher inside than at both ends, but not one bell."


@pytest.mark.parametrize(
    ("profile", "error", "words"),
    [
        ([0.1, 0.9, 0.6, 0.4], 0, "layer 1, in the middle"),  # a third of the depth to the digit
        # The range is 0.4: changes against the trend of up to 0.02 are ignored.
        ([0.2, 0.4, 0.381, 0.6, 0.3], 0, BELL),
        ([0.2, 0.4, 0.379, 0.6, 0.3], 0, INSIDE),
        ([0.2, 0.3, 0.5, 0.6, 0.581], 0, f"{LOW}: it rises with depth and levels off"),
        ([0.2, 0.3, 0.5, 0.6, 0.579], 0, BELL),
        # Flat: a range below a tenth of the largest value, or within the margin of a difference.
        ([0.55, 0.56, 0.60, 0.56, 0.55], 0, "flat, 0.55 to 0.60; no layer stands out"),
        ([0.53, 0.56, 0.60, 0.56, 0.53], 0, BELL),
        ([0.2, 0.3, 0.4, 0.3, 0.2], 0.15, "flat, 0.20 to 0.40; no layer stands out"),
        ([0.2, 0.3, 0.4, 0.3, 0.2], 0.14, f"0.20 at layer 4){BELL}"),
        ([0.1, math.nan, 0.9, 0.2], 0, "0.90, at layer 2, in the middle (0.10 at layer 0, 0.20 at "
                                       f"layer 3){BELL}"),
        ([0.1, math.nan, 0.9], 0, ""),
    ],
)  # fmt: skip
def test_the_words_on_a_profile_change_at_its_limits(make_readings, profile, error, words):
    text = [x for x in summarise(anisotropy(make_readings(), profile, error)) if "depth at" in x]
    assert bool(text) == bool(words)
    if words:
        assert words in text[0]
        assert text[0].startswith("anisotropy over depth at step 1,500: ")


def test_what_was_not_measured_is_not_mentioned(make_readings):
    without = ["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy"]
    assert summarise(make_readings(without=without)) == [
        "geomon took 4.0 % of the time until step 1,500."
    ]
    nothing = summarise(make_readings(without=[*without, "geomon"]))
    assert nothing == ["9 readings, none of the metrics that this summary speaks of."]
    assert summarise(Readings([], [])) == ["No readings yet."]


def test_one_reading_and_missing_numbers_do_no_harm(make_readings):
    headline, *others = summarise(make_readings((0,)))
    assert headline == (
        "intrinsic dimension 2.5 ± 0.1, too few readings to tell; distinct tokens 32.1 ± 0.1, too "
        "few readings to tell."
    )
    assert not any("At step 0" in sentence for sentence in others)
    first = make_readings((0,))[0]
    empty = with_values(first, dict.fromkeys(first.values.keys() - {"geomon/seconds"}, math.nan))
    assert summarise([empty]) == ["1 readings, none of the metrics that this summary speaks of."]


def test_a_run_read_by_two_sources_is_described_from_one(make_readings):
    probe = make_readings()
    inline = make_readings((1500,), curves={"twonn/mean": [99.0]}, source="inline")
    mixed = Readings(probe.runs, [*probe, *inline])
    assert summarise(mixed) == summarise(probe)


def scales(make_readings, steps, small, large, margin=0.01):
    """The sentence on scales of a run whose readings are of these steps."""
    count = len(steps)
    curves = {"gride/mean/k1": small, "gride/mean/k32": large}
    curves |= {f"{name}/margin": [margin] * count for name in curves}
    steady = {name: [3.0] * count for name in ("twonn/mean", "twonn_distinct/mean")}
    more = {name: [1.0] * count for name in ("attention_entropy/mean", "geomon/overhead")}
    found = summarise(make_readings(steps, curves={**steady, **more, **curves}))
    return [sentence for sentence in found if "scale" in sentence]


@pytest.mark.parametrize(
    ("step", "since", "share"), [(100, 100, -29), (101, 50, -38), (99, 99, -29)]
)
def test_the_end_begins_two_octaves_before_the_last_step(make_readings, step, since, share):
    """100 is two octaves before 400, to the step: 101 is too late, and 50 is taken instead."""
    (sentence,) = scales(make_readings, (0, 50, step, 400), [9, 8, 7, 5], [9, 2, 3, 4])
    assert f"since step {since}: at scale 1 it fell ({share} %, to 5.0)" in sentence


@pytest.mark.parametrize(
    ("small", "large", "disagree"),
    [
        ([9, 5.0], [4, 4.21], True),  # 5 % and more
        ([9, 5.0], [4, 4.19], False),
        ([4, 4.19], [9, 5.0], False),
        ([9, 5.0], [9, 5.0], False),
        ([0, 5.0], [9, 5.0], False),  # a share of nothing
    ],
)
def test_scales_disagree_where_both_move_by_a_twentieth_in_opposite_ways(
    make_readings, small, large, disagree
):
    assert bool(scales(make_readings, (100, 400), small, large)) == disagree
    assert not scales(make_readings, (100, 400), small, large, margin=0.0)  # unknown errors
    assert not scales(make_readings, (101, 400), small, large)  # less than two octaves


def test_the_first_rise_is_compared_at_its_own_two_steps(make_readings):
    """What distinct tokens do after the peak of twonn does not explain its rise."""
    rises = [2.5, 3.0, 3.5, 4.5, 5.5, 5.0, 4.0, 3.0, 2.0]
    text = text_of(make_readings(curves={"twonn_distinct/mean": rises}))
    assert "not only near-duplicates" in text
    missing = [
        with_values(r, {t: v for t, v in r.values.items() if r.step or "distinct" not in t})
        for r in make_readings()
    ]
    assert "near-duplicates" not in text_of(missing)


def test_entropy_is_a_share_of_its_start_where_there_is_one(make_readings):
    def entropy(*curve):
        readings = make_readings((0, 8)[: len(curve)], curves={"attention_entropy/mean": curve})
        return [sentence for sentence in summarise(readings) if "entropy" in sentence]

    assert entropy(0.0, 2.0) == ["attention entropy: 0.00 nats at step 0, 2.0 nats at step 8."]
    assert entropy(2.0) == ["attention entropy: 2.0 nats at step 0."]


def test_heads_at_a_limit_itself_are_not_counted_as_beyond_it():
    cosines = {f"qk_cosine/layer_01/head_{head}": x for head, x in enumerate((0.5, -0.5, -0.6))}
    text = " ".join(summarise(Readings([], [reading_of(cosines)])))
    assert "above 0.5 in 0 of 3 heads, and below -0.5 in 1." in text
