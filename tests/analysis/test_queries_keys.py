"""Mean queries and keys: how far chance goes, and the heads of a layer joined to one vector."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tagged import reading_of, with_values

from geomon.analysis.queries_keys import (
    _joined_cosines,
    align_layers,
    chance_limit,
    heads_limit,
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


@given(st.integers(2, 20_000), st.integers(1, 40))
@settings(deadline=None)
def test_the_width_of_heads_is_read_off_the_null(width, heads):
    limit = heads_limit(at(0, [[0.3] * heads], width))
    half = (width - 1) / 2
    # The other tail, which is as large: 1 - |c| keeps the digits that 1 + |c| loses next to 1.
    tail = 2 * stats.beta.cdf((1 - limit) / 2, half, half)
    assert heads * tail == pytest.approx(0.05, rel=1e-6)


@given(st.one_of(st.floats(), st.floats(0, 1)))
@settings(deadline=None)
def test_a_null_that_no_width_has_gives_no_limit(null):
    """A record may hold anything: 1e-200, whose square is 0, was a division by zero."""
    limit = heads_limit(at(0, [[0.3]], **{"qk_cosine/null_magnitude": null}))
    assert math.isnan(limit) == (not 1e-3 < null < 0.7)


def test_chance_alone_puts_a_head_beyond_the_limit_in_one_run_of_twenty():
    generator = np.random.default_rng(0)
    tables = [chance(generator, (4, 4)) for _ in range(400)]
    beyond = np.mean([np.abs(table).max() > heads_limit(at(0, table)) for table in tables])
    assert 0.02 < beyond < 0.085


def test_without_heads_or_without_a_width_there_is_no_limit():
    reading = at(0, [[0.9]])
    assert math.isnan(heads_limit(with_values(reading, {"twonn/mean": 3.0})))
    bare = with_values(reading, {"qk_cosine/layer_01/head_0": 0.9})
    assert math.isnan(heads_limit(bare))


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
def test_cosines_of_isotropic_directions_follow_the_beta_distribution(width, probability):
    limit, half = chance_limit(width, probability), (width - 1) / 2
    tail = 2 * stats.beta.cdf((1 - limit) / 2, half, half)
    assert tail == pytest.approx(1 - probability, rel=1e-6)
