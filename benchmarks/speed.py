"""Time and peak memory of the dimension and of the anisotropy, beside their peers."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from enum import StrEnum
from io import StringIO
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.attention_memory import peak_beyond

THREADS = 2
# Passive: threads that spin at barriers measure whatever else runs on the machine.
SETTINGS = {
    "OMP_NUM_THREADS": str(THREADS),
    "OPENBLAS_NUM_THREADS": str(THREADS),
    "OMP_WAIT_POLICY": "passive",
}
# Seconds; what takes longer in its first run is not run again.
PATIENCE = 300.0

DIMENSION_SIZES = ((4096, 128), (4096, 768), (16384, 256))
ANISOTROPY_SIZES = ((4096, 768), (4096, 4096))
SPECTRA = ("decaying", "flat")

Rows = NDArray[np.float32]
Contender = Callable[[Rows], float]

console = Console(width=120)


class Part(StrEnum):
    """A table of the benchmark."""

    ALL = "all"
    DIMENSION = "dimension"
    ANISOTROPY = "anisotropy"


def main(
    part: Annotated[Part, typer.Option(help="The table to make.")] = Part.ALL,
    runs: Annotated[int, typer.Option(help="Runs of each, in turn, after one that warms up.")] = 5,
    memory: Annotated[bool, typer.Option(help="Measure the peak memory, one process each.")] = True,
    alone: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Time each contender in turn on the same rows, and print medians side by side."""
    if alone:
        _report_memory(**json.loads(alone))
        return
    tables = []
    if part in (Part.ALL, Part.DIMENSION):
        tables += [("dimension", "decaying", size) for size in DIMENSION_SIZES]
    if part in (Part.ALL, Part.ANISOTROPY):
        tables += [
            ("anisotropy", spectrum, size) for size in ANISOTROPY_SIZES for spectrum in SPECTRA
        ]
    for question, spectrum, size in tables:
        # Before anything is timed: a child must not share the cores with a measurement.
        names = list(CONTENDERS[question])
        peaks = {name: _peak_alone(question, name, spectrum, size) for name in names if memory}
        console.print(_timed(question, spectrum, size, runs, peaks))
    console.print(
        f"{THREADS} threads of {os.cpu_count()} cores, torch {torch.__version__}, "
        f"numpy {np.__version__}, {platform.machine()}; rows given in float32; peak: resident "
        "memory beyond the imports and the rows, one process each"
    )


def cloud(spectrum: str, size: tuple[int, int]) -> Rows:
    """Rows like hidden states: off the origin, with a spectrum that decays, or a flat one."""
    tokens, width = size
    random = np.random.default_rng(0)
    rows = random.standard_normal((tokens, width))
    if spectrum == "decaying":
        rows *= np.arange(1, width + 1) ** -0.5
    return (rows + 3 * random.standard_normal(width)).astype(np.float32)


def _geomon_twonn(k: int, queries: int | None = None) -> Contender:
    from geomon.kernels.dimension import twonn
    from geomon.kernels.neighbours import nearest, unique_rows
    from geomon.metrics.views import spread_rows

    def answer(rows: Rows) -> float:
        points = torch.from_numpy(rows)
        unique = unique_rows(points)
        found = nearest(points, k, of=spread_rows(unique, queries), among=unique)
        return twonn(found.distances).item()

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


def _numpy_svd(precision: type[np.floating]) -> Contender:
    def answer(rows: Rows) -> float:
        centred = rows.astype(precision)
        centred -= centred.mean(axis=0)
        values = np.linalg.svd(centred, compute_uv=False)
        return float(values[0] ** 2 / (values**2).sum())

    return answer


def _scipy_svds() -> Contender:
    from scipy.sparse.linalg import svds

    def answer(rows: Rows) -> float:
        centred = rows.astype(np.float64)
        centred -= centred.mean(axis=0)
        start = np.random.default_rng(0).standard_normal(min(centred.shape))
        value = svds(centred, k=1, return_singular_vectors=False, v0=start)[0]
        return float(value**2 / np.square(centred).sum())

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
    "anisotropy": {
        "geomon spectrum": _geomon_spectrum,
        "numpy svd, float64": lambda: _numpy_svd(np.float64),
        "numpy svd, float32": lambda: _numpy_svd(np.float32),
        "scipy svds, k = 1": _scipy_svds,
    },
}


def _timed(
    question: str, spectrum: str, size: tuple[int, int], runs: int, peaks: dict[str, str]
) -> Table:
    torch.set_num_threads(THREADS)
    rows = cloud(spectrum, size)
    contenders, missing = {}, []
    for name, make in CONTENDERS[question].items():
        try:
            contenders[name] = make()
        except ImportError as error:
            missing.append(f"{name}: {error.name} is not installed")
    times: dict[str, list[float]] = {name: [] for name in contenders}
    answers: dict[str, float] = {}
    for _ in range(runs + 1):
        for name, contender in contenders.items():
            if times[name] and times[name][0] > PATIENCE:
                continue
            began = time.perf_counter()
            answers[name] = quiet(contender, rows)
            times[name].append(time.perf_counter() - began)
    # Of what was run again, the first run only warms up.
    medians = {name: statistics.median(taken[1:] or taken) for name, taken in times.items()}
    fastest = min(medians.values())
    title = f"{question.capitalize()} at {size[0]:,} × {size[1]:,}"
    table = Table(title=title + (f", {spectrum} spectrum" if question == "anisotropy" else ""))
    table.add_column("")
    for column in ("median, s", "fastest, s", "slowest, s", "median / best", "peak, MB", "value"):
        table.add_column(column, justify="right")
    for name, taken in times.items():
        kept = taken[1:] or taken
        note = " (once)" if taken[0] > PATIENCE else ""
        table.add_row(
            name + note, f"{medians[name]:.3f}", f"{min(kept):.3f}", f"{max(kept):.3f}",
            f"{medians[name] / fastest:.2f}", peaks.get(name, "-"), f"{answers[name]:.9g}",
        )  # fmt: skip
    table.caption = "; ".join([f"medians of {runs}", *missing])
    return table


def quiet(contender: Contender, rows: Rows) -> float:
    """Run a contender without what it prints and warns of.

    Args:
        contender: What is measured.
        rows: Its rows, [tokens, width].
    """
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        return contender(rows)


def _peak_alone(question: str, name: str, spectrum: str, size: tuple[int, int]) -> str:
    """Megabytes in a process of its own; "-" where the peer is missing or takes too long."""
    asked = json.dumps({"question": question, "name": name, "spectrum": spectrum, "size": size})
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.speed", "--alone", asked]
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return "-"
    return f"{float(answer.stdout.split()[-1]):.0f}"


def _report_memory(question: str, name: str, spectrum: str, size: tuple[int, int]) -> None:
    torch.set_num_threads(THREADS)
    contender = CONTENDERS[question][name]()
    rows = cloud(spectrum, size)
    print(peak_beyond(lambda: quiet(contender, rows)))


if __name__ == "__main__":
    if any(name not in os.environ for name in SETTINGS):  # read by the libraries as they load
        environment = {**SETTINGS, **os.environ}
        again = [sys.executable, "-m", "benchmarks.speed", *sys.argv[1:]]
        os.execve(sys.executable, again, environment)
    typer.run(main)
