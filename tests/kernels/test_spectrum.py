import pytest
import torch

from support.kernels import (
    effective_rank,
    power_law,
    principal_axes,
    spectrum,
)
from support.samples import normal


def grouped(tokens, groups=8):
    return torch.arange(tokens) * groups // tokens


def smooth(tokens, width, seed=0):
    """Rows of a decaying spectrum whose groups are shifted a little, as sequences are."""
    own = 0.3 * normal(8, width, seed=seed + 1)[grouped(tokens)]
    return (normal(tokens, width, seed=seed) + own) * torch.arange(1, width + 1) ** -0.5


@pytest.mark.parametrize(
    ("tokens", "width", "close"),
    [
        (500, 64, 1e-9), (64, 64, 1e-9), (64, 500, 1e-9), (1040, 300, 1e-9), (1200, 1100, 1e-5),
        (1100, 1200, 1e-5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_axes_have_the_eigenvalues_of_the_spectrum_and_their_groups_sum_to_them(
    tokens, width, close, offset
):
    hidden, group = (smooth(tokens, width) * 1024).round() / 1024 + offset, grouped(tokens)
    axes, want = principal_axes(hidden, group, 8), spectrum(hidden)
    largest = want[0].item()
    torch.testing.assert_close(axes.eigenvalues, want, rtol=close, atol=close * largest)
    assert (axes.eigenvalues.diff() <= 0).all()
    assert torch.equal(axes.counts, group.bincount().double())
    # Coordinates are computed in float32, or in eigenvectors of float32.
    whole = axes.squares.sum(dim=0) / tokens
    torch.testing.assert_close(whole, axes.eigenvalues, rtol=1e-5, atol=1e-6 * largest)
    trace = (hidden - hidden.mean(dim=0)).square().sum(dim=1)
    by_group = group.bincount(trace)
    torch.testing.assert_close(axes.squares.sum(dim=1), by_group, rtol=1e-5, atol=0)


def test_directions_without_variance_are_no_part_of_the_law():
    """A norm takes one direction away, few rows take many: rounding there is no tail."""
    rows = normal(300, 64)
    turned = torch.cat([rows, torch.zeros(300, 90)], dim=1)
    turned = turned @ torch.linalg.qr(normal(154, 154, seed=5)).Q
    torch.testing.assert_close(power_law(spectrum(turned)), power_law(spectrum(rows)))


def test_eigenvalues_may_come_in_any_order_and_below_0_by_rounding():
    values = 3 * torch.arange(1, 129, dtype=torch.float64) ** -1.5
    other = torch.cat([torch.tensor([-1e-20]).double(), values.flip(0)])
    assert [*map(float, power_law(other))] == pytest.approx([1.5, 1.0])
    assert effective_rank(other).item() == pytest.approx(effective_rank(values).item())
