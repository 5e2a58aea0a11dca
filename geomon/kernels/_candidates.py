"""Distances to candidates in float64, and their order: what every search ends with."""

import torch
from torch import Tensor

from geomon.kernels._blocks import rows_in_block


def distances_to(rows: Tensor, wanted: Tensor, candidates: Tensor, unit: float) -> Tensor:
    """Compute the distances of rows to their candidates by differences of the rows as given.

    Args:
        rows: All rows, [tokens, width].
        wanted: Indices of the rows that have candidates, [wanted].
        candidates: Indices of these, [wanted, count]; a row is infinitely far from itself.
        unit: Power of two of the order of the distances where that is extreme, else 1.

    Returns:
        Distances, [wanted, count], float64.
    """
    count, width = candidates.shape[1], rows.shape[1]
    distances = torch.empty(candidates.shape, dtype=torch.float64, device=rows.device)
    # A quarter of a block: differences that leave the cache cost a third more.
    step = rows_in_block(4 * count * width, rows.device)
    # Allocated once: the allocator does not find again what is freed between blocks.
    taken = rows.new_empty(min(step, len(wanted)) * count, width)
    exact = torch.empty_like(taken, dtype=torch.float64)
    for part, block, target in zip(
        wanted.split(step), candidates.split(step), distances.split(step), strict=True
    ):
        filled = slice(0, block.numel())
        torch.index_select(rows, 0, block.flatten(), out=taken[filled])
        difference = exact[filled].copy_(taken[filled]).view(len(block), count, width)
        # Both in float64: a subtraction of mixed precision takes twice as long.
        difference.sub_(rows.index_select(0, part).double()[:, None])
        norms(difference, unit, out=target)
    return distances.masked_fill_(candidates == wanted[:, None], torch.inf)


def norms(differences: Tensor, unit: float, out: Tensor) -> None:
    """Compute the norms of differences, in a unit in which their squares neither vanish nor end.

    Args:
        differences: Differences of rows, [..., width], float64; changed where the unit is not 1.
        unit: Power of two of their order where that is extreme, else 1.
        out: Where the norms go, [...].
    """
    if unit != 1:
        differences.mul_(1 / unit)
    torch.linalg.vector_norm(differences, dim=-1, out=out)
    if unit != 1:
        out.mul_(unit)


def nearest_first(distances: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the candidates of each row by their distance, and equal distances by index.

    Args:
        distances: Distances, [rows, count].
        candidates: Indices, [rows, count].

    Returns:
        Both in this order.

    Example:
        >>> near = nearest_first(torch.tensor([[2.0, 1.0, 1.0]]), torch.tensor([[0, 9, 4]]))
        >>> near[1].tolist()
        [[4, 9, 0]]
    """
    order = distances.sort(dim=1)
    values, index = order.values, candidates.gather(1, order.indices)
    tied = (values[:, 1:] == values[:, :-1]).any(dim=1).nonzero().squeeze(1)
    if len(tied) > 0:
        by_index = candidates[tied].sort(dim=1)
        again = distances[tied].gather(1, by_index.indices).sort(dim=1, stable=True)
        values[tied] = again.values
        index[tied] = by_index.values.gather(1, again.indices)
    return values, index
