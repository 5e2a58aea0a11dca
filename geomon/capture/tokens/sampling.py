"""Sampling: which rows of hidden states, projections and queries are kept, and how many fit.

A *row* is the vector of one token. Rows are drawn once and are the same at every layer.
"""

import hashlib
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture import apart
from geomon.capture.snapshot import query_places, whole_sequences
from geomon.capture.storage import send
from geomon.note import Note
from geomon.note_kinds import NoteKind

# Query rows per layer from which attention is measured: a mean entropy with a spread of 1 nat then
# has a standard error of 0.03.
ATTENTION_QUERIES = 1024

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip

# Rows that are kept regardless of the memory limit: with fewer, nothing can be measured.
_FEWEST_ROWS = 16

# Bytes per number: shorter types are converted to float32 before they are measured.
_BYTES = 4

# Share of the memory that is planned for rows; the rest is for keys, masks and scores.
_FOR_ROWS = 0.5


class SampledRows(NamedTuple):
    """Copies of sampled rows.

    Attributes:
        values: The rows, [rows, width], float32.
        indices: Flat indices of the rows in `shape`.
        shape: Shape of the tensor that they were copied from, without the width.
        role: "key" for keys from another stack, with padding of their own. Defaults to "".
        last: Rows that may be the last tokens of their sequences, or None if not wanted.
        start: First index of this rank's part of the tensor, by dimension; () for the whole.
        additions: Each row compared with the same token's row one layer before (see
            `kernels.additions`), or None if not compared.
    """

    values: Tensor
    indices: Tensor
    shape: tuple[int, ...]
    role: str = ""
    last: "SampledRows | None" = None
    start: tuple[int, ...] = ()
    additions: Tensor | None = None

    def at(self, places: Tensor, indices: Tensor | None = None) -> "SampledRows":
        """Return the rows at some places, integers on the host; `indices` are theirs if known."""
        if len(places) == len(self.indices):
            return self
        there = send(places, self.values.device)
        additions = None if self.additions is None else apart.select(self.additions, there)
        return self._replace(
            values=apart.select(self.values, there),
            indices=self.indices[places] if indices is None else indices,
            additions=additions,
        )


class Draw(NamedTuple):
    """The rows that are copied of all hidden states of one shape.

    Attributes:
        places: Flat indices of the rows, and behind them of the last tokens, in this rank's part,
            on the device of the hidden states.
        indices: Flat indices of the rows in `shape`, on the host.
        last: Flat indices of rows that may be the last tokens of their sequences, or None if not
            wanted.
        shape: Shape of the hidden states of all ranks, without the width.
        start: First index of this rank's part, by dimension; () for the whole.
    """

    places: Tensor
    indices: Tensor
    last: Tensor | None
    shape: tuple[int, ...]
    start: tuple[int, ...]

    def copy(self, values: Tensor) -> SampledRows:
        """Copy the rows."""
        count, rows = len(self.indices), copy_rows(values, self.places)
        kept = SampledRows(rows[:count], self.indices, self.shape, start=self.start)
        if self.last is None:
            return kept
        return kept._replace(last=kept._replace(values=rows[count:], indices=self.last))


class RowSampler:
    """Samples up to `max_rows` rows with private generators; global random state is not touched.

    Draws depend only on the seed and on sizes, not on earlier draws, so that ranks that see other
    parts of one pass draw the same rows.
    """

    def __init__(self, max_rows: int, seed: int) -> None:
        self._max_rows = max_rows
        self._max_queries = ATTENTION_QUERIES
        self._seed = seed
        self._queries: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def max_rows(self) -> int:
        """Largest number of sampled rows."""
        return self._max_rows

    def limit(self, rows: int) -> None:
        """Lower the largest number of rows and queries; larger limits than now change nothing."""
        self._max_rows = min(self._max_rows, rows)
        self._max_queries = min(self._max_queries, rows)

    def sample_rows(self, shape: torch.Size, valid: Tensor | None) -> Tensor:
        """Sample rows that are not padding."""
        rows = self._permute(math.prod(shape), "rows")
        if valid is not None:
            rows = rows[valid.flatten().cpu()[rows]]
        return rows[: self._max_rows]

    def sample_places(self, count: int) -> Tensor:
        """Sample rows of a weight matrix."""
        return self._permute(count, "places")[: self._max_rows].sort().values

    def number_rows(self, count: int) -> Tensor:
        """Return the place of every row, including padding, in sampling order."""
        order = self._permute(count, "rows")
        return torch.empty_like(order).scatter_(0, order, torch.arange(count, device="cpu"))

    def sample_queries(self, sequences: int, length: int) -> tuple[Tensor, Tensor]:
        """Sample queries of attention, equal for all layers with these sizes.

        Returns the indices of the sampled sequences, [sampled sequences], and the positions of the
        sampled queries in each of them, [sampled sequences, queries].
        """
        if (sequences, length) not in self._queries:
            some = min(sequences, whole_sequences(self._max_rows, length))
            chosen = self._permute(sequences, "sequences")[:some].sort().values
            each = min(length, math.ceil(self._max_queries / some))
            numbers = torch.arange(some, dtype=torch.int64, device="cpu")
            self._queries[sequences, length] = chosen, query_places(numbers, some, each, length)
        return self._queries[sequences, length]

    def _permute(self, count: int, what: str) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(derive_seed(self._seed, what, count))
        return torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")


