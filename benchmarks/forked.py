"""Ranks that are forks of this process: they need not import anything again."""

import multiprocessing
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function on a number of ranks of torch.distributed (gloo); returns all results.

    Args:
        size: Number of ranks.
        function: A function of a module.
        args: Its arguments.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with ProcessPoolExecutor(size, multiprocessing.get_context("fork")) as pool:
        ranks = [pool.submit(_run, address, rank, size, function, args) for rank in range(size)]
        return [rank.result() for rank in ranks]


def _run(
    address: str, rank: int, size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", address, limit, rank=rank, world_size=size)
    result = function(*args)
    dist.barrier()  # the first rank holds the store of all
    dist.destroy_process_group()
    return result
