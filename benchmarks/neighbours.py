"""TwoNN end to end on hidden states and on noise, beside DADApy and scikit-dimension.

python -m benchmarks.hidden_states --out FOLDER
python -m benchmarks.neighbours --states FOLDER
"""

import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import faiss
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import speed
from geomon.kernels import certified, quantised
from geomon.kernels.neighbours import nearest, unique_rows

# Seconds of the processor on one thread: on a machine with other work, no others can be compared.
SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TOKENS = 4096
COLUMNS = (
    "rows", "geomon, s", "DADApy, s", "scikit-d., s", "fastest peer / geomon", "product / geomon",
    "search", "certified", "k = 16 in float32, s", "k = 16, s",
)  # fmt: skip

console = Console(width=140)


def main(
    states: Annotated[Path | None, typer.Option(help="Folder of hidden states.")] = None,
    runs: Annotated[int, typer.Option(help="Runs of each, in turn, after one that warms up.")] = 3,
    noise: Annotated[list[int], typer.Option(help="Widths of the noise.")] = [128, 768, 2048],  # noqa: B006
    only: Annotated[str, typer.Option(help="Files of states whose names hold this text.")] = "",
) -> None:
    """Time each contender in turn on the same rows, and print medians side by side."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    speed.THREADS = 1
    files = sorted(f for f in states.glob("*.pt") if only in f.name) if states else []
    table = Table(title="TwoNN end to end: seconds of the processor, one thread")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("rows", "search") else "right")
    inputs: list[tuple[str, Callable[[], Tensor]]] = [
        (file.stem.replace("_", " "), functools.partial(torch.load, file)) for file in files
    ]
    inputs += [(f"noise, width {width}", functools.partial(_noise, width)) for width in noise]
    for name, make in inputs:
        line = _line(make(), runs)
        table.add_row(name, *line)
        print(name, *line, sep=" | ", flush=True)  # the table comes only at the end
    console.print(table)
    console.print(f"torch {torch.__version__}, {platform.machine()}, medians of {runs}")


def _noise(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, width, generator=generator, dtype=torch.float32)


def _line(rows: Tensor, runs: int) -> list[str]:
    rows = rows[unique_rows(rows)]  # for the peers, which take copies for neighbours
    array = rows.numpy()
    contenders: dict[str, Callable[[], object]] = {"product": lambda: rows @ rows.T}
    for name in ("geomon, k = 2", "DADApy, k = 2", "scikit-dimension"):
        try:
            answer = speed.CONTENDERS["dimension"][name]()
        except ImportError:
            continue
        contenders[name] = functools.partial(speed.quiet, answer, array)
    contenders["k = 16"] = lambda: nearest(rows, 16)
    contenders["k = 16, whole"] = lambda: _whole(rows)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs + 1):
        for name, contender in contenders.items():
            began = time.process_time()
            contender()
            times[name].append(time.process_time() - began)
    seconds = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    own = seconds["geomon, k = 2"]
    peers = [seconds.get(name) for name in ("DADApy, k = 2", "scikit-dimension")]
    known = [peer for peer in peers if peer is not None]
    return [
        f"{own:.3f}", *(f"{peer:.3f}" if peer else "-" for peer in peers),
        f"{min(known) / own:.2f}" if known else "-", f"{seconds['product'] / own:.2f}",
        *_certified(rows), f"{seconds['k = 16, whole']:.3f}", f"{seconds['k = 16']:.3f}",
    ]  # fmt: skip


def _whole(rows: Tensor) -> None:
    """Search in float32 in all coordinates, whatever a trial says."""
    choose, pays = certified.choose, quantised.pays
    certified.choose, quantised.pays = lambda *_: None, lambda *_: False
    try:
        nearest(rows, 16)
    finally:
        certified.choose, quantised.pays = choose, pays


def _certified(rows: Tensor) -> tuple[str, str]:
    """Return how the 2 nearest are searched by lower bounds, and the share that is certified."""
    seen: list[tuple[str, certified.Certified]] = []
    by_float, by_integers = certified.search, quantised.search

    def in_float(values: Tensor, own: Tensor, k: int, plan: certified.Plan, *given: Any) -> Any:
        found = by_float(values, own, k, plan, *given)
        seen.append((f"{plan.directions.shape[1] + 1} coordinates, {plan.candidates}", found))
        return found

    def in_integers(*given: Any) -> Any:
        found = by_integers(*given)
        seen.append(("8-bit integers", found))
        return found

    certified.search, quantised.search = in_float, in_integers
    try:
        nearest(rows, 2)
    finally:
        certified.search, quantised.search = by_float, by_integers
    if not seen:
        return "all coordinates", "-"
    return seen[-1][0], f"{float(seen[-1][1].certain.double().mean()):.1%}"


if __name__ == "__main__":
    if any(name not in os.environ for name in SETTINGS):  # read by the libraries as they load
        environment = {**SETTINGS, **os.environ}
        again = [sys.executable, "-m", "benchmarks.neighbours", *sys.argv[1:]]
        os.execve(sys.executable, again, environment)
    typer.run(main)
