"""Balanced half-samples: how far an estimate would be off on other sequences.

Rows of one sequence are alike, and equal tokens lie close together: a standard error that takes
rows as independent is far too small. So whole sequences are put into 16 groups, and the groups into
two halves, in 15 ways that are balanced: in each way every half has 8 groups, and over all ways
each pair of groups stands in one half equally often (McCarthy 1966). With a and b the estimates on
the two halves, the mean of ((a - b) / 2)^2 over the ways estimates the variance of the estimate on
all rows; for a sum over groups it is exactly 16 times the sample variance of the groups.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from scipy import special  # type: ignore[import-untyped]
from torch import Tensor

from geomon.kernels._blocks import in_blocks, row_blocks, rows_in_block, with_squares
from geomon.kernels.products import as_factor, product_with_itself

# Groups of sequences, a power of two. With 16 of them Student's factor is 2.13, with 8 it is 2.36:
# more groups would gain little, and cost a way each.
_GROUPS = 16

# With fewer sequences there are too few groups for an error.
FEWEST_SEQUENCES = 8

# Rows that are compared with one another as being at one place, and groups that they must be of.
_ROWS_AT_A_PLACE, _GROUPS_AT_A_PLACE = 16, 6

# Deviation of the lengths of sequences, as a share of their mean, from which places are part of the
# sample. Taken off all the same, they made intervals that covered .58 to .73 of padded documents.
_UNEQUAL = 0.1

# Directions in which the leading eigenvalue of each half is looked for, and steps that find them.
_DIRECTIONS, _STEPS = 8, 3

# Directions along which the variance of each half is compared with that of all rows. Intervals of
# the effective rank by so many differ by at most 4 % from those by all directions, by 16 of them by
# at most 17 % (widths 128 and 384, trained and not); those of the participation ratio by none.
_SHARES = 64

# The same for each head, whose scatter is known, so that a step costs next to nothing. Two are
# enough where the first direction stands out; where none does, the interval is too wide by a sixth.
_HEAD_DIRECTIONS, _HEAD_STEPS = 2, 8


class HalfSamples(NamedTuple):
    """The ways of cutting rows into two halves.

    Attributes:
        group: Group of each row, int64, [tokens].
        first: True for the groups in the first half, one way in each row, [ways, groups]. No ways
            where there are fewer than 8 sequences.
        widening: What a difference between halves is to be multiplied by, because sequences of
            unequal length are worth fewer than their number; 1 where all are of one length.
    """

    group: Tensor
    first: Tensor
    widening: float = 1.0


class HalfMoments(NamedTuple):
    """Moments of the rows of each half: the first halves of all ways, then the second ones.

    Attributes:
        square_of_mean: Squared norm of the mean row, M, [2 ways].
        variance: Variance about the mean row, V, [2 ways].
    """

    square_of_mean: Tensor
    variance: Tensor


class HeadScatter(NamedTuple):
    """Products of the centred numbers of each head, summed over rows, in float64.

    Attributes:
        total: Sum over all rows, [heads, head width, head width].
        basis: The leading two directions of all rows, or one in a single column, [heads, head
            width, directions].
        centre: Mean over all rows, [heads, head width].
        groups: Sum over the rows of each group of the products of the numbers along these
            directions, about the centre, [groups, heads, directions, directions].
        squares: Sum over the rows of each group of the squared distances from the centre, [groups,
            heads].
    """

    total: Tensor
    basis: Tensor
    centre: Tensor
    groups: Tensor
    squares: Tensor


class GroupSums(NamedTuple):
    """Sums over the rows of each group, in float64.

    Attributes:
        counts: Number of rows, [groups].
        rows: Sum of the rows, [groups, heads, width].
        squares: Sum of the squared norms, [groups, heads].
        directions: Sum of the rows divided by their norms, [groups, heads, width].
        directed: Number of rows that have a direction, [groups, heads].
    """

    counts: Tensor
    rows: Tensor
    squares: Tensor
    directions: Tensor
    directed: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean over all rows, [heads, width]."""
        return self.rows.sum(dim=0) / self.counts.sum()

    @property
    def square(self) -> Tensor:
        """Mean squared norm of the rows, [heads]."""
        return self.squares.sum(dim=0) / self.counts.sum()

    @property
    def cosine(self) -> Tensor:
        """Mean cosine over all pairs of different rows, [heads]; NaN with fewer than two."""
        n = self.directed.sum(dim=0)
        value = (self.directions.sum(dim=0).square().sum(dim=1) - n) / (n * (n - 1))
        return torch.where(n >= 2, value, torch.nan)


