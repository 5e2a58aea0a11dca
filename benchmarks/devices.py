"""Times one reading on the host and on an accelerator, and the copy between them.

Without an accelerator, only the host is timed.
"""

from collections.abc import Callable, Iterator
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.timing import median_seconds, print_machine, print_table
from geomon import METRICS
from geomon.capture.snapshot import HOST, Layer
from geomon.metrics import Evaluator

HEAD_WIDTH, LENGTH, QUERIES = 64, 512, 1024


def decoder_layer(rows: int, width: int) -> Layer:
    """Make a layer as a window captures it, from random numbers with a falling spectrum.

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


def _timed(
    layer: Layer, layers: int, rows: int, batches: int, runs: int
) -> Iterator[tuple[str, str, str]]:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    evaluator = Evaluator(METRICS, batches, strict=True)

    def measure(place: torch.device) -> Callable[[], object]:
        there = layer.to(place)
        return lambda: evaluator.measure_layer(there, rows)

    def row(
        name: str, action: Callable[[], object], where: torch.device | None
    ) -> tuple[str, str, str]:
        taken = median_seconds(action, runs, where)
        return name, f"{taken:.3f}", f"{taken * layers:.2f}"

    yield row("measured on the host", measure(HOST), None)
    if device is None:
        return
    there = layer.to(device)
    yield row(f"measured on {device}", measure(device), device)
    torch.set_float32_matmul_precision("high")  # many trainings allow TF32
    yield row(f"measured on {device}, TF32 allowed", measure(device), device)
    yield row(f"copy from {device} to the host", lambda: there.to(HOST), device)
    yield row(f"copy from the host to {device}", lambda: layer.to(device), device)
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device) / 1e6
        print(f"{torch.cuda.get_device_name(device)}: {most:,.0f} MB at most")


def main(
    layers: Annotated[int, typer.Option(help="Layers of the model; one is timed.")] = 12,
    width: Annotated[int, typer.Option(help="Width of the hidden states, a multiple of 64.")] = 768,
    rows: Annotated[int, typer.Option(help="Rows in a split.")] = 4096,
    batches: Annotated[int, typer.Option(help="Splits.")] = 1,
    runs: Annotated[int, typer.Option(help="Runs of each, of which the median is printed.")] = 3,
) -> None:
    """Time the measurement of one decoder layer, and print the time of a reading of all layers."""
    layer = decoder_layer(rows * batches, width)
    size = sum(x.nbytes for x in layer.captured.values() if isinstance(x, Tensor))
    print_table(
        f"One reading of {layers} layers of width {width}, {batches} x {rows} rows",
        ("", "one layer, s", "all layers, s"),
        _timed(layer, layers, rows, batches, runs),
    )
    print_machine(f"{size / 1e6:,.0f} MB of captured tensors a layer", f"medians of {runs}")


if __name__ == "__main__":
    typer.run(main)
