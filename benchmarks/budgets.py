"""Whether a budget holds: the recipe's training, with geomon and without in turns."""

import copy
import functools
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
import numpy as np
import scipy.stats
import typer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

import geomon.monitor.monitor
from geomon import Memory
from geomon.lightning import GeometryMonitor
from geomon.monitor.planning.budget import Budget
from recipes.enwik8.data import Corpus, load
from recipes.enwik8.model import CharacterDecoder
from recipes.enwik8.presets import PRESETS, Preset
from recipes.enwik8.train import PROBE_TOKENS, probe_windows
from recipes.enwik8.windows import CharacterData

BUDGETS = (0.005, 0.01, 0.05)
SETTLED = 200  # steps with geomon after which the budget has to hold


def main(
    steps: Annotated[int, typer.Option(help="With geomon, and as many without.")] = 1500,
    runs: Annotated[int, typer.Option(help="For each budget, in turn.")] = 3,
    data: Annotated[str | None, typer.Option(help="A file of enwik8; else the fallback.")] = None,
    alone: Annotated[float, typer.Option(hidden=True)] = 0.0,
) -> None:
    """Train the recipe under each budget, and compare the wall times of the two kinds of steps.

    Two runs of the same training differ by several per cent, as the machine is slower or faster for
    seconds at a time, which hides a budget of one. So a run takes turns with itself, step by step:
    a pair with geomon, a pair without; geomon's clock stands still in the second. The difference is
    summed over the fours of steps in which geomon did anything, and is the median of the others
    times their number: single steps that the machine holds up would else decide it.
    """
    if alone:
        print(json.dumps(_run(steps, alone, data)))
        return
    found: dict[float, list[dict[str, Any]]] = {budget: [] for budget in BUDGETS}
    for _ in range(runs):
        for budget in BUDGETS:
            found[budget].append(_in_process(steps, budget, data))
            print(budget, found[budget][-1], file=sys.stderr, flush=True)
    table = Table(
        title=f"The recipe's preset cpu, {steps:,} steps with geomon and as many without; "
        f"medians of {runs} (smallest to largest)"
    )
    for column in ("budget", "without, s", "with, s", "geomon at work", "+-", "elsewhere", "+-",
                   "geomon/overhead", f"largest after {SETTLED}", "readings", "rows"):  # fmt: skip
        table.add_column(column, justify="right")
    for budget, ran in found.items():
        table.add_row(
            f"{budget:.1%}",
            f"{statistics.median(run['without'] for run in ran):.1f}",
            f"{statistics.median(run['with'] for run in ran):.1f}",
            _percent([run["worked"] for run in ran]),
            f"{statistics.median(run['worked_error'] for run in ran):.2%}",
            _percent([run["idle"] for run in ran]),
            f"{statistics.median(run['idle_error'] for run in ran):.2%}",
            _percent([run["overhead"] for run in ran]),
            f"{max(run['largest'] for run in ran):.2%}",
            ", ".join(str(run["readings"]) for run in ran),
            ", ".join(str(run["rows"]) for run in ran),
        )
    Console(width=150).print(table)


def _percent(shares: list[float]) -> str:
    return f"{statistics.median(shares):.2%} ({min(shares):.2%} to {max(shares):.2%})"


def _in_process(steps: int, budget: float, data: str | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.budgets", "--steps", str(steps),
               "--alone", str(budget)]  # fmt: skip
    command += ["--data", data] if data else []
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


class _Noting(Budget):
    """A budget that says when something was spent."""

    spent_now = False

    def spend(self, seconds: float) -> None:
        """As a budget's."""
        super().spend(seconds)
        # What every step costs, microseconds, is spent at every step.
        _Noting.spent_now = _Noting.spent_now or seconds > 1e-3


