"""Neighbourhoods against plain references: one at a time, distances by differences."""

import math

import definitions as by_book
import pytest
import torch
from mathematics import local_anisotropy, local_dimension, nearest
from new_tensors import LargestNewTensor
from samples import generator, normal


def sets(count, size, tokens, seed=0):
    source = generator(seed)
    return torch.stack([torch.randperm(tokens, generator=source)[:size] for _ in range(count)])


def twonn(points):
    return by_book.twonn(by_book.distances(points.double().numpy())[:, :2])


@pytest.mark.parametrize(
    ("width", "offset", "scale", "dtype"),
    [
        (2, 0, 1, torch.float64), (90, 0, 1, torch.float32), (40, 1e3, 1, torch.float32),
        (9, 1e9, 1, None), (5, 0, 3e-140, None), (5, 0, 1e150, None),
    ],
)  # fmt: skip
def test_values_are_those_of_each_neighbourhood_alone(width, offset, scale, dtype):
    rows = (scale * normal(300, width) * torch.arange(1, width + 1) ** -0.5 + offset).to(dtype)
    members = nearest(rows, 64).indices[:40]
    found, shapes = local_dimension(rows, members), local_anisotropy(rows, members)
    for index, own in enumerate(members):
        assert found[index].item() == pytest.approx(twonn(rows[own]), rel=1e-9)
        centred = by_book.centred(rows[own].double().numpy())
        assert shapes[index].item() == pytest.approx(by_book.shares(centred)[0])


@pytest.mark.parametrize("spread", [1e-3, 1e-6, 1e-9, 1e-12])
def test_near_duplicates_in_a_neighbourhood_keep_their_distances(spread):
    """The Gram matrix alone has no digit of them left at 1e-9 of the extent."""
    centres = normal(8, 12, seed=2).repeat_interleave(8, dim=0)
    rows = centres + spread * normal(64, 12, seed=3)
    found = local_dimension(rows, torch.arange(64)[None])[0].item()
    assert found == pytest.approx(twonn(rows), rel=1e-9)


@pytest.mark.parametrize("width", [1, 3, 24])
def test_on_a_lattice_whose_numbers_are_rounded_the_dimension_is_infinite(width):
    """Spacings are equal but for rounding, which is no structure: TwoNN of it would be 1e13."""
    rows = torch.arange(200.0, dtype=torch.float64)[:, None] * normal(1, width).double() + 0.3
    own = torch.arange(70, 130)
    members = own[:, None] + torch.tensor([*range(-20, 0), *range(1, 21)])
    assert (local_dimension(rows, members) == math.inf).all()


def test_sets_without_an_answer():
    assert local_dimension(normal(5, 3), sets(2, 2, 5)).isnan().tolist() == [True, True]
    assert local_dimension(torch.ones(9, 3), sets(2, 9, 9)).isnan().tolist() == [True, True]
    assert local_dimension(normal(5, 3), torch.zeros(0, 5, dtype=torch.int64)).shape == (0,)
    assert local_anisotropy(torch.ones(9, 3), sets(2, 9, 9)).isnan().all()
    empty = local_anisotropy(normal(5, 3), torch.zeros(2, 0, dtype=torch.int64))
    assert empty.isnan().tolist() == [True, True]


def test_memory_is_that_of_blocks(cut_blocks):
    rows, members = normal(100, 6).float(), sets(30, 20, 100)
    whole = local_dimension(rows, members), local_anisotropy(rows, members)
    cut_blocks(1)
    with LargestNewTensor(rows, members) as in_blocks:
        torch.testing.assert_close(local_dimension(rows, members), whole[0], rtol=1e-12, atol=0)
    assert in_blocks.bytes <= 8 * 20 * 20 * 6  # one neighbourhood of 30
    torch.testing.assert_close(local_anisotropy(rows, members), whole[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: local_dimension(normal(5), sets(1, 3, 5)), "expected a floating-point tensor"),
        (lambda: local_dimension(normal(5, 2), sets(1, 3, 5).double()), "indices of rows"),
        (lambda: local_anisotropy(normal(5, 2), torch.arange(5)), "indices of rows"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
