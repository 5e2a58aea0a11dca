"""Angles: what the table of contracts does not hold, pairs that are not there and heads."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import few_examples, normal

from geomon.kernels.angles import (
    cosine_centred,
    qk_cosine,
    qk_dot,
)
from geomon.kernels.groups import group_sums


def cosine(hidden):
    return group_sums(hidden[:, None], torch.zeros(len(hidden), dtype=torch.int64), 1).cosine[0]


def test_rows_at_the_mean_have_no_direction_about_it():
    assert cosine_centred(torch.tensor([[0.0], [1.0], [0.0], [-1.0]])).item() == pytest.approx(-1)


@few_examples
@given(
    st.integers(3, 20), st.integers(1, 4), st.integers(2, 8), st.integers(1, 3), st.integers(0, 99)
)
def test_each_query_head_faces_the_key_head_of_its_group(tokens, heads, width, group, seed):
    query = normal(tokens, heads * group, width, seed=seed).mean(dim=0)
    key = normal(tokens, heads, width, seed=seed + 1).mean(dim=0)
    q, k = query.numpy(), key.numpy().repeat(group, axis=0)
    dots, sizes = (q * k).sum(axis=1), [np.linalg.norm(x, axis=1) for x in (q, k)]
    np.testing.assert_allclose(qk_dot(query, key), dots, rtol=1e-12)
    np.testing.assert_allclose(qk_cosine(query, key), dots / sizes[0] / sizes[1], rtol=1e-12)


def test_qk_cosine_is_nan_where_a_mean_is_zero_and_only_there():
    query, key = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.ones(2, 2)
    assert qk_cosine(query, key).isnan().tolist() == [True, False]
    assert qk_dot(query, key).tolist() == [0.0, 2.0]


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((4, 8), (4, 7)), ((4, 8), (3, 8)), ((2, 8), (4, 8)), ((4, 8), (0, 8)), ((8,), (8,)),
        ((5, 4, 8), (3, 4, 8)),
    ],
)  # fmt: skip
def test_qk_names_the_shapes_it_cannot_use(query, key):
    with pytest.raises(ValueError, match="expected mean queries") as caught:
        qk_cosine(torch.ones(query), torch.ones(key))
    assert f"{list(query)} and {list(key)}" in str(caught.value)


def test_the_gradient_of_the_centred_cosine_is_that_of_its_definition():
    """Where rows with a number of 1 or more were scaled, it was 0."""
    assert torch.autograd.gradcheck(cosine_centred, (normal(9, 3) + 2).requires_grad_())
