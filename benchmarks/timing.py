"""What the benchmarks share: seconds, peaks of memory, and tables that a page can take."""

import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch


def seconds(action: Callable[[], object], device: torch.device | None = None) -> float:
    """Time one call, with all that it has queued on a device.

    Args:
        action: What is timed.
        device: The accelerator that it uses; None for the host alone.
    """
    began = time.perf_counter()
    action()
    if device is not None:
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began


def median_seconds(
    action: Callable[[], object], runs: int, device: torch.device | None = None
) -> float:
    """Return the median time of several calls after one that warms up.

    Args:
        action: What is timed.
        runs: Number of timed calls.
        device: The accelerator that it uses; None for the host alone.
    """
    return statistics.median([seconds(action, device) for _ in range(runs + 1)][1:])


def peak_beyond(action: Callable[[], object]) -> float:
    """Return the megabytes (10^6) of resident memory that a call takes beyond what is there.

    For a process of its own: the first call pays for what libraries set up once.

    Args:
        action: What is measured.
    """
    before = _resident("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of the imports
    except OSError:
        before = _resident("VmHWM")
    action()
    return (_resident("VmHWM") - before) / 1e6


def _resident(field: str) -> int:
    """Return VmRSS (now) or VmHWM (the peak) in bytes.

    From /proc, because ru_maxrss of a child begins with the peak of its parent. Elsewhere ru_maxrss
    serves for both.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table of Markdown, each row as soon as it is there.

    Args:
        title: Line above the table.
        columns: Heads of the columns; all but the first are aligned to the right.
        rows: Cells of each row.
    """
    print(
        f"\n{title}\n\n| {' | '.join(columns)} |\n|---{'|---:' * (len(columns) - 1)}|", flush=True
    )
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def print_machine(*words: str) -> None:
    """Print what the numbers above depend on.

    Args:
        *words: What else there is to say of them.
    """
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    here = (threads, f"torch {torch.__version__}", platform.machine())
    print(f"\n{'; '.join((*words, *here))}", flush=True)
