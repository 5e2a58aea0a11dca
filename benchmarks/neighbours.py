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
from typing import Annotated

import faiss
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import speed
from geomon.kernels.neighbours import nearest, unique_rows

# Seconds of the processor on one thread: on a machine with other work, no others can be compared.
SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TOKENS = 4096
COLUMNS = (
    "rows", "geomon, s", "DADApy, s", "scikit-d., s", "fastest peer / geomon", "product / geomon",
    "k = 24, s", "k = 24 of 2,048, s",
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
        table.add_column(name, justify="left" if name == "rows" else "right")
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
    some = torch.arange(min(2048, len(rows)))
    contenders["k = 24"] = lambda: nearest(rows, 24)
    contenders["k = 24, some"] = lambda: nearest(rows, 24, of=some)
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
        f"{seconds['k = 24']:.3f}", f"{seconds['k = 24, some']:.3f}",
    ]  # fmt: skip


if __name__ == "__main__":
    if any(name not in os.environ for name in SETTINGS):  # read by the libraries as they load
        environment = {**SETTINGS, **os.environ}
        again = [sys.executable, "-m", "benchmarks.neighbours", *sys.argv[1:]]
        os.execve(sys.executable, again, environment)
    typer.run(main)
