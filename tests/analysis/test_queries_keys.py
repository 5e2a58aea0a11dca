"""Mean queries and keys: chance, direction, onset and depth are found from the record alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from tagged import reading_of, with_values

from geomon.analysis.queries_keys import (
    _joined_cosines,
    align_layers,
    chance_limit,
    cosine_p_value,
    queries_and_keys,
)
from geomon.kernels.baselines import isotropic_cosine_magnitude
from geomon.record import Readings, Record, read, tags
from geomon.record.arrays import ArrayPlace

WIDTH = 32
cosines = st.floats(-1, 1)


def at(step, table, width=WIDTH, **more):
    """A reading with a cosine for each head of each layer, [layers, heads]."""
    values = {
        tags.layer_tag("qk_cosine", layer, tags.head_part(head)): float(value)
        for layer, row in enumerate(table, start=1)
        for head, value in enumerate(row)
    }
    values["qk_cosine/null_magnitude"] = isotropic_cosine_magnitude(width)
    return reading_of(values | more, step)


def chance(generator, shape, width=WIDTH):
    one, other = generator.normal(size=(2, *shape, width))
    return (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)


@given(st.integers(2, 20_000))
@settings(deadline=None)
def test_the_width_of_heads_is_read_off_the_null(width):
    found = queries_and_keys([at(0, [[0.3]], width)])
    assert found is not None
    assert found.width == width


@given(st.one_of(st.floats(), st.floats(0, 1)))
@settings(deadline=None)
def test_a_null_that_no_width_has_is_none(null):
    """A record may hold anything: 1e-200, whose square is 0, was a division by zero."""
    damaged = at(0, [[0.3]], **{"qk_cosine/null_magnitude": null})
    found = queries_and_keys([damaged])
    assert (found is None) == (not 1e-3 < null < 0.7)
    assert found is None or found.width >= 2


@given(cosines, st.integers(2, 3000))
@example(cosine=0.9999999999999999, width=2)
@settings(deadline=None)
def test_the_p_value_is_the_tail_of_the_beta_distribution(cosine, width):
    half = (width - 1) / 2
    # The other tail, which is as large: 1 - |c| keeps the digits that 1 + |c| loses next to 1.
    tail = 2 * stats.beta.cdf((1 - abs(cosine)) / 2, half, half)
    assert cosine_p_value(cosine, width) == pytest.approx(tail, rel=1e-6, abs=1e-300)


def test_chance_alone_names_a_head_in_one_run_of_twenty():
    generator = np.random.default_rng(0)
    runs = [queries_and_keys([at(0, chance(generator, (4, 4)))]) for _ in range(400)]
    named = np.mean([len(run.of("chance")) < 16 for run in runs])
    assert 0.02 < named < 0.085
    falls = np.mean([run.depth_p < 0.05 for run in runs])
    assert 0.02 < falls < 0.085


@given(st.lists(cosines, min_size=1, max_size=40))
@settings(deadline=None)
def test_the_named_heads_are_those_of_holm(values):
    found = queries_and_keys([at(0, [values])])
    p_values = np.array([cosine_p_value(value, WIDTH) for value in values])
    order = np.argsort(p_values, kind="stable")
    count = len(values)
    adjusted = np.empty(count)
    adjusted[order] = np.maximum.accumulate(p_values[order] * (count - np.arange(count)))
    named = [head.direction != "chance" for head in found.heads]
    clear = np.abs(adjusted - 0.05) > 1e-9  # a product and a quotient round differently
    assert (np.array(named) == (adjusted <= 0.05))[clear].all()
    assert ((np.abs(values) > found.limit) == named)[clear].all()
    for head in found.heads:
        assert head.direction in ("chance", "similar" if head.cosine > 0 else "opposite")
        assert (head.onset is None) == (head.direction == "chance")


@given(st.integers(0, 5), st.sampled_from([-1, 1]), st.integers(0, 2**31))
@settings(deadline=None, max_examples=40)
def test_an_onset_is_the_step_from_which_a_head_stays_beyond_chance(number, sign, seed):
    """Before it, a head may be beyond chance for a while: with the other sign, or not to stay."""
    generator = np.random.default_rng(seed)
    steps = [0, 8, 32, 128, 512, 2048]
    readings = []
    for index, step in enumerate(steps):
        table = chance(generator, (2, 3))
        table[1, 2] = sign * 0.9
        if index == number - 1:
            table[1, 2] = generator.choice([0.05, -sign * 0.9])
        readings.append(at(step, table))
    found = queries_and_keys(generator.permutation(np.array(readings, dtype=object)).tolist())
    head = next(each for each in found.heads if (each.layer, each.head) == (2, 2))
    assert head.direction == ("similar" if sign > 0 else "opposite")
    assert head.onset == steps[number]


def test_a_cosine_that_falls_with_depth_is_found():
    found = queries_and_keys([at(0, [[0.1] * 8, [0.1, -0.1] * 4, [-0.1] * 7 + [0.1]])])
    assert found.depth < 0
    assert found.depth_p < 0.001
    heads = queries_and_keys([at(0, [[0.7, 0.9, -0.8, -0.95, 0.8]])])
    assert [head.head for head in heads.of("similar")] == [1, 4, 0]
    assert [head.head for head in heads.of("opposite")] == [3, 2]


def test_the_words_say_what_was_found():
    start = {"qk_dot/layer_01/head_0": 0.5, "qk_dot/layer_02/head_0": -1.5}
    end = {"qk_dot/layer_01/head_0": 8.0, "qk_dot/layer_02/head_0": -4.0}
    first, last = [[0.9] * 6, [0.0] * 6], [[0.9] * 6, [-0.9] * 6]
    readings = [at(0, first, **start), at(64, first), at(128, last, **end)]
    assert queries_and_keys(readings).words() == [
        "Mean query and mean key are similar beyond chance in 6 of 12 heads (from step 0 on), and "
        "opposite in 6 (from step 128 on). By chance (random directions in 32 dimensions) any of "
        "the 12 heads would be beyond the limit in 5 % of the readings.",
        "The cosine of mean query and mean key falls with depth (Kendall's tau -1.00, p below "
        ".001).",
        "Mean query · mean key, mean size over heads: 1 at the start, 6 at the end.",
    ]


def test_without_heads_or_without_a_width_there_is_nothing():
    reading = at(0, [[0.9]])
    assert queries_and_keys([]) is None
    assert queries_and_keys([with_values(reading, {"twonn/mean": 3.0})]) is None
    bare = with_values(reading, {"qk_cosine/layer_01/head_0": 0.9})
    assert queries_and_keys([bare]) is None
    lost = with_values(reading, dict(reading.values) | {"qk_cosine/layer_01/head_0": math.nan})
    assert queries_and_keys([lost]) is None


# -- heads of a layer joined to one vector ---------------------------------------------------------


def beside(folder, means, layers=(1,)):
    """A record whose arrays hold the same mean queries and keys at each layer, one pair a step."""
    record = Record(folder)
    record.begin(0, {})
    for step, (query, key) in enumerate(means):
        reading = at(step, [[0.0]] * max(layers))
        record.write(reading)
        arrays = {}
        for layer in layers:
            arrays[ArrayPlace("", "mean_query", layer)] = np.asarray(query, dtype=np.float32)
            arrays[ArrayPlace("", "mean_key", layer)] = np.asarray(key, dtype=np.float32)
        record.write_arrays(reading, arrays)
    record.close()
    return read(folder)


def test_heads_are_joined_to_one_vector_and_shared_keys_repeated(tmp_path):
    generator = np.random.default_rng(0)
    query, key = generator.normal(size=(6, 5)), generator.normal(size=(2, 5))
    found = align_layers(beside(tmp_path, [(query, key), (query, -key)], layers=(1, 4)))
    whole = np.concatenate([key[0]] * 3 + [key[1]] * 3)  # heads 0 to 2 share key head 0
    cosine = np.corrcoef(np.array([query.ravel(), whole]))  # of centred rows: not what is asked
    expected = query.ravel() @ whole / np.linalg.norm(query) / np.linalg.norm(whole)
    assert abs(cosine[0, 1] - expected) > 1e-3
    assert list(found) == [1, 4]
    assert found[4] == replace(found[1], layer=4)
    assert (found[1].width, found[1].steps) == (30, (0, 1))
    assert found[1].cosines == pytest.approx((expected, -expected), abs=1e-6)


@given(st.sampled_from([1e-30, 1.0, 1e30]), st.sampled_from([1e-30, 1.0, 1e30]))
@settings(deadline=None)
def test_the_joined_cosine_does_not_depend_on_lengths(one, other):
    pair = np.array([[1.0, 2.0]]), np.array([[2.0, -1.5]])
    arrays = {"mean_query/layer_01": one * pair[0], "mean_key/layer_01": other * pair[1]}
    ((cosine, width),) = _joined_cosines(arrays, range(9)).values()
    assert (cosine, width) == (pytest.approx(-1 / math.sqrt(5) / 2.5), 2)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_mean_without_direction_has_no_cosine(tmp_path, bad):
    readings = beside(tmp_path, [([[1.0, 2.0]], [[bad, bad]])])
    assert math.isnan(align_layers(readings)[1].cosines[0])


def test_readings_without_arrays_have_no_joined_cosines(tmp_path):
    assert align_layers(Readings([], [at(0, [[0.3]])])) == {}
    assert align_layers(Readings([], [])) == {}
    record = beside(tmp_path, [([[1.0]], [[1.0]])])
    (tmp_path / "arrays" / "step_000000_probe.npz").unlink()
    assert align_layers(record) == {}


@given(st.integers(2, 20_000), st.floats(0.01, 0.99))
@settings(deadline=None)
def test_chance_is_beyond_its_limit_as_often_as_the_p_value_says(width, probability):
    limit = chance_limit(width, probability)
    assert cosine_p_value(limit, width) == pytest.approx(1 - probability, rel=1e-6)
