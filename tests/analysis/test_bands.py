import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from geomon.analysis.bands import Bands, continue_line, measure_distance
from geomon.record.columns import Place
from support.readings import reading_of

# As they were measured: docs/warnings.md.
WINDOW, LEAST, OUTSIDE, SCATTER, SCATTER_READINGS = 48, 8, 1.15, 0.8, 20
SCORES = "max_logit/layer_02/head_1"


def noise(readings, curves=1, seed=0):
    return np.random.default_rng(seed).standard_normal((readings, curves))


@pytest.mark.parametrize("count", [8, 20, 48, 60])
def test_the_line_and_its_unit_are_those_of_a_prediction_interval(count):
    """Against scipy's regression: the interval of a new observation at the next reading."""
    values = (noise(count, seed=count)[:, 0] + 0.3 * np.arange(count) + 1e4)[-WINDOW:]
    x = np.arange(len(values))
    fit = stats.linregress(x, values)
    residual = values - fit.intercept - fit.slope * x
    error = np.sqrt((residual**2).sum() / (len(x) - 2))
    error *= np.sqrt(1 + 1 / len(x) + (len(x) - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum())
    found = continue_line(np.concatenate([noise(count)[:, 0] * 0 + 7.0, values])[-count:, None])
    assert found.expected[0] == pytest.approx(fit.intercept + fit.slope * len(x), rel=1e-9)
    unit = stats.t(len(x) - 2).isf(1.5e-7) * error
    assert found.unit[0] == pytest.approx(unit, rel=1e-6)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(0.01, 100), st.floats(-50, 50), st.floats(-3, 3))
def test_a_scale_a_shift_and_a_trend_change_no_distance(seed, scale, shift, slope):
    values = noise(31, seed=seed)
    moved = scale * values + shift + slope * np.arange(31)[:, None]
    first, second = continue_line(values[:30]), continue_line(moved[:30])
    one = (values[30] - first.expected) / first.unit
    other = (moved[30] - second.expected) / second.unit
    assert other[0] == pytest.approx(one[0], rel=1e-3, abs=1e-3)


def test_rounding_is_the_least_error_of_curves_above_and_below_zero():
    above, below = continue_line(np.tile([0.3, -0.3], (20, 1))).unit
    assert above == below > 0


def test_missing_values_are_left_out_and_few_have_no_band():
    values = noise(20, 3)
    values[5:10, 1] = np.nan
    values[LEAST - 1 :, 2] = np.nan
    found, alone = continue_line(values), continue_line(values[:, :1])
    assert found.expected[0] == alone.expected[0]
    assert np.isfinite([found.expected, found.unit]).tolist() == [[True, True, False]] * 2


def run(values, tag=SCORES, first=1000, **others):
    """Return what the bands find at each reading of a run in which one value has a course."""
    bands, courses = Bands(), {tag: values, **others}
    return [
        bands.add(reading_of({name: course[n] for name, course in courses.items()}, first + n))
        for n in range(len(values))
    ]


def heads_of(values):
    """Return what the bands find in a run of many heads, [heads, readings]."""
    return run(
        values[0], **{f"qk_dot/layer_01/head_{n}": course for n, course in enumerate(values)}
    )


def departures(*args, **kwargs):
    return [found.departures for found in run(*args, **kwargs)]


def test_healthy_noise_raises_nothing_at_any_reading():
    """Two hundred curves of a hundred readings."""
    found = heads_of(noise(100, 200, seed=3).T)
    assert not any(each.departures for each in found)
    assert max(each.scatter for each in found[50:]) < SCATTER / 2


def test_a_jump_that_stays_leaves_its_band_at_the_next_reading_and_is_placed():
    values = 20 + noise(60)[:, 0]
    values[50:] += 25
    found = departures(values)
    assert not any(found[:51])
    (departure,) = found[51]
    assert departure.place == Place("", "max_logit", layer=2, kind="head", head=1)
    assert departure.value == values[51]
    assert departure.low < 20 < departure.high < departure.value
    first, second = (continue_line(values[:50, None], ahead) for ahead in (1, 2))
    sizes = [
        (value - line.expected[0]) / (OUTSIDE * line.unit[0])
        for value, line in zip(values[50:52], (first, second), strict=True)
    ]
    assert departure.size == pytest.approx(min(sizes))
    middle = (departure.low + departure.high) / 2
    assert (departure.value - middle) / (departure.high - middle) == pytest.approx(sizes[1])
    assert [each.is_strange for each in run(values)[48:51]] == [False, False, True]


