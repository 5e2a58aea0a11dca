"""Measures the cost of one reading in training steps on equally many tokens: make bench.

The models are first trained for some steps on enwik8, like the models of users: the neighbour
search is cheaper once training has given the rows a few leading directions.
"""

import statistics
from collections.abc import Iterator
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks.timing import print_machine, print_table, seconds
from geomon import METRICS, Memory, Monitor
from recipes.enwik8.text import Text, load

TOKENS = 4096
# Batch size in tokens of that training; small because of the model of width 768.
TRAINING_TOKENS = 1024
# Learning rate of that training by width.
RATES = {128: 1e-3, 384: 6e-4, 768: 6e-4}
# Layers, width, context: the recipe's model, a slightly larger one, and GPT-2's size.
SIZES = {"small": [(4, 128, 64), (6, 128, 128), (6, 384, 256)], "gpt2": [(12, 768, 512)]}


def _trained(layers: int, width: int, context: int, corpus: Text, steps: int) -> torch.nn.Module:
    """Train a decoder for some steps of AdamW on random windows of the text."""
    torch.manual_seed(0)
    configuration = GPT2Config(
        vocab_size=corpus.vocabulary, n_positions=context, n_embd=width, n_layer=layers,
        n_head=width // 32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        activation_function="gelu_pytorch_tanh", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(configuration)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[width])
    text = torch.from_numpy(corpus.train).long()
    places = torch.Generator().manual_seed(0)
    sequences = max(1, TRAINING_TOKENS // context)
    for step in range(steps):
        starts = torch.randint(len(text) - context, (sequences,), generator=places)
        for group in optimizer.param_groups:
            group["lr"] = RATES[width] * min(1.0, (step + 1) / 10)
        _train(model, optimizer, text[starts[:, None] + torch.arange(context)])
    return model


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _rows(
    sizes: list[tuple[int, int, int]], corpus: Text, trained: int, runs: int
) -> Iterator[list[object]]:
    for layers, width, context in sizes:
        model = _trained(layers, width, context, corpus, trained)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        ids = torch.from_numpy(corpus.validation[:TOKENS]).long().view(-1, context)
        memory = Memory()
        monitor = Monitor(
            model, tokens=TOKENS, directory=None, sinks=[memory], strict=True,
            schedule=lambda step: step % 2 == 1,
        )  # fmt: skip
        step, inline, probe = [], [], []
        for run in range(runs + 1):  # the first warms up
            step.append(seconds(lambda: _train(model, optimizer, ids)))  # noqa: B023
            with monitor(2 * run + 1):
                model(input_ids=ids, labels=ids, use_cache=False)
            inline.append(memory.readings[-1].seconds)
            monitor.probe(2 * run + 2, {"input_ids": ids, "use_cache": False})
            probe.append(memory.readings[-1].seconds)
        bare, read, probed = (statistics.median(taken[1:]) for taken in (step, inline, probe))
        yield [
            f"{layers} layers, width {width}, context {context}",
            f"{bare:.3f}", f"{read:.3f}", f"{probed:.3f}", f"{read / bare:.2f}",
            f"{probed / bare:.2f}",
        ]  # fmt: skip


def main(
    size: Annotated[str, typer.Option(help="small (three minutes) or gpt2 (15).")] = "small",
    runs: Annotated[int, typer.Option(help="Pairs of a step and a reading of each kind.")] = 9,
    trained: Annotated[int, typer.Option(min=0, help="Steps of training on enwik8 before.")] = 100,
) -> None:
    """Time training steps and readings in turn, and print the ratios of their medians."""
    corpus = load()
    print_table(
        f"One reading of all {len(METRICS)} metrics on {TOKENS:,} tokens",
        ("model", "step, s", "inline, s", "probe, s", "inline / step", "probe / step"),
        _rows(SIZES[size], corpus, trained, runs),
    )
    print_machine(f"trained for {trained:,} steps on {corpus.source}", f"medians of {runs}")


if __name__ == "__main__":
    typer.run(main)
