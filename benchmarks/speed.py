"""Compares time and peak memory of dimension and anisotropy with other packages."""

import multiprocessing
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.timing import peak_beyond, print_machine, print_table, seconds

THREADS = 2
# Passive, because threads that spin at barriers are slowed by everything else on the machine.
SETTINGS = {
    "OMP_NUM_THREADS": str(THREADS),
    "OPENBLAS_NUM_THREADS": str(THREADS),
    "OMP_WAIT_POLICY": "passive",
}
# Tokens and width; rows have standard deviations i^(-1/2) along their columns.
SIZES = {
    "dimension": ((4096, 128), (4096, 768), (16384, 256)),
    "anisotropy": ((4096, 768), (4096, 4096)),
}

Rows = NDArray[np.float32]
Contender = Callable[[Rows], float]


def cloud(tokens: int, width: int) -> Rows:
    """Draw rows like hidden states: away from the origin, with a decaying spectrum.

    Args:
        tokens: Number of rows.
        width: Width of the rows.
    """
    random = np.random.default_rng(0)
    rows = random.standard_normal((tokens, width)) * np.arange(1, width + 1) ** -0.5
    return (rows + 3 * random.standard_normal(width)).astype(np.float32)


def _geomon_twonn(k: int, queries: int | None = None) -> Contender:
    from geomon.kernels.dimension import twonn
    from geomon.kernels.neighbours import copies_of, nearest, unique_rows
    from geomon.metrics.views import spread_rows

    def answer(rows: Rows) -> float:
        points = torch.from_numpy(rows)
        unique = unique_rows(copies_of(points))
        found = nearest(points, k, of=spread_rows(unique, queries), among=unique)
        return twonn(found.distances).value.item()

    return answer


def _scikit_dimension() -> Contender:
    from skdim.id import TwoNN

    return lambda rows: float(TwoNN(discard_fraction=0.1).fit(rows).dimension_)


def _dadapy(k: int) -> Contender:
    from dadapy import Data

    def answer(rows: Rows) -> float:
        data = Data(coordinates=rows, maxk=k, n_jobs=THREADS)
        return float(data.compute_id_2NN(algorithm="base", mu_fraction=0.9)[0])

    return answer


def _geomon_spectrum() -> Contender:
    from geomon.kernels.spectrum import anisotropy, spectrum

    return lambda rows: anisotropy(spectrum(torch.from_numpy(rows))).item()


def _numpy_svd() -> Contender:
    def answer(rows: Rows) -> float:
        values = np.linalg.svd(rows - rows.mean(axis=0, dtype=np.float64), compute_uv=False)
        return float(values[0] ** 2 / (values**2).sum())

    return answer


CONTENDERS: dict[str, dict[str, Callable[[], Contender]]] = {
    "dimension": {
        "geomon, k = 2": lambda: _geomon_twonn(2),
        "geomon, k = 2, 2,048 queries": lambda: _geomon_twonn(2, 2048),
        "geomon, k = 64": lambda: _geomon_twonn(64),
        "DADApy, k = 2": lambda: _dadapy(2),
        "DADApy, k = 64": lambda: _dadapy(64),
        "scikit-dimension": _scikit_dimension,
    },
    "anisotropy": {"geomon spectrum": _geomon_spectrum, "numpy svd, float64": _numpy_svd},
}


def _quiet(contender: Contender, rows: Rows) -> float:
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        return contender(rows)


def _timed(question: str, size: tuple[int, int], runs: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each installed contender; all run in turn, after one run for warm-up."""
    rows = cloud(*size)
    contenders: dict[str, Contender] = {}
    for name, make in CONTENDERS[question].items():
        try:
            contenders[name] = make()
        except ImportError as error:
            print(f"{name}: {error.name} is not installed")
    times: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, float] = {}
    for _ in range(runs + 1):
        for name, contender in contenders.items():

            def once(name: str = name, contender: Contender = contender) -> None:
                answers[name] = _quiet(contender, rows)

            times[name].append(seconds(once))
    for name, taken in times.items():
        low, middle, high = min(taken[1:]), statistics.median(taken[1:]), max(taken[1:])
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            peak = f"{alone.submit(_peak, question, name, size).result():.0f}"
        yield name, f"{middle:.3f}", f"{low:.3f}", f"{high:.3f}", peak, f"{answers[name]:.9g}"


def _peak(question: str, name: str, size: tuple[int, int]) -> float:
    """Megabytes that a contender takes; for a process of its own."""
    contender, rows = CONTENDERS[question][name](), cloud(*size)
    return peak_beyond(lambda: _quiet(contender, rows))


def main(
    runs: Annotated[int, typer.Option(help="Runs of each, in turn, after one that warms up.")] = 5,
) -> None:
    """Time each contender in turn on the same rows, and print medians side by side."""
    torch.set_num_threads(THREADS)
    for question, sizes in SIZES.items():
        for size in sizes:
            print_table(
                f"{question.capitalize()} at {size[0]:,} × {size[1]:,}, medians of {runs}",
                ("", "s", "fastest", "slowest", "peak, MB", "value"),
                _timed(question, size, runs),
            )
    print_machine("rows in float32", "peak: beyond imports and rows, a process each")


if __name__ == "__main__":
    if any(name not in os.environ for name in SETTINGS):  # read by the libraries as they load
        again = [sys.executable, "-m", "benchmarks.speed", *sys.argv[1:]]
        os.execve(sys.executable, again, {**SETTINGS, **os.environ})
    typer.run(main)
