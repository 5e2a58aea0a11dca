"""Measures the cost of a reading and of a check in training steps, at two batch sizes."""

import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks.timing import print_machine, print_table
from geomon import Monitor

# Number and length of the sequences in a batch.
BATCHES = ((32, 128), (8, 64))
_SYMBOLS = 100
# First timed step: bands exist from step 200 on, and checks add to them.
_FIRST = 200


def _rows(layers: int, width: int, runs: int) -> Iterator[list[object]]:
    for sequences, length in BATCHES:
        torch.manual_seed(0)
        configuration = GPT2Config(
            vocab_size=_SYMBOLS, n_positions=length, n_embd=width, n_layer=layers,
            n_head=width // 32, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(configuration)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(
            around: AbstractContextManager[None],
            model: torch.nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            shape: tuple[int, int] = (sequences, length),
        ) -> float:
            ids = torch.randint(_SYMBOLS, shape)
            began = time.process_time()
            with around:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return time.process_time() - began

        plain = statistics.median([step(nullcontext()) for _ in range(runs + 2)][2:])
        taken = []
        for schedule, checks in ((1, None), (10**6, 1)):
            monitor = Monitor(model, directory=None, schedule=schedule, checks=checks)
            for at in range(0 if checks is None else 1, 12):  # what a first one loads, and bands
                step(monitor(_FIRST - 12 + at))
            found = [step(monitor(_FIRST + run)) for run in range(runs)]
            taken.append((statistics.median(found) - plain) / plain)
            monitor.close()
        yield [
            f"{sequences} x {length}", f"{1e3 * plain:.0f}", *(f"{ratio:.2f}" for ratio in taken),
        ]  # fmt: skip


def main(
    layers: Annotated[int, typer.Option(help="Number of blocks.")] = 6,
    width: Annotated[int, typer.Option(help="Width of the hidden states.")] = 128,
    runs: Annotated[int, typer.Option(help="Steps of each kind, of which medians are taken.")] = 9,
) -> None:
    """Time steps that are read, checked, or neither, on one thread, and print the ratios."""
    torch.set_num_threads(1)
    print_table(
        f"A reading and a check of {layers} layers of width {width}, in training steps",
        ("batch", "step, ms", "reading / step", "check / step"),
        _rows(layers, width, runs),
    )
    print_machine("one thread, processor time", f"medians of {runs}")


if __name__ == "__main__":
    typer.run(main)
