"""Time and memory of pages of a large record: python -m benchmarks.large_record.

The record is that of a long run of a large model: 5,000 readings of 24 layers with 16 heads each,
all default metrics. Tags and notes are those of a small model of that many layers and heads, values
wander. Every page is a process of its own, measured from its start to its end.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
import typer
from torch import nn

from geomon import Memory, Monitor
from geomon.record import FILE_NAME, Reading
from geomon.record.columns import Column

LIMIT_SECONDS, LIMIT_MB = 10.0, 1000.0
PAGES = {
    "read": [sys.executable, "-c", "import sys, geomon; geomon.read(sys.argv[1])", "{run}"],
    "summary": ["{geomon}", "summary", "{run}"],
    "watch --once": ["{geomon}", "watch", "--once", "{run}"],
    "figure": ["{geomon}", "figure", "{run}", "--out", "{out}/geometry.png"],
    "report": ["{geomon}", "report", "{run}", "-o", "{out}/report.html"],
    "export": ["{geomon}", "export", "{run}", "-o", "{out}/values.parquet"],
}


def first_reading(layers: int, heads: int) -> tuple[dict[str, object], Reading]:
    """Read a small model of as many layers and heads once, with all default metrics."""
    torch.manual_seed(0)
    width = 4 * heads
    layer = nn.TransformerEncoderLayer(width, heads, width, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()
    memory = Memory()
    monitor = Monitor(
        model, tokens=256, batches=1, directory=None, sinks=[memory], background=False
    )
    monitor.probe(0, torch.randn(8, 64, width))
    description = monitor.describe()
    monitor.close()
    return description, memory.readings[0]


def write_record(folder: Path, readings: int, layers: int, heads: int) -> int:
    """Write the record, and return the number of values in a reading.

    Args:
        folder: Folder of the run.
        readings: Number of readings.
        layers: Number of layers.
        heads: Number of heads in each.
    """
    description, first = first_reading(layers, heads)
    chance = np.random.default_rng(0)
    walks: dict[str, float] = {}
    with (folder / FILE_NAME).open("w") as file:
        file.write(json.dumps({"run": {**description, "time": 1.7e9, "from_step": 0}}) + "\n")
        for index in range(readings):
            columns = {}
            for name, column in first.columns.items():
                walks[name] = walks.get(name, 0.0) + chance.normal(0, 0.002)
                columns[name] = _scaled(column, math.exp(walks[name]))
            # The mean dimension rises to a peak and falls, as that of a training does.
            columns["twonn"].mean = 5 + 4 * math.exp(-((math.log1p(index) - 4) ** 2))
            columns["twonn"].mean_margin = 0.2
            reading = Reading(
                100 * index, 1.7e9 + index, 0.5, "inline", "train", 8192, 1, "float32",
                {"": columns}, overhead=0.01,
            )  # fmt: skip
            file.write(reading.line() + "\n")
    return len(first.values)


def _scaled(column: Column, factor: float) -> Column:
    return msgspec.structs.replace(
        column,
        layers=[factor * value for value in column.layers],
        heads=[[factor * value for value in heads] for heads in column.heads],
        mean=factor * column.mean,
        parts={name: _scaled(part, factor) for name, part in column.parts.items()},
    )


def measure(command: list[str]) -> tuple[float, float, float]:
    """Run a command, and return its seconds, those of processors, and its largest memory in MB."""
    # A process between them, so that no other child's memory is taken for this one's.
    code = (
        "import resource, subprocess, sys; "
        "done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss); sys.exit(done.returncode)"
    )
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *command], stdout=subprocess.PIPE, text=True, check=True
    )
    seconds = time.perf_counter() - began
    processor, memory = map(float, done.stdout.split())
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kB elsewhere
    return seconds, processor, memory * unit / 1e6


def main(
    readings: Annotated[int, typer.Option(help="Number of readings.")] = 5000,
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 24,
    heads: Annotated[int, typer.Option(help="Number of heads in each layer.")] = 16,
    page: Annotated[str, typer.Option(help="The only page to measure.")] = "",
) -> None:
    """Write a large record and measure the pages that are made of it."""
    with tempfile.TemporaryDirectory() as place:
        run, out = Path(place, "run"), Path(place, "out")
        run.mkdir()
        out.mkdir()
        began = time.perf_counter()
        count = write_record(run, readings, layers, heads)
        size = (run / FILE_NAME).stat().st_size
        print(
            f"{readings:,} readings of {count:,} values: {size / 1e6:,.0f} MB on disk, "
            f"{(time.perf_counter() - began) / readings * 1e3:.1f} ms for each line"
        )
        geomon = str(Path(sys.executable).with_name("geomon"))
        for name, command in PAGES.items():
            if page not in ("", name):
                continue
            filled = [part.format(run=run, out=out, geomon=geomon) for part in command]
            seconds, processor, megabytes = measure(filled)
            good = seconds <= LIMIT_SECONDS and megabytes <= LIMIT_MB
            print(
                f"{name:14} {seconds:6.1f} s ({processor:.1f} s of processors) "
                f"{megabytes:7,.0f} MB  {'within' if good else 'NOT WITHIN'} the limits"
            )


if __name__ == "__main__":
    typer.run(main)
