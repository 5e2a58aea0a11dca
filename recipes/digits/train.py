"""One training, with the monitor beside it."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from geomon import Monitor, log_spaced, select
from recipes.digits.data import Images, load
from recipes.digits.model import CONVOLUTIONAL, TRANSFORMER, Classifier, OneVectorPerImage, build
from recipes.study import begin_training, finish_training

# Folder of the readings with one row for each image, inside that of a convolutional network.
PER_IMAGE = "per_image"
ACCURACY = "held_out_accuracy"

_OF_ROWS = ("cosine", "cosine_centred", "drift_norm")
_OF_ATTENTION = ("qk_cosine", "attention_entropy")
_ROWS = 4096
_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Settings:
    """Everything that all trainings of the experiment share.

    Attributes:
        steps: Number of optimizer updates.
        batch: Number of images in a batch.
        layers: Number of blocks.
        width: Width of the hidden states.
        heads: Number of heads.
    """

    steps: int
    batch: int
    layers: int
    width: int
    heads: int


def train(kind: str, settings: Settings, seed: int, folder: Path) -> None:
    """Train a network and leave its record; nothing is done where the record is complete.

    Args:
        kind: "transformer", "mixer" or "convolutional".
        settings: What all trainings share.
        seed: Seed of the split, the weights and the batches.
        folder: Folder of the record.
    """
    of_this = {**asdict(settings), "kind": kind, "seed": seed}
    began = begin_training(folder, of_this)
    if began is None:
        return
    images, held_out = load(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(kind, layers=settings.layers, width=settings.width, heads=settings.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    schedule = log_spaced(per_octave=1, first=4)
    metrics = select(*_OF_ROWS, *(_OF_ATTENTION if kind == TRANSFORMER else ()))
    monitors = [
        Monitor(
            watched, metrics=metrics, probe=held_out.pixels, schedule=schedule, tokens=rows,
            batches=1, directory=where, seed=seed, log=("loss", ACCURACY),
        )
        for watched, rows, where in _watched(kind, model, folder, len(held_out.digits))
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for step in range(settings.steps):
        chosen = torch.randint(len(images.digits), (settings.batch,), generator=generator)
        for monitor in monitors:
            with monitor(step):
                pass  # the probe is read before the update of the step
        loss = F.cross_entropy(model(images.pixels[chosen]), images.digits[chosen])
        if schedule(step):
            _log(monitors, step, loss, _accuracy(model, held_out))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for monitor in monitors:
        monitor.probe(settings.steps)
    _log(monitors, settings.steps, None, _accuracy(model, held_out))
    for monitor in monitors:
        monitor.close()
    finish_training(folder, of_this, began)


def _watched(
    kind: str, model: Classifier, folder: Path, images: int
) -> list[tuple[nn.Module, int, Path]]:
    """The models to watch, each with the rows of a reading and the folder of its record."""
    watched: list[tuple[nn.Module, int, Path]] = [(model, _ROWS, folder)]
    if kind == CONVOLUTIONAL:
        watched.append((OneVectorPerImage(model), images, folder / PER_IMAGE))
    return watched


def _log(monitors: list[Monitor], step: int, loss: Tensor | None, accuracy: Tensor) -> None:
    for monitor in monitors:
        monitor.log(step, **{"loss": loss, ACCURACY: accuracy})


@torch.no_grad()
def _accuracy(model: nn.Module, images: Images) -> Tensor:
    """Share of the images that are recognised, in eval mode."""
    model.eval()
    hits = model(images.pixels).argmax(dim=1) == images.digits
    model.train()
    return hits.float().mean()
