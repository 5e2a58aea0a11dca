import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from short_products import ShortProducts

from geomon.kernels import _blocks
from geomon.kernels import half_samples as kernel
from geomon.kernels.angles import (
    cosine,
    cosine_centred,
    head_anisotropy,
    head_cosine,
    head_scatter,
    mean_rows,
    qk_cosine,
    qk_cosine_concatenated,
    qk_dot,
    sequence_cosines,
)
from geomon.kernels.dimension import (
    HalfRatios,
    gride,
    gride_differences,
    ratios_in_halves,
    twonn,
    twonn_censored,
    twonn_differences,
)
from geomon.kernels.half_samples import HalfSamples, group_sums, half_samples, margin
from geomon.kernels.moments import drift_norm, mean_square_norm, squares_about_mean, variance
from geomon.kernels.neighbours import nearest
from geomon.kernels.spectrum import (
    anisotropy,
    effective_rank,
    participation_ratio,
    scatter,
    spectrum,
)

few_examples = settings(deadline=None, derandomize=True, max_examples=25)


def rows_of_sequences(sequences, length, width, *, offset=0.0, seed=0):
    """Rows of which those of one sequence are alike, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.arange(1, width + 1, dtype=torch.float64).rsqrt()
    own = torch.randn(sequences, 1, width, generator=generator, dtype=torch.float64)
    each = torch.randn(sequences, length, width, generator=generator, dtype=torch.float64)
    order = torch.randperm(sequences * length, generator=generator)
    numbers = torch.arange(sequences).repeat_interleave(length)
    return (scale * (own + each) + offset).flatten(0, 1)[order], numbers[order]


def on_halves(function, rows, halves):
    """The reference: the estimate on the rows of one half minus that on the others."""
    members = halves.first[:, halves.group]
    return torch.stack([function(rows[one]) - function(rows[~one]) for one in members])


@pytest.mark.parametrize(
    ("sequences", "ways", "groups"), [(8, 7, 8), (15, 7, 8), (16, 15, 16), (900, 15, 16)]
)
def test_ways_are_balanced(sequences, ways, groups):
    halves = half_samples(torch.arange(sequences).repeat_interleave(3))
    assert halves.first.shape == (ways, groups)
    assert (halves.first.sum(dim=1) == groups // 2).all()
    # Two groups are in one half in one way fewer than in two: McCarthy's balance.
    together = (halves.first[:, :, None] == halves.first[:, None]).sum(dim=0)
    assert (together[~torch.eye(groups, dtype=torch.bool)] == groups // 2 - 1).all()
    sizes = halves.group.bincount(minlength=groups)
    assert sizes.max() <= 2 * sizes.min()


def test_neighbouring_sequences_come_into_one_group():
    group = half_samples(torch.arange(64)).group
    assert torch.equal(group, torch.arange(64) // 4)


@pytest.mark.parametrize("sequences", [0, 1, 7])
def test_too_few_sequences_make_no_ways(sequences):
    halves = half_samples(torch.arange(sequences).repeat_interleave(50))
    assert halves.first.shape[0] == 0
    assert math.isnan(margin([]))


def test_groups_are_filled_by_the_sequences_that_are_there():
    """Of several ranks the first split of the rows holds the sequences of the first rank alone."""
    halves = half_samples(torch.arange(16).repeat_interleave(5) + 1000)
    assert halves.group.bincount(minlength=16).tolist() == [5] * 16


def lengths_of(kind, sequences, generator):
    """Rows of each sequence: all alike, log-normal, or a tenth of them fifty times as long."""
    if kind == "equal":
        return torch.full((sequences,), 40)
    if kind == "one in ten is long":
        return torch.where(torch.rand(sequences, generator=generator) < 0.1, 1000, 20)
    return (torch.randn(sequences, generator=generator) + 3.5).exp().clamp(2, 1000).long()


@pytest.mark.parametrize(
    ("kind", "sequences", "without"),
    [("equal", 8, 0.95), ("log-normal", 12, 0.92), ("one in ten is long", 16, 0.86)],
)
def test_intervals_cover_with_sequences_of_unequal_length(kind, sequences, without):
    """The mean of rows of which those of one sequence share half of what they scatter by."""
    generator = torch.Generator().manual_seed(sequences)
    covered, plain = [], []
    for _ in range(40):
        lengths = lengths_of(kind, sequences, generator)
        halves = half_samples(torch.arange(sequences).repeat_interleave(lengths))
        # A hundred draws side by side, as if they were heads.
        own, each = torch.randn(2, sequences, 100, generator=generator, dtype=torch.float64)
        sums = 0.5 * own * lengths[:, None] + each * lengths[:, None].sqrt()
        group = kernel.halves_of_sequences(own).group
        values, counts = (
            torch.zeros(halves.first.shape[1], 100, dtype=torch.float64).index_add_(0, group, part)
            for part in (sums, lengths[:, None].double().expand(-1, 100))
        )
        differences = kernel.mean_differences(values, counts, halves)
        unit = margin([1.0] * len(differences))
        errors = (sums.sum(dim=0) / lengths.sum()).abs()
        widths = unit * differences.square().mean(dim=0).sqrt()
        covered.append((errors <= halves.widening * widths).double().mean())
        plain.append((errors <= widths).double().mean())
    assert torch.stack(covered).mean() >= 0.94
    assert torch.stack(plain).mean() == pytest.approx(without, abs=0.02)


def test_sequences_of_one_length_widen_nothing():
    for sequences in (8, 16, 64):
        numbers = torch.arange(sequences).repeat_interleave(5)
        assert half_samples(numbers).widening == pytest.approx(1)
    # Two sequences in one group and one in all others are worth 14.4 degrees of freedom.
    assert 1 < half_samples(torch.arange(17).repeat_interleave(5)).widening < 1.01


def test_one_sequence_that_has_nearly_all_rows_is_worth_one_degree_of_freedom():
    lengths = torch.tensor([10_000] + [2] * 15)
    halves = half_samples(torch.arange(16).repeat_interleave(lengths))
    # Student's 12.7 in place of 2.13; nothing but its short companions is seen to differ.
    assert halves.widening > stats.t.ppf(0.975, 1) / stats.t.ppf(0.975, 15)


def test_rows_that_do_not_count_have_no_part_in_the_lengths():
    numbers = torch.arange(16).repeat_interleave(10)
    counted = torch.arange(160) % 10 < torch.where(numbers < 2, 10, 1)
    known = half_samples(numbers[counted])
    found = half_samples(numbers, counted)
    assert found.widening == pytest.approx(known.widening)
    assert found.widening > 1.5
    assert torch.equal(found.group[counted], known.group)


@pytest.mark.parametrize("groups", [150, 50])
def test_groups_of_other_rows_are_refused(groups):
    with pytest.raises(ValueError, match=f"a group for each of 100 rows, got {groups}"):
        group_sums(torch.ones(100, 1, 3), half_samples(torch.arange(groups)))


def test_a_half_without_rows_has_no_anisotropy():
    halves = HalfSamples(torch.zeros(9, dtype=torch.int64), half_samples(torch.arange(16)).first)
    rows = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    sums = group_sums(rows[:, None], halves)
    assert kernel.anisotropy_differences(rows, squares_about_mean(rows), sums, halves).isnan().all()


def test_many_numbers_of_which_few_come_are_few_sequences():
    assert half_samples(torch.tensor([0, 50, 1000]).repeat_interleave(9)).first.shape[0] == 0


def test_the_margin_of_a_mean_is_that_of_students_interval_over_groups():
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(16, 10, generator=generator, dtype=torch.float64)
    halves = half_samples(torch.arange(16).repeat_interleave(10))
    chosen = torch.ones(1, 160, dtype=torch.bool)
    found = kernel.row_mean_differences(values.view(1, -1), chosen, halves)
    means = values.mean(dim=1).numpy()
    low, high = stats.t.interval(0.95, 15, means.mean(), stats.sem(means))
    assert margin(found[:, 0].tolist()) == pytest.approx((high - low) / 2)


def test_a_difference_that_is_not_finite_makes_no_margin():
    assert math.isnan(margin([1.0, math.inf, 2.0]))
    assert math.isnan(margin([1.0, math.nan]))
    assert margin([0.0] * 15) == 0


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences_are_those_of_the_metrics_on_the_halves(offset, dtype):
    rows, numbers = rows_of_sequences(24, 20, 12, offset=offset)
    rows, halves = rows.to(dtype), half_samples(numbers)
    sums = group_sums(rows[:, None], halves)
    moments = kernel.moments_of_halves(squares_about_mean(rows), sums, halves)
    for found, function in (
        (kernel.cosine_differences(sums, halves), cosine),
        (kernel.drift_differences(sums, halves), drift_norm),
        (torch.sub(*moments.variance.chunk(2))[:, None], variance),
        (kernel.mean_differences(sums.squares, sums.counts[:, None], halves), mean_square_norm),
    ):
        want = on_halves(function, rows, halves)
        torch.testing.assert_close(found[:, 0], want, rtol=1e-6, atol=1e-9 * (1 + offset**2))


@pytest.mark.parametrize("offset", [1e7, 1e9])
def test_variances_of_halves_far_from_the_origin_are_those_near_it(offset):
    """Numbers are multiples of 2^-18, so that the shift rounds nothing."""
    rows, numbers = rows_of_sequences(24, 20, 12)
    halves = half_samples(numbers)

    def found(rows):
        sums, squares = group_sums(rows[:, None], halves), squares_about_mean(rows)
        heads = rows.view(-1, 2, 6)
        return (
            kernel.moments_of_halves(squares, sums, halves).variance,
            kernel.anisotropy_differences(rows, squares, sums, halves),
            kernel.anisotropy_differences(
                rows, squares_about_mean(rows), sums, halves, scatter(rows)
            ),
            kernel.head_anisotropy_differences(
                kernel.scatter_by_group(heads, halves), group_sums(heads, halves), halves
            ),
        )

    near = (rows * 2**18).round() / 2**18
    for one, other in zip(found(near), found(near + offset), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_differences_of_heads():
    rows, numbers = rows_of_sequences(16, 30, 24, offset=0.3)
    query, key = rows.view(-1, 4, 6), rows.flip(1).reshape(-1, 4, 6)[:, :2]
    halves = half_samples(numbers)
    sums = [group_sums(part, halves) for part in (query, key)]
    close = {"rtol": 1e-9, "atol": 1e-12}
    found = kernel.cosine_differences(sums[0], halves)
    torch.testing.assert_close(found, on_halves(head_cosine, query, halves), **close)
    both = torch.cat([query, key], dim=1)
    for function in (qk_cosine, qk_dot, qk_cosine_concatenated):
        found = kernel.paired_mean_differences(function, *sums, halves)

        def of(part, function=function):
            return function(mean_rows(part[:, :4]), mean_rows(part[:, 4:]))

        torch.testing.assert_close(found, on_halves(of, both, halves), **close)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_anisotropy_of_halves_is_near_that_of_their_spectra(offset):
    rows, numbers = rows_of_sequences(32, 40, 24, offset=offset)
    halves = half_samples(numbers)
    sums = group_sums(rows[:, None], halves)
    found = kernel.anisotropy_differences(rows, squares_about_mean(rows), sums, halves)[:, 0]
    want = on_halves(lambda part: anisotropy(spectrum(part)), rows, halves)
    assert (found - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_anisotropy_of_halves_is_the_same_by_rows_and_by_their_scatter(offset):
    rows, numbers = rows_of_sequences(32, 40, 24, offset=offset)
    halves = half_samples(numbers)
    sums = group_sums(rows[:, None], halves)
    found = kernel.anisotropy_differences(
        rows, squares_about_mean(rows), sums, halves, scatter(rows)
    )
    want = kernel.anisotropy_differences(rows, squares_about_mean(rows), sums, halves)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-7)
    assert want.norm() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-105, -75, 66, 120])
def test_anisotropy_of_halves_is_the_same_at_every_scale(dtype, exponent):
    """In float32 squares of such numbers end; a basis of what is no number made intervals of 0."""
    rows, numbers = rows_of_sequences(16, 4, 96)
    halves = half_samples(numbers)

    def found(rows):
        sums = group_sums(rows[:, None], halves)
        return kernel.anisotropy_differences(rows, squares_about_mean(rows), sums, halves)

    want = found(rows.to(dtype))
    assert want.norm() > 0.01
    torch.testing.assert_close(found(rows.to(dtype) * 2.0**exponent), want, rtol=1e-9, atol=0)


def test_anisotropy_of_halves_is_not_made_of_shortened_factors():
    rows, numbers = rows_of_sequences(16, 40, 24)
    rows, halves = rows.float(), half_samples(numbers)
    sums = group_sums(rows[:, None], halves)
    for known in (None, scatter(rows)):
        want = kernel.anisotropy_differences(rows, squares_about_mean(rows), sums, halves, known)
        with ShortProducts():
            found = kernel.anisotropy_differences(
                rows, squares_about_mean(rows), sums, halves, known
            )
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-7)


def shares_of(rows, numbers):
    halves = half_samples(numbers)
    squares = (rows.double() - rows.double().mean(dim=0)).square().sum(dim=1)
    sums = group_sums(rows[:, None], halves)
    return kernel.shares_of_halves(rows, squares, sums, halves, scatter(rows), spectrum(rows))


OF_SHARES = [
    (effective_rank, lambda p: torch.special.entr(p).sum(dim=1).exp()),
    (participation_ratio, lambda p: 1 / p.square().sum(dim=1)),
]


@pytest.mark.parametrize("exponent", [-75, 0, 66])
@pytest.mark.parametrize("offset", [0.0, 1e4])
# Of the wider rows 64 directions are looked at.
@pytest.mark.parametrize("size", [(32, 40, 24), (160, 16, 96)])
def test_shares_of_halves_serve_for_differences_of_their_spectra(size, offset, exponent):
    rows, numbers = rows_of_sequences(*size, offset=offset)
    rows = rows * 2.0**exponent
    shares = shares_of(rows, numbers)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(30, dtype=torch.float64))
    for of_spectrum, of_shares in OF_SHARES:
        one, other = of_shares(shares).chunk(2)
        want = on_halves(
            lambda part, of=of_spectrum: of(spectrum(part)), rows, half_samples(numbers)
        )
        assert (one - other - want).norm() < 0.2 * want.norm()  # of first order


def test_shares_beyond_the_leading_directions_are_divided_as_those_of_all_rows(monkeypatch):
    rows, numbers = rows_of_sequences(32, 40, 24)
    rows = rows * torch.arange(1, 25) ** -0.7
    every = shares_of(rows, numbers)
    monkeypatch.setattr(kernel, "_SHARES", 8)
    some = shares_of(rows, numbers)
    assert some.shape == every.shape
    torch.testing.assert_close(some.sum(dim=1), torch.ones(30, dtype=torch.float64))
    for _, of_shares in OF_SHARES:
        want, found = (one - other for one, other in (of_shares(p).chunk(2) for p in (every, some)))
        assert (found - want).norm() < 0.25 * want.norm()


def test_equal_rows_have_no_shares_of_the_variance():
    assert shares_of(torch.ones(48, 4), torch.arange(16).repeat_interleave(3)).isnan().all()


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cosines_about_the_mean_are_those_of_the_halves(offset, dtype):
    rows, numbers = rows_of_sequences(24, 20, 12, offset=offset)
    rows, halves = rows.to(dtype), half_samples(numbers)
    found = kernel.centred_cosine_differences(rows, group_sums(rows[:, None], halves), halves)
    want = on_halves(cosine_centred, rows, halves)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-9)
    assert want.abs().max() > 1e-3


def test_a_row_that_is_the_mean_of_its_half_has_no_direction_there():
    rows = torch.tensor([[1.0], [2.0], [6.0], [7.0]]).repeat(8, 1)
    halves = half_samples(torch.arange(8).repeat_interleave(4))
    rows[:4], rows[4:8] = 4.0, torch.tensor([[0.0], [1.0], [7.0], [8.0]])
    found = kernel.centred_cosine_differences(rows, group_sums(rows[:, None], halves), halves)
    torch.testing.assert_close(found, on_halves(cosine_centred, rows, halves))


@pytest.mark.parametrize("scale", [0.1, 1 / 3, 1e-7])
def test_a_row_that_is_the_mean_but_for_rounding_has_no_direction_either(scale):
    rows = torch.tensor([[1.0], [2.0], [6.0], [7.0]], dtype=torch.float64).repeat(8, 1)
    halves = half_samples(torch.arange(8).repeat_interleave(4))
    rows[:4], rows[4:8] = 4.0, torch.tensor([[0.0], [1.0], [7.0], [8.0]])

    def found(rows):
        return kernel.centred_cosine_differences(rows, group_sums(rows[:, None], halves), halves)

    torch.testing.assert_close(found(scale * rows), found(rows), rtol=1e-9, atol=1e-12)


def test_a_row_without_a_direction_counts_in_no_cosine_of_sequences():
    rows, numbers = rows_of_sequences(16, 8, 5)
    rows[::3] = 0
    halves, own = half_samples(numbers), sequence_cosines(rows, numbers)
    sums, close = group_sums(rows[:, None], halves), {"rtol": 1e-9, "atol": 1e-12}
    within = kernel.within_cosine_differences(own.own, own.rows)
    between = kernel.between_cosine_differences(own.own, own.rows, sums)
    members = halves.first[:, halves.group]
    for found, name in ((within, "within"), (between, "between")):
        want = torch.stack([
            getattr(sequence_cosines(rows[one], numbers[one]), name)
            - getattr(sequence_cosines(rows[~one], numbers[~one]), name)
            for one in members
        ])  # fmt: skip
        torch.testing.assert_close(found, want, **close)


@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_anisotropy_of_heads_in_halves_is_near_that_of_their_rows(offset):
    """The spectrum of the first head is steep; those of the others are flatter and flatter."""
    rows, numbers = rows_of_sequences(32, 40, 48, offset=offset)
    rows, halves = rows.view(-1, 3, 16).float(), half_samples(numbers)
    found = kernel.head_anisotropy_differences(
        kernel.scatter_by_group(rows, halves), group_sums(rows, halves), halves
    )
    want = on_halves(head_anisotropy, rows, halves)
    assert found.shape == (15, 3)
    assert (found - want)[:, 0].norm() < 0.1 * want[:, 0].norm()
    assert (found.norm(dim=0) / want.norm(dim=0) > 0.95).all()
    over_heads = found.mean(dim=1).norm() / want.mean(dim=1).norm()
    assert 0.95 < over_heads < 1.25


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    heads=st.integers(1, 5),
    width=st.integers(1, 9),
    offset=st.sampled_from([0.0, 1e6]),
)
def test_the_scatter_of_heads_is_that_of_each_alone(seed, heads, width, offset):
    rows, numbers = rows_of_sequences(9, 5, heads * width, offset=offset, seed=seed)
    rows, halves = rows.view(-1, heads, width), half_samples(numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_blocks, "BLOCK", 2 * 45 * width)  # two heads at a time
        found = kernel.scatter_by_group(rows, halves)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found.total, head_scatter(rows), **close)
    torch.testing.assert_close(found.centre, mean_rows(rows))
    inside = torch.einsum("thw,hwd->thd", rows - mean_rows(rows), found.basis)
    for number, own in enumerate(found.groups):
        part = inside[halves.group == number]
        want = torch.einsum("thc,thd->hcd", part, part)
        torch.testing.assert_close(own, want, rtol=1e-9, atol=1e-7)
    products = found.basis.mT @ found.basis
    torch.testing.assert_close(products, torch.eye(min(2, width)).double().expand_as(products))


def test_the_two_directions_of_a_head_are_the_leading_ones():
    """Of a steep spectrum, of one in which all but one direction is rounding, and of equal rows."""
    rows, numbers = rows_of_sequences(16, 30, 12)
    steep = rows * torch.logspace(0, -6, 12, dtype=torch.float64)
    flat = rows[:, :1] * torch.arange(1, 13)
    heads = torch.stack([steep, flat, torch.full_like(rows, 0.1)], dim=1)
    found = kernel.scatter_by_group(heads, half_samples(numbers))
    for head, directions in ((0, 2), (1, 1)):
        leading = torch.linalg.eigh(found.total[head]).eigenvectors[:, -directions:].flip(1)
        cosines = (leading * found.basis[head, :, :directions]).sum(dim=0).abs()
        torch.testing.assert_close(cosines, torch.ones_like(cosines), rtol=1e-6, atol=0)
    assert (found.total[2] == 0).all()
    products = found.basis.mT @ found.basis
    torch.testing.assert_close(products, torch.eye(2).double().expand_as(products))


@pytest.mark.parametrize("width", [1, 2])
def test_in_few_columns_the_anisotropy_of_heads_in_halves_is_exact(width):
    rows, numbers = rows_of_sequences(16, 30, 2 * width)
    rows, halves = rows.view(-1, 2, width), half_samples(numbers)
    found = kernel.head_anisotropy_differences(
        kernel.scatter_by_group(rows, halves), group_sums(rows, halves), halves
    )
    want = on_halves(head_anisotropy, rows, halves)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


def test_rows_without_a_direction_count_in_no_cosine():
    rows, numbers = rows_of_sequences(16, 8, 5)
    rows[::3] = 0
    halves = half_samples(numbers)
    found = kernel.cosine_differences(group_sums(rows[:, None], halves), halves)[:, 0]
    torch.testing.assert_close(found, on_halves(cosine, rows, halves), rtol=1e-9, atol=1e-12)


def test_heads_of_which_a_half_has_no_row_are_nan():
    halves = half_samples(torch.arange(8))
    chosen = torch.tensor([[True] + [False] * 7, [True] * 8])
    found = kernel.row_mean_differences(torch.ones(2, 8), chosen, halves)
    assert found[:, 0].isnan().all()
    assert (found[:, 1] == 0).all()


@few_examples
@given(seed=st.integers(0, 10**6), sequences=st.integers(8, 40), scale=st.sampled_from([1e-3, 1e5]))
def test_differences_under_order_and_scale(seed, sequences, scale):
    rows, numbers = rows_of_sequences(sequences, 6, 5, seed=seed)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))

    def found(rows, numbers):
        halves = half_samples(numbers)
        sums = group_sums(rows[:, None], halves)
        return kernel.drift_differences(sums, halves), kernel.cosine_differences(sums, halves)

    (drift, angle), (other_drift, other_angle) = (
        found(rows, numbers),
        found(scale * rows[order], numbers[order]),
    )
    torch.testing.assert_close(scale * drift, other_drift, rtol=1e-9, atol=1e-9 * scale)
    torch.testing.assert_close(angle, other_angle, rtol=1e-9, atol=1e-9)


def test_groups_of_no_ways_give_nothing():
    halves = HalfSamples(torch.zeros(5, dtype=torch.int64), torch.empty(0, 8, dtype=torch.bool))
    sums = group_sums(torch.randn(5, 1, 3, generator=torch.Generator().manual_seed(0)), halves)
    assert kernel.cosine_differences(sums, halves).shape == (0, 1)


# -- intrinsic dimension: from the neighbours among all rows --


def ratios(rows, numbers, k, scales=(1,)):
    near, halves = nearest(rows, k=k), half_samples(numbers)
    return ratios_in_halves(*near, torch.arange(len(rows)), halves, scales), halves


@pytest.mark.parametrize("discard", [0.0, 0.1, 0.8])
@pytest.mark.parametrize("sequences", [9, 30])
def test_with_all_neighbours_known_they_are_the_estimates_on_the_halves(discard, sequences):
    rows, numbers = rows_of_sequences(sequences, 20, 4)
    (found,), halves = ratios(rows, numbers, len(rows) - 1)
    fit, censored = twonn_differences(found, discard)
    close = {"rtol": 1e-9, "atol": 1e-12}

    def fitted(part):
        return twonn(nearest(part, k=2).distances, discard)

    def likely(part):
        return twonn_censored(nearest(part, k=2).distances, discard).value

    torch.testing.assert_close(fit, on_halves(fitted, rows, halves), **close)
    torch.testing.assert_close(censored, on_halves(likely, rows, halves), **close)


@pytest.mark.parametrize("k", [1, 2, 4, 16])
def test_one_step_of_newton_is_as_good_as_the_root(k):
    rows, numbers = rows_of_sequences(24, 30, 5, seed=k)
    (found,), halves = ratios(rows, numbers, len(rows) - 1, (k,))

    def estimate(part):
        return gride(nearest(part, k=2 * k).distances, [k])[0]

    want = on_halves(estimate, rows, halves)
    assert (gride_differences([found], [k])[0] - want).norm() < 0.06 * want.norm()


def test_several_scales_at_once_are_those_of_each_alone():
    rows, numbers = rows_of_sequences(24, 30, 5)
    rows[::9] = rows[:1] + torch.arange(80)[:, None]  # ratios of equal spacings are 1
    scales = [4, 1, 16, 2]
    found, _ = ratios(rows, numbers, 64, scales)
    assert any((one.log_mu == 0).any() for one in found)
    every = gride_differences(found, scales)
    assert every.shape == (4, 15)
    for own, one, k in zip(every, found, scales, strict=True):
        torch.testing.assert_close(own, gride_differences([one], [k])[0], rtol=1e-12, atol=0)


def test_sixteen_neighbours_are_enough():
    rows, numbers = rows_of_sequences(64, 32, 8)
    (few,), _ = ratios(rows, numbers, 16)
    (all_of_them,), _ = ratios(rows, numbers, 300)
    assert few.known.double().mean() > 0.99
    assert all_of_them.known.all()
    torch.testing.assert_close(
        few.log_mu[few.known], all_of_them.log_mu[few.known], rtol=1e-12, atol=0
    )
    # Where the second neighbour is too far, the farthest that is known stands for it.
    rest = ~few.known & ~few.log_mu.isnan()
    assert (few.log_mu[rest] <= all_of_them.log_mu[rest]).all()
    one, other = (twonn_differences(found)[0] for found in (few, all_of_them))
    assert (one - other).norm() < 0.1 * other.norm()


def test_neighbours_that_do_not_count_are_passed_over():
    rows, numbers = rows_of_sequences(16, 20, 3)
    near, halves = nearest(rows, k=len(rows) - 1), half_samples(numbers)
    counts = torch.arange(len(rows)) % 3 > 0
    members = counts.nonzero().squeeze(1)
    distances = near.distances[members].masked_fill(~counts[near.indices[members]], torch.inf)
    (found,) = ratios_in_halves(distances, near.indices[members], members, halves)
    own, _ = ratios(rows[members], numbers[members], len(members) - 1)
    # The numbers of the sequences are the same, so the halves are.
    torch.testing.assert_close(found.log_mu, own[0].log_mu, rtol=1e-9, atol=1e-12)


def test_a_half_of_which_much_is_unknown_has_no_estimate():
    log_mu = torch.rand(1, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first = torch.arange(100)[None] % 2 == 0
    for unknown, has in ((4, True), (20, False)):  # a tenth is dropped in any case
        known = torch.arange(100)[None] >= unknown
        for value in twonn_differences(HalfRatios(log_mu, known, first)):
            assert value.isfinite().all() == has


@settings(deadline=None, derandomize=True, max_examples=20)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-3, 1e4]))
def test_differences_do_not_change_with_scale_or_order(seed, scale):
    rows, numbers = rows_of_sequences(16, 12, 3, seed=seed)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    (one,), _ = ratios(rows, numbers, 12)
    (other,), _ = ratios(scale * rows[order], numbers[order], 12)
    for left, right in zip(twonn_differences(one), twonn_differences(other), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-9, equal_nan=True)


# -- rows at places that are the same at every draw: queries of attention --


def at_places(sequences=32, each=32, length=64, seed=0):
    """A value that falls with the place, differs by sequence and scatters: values, places, numbers.

    As queries are sampled: evenly spread over the length, shifted from sequence to sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = {"generator": generator, "dtype": torch.float64}
    shift = torch.randperm(sequences, generator=generator)[:, None]
    places = (2 * (sequences * torch.arange(each) + shift) + 1) * length // (2 * sequences * each)
    own = 0.002 * torch.randn(sequences, 1, **kind)
    noise = 0.01 * torch.randn(sequences, each, **kind)
    values = 1 / (places + 2) + own + noise
    numbers = torch.arange(sequences).repeat_interleave(each)
    return values.view(1, -1), places.view(1, -1).double() + 2, numbers