class _Clocks(L.Callback):
    """Seconds of the steps with geomon, and of those without.

    Comes after the monitor among the callbacks, so that what it does at the end is counted.
    """

    def __init__(self) -> None:
        self.seconds = {True: 0.0, False: 0.0}
        self.steps: list[float] = []  # of each step
        self.worked: list[bool] = []  # whether geomon did anything in it
        self.overhead = 0.0  # as geomon has it, at the end
        self.largest = 0.0  # after any of the steps by which it has to hold
        self._last = 0.0
        self._watched = True

    def clock(self) -> float:
        """Seconds of the steps with geomon, up to now: the clock that its budget sees."""
        running = time.perf_counter() - self._last if self._watched else 0.0
        return self.seconds[True] + running

    def on_train_start(self, *args: Any) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._look(trainer, after=2 * SETTLED)
        self._tick()
        self._watched = is_watched(trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._look(trainer, after=0)
        self._tick()

    def _tick(self) -> None:
        now = time.perf_counter()
        self.seconds[self._watched] += now - self._last
        self.steps.append(now - self._last)
        self.worked.append(_Noting.spent_now)
        _Noting.spent_now = False
        self._last = now

    def _look(self, trainer: L.Trainer, *, after: int) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GeometryMonitor) and self._watched:
                self.overhead = callback.overhead
                if trainer.global_step >= after:
                    self.largest = max(self.largest, self.overhead)


class _InTurns(GeometryMonitor):
    """The callback, which the steps without geomon do not reach."""

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if is_watched(trainer.global_step):
            super().on_train_batch_start(trainer, *args)


def is_watched(step: int) -> bool:
    """Whether a step is one with geomon: with, without, without, with, which no drift favours."""
    return step % 4 in (0, 3)


def _difference(clocks: _Clocks) -> dict[str, float]:
    """What the steps with geomon took more than those without, as shares of the first.

    `worked`: in the fours of steps in which it did anything, and at the end; `idle`: in the others,
    by their median; `worked_error` and `idle_error`: their standard errors.
    """
    end = clocks.steps[4 * (len(clocks.steps) // 4) :]  # what was done after the last step
    seconds = np.array(clocks.steps[: len(clocks.steps) - len(end)]).reshape(-1, 4)
    worked = np.array(clocks.worked[: seconds.size]).reshape(-1, 4).any(axis=1)
    more = seconds @ np.array([1, -1, -1, 1])
    idle = more[~worked]
    spread = scipy.stats.median_abs_deviation(idle, scale="normal")
    found = {
        "worked": more[worked].sum() + sum(end),
        "idle": np.median(idle) * len(idle),
        "worked_error": spread * worked.sum() ** 0.5,
        "idle_error": spread * 1.25 * len(idle) ** 0.5,  # a median's, beside a mean's
    }
    return {name: float(value / clocks.seconds[True]) for name, value in found.items()}


def _fit(
    model: CharacterDecoder,
    corpus: Corpus,
    preset: Preset,
    folder: str,
    callbacks: list[L.Callback],
) -> None:
    trainer = L.Trainer(
        accelerator="cpu", max_steps=preset.steps, max_epochs=1, limit_val_batches=0,
        gradient_clip_val=1.0, enable_model_summary=False, enable_progress_bar=False,
        enable_checkpointing=False, logger=TensorBoardLogger(folder), callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(model, CharacterData(corpus, preset, seed=0))


def _run(steps: int, budget: float, data: str | None) -> dict[str, Any]:
    preset = replace(PRESETS["cpu"], steps=2 * steps)
    corpus = load(data, text="bytes", minimum=20 * (PROBE_TOKENS + preset.context))
    L.seed_everything(0, verbose=False)
    model = CharacterDecoder("gpt2", corpus.vocabulary_size, preset, compiled=False)
    clocks, memory = _Clocks(), Memory()
    geomon.monitor.monitor.Budget = functools.partial(_Noting, clock=clocks.clock)  # type: ignore[misc,assignment]
    with tempfile.TemporaryDirectory() as folder:
        monitor = _InTurns(
            probe=probe_windows(corpus, preset.context, budget), budget=budget, directory=folder,
            sinks=[memory],
        )  # fmt: skip
        # The first steps of a process are slow, and would count as geomon's.
        _fit(copy.deepcopy(model), corpus, replace(preset, steps=20), folder, [])
        _fit(model, corpus, preset, folder, [monitor, clocks])
    return {
        **_difference(clocks),
        "with": clocks.seconds[True],
        "without": clocks.seconds[False],
        "overhead": clocks.overhead,
        "largest": clocks.largest,
        "readings": len(memory.readings),
        "rows": memory.readings[-1].tokens if memory.readings else 0,
    }


if __name__ == "__main__":
    typer.run(main)
