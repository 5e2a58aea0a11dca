"""What a report says of runs: words, curves, profiles and heads, as plain data for the page.

A run may hold tens of millions of values: curves are thinned to some hundred steps, profiles and
heads to a few dozen, and numbers are rounded to five digits.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from geomon.analysis import Curve, curve_of, single_source, summarise
from geomon.analysis.alerts import first_alerts
from geomon.analysis.curves import plain_curve, training_curve
from geomon.analysis.numbers import number
from geomon.analysis.summary import headline
from geomon.record import Reading, Readings, tags
from geomon.record.columns import MetricText, Place
from geomon.record.headline import beside, headlines_of
from geomon.record.printable import printable
from geomon.show.loading import load, name_runs

# Largest numbers of steps in curves, and in what a slider moves over.
_MOST_POINTS, _MOST_STEPS = 400, 32
# What describes a start of a run and nothing that distinguishes it from runs beside it.
_OF_A_START = ("time", "from_step", "seed", "training/seed")
# What the page says of values that are of no metric.
_LOGGED = "Values that the training logs, its loss for instance."
_COST = "What geomon costs: overhead is its share of the time of the training."
_OVERHEAD = "share of the time that geomon takes"


class Drawn(NamedTuple):
    """A curve, and how the page speaks of it.

    Attributes:
        curve: The curve.
        label: What it is, in words.
        unit: Label of its axis.
        meaning: A sentence on what it says.
        chart: Title of the chart in which it stands; "" where it is drawn only if it is chosen.
        null: Value of rows without structure and its words; None where it is not known.
    """

    curve: Curve
    label: str
    unit: str
    meaning: str
    chart: str = ""
    null: tuple[float, str] | None = None


@dataclass(frozen=True)
class Run:
    """A run of which a report is made.

    Attributes:
        name: Name for readers, different for each run of a report.
        path: Folder of the run, or the path of its file.
        readings: Its readings, of one stack.
    """

    name: str
    path: Path
    readings: Readings

    @property
    def description(self) -> Mapping[str, Any]:
        """Description of the run's last start; empty where the record has none."""
        return self.readings.runs[-1] if self.readings.runs else {}


def load_runs(paths: Sequence[Path], stack: str | None = None) -> list[Run]:
    """Read the records of runs.

    Args:
        paths: Folders of runs, or paths of their files.
        stack: Name of the stack to show, for models with several; None for the main one.

    Raises:
        FileNotFoundError: A folder holds no record.
        ValueError: A file is not a record, has no readings, or its model no such stack.
    """
    runs = []
    for path, name in zip(paths, name_runs(paths), strict=True):
        runs.append(Run(name, path, load(path, stack)))
    return runs


def build_content(runs: Sequence[Run]) -> dict[str, Any]:
    """Build everything that the page shows of runs, as numbers, texts, lists and dicts.

    Args:
        runs: Runs, at least one.
    """
    drawn = [_drawn(Readings(run.readings.runs, single_source(run.readings))) for run in runs]
    contents = [_run_content(run, curves) for run, curves in zip(runs, drawn, strict=True)]
    groups = _seed_groups(runs)
    present = {name: each for curves in reversed(drawn) for name, each in curves.items()}
    charts: dict[str, dict[str, Any]] = {}
    for name, each in present.items():
        if each.chart:
            empty: dict[str, Any] = {"title": each.chart, "unit": each.unit, "lines": {}}
            charts.setdefault(each.chart, empty)["lines"][name] = each.label
    texts = _texts_of([run.readings for run in runs])
    return {
        "runs": contents,
        "groups": groups,
        "charts": list(charts.values()),
        "curves": {
            name: {"label": each.label, "unit": each.unit, "meaning": each.meaning}
            for name, each in sorted(present.items())
        },
        "titles": {name: printable(text.label) for name, text in texts.items()},
        "configuration": _configuration(runs),
        "cost_labels": list(dict.fromkeys(label for c in contents for label in c["cost"])),
        "glossary": {
            **{printable(f"{text.title} ({name})"): printable(text.meaning)
               for name, text in texts.items() if text.meaning},
            "training": _LOGGED, "geomon": _COST,
        },
    }  # fmt: skip


def _texts_of(runs: Sequence[Readings]) -> dict[str, MetricText]:
    """How the page speaks of each metric of runs, by its name."""
    every = {name: run for run in reversed(runs) for each in run for name in each.columns}
    listed = [name for run in runs for name in run.metrics if name in every]
    return {name: every[name].text_of(name) for name in dict.fromkeys([*listed, *every])}


