import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import few_examples, normal
from scipy.spatial.distance import pdist

from geomon.kernels.angles import (
    cosine_centred,
    qk_cosine,
    qk_cosine_concatenated,
    qk_dot,
    sequence_cosines,
)
from geomon.kernels.groups import group_sums


def head_cosine(rows):
    return group_sums(rows, torch.zeros(len(rows), dtype=torch.int64), 1).cosine


def cosine(hidden):
    return head_cosine(hidden[:, None])[0]


head_shapes = st.tuples(
    st.integers(3, 20), st.integers(1, 4), st.integers(2, 8), st.integers(0, 10**6)
)


def over_all_pairs(hidden):
    return 1 - pdist(hidden.double().numpy(), "cosine").mean()


@pytest.mark.parametrize(("tokens", "width"), [(2, 1), (3, 40), (300, 16), (600, 32), (1500, 8)])
@pytest.mark.parametrize("offset", [0.0, 0.5, 20.0])
def test_cosine_agrees_with_all_pairs(tokens, width, offset):
    hidden = normal(tokens, width) * torch.linspace(0.1, 9, tokens)[:, None] + offset
    assert cosine(hidden).item() == pytest.approx(over_all_pairs(hidden), abs=1e-12)


@pytest.mark.parametrize("tokens", [300, 800])
def test_cosine_close_to_one_where_float32_cannot_tell_it_from_one(tokens):
    hidden = (1e4 + normal(tokens, 64)).float()
    units = hidden.double() / hidden.double().norm(dim=1, keepdim=True)
    gap = (pdist(units.numpy(), "sqeuclidean") / 2).mean()  # 1 - cos without the cancellation
    assert gap == pytest.approx(1e-8, rel=0.1)
    # The same formula in float32, whose spacing below 1 is 6e-8.
    naive = torch.nn.functional.normalize(hidden, dim=1)
    naive = (naive.sum(dim=0).square().sum() - tokens) / (tokens * (tokens - 1))
    assert abs(1 - naive.item() - gap) > 0.5 * gap
    assert 1 - cosine(hidden).item() == pytest.approx(gap, rel=1e-5)


def test_cosine_of_the_axes_is_zero_and_of_opposite_rows_is_lowest():
    assert cosine(torch.eye(500)).item() == pytest.approx(0, abs=1e-15)
    for tokens in (2, 3, 50):
        simplex = torch.eye(tokens, dtype=torch.float64) - 1 / tokens
        assert cosine(simplex).item() == pytest.approx(-1 / (tokens - 1), abs=1e-13)


@pytest.mark.parametrize("directions", [0, 1])
def test_cosine_is_nan_with_fewer_than_two_directions(directions):
    hidden = torch.zeros(5, 3)
    hidden[:directions] = 1
    got = cosine(hidden)
    assert got.isnan()
    assert got.dtype == torch.float64
    assert got.shape == ()


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e-320])
def test_cosine_of_extreme_rows_neither_overflows_nor_vanishes(scale):
    hidden = torch.tensor([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    assert cosine(hidden * scale).item() == pytest.approx((0.6 + 0.8) / 3, rel=1e-3)
    lengths = torch.tensor([[1.0], [scale], [1.0]], dtype=torch.float64)
    assert cosine(hidden * lengths).item() == pytest.approx((0.6 + 0.8) / 3, rel=1e-3)


def test_qk_cosine_is_nan_where_a_mean_is_zero_and_only_there():
    query, key = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.ones(2, 2)
    got = qk_cosine(query, key)
    assert got[0].isnan()
    assert got[1].item() == pytest.approx(1)
    assert qk_dot(query, key).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("kernel", [qk_cosine, qk_dot])
@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((4, 8), (4, 7)),
        ((4, 8), (3, 8)),
        ((2, 8), (4, 8)),
        ((4, 8), (0, 8)),
        ((8,), (8,)),
        ((5, 4, 8), (3, 4, 8)),
    ],
)
def test_qk_names_the_shapes_it_cannot_use(kernel, query, key):
    with pytest.raises(ValueError, match="expected mean queries") as caught:
        kernel(torch.ones(query), torch.ones(key))
    assert str(list(query)) in str(caught.value)
    assert str(list(key)) in str(caught.value)


