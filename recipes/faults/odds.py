"""Odds: limits set on healthy trainings, false alarms on others, what is noticed and how early."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from recipes.faults.detectors import Scores
from recipes.faults.track import Place

# Readings without a score above the limit after which one is a new alarm.
_QUIET = 12


class Alarm(NamedTuple):
    """The first reading of several whose scores are above a limit.

    Attributes:
        step: Its step.
        place: Place with the largest score.
    """

    step: int
    place: Place


def alarms(scores: Scores, limit: float) -> list[Alarm]:
    """List the alarms that a limit gives."""
    found: list[Alarm] = []
    quiet = _QUIET
    for step, score, place in zip(scores.steps, scores.scores, scores.places, strict=True):
        if score > limit:
            if quiet >= _QUIET:
                found.append(Alarm(int(step), place))
            quiet = 0
        else:
            quiet += 1
    return found


def choose_limit(healthy: Sequence[Scores], rate: float) -> float:
    """Choose the lowest limit with at most so many alarms in healthy trainings.

    Returns:
        The limit; NaN where nothing is scored.
    """
    known = np.concatenate([each.scores[np.isfinite(each.scores)] for each in healthy])
    if not len(known):
        return math.nan
    allowed = math.floor(rate * len(known))
    # A limit only matters where it is a score: alarms never grow in number above the median.
    candidates = np.unique(known[known >= np.median(known)])
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        count = sum(len(alarms(each, candidates[middle])) for each in healthy)
        low, high = (low, middle) if count <= allowed else (middle + 1, high)
    return float(candidates[low])


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


def false_alarms(healthy: Iterable[Scores], limit: float) -> Rate:
    """Count the alarms of healthy trainings, of all readings that have a score."""
    every = list(healthy)
    readings = sum(int(np.isfinite(each.scores).sum()) for each in every)
    return Rate(sum(len(alarms(each, limit)) for each in every), readings)


def first_alarm(scores: Scores, limit: float, start: int, end: int) -> Alarm | None:
    """Find the first reading of a range of steps whose score is above a limit."""
    inside = (scores.steps >= start) & (scores.steps < end)
    with np.errstate(invalid="ignore"):
        over = np.flatnonzero(inside & (scores.scores > limit))
    if not len(over):
        return None
    return Alarm(int(scores.steps[over[0]]), scores.places[over[0]])


def largest_score(scores: Scores, start: int, end: int) -> float:
    """Return the largest score in a range of steps; NaN where there is none."""
    inside = scores.scores[(scores.steps >= start) & (scores.steps < end)]
    known = inside[np.isfinite(inside)]
    return float(known.max()) if len(known) else math.nan


def area_under_curve(healthy: Sequence[float], faulty: Sequence[float]) -> float:
    """Compute the chance that a faulty training has a larger score than a healthy one (AUROC)."""
    first = np.array([score for score in healthy if math.isfinite(score)])
    second = np.array([score for score in faulty if math.isfinite(score)])
    if not len(first) or not len(second):
        return math.nan
    larger = (second[:, None] > first).mean() + (second[:, None] == first).mean() / 2
    return float(larger)