def half_samples(sequences: Tensor, counted: Tensor | None = None) -> HalfSamples:
    """Cut rows into two halves of whole sequences, in balanced ways.

    Neighbouring sequences come into one group: they may be parts of one text.

    Args:
        sequences: Number of each row's sequence, int64, [tokens].
        counted: True for the rows that count, [tokens]; None for all.

    Example:
        >>> halves = half_samples(torch.arange(16).repeat_interleave(3))
        >>> list(halves.first.shape), halves.first.sum(dim=1).tolist() == [8] * 15
        ([15, 16], True)
    """
    # By those that are there: of several ranks each split of the rows may hold one rank's alone.
    _, order, sizes = torch.unique(sequences, return_inverse=True, return_counts=True)
    count = len(sizes)
    groups = _GROUPS if count >= _GROUPS else FEWEST_SEQUENCES
    number = torch.arange(groups, dtype=torch.int64, device=sequences.device)
    # Rows of a Hadamard matrix: the parity of the common bits of two numbers below 16.
    common = number[1:, None] & number
    common ^= common >> 2
    table = (common ^ (common >> 1)) & 1 == 0
    of_sequence = torch.arange(count, dtype=torch.int64, device=sequences.device) * groups
    of_sequence //= max(count, 1)
    if count < FEWEST_SEQUENCES:
        return HalfSamples(of_sequence[order], table[:0])
    if counted is not None:
        sizes = torch.bincount(order[counted], minlength=count)
    return HalfSamples(of_sequence[order], table, _widening(sizes, of_sequence, table))


def _widening(sizes: Tensor, group: Tensor, first: Tensor) -> float:
    """Compute by how much unequal lengths of sequences must widen an interval.

    For a mean over rows, ((a - b) / 2)^2 averaged over the ways is a quadratic form Q of the sums
    of the groups. If the rows of a sequence are all alike, such a sum has a variance in proportion
    to the sum of the squared lengths in it. That gives the expectation of the form, which is too
    small where one sequence has a large part of all rows, and by its second moment (Satterthwaite
    1946; Bell and McCaffrey 2002) the degrees of freedom that it is worth. Rows that are less alike
    have more, so that the interval is then too wide rather than too narrow.

    Args:
        sizes: Number of rows of each sequence, [sequences].
        group: Group of each sequence, [sequences].
        first: True for the groups in the first half of each way, [ways, groups].
    """
    ways, groups = first.shape
    rows, member = sizes.cpu().double(), group.cpu()
    counts, variances = (
        torch.bincount(member, weights=each, minlength=groups) for each in (rows, rows.square())
    )
    side = first.cpu().double()
    one = side @ counts
    if not bool(((one > 0) & (one < counts.sum())).all()):
        return 1.0  # a half without rows: its differences are not finite
    weights = (side / one[:, None] - (1 - side) / (counts.sum() - one)[:, None]) / 2
    form = weights.T @ weights / ways * variances.sqrt() * variances.sqrt()[:, None]
    expected = float(form.trace())
    degrees = expected**2 / float(form.square().sum())
    bias = float(variances.sum() / counts.sum().square()) / expected
    return math.sqrt(bias) * student(degrees) / student(ways)


def student(degrees: float) -> float:
    """Return the 97.5 % point of Student's distribution.

    Args:
        degrees: Degrees of freedom, which need not be whole.
    """
    return float(special.stdtrit(degrees, 0.975))


def margin(differences: Iterable[float]) -> float:
    """Compute the half width of a 95 % interval from the differences between halves.

    t sqrt(mean ((a - b) / 2)^2) with t the 97.5 % point of Student's distribution, with as many
    degrees of freedom as there are ways.

    Args:
        differences: Estimate on the first half minus that on the second, for each way.

    Returns:
        At least 0; NaN without ways, or where a difference is not finite.

    Example:
        >>> round(margin([1.0, -1.0] * 7 + [1.0]), 3)  # 2.131 / 2
        1.066
    """
    known = list(differences)
    if not known or not all(map(math.isfinite, known)):
        return math.nan
    error = math.hypot(*known) / (2 * math.sqrt(len(known)))
    return student(len(known)) * error


