"""Readings for tests, written down as values by tag. Only tests read tags."""

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from geomon.note import Note
from geomon.record import RaisedAlert, Reading, Readings, tags
from geomon.record.columns import Column, Stacks
from geomon.record.headline import HEADLINE, Charts, Detail


def charts_of(record: Readings, detail: Detail = HEADLINE) -> Charts:
    """Build charts that know the texts of a record, as the sinks of its run do."""
    charts = Charts(detail)
    charts.describe(record.runs[-1])
    return charts


_PLACE = re.compile(r"(?:(?P<stack>.+)_)?(?:layer_(?P<layer>\d+)|mean)")
_ENDING = re.compile(r"(?:(?P<part>.+)/)?(?:head_(?P<head>\d+)|(?P<kind>margin|min|max))")

# How pages speak of the metrics of synthetic runs, as a record holds it.
TEXTS: dict[str, dict[str, Any]] = {
    "twonn": {
        "title": "intrinsic dimension",
        "meaning": "Number of directions in which the nearest neighbours of a row lie.",
        "null": "Gaussian noise",
        "parts": {"n": "rows"},
    },
    "twonn_distinct": {"title": "intrinsic dimension, distinct tokens"},
    "gride": {
        "title": "intrinsic dimension by scale",
        "parts": {"k1": "scale 1", "k32": "scale 32"},
    },
    "anisotropy": {
        "title": "anisotropy",
        "meaning": "Share of the variance in the first direction.",
        "null": "isotropic noise",
        "missing": "all rows are equal",
    },
    "attention_entropy": {
        "title": "attention entropy",
        "unit": "nats",
        "null": "uniform attention",
        "meaning": "Entropy of the attention weights of a query.",
    },
    "qk_cosine": {
        "title": "cosine of mean query and mean key",
        "missing": "the mean query or the mean key of a head is 0",
    },
}


