"""One Transformer block with the norms after its sublayers, as in BERT, or before them."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["post_norm", "pre_norm"]
KINDS: tuple[Kind, ...] = ("post_norm", "pre_norm")

# Standard deviation of BERT's initial weights and embeddings; its biases begin at 0.
_DEVIATION = 0.02


class Block(nn.Module):
    """Attention of every token to all tokens, and a perceptron, initialised as in BERT.

    Args:
        width: Width of the hidden states.
        heads: Number of heads.
        kind: Whether the norms stand after the sublayers or before them.
    """

    def __init__(self, width: int, heads: int, kind: Kind) -> None:
        super().__init__()
        self.heads, self.kind = heads, kind
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.perceptron_norm = nn.LayerNorm(width, eps=1e-12)
        initialise(self)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the output of the block, [sequences, length, width] to the same."""
        if self.kind == "post_norm":
            hidden = self.attention_norm(hidden + self._attend(hidden))
            return self.perceptron_norm(hidden + self._transform(hidden))
        hidden = hidden + self._attend(self.attention_norm(hidden))
        return hidden + self._transform(self.perceptron_norm(hidden))

    def scores(self, hidden: Tensor, head: int) -> Tensor:
        """Compute the scores of one head before the softmax, [sequences, queries, keys].

        Args:
            hidden: Input of the block, [sequences, length, width].
            head: Number of the head.
        """
        entering = hidden if self.kind == "post_norm" else self.attention_norm(hidden)
        query, key = self._of_heads(self.query(entering)), self._of_heads(self.key(entering))
        scores: Tensor = query[:, head] @ key[:, head].transpose(1, 2) / query.shape[3] ** 0.5
        return scores

    def _attend(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            self._of_heads(layer(hidden)) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _of_heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def _transform(self, hidden: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.widen(hidden)))


class Stack(nn.Module):
    """A stack of one block, the model that is watched.

    Args:
        width: Width of the hidden states.
        heads: Number of heads.
        kind: Whether the norms stand after the sublayers or before them.
    """

    def __init__(self, width: int, heads: int, kind: Kind) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, heads, kind)])

    @property
    def block(self) -> Block:
        """The block."""
        block = self.blocks[0]
        assert isinstance(block, Block)
        return block

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the output of the block, [sequences, length, width] to the same."""
        return self.block(hidden)


class MaskedCharacters(nn.Module):
    """The stack between an embedding of characters and its transpose, to be trained.

    Args:
        vocabulary: Number of distinct characters; one more id stands for a masked one.
        context: Number of characters in a window.
        width: Width of the hidden states.
        heads: Number of heads.
        kind: Whether the norms stand after the sublayers or before them.
    """

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, kind: Kind) -> None:
        super().__init__()
        self.mask_id = vocabulary
        self.characters = nn.Embedding(vocabulary + 1, width)
        self.positions = nn.Embedding(context, width)
        self.stack = Stack(width, heads, kind)
        # BERT normalises the sum of its embeddings, pre-norm models what leaves the last block.
        self.first_norm = nn.LayerNorm(width) if kind == "post_norm" else nn.Identity()
        self.last_norm = nn.Identity() if kind == "post_norm" else nn.LayerNorm(width)
        initialise(self)

    def forward(self, characters: Tensor) -> Tensor:
        """Compute logits of the characters, [sequences, length, vocabulary + 1]."""
        hidden = self.characters(characters) + self.positions.weight[: characters.shape[1]]
        hidden = self.last_norm(self.stack(self.first_norm(hidden)))
        return hidden @ self.characters.weight.T


def initialise(module: nn.Module) -> None:
    """Draw weights and embeddings from Normal(0, 0.02^2), and set biases to 0, as in BERT.

    Args:
        module: Module of linear maps, embeddings and norms.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=_DEVIATION)
        if isinstance(part, nn.Linear):
            nn.init.zeros_(part.bias)


def draw_inputs(sequences: int, length: int, table: Tensor, generator: torch.Generator) -> Tensor:
    """Draw tokens uniformly, and return their embeddings, [sequences, length, width].

    Args:
        sequences: Number of sequences.
        length: Number of tokens in each.
        table: Embedding table, [tokens, width].
        generator: Source of the random numbers; its state advances.
    """
    return table[torch.randint(len(table), (sequences, length), generator=generator)]


def draw_table(tokens: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw an embedding table as it is initialised in BERT, [tokens, width].

    Args:
        tokens: Number of tokens.
        width: Width of the hidden states.
        generator: Source of the random numbers; its state advances.
    """
    return _DEVIATION * torch.randn(tokens, width, generator=generator)


def draw_direction(width: int, generator: torch.Generator) -> Tensor:
    """Draw a direction uniformly: a vector of norm 1, [width].

    Args:
        width: Width of the hidden states.
        generator: Source of the random numbers; its state advances.
    """
    drawn = torch.randn(width, generator=generator)
    return drawn / drawn.norm()
