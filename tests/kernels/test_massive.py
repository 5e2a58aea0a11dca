import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.kernels import massive as kernel
from geomon.kernels.massive import LARGEST_SHARE, ordinary_rows, sink_share
from geomon.kernels.spectrum import anisotropy, spectrum

KERNELS = [ordinary_rows, sink_share]

few_examples = settings(deadline=None, derandomize=True, max_examples=30)
seeds = st.integers(0, 10**6)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def with_massive_rows(tokens=2032, width=768, massive=16, norm=1000.0, seed=0):
    """Rows of norm sqrt(width) and, scattered among them, `massive` copies of one massive row."""
    direction = normal(width, seed=seed + 1)
    copies = (norm * direction / direction.norm()).expand(massive, -1)
    order = torch.randperm(tokens + massive, generator=generator(seed))
    hidden = torch.cat([normal(tokens, width, seed=seed), copies])[order]
    return hidden, order < tokens


def clusters(radii, per_cluster, width, spacing, seed=0):
    centres = spacing * normal(len(radii), width, seed=seed)
    noise = normal(len(radii) * per_cluster, width, seed=seed + 1)
    scale = torch.tensor(radii, dtype=torch.float64).repeat_interleave(per_cluster)
    return centres.repeat_interleave(per_cluster, dim=0) + scale[:, None] * noise


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


@pytest.mark.parametrize("offset", [0.0, 30.0, 1e6])
def test_massive_rows_are_found_wherever_the_rows_lie(offset):
    # Norms hide them: at an offset of 1e6 every row is as long as every other.
    hidden, ordinary = with_massive_rows(tokens=500, width=64, massive=5, norm=200)
    far = hidden + offset
    assert torch.equal(ordinary_rows(far), ordinary)
    torch.testing.assert_close(sink_share(far), sink_share(hidden), rtol=1e-8, atol=0)


def test_massive_rows_do_not_hide_behind_the_mean_and_deviation_that_they_move():
    hidden, ordinary = with_massive_rows(tokens=960, width=64, massive=40, norm=1e4)
    rows = hidden.numpy()
    distance = np.linalg.norm(rows - rows.mean(axis=0), axis=1)
    # Five standard deviations above the mean distance: finds none of the 40.
    assert not (distance > distance.mean() + 5 * distance.std()).any()
    assert torch.equal(ordinary_rows(hidden), ordinary)


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


@pytest.mark.parametrize("spacing", [0.0, 1.0, 10.0])
@pytest.mark.parametrize(
    "radii",
    [[0.1, 1, 4, 9], [0.1] * 9 + [9], [0.01] * 8 + [5] * 2, [1] * 9 + [100], [1] * 9 + [10]],
)
def test_nothing_is_massive_in_clusters_of_unequal_radius(radii, spacing):
    # At spacing 1 some of the widest clusters straddle ten medians: cut, they would lose a part.
    assert ordinary_rows(clusters(radii, 100, 48, spacing)).all()


@pytest.mark.parametrize("tokens", [20, 100, 400, 1001])
def test_at_most_a_twentieth_of_the_rows_is_massive(tokens):
    most = int(LARGEST_SHARE * tokens)
    for massive, found in [(most, most), (most + 1, 0)]:
        hidden, _ = with_massive_rows(tokens=tokens - massive, width=16, massive=massive, norm=500)
        assert (~ordinary_rows(hidden)).sum() == found


@pytest.mark.parametrize(("ratio", "found"), [(9.9, 0), (10.1, 1)])
def test_the_boundary_is_the_factor_times_the_median_distance(ratio, found):
    # 20 rows on either side at distance 1; the median is 0 and the median distance 1.
    hidden = torch.tensor([-1.0, 1.0] * 20 + [0.0] * 9 + [ratio])[:, None]
    assert (~ordinary_rows(hidden)).sum() == found
    assert (~ordinary_rows(hidden, factor=ratio - 0.05)).sum() == 1


