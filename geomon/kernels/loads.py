"""Loads of experts: how many tokens a router gives to each."""

from torch import Tensor

# Load that an expert counts as at least: that of a lost one is 0, which has no logarithm.
_LEAST = 0.01


def expert_loads(expert_counts: Tensor) -> Tensor:
    """Compute how often each expert is chosen over the mean; 0.01 at least.

    Args:
        expert_counts: How often the tokens chose each expert, floating point, [experts].

    Returns:
        [experts], 1 if all are chosen equally often; NaN if none is chosen.
    """
    return (expert_counts / expert_counts.mean()).clamp(min=_LEAST)
