"""Random rows and token ids that many tests of kernels begin with."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

few_examples = settings(deadline=None, derandomize=True, max_examples=30)
seeds = st.integers(0, 10**6)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def dyadic(*shape: int, seed: int = 0) -> torch.Tensor:
    # Multiples of 2^-10: a shift by a power of two is exact, so it changes no difference of rows.
    return (normal(*shape, seed=seed) * 1024).round() / 1024
