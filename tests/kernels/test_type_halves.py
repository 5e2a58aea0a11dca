"""Token types on halves of the sequences, held to the types of the rows of each half."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.kernels import _blocks
from geomon.kernels.half_samples import half_samples
from geomon.kernels.token_types import token_types
from geomon.kernels.type_halves import type_moments, within_of_halves


def text(sequences=24, length=40, types=30, width=6, offset=0.0, seed=0):
    """Rows of sequences, their types (some come once), and the numbers of the sequences."""
    generator = torch.Generator().manual_seed(seed)
    kind = {"generator": generator, "dtype": torch.float64}
    law = 1 / torch.arange(1, types + 1, dtype=torch.float64)
    ids = torch.multinomial(law, sequences * length, replacement=True, generator=generator)
    ids[:5] = torch.arange(1000, 1005)
    own = torch.randn(sequences, 1, width, **kind).expand(-1, length, -1).flatten(0, 1)
    centre = torch.randn(1005, width, **kind)[ids]
    rows = 0.5 * own + centre * (1 + torch.randn(len(ids), 1, **kind) / 2) + offset
    return rows, ids, torch.arange(sequences).repeat_interleave(length)


def type_halves(rows, ids, halves):
    return type_moments(rows, ids, halves).halves


def of_halves(function, rows, ids, halves):
    """The reference: a value of the token types of the rows in each half of each way."""
    members = halves.first[:, halves.group]
    parts = [*members, *~members]
    return torch.stack([function(token_types(rows[one], ids[one])) for one in parts])


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_variance_within_types_is_that_of_each_half(offset, dtype):
    rows, ids, sequences = text(offset=offset)
    rows, halves = rows.to(dtype), half_samples(sequences)
    found = within_of_halves(type_halves(rows, ids, halves))
    want = of_halves(lambda types: types.within_variance, rows, ids, halves)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=0)
    assert found.shape == (30,)
    assert want.std() > 0.01 * want.mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_rows_of_a_type_leave_the_digits_of_the_others(dtype):
    """The first row of each type is 300 times as long as the others: nothing may cancel with it."""
    rows, ids, sequences = text(types=8)
    length = rows.norm(dim=1).mean()
    for first in range(4):
        rows[(ids == first).nonzero()[0]] *= 300 * length / rows[(ids == first).nonzero()[0]].norm()
    rows, halves = rows.to(dtype), half_samples(sequences)
    found = type_halves(rows, ids, halves)
    kinds = [number for number in ids.unique() if (ids == number).sum() > 1]
    first = halves.first[:, halves.group]
    for half, member in enumerate([*first, *~first]):
        for place, number in enumerate(kinds):
            own = rows[member & (ids == number)].double()
            want = (own - own.mean(dim=0)).square().sum()
            torch.testing.assert_close(found.scatter[half, place], want, rtol=1e-5, atol=0)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    offset=st.sampled_from([0.0, 1e3]),
    block=st.sampled_from([64, 10**6]),
    long=st.sampled_from([1.0, 1e4]),
)
def test_the_types_of_all_rows_are_those_without_halves(seed, offset, block, long):
    rows, ids, sequences = text(10, 7, 12, 5, offset=offset, seed=seed)
    rows[3] *= long
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_blocks, "BLOCK", block)
        found = type_moments(rows, ids, half_samples(sequences)).types
    want = token_types(rows, ids)
    assert torch.equal(found.rows, want.rows)
    torch.testing.assert_close(found.m, want.m, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.scatter, want.scatter, rtol=1e-10, atol=0)


def test_types_of_equal_rows_do_not_scatter():
    rows = torch.full((40, 3), 0.1).repeat_interleave(2, dim=0)
    ids, sequences = torch.arange(80) % 7, torch.arange(80) // 10
    found = type_moments(rows, ids, half_samples(sequences))
    assert (found.types.scatter == 0).all()
    assert (found.halves.scatter == 0).all()


@settings(deadline=None, derandomize=True, max_examples=15)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-3, 1e4]))
def test_moments_of_types_under_order_scale_and_names(seed, scale):
    rows, ids, sequences = text(16, 10, 8, 3, seed=seed)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    one = type_halves(rows, ids, half_samples(sequences))
    other = type_halves(scale * rows[order], ids[order] * 3, half_samples(sequences[order]))
    torch.testing.assert_close(other.rows, one.rows)
    torch.testing.assert_close(other.scatter / scale**2, one.scatter, rtol=1e-4, atol=1e-5)


def test_without_a_type_that_comes_twice_there_is_no_difference():
    rows, _, sequences = text()
    types = type_halves(rows, torch.arange(len(rows)), half_samples(sequences))
    assert types.rows.shape == (30, 0)
    assert within_of_halves(types).isnan().all()
