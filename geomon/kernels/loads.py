"""Loads of experts: how evenly a router gives them tokens."""

from torch import Tensor

# Load that an expert counts as at least, as a share of the mean load: that of a lost one is 0.
_LEAST = 0.01


def expert_load(expert_counts: Tensor) -> Tensor:
    """Compute the geometric mean of the loads of experts over their mean.

    A load counts as at least 0.01 of the mean, so that a lost expert divides the value by 100 to
    the power 1 / experts at most, and a second one does so again.

    Args:
        expert_counts: How often the tokens chose each expert, floating point, [experts].

    Returns:
        A scalar between 0.01 and 1, which is 1 if all experts are chosen equally often; NaN if no
        expert is chosen.
    """
    loads = expert_counts / expert_counts.mean()
    return loads.clamp(min=_LEAST).log().mean().exp()
