"""A small decoder that answers questions, trained by Lightning."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from recipes.grokking.data import LENGTH, vocabulary_size

# Names under which the accuracies are logged, and stand in every reading.
TRAINING_ACCURACY, HELD_OUT_ACCURACY = "training_accuracy", "held_out_accuracy"

_LEARNING_RATE = 1e-3
_WARMUP = 10  # updates until the learning rate is reached, as in Power et al. (2201.02177)


class Block(nn.Module):
    """Causal attention and a perceptron, each on what its norm makes of the residual stream.

    Args:
        width: Width of the hidden states.
        heads: Number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the next layer, [sequences, length, width] to the same."""
        normed = self.attention_norm(hidden)
        query, key, value = (
            projection(normed).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


class Answerer(L.LightningModule):
    """Pre-norm decoder that reads its answer off the last token, with AdamW.

    Args:
        modulus: Number that the remainders are of.
        width: Width of the hidden states.
        heads: Number of heads.
        layers: Number of blocks.
        weight_decay: Weight decay of every parameter.
    """

    def __init__(
        self, modulus: int, *, width: int, heads: int, layers: int, weight_decay: float
    ) -> None:
        super().__init__()
        self.weight_decay = weight_decay
        self.tokens = nn.Embedding(vocabulary_size(modulus), width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, modulus)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the answers, [questions, modulus]."""
        hidden = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden[:, -1]))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the answers, in nats."""
        tokens, answers = batch
        return F.cross_entropy(self(tokens), answers)

    def validation_step(
        self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Accuracy on the pairs of the training, and on those that are held out."""
        tokens, answers = batch
        hits = (self(tokens).argmax(dim=1) == answers).float()
        name = (TRAINING_ACCURACY, HELD_OUT_ACCURACY)[dataloader_idx]
        self.log(name, hits.mean(), batch_size=len(hits), add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        """AdamW as in Ruppik et al. (2506.01034)."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=self.weight_decay
        )
        rate = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARMUP))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}
