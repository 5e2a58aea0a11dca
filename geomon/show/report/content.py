"""Builds the content of a report: texts, tables and panels as plain data for the page.

A run can hold tens of millions of values, so curves are thinned to some hundred steps, and maps and
heads to a few dozen.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from geomon.analysis import (
    Curve,
    Fact,
    Quantity,
    alert_sentences,
    facts_of,
    first_alerts,
    null_of,
    quantities_of,
    single_source,
    summarise,
)
from geomon.record import MetricText, Readings, printable
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


# Readings of one stack of each run, by names for readers.
Runs = Mapping[str, Readings]
# Titles of the groups of values over training that are shown on request.
OTHERS, BEFORE = "Any other value", "Before the alerts"


def build_content(runs: Runs) -> dict[str, Any]:
    """Build the texts and tables of the page as plain data."""
    return {
        "runs": [
            {
                "name": name,
                "colour": colour,
                "model": printable(str(described.get("model", "unknown model"))),
                **_words_of(run),
                "notes": _notes(run),
                "times": [reading.time for reading in run],
                "seconds": [reading.seconds for reading in run],
                "last": run[-1],
            }
            for (name, run), described, colour in zip(
                runs.items(), _descriptions(runs), _colours(runs), strict=True
            )
        ],
        "configuration": _configuration(runs),
        "glossary": {
            printable(f"{text.title} ({name})"): printable(text.meaning)
            for name, text in _texts_of([*runs.values()]).items()
            if text.meaning
        },
    }


def _words_of(readings: Readings) -> dict[str, Any]:
    """Summarise a run: alerts, facts with what is far from healthy, and all other sentences."""
    alerts, facts = alert_sentences(readings), facts_of(readings)
    said = [*alerts, *(fact.sentence for fact in facts)]
    ranges = {each.quantity.metric: each for each in reversed(facts)}  # the first of each metric
    return {
        "alerts": alerts,
        "facts": [
            (fact, _far(fact, readings) if fact in ranges.values() else "") for fact in facts
        ],
        "others": [each for each in summarise(readings, facts) if each not in said],
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


def build_panels(
    runs: Runs,
) -> Iterator[tuple[str, str, str, Mapping[str, Lines | Matrix | dict[int, Matrix]]]]:
    """Yield the section, title, healthy range and panels by name of each chart, in their order.

    Colours stand for runs, or for the lines of a panel if there is one run.
    """
    selected = {name: Readings(run.runs, single_source(run)) for name, run in runs.items()}
    drawn = _RunCurves(runs, selected)
    charts: dict[str, list[Quantity]] = {}
    for each in drawn.quantities.values():
        charts.setdefault(each.chart, []).append(each)
    others = charts.pop("", [])
    for place, (chart, group) in enumerate(charts.items()):
        title = chart if len(group) > 1 else group[0].words
        lines = drawn.panel(group, group[0].unit)
        yield "training" if place else "lead", title, drawn.healthy(group[0]), {title: lines}
    yield "training", BEFORE, "", _before_alerts(runs)
    others.sort(key=lambda each: (not each.tag.endswith("/mean"), each.tag))
    yield "training", OTHERS, "", {each.title: drawn.panel([each], each.label) for each in others}
    depth, maps, heads = _depth(selected, _colours(runs))
    yield "depth", "At several steps", "", depth
    yield "depth", "By layer and step", "", maps
    yield "depth", "By layer and head", "", heads


class _RunCurves:
    """Curves of all runs over training, from which panels are drawn.

    Args:
        runs: All readings of each run.
        selected: One reading per step of each run.

    Attributes:
        quantities: Quantities with a curve in some run, by tag.
    """

    def __init__(self, runs: Runs, selected: Runs) -> None:
        self._first = next(iter(selected.values()))
        self._is_comparison = len(runs) > 1
        self._alerts = [] if self._is_comparison else alerts_of(*runs.values())
        self.quantities: dict[str, Quantity] = {}
        curves: list[dict[str, Curve]] = []
        for readings in selected.values():
            listed = quantities_of(readings)
            drawn = {tag: thin(each.curve(readings)) for tag, each in listed.items()}
            curves.append({tag: curve for tag, curve in drawn.items() if curve})
            for tag in curves[-1]:
                self.quantities.setdefault(tag, listed[tag])
        self._series = _series_of(runs, curves)
        steps = {step for each in curves for curve in each.values() for step in curve.steps}
        self._steps = sorted(steps)

    def healthy(self, quantity: Quantity) -> str:
        """Return the words on a quantity in healthy runs."""
        return printable(self._first.text_of(quantity.metric).healthy)

    def panel(self, quantities: Sequence[Quantity], label: str) -> Lines:
        """Draw quantities in one panel, with the null and the healthy range of the first one."""
        one, is_alone = quantities[0], len(quantities) == 1
        lines = [
            line
            for place, quantity in enumerate(quantities)
            for line in self._lines(quantity, place, below="" if is_alone else quantity.name)
        ]
        has_null = is_alone and one.has_null and not self._is_comparison
        made = Lines(
            label, lines, alerts=self._alerts, covers=self._steps,
            null=null_of(self._first, one.metric) if has_null else None,
            usual=_usual(self._first.text_of(one.metric)) if one.chart else None,
        )  # fmt: skip
        return to_logarithm(made) if one.metric in DIMENSIONS else made

    def _lines(self, quantity: Quantity, place: int, below: str) -> Iterator[Line]:
        """Yield the line of a quantity in each series, the lines at one place alike."""
        dash, colour = _DASHES[place % len(_DASHES)], SERIES[place % len(SERIES)]
        look: dict[str, Any] = {"dash": dash} if self._is_comparison else {"colour": colour}
        for name, lines in self._series:
            if quantity.tag in lines:
                words = ": ".join(filter(None, (name, below))) if self._is_comparison else below
                yield replace(lines[quantity.tag], name=words if name else "", **look)


def _before_alerts(runs: Runs) -> dict[str, Lines]:
    """Collect the curves that led to the first alert of each kind, by alert and tag."""
    found = {}
    for run, readings in runs.items():
        for first in first_alerts(readings):
            step, name = first.alert.step, f"{run}: " if len(runs) > 1 else ""
            for course in first.alert.courses[:_MOST_COURSES]:
                line = Line("", course.steps, course.values, BLUE)
                title = f"{name}{first.alert.kind} at step {step:,}: {course.tag}"
                found[title] = Lines(course.tag, [line], alerts=[(step, first.alert.kind)])
    return found


def _series_of(
    runs: Runs, curves: Sequence[Mapping[str, Curve]]
) -> list[tuple[str, dict[str, Line]]]:
    """List names and lines by tag, of each run and of the mean of each group of seeds."""
    colours, groups, names = _colours(runs), _seed_groups(runs), [*runs]
    grouped = {index for group in groups for index in group}
    series = []
    for index, (name, by_tag) in enumerate(zip(names, curves, strict=True)):
        lines = {tag: line_of(curve, "", colours[index]) for tag, curve in by_tag.items()}
        if index in grouped:
            lines = {tag: replace(x, low=(), high=(), width=0.7) for tag, x in lines.items()}
        series.append(("" if index in grouped else name, lines))
    for group in groups:
        common = set.intersection(*(set(curves[index]) for index in group))
        means = {
            tag: _mean([curves[index][tag] for index in group], colours[group[0]]) for tag in common
        }
        said = [names[index] for index in group[:4]] + (["..."] if len(group) > 4 else [])
        series.append((f"mean of {', '.join(said)}", means))
    return series


def _mean(curves: Sequence[Curve], colour: str) -> Line:
    """Average curves over their common steps, with a band from the lowest to the highest."""
    first, last = max(c.steps[0] for c in curves), min(c.steps[-1] for c in curves)
    steps = [step for step in curves[0].steps if first <= step <= last]
    rows = np.array([np.interp(steps, curve.steps, curve.values) for curve in curves])
    low, high = rows.min(axis=0).tolist(), rows.max(axis=0).tolist()
    return Line("", steps, rows.mean(axis=0).tolist(), colour, low, high, width=2.6)


def _depth(
    runs: Runs, colours: Sequence[str]
) -> tuple[dict[str, Lines], dict[str, Matrix], dict[str, dict[int, Matrix]]]:
    """Build the panels over depth, the maps by layer and step, and the matrices of heads."""
    depth: dict[str, Lines] = {}
    maps: dict[str, Matrix] = {}
    heads: dict[str, dict[int, Matrix]] = {}
    for metric, text in _texts_of([*runs.values()]).items():
        label = text.label
        for (run, readings), colour in zip(runs.items(), colours, strict=True):
            name = f"{run}: {label}" if len(runs) > 1 else label
            matrix = map_panel(some := _at(readings, _MOST_COLUMNS), metric)
            if matrix is None:
                continue
            maps[name], profile = matrix, depth_panel(some, metric)
            if len(runs) > 1:
                before = depth[label].lines if label in depth else ()
                lines = [*before, *_ends(profile, run, colour)]
                profile = replace(profile, lines=lines, named_by="")
            depth[label] = profile
            if found := head_panels(_at(readings, _MOST_STEPS), metric, _MOST_STEPS):
                heads[name] = found
    return depth, maps, heads


def _ends(profile: Lines, run: str, colour: str) -> list[Line]:
    """Draw the first and the last line of a profile in the colour of the run."""
    first, last = profile.lines[0], profile.lines[-1]
    thin_first = replace(first, name="", colour=colour, dash="dot", width=1.0)
    ends = [thin_first, replace(last, name=f"{run}, step {last.name}", colour=colour, width=2.0)]
    return ends[1:] if last is first else ends


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


def _descriptions(runs: Runs) -> list[dict[str, Any]]:
    """List the description of each run's last start; empty if its record has none."""
    return [run.runs[-1] if run.runs else {} for run in runs.values()]


