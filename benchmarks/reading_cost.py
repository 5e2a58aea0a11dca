"""The cost of one reading in units of one training step on the same tokens: make bench."""

import platform
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GPT2Config

from geomon import METRICS, Memory, Monitor

TOKENS = 4096

# layers, width, context: the recipe's model, one a little larger, and GPT-2's own size.
SIZES = {"small": [(4, 128, 64), (6, 128, 128), (6, 384, 256)], "gpt2": [(12, 768, 512)]}
COLUMNS = (
    "layers", "width", "context", "step, s", "inline, s", "probe, s", "inline / step",
    "probe / step", "step unmonitored / bare",
)  # fmt: skip


def main(
    size: Annotated[str, typer.Option(help="small (two minutes) or gpt2 (ten).")] = "small",
    runs: Annotated[int, typer.Option(help="Pairs of a step and a reading of each kind.")] = 9,
) -> None:
    """Time training steps and readings in turn, and print the ratios of their medians."""
    table = Table(title=f"One reading of all {len(METRICS)} metrics on {TOKENS:,} tokens")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for sizes in SIZES[size]:
        table.add_row(*map(str, sizes), *_measure(*sizes, runs))
    console = Console(width=110)
    console.print(table)
    console.print(
        f"medians of {runs}; {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{platform.machine()}"
    )


def _measure(layers: int, width: int, context: int, runs: int) -> list[str]:
    torch.manual_seed(0)
    configuration = GPT2Config(
        vocab_size=205, n_positions=context, n_embd=width, n_layer=layers, n_head=width // 32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu_pytorch_tanh",
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(configuration)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 205, (TOKENS // context, context))
    memory = Memory()
    monitor = Monitor(
        model, tokens=TOKENS, batches=1, directory=None, sinks=[memory], probe=None, strict=True,
        schedule=lambda step: step % 3 == 1,
    )  # fmt: skip

    def train(step: int | None) -> None:
        if step is None:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        else:
            with monitor(step):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    bare, unmonitored, inline, probe = [], [], [], []
    for run in range(runs + 1):  # the first warms up
        bare.append(_seconds(lambda: train(None)))
        unmonitored.append(_seconds(lambda run=run: train(3 * run + 2)))  # type: ignore[misc]
        train(3 * run + 4)
        inline.append(memory.readings[-1].seconds)
        monitor.probe(3 * run + 5, {"input_ids": ids, "use_cache": False})
        probe.append(memory.readings[-1].seconds)
    step, beside, read, probed = (
        statistics.median(times[1:]) for times in (bare, unmonitored, inline, probe)
    )
    return [
        f"{step:.3f}", f"{read:.3f}", f"{probed:.3f}", f"{read / step:.2f}", f"{probed / step:.2f}",
        f"{beside / step:.3f}",
    ]  # fmt: skip


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
