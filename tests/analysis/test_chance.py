"""Mean queries and keys: how far chance goes, and the heads of a layer joined to one vector."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from geomon.analysis.chance import chance_limit, heads_limit
from geomon.kernels.baselines import isotropic_cosine_magnitude
from geomon.record import tags
from support.readings import reading_of, with_values

WIDTH = 32


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
    assert limit == pytest.approx(chance_limit(width, 1 - 0.05 / heads))
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
