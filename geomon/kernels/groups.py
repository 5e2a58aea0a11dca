"""Groups of sequences, and sums over the rows of each group.

Rows of one sequence are alike, so an interval must leave out whole sequences. Sums over rows are
kept by group, so that the sum without a group is the sum of the others.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from geomon.kernels._blocks import in_blocks, with_squares

GROUPS = 8


def group_sequences(sequences: Tensor) -> Tensor | None:
    """Put sequences, in order, into 8 groups with about equally many rows.

    Neighbouring sequences share a group, because they may be parts of one text. If one sequence has
    more than an eighth of the rows, groups have about equally many sequences instead.

    Args:
        sequences: Index of each row's sequence, integers, [tokens].

    Returns:
        Group of each row, int64, [tokens], or None with fewer than 8 sequences.

    Example:
        >>> group_sequences(torch.arange(16)).tolist()
        [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    """
    _, order, sizes = torch.unique(sequences, return_inverse=True, return_counts=True)
    count = len(sizes)
    if count < GROUPS:
        return None
    # Twice the number of rows before the middle of each sequence, in exact integers.
    middle = 2 * sizes.cumsum(0) - sizes
    group = GROUPS * middle // (2 * len(sequences))
    if len(group.unique()) < GROUPS:
        group = torch.arange(count, dtype=torch.int64, device=sequences.device) * GROUPS // count
    return group[order]


class Groups(NamedTuple):
    """Groups of sequences that a margin leaves out in turn.

    Attributes:
        of: Group of each row, int64, [rows].
        size: Number of groups: 8, or 1 if the sequences are unknown or fewer than 8.
    """

    of: Tensor
    size: int

    def at(self, rows: Tensor) -> "Groups":
        """Return the groups of some of the rows.

        Args:
            rows: Indices of the rows.
        """
        return Groups(self.of[rows], self.size)

    def staying(self, group: int) -> Tensor:
        """Return the indices of the rows of other groups.

        Args:
            group: Index of the group that is left out.
        """
        return (self.of != group).nonzero().squeeze(1)


class GroupSums(NamedTuple):
    """Sums over the rows of each group, float64.

    Attributes:
        counts: Number of rows, [groups].
        rows: Sum of the rows, [groups, heads, width].
        squares: Sum of the squared norms, [groups, heads].
        directions: Sum of the rows divided by their norms, [groups, heads, width].
        directed: Number of rows with nonzero norm, [groups, heads].
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
        """Mean cosine over all pairs of different rows, [heads].

        (|sum_i u_i|^2 - n) / (n (n - 1)) with u_i = x_i / |x_i|. This is exact over all pairs in a
        single pass, whereas Godey et al. (2401.12143, section 3) sample pairs. Range [-1/(n-1), 1];
        about 0 for isotropic rows. Rows of norm 0 are left out; NaN if fewer than two rows remain.
        """
        n = self.directed.sum(dim=0)
        value = (self.directions.sum(dim=0).square().sum(dim=1) - n) / (n * (n - 1))
        return torch.where(n >= 2, value, torch.nan)


def group_sums(rows: Tensor, group: Tensor, groups: int = GROUPS) -> GroupSums:
    """Sum rows, squared norms and directions by group, in one pass.

    Args:
        rows: Floating-point rows by head, [tokens, heads, width].
        group: Group of each row, int64, [tokens].
        groups: Number of groups. Defaults to 8.

    Returns:
        The sums of each group.

    Raises:
        ValueError: If `group` does not have one entry for each row.
    """
    if len(group) != len(rows):
        raise ValueError(f"expected a group for each of {len(rows)} rows, got {len(group)}")
    heads = rows.shape[1]
    total = rows.new_zeros(groups, *rows.shape[1:], dtype=torch.float64)
    directions, numbers = torch.zeros_like(total), total.new_zeros(groups, 2 * heads)
    start = 0
    for flat in in_blocks(rows.flatten(1)):
        own = group[start : start + len(flat)]
        start += len(flat)
        block = flat.view(-1, *rows.shape[1:])
        add_by_group(total, own, block)
        norm = torch.linalg.vector_norm(block, dim=2)
        squares = norm.square()
        scaled = with_squares(block, rows.dtype)
        norm = norm if scaled is block else torch.linalg.vector_norm(scaled, dim=2)
        add_by_group(numbers, own, torch.cat([squares, norm > 0], dim=1))
        scaled.mul_(torch.where(norm > 0, 1 / norm, 0)[:, :, None])
        add_by_group(directions, own, scaled)
    counts = torch.bincount(group, minlength=groups).double()
    squares, directed = numbers.split(heads, dim=1)
    return GroupSums(counts, total, squares, directions, directed)


def add_by_group(total: Tensor, group: Tensor, values: Tensor) -> None:
    """Add values to the total of their group, on a device by a product with a fixed order.

    Args:
        total: Sums so far, float64, [groups, ...].
        group: Group of each row, [rows].
        values: One or several values of each row, float64, [rows, ...].
    """
    if total.device.type == "cpu":
        total.index_add_(0, group, values)
        return
    every = torch.arange(len(total), dtype=group.dtype, device=group.device)
    total += torch.tensordot((every[:, None] == group).to(values), values, dims=1)
