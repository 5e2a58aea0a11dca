"""Compares time and peak memory of the intrinsic dimension with other packages."""

import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.accuracy import Estimator, Rows, dadapy, geomon, installed, scikit_dimension
from benchmarks.timing import peak_beyond, print_machine, print_table, seconds

THREADS = 2
# Passive, because threads that spin at barriers are slowed by everything else on the machine.
SETTINGS = {
    "OMP_NUM_THREADS": str(THREADS),
    "OPENBLAS_NUM_THREADS": str(THREADS),
    "OMP_WAIT_POLICY": "passive",
}
# Tokens and width; rows have standard deviations i^(-1/2) along their columns.
SIZES = ((4096, 128), (4096, 768))
CONTENDERS: dict[str, Callable[[], Estimator]] = {
    "geomon, k = 2": geomon,
    "geomon, k = 2, 2,048 queries": lambda: geomon(queries=2048),
    "geomon, k = 64": lambda: geomon(64),
    "DADApy, k = 2": lambda: dadapy("base"),
    "DADApy, k = 64": lambda: dadapy("base", 64),
    "scikit-dimension": scikit_dimension,
}


def cloud(tokens: int, width: int) -> Rows:
    """Draw rows like hidden states: away from the origin, with a decaying spectrum.

    Args:
        tokens: Number of rows.
        width: Width of the rows.
    """
    random = np.random.default_rng(0)
    rows = random.standard_normal((tokens, width)) * np.arange(1, width + 1) ** -0.5
    return (rows + 3 * random.standard_normal(width)).astype(np.float32)


def _timed(size: tuple[int, int], runs: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each installed contender; all run in turn, after one run for warm-up."""
    rows, contenders = cloud(*size), installed(CONTENDERS)
    taken = [
        {name: seconds(lambda own=own: own(rows)) for name, own in contenders.items()}
        for _ in range(runs + 1)
    ]
    for name in contenders:
        times = [each[name] for each in taken[1:]]
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            peak = f"{alone.submit(_peak, name, size).result():.0f}"
        yield name, *(f"{each(times):.3f}" for each in (statistics.median, min, max)), peak


def _peak(name: str, size: tuple[int, int]) -> float:
    """Megabytes that a contender takes; for a process of its own."""
    contender, rows = CONTENDERS[name](), cloud(*size)
    return peak_beyond(lambda: contender(rows))


def main(
    runs: Annotated[int, typer.Option(help="Runs of each, in turn, after one that warms up.")] = 5,
) -> None:
    """Time each contender in turn on the same rows, and print medians side by side."""
    torch.set_num_threads(THREADS)
    for size in SIZES:
        print_table(
            f"TwoNN at {size[0]:,} × {size[1]:,}, medians of {runs}",
            ("", "s", "fastest", "slowest", "peak, MB"),
            _timed(size, runs),
        )
    print_machine("rows in float32", "peak: beyond imports and rows, a process each")


if __name__ == "__main__":
    if any(name not in os.environ for name in SETTINGS):  # read by the libraries as they load
        again = [sys.executable, "-m", "benchmarks.speed", *sys.argv[1:]]
        os.execve(sys.executable, again, {**SETTINGS, **os.environ})
    typer.run(main)
