"""Windows of a text, and what a model of characters is asked for in them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.enwik8.text import Ids, windows
from recipes.study.model import Transformer

# Devlin et al. (1810.04805); here every chosen character is masked.
_MASKED_SHARE = 0.15


def next_characters(model: Transformer, windows: Tensor, generator: torch.Generator) -> Tensor:
    """Compute the mean cross-entropy of the characters that follow, in nats.

    Args:
        model: Causal model.
        windows: Characters, int64 [sequences, context + 1].
        generator: Not used; the objectives are called alike.
    """
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def masked_characters(model: Transformer, windows: Tensor, generator: torch.Generator) -> Tensor:
    """Compute the mean cross-entropy of characters that the model does not see, in nats.

    Args:
        model: Model that sees all characters; the last id of its embedding stands for a masked one.
        windows: Characters, int64 [sequences, context + 1]; the last one is not used.
        generator: Source of the masks; its state advances.
    """
    characters = windows[:, :-1]
    chosen = torch.rand(characters.shape, generator=generator) < _MASKED_SHARE
    chosen[0, 0] = True  # a mean over no character would be none
    assert isinstance(model.embedding, nn.Embedding)
    logits = model(characters.masked_fill(chosen, model.embedding.num_embeddings - 1))
    return F.cross_entropy(logits[chosen], characters[chosen])


def random_windows(ids: Ids, length: int, batch: int) -> Callable[[torch.Generator], Tensor]:
    """Make the function that draws a batch of windows."""

    def draw(generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(ids) - length + 1, (batch,), generator=generator)
        return windows(ids, starts.numpy(), length)

    return draw
