"""A still: the geometry of a model at one moment, without training and without a record."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from geomon.capture.anatomy.blocks import find_anatomy
from geomon.capture.probe import extra_pass
from geomon.capture.sampling import drawing_seed
from geomon.capture.selfcheck import NotSeenError, complaint
from geomon.capture.window import Window
from geomon.metrics.evaluate import evaluate
from geomon.metrics.table import METRICS, Metric, check_metrics, views_of
from geomon.monitor.options import check_counts


def measure(
    model: nn.Module,
    inputs: Any,
    *,
    metrics: Mapping[str, Metric] = METRICS,
    tokens: int = 4096,
    batches: int = 2,
    seed: int = 0,
    blocks: str | Sequence[nn.Module] | None = None,
) -> dict[str, float]:
    """Measure a model once, without training: `{tag: float}`.

    Args:
        model: Any module that contains a transformer.
        inputs: A tensor, a dict of keyword arguments, a tuple of arguments, or a function of the
            model.
        metrics: As of `Monitor`, and so are the rest.
        tokens: Rows in one batch of the estimate.
        batches: Largest number of such batches.
        seed: Of the private generator that draws rows.
        blocks: Overrides the search for the blocks.

    Raises:
        ValueError: As `Monitor`.
        NotSeenError: Something that the metrics read was not seen in the pass.
    """
    check_counts(tokens=tokens, batches=batches)
    checked = check_metrics(metrics)
    views = views_of(checked)
    window = Window(
        find_anatomy(model, blocks), views, rows=tokens * batches, seed=drawing_seed(seed)
    )
    extra_pass(model, inputs, window)
    snapshot = window.snapshot()
    unseen = complaint(snapshot, views)
    if unseen is not None:
        raise NotSeenError(unseen)
    return evaluate(snapshot, checked, rows=tokens, batches=batches, strict=True).values


__all__ = ["measure"]
