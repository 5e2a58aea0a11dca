"""A short training on real text, for benchmarks that need the hidden states of a trained model."""

import itertools
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from recipes.enwik8.data import Corpus

# Learning rate of AdamW by the width of the model.
RATES = {128: 1e-3, 384: 6e-4, 768: 6e-4}


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
