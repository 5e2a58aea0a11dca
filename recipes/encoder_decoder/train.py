"""One training: windows of enwik8, next or masked characters, and the monitor beside it."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geomon import Monitor, log_spaced, select
from recipes.encoder_decoder.model import Kind, Size, Transformer
from recipes.enwik8.data import Corpus
from recipes.enwik8.windows import Windows, spread
from recipes.study import begin_training, finish_training

KINDS = {
    "decoder": Kind(causal=True),
    "encoder": Kind(causal=False),
    "decoder_uniform": Kind(causal=True, uniform=True),
}
METRICS = select("anisotropy", "anisotropy_no_sinks", "sink_share", "cosine")

# Devlin et al. (1810.04805); here every chosen character is masked.
_MASKED_SHARE = 0.15
# The paper's least batch of rows; all characters of the probe are measured.
PROBE_CHARACTERS = 4096


@dataclass(frozen=True)
class Training:
    """How every one of the compared models is trained.

    Attributes:
        size: Sizes of the model.
        steps: Number of optimizer updates.
        batch: Number of windows in a batch.
        learning_rate: Highest learning rate.
        warmup: Number of updates until the learning rate is at its highest.
    """

    size: Size
    steps: int
    batch: int
    learning_rate: float = 3e-3
    warmup: int = 50


def train(name: str, training: Training, corpus: Corpus, seed: int, folder: Path) -> None:
    """Train one model and leave its record; nothing is done where the record is complete.

    Args:
        name: Key of `KINDS`.
        training: Sizes and schedule.
        corpus: Text.
        seed: Seed of the weights, windows and masks.
        folder: Folder of the record.
    """
    settings = {"kind": name, "seed": seed, "text": corpus.sha256(), **asdict(training)}
    began = begin_training(folder, settings)
    if began is None:
        return
    size = training.size
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(corpus.vocabulary_size, size, KINDS[name])
    optimizer = adamw(model, training.learning_rate)
    schedule = log_spaced(per_octave=2, first=16)
    held_out = spread(corpus.validation, size.context + 1, PROBE_CHARACTERS // size.context)
    monitor = Monitor(
        model, metrics=METRICS, probe=held_out[:, :-1], schedule=schedule, tokens=PROBE_CHARACTERS,
        batches=1, directory=folder, seed=seed, log=("held_out_loss",),
        extra_layers=("final_norm",),
    )  # fmt: skip
    windows = Windows(corpus.train, size.context + 1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(training.steps):
        places = torch.randint(len(windows), (training.batch,), generator=generator)
        batch = torch.stack([windows[int(place)] for place in places])
        with monitor(step):
            loss = objective(model, batch, generator)
        if schedule(step):
            monitor.log(step, held_out_loss=_held_out_loss(model, held_out))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * _rate(step, training)
        optimizer.step()
    monitor.probe(training.steps)
    monitor.log(training.steps, held_out_loss=_held_out_loss(model, held_out))
    monitor.close()
    finish_training(folder, settings, began)


def objective(model: Transformer, windows: Tensor, generator: torch.Generator) -> Tensor:
    """Compute the mean cross-entropy of the next characters, or of the masked ones, in nats.

    Args:
        model: Model.
        windows: Characters, int64 [sequences, context + 1]; the last one is a target alone.
        generator: Generator of the masks.
    """
    characters, following = windows[:, :-1], windows[:, 1:]
    if model.kind.causal:
        return F.cross_entropy(model(characters).flatten(0, 1), following.flatten())
    chosen = torch.rand(characters.shape, generator=generator) < _MASKED_SHARE
    chosen[0, 0] = True  # a mean over no character would be none
    logits = model(characters.masked_fill(chosen, model.mask_id))
    return F.cross_entropy(logits[chosen], characters[chosen])


@torch.no_grad()
def _held_out_loss(model: Transformer, windows: Tensor) -> Tensor:
    """Compute the objective on held-out windows, with the same masks at every call."""
    return objective(model, windows, torch.Generator().manual_seed(0))


def adamw(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Make an AdamW that decays matrices and leaves biases and norms as they are.

    Args:
        model: Model to be trained.
        learning_rate: Highest learning rate.
    """
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def _rate(step: int, training: Training) -> float:
    """Share of the highest learning rate: a warm-up, then a cosine that ends at a tenth."""
    if step < training.warmup:
        return (step + 1) / training.warmup
    done = (step - training.warmup) / max(1, training.steps - training.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))
