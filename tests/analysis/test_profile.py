"""A profile over depth: its bulge, its peak, and whether layer 0 is far above the blocks."""

import math

import pytest

from geomon.analysis import bulge, is_far_above, peak_depth

NAN = math.nan
# A profile by layer, its bulge, and the depth of its peak.
PROFILES = [
    ([1.0, 0.0, 4.0, 5.0, 6.0, 0.0, 3.0], 1.5, 4 / 6),
    ([1.0, 9.0, 4.0, NAN, 6.0, 0.0, 3.0], 1.5, 1 / 6),
    ([3.0, 3.0, 3.0, 3.0], 0.0, 0.0),  # the first of equal peaks
    ([-2.0, 0.0, -4.0], 1.0, 0.5),
    ([-4.0, -8.0, -2.0], -5 / 3, 1.0),
    ([NAN, 1.0, 3.0, 3.0], NAN, 2 / 3),
    ([-1.0, 2.0, 1.0], NAN, 0.5),  # the ends cancel
    ([1.0, NAN, 2.0], NAN, 1.0),
    ([1.0, 2.0], NAN, 1.0),  # nothing is in the middle
    ([2.0], NAN, NAN),
    ([NAN, NAN, NAN], NAN, NAN),
    ([], NAN, NAN),
]


@pytest.mark.parametrize(("profile", "expected", "depth"), PROFILES)
def test_a_profile_has_a_bulge_and_a_peak(profile, expected, depth):
    found = bulge(profile), peak_depth(profile)
    assert found == pytest.approx((expected, depth), nan_ok=True)


@pytest.mark.parametrize(
    ("first", "blocks", "is_above"),
    [
        ([6.0], [1.0, 3.0], False), ([6.1], [1.0, 3.0], True), ([5.0, 6.1], [3.0, 1.0], True),
        ([3.0], [-1.0, 1.0], False), ([3.1], [-1.0, 1.0], True), ([-5.0], [-1.0, -2.0], False),
        ([9.0], [0.0, 0.0], False), ([9.0], [], False), ([], [1.0], False), ([NAN], [1.0], False),
        ([9.0, NAN], [1.0, NAN], True),
    ],
)  # fmt: skip
def test_layer_0_is_far_above_at_more_than_twice_the_range_of_the_blocks(first, blocks, is_above):
    assert is_far_above(first, blocks) == is_above
