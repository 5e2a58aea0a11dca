"""Sixteen faults that no alert was made for, and changes of a training that are no fault."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.faults.kinds import (
    PLACES,
    Change,
    EachStep,
    Fault,
    Subject,
    changed_rate,
    nothing,
    scaled,
)
from recipes.faults.trainings import CONTEXT, HEADS, LAYERS, SEQUENCES, WARM_UP, Task

# Step before which a fault or a change comes, and steps that are made with a fault.
FAULT_STEP, WATCHED_STEPS = 360, 110
_SHIFT = 7  # places
_BURST, _SHUFFLED = 5, 30  # steps
_BETWEEN = 20  # steps from one validation to the next


# -- faults in one block ---------------------------------------------------------------------------


def _half_residual(subject: Subject, block: int, chance: random.Random) -> None:
    """Halve what goes past the attention, if a norm follows their sum, or past the whole block."""
    if "post_norm" in PLACES[subject.block]:
        subject.part(block, "post_norm").register_forward_pre_hook(
            lambda module, inputs: (inputs[0], 0.5 * inputs[1])
        )
        return

    def halved(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] - 0.5 * inputs[0], *output[1:])
        return output - 0.5 * inputs[0]

    subject.blocks()[block].register_forward_hook(halved)


def _moved_queries(subject: Subject, block: int, chance: random.Random) -> None:
    def earlier(module: nn.Module, inputs: Any, rows: Tensor) -> Tensor:
        return torch.cat([rows[:, :1].expand(-1, _SHIFT, -1), rows[:, :-_SHIFT]], dim=1)

    subject.part(block, "query").register_forward_hook(earlier)


def _head_lost(subject: Subject, block: int, chance: random.Random) -> None:
    head = chance.randrange(HEADS)

    def without(module: nn.Module, inputs: Any) -> Any:
        heads = inputs[0].unflatten(-1, (HEADS, -1)).clone()
        heads[..., head, :] = 0.0
        return (heads.flatten(-2),)

    subject.part(block, "attention").register_forward_pre_hook(without)


def _gradient_burst(subject: Subject, block: int, chance: random.Random) -> EachStep:
    handles = [
        parameter.register_hook(lambda gradient: 30.0 * gradient)
        for parameter in subject.blocks()[block].parameters()
    ]

    def end(since: int) -> None:
        if since == _BURST:
            for handle in handles:
                handle.remove()

    return end


def turned(rows: Tensor, width: int) -> Tensor:
    """Turn keys of a Llama, [..., heads * width], as rotary positions one place on do."""
    half = width // 2
    angles = 10_000.0 ** -(torch.arange(half) / half)
    first, second = rows.unflatten(-1, (-1, 2, half)).unbind(-2)
    cos, sin = angles.cos(), angles.sin()
    both = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-2)
    return both.flatten(-3)


def _keys_turned(subject: Subject, block: int, chance: random.Random) -> None:
    width = subject.part(block, "self").head_dim
    subject.part(block, "key").register_forward_hook(
        lambda module, inputs, rows: turned(rows, width)
    )


def _mask_leaks(subject: Subject, block: int, chance: random.Random) -> None:
    subject.part(block, "self").is_causal = False


def _rounded(subject: Subject, block: int, chance: random.Random) -> EachStep:
    def round_weights(since: int) -> None:
        for parameter in subject.blocks()[block].parameters():
            parameter.data.copy_(parameter.data.bfloat16())

    return round_weights


def _dropout(subject: Subject, block: int, chance: random.Random) -> None:
    subject.part(block, "mlp").register_forward_hook(
        lambda module, inputs, rows: F.dropout(rows, 0.5, module.training)
    )


# -- faults everywhere -----------------------------------------------------------------------------


def _same_batch(subject: Subject, block: int, chance: random.Random) -> None:
    kept: list[Any] = []
    draw = subject.draw

    def again(generator: torch.Generator) -> Any:
        kept.append(draw(generator))
        return kept[0]

    subject.draw = again


def _frozen_embedding(subject: Subject, block: int, chance: random.Random) -> None:
    place = PLACES[subject.block]["embedding"]
    subject.model.get_submodule(place).requires_grad_(False)


def _state_lost(subject: Subject, block: int, chance: random.Random) -> None:
    subject.optimizer.state.clear()


def _loss_once(subject: Subject, block: int, chance: random.Random) -> EachStep:
    return lambda since: setattr(subject, "factor", 1_000.0 if since == 0 else 1.0)


def _labels_shuffled(subject: Subject, block: int, chance: random.Random) -> EachStep:
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    right = subject.labels

    def shuffled(labels: Tensor) -> Tensor:
        flat = labels.flatten()
        return flat[torch.randperm(len(flat), generator=generator)].view_as(labels)

    subject.labels = shuffled
    return lambda since: setattr(subject, "labels", shuffled if since < _SHUFFLED else right)


def _decay(subject: Subject, block: int, chance: random.Random) -> None:
    for group in subject.optimizer.param_groups:
        group["weight_decay"] *= 100.0


def _local(name: str, words: str, change: Change) -> Fault:
    return Fault(name, "unseen", words, change, local=True, held_out=True)


def _global(name: str, words: str, change: Change) -> Fault:
    return Fault(name, "unseen", words, change, held_out=True)


UNSEEN = {
    fault.name: fault
    for fault in (
        _local("norm_gain", "gains of one norm × 3", scaled(3.0, "norm")),
        _local("half_residual", "residual of one block × 0.5", _half_residual),
        _local("moved_queries", "queries of one block from 7 places before", _moved_queries),
        _local("head_lost", "output of one head set to 0", _head_lost),
        _local("gradient_burst", "gradients of one block × 30 for 5 steps", _gradient_burst),
        _local("keys_turned", "rotary positions of one block's keys off by one", _keys_turned),
        _local("mask_leaks", "one block sees later tokens", _mask_leaks),
        _local("rounded", "one block rounded to bfloat16 at each step", _rounded),
        _local("dropout", "dropout of 0.5 in one block", _dropout),
        _global("same_batch", "the same batch again and again", _same_batch),
        _global("frozen_embedding", "the embedding no longer trains", _frozen_embedding),
        _global("state_lost", "Adam's state reset", _state_lost),
        _global("rate_x10", "learning rate × 10", changed_rate(lambda since, drawn: 10)),
        _global("loss_once", "loss × 1,000 once", _loss_once),
        _global("labels_shuffled", "labels shuffled for 30 steps", _labels_shuffled),
        _global("weight_decay", "weight decay × 100", _decay),
    )
}


# -- changes that are no fault ---------------------------------------------------------------------


def _batch_doubled(subject: Task) -> None:
    subject.draw = partial(subject.make, 2 * SEQUENCES, CONTEXT)


def _longer(subject: Task) -> None:
    subject.draw = partial(subject.make, SEQUENCES, 3 * CONTEXT // 2)


def _rate_restarted(subject: Task) -> None:
    rate = subject.rate
    subject.rate = lambda step: rate(step - FAULT_STEP + WARM_UP)


def _validation(subject: Task) -> EachStep:
    def validate(since: int) -> None:
        if since % _BETWEEN == 0:
            subject.held_out_loss()

    return validate


def _times_rate(factor: Callable[[int], float]) -> Callable[[Task], EachStep | None]:
    def plant(subject: Task) -> EachStep | None:
        change = changed_rate(lambda since, drawn: factor(since))
        return change(subject, 0, random.Random(0))

    return plant


# Name in words, and what it does.
HEALTHY: dict[str, Callable[[Task], EachStep | None]] = {
    "plain": lambda subject: None,
    "warm-up restarted": _times_rate(lambda since: min(1.0, (since + 1) / WARM_UP)),
    "rate dropped": _times_rate(lambda since: 0.1),
    "schedule restarted": _rate_restarted,
    "batch doubled": _batch_doubled,
    "longer sequences": _longer,
    "validation in between": _validation,
}

# Runs of all trainings: 41 with a fault, which is everywhere in 9 of them, and 24 healthy ones.
_FAULTS_OF = {
    "llama_text": "norm_gain half_residual moved_queries head_lost gradient_burst keys_turned "
                  "mask_leaks rounded dropout same_batch weight_decay",
    "vit": "norm_gain half_residual moved_queries head_lost gradient_burst dropout "
           "labels_shuffled rate_x10",
    "llama_copy": "half_residual moved_queries head_lost gradient_burst keys_turned mask_leaks "
                  "dropout frozen_embedding loss_once",
    "t5": "norm_gain half_residual head_lost gradient_burst state_lost labels_shuffled",
    "bert": "norm_gain half_residual moved_queries head_lost gradient_burst dropout same_batch",
}  # fmt: skip
_HEALTHY_OF = {
    "warm-up restarted": "llama_copy t5 bert",
    "rate dropped": "llama_text vit llama_copy t5",
    "schedule restarted": "llama_text vit bert",
    "batch doubled": "llama_text vit llama_copy bert",
    "longer sequences": "llama_text t5 bert",
    "validation in between": "llama_copy t5",
}


@dataclass(frozen=True)
class Cell:
    """A run that goes on from the common first steps of a training.

    Attributes:
        training: Name of the training.
        what: Name of the fault or of the change.
    """

    training: str
    what: str

    @property
    def fault(self) -> Fault | None:
        """The fault; None for a healthy run."""
        return UNSEEN.get(self.what)

    def chance(self, of: str) -> random.Random:
        """Make a source of chance of the fault."""
        return random.Random(f"{self.training} {self.what} {of}")

    @property
    def folder(self) -> Path:
        """Folder of the run inside the folder of all runs."""
        return Path(self.training) / self.what

    @property
    def place(self) -> tuple[str, int]:
        """Stack and depth of the block."""
        if self.training != "t5":
            return "", self.block + 1
        return ("encoder", "decoder")[self.block // (LAYERS // 2)], self.block % (LAYERS // 2) + 1

    @property
    def block(self) -> int:
        """Block that has the fault, if it is in one."""
        return self.chance("where").randrange(LAYERS)

    def plant(self, task: Task) -> EachStep:
        """Put the fault or the change into the training."""
        if self.fault is not None:
            return self.fault.plant(task, self.block, self.chance("how"))
        return HEALTHY[self.what](task) or nothing


CELLS = [
    *(Cell(training, "plain") for training in _FAULTS_OF),
    *(Cell(training, what) for what, names in _HEALTHY_OF.items() for training in names.split()),
    *(Cell(training, what) for training, names in _FAULTS_OF.items() for what in names.split()),
]