def margin_of(values, places, numbers):
    halves, every = half_samples(numbers), torch.ones_like(values, dtype=torch.bool)
    own = kernel.without_places(values, every, places, numbers, halves)
    return margin(kernel.row_mean_differences(own, every, halves)[:, 0].tolist())


def plain_margin_of(values, numbers):
    every = torch.ones_like(values, dtype=torch.bool)
    return margin(kernel.row_mean_differences(values, every, half_samples(numbers))[:, 0].tolist())


@pytest.mark.parametrize(("each", "length"), [(32, 64), (32, 1024), (8, 64)])
def test_without_places_the_margin_covers_and_is_no_wider_than_it_has_to_be(each, length):
    draws = [at_places(128 if each == 8 else 32, each, length, seed) for seed in range(120)]
    means = torch.stack([values.mean() for values, _, _ in draws])
    found = torch.tensor([margin_of(*draw) for draw in draws], dtype=torch.float64)
    plain = torch.tensor([plain_margin_of(v, n) for v, _, n in draws], dtype=torch.float64)
    covered = ((means - means.mean()).abs() <= found).double().mean()
    assert 0.9 <= covered <= 0.99
    assert found.mean() < 1.35 * 1.96 * means.std()
    if length == 64:  # in a long sequence few places are early ones
        assert plain.mean() > 1.3 * found.mean()


