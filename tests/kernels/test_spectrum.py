import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.kernels import _blocks
from geomon.kernels.spectrum import (
    anisotropy,
    effective_rank,
    head_axes,
    principal_axes,
    spectrum,
)

SHAPES = [(2, 2), (7, 32), (32, 7), (300, 16), (500, 64), (64, 500), (1200, 48), (600, 259)]

small_shapes = st.tuples(st.integers(2, 24), st.integers(1, 12), st.integers(0, 10**6))
few_examples = settings(deadline=None, derandomize=True, max_examples=30)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dyadic(*shape, seed=0):
    # Multiples of 2^-10: adding 1e10 to them is exact in float64, so a shift changes no spread.
    return (normal(*shape, seed=seed) * 1024).round() / 1024


def rotation(width, seed=0):
    return torch.linalg.qr(normal(width, width, seed=seed + 1)).Q


def by_singular_values(hidden):
    rows = hidden.double().numpy()
    singular = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)
    return torch.from_numpy(singular**2 / len(rows))


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_spectrum_agrees_with_singular_values(tokens, width):
    hidden = normal(tokens, width) * torch.linspace(0.1, 3, width)
    got, want = spectrum(hidden), by_singular_values(hidden)
    assert got.shape == (min(tokens, width),)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13 * want[0].item())
    assert (got.diff() <= 0).all()


@pytest.mark.parametrize(("tokens", "width"), [(500, 40), (900, 130)])
def test_spectrum_agrees_with_numpys_covariance(tokens, width):
    hidden = normal(tokens, width, seed=3) + 5
    covariance = np.cov(hidden.numpy(), rowvar=False, bias=True)
    want = torch.from_numpy(np.linalg.eigvalsh(covariance)[::-1].copy())
    torch.testing.assert_close(spectrum(hidden), want, rtol=1e-10, atol=1e-12)


def test_spectrum_far_from_the_origin_where_a_float32_covariance_turns_negative():
    hidden = (10 + 0.01 * normal(1000, 256)).float()
    # E[x x'] - m m' in float32: a good part of the 256 eigenvalues comes out below 0.
    mean = hidden.mean(dim=0)
    naive = torch.linalg.eigvalsh(hidden.T @ hidden / len(hidden) - torch.outer(mean, mean))
    assert (naive < 0).sum() > 20
    got, want = spectrum(hidden), by_singular_values(hidden)
    assert got.min() > 0
    torch.testing.assert_close(got, want, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("tokens", "width"), [(450, 24), (24, 450)])
def test_spectrum_at_offset_1e10_in_float64(tokens, width):
    near, offset = dyadic(tokens, width), 1e10
    far = near + offset
    assert torch.equal(far - offset, near)
    # Uncentred second moments in float64 lose 20 digits to 1e20: the trace is off by thousands.
    mean = far.mean(dim=0)
    naive = (far.T @ far / tokens - torch.outer(mean, mean)).trace()
    assert abs(naive - near.var(dim=0, correction=0).sum()) > 1
    want = spectrum(near)
    # The rounding of the mean, 1e-6 of the spread, enters squared.
    torch.testing.assert_close(spectrum(far), want, rtol=1e-9, atol=1e-9)


def test_spectrum_of_points_on_the_axes_is_known():
    lengths = torch.tensor([5.0, 3.0, 2.0, 0.5], dtype=torch.float64)
    hidden = torch.cat([torch.diag(lengths), -torch.diag(lengths)])
    torch.testing.assert_close(spectrum(hidden), lengths.square() / 4)
    torch.testing.assert_close(anisotropy(spectrum(hidden)).item(), 25 / 38.25)


@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_spectrum_sums_to_the_variance(tokens, width):
    hidden = normal(tokens, width, seed=2) + 3
    want = hidden.var(dim=0, correction=0).sum()
    torch.testing.assert_close(spectrum(hidden).sum(), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("tokens", "width"), [(500, 100), (2000, 200), (300, 600)])
def test_anisotropy_of_an_isotropic_gaussian_is_the_edge_of_marchenko_and_pastur(tokens, width):
    got = anisotropy(spectrum(normal(tokens, width, seed=1))).item()
    # The top eigenvalue fluctuates by about tokens^(-2/3) below and around the edge.
    assert got == pytest.approx((1 + (width / tokens) ** 0.5) ** 2 / width, rel=0.04)


def test_anisotropy_is_driven_to_one_by_a_few_rows_of_massive_norm():
    quiet, direction = normal(2032, 768), normal(768, seed=1)
    massive = (1000 * direction / direction.norm()).expand(16, -1)
    assert anisotropy(spectrum(torch.cat([quiet, massive]))).item() == pytest.approx(
        0.911, abs=1e-3
    )
    assert anisotropy(spectrum(quiet)).item() == pytest.approx(0.0034, abs=1e-4)


