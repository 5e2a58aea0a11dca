"""The geometry of a plain matrix of hidden states, without a model: a notebook's one-liner."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from geomon.capture.snapshot import Layer, Snapshot
from geomon.metrics.evaluate import evaluate
from geomon.metrics.table import METRICS, Metric, check_metrics, views_of

_LAYER = 1


def geometry(
    hidden: Any,
    token_ids: Any = None,
    positions: Any = None,
    *,
    metrics: Mapping[str, Metric] = METRICS,
    tokens: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Measure a matrix of hidden states: every metric that its inputs allow.

    Rows that are not finite are left out. The rows are shuffled and measured in batches of
    `tokens`, as a training is; without `tokens` all are one batch.

    Args:
        hidden: [tokens, width], a tensor or an array, floating-point or integer.
        token_ids: [tokens]; for the metrics of token types. None leaves those out.
        positions: [tokens], of each row in its sequence; None counts equal tokens as repeated
            wherever they stand.
        metrics: From a name to a function of views.
        tokens: Rows in one batch of the estimate.
        seed: Of the shuffling.

    Returns:
        `{"twonn": 7.3, "twonn/n": 4096.0, ...}`; NaN where a value does not exist.

    Raises:
        ValueError: Not a matrix, too few rows, or ids and positions of another length.

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
    if token_ids is not None and positions is None:
        captured["positions"] = torch.zeros(len(rows), dtype=torch.int64)
    finite = rows.isfinite().all(dim=1).nonzero().squeeze(1)
    order = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(seed))]
    if len(order) < 3:
        raise ValueError(
            f"expected at least 3 finite rows, got {len(order)} of {len(rows)}: give more tokens"
        )
    captured = {name: values[order] for name, values in captured.items()}
    captured |= {"hidden": rows[order], "precision": precision}
    allowed = {
        name: metric
        for name, metric in check_metrics(metrics).items()
        if views_of({name: metric}) <= captured.keys()
    }
    size = len(order) if tokens is None else tokens
    result = evaluate(
        Snapshot([Layer(_LAYER, "rows", captured)], len(order), "", ""),
        allowed,
        rows=size,
        batches=max(1, len(order) // size),
    )
    marker = f"/layer_{_LAYER:02d}"
    return {
        tag.replace(marker, "", 1): value
        for tag, value in result.values.items()
        if marker in tag or tag.endswith("/null")
    }


def _as_rows(hidden: Any) -> Tensor:
    rows: Tensor = torch.as_tensor(hidden).detach().cpu()
    if rows.ndim != 2 or rows.shape[1] < 1:
        raise ValueError(
            f"expected hidden states [tokens, width], got {list(rows.shape)}: flatten the leading "
            "dimensions, as in hidden.reshape(-1, hidden.shape[-1])"
        )
    return rows if rows.is_floating_point() else rows.double()


def _as_labels(name: str, given: Any, count: int) -> Tensor:
    labels: Tensor = torch.as_tensor(given).detach().cpu().flatten()
    if len(labels) != count:
        raise ValueError(
            f"expected {count} {name}, one for each row of hidden states, got {len(labels)}"
        )
    return labels
