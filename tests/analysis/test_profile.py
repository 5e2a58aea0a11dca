import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tagged import reading_of

from geomon.analysis.profile import bulge, is_far_above, peak_depth, profile_of

VALUES = st.floats(-100, 100, allow_subnormal=False).map(lambda x: round(x, 3))
PROFILES = st.lists(st.one_of(VALUES, st.just(math.nan)), min_size=1, max_size=20)


@given(st.integers(4, 30), st.floats(0.1, 10), st.one_of(st.just(0.0), st.floats(0.01, 5)))
def test_a_straight_profile_has_no_bulge(count, first, slope):
    profile = [first + slope * layer for layer in range(count)]
    assert bulge(profile) == pytest.approx(0, abs=1e-9)
    assert peak_depth(profile) == (1.0 if profile[-1] > profile[-2] else 0.0)


@given(PROFILES.filter(lambda x: len(x) > 1), st.floats(0.1, 10))
def test_neither_depends_on_the_unit(profile, unit):
    scaled = [unit * value for value in profile]
    assert bulge(scaled) == pytest.approx(bulge(profile), rel=1e-6, abs=1e-6, nan_ok=True)
    assert peak_depth(profile[::-1]) >= 0 or math.isnan(peak_depth(profile))


@pytest.mark.parametrize(
    ("profile", "expected", "depth"),
    [
        ([1.0, 3.0, 1.0], 2.0, 0.5),
        ([2.0, 1.0, 1.0, 2.0], -0.5, 0.0),
        # The published figures of a decoder, by layer: the peak is at a quarter of the depth.
        ([0.083, 0.458, 0.275, 0.146, 0.136], 0.275 / 0.1095 - 1, 0.25),
        ([1.0], math.nan, math.nan),
        ([1.0, 2.0], math.nan, 1.0),
        ([], math.nan, math.nan),
        ([math.nan, 1.0, 2.0], math.nan, 1.0),
        ([-1.0, 3.0, 1.0], math.nan, 0.5),
    ],
)
def test_closed_forms(profile, expected, depth):
    assert bulge(profile) == pytest.approx(expected, nan_ok=True)
    assert peak_depth(profile) == pytest.approx(depth, nan_ok=True)


def test_a_profile_has_the_values_of_layers_alone():
    values = {
        "cosine/layer_01": 0.2, "cosine/layer_00": 0.1, "cosine/layer_01/margin": 9.0,
        "cosine/layer_01/head_0": 9.0, "cosine/mean": 9.0,
        "cosine/null": 0.0, "twonn/layer_02": 9.0,
    }  # fmt: skip
    reading = reading_of(values)
    assert profile_of(reading, "cosine") == [0.1, 0.2]
    assert profile_of(reading, "anisotropy") == []
    assert str(profile_of(reading_of({"qk_dot/layer_01": 0.2}), "qk_dot")) == "[nan, 0.2]"


@given(VALUES, st.lists(VALUES, min_size=1, max_size=20), st.sampled_from((0.25, 2.0, 64.0)))
def test_layer_0_far_above_the_blocks_does_not_depend_on_the_unit(first, blocks, unit):
    is_far = is_far_above([first], blocks)
    assert is_far == is_far_above([unit * first], [unit * value for value in blocks])
    assert is_far == is_far_above([math.nan, first, -1000.0], [*blocks, math.nan])
    # On an axis from 0, or from the lowest block, the blocks fill less than half the height.
    low, high = min(0.0, *blocks), max(0.0, *blocks)
    assert is_far == (high > low and (high - low) < 0.5 * (first - low))


def test_layer_0_is_far_above_no_blocks():
    assert not is_far_above([3.0], [])
    assert not is_far_above([3.0], [0.0, math.nan])
    assert not is_far_above([], [1.0])
