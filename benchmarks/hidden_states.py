"""Hidden states of GPT-2-like models along a short training on enwik8, kept in files.

python -m benchmarks.hidden_states --out FOLDER

On an accelerator, where there is one: the wide models take hours on a processor.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from recipes.enwik8.data import Corpus, load

CONTEXT, ROWS = 128, 4096


class Training(NamedTuple):
    """A model and how it is trained.

    Attributes:
        layers: Number of blocks.
        heads: Heads of each.
        sequences: Sequences of a batch, of 128 bytes each.
        rate: Learning rate of AdamW after a warm-up of 10 steps.
        steps: Steps after which the hidden states are kept.
    """

    layers: int
    heads: int
    sequences: int
    rate: float
    steps: tuple[int, ...]


TRAININGS = {
    128: Training(4, 4, 8, 1e-3, (0, 30, 100, 1000)),
    384: Training(4, 6, 8, 6e-4, (0, 30, 100, 1000)),
    768: Training(4, 12, 8, 6e-4, (0, 30, 100, 1000)),
    2048: Training(2, 16, 4, 3e-4, (0, 30, 100, 1000)),
}


def main(
    out: Annotated[Path, typer.Option(help="Folder for the files; those that exist are kept.")],
    width: Annotated[list[int], typer.Option(help="Widths of the models.")] = list(TRAININGS),  # noqa: B006
    steps: Annotated[int, typer.Option(help="Longest training.")] = 1000,
) -> None:
    """Train one model of each width, and keep rows of its first and of its last block."""
    out.mkdir(parents=True, exist_ok=True)
    corpus = load()
    print(corpus.source, flush=True)
    for one in width:
        training = TRAININGS[one]
        wanted = tuple(step for step in training.steps if step <= steps)
        if not all(file_of(out, one, step, 1).exists() for step in wanted):
            _train(out, corpus, one, training, wanted)


def file_of(folder: Path, width: int, step: int, layer: int) -> Path:
    """Name the file of the rows behind one block.

    Args:
        folder: Where the files are.
        width: Width of the model.
        step: Steps of training before.
        layer: Number of the block, from 1.
    """
    return folder / f"width_{width}_step_{step:04d}_layer_{layer}.pt"


def _train(
    out: Path, corpus: Corpus, width: int, training: Training, wanted: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(corpus.symbols), n_positions=CONTEXT, n_embd=width, n_layer=training.layers,
        n_head=training.heads, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    # Made on the processor, so that the weights at the start are the same everywhere.
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    model = AutoModelForCausalLM.from_config(config).to(device)
    began = time.perf_counter()
    text = torch.from_numpy(corpus.validation).long()
    losses = train_on_text(
        model, corpus, context=CONTEXT, sequences=training.sequences, rate=training.rate
    )
    for step in range(wanted[-1] + 1):
        if step in wanted:
            _keep(out, model, text, width, step)
        loss = next(losses)
        if step in wanted:
            taken = time.perf_counter() - began
            print(f"width {width}, step {step}: loss {loss:.3f}, {taken:.0f} s", flush=True)


def train_on_text(
    model: PreTrainedModel, corpus: Corpus, *, context: int, sequences: int, rate: float
) -> Iterator[float]:
    """Train by AdamW on random windows of a text; yields the loss of each batch after its update.

    Args:
        model: A language model of the transformers library.
        corpus: The text.
        context: Length of a window, in characters.
        sequences: Number of windows in a batch.
        rate: Learning rate after a warm-up of 10 steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    text = torch.from_numpy(corpus.train).long()
    places = torch.Generator().manual_seed(0)
    for step in itertools.count():
        starts = torch.randint(len(text) - context, (sequences,), generator=places)
        batch = text[starts[:, None] + torch.arange(context)].to(model.device)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10)
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach())


@torch.no_grad()
def _keep(out: Path, model: PreTrainedModel, text: Tensor, width: int, step: int) -> None:
    batch = text[: ROWS // CONTEXT * CONTEXT].view(-1, CONTEXT).to(model.device)
    hidden = model(batch, output_hidden_states=True).hidden_states
    # What the library returns last is behind the final norm: the last but one is a block's.
    for layer in sorted({1, len(hidden) - 2}):
        rows = hidden[layer].flatten(0, 1).contiguous()
        torch.save(rows.float().cpu(), file_of(out, width, step, layer))


if __name__ == "__main__":
    typer.run(main)
