import numpy as np
import pytest
import torch
from mathematics import ordinary_rows


@pytest.mark.parametrize(("tokens", "width"), [(4096, 64), (2048, 768), (4096, 8)])
@pytest.mark.parametrize("name", ["gaussian", "uniform", "student", "anisotropic"])
def test_nothing_is_massive_in_ordinary_distributions(name, tokens, width):
    random = np.random.default_rng(7)
    sample = {
        "gaussian": lambda: random.standard_normal((tokens, width)),
        "uniform": lambda: random.uniform(-1, 1, (tokens, width)),
        "student": lambda: random.standard_t(5, (tokens, width)),
        "anisotropic": lambda: random.standard_normal((tokens, width)) / np.arange(1, width + 1),
    }[name]
    assert ordinary_rows(torch.from_numpy(sample())).all()


@pytest.mark.parametrize(("ratio", "found"), [(9.9, 0), (10.1, 1)])
def test_the_boundary_is_the_factor_times_the_median_distance(ratio, found):
    # 20 rows on either side at distance 1; the median is 0 and the median distance 1.
    hidden = torch.tensor([-1.0, 1.0] * 20 + [0.0] * 9 + [ratio])[:, None]
    assert (~ordinary_rows(hidden)).sum() == found


def test_without_a_scale_nothing_is_massive():
    hidden = torch.zeros(100, 3)
    hidden[:3] = 1000.0
    assert ordinary_rows(hidden).all()


@pytest.mark.parametrize(("count", "found"), [(49, 49), (50, 50), (52, 0)])
def test_as_many_as_one_row_in_twenty_can_be_massive(count, found):
    rows = np.random.default_rng(12).standard_normal((1000, 16))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[:count] *= 100
    assert (~ordinary_rows(torch.from_numpy(rows))).sum() == found
