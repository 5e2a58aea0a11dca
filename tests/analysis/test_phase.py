"""The phase of a curve is held to its rule, reading by reading, with arithmetic of its own."""

import math
import re
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from geomon.analysis import find_phase

# Mean of twonn over the layers of a character decoder on enwik8, as training goes on.
STEPS = [0, 32, 64, 128, 256, 512, 1024, 1500, 8192, 16000]
PAPER = [2.5, 3.3, 5.0, 7.3, 7.4, 6.4, 5.7, 5.3, 4.7, 4.1]
UP = [2 + 0.5 * n for n in range(11)]
MOVES = {"expanding", "compressing", "falling"}
# Steps, values, margins; names from which number of readings on; the step of `since`, and where the
# peak may be.
COURSES = {
    "up and down, read by octaves": (
        [0, *(2**n for n in range(12))],
        [2.5, 2.5, 2.6, 2.8, 3.3, 4.0, 5.0, 6.2, 7.1, 7.4, 6.9, 6.4, 5.92], [0.36] * 13,
        {1: "unknown", 2: "unclear", 6: "expanding", 11: "level", 12: "compressing"},
        (256, (128, 512)),
    ),
    "halved at the end": (
        [0, 4, 8, 11, 16, 23, 32, 64, 300],
        [28.92, 28.85, 27.22, 25.98, 27.05, 19.66, 17.76, 11.26, 5.57],
        [1.16, 1.36, 0.82, 1.34, 1.69, 1.32, 1.48, 0.9, 0.65],
        {1: "unknown", 2: "level", 4: "falling", 5: "level", 6: "falling"}, (64, (0, 16)),
    ),
    "up, down, up and level below the peak": (
        range(150), [*UP, *UP[::-1], *(2 + 0.2 * n for n in range(11)), *[4.0] * 117], [0.1] * 150,
        {1: "unknown", 2: "expanding", 13: "compressing", 24: "unclear", 25: "expanding",
         125: "level"},
        (31, (10, 11)),
    ),
    "a jump up, and a jump down": (
        range(9), [1, 1, 1, 1, 9, 9.02, 9.01, 1, 1], [0.1] * 9,
        {1: "unknown", 2: "level", 5: "expanding", 8: "compressing"}, (6, (4, 6)),
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
    assert (phase.since and phase.since.step, phase.peak_steps) == end
    assert (phase.start.value, phase.last.value, phase.peak.value) == (
        values[0], values[-1], max(values),
    )  # fmt: skip


def apart(one, other, readings):
    """Sign of the difference of two readings beyond its margin, all pairs at a level of .01."""
    return apart_of(one, other, readings * (readings - 1) / 2, 0.01)


def apart_of(one, other, pairs, level):
    deviations = max(stats.norm.isf(level / 2 / pairs), 1.959)
    errors = [margin / 1.96 for _, margin in (one, other)]
    gap = other[0] - one[0]
    return int(np.sign(gap)) if abs(gap) > deviations * np.linalg.norm(errors) else 0


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=150)
def test_each_phase_follows_from_the_readings_that_it_names(seed):
    random = Random(seed)
    count, wander = random.randint(2, 60), random.choice([0.0, 0.1, 0.5])
    steps = sorted(random.sample(range(3000), count))
    level, points = 8.0, []
    for _ in range(count):
        level = abs(level + random.gauss(0, wander))
        points.append((level + random.gauss(0, 0.2), 0.4 * random.uniform(0.8, 1.2)))
    phase = find_phase(steps, *zip(*points, strict=True))
    last, known = points[-1], dict(zip(steps, points, strict=True))
    signs = {step: apart(point, last, count) for step, point in known.items()}
    moved = [step for step, sign in signs.items() if sign]
    if phase.name in MOVES:
        since = phase.since.step
        assert since == moved[-1], "the most recent reading that differs"
        assert signs[since] == (1 if phase.name == "expanding" else -1)
        later = [step for step in steps if step > since]
        change = last[0] - known[later[0]][0]
        pairs = count * (count - 1) / 2
        width = max(stats.norm.isf(0.005 / pairs), 1.959) / 1.96
        width *= math.hypot(last[1], known[later[0]][1])
        is_quiet = 4 * later[0] <= steps[-1] and later != steps[-1:]
        largest = max(abs(value) for value, _ in points)
        assert not is_quiet or abs(change) + width > 0.25 * largest, "it would be level"
        change = phase.change(phase.since)
        assert change.value == pytest.approx(last[0] - known[since][0])
        assert abs(change.value) > change.margin > 0
        assert (phase.name == "compressing") <= (
            apart(points[0], known[phase.peak.step], count) == 1
        )
    if phase.name == "level":
        assert 4 * phase.since.step <= steps[-1]
        assert not any(sign for step, sign in signs.items() if step >= phase.since.step)
        change = phase.change(phase.since)
        largest = max(abs(value) for value, _ in points)
        assert abs(change.value) + change.margin <= 0.25 * largest
    if phase.name == "unclear":
        later = [point for step, point in known.items() if moved and moved[-1] < step < steps[-1]]
        turns = {apart_of(point, last, max(1, len(later)), 0.05) for point in later}
        assert not moved or -signs[moved[-1]] in turns, "what has not turned has a word"
    first, end = phase.peak_steps
    assert first <= phase.peak.step <= end
    beside = [step for step in steps if first <= step <= end]
    assert not any(apart(known[step], known[phase.peak.step], count) for step in beside)
    top = apart(last, known[phase.peak.step], count)
    assert phase.has_fallen == (top == 1)


def test_the_words_name_the_readings_and_their_difference():
    phase = find_phase(STEPS, PAPER, [0.3] * 10)
    assert phase.words() == "compressing, -1.2 ± 0.8 since step 1,500"
    assert phase.course() == (
        "peak 7.4 ± 0.3 at step 256 (between steps 128 and 256), -3.3 ± 0.8 since; "
        "start 2.5 ± 0.3 at step 0, +1.6 ± 0.8 since"
    )
    found = re.search(r"(-\S+) ± (\S+)", phase.words())
    assert float(found[1]) == pytest.approx(4.1 - 5.3)
    assert float(found[2]) == pytest.approx(0.3 * math.sqrt(2) * phase.widening, abs=0.05)
    assert find_phase([0], [1.0], [0.1]).course() == ""


def test_values_that_are_not_finite_are_passed_over():
    phase = find_phase([0, 1, 2, 3], [1.0, math.nan, 3.0, 2.0], [0.2, 0.2, math.nan, 0.2])
    assert (phase.name, phase.since.step, phase.peak.step) == ("expanding", 0, 2)
    assert find_phase([0], [math.nan]).name == "unknown"
    with pytest.raises(ValueError, match="as many values and margins as steps"):
        find_phase([0, 1], [1.0])


@pytest.mark.parametrize(("before", "name"), [(51, "expanding"), (50, "level")])
@pytest.mark.parametrize("shift", [0, -15])
def test_two_octaves_without_a_change_are_level(before, name, shift):
    steps, values = [1, 20, before, 200], [value + shift for value in (1.0, 5.0, 12.0, 12.1)]
    assert find_phase(steps, values, [0.2] * 4).name == name


def noise(count, correlation, seed):
    """Curves without a change: 41 errors of deviation 1 and a correlation of neighbours."""
    fresh = np.random.default_rng(seed).standard_normal((41, count))
    fresh[1:] *= math.sqrt(1 - correlation**2)
    for n in range(1, 41):
        fresh[n] += correlation * fresh[n - 1]
    return fresh.T


def names(values):
    """Names of the phase at every reading of a run."""
    steps, margins = range(len(values)), [1.96] * len(values)
    return {
        find_phase(steps[:until], values[:until].tolist(), margins[:until]).name
        for until in range(2, len(values) + 1)
    }


def most(count, rate):
    """Number that chance exceeds once in a thousand."""
    return count * rate + 3.1 * math.sqrt(count * rate * (1 - rate)) + 0.5


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_one_curve_in_twenty_without_a_change_is_called_one_at_any_of_its_readings(correlation):
    alarms = [bool(names(50 + values) & MOVES) for values in noise(200, correlation, seed=3)]
    assert sum(alarms) <= most(200, 0.05)


@pytest.mark.parametrize(
    ("sign", "opposite"), [(1, {"falling", "compressing"}), (-1, {"expanding"})]
)
def test_a_curve_that_only_drifts_is_not_called_the_opposite(sign, opposite):
    drifting = 50 + noise(120, 0.3, seed=4) + sign * np.linspace(0, 4, 41)
    assert sum(bool(names(values) & opposite) for values in drifting) <= most(120, 0.04)