def test_anisotropy_of_points_on_a_line_is_one():
    hidden = torch.linspace(-3, 7, 450, dtype=torch.float64)[:, None] * normal(1, 20) + 4
    assert anisotropy(spectrum(hidden)).item() == pytest.approx(1, abs=1e-12)


@given(small_shapes)
@few_examples
def test_spectrum_does_not_change_under_shift_rotation_or_order(shape):
    tokens, width, seed = shape
    hidden = dyadic(tokens, width, seed=seed)
    want = spectrum(hidden)
    close = {"rtol": 1e-9, "atol": 1e-12 * max(1.0, want[0].item())}
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(spectrum(hidden + 1024 * dyadic(width, seed=seed)), want, **close)
    torch.testing.assert_close(spectrum(hidden @ rotation(width, seed)), want, **close)
    torch.testing.assert_close(spectrum(hidden[order]), want, **close)


@given(small_shapes, st.sampled_from([2.0**-30, 0.1, 3.0, -1.0, 1e6]))
@few_examples
def test_spectrum_grows_with_the_square_of_the_scale_and_anisotropy_not_at_all(shape, scale):
    hidden = normal(*shape[:2], seed=shape[2])
    want = spectrum(hidden)
    got = spectrum(scale * hidden)
    close = {"rtol": 1e-9, "atol": 1e-12 * want[0].item()}
    torch.testing.assert_close(got / scale**2, want, **close)
    torch.testing.assert_close(anisotropy(got), anisotropy(want), rtol=1e-9, atol=0)


@given(small_shapes, st.integers(2, 4))
@few_examples
def test_spectrum_is_the_same_when_every_row_comes_several_times(shape, copies):
    hidden = normal(*shape[:2], seed=shape[2])
    want, got = spectrum(hidden), spectrum(hidden.repeat(copies, 1))
    close = {"rtol": 1e-9, "atol": 1e-12 * want[0].item()}
    torch.testing.assert_close(got[: len(want)], want, **close)
    assert (got[len(want) :] <= 1e-12 * want[0]).all()


@given(small_shapes)
@few_examples
def test_anisotropy_lies_between_one_over_the_rank_and_one(shape):
    eigenvalues = spectrum(normal(*shape[:2], seed=shape[2]))
    assert 1 / len(eigenvalues) - 1e-12 <= anisotropy(eigenvalues).item() <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "width"), [(40, 9), (9, 40)])
def test_spectrum_takes_any_floating_dtype_and_leaves_it_alone(dtype, tokens, width):
    hidden = (100 * normal(tokens, width)).to(dtype)
    before = hidden.clone()
    got = spectrum(hidden)
    assert got.dtype == anisotropy(got).dtype == torch.float64
    assert anisotropy(got.to(dtype)).dtype == torch.float64
    assert hidden.dtype == dtype
    assert torch.equal(hidden, before)
    torch.testing.assert_close(got, by_singular_values(hidden), rtol=1e-10, atol=1e-8)


def test_anisotropy_leaves_its_input_alone():
    eigenvalues = torch.tensor([3.0, 1.0])
    assert anisotropy(eigenvalues).shape == ()
    assert eigenvalues.tolist() == [3.0, 1.0]


def test_spectrum_reads_rows_in_any_memory_layout():
    hidden = normal(60, 20)
    torch.testing.assert_close(spectrum(hidden.T.contiguous().T), spectrum(hidden))
    torch.testing.assert_close(spectrum(hidden[::2, ::3]), spectrum(hidden[::2, ::3].clone()))


def test_a_constant_column_adds_a_zero():
    hidden = normal(500, 6)
    got = spectrum(torch.cat([hidden, torch.full((500, 2), 0.1, dtype=torch.float64)], dim=1))
    torch.testing.assert_close(got[:6], spectrum(hidden))
    assert (got[6:] < 1e-15).all()


def test_one_row_has_no_spread():
    eigenvalues = spectrum(normal(1, 5))
    assert eigenvalues.tolist() == [0]
    assert anisotropy(eigenvalues).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [2, 3, 7, 100, 1000])
def test_anisotropy_of_equal_rows_is_nan(dtype, tokens):
    # In float64 the mean of equal rows need not round back to the row: 1e-16 would count as spread.
    hidden = normal(1, 5).to(dtype).repeat(tokens, 1)
    assert (spectrum(hidden) == 0).all()
    assert anisotropy(spectrum(hidden)).isnan()


@pytest.mark.parametrize(
    "hidden",
    [torch.ones(4), torch.ones(2, 3, 4), torch.ones(0, 3), torch.ones(3, 0), torch.ones(())],
)
def test_spectrum_names_the_shape_it_cannot_use(hidden):
    with pytest.raises(ValueError, match="expected") as caught:
        spectrum(hidden)
    assert str(list(hidden.shape)) in str(caught.value)