def _colours(runs: Runs) -> list[str]:
    """Choose a colour for each run; runs that differ only in their seed share one."""
    first = {index: group[0] for group in _seed_groups(runs) for index in group}
    return [SERIES[first.get(index, index) % len(SERIES)] for index in range(len(runs))]


def _seed_groups(runs: Runs) -> list[list[int]]:
    """Group the indices of runs that differ only in their seed."""
    groups: dict[str, list[int]] = {}  # runs of one seed differ in something unrecorded
    described = _descriptions(runs)
    for index, run in enumerate(described):
        told = {key: x for key, x in run.items() if key not in _OF_ONE_SEED}
        groups.setdefault(repr(sorted(told.items())), []).append(index)
    seeds = [repr([run.get(name) for name in ("seed", "training/seed")]) for run in described]
    return [
        group
        for group in groups.values()
        if len(group) > 1 and len({seeds[index] for index in group}) == len(group)
    ]


# -- tables ----------------------------------------------------------------------------------------


def _notes(readings: Readings) -> list[dict[str, Any]]:
    """List remarks on the record and notes of readings, each kind of note once."""
    found: dict[str, dict[str, Any]] = {}
    for reading in readings:
        for note in reading.notes:
            if not note.is_alert:
                first = found.get(note.key, {"first": reading.step, "count": 0})
                found[note.key] = {
                    "text": printable(note.words()), "first": first["first"], "last": reading.step,
                    "count": first["count"] + 1,
                }  # fmt: skip
    remarks = [{"text": printable(text), "first": None} for text in readings.remarks()]
    return remarks + sorted(found.values(), key=lambda note: -note["count"])


def _configuration(runs: Runs) -> list[dict[str, Any]]:
    """Build the rows of the table of descriptions: name, text for each run, whether they differ."""
    described = _descriptions(runs)
    settings: dict[str, list[Any]] = {
        name: [each.get(name) for each in described] for run in described for name in run
    }
    if max(starts := [len(run.runs) for run in runs.values()]) > 1:
        settings["starts"] = starts
    return [
        {
            "name": printable(name),
            "texts": [setting_words(name, value) for value in values],
            "differs": any(value != values[0] for value in values) and name != "time",
        }
        for name, values in settings.items()
    ]
