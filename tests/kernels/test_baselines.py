import math

import numpy as np
import pytest
import torch
from scipy import stats

from support.kernels import (
    anisotropy,
    effective_rank,
    isotropic_anisotropy,
    isotropic_cosine_quantile,
    isotropic_spectrum,
    power_law,
    spectrum,
)
from support.samples import normal


@pytest.mark.parametrize(
    ("tokens", "width", "times", "scatter"),
    [(64, 16, 100, 0.063), (1000, 10, 60, 0.023), (150, 900, 15, 0.012)],
)
def test_isotropic_anisotropy_is_as_close_to_samples_as_it_says(tokens, width, times, scatter):
    values = [anisotropy(spectrum(normal(tokens, width, seed=i))).item() for i in range(times)]
    excess = isotropic_anisotropy(tokens, width) / np.mean(values) - 1
    noise = 4 * scatter / math.sqrt(times)
    assert -noise < excess < min(tokens, width) ** (-2 / 3) + noise


@pytest.mark.parametrize("width", [2, 3, 768, 12288])
@pytest.mark.parametrize("probability", [0.01, 0.5, 0.95, 0.999])
def test_cosine_quantile_agrees_with_students_t(width, probability):
    # cos sqrt(d - 1) / sqrt(1 - cos^2) of isotropic directions is t with d - 1 degrees of freedom.
    t = stats.t.ppf(probability, width - 1)
    want = t / math.sqrt(width - 1 + t * t)
    got = isotropic_cosine_quantile(width, probability)
    assert got == pytest.approx(want, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize(
    ("tokens", "width"), [(500, 100), (100, 500), (200, 200), (1000, 20), (64, 768)]
)
def test_the_isotropic_spectrum_is_that_of_samples(tokens, width):
    samples = torch.stack([spectrum(normal(tokens, width, seed=i)) for i in range(12)])
    rank = min(tokens - 1, width)
    found = isotropic_spectrum(tokens, width)
    assert (found.diff() <= 0).all()
    assert found.sum().item() == pytest.approx(width * (tokens - 1) / tokens, rel=0.01)
    mean = samples.mean(dim=0)[:rank]
    torch.testing.assert_close(found, mean, rtol=0.02, atol=0.02 * mean[0].item())
    ranks = torch.stack([effective_rank(own) for own in samples]).mean().item()
    assert effective_rank(found).item() == pytest.approx(ranks, rel=0.01)
    if rank > 50:
        alpha = torch.stack([power_law(own).alpha for own in samples]).mean().item()
        assert power_law(found).alpha.item() == pytest.approx(alpha, rel=0.03)
