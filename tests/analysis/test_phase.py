import math
import time
from random import Random

import pytest

from geomon.analysis import find_phase
from geomon.analysis.phase import Z, find_noise

# Mean of twonn over the layers of a character decoder on enwik8, as training goes on.
STEPS = [0, 32, 64, 128, 256, 512, 1024, 1500, 8192, 16000]
PAPER = [2.5, 3.3, 5.0, 7.3, 7.4, 6.4, 5.7, 5.3, 4.7, 4.1]


_RANDOM = Random(1)
SCATTER = [_RANDOM.gauss(0, 1) for _ in range(64)]
UP = [2 + 0.5 * n for n in range(11)]
# Steps, values, margins; names from which number of readings on; and, at the end, since when, and
# where the peak may be.
COURSES = {
    "up and down, read by octaves": (
        [0, *(2**n for n in range(12))],
        [2.5, 2.5, 2.6, 2.8, 3.3, 4.0, 5.0, 6.2, 7.1, 7.4, 6.9, 6.4, 5.92], [0.36] * 13,
        {2: "steady", 6: "expanding", 11: "level", 12: "compressing"}, (256, 256, 128, 512),
    ),
    "up and down, without margins": (
        range(41),
        [(10 + 0.2 * n if n < 24 else 19.6 - 0.2 * n) + 0.05 * SCATTER[n] for n in range(41)], None,
        {2: "unknown", 20: "expanding", 33: "compressing"}, (24, 24, 24, 25),
    ),
    "a slow rise out of scatter": (
        range(64), [SCATTER[n] + 0.15 * max(n - 32, 0) for n in range(64)], [Z] * 64,
        {2: "steady", 48: "expanding"}, (17, 61, None, None),
    ),
    "down, and level": (
        range(0, 640, 10), [30 + SCATTER[n] - min(n, 12) for n in range(64)], [Z] * 64,
        {2: "steady", 4: "falling", 45: "level", 46: "falling"}, (10, 0, None, None),
    ),
    "up, down, up and level below the peak": (
        range(150), [*UP, *UP[::-1], *(2 + 0.2 * n for n in range(11)), *[4.0] * 117], [0.1] * 150,
        {2: "expanding", 13: "compressing", 25: "expanding", 129: "level"}, (32, 10, 10, 11),
    ),
    "scatter beyond the margins": (
        range(64), [8 + x for x in SCATTER], [0.4] * 64,
        {2: "steady", 3: "falling", 6: "expanding", 7: "erratic", 8: "compressing",
         9: "expanding", 10: "erratic"}, (None, 17, None, None),
    ),
    "a jump up, and a jump down": (
        range(9), [1, 1, 1, 1, 9, 9.02, 9.01, 1, 1], [0.1] * 9,
        {2: "steady", 5: "expanding", 8: "compressing"}, (5, 5, 4, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "values", "margins", "course", "end"), COURSES.values(),
                         ids=COURSES)  # fmt: skip
def test_the_name_changes_where_the_course_does(steps, values, margins, course, end):
    found = {}
    for until in range(2, len(values) + 1):
        phase = find_phase(list(steps)[:until], values[:until], margins and margins[:until])
        if not found or [*found.values()][-1] != phase.name:
            found[until] = phase.name
    assert found == course
    assert (phase.since, phase.peak_step, phase.earliest, phase.latest) == end
    assert phase.end == values[-1]
    assert math.isnan(phase.start) if phase.since is None else phase.start in values


@pytest.mark.parametrize(
    ("until", "name"),
    [(1, "unknown"), (2, "expanding"), (4, "expanding"), (5, "expanding"), (7, "compressing"),
     (10, "compressing")],
)  # fmt: skip
def test_the_published_course(until, name):
    assert find_phase(STEPS[:until], PAPER[:until], [0.3] * until).name == name


def test_a_margin_that_is_small_by_luck_is_not_believed():
    values = [5.0, 5.2, 5.0, 5.1]
    assert find_phase(range(4), values, [0.4, 0.4, 0.002, 0.4]).name == "steady"


def test_a_run_that_jumps_in_one_step_has_not_been_steady():
    values, margins = [1.2, 1.1, 1.15, 1.14, 7.70], [0.41, 0.4, 0.41, 0.41, 0.38]
    for first in range(4):
        steps = range(5 - first)
        phase = find_phase(steps, values[first:], margins[first:])
        assert phase.name == "expanding"
        assert phase.words().endswith("from 1.1 to 7.7")
    after = find_phase(range(40), [*values, *[7.6, 7.7] * 17, 7.6], [0.4] * 40)
    assert (after.name, after.since) == ("level", 4)


@pytest.mark.parametrize("margin", [0.4, 0.0])
def test_readings_that_jump_to_and_fro_beyond_their_margins_are_erratic(margin):
    values = [1.2, 7.7, 1.4, 6.9, 1.1, 5.0, 8.0, 2.0, 6.0, 1.5] * 2
    assert find_phase(range(20), values, [margin] * 20).name == "erratic"
    assert find_phase(range(6), values[:6], [0.4] * 6).name == "erratic"


def test_a_plateau_is_level_however_dense_the_readings():
    steps = list(range(0, 2001, 20))
    values = [8 - 5 * math.exp(-step / 100) for step in steps]
    assert find_phase(steps[:10], values[:10], [0.1] * 10).name == "expanding"
    phase = find_phase(steps, values, [0.1] * len(steps))
    assert phase.name == "level"
    assert phase.words() == "level since step 360, after a rise to 8.0"
    assert phase.earliest is None  # no peak: nothing fell


def test_values_that_are_not_finite_are_passed_over():
    phase = find_phase([0, 1, 2, 3], [1.0, math.nan, 3.0, 2.0], [0.2, 0.2, math.nan, 0.2])
    assert (phase.name, phase.peak_step) == ("compressing", 2)
    assert find_phase([0], [math.nan]).name == "unknown"
    with pytest.raises(ValueError, match="as many values and margins as steps"):
        find_phase([0, 1], [1.0])


@pytest.mark.parametrize(("before", "name"), [(51, "expanding"), (50, "level")])
def test_two_octaves_without_a_change_are_level(before, name):
    steps, values = [1, 20, before, 200], [1.0, 5.0, 12.0, 12.1]
    assert find_phase(steps, values, [0.2] * 4).name == name


def test_noise_has_the_error_that_was_put_into_it():
    random = Random(0)
    values = [(15 + 0.001 * n) * (1 + random.gauss(0, 0.02)) for n in range(2000)]
    trusted = find_noise(range(2000), values, [Z * 0.02 * value for value in values])
    assert trusted.errors[1900] / values[1900] == pytest.approx(0.02, rel=0.1)
    raised = find_noise(range(2000), values, [Z * 0.001 * value for value in values])
    assert raised.is_erratic
    assert raised.errors[1900] / values[1900] == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("steps", [[0, *(2**n for n in range(13))], list(range(0, 701, 50))])
def test_a_trend_is_no_scatter_whatever_the_distance_of_steps(steps):
    values = [2 + 4 * math.log1p(step) + math.log1p(step) ** 2 for step in steps]
    noise = find_noise(steps, values, [0.01] * len(steps))
    assert not noise.is_erratic
    assert max(noise.errors) == pytest.approx(0.01 / Z)


def noise(count, length, correlation, seed):
    """Curves without a change: errors of deviation 1 and a correlation of neighbours."""
    random = Random(seed)
    for _ in range(count):
        values = [random.gauss(0, 1)]
        for _ in range(length - 1):
            fresh = math.sqrt(1 - correlation**2) * random.gauss(0, 1)
            values.append(correlation * values[-1] + fresh)
        yield values


def names(values, margins):
    """Names of the phase at every third reading of a run."""
    steps = range(len(values))
    return {
        find_phase(steps[:until], values[:until], margins and margins[:until]).name
        for until in range(2, len(values) + 1, 3)
    }


def most(count, rate):
    """Number that chance exceeds once in a thousand."""
    return count * rate + 3.1 * math.sqrt(count * rate * (1 - rate)) + 0.5


@pytest.mark.parametrize(
    ("correlation", "known", "offset"), [(0.0, True, 0.0), (0.5, True, 50.0), (0.5, False, 50.0)]
)
def test_one_curve_in_twenty_without_a_change_is_called_one_at_any_of_its_readings(
    correlation, known, offset
):
    alarms = 0
    for values in noise(120, 41, correlation, seed=3):
        shifted = [offset + value for value in values]
        found = names(shifted, [Z] * 41 if known else None)
        alarms += bool(found - {"steady", "unknown"})
    assert alarms <= most(120, 0.05)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_curve_that_only_drifts_is_not_called_the_opposite(sign):
    opposite = {"falling", "compressing"} if sign > 0 else {"expanding", "compressing"}
    alarms = 0
    for values in noise(120, 41, 0.3, seed=4):
        drifting = [value + sign * 4 * index / 40 for index, value in enumerate(values)]
        alarms += bool(names(drifting, [Z] * 41) & opposite)
    assert alarms <= most(120, 0.04)


def test_a_long_run_with_many_turns_costs_little():
    values = [10.0 + 5 * (index // 50 % 2) + 0.01 * (index % 3) for index in range(5000)]
    began = time.process_time()
    assert find_phase(range(5000), values, [0.1] * 5000).name != "steady"
    assert time.process_time() - began < 2
