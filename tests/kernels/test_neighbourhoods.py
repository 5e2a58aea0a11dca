"""Neighbourhoods against plain references: one at a time, distances by differences."""

import math

import pytest
import torch

from support import definitions as by_book
from support.hardware import LargestNewTensor
from support.kernels import local_anisotropy, local_dimension, nearest
from support.samples import generator, normal


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
    expected = [twonn(rows[own]) for own in members]
    assert local_dimension(rows, members).tolist() == pytest.approx(expected, rel=1e-9)
    parts = [by_book.centred(rows[own].double().numpy()) for own in members]
    shapes = [by_book.shares(part)[0] for part in parts]
    assert local_anisotropy(rows, members).tolist() == pytest.approx(shapes)


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


def test_memory_is_that_of_blocks(cut_blocks):
    rows, members = normal(100, 6).float(), sets(30, 20, 100)
    whole = local_dimension(rows, members), local_anisotropy(rows, members)
    cut_blocks(1)
    with LargestNewTensor(rows, members) as in_blocks:
        torch.testing.assert_close(local_dimension(rows, members), whole[0], rtol=1e-12, atol=0)
    assert in_blocks.bytes <= 8 * 20 * 20 * 6  # one neighbourhood of 30
    torch.testing.assert_close(local_anisotropy(rows, members), whole[1], rtol=1e-9, atol=1e-12)