def _drawn(readings: Readings) -> dict[str, Drawn]:
    """The curves of a run by name, those of charts first for each metric."""
    drawn: dict[str, Drawn] = {}
    for metric, text in _texts_of([readings]).items():
        chart = printable(readings.text_of(beside(metric)).title)
        headlines = {each.tag or each.name: each for each in headlines_of(metric, text)}
        places = {place.tag: place for place in _means(readings, metric)}
        for name in dict.fromkeys([*headlines, *places]):
            charted, place = headlines.get(name), places.get(name, Place("", metric, kind=""))
            if charted is not None and not charted.chart:
                continue  # an end of the interval, which is a band
            words = f"{text.title_of(place.part)}, mean over layers"
            if place.kind == "value":
                curve = curve_of(readings, metric, part=place.part)
            else:
                find = charted.value if charted else partial(_find, place)
                curve, words = plain_curve(readings, find), f"{words}, {place.name or place.kind}"
            drawn[name] = Drawn(
                curve, printable(charted.words if charted else words), printable(text.label),
                printable(text.meaning), chart if charted else "",
                _null_of(readings, metric) if place == Place("", metric) else None,
            )  # fmt: skip
    for name in dict.fromkeys(name for reading in readings for name in reading.training):
        # A loss on the probe is of its own: the function that gives it may have another unit.
        title = {tags.LOSS: "training loss", tags.PROBE_LOSS: "loss on the probe"}.get(name, "")
        drawn[tags.training_tag(name)] = Drawn(
            training_curve(readings, name), title or printable(f"training {name}"),
            "loss" if title else "", _LOGGED, title,
        )  # fmt: skip
    overhead = plain_curve(readings, lambda reading: reading.overhead)
    drawn[tags.OVERHEAD] = Drawn(overhead, _OVERHEAD, "", _COST)
    return {name: each for name, each in drawn.items() if len(each.curve)}


def _find(place: Place, reading: Reading) -> float:
    return place.find(reading.stacks)


def _null_of(readings: Readings, metric: str) -> tuple[float, str] | None:
    null = _rounded(readings[-1].column(metric).whole.get("null", math.nan))
    return None if null is None else (null, printable(readings.text_of(metric).null or "null"))


def _means(readings: Readings, metric: str) -> list[Place]:
    """List what the readings have of a metric over all layers, but for deviations."""
    every: dict[Place, None] = {}
    for column in (reading.columns[metric] for reading in readings if metric in reading.columns):
        for part, own in {"": column, **column.parts}.items():
            base = Place("", metric, part)
            if part.rpartition("/")[2] == "std":
                continue
            if any(own.depths()) or not math.isnan(own.mean):
                every[base] = None
            if own.heads:
                every |= dict.fromkeys(base._replace(kind=kind) for kind in ("min", "max"))
            every |= dict.fromkeys(base._replace(kind="whole", name=name) for name in own.whole)
    return list(every)


def _run_content(run: Run, curves: Mapping[str, Drawn]) -> dict[str, Any]:
    selected = Readings(run.readings.runs, single_source(run.readings))
    curve = curve_of(selected, "twonn")
    phase = curve.phase() if len(curve) else None
    return {
        "name": printable(run.name),
        "model": printable(str(run.description.get("model", "unknown model"))),
        "phase": phase.name if phase else "unknown",
        "headline": printable(headline(run.readings)),
        "numbers": _numbers(selected, curve),
        "sentences": [printable(text) for text in summarise(run.readings)],
        "alerts": _alerts(run.readings),
        "notes": _notes(run.readings),
        "cost": dict(_cost(run.readings)),
        "curves": {name: _points(each) for name, each in curves.items()},
        **_depth(selected),
    }


def _numbers(readings: Readings, curve: Curve) -> list[tuple[str, str]]:
    """Labels and texts of the few numbers that a reader looks for first."""
    last = readings[-1]
    numbers = [("readings", f"{len(readings):,}, to step {last.step:,}")]
    if len(curve) and (phase := curve.phase()).earliest is not None:
        peak = f"{number(phase.peak)} at step {phase.peak_step:,}"
        numbers.append((f"{readings.text_of('twonn').title}, peak", peak))
    layers = last.layers("anisotropy")
    known = [(value, layer) for layer, value in last.column("anisotropy").by_layer().items()]
    if known:
        value, layer = max(known)
        title = readings.text_of("anisotropy").title
        numbers.append((f"{title}, highest", f"{value:.2g} at layer {layer} of {layers[-1]}"))
    loss = training_curve(readings)
    if len(loss):
        since = f" at step {loss.steps[-1]:,}" if loss.steps[-1] < last.step else ""
        numbers.append(("training loss", f"{loss.values[-1]:.3g}{since}"))
    if math.isfinite(last.overhead):
        numbers.append(("geomon's share of the time", f"{last.overhead * 100:.2g} %"))
    return numbers


def _alerts(readings: Readings) -> list[dict[str, Any]]:
    """Alerts by kind: the first, and the number of them."""
    return [
        {"step": first.step, "words": printable(first.note.words()), "count": first.total}
        for first in first_alerts(readings)
    ]


