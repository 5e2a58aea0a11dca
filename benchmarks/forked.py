"""Ranks that are forks of this process: they need not import anything again."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist


class LostError(RuntimeError):
    """A rank has met an error, or has ended without an answer."""


def on_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    limit: float = 600.0,
    together: bool = True,
) -> list[Any]:
    """Call a function on a number of ranks of torch.distributed; returns what each has given.

    A rank that ends without an answer gives None.

    Args:
        size: Number of ranks.
        function: The function; gloo is initialised before it is called.
        args: Its arguments.
        limit: Seconds after which ranks are killed.
        together: Whether ranks that have ended wait for the others; one that ends before the others
            breaks their groups.

    Raises:
        LostError: A rank has met an error, or takes too long.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    forks = multiprocessing.get_context("fork")
    channels: list[Connection] = []
    processes = []
    for rank in range(size):
        here, there = forks.Pipe(duplex=False)
        process = forks.Process(
            target=_run, args=(there, rank, size, port, together, function, args)
        )
        process.start()
        there.close()
        channels.append(here)
        processes.append(process)
    until = time.monotonic() + limit
    try:
        return [_answer(rank, channel, until) for rank, channel in enumerate(channels)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(rank: int, channel: Connection, until: float) -> Any:
    if not wait([channel], timeout=max(0.0, until - time.monotonic())):
        raise LostError(f"rank {rank} takes too long")
    try:
        well, given = channel.recv()
    except EOFError:
        return None
    if not well:
        raise LostError(f"rank {rank}: {given}")
    return given


def _run(
    channel: Connection,
    rank: int,
    size: int,
    port: str,
    together: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size),
        "RANK": str(rank), "LOCAL_RANK": str(rank),
    }  # fmt: skip
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        channel.send((True, function(*args)))
        if together:
            dist.barrier()
    except Exception as error:
        channel.send((False, f"{type(error).__name__}: {error}"))
    os._exit(0)  # a broken group is not waited for
