"""What monitoring costs over a run, by interval, and a model that predicts it for other sizes."""

import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import nnls
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks.attention_memory import peak_beyond
from geomon import METRICS, Memory, Monitor

LAYERS, CONTEXT, TOKENS, HEAD_WIDTH = 4, 256, 4096, 64
WIDTHS = (128, 512, 768)
ROWS = (1024, 2048, 4096)
INTERVALS = (10, 50, 100, 500)
PREDICTED_WIDTHS = (1024, 2048, 4096, 8192)
PREDICTED_ROWS = (4096, 16384)

console = Console(width=120)


class Costs(NamedTuple):
    """Seconds, medians: of a bare training step, and of a reading in and beside it."""

    step: float
    inline: float
    probe: float


def main(
    runs: Annotated[int, typer.Option(help="Pairs of a step and a reading of each kind.")] = 5,
    alone: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure steps and readings side by side, and print what they come to by interval."""
    if alone:
        width, source = alone.split("/")
        print(_peak(int(width), source))
        return
    measured = {(width, rows): _measure(width, rows, runs) for width in WIDTHS for rows in ROWS}
    console.print(_interval_table(measured, runs))
    console.print(*_model_tables(measured))
    console.print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, {platform.machine()}"
    )


class Run:
    """A small decoder, its training step, and a monitor of it."""

    def __init__(self, width: int, rows: int) -> None:
        torch.manual_seed(0)
        configuration = GPT2Config(
            vocab_size=205, n_positions=CONTEXT, n_embd=width, n_layer=LAYERS,
            n_head=width // HEAD_WIDTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            activation_function="gelu_pytorch_tanh", bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.model = AutoModelForCausalLM.from_config(configuration)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._ids: Tensor = torch.randint(0, 205, (TOKENS // CONTEXT, CONTEXT))
        self.memory = Memory()
        self._monitor = Monitor(
            self.model, tokens=rows, batches=1, directory=None, sinks=[self.memory], strict=True,
            schedule=lambda step: True,
        )  # fmt: skip
        self._step = 0

    def bare(self) -> None:
        """One training step."""
        self._train(self._loss())

    def inline(self) -> None:
        """One training step whose forward pass is read."""
        self._step += 1
        with self._monitor(self._step):
            loss = self._loss()
        self._train(loss)

    def probe(self) -> None:
        """One reading in a pass of its own."""
        self._step += 1
        self._monitor.probe(self._step, {"input_ids": self._ids, "use_cache": False})

    def _loss(self) -> Tensor:
        loss: Tensor = self.model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        return loss

    def _train(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()


def _measure(width: int, rows: int, runs: int) -> Costs:
    run = Run(width, rows)
    bare, inline, probe = [], [], []
    for _ in range(runs + 1):  # the first warms up
        bare.append(_seconds(run.bare))
        run.inline()
        inline.append(run.memory.readings[-1].seconds)
        run.probe()
        probe.append(run.memory.readings[-1].seconds)
    return Costs(*(statistics.median(times[1:]) for times in (bare, inline, probe)))


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _peak(width: int, source: str) -> float:
    """Megabytes that a reading takes beyond what a training step takes."""
    run = Run(width, TOKENS)
    run.bare()
    step = peak_beyond(run.bare)
    return peak_beyond(getattr(run, source)) - (step if source == "inline" else 0.0)


def _interval_table(measured: dict[tuple[int, int], Costs], runs: int) -> Table:
    table = Table(
        title=f"Overhead of all {len(METRICS)} metrics on {TOKENS:,} tokens, {LAYERS} layers, "
        "by interval in steps"
    )
    for column in ("width", "source", "step, s", "reading, s", *map(str, INTERVALS), "peak, MB"):
        table.add_column(column, justify="right")
    for width in WIDTHS:
        costs = measured[width, TOKENS]
        for source in ("inline", "probe"):
            seconds = getattr(costs, source)
            shares = (seconds / (seconds + every * costs.step) for every in INTERVALS)
            command = [sys.executable, "-m", "benchmarks.overhead", "--alone", f"{width}/{source}"]
            peak = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            table.add_row(
                str(width), source, f"{costs.step:.3f}", f"{seconds:.3f}",
                *(f"{share:.1%}" for share in shares), f"{float(peak.split()[-1]):.0f}",
            )  # fmt: skip
    table.caption = (
        f"share of the whole time; medians of {runs}; peak: resident memory beyond that of a "
        "training step, one process each"
    )
    return table


# -- the model -------------------------------------------------------------------------------------


def counted(width: int, rows: int) -> NDArray[np.float64]:
    """Operations of a reading, by kind: each kind has a rate of its own.

    The distance products, 2 n^2 d in each layer; what passes over rows (copies, centring, moments),
    n d; the Gram matrix, 2 n d^2; its eigenvalues, d^3; the scores of the sampled queries against
    the keys of the sampled sequences; and what a layer costs however small it is.
    """
    depth = LAYERS + 1
    queries = 256 * CONTEXT * width
    return np.array(
        [2 * rows**2 * width, rows * width, 2 * rows * width**2, width**3, queries, 1.0]
    ) * float(depth)


def training(width: int) -> float:
    """Operations of a training step: 6 for each weight of the blocks and each token."""
    return 6.0 * 12 * width**2 * LAYERS * TOKENS


def _model_tables(measured: dict[tuple[int, int], Costs]) -> tuple[Table, Table]:
    features = np.stack([counted(*size) for size in measured])
    seconds = np.array([costs.inline for costs in measured.values()])
    fit = Table(title="The model on the measured sizes: inline readings, s")
    for column in ("width", "rows", "measured", "predicted", "error", "error, size left out"):
        fit.add_column(column, justify="right")
    predicted = features @ _rates(features, seconds)
    for place, ((width, rows), true) in enumerate(zip(measured, seconds, strict=True)):
        others = np.arange(len(seconds)) != place
        blind = features[place] @ _rates(features[others], seconds[others])
        fit.add_row(
            str(width), f"{rows:,}", f"{true:.3f}", f"{predicted[place]:.3f}",
            f"{predicted[place] / true - 1:+.0%}", f"{blind / true - 1:+.0%}",
        )  # fmt: skip
    rates = _rates(features, seconds)
    largest = measured[WIDTHS[-1], TOKENS]
    speed = training(WIDTHS[-1]) / largest.step
    beyond = Table(title=f"Predicted for {LAYERS} layers, here")
    for column in ("width", "rows", "reading, s", f"step on {TOKENS:,} tokens, s", "readings/step"):
        beyond.add_column(column, justify="right")
    for width in PREDICTED_WIDTHS:
        for rows in PREDICTED_ROWS:
            reading, step = float(counted(width, rows) @ rates), training(width) / speed
            beyond.add_row(
                str(width), f"{rows:,}", f"{reading:.1f}", f"{step:.1f}", f"{reading / step:.2f}"
            )
    return fit, beyond


def _rates(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds for an operation of each kind, none below 0; relative errors count alike."""
    scale = features.max(axis=0)
    found, _ = nnls(features / scale / seconds[:, None], np.ones(len(seconds)))
    rates: NDArray[np.float64] = found / scale
    return rates


if __name__ == "__main__":
    typer.run(main)