def group_sums(rows: Tensor, halves: HalfSamples) -> GroupSums:
    """Add up rows, squared norms and directions by group, in one pass.

    Args:
        rows: Floating-point rows by head, [tokens, heads, width].
        halves: The groups of the rows.

    Raises:
        ValueError: The groups are of another number of rows.
    """
    if len(halves.group) != len(rows):
        raise ValueError(f"expected a group for each of {len(rows)} rows, got {len(halves.group)}")
    groups, heads = halves.first.shape[1], rows.shape[1]
    total = rows.new_zeros(groups, *rows.shape[1:], dtype=torch.float64)
    directions, numbers = torch.zeros_like(total), total.new_zeros(groups, 2 * heads)
    start = 0
    for flat in in_blocks(rows.flatten(1)):
        group = halves.group[start : start + len(flat)]
        start += len(flat)
        block = flat.view(-1, *rows.shape[1:])
        _add_by_group(total, group, block)
        norm = torch.linalg.vector_norm(block, dim=2)
        squares = norm.square()
        scaled = with_squares(block, rows.dtype)
        norm = norm if scaled is block else torch.linalg.vector_norm(scaled, dim=2)
        _add_by_group(numbers, group, torch.cat([squares, norm > 0], dim=1))
        scaled.mul_(torch.where(norm > 0, 1 / norm, 0)[:, :, None])
        _add_by_group(directions, group, scaled)
    counts = torch.bincount(halves.group, minlength=groups).double()
    squares, directed = numbers.split(heads, dim=1)
    return GroupSums(counts, total, squares, directions, directed)