def test_one_strange_reading_is_none_and_two_are_on_one_side():
    line = continue_line(noise(48))
    middle, unit = line.expected[0], line.unit[0]
    within, beyond = middle + 0.9 * OUTSIDE * unit, middle + 1.2 * OUTSIDE * unit
    assert not any(departures([*noise(48)[:, 0], 1e6, *noise(20, seed=1)[:, 0]]))
    for one, other, count in (
        (beyond, beyond + 1, 1), (beyond, 2 * middle - beyond, 0), (beyond, within, 0),
        (within, beyond, 0),
    ):  # fmt: skip
        first, second = departures([*noise(48)[:, 0], one, other])[-2:]
        assert (len(first), len(second)) == (0, count)
        assert all(each.high < other for each in second)


@pytest.mark.parametrize("metric", ["variance", "within_variance"])
def test_a_value_that_varies_by_factors_has_a_band_of_factors(metric):
    values = np.exp(0.1 * noise(50)[:, 0])
    values[48:] = math.exp(-4)
    (departure,) = departures(values, tag=f"{metric}/layer_01")[49]
    assert 0 < departure.low < 1 < departure.high
    assert departure.high == pytest.approx(1 / departure.low, rel=0.5)
    assert not any(departures([0.0, -1.0] * 12, tag=f"{metric}/layer_01"))  # which have no factor


@pytest.mark.parametrize(("share", "leaves"), [(0.9, False), (1.1, True)])
def test_a_band_of_factors_is_never_wider_than_tenfold_around_the_median(share, leaves):
    """Readings that scatter a hundredfold would otherwise open the band for anything."""
    logarithms = 2.0 * noise(50)[:, 0]
    logarithms[48:] = np.median(logarithms[:48]) + share * math.log(10)
    assert any(departures(np.exp(logarithms), tag="variance/layer_01")[49]) is leaves


def test_the_largest_departure_comes_first():
    small, large = 20 + noise(50)[:, 0], 20 + noise(50, seed=1)[:, 0]
    small[48:] += 40
    large[48:] += 90
    found = departures(small, **{"max_logit/layer_01/head_0": large})[49]
    assert [departure.place.layer for departure in found] == [1, 2]


@pytest.mark.parametrize(
    ("metric", "least", "scale"),
    [
        ("attention_entropy_normalised", 0.01, float), ("max_logit", 0.5, float),
        ("qk_dot", 0.25, float), ("variance", 0.05, math.exp), ("within_variance", 0.05, math.exp),
    ],
)  # fmt: skip
def test_a_band_is_never_narrower_than_a_change_that_matters(metric, least, scale):
    within, beyond = (
        departures([scale(x) for x in [3.0] * 20 + [3.0 + share * least] * 2], f"{metric}/layer_02")
        for share in (0.99, 1.01)
    )
    assert not any(within)
    (departure,) = beyond[-1]
    assert departure.low == pytest.approx(scale(3.0 - least))
    assert departure.high == pytest.approx(scale(3.0 + least))


def test_twice_the_scatter_of_all_values_is_seen_although_none_leaves_its_band():
    values = noise(100, 60, seed=5).T
    values[:, 60:] *= 2
    found = heads_of(values + 5 + 0.1 * np.arange(100))  # about lines that rise
    assert not any(each.departures for each in found)
    assert max(each.scatter for each in found[30:60]) < SCATTER
    assert 60 < next(n for n, each in enumerate(found) if each.scatter > SCATTER) < 80
    assert math.isnan(found[SCATTER_READINGS - 2].scatter)


def test_one_reading_at_which_all_values_jump_is_no_growth_of_their_scatter():
    values = noise(100, 60, seed=5).T
    values[:, 60] += 100
    assert max(each.scatter for each in heads_of(values)[40:]) < SCATTER


def last_of(values, steps):
    """Return what the bands find at the last of some readings."""
    bands = Bands()
    pairs = zip(steps, values, strict=True)
    return [bands.add(reading_of({SCORES: value}, step)) for step, value in pairs][-1]