def test_what_is_left_is_scaled_by_the_numbers_that_were_fitted():
    """A line in the logarithm of the place takes two of the 16 groups of a stratum."""
    places = torch.tensor([10.0, 30, 90, 270])[:, None] + torch.arange(16) / 16
    sequences = torch.arange(16).expand(4, -1).flatten()
    values = torch.randn(1, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    every = torch.ones_like(values, dtype=torch.bool)
    found = kernel.without_places(
        values, every, places.view(1, -1).double(), sequences, half_samples(sequences)
    )
    for stratum in (slice(15, 31), slice(31, 47), slice(47, 63)):
        x = places.flatten()[stratum].double().log()
        line = torch.stack([torch.ones_like(x), x], dim=1)
        own = values[0, stratum]
        left = own - line @ torch.linalg.lstsq(line, own[:, None]).solution[:, 0]
        torch.testing.assert_close(found[0, stratum], left * math.sqrt(16 / 14), rtol=1e-6, atol=0)


def test_rows_that_are_all_at_one_place_are_as_they_were():
    values, _, numbers = at_places()
    same = torch.full_like(values, 64)
    every, halves = torch.ones_like(values, dtype=torch.bool), half_samples(numbers)
    own = kernel.without_places(values, every, same, numbers, halves)
    torch.testing.assert_close(own, values - values.mean(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lengths", [5, 64])
def test_sequences_that_have_a_place_of_their_own_keep_what_they_differ_by(lengths):
    """Padding: every query of an encoder sees as many keys as its sequence has tokens."""
    generator = torch.Generator().manual_seed(3)
    of_sequence = torch.randint(lengths, (64,), generator=generator) + 5
    places = of_sequence.repeat_interleave(16)[None].double()
    values = places.log() + 0.001 * torch.randn(1, 1024, generator=generator).double()
    numbers = torch.arange(64).repeat_interleave(16)
    assert margin_of(values, places, numbers) == pytest.approx(plain_margin_of(values, numbers))


def test_heads_that_see_other_keys_are_taken_one_by_one():
    values, places, numbers = at_places()
    other = places.flip(1)
    halves = half_samples(numbers)
    both = torch.cat([values, values]), torch.cat([places, other])
    chosen = torch.arange(values.shape[1])[None] % 5 > 0
    found = kernel.without_places(both[0], chosen.expand(2, -1), both[1], numbers, halves)
    for head, place in enumerate((places, other)):
        want = kernel.without_places(values, chosen, place, numbers, halves)
        torch.testing.assert_close(found[head], want[0])
    assert (found[:, ~chosen[0]] == 0).all()
    nothing = torch.zeros_like(values, dtype=torch.bool)
    assert (kernel.without_places(values, nothing, places, numbers, halves) == 0).all()
