"""One training on few texts or on plenty, with the held-out loss beside the geometry."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from geomon import Monitor, every, select
from recipes.encoder_decoder.model import Kind, Size, Transformer
from recipes.encoder_decoder.train import adamw
from recipes.enwik8.data import Corpus
from recipes.enwik8.windows import Windows, spread
from recipes.study import begin_training, finish_training

# Trained on the first characters of the text, over and over; or on all of it, as the control.
TEXTS = ("few", "plenty")

# Sequences of the probe: twice the width, from which a rank at their last tokens means anything.
_SEQUENCES = 128
_ROWS = 2048
# Windows on which each loss is measured.
_LOSS_WINDOWS = 64


def local_dimension(local_dimensions: Tensor) -> Tensor:
    """Mean over tokens of TwoNN on the 64 nearest rows of each.

    It has the values of geomon's own metric without the interval over other sequences, which is
    half of the cost of a reading; here the seeds give one.
    """
    return local_dimensions.mean()


METRICS = {
    **select("effective_rank", "effective_rank_last", "twonn"),
    "local_dimension": local_dimension,
}


@dataclass(frozen=True)
class Training:
    """How the models are trained, on few texts and on plenty alike.

    Attributes:
        size: Sizes of the model.
        steps: Number of optimizer updates.
        batch: Number of windows in a batch.
        few: Number of characters of the few texts.
        distance: Number of steps between two readings.
        learning_rate: Learning rate after the warm-up. It stays: a schedule would turn curves too.
        warmup: Number of updates until the learning rate is at its highest.
    """

    size: Size
    steps: int
    batch: int
    few: int
    distance: int
    learning_rate: float = 2e-3
    warmup: int = 50


def train(name: str, training: Training, corpus: Corpus, seed: int, folder: Path) -> None:
    """Train one model and leave its record; nothing is done where the record is complete.

    Args:
        name: One of `TEXTS`.
        training: Sizes and schedule.
        corpus: Text.
        seed: Seed of the weights and windows.
        folder: Folder of the record.
    """
    settings = {"texts": name, "seed": seed, "corpus": corpus.sha256(), **asdict(training)}
    began = begin_training(folder, settings)
    if began is None:
        return
    length = training.size.context + 1
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(corpus.vocabulary_size, training.size, Kind(causal=True))
    optimizer = adamw(model, training.learning_rate)
    text = corpus.train[: training.few] if name == "few" else corpus.train
    probe = spread(corpus.validation, training.size.context, _SEQUENCES)
    trained, held_out = (spread(ids, length, _LOSS_WINDOWS) for ids in (text, corpus.validation))
    schedule = every(training.distance)
    monitor = Monitor(
        model, metrics=METRICS, probe=probe, schedule=schedule, tokens=_ROWS,
        batches=1, directory=folder, seed=seed, log=("train_loss", "held_out_loss"),
    )  # fmt: skip
    windows = Windows(text, length)
    generator = torch.Generator().manual_seed(seed)
    for step in range(training.steps):
        places = torch.randint(len(windows), (training.batch,), generator=generator)
        batch = torch.stack([windows[int(place)] for place in places])
        with monitor(step):
            loss = _loss(model, batch)
        if schedule(step):
            monitor.log(step, **_losses(model, trained, held_out))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * min(1.0, (step + 1) / training.warmup)
        optimizer.step()
    monitor.probe(training.steps)
    monitor.log(training.steps, **_losses(model, trained, held_out))
    monitor.close()
    finish_training(folder, settings, began)


def _loss(model: Transformer, windows: Tensor) -> Tensor:
    """Mean cross-entropy of the next characters, in nats."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def _losses(model: Transformer, trained: Tensor, held_out: Tensor) -> dict[str, Tensor]:
    """Loss on windows of the text that is trained on, and on held-out ones, by name."""
    return {"train_loss": _loss(model, trained), "held_out_loss": _loss(model, held_out)}
