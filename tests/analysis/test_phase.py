"""The phase of a curve is held to its rule, with arithmetic of its own."""

import functools
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from geomon.analysis.phase import Point, change_between, find_phase, phase_of, sum_of
from support import definitions as by_book

# Mean of twonn over the layers of a character decoder on enwik8, as training goes on.
STEPS = [0, 32, 64, 128, 256, 512, 1024, 1500, 8192, 16000]
PAPER = [2.5, 3.3, 5.0, 7.3, 7.4, 6.4, 5.7, 5.3, 4.7, 4.1]
UP = [2 + 0.5 * n for n in range(11)]
# Standard errors in half the width of a 95 % interval from 8 groups.
T = stats.t.isf(0.025, 7)
MOVES = {"expanding", "compressing", "falling"}
# Steps, values, margins; names from which number of readings on; the step of `since`, and where the
# peak may be.
COURSES = {
    "up and down, read by octaves": (
        [0, *(2**n for n in range(12))],
        [2.5, 2.5, 2.6, 2.8, 3.3, 4.0, 5.0, 6.2, 7.1, 7.4, 6.9, 6.4, 5.92], [0.36] * 13,
        {1: "unknown", 2: "level", 3: "unclear", 5: "expanding", 11: "level",
         12: "compressing"},
        (128, (128, 512)),
    ),
    "halved at the end": (
        [0, 4, 8, 11, 16, 23, 32, 64, 300],
        [28.92, 28.85, 27.22, 25.98, 27.05, 19.66, 17.76, 11.26, 5.57],
        [1.16, 1.36, 0.82, 1.34, 1.69, 1.32, 1.48, 0.9, 0.65],
        {1: "unknown", 2: "level", 4: "falling", 5: "level", 6: "falling"}, (32, (0, 8)),
    ),
    "up, down, up and level below the peak": (
        range(150), [*UP, *UP[::-1], *(2 + 0.2 * n for n in range(11)), *[4.0] * 117], [0.1] * 150,
        {1: "unknown", 2: "expanding", 12: "level", 13: "compressing", 23: "level",
         25: "expanding", 35: "level"},
        (32, (10, 11)),
    ),
    "one collapse": (
        range(0, 500, 50), [*[5.0] * 9, 1.1], [0.4] * 10,
        {1: "unknown", 2: "level", 10: "falling"}, (400, (0, 400)),
    ),
    "margins too wide to say level": (
        range(12), [5.0] * 12, [1.0] * 12, {1: "unknown", 2: "unclear"}, (None, (0, 11)),
    ),
    "no margins": (range(5), [1, 2, 3, 4, 5], None, {1: "unknown"}, (None, (4, 4))),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "values", "margins", "course", "end"), COURSES.values(),
                         ids=COURSES)  # fmt: skip
def test_the_name_changes_where_the_course_does(steps, values, margins, course, end):
    found = {}
    for until in range(1, len(values) + 1):
        phase = find_phase(list(steps)[:until], values[:until], margins and margins[:until])
        if not found or [*found.values()][-1] != phase.name:
            found[until] = phase.name
    assert found == course
    assert (phase.since and phase.since.step, phase.highest.steps) == end
    assert (phase.start.value, phase.last.value, phase.peak.value) == (
        values[0], values[-1], max(values),
    )  # fmt: skip


def lines(steps, values, errors):
    """Divide a curve by trying every division: the least chi square plus 16 for each stretch."""
    axes = (np.array(steps, float), np.log1p(steps))

    def chi_square(axis, first, last):
        some = slice(first, last + 1)
        x, y, w = axis[some] - axis[first], np.array(values[some]), 1 / errors[some]
        return float(((np.polyval(np.polyfit(x, y, 1, w=w), x) - y) ** 2 * w**2).sum())

    @functools.cache
    def best(last):
        if last == 0:
            return 0.0, 0
        return min(
            (best(first)[0] + min(chi_square(axis, first, last) for axis in axes) + 16, first)
            for first in range(last)
        )

    last = len(values) - 1
    first = best(last)[1]
    axis = min(axes, key=lambda axis: chi_square(axis, first, last))
    some = slice(first, last + 1)
    (slope, _), covariance = np.polyfit(
        axis[some] - axis[first], values[some], 1, w=1 / errors[some], cov="unscaled"
    )
    length = axis[last] - axis[first]
    return steps[first], slope * length, math.sqrt(covariance[0, 0]) * length


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=60)
def test_the_newest_stretch_is_that_of_the_best_division_into_lines(seed):
    random, start = Random(seed), seed % 2 * 10**9  # as if tokens of a long run were counted
    count, wander = random.randint(5, 12), random.choice([0.0, 0.3, 1.0])
    steps = sorted(random.sample(range(start, start + 3000), count))
    level, values = 8.0, []
    for _ in range(count):
        level += random.gauss(0, wander)
        values.append(level + random.gauss(0, 0.2))
    phase = find_phase(steps, values, [0.4] * count)
    if phase.since is None:
        return
    axis = np.log1p(steps)
    share = (axis[2:] - axis[1:-1]) / (axis[2:] - axis[:-2])
    off = values[1:-1] - share * values[:-2] - (1 - share) * values[2:]
    off /= np.sqrt(1 + share**2 + (1 - share) ** 2)
    scatter = (2 * (0.4 / T) ** 2 + (count - 4) * (1.48 * np.median(np.abs(off))) ** 2) / (
        count - 2
    )
    error = max(0.4 / T, math.sqrt(scatter), 0.01 * np.ptp(values), 0.01 * np.median(values))
    first, change, deviation = lines(steps, values, np.full(count, error))
    alike = math.sqrt(2 - 2 / sum(step >= first for step in steps))
    assert phase.since.step == first
    assert phase.change.value == pytest.approx(change, rel=1e-4, abs=1e-9)
    assert phase.change.margin == pytest.approx(
        alike * stats.norm.isf(0.015 / count) * deviation, rel=1e-3
    )
    largest = max(abs(v) for step, v in zip(steps, values, strict=True) if step >= first)
    beyond = abs(change) > phase.change.margin
    matters = abs(change) >= max(0.1 * min(np.ptp(values), largest), 0.02 * largest)
    assert (phase.name in MOVES) == (beyond and matters)
    assert phase.name not in MOVES or (phase.name == "expanding") == (change > 0)
    assert phase.name != "level" or abs(change) + phase.change.margin <= 0.25 * largest


