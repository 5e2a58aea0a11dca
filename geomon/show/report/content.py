"""Builds the content of a report: texts, tables and panels as plain data for the page.

A run can hold tens of millions of values, so curves are thinned to some hundred steps, and maps and
heads to a few dozen.
"""

import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from geomon.analysis import Curve, Fact, facts_of, null_of, single_source, summarise
from geomon.analysis.alerts import first_alerts
from geomon.analysis.quantities import Quantity, quantities_of
from geomon.analysis.summary import alert_sentences
from geomon.record import Readings
from geomon.record.columns import MetricText
from geomon.record.printable import printable
from geomon.show.collect import (
    DIMENSIONS,
    alerts_of,
    depth_panel,
    head_panels,
    line_of,
    map_panel,
    to_logarithm,
)
from geomon.show.colours import BLUE, SERIES
from geomon.show.panels import Line, Lines, Matrix, spread_both, thin
from geomon.show.settings import OF_A_START, setting_words

# Largest numbers of steps in maps and in sliders.
_MOST_COLUMNS, _MOST_STEPS = 64, 16
# Dashes of the quantities of one chart, for several runs; "dash" bridges gaps.
_DASHES = ("solid", "dot", "dashdot")
# Largest number of curves that are shown before an alert.
_MOST_COURSES = 12
# Keys of a description that may differ between runs of one configuration.
_OF_ONE_SEED = (*OF_A_START, "seed", "training/seed")


class Panels(NamedTuple):
    """Panels of a report, each by its title or by its name in a menu.

    Attributes:
        training: Headline values over training.
        healthy: How they behave in healthy runs, by the same titles, where known.
        others: All other values over training.
        before_alerts: Values that left their bands, up to the first alert of each kind.
        depth: Metrics over depth.
        maps: Metrics by layer and step.
        heads: Metrics by layer and head, by step.
        steps: Steps that every step axis covers.
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
    """Run in a report.

    Attributes:
        name: Name for readers, unique in the report.
        path: Folder of the run, or the path of its file.
        readings: Readings of one stack.
    """

    name: str
    path: Path
    readings: Readings

    @property
    def description(self) -> Mapping[str, Any]:
        """Description of the run's last start; empty if the record has none."""
        return self.readings.runs[-1] if self.readings.runs else {}


def build_content(runs: Sequence[Run]) -> dict[str, Any]:
    """Build the texts and tables of the page as plain data."""
    texts = _texts_of([run.readings for run in runs])
    return {
        "runs": [
            {
                "name": run.name,
                "colour": colour,
                "model": printable(str(run.description.get("model", "unknown model"))),
                **_words_of(run.readings),
                "notes": _notes(run.readings),
                "times": [reading.time for reading in run.readings],
                "seconds": [reading.seconds for reading in run.readings],
                "last": run.readings[-1],
            }
            for run, colour in zip(runs, _colours(runs), strict=True)
        ],
        "configuration": _configuration(runs),
        "glossary": {
            printable(f"{text.title} ({name})"): printable(text.meaning)
            for name, text in texts.items()
            if text.meaning
        },
    }


def _words_of(readings: Readings) -> dict[str, Any]:
    """Summarise a run: alerts, facts with what is far from healthy, and all other sentences."""
    alerts, facts = alert_sentences(readings), facts_of(readings)
    said = [*alerts, *(fact.sentence for fact in facts)]
    ranges = {each.quantity.metric: each for each in reversed(facts)}  # the first of each metric
    steps = [reading.step for reading in single_source(readings)]
    apart = max(map(operator.sub, steps[1:], steps), default=0)
    return {
        "alerts": alerts,
        "facts": [
            (fact, _far(fact, readings) if fact in ranges.values() else "") for fact in facts
        ],
        "others": [each for each in summarise(readings, facts) if each not in said],
        "looked": f"{len(steps):,} reading{'s' * (len(steps) != 1)}"
        + f", at most {apart:,} steps apart" * (apart > 0),
    }


def _far(fact: Fact, readings: Readings) -> str:
    """Say if a quantity ends at more than twice or less than half of its healthy range."""
    value = fact.quantity.curve(readings).values[-1]
    low, high, _ = _usual(readings.text_of(fact.quantity.metric)) or (-math.inf, math.inf, "")
    side = "above" if value > 2 * high else "below" if 2 * value < low else ""
    return f"far {side} the healthy {low:g} to {high:g}" if side else ""


