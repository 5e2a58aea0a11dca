"""A small transformer that differs in its mask and in its attention alone."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# GPT-2's deviation of weights, 0.02 at width 768, for any width.
_DEVIATION = 0.02 * math.sqrt(768)


@dataclass(frozen=True)
class Kind:
    """Which of the compared models one is.

    Attributes:
        causal: Whether a token sees itself and the tokens before it alone, and predicts the next;
            otherwise it sees all tokens, and masked ones are predicted.
        uniform: Whether every visible key has the same weight, whatever its content.
    """

    causal: bool
    uniform: bool = False


@dataclass(frozen=True)
class Size:
    """Sizes of a model.

    Attributes:
        layers: Number of blocks.
        width: Width of the hidden states.
        heads: Number of heads of each attention.
        context: Number of characters in a window.
    """

    layers: int
    width: int
    heads: int
    context: int


class Attention(nn.Module):
    """Multi-head attention, or the mean of the visible values in its place.

    Args:
        size: Sizes of the model.
        kind: Which of the compared models it is.
    """

    def __init__(self, size: Size, kind: Kind) -> None:
        super().__init__()
        self.heads, self.kind = size.heads, kind
        self.query = None if kind.uniform else nn.Linear(size.width, size.width)
        self.key = None if kind.uniform else nn.Linear(size.width, size.width)
        self.value = nn.Linear(size.width, size.width)
        self.out = nn.Linear(size.width, size.width)
        self.bias: Tensor
        self.register_buffer("bias", score_bias(size, kind), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix the values of the visible tokens, [sequences, length, width] to the same."""
        value = self._heads(self.value(hidden))
        if self.query is None or self.key is None:
            # Scores of zero: the softmax gives every visible key the same weight.
            query = key = torch.zeros_like(value)
        else:
            query, key = self._heads(self.query(hidden)), self._heads(self.key(hidden))
        length = hidden.shape[1]
        bias = self.bias[:, :length, :length]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(2, (self.heads, -1)).transpose(1, 2)


def score_bias(size: Size, kind: Kind) -> Tensor:
    """Compute what is added to the scores: the causal mask, and a penalty of the distance.

    The penalty is ALiBi's (Press et al., 2108.12409), with a slope of 2^(-8 h / heads) at head h =
    1, 2, ...: with positions that have to be learned, masked models stay for hundreds of steps at
    the frequencies of characters. Uniform weights have none.

    Args:
        size: Sizes of the model.
        kind: Which of the compared models it is.

    Returns:
        Bias, float32 [heads, context, context]; -inf where a key is not visible.
    """
    places = torch.arange(size.context)
    distance = (places[:, None] - places).abs()
    slopes = 2.0 ** (-8 * torch.arange(1, size.heads + 1) / size.heads)
    bias = -(0.0 if kind.uniform else 1.0) * slopes[:, None, None] * distance
    return bias.masked_fill(places > places[:, None], -math.inf) if kind.causal else bias


class Block(nn.Module):
    """Attention and a perceptron, each with its norm and its residual connection.

    Args:
        size: Sizes of the model.
        kind: Which of the compared models it is.
    """

    def __init__(self, size: Size, kind: Kind) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = Attention(size, kind)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * size.width, size.width),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the next layer, [sequences, length, width] to the same."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Transformer(nn.Module):
    """Blocks between an embedding and its transpose, initialised as GPT-2.

    Args:
        vocabulary: Number of distinct characters; one more id stands for a masked character.
        size: Sizes of the model.
        kind: Which of the compared models it is.
    """

    def __init__(self, vocabulary: int, size: Size, kind: Kind) -> None:
        super().__init__()
        self.mask_id, self.kind = vocabulary, kind
        self.characters = nn.Embedding(vocabulary + 1, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size, kind) for _ in range(size.layers))
        self.last_norm = nn.LayerNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("out.weight", "mlp.2.weight"))
                depth = math.sqrt(2 * size.layers) if into_residual else 1.0
                nn.init.normal_(parameter, std=_DEVIATION / math.sqrt(size.width) / depth)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, characters: Tensor) -> Tensor:
        """Logits of the characters, [sequences, length, vocabulary + 1]."""
        places = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.characters(characters) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last_norm(hidden) @ self.characters.weight.T
