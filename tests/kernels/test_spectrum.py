import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.kernels.spectrum import anisotropy, scatter, scatter_with, spectrum

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


@few_examples
@given(
    shape=small_shapes,
    others=st.integers(0, 5),
    offset=st.sampled_from([0.0, 1e10]),
    norm=st.sampled_from([1.0, 1e4, 1e9]),
)
def test_a_scatter_that_is_shared_is_that_of_all_rows_and_that_of_most(shape, others, offset, norm):
    """Taken away from that of all, the products of massive rows would leave nothing of the rest."""
    tokens, width, seed = shape
    most = dyadic(tokens, width, seed=seed) + offset
    few = (norm * dyadic(others, width, seed=seed + 1)).round() + offset
    whole, known = scatter_with(most, few)
    assert torch.equal(known, scatter(most))
    want = scatter(torch.cat([most, few]))
    trace = want.trace().item()
    torch.testing.assert_close(whole, want, rtol=0, atol=1e-12 * trace)


def test_equal_rows_beside_equal_rows_scatter_along_their_distance_alone():
    most, few = torch.full((30, 4), 0.1), torch.full((2, 4), 7.3)
    whole, known = scatter_with(most, few)
    assert (known == 0).all()
    apart = few[0].double() - most[0].double()
    torch.testing.assert_close(whole, torch.outer(apart, apart) * 60 / 32, rtol=1e-14, atol=0)
