"""Programs that run once on every rank: how a test starts one, and what each rank does.

A program is a number of functions of the ranks and a folder. Each checks on its own rank what it
finds there, and a file says which of them have ended well on which rank.
"""

import contextlib
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from geomon.distributed import RankGroup, find_ranks
from support.forks import Forks
from support.own_errors import no_own_errors

LIMIT = 400.0  # seconds: a hang is a failure

Function = Callable[[RankGroup, Path], None]


class Program(NamedTuple):
    """Functions that a process calls on each rank.

    Attributes:
        functions: Functions of modules, which are called one after another.
        initialises: Whether they initialise torch.distributed themselves.
        loses_ranks: Whether the process groups are broken at the end.
    """

    functions: tuple[Function, ...]
    initialises: bool = False
    loses_ranks: bool = False


class Ended(NamedTuple):
    """How a program has ended: on how many ranks each of its functions did well, and its output."""

    well: Counter[str]
    said: str


_ON_EACH_RANK = """
import pickle, sys
from pathlib import Path
from support.ranks.launch import run_here
run_here(pickle.loads(bytes.fromhex(sys.argv[1])), Path(sys.argv[2]))
"""


def launcher(
    forks: Forks, preparation: str, folder: Path
) -> Iterator[Callable[[Program, int], Ended]]:
    """Yield what runs a program on a number of ranks, each only once; a fixture's generator."""
    prepared = Forks(preparation, forks)

    @functools.cache
    def run(program: Program, size: int) -> Ended:
        return _run_on_ranks(prepared, program, folder, size)

    yield run
    prepared.close()


def _run_on_ranks(forks: Forks, program: Program, folder: Path, size: int) -> Ended:
    """Run a program on a number of ranks, with a hard limit of time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
        "CUDA_VISIBLE_DEVICES": "",  # Lightning's sharded strategy takes any device that is there
    }  # fmt: skip
    names = [function.__name__ for function in program.functions]
    logs = [folder / f"{names[0]}_{size}_{rank}.log" for rank in range(size)]
    processes = []
    until = time.monotonic() + LIMIT
    try:
        for rank, log in enumerate(logs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as output:
                processes.append(
                    forks.start(
                        _ON_EACH_RANK, pickle.dumps(program).hex(), folder,
                        environment=os.environ | shared | own,
                        stdout=output.fileno(), stderr=output.fileno(),
                    )
                )  # fmt: skip
        # A rank that has failed lets the others wait for it in vain.
        while any(process.is_running() for process in processes) and time.monotonic() < until:
            if any(not process.is_running() and process.wait(1) for process in processes):
                break
            time.sleep(0.05)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
    well = Counter({name: len([*folder.glob(f"{name}_{size}_*.done")]) for name in names})
    said = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs)
    return Ended(well, said)


def run_here(program: Program, folder: Path) -> None:
    """Run the functions of a program on this rank, whose process ends with them."""
    if not program.initialises:
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    try:
        for function in program.functions:
            began = time.perf_counter()
            with contextlib.nullcontext() if program.loses_ranks else no_own_errors():
                function(find_ranks(), folder)
            took, rank = time.perf_counter() - began, os.environ["RANK"]
            print(f"rank {rank}: {function.__name__}, {took:.1f} s", file=sys.stderr, flush=True)
            write_down(function, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if dist.is_initialized() and not program.loses_ranks:
        dist.destroy_process_group()
    os._exit(0)  # a broken group is not waited for


def write_down(function: Function, folder: Path) -> None:
    """Note that a function has ended well on this rank."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    (folder / f"{function.__name__}_{size}_{rank}.done").touch()
