"""Ranks that are late, dead or interrupted: the others go on by themselves, and none waits."""

import _thread
import gc
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from geomon.distributed import RankGroup, RanksLostError, join_ranks
from support.ranks.launch import write_down
from support.ranks.one_process import Decoder, monitor_of, ragged, steps
from support.ranks.whole_runs import Heard
from support.scenarios import Scenario, Watched, check


def lost(ranks: RankGroup, folder: Path) -> None:
    """The second rank sleeps through a reading, later it dies; the first goes on with its own.

    It sleeps until the first has given it up: how long that takes is the machine's affair.
    """

    def sleep(watched: Watched) -> None:
        while ranks.rank and not (folder / "given up").exists():
            time.sleep(0.05)

    def die(watched: Watched) -> None:
        if ranks.rank:
            write_down(lost, folder)
            os._exit(0)

    def give_up(watched: Watched) -> None:
        (folder / "given up").touch()

    said = [f"rank {rank} lost the other ranks" for rank in range(2)]
    options = {"tokens": 512, "rank_timeout": 4, "first_batch": 100 * ranks.rank}
    for fault in (sleep, die):  # the reading that was under way is left out
        scenario = Scenario(
            [0, 1, fault, 2, give_up, 3], [0, 1, 3], options, [said[0], "only 256 rows"],
            {"tokens": [512, 512, 256]}, elsewhere=said[1:],
        )  # fmt: skip
        check(scenario, folder / fault.__name__, Heard(), is_first=ranks.rank == 0)


def told(ranks: RankGroup, folder: Path) -> None:
    """One rank of four is gone; a rank that does not hear of it itself is told by the others."""
    gc.disable()  # which might end by chance what is to end at once
    group = join_ranks(timeout=60)
    if ranks.rank == 3:
        write_down(told, folder)
        os._exit(0)
    began = time.perf_counter()
    with pytest.raises(RanksLostError):
        group.all_gather(0)
    group.disconnect()
    (folder / f"told {ranks.rank}").touch()
    while len([*folder.glob("told [0-9]")]) < 3 and time.perf_counter() - began < 30:
        time.sleep(0.05)  # ranks that end would tell the others too
    assert time.perf_counter() - began < 30


def interrupted(ranks: RankGroup, folder: Path) -> None:
    """Ctrl-C while the other rank does not answer: it is not waited for."""
    model, (ids, mask) = Decoder(), ragged(ranks.rank)
    monitor, memory = monitor_of(model, strict=False, rank_timeout=1000)
    done = folder / "interrupted"
    while ranks.rank and not done.exists():
        time.sleep(0.1)
    if ranks.rank:
        return
    # A process that was started in the background of a shell ignores Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt), monitor(0):
        model(ids, attention_mask=mask)
    with monitor(1):  # goes on alone
        model(ids, attention_mask=mask)
    assert steps(memory) == [1]
    assert not any(module._forward_hooks for module in model.modules())
    done.touch()
