"""Ranks that are forks of this process: they need not import anything again."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function on a number of ranks of torch.distributed (gloo); returns all results.

    Args:
        size: Number of ranks.
        function: A function of a module.
        args: Its arguments.
    """
    launch = LaunchConfig(
        1,
        1,
        size,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        run_id="ranks",
        start_method="fork",
    )
    results = elastic_launch(launch, _run)(function, *args)
    return [results[rank] for rank in range(size)]


def _run(function: Callable[..., Any], *args: Any) -> Any:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    result = function(*args)
    dist.barrier()  # the first rank holds the store of all
    dist.destroy_process_group()
    return result