def _notes(readings: Readings) -> list[dict[str, Any]]:
    """Remarks on the record and notes of readings, those of one kind as one."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for reading in readings:
        for note in reading.notes:
            if not note.is_alert:
                first = found.get((note.stack, note.kind), {"first": reading.step, "count": 0})
                found[note.stack, note.kind] = {
                    "text": printable(note.words()), "first": first["first"], "last": reading.step,
                    "count": first["count"] + 1,
                }  # fmt: skip
    remarks = [
        {"text": printable(text), "first": None, "last": None, "count": 1}
        for text in readings.remarks()
    ]
    return remarks + sorted(found.values(), key=lambda note: -note["count"])


def _cost(readings: Readings) -> list[tuple[str, str]]:
    seconds = [reading.seconds for reading in readings]
    last = readings[-1]
    times = [reading.time for reading in readings]
    cost = [
        ("readings", f"{len(readings):,}"),
        ("time in readings", f"{math.fsum(seconds):,.1f} s"),
        ("longest reading", f"{max(seconds):.2f} s"),
        ("rows in a reading", f"{last.tokens:,} on {last.world_size} rank(s), {last.dtype}"),
        ("from first to last reading", f"{(max(times) - min(times)) / 60:,.1f} min"),
    ]
    if math.isfinite(last.overhead):
        cost.append(("share of the training's time", f"{last.overhead * 100:.2g} %"))
    return [(label, printable(text)) for label, text in cost]


def _points(drawn: Drawn) -> dict[str, Any]:
    """Steps, values, half widths of 95 % intervals and the null of a curve."""
    curve = drawn.curve
    kept = _spread(curve.steps, _MOST_POINTS)
    ends = {curve.values.index(max(curve.values)), curve.values.index(min(curve.values))}
    indices = sorted({*kept, *ends})
    points: dict[str, Any] = {
        "x": [curve.steps[index] for index in indices],
        "y": [_rounded(curve.values[index]) for index in indices],
    }
    if any(margins := curve.margins):
        points["margin"] = [_rounded(margins[index]) for index in indices]
    if drawn.null is not None:
        points["null"], points["null_words"] = drawn.null
    return points


def _depth(readings: Readings) -> dict[str, Any]:
    """Profiles over depth and tables of heads, at a few steps."""
    steps = [reading.step for reading in readings]
    few = [readings[index] for index in _spread(steps, _MOST_STEPS)]
    shown = [reading.step for reading in few]
    profiles: dict[str, dict[str, Any]] = {}
    tables: dict[str, dict[str, Any]] = {}
    for metric in _texts_of([readings]):
        columns = [reading.column(metric) for reading in few]
        layers = sorted({layer for column in columns for layer in column.depths()})
        if layers:
            null, words = _null_of(readings, metric) or (None, "")
            profiles[metric] = {
                "layers": layers,
                "rows": [[_rounded(column.at(n)) for n in layers] for column in columns],
                "null": null,
                "null_words": words,
            }
        heads = [column.by_head() for column in columns]
        places = {place for known in heads for place in known}
        if places:
            rows = sorted({layer for layer, _ in places})
            count = range(1 + max(head for _, head in places))
            tables[metric] = {
                "layers": rows,
                "rows": [
                    [[_rounded(known.get((n, h), math.nan)) for h in count] for n in rows]
                    for known in heads
                ],
            }
    return {
        "profiles": {"steps": shown, "values": profiles},
        "heads": {"steps": shown, "values": tables},
    }


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """Choose indices of ascending steps: half of them evenly, half evenly on a logarithmic axis."""
    if len(steps) <= most:
        return list(range(len(steps)))
    even = np.linspace(0, len(steps) - 1, most // 2)
    places = np.log1p(np.array(steps, dtype=float) - steps[0])
    near = np.searchsorted(places, np.linspace(places[0], places[-1], most // 2))
    return sorted({*even.round().astype(int).tolist(), *near.tolist()} - {len(steps)})


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _seed_groups(runs: Sequence[Run]) -> list[list[int]]:
    """Indices of runs whose descriptions differ in the seed and nothing else; two at least.

    Runs of one seed that are described alike differ in something that no record holds, such as the
    learning rate: a mean of them would mean nothing.
    """
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        told = {key: x for key, x in run.description.items() if key not in _OF_A_START}
        if told:
            groups.setdefault(repr(sorted(told.items())), []).append(index)
    seeds = [
        repr([run.description.get(name) for name in ("seed", "training/seed")]) for run in runs
    ]
    return [
        group
        for group in groups.values()
        if len(group) > 1 and len({seeds[index] for index in group}) == len(group)
    ]


def _configuration(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows of the table of descriptions: name, a text for each run, and whether they differ."""
    names = dict.fromkeys(name for run in runs for name in run.description)
    rows = []
    for name in names:
        values = [run.description.get(name) for run in runs]
        texts = [_text(name, value) for value in values]
        differs = any(value != values[0] for value in values) and name != "time"
        rows.append({"name": printable(name), "texts": texts, "differs": differs})
    starts = [len(run.readings.runs) for run in runs]
    if max(starts) > 1:
        texts = [f"{count}" for count in starts]
        rows.append({"name": "starts", "texts": texts, "differs": len(set(starts)) > 1})
    return rows


def _text(name: str, value: Any) -> str:
    if value is None:
        return "not recorded"
    if name == "time" and isinstance(value, int | float) and 0 <= value < 2**40:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    if isinstance(value, list | dict):
        texts = list(map(str, value))
        return printable(f"{len(texts)}: " + ", ".join(texts))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return printable(str(value))


__all__ = ["Run", "build_content", "load_runs"]
