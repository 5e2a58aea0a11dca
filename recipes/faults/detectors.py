"""Detectors: what notices a fault, how early, and how often it is wrong."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]

from geomon import Reading, read
from geomon.analysis import (
    FEWEST_READINGS,
    SLOW_STRIDE,
    WATCHED,
    Distance,
    WatchedMetric,
    measure_distance,
    start_of_window,
)
from geomon.record import Column
from recipes.faults.kinds import FAULTS, Fault
from recipes.faults.training import BATCHES, EACH_STEP, FIRST_READ, Job

Array = NDArray[np.float64]

# Readings without a score above the limit after which one is a new alarm.
_QUIET = 12
# Readings over which OLMo-core's stability monitor takes its mean and deviation; 128 there.
_OLMO_WINDOW = 96
_LOGARITHMS = {
    "loss",
    "gradient_norm",
    *(name for name, own in WATCHED.items() if own.by_logarithm),
}

ALERTS, OLMO = "geomon's alerts", " as OLMo-core"
# The numbers that each detector looks at: the one furthest outside of its band is its score.
DETECTORS: dict[str, tuple[str, ...]] = {
    "loss": ("loss",),
    f"loss{OLMO}": ("loss",),
    "gradient norm": ("gradient_norm",),
    f"gradient norm{OLMO}": ("gradient_norm",),
    **{name.replace("_", " "): (name,) for name in (*WATCHED, "anisotropy", "qk_cosine")},
    "any value that alerts watch": tuple(WATCHED),
}


class Place(NamedTuple):
    """Place of a number: a metric or a value that the training logs, a layer, a head or a part."""

    metric: str
    layer: int = 0
    part: str = ""


class Scores(NamedTuple):
    """Scores of a detector on a run.

    Attributes:
        steps: Steps of the readings, [readings].
        scores: Score of each reading, the higher the stranger, [readings]; NaN without one.
        layers: Layer with the largest score at each reading, [readings]; 0 for none.
    """

    steps: NDArray[np.int64]
    scores: Array
    layers: NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """A complete run with what its records hold.

    Attributes:
        job: The run.
        scores: Scores by detector, of every step.
        alerts: Step and layer of each alert, by record.
    """

    job: Job
    scores: dict[str, Scores]
    alerts: dict[str, list[tuple[int, int]]]

    @property
    def fault(self) -> Fault | None:
        """The fault; None for a healthy run."""
        return FAULTS.get(self.job.fault)


def read_run(job: Job, folder: Path) -> Run:
    """Read and score a run."""
    alerts = {
        name: [
            (alert.step, next(iter([*alert.note.layers, *(n for n, _ in alert.note.heads)]), 0))
            for alert in read(folder / job.folder / name).alerts
        ]
        for name in (EACH_STEP, *BATCHES)
    }
    readings = list(read(folder / job.folder / EACH_STEP))
    return Run(job, score(readings), alerts)


def score(readings: Sequence[Reading]) -> dict[str, Scores]:
    """Score readings by all detectors."""
    numbers: dict[Place, Array] = {}
    for at, reading in enumerate(readings):
        for place, value in (*_logged(reading), *numbers_of(reading.columns)):
            numbers.setdefault(place, np.full(len(readings), np.nan))[at] = value
    places = list(numbers)
    steps = np.array([reading.step for reading in readings])
    layers = np.array([place.layer for place in places])
    sizes = distances(steps, places, np.stack(list(numbers.values()), axis=1))
    found = {}
    for name, metrics in DETECTORS.items():
        chosen = [n for n, place in enumerate(places) if place.metric in metrics]
        if name.endswith(OLMO):
            scores = _as_olmo(numbers[Place(metrics[0])])[:, None]
        else:
            scores = sizes[:, chosen]
        if chosen:
            known = np.where(np.isfinite(scores), scores, -np.inf)
            largest = known.max(axis=1)
            found[name] = Scores(
                steps, np.where(np.isfinite(largest), largest, np.nan),
                layers[chosen][known.argmax(axis=1)],
            )  # fmt: skip
    return found


def _logged(reading: Reading) -> Iterator[tuple[Place, float]]:
    for name in ("loss", "gradient_norm"):
        yield Place(name), reading.training.get(name, math.nan)


def numbers_of(columns: Mapping[str, Column]) -> Iterator[tuple[Place, float]]:
    """Yield the values of a stack, by head or part if there are some."""
    for metric, column in columns.items():
        if metric in WATCHED and WATCHED[metric].by_part:
            for part, own in column.parts.items():
                yield from ((Place(metric, n, part), value) for n, value in own.by_layer().items())
        elif heads := column.by_head():
            yield from ((Place(metric, n, str(head)), v) for (n, head), v in heads.items())
        else:
            yield from ((Place(metric, n), value) for n, value in column.by_layer().items())


def distances(steps: NDArray[np.int64], places: Sequence[Place], numbers: Array) -> Array:
    """Compare each number at each reading with the line through those before it.

    Every fifth reading is compared with every fifth before it too, as bands do.

    Args:
        steps: Steps, ascending, [readings].
        places: Places of the numbers.
        numbers: The numbers, [readings, places].

    Returns:
        Distances in units of the bands, above 1 outside, [readings, places].
    """
    logarithms = np.array([place.metric in _LOGARITHMS for place in places])
    numbers = np.where(logarithms, np.log(np.maximum(numbers, 1e-9)), numbers)
    watched = [WATCHED.get(place.metric, WatchedMetric(0.0)) for place in places]
    largest = np.array([each.largest for each in watched])
    least = np.array(
        [each.least_at(place.part) for each, place in zip(watched, places, strict=True)]
    )

    def compare(reading: int, every: int) -> Distance:
        start = start_of_window(steps[:reading:every], int(steps[reading]))
        return measure_distance(numbers[:reading:every][start:], numbers[reading], least, largest)

    sizes = np.full(numbers.shape, np.nan)
    for reading in range(FEWEST_READINGS, len(steps)):
        sizes[reading] = compare(reading, 1).size
        if reading % SLOW_STRIDE == 0:
            sizes[reading] = np.fmax(sizes[reading], compare(reading, SLOW_STRIDE).size)
    return sizes


def _as_olmo(values: Array) -> Array:
    """Distance above the mean of the values before, in deviations."""
    scores = np.full(len(values), np.nan)
    for reading in range(_OLMO_WINDOW, len(values)):
        before = values[reading - _OLMO_WINDOW : reading]
        scores[reading] = (values[reading] - before.mean()) / before.std()
    return scores


# -- odds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """Number of events in so many trials, with its exact 95 % interval (Poisson).

    Attributes:
        count: Number of events.
        trials: Number of trials.
    """

    count: int
    trials: int

    @property
    def low(self) -> float:
        """Lower end of the interval of the rate."""
        return float(stats.chi2.ppf(0.025, 2 * self.count) / 2) / self.trials if self.count else 0.0

    @property
    def high(self) -> float:
        """Upper end of the interval of the rate."""
        return float(stats.chi2.ppf(0.975, 2 * self.count + 2) / 2) / self.trials


class Outcome(NamedTuple):
    """Verdict of a detector on one run with a fault.

    Attributes:
        fault: Name of the fault.
        delay: Steps from the fault to the first alarm; None if none came.
        located: Whether the alarm named the layer of the faulty block; None without an alarm, for
            a fault that is everywhere, and if no layer was named.
    """

    fault: str
    delay: int | None
    located: bool | None


class Result(NamedTuple):
    """A detector at one rate of false alarms.

    Attributes:
        outcomes: Outcomes of all runs with a fault.
        rate: False alarms in healthy steps that no limit was chosen with.
    """

    outcomes: tuple[Outcome, ...]
    rate: Rate

    def of(self, faults: Iterable[str]) -> list[Outcome]:
        """Select the outcomes of some faults."""
        wanted = set(faults)
        return [outcome for outcome in self.outcomes if outcome.fault in wanted]


def alarms(scores: Scores, limit: float) -> list[tuple[int, int]]:
    """List step and layer of the alarms that a limit gives: those that follow closely are one."""
    over = np.flatnonzero(scores.scores > limit)
    first = over[np.diff(over, prepend=-_QUIET - 1) > _QUIET]
    return [(int(scores.steps[at]), int(scores.layers[at])) for at in first]


def choose_limit(healthy: Sequence[Scores], rate: float) -> float:
    """Choose the lowest limit with at most so many alarms in healthy runs; NaN without scores."""
    known = np.concatenate([np.zeros(0), *(each.scores for each in healthy)])
    known = known[np.isfinite(known)]
    # A limit only matters where it is a score; in falling order, the alarms of most limits are few.
    limit = math.nan
    for candidate in np.unique(known)[::-1]:
        if sum(len(alarms(each, candidate)) for each in healthy) > math.floor(rate * len(known)):
            break
        limit = float(candidate)
    return limit


def evaluate(runs: Sequence[Run], detector: str, rate: float) -> Result:
    """Choose a limit with every other healthy run, and apply it to all others."""
    healthy = [run.scores[detector] for run in runs if run.fault is None and detector in run.scores]
    limit = choose_limit(healthy[::2], rate)
    others = healthy[1::2]
    false = sum(len(alarms(each, limit)) for each in others)
    outcomes = [
        outcome_of(run.job, _within(run.scores[detector], limit, run), run.fault.steps)
        for run in runs
        if run.fault is not None and detector in run.scores
    ]
    return Result(tuple(outcomes), Rate(false, sum(np.isfinite(s.scores).sum() for s in others)))


def _within(scores: Scores, limit: float, run: Run) -> list[tuple[int, int]]:
    """Readings above the limit from the fault on, whether or not an alarm came just before it."""
    over = np.flatnonzero((scores.scores > limit) & (scores.steps >= run.job.fault_step))
    return [(int(scores.steps[at]), int(scores.layers[at])) for at in over]


def evaluate_alerts(runs: Sequence[Run], record: str, within: int | None = None) -> Result:
    """Judge the alerts that stand in a record, from the fault on and in the healthy steps before.

    Args:
        runs: The runs.
        record: Name of the record.
        within: Steps in which an alert counts; None for those in which the fault is watched.
    """
    outcomes = [
        outcome_of(run.job, run.alerts[record], within or run.fault.steps)
        for run in runs
        if run.fault is not None
    ]
    healthy = [run for run in runs if run.fault is None]
    false = [sum(step >= FIRST_READ for step, _ in run.alerts[record]) for run in healthy]
    steps = [len(run.scores["loss"].steps) for run in healthy]
    return Result(tuple(outcomes), Rate(sum(false), sum(steps)))


def outcome_of(job: Job, found: Sequence[tuple[int, int]], steps: int) -> Outcome:
    """Judge the alarms of a run, given as steps and layers."""
    after = [(step - job.fault_step, layer) for step, layer in found if step >= job.fault_step]
    delay, layer = next((pair for pair in after if pair[0] < steps), (None, 0))
    known = delay is not None and layer and FAULTS[job.fault].local
    return Outcome(job.fault, delay, layer == job.fault_block + 1 if known else None)
