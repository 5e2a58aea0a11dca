"""The trainings into which faults are put: settings drawn by number, a model, and its parts."""

import os
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig

from recipes.enwik8.text import Text, carried_text, characters
from recipes.enwik8.train import configuration

# Bytes of the standard library's source that are a text of its own.
_SOURCE_BYTES = 4_000_000
# Experts of a block, of which each character takes two.
_EXPERTS = 4


class Sizes(NamedTuple):
    """Sizes of a model.

    Attributes:
        width: Width of the hidden states.
        heads: Heads of each attention.
        context: Characters in a window.
        layers: Numbers of blocks, of which each training draws one.
    """

    width: int
    heads: int
    context: int
    layers: tuple[int, ...]


SIZES = {
    "narrow": Sizes(64, 4, 48, (3, 4)),
    "wide": Sizes(96, 4, 48, (4, 5)),
    # No threshold was chosen with it.
    "other": Sizes(80, 5, 40, (2, 6)),
}


@dataclass(frozen=True)
class Settings:
    """All that makes a healthy training what it is.

    Attributes:
        size: Name of the sizes.
        number: Number of the training among those of its size, by which the rest is drawn.
        block: Kind of the blocks: "gpt2", "llama" or "mixtral".
        text: Name of the text.
        layers: Number of blocks.
        batch: Windows in a batch.
        learning_rate: Highest learning rate.
    """

    size: str
    number: int
    block: str
    text: str
    layers: int
    batch: int
    learning_rate: float

    @property
    def name(self) -> str:
        """Name of the folder of the training."""
        return f"{self.size}_{self.number:03d}"


def draw_settings(size: str, number: int, *, block: str = "", text: str = "") -> Settings:
    """Draw the settings of a training."""
    chance = random.Random(f"{size} {number}")
    return Settings(
        size,
        number,
        block or ("gpt2", "llama", "llama", "gpt2")[number % 4],
        text or ("docs" if number % 8 in (3, 6) else "given"),
        chance.choice(SIZES[size].layers),
        chance.choice((8, 12, 16)),
        round(1e-3 * 3 ** chance.random(), 6),
    )


def load_text(name: str, given: Text) -> Text:
    """Load a text."""
    if name == "docs":
        return characters(carried_text(), "Python's reference and docstrings")
    if name == "code":
        return characters(_source_text(), "source of Python's standard library")
    return given


def _source_text() -> bytes:
    """Join modules of the standard library, in an order that does not depend on the file system."""
    library = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    for name in sorted(os.listdir(library)):
        path = library / name
        if path.suffix == ".py":
            parts.append(path.read_bytes())
        if sum(map(len, parts)) > _SOURCE_BYTES:
            break
    return b"\n\n".join(parts)


def build_model(settings: Settings, vocabulary_size: int) -> nn.Module:
    """Build the model of a training; torch's generator has its seed."""
    sizes = SIZES[settings.size]
    config: PretrainedConfig
    if settings.block == "mixtral":
        config = MixtralConfig(
            vocab_size=vocabulary_size, max_position_embeddings=sizes.context,
            hidden_size=sizes.width, intermediate_size=sizes.width, num_local_experts=_EXPERTS,
            num_hidden_layers=settings.layers, num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.heads, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    else:
        config = configuration(
            settings.block, vocabulary_size,
            {**sizes._asdict(), "layers": settings.layers, "dropout": 0.0},
        )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


class Parts:
    """Weights of a decoder by what they do, whichever library's names they have.

    Args:
        model: A decoder of `build_model`.
    """

    def __init__(self, model: nn.Module) -> None:
        decoder: Any = model
        self.blocks: list[Any] = list(
            decoder.transformer.h if hasattr(decoder, "transformer") else decoder.model.layers
        )
        self.heads: int = decoder.config.num_attention_heads
        self.width: int = decoder.config.hidden_size

    def query(self, block: int) -> Tensor:
        """Weights of the queries of a block, [width, outputs], a view."""
        return self._projection(block, 0)

    def key(self, block: int) -> Tensor:
        """Weights of the keys of a block, [width, outputs], a view."""
        return self._projection(block, 1)

    def value(self, block: int) -> Tensor:
        """Weights of the values of a block, [width, outputs], a view."""
        return self._projection(block, 2)

    def head(self, weights: Tensor, head: int) -> Tensor:
        """Select the columns of one head, a view."""
        width = self.width // self.heads
        return weights[:, head * width : (head + 1) * width]

    def attention_output(self, block: int) -> nn.Parameter:
        """Weights that take what a block's heads read into the residual stream."""
        each = self.blocks[block]
        found = each.attn.c_proj if hasattr(each, "attn") else each.self_attn.o_proj
        return found.weight

    def mlp_output(self, block: int) -> nn.Parameter:
        """Weights that take a block's perceptron into the residual stream; of all experts."""
        mlp = self.blocks[block].mlp
        if hasattr(mlp, "experts"):
            return mlp.experts.down_proj
        return (mlp.c_proj if hasattr(mlp, "c_proj") else mlp.down_proj).weight

    def attention_norm(self, block: int) -> nn.Parameter:
        """Gains of the norm before a block's attention."""
        each = self.blocks[block]
        return (each.ln_1 if hasattr(each, "ln_1") else each.input_layernorm).weight

    def router(self, block: int) -> nn.Module:
        """The module that gives characters to experts."""
        return self.blocks[block].mlp.gate

    def projections(self, block: int) -> list[nn.Module]:
        """The modules that make queries and keys of a block: one in GPT-2, with the values."""
        each = self.blocks[block]
        if hasattr(each, "attn"):
            return [each.attn.c_attn]
        return [each.self_attn.q_proj, each.self_attn.k_proj]

    def _projection(self, block: int, which: int) -> Tensor:
        each = self.blocks[block]
        if hasattr(each, "attn"):
            whole: Tensor = each.attn.c_attn.weight.data
            return whole[:, which * self.width : (which + 1) * self.width]
        attention = each.self_attn
        found: Tensor = (attention.q_proj, attention.k_proj, attention.v_proj)[which].weight.data
        return found.T


@dataclass
class Subject:
    """A training into which a fault can be put: what a fault may replace.

    Attributes:
        model: The model.
        optimizer: AdamW.
        draw: Function that draws a batch of windows, int64 [sequences, context + 1].
        loss: Function of the model and of windows.
        learning_rate: Highest learning rate.
        rate: Function from a step to the share of it.
    """

    model: nn.Module
    optimizer: torch.optim.AdamW
    draw: Callable[[torch.Generator], Tensor]
    loss: Callable[[nn.Module, Tensor], Tensor]
    learning_rate: float
    rate: Callable[[int], float]


def next_character_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Compute the mean cross-entropy of the characters that follow, in nats.

    Args:
        model: A decoder.
        windows: Characters, int64 [sequences, context + 1].
    """
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
