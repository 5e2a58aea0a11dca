"""The time of one reading on the host and on an accelerator, and of the copy between them.

    python -m benchmarks.devices --layers 24 --width 1024

Without an accelerator the host alone is timed, and that is said.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from geomon import METRICS
from geomon.capture.snapshot import HOST, Layer
from geomon.metrics import Evaluator

HEAD_WIDTH, LENGTH, QUERIES = 64, 512, 1024


def main(
    layers: Annotated[int, typer.Option(help="Layers of the model; one is timed.")] = 12,
    width: Annotated[int, typer.Option(help="Width of the hidden states, a multiple of 64.")] = 768,
    rows: Annotated[int, typer.Option(help="Rows in a split.")] = 4096,
    batches: Annotated[int, typer.Option(help="Splits.")] = 2,
    runs: Annotated[int, typer.Option(help="Runs of each, of which the median is printed.")] = 3,
) -> None:
    """Time the measuring of one layer of a decoder, and print the time of a reading of all."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    layer = decoder_layer(rows * batches, width)
    size = sum(x.nbytes for x in layer.captured.values() if isinstance(x, Tensor))
    evaluator = Evaluator(METRICS, batches, strict=True)

    def measure(place: torch.device) -> Callable[[], object]:
        there = layer.to(place)
        return lambda: evaluator.measure_layer(there, rows)

    table = Table(title=f"One reading of {layers} layers of width {width}, {batches} x {rows} rows")
    for column in ("", "one layer, s", "all layers, s"):
        table.add_column(column, justify="left" if not column else "right")
    timed = {"measured on the host": seconds(measure(HOST), None, runs)}
    if device is not None:
        there = layer.to(device)
        timed |= {
            f"measured on {device}": seconds(measure(device), device, runs),
            f"the same, float32 products in TF32 allowed: {device}": with_tf32(
                lambda: seconds(measure(device), device, runs)
            ),
            f"copy from {device} to the host": seconds(lambda: there.to(HOST), device, runs),
            f"copy from the host to {device}": seconds(lambda: layer.to(device), device, runs),
        }
    for name, taken in timed.items():
        table.add_row(name, f"{taken:.3f}", f"{taken * layers:.2f}")
    console = Console(width=110)
    console.print(table)
    console.print(
        f"{size / 1e6:,.0f} MB of captured tensors a layer; medians of {runs} after one that warms "
        f"up; {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    if device is None:
        console.print("no accelerator here: the host alone was timed")
    elif device.type == "cuda":
        console.print(
            f"{torch.cuda.get_device_name(device)}; most memory of the device that was taken: "
            f"{torch.cuda.max_memory_allocated(device) / 1e6:,.0f} MB"
        )


def decoder_layer(rows: int, width: int) -> Layer:
    """Make a layer as a window captures it, of random numbers with a spectrum that falls.

    Args:
        rows: Number of rows of hidden states.
        width: Width of the hidden states.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads, sequences = width // HEAD_WIDTH, max(1, rows // LENGTH)
    each = QUERIES // sequences
    places = (torch.arange(each) * LENGTH // each)[:, None]
    number = torch.arange(rows) // LENGTH
    return Layer(
        1,
        "block",
        {
            "hidden": normal(rows, width) * torch.arange(1, width + 1) ** -0.5 + 1,
            "token_ids": torch.randint(0, 1000, (rows,), generator=generator),
            "positions": torch.arange(rows) % LENGTH,
            "sequences": number,
            "precision": torch.finfo(torch.bfloat16).eps,
            "query": normal(sequences, heads, each, HEAD_WIDTH),
            "key": normal(sequences, heads, LENGTH, HEAD_WIDTH),
            "visible": (torch.arange(LENGTH) <= places)[None, None],
            "bias": None,
            "scale": HEAD_WIDTH**-0.5,
            "softcap": None,
            "sink": None,
            "max_logits": normal(heads),
            "projected_query": normal(rows, heads, HEAD_WIDTH),
            "projected_key": normal(rows, heads, HEAD_WIDTH),
            "query_sequences": number,
            "key_sequences": number,
        },
    )


def seconds(action: Callable[[], object], device: torch.device | None, runs: int) -> float:
    """Time an action, with all that it has queued on a device: the median after one warm run.

    Args:
        action: What is timed.
        device: The device; None for the host alone.
        runs: Number of timed runs.
    """
    taken = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        action()
        if device is not None:
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def with_tf32(timed: Callable[[], float]) -> float:
    """Time under the setting that many trainings have; values are the same, and so is the time.

    Args:
        timed: What is timed.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return timed()
    finally:
        torch.set_float32_matmul_precision(before)


if __name__ == "__main__":
    typer.run(main)
