"""Wide layers: time and memory of a reading, and errors: python -m benchmarks.wide_layers."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.attention_memory import peak_beyond
from geomon import METRICS, geometry, select

SIZES = {"small": [(4_096, 4_096)], "large": [(4_096, 4_096), (65_536, 1_024)]}
OF_SPECTRUM = ("anisotropy", "anisotropy_no_sinks", "effective_rank", "participation_ratio")
TYPES, LENGTH = 5_000, 512
# Sides at which all eigenvalues and their summary are timed.
SIDES = (768, 1_024, 1_280, 2_048, 4_096)

Lambdas = dict[str, Tensor]


def main(
    part: Annotated[str, typer.Option(help="reading, sides, errors, or all.")] = "all",
    size: Annotated[str, typer.Option(help="small (4,096 x 4,096), large (65,536 rows too).")] = (
        "small"
    ),
    beside: Annotated[str, typer.Option(help="Another checkout, measured in turn.")] = "",
    runs: Annotated[int, typer.Option(help="Runs of each, of which medians are taken.")] = 3,
    side: Annotated[int, typer.Option(help="Smaller side of the rows of the errors.")] = 4_096,
    alone: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure `geometry`, and its spectral metrics alone, each run in a process of its own."""
    if alone:
        print(*_measure(alone))
        return
    console = Console(width=110)
    if part in ("reading", "all"):
        console.print(_readings(SIZES[size], beside, runs))
    if part in ("sides", "all"):
        console.print(_by_side(runs))
    if part in ("errors", "all"):
        console.print(_errors(side))


def _readings(sizes: list[tuple[int, int]], beside: str, runs: int) -> Table:
    table = Table(title=f"Medians of {runs}; {torch.get_num_threads()} threads")
    for column in ("rows", "metrics", "checkout", "s", "processor s", "peak beyond rows, MB"):
        table.add_column(column, justify="right")
    checkouts = {"this": str(Path(__file__).parents[1])} | ({"other": beside} if beside else {})
    for rows, width in sizes:
        for which in ("all", "spectral"):
            found: dict[str, list[list[float]]] = {name: [] for name in checkouts}
            for _ in range(runs):
                for name, path in checkouts.items():
                    found[name].append(_in_checkout(path, f"{which}/{rows}/{width}"))
            for name, each in found.items():
                wall, processor, peak = map(statistics.median, zip(*each, strict=True))
                table.add_row(
                    f"{rows:,} x {width:,}", which, name, f"{wall:.2f}", f"{processor:.2f}",
                    f"{peak:.0f}",
                )  # fmt: skip
    return table


def _in_checkout(path: str, task: str) -> list[float]:
    """Run a task with the geomon of a checkout: seconds, processor seconds, megabytes."""
    answer = subprocess.run(
        [sys.executable, __file__, "--alone", task],
        check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
    ).stdout  # fmt: skip
    return [float(word) for word in answer.split()]


def _measure(task: str) -> tuple[float, float, float]:
    which, rows, width = task.split("/")
    count = int(rows)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(count, int(width), generator=generator)
    hidden *= torch.arange(1, int(width) + 1) ** -0.5
    share = 1 / torch.arange(1.0, TYPES + 1)
    ids = torch.multinomial(share, count, replacement=True, generator=generator)
    positions = torch.arange(count) % LENGTH
    metrics = METRICS if which == "all" else select(*OF_SPECTRUM)
    geometry(hidden[:256], ids[:256], positions[:256], metrics=metrics)  # set up once
    seconds = []

    def read() -> None:
        began, processor = time.perf_counter(), time.process_time()
        geometry(hidden, ids, positions, metrics=metrics)
        seconds.extend((time.perf_counter() - began, time.process_time() - processor))

    peak = peak_beyond(read)
    return seconds[0], seconds[1], peak


