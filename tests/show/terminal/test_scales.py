import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.show.terminal import scales

numbers = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(numbers, st.floats(0, 1e3)), min_size=1, max_size=20))
@settings(deadline=None, max_examples=60)
def test_an_axis_holds_all_values_and_is_no_finer_than_the_margins(points):
    values, margins = map(list, zip(*points, strict=True))
    low, high = scales.axis_range(values, margins)
    slack = 1e-9 * max(1.0, *map(abs, values))
    assert all(low - slack <= v - m and v + m <= high + slack for v, m in points)
    assert high - low >= 4 * scales.typical(margins) - slack
    assert high - low >= 10 * scales.last_digit(max(map(abs, values))) - slack
    if min(values) >= 0 and not any(margins):
        assert low >= 0


@given(low=numbers, width=st.floats(1e-3, 1e6), count=st.integers(2, 12))
@settings(deadline=None, max_examples=60)
def test_marks_are_evenly_spaced_inside_the_axis_and_say_their_value(low, width, count):
    marks = scales.axis_marks(low, low + width, count)
    assert len(marks) <= count
    slack = 1e-6 * max(abs(low), width)
    assert all(low - slack <= mark <= low + width + slack for mark, _ in marks)
    gaps = [b - a for (a, _), (b, _) in pairwise(marks)]
    assert all(math.isclose(gap, gaps[0], rel_tol=1e-3) for gap in gaps)
    for mark, text in marks:
        if abs(mark) < 1e6:
            assert math.isclose(
                float(text.replace(",", "")), mark, abs_tol=1e-9 * max(1, abs(mark))
            )


@given(
    first=st.integers(0, 10**6), length=st.integers(0, 10**9), count=st.integers(2, 20),
    logarithmic=st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_steps_are_marked_in_order_and_not_too_many(first, length, count, logarithmic):
    last = first + length
    marks = scales.step_marks(first, last, count, logarithmic=logarithmic)
    places = [mark for mark, _ in marks]
    assert places == sorted(set(places))
    assert len(places) <= count + 1
    ends = [scales.place(step, logarithmic=logarithmic) for step in (first, last)]
    assert all(ends[0] - 1e-6 <= mark <= ends[1] + 1e-6 * max(1, ends[1]) for mark in places)
