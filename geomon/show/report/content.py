"""What a report says of runs: words, curves, profiles and heads, as plain data for the page.

A run may hold tens of millions of values: curves are thinned to some hundred steps, profiles and
heads to a few dozen, and numbers are rounded to five digits.
"""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geomon.analysis import Curve, curve_of, mean_abs_over_heads, single_source, summarise
from geomon.analysis.alerts import alert_notes, is_alert
from geomon.record import Readings, tags
from geomon.record.printable import printable
from geomon.show.loading import load, name_runs
from geomon.show.numbers import with_margin
from geomon.show.report.glossary import MEANINGS

# Largest numbers of steps in curves, and in what a slider moves over.
_MOST_POINTS, _MOST_STEPS = 400, 32
# What describes a start of a run and nothing that distinguishes it from runs beside it.
_OF_A_START = ("time", "from_step", "seed", "training/seed")
_ALERT = re.compile(r"(?P<words>.*) \((?P<link>docs/alerts\.md#\w+)\)", re.DOTALL)

# Keys of curves that are of no single tag.
_LARGEST = "anisotropy, largest layer"
_ALIGNMENT = "qk_cosine, mean size over heads"
_TWONN = tags.mean_tag("twonn")

# Titles of charts, their units, and the curves in them with their names.
CHARTS = (
    (
        "Intrinsic dimension", "dimension",
        {_TWONN: "all tokens (twonn)", tags.mean_tag("twonn_distinct"): "distinct tokens",
         tags.mean_tag("gride", "k32"): "at scale 32 (gride)"},
    ),
    (
        "Anisotropy", "share of the variance",
        {tags.mean_tag("anisotropy"): "mean over layers", _LARGEST: "largest layer"},
    ),
    (
        "Attention entropy", "nats",
        {tags.mean_tag("attention_entropy"): "mean over heads",
         tags.mean_tag("attention_entropy", "min"): "lowest head of each layer, mean"},
    ),
    ("Mean query against mean key", "|cosine|", {_ALIGNMENT: "mean over heads"}),
    ("Effective rank", "directions", {tags.mean_tag("effective_rank"): "mean over layers"}),
    ("Length of the mean hidden state", "norm", {tags.mean_tag("drift_norm"): "mean over layers"}),
    ("Attention on the first key", "share", {tags.mean_tag("attention_sink"): "mean over heads"}),
    ("Training loss", "loss", {tags.training_tag(tags.LOSS): "training loss"}),
    # Of its own: the function that gives it may have another unit.
    ("Loss on the probe", "loss", {tags.training_tag(tags.PROBE_LOSS): "loss on the probe"}),
)  # fmt: skip


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
    contents = [_run_content(run) for run in runs]
    groups = _seed_groups(runs)
    present = {tag for content in contents for tag in content["curves"]}
    charts = [
        {"title": title, "unit": unit, "lines": {t: n for t, n in lines.items() if t in present}}
        for title, unit, lines in CHARTS
        if present & lines.keys()
    ]
    metrics = {name.partition("/")[0].partition(",")[0] for name in present}
    metrics |= {m for content in contents for m in content["profiles"]["values"]}
    return {
        "runs": contents,
        "groups": groups,
        "charts": charts,
        "curves": sorted(present),
        "configuration": _configuration(runs),
        "cost_labels": list(dict.fromkeys(label for c in contents for label in c["cost"])),
        "glossary": {name: text for name, text in MEANINGS.items() if name in metrics},
    }


def _run_content(run: Run) -> dict[str, Any]:
    selected = Readings([], single_source(run.readings))
    curve = curve_of(selected, _TWONN)
    phase = curve.phase() if len(curve) else None
    return {
        "name": printable(run.name),
        "model": printable(str(run.description.get("model", "unknown model"))),
        "phase": phase.name if phase else "unknown",
        "headline": _headline(selected, curve),
        "numbers": _numbers(selected, curve),
        "sentences": [printable(text) for text in summarise(run.readings)],
        "alerts": _alerts(run.readings),
        "notes": _notes(run.readings),
        "cost": dict(_cost(run.readings)),
        "curves": _curves(selected),
        **_depth(selected),
    }


def _headline(readings: Readings, curve: Curve) -> str:
    """Say how the intrinsic dimension goes, and where it ends before the run does."""
    if not len(curve):
        return "Intrinsic dimension: not measured."
    phase, end = curve.phase(), readings[-1].step
    ended = f" (known to step {curve.steps[-1]:,} of {end:,})" if curve.steps[-1] < end else ""
    return f"Intrinsic dimension: {phase.words()}{phase.span()}{ended}."


def _numbers(readings: Readings, curve: Curve) -> list[tuple[str, str]]:
    """Labels and texts of the few numbers that a reader looks for first."""
    last = readings[-1]
    numbers = [("readings", f"{len(readings):,}, to step {last.step:,}")]
    if len(curve):
        since = f" at step {curve.steps[-1]:,}" if curve.steps[-1] < last.step else ""
        now = with_margin(curve.values[-1], curve.margins[-1])
        numbers.append(("dimension now" if not since else "dimension", f"{now}{since}"))
        phase = curve.phase()
        if phase.name in ("peak", "compressing"):
            numbers.append(("its peak", f"{phase.peak:.3g} at step {phase.peak_step:,}"))
    layers = last.layers("anisotropy")
    profile = [(last.values.get(tags.layer_tag("anisotropy", n), math.nan), n) for n in layers]
    if known := [pair for pair in profile if math.isfinite(pair[0])]:
        value, layer = max(known)
        numbers.append(("most anisotropic", f"{value:.2g} at layer {layer} of {layers[-1]}"))
    loss = curve_of(readings, tags.training_tag(tags.LOSS))
    if len(loss):
        since = f" at step {loss.steps[-1]:,}" if loss.steps[-1] < last.step else ""
        numbers.append(("training loss", f"{loss.values[-1]:.3g}{since}"))
    overhead = last.values.get(tags.OVERHEAD, math.nan)
    if math.isfinite(overhead):
        numbers.append(("geomon's share of the time", f"{overhead * 100:.2g} %"))
    return numbers


