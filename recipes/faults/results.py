"""What the trainings say: for each schedule, detector and fault what was noticed, and how early."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from geomon import log_spaced
from recipes.faults.detectors import DETECTORS, OF_MARGINS, Scores, score_all
from recipes.faults.kinds import FAULTS, Fault
from recipes.faults.odds import (
    Rate,
    area_under_curve,
    choose_limit,
    false_alarms,
    first_alarm,
    largest_score,
)
from recipes.faults.plan import MAIN_TEXT, OTHER_TEXT
from recipes.faults.track import Track, read_tracks
from recipes.faults.training import EACH_STEP, FIRST_READ, FULL, FULL_INTERVAL

# Schedules that are compared, and the detectors that are applied to each.
SCHEDULES: dict[str, Collection[str]] = {
    "each step": tuple(DETECTORS), "every 10 steps": ("geometry",), "log_spaced()": ("geometry",),
}  # fmt: skip


@dataclass(frozen=True)
class Scored:
    """A training with the scores of each detector.

    Attributes:
        track: The training, whose numbers need not be kept.
        scores: Scores by detector.
    """

    track: Track
    scores: dict[str, Scores]

    @property
    def fault(self) -> Fault | None:
        """The fault; None for a healthy training."""
        return FAULTS.get(self.track.fault)

    @property
    def calibrates(self) -> bool:
        """Whether limits are chosen with this training."""
        return self.track.number % 2 == 0

    @property
    def window(self) -> tuple[int, int]:
        """First step of the fault, and the step after the last one that is watched."""
        assert self.fault is not None
        assert self.track.fault_step is not None
        return self.track.fault_step, self.track.fault_step + self.fault.steps


def select(track: Track, schedule: str) -> Track:
    """Select the readings of a schedule."""
    steps = track.steps
    end = math.inf if track.fault_step is None else track.fault_step + FAULTS[track.fault].steps
    if schedule == "log_spaced()":
        due = log_spaced()
        return track.at(np.array([bool(due(int(step))) for step in steps]))
    if schedule == "with margins":
        return track.at((steps % FULL_INTERVAL == 0) & (steps < end))
    inside = (steps >= FIRST_READ) & (steps < end)
    return track.at(inside & (steps % 10 == 0) if schedule == "every 10 steps" else inside)


def score_trainings(folder: Path) -> dict[str, list[Scored]]:
    """Score all trainings but those in which alerts are counted, by schedule."""
    found: dict[str, list[Scored]] = {schedule: [] for schedule in SCHEDULES}
    for track in read_tracks(folder, EACH_STEP, [*MAIN_TEXT, *OTHER_TEXT]):
        for schedule, detectors in SCHEDULES.items():
            scores = dict(score_all(select(track, schedule), detectors))
            found[schedule].append(Scored(replace(track, values={}), scores))
    return found


def score_full(folder: Path) -> list[Scored]:
    """Score the trainings that limits are tested with by the detectors that need margins."""
    found = []
    for track in read_tracks(folder, FULL, MAIN_TEXT):
        kept, scores = select(track, "with margins"), {}
        for name, (_, score) in OF_MARGINS.items():
            each = score(kept)
            late = np.where(kept.steps >= FIRST_READ, each.scores, np.nan)
            scores[name] = each._replace(scores=late)
        found.append(Scored(replace(track, values={}), scores))
    return found


@dataclass(frozen=True)
class Outcome:
    """What a detector made of one training with a fault.

    Attributes:
        fault: The fault.
        size: Name of the sizes of the model.
        delay: Steps from the fault to the first alarm; None where none came.
        located: Whether the layer that was named is that of the faulty block; None without an
            alarm, for a fault that is everywhere, and for a detector that names no layer.
        score: Largest score while the fault was watched.
    """

    fault: Fault
    size: str
    delay: int | None
    located: bool | None
    score: float


@dataclass(frozen=True)
class Result:
    """A detector at one rate of false alarms.

    Attributes:
        detector: Its name.
        limit: The limit.
        rate: False alarms in healthy trainings that the limit was not chosen with.
        outcomes: Outcomes of all trainings with a fault.
        healthy: Largest scores of healthy trainings over as many steps as a fault is watched.
    """

    detector: str
    limit: float
    rate: Rate
    outcomes: tuple[Outcome, ...]
    healthy: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def of(self, faults: Iterable[str]) -> list[Outcome]:
        """Select the outcomes of some faults."""
        wanted = set(faults)
        return [outcome for outcome in self.outcomes if outcome.fault.name in wanted]

    def noticed(self, faults: Iterable[str]) -> float:
        """Return the share of the trainings with some faults in which an alarm came."""
        found = [outcome.delay is not None for outcome in self.of(faults)]
        return sum(found) / len(found) if found else math.nan

    def by_chance(self, steps: int) -> tuple[int, int]:
        """Count the healthy stretches of so many steps with a score above the limit, and all."""
        scores = self.healthy.get(steps, ())
        return sum(score > self.limit for score in scores), len(scores)

    def area(self, faults: Iterable[str]) -> float:
        """Return the area under the curve (AUROC) for some faults."""
        chosen = self.of(faults)
        lengths = {outcome.fault.steps for outcome in chosen}
        healthy = [score for length in lengths for score in self.healthy.get(length, ())]
        return area_under_curve(healthy, [outcome.score for outcome in chosen])


def evaluate(
    trainings: Sequence[Scored], detector: str, rate: float, limit: float | None = None
) -> Result:
    """Choose a limit with the healthy trainings of one half, and apply it to all others."""
    healthy = [training for training in trainings if training.fault is None]
    if limit is None:
        limit = choose_limit([t.scores[detector] for t in healthy if t.calibrates], rate)
    others = [t.scores[detector] for t in healthy if not t.calibrates]
    outcomes = [
        _outcome(training, training.scores[detector], limit)
        for training in trainings
        if training.fault is not None
    ]
    lengths = {fault.steps for fault in FAULTS.values()}
    windows = {
        length: tuple(
            largest_score(scores, start, start + length)
            for scores in others
            for start in range(int(scores.steps[-1]) - length, FIRST_READ + 96, -length)
        )
        for length in lengths
    }
    return Result(detector, limit, false_alarms(others, limit), tuple(outcomes), windows)


def _outcome(training: Scored, scores: Scores, limit: float) -> Outcome:
    assert training.fault is not None
    start, end = training.window
    alarm = first_alarm(scores, limit, start, end)
    located = None
    if alarm is not None and training.track.block is not None and alarm.place.layer:
        located = alarm.place.layer == training.track.block + 1
    return Outcome(
        training.fault, training.track.size, None if alarm is None else alarm.step - start, located,
        largest_score(scores, start, end),
    )  # fmt: skip
