"""Whether a budget holds: the recipe's training with and without geomon, in pairs of processes."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import Annotated, Any

import lightning as L
import torch
import typer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from geomon import Memory
from geomon.lightning import GeometryMonitor
from recipes.enwik8.data import load
from recipes.enwik8.model import CharacterDecoder
from recipes.enwik8.presets import PRESETS
from recipes.enwik8.train import PROBE_TOKENS, probe_windows
from recipes.enwik8.windows import CharacterData

BUDGETS = (0.005, 0.01, 0.05)
SETTLED = 200  # steps after which the budget has to hold


def main(
    steps: Annotated[int, typer.Option(help="Of each run.")] = 1500,
    pairs: Annotated[int, typer.Option(help="Runs with and without, for each budget.")] = 3,
    data: Annotated[str | None, typer.Option(help="A file of enwik8; else the fallback.")] = None,
    alone: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run the recipe in turn without geomon and under each budget, and compare the wall times."""
    if alone:
        print(json.dumps(_run(steps, json.loads(alone), data)))
        return
    table = Table(title=f"The recipe's preset cpu, {steps:,} steps; medians of {pairs} pairs")
    for column in ("budget", "training, s", "with geomon, s", "measured", "geomon/overhead",
                   f"largest after step {SETTLED}", "readings", "rows"):  # fmt: skip
        table.add_column(column, justify="right")
    for budget in BUDGETS:
        bare, watched = [], []
        for _ in range(pairs):
            bare.append(_in_process(steps, None, data))
            watched.append(_in_process(steps, budget, data))
        shares = [1 - b["seconds"] / w["seconds"] for b, w in zip(bare, watched, strict=True)]
        last = watched[-1]
        table.add_row(
            f"{budget:.1%}", f"{statistics.median(b['seconds'] for b in bare):.1f}",
            f"{statistics.median(w['seconds'] for w in watched):.1f}",
            f"{statistics.median(shares):+.2%} ({min(shares):+.1%} to {max(shares):+.1%})",
            f"{statistics.median(w['overhead'] for w in watched):.2%}",
            f"{max(w['largest'] for w in watched):.2%}", str(last["readings"]), str(last["rows"]),
        )  # fmt: skip
    Console(width=130).print(table)


def _in_process(steps: int, budget: float | None, data: str | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.budgets", "--steps", str(steps),
               "--alone", json.dumps(budget)]  # fmt: skip
    command += ["--data", data] if data else []
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


class _Clock(L.Callback):
    """Seconds from before the first batch to the end of training."""

    seconds = 0.0

    def on_train_start(self, *args: Any) -> None:
        self._began = time.perf_counter()

    def on_train_end(self, *args: Any) -> None:
        self.seconds = time.perf_counter() - self._began


def _run(steps: int, budget: float | None, data: str | None) -> dict[str, Any]:
    preset = replace(PRESETS["cpu"], steps=steps)
    corpus = load(data, text="bytes", minimum=20 * (PROBE_TOKENS + preset.context))
    L.seed_everything(0, verbose=False)
    model = CharacterDecoder("gpt2", corpus.vocabulary_size, preset, compiled=False)
    clock, memory = _Clock(), Memory()
    with tempfile.TemporaryDirectory() as folder:
        monitor = GeometryMonitor(
            probe=probe_windows(corpus, preset.context), budget=budget, directory=folder,
            sinks=[memory],
        )  # fmt: skip
        trainer = L.Trainer(
            accelerator="cpu", max_steps=steps, max_epochs=1, limit_val_batches=0,
            gradient_clip_val=1.0, enable_model_summary=False, enable_progress_bar=False,
            enable_checkpointing=False, logger=TensorBoardLogger(folder),
            callbacks=[clock] if budget is None else [clock, monitor],
        )  # fmt: skip
        # Last, so that what the monitor does at the end of training is within the clock's seconds.
        if budget is not None:
            trainer.callbacks.sort(key=lambda callback: isinstance(callback, _Clock))
        trainer.fit(model, CharacterData(corpus, preset, seed=0))
    settled = [r for r in memory.readings if r.step >= SETTLED]
    return {
        "seconds": clock.seconds,
        "overhead": monitor.overhead,
        "largest": max((r.values.get("geomon/overhead", 0.0) for r in settled), default=0.0),
        "readings": len(memory.readings),
        "rows": memory.readings[-1].tokens if memory.readings else 0,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    typer.run(main)
