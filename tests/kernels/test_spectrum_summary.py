import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.kernels import spectrum as whole
from geomon.kernels import spectrum_summary as module
from geomon.kernels.spectrum_summary import summarise_spectrum

VALUES = {
    "anisotropy": whole.anisotropy,
    "effective_rank": whole.effective_rank,
    "participation_ratio": whole.participation_ratio,
}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def rows_with(lambdas, tokens, seed=0):
    """Rows whose centred covariance has exactly these eigenvalues, along random directions."""
    start = normal(tokens, len(lambdas), seed=seed)
    directions = torch.linalg.qr(start - start.mean(dim=0)).Q
    turned = torch.linalg.qr(normal(len(lambdas), len(lambdas), seed=seed + 1)).Q
    return (directions * (tokens * torch.as_tensor(lambdas).double()).sqrt()) @ turned


@pytest.fixture
def few(monkeypatch):
    """A space of 128 vectors for sides of a few hundred: much is left to chance."""
    monkeypatch.setattr(module, "WHOLE_SIDE", 200)
    monkeypatch.setattr(module, "_VECTORS", 16)
    monkeypatch.setattr(module, "_BLOCKS", 8)


def assert_near(hidden, *, errors=2.0, at_most=0.05):
    """Within so many stated errors (of 95 % intervals), which are small shares of the values."""
    summary, eigenvalues = summarise_spectrum(hidden), whole.spectrum(hidden)
    assert not summary.is_whole
    for name, function in VALUES.items():
        estimate, want = getattr(summary, name), function(eigenvalues).item()
        assert 0 < estimate.error.item() <= at_most * want, name
        assert abs(estimate.value.item() - want) <= errors * estimate.error.item(), name


