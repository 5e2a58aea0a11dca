import math

import numpy as np
import pytest
import torch

from geomon import METRICS, geometry


def cloud(tokens=600, width=16, seed=0):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def test_every_metric_that_the_inputs_allow():
    values = geometry(cloud(), torch.arange(600) % 50)
    names = {tag.split("/")[0] for tag in values}
    of_heads = ("qk", "attention", "query", "key", "max")
    heads = {name for name in METRICS if name.startswith(of_heads)}
    assert names == set(METRICS) - heads
    assert all(math.isfinite(value) for value in values.values()), values


def test_without_token_ids_what_needs_them_is_left_out():
    names = {tag.split("/")[0] for tag in geometry(cloud())}
    assert "twonn" in names
    assert "twonn_distinct" not in names


@pytest.mark.parametrize("kind", [np.asarray, torch.Tensor.double, torch.Tensor.half, torch.clone])
def test_arrays_and_tensors_of_any_precision(kind):
    values = geometry(kind(cloud()))
    assert values["twonn"] == pytest.approx(geometry(cloud())["twonn"], rel=0.02)


def test_integers_are_numbers():
    rows = torch.randint(0, 1000, (300, 5), generator=torch.Generator().manual_seed(0))
    assert geometry(rows) == geometry(rows.double())


def test_input_is_unchanged_and_results_are_the_same_twice():
    rows = cloud()
    before = rows.clone()
    state = torch.random.get_rng_state()
    assert geometry(rows) == geometry(rows)
    assert torch.equal(rows, before)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_batches_have_a_deviation():
    values = geometry(cloud(1200), tokens=400)
    assert values["twonn/n"] == 400
    assert values["twonn/std"] > 0
    assert "twonn/std" not in geometry(cloud(1200))


def test_rows_that_are_not_finite_are_left_out():
    rows = cloud()
    spoilt = torch.cat([rows, torch.full((5, 16), math.nan), torch.full((3, 16), math.inf)])
    assert geometry(spoilt)["twonn/n"] == 600
    assert geometry(spoilt)["anisotropy"] == pytest.approx(geometry(rows)["anisotropy"])


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (torch.randn(3), r"expected hidden states \[tokens, width\], got \[3\]"),
        (torch.randn(2, 3, 4), r"got \[2, 3, 4\]"),
        (torch.randn(2, 3), "at least 3 finite rows, got 2 of 2"),
        (torch.empty(0, 3), "at least 3 finite rows"),
        (torch.full((9, 2), math.nan), "at least 3 finite rows, got 0 of 9"),
    ],
)
def test_bad_rows_are_refused_with_shape_and_expectation(hidden, message):
    with pytest.raises(ValueError, match=message):
        geometry(hidden)


def test_ids_of_another_length_are_refused():
    with pytest.raises(ValueError, match="expected 600 token_ids, one for each row"):
        geometry(cloud(), torch.arange(5))


def test_constant_rows_give_nan_not_an_error():
    values = geometry(torch.ones(50, 4))
    assert values["variance"] == 0
    assert math.isnan(values["anisotropy"])
    assert math.isnan(values["twonn"])


def test_positions_tell_equal_tokens_apart():
    ids, positions = torch.arange(600) % 50, torch.arange(600) % 7
    both = geometry(cloud(), ids, positions)
    assert both["twonn_distinct/n"] == 350  # every pair of 50 ids and 7 positions occurs
    assert both["twonn_distinct/repeated"] == pytest.approx(1 - 350 / 600)
    assert geometry(cloud(), ids)["twonn_distinct/n"] == 50
    with pytest.raises(ValueError, match="expected 600 positions, one for each row"):
        geometry(cloud(), ids, positions[:-1])
    with pytest.raises(ValueError, match="expected 600 token_ids, one for each row"):
        geometry(cloud(), ids[:-1])
