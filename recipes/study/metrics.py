"""Metrics of experiments that are not geomon's own, as functions of views.

A monitor takes them beside geomon's: `METRICS | {"token_frequency": token_frequency}`.
"""

import torch
from torch import Tensor


def local_dimension(local_dimensions: Tensor) -> Tensor:
    """Mean over tokens of TwoNN on the 64 nearest rows of each.

    It has the values of geomon's metric of that name without the margin over other sequences, which
    is half of the cost of a reading; in an experiment the seeds give one.

    Args:
        local_dimensions: Dimension about each token, [tokens].
    """
    return local_dimensions.mean()


def qk_cosine_concatenated(mean_query: Tensor, mean_key: Tensor) -> Tensor:
    """Cosine between the mean query and the mean key with all heads side by side.

    One value for a layer (Godey et al., 2401.12143, figure 23). Heads count by the lengths of their
    means, where the mean of `qk_cosine` over heads counts all alike. Range [-1, 1].

    Args:
        mean_query: Mean query of each head, [heads, head width].
        mean_key: Mean key of each key head, [key heads, head width]; key heads divide heads.
    """
    facing = mean_key.repeat_interleave(len(mean_query) // len(mean_key), dim=0)
    return (mean_query * facing).sum() / (mean_query.norm() * facing.norm())


def frequency_classes(token_ids: Tensor) -> Tensor:
    """Sort rows by the frequency of their token into rare (0), middle (1) and frequent (2).

    The third of all rows whose types come least often is rare, the third whose types come most
    often frequent. Types with the same number of rows are in one class, that of the row in their
    middle: a class can be larger than a third, or empty.

    Args:
        token_ids: Type of each row, integers, [tokens].

    Returns:
        Class of each row, int64, [tokens].

    Example:
        >>> frequency_classes(torch.tensor([8, 8, 8, 5, 5, 3])).tolist()
        [2, 2, 2, 1, 1, 0]
    """
    _, kind, count = torch.unique(token_ids, return_inverse=True, return_counts=True)
    _, level, rows = torch.unique(count[kind], return_inverse=True, return_counts=True)
    # Twice the number of rows up to the middle of each level, in integers: nothing is rounded.
    middle = 2 * rows.cumsum(0) - rows
    return (3 * middle // (2 * len(token_ids)))[level]


def token_frequency(hidden: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
    """M (squared norm of the mean), V (variance) and Q (mean squared norm) by token frequency.

    Rare and unused tokens are the rival explanation of drift (Godey et al., 2401.12143, section 2;
    Razzhigaev et al., 2311.05928): if rare tokens alone are pushed aside, their moments say so.

    Args:
        hidden: Rows, [tokens, width].
        token_ids: Type of each row, integers, [tokens].

    Returns:
        Parts such as "rare/m"; NaN for a class without rows.
    """
    classes, found = frequency_classes(token_ids), {}
    for number, name in enumerate(("rare", "middle", "frequent")):
        rows = hidden[classes == number].double()
        mean = rows.mean(dim=0)
        found[f"{name}/m"] = mean.square().sum()
        found[f"{name}/v"] = (rows - mean).square().sum(dim=1).mean()
        found[f"{name}/q"] = rows.square().sum(dim=1).mean()
    return found
