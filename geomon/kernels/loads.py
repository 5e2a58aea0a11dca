"""Loads of experts: how many tokens a router sends to each."""

from torch import Tensor

# Smallest load: an unused expert would have 0, which has no logarithm.
_LEAST = 0.01


def expert_loads(expert_counts: Tensor) -> Tensor:
    """Compute how often each expert is chosen, relative to the mean, but at least 0.01.

    Args:
        expert_counts: How often the tokens chose each expert, floating point, [experts].

    Returns:
        [experts], 1 if all are chosen equally often; NaN if none is chosen.
    """
    return (expert_counts / expert_counts.mean()).clamp(min=_LEAST)
