import math
import statistics
import time
from random import Random

import pytest

from geomon.analysis import Phase, find_phase
from geomon.analysis.phase import FALSE_ALARMS, FALSE_TURNS, exceeds_errors, robust_errors

# Mean of twonn over the layers of a character decoder on enwik8, as training goes on.
STEPS = [0, 32, 64, 128, 256, 512, 1024, 1500, 8192, 16000]
PAPER = [2.5, 3.3, 5.0, 7.3, 7.4, 6.4, 5.7, 5.3, 4.7, 4.1]
# A training of 300 steps, with the deviation over two batches: at first it only scatters.
NOISY = [2.61, 2.37, 2.45, 2.44, 2.47, 2.65, 2.73, 2.78, 2.62, 2.83, 2.49, 2.48, 2.63, 3.05, 4.73]
NOISE = [0.01, 0.24, 0.0, 0.2, 0.19, 0.03, 0.04, 0.1, 0.08, 0.07, 0.09, 0.0, 0.12, 0.15, 0.13]
TIMES = [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128]


@pytest.mark.parametrize(
    ("until", "name"),
    [(1, "unknown"), (2, "expanding"), (4, "expanding"), (5, "peak"), (7, "compressing"),
     (10, "compressing")],
)  # fmt: skip
def test_the_published_course(until, name):
    assert find_phase(STEPS[:until], PAPER[:until], [0.15] * until).name == name


def test_the_peak_and_the_change_since():
    phase = find_phase(STEPS, PAPER, [0.15] * 10)
    assert (phase.peak_step, phase.peak) == (256, 7.4)
    assert phase.change == pytest.approx(4.1 / 7.4 - 1)
    assert phase.words() == "compressing since step 256: 45 % below the peak 7.4"


def test_scatter_is_never_called_a_compression():
    for until in range(2, 13):
        phase = find_phase(TIMES[:until], NOISY[:until], NOISE[:until])
        assert phase.name in ("steady", "peak"), (TIMES[until - 1], phase)
    assert find_phase(TIMES, NOISY, NOISE).name == "expanding"


def test_a_deviation_that_is_small_by_luck_is_not_believed():
    values, errors = [5.0, 5.2, 5.0], [0.2, 0.2, 0.2]
    assert find_phase([0, 1, 2], values, errors).name == "steady"
    assert find_phase([0, 1, 2], values, [0.2, 0.001, 0.001]).name == "steady"


def test_a_fall_from_the_start_is_not_the_compression_after_an_expansion():
    phase = find_phase([0, 10, 100], [32.0, 18.0, 5.0], [0.5, 0.5, 0.5])
    assert phase.name == "falling"
    assert phase.words() == "falling since step 0: 84 % below 32"


def test_a_plateau_is_a_peak_however_dense_the_readings():
    steps = list(range(0, 2001, 20))
    values = [8 - 5 * math.exp(-step / 100) for step in steps]
    assert find_phase(steps[:10], values[:10], [0.05] * 10).name == "expanding"
    assert find_phase(steps, values, [0.05] * len(steps)).name == "peak"


def test_values_that_are_not_finite_are_passed_over():
    phase = find_phase([0, 1, 2, 3], [1.0, math.nan, 3.0, 2.0], [0.1, 0.1, math.nan, 0.1])
    assert (phase.name, phase.peak_step) == ("compressing", 2)
    assert find_phase([0], [math.nan]).name == "unknown"
    with pytest.raises(ValueError, match="as many values and errors as steps"):
        find_phase([0, 1], [1.0])


@pytest.mark.parametrize(("before", "name"), [(141, "expanding"), (142, "peak")])
def test_half_an_octave_of_steps_is_a_factor_of_the_root_of_two(before, name):
    """141 * 1.4142 is below 200, and 142 * 1.4142 above: it is the step before that counts."""
    steps, values = [1, 100, before, 200], [1.0, 12.0, 10.0, 12.0]
    assert find_phase(steps, values, [0.1] * 4).name == name


def test_errors_are_those_of_both_values_and_a_difference_has_a_sign():
    assert exceeds_errors(1.97, 0.6, 0.8)
    assert not exceeds_errors(1.95, 0.6, 0.8)
    assert not exceeds_errors(-5.0, 0.6, 0.8)


def test_a_phase_says_its_change_in_words():
    assert Phase("peak", 40, 12.34, 0.0).words() == "at its peak so far, 12.3 at step 40"
    assert Phase("peak", 40, 123.4, -0.25).words() == (
        "25 % below its peak, 123 at step 40, within its scatter"
    )
    assert Phase("steady", 0, 1.0, 0.0).words() == "steady within its errors"
    assert Phase("unknown", -1, math.nan, math.nan).words() == "too few readings to tell"
    assert Phase("expanding", 3, 2.0, 0.0).words() == "expanding"


