"""The limits of massive rows; test_contract.py compares the rows with their definition."""

import numpy as np
import pytest
import torch

from support.kernels import ordinary_rows

SHAPES = [(4096, 64), (2048, 768), (4096, 8)]
RANDOM = np.random.default_rng(7)
# Nothing is massive in ordinary distributions.
ORDINARY = {
    "gaussian": RANDOM.standard_normal,
    "uniform": lambda shape: RANDOM.uniform(-1, 1, shape),
    "student": lambda shape: RANDOM.standard_t(5, shape),
    "anisotropic": lambda shape: RANDOM.standard_normal(shape) / np.arange(1, shape[1] + 1),
}


def at(ratio):
    """20 rows on either side at distance 1: the median is 0, the median distance 1; one row far."""
    return np.array([-1.0, 1.0] * 20 + [0.0] * 9 + [ratio])[:, None]


def among_directions(count):
    """A thousand directions, some of them a hundred times as long."""
    rows = np.random.default_rng(12).standard_normal((1000, 16))
    length = np.where(np.arange(1000) < count, 100, 1)
    return length[:, None] * rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        *((draw(shape), 0) for draw in ORDINARY.values() for shape in SHAPES),
        (at(9.9), 0), (at(10.1), 1),
        (1000 * np.eye(100, 3), 0),  # without a scale
        *((among_directions(n), found) for n, found in ((49, 49), (50, 50), (52, 0))),
    ],
)  # fmt: skip
def test_massive_rows_are_ten_times_as_far_as_the_median_and_one_in_twenty(rows, count):
    assert (~ordinary_rows(torch.from_numpy(rows))).sum() == count
