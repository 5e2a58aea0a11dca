import math

import pytest

from geomon.analysis import find_phase

# notes/definitions.md: the mean of twonn over layers, as training goes on.
STEPS = [0, 32, 64, 128, 256, 512, 1024, 1500, 8192, 16000]
PAPER = [2.5, 3.3, 5.0, 7.3, 7.4, 6.4, 5.7, 5.3, 4.7, 4.1]
# A training of 300 steps, with the deviation over two batches: at first it only scatters.
NOISY = [2.61, 2.37, 2.45, 2.44, 2.47, 2.65, 2.73, 2.78, 2.62, 2.83, 2.49, 2.48, 2.63, 3.05, 4.73]
NOISE = [0.01, 0.24, 0.0, 0.2, 0.19, 0.03, 0.04, 0.1, 0.08, 0.07, 0.09, 0.0, 0.12, 0.15, 0.13]
TIMES = [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128]


@pytest.mark.parametrize(
    ("until", "name"),
    [(1, "unknown"), (2, "expanding"), (4, "expanding"), (5, "peak"), (6, "compressing"),
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
