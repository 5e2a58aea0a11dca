"""As a user gets it: a monitor with all defaults watches a run into which a fault is put.

What a monitor does by default depends on what readings and checks cost in training steps. These
models are so small that a step takes little more than the calls of Python in it. So the planner of
geomon is asked what it would do at the costs that were measured on usual batches, and a monitor
follows that plan.
"""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from geomon import Monitor, read
from geomon.distributed import RankGroup
from geomon.monitor.planner import DEFAULT_SHARE, Account, Due, Planner
from recipes.enwik8.text import Text
from recipes.faults.kinds import FAULTS, Planted
from recipes.faults.odds import Rate
from recipes.faults.page import by_kind, delays, located, per, share, spread, words_of
from recipes.faults.results import Outcome
from recipes.faults.subject import Settings, draw_settings, load_text
from recipes.faults.training import fault_step, new_subject, plant, train
from recipes.study.markdown import table
from recipes.study.training import begin_training, finish_training, is_finished

# Numbers of these trainings: no limit was chosen with any of them.
NUMBERS = range(900, 1_000)
# Updates of a run as its monitor is told, and those after a fault that are made.
STEPS, AFTER = 1_500, 200
# Within so many steps an alert is early.
_EARLY = 50
# Alerts are counted from the first step with bands on.
_FROM = 200
_RESULT = "live.json"


class Costs(NamedTuple):
    """What geomon costs, in training steps (docs/cost.md: 6 layers of width 128, one thread).

    Attributes:
        reading: Cost of a reading of all default metrics.
        check: Cost of a check.
    """

    reading: float
    check: float


# By the batches of a training.
BATCHES = {"32 x 128 tokens": Costs(1.0, 0.13), "8 x 64 tokens": Costs(3.4, 0.6)}


def plan(costs: Costs, steps: int) -> tuple[set[int], set[int]]:
    """Plan a run as a monitor does by default.

    Returns:
        Steps that are read, and steps that are checked.
    """
    now = 0.0
    account = Account(clock=lambda: now)
    planner = Planner(None, DEFAULT_SHARE, "auto", RankGroup(), account, source="inline")
    read_at, checked_at = set(), set()
    planner.expect_end(steps - 1)
    account.begin()
    planner.begin(0, 0)
    for step in range(steps):
        planner.advance(step)
        due = planner.due(force=step == steps - 1)
        with account.charge():
            if due is Due.READING:
                planner.mark_read("inline")
                read_at.add(step)
                now += costs.reading
            elif due is Due.CHECK:
                planner.mark_checked(costs.check, again=False)
                checked_at.add(step)
                now += costs.check
        now += 1.0
    return read_at, checked_at


@dataclass(frozen=True)
class LiveJob:
    """A run with all defaults.

    Attributes:
        settings: Settings of the training.
        fault: Name of the fault; "" for a healthy run.
        steps: Updates of the whole run.
    """

    settings: Settings
    fault: str
    steps: int = STEPS

    @property
    def folder(self) -> Path:
        """Folder of the run below that of all trainings."""
        return Path(self.settings.name) / f"live_{self.fault or 'healthy'}"


def plan_live(count: int, sizes: Sequence[str]) -> list[LiveJob]:
    """List the runs: of each size and number a healthy one, and one with each fault."""
    jobs = []
    for number in NUMBERS[:count]:
        for size in sizes:
            for name, fault in {"": None, **FAULTS}.items():
                settings = draw_settings(size, number, block=fault.block if fault else "")
                jobs.append(LiveJob(settings, name))
    return jobs


def run_live(job: LiveJob, given: Text, folder: Path) -> None:
    """Make a run, and note which alerts stand in its record; a complete one is kept."""
    logging.getLogger("geomon").setLevel(logging.ERROR)  # what notes say of faults is no news
    settings, place = job.settings, folder / job.folder
    corpus = load_text(settings.text, given)
    description = asdict(settings) | {"fault": job.fault, "steps": job.steps}
    began = time.process_time()
    if not begin_training(place, description):
        return
    subject, generator = new_subject(settings, corpus)
    first = fault_step(settings, FAULTS[job.fault]) if job.fault else job.steps
    planted, monitors = Planted(), {}
    for number, (batches, costs) in enumerate(BATCHES.items()):
        read_at, checked_at = plan(costs, job.steps)
        monitors[batches] = Monitor(
            subject.model, directory=place / str(number), schedule=read_at.__contains__,
            checks=checked_at.__contains__, arrays=False,
        )  # fmt: skip

    def before(step: int) -> None:
        nonlocal planted
        if step == first:
            planted = plant(FAULTS[job.fault], subject, settings)
        planted.each_step(step - first)

    steps = range(min(job.steps, first + AFTER))
    train(subject, generator, steps, list(monitors.values()), before=before, logs=False)
    alerts, readings = {}, {}
    for batches, monitor in monitors.items():
        assert monitor.path is not None
        record = read(monitor.path)
        readings[batches] = len(record)
        alerts[batches] = [
            (alert.step, alert.note.kind, [*alert.note.layers, *(n for n, _ in alert.note.heads)])
            for alert in record.alerts
        ]
    found = {
        "first": first, "block": planted.block, "size": settings.size,
        "fault": job.fault, "last": steps[-1], "alerts": alerts, "readings": readings,
    }  # fmt: skip
    (place / _RESULT).write_text(json.dumps(found) + "\n")
    finish_training(place, description, began)


