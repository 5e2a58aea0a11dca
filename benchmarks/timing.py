"""Shared by the benchmarks: times and Markdown tables."""

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from recipes.study.markdown import table


def seconds(action: Callable[[], object]) -> float:
    """Time one call.

    Args:
        action: The function to time.
    """
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table, each row as soon as it is available.

    Args:
        title: Line above the table.
        columns: Column names; all but the first column are aligned to the right.
        rows: Cells of each row.
    """
    print(f"\n{title}\n")
    for line in table(columns, (map(str, row) for row in rows)):
        print(line, flush=True)


def print_machine(*words: str) -> None:
    """Print the conditions of the numbers above.

    Args:
        *words: Further conditions.
    """
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    here = (threads, f"torch {torch.__version__}", platform.machine())
    print(f"\n{'; '.join((*words, *here))}", flush=True)