rank = torch.arange(1, 401).double()
SPECTRA = {
    "flat": torch.ones(400).double(),
    "noise": whole.spectrum(normal(800, 400)),
    "square noise": whole.spectrum(normal(401, 400)),
    "slow decay": rank**-0.5,
    "decay": rank**-1.0,
    "fast decay": rank**-2.0,
    "many decades": torch.exp(-rank / 12),
    "one spike": torch.cat([torch.tensor([1e5]).double(), whole.spectrum(normal(800, 399))]),
    "spikes": torch.cat([torch.linspace(300, 40, 30).double(), whole.spectrum(normal(800, 370))]),
    "few directions": torch.cat([rank[:5], torch.zeros(395).double()]),
    "a hundred directions": torch.cat([rank[:100], torch.zeros(300).double()]),
    "three levels": torch.tensor([100.0] * 10 + [3.0] * 150 + [0.5] * 240).double(),
    "equal at the top": torch.cat([torch.full((40,), 30.0).double(), rank[:360] ** -0.5]),
    "nearly equal at the top": torch.cat([1 + 1e-3 * normal(60).abs(), 0.3 * rank[:340] ** -0.5]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("offset", [0, 300])
def test_values_are_within_their_stated_error_of_all_eigenvalues(name, offset, few):
    lambdas = SPECTRA[name].sort(descending=True).values
    assert_near((rows_with(lambdas, 900) + offset * normal(400, seed=9)).float())


@settings(deadline=None, derandomize=True, max_examples=30)
@given(
    st.integers(0, 10**6), st.integers(201, 420), st.integers(201, 900), st.floats(0, 2),
    st.sampled_from([torch.float32, torch.float64]), st.integers(0, 6),
)  # fmt: skip
def test_values_of_any_rows_are_within_their_stated_error(
    seed, width, tokens, decay, dtype, massive
):
    hidden = normal(tokens, width, seed=seed) * torch.arange(1.0, width + 1) ** -decay
    hidden = hidden + 10 * normal(width, seed=seed + 1)
    hidden[:massive] *= 100
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WHOLE_SIDE", 200), ("_VECTORS", 16), ("_BLOCKS", 8)):
            patch.setattr(module, name, value)
        assert_near(hidden.to(dtype))


def test_an_error_covers_as_often_as_it_says(few):
    """With the starting vectors at rest the rows are turned: as good as other starting vectors."""
    lambdas = torch.arange(1, 301).double() ** -1.0
    found = [summarise_spectrum(rows_with(lambdas, 302, seed=2 * seed)) for seed in range(40)]
    for name in ("effective_rank", "participation_ratio"):  # that of the anisotropy is a bound
        want = VALUES[name](lambdas).item()
        estimates = [getattr(summary, name) for summary in found]
        errors = [abs(value.item() - want) / error.item() for value, error in estimates]
        assert sum(error <= 1 for error in errors) >= 35, (name, errors)
        assert max(errors) > 0.4, name  # an interval that is far too wide says nothing


def test_the_error_of_the_entropy_holds_what_a_coarse_quadrature_adds(monkeypatch):
    """Three blocks and many decades: Gauss quadrature alone is nearly two intervals too high."""
    monkeypatch.setattr(module, "WHOLE_SIDE", 200)
    monkeypatch.setattr(module, "_BLOCKS", 3)
    lambdas = torch.exp(-torch.arange(1, 401).double() / 60)
    want = whole.effective_rank(lambdas).item()
    inside = 0
    for seed in range(8):
        rows = rows_with(lambdas, 900, seed=2 * seed)
        value, error = summarise_spectrum(rows).effective_rank
        inside += abs(value.item() - want) <= error.item()
    assert inside >= 7


def test_at_full_size_the_values_are_close():
    hidden = normal(1300, 1100) * torch.arange(1, 1101) ** -0.5
    assert_near(hidden.float(), at_most=0.01)


@pytest.mark.parametrize("shape", [(300, 40), (40, 300), (1, 1), (1500, 1024)])
def test_narrow_rows_have_all_eigenvalues_and_the_values_of_them_to_the_last_bit(shape):
    hidden = normal(*shape).float()
    summary, eigenvalues = summarise_spectrum(hidden), whole.spectrum(hidden)
    assert summary.is_whole
    assert torch.equal(summary.eigenvalues, eigenvalues)
    for name, function in VALUES.items():
        estimate = getattr(summary, name)
        assert estimate.error is None
        exact = {"rtol": 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(estimate.value, function(eigenvalues), **exact)
    torch.testing.assert_close(
        (summary.alpha.value, summary.r_squared), tuple(whole.power_law(eigenvalues)), **exact
    )


def test_wide_rows_need_neither_all_eigenvalues_nor_a_gram_matrix(monkeypatch):
    monkeypatch.setattr(module.kernels, "spectrum", pytest.fail)
    solver, sides = torch.linalg.eigh, []

    def spy(matrix):
        sides.append(len(matrix))
        return solver(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", spy)
    summarise_spectrum(normal(1100, 1030).float())
    assert max(sides) <= 320


@pytest.mark.parametrize("name", SPECTRA)
def test_the_largest_eigenvalues_make_the_power_law_that_all_make(name, monkeypatch):
    monkeypatch.setattr(module, "WHOLE_SIDE", 399)
    monkeypatch.setattr(module, "_BLOCKS", 8)
    lambdas = SPECTRA[name].sort(descending=True).values
    hidden = rows_with(lambdas, 900).float()
    summary = summarise_spectrum(hidden)
    found = summary.eigenvalues
    assert len(found) == 256
    assert (found >= 0).all()
    assert (found.diff() <= 0).all()
    want, got = whole.power_law(whole.spectrum(hidden)).alpha, summary.alpha
    torch.testing.assert_close(got.value, whole.power_law(found).alpha, equal_nan=True)
    assert got.value.isnan() == want.isnan()
    if not want.isnan():
        assert abs(got.value.item() - want.item()) <= 2 * got.error.item()
    if "equal at the top" not in name:  # it is not known at which rank they end
        assert not got.error.item() > 0.03
    assert found[0].item() == pytest.approx(lambdas[0].item(), rel=5e-3)


def test_eigenvalues_that_are_nothing_are_0(few):
    found = summarise_spectrum(rows_with(SPECTRA["few directions"], 900).float()).eigenvalues
    torch.testing.assert_close(found[:5], torch.arange(5, 0, -1).double(), rtol=1e-5, atol=0)
    assert (found[5:] == 0).all()


@pytest.mark.parametrize("scale", [2.0**-300, 2.0**-20, 2.0**20, 2.0**300])
def test_the_scale_of_the_rows_changes_the_eigenvalues_alone(scale, few):
    hidden = normal(500, 260) * torch.arange(1, 261) ** -1.0
    one, other = summarise_spectrum(hidden), summarise_spectrum(scale * hidden)
    assert torch.equal(scale**2 * one.eigenvalues, other.eigenvalues)
    for name in VALUES:
        assert torch.equal(torch.stack(getattr(one, name)), torch.stack(getattr(other, name)))


def test_far_from_the_origin_nothing_changes(few):
    near = (normal(500, 260) * 1024).round() / 1024
    one, other = summarise_spectrum(near), summarise_spectrum(near + 1e12)
    for name in VALUES:
        torch.testing.assert_close(
            getattr(other, name).value, getattr(one, name).value, rtol=1e-5, atol=0
        )


def test_few_tokens_and_few_columns_are_the_same_question(few):
    """Rows and columns of a doubly centred matrix have the same singular values."""
    hidden = normal(260, 700) * torch.arange(1, 701) ** -0.7
    hidden = hidden - hidden.mean(dim=0)
    hidden = hidden - hidden.mean(dim=1, keepdim=True)
    for rows in (hidden, hidden.T):
        assert_near(rows)


def test_summaries_repeat_and_touch_nothing(few):
    hidden, state = normal(400, 300).float(), torch.get_rng_state()
    before = hidden.clone()
    one, other = summarise_spectrum(hidden), summarise_spectrum(hidden)
    assert torch.equal(one.eigenvalues, other.eigenvalues)
    assert all(getattr(one, name) == getattr(other, name) for name in VALUES)
    assert torch.equal(hidden, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_few_bits_are_read_as_they_are(dtype, few):
    assert_near((100 * normal(500, 260)).to(dtype))


def test_products_of_shorter_numbers_are_not_used(few):
    hidden = (normal(900, 300) * torch.arange(1, 301) ** -0.5).float()
    want = summarise_spectrum(hidden)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        got = summarise_spectrum(hidden)
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(got.eigenvalues[:20], want.eigenvalues[:20], rtol=2e-6, atol=0)
    assert not torch.equal(got.eigenvalues, want.eigenvalues)  # float64


def test_equal_rows_have_no_directions(few):
    summary = summarise_spectrum(normal(1, 300).repeat(400, 1))
    assert all(getattr(summary, name).value.isnan() for name in VALUES)
    assert (summary.eigenvalues == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_end_as_in_the_whole_spectrum(bad, few):
    hidden = normal(400, 300)
    hidden[3, 1] = bad

    def outcome(function):
        try:
            return bool(function(hidden).isnan().any())
        except torch.linalg.LinAlgError:
            return True

    assert outcome(whole.spectrum)
    assert outcome(lambda rows: summarise_spectrum(rows).anisotropy.value)


@pytest.mark.parametrize("hidden", [torch.ones(4), torch.ones(0, 3), torch.ones(3, 2).long()])
def test_what_is_no_matrix_of_rows_is_refused(hidden):
    with pytest.raises(ValueError, match="expected"):
        summarise_spectrum(hidden)