@dataclass(frozen=True)
class LiveRun:
    """Results of a run.

    Attributes:
        batches: Name of the batches whose costs were planned with.
        fault: Name of the fault; "" for a healthy run.
        outcome: Whether the record has an alert after the fault; None for a healthy run.
        false: Alerts before the fault, from step 200 on.
        steps: Healthy steps in which these were counted.
        readings: Number of readings.
    """

    batches: str
    fault: str
    outcome: Outcome | None
    false: int
    steps: int
    readings: int


def read_live(folder: Path) -> list[LiveRun]:
    """Read what came of all complete runs."""
    paths = [
        path for path in sorted(folder.glob(f"*/live_*/{_RESULT}")) if is_finished(path.parent)
    ]
    return [
        _live_run(found, batches, alerts)
        for found in (json.loads(path.read_text()) for path in sorted(paths))
        for batches, alerts in found["alerts"].items()
    ]


def _live_run(found: dict[str, Any], batches: str, alerts: list[Any]) -> LiveRun:
    first, block, outcome = found["first"], found["block"], None
    if found["fault"]:
        after = [(step - first, layers) for step, _, layers in alerts if step >= first]
        delay, layers = after[0] if after else (None, [])
        place = None if block is None or not layers else layers[0] == block + 1
        outcome = Outcome(FAULTS[found["fault"]], found["size"], delay, place, 0.0)
    return LiveRun(
        batches, found["fault"], outcome, sum(_FROM <= step < first for step, *_ in alerts),
        max(0, min(first, found["last"] + 1) - _FROM), found["readings"][batches],
    )  # fmt: skip


def live_section(runs: Sequence[LiveRun]) -> list[str]:
    """Write the section of the page: what stands in the record of a run with all defaults."""
    by_batches = {name: [run for run in runs if run.batches == name] for name in BATCHES}
    counts = {sum(run.fault == name for run in by_batches[next(iter(BATCHES))]) for name in FAULTS}
    within = [f"within {steps} steps" for steps in (_EARLY, AFTER)]
    by_kinds = [
        (name, kind, _within(outcomes, _EARLY), share(outcomes), spread(delays(outcomes)),
         located(outcomes))
        for name, own in by_batches.items()
        for kind, names in by_kind(FAULTS).items()
        for outcomes in [_outcomes(own, names)]
    ]  # fmt: skip
    return [
        f"All defaults, runs of {STEPS:,} steps with `expect_end`, planned at the costs of two "
        "sizes of batches. Each fault was put into "
        f"{' to '.join(map(str, sorted({min(counts), max(counts)})))} runs on which no threshold "
        "was set. An alert counts from the step at which it is in the record.\n",
        *table(["batches", "", *within, "steps until the alert", "right block"], by_kinds, words=2),
        *(_costs(name, own) for name, own in by_batches.items()),
    ]


def _costs(name: str, runs: Sequence[LiveRun]) -> str:
    """How many readings and checks were planned, and how many alerts were false."""
    rate = Rate(sum(run.false for run in runs), sum(run.steps for run in runs))
    read_at, checked_at = plan(BATCHES[name], STEPS)
    found = {fault: _outcomes(runs, [fault]) for fault in FAULTS}
    missed = {fault: all(each.delay is None for each in own) for fault, own in found.items() if own}
    never = [words_of(FAULTS[fault]) for fault, is_missed in missed.items() if is_missed]
    return (
        f"\n{name}: {len(read_at)} readings and {len(checked_at)} checks in {STEPS:,} steps. "
        f"Never noticed: {', '.join(never) or 'none'}. "
        f"In {rate.trials:,} healthy steps of these runs, from step {_FROM} on, {rate.count} "
        f"alert{'s' * (rate.count != 1)} came: {per(rate, 10_000)} in 10,000 steps."
    )


def _outcomes(runs: Sequence[LiveRun], faults: Sequence[str]) -> list[Outcome]:
    found = [run.outcome for run in runs if run.outcome is not None]
    return [outcome for outcome in found if outcome.fault.name in faults]


def _within(outcomes: Sequence[Outcome], steps: int) -> str:
    """Share of the trainings with an alarm within so many steps."""
    late = [replace(o, delay=None) if (o.delay or 0) > steps else o for o in outcomes]
    return share(late)
