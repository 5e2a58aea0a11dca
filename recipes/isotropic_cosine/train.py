"""A short training of the decoder of recipes/enwik8, watched on held-out windows."""

from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from geomon import Monitor, log_spaced, select
from recipes.enwik8.data import Corpus
from recipes.enwik8.model import configuration
from recipes.enwik8.presets import PRESETS, Preset
from recipes.enwik8.windows import Windows, spread
from recipes.study import begin_training, finish_training

# Rows that a reading stands on: 32 windows of 64 characters.
TOKENS = 2048


def preset(width: int, steps: int) -> Preset:
    """Change the smallest decoder of recipes/enwik8 to a width and a number of steps.

    Args:
        width: Width of the hidden states; heads are 32 wide as there.
        steps: Number of optimizer updates.
    """
    small = PRESETS["cpu"]
    return replace(small, width=width, heads=max(1, width // 32), steps=steps)


def train(corpus: Corpus, sizes: Preset, seed: int, folder: Path) -> None:
    """Train a decoder, and record its mean cosine before the first step and on the way.

    Args:
        corpus: The text.
        sizes: Sizes of the model, and its training.
        seed: Seed of the weights and of the windows.
        folder: Folder of the training, which gets the record.
    """
    settings = {**asdict(sizes), "seed": seed, "text": corpus.sha256()}
    began = begin_training(folder, settings)
    if began is None:
        return
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configuration("gpt2", corpus.vocabulary_size, sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.learning_rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    windows = Windows(corpus.train, sizes.context + 1)
    monitor = Monitor(
        model,
        metrics=select("cosine", "cosine_centred", "drift_norm"),
        probe={"input_ids": spread(corpus.validation, sizes.context, TOKENS // sizes.context)},
        schedule=log_spaced(per_octave=4, first=min(32, sizes.steps)),
        tokens=TOKENS, batches=1, directory=folder, seed=seed,
    )  # fmt: skip
    for step in range(sizes.steps):
        places = torch.randint(len(windows), (sizes.batch,), generator=generator)
        batch = torch.stack([windows[place] for place in places.tolist()])
        with monitor(step):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = sizes.learning_rate * min(1.0, (step + 1) / sizes.warmup)
        optimizer.step()
    monitor.probe(sizes.steps)
    monitor.close()
    finish_training(folder, settings, began)
