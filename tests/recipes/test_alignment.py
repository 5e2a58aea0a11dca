"""Heads of a layer joined to one vector, from the arrays beside a record."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tagged import reading_of

from geomon.record import Readings, Record, read
from geomon.record.arrays import ArrayPlace
from recipes.papers.alignment import _joined_cosines, align_layers


def beside(folder, means, layers=(1,)):
    """A record whose arrays hold the same mean queries and keys at each layer, one pair a step."""
    record = Record(folder)
    record.begin(0, {})
    for step, pair in enumerate(means):
        reading = reading_of({f"qk_cosine/layer_{n:02d}/head_0": 0.0 for n in layers}, step)
        record.write(reading)
        record.write_arrays(reading, {
            ArrayPlace("", name, layer): np.asarray(mean, dtype=np.float32)
            for layer in layers
            for name, mean in zip(("mean_query", "mean_key"), pair, strict=True)
        })  # fmt: skip
    record.close()
    return read(folder)


def test_heads_are_joined_to_one_vector_and_shared_keys_repeated(tmp_path):
    generator = np.random.default_rng(0)
    query, key = generator.normal(size=(6, 5)), generator.normal(size=(2, 5))
    found = align_layers(beside(tmp_path, [(query, key), (query, -key)], layers=(1, 4)))
    whole = np.concatenate([key[0]] * 3 + [key[1]] * 3)  # heads 0 to 2 share key head 0
    expected = query.ravel() @ whole / np.linalg.norm(query) / np.linalg.norm(whole)
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
    cosines = {"qk_cosine/layer_01/head_0": 0.3, "qk_cosine/null_magnitude": 0.1}
    assert align_layers(Readings([], [reading_of(cosines)])) == {}
    assert align_layers(Readings([], [])) == {}
    record = beside(tmp_path, [([[1.0]], [[1.0]])])
    (tmp_path / "arrays" / "step_000000_probe.npz").unlink()
    assert align_layers(record) == {}
