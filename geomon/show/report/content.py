"""What a report says of runs, and which panels it shows: plain data for the page.

A run may hold tens of millions of values: curves are thinned to some hundred steps, maps and heads
to a few dozen.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from geomon.analysis import Curve, null_of, single_source, summarise
from geomon.analysis.alerts import first_alerts
from geomon.analysis.quantities import Quantity, quantities_of
from geomon.analysis.summary import alert_sentences
from geomon.record import Readings
from geomon.record.columns import MetricText
from geomon.record.printable import printable
from geomon.show.collect import alerts_of, depth_panel, head_panels, line_of, map_panel
from geomon.show.colours import BLUE, DASHES, look_of
from geomon.show.panels import Line, Lines, Matrix, spread_both, thin
from geomon.show.settings import OF_A_START, setting_words

# Largest numbers of steps in maps, and in what a slider moves over.
_MOST_COLUMNS, _MOST_STEPS = 64, 16
# Largest number of values whose courses before an alert are shown.
_MOST_COURSES = 12
# What describes a start of a run and nothing that distinguishes it from runs beside it.
_OF_ONE_SEED = (*OF_A_START, "seed", "training/seed")


class Panels(NamedTuple):
    """The panels of a report, each by its title or by its name in a menu.

    Attributes:
        training: Headline values over training.
        healthy: What they do in healthy runs, by the same titles; none for some.
        others: All other values over training.
        before_alerts: Values that left their bands, up to the first alert of each kind.
        depth: Metrics over depth.
        maps: Metrics by layer and step.
        heads: Metrics by layer and head, by step.
        steps: Steps that the axis of steps reaches over, the same in all panels.
    """

    training: dict[str, Lines]
    healthy: dict[str, str]
    others: dict[str, Lines]
    before_alerts: dict[str, Lines]
    depth: dict[str, Lines]
    maps: dict[str, Matrix]
    heads: dict[str, dict[int, Matrix]]
    steps: Collection[int]


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


def build_content(runs: Sequence[Run]) -> dict[str, Any]:
    """Build what the page says of runs, as texts, numbers, lists and dicts."""
    texts = _texts_of([run.readings for run in runs])
    return {
        "runs": [
            {
                "name": run.name,
                "colour": colour,
                "model": printable(str(run.description.get("model", "unknown model"))),
                **_words_of(run.readings),
                "notes": _notes(run.readings),
            }
            for run, colour in zip(runs, _colours(runs), strict=True)
        ],
        "configuration": _configuration(runs),
        "cost": _cost(runs),
        "glossary": {
            printable(f"{text.title} ({name})"): printable(text.meaning)
            for name, text in texts.items()
            if text.meaning
        },
    }


def _words_of(readings: Readings) -> dict[str, Any]:
    """A run in words, each sentence once: the first fact, the alerts, and the others."""
    alerts = alert_sentences(readings)
    first, *others = [each for each in summarise(readings) if each not in alerts]
    return {
        "headline": printable(first),
        "alerts": [*map(printable, alerts)],
        "sentences": [*map(printable, others)],
    }


# -- panels ----------------------------------------------------------------------------------------


def build_panels(runs: Sequence[Run]) -> Panels:
    """Build the panels of runs: each run has a colour; of one run, each line of a panel.

    Runs that differ in their seed alone are drawn faintly, and as their mean with a band from the
    lowest to the highest.
    """
    selected = [Readings(run.readings.runs, single_source(run.readings)) for run in runs]
    present: dict[str, Quantity] = {}
    curves: list[dict[str, Curve]] = []
    for readings in selected:
        listed = quantities_of(readings)
        drawn = {tag: thin(each.curve(readings)) for tag, each in listed.items()}
        curves.append({tag: curve for tag, curve in drawn.items() if curve})
        present |= {tag: listed[tag] for tag in curves[-1] if tag not in present}
    series = _series_of(runs, curves)
    charts: dict[str, list[Quantity]] = {}
    for each in present.values():
        if each.chart:
            charts.setdefault(each.chart, []).append(each)
    plain = sorted(present, key=lambda tag: (not tag.endswith("/mean"), tag))
    alerts = alerts_of(runs[0].readings) if len(runs) == 1 else []

    def panel(quantities: Sequence[Quantity], label: str) -> Lines:
        found = []
        for place, quantity in enumerate(quantities):
            below = quantity.name if len(quantities) > 1 else ""
            for name, lines in series:
                if (line := lines.get(quantity.tag)) is None:
                    continue
                if len(runs) > 1:
                    named = ": ".join(filter(None, (name, below))) if name else ""
                    found.append(replace(line, name=named, dash=DASHES[place % len(DASHES)]))
                else:
                    found.append(replace(line, name=below, colour=look_of(place)[0]))
        first = quantities[0]
        has_null = len(runs) == len(quantities) == 1 and first.is_mean and not first.part
        null = null_of(selected[0], first.metric) if has_null else None
        return Lines(label, found, null=null, alerts=alerts)

    steps = {step for each in curves for curve in each.values() for step in curve.steps}
    return Panels(
        {
            title if len(each) > 1 else each[0].words: panel(each, each[0].unit)
            for title, each in charts.items()
        },
        {
            title if len(each) > 1 else each[0].words: printable(text)
            for title, each in charts.items()
            if (text := selected[0].text_of(each[0].metric).healthy)
        },
        {
            present[tag].title: panel([present[tag]], present[tag].label)
            for tag in plain
            if not present[tag].chart
        },
        _before_alerts(runs),
        *_depth(runs, selected),
        steps,
    )


def _before_alerts(runs: Sequence[Run]) -> dict[str, Lines]:
    """Collect what led to the first alert of each kind, by the alert and the tag of the value."""
    found = {}
    for run in runs:
        for first in first_alerts(run.readings):
            step, name = first.alert.step, f"{run.name}: " * (len(runs) > 1)
            name += f"{first.kind} at step {step:,}"
            for course in first.alert.courses[:_MOST_COURSES]:
                line = Line("", course.steps, course.values, BLUE)
                alerts = [(step, first.kind)]
                found[f"{name}: {course.tag}"] = Lines(course.tag, [line], alerts=alerts)
    return found


def _series_of(
    runs: Sequence[Run], curves: Sequence[Mapping[str, Curve]]
) -> list[tuple[str, dict[str, Line]]]:
    """Name of each run, and its lines by tag; the same of the means of runs of other seeds.

    Runs of which there is a mean are faint and have no name.
    """
    colours, groups = _colours(runs), _seed_groups(runs)
    grouped = {index for group in groups for index in group}
    series = []
    for index, (run, by_tag) in enumerate(zip(runs, curves, strict=True)):
        lines = {tag: line_of(curve, "", colours[index]) for tag, curve in by_tag.items()}
        if index in grouped:
            lines = {tag: replace(x, low=(), high=(), width=0.7) for tag, x in lines.items()}
        series.append(("" if index in grouped else run.name, lines))
    for group in groups:
        names = ", ".join(runs[index].name for index in group[:4])
        common = set.intersection(*(set(curves[index]) for index in group))
        means = {
            tag: _mean([curves[index][tag] for index in group], colours[group[0]]) for tag in common
        }
        series.append((f"mean of {names}{', ...' * (len(group) > 4)}", means))
    return series


def _mean(curves: Sequence[Curve], colour: str) -> Line:
    """The mean of curves, and a band from the lowest to the highest, where all have values."""
    first, last = max(c.steps[0] for c in curves), min(c.steps[-1] for c in curves)
    steps = [step for step in curves[0].steps if first <= step <= last]
    rows = np.array([np.interp(steps, curve.steps, curve.values) for curve in curves])
    low, high = rows.min(axis=0).tolist(), rows.max(axis=0).tolist()
    return Line("", steps, rows.mean(axis=0).tolist(), colour, low, high, width=2.6)


def _depth(
    runs: Sequence[Run], selected: Sequence[Readings]
) -> tuple[dict[str, Lines], dict[str, Matrix], dict[str, dict[int, Matrix]]]:
    """Metrics over depth, by layer and step, and by layer and head."""
    depth: dict[str, Lines] = {}
    maps: dict[str, Matrix] = {}
    heads: dict[str, dict[int, Matrix]] = {}
    for metric, text in _texts_of(selected).items():
        label = text.label
        for run, colour, readings in zip(runs, _colours(runs), selected, strict=True):
            name = f"{run.name}: {label}" if len(runs) > 1 else label
            matrix = map_panel(some := _at(readings, _MOST_COLUMNS), metric)
            if matrix is None:
                continue
            maps[name], profile = matrix, depth_panel(some, metric)
            if len(runs) > 1:
                ends = _ends(profile, run.name, colour)
                before = depth[label].lines if label in depth else ()
                profile = replace(profile, lines=[*before, *ends], named_by="")
            depth[label] = profile
            if found := head_panels(_at(readings, _MOST_STEPS), metric, _MOST_STEPS):
                heads[name] = found
    return depth, maps, heads


def _ends(profile: Lines, run: str, colour: str) -> list[Line]:
    """The first and the last line of a profile, in the colour of the run."""
    first, last = profile.lines[0], profile.lines[-1]
    ends = [replace(last, name=f"{run}, step {last.name}", colour=colour, width=2.0)]
    if last is not first:
        ends.insert(0, replace(first, name="", colour=colour, dash="dot", width=1.0))
    return ends


def _at(readings: Readings, most: int) -> Readings:
    steps = spread_both([reading.step for reading in readings], most)
    return Readings(readings.runs, [reading for reading in readings if reading.step in steps])


def _texts_of(runs: Sequence[Readings]) -> dict[str, MetricText]:
    """How the page speaks of each metric of runs, by its name."""
    found: dict[str, MetricText] = {}
    for run in runs:
        for name in dict.fromkeys(name for each in run for name in each.columns):
            found.setdefault(name, run.text_of(name))
    return found


def _colours(runs: Sequence[Run]) -> list[str]:
    """A colour for each run; those of one group share that of the first."""
    first = {index: group[0] for group in _seed_groups(runs) for index in group}
    return [look_of(first.get(index, index))[0] for index in range(len(runs))]


def _seed_groups(runs: Sequence[Run]) -> list[list[int]]:
    """Indices of runs whose descriptions differ in the seed and nothing else; two at least.

    Runs of one seed that are described alike differ in something that no record holds, such as the
    learning rate: a mean of them would mean nothing.
    """
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        told = {key: x for key, x in run.description.items() if key not in _OF_ONE_SEED}
        groups.setdefault(repr(sorted(told.items())), []).append(index)
    seeds = [
        repr([run.description.get(name) for name in ("seed", "training/seed")]) for run in runs
    ]
    return [
        group
        for group in groups.values()
        if len(group) > 1 and len({seeds[index] for index in group}) == len(group)
    ]


# -- tables ----------------------------------------------------------------------------------------


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
    remarks = [{"text": printable(text), "first": None} for text in readings.remarks()]
    return remarks + sorted(found.values(), key=lambda note: -note["count"])


def _cost(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows of the table of costs: a name, and a text for each run."""
    found: dict[str, list[str]] = {}
    for run in runs:
        last, seconds = run.readings[-1], [reading.seconds for reading in run.readings]
        times = [reading.time for reading in run.readings]
        share = f"{last.overhead * 100:.2g} %" if math.isfinite(last.overhead) else ""
        ranks = f"{last.world_size} rank{'s' * (last.world_size != 1)}"
        for name, text in (
            ("readings", f"{len(seconds):,}, to step {last.step:,}"),
            ("time in readings", f"{math.fsum(seconds):,.1f} s, the longest {max(seconds):.2f} s"),
            ("share of the training's time", share),
            ("rows in a reading", f"{last.tokens:,} on {ranks}, {last.dtype}"),
            ("from first to last reading", f"{(max(times) - min(times)) / 60:,.1f} min"),
        ):
            found.setdefault(name, []).append(printable(text))
    return [
        {"name": name, "texts": texts, "differs": False}
        for name, texts in found.items()
        if any(texts)
    ]


def _configuration(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows of the table of descriptions: name, a text for each run, and whether they differ."""
    names = dict.fromkeys(name for run in runs for name in run.description)
    settings: dict[str, list[Any]] = {
        name: [run.description.get(name) for run in runs] for name in names
    }
    starts = [len(run.readings.runs) for run in runs]
    if max(starts) > 1:
        settings["starts"] = starts
    return [
        {
            "name": printable(name),
            "texts": [setting_words(name, value) for value in values],
            "differs": any(value != values[0] for value in values) and name != "time",
        }
        for name, values in settings.items()
    ]


__all__ = ["Panels", "Run", "build_content", "build_panels"]
