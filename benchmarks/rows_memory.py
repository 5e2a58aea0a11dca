"""Peak memory and time of every metric on many wide rows: python -m benchmarks.rows_memory."""

import subprocess
import sys
import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.attention_memory import peak_beyond
from geomon import geometry

SIZES = {
    "small": [(16_384, 1_024), (32_768, 1_024), (8_192, 4_096)],
    "large": [(65_536, 1_024), (65_536, 4_096)],
}
TYPES, LENGTH = 5_000, 512
COPIES = 0.1  # share of the rows that copy another: those that are left are then rows of their own


def main(
    size: Annotated[
        str, typer.Option(help="small (two minutes) or large (a quarter of an hour).")
    ] = "small",
    alone: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure `geometry` on made-up rows, each size in a process of its own."""
    if alone:
        print(*_measure(*map(int, alone.split("x"))))
        return
    table = Table(title="geometry(rows, token_ids, positions), all metrics of rows")
    for column in ("rows", "width", "float32 rows, MB", "peak beyond them, MB", "in rows", "s"):
        table.add_column(column, justify="right")
    for rows, width in SIZES[size]:
        command = [sys.executable, "-m", "benchmarks.rows_memory", "--alone", f"{rows}x{width}"]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        peak, seconds = map(float, answer.split())
        own = 4 * rows * width / 1e6
        table.add_row(
            f"{rows:,}", f"{width:,}", f"{own:.0f}", f"{peak:.0f}", f"{peak / own:.2f}",
            f"{seconds:.0f}",
        )  # fmt: skip
    Console(width=110).print(table)


def _measure(rows: int, width: int) -> tuple[float, float]:
    """Megabytes beyond the rows, and seconds."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator)
    hidden *= torch.arange(1, width + 1) ** -0.5
    copies = int(COPIES * rows)
    hidden[:copies] = hidden[copies : 2 * copies]
    share = 1 / torch.arange(1.0, TYPES + 1)
    ids = torch.multinomial(share, rows, replacement=True, generator=generator)
    positions = torch.arange(rows) % LENGTH
    geometry(hidden[:256], ids[:256], positions[:256])  # what the libraries set up once
    began = time.perf_counter()
    peak = peak_beyond(lambda: geometry(hidden, ids, positions))
    return peak, time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