def test_rows_without_a_direction_are_left_out_of_the_head_they_are_in():
    rows = normal(30, 2, 6)
    rows[4:9, 0] = 0
    keep = torch.cat([rows[:4, 0], rows[9:, 0]])
    got = head_cosine(rows)
    torch.testing.assert_close(got[0], cosine(keep))
    torch.testing.assert_close(got[1], cosine(rows[:, 1]))
    rows[1:, 0] = 0
    got = head_cosine(rows)
    assert got[0].isnan()
    assert not got[1].isnan()


# -- about the mean, within and between sequences, heads side by side --


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize(("tokens", "width"), [(2, 3), (300, 7), (1600, 700)])
def test_the_centred_cosine_is_that_over_all_pairs_of_centred_rows(tokens, width, offset):
    near = (normal(tokens, width) * 1024).round() / 1024
    want = over_all_pairs(near - near.mean(dim=0))
    assert cosine_centred(near + offset).item() == pytest.approx(want, rel=1e-6, abs=1e-12)


def by_pairs(rows, sequences):
    """Mean cosine over the pairs of one sequence and over those of two, pair by pair."""
    unit = rows.double().numpy() / np.linalg.norm(rows.double().numpy(), axis=1, keepdims=True)
    one, two = np.triu_indices(len(unit), 1)
    values, own = (unit[one] * unit[two]).sum(axis=1), (sequences[one] == sequences[two]).numpy()
    return values[own].mean(), values[~own].mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosines_within_and_between_sequences_are_those_of_the_pairs(dtype):
    sequences = torch.randint(9, (400,), generator=torch.Generator().manual_seed(1)) * 5 - 7
    rows = (normal(400, 11) + 1.5 * normal(50, 11, seed=2)[sequences]).to(dtype)
    found = sequence_cosines(rows, sequences)
    within, between = by_pairs(rows, sequences)
    assert found.within.item() == pytest.approx(within, rel=1e-6)
    assert found.between.item() == pytest.approx(between, rel=1e-6)
    assert found.within > found.between + 0.2
    # All pairs are these and those.
    n = found.rows
    own, every = (n * (n - 1)).sum(), n.sum() * (n.sum() - 1)
    both = (own * found.within + (every - own) * found.between) / every
    torch.testing.assert_close(both, cosine(rows))


def test_pairs_that_there_are_not_have_no_cosine():
    rows = normal(6, 4)
    one, each = (sequence_cosines(rows, ids) for ids in (torch.zeros(6).long(), torch.arange(6)))
    torch.testing.assert_close(one.within, cosine(rows))
    assert one.between.isnan()
    torch.testing.assert_close(each.between, cosine(rows))
    assert each.within.isnan()
    rows[:2] = 0  # without a direction: left out
    got, want = (sequence_cosines(rows[n:], torch.arange(n, 6) // 3) for n in (0, 2))
    torch.testing.assert_close(
        torch.stack([got.within, got.between]), torch.stack([want.within, want.between])
    )
    rows[:5] = 0
    assert sequence_cosines(rows, torch.arange(6) // 3).between.isnan()
    with pytest.raises(ValueError, match="the number of a sequence for each of 6 rows"):
        sequence_cosines(rows, torch.zeros(5).long())


@few_examples
@given(head_shapes, st.integers(1, 3))
def test_heads_side_by_side_are_one_long_head(shape, group):
    tokens, heads, width, seed = shape
    query = normal(tokens, heads * group, width, seed=seed).mean(dim=0)
    key = normal(tokens, heads, width, seed=seed + 1).mean(dim=0)
    flat_query, flat_key = (
        query.flatten().numpy(),
        key.repeat_interleave(group, 0).flatten().numpy(),
    )
    want = flat_query @ flat_key / np.linalg.norm(flat_query) / np.linalg.norm(flat_key)
    assert qk_cosine_concatenated(query, key).item() == pytest.approx(want, abs=1e-12)
    # One head alone is the cosine of that head.
    torch.testing.assert_close(
        qk_cosine_concatenated(query[:1], key[:1]), qk_cosine(query[:1], key[:1])[0]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_the_centred_cosine_is_that_of_its_definition(dtype):
    rows = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).to(dtype) + 1
    one, other = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    cosine_centred(one).backward()
    exact = other.double() - other.double().mean(dim=0)
    directions = exact / exact.norm(dim=1, keepdim=True)
    (((directions @ directions.T).sum() - 40) / (40 * 39)).backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-9)
