"""The one training loop, its monitors, and the folder of its records."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from geomon import Metric, Monitor, select
from geomon.record import Record
from recipes.enwik8.optimizer import adamw
from recipes.enwik8.text import InputError
from recipes.study.files import write_json

_FINISHED = "finished.json"


def without_margins(*names: str) -> dict[str, Metric]:
    """Select metrics of geomon without their margins: in an experiment the seeds give them."""
    found = select(*names).items()
    return {
        name: replace(each, has_margin=False) for name, each in found if isinstance(each, Metric)
    }


@dataclass(frozen=True)
class Watch:
    """A monitor's model, metrics and inputs.

    Attributes:
        model: The model that is trained, or a view of it that shares its weights.
        probe: Inputs that every reading looks at.
        metrics: Metrics by name.
        rows: Number of rows that a reading measures.
        extra_layers: Layers other than the blocks, as for `Monitor`.
    """

    model: nn.Module
    probe: Any
    metrics: Mapping[str, Callable[..., Any]]
    rows: int
    extra_layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Training:
    """One training: a model, its loss, and the monitors that read it.

    Attributes:
        model: The model.
        loss: Draws a batch by a generator, and computes its loss.
        steps: Largest number of optimizer updates; 0 to read an untrained model.
        watched: Monitors, by the name of a folder inside the training's folder; "" for itself.
        schedule: Whether a step is read; step 0 and the last one are read whatever it says.
        learning_rate: Highest learning rate.
        rate: Share of it at a step.
        weight_decay: Weight decay of matrices.
        decay_of_vectors: Weight decay of biases and norms.
        betas: Betas of AdamW.
        held_out: Measures held-out values, which the readings record: losses, accuracies.
        is_solved: Whether the training ends before its last step, from what `held_out` measured.
    """

    model: nn.Module
    loss: Callable[[torch.Generator], Tensor]
    steps: int
    watched: Mapping[str, Watch]
    schedule: Callable[[int], bool]
    learning_rate: float
    rate: Callable[[int], float] = lambda step: 1.0
    weight_decay: float = 0.1
    decay_of_vectors: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    held_out: Callable[[], Mapping[str, Tensor]] = field(default=dict)
    is_solved: Callable[[Mapping[str, Tensor]], bool] = lambda values: False


def fit(training: Training, folder: Path, seed: int) -> None:
    """Train a model, and record what is watched."""
    optimizer = adamw(
        training.model, training.learning_rate, decay=training.weight_decay,
        of_vectors=training.decay_of_vectors, betas=training.betas,
    )  # fmt: skip
    monitors = [
        Monitor(
            watch.model, metrics=watch.metrics, probe=watch.probe, tokens=watch.rows, splits=1,
            directory=folder / name, seed=seed, extra_layers=watch.extra_layers, alerts=(),
        )
        for name, watch in training.watched.items()
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for step in range(training.steps + 1):
        ends = step == training.steps
        if ends or step == 0 or training.schedule(step):
            with torch.no_grad():
                values = training.held_out()
            for monitor in monitors:
                monitor.log(step, **values)
                monitor.probe(step)
            ends = ends or training.is_solved(values)
        if ends:
            break
        rate = training.learning_rate * training.rate(step)
        update(training.model, optimizer, training.loss(generator), rate)
    for monitor in monitors:
        monitor.close()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> Tensor:
    """Make one update of the weights, with gradients of a norm of at most 1.

    Returns:
        Norm of the gradients before they were clipped.
    """
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return norm


def warm_up(updates: int) -> Callable[[int], float]:
    """Make the schedule of a learning rate that stays after a warm-up."""
    return lambda step: min(1.0, (step + 1) / updates)


def begin_training(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Prepare a folder for one training: delete the records of one that was broken off.

    Returns:
        Whether there is something to do: False if the folder holds the complete training.

    Raises:
        InputError: The folder holds a complete training with other settings, or another process
            trains there.
    """
    path = folder / _FINISHED
    if path.is_file():
        earlier = json.loads(path.read_text())["settings"]
        now = json.loads(json.dumps(settings))
        if earlier == now:
            return False
        differing = sorted(n for n in {**earlier, **now} if earlier.get(n) != now.get(n))
        raise InputError(
            f"{folder} holds a training with another {', '.join(differing)}: choose another folder "
            "by --out"
        )
    for place in sorted({path.parent for path in folder.glob("**/readings*.jsonl")}):
        try:
            record = Record(place)  # one process at a time
        except ValueError as error:
            raise InputError(str(error)) from error
        for path in (*place.glob("readings*.jsonl"), *place.glob("arrays*/step_*.npz")):
            path.unlink()
        record.close()
    return True


def finish_training(folder: Path, settings: Mapping[str, Any]) -> None:
    """Note that the training in a folder is complete."""
    write_json(folder / _FINISHED, {"settings": settings})


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a complete training."""
    return (folder / _FINISHED).is_file()
