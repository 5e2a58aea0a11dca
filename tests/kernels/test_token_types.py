import numpy as np
import pytest
import torch
from samples import normal, zipf

from geomon.kernels.moments import variance
from geomon.kernels.token_types import token_types


def within_variance(hidden, token_ids):
    return token_types(hidden, token_ids).within_variance


def between_variance(hidden, token_ids):
    return variance(hidden) - within_variance(hidden, token_ids)


def by_loop(hidden, token_ids):
    """n_t, M_t and V_t (with 1/n_t) of each type, one after the other."""
    rows, ids = hidden.double().numpy(), token_ids.numpy()
    parts = [rows[ids == t] for t in np.unique(ids)]
    count = np.array([len(part) for part in parts])
    norm = np.array([np.square(part.mean(axis=0)).sum() for part in parts])
    spread = np.array([np.square(part - part.mean(axis=0)).sum() / len(part) for part in parts])
    return count, norm, spread


@pytest.mark.parametrize(("tokens", "width", "types"), [(900, 8, 20), (3000, 10, 400), (9, 2, 8)])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_variances_and_slope_agree_with_a_loop_over_types(tokens, width, types, offset):
    ids = zipf(tokens, types, seed=1)
    hidden = normal(tokens, width) + 3 * normal(types, width, seed=2)[ids] + offset
    count, norm, spread = by_loop(hidden, ids)
    want = (count * spread).sum() / (tokens - len(count))
    assert within_variance(hidden, ids).item() == pytest.approx(want, rel=1e-10)
    chosen = (count >= 10) & (count <= 100_000)
    n, m, v = count[chosen], norm[chosen], spread[chosen]
    # V_t with 1/(n_t - 1), and Q_t = M_t + V_t kept.
    unbiased = v * n / (n - 1)
    own = m + v - unbiased
    fit = token_types(hidden, ids).norm_variance_slope()
    assert fit.types.item() == chosen.sum()
    assert fit.coverage.item() == pytest.approx(n.sum() / tokens)
    if chosen.sum() < 3:
        assert fit.slope.isnan()
        assert fit.r_squared.isnan()
        return
    assert fit.slope.item() == pytest.approx(np.polyfit(own, unbiased, 1)[0], rel=1e-7)
    assert fit.r_squared.item() == pytest.approx(np.corrcoef(own, unbiased)[0, 1] ** 2, rel=1e-7)
    assert fit.q_variation.item() == pytest.approx((m + v).std() / (m + v).mean(), rel=1e-7)


def test_a_type_in_a_hundred_thousand_rows_is_in_the_fit_and_one_in_more_is_not():
    ids = torch.arange(4).repeat_interleave(torch.tensor([9, 10, 100_000, 100_001]))
    fit = token_types(normal(len(ids), 1), ids).norm_variance_slope()
    assert (fit.types.item(), fit.coverage.item()) == (2, pytest.approx(100_010 / len(ids)))
    assert token_types(torch.zeros(40, 3), torch.arange(40) % 4).norm_variance_slope().slope.isnan()


def test_within_variance_of_a_text_like_sample_is_that_of_the_population():
    # V_W = 32: unit variance in 32 columns. 40 % of the rows only serve to fit their type's mean.
    got, plain, types = [], [], []
    for seed in range(20):
        ids = zipf(2048, 5000, seed)
        hidden = normal(2048, 32, seed=seed) + 2 * normal(5000, 32, seed=100 + seed)[ids]
        count, _, spread = by_loop(hidden, ids)
        got.append(within_variance(hidden, ids).item())
        plain.append((count * spread).sum() / 2048)
        types.append(len(count))
    assert np.mean(types) == pytest.approx(811, rel=0.05)
    assert np.mean(plain) == pytest.approx(19.3, abs=0.7)
    assert np.mean(got) == pytest.approx(32, rel=0.003)
    assert got == pytest.approx([32] * 20, rel=0.03)


def test_within_variance_at_offset_1e10_where_moments_of_types_cancel():
    near, ids = (normal(450, 24) * 1024).round() / 1024, torch.arange(450) % 30
    far = near + 1e10
    naive = sum(
        part.square().sum() - len(part) * part.mean(dim=0).square().sum()
        for part in (far[ids == t] for t in ids.unique())
    ) / (450 - len(ids.unique()))
    want = within_variance(near, ids)
    assert abs(naive - want) > want
    torch.testing.assert_close(within_variance(far, ids), want, rtol=1e-9, atol=0)
    torch.testing.assert_close(
        between_variance(far, ids), between_variance(near, ids), rtol=1e-7, atol=0
    )


# -- the authors' own scripts (github.com/ymgw55/Norm-and-Variance, src/): their formulas anew --


def test_moments_of_types_that_are_not_known_by_group_say_so():
    with pytest.raises(ValueError, match="give groups"):
        token_types(normal(9, 2), torch.arange(9) % 3).without(0)


@pytest.mark.parametrize("ids", [torch.zeros(3).long(), torch.zeros(4, 1).long(), torch.zeros(4)])
def test_token_ids_that_do_not_fit_the_rows_are_named(ids):
    with pytest.raises(ValueError, match="a token id for each of 4 rows") as caught:
        token_types(torch.ones(4, 2), ids)
    assert f"{ids.dtype} {list(ids.shape)}" in str(caught.value)
