"""Steps that a run reads by default: simulated runs with the planner itself and a false clock."""

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer

from benchmarks.timing import print_table
from geomon.distributed import RankGroup
from geomon.monitor.planner import DEFAULT_SHARE, Account, Due, Planner

# Steps of a reading, and of a check.
COSTS = {1.0: 0.15, 2.5: 0.6, 7.0: 0.6}
LENGTHS = (300, 400, 1_500, 2_000, 10_000, 100_000)
# Steps where the story of the recipe happens: a plan should read near each of them.
TARGETS = (64, 96, 128, 180, 256, 360, 512, 720, 1024)
_NEAR = 0.25  # of a target
_DEARER_FIRST = 2.2  # a first reading loads libraries
_SCATTER = 0.15  # standard deviation of the logarithm of a reading's cost


def targets(steps: int) -> list[int]:
    """List the targets that a run of some steps reaches."""
    return [target for target in TARGETS if target < steps]


class Run(NamedTuple):
    """A simulated run.

    Attributes:
        steps: Its length.
        reads: Steps that were read.
        checks: Number of checks.
        share: Share of the time that readings and checks took.
    """

    steps: int
    reads: list[int]
    checks: int
    share: float

    @property
    def near(self) -> int:
        """Number of targets with a reading near them."""
        return sum(any(abs(r - t) <= _NEAR * t for r in self.reads) for t in targets(self.steps))

    @property
    def gap(self) -> int:
        """Largest number of steps between two readings."""
        return max(after - before for before, after in itertools.pairwise(self.reads))

    @property
    def ratio(self) -> float:
        """Largest ratio of the steps of two readings in a row, from step 48 on."""
        late = [step for step in self.reads if step >= 48]
        return max((after / before for before, after in itertools.pairwise(late)), default=math.nan)


def simulate(
    steps: int, cost: float, check: float | None, share: float, *, is_known: bool, seed: int
) -> Run:
    """Simulate a run in steps of one second.

    Args:
        steps: Length of the run.
        cost: Seconds of a reading; they scatter, and the first takes longer.
        check: Seconds of a check; None for no checks, as with a probe.
        share: Share of the time that geomon may take.
        is_known: Whether the planner knows the length. Then the last step is read, as callbacks do.
        seed: Seed of the scatter.
    """
    chance, now, reads, checks = random.Random(seed), 0.0, [], 0
    account = Account(clock=lambda: now)
    kind = None if check is None else "auto"
    planner = Planner(None, share, kind, RankGroup(), account, source="inline")
    planner.purse.end = steps - 1 if is_known else None
    account.begin()
    planner.begin(0, 0)
    for step in range(steps):
        planner.advance(step)
        due = planner.due(force=is_known and step == steps - 1)
        with account.charge():
            if due is Due.READING:
                planner.mark_read("inline")
                scattered = cost * math.exp(_SCATTER * chance.gauss(0, 1))
                now += scattered if reads else _DEARER_FIRST * cost
                reads.append(step)
            elif due is Due.CHECK and check is not None:
                now += check
                planner.checks.mark(check)
                checks += 1
        now += 1.0
    return Run(steps, reads, checks, account.overhead)


def _row(steps: int, cost: float, *, is_known: bool, runs: Sequence[Run]) -> list[str]:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(run, name) for run in runs)

    return [
        f"{steps:,} steps, end {'known' if is_known else 'unknown'}", f"{cost:g}",
        f"{statistics.fmean(len(run.reads) for run in runs):.1f}",
        f"{mean('near'):.1f} of {len(targets(steps))}",
        f"{mean('gap'):,.0f}", f"{mean('ratio'):.1f}", f"{mean('checks'):,.0f}",
        f"{100 * max(run.share for run in runs):.1f} %",
    ]  # fmt: skip


def main(
    checks: Annotated[bool, typer.Option(help="Whether checks share the time.")] = True,
    seeds: Annotated[int, typer.Option(help="Runs of each kind.")] = 5,
    share: Annotated[float, typer.Option(help="Share of the time.")] = DEFAULT_SHARE,
) -> None:
    """Print what runs of many lengths and costs read: means of a few runs, the largest share."""
    columns = (
        "run", "cost", "readings", "near targets", "largest gap", "ratio", "checks", "share",
    )  # fmt: skip
    print_table(
        "Default plans; costs of a reading in steps",
        columns,
        (
            _row(steps, cost, is_known=is_known, runs=[
                simulate(
                    steps, cost, check if checks else None, share, is_known=is_known, seed=seed
                )
                for seed in range(seeds)
            ])
            for is_known, steps, (cost, check) in itertools.product(
                (True, False), LENGTHS, COSTS.items()
            )
        ),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
