"""The faults: what each does to a training, from one step on."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Value of a single weight after an error of memory. In float32 a flipped top bit of the exponent
# gives more than 1e30 and a loss of NaN at once, any other bit a weight below 2.
_STUCK_AT = 64.0
_DISTINCT_BATCHES = 4  # of data that repeats
_STALE = 8  # steps by which a gradient is late

# Paths of a model's blocks, and of the modules in a block that faults touch.
PLACES = {
    "gpt2": {
        "blocks": "blocks", "query": "mixing.query", "key": "mixing.key", "value": "mixing.value",
        "attention": "mixing.out", "mlp": "mlp.2", "norm": "attention_norm",
    },
    "llama": {
        "blocks": "model.layers", "query": "self_attn.q_proj", "key": "self_attn.k_proj",
        "value": "self_attn.v_proj", "attention": "self_attn.o_proj", "mlp": "mlp.down_proj",
        "norm": "input_layernorm", "self": "self_attn", "embedding": "model.embed_tokens",
    },
    "mixtral": {"blocks": "model.layers", "router": "mlp.gate"},
    "vit": {
        "blocks": "vit.layers", "query": "attention.q_proj", "attention": "attention.o_proj",
        "mlp": "mlp.fc2", "norm": "layernorm_before",
    },
    "roformer": {
        "blocks": "roformer.encoder.layer", "query": "attention.self.query",
        "attention": "attention.output.dense", "mlp": "output.dense",
        "norm": "attention.output.LayerNorm", "post_norm": "attention.output",
    },
    "t5": {
        "blocks": "encoder.block decoder.block", "attention": "layer.0.SelfAttention.o",
        "norm": "layer.0.layer_norm",
    },
}  # fmt: skip


@dataclass
class Subject:
    """A training into which a fault can be put: what a fault may replace.

    Attributes:
        model: The model.
        block: Kind of its blocks, a name of `PLACES`.
        optimizer: AdamW.
        draw: Function that draws a batch of windows, int64 [sequences, context + 1], or a batch of
            another kind that the loss takes.
        rate: Function from a step to the learning rate.
        vocabulary: Number of distinct characters.
        labels: Function from windows to what the model is to predict at all places but the last.
    """

    model: nn.Module
    block: str
    optimizer: torch.optim.AdamW
    draw: Callable[[torch.Generator], Any]
    rate: Callable[[int], float]
    vocabulary: int
    labels: Callable[[Tensor], Tensor] = lambda windows: windows[:, 1:]

    def loss(self, windows: Any) -> Tensor:
        """Compute the mean cross-entropy of the next tokens, in nats."""
        labels = self.labels(windows)
        outputs = self.model(windows[:, :-1])
        logits = getattr(outputs, "logits", outputs)[:, : labels.shape[1]]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def blocks(self) -> list[nn.Module]:
        """List the blocks."""
        stacks = PLACES[self.block]["blocks"].split()
        return [block for stack in stacks for block in self.model.get_submodule(stack).children()]

    def part(self, block: int, name: str) -> Any:
        """Return the module of a block that has a name in `PLACES`."""
        return self.blocks()[block].get_submodule(PLACES[self.block][name])


# Lasting part of a fault: a function of the number of updates since it came, called before each
# forward pass from the first one on.
EachStep = Callable[[int], None]
# Puts a fault into a block of a training, with a source of chance; None if it does nothing more.
Change = Callable[[Subject, int, random.Random], EachStep | None]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: Name of the fault.
        kind: "loud" if the loss was expected to jump at once, "silent" if it was expected to absorb
            the fault, "creeping" if the fault grows, "unseen" if nothing was expected and no alert
            was made for it.
        words: Description of the fault, for a table.
        change: Function that puts the fault into a training.
        local: Whether it is in one block.
        block: Kind of blocks that it needs; "" for any.
        held_out: Whether no threshold and no alert was chosen with it.
    """

    name: str
    kind: Literal["loud", "silent", "creeping", "unseen"]
    words: str
    change: Change
    local: bool = False
    block: str = ""
    held_out: bool = False

    @property
    def steps(self) -> int:
        """Number of steps that are watched after the fault."""
        return {"loud": 40, "silent": 80, "creeping": 160, "unseen": 110}[self.kind]

    def plant(self, subject: Subject, block: int, chance: random.Random) -> EachStep:
        """Put the fault into a training."""
        return self.change(subject, block, chance) or nothing


def nothing(since: int) -> None:
    """Do nothing more."""


def scaled(factor: float, *names: str, grows: bool = False, all_blocks: bool = False) -> Change:
    """Multiply weights of a block once, or before every forward pass."""

    def plant(subject: Subject, block: int, chance: random.Random) -> EachStep | None:
        chosen = range(len(subject.blocks())) if all_blocks else [block]

        def scale(since: int) -> None:
            for each in chosen:
                for name in names:
                    subject.part(each, name).weight.data.mul_(factor)

        if grows:
            return scale
        scale(0)
        return None

    return plant


def changed_rate(factor: Callable[[int, float], float], low: float = 0, high: float = 0) -> Change:
    """Multiply the learning rate by a function of the steps since and of a number that is drawn."""

    def plant(subject: Subject, block: int, chance: random.Random) -> EachStep:
        rate, drawn, now = subject.rate, chance.uniform(low, high), [0]
        subject.rate = lambda step: rate(step) * factor(now[0], drawn)
        return lambda since: now.__setitem__(0, since)

    return plant


def _noise_batches(subject: Subject, block: int, chance: random.Random) -> None:
    draw = subject.draw
    subject.draw = lambda generator: torch.randint(
        subject.vocabulary, draw(generator).shape, generator=generator
    )


