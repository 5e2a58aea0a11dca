import numpy as np
import pytest
import torch
from samples import generator, normal

from geomon.kernels.massive import ordinary_rows, share_beyond
from geomon.kernels.moments import squares_about_mean
from geomon.kernels.spectrum import anisotropy, spectrum


def sink_share(hidden):
    return share_beyond(squares_about_mean(hidden), ordinary_rows(hidden))


def with_massive_rows(tokens=2032, width=768, massive=16, norm=1000.0, seed=0):
    """Rows of norm sqrt(width) and, scattered among them, `massive` copies of one massive row."""
    direction = normal(width, seed=seed + 1)
    copies = (norm * direction / direction.norm()).expand(massive, -1)
    order = torch.randperm(tokens + massive, generator=generator(seed))
    hidden = torch.cat([normal(tokens, width, seed=seed), copies])[order]
    return hidden, order < tokens


def test_sixteen_massive_rows_among_two_thousand_are_found():
    hidden, ordinary = with_massive_rows()
    assert torch.equal(ordinary_rows(hidden), ordinary)
    assert anisotropy(spectrum(hidden)).item() == pytest.approx(0.911, abs=1e-3)
    assert anisotropy(spectrum(hidden[ordinary])).item() == pytest.approx(0.0034, abs=1e-4)
    rows = hidden.numpy()
    squares = ((rows - rows.mean(axis=0)) ** 2).sum(axis=1)
    want = squares[~ordinary.numpy()].sum() / squares.sum()
    assert sink_share(hidden).item() == pytest.approx(want, rel=1e-10)
    assert want > 0.9


@pytest.mark.parametrize(("tokens", "width"), [(4096, 64), (2048, 768), (300, 8), (4096, 2)])
@pytest.mark.parametrize("offset", [0.0, 50.0])
@pytest.mark.parametrize("name", ["gaussian", "uniform", "student", "anisotropic"])
def test_nothing_is_massive_in_ordinary_distributions(name, tokens, width, offset):
    random = np.random.default_rng(7)
    if name == "student" and width < 8:
        pytest.skip("Student's t(5) in one or two columns does have rows ten medians away")
    sample = {
        "gaussian": lambda: random.standard_normal((tokens, width)),
        "uniform": lambda: random.uniform(-1, 1, (tokens, width)),
        "student": lambda: random.standard_t(5, (tokens, width)),
        "anisotropic": lambda: random.standard_normal((tokens, width)) / np.arange(1, width + 1),
    }[name]
    hidden = torch.from_numpy(sample()) + offset
    assert ordinary_rows(hidden).all()
    assert sink_share(hidden).item() == 0


@pytest.mark.parametrize(("ratio", "found"), [(9.9, 0), (10.1, 1)])
def test_the_boundary_is_the_factor_times_the_median_distance(ratio, found):
    # 20 rows on either side at distance 1; the median is 0 and the median distance 1.
    hidden = torch.tensor([-1.0, 1.0] * 20 + [0.0] * 9 + [ratio])[:, None]
    assert (~ordinary_rows(hidden)).sum() == found


def test_without_a_scale_nothing_is_massive():
    hidden = torch.zeros(100, 3)
    hidden[:3] = 1000.0
    assert ordinary_rows(hidden).all()
    assert sink_share(hidden).item() == 0


def test_as_many_as_one_row_in_twenty_can_be_massive():
    random = np.random.default_rng(12)
    rows = random.standard_normal((1000, 16))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    for count, found in ((49, 49), (50, 50), (52, 0)):
        hidden = torch.from_numpy(rows).clone()
        hidden[:count] *= 100
        assert (~ordinary_rows(hidden)).sum() == found
