"""One look without training and without a record: `measure` a model, the `geometry` of rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from geomon.capture import Window, derive_seed, extra_pass, find_anatomy
from geomon.capture.snapshot import Layer, NotSeenError, explain_missing
from geomon.metrics import METRICS, Evaluator, Metric, check_metrics
from geomon.monitor import check_count
from geomon.record import tags

_LAYER = 1


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
        metrics: Metrics to measure: a dict from a name to a function of views.
        tokens: Number of rows of hidden states in one split of the estimate.
        batches: Largest number of splits, from which the deviation of each estimate is computed.
        seed: Seed of the private generator that samples rows.
        blocks: The blocks of the model, where the search does not find them: a regular expression
            that matches their whole names, or the modules.

    Raises:
        ValueError: The model has no blocks, a metric reads an unknown view, or a number is out of
            range.
        NotSeenError: Something that the metrics read was not seen in the pass.
    """
    check_count("tokens", tokens)
    check_count("batches", batches)
    evaluator = Evaluator(check_metrics(metrics), batches, strict=True)
    views = evaluator.views
    window = Window(
        find_anatomy(model, blocks), views, rows=tokens * batches, seed=derive_seed(seed)
    )
    extra_pass(model, inputs, window)
    snapshot = window.snapshot()
    missing = explain_missing(snapshot, views)
    if missing is not None:
        raise NotSeenError(missing)
    return evaluator.evaluate(snapshot.layers, tokens).values


def geometry(
    hidden: Any,
    token_ids: Any = None,
    positions: Any = None,
    *,
    sequences: Any = None,
    metrics: Mapping[str, Metric] = METRICS,
    tokens: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Measure a plain matrix of hidden states: every metric that its inputs allow.

    Rows that are not finite are left out. The rows are shuffled and measured in splits of `tokens`
    rows, as in a training; without `tokens` all rows are one split.

    Args:
        hidden: Rows, [tokens, width], a tensor or an array, floating-point or integer.
        token_ids: Token id of each row, [tokens], for the metrics of token types. None leaves those
            metrics out.
        positions: Position of each row in its sequence, [tokens]. None counts equal tokens as
            repeated wherever they stand.
        sequences: Number or id of the sequence that each row is of, [tokens], for the intervals
            (`twonn/margin`). None leaves them out: rows of one sequence are alike, and without it
            nobody knows how alike.
        metrics: Metrics to measure: a dict from a name to a function of views.
        tokens: Number of rows in one split of the estimate.
        seed: Seed of the private generator that shuffles the rows.

    Returns:
        `{"twonn": 7.3, "twonn/n": 4096.0, ...}`; NaN where a value does not exist.

    Raises:
        ValueError: `hidden` is no matrix or has fewer than 3 finite rows, or ids or positions have
            another length.

    Example:
        >>> rows = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
        >>> values = geometry(rows)
        >>> 5 < values["twonn"] < 9, round(values["twonn/n"])
        (True, 500)
    """
    rows = _as_rows(hidden)
    precision = torch.finfo(rows.dtype).eps
    captured: dict[str, Any] = {}
    for name, given in (("token_ids", token_ids), ("positions", positions)):
        if given is not None:
            captured[name] = _as_labels(name, given, len(rows))
    if sequences is not None:
        labels = _as_labels("sequences", sequences, len(rows))
        captured["sequences"] = torch.unique(labels, return_inverse=True)[1]
    if token_ids is not None and positions is None:
        captured["positions"] = torch.zeros(len(rows), dtype=torch.int64, device="cpu")
    finite = rows.isfinite().all(dim=1).nonzero().squeeze(1)
    generator = torch.Generator("cpu").manual_seed(seed)
    shuffled = torch.randperm(len(finite), generator=generator, dtype=torch.int64, device="cpu")
    order = finite[shuffled]
    if len(order) < 3:
        raise ValueError(
            f"expected at least 3 finite rows, got {len(order)} of {len(rows)}: give more tokens"
        )
    captured = {name: values[order] for name, values in captured.items()}
    captured |= {"hidden": rows[order], "precision": precision}
    allowed = {
        name: metric
        for name, metric in check_metrics(metrics).items()
        if Evaluator({name: metric}, 1).views <= captured.keys()
    }
    size = len(order) if tokens is None else tokens
    evaluator = Evaluator(allowed, batches=max(1, len(order) // size))
    result = evaluator.evaluate([Layer(_LAYER, "rows", captured)], size)
    marker = f"/layer_{_LAYER:02d}"
    return {
        tag.replace(marker, "", 1): value
        for tag, value in result.values.items()
        if marker in tag or tags.parse(tag) is None
    }


def _as_tensor(values: Any) -> Tensor:
    """Convert to a tensor on the host, whatever the default dtype and device are."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    return torch.as_tensor(np.asarray(values), device="cpu")


def _as_rows(hidden: Any) -> Tensor:
    rows = _as_tensor(hidden)
    if rows.ndim != 2 or rows.shape[1] < 1:
        raise ValueError(
            f"expected hidden states [tokens, width], got {list(rows.shape)}: flatten the leading "
            "dimensions, as in hidden.reshape(-1, hidden.shape[-1])"
        )
    return rows if rows.is_floating_point() else rows.double()


def _as_labels(name: str, given: Any, count: int) -> Tensor:
    labels = _as_tensor(given).flatten()
    if len(labels) != count:
        raise ValueError(
            f"expected {count} {name}, one for each row of hidden states, got {len(labels)}"
        )
    return labels


__all__ = ["geometry", "measure"]
