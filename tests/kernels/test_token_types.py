import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import PlainDecoder
from samples import few_examples, generator, normal

from geomon.kernels.moments import drift_norm, mean_square_norm, variance
from geomon.kernels.token_types import token_types


def within_variance(hidden, token_ids):
    return token_types(hidden, token_ids).within_variance


def between_variance(hidden, token_ids):
    return variance(hidden) - within_variance(hidden, token_ids)


def norm_variance_slope(hidden, token_ids, smallest=10, largest=100_000):
    return token_types(hidden, token_ids).norm_variance_slope(smallest, largest)


KERNELS = [within_variance, norm_variance_slope]

cases = st.tuples(st.integers(4, 60), st.integers(1, 9), st.integers(1, 8), st.integers(0, 10**6))


def random_ids(tokens, types, seed=0):
    return torch.randint(types, (tokens,), generator=generator(seed)) * 7 - 3


def zipf(tokens, types, seed):
    share = 1 / np.arange(1, types + 1)
    return torch.from_numpy(
        np.random.RandomState(seed).choice(types, size=tokens, p=share / share.sum())
    )


def by_loop(hidden, token_ids):
    """n_t, M_t and V_t (with 1/n_t) of each type, one after the other."""
    rows, ids = hidden.double().numpy(), token_ids.numpy()
    parts = [rows[ids == t] for t in np.unique(ids)]
    count = np.array([len(part) for part in parts])
    norm = np.array([np.square(part.mean(axis=0)).sum() for part in parts])
    spread = np.array([np.square(part - part.mean(axis=0)).sum() / len(part) for part in parts])
    return count, norm, spread


@pytest.mark.parametrize(("tokens", "width", "types"), [(500, 8, 3), (700, 30, 300), (9, 2, 8)])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_variances_agree_with_a_loop_over_types(tokens, width, types, offset):
    hidden, ids = normal(tokens, width) + offset, random_ids(tokens, types)
    hidden = hidden + 3 * normal(1000, width, seed=2)[ids % 1000]
    count, _, spread = by_loop(hidden, ids)
    plain = (count * spread).sum() / tokens
    want = plain / (1 - len(count) / tokens)
    assert within_variance(hidden, ids).item() == pytest.approx(want, rel=1e-10)
    total = variance(hidden).item()
    assert between_variance(hidden, ids).item() == pytest.approx(total - want, rel=1e-9)


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


@given(cases, st.sampled_from([0.0, 1.0, 1e3]))
@few_examples
def test_the_parts_add_up(case, offset):
    tokens, width, types, seed = case
    hidden, ids = normal(tokens, width, seed=seed) + offset, random_ids(tokens, types, seed)
    if len(ids.unique()) == tokens:
        return
    within, between = within_variance(hidden, ids), between_variance(hidden, ids)
    torch.testing.assert_close(within + between, variance(hidden), rtol=1e-9, atol=0)
    total = drift_norm(hidden).square() + variance(hidden)
    torch.testing.assert_close(total, mean_square_norm(hidden), rtol=1e-9, atol=0)


def test_one_type_is_all_within_and_two_constant_types_all_between():
    hidden = normal(50, 6)
    one = torch.zeros(50, dtype=torch.long)
    unbiased = hidden.var(dim=0, correction=1).sum()
    torch.testing.assert_close(within_variance(hidden, one), unbiased)
    torch.testing.assert_close(between_variance(hidden, one), variance(hidden) - unbiased)
    two = torch.arange(50) % 2
    torch.testing.assert_close(between_variance(hidden[two], two), variance(hidden[two]))
    assert within_variance(hidden[two], two).item() == 0


def test_within_variance_at_offset_1e10_where_moments_of_types_cancel():
    near, ids = (normal(450, 24) * 1024).round() / 1024, random_ids(450, 30)
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


@pytest.mark.parametrize("smallest", [2, 10])
def test_slope_agrees_with_numpys_fit(smallest):
    ids = zipf(3000, 400, 1)
    hidden = normal(3000, 10) + 2 * normal(400, 10, seed=3)[ids] + 1
    count, norm, spread = by_loop(hidden, ids)
    chosen = count >= smallest
    count, norm, spread = count[chosen], norm[chosen], spread[chosen]
    v = spread * count / (count - 1)
    m = norm + spread - v  # Q_t = M_t + V_t is kept
    got = norm_variance_slope(hidden, ids, smallest=smallest)
    assert got.slope.item() == pytest.approx(np.polyfit(m, v, 1)[0], rel=1e-8)
    assert got.r_squared.item() == pytest.approx(np.corrcoef(m, v)[0, 1] ** 2, rel=1e-8)
    assert got.types.item() == chosen.sum()
    assert got.coverage.item() == pytest.approx(count.sum() / 3000)


