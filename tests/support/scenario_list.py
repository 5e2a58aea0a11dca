"""Scenarios: runs as events, and what sinks, record and log hold in the end, on any ranks."""

import copy
import threading

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from geomon import every, select
from geomon.distributed import RankGroup, RanksLostError
from support.mishaps import FullDisk
from support.models import batch
from support.scenarios import EXTRA, Scenario, probe, step

NOT_SEEN = "did not run while the window was open"


def raising(error):
    """A function of anything that raises."""

    def raises(*given, **named):
        raise error

    return raises


def fails_at_times(number):
    if number in (2, 3, 5):
        raise LookupError(f"nothing is known of step {number}")
    return number % 2 == 0


class Cumulative(nn.Module):
    """A block of linear attention, by hand: with projections, and without a softmax."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.num_heads = 2

    def forward(self, x):
        return x + (self.q_proj(x) @ self.k_proj(x).mT).exp() @ x


def of_the_training():
    return threading.current_thread() is threading.main_thread()


def linear_attention():
    return nn.Sequential(Cumulative(), Cumulative())


class Silent(RankGroup):
    """The first of two ranks; the other one does not answer."""

    def __init__(self):
        super().__init__(0, 2, process_group=object())

    def _call(self, collective, *given, **named):
        if collective is not dist.broadcast_object_list:
            raise RanksLostError("no answer")


def fill_the_disk(watched):
    FullDisk(watched.patch)


def free_the_disk(watched):
    watched.patch.undo()


def fill_the_disk_of_arrays(watched):
    full = raising(OSError("No space left on device"))
    watched.patch.setattr("geomon.record.arrays._archive", full)


def replace_a_block(watched):
    watched.model.blocks[1] = copy.deepcopy(watched.model.blocks[1])


def add_a_block(watched):
    watched.model.blocks.append(copy.deepcopy(watched.model.blocks[1]))


def enter_without_a_step(watched):
    with watched.monitor:
        watched.model(batch())


def fail_inside(watched):
    with watched.monitor:
        raise KeyError("before the first step")


def enter_and_step(watched):
    with watched.monitor as monitor:
        assert monitor is watched.monitor
        watched.step(0)


def run_the_embedding_alone(watched):
    with watched.monitor(2, force=True):
        watched.model.tokens(batch())


def accumulate(number):
    return [step(number, force=True)] * 2


def of_kind(kind):
    """Steps whose numbers are of another type."""
    events = [*(step(kind(n)) for n in range(5)), *[probe(kind(7), batch())] * 2]
    return Scenario(events, [0, 2, 4, 7], {"schedule": every(2)}, [EXTRA])


SCHEDULE = {"schedule": fails_at_times, "metrics": ["max_logit"]}
FAILING = {"metrics": select("variance") | {"broken": lambda hidden: 1 / 0}}
SECOND = {"ranks": lambda: RankGroup(1, 2), "gather": False, "directory": None}
SCENARIOS = {
    "scheduled steps are read once, step 0 whatever the schedule says": Scenario(
        [*range(10), step(9, force=True)], [0, 4, 8, 9],
        {"schedule": lambda number: number in (4, 8)}, found={"recorded": [0, 4, 8, 9]},
    ),
    "a training that goes back is read from there on": Scenario(
        [*range(9), *range(3, 10)], [0, 2, 4, 6, 8, 4, 6, 8], {"schedule": every(2)},
        found={"abandoned": [4, 6, 8], "rewound": [None, 3]},
    ),
    "a schedule that raises": Scenario(
        range(10), [0, 4, 6, 8], SCHEDULE,
        ["the function passed as schedule failed: steps at which it fails are not read: "
         "LookupError: nothing is known of step 2"],
    ),
    "checks that raise": Scenario(
        range(10), [0, 5], {"schedule": every(5), "checks": lambda n: n < 3 or 1 / (n - 3) > 9,
                            "metrics": ["max_logit"]},
        ["the function passed as checks failed"],
    ),
    "a strict schedule that raises": Scenario(
        range(10), [0], SCHEDULE | {"strict": True}, raises=(LookupError, "of step 2")
    ),
    "a metric that fails": Scenario(
        range(3), range(3), FAILING, ["division by zero"], {"finite": [["variance"]] * 3}
    ),
    "a strict metric that fails": Scenario(
        range(3), [], FAILING | {"strict": True}, raises=(ZeroDivisionError, "division by zero")
    ),
    "a record that cannot be written, and then can": Scenario(
        [0, 1, fill_the_disk, 2, 3, 4, free_the_disk, 5, 6, fill_the_disk, 7, free_the_disk],
        range(8), said=["could not be written"], found={"recorded": [0, 1, 1, 1, 1, 5, 6, 6]},
    ),
    "arrays that cannot be written, and then can": Scenario(
        [0, fill_the_disk_of_arrays, 1, 2, free_the_disk, 3], range(4),
        {"metrics": select("qk_cosine"), "arrays": True},
        ["arrays for figures could not be written"],
        {"arrays": ["step_000000_inline", "step_000003_inline"]},
    ),
    "without arrays": Scenario(range(2), range(2), {"arrays": False}, found={"arrays": []}),
    **{
        f"ranks that could not share a budget follow the schedule, {source}": Scenario(
            range(20), range(20),
            {"ranks": lambda: RankGroup(0, 2), "gather": False, "probe": probe},
            [] if probe is None else [EXTRA],
        )
        for source, probe in (("inline", None), ("probe", batch()))
    },
    "a metric of one's own is measured by the thread that trains": Scenario(
        range(2), range(2),
        {"background": True, "metrics": {"own": lambda hidden: 1 / of_the_training()}},
        found={"finite": [["own"]] * 2},
    ),
    "whole numbers of numpy": of_kind(np.uint8),
    "arrays of numpy": of_kind(np.array),
    "tensors": of_kind(torch.tensor),
    "tensors of one": of_kind(lambda number: torch.tensor([number])),
    "a window in which nothing ran": Scenario(
        [1, run_the_embedding_alone, run_the_embedding_alone, 3], [1, 3], said=[NOT_SEEN],
    ),
    "a probe in which nothing ran": Scenario(
        [probe(0, lambda model: None), probe(1, lambda model: None), 2], [2], said=[EXTRA, NOT_SEEN]
    ),
    "strict, and nothing ran": Scenario(
        [run_the_embedding_alone], [], {"strict": True}, raises=(RuntimeError, NOT_SEEN)
    ),
    "views that were expected and not seen": Scenario(
        [probe(n, torch.rand(12, 6, 8) / 9) for n in range(2)], range(2),
        {"model": linear_attention, "metrics": select("variance", "attention_entropy")},
        ["not seen in the first pass", EXTRA, "attention_entropy, layer 1, 2"],
        {"finite": [["variance"]] * 2},
    ),
    "strict, and views were not seen": Scenario(
        [probe(0, torch.randn(4, 6, 8))], [],
        {"model": linear_attention, "metrics": select("attention_entropy"), "strict": True},
        said=[EXTRA], raises=(RuntimeError, "not seen in the first pass"),
    ),
    "blocks that are replaced or added": Scenario(
        [0, replace_a_block, 1, add_a_block, 2], range(3),
        {"metrics": {"last": lambda hidden: hidden.norm()}},
        ["4 now, 3 then"], {"finite": [["last"]] * 3},
    ),
    "a budget leaves readings out": Scenario(
        [*range(8), step(8, force=True)], [0, 8], {"budget": 0.001, "checks": None},
        ["the budget left out 7 of 9 readings that were due"], {"left_out": [0, 7]},
    ),
    "a `with` without a step": Scenario(
        [enter_without_a_step], [], said=["`with monitor(step):` around the forward pass"],
        read=[],
    ),
    "no step at all": Scenario([], [], said=["the monitor was given no step, so"], read=[]),
    "an error before the first step": Scenario(
        [fail_inside], [], raises=(KeyError, "before the first step"), read=[],
    ),
    "a `with` around steps": Scenario([enter_and_step], [0]),
    "the first extra pass says what cannot be put back": Scenario(
        [probe(n, batch()) for n in range(3)], range(3), said=[EXTRA],
        found={"kinds": [["extra pass"], [], []]},
    ),
    "fewer rows than were asked for": Scenario(
        [0, step(1, inputs=batch(2, 16))], [0, 1], {"tokens": 200},
        ["step 1 has 2 notes on how far its values can be trusted: geomon summary"],
        {"tokens": [200, 32]},
    ),
    "batches of a step that is read again": Scenario([*accumulate(3), *accumulate(4)], [3, 4]),
    "without gathering a pass that fails elsewhere is said": Scenario(
        [probe(0)], [], SECOND | {"probe": raising(OSError("no batch here")), "strict": True},
        said=[EXTRA], raises=(OSError, "no batch here"),
    ),
    "ranks that do not answer are left to themselves": Scenario(
        range(3), [1, 2], {"ranks": Silent},
        ["rank 0 lost the other ranks (no answer): their rows are no longer gathered"],
    ),
    "strict, and ranks do not answer": Scenario(
        range(3), [], {"ranks": Silent, "strict": True}, raises=(RanksLostError, "no answer")
    ),
}  # fmt: skip