OPPOSITE = {"expanding": {"falling", "compressing"}, "falling": {"expanding"},
            "compressing": {"expanding"}}  # fmt: skip


@given(st.integers(0, 10_000), st.floats(1e-6, 1e6))
@settings(deadline=None, max_examples=40)
def test_units_do_not_change_the_word_and_a_mirror_turns_it(seed, unit):
    random = Random(seed)
    count, drift = random.randint(2, 30), random.choice([0.0, 0.1, -0.1])
    values = np.array([9 + drift * n + random.gauss(0, 0.3) for n in range(count)])
    steps, margins = list(range(0, 20 * count, 20)), np.full(count, 0.5)
    phase = find_phase(steps, values.tolist(), margins.tolist())
    same = find_phase(steps, (unit * values).tolist(), (unit * margins).tolist())
    mirrored = find_phase(steps, (-values).tolist(), margins.tolist())
    assert (same.name, same.since and same.since.step) == (
        phase.name, phase.since and phase.since.step,
    )  # fmt: skip
    assert mirrored.name in OPPOSITE.get(phase.name, {phase.name})


def paired(steps, values, groups, fingerprints=None):
    """Readings of the same rows, from the relative errors of their 8 groups, [steps, 8]."""
    means = np.array(values) * (1 + groups.mean(axis=1))
    without = np.array(values)[:, None] * (1 + (groups.sum(axis=1, keepdims=True) - groups) / 7)
    return [
        Point(step, value, by_book.margin(each), each.tolist(), name)
        for step, value, each, name in zip(
            steps, means.tolist(), without, fingerprints or ["rows"] * len(steps), strict=True
        )
    ]


def test_errors_that_all_readings_share_cancel_in_their_differences():
    random = np.random.default_rng(7)
    shared = 0.2 * random.standard_normal((1, 8)) + 0.003 * random.standard_normal((12, 8))
    steps, falling = range(0, 1200, 100), np.linspace(6, 5, 12)
    assert phase_of(paired(steps, falling, shared)).name == "falling"
    for others in ([str(step) for step in steps], [""] * 12):
        assert phase_of(paired(steps, falling, shared, others)).name == "unclear"
    half = [*["before"] * 6, *["after"] * 6]
    assert phase_of(paired(steps, falling, shared, half)).name in {"level", "unclear"}


@pytest.mark.parametrize("rows", [("a", "a", "a"), ("a", "b", "a"), ("", "", ""), ("a", "b", "c")])
def test_the_margin_of_a_sum_pairs_what_saw_the_same_rows(rows):
    random = np.random.default_rng(1)
    without = 5 + random.standard_normal((3, 8))
    points = [
        Point(step, 5.0, by_book.margin(each), each.tolist(), name)
        for step, each, name in zip((0, 1, 2), without, rows, strict=True)
    ]
    weights = np.array([-1.0, 0.5, 2.0])
    squares = 0.0
    for name in {*rows} - {""}:
        some = [n for n in range(3) if rows[n] == name]
        squares += by_book.margin(weights[some] @ without[some]) ** 2
    if not rows[0]:
        squares = sum(
            (w * by_book.margin(each)) ** 2 for w, each in zip(weights, without, strict=True)
        )
    found = sum_of(points, weights.tolist())
    assert found.value == pytest.approx(7.5)
    assert found.margin == pytest.approx(math.sqrt(squares))
    unknown = [points[0]._replace(margin=0.0), *points[1:]]
    assert sum_of(unknown, weights.tolist()).margin == 0


