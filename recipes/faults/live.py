"""As a user gets it: a monitor with all defaults watches a run into which a fault is put."""

import json
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from geomon import Monitor, read
from recipes.enwik8.data import Corpus
from recipes.faults.kinds import FAULTS
from recipes.faults.odds import Rate
from recipes.faults.page import KINDS, located, share, spread
from recipes.faults.results import Outcome
from recipes.faults.subject import Settings, draw_settings, load_text
from recipes.faults.training import fault_step, new_subject
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
    """List the runs: of each size and number a healthy one, and one with each fault.

    Args:
        count: Number of runs with each fault and size.
        sizes: Names of the sizes.
    """
    jobs = []
    for number in NUMBERS[:count]:
        for size in sizes:
            for name, fault in {"": None, **FAULTS}.items():
                settings = draw_settings(size, number, block=fault.block if fault else "")
                jobs.append(LiveJob(settings, name))
    return jobs


def run_live(job: LiveJob, given: Corpus, folder: Path) -> None:
    """Make a run, and note which alerts stand in its record; a complete one is kept.

    Args:
        job: The run.
        given: The text that the recipe was given.
        folder: Folder of all trainings.
    """
    logging.getLogger("geomon").setLevel(logging.ERROR)  # what notes say of faults is no news
    settings, place = job.settings, folder / job.folder
    corpus = load_text(settings.text, given)
    description = asdict(settings) | {"fault": job.fault, "steps": job.steps}
    began = time.process_time()
    if not begin_training(place, description):
        return
    torch.manual_seed(settings.number)
    subject = new_subject(settings, corpus)
    generator = torch.Generator().manual_seed(settings.number)
    first = fault_step(settings, FAULTS[job.fault]) if job.fault else job.steps
    planted, monitor = None, Monitor(subject.model, directory=place)
    monitor.expect_end(job.steps - 1)
    for step in range(min(job.steps, first + AFTER)):
        if step == first:
            chance = random.Random(f"{settings.name} {job.fault} where")
            planted = FAULTS[job.fault].plant(subject, chance)
        if planted is not None:
            planted.each_step(step - first)
        windows = subject.draw(generator)
        with monitor(step):
            loss = subject.loss(subject.model, windows)
        subject.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(subject.model.parameters(), 1.0)
        for group in subject.optimizer.param_groups:
            group["lr"] = settings.learning_rate * subject.rate(step)
        subject.optimizer.step()
    monitor.close()
    record = read(place)
    alerts = [
        (alert.step, alert.note.kind, [*alert.note.layers, *(n for n, _ in alert.note.heads)])
        for alert in record.alerts
    ]
    found = {
        "first": first, "block": planted and planted.block, "alerts": alerts,
        "readings": [reading.step for reading in record], "overhead": monitor.overhead,
        "size": settings.size, "fault": job.fault, "last": step,
    }  # fmt: skip
    (place / _RESULT).write_text(json.dumps(found) + "\n")
    finish_training(place, description, began)


@dataclass(frozen=True)
class LiveRun:
    """What came of a run.

    Attributes:
        fault: Name of the fault; "" for a healthy run.
        outcome: Whether the record has an alert after the fault; None for a healthy run.
        false: Alerts before the fault, from step 200 on.
        steps: Healthy steps in which these were counted.
        readings: Number of readings.
        overhead: Share of the time that geomon took.
    """

    fault: str
    outcome: Outcome | None
    false: int
    steps: int
    readings: int
    overhead: float


def read_live(folder: Path) -> list[LiveRun]:
    """Read what came of all complete runs.

    Args:
        folder: Folder of all trainings.
    """
    return list(_read_live(folder))


def _read_live(folder: Path) -> Iterator[LiveRun]:
    for path in sorted(folder.glob(f"*/live_*/{_RESULT}")):
        if not is_finished(path.parent):
            continue
        found = json.loads(path.read_text())
        first, block = found["first"], found["block"]
        false = [step for step, *_ in found["alerts"] if _FROM <= step < first]
        outcome = None
        if found["fault"]:
            after = [(step, layers) for step, _, layers in found["alerts"] if step >= first]
            step, layers = after[0] if after else (None, [])
            place = None if block is None or not layers else layers[0] == block + 1
            delay = None if step is None else step - first
            outcome = Outcome(FAULTS[found["fault"]], found["size"], delay, place, 0.0)
        yield LiveRun(
            found["fault"], outcome, len(false), max(0, min(first, found["last"] + 1) - _FROM),
            len(found["readings"]), found["overhead"],
        )  # fmt: skip


def live_section(runs: Sequence[LiveRun]) -> list[str]:
    """Write the section of the page: what stands in the record of a run with all defaults.

    Args:
        runs: What came of all runs.
    """
    outcomes = [run.outcome for run in runs if run.outcome is not None]
    healthy = [run for run in runs if not run.fault]
    rate = Rate(sum(run.false for run in runs), sum(run.steps for run in runs))
    one, low, high = (1e4 * x for x in (rate.count / max(rate.trials, 1), rate.low, rate.high))
    rows = [
        f"All defaults, runs of {STEPS:,} steps of which the monitor was told, each fault in "
        f"{_counts(outcomes)} runs that no limit was chosen with. An alert counts from the step at "
        "which it stands in the record.\n",
        f"| | fault | within {_EARLY} steps | within {AFTER} steps | steps until the alert "
        "| right block |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        rows.append(
            f"| **{kind}** | all | {_cells([o for o in outcomes if o.fault.kind == kind])} |"
        )
    for kind in KINDS:
        for name, fault in FAULTS.items():
            own = [outcome for outcome in outcomes if outcome.fault.name == name]
            if fault.kind == kind and own:
                words = f"{fault.words}{' *' * fault.held_out}"
                rows.append(f"| {kind} | {words} | {_cells(own)} |")
    shares = sorted(run.overhead for run in healthy)
    made = sorted(run.readings for run in healthy)
    rows.append(
        f"\nIn {rate.trials:,} healthy steps of these runs, from step {_FROM} on, {rate.count} "
        f"alert{'s' * (rate.count != 1)} came: {one:.1f} (95 % interval {low:.1f} to {high:.1f}) "
        f"in 10,000 steps."
    )
    if healthy:
        rows.append(
            f"\nThe {len(healthy)} healthy runs were read {made[0]} to {made[-1]} times, for "
            f"{shares[0]:.1%} to {shares[-1]:.1%} of the time.".replace("%", " %")
        )
    return rows


def _counts(outcomes: Sequence[Outcome]) -> str:
    counts = {sum(o.fault.name == name for o in outcomes) for name in FAULTS} - {0}
    return (
        " to ".join(str(count) for count in sorted({min(counts), max(counts)})) if counts else "0"
    )


def _cells(outcomes: Sequence[Outcome]) -> str:
    early = [o for o in outcomes if o.delay is not None and o.delay <= _EARLY]
    within = f"{len(early) / len(outcomes):.0%}".replace("%", " %") if outcomes else "-"
    delays = [o.delay for o in outcomes if o.delay is not None]
    return " | ".join([within, share(outcomes), spread(delays), located(outcomes)])
