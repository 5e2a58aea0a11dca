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


def test_a_cosine_that_falls_with_depth_is_found():
    found = queries_and_keys([at(0, [[0.1] * 8, [0.1, -0.1] * 4, [-0.1] * 7 + [0.1]])])
    assert found.depth < 0
    assert found.depth_p < 0.001
    two = queries_and_keys([at(0, [[0.1] * 8, [-0.1] * 8], **{"qk_dot/layer_01/head_0": 0.0})])
    assert two.depth == pytest.approx(-1)
    assert not any("Mean query · mean key" in sentence for sentence in two.words())
    heads = queries_and_keys([at(0, [[0.7, 0.9, -0.8, -0.95, 0.8]])])
    assert [head.head for head in heads.of("similar")] == [1, 4, 0]
    assert [head.head for head in heads.of("opposite")] == [3, 2]


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