def test_spectrum_refuses_integers():
    with pytest.raises(ValueError, match=r"floating-point .* torch.int64 \[3, 2\]"):
        spectrum(torch.ones(3, 2, dtype=torch.int64))


@pytest.mark.parametrize("eigenvalues", [torch.ones(0), torch.ones(2, 2), torch.ones(())])
def test_anisotropy_names_the_shape_it_cannot_use(eigenvalues):
    with pytest.raises(ValueError, match=r"expected eigenvalues \[rank\]") as caught:
        anisotropy(eigenvalues)
    assert str(list(eigenvalues.shape)) in str(caught.value)


# -- variance along the eigenvectors by group of sequences --


def grouped(tokens, groups=8):
    return torch.arange(tokens) * groups // tokens


def smooth(tokens, width, seed=0):
    """Rows of a decaying spectrum whose groups are shifted a little, as sequences are."""
    own = 0.3 * normal(8, width, seed=seed + 1)[grouped(tokens)]
    return (normal(tokens, width, seed=seed) + own) * torch.arange(1, width + 1) ** -0.5


@pytest.mark.parametrize(
    ("tokens", "width", "close"),
    [(500, 64, 1e-9), (64, 500, 1e-9), (1040, 300, 1e-9), (1200, 1100, 1e-5), (1100, 1200, 1e-5)],
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


@pytest.mark.parametrize(("tokens", "width"), [(2048, 64), (1024, 256), (512, 700)])
def test_without_a_group_axes_follow_the_spectrum_of_the_other_rows_to_first_order(tokens, width):
    hidden, group = smooth(tokens, width), grouped(tokens)
    axes = principal_axes(hidden, group, 8)
    left = [axes.without(number).sort(descending=True).values for number in range(8)]
    exact = [spectrum(hidden[group != number]) for number in range(8)]
    for got, want in zip(left, exact, strict=True):
        # The mean moves too, which is of second order: (1/8)^2 of the group's own mean.
        assert got.sum().item() == pytest.approx(want.sum().item(), rel=1 / 64)
    # Fewer rows than columns fill fewer directions without a group, which is alike for all.
    few = tokens < 2 * width
    for metric in (anisotropy, effective_rank):
        found, wanted = (torch.stack([*map(metric, each)]) for each in (left, exact))
        torch.testing.assert_close(found, wanted, rtol=0.06 if few else 0.02, atol=0)
        assert found.std().item() == pytest.approx(wanted.std().item(), rel=0.15)


def test_without_a_group_whose_rows_are_alone_on_an_axis_nothing_is_left_there():
    lengths = torch.tensor([9.0, 4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    hidden = torch.cat([torch.diag(lengths), -torch.diag(lengths)])
    group = torch.arange(5).repeat(2)
    for axes in (
        principal_axes(hidden, group, 5),
        principal_axes(torch.cat([hidden, torch.zeros(10, 30).double()], dim=1), group, 5),
    ):
        for number in range(5):
            want = torch.where(torch.arange(5) == number, 0, lengths.square() / 4)
            torch.testing.assert_close(axes.without(number)[:5], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_axes_of_heads_are_those_of_each_head_alone(offset, monkeypatch):
    monkeypatch.setattr(_blocks, "BLOCK", 10_000)
    near = torch.stack([smooth(700, 24, seed=seed) for seed in (0, 2, 4)], dim=1)
    rows = (near * 1024).round() / 1024 + offset
    group = grouped(700)[torch.randperm(700, generator=torch.Generator().manual_seed(0))]
    found = head_axes(rows, group, 8)
    assert torch.equal(found.counts, group.bincount().double())
    for head in range(3):
        want = principal_axes(rows[:, head], group, 8)
        torch.testing.assert_close(found.eigenvalues[head], want.eigenvalues, rtol=1e-9, atol=0)
        torch.testing.assert_close(found.squares[:, head], want.squares, rtol=1e-4, atol=0)
        for number in range(8):
            got = found.without(number)[head]
            torch.testing.assert_close(got, want.without(number), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(40, 9), (9, 40), (40, 2, 9)])
def test_axes_leave_their_rows_alone_and_equal_rows_have_none(dtype, shape):
    rows = (100 * normal(*shape)).to(dtype)
    before, group = rows.clone(), grouped(len(rows))
    compute = principal_axes if rows.ndim == 2 else head_axes
    assert compute(rows, group, 8).eigenvalues.dtype == torch.float64
    assert torch.equal(rows, before)
    equal = compute(rows[:1].expand_as(rows), group, 8)
    assert (equal.eigenvalues == 0).all()
    assert (equal.without(3) == 0).all()
