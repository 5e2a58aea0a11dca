"""Shared by the benchmarks: times, memory peaks, and Markdown tables."""

import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch


def seconds(action: Callable[[], object]) -> float:
    """Time one call.

    Args:
        action: The function to time.
    """
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def peak_beyond(action: Callable[[], object]) -> float:
    """Return how many megabytes (10^6) of resident memory a call adds at its peak.

    Use it in a separate process, because the first call pays for one-time setups of libraries.

    Args:
        action: The function to measure.
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

    They are read from /proc, because ru_maxrss of a child begins with its parent's peak. Other
    systems use ru_maxrss for both.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table, each row as soon as it is available.

    Args:
        title: Line above the table.
        columns: Column names; all but the first column are aligned to the right.
        rows: Cells of each row.
    """
    print(
        f"\n{title}\n\n| {' | '.join(columns)} |\n|---{'|---:' * (len(columns) - 1)}|", flush=True
    )
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def print_machine(*words: str) -> None:
    """Print the conditions of the numbers above.

    Args:
        *words: Further conditions.
    """
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    here = (threads, f"torch {torch.__version__}", platform.machine())
    print(f"\n{'; '.join((*words, *here))}", flush=True)
