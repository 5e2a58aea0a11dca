"""A small decoder on ragged batches, and the readings of one process with the rows of all ranks.

Each rank has batches of its own size, length and padding. The readings of all ranks together are
compared with a reading of one process that holds all rows, put together here by hand.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geomon import Memory, Reading, select
from geomon.capture import Window, derive_seed, find_anatomy
from geomon.distributed import merge_layers
from geomon.metrics import Evaluator
from support.measuring import watching
from support.models import VOCABULARY, PlainDecoder

LAYERS, LENGTH = 3, 24
FEW = select("variance", "twonn", "within_variance", "attention_entropy", "qk_cosine")


class Decoder(PlainDecoder):
    """Takes a padding mask."""

    def __init__(self, layers: int = LAYERS, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        super().__init__(16, layers, 2, LENGTH, dropout)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        length = ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask[:, None, :]
        seen = seen | torch.eye(length, dtype=torch.bool)  # no row of a softmax is empty
        x = self.tokens(ids) + self.places(torch.arange(length))
        for block in self.blocks:
            x = block(x, seen[:, None])
        return self.head(x)


def ragged(rank: int, step: int = 0, empty: int | None = None) -> tuple[Tensor, Tensor]:
    """A batch of a rank's own size, length and padding; of padding alone for the empty rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    sequences, length = 2 + rank % 3, LENGTH - 6 * (rank % 2)
    ids = torch.randint(0, VOCABULARY, (sequences, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (sequences,), generator=generator)
    mask = torch.arange(length) < lengths[:, None]
    return ids, mask & (rank != empty)


def loss_of(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    each = F.cross_entropy(
        model(ids, attention_mask=mask).flatten(0, 1), ids.flatten(), reduction="none"
    )
    return (each * mask.flatten()).sum() / mask.sum().clamp(min=1)


def rows_of_all(batches, rows: int) -> int:
    size = len(batches)
    shares = [rows // size + (rank < rows % size) for rank in range(size)]
    return sum(min(own, int(mask.sum())) for own, (_, mask) in zip(shares, batches, strict=True))


def one_process(model, batches, metrics, *, step, tokens, most=1):
    """Values of one process that holds the rows that each rank drew."""
    size, rows = len(batches), tokens * most
    snapshots = []
    for rank, (ids, mask) in enumerate(batches):
        own = rows // size + (rank < rows % size)
        seed = derive_seed(0, step, rank) if rank else derive_seed(0, step)
        with Window(
            find_anatomy(model), Evaluator(metrics, most).views, rows=own, seed=seed
        ) as window:
            model(ids, attention_mask=mask)
        snapshots.append(window.snapshot())
    # How parts are put together is held against a layer that was cut, in test_merge.py.
    layers = [merge_layers(parts) for parts in zip(*(s.layers for s in snapshots), strict=True)]
    evaluated = Evaluator(metrics, most).evaluate(layers, tokens).stacks
    return measured(Reading(0, 0.0, 0.0, "inline", "", 0, 1, "", evaluated))


def measured(reading) -> dict[str, float]:
    others = ("geomon/", "training/", "update_size/", "unmoved/")  # the last two take two looks
    return {tag: value for tag, value in reading.values.items() if not tag.startswith(others)}


def assert_same(values: dict[str, float], others: dict[str, float], within: float = 0) -> None:
    """Hold values against others, up to a share of these."""
    assert values.keys() == others.keys()
    for tag, value in values.items():
        other = others[tag]
        alike = abs(value - other) <= within * max(abs(other), 1e-3)
        assert alike or (math.isnan(value) and math.isnan(other)), (tag, value, other)


def losses(memory: Memory) -> list[float]:
    return [reading.values["training/loss"] for reading in memory.readings]


def words(memory: Memory) -> list[str]:
    return [note for reading in memory.readings for note in reading.words()]


def steps(memory: Memory) -> list[int]:
    return [reading.step for reading in memory.readings]


monitor_of = partial(watching, metrics=FEW, tokens=32)