@pytest.mark.parametrize(
    ("first", "spacing", "has_bands"),
    [(189, 1, True), (188, 1, False), (100, 100, True), (99, 100, False)],
)
def test_bands_need_nine_readings_of_the_last_three_quarters_of_the_run(first, spacing, has_bands):
    """Ten readings and a jump; none in the first 200 steps."""
    steps = [first + n * spacing for n in range(12)]
    found = last_of([*noise(10)[:, 0], 1e3, 1e3], steps)
    assert bool(found.departures) is has_bands


@pytest.mark.parametrize(("spacing", "leaves"), [(25, True), (30, False)])
def test_readings_before_the_last_quarter_count_only_if_those_in_it_are_too_few(spacing, leaves):
    """A level that was left long ago makes the band wide, if it is in the line at all."""
    steps = range(1000 - 40 * spacing // 2, 1000 + 1, spacing)
    values = [200.0 * (step < 740) + noise(1, seed=step)[0, 0] for step in steps]
    assert bool(last_of([*values[:-2], 200.0, 200.0], steps).departures) is leaves


def test_a_creeping_value_leaves_the_band_of_every_fifth_reading():
    """A slope that changes: the line through the last 48 readings goes along with it."""
    steps = np.arange(400)
    values = 100 + noise(400)[:, 0] + np.where(steps > 300, 1.2 * (steps - 300), 0)
    out = [n for n, each in enumerate(departures(values, first=2000)) if each]
    assert out
    assert 300 < out[0] < 400
    assert all(n % 5 == 0 for n in out)


@pytest.mark.parametrize("after", [0.0, 1.2, 0.8])
def test_norms_of_weights_have_a_band_by_name_and_are_no_part_of_the_scatter(after):
    steps = np.arange(60)
    values = 3 * 1.0001**steps * np.where(steps >= 50, after, 1)
    found = run(noise(60)[:, 0], **{"weight_norm/layer_02/attn.c_proj": values})
    (departure,) = found[51].departures
    assert departure.place == Place("", "weight_norm", "attn.c_proj", layer=2)
    assert departure.value == pytest.approx(max(values[51], 1e-9))
    assert departure.low < 3 < departure.high
    assert not any(each.departures for each in found[:51])
    both = ([each.scatter for each in one] for one in (found, run(noise(60)[:, 0])))
    np.testing.assert_allclose(*both)


def test_stacks_have_bands_of_their_own():
    bands, tags = Bands("decoder"), {"max_logit/decoder_layer_01/head_0": 1.0}
    for n, value in enumerate([*noise(20)[:, 0], 1e3, 1e3]):
        tags["max_logit/encoder_layer_01/head_0"] = value
        found = bands.add(reading_of(tags, 1000 + n))
    assert found.departures == []


@pytest.mark.parametrize("gap", [math.nan, math.inf, None])
def test_a_value_that_comes_and_goes_leaves_the_others_their_places(gap):
    """It comes before them in each reading that has it, and has a band from what is known."""
    bands, noises = Bands(), noise(60, 2)
    found = []
    for n, (one, other) in enumerate(noises):
        values = {"qk_dot/layer_01/head_1": one, SCORES: other + 1e3 * (n >= 50)}
        if n % 3 == 1:
            values["qk_dot/layer_01/head_0"] = 0.5
        elif gap is not None:
            values["qk_dot/layer_01/head_0"] = gap
        found.append(bands.add(reading_of(values, 1000 + n)))
    (departure,) = found[51].departures
    assert departure.place.tag == SCORES
    assert departure.value == noises[51, 1] + 1e3
    assert not any(each.departures for each in found[:51])
    known = bands.course(Place("", "qk_dot", layer=1, kind="head", head=1)).values
    assert known == tuple(noises[-32:, 0])


@pytest.mark.parametrize(("last", "value", "is_outside"), [
    (2.4, 2.4, True), (2.4, 2.2, False), (2.2, 2.4, False), (-2.4, 2.4, False), (-2.4, -2.4, True),
])  # fmt: skip
def test_a_band_of_limited_width_lies_around_the_median(last, value, is_outside):
    """Readings with a bend in them would open it until it holds anything."""
    bent = np.array([0.0, 0, 0, 0, 0, 0, 6, 12, 18, last])[:, None]
    limit = math.log(10)
    limited = measure_distance(bent, np.array([value]), 0.0, limit)
    assert (limited.size[0] > 1) == is_outside
    assert (limited.expected[0], limited.width[0]) == (0.0, limit)
    assert measure_distance(bent, np.array([value])).size[0] < 1