def derive_seed(*parts: object) -> int:
    """Derive the seed of a private generator.

    Args:
        parts: Everything that the seed depends on, such as the user's seed, the step and the rank.
    """
    text = " ".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


class MemoryLimit:
    """Memory limit for the rows of one window, and for what comes with them.

    The number of sampled rows of hidden states, queries and keys is lowered until they fit into
    half of it. The rest is for what else attention needs (all keys of a sequence, mask rows).

    Args:
        max_mb: Largest memory in megabytes (10^6 bytes), or None for no limit.
        sampler: Sampler of the rows, which is limited.
        layers: Number of layers whose hidden states are kept.
        blocks: Number of blocks whose attention is kept; may be 0.
        share: Number of passes that share the memory.

    Attributes:
        sampler: The argument.
    """

    def __init__(
        self,
        max_mb: float | None,
        sampler: RowSampler,
        *,
        layers: int,
        blocks: int,
        share: int = 1,
    ) -> None:
        self._max_mb = None if max_mb is None else max_mb / share
        self.sampler = sampler
        self._asked = sampler.max_rows
        self._layers = layers
        self._blocks = blocks

    def fit_rows(self, width: int) -> None:
        """Lower the number of sampled rows to fit, now that their width is known.

        Each row costs a hidden state per layer, and per block a query and a key, both as projected
        and as attended.
        """
        if self._max_mb is not None:
            row = _BYTES * width * (self._layers + 4 * self._blocks)
            self.sampler.limit(max(_FEWEST_ROWS, int(_FOR_ROWS * 1e6 * self._max_mb / row)))

    def notes(self) -> list[Note]:
        """Make the note on rows left out for memory, if there are any."""
        if self._max_mb is None or self.sampler.max_rows >= self._asked:
            return []
        text = (
            "at most {rows} rows instead of {asked} are kept: a window may hold {limit:g} MB "
            "(max_capture_mb)"
        )
        numbers = {"rows": self.sampler.max_rows, "asked": self._asked, "limit": self._max_mb}
        return [Note(NoteKind.ROWS_THINNED, text, numbers=numbers)]


@torch.no_grad()
def spread_indices(count: int, most: int) -> Tensor:
    """Return evenly spread indices, including the first and last, in exact integer arithmetic."""
    kept = min(count, most)
    order = torch.arange(kept, dtype=torch.int64, device="cpu")
    return order * (count - 1) // max(kept - 1, 1)


def copy_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Copy rows of a tensor as [rows, width], float32.

    It copies because the model may change its tensors in place, and only rows because a view would
    keep the whole tensor in memory.
    """
    values, rows = values.detach(), send(rows, values.device)
    if values.is_contiguous():  # five times as fast for short rows
        values = values.view(-1, values.shape[-1])
    if values.ndim == 2:
        return apart.convert(apart.select(values, rows))
    return apart.keep(values[torch.unravel_index(rows, values.shape[:-1])].float())


def move_width_last(values: Tensor, block: nn.Module, *, entering: bool) -> Tensor:
    """View the hidden states of a block with the width as their last dimension."""
    return values.movedim(1, -1) if has_width_second(values, block, entering=entering) else values


def has_width_second(values: Tensor, block: nn.Module, *, entering: bool) -> bool:
    """Whether hidden states of a block are feature maps, [batch, width, height, ...].

    They are if a convolution of the block has as many output channels (or, for the block's input,
    input channels) as their second dimension. [batch, length, width] has the width last if another
    parameter of the block has that size.
    """
    if values.ndim < 3:
        return False
    convolutions = [module for module in block.modules() if isinstance(module, _CONVOLUTIONS)]
    channels = {module.out_channels for module in convolutions}
    if entering:
        channels |= {module.in_channels for module in convolutions}
    is_width = values.shape[1] in channels
    return is_width and not (values.ndim == 3 and values.shape[2] in _sizes(block))


def _sizes(block: nn.Module) -> set[int]:
    """Sizes of the dimensions of all parameters except convolution weights."""
    return {
        size
        for module in block.modules()
        if not isinstance(module, _CONVOLUTIONS)
        for parameter in module.parameters(recurse=False)
        for size in parameter.shape
    }
