"""Cautions: notes on values that are missing, or whose meaning is not what it seems."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

from geomon.capture import note_on_layers
from geomon.metrics.metric import Metric
from geomon.note import Note
from geomon.note_kinds import NoteKind
from geomon.record import Columns, Place, places_of, tags

# Shares and ratios above which a number does not mean what it seems to.
DUPLICATES = 0.05  # share of the rows
DISAGREEMENT = 1.5  # twonn over twonn_distinct, or the other way
BENDING = 2.0  # largest over smallest dimension among the scales
MASSIVE = 0.5  # share of the variance
ROUNDING = 0.1  # share of the median nearest distance
_FEWEST = 3  # rows that TwoNN needs

_FEW_ROWS = "fewer than 3 rows differ from one another"
_LOST = "not all of these are finite: {views}"
_TIES = "both compared distances are equal at every row, as on a lattice or after coarse rounding"


def cautions(columns: Columns) -> list[Note]:
    """Make notes on values of one stack that need caution, judged by other values."""
    notes = [
        _at_layers(
            columns, NoteKind.DUPLICATES, ("twonn", "duplicates"), DUPLICATES,
            "of the rows are exact copies of others and were left out of the dimension",
        ),
        _at_layers(
            columns, NoteKind.MASSIVE_ROWS, ("massive_share", ""), MASSIVE,
            "of the variance is carried by a few rows of massive norm: read "
            "anisotropy_without_massive",
        ),
        _at_layers(
            columns, NoteKind.ROUNDING, ("twonn", "rounding"), ROUNDING,
            "of the median nearest distance comes from rounding of the captured numbers: the "
            "dimension is distorted, too high or too low",
        ),
        *_few_rows(columns),
        _disagreement(columns),
        _bending(columns),
    ]  # fmt: skip
    return [note for note in notes if note is not None]


def explain_not_finite(
    columns: Columns,
    explained: Collection[tuple[str, int | None]],
    metrics: Mapping[str, Metric],
    lost: Mapping[tuple[str, int | None], str],
) -> list[Note]:
    """Name every value of a stack that is not finite, with the reason.

    `lost` has, by metric and layer, the captured views that are not finite either. A part is not
    named in addition to a value that is itself not finite.
    """
    reasons: dict[tuple[str, str], list[int]] = defaultdict(list)
    for metric, column in columns.items():
        for place in places_of(metric, column):
            value = place.find({"": columns})
            is_said = (metric, place.layer) in explained
            if math.isfinite(value) or is_said or _is_said_elsewhere(place, columns):
                continue
            part = "/".join(filter(None, (place.part, place.name)))
            views = lost.get((metric, place.layer))
            reason = _reason(metrics.get(metric), metric, part, value)
            reason = _LOST.format(views=views) if views else reason
            found = reasons[f"{metric}/{part}" if part else metric, reason]
            if place.layer is not None and place.layer not in found:
                found.append(place.layer)
    return notes_on_metrics(NoteKind.NOT_FINITE, reasons)


def _is_said_elsewhere(place: Place, columns: Columns) -> bool:
    """Whether another value or another note says why a value is not finite."""
    whole = Place("", place.metric, layer=place.layer)
    if place.kind in ("min", "max"):  # heads are checked one by one
        return True
    is_part = place.kind != "whole" and place != whole and columns[place.metric].layers
    if is_part and not math.isfinite(whole.find({"": columns})):
        return True
    # `cautions` makes a note on these.
    return whole._replace(part=tags.ROWS).find({"": columns}) < _FEWEST


def notes_on_metrics(kind: NoteKind, reasons: Mapping[tuple[str, str], list[int]]) -> list[Note]:
    """Make one note on all metrics that lack something for the same reason at the same layers."""
    metrics: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (metric, reason), layers in reasons.items():
        metrics[reason, tuple(layers)].append(metric)
    return [
        note_on_layers(kind, ", ".join(names), reason, layers)
        for (reason, layers), names in metrics.items()
    ]


def _reason(known: Metric | None, metric: str, part: str, value: float) -> str:
    """Say why a value is not finite."""
    if part == "std":
        return "NaN: one of the splits has no value"
    if math.isinf(value):
        of_neighbours = metric.startswith(("twonn", "gride", "local_dimension"))
        return f"infinite: {_TIES if of_neighbours else 'too large for float64'}"
    missing = known.text.missing if known is not None else ""
    return f"NaN: {missing or 'the metric returned it'}"


def _of_part(columns: Columns, metric: str, part: str) -> dict[int, float]:
    """Return the finite values of a part of a metric by layer."""
    column = columns.get(metric)
    if column is not None and part:
        column = column.parts.get(part)
    return {} if column is None else column.by_layer()


def _at_layers(
    columns: Columns, kind: NoteKind, place: tuple[str, str], limit: float, words: str
) -> Note | None:
    """Make the note on layers where a part of a metric exceeds its limit."""
    metric, part = place
    values = _of_part(columns, metric, part)
    above = {layer: value for layer, value in values.items() if value > limit}
    if not above:
        return None
    text = "{metric}{where}: up to {most:.0f} % " + words
    most = 100 * max(above.values())
    return Note(kind, text, layers=tuple(above), numbers={"metric": metric, "most": most})


def _few_rows(columns: Columns) -> list[Note]:
    """Make the notes on dimensions with too few rows."""
    words = f"{_FEW_ROWS}, so there is no dimension"
    few: dict[tuple[str, str], list[int]] = {}
    for metric in ("local_dimension", "twonn", "twonn_distinct"):
        rows = _of_part(columns, metric, tags.ROWS)
        if layers := [layer for layer, count in rows.items() if count < _FEWEST]:
            few[metric, words] = layers
    return notes_on_metrics(NoteKind.EQUAL_ROWS, few)


def _mean(columns: Columns, metric: str) -> float:
    return columns[metric].mean if metric in columns else math.nan


def _disagreement(columns: Columns) -> Note | None:
    one, other = (_mean(columns, name) for name in ("twonn", "twonn_distinct"))
    if (
        not (0 < one < math.inf and 0 < other < math.inf)
        or max(one / other, other / one) < DISAGREEMENT
    ):
        return None
    return Note(
        NoteKind.NEAR_DUPLICATES,
        "twonn is {one:.1f}, but {other:.1f} with each token at each position once "
        "(twonn_distinct): near-duplicates make the difference",
        numbers={"one": one, "other": other},
    )


def _bending(columns: Columns) -> Note | None:
    scales = {
        part: column.mean
        for part, column in (columns["gride"].parts if "gride" in columns else {}).items()
        if part[1:].isdigit() and 0 < column.mean < math.inf
    }
    if not scales or max(scales.values()) < BENDING * min(scales.values()):
        return None
    low, high = min(scales, key=scales.__getitem__), max(scales, key=scales.__getitem__)
    return Note(
        NoteKind.SCALES_DIFFER,
        "the dimension depends on the scale: gride is {high:.1f} at {at_high} and {low:.1f} at "
        "{at_low}",
        numbers={"low": scales[low], "at_low": low, "high": scales[high], "at_high": high},
    )
