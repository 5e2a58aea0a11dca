import pytest
import torch
from mathematics import (
    anisotropy,
    effective_rank,
    participation_ratio,
    power_law,
    principal_axes,
    spectrum,
)
from samples import normal


def grouped(tokens, groups=8):
    return torch.arange(tokens) * groups // tokens


def smooth(tokens, width, seed=0):
    """Rows of a decaying spectrum whose groups are shifted a little, as sequences are."""
    own = 0.3 * normal(8, width, seed=seed + 1)[grouped(tokens)]
    return (normal(tokens, width, seed=seed) + own) * torch.arange(1, width + 1) ** -0.5


@pytest.mark.parametrize(
    ("tokens", "width", "close"),
    [
        (500, 64, 1e-9),
        (64, 64, 1e-9),
        (64, 500, 1e-9),
        (1040, 300, 1e-9),
        (1200, 1100, 1e-5),
        (1100, 1200, 1e-5),
    ],
)
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
    whole = axes.squares.sum(dim=0) / tokens
    # Coordinates are computed in float32, or in eigenvectors of float32.
    torch.testing.assert_close(whole, axes.eigenvalues, rtol=1e-5, atol=1e-6 * largest)
    trace = (hidden - hidden.mean(dim=0)).square().sum(dim=1)
    by_group = torch.stack([trace[group == number].sum() for number in range(8)])
    torch.testing.assert_close(axes.squares.sum(dim=1), by_group, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kernel", [anisotropy, effective_rank, participation_ratio, power_law])
@pytest.mark.parametrize("lambdas", [torch.ones(0), torch.ones(2, 2), torch.ones(())])
def test_ranks_name_the_shape_they_cannot_use(kernel, lambdas):
    with pytest.raises(ValueError, match=r"expected eigenvalues \[rank\]") as caught:
        kernel(lambdas)
    assert str(list(lambdas.shape)) in str(caught.value)


def test_directions_without_variance_are_no_part_of_the_law():
    """A norm takes one direction away, few rows take many: rounding there is no tail."""
    rows = normal(300, 64)
    turned = torch.cat([rows, torch.zeros(300, 90)], dim=1)
    turned = turned @ torch.linalg.qr(normal(154, 154, seed=5)).Q
    torch.testing.assert_close(power_law(spectrum(turned)), power_law(spectrum(rows)))


def test_where_there_is_no_power_law_and_eigenvalues_in_any_order():
    values = 3 * torch.arange(1, 129, dtype=torch.float64) ** -1.5
    # Computed elsewhere they come in any order, and below 0 by rounding.
    other = torch.cat([torch.tensor([-1e-20]).double(), values.flip(0)])
    assert [*map(float, power_law(other))] == pytest.approx([1.5, 1.0])
    assert effective_rank(other).item() == pytest.approx(effective_rank(values).item())
    assert all(value.isnan() for value in power_law(torch.arange(1.0, 19)))
    assert power_law(torch.arange(1.0, 20)).alpha.isfinite()  # ranks 11 to 15
    flat = power_law(torch.ones(200))
    assert flat.alpha.item() == pytest.approx(0, abs=1e-12)
    assert power_law(torch.zeros(200)).alpha.isnan()
