"""One look without training or record: `measure` a model, or the `geometry` of rows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from geomon.analysis import significant
from geomon.array_input import as_labels, as_rows
from geomon.capture import (
    Layer,
    NotSeenError,
    TensorPlace,
    Window,
    check_extra_layers,
    derive_seed,
    explain_missing,
    extra_pass,
    find_anatomy,
)
from geomon.distributed import find_place
from geomon.metrics import METRICS, Evaluator, Metric, check_metrics
from geomon.monitor import check_count, measure_alone
from geomon.note import Note
from geomon.note_kinds import NoteKind
from geomon.record import places_of, tagged, tags

_LAYER = 1

# Fewest rows that can be measured.
_FEWEST = 3

# Rows beyond this power of two are refused, because their fourth power would not fit float64.
_LARGEST_EXPONENT = 200


class Values(dict[str, float]):
    """A dict of values by tag, with notes on how far they can be trusted.

    Args:
        values: Values by tag.
        notes: Sentences for the reader of the numbers. Defaults to ().

    Attributes:
        notes: The sentences. Every value that is not finite is named in one.

    Example:
        >>> values = Values({"twonn": 7.3}, ["300 of 4096 rows"])
        >>> values["twonn"], values.notes
        (7.3, ('300 of 4096 rows',))
        >>> print(values)
        {'twonn': 7.3}
        note: 300 of 4096 rows
    """

    notes: tuple[str, ...]

    def __init__(self, values: Mapping[str, float], notes: Iterable[str] = ()) -> None:
        super().__init__(values)
        self.notes = tuple(notes)

    def __repr__(self) -> str:
        return "\n".join([super().__repr__(), *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        """Show a table in a notebook: means over layers, or every metric of a single layer."""
        ends = (f"/{tags.MEAN}", f"_{tags.MEAN}")  # the second is the mean of one stack
        whole = [tag for tag in self if tag.count("/") == 1 and "/null_" not in tag]
        means = [tag for tag in whole if tag.endswith(ends)]
        shown = means or [tag for tag in self if "/" not in tag]
        rows = "".join(
            f"<tr><td>{escape(tag)}</td><td>{self._words(tag)}</td></tr>" for tag in shown
        )
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return f"<table>{rows}</table><p>{len(shown)} of {len(self)} values</p><ul>{notes}</ul>"

    def _words(self, tag: str) -> str:
        value, margin = self[tag], self.get(f"{tag}/margin", math.nan)
        words = significant(value, 4)
        return f"{words} ± {significant(margin, 2)}" if math.isfinite(margin) else words

    def copy(self) -> "Values":
        """Copy the values and the notes."""
        return Values(self, self.notes)


def measure(
    model: nn.Module,
    inputs: Any,
    *,
    metrics: Mapping[str, Callable[..., Any]] = METRICS,
    tokens: int = 4096,
    splits: int = 1,
    queries: int | None = Evaluator.queries,
    seed: int = 0,
    blocks: str | Sequence[nn.Module] | None = None,
    extra_layers: Sequence[str] = (),
) -> Values:
    """Measure a model once, without training: `{tag: float}`, with `.notes`.

    If ranks share the model, all of them run the pass, and each measures its own part.

    Args:
        model: Any module that contains a transformer.
        inputs: A tensor, a dict of keyword arguments, a tuple of arguments, or a function of the
            model.
        metrics: Metrics to measure: a dict from a name to a function of views. Defaults to
            `METRICS`.
        tokens: Number of rows of hidden states in one split of the estimate. Defaults to 4096.
        splits: Largest number of splits; with at least two, their deviation is computed too.
            Defaults to 1.
        queries: Number of rows of a split from which distances to all its rows are measured, or
            None for all, as in the papers. Defaults to 1024.
        seed: Seed of the private generator that samples rows. Defaults to 0.
        blocks: The blocks of the model, if the search does not find them: a regular expression that
            matches their whole names, or the modules.
        extra_layers: Further layers to measure: "final_norm" (the last block's output after the
            final norm), "embedding" and "unembedding" (rows of the two matrices). Defaults to ().

    Returns:
        The values by tag.

    Raises:
        ValueError: If the model has no blocks, a metric reads an unknown view, or a number is out
            of range.
        NotSeenError: If the pass did not show something that the metrics read.
    """
    check_count("tokens", tokens)
    check_count("splits", splits)
    check_count("queries", queries, at_least=_FEWEST, or_none=True)
    evaluator = Evaluator(check_metrics(metrics), splits, queries, strict=True, explains=True)
    views, place = evaluator.views, find_place([model])
    window = Window(
        find_anatomy(model, blocks), views, rows=tokens * splits, seed=derive_seed(seed),
        extra_layers=check_extra_layers(extra_layers),
        place=TensorPlace(place.shard, place.shards),
    )  # fmt: skip
    extra_pass(model, inputs, window)
    snapshot = window.snapshot()
    missing = explain_missing(snapshot, views)
    if missing is not None:
        raise NotSeenError(missing)
    reading = measure_alone(snapshot, evaluator, tokens)
    notes = [*place.notes_alone(), *reading.notes]
    return Values(tagged(reading.stacks), dict.fromkeys(note.words() for note in notes))


def geometry(
    hidden: Any,
    token_ids: Any = None,
    positions: Any = None,
    *,
    sequences: Any = None,
    metrics: Mapping[str, Callable[..., Any]] = METRICS,
    tokens: int | None = None,
    queries: int | None = Evaluator.queries,
    seed: int = 0,
) -> Values:
    """Measure a plain matrix of hidden states: every metric that its inputs allow.

    Rows that are not finite are left out. The rows are shuffled and measured in splits of `tokens`
    rows, as in a training; without `tokens`, all rows form one split.

    Args:
        hidden: Rows, [tokens, width], a tensor or an array, floating-point or integer.
        token_ids: Token id of each row, whole numbers, [tokens], for the metrics of token types.
            Defaults to None, which leaves those metrics out.
        positions: Position of each row in its sequence, whole numbers, [tokens]. Defaults to None,
            which counts equal tokens as repeated at any position.
        sequences: Index or id of the sequence of each row, whole numbers, [tokens], for the
            intervals (`twonn/margin`). Defaults to None, which leaves intervals out, because rows
            of one sequence are alike.
        metrics: Metrics to measure: a dict from a name to a function of views. Defaults to
            `METRICS`.
        tokens: Number of rows in one split of the estimate, at least 3. Defaults to all rows.
        queries: Number of rows of a split from which distances to all its rows are measured, or
            None for all. Defaults to 1024.
        seed: Seed of the private generator that shuffles the rows. Defaults to 0.

    Returns:
        `{"twonn": 7.3, "twonn/n": 4096.0, ...}`, a dict with `.notes`. A value that does not exist
        is NaN, and a note says why.

    Raises:
        ValueError: If `hidden` is not a matrix of real numbers between 2^-200 and 2^200, or has
            fewer than 3 finite rows, if ids or positions are not whole numbers or have another
            length, if a number is out of range, or if none of the metrics can be measured on the
            inputs.

    Example:
        >>> rows = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
        >>> values = geometry(rows)
        >>> 5 < values["twonn"] < 9, round(values["twonn/n"]), values.notes
        (True, 500, ())
    """
    if tokens is not None:
        check_count("tokens", tokens, at_least=_FEWEST)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    rows, precision = as_rows(hidden)
    captured: dict[str, Any] = {}
    for name, given in (("token_ids", token_ids), ("positions", positions)):
        if given is not None:
            captured[name] = as_labels(name, given, len(rows))
    if sequences is not None:
        labels = as_labels("sequences", sequences, len(rows))
        captured["sequences"] = torch.unique(labels, return_inverse=True)[1]
    if token_ids is not None and positions is None:
        captured["positions"] = torch.zeros(len(rows), dtype=torch.int64, device="cpu")
    given_rows = len(rows)
    finite = rows.isfinite().all(dim=1).nonzero().squeeze(1)
    generator = torch.Generator("cpu").manual_seed(seed)
    shuffled = torch.randperm(len(finite), generator=generator, dtype=torch.int64, device="cpu")
    order = finite[shuffled]
    if len(order) < _FEWEST:
        raise ValueError(
            f"expected at least {_FEWEST} finite rows, got {len(order)} of {len(rows)}: use more "
            "tokens"
        )
    rows = rows[order]
    _check_size(rows)
    captured = {name: values[order] for name, values in captured.items()}
    captured |= {"hidden": rows, "precision": precision}
    size = len(order) if tokens is None else tokens
    splits = max(1, len(order) // size)
    check_count("queries", queries, at_least=_FEWEST, or_none=True)
    allowed = _allowed(check_metrics(metrics), captured)
    evaluator = Evaluator(allowed, splits, queries, explains=True)
    values, more = _evaluate(evaluator, Layer(_LAYER, "rows", captured), size)
    notes = _notes_on_rows(given_rows, len(order), size, splits)
    return Values(values, dict.fromkeys(note.words() for note in [*notes, *more]))


def _allowed(metrics: dict[str, Metric], captured: Mapping[str, Any]) -> dict[str, Metric]:
    """Select the metrics whose views are available."""
    allowed = {n: metric for n, metric in metrics.items() if metric.can_be_measured(captured)}
    if not allowed:
        reasons = "; ".join(
            f"{name} reads {', '.join(sorted(metric.captured - captured.keys()))}"
            for name, metric in metrics.items()
        )
        raise ValueError(
            f"none of the metrics can be measured on {', '.join(sorted(captured))}: {reasons}"
        )
    return allowed


def _notes_on_rows(given: int, finite: int, size: int, splits: int) -> list[Note]:
    """Say which rows were left out, and whether there were fewer than asked for."""
    notes = []
    if finite < given:
        numbers = {"lost": given - finite, "rows": given}
        text = "{lost} of {rows} rows that are not finite were left out"
        notes.append(Note(NoteKind.ROWS_NOT_FINITE, text, numbers=numbers))
    if finite < size:
        numbers = {"rows": finite, "asked": size}
        text = (
            "{rows} rows, fewer rows than tokens asks for ({asked}): TwoNN depends on that number"
        )
        notes.append(Note(NoteKind.FEW_ROWS, text, numbers=numbers))
    elif finite > size * splits:
        text = f"{finite - size * splits} rows beyond the last full split were left out"
        notes.append(Note(NoteKind.ROWS_BEYOND_SPLITS, text))
    return notes


def _check_size(rows: Tensor) -> None:
    """Refuse float64 rows whose powers do not fit float64 (powers of shorter types always fit)."""
    if rows.dtype == torch.float64:
        largest = rows.abs().max().item()
        if abs(math.frexp(largest)[1]) > _LARGEST_EXPONENT:
            raise ValueError(
                f"expected hidden states between 2^-{_LARGEST_EXPONENT} and 2^{_LARGEST_EXPONENT}, "
                f"got {largest:.3g} as the largest number: scale the rows"
            )


def _evaluate(evaluator: Evaluator, layer: Layer, size: int) -> tuple[dict[str, float], list[Note]]:
    """Measure plain rows; tags name no layer, and each value is explained."""
    result = evaluator.combine([evaluator.measure_layer(layer, size)], size)
    # Tags omit the layer, because there is only one and no mean over layers.
    marker = f"/{tags.layer_tag('', _LAYER)}"
    values = {
        place.tag.replace(marker, ""): place.find(result.stacks)
        for metric, column in result.stacks[""].items()
        for place in places_of(metric, column)
        if place.layer == _LAYER or place.kind == "whole"
    }
    return values, [msgspec.structs.replace(note, layers=()) for note in result.notes]


__all__ = ["Values", "geometry", "measure"]
