"""Mean queries against mean keys, by head and joined to one vector, from arrays by step."""

import math

import numpy as np
import pytest

from geomon.record import Readings
from recipes.papers.alignment import align_layers, cosine
from recipes.papers.arrays import arrays_over_training


def test_heads_are_joined_to_one_vector_and_shared_keys_repeated():
    generator = np.random.default_rng(0)
    query, key = generator.normal(size=(6, 5)), generator.normal(size=(2, 5))
    arrays = {"mean_query/layer_01": query, "mean_query/layer_04": query}
    found = align_layers({
        step: arrays | {"mean_key/layer_01": sign * key, "mean_key/layer_04": sign * key}
        for step, sign in ((0, 1), (1, -1))
    } | {2: arrays})  # fmt: skip
    whole = np.concatenate([key[0]] * 3 + [key[1]] * 3)  # heads 0 to 2 share key head 0
    expected = query.ravel() @ whole / np.linalg.norm(query) / np.linalg.norm(whole)
    assert [(layer, each.layer) for layer, each in found.items()] == [(1, 1), (4, 4)]
    for each in found.values():
        assert (each.width, each.steps) == (30, (0, 1))
        assert each.cosines == pytest.approx([expected, -expected])


@pytest.mark.parametrize("one", [1e-300, 1.0, 1e300])
@pytest.mark.parametrize("other", [1e-300, 1.0, 1e300])
def test_a_cosine_does_not_depend_on_lengths(one, other):
    found = cosine(one * np.array([1.0, 2.0]), other * np.array([2.0, -1.5]))
    assert found == pytest.approx(-1 / math.sqrt(5) / 2.5)


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_mean_without_direction_has_no_cosine(bad):
    assert np.isnan(cosine(np.array([1.0, 2.0]), np.array([bad, bad])))


def test_readings_without_arrays_have_no_joined_cosines():
    assert align_layers(arrays_over_training(Readings([], []), "mean_query")) == {}
    assert align_layers({0: {"mean_query/layer_01": np.ones((1, 1))}}) == {}
