"""The cost of not reading: opening and closing a window, and a step at which no reading is due.

python -m benchmarks.window_cost
"""

import itertools
import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import lightning as L
import torch
import transformers
import typer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

from geomon import METRICS, Monitor, every
from geomon.capture.anatomy.blocks import Anatomy, find_anatomy
from geomon.capture.window import Window
from geomon.lightning import GeometryMonitor
from geomon.metrics import Evaluator

CONTEXT, SEQUENCES, VOCABULARY = 64, 16, 205
NEVER = every(10**9)  # but for step 0


def main(
    modules: Annotated[int, typer.Option(help="Modules of the model whose window is timed.")] = 500,
    windows: Annotated[int, typer.Option(help="Windows that are opened and closed.")] = 51,
    pairs: Annotated[int, typer.Option(help="Pairs of fits, with and without the callback.")] = 9,
    steps: Annotated[int, typer.Option(help="Steps of each fit that are timed.")] = 60,
) -> None:
    """Time windows around nothing, and training steps with and without an idle callback."""
    logging.getLogger("geomon").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    table = Table(title="What geomon costs where it does not read")
    for column in ("what", "median", "from", "to"):
        table.add_column(column, justify="left" if column == "what" else "right")
    large = _model(layers=_layers_for(modules))
    count = sum(1 for _ in large.modules())
    anatomy = find_anatomy(large)
    opened = [_seconds(lambda: _open(anatomy)) for _ in range(windows + 3)][3:]
    table.add_row(f"window opened and closed, {count} modules, ms", *_spread(opened, 1e3, ".2f"))
    monitor = Monitor(large, schedule=NEVER, directory=None)
    idle = [_seconds(lambda: _enter(monitor)) for _ in range(windows + 3)][3:]
    table.add_row("monitor(step) where no reading is due, µs", *_spread(idle, 1e6, ".1f"))

    without, beside = [], []
    for pair in range(pairs + 1):  # the first warms up
        # In turn, and in either order, so that what drifts meets both alike.
        for watched in (False, True) if pair % 2 else (True, False):
            (beside if watched else without).append(_step_seconds(steps, watched=watched))
    without, beside = without[1:], beside[1:]
    table.add_row("training step, ms", *_spread(without, 1e3, ".2f"))
    table.add_row("the same with GeometryMonitor(), ms", *_spread(beside, 1e3, ".2f"))
    ratios = [b / w for b, w in zip(beside, without, strict=True)]
    ratio = statistics.median(beside) / statistics.median(without)
    table.add_row(
        "ratio of the medians (from, to: of single pairs)",
        f"{ratio:.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}",
    )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    console.print(
        f"{windows} windows, {pairs} pairs of {steps} steps; {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {platform.machine()}"
    )


class _Training(L.LightningModule):
    """A small decoder, and the seconds of each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _model(layers=4)
        self.seconds: list[float] = []
        self._began = 0.0

    def training_step(self, batch: Tensor, index: int) -> STEP_OUTPUT:
        """The loss of the decoder."""
        loss: Tensor = self.net(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Clock(L.Callback):
    """Times from the start of one step to the start of the next: all callbacks are within."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Note the time."""
        self.starts.append(time.perf_counter())


def _step_seconds(steps: int, *, watched: bool) -> float:
    """Median seconds of a step of a fit, without its first ten (step 0 is read)."""
    torch.manual_seed(0)
    clock = _Clock()
    monitor = [GeometryMonitor(schedule=NEVER, tokens=SEQUENCES * CONTEXT)] if watched else []
    with TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_steps=steps + 10, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[clock, *monitor],
            default_root_dir=directory,
        )  # fmt: skip
        ids = torch.randint(0, VOCABULARY, (SEQUENCES * (steps + 10), CONTEXT))
        trainer.fit(_Training(), DataLoader(ids, batch_size=SEQUENCES))  # type: ignore[arg-type]
    starts = clock.starts[10:]
    return statistics.median(after - before for before, after in itertools.pairwise(starts))


def _model(layers: int) -> nn.Module:
    configuration = GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=128, n_layer=layers, n_head=4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(configuration)
    return model


def _layers_for(modules: int) -> int:
    """Layers of the smallest model with so many modules."""
    one, two = (sum(1 for _ in _model(layers).modules()) for layers in (1, 2))
    return max(1, -((one - modules) // (two - one)) + 1)


def _open(anatomy: Anatomy) -> None:
    with Window(anatomy, Evaluator(METRICS, 2).views, rows=4096, seed=0):
        pass


def _enter(monitor: Monitor) -> None:
    with monitor(7):
        pass


def _spread(seconds: list[float], unit: float, style: str) -> tuple[str, str, str]:
    values = (statistics.median(seconds), min(seconds), max(seconds))
    middle, least, most = (format(value * unit, style) for value in values)
    return middle, least, most


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