@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
def test_equal_rows_are_ordinary_and_without_variance(tokens):
    hidden = normal(1, 6).repeat(tokens, 1)
    assert ordinary_rows(hidden).all()
    assert sink_share(hidden).isnan()


def test_without_a_scale_nothing_is_massive():
    hidden = torch.zeros(100, 3)
    hidden[:3] = 1000.0
    assert ordinary_rows(hidden).all()
    assert sink_share(hidden).item() == 0


@given(seeds, st.sampled_from([2.0**-20, 0.25, -4.0, 2.0**20]), st.sampled_from([0.0, 1024.0]))
@few_examples
def test_a_shift_a_scale_or_another_order_finds_the_same_rows(seed, scale, shift):
    hidden, ordinary = with_massive_rows(tokens=97, width=6, massive=3, norm=200, seed=seed)
    hidden = (hidden * 1024).round() / 1024  # so that the shift is exact
    order = torch.randperm(len(hidden), generator=generator(seed))
    for other, want in [
        (scale * (hidden + shift), ordinary),
        (hidden[order], ordinary[order]),
    ]:
        assert torch.equal(ordinary_rows(other), want)
        torch.testing.assert_close(sink_share(other), sink_share(hidden), rtol=1e-8, atol=0)


@given(seeds)
@few_examples
def test_a_rotation_finds_the_same_rows(seed):
    hidden, ordinary = with_massive_rows(tokens=197, width=12, massive=3, norm=300, seed=seed)
    turn = torch.linalg.qr(normal(12, 12, seed=seed + 5)).Q
    assert torch.equal(ordinary_rows(hidden @ turn), ordinary)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_massive_rows_take_any_floating_dtype_and_leave_it_alone(kernel, dtype):
    # The square of 2000 overflows float16.
    hidden = with_massive_rows(tokens=200, width=16, massive=4, norm=2000)[0].to(dtype)
    before = hidden.clone()
    got = kernel(hidden)
    assert got.dtype == (torch.bool if kernel is ordinary_rows else torch.float64)
    assert torch.equal(hidden, before)
    torch.testing.assert_close(got, kernel(hidden.double()), rtol=0, atol=0)
    assert (~ordinary_rows(hidden)).sum() == 4


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "hidden", [torch.ones(4), torch.ones(2, 3, 4), torch.ones(0, 3), torch.ones(3, 0)]
)
def test_massive_rows_name_the_shape_they_cannot_use(kernel, hidden):
    with pytest.raises(ValueError, match="expected") as caught:
        kernel(hidden)
    assert str(list(hidden.shape)) in str(caught.value)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("factor", [1.0, 0.0, -3.0, math.nan])
def test_massive_rows_refuse_a_factor_that_is_none(kernel, factor):
    with pytest.raises(ValueError, match="factor"):
        kernel(torch.ones(3, 2), factor)


def test_the_limit_is_ten_times_the_median_distance():
    """Numbers written out: a test that takes the limit from the code agrees with any."""
    random = np.random.default_rng(11)
    rows = random.standard_normal((1001, 16))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)  # all at distance 1 of the centre
    for distance, massive in ((9.8, False), (10.2, True)):
        hidden = torch.from_numpy(rows).clone()
        hidden[500] *= distance
        assert bool(ordinary_rows(hidden)[500]) == (not massive), distance
        assert ordinary_rows(hidden).sum() == 1001 - massive
    assert inspect.signature(ordinary_rows).parameters["factor"].default == 10.0


def test_as_many_as_one_row_in_twenty_can_be_massive():
    random = np.random.default_rng(12)
    rows = random.standard_normal((1000, 16))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    for count, found in ((49, 49), (50, 50), (52, 0)):
        hidden = torch.from_numpy(rows).clone()
        hidden[:count] *= 100
        assert (~ordinary_rows(hidden)).sum() == found


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_centre_is_the_lower_median_of_each_column_in_its_own_digits(dtype, tokens):
    rows = (normal(tokens, 5) + 1e9 * (dtype == torch.float64)).to(dtype)
    want = rows.double().median(dim=0).values
    assert torch.equal(kernel._median(rows), want)
