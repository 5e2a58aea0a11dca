"""The table of subtraction modulo a number, `a - b =` -> c, split into two parts."""

from typing import NamedTuple

import torch
from torch import Tensor

# Number of tokens of a question: a, the operation, b and the equals sign.
LENGTH = 4


class Pairs(NamedTuple):
    """Questions with their answers.

    Attributes:
        tokens: Token ids of `a - b =`, int64 [pairs, 4].
        answers: Remainders, int64 [pairs].
    """

    tokens: Tensor
    answers: Tensor


def vocabulary_size(modulus: int) -> int:
    """Return the number of distinct tokens: the remainders and two signs."""
    return modulus + 2


def table(modulus: int) -> Pairs:
    """List all pairs of remainders with their difference.

    Example:
        >>> table(2).tokens.tolist(), table(2).answers.tolist()
        ([[0, 2, 0, 3], [0, 2, 1, 3], [1, 2, 0, 3], [1, 2, 1, 3]], [0, 1, 1, 0])
    """
    remainders = torch.arange(modulus)
    a, b = torch.cartesian_prod(remainders, remainders).T
    minus, equals = torch.full_like(a, modulus), torch.full_like(a, modulus + 1)
    return Pairs(torch.stack([a, minus, b, equals], dim=1), (a - b) % modulus)


def split(pairs: Pairs, fraction: float, seed: int) -> tuple[Pairs, Pairs]:
    """Draw the pairs to train on, and hold out the others."""
    count = len(pairs.answers)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    train, held_out = order.tensor_split([round(fraction * count)])
    return select(pairs, train), select(pairs, held_out)


def select(pairs: Pairs, which: Tensor | slice) -> Pairs:
    """Select pairs."""
    return Pairs(pairs.tokens[which], pairs.answers[which])
