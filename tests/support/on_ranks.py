"""Programs that run once on every rank: how a test starts one, and what each of them does itself.

A program is a number of functions of the ranks and a folder. Each checks what it finds where it
finds it; the names of those that have ended well are written down.
"""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from geomon.distributed import RankGroup, find_ranks
from support.forks import Forks
from support.own_errors import no_own_errors

LIMIT = 400.0  # seconds: a hang is a failure


class Ended(NamedTuple):
    """How a program has ended: on how many ranks each of its functions did well, and its output."""

    well: Counter[str]
    said: str


def run_on_ranks(forks: Forks, program: Path, folder: Path, which: str, size: int) -> Ended:
    """Run a program of a file on a number of ranks, with a hard limit of time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
        "CUDA_VISIBLE_DEVICES": "",  # Lightning's sharded strategy takes any device that is there
    }  # fmt: skip
    logs = [folder / f"{which}_{size}_{rank}.log" for rank in range(size)]
    processes = []
    until = time.monotonic() + LIMIT
    try:
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as output:
                processes.append(
                    forks.start(
                        str(program), which, folder, environment=os.environ | shared | own,
                        stdout=output.fileno(), stderr=output.fileno(),
                    )
                )  # fmt: skip
        # What one rank has met lets the others wait for it in vain.
        while any(process.is_running() for process in processes) and time.monotonic() < until:
            if any(not process.is_running() and process.wait(1) for process in processes):
                break
            time.sleep(0.05)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
    done = [path.read_text().split() for path in folder.glob(f"{which}_{size}_*.txt")]
    said = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs)
    return Ended(Counter(name for names in done for name in names), said)


def runner(program: str, preparation: str) -> Iterator[Callable[[Path, str, int], Ended]]:
    """A fixture: runs a program of a file beside this one on a number of ranks, each only once."""
    forks = Forks(preparation)
    path = Path(__file__).with_name(program)
    yield functools.cache(partial(run_on_ranks, forks, path))
    forks.close()


def run_here(
    functions: Sequence[Callable[[RankGroup, Path], None]],
    which: str,
    folder: Path,
    *,
    by_itself: bool = False,
    ends: bool = True,
) -> None:
    """Run the functions of a program on this rank; what has ended well is written down.

    Args:
        functions: The functions.
        which: Name of the program.
        folder: Where they may write.
        by_itself: Whether they initialise torch.distributed themselves.
        ends: Whether the process groups are whole at the end.
    """
    rank = os.environ["RANK"]
    if not by_itself:
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    try:
        for function in functions:
            began = time.perf_counter()
            with no_own_errors() if ends else contextlib.nullcontext():
                function(find_ranks(), folder)
            took = time.perf_counter() - began
            print(f"rank {rank}: {function.__name__}, {took:.1f} s", file=sys.stderr, flush=True)
            write_down(function.__name__, which, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if dist.is_initialized() and ends:
        dist.destroy_process_group()
    os._exit(0)  # a broken group is not waited for


def write_down(name: str, which: str, folder: Path) -> None:
    """Note that a function has ended well on this rank."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    with (folder / f"{which}_{size}_{rank}.txt").open("a") as done:
        done.write(f"{name}\n")
