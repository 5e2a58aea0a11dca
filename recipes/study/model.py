"""One transformer for all experiments: what they compare is one of its options."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """Sizes of a transformer, and in what it differs from others.

    Attributes:
        layers: Number of blocks.
        width: Width of the hidden states.
        heads: Number of heads of each attention.
        context: Largest number of places in a sequence.
        causal: Whether a place sees itself and the places before it alone.
        mixing: Way to mix the places: attention by content, the mean of the visible places
            ("uniform"), or a perceptron over all places.
        alibi: Whether scores fall with the distance (Press et al., 2108.12409).
        norm: Whether the norms stand before the sublayers, as in GPT-2, or after them, as in BERT.
        deviation: Standard deviation of the initial weights; None for torch's own initialisation.
    """

    layers: int
    width: int
    heads: int
    context: int
    causal: bool = True
    mixing: Literal["attention", "uniform", "perceptron"] = "attention"
    alibi: bool = False
    norm: Literal["pre", "post"] = "pre"
    deviation: float | None = 0.02

    def new_norm(self) -> nn.LayerNorm:
        """Make a norm: BERT's hardly adds to the variance, GPT-2's by torch's default."""
        return nn.LayerNorm(self.width, eps=1e-12 if self.norm == "post" else 1e-5)


class Attention(nn.Module):
    """Multi-head attention, or the mean of the visible values in its place.

    Args:
        architecture: Sizes and options.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        width, uniform = architecture.width, architecture.mixing == "uniform"
        self.heads = architecture.heads
        self.query = None if uniform else nn.Linear(width, width)
        self.key = None if uniform else nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.causal = architecture.causal
        self.bias: Tensor | None
        self.register_buffer(
            "bias", score_bias(architecture) if architecture.alibi else None, persistent=False
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix the values of the visible places, [sequences, length, width] to the same."""
        value = self._of_heads(self.value(hidden))
        if self.query is None or self.key is None:
            # Scores of zero: the softmax gives every visible key the same weight.
            query = key = torch.zeros_like(value)
        else:
            query, key = self._of_heads(self.query(hidden)), self._of_heads(self.key(hidden))
        length = hidden.shape[1]
        bias = None if self.bias is None else self.bias[:, :length, :length]
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=self.causal and bias is None
        )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _of_heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(2, (self.heads, -1)).transpose(1, 2)


def score_bias(architecture: Architecture) -> Tensor:
    """Compute what is added to the scores: a penalty of the distance, and the causal mask.

    The penalty is ALiBi's, with a slope of 2^(-8 h / heads) at head h = 1, 2, ...: with positions
    that have to be learned, masked models stay for hundreds of steps at the frequencies of
    characters.

    Returns:
        Bias, float32 [heads, context, context]; -inf for keys that are not visible.
    """
    places = torch.arange(architecture.context)
    distance = (places[:, None] - places).abs()
    slopes = 2.0 ** (-8 * torch.arange(1, architecture.heads + 1) / architecture.heads)
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(places > places[:, None], -math.inf) if architecture.causal else bias


class PlacePerceptron(nn.Module):
    """Perceptron over the places in place of the width.

    Args:
        places: Number of places.
    """

    def __init__(self, places: int) -> None:
        super().__init__()
        self.mlp = perceptron(places, 4 * places)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix the places by fixed weights, [sequences, places, width] to the same."""
        return self.mlp(hidden.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    """A layer that mixes the places and a perceptron, each with a norm and a residual connection.

    Args:
        architecture: Sizes and options.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.norm = architecture.norm
        self.attention_norm, self.mlp_norm = architecture.new_norm(), architecture.new_norm()
        if architecture.mixing == "perceptron":
            self.mixing: nn.Module = PlacePerceptron(architecture.context)
        else:
            self.mixing = Attention(architecture)
        self.mlp = perceptron(architecture.width, 4 * architecture.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the next layer, [sequences, length, width] to the same."""
        if self.norm == "post":
            hidden = self.attention_norm(hidden + self.mixing(hidden))
            return self.mlp_norm(hidden + self.mlp(hidden))
        hidden = hidden + self.mixing(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Transformer(nn.Module):
    """Blocks between an embedding with learned positions and logits at every place.

    Args:
        embedding: Embedding of the inputs; an `nn.Embedding` for token ids.
        architecture: Sizes and options.
        outputs: Number of logits; None for the transpose of the embedding.
    """

    def __init__(
        self, embedding: nn.Module, architecture: Architecture, outputs: int | None = None
    ) -> None:
        super().__init__()
        width, post = architecture.width, architecture.norm == "post"
        self.architecture = architecture
        self.embedding = embedding
        self.positions = nn.Embedding(architecture.context, width)
        # BERT normalises the sum of its embeddings, pre-norm models what leaves the last block.
        self.first_norm = architecture.new_norm() if post else nn.Identity()
        self.blocks = nn.ModuleList(Block(architecture) for _ in range(architecture.layers))
        self.last_norm = nn.Identity() if post else architecture.new_norm()
        self.head = None if outputs is None else nn.Linear(width, outputs)
        if architecture.deviation is not None:
            self._initialise(architecture.deviation)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits at every place, [sequences, length, outputs]."""
        hidden = self.embedding(inputs)
        hidden = self.first_norm(hidden + self.positions.weight[: hidden.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.last_norm(hidden)
        return self.head(hidden) if self.head is not None else hidden @ self.embedding.weight.T

    def _initialise(self, deviation: float) -> None:
        """Draw weights as BERT; as GPT-2, whose last maps into the residual stream are smaller."""
        depth = 1.0 if self.architecture.norm == "post" else math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                into_residual = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=deviation / (depth if into_residual else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def perceptron(width: int, inner: int) -> nn.Sequential:
    """Make two linear maps with a GELU between them."""
    return nn.Sequential(
        nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width)
    )