def mean_differences(
    values: Tensor,
    counts: Tensor,
    halves: HalfSamples,
    *,
    of: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compare the means of the two halves, or a function of them, for each way.

    Args:
        values: Sum over each group, [groups, heads].
        counts: Number of summands in each group, [groups, heads].
        halves: The ways.
        of: Function of the means; None for the means themselves.

    Returns:
        [ways, heads], float64.
    """
    means = [_total(values, side) / _total(counts, side) for side in sides_of(halves)]
    one, other = means if of is None else map(of, means)
    return one - other


def row_mean_differences(
    values: Tensor,
    chosen: Tensor,
    halves: HalfSamples,
    *,
    of: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compare the means of chosen rows of each head, or a function of them, in the two halves.

    Args:
        values: One number for each row of each head, [heads, rows].
        chosen: True for the rows that count, [heads, rows].
        halves: The groups of the rows, and the ways.
        of: Function of the means; None for the means themselves.

    Returns:
        [ways, heads], float64.
    """
    member = _members(halves.group, halves.first.shape[1]).double()
    sums = member @ torch.where(chosen, values, 0).T.double()
    return mean_differences(sums, member @ chosen.T.double(), halves, of=of)


def without_places(
    values: Tensor, chosen: Tensor, places: Tensor, sequences: Tensor, halves: HalfSamples
) -> Tensor:
    """Subtract what rows have by their place: a line in its logarithm, for rows at like places.

    Places are no part of the sample where they are spread evenly by design, as those of the queries
    of attention are: another draw of sequences has the same ones, but a half has others than its
    counterpart. Lines are fitted to about 16 rows that see about as many keys. The mean of all rows
    alone is subtracted where those are of fewer than 6 groups, and everywhere where sequences are
    of unequal length, or places differ from sequence to sequence more than within one: the length
    of a sequence is part of the sample, and which places there are follows from it.

    Args:
        values: One number for each row of each head, [heads, rows].
        chosen: True for the rows that count, [heads, rows].
        places: Place of each row of each head, above 0: how many keys it sees, [heads, rows].
        sequences: Number of each row's sequence, int64, [rows].
        halves: The groups of the rows.

    Returns:
        What is left, scaled by sqrt(g / (g - k)) where k numbers were fitted to rows of g groups; 0
        where a row does not count; [heads, rows].
    """
    left = torch.zeros_like(values)
    alike = bool((chosen == chosen[:1]).all() and (places == places[:1]).all())
    for heads in [slice(None)] if alike else [slice(h, h + 1) for h in range(len(values))]:
        rows = chosen[heads][0].nonzero().squeeze(1)
        if len(rows) == 0:
            continue
        some, along = values[heads][:, rows].double(), places[heads][0, rows].double().log()
        whole = some - some.mean(dim=1, keepdim=True)
        left[heads, rows] = whole.to(left)
        _, own = torch.unique(sequences[rows], return_inverse=True)
        within = along - _means(along[None], own)[0, own]
        if within.square().sum() < 0.5 * (along - along.mean()).square().sum():
            continue
        lengths = torch.bincount(own).double()
        if lengths.std(correction=0) > _UNEQUAL * lengths.mean():
            continue
        _, level, count = torch.unique(
            places[heads][0, rows], return_inverse=True, return_counts=True
        )
        stratum = ((count.cumsum(0) - count // 2) // _ROWS_AT_A_PLACE)[level]
        _, stratum, size = torch.unique(stratum, return_inverse=True, return_counts=True)
        groups = halves.first.shape[1]
        cell = stratum * groups + halves.group[rows]
        seen = torch.bincount(cell, minlength=len(size) * groups).view(-1, groups) > 0
        number = seen.sum(dim=1)
        crossed = number >= _GROUPS_AT_A_PLACE
        along = along - _means(along[None], stratum)[0, stratum]
        about = some - _means(some, stratum)[:, stratum]
        across = _means(along.square()[None], stratum)
        sloped = across > 1e-12  # places that differ by more than rounding
        slope = torch.where(sloped, _means(about * along, stratum) / across.clamp(min=1e-12), 0)
        about = about - slope[:, stratum] * along
        # One mean of all rows is what the halves have in common.
        fitted = sloped[0].double() + (len(size) > 1)
        scale = (number / (number - fitted).clamp(min=1)).sqrt()[stratum]
        left[heads, rows] = torch.where(crossed[stratum], about * scale, whole).to(left)
    return left


def cosine_differences(sums: GroupSums, halves: HalfSamples) -> Tensor:
    """Compare the mean cosine over all pairs in the two halves, for each way: [ways, heads].

    Args:
        sums: Sums over the rows of each group.
        halves: The ways.
    """

    def cosine(side: Tensor) -> Tensor:
        n = _total(sums.directed, side)
        return (_total(sums.directions, side).square().sum(dim=2) - n) / (n * (n - 1))

    return _difference(cosine, halves)


def centred_cosine_differences(hidden: Tensor, sums: GroupSums, halves: HalfSamples) -> Tensor:
    """Compare the mean cosine about the mean of the rows in the two halves, for each way: [ways].

    Every half has its own mean. With w_i = 1 / |x_i - mean|, the sum of the directions is
    sum_i w_i x_i - (sum_i w_i) mean: the halves of all ways are two matrix products.

    Args:
        hidden: Rows, [tokens, width].
        sums: Sums over the rows of each group, with one head.
        halves: The groups of the rows, and the ways.
    """
    sides = torch.cat(sides_of(halves))
    centre = sums.rows.sum(dim=0) / sums.counts.sum()
    means = half_mean(sums, sides)[:, 0] - centre
    squares = means.square().sum(dim=1)[:, None]
    total, weight = torch.zeros_like(means), torch.zeros_like(squares)
    n = torch.zeros_like(squares)
    start = 0
    for block in in_blocks(hidden):
        group = halves.group[start : start + len(block)]
        start += len(block)
        rows = block.sub_(centre)
        norms = rows.square().sum(dim=1)
        apart = norms + squares - 2 * (means @ rows.T)
        # What is left of two equal squares by rounding is no distance.
        far = apart > 1e-14 * (norms + squares)
        chosen = far & (sides[:, group] > 0)
        inverse = torch.where(chosen, apart.clamp_(min=0).rsqrt(), 0)
        total += inverse @ rows
        weight += inverse.sum(dim=1, keepdim=True)
        n += chosen.sum(dim=1, keepdim=True)
    directions = (total - weight * means).square().sum(dim=1)
    n = n.squeeze(1)
    one, other = ((directions - n) / (n * (n - 1))).chunk(2)
    return one - other


def within_cosine_differences(own: Tensor, rows: Tensor) -> Tensor:
    """Compare the mean cosine over pairs of one sequence in the two halves, for each way: [ways].

    Args:
        own: Squared norm of the sum of the directions of each sequence, [sequences].
        rows: Number of rows that have a direction in each sequence, [sequences].
    """
    halves = halves_of_sequences(own)
    values, counts = (_by_group(part, halves) for part in (own - rows, rows * (rows - 1)))
    return mean_differences(values, counts, halves)[:, 0]


def between_cosine_differences(own: Tensor, rows: Tensor, sums: GroupSums) -> Tensor:
    """Compare the mean cosine over pairs of two sequences in the two halves, for each way: [ways].

    Args:
        own: Squared norm of the sum of the directions of each sequence, [sequences].
        rows: Number of rows that have a direction in each sequence, [sequences].
        sums: Sums over the rows of each group, with one head.
    """
    halves = halves_of_sequences(own)
    squares, counts = (_by_group(part, halves) for part in (own, rows.square()))

    def cosine(side: Tensor) -> Tensor:
        n = _total(sums.directed, side)
        whole = _total(sums.directions, side).square().sum(dim=2)
        return (whole - _total(squares, side)) / (n.square() - _total(counts, side))

    return _difference(cosine, halves)[:, 0]


def drift_differences(sums: GroupSums, halves: HalfSamples) -> Tensor:
    """Compare the norm of the mean row of the two halves, for each way: [ways, heads].

    Args:
        sums: Sums over the rows of each group.
        halves: The ways.
    """
    return _difference(lambda side: half_mean(sums, side).norm(dim=2), halves)


def paired_mean_differences(
    function: Callable[[Tensor, Tensor], Tensor], query: GroupSums, key: GroupSums,
    halves: HalfSamples,
) -> Tensor:  # fmt: skip
    """Compare a function of the mean query and the mean key on the two halves, for each way.

    Args:
        function: Function of a mean query and a mean key of each head, [ways, heads, head width].
        query: Sums of the queries of each group.
        key: Sums of the keys of each group.
        halves: The ways.

    Returns:
        [ways, heads], or [ways] where the function has one value for all heads.
    """
    sides = torch.cat(sides_of(halves))
    one, other = function(half_mean(query, sides), half_mean(key, sides)).chunk(2)
    return one - other


def anisotropy_differences(
    hidden: Tensor, squares: Tensor, sums: GroupSums, halves: HalfSamples,
    scatter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compare the share of the variance along the leading direction of the two halves: [ways, 1].

    The leading eigenvalue of each half is looked for in the space of the leading eight directions
    of all rows, which three steps of subspace iteration find.

    Args:
        hidden: Rows, [tokens, width].
        squares: Squared distance of each row from the mean of all, float64, [tokens].
        sums: Sums over the rows of each group, with one head.
        halves: The groups of the rows, and the ways.
        scatter: Sum over all rows of the products of their centred numbers, where it is known,
            [width, width], float64; None takes products with the rows in its place.
    """
    centre = sums.rows.sum(dim=0) / sums.counts.sum()
    count = min(_DIRECTIONS, *hidden.shape)
    start = _start(hidden.shape[1], count, torch.float32)
    if scatter is not None:
        basis = _subspace(lambda basis: scatter @ basis, start.to(scatter))
        inside = torch.cat([block.sub_(centre) @ basis for block in in_blocks(hidden)])
    else:
        # Divided by a power of two, which changes no digit: in float32 the square of 1e20 is no
        # number, and that of 1e-23 is 0.
        exponent = torch.frexp(squares.max().sqrt()).exponent
        unit = torch.ldexp(torch.ones_like(centre[0, 0]), -exponent)
        centred = hidden.new_empty(hidden.shape, dtype=torch.float32)
        for target, block in zip(row_blocks(centred), in_blocks(hidden), strict=True):
            target.copy_(block.sub_(centre).mul_(unit))
        centred = as_factor(centred)
        basis = _subspace(lambda basis: centred.T @ (centred @ basis), start.to(centred))
        inside = torch.ldexp((centred @ basis).double(), exponent)
    # A column of ones beside them: products with it are sums.
    products = _products_in_groups(
        torch.nn.functional.pad(inside, (0, 1), value=1)[:, None], halves
    )
    groups, drift = products[..., :-1, :-1], products[..., -1, :-1]
    variances = _variances(_by_group(squares, halves), sums, centre, halves)
    return _leading_share_differences(groups, drift, variances, sums.counts, halves)


def shares_of_halves(
    hidden: Tensor, squares: Tensor, sums: GroupSums, halves: HalfSamples, scatter: Tensor,
    eigenvalues: Tensor,
) -> Tensor:  # fmt: skip
    """Compute the shares of the variance of each half along the leading directions of all rows.

    They stand for the eigenvalues of the half. To first order these change by what the variance
    along the eigenvectors of all rows changes by; what the directions turn by is of second order,
    and alike in both halves. Beyond the leading 64 each half has what is left of its variance,
    divided as that of all rows is.

    Args:
        hidden: Rows, [tokens, width].
        squares: Squared distance of each row from the mean of all, float64, [tokens].
        sums: Sums over the rows of each group, with one head.
        halves: The groups of the rows, and the ways.
        scatter: Sum over all rows of the products of their centred numbers, [width, width],
            float64.
        eigenvalues: All of those of the covariance of the rows, descending, [width].

    Returns:
        [2 ways, width], float64; NaN where a half has no variance.
    """
    sides = torch.cat(sides_of(halves))
    trace = scatter.diagonal().sum()
    if not bool(trace > 0) or not bool(trace.isfinite()) or len(sides) == 0:
        return scatter.new_full((len(sides), len(scatter)), torch.nan)
    scatter, count = scatter / trace, min(_SHARES, *hidden.shape)
    start = _start(hidden.shape[1], count, torch.float32).to(scatter)
    basis = _subspace(lambda basis: scatter @ basis, start)
    basis = basis @ torch.linalg.eigh(basis.T @ scatter @ basis).eigenvectors
    centre = sums.rows.sum(dim=0) / sums.counts.sum()
    inside = torch.cat([(block.sub_(centre) @ basis).square_() for block in in_blocks(hidden)])
    n = _total(sums.counts, sides)[:, None]
    drift = (_total(sums.rows, sides)[:, 0] / n - centre) @ basis
    of_group = _members(halves.group, len(sums.counts)).double() @ inside
    along = _total(of_group, sides) / n - drift.square()
    variances = _variances(_by_group(squares, halves), sums, centre, halves)
    leading = along.clamp(min=0) / variances
    beyond = eigenvalues[count:].clamp(min=0)
    left = (1 - leading.sum(dim=1, keepdim=True)).clamp(min=0)
    return torch.cat([leading, left * (beyond / beyond.sum().clamp(min=1e-300))], dim=1)


def scatter_by_group(rows: Tensor, halves: HalfSamples) -> HeadScatter:
    """Sum the products of the centred numbers of each head, over all rows and over groups.

    Those of groups are along the leading two directions of all rows alone, which a few steps of
    subspace iteration on their scatter find.

    Args:
        rows: Queries or keys of one projection, [tokens, heads, head width].
        halves: The groups of the rows.
    """
    width = rows.shape[2]
    start = _start(width, min(_HEAD_DIRECTIONS, width), torch.float64).to(rows.device)
    longest = max(len(rows), halves.first.shape[1] * width)  # of the rows, and of all products
    step = max(1, rows_in_block(longest, rows.device) // width)
    parts = [_scatter_of_heads(some, halves, start) for some in rows.split(step, dim=1)]
    if len(parts) == 1:
        return parts[0]
    return HeadScatter(
        total=torch.cat([part.total for part in parts]),
        basis=torch.cat([part.basis for part in parts]),
        centre=torch.cat([part.centre for part in parts]),
        groups=torch.cat([part.groups for part in parts], dim=1),
        squares=torch.cat([part.squares for part in parts], dim=1),
    )


def _scatter_of_heads(rows: Tensor, halves: HalfSamples, start: Tensor) -> HeadScatter:
    """Compute `scatter_by_group` of so few heads that their rows in float64 are one block."""
    by_group = rows.device.type == "cpu" and len(halves.first) > 0
    if by_group:
        rows = rows.index_select(0, halves.group.argsort())
    # The first row is subtracted before the mean is taken: equal rows give exactly 0.
    first = rows[0].double()
    about = rows - first
    shift = about.sum(dim=0) / len(rows)
    by_head = about.sub_(shift).transpose(0, 1)
    if not by_group:
        total = product_with_itself(by_head)
        basis = _leading_directions(total, start)
        groups = _products_in_groups((by_head @ basis).transpose(0, 1), halves)
        squares = groups.new_zeros(groups.shape[:2])
        _add_by_group(squares, halves.group, by_head.square().sum(dim=2).T)
        return HeadScatter(total, basis, first + shift, groups, squares)
    # A product for each group costs as much as one of all rows, and needs no second pass.
    of_groups = by_head.split(_sizes_of(halves), dim=1)
    each = torch.stack([product_with_itself(part) for part in of_groups])
    total = each.sum(dim=0)
    basis = _leading_directions(total, start)
    squares = each.diagonal(dim1=2, dim2=3).sum(dim=2)
    return HeadScatter(total, basis, first + shift, basis.mT @ (each @ basis), squares)


def _sizes_of(halves: HalfSamples) -> list[int]:
    """Count the rows of each group, on the host."""
    return torch.bincount(halves.group, minlength=halves.first.shape[1]).tolist()


def head_anisotropy_differences(
    scatter: HeadScatter, sums: GroupSums, halves: HalfSamples
) -> Tensor:
    """Compare the share of the variance along the leading direction of each head in the halves.

    The leading eigenvalue of each half is looked for among the leading two directions of all rows.

    Args:
        scatter: Products of the centred numbers, summed over all rows and over groups.
        sums: Sums over the rows of each group.
        halves: The ways.

    Returns:
        [ways, heads].
    """
    about = sums.rows - sums.counts[:, None, None] * scatter.centre
    drift = torch.einsum("ghw,hwd->ghd", about, scatter.basis)
    variances = _variances(scatter.squares, sums, scatter.centre, halves)
    return _leading_share_differences(scatter.groups, drift, variances, sums.counts, halves)


def _start(width: int, count: int, dtype: torch.dtype) -> Tensor:
    """Draw the directions from which subspace iteration starts, [width, directions]."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(width, count, generator=generator, dtype=dtype, device="cpu")


def _leading_directions(scatter: Tensor, start: Tensor) -> Tensor:
    """Find the leading directions of each head by subspace iteration, orthonormal.

    In all steps but the last one the second direction is only made orthogonal to the first: a
    decomposition of each head at every step would take longer than everything else.

    Args:
        scatter: Scatter of each head, [heads, head width, head width].
        start: Directions from which to start, one or two, [head width, directions].
    """
    # Divided by the trace, so that lengths stay within float64 in all steps.
    trace = scatter.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None]
    unit = torch.where(trace > 0, scatter / trace, 0)
    basis = start.expand(len(scatter), -1, -1)
    for _ in range(_HEAD_STEPS - 1):
        basis = unit @ basis
        inner = basis[:, :, :1].mT @ basis  # with the first direction
        along = inner / inner[:, :, :1].clamp(min=1e-300)
        along[:, :, 0] = 0
        basis = torch.baddbmm(basis, basis[:, :, :1], along, alpha=-1)
    return torch.linalg.qr(unit @ basis).Q


def _products_in_groups(inside: Tensor, halves: HalfSamples) -> Tensor:
    """Sum the products of numbers over the rows of each group: [groups, heads, n, n].

    Args:
        inside: Centred rows along a few directions, [tokens, heads, n], float64.
        halves: The groups of the rows.
    """
    if inside.device.type == "cpu":
        ordered = inside.index_select(0, halves.group.argsort()).transpose(0, 1)
        return torch.stack([part.mT @ part for part in ordered.split(_sizes_of(halves), dim=1)])
    columns = inside.permute(1, 2, 0).contiguous()
    products = columns[:, :, None] * columns[:, None]
    total = products.new_zeros(halves.first.shape[1], *products.shape[:3])
    _add_by_group(total.flatten(1), halves.group, products.flatten(0, 2).T)
    return total


def _subspace(product: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Find the space of the leading directions by subspace iteration, orthonormal.

    Args:
        product: Multiplies the scatter with directions, [width, directions].
        start: Directions from which to start, [width, directions].
    """
    basis = start
    for _ in range(_STEPS):
        basis = torch.linalg.qr(product(basis)).Q
    return basis


def _leading_share_differences(
    scatter: Tensor, drift: Tensor, variances: Tensor, counts: Tensor, halves: HalfSamples
) -> Tensor:
    """Compare the leading eigenvalue over the variance in the two halves, [ways, heads].

    Args:
        scatter: Products of the centred numbers along a few directions, summed over the rows of
            each group, [groups, heads, directions, directions], float64.
        drift: Sums of these numbers, [groups, heads, directions].
        variances: Variance of each half about its own mean, [2 ways, heads].
        counts: Number of rows of each group, [groups].
        halves: The ways.
    """
    sides = torch.cat(sides_of(halves))
    n = _total(counts, sides)[:, None]
    mean = _total(drift, sides) / n[:, :, None]
    second = _total(scatter, sides) / n[:, :, None, None]
    second = second - mean[..., :, None] * mean[..., None, :]
    top = _largest_eigenvalue(second.nan_to_num(0, 0, 0))  # a half without rows
    one, other = torch.where(n > 0, top / variances, torch.nan).chunk(2)
    return one - other


def _largest_eigenvalue(symmetric: Tensor) -> Tensor:
    """Compute the largest eigenvalue of symmetric matrices; of two rows by the formula."""
    if symmetric.shape[-1] != 2:
        return torch.linalg.eigvalsh(symmetric)[..., -1]
    one, other, across = symmetric[..., 0, 0], symmetric[..., 1, 1], symmetric[..., 1, 0]
    return (one + other) / 2 + torch.hypot((one - other) / 2, across)


def moments_of_halves(squares: Tensor, sums: GroupSums, halves: HalfSamples) -> HalfMoments:
    """Compute the squared norm of the mean and the variance of each half.

    Args:
        squares: Squared distance of each row from the mean of all, float64, [tokens].
        sums: Sums over the rows of each group, with one head.
        halves: The groups of the rows, and the ways.
    """
    sides = torch.cat(sides_of(halves))
    square = half_mean(sums, sides).square().sum(dim=2)
    variances = _variances(_by_group(squares, halves), sums, sums.mean, halves)
    return HalfMoments(square[:, 0], variances[:, 0])


def half_mean(sums: GroupSums, side: Tensor) -> Tensor:
    """Compute the mean row of a half, [ways, heads, width].

    Args:
        sums: Sums over the rows of each group.
        side: Weights of the groups in the half, [ways, groups].
    """
    return _total(sums.rows, side) / _total(sums.counts, side)[:, None, None]


def sides_of(halves: HalfSamples) -> tuple[Tensor, Tensor]:
    """Weigh the groups in the first and in the second half, [ways, groups], float64.

    Args:
        halves: The ways.
    """
    first = halves.first.double()
    return first, 1 - first


def _difference(function: Callable[[Tensor], Tensor], halves: HalfSamples) -> Tensor:
    one, other = map(function, sides_of(halves))
    return one - other


def halves_of_sequences(values: Tensor) -> HalfSamples:
    """Cut sequences into halves as `half_samples` cuts their rows.

    Args:
        values: One value for each sequence, [sequences].
    """
    return half_samples(torch.arange(len(values), dtype=torch.int64, device=values.device))


def _by_group(values: Tensor, halves: HalfSamples) -> Tensor:
    """Add up one value for each member of the groups, [groups, 1]."""
    return (_members(halves.group, halves.first.shape[1]).double() @ values)[:, None]


def _means(values: Tensor, member: Tensor) -> Tensor:
    """Average the values of the rows of each member, [heads, members], from [heads, rows]."""
    sums = values.new_zeros(len(values), int(member.max()) + 1).index_add_(1, member, values)
    return sums / torch.bincount(member)


def _add_by_group(total: Tensor, group: Tensor, values: Tensor) -> None:
    """Add values to the total of their group; on a device by a product, in a fixed order.

    Args:
        total: Sums so far, float64, [groups, ...].
        group: Group of each row, [rows].
        values: One or several values of each row, float64, [rows, ...].
    """
    if total.device.type == "cpu":
        total.index_add_(0, group, values)
    else:
        total += torch.tensordot(_members(group, len(total)).to(values), values, dims=1)


def _members(group: Tensor, groups: int) -> Tensor:
    """Mark the rows of each group, [groups, rows]."""
    every = torch.arange(groups, dtype=group.dtype, device=group.device)
    return every[:, None] == group


def _total(values: Tensor, side: Tensor) -> Tensor:
    """Add up the groups of a half: [ways, ...] from [groups, ...]."""
    return torch.tensordot(side, values, dims=1)


def _variances(squares: Tensor, sums: GroupSums, centre: Tensor, halves: HalfSamples) -> Tensor:
    """Compute the variance of each half about its own mean, [2 ways, heads].

    From squared distances to a centre among the rows: in a difference of the mean square norm and
    the squared norm of the mean, what all rows share would cancel.

    Args:
        squares: Squared distances of the rows from the centre, summed over each group, [groups,
            heads].
        sums: Sums over the rows of each group.
        centre: The centre of each head, [heads, width].
        halves: The ways.
    """
    sides = torch.cat(sides_of(halves))
    n = _total(sums.counts, sides)[:, None]
    mean = _total(sums.rows - sums.counts[:, None, None] * centre, sides) / n[:, :, None]
    return _total(squares, sides) / n - mean.square().sum(dim=2)
