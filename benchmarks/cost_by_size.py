"""What one and eight GPUs pay, by the size of the model: layers measured, steps counted.

The time of a layer is measured here, on one core. The time of a training step is counted: 6
floating-point operations for each parameter and token, at a rate that is given.
"""

import math
import statistics
import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GPT2Config

from geomon import METRICS, Memory, Monitor, log_spaced
from geomon.metrics.evaluate import Evaluator

TOKENS = 4096
SPLITS = 2
CONTEXT = 512
HEAD_WIDTH = 64
VOCABULARY = 50_000
BATCH = 500_000  # tokens of one optimizer step
STEPS = 100_000


@dataclass(frozen=True)
class Size:
    """A decoder of one of the usual sizes."""

    layers: int
    width: int

    @property
    def parameters(self) -> float:
        """Number of parameters, with a vocabulary of 50,000."""
        return 12 * self.layers * self.width**2 + VOCABULARY * self.width


SIZES = (Size(12, 768), Size(24, 1024), Size(24, 2048), Size(32, 4096))


def main(
    widest: Annotated[int, typer.Option(help="Widths above this one are left out.")] = 4096,
    runs: Annotated[int, typer.Option(help="Readings of each width, after one that warms up.")] = 3,
    rate: Annotated[float, typer.Option(help="Operations of one GPU in training, 1e12/s.")] = 400,
) -> None:
    """Measure one layer of each width, and print what a reading and a run cost."""
    torch.set_num_threads(1)
    readings = sum(map(log_spaced(), range(STEPS + 1)))
    table = Table(
        title=f"All {len(METRICS)} metrics, {SPLITS} x {TOKENS:,} rows a layer; steps of "
        f"{BATCH:,} tokens; {readings} readings in {STEPS:,} steps"
    )
    for column in (
        "layers x width", "parameters", "a layer and split, s", "a reading on one core, s",
        "step, s: 1 GPU", "8 GPUs", "thread busy, 1 GPU", "all wait, 8 GPUs", "step, budget 1%",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for size in SIZES:
        if size.width > widest:
            continue
        layer = _seconds_of_layer(size.width, runs)
        reading = SPLITS * (size.layers + 1) * layer
        step = 6 * size.parameters * BATCH / (rate * 1e12)
        waiting = reading / 8
        table.add_row(
            f"{size.layers} x {size.width}", f"{size.parameters / 1e6:,.0f} M", f"{layer:.2f}",
            f"{reading:.1f}", f"{step:.2f}", f"{step / 8:.2f}",
            _share(readings * reading, STEPS * step),
            _share(readings * waiting, STEPS * step / 8),
            f"every {math.ceil(100 * waiting / (step / 8)):,}",
        )  # fmt: skip
    console = Console(width=150)
    console.print(table)
    console.print(
        "measured: a layer and split, medians; counted: steps, at "
        f"{rate:.0f}e12 operations a second and GPU. Thread busy: share of the run in which the "
        "thread of one GPU measures, beside the training. All wait: share of the run in which "
        "eight GPUs wait, each of whose ranks measures an eighth of the layers on one core. Last "
        "column: the least distance of readings of eight GPUs under budget='1%'"
    )
    console.print(f"{torch.get_num_threads()} thread, torch {torch.__version__}")


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2g} %"


def _seconds_of_layer(width: int, runs: int) -> float:
    """The median time of a layer of a model with one block, without that of the forward pass."""
    torch.manual_seed(0)
    configuration = GPT2Config(
        vocab_size=1000, n_positions=CONTEXT, n_embd=width, n_layer=1, n_head=width // HEAD_WIDTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(configuration)
    ids = torch.randint(0, 1000, (TOKENS // CONTEXT, CONTEXT))
    inputs = {"input_ids": ids, "use_cache": False}
    taken: list[float] = []
    measure = Evaluator.measure_layer

    def timed(self: Evaluator, layer: Any, rows: int) -> Any:
        began = time.perf_counter()
        result = measure(self, layer, rows)
        if layer.index > 0:  # layer 0 has no attention
            taken.append(time.perf_counter() - began)
        return result

    Evaluator.measure_layer = timed  # type: ignore[method-assign]
    try:
        monitor = Monitor(
            model, tokens=TOKENS, batches=1, directory=None, sinks=[Memory()], strict=True
        )
        for step in range(runs + 1):
            monitor.probe(step, inputs)
    finally:
        Evaluator.measure_layer = measure  # type: ignore[method-assign]
    return statistics.median(taken[1:])


if __name__ == "__main__":
    typer.run(main)
