"""Measures the cost of not reading: opening and closing a window, and a step without a reading."""

import itertools
import logging
import statistics
import time
import warnings
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import lightning as L
import torch
import transformers
import typer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks.timing import print_machine, print_table, seconds
from geomon import METRICS, Monitor, every
from geomon.capture.anatomy.blocks import Anatomy, find_anatomy
from geomon.capture.window import Window
from geomon.lightning import GeometryMonitor
from geomon.metrics import Evaluator

CONTEXT, SEQUENCES, VOCABULARY = 64, 16, 205
LARGE = 40  # layers of GPT-2: 528 modules
NEVER = every(10**9)  # but for step 0


class _Training(L.LightningModule):
    """A small decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _model(layers=4)

    def training_step(self, batch: Tensor, index: int) -> STEP_OUTPUT:
        loss: Tensor = self.net(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Clock(L.Callback):
    """Times from the start of one step to the start of the next, with all callbacks."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())


def _step_seconds(steps: int, *, watched: bool) -> float:
    """Return the median seconds of a step of a fit, without its first ten (step 0 is read)."""
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


def _open(anatomy: Anatomy) -> None:
    with Window(anatomy, Evaluator(METRICS, 2).views, rows=4096, seed=0):
        pass


def _enter(monitor: Monitor) -> None:
    with monitor(7):
        pass


def _spread(name: str, taken: list[float], unit: float, style: str) -> list[str]:
    values = (statistics.median(taken), min(taken), max(taken))
    return [name, *(format(value * unit, style) for value in values)]


def main(
    windows: Annotated[int, typer.Option(help="Windows that are opened and closed.")] = 51,
    pairs: Annotated[int, typer.Option(help="Pairs of fits, with and without the callback.")] = 9,
    steps: Annotated[int, typer.Option(help="Steps of each fit that are timed.")] = 60,
) -> None:
    """Time windows around nothing, and training steps with and without an idle callback."""
    for name in ("geomon", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    large = _model(LARGE)
    count, anatomy = sum(1 for _ in large.modules()), find_anatomy(large)
    monitor = Monitor(large, schedule=NEVER, directory=None)
    opened = [seconds(lambda: _open(anatomy)) for _ in range(windows + 3)][3:]
    idle = [seconds(lambda: _enter(monitor)) for _ in range(windows + 3)][3:]
    without, beside = [], []
    for pair in range(pairs + 1):  # the first warms up
        # In turn and in both orders, so that drifts affect both equally.
        for watched in (False, True) if pair % 2 else (True, False):
            (beside if watched else without).append(_step_seconds(steps, watched=watched))
    without, beside = without[1:], beside[1:]
    ratios = [b / w for b, w in zip(beside, without, strict=True)]
    rows = [
        _spread(f"window opened and closed, {count} modules, ms", opened, 1e3, ".2f"),
        _spread("monitor(step) where no reading is due, µs", idle, 1e6, ".1f"),
        _spread("training step, ms", without, 1e3, ".2f"),
        _spread("the same with GeometryMonitor(), ms", beside, 1e3, ".2f"),
        _spread("ratio of single pairs", ratios, 1, ".3f"),
    ]
    print_table("Where geomon does not read", ("what", "median", "from", "to"), rows)
    ratio = statistics.median(beside) / statistics.median(without)
    print_machine(f"{windows} windows, {pairs} pairs", f"ratio of the medians {ratio:.3f}")


if __name__ == "__main__":
    typer.run(main)