def test_metrics_of_fewer_degrees_of_freedom_have_wider_differences():
    random = np.random.default_rng(2)
    without = 5 + random.standard_normal((2, 8))
    wide = [
        Point(step, 5.0, 1.5 * by_book.margin(each), each.tolist(), "rows")
        for step, each in zip((0, 1), without, strict=True)
    ]
    found = change_between(*wide)
    assert found.margin == pytest.approx(1.5 * by_book.margin(without[1] - without[0]))


def test_the_words_name_the_readings_and_the_change_along_their_line():
    phase = find_phase(STEPS, PAPER, [0.3] * 10)
    assert phase.words() == "compressing, -3.4 ± 1.3 since step 128"
    assert phase.course() == (
        "start 2.5 ± 0.3 at step 0; peak 7.4 ± 0.3 at step 256 (between steps 128 and 256)"
    )
    assert find_phase([0], [1.0], [0.1]).course() == ""


@pytest.mark.parametrize(
    ("values", "margin", "course"),
    [
        ([5.0, 5.1, 5.0, 4.9, 5.0], 0.2, ""),
        ([0.0, 0.0, 0.0], 0.0, ""),
        ([1.0, 3.0, 3.01, 3.0, 3.0, 3.0], 0.2, "start 1.0 ± 0.2 at step 0; rose to 3.0 ± 0.2"),
        ([9.0, 4.0, 3.0, 5.0, 6.0], 0.2, "start 9.0 ± 0.2 at step 0; low 3.0 ± 0.2 at step 20"),
        ([2.0, 7.0, 2.0], 0.0, "start 2.0 at step 0; peak 7.0 at step 10"),
        ([2.0, 2.001, 2.0], 0.0001, ""),
    ],
)  # fmt: skip
def test_a_course_tells_turns_and_nothing_that_is_too_small_to_matter(values, margin, course):
    steps = range(0, 10 * len(values), 10)
    phase = find_phase(steps, values, [margin] * len(values))
    assert phase.course().startswith(course)
    assert bool(phase.course()) == bool(course)


def test_values_that_are_not_finite_are_passed_over():
    phase = find_phase([0, 1, 2, 3], [1.0, math.nan, 3.0, 2.0], [0.2, 0.2, math.nan, 0.2])
    assert (phase.name, phase.since.step, phase.peak.step) == ("expanding", 0, 2)
    assert find_phase([0, 1], [1.0, 3.0], [0.2, math.nan]).name == "unknown"
    assert find_phase([0], [math.nan]).name == "unknown"
    with pytest.raises(ValueError, match="as many values and margins as steps"):
        find_phase([0, 1], [1.0])


def noise(count, correlation, seed):
    """Curves without a change: 41 errors of deviation 1 and a correlation of neighbours."""
    fresh = np.random.default_rng(seed).standard_normal((41, count))
    fresh[1:] *= math.sqrt(1 - correlation**2)
    for n in range(1, 41):
        fresh[n] += correlation * fresh[n - 1]
    return fresh.T


def names(values):
    """Names of the phase at every reading of a run."""
    steps, margins = range(len(values)), [T] * len(values)
    return {
        find_phase(steps[:until], values[:until].tolist(), margins[:until]).name
        for until in range(2, len(values) + 1)
    }


def most(count, rate):
    """Number that chance exceeds once in a thousand."""
    return count * rate + 3.1 * math.sqrt(count * rate * (1 - rate)) + 0.5


@pytest.mark.parametrize("correlation", [0.0, 1 / 3])
def test_one_curve_in_twenty_without_a_change_is_called_one_at_any_of_its_readings(correlation):
    alarms = [bool(names(50 + values) & MOVES) for values in noise(40, correlation, seed=3)]
    assert sum(alarms) <= most(40, 0.05)


@pytest.mark.parametrize("jitter", [0.0, 0.01])
def test_one_paired_curve_in_twenty_without_a_change_is_called_one(jitter):
    random, steps, wrong = np.random.default_rng(5), range(0, 2500, 100), 0
    for _ in range(60):
        groups = 0.1 * random.standard_normal((1, 8)) + 0.02 * random.standard_normal((25, 8))
        flat = 5 * (1 + jitter * random.standard_normal(25))
        points = paired(steps, flat, groups)
        wrong += any(phase_of(points[:until]).name in MOVES for until in range(2, 26))
    assert wrong <= most(60, 0.05)


@pytest.mark.parametrize(
    ("sign", "opposite"), [(1, {"falling", "compressing"}), (-1, {"expanding"})]
)
def test_a_curve_that_only_drifts_is_not_called_the_opposite(sign, opposite):
    drifting = 50 + noise(40, 0.3, seed=4) + sign * np.linspace(0, 4, 41)
    assert sum(bool(names(values) & opposite) for values in drifting) <= most(40, 0.04)