def test_slope_without_enough_types_or_without_spread_is_nan():
    ids = torch.arange(40) % 2
    fit = norm_variance_slope(normal(40, 3), ids)
    assert fit.slope.isnan()
    assert fit.r_squared.isnan()
    assert (fit.types.item(), fit.coverage.item()) == (2, 1)
    none = norm_variance_slope(normal(40, 3), torch.arange(40))
    assert none.slope.isnan()
    assert (none.types.item(), none.coverage.item()) == (0, 0)
    assert norm_variance_slope(torch.zeros(40, 3), torch.arange(40) % 4).slope.isnan()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ids", [torch.zeros(3).long(), torch.zeros(4, 1).long(), torch.zeros(4)])
def test_clusters_name_the_token_ids_they_cannot_use(kernel, ids):
    with pytest.raises(ValueError, match="a token id for each of 4 rows") as caught:
        kernel(torch.ones(4, 2), ids)
    assert f"{ids.dtype} {list(ids.shape)}" in str(caught.value)


@pytest.mark.parametrize(("smallest", "largest"), [(1, 10), (0, 10), (11, 10)])
def test_slope_refuses_limits_without_a_variance(smallest, largest):
    with pytest.raises(ValueError, match="2 <= smallest <= largest"):
        norm_variance_slope(torch.ones(4, 2), torch.zeros(4).long(), smallest, largest)


# -- the authors' own scripts (github.com/ymgw55/Norm-and-Variance, src/): their formulas anew --


def states_of_a_model(sequences=40, length=32):
    """Hidden states of a small decoder on tokens of Zipf's law, after each block."""
    torch.manual_seed(0)
    model = PlainDecoder(width=24, length=length)
    ids = zipf(sequences * length, 50, seed=4).view(sequences, length)
    with torch.no_grad():
        x = model.tokens(ids) + model.places(torch.arange(length))
        layers = [x, *(x := block(x) for block in model.blocks)]
    return [layer.flatten(0, 1) for layer in layers], ids.flatten()


def their_statistics(hidden, token_ids):
    """n_t, Q_t, M_t and V_t of each type, brought up to date token by token."""
    kept = {}
    for x, token in zip(hidden.double().numpy(), token_ids.tolist(), strict=True):
        count, mean, square = kept.get(token, (0, np.zeros_like(x), 0.0))
        mean = mean + (x - mean) / (count + 1)
        kept[token] = (count + 1, mean, square + ((x @ x) - square) / (count + 1))
    count, mean, square = (np.array(part) for part in zip(*kept.values(), strict=True))
    norm = np.square(mean).sum(axis=1)
    return count, square, norm, square - norm


def test_the_authors_figures_come_out_of_the_states_of_a_model():
    layers, ids = states_of_a_model()
    for hidden in layers:
        count, square, norm, spread = their_statistics(hidden, ids)
        chosen = (np.log10(count) >= 1) & (np.log10(count) <= 5)
        assert 3 < chosen.sum() < len(count)
        # Figure 4: coefficient of variation of Q_t, slope of V_t on M_t and its R^2.
        q, m, v = square[chosen], norm[chosen], spread[chosen]
        found = token_types(hidden, ids).norm_variance_slope(corrected=False)
        assert found.q_variation.item() == pytest.approx(q.std() / q.mean(), rel=1e-6)
        assert found.slope.item() == pytest.approx(np.polyfit(m, v, 1)[0], rel=1e-5)
        assert found.r_squared.item() == pytest.approx(np.corrcoef(m, v)[0, 1] ** 2, rel=1e-5)


@given(cases, st.sampled_from([0.0, 1e6]))
@few_examples
def test_without_a_group_the_moments_of_types_are_those_of_the_other_rows(case, offset):
    tokens, width, types, seed = case
    hidden = (normal(tokens, width, seed=seed) * 1024).round() / 1024 + offset
    ids = random_ids(tokens, types, seed)
    group = torch.randint(3, (tokens,), generator=generator(seed))
    found = token_types(hidden, ids, group)
    whole = token_types(hidden, ids)
    for name in ("rows", "m", "scatter"):
        torch.testing.assert_close(getattr(found, name), getattr(whole, name), rtol=1e-12, atol=0)
    for number in group.unique().tolist():
        stay = group != number
        if stay.any():
            left, want = found.without(number), token_types(hidden[stay], ids[stay])
            # Types that have one row left, or equal ones, have no scatter but rounding.
            least = 1e-9 * whole.scatter.max().item()
            assert torch.equal(left.rows, want.rows)
            torch.testing.assert_close(left.m, want.m, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(left.scatter, want.scatter, rtol=1e-9, atol=least)


def test_moments_of_types_that_are_not_known_by_group_say_so():
    with pytest.raises(ValueError, match="give groups"):
        token_types(normal(9, 2), random_ids(9, 3)).without(0)