def stacks_of(values: Mapping[str, float]) -> Stacks:
    """Build columns from values by tag; values of the whole run are left out."""
    split = {tag: tag.split("/", 2) for tag in values if tag.split("/")[0] not in tags.OF_RUN}
    found = {tag: _PLACE.fullmatch(names[1]) for tag, names in split.items()}
    stacks: Stacks = {place["stack"] or "": {} for place in found.values() if place}
    # Values of a column at each depth, by (stack, metric, part) and kind; None for the mean.
    entries: dict[tuple[str, str, str], dict[Any, dict[Any, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for tag, (metric, name, *rest) in split.items():
        place = found[tag]
        if place is None:
            text = "/".join([name, *rest])
            stack = next((each for each in stacks if text.startswith(f"{each}_")), "")
            column = stacks.setdefault(stack, {}).setdefault(metric, Column())
            column.whole[text.removeprefix(f"{stack}_" if stack else "")] = values[tag]
            continue
        layer = None if place["layer"] is None else int(place["layer"])
        stacks[place["stack"] or ""].setdefault(metric, Column())
        part, kind = _ending(rest[0] if rest else "")
        entries[place["stack"] or "", metric, part][kind][layer] = values[tag]
    for (stack, metric, part), kinds in entries.items():
        column = stacks[stack][metric]
        has_heads = any(isinstance(kind, int) for kind in kinds)
        for extreme in ("min", "max"):
            at_layers = kinds.pop(extreme, None)
            if at_layers and not has_heads:  # else the heads say it
                name = "/".join(filter(None, (part, extreme)))
                _fill(column.parts.setdefault(name, Column()), {"": at_layers})
        if kinds:
            _fill(column.parts.setdefault(part, Column()) if part else column, kinds)
    return stacks


def _ending(rest: str) -> tuple[str, Any]:
    match = _ENDING.fullmatch(rest)
    if match is None:
        return rest, ""
    return match["part"] or "", match["kind"] or int(match["head"])


def _fill(column: Column, kinds: Mapping[Any, dict[Any, float]]) -> None:
    depths = {layer for at in kinds.values() for layer in at if layer is not None}
    column.first = min(depths, default=0)
    layers = range(column.first, max(depths, default=-1) + 1)
    column.layers = [kinds.get("", {}).get(layer, math.nan) for layer in layers]
    column.mean = kinds.get("", {}).get(None, math.nan)
    margins = kinds.get("margin", {})
    column.mean_margin = margins.get(None, math.nan)
    if margins.keys() - {None}:
        column.margin = [margins.get(layer, math.nan) for layer in layers]
    heads = {kind: at for kind, at in kinds.items() if isinstance(kind, int)}
    if heads:
        column.heads = [
            [heads.get(head, {}).get(layer, math.nan) for head in range(max(heads) + 1)]
            if any(layer in at for at in heads.values())
            else []
            for layer in layers
        ]


def reading_of(
    values: Mapping[str, float],
    step: int = 0,
    source: str = "probe",
    notes: Iterable[Note | str] = (),
    **fields: Any,
) -> Reading:
    """Build a reading of values by tag, "geomon/overhead" and "training/loss" among them."""
    of_training = {
        tag.removeprefix("training/"): value
        for tag, value in values.items()
        if tag.startswith("training/")
    }
    given: dict[str, Any] = {
        "time": time.time() - 60,
        "seconds": values.get(tags.SECONDS, 2.0),
        "mode": "eval",
        "tokens": 8192,
        "world_size": 1,
        "dtype": "float32",
        "overhead": values.get(tags.OVERHEAD, math.nan),
        "training": of_training,
        "stacks": stacks_of(values),
    }
    return Reading(
        step=step,
        source=source,
        notes=tuple(Note(note, note) if isinstance(note, str) else note for note in notes),
        **{**given, **fields},
    )


def with_values(reading: Reading, values: Mapping[str, float], **fields: Any) -> Reading:
    """Build a reading like another one, of other values by tag."""
    names = ("step", "source", "notes", "time", "mode", "tokens", "dtype")
    return reading_of(values, **{name: getattr(reading, name) for name in names} | fields)


def alert_of(kind: str, words: str) -> Note:
    """Build a note that is an alert."""
    return Note(kind, words, advice="look there")


def raised_of(kind: str, step: int, words: str = "", **fields: Any) -> RaisedAlert:
    """Build an alert as a line of a record."""
    words = words or f"{kind.replace('_', ' ')} (layer 2): look there (geomon alerts {kind})"
    given = {"time": time.time() - 60, "source": "check", **fields}
    return RaisedAlert(step=step, note=alert_of(kind, words), **given)


STEPS = (0, 16, 32, 64, 128, 256, 512, 1024, 1500)
# Curves of a character decoder on enwik8: expansion and compression of the paper's estimate, while
# the distinct tokens' falls throughout and scale 32 falls and then grows.
CURVES = {
    "twonn/mean": (2.5, 2.8, 3.3, 5.0, 7.3, 7.4, 6.4, 5.7, 5.3),
    "twonn_distinct/mean": (32.1, 24.0, 18.6, 11.0, 7.5, 6.2, 5.9, 5.3, 4.9),
    "gride/mean/k1": (2.6, 2.9, 3.4, 5.0, 7.2, 7.3, 6.4, 5.6, 5.2),
    "gride/mean/k32": (14.6, 10.0, 7.2, 4.1, 3.2, 3.8, 4.5, 5.6, 6.0),
    "attention_entropy/mean": (3.2, 3.2, 3.1, 3.0, 2.8, 2.4, 2.0, 1.8, 1.6),
    "geomon/overhead": (0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1, 0.06, 0.04),
}


def _at(steps: Sequence[int], index: int, layers: int, heads: int) -> dict[str, float]:
    """Layers and heads: a bell of anisotropy that grows, cosines that grow with either sign."""
    progress = index / max(len(steps) - 1, 1)
    values = {}
    for layer in range(layers + 1):
        bell = math.exp(-((4 * layer / layers - 2) ** 2))
        values[tags.layer_tag("anisotropy", layer)] = 0.1 + 0.5 * progress * bell
        if layer:
            values[tags.layer_tag("attention_entropy", layer)] = 3.0 - progress * layer / layers
            values[tags.layer_tag("qk_cosine", layer)] = (
                -(heads % 2) * (0.1 + 0.6 * progress) / max(heads, 1)
            )
        for head in range(heads if layer else 0):
            sign = 1 if head % 2 else -1
            part = tags.head_part(head)
            values[tags.layer_tag("qk_cosine", layer, part)] = sign * (0.1 + 0.6 * progress)
            values[tags.layer_tag("attention_entropy", layer, part)] = (
                3.0 - progress * layer / layers
            )
    return values


def synthetic_run(
    steps: Sequence[int] = STEPS,
    *,
    curves: Mapping[str, Sequence[float]] | None = None,
    layers: int = 4,
    heads: int = 4,
    error: float = 0.1,
    without: Sequence[str] = (),
    notes: Sequence[Note | str] = (),
    source: str = "probe",
) -> Readings:
    """Make up the readings of a run: `steps`, curves by tag, and a number of layers and heads."""
    curves = {name: values[: len(steps)] for name, values in {**CURVES, **(curves or {})}.items()}
    readings = []
    for index, step in enumerate(steps):
        values = _at(steps, index, layers, heads)
        for name, curve in curves.items():
            values[name] = curve[index]
            if name.startswith("twonn"):
                values[f"{name}/margin"] = error
        kept = {tag: value for tag, value in values.items() if tag.split("/")[0] not in without}
        readings.append(reading_of(kept, step, source, notes))
    return Readings([{"model": "Synthetic", "metrics": TEXTS}], readings)