def _alerts(readings: Readings) -> list[dict[str, Any]]:
    """Alerts by kind: the first, the number of them, and where their meaning is explained."""
    found: dict[str, dict[str, Any]] = {}
    for reading in readings:
        for note in alert_notes(reading):
            match = _ALERT.fullmatch(note)
            words, link = (match["words"], match["link"]) if match else (note, "docs/alerts.md")
            kind = words.partition(" (")[0].partition(":")[0]
            alert = found.setdefault(
                kind, {"step": reading.step, "words": printable(words), "link": link, "count": 0}
            )
            alert["count"] += 1
    return list(found.values())


def _notes(readings: Readings) -> list[dict[str, Any]]:
    """Remarks on the record and notes of readings, those that differ in numbers alone as one."""
    found: dict[str, dict[str, Any]] = {}
    for reading in readings:
        for note in reading.notes:
            if not is_alert(note):
                kind = re.sub(r"\d[\d.,]*", "0", note)
                first = found.get(kind, {"first": reading.step, "count": 0})
                found[kind] = {
                    "text": printable(note), "first": first["first"], "last": reading.step,
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
    overhead = last.values.get(tags.OVERHEAD, math.nan)
    if math.isfinite(overhead):
        cost.append(("share of the training's time", f"{overhead * 100:.2g} %"))
    return [(label, printable(text)) for label, text in cost]


def _curves(readings: Readings) -> dict[str, dict[str, list[Any]]]:
    """Curves by key: steps, values and half widths of 95 % intervals."""
    curves = {}
    for name in readings.tags():
        tag = tags.parse(name)
        trust = tag is not None and tag.part.rpartition("/")[2] in ("margin", "std", "error")
        wanted = tags.is_of_run(name) or (tag is not None and tag.layer is None and not trust)
        if wanted and name != tags.SECONDS:
            curves[name] = curve_of(readings, name)
    layers = [tags.layer_tag("anisotropy", n) for n in readings.layers("anisotropy") if n]
    if layers:
        table = readings.table(layers)
        largest = np.where(np.isfinite(table), table, -np.inf).max(axis=1)
        pairs = [
            (reading.step, float(value))
            for reading, value in zip(readings, largest, strict=True)
            if math.isfinite(value)
        ]
        steps, values = [s for s, _ in pairs], [v for _, v in pairs]
        curves[_LARGEST] = Curve(steps, values, [0.0] * len(pairs))
    curves[_ALIGNMENT] = mean_abs_over_heads(readings, "qk_cosine")
    return {printable(name): _points(curve) for name, curve in curves.items() if len(curve)}


def _points(curve: Curve) -> dict[str, list[Any]]:
    kept = _spread(curve.steps, _MOST_POINTS)
    ends = {curve.values.index(max(curve.values)), curve.values.index(min(curve.values))}
    indices = sorted({*kept, *ends})
    points: dict[str, list[Any]] = {
        "x": [curve.steps[index] for index in indices],
        "y": [_rounded(curve.values[index]) for index in indices],
    }
    if any(margins := curve.margins):
        points["margin"] = [_rounded(margins[index]) for index in indices]
    return points


def _depth(readings: Readings) -> dict[str, Any]:
    """Profiles over depth and tables of heads, at a few steps."""
    steps = [reading.step for reading in readings]
    few = Readings([], [readings[index] for index in _spread(steps, _MOST_STEPS)])
    shown = [reading.step for reading in few]
    layers: dict[str, set[int]] = {}
    heads: dict[str, set[tuple[int, int]]] = {}
    for tag in filter(None, map(tags.parse, few.tags())):
        if tag.layer is not None and tag.head is not None:
            heads.setdefault(tag.metric, set()).add((tag.layer, tag.head))
        elif tag.layer is not None and not tag.part:
            layers.setdefault(tag.metric, set()).add(tag.layer)
    profiles = {
        metric: {
            "layers": sorted(numbers),
            "rows": _table(few, [tags.layer_tag(metric, n) for n in sorted(numbers)]),
        }
        for metric, numbers in layers.items()
    }
    tables = {}
    for metric, places in heads.items():
        rows = sorted({layer for layer, _ in places})
        count = 1 + max(head for _, head in places)
        names = [tags.layer_tag(metric, n, tags.head_part(h)) for n in rows for h in range(count)]
        flat = _table(few, names)
        tables[metric] = {
            "layers": rows,
            "rows": [[row[i : i + count] for i in range(0, len(row), count)] for row in flat],
        }
    return {
        "profiles": {"steps": shown, "values": profiles},
        "heads": {"steps": shown, "values": tables},
    }


def _table(readings: Readings, names: Sequence[str]) -> list[list[float | None]]:
    return [[_rounded(value) for value in row] for row in readings.table(names).tolist()]


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
    if isinstance(value, list):
        texts = list(map(str, value))
        return printable(f"{len(texts)}: " + ", ".join(texts))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return printable(str(value))


__all__ = ["CHARTS", "Run", "build_content", "load_runs"]