def _shifted_labels(subject: Subject, block: int, chance: random.Random) -> None:
    subject.labels = lambda windows: windows[:, 2:]


def _moments_lost(subject: Subject, block: int, chance: random.Random) -> None:
    for state in subject.optimizer.state.values():
        state["exp_avg_sq"].zero_()


def _one_weight(subject: Subject, block: int, chance: random.Random) -> None:
    name = chance.choice(["query", "key", "value", "attention", "mlp"])
    weights = subject.part(block, name).weight.data
    weights[tuple(chance.randrange(size) for size in weights.shape)] = _STUCK_AT


def _frozen_block(subject: Subject, block: int, chance: random.Random) -> None:
    subject.blocks()[block].requires_grad_(False)


def _expert_lost(subject: Subject, block: int, chance: random.Random) -> None:
    router = subject.part(block, "router")
    lost = chance.randrange(router.num_experts)

    def without(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        logits = outputs[0].index_fill(-1, torch.tensor([lost]), -torch.inf)
        weights, experts = logits.float().softmax(dim=-1).topk(router.top_k, dim=-1)
        return logits, weights / weights.sum(dim=-1, keepdim=True), experts

    router.register_forward_hook(without)


def _precision_lost(subject: Subject, block: int, chance: random.Random) -> EachStep:
    """Round queries and keys to fewer and fewer bits of the mantissa, from 8 to 1."""
    bits = [8]

    def rounded(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        mantissa, exponent = output.detach().frexp()
        near = torch.ldexp((mantissa * 2 ** bits[0]).round() / 2 ** bits[0], exponent)
        return output + (near - output).detach()

    for name in ("query", "key"):
        subject.part(block, name).register_forward_hook(rounded)
    return lambda since: bits.__setitem__(0, max(1, 8 - since // 20))


def _weight_decay_lost(subject: Subject, block: int, chance: random.Random) -> None:
    for group in subject.optimizer.param_groups:
        group["weight_decay"] = 0.0


def _data_repeats(subject: Subject, block: int, chance: random.Random) -> None:
    draw, kept = subject.draw, deque[Tensor](maxlen=_DISTINCT_BATCHES)

    def repeated(generator: torch.Generator) -> Tensor:
        kept.append(kept[0] if len(kept) == _DISTINCT_BATCHES else draw(generator))
        return kept[-1]

    subject.draw = repeated


def _stale_gradients(subject: Subject, block: int, chance: random.Random) -> None:
    earlier: deque[list[Tensor | None]] = deque()

    def take_earlier(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        earlier.append([None if p.grad is None else p.grad.clone() for p in parameters])
        if len(earlier) > _STALE:
            for parameter, gradient in zip(parameters, earlier.popleft(), strict=True):
                parameter.grad = gradient

    subject.optimizer.register_step_pre_hook(take_earlier)


def _labels_decay(subject: Subject, block: int, chance: random.Random) -> EachStep:
    share, generator = [0.0], torch.Generator().manual_seed(chance.randrange(2**31))

    def labels(windows: Tensor) -> Tensor:
        right = windows[:, 1:]
        wrong = torch.rand(right.shape, generator=generator) < share[0]
        others = torch.randint(subject.vocabulary, right.shape, generator=generator)
        return torch.where(wrong, others, right)

    subject.labels = labels
    return lambda since: share.__setitem__(0, min(1.0, 0.005 * since))


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("learning_rate_x10", "loud", "learning rate × 10",
              changed_rate(lambda since, drawn: 10)),
        Fault("noise_batches", "loud", "batches of noise", _noise_batches),
        Fault("shifted_labels", "loud", "labels shifted by one", _shifted_labels),
        Fault("moments_lost", "loud", "Adam's second moments set to 0", _moments_lost),
        Fault("mlp_scaled", "silent", "output of one block's MLP × 6", scaled(6.0, "mlp"),
              local=True),
        Fault("one_weight", "silent", "one weight set to 64", _one_weight, local=True),
        Fault("scores_scaled", "silent", "queries and keys of one block × 3",
              scaled(3.0, "query", "key"), local=True),
        Fault("gain_zero", "silent", "gains of one norm set to 0", scaled(0.0, "norm"),
              local=True),
        Fault("frozen_block", "silent", "one block no longer trains", _frozen_block, local=True),
        Fault("expert_lost", "silent", "an expert is no longer used", _expert_lost, local=True,
              block="mixtral"),
        Fault("attention_dead", "silent", "output of one block's attention set to 0",
              scaled(0.0, "attention"), local=True),
        Fault("values_scaled", "silent", "values of one block × 5", scaled(5.0, "value"),
              local=True, held_out=True),
        Fault("learning_rate_high", "creeping", "learning rate × 1.5 to 4",
              changed_rate(lambda since, drawn: drawn, 1.5, 4.0)),
        Fault("learning_rate_grows", "creeping", "learning rate grows by 1.5 % a step",
              changed_rate(lambda since, drawn: 1.015**since)),
        Fault("scores_grow", "creeping", "all queries grow by 1 % a step",
              scaled(1.01, "query", grows=True, all_blocks=True)),
        Fault("entropy_collapses", "creeping", "one block's scores grow by 1.6 % a step",
              scaled(1.008, "query", "key", grows=True), local=True),
        Fault("precision_lost", "creeping", "one block's queries and keys lose a bit in 20 steps",
              _precision_lost, local=True),
        Fault("weight_decay_lost", "creeping", "no weight decay", _weight_decay_lost),
        Fault("data_repeats", "creeping", "the same four batches again and again", _data_repeats),
        Fault("stale_gradients", "creeping", "gradients come 8 steps late", _stale_gradients),
        Fault("labels_decay", "creeping", "0.5 % more of the labels are random at each step",
              _labels_decay, held_out=True),
    )
}  # fmt: skip
