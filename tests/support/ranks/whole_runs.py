"""Whole runs: the first rank has the readings, record and words that one process would have."""

import logging
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from geomon import every, select
from geomon.capture import Window
from geomon.distributed import RankFailedError, RankGroup
from support.models import PlainDecoder, batch
from support.ranks.one_process import LAYERS
from support.scenario_list import SCENARIOS
from support.scenarios import Scenario, Watched, check, step


class Heard(logging.Handler):
    """Messages that geomon logs on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self.clear = self.messages.clear
        logging.getLogger("geomon").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def second_rank_fails(hidden: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("by design")
    return hidden.mean()


def broken_window(self, device=None, *, wait=True):
    raise OSError("no window here")


def without_window(step: int, rank: int):
    """Run a step whose window fails on a rank."""

    def event(watched: Watched) -> None:
        if dist.get_rank() == rank:
            watched.patch.setattr(Window, "snapshots", broken_window)
        watched.step(step)
        watched.patch.undo()

    return event


def unwatched(watched: Watched) -> None:
    watched.model(batch())


def waste(watched: Watched) -> None:
    """By its own clock the second rank would read each step."""
    watched.monitor.account.charged -= 1e9 * (dist.get_rank() == 1)


# Scenarios with ranks of their own, with an error of one rank alone, and with rows that all have.
ALONE = {name for name, each in SCENARIOS.items() if "ranks" in each.options}
ALONE |= {"a strict metric that fails", "fewer rows than were asked for"}
FRAGILE = {"metrics": select("variance") | {"fragile": second_rank_fails}}


def runs_of(rank: int, size: int) -> dict[str, Scenario]:
    """Scenarios of this rank; most are also run in one process."""
    odd, last, second = rank == 1, size - 1, every(2)
    return {name: each for name, each in SCENARIOS.items() if name not in ALONE} | {
        "a metric fails at the layers of one rank": Scenario(
            range(2), range(2), FRAGILE, ["by design"]
        ),
        "strict, and a metric fails": Scenario(
            [0], [], FRAGILE | {"strict": True},
            raises=(RankFailedError, "by design") if rank < 2 else None,
        ),
        "a window fails on one rank": Scenario(  # not tried again by those that saw no fault
            [0, without_window(1, last), without_window(2, last), 2, 3, 4], [0, 3, 4],
            said=[f"a reading failed and is left out: rank {last}: OSError: no window here"],
        ),
        "other layers": Scenario(  # said when the monitors are built
            [0], [0], {"model": lambda: PlainDecoder(layers=LAYERS + odd), "tokens": 256},
            ["rank 1 was built with other layers than rank 0"], {"tokens": [256]},
        ),
        "another schedule": Scenario(
            range(7), [0, 2, 4, 6], {"schedule": every(3) if odd else second},
            ["rank 1 was built with schedule="],
        ),
        # That rank owes it and is ahead at step 3, where it waits; they meet at step 4.
        "a rank misses a window": Scenario(
            [0, 1, unwatched if odd else 2, *range(3, 7)], [0, 4, 6], {"schedule": second},
            ["rank 1 reads step 3 but rank 0 reads step 2"],
        ),
        "a budget, of which the first rank decides": Scenario(
            [0, waste, *range(1, 8), step(8, force=True)], [0, 8],
            {"budget": 0.001, "checks": None}, ["the budget left out 7 of 9"],
            {"left_out": [0, 7]},
        ),
        "nothing is gathered, and no rank waits": Scenario(
            range(2 * (rank == 0)), range(2), {"gather": False, "tokens": 256},
            found={"tokens": [256] * 2},
        ),
    }  # fmt: skip


def scenarios(ranks: RankGroup, folder: Path) -> None:
    heard, first = Heard(), ranks.rank == 0
    for name, scenario in runs_of(ranks.rank, ranks.size).items():
        if ranks.size > 2 and name in SCENARIOS:  # no different from two ranks, and slow
            continue
        dist.barrier()
        place = folder / f"{name} {ranks.size}".replace("/", "")
        options = {"first_batch": 100 * ranks.rank, "directory": place}
        print(name, file=sys.stderr)
        own = replace(scenario, options=options | scenario.options)
        watched = check(own, folder, heard, is_first=first)
        for reading in watched.memory.readings if scenario.options is FRAGILE else ():
            for layer in range(LAYERS + 1):
                fails = math.isnan(reading.values[f"fragile/layer_{layer:02d}"])
                assert fails == (layer % ranks.size == 1)
                assert math.isfinite(reading.values[f"variance/layer_{layer:02d}"])


def resumed(ranks: RankGroup, folder: Path) -> None:
    """Goes on in the same folder, two steps back, as from a checkpoint."""
    first = {1: 10, 2: 0, 4: 5}[ranks.size]
    events, options = range(max(0, first - 2), first + 5), {"first_batch": 100 * ranks.rank}
    check(
        Scenario(events, events, options, read=range(first + 5)), folder / "resumed", Heard(),
        is_first=ranks.rank == 0,
    )  # fmt: skip
