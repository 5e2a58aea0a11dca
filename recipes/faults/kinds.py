"""The faults: what each does to a training, from one step on."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.faults.subject import Parts, Subject

# Value of a single weight after an error of memory. In float32 a flipped top bit of the exponent
# gives more than 1e30 and a loss of NaN at once, any other bit a weight below 2.
_STUCK_AT = 64.0
_DISTINCT_BATCHES = 4  # of data that repeats
_STALE = 8  # steps by which a gradient is late


class Planted(NamedTuple):
    """Where a fault is, and what it goes on doing.

    Attributes:
        block: Number of the block, from 0; None where it is everywhere.
        each_step: Function of the number of updates since the fault, called before each forward
            pass from the first one on.
    """

    block: int | None = None
    each_step: Callable[[int], None] = lambda since: None


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: Name of the fault.
        kind: "loud" where the loss was expected to jump at once, "silent" where it was expected to
            absorb the fault, "creeping" where the fault grows.
        words: What it does, for a table.
        plant: Function that puts the fault into a training.
        block: Kind of blocks that it needs; "" for any.
        held_out: Whether no threshold and no alert was chosen with it.
    """

    name: str
    kind: Literal["loud", "silent", "creeping"]
    words: str
    plant: Callable[[Subject, random.Random], Planted]
    block: str = ""
    held_out: bool = False

    @property
    def steps(self) -> int:
        """Number of steps that are watched after the fault."""
        return {"loud": 40, "silent": 80, "creeping": 160}[self.kind]


def _scaled(
    factor: float, *matrices: Callable[[Parts, int], Tensor], each_step: bool = False
) -> Callable[[Subject, random.Random], Planted]:
    """Multiply matrices of some block once, or before every forward pass."""

    def plant(subject: Subject, chance: random.Random) -> Planted:
        parts, block = _some_block(subject, chance)

        def scale(since: int) -> None:
            for matrix in matrices:
                matrix(parts, block).data.mul_(factor)

        if each_step:
            return Planted(block, scale)
        scale(0)
        return Planted(block)

    return plant


def _queries_grow(subject: Subject, chance: random.Random) -> Planted:
    parts = Parts(subject.model)

    def grow(since: int) -> None:
        for block in range(len(parts.blocks)):
            parts.query(block).mul_(1.01)

    return Planted(each_step=grow)


def _rate_times(low: float, high: float) -> Callable[[Subject, random.Random], Planted]:
    """Multiply the learning rate by a factor that is drawn."""

    def plant(subject: Subject, chance: random.Random) -> Planted:
        rate, factor = subject.rate, chance.uniform(low, high)
        subject.rate = lambda step: rate(step) * factor
        return Planted()

    return plant


def _noise_batches(subject: Subject, chance: random.Random) -> Planted:
    draw, symbols = subject.draw, subject.model.get_input_embeddings().num_embeddings  # type: ignore[operator]

    def noise(generator: torch.Generator) -> Tensor:
        return torch.randint(symbols, draw(generator).shape, generator=generator)

    subject.draw = noise
    return Planted()


def _shifted_labels(subject: Subject, chance: random.Random) -> Planted:
    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 2:].flatten())

    subject.loss = loss
    return Planted()


def _moments_lost(subject: Subject, chance: random.Random) -> Planted:
    for state in subject.optimizer.state.values():
        state["exp_avg_sq"].zero_()
    return Planted()


def _one_weight(subject: Subject, chance: random.Random) -> Planted:
    parts, block = _some_block(subject, chance)
    matrices = [
        parts.query(block), parts.key(block), parts.value(block),
        parts.attention_output(block).data, parts.mlp_output(block).data,
    ]  # fmt: skip
    weights = chance.choice(matrices)
    weights[tuple(chance.randrange(size) for size in weights.shape)] = _STUCK_AT
    return Planted(block)


def _frozen_block(subject: Subject, chance: random.Random) -> Planted:
    parts, block = _some_block(subject, chance)
    for parameter in parts.blocks[block].parameters():
        parameter.requires_grad_(False)
    return Planted(block)