def _by_side(runs: int) -> Table:
    from geomon.kernels import spectrum_summary
    from geomon.kernels.spectrum import spectrum

    table = Table(title="Processor seconds of one layer of 4,096 rows")
    for column in ("width", "all eigenvalues", "summary", "ratio"):
        table.add_column(column, justify="right")
    spectrum_summary.WHOLE_SIDE = 0
    for width in SIDES:
        hidden = torch.randn(4_096, width, generator=torch.Generator().manual_seed(1))
        whole, summary = [], []
        for _ in range(runs):
            for function, taken in (
                (spectrum, whole), (spectrum_summary.summarise_spectrum, summary),
            ):  # fmt: skip
                began = time.process_time()
                function(hidden)
                taken.append(time.process_time() - began)
        one, other = statistics.median(whole), statistics.median(summary)
        table.add_row(f"{width:,}", f"{one:.2f}", f"{other:.2f}", f"{one / other:.1f}")
    return table


def _errors(side: int) -> Table:
    from geomon.kernels import spectrum_summary
    from geomon.kernels.spectrum import anisotropy, effective_rank, participation_ratio, power_law

    table = Table(title=f"Errors (stated) of a layer of {side:,} columns, in % of the value")
    table.add_column("eigenvalues")
    for column in ("anisotropy", "effective rank", "participation ratio", "alpha (absolute)"):
        table.add_column(column, justify="right")
    spectrum_summary.WHOLE_SIDE = 0
    for name, lambdas in _spectra(side).items():
        found = spectrum_summary.summarise_spectrum(_rows_with(lambdas))
        values = {
            "anisotropy": anisotropy(lambdas), "effective_rank": effective_rank(lambdas),
            "participation_ratio": participation_ratio(lambdas),
        }  # fmt: skip
        cells = []
        for metric, want in values.items():
            value, error = getattr(found, metric)
            cells.append(f"{100 * float(value / want - 1):+.4f} ({100 * float(error / want):.4f})")
        off = float(found.alpha.value - power_law(lambdas).alpha)
        table.add_row(name, *cells, f"{off:+.4f} ({float(found.alpha.error or 0):.4f})")
    return table


def _spectra(side: int) -> Lambdas:
    from geomon.kernels.baselines import isotropic_spectrum

    rank = torch.arange(1, side + 1, dtype=torch.float64)
    noise = isotropic_spectrum(side + 1, side)
    generator = torch.Generator().manual_seed(3)
    scatter = (1 + 0.3 * torch.randn(side, generator=generator, dtype=torch.float64)).abs()
    found = {
        "all equal": torch.ones_like(rank),
        "noise, as many rows": noise,
        "noise, 16 times as many rows": isotropic_spectrum(16 * side, side),
        "rank^-0.5": rank**-0.5,
        "rank^-1": rank**-1,
        "rank^-1 with scatter": scatter / rank,
        "rank^-1.5": rank**-1.5,
        "rank^-2": rank**-2,
        "exp(-rank / 100)": torch.exp(-rank / 100),
        "exp(-rank / 1,000)": torch.exp(-rank / 1000),
        "massive rows: 1e8 and noise": torch.cat([1e8 * rank[:1], noise[1:]]),
        "50 directions and noise": torch.cat([11 * (51 - rank[:50]), noise[50:]]),
        "300 directions": torch.where(rank <= 300, 301 - rank, 0),
        "40 equal ones and noise": torch.cat([torch.full_like(rank[:40], 50), noise[40:]]),
    }
    return {name: lambdas.sort(descending=True).values for name, lambdas in found.items()}


def _rows_with(lambdas: Tensor) -> Tensor:
    """Rows whose centred covariance has these eigenvalues: on axes in pairs, then reflected."""
    side = len(lambdas)
    generator = torch.Generator().manual_seed(4)
    axes = torch.diag((side * lambdas).sqrt())
    rows = torch.cat([axes, -axes])
    mirror = torch.randn(2 * side, generator=generator, dtype=torch.float64)
    mirror -= mirror.mean()  # the mean row stays 0
    mirror /= mirror.norm()
    rows -= 2 * torch.outer(mirror, mirror @ rows)
    mirror = torch.randn(side, generator=generator, dtype=torch.float64)
    mirror /= mirror.norm()
    rows -= 2 * torch.outer(rows @ mirror, mirror)
    return rows.float()


if __name__ == "__main__":
    typer.run(main)
