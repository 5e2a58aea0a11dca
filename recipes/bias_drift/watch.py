"""Readings of one block under biases of growing norm: untrained, and before and after a training.

Each level of bias has a record of its own, for instance
`untrained_post_norm/seed_0/direction_1/bias_0.5`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from geomon import Monitor, select
from recipes.bias_drift.block import (
    Kind,
    MaskedCharacters,
    Stack,
    draw_direction,
    draw_inputs,
    draw_table,
)
from recipes.enwik8.data import Corpus
from recipes.enwik8.windows import Windows
from recipes.study import begin_training, finish_training

# Norms of the bias. An embedding has a norm of 0.55, a normalised row of width 768 one of 27.7.
LEVELS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 32.0, 128.0)
TRAINED_LEVELS = (0.0, 0.5, 2.0, 8.0, 32.0)
# Tokens of BERT's vocabulary: so many that a sample holds few of them twice.
VOCABULARY = 30_522
# Quantiles of the scores of one head that are kept.
QUANTILES = (0.05, 0.5, 0.95)
SCORES = "scores.json"
HEAD = 0

_CONTEXT, _BATCH, _MASKED, _RATE, _WARMUP = 64, 16, 0.15, 5e-4, 20


@dataclass(frozen=True)
class Sizes:
    """Sizes of the block and of what it is given.

    Attributes:
        width: Width of the hidden states.
        heads: Number of heads.
        sequences: Number of sequences.
        length: Number of tokens in each.
        directions: Number of directions of the bias.
        trained_width: Width of the trained block, whose heads are as wide as the others.
        steps: Number of steps of its training.
    """

    width: int = 768
    heads: int = 12
    sequences: int = 8
    length: int = 256
    directions: int = 2
    trained_width: int = 256
    steps: int = 200


def mean_norm(hidden: Tensor) -> Tensor:
    """Mean norm of a row, E |x|, where `drift_norm` is the norm of the mean row, |E x|."""
    return hidden.norm(dim=1).mean()


def query_norm(projected_query: Tensor) -> Tensor:
    """Mean norm of a query, per head."""
    return projected_query.norm(dim=2).mean(dim=0)


def key_norm(projected_key: Tensor) -> Tensor:
    """Mean norm of a key, per key head."""
    return projected_key.norm(dim=2).mean(dim=0)


METRICS: Mapping[str, Callable[..., Any]] = {
    **select(
        "cosine", "drift_norm", "qk_cosine", "qk_dot", "query_mean_norm", "key_mean_norm",
        "query_cosine", "key_cosine", "query_anisotropy", "key_anisotropy", "attention_entropy",
        "attention_entropy_normalised", "attention_extremes", "score_mean", "score_spread",
    ),
    "mean_norm": mean_norm,
    "query_norm": query_norm,
    "key_norm": key_norm,
}  # fmt: skip


def watch_untrained(
    kind: Kind, seed: int, sizes: Sizes, folder: Path, levels: Sequence[float] = LEVELS
) -> None:
    """Read a block of one initialisation at all levels and directions of the bias.

    Args:
        kind: Whether the norms stand after the sublayers or before them.
        seed: Seed of the weights, of the inputs and of the directions.
        sizes: Sizes of the block and of what it is given.
        folder: Folder of the records.
        levels: Norms of the bias, ascending from 0.
    """
    settings = {
        "kind": kind, "seed": seed, "levels": levels, "metrics": list(METRICS),
        "width": sizes.width, "heads": sizes.heads, "sequences": sizes.sequences,
        "length": sizes.length, "directions": sizes.directions,
    }  # fmt: skip
    began = begin_training(folder, settings)
    if began is None:
        return
    generator = torch.Generator().manual_seed(seed)
    directions = [draw_direction(sizes.width, generator) for _ in range(sizes.directions)]
    torch.manual_seed(seed)
    stack = Stack(sizes.width, sizes.heads, kind)
    table = draw_table(VOCABULARY, sizes.width, generator)
    hidden = draw_inputs(sizes.sequences, sizes.length, table, generator)
    read_levels(stack, hidden, directions, levels, folder, step=0)
    finish_training(folder, settings, began)


def watch_trained(
    kind: Kind,
    seed: int,
    sizes: Sizes,
    corpus: Corpus,
    folder: Path,
    levels: Sequence[float] = TRAINED_LEVELS,
) -> None:
    """Train a block to fill in masked characters, and read it before the first step and after.

    The bias is added in readings alone, never in the training. Inputs are drawn uniformly from the
    embeddings of the characters.

    Args:
        kind: Whether the norms stand after the sublayers or before them.
        seed: Seed of the weights, of the inputs, of the direction and of the windows.
        sizes: Sizes of the block and of what it is given.
        corpus: The text.
        folder: Folder of the records.
        levels: Norms of the bias, ascending from 0.
    """
    settings = {
        "kind": kind, "seed": seed, "text": corpus.sha256(), "levels": levels,
        "metrics": list(METRICS), **asdict(sizes),
    }  # fmt: skip
    began = begin_training(folder, settings)
    if began is None:
        return
    width = sizes.trained_width
    heads = max(1, width * sizes.heads // sizes.width)
    torch.manual_seed(seed)
    model = MaskedCharacters(corpus.vocabulary_size, _CONTEXT, width, heads, kind)
    generator = torch.Generator().manual_seed(seed)
    direction = draw_direction(width, generator)
    places = torch.randint(
        corpus.vocabulary_size, (sizes.sequences, sizes.length), generator=generator
    )

    def read(step: int) -> None:
        hidden = model.characters.weight.detach()[places]
        read_levels(model.stack, hidden, [direction], levels, folder, step=step)

    read(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95))
    windows = Windows(corpus.train, _CONTEXT)
    for step in range(sizes.steps):
        chosen = torch.randint(len(windows), (_BATCH,), generator=generator)
        batch = torch.stack([windows[place] for place in chosen.tolist()])
        masked = torch.rand(batch.shape, generator=generator) < _MASKED
        logits = model(batch.masked_fill(masked, model.mask_id))
        optimizer.zero_grad()
        F.cross_entropy(logits[masked], batch[masked]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARMUP)
        optimizer.step()
    read(sizes.steps)
    finish_training(folder, settings, began)


def read_levels(
    stack: Stack,
    hidden: Tensor,
    directions: Sequence[Tensor],
    levels: Sequence[float],
    folder: Path,
    *,
    step: int,
) -> None:
    """Record one reading for each level and direction: the block on hidden + level * direction.

    Args:
        stack: The block.
        hidden: Input of the block without bias, [sequences, length, width].
        directions: Directions of the bias, of norm 1, [width] each.
        levels: Norms of the bias.
        folder: Folder of the records; without bias all directions have one record.
        step: Number of optimizer updates in the weights.
    """
    for level in levels:
        for number, direction in enumerate(directions if level else directions[:1]):
            place = folder / bias_folder(level, number)
            biased = (hidden + level * direction).detach()
            monitor = Monitor(
                stack, metrics=METRICS, tokens=hidden.shape[:2].numel(), batches=1,
                directory=place, alerts=(), strict=True,
            )  # fmt: skip
            monitor.probe(step, biased)
            monitor.close()
            with torch.no_grad():
                scores = stack.block.scores(biased, HEAD).flatten()
            # torch.quantile takes 16 million numbers at most.
            found = scores.sort().values[[int(q * (len(scores) - 1)) for q in QUANTILES]]
            (place / SCORES).write_text(json.dumps(found.tolist()) + "\n")


def bias_folder(level: float, direction: int) -> Path:
    """Name the folder of a level of bias; without bias it is the same for all directions.

    Args:
        level: Norm of the bias.
        direction: Number of its direction.

    Example:
        >>> bias_folder(0.5, 1).as_posix(), bias_folder(0.0, 1).as_posix()
        ('direction_1/bias_0.5', 'bias_0')
    """
    name = f"bias_{level:g}"
    return Path(f"direction_{direction}") / name if level else Path(name)