def _expert_lost(subject: Subject, chance: random.Random) -> Planted:
    parts, block = _some_block(subject, chance)
    router: Any = parts.router(block)
    lost = chance.randrange(router.num_experts)

    def without(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        logits = outputs[0].index_fill(-1, torch.tensor([lost]), -torch.inf)
        weights, experts = logits.float().softmax(dim=-1).topk(router.top_k, dim=-1)
        return logits, weights / weights.sum(dim=-1, keepdim=True), experts

    router.register_forward_hook(without)
    return Planted(block)


def _learning_rate_grows(subject: Subject, chance: random.Random) -> Planted:
    rate, now = subject.rate, [0]
    subject.rate = lambda step: rate(step) * 1.015 ** now[0]
    return Planted(each_step=lambda since: now.__setitem__(0, since))


def _precision_lost(subject: Subject, chance: random.Random) -> Planted:
    """Round queries and keys to fewer and fewer bits of the mantissa, from 8 to 1."""
    parts, block = _some_block(subject, chance)
    bits = [8]

    def rounded(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        mantissa, exponent = output.detach().frexp()
        near = torch.ldexp((mantissa * 2 ** bits[0]).round() / 2 ** bits[0], exponent)
        if output.shape[-1] == 3 * parts.width:  # queries, keys and values
            near = torch.cat([near[..., : 2 * parts.width], output[..., 2 * parts.width :]], dim=-1)
        return output + (near - output).detach()

    for module in parts.projections(block):
        module.register_forward_hook(rounded)
    return Planted(block, lambda since: bits.__setitem__(0, max(1, 8 - since // 20)))


def _weight_decay_lost(subject: Subject, chance: random.Random) -> Planted:
    for group in subject.optimizer.param_groups:
        group["weight_decay"] = 0.0
    return Planted()


def _data_repeats(subject: Subject, chance: random.Random) -> Planted:
    draw, turn = subject.draw, [0]
    kept: list[Tensor] = []

    def repeated(generator: torch.Generator) -> Tensor:
        if len(kept) < _DISTINCT_BATCHES:
            kept.append(draw(generator))
            return kept[-1]
        turn[0] += 1
        return kept[turn[0] % _DISTINCT_BATCHES]

    subject.draw = repeated
    return Planted()


def _stale_gradients(subject: Subject, chance: random.Random) -> Planted:
    earlier: deque[list[Tensor | None]] = deque()

    def take_earlier(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        earlier.append([None if p.grad is None else p.grad.clone() for p in parameters])
        if len(earlier) > _STALE:
            for parameter, gradient in zip(parameters, earlier.popleft(), strict=True):
                parameter.grad = gradient

    subject.optimizer.register_step_pre_hook(take_earlier)
    return Planted()


def _labels_decay(subject: Subject, chance: random.Random) -> Planted:
    share = [0.0]
    generator = torch.Generator().manual_seed(chance.randrange(2**31))

    def loss(model: nn.Module, windows: Tensor) -> Tensor:
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        labels = windows[:, 1:]
        wrong = torch.rand(labels.shape, generator=generator) < share[0]
        random_labels = torch.randint(logits.shape[-1], labels.shape, generator=generator)
        return F.cross_entropy(
            logits.flatten(0, 1), torch.where(wrong, random_labels, labels).flatten()
        )

    subject.loss = loss
    return Planted(each_step=lambda since: share.__setitem__(0, min(1.0, 0.005 * since)))


def _some_block(subject: Subject, chance: random.Random) -> tuple[Parts, int]:
    parts = Parts(subject.model)
    return parts, chance.randrange(len(parts.blocks))


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("learning_rate_x10", "loud", "learning rate × 10", _rate_times(10, 10)),
        Fault("noise_batches", "loud", "batches of noise", _noise_batches),
        Fault("shifted_labels", "loud", "labels shifted by one", _shifted_labels),
        Fault("moments_lost", "loud", "Adam's second moments set to 0", _moments_lost),
        Fault("mlp_scaled", "silent", "output of one block's MLP × 6",
              _scaled(6.0, Parts.mlp_output)),
        Fault("one_weight", "silent", "one weight set to 64", _one_weight),
        Fault("scores_scaled", "silent", "queries and keys of one block × 3",
              _scaled(3.0, Parts.query, Parts.key)),
        Fault("gain_zero", "silent", "gains of one norm set to 0",
              _scaled(0.0, Parts.attention_norm)),
        Fault("frozen_block", "silent", "one block no longer trains", _frozen_block),
        Fault("expert_lost", "silent", "an expert is no longer used", _expert_lost, "mixtral"),
        Fault("learning_rate_high", "creeping", "learning rate × 1.5 to 4",
              _rate_times(1.5, 4.0)),
        Fault("learning_rate_grows", "creeping", "learning rate grows by 1.5 % a step",
              _learning_rate_grows),
        Fault("scores_grow", "creeping", "all queries grow by 1 % a step", _queries_grow),
        Fault("entropy_collapses", "creeping", "one block's scores grow by 1.6 % a step",
              _scaled(1.008, Parts.query, Parts.key, each_step=True)),
        Fault("precision_lost", "creeping", "one block's queries and keys lose a bit in 20 steps",
              _precision_lost),
        Fault("weight_decay_lost", "creeping", "no weight decay", _weight_decay_lost),
        Fault("data_repeats", "creeping", "the same four batches again and again", _data_repeats),
        Fault("attention_dead", "silent", "output of one block's attention set to 0",
              _scaled(0.0, Parts.attention_output)),
        Fault("stale_gradients", "creeping", "gradients come 8 steps late", _stale_gradients),
        Fault("values_scaled", "silent", "values of one block × 5",
              _scaled(5.0, Parts.value), held_out=True),
        Fault("labels_decay", "creeping", "0.5 % more of the labels are random at each step",
              _labels_decay, held_out=True),
    )
}  # fmt: skip
