"""Memory over many readings: a monitor on a long run must not grow."""

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from geomon import Monitor
from geomon.metrics.table import select

METRICS = ("cosine", "variance")
ALLOWED = 0.05


class Block(nn.Module):
    """The smallest thing that is a block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """A residual step."""
        return x + self.inner(x)


def main(
    readings: Annotated[int, typer.Option(help="How many are made.")] = 100_000,
    looks: Annotated[int, typer.Option(help="Times at which the memory is looked at.")] = 10,
) -> None:
    """Read a tiny model many times, and print the resident memory as it goes on."""
    console = Console()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    rows = torch.randn(8, 4)
    seen: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        monitor = Monitor(
            model, metrics=select(*METRICS), schedule=lambda step: True, tokens=8, batches=1,
            directory=directory, strict=True,
        )  # fmt: skip
        began = time.perf_counter()
        for step in range(readings):
            with monitor(step):
                model(rows)
            if (step + 1) % (readings // looks) == 0:
                seen.append(_resident_mb())
                console.print(
                    f"{step + 1:>9,} readings  {seen[-1]:7.1f} MB resident  "
                    f"{(time.perf_counter() - began) / (step + 1) * 1e3:.2f} ms each"
                )
        monitor.close()
        size = (Path(directory) / "readings.jsonl").stat().st_size
    growth = max(seen[1:]) / seen[0] - 1
    verdict = "flat" if abs(growth) <= ALLOWED else "NOT FLAT"
    console.print(f"record: {size / 1e6:.0f} MB on disk; memory grew by {growth:+.1%}: {verdict}")


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    typer.run(main)
