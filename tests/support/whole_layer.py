"""A layer with every captured view, for tests that measure everything."""

import torch

from support.kernels import row_additions
from support.measuring import CAPTURED, Layer

SEQUENCES, LENGTH, WIDTH, HEADS, KEY_HEADS, HEAD_WIDTH = 16, 16, 24, 4, 2, 6
ROWS = SEQUENCES * LENGTH


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole_layer(*, by_hand: bool = False) -> Layer:
    """A layer with copies among its rows, a massive one, hidden keys, a cap and a sink.

    Args:
        by_hand: Whether scores were seen in place of queries and keys.
    """
    hidden = normal(ROWS, WIDTH) * torch.linspace(0.1, 1, WIDTH) + 3
    hidden[5], hidden[20:24] = hidden[9], hidden[30]
    hidden[7] *= 40
    sequences = torch.arange(ROWS) // LENGTH
    positions = torch.arange(ROWS) % LENGTH
    ids = torch.randint(0, 12, (ROWS,), generator=torch.Generator().manual_seed(1))
    captured = {
        "hidden": hidden, "token_ids": ids, "positions": positions, "sequences": sequences,
        "additions": row_additions(hidden - normal(ROWS, WIDTH, seed=10), hidden),
        "precision": 2**-8,
        "query": normal(SEQUENCES, HEADS, LENGTH, HEAD_WIDTH, seed=2),
        "key": normal(SEQUENCES, KEY_HEADS, LENGTH, HEAD_WIDTH, seed=3),
        "visible": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None],
        "bias": normal(1, HEADS, 1, LENGTH, seed=4), "scale": 0.4, "softcap": 8.0,
        "sink": normal(HEADS, seed=5),
        "scores": normal(SEQUENCES, HEADS, LENGTH, LENGTH, seed=6),
        "max_logits": normal(HEADS, seed=7),
        "head_outputs": torch.tensor([[500.0, 20.0], [20.0, 20.0], [0.0, 20.0], [5.0, 20.0]]),
        "projected_query": normal(ROWS, HEADS, HEAD_WIDTH, seed=8) + 0.3,
        "projected_key": normal(ROWS, KEY_HEADS, HEAD_WIDTH, seed=9) + 0.2,
        "query_sequences": sequences, "key_sequences": sequences,
        "weight_norms": {"attention": 3.0, "mlp": 4.0},
        "weight_moves": torch.tensor([0.002, 1.25, 0.25, -0.5, 4.0], dtype=torch.float64),
        "expert_counts": torch.tensor([5.0, 3.0, 0.0, 8.0]),
    }  # fmt: skip
    rows = slice(LENGTH - 1, None, 3)
    for name in ("hidden", "token_ids", "positions", "sequences", "additions"):
        captured[f"last_{name}"] = captured[name][rows].clone()
    captured["last_precision"] = 2**-8
    assert captured.keys() == CAPTURED.keys()
    left_out = ("query", "key", "bias", "scale", "softcap", "sink") if by_hand else ("scores",)
    return Layer(1, "block", {n: v for n, v in captured.items() if n not in left_out})
