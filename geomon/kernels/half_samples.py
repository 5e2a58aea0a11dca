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

from geomon.kernels._blocks import in_blocks, row_blocks

# Groups of sequences, a power of two. With 16 of them Student's factor is 2.13, with 8 it is 2.36:
# more groups would gain little, and cost a way each.
_GROUPS = 16

# With fewer sequences there are too few groups for an error.
FEWEST_SEQUENCES = 8

# Directions in which the leading eigenvalue of each half is looked for, and steps that find them.
_DIRECTIONS, _STEPS = 8, 3


class HalfSamples(NamedTuple):
    """The ways of cutting rows into two halves.

    Attributes:
        group: Group of each row, int64, [tokens].
        first: True for the groups in the first half, one way in each row, [ways, groups]. No ways
            where there are fewer than 8 sequences.
    """

    group: Tensor
    first: Tensor


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


def half_samples(sequences: Tensor) -> HalfSamples:
    """Cut rows into two halves of whole sequences, in balanced ways.

    Neighbouring sequences come into one group: they may be parts of one text.

    Args:
        sequences: Number of each row's sequence, int64, [tokens].

    Example:
        >>> halves = half_samples(torch.arange(16).repeat_interleave(3))
        >>> list(halves.first.shape), halves.first.sum(dim=1).tolist() == [8] * 15
        ([15, 16], True)
    """
    # By those that are there: of several ranks each split of the rows may hold one rank's alone.
    numbers, order = torch.unique(sequences, return_inverse=True)
    count = len(numbers)
    groups = _GROUPS if count >= _GROUPS else FEWEST_SEQUENCES
    ways = range(1, groups) if count >= FEWEST_SEQUENCES else ()
    # Rows of a Hadamard matrix: the parity of the common bits of two numbers.
    first = [[(way & group).bit_count() % 2 == 0 for group in range(groups)] for way in ways]
    table = torch.tensor(first, dtype=torch.bool, device=sequences.device).view(-1, groups)
    return HalfSamples(order * groups // max(count, 1), table)


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
    return float(special.stdtrit(len(known), 0.975)) * error


def group_sums(rows: Tensor, halves: HalfSamples) -> GroupSums:
    """Add up rows, squared norms and directions by group, in one pass.

    Args:
        rows: Floating-point rows by head, [tokens, heads, width].
        halves: The groups of the rows.
    """
    groups = halves.first.shape[1]
    counts = rows.new_zeros(groups, dtype=torch.float64)
    total, directions = (counts.new_zeros(groups, *rows.shape[1:]) for _ in range(2))
    squares, directed = (counts.new_zeros(groups, rows.shape[1]) for _ in range(2))
    start = 0
    for flat in in_blocks(rows.flatten(1)):
        group = halves.group[start : start + len(flat)]
        start += len(flat)
        block = flat.view(-1, *rows.shape[1:])
        square = torch.linalg.vector_norm(block, dim=2).square_()
        member = _members(group, groups).to(block)
        counts += member.sum(dim=1)
        total += torch.tensordot(member, block, dims=1)
        squares += member @ square
        directed += member @ (square > 0).double()
        block.mul_(torch.where(square > 0, square.rsqrt(), 0)[:, :, None])
        directions += torch.tensordot(member, block, dims=1)
    return GroupSums(counts, total, squares, directions, directed)


def mean_differences(values: Tensor, counts: Tensor, halves: HalfSamples) -> Tensor:
    """Compare the means of the two halves, for each way.

    Args:
        values: Sum over each group, [groups, heads].
        counts: Number of summands in each group, [groups, heads].
        halves: The ways.

    Returns:
        [ways, heads], float64.
    """
    one, other = (_total(values, side) / _total(counts, side) for side in _sides(halves))
    return one - other


def row_mean_differences(values: Tensor, chosen: Tensor, halves: HalfSamples) -> Tensor:
    """Compare the means of chosen rows of each head in the two halves, for each way.

    Args:
        values: One number for each row of each head, [heads, rows].
        chosen: True for the rows that count, [heads, rows].
        halves: The groups of the rows, and the ways.

    Returns:
        [ways, heads], float64.
    """
    member = _members(halves.group, halves.first.shape[1]).double()
    sums = member @ torch.where(chosen, values, 0).T.double()
    return mean_differences(sums, member @ chosen.T.double(), halves)


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


def drift_differences(sums: GroupSums, halves: HalfSamples) -> Tensor:
    """Compare the norm of the mean row of the two halves, for each way: [ways, heads].

    Args:
        sums: Sums over the rows of each group.
        halves: The ways.
    """
    return _difference(lambda side: half_mean(sums, side).norm(dim=2), halves)


def variance_differences(sums: GroupSums, halves: HalfSamples) -> Tensor:
    """Compare the variance of the two halves, for each way: [ways, heads].

    Args:
        sums: Sums over the rows of each group.
        halves: The ways.
    """
    return _difference(lambda side: _variance(sums, side), halves)


def paired_mean_differences(
    function: Callable[[Tensor, Tensor], Tensor], query: GroupSums, key: GroupSums,
    halves: HalfSamples,
) -> Tensor:  # fmt: skip
    """Compare a function of the mean query and the mean key on the two halves: [ways, heads].

    Args:
        function: Function of a mean query and a mean key of each head.
        query: Sums of the queries of each group.
        key: Sums of the keys of each group.
        halves: The ways.
    """

    def each(side: Tensor) -> Tensor:
        pairs = zip(half_mean(query, side), half_mean(key, side), strict=True)
        found = [function(*pair) for pair in pairs]
        return torch.stack(found) if found else side.new_empty(0, query.rows.shape[1])

    return _difference(each, halves)


def anisotropy_differences(hidden: Tensor, sums: GroupSums, halves: HalfSamples) -> Tensor:
    """Compare the share of the variance along the leading direction of the two halves: [ways, 1].

    The leading eigenvalue of each half is looked for in the space of the leading eight directions
    of all rows, which three steps of subspace iteration find.

    Args:
        hidden: Rows, [tokens, width].
        sums: Sums over the rows of each group, with one head.
        halves: The groups of the rows, and the ways.
    """
    centre = sums.rows.sum(dim=0) / sums.counts.sum()
    centred = hidden.new_empty(hidden.shape, dtype=torch.float32)
    for target, block in zip(row_blocks(centred), in_blocks(hidden), strict=True):
        target.copy_(block.sub_(centre))
    count = min(_DIRECTIONS, *hidden.shape)
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(
        hidden.shape[1], count, generator=generator, dtype=torch.float32, device="cpu"
    )
    basis = start.to(hidden.device)
    for _ in range(_STEPS):
        basis = torch.linalg.qr(centred.T @ (centred @ basis)).Q
    inside = (centred @ basis).double()
    member = _members(halves.group, halves.first.shape[1]).double()
    products = (inside[:, :, None] * inside[:, None, :]).flatten(1)
    scatter = (member @ products).view(-1, count, count)
    drift = member @ inside

    def anisotropy(side: Tensor) -> Tensor:
        n = _total(sums.counts, side)[:, None]
        mean = _total(drift, side) / n
        second = _total(scatter, side) / n[:, :, None] - mean[:, :, None] * mean[:, None, :]
        top = torch.linalg.eigvalsh(second.nan_to_num(0, 0, 0))[:, -1:]  # a half without rows
        return torch.where(n > 0, top / _variance(sums, side), torch.nan)

    return _difference(anisotropy, halves)


def half_mean(sums: GroupSums, side: Tensor) -> Tensor:
    """Compute the mean row of a half, [ways, heads, width].

    Args:
        sums: Sums over the rows of each group.
        side: Weights of the groups in the half, [ways, groups].
    """
    return _total(sums.rows, side) / _total(sums.counts, side)[:, None, None]


def _sides(halves: HalfSamples) -> tuple[Tensor, Tensor]:
    """Weigh the groups in the first and in the second half, [ways, groups], float64."""
    first = halves.first.double()
    return first, 1 - first


def _difference(function: Callable[[Tensor], Tensor], halves: HalfSamples) -> Tensor:
    one, other = map(function, _sides(halves))
    return one - other


def _members(group: Tensor, groups: int) -> Tensor:
    """Mark the rows of each group, [groups, rows]."""
    every = torch.arange(groups, dtype=group.dtype, device=group.device)
    return every[:, None] == group


def _total(values: Tensor, side: Tensor) -> Tensor:
    """Add up the groups of a half: [ways, ...] from [groups, ...]."""
    return torch.tensordot(side, values, dims=1)


def _variance(sums: GroupSums, side: Tensor) -> Tensor:
    """Compute the variance of a half about its own mean, [ways, heads]."""
    # About the mean of all rows first: what both halves share does not cancel.
    centre = sums.rows.sum(dim=0) / sums.counts.sum()
    size = sums.counts[:, None]
    squares = sums.squares - 2 * (sums.rows * centre).sum(dim=2) + size * centre.square().sum(dim=1)
    n = _total(sums.counts, side)[:, None]
    mean = _total(sums.rows - size[:, :, None] * centre, side) / n[:, :, None]
    return _total(squares, side) / n - mean.square().sum(dim=2)