def test_errors_rise_to_the_share_that_is_typical_of_the_curve():
    # Below eight values: the root mean square share, sqrt((0.01 + 0 + 0.0025) / 3).
    share = math.sqrt(0.0125 / 3)
    assert robust_errors([10.0, 20.0, 40.0], [1.0, 0.0, 2.0]) == pytest.approx(
        [1.0, 20 * share, 40 * share]
    )
    # From eight on the median share, as long as the curve scatters less.
    values = [10.0] * 8
    assert robust_errors(values, [0.1] * 3 + [0.3] * 5) == pytest.approx([0.3] * 8)
    # Third differences of alternating values are 8 times the amplitude.
    zigzag = [10.0, 10.1] * 5
    found = robust_errors(zigzag, [0.0] * 10)
    scatter = statistics.median(
        abs(zigzag[i + 3] - 3 * zigzag[i + 2] + 3 * zigzag[i + 1] - zigzag[i]) / zigzag[i + 2]
        for i in range(7)
    )
    expected = scatter / math.sqrt(20) / 0.6745
    assert found == pytest.approx([expected * value for value in zigzag])
    # Where a value is not positive, as they are: sqrt((0.25 + 0.01) / 2).
    assert robust_errors([1.0, -1.0], [0.5, 0.1]) == pytest.approx([0.5, math.sqrt(0.13)])
    assert robust_errors([], []) == []


def test_noise_has_the_error_that_was_put_into_it():
    random = Random(0)
    values = [(5 + 0.01 * n) * (1 + random.gauss(0, 0.02)) for n in range(2000)]
    errors = robust_errors(values, [0.0] * 2000)
    assert errors[1000] / values[1000] == pytest.approx(0.02, rel=0.1)


def noise(count, length, correlation, seed):
    """Curves without a change: errors of deviation 1 and a correlation of neighbours."""
    random = Random(seed)
    for _ in range(count):
        values = [random.gauss(0, 1)]
        for _ in range(length - 1):
            fresh = math.sqrt(1 - correlation**2) * random.gauss(0, 1)
            values.append(correlation * values[-1] + fresh)
        yield values


def names(values, errors):
    """Names of the phase at every third reading of a run."""
    steps = range(len(values))
    return {
        find_phase(steps[:until], values[:until], errors and errors[:until]).name
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
        found = names(shifted, [1.0] * 41 if known else None)
        alarms += bool(found - {"steady", "unknown"})
    assert alarms <= most(120, FALSE_ALARMS)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_curve_that_only_drifts_is_not_called_the_opposite(sign):
    opposite = {"falling", "compressing"} if sign > 0 else {"expanding", "peak", "compressing"}
    alarms = 0
    for values in noise(120, 41, 0.3, seed=4):
        drifting = [value + sign * 4 * index / 40 for index, value in enumerate(values)]
        alarms += bool(names(drifting, [1.0] * 41) & opposite)
    assert alarms <= most(120, FALSE_TURNS)


def test_a_peak_of_four_errors_is_found_with_its_interval():
    found = inside = 0
    for values in noise(50, 100, 0.0, seed=5):
        planted = [value + 4 - abs(index - 50) / 12.5 for index, value in enumerate(values)]
        phase = find_phase(range(100), planted, [1.0] * 100)
        found += phase.name == "compressing"
        inside += phase.earliest is not None and phase.earliest <= 50 <= phase.latest
    assert found >= 45
    assert inside >= 45


def test_a_change_that_no_single_reading_shows_is_found_in_the_means_of_many():
    random = Random(6)
    values = [random.gauss(2.0 * (index >= 100), 1) for index in range(200)]
    assert max(values[100:]) - max(values[:100]) < 3
    assert find_phase(range(200), values, [1.0] * 200).name in ("expanding", "peak")


def test_a_long_run_with_many_turns_costs_little():
    values = [10.0 + 5 * (index // 50 % 2) + 0.01 * (index % 3) for index in range(5000)]
    began = time.process_time()
    assert find_phase(range(5000), values, [0.05] * 5000).name != "steady"
    assert time.process_time() - began < 2


def test_without_errors_eight_readings_are_needed():
    rising = [1.0, 2.1, 3.0, 4.1, 5.0, 6.1, 7.0, 8.1, 9.0, 10.1, 11.0, 12.1]
    assert find_phase(range(7), rising[:7]).name == "unknown"
    assert find_phase(range(12), rising).name == "expanding"


def test_a_second_rise_is_seen_and_a_lower_plateau_is_below_the_peak():
    up = [2 + 0.5 * index for index in range(11)]
    values = [*up, *up[::-1], *(2 + 0.2 * index for index in range(11)), *[4.0] * 30]
    at_step = [find_phase(range(n), values[:n], [0.05] * n) for n in range(len(values) + 1)]
    assert [at_step[n].name for n in (11, 22, 33)] == ["expanding", "compressing", "expanding"]
    assert (at_step[33].peak_step, at_step[33].peak) == (32, 4)
    last = at_step[-1]
    assert (last.name, last.peak_step, last.peak) == ("compressing", 10, 7)
