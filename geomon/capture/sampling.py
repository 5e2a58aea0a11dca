"""Which rows are kept: of hidden states and projections, and of the queries of attention."""

import hashlib
import math

import torch
from torch import Tensor, nn

# Query rows per layer from which attention is measured: the standard error of a mean entropy with
# a spread of 1 nat is then 0.03.
QUERIES = 1024

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


class RowDraw:
    """Draws rows with a private generator; no global random state is touched.

    Args:
        budget: Largest number of rows.
        seed: Of the generator.
    """

    def __init__(self, budget: int, seed: int) -> None:
        self._budget = budget
        self._most_queries = QUERIES
        self._generator = torch.Generator().manual_seed(seed)
        self._queries: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def budget(self) -> int:
        """Largest number of rows that is drawn."""
        return self._budget

    def limit(self, rows: int) -> None:
        """Draw no more than so many rows from here on, of queries either."""
        self._budget = min(self._budget, rows)
        self._most_queries = min(self._most_queries, rows)

    def rows(self, shape: torch.Size, valid: Tensor | None) -> Tensor:
        """Flat indices of rows, among those that are no padding.

        Args:
            shape: Of the rows: everything but the width.
            valid: False where there is padding, of the same shape, or None.
        """
        rows = torch.randperm(math.prod(shape), generator=self._generator)
        if valid is not None:
            rows = rows[valid.flatten().cpu()[rows]]
        return rows[: self._budget]

    def queries(self, sequences: int, length: int) -> tuple[Tensor, Tensor]:
        """Sequences, and positions in each; the same for all layers of one shape.

        Under a causal mask the entropy of a row grows with its position: positions are evenly
        spread, and shifted from sequence to sequence so that together they cover all alike.

        Returns:
            [sequences] and [sequences, queries].
        """
        if (sequences, length) not in self._queries:
            some = max(1, min(sequences, self._budget // length))
            chosen = torch.randperm(sequences, generator=self._generator)[:some].sort().values
            each = min(length, math.ceil(self._most_queries / some))
            shift = torch.randperm(some, generator=self._generator)[:, None] + 0.5
            places = (torch.arange(each)[None, :] + shift / some) * (length / each)
            self._queries[sequences, length] = chosen, places.long()
        return self._queries[sequences, length]


def drawing_seed(*of: object) -> int:
    """The seed of a private generator that draws for a seed of the user's, a step, a rank."""
    text = " ".join(map(str, of))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@torch.no_grad()
def select(values: Tensor, rows: Tensor) -> Tensor:
    """A copy of the rows, [rows, width], in float32.

    A copy, because the model may change its tensors in place; of rows alone, because a view would
    keep the whole in memory.

    Args:
        values: [..., width], contiguous or not.
        rows: Flat indices into all but the last dimension.
    """
    places = torch.unravel_index(rows.to(values.device), values.shape[:-1])
    return values.detach()[places].float()


@torch.no_grad()
def at_places(values: Tensor, places: Tensor) -> Tensor:
    """Rows of [sequences (or 1), heads, length, width] at each sequence's own places."""
    values = values.detach().expand(len(places), -1, -1, -1)
    index = places.to(values.device)[:, None, :, None]
    return values.gather(2, index.expand(-1, values.shape[1], -1, values.shape[3]))


def width_last(values: Tensor, block: nn.Module) -> Tensor:
    """A view of what a block gave with the width as its last dimension.

    Feature maps are [batch, width, height, ...] where a convolution of the block has as many
    channels as their second dimension. [batch, length, width] has the width where another
    parameter of the block has it.
    """
    if values.ndim < 3 or not any(isinstance(m, _CONVOLUTIONS) for m in block.modules()):
        return values
    channels = {m.out_channels for m in block.modules() if isinstance(m, _CONVOLUTIONS)}
    if values.shape[1] not in channels:
        return values
    if values.ndim == 3 and values.shape[2] in _widths(block):
        return values
    return values.movedim(1, -1)


def _widths(block: nn.Module) -> set[int]:
    """Sizes of all parameters but those of convolutions."""
    return {
        size
        for module in block.modules()
        if not isinstance(module, _CONVOLUTIONS)
        for parameter in module.parameters(recurse=False)
        for size in parameter.shape
    }
