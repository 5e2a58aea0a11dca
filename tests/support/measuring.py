"""Calls that measure a snapshot, watch a model or train it, for tests and benchmarks of metrics.

Tests of metrics import names of geomon's inner modules from here.
"""

# ruff: noqa: F401

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geomon import Memory, Monitor, every, select
from geomon.capture.snapshot import (
    CAPTURED,
    SOURCES,
    CapturedView,
    Layer,
    Part,
    PassInfo,
    Snapshot,
)
from geomon.metrics import Evaluator, check_metrics
from geomon.metrics.cautions import cautions, explain_not_finite
from geomon.metrics.evaluate import Evaluation
from geomon.metrics.layer_views import LayerViews, MissingViewError, ViewsWithout
from geomon.metrics.metric import Sizes
from geomon.metrics.views import DERIVED, derived, groups_of, spread_rows
from geomon.metrics.without import NoMarginError, sliced
from geomon.note import Note
from geomon.record.columns import margin, tagged


class Measured(NamedTuple):
    """Values by tag, and notes on them."""

    values: dict[str, float]
    notes: list[Note]


class Seen(NamedTuple):
    """Values by tag, and sentences of the notes."""

    values: dict[str, float]
    notes: list[str]


def seen(evaluation: Evaluation) -> Seen:
    """Unpack an evaluation."""
    return Seen(tagged(evaluation.stacks), [note.words() for note in evaluation.notes])


def evaluate(
    snapshot: Snapshot,
    metrics: Mapping[str, Callable[..., Any]],
    *,
    rows: int,
    splits: int,
    queries: int | None = None,
    strict: bool = False,
) -> Measured:
    """Every metric at every layer of a snapshot."""
    evaluator = Evaluator(check_metrics(metrics), splits, queries, strict)
    found = evaluator.evaluate(snapshot.layers, rows)
    return Measured(tagged(found.stacks), found.notes)


def nowhere(step: int) -> AbstractContextManager[None]:
    """Nothing around a step."""
    return nullcontext()


def train(
    model: nn.Module,
    loss_of: Callable[[int], Tensor],
    steps: Iterable[int],
    around: Callable[[int], AbstractContextManager[Any]] = nowhere,
    rate: float = 1e-2,
) -> list[float]:
    """Losses of some steps, each of them with something around its forward pass."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=rate), []
    for step in steps:
        with around(step):
            loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def watching(model: nn.Module, **options: Any) -> tuple[Monitor, Memory]:
    """Build a monitor that reads one metric on few rows at every step, and its sink."""
    memory = Memory()
    few = {
        "metrics": select("variance"), "tokens": 64, "splits": 1, "schedule": every(1),
        "strict": True, "directory": None, "sinks": [memory],
    }  # fmt: skip
    return Monitor(model, **(few | options)), memory