def _usual(text: MetricText) -> tuple[float, float, str] | None:
    """Read the range of healthy runs from the words for a metric: the first "1 to 2" in them."""
    words = text.healthy.partition(": ")[2].partition(";")[0]
    found = re.search(r"(\d+\.?\d*) to (\d+\.?\d*)", words)
    return (float(found[1]), float(found[2]), "healthy runs of the recipe") if found else None


# -- panels ----------------------------------------------------------------------------------------


def build_panels(runs: Sequence[Run]) -> Panels:
    """Build the panels: colours stand for runs, or for the lines of a panel if there is one run."""
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
                    found.append(replace(line, name=named, dash=_DASHES[place % len(_DASHES)]))
                else:
                    found.append(replace(line, name=below, colour=SERIES[place % len(SERIES)]))
        first = quantities[0]
        has_null = len(runs) == len(quantities) == 1 and first.is_mean and not first.part
        null = null_of(selected[0], first.metric) if has_null else None
        usual = _usual(selected[0].text_of(first.metric)) if first.chart else None
        made = Lines(label, found, null=null, alerts=alerts, usual=usual)
        return to_logarithm(made) if first.metric in DIMENSIONS else made

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
    """Collect the curves that led to the first alert of each kind, by alert and tag."""
    found = {}
    for run in runs:
        for first in first_alerts(run.readings):
            step, name = first.alert.step, f"{run.name}: " * (len(runs) > 1)
            for course in first.alert.courses[:_MOST_COURSES]:
                line = Line("", course.steps, course.values, BLUE)
                panel = Lines(course.tag, [line], alerts=[(step, first.alert.kind)])
                found[f"{name}{first.alert.kind} at step {step:,}: {course.tag}"] = panel
    return found


def _series_of(
    runs: Sequence[Run], curves: Sequence[Mapping[str, Curve]]
) -> list[tuple[str, dict[str, Line]]]:
    """List names and lines by tag, of each run and of the mean of each group of seeds."""
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
    """Average curves over their common steps, with a band from the lowest to the highest."""
    first, last = max(c.steps[0] for c in curves), min(c.steps[-1] for c in curves)
    steps = [step for step in curves[0].steps if first <= step <= last]
    rows = np.array([np.interp(steps, curve.steps, curve.values) for curve in curves])
    low, high = rows.min(axis=0).tolist(), rows.max(axis=0).tolist()
    return Line("", steps, rows.mean(axis=0).tolist(), colour, low, high, width=2.6)


def _depth(
    runs: Sequence[Run], selected: Sequence[Readings]
) -> tuple[dict[str, Lines], dict[str, Matrix], dict[str, dict[int, Matrix]]]:
    """Build the panels over depth, the maps by layer and step, and the matrices of heads."""
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
    """Draw the first and the last line of a profile in the colour of the run."""
    first, last = profile.lines[0], profile.lines[-1]
    thin_first = replace(first, name="", colour=colour, dash="dot", width=1.0)
    ends = [thin_first, replace(last, name=f"{run}, step {last.name}", colour=colour, width=2.0)]
    return ends[-1:] if last is first else ends


def _at(readings: Readings, most: int) -> Readings:
    steps = spread_both([reading.step for reading in readings], most)
    return Readings(readings.runs, [reading for reading in readings if reading.step in steps])


def _texts_of(runs: Sequence[Readings]) -> dict[str, MetricText]:
    """Collect the texts of every metric in the runs, by metric name."""
    return {
        name: run.text_of(name)
        for run in reversed(runs)  # the first run's words
        for name in dict.fromkeys(name for each in run for name in each.columns)
    }


def _colours(runs: Sequence[Run]) -> list[str]:
    """Choose a colour for each run; runs that differ only in their seed share one."""
    first = {index: group[0] for group in _seed_groups(runs) for index in group}
    return [SERIES[first.get(index, index) % len(SERIES)] for index in range(len(runs))]


def _seed_groups(runs: Sequence[Run]) -> list[list[int]]:
    """Group the indices of runs that differ only in their seed."""
    groups: dict[str, list[int]] = {}  # runs of one seed differ in something unrecorded
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
    """List remarks on the record and notes of readings, each kind of note once."""
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


def _configuration(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Build the rows of the table of descriptions: name, text for each run, whether they differ."""
    names = dict.fromkeys(name for run in runs for name in run.description)
    settings: dict[str, list[Any]] = {
        name: [run.description.get(name) for run in runs] for name in names
    }
    if max(starts := [len(run.readings.runs) for run in runs]) > 1:
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
