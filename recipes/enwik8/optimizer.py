"""The optimizer and its learning rate, without the imports of the training around them."""

import math
from collections.abc import Callable

import torch


def adamw(
    model: torch.nn.Module, learning_rate: float, *, decay: float = 0.1, of_vectors: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
) -> torch.optim.AdamW:  # fmt: skip
    """Make an AdamW optimizer that decays matrices; `of_vectors` decays biases and norm gains."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": of_vectors},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


def cosine_rate(warmup: int, steps: int) -> Callable[[int], float]:
    """Make a learning rate schedule: a warm-up, then a cosine that ends at a tenth."""

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return rate
