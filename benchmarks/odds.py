"""Faults that are noticed at the costs of a training on a GPU, by small trainings on this machine.

A training of 12 layers at 50 ms a step pays for few looks. The faults of `recipes.faults` are put
into small decoders at steps 600 to 780, each watched at the steps that such a training's plan has.
"""

import itertools
import logging
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.timing import print_table
from geomon import Monitor, read
from geomon.analysis.bands import WATCHED
from recipes.enwik8.text import Text, carried_text, characters
from recipes.faults.detectors import Outcome, outcome_of
from recipes.faults.kinds import FAULTS
from recipes.faults.page import KINDS, delays, located, share, spread
from recipes.faults.training import (
    AFTER,
    EARLIEST,
    LATEST,
    Costs,
    Job,
    new_subject,
    plan,
    train,
)
from recipes.study.training import without_margins

# Most that a look may cost 12 layers, in steps of 50 ms.
COSTS = Costs(reading=3.0, check=1.0)
LENGTHS = (2_000, 20_000)
# All that alerts look at, without margins, so that runs take less time.
_OF_ALERTS = (*WATCHED, "effective_rank", "massive_share")
_WITHIN = (50, 200)  # steps
_FIRST = 2_000  # number of the first run: no limit of an alert was chosen with any of them

Plan = tuple[set[int], set[int]]  # steps that are read, and that are checked


def noticed(job: Job, given: Text, plans: Sequence[Plan]) -> list[list[tuple[int, int]]]:
    """Make a run; return step and layer of its alerts, for each plan."""
    subject = new_subject(job, given)
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(number) for number in range(len(plans))]
        monitors = [
            Monitor(
                subject.model, metrics=without_margins(*_OF_ALERTS), directory=own, arrays=False,
                schedule=read_at.__contains__, checks=checked_at.__contains__, sinks=(),
            )
            for own, (read_at, checked_at) in zip(folders, plans, strict=True)
        ]  # fmt: skip
        for _ in train(job, subject, monitors):
            pass
        for monitor in monitors:
            monitor.close()
        return [
            [
                (a.step, next(iter([*a.note.layers, *(layer for layer, _ in a.note.heads)]), 0))
                for a in read(own).alerts
            ]
            for own in folders
        ]


def _row(steps: int, planned: Plan, outcomes: Sequence[Outcome]) -> Iterator[str]:
    read_at, checked_at = planned
    looks = sorted(read_at | checked_at)
    apart = [
        after - before for before, after in itertools.pairwise(looks)
        if EARLIEST <= after < LATEST + AFTER
    ]  # fmt: skip
    yield from (f"{steps:,}", f"{len(read_at):,}", f"{len(checked_at):,}")
    yield f"{statistics.fmean(apart):.0f}"
    for within, faults in itertools.product(_WITHIN, KINDS.values()):
        yield share([
            o if o.delay is not None and o.delay < within else o._replace(delay=None)
            for o in outcomes if o.fault in faults
        ])  # fmt: skip
    yield from (spread(delays(outcomes)), located(outcomes))


def main(
    count: Annotated[int, typer.Option(min=1, help="Runs of each fault.")] = 2,
    width: Annotated[int, typer.Option(help="Width of the models.")] = 64,
) -> None:
    """Print how often each plan looks, and what share of the faults its alerts notice."""
    logging.getLogger("geomon").setLevel(logging.ERROR)  # what it says of faults is no news here
    given = characters(carried_text(), "Python's reference and docstrings")
    plans = [plan(COSTS, steps) for steps in LENGTHS]
    outcomes: list[list[Outcome]] = [[] for _ in plans]
    for number, fault in itertools.product(range(_FIRST, _FIRST + count), FAULTS):
        job = Job(number, fault, width)
        for own, alerts in zip(outcomes, noticed(job, given, plans), strict=True):
            own.append(outcome_of(job, alerts, max(_WITHIN)))
    within = [f"{kind}, within {steps}" for steps, kind in itertools.product(_WITHIN, KINDS)]
    print_table(
        f"{len(outcomes[0])} runs with a fault at step {EARLIEST} to {LATEST}; a reading costs "
        f"{COSTS.reading:g} steps, a check {COSTS.check:g}",
        ("steps", "readings", "checks", "apart", *within, "steps until the alert", "right block"),
        (tuple(_row(*each)) for each in zip(LENGTHS, plans, outcomes, strict=True)),
    )


if __name__ == "__main__":
    typer.run(main)
