"""Numbers for readers: as many digits as their size, or their margin, allows."""

import math

import pytest

from geomon.analysis.numbers import number, significant, with_margin


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0.00"), (0.994, "0.99"), (-0.25, "-0.25"), (1.0, "1.0"), (-1.26, "-1.3"),
        (99.94, "99.9"), (100.0, "100"), (-1234.6, "-1235"), (math.inf, "none"),
    ],
)  # fmt: skip
def test_a_number_has_fewer_decimals_the_larger_it_is(value, words):
    assert number(value) == words


@pytest.mark.parametrize(
    ("value", "margin", "words"),
    [
        (5.347, 0.0953, "5.3 ± 0.1"), (5.347, 0.0952, "5.35 ± 0.10"), (5.347, 0.953, "5.3 ± 1.0"),
        (53.47, 9.0, "53.5 ± 9.0"), (53.47, 9.6, "53 ± 10"), (534.7, 0.004, "534.700 ± 0.004"),
        (5.3, math.nan, "5.3"), (-0.04, 0.3, "0.0 ± 0.3"), (1.04, 1.01, "1.04 ± 1.01"),
        (1.01, 1.04, "1.0 ± 1.0"), (1.0000001, 1.0, "1.000000 ± 1.000000"),
    ],
)  # fmt: skip
def test_a_value_has_the_decimals_of_its_margin(value, margin, words):
    assert with_margin(value, margin) == words


@pytest.mark.parametrize(
    ("value", "digits", "words"),
    [
        (99.4, 2, "99"), (99.5, 2, "100"), (-1234.5, 2, "-1,234"), (9.96, 2, "10"),
        (0.012345, 3, "0.0123"), (999_999.4, 3, "999,999"), (1e6, 3, "1e+06"), (0.0, 2, "0"),
        (999.4, 3, "999"), (999.5, 3, "1,000"),
    ],
)  # fmt: skip
def test_a_number_has_so_many_digits_or_all_before_the_point(value, digits, words):
    assert significant(value, digits) == words
