import math

import numpy as np
import pytest
from samples import normal

from geomon.kernels.moments import drift_norm, mean_square_norm, variance

SHAPES = [(1, 3), (2, 1), (7, 32), (450, 16), (1200, 48), (30, 500)]


def by_exact_sums(hidden):
    """M, V and Q with sums that round once, and V over all pairs: sum |x - y|^2 / (2 n^2)."""
    rows = hidden.double().numpy()
    n = len(rows)
    mean_norm = math.fsum((math.fsum(column) / n) ** 2 for column in rows.T)
    pairs = math.fsum(float(np.square(rows - row).sum()) for row in rows) / (2 * n * n)
    return mean_norm, pairs, math.fsum(np.square(rows).ravel()) / n


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e4])
def test_moments_agree_with_exact_sums_and_all_pairs(tokens, width, offset):
    hidden = normal(tokens, width) + offset
    m, v, q = by_exact_sums(hidden)
    assert drift_norm(hidden).item() == pytest.approx(math.sqrt(m), rel=1e-12)
    assert variance(hidden).item() == pytest.approx(v, rel=1e-11, abs=1e-20)
    assert mean_square_norm(hidden).item() == pytest.approx(q, rel=1e-12)


def test_variance_far_from_the_origin_where_float32_loses_it():
    hidden = (1e4 + normal(600, 64)).float()
    # Q - M in float32: both are 6.4e9, whose spacing is 512; the variance is about 64.
    naive = hidden.square().sum(dim=1).mean() - hidden.mean(dim=0).square().sum()
    want = by_exact_sums(hidden)[1]
    assert abs(naive - want) > 0.5 * want
    assert variance(hidden).item() == pytest.approx(want, rel=1e-10)
