"""Choose the rows of hidden states to keep in a pass, also if ranks share the hidden states."""

import torch
from torch import Tensor

from geomon.capture.shards import (
    ShardingError,
    Slice,
    TensorPlace,
    is_sharded,
    sharded_along,
    slice_of,
    whole,
)
from geomon.capture.storage import Shape, send
from geomon.capture.tap import Stream
from geomon.capture.tokens.pass_tokens import PassTokens
from geomon.capture.tokens.sampling import Draw, MemoryLimit


class SequenceSplit:
    """Dimension along which ranks share hidden states that are plain tensors.

    Tensor parallelism may split them along the sequence without saying so: token ids or attention
    that are a multiple as long show it.

    Args:
        place: Place of this rank among those that share the weights of the blocks.
        tokens: The tokens of the pass.
    """

    def __init__(self, place: TensorPlace, tokens: PassTokens) -> None:
        self._place, self._tokens = place, tokens
        self._along: int | None = None
        self._is_known = place.shards == 1

    def part_of(self, part: Shape) -> Slice:
        """Locate hidden states of a shape, without the width, in the hidden states of all ranks."""
        if not self._is_known:
            self._look_at_ids(part)
        if self._along is None or part == self._tokens.shape:
            return whole(part)
        return sharded_along(self._along, part, self._place)

    def possible_shapes(self, part: Shape) -> list[Shape]:
        """List the shapes that hidden states may have over all ranks."""
        return [part] if self._is_known else [part, *self._longer(part)]

    def settle(self, part: Shape, shape: Shape) -> bool:
        """Accept the shape over all ranks that attention has shown; returns whether it is new."""
        self._is_known = True
        if shape == part:
            return False
        self._along = next(dim for dim in range(len(part)) if shape[dim] != part[dim])
        return True

    def _look_at_ids(self, part: Shape) -> None:
        longer = self._longer(part)
        shape = self._tokens.ids.first_fitting([part, *longer])
        self._is_known = shape is not None
        self._along = None if shape in (None, part) else longer.index(shape)

    def _longer(self, part: Shape) -> list[Shape]:
        return [sharded_along(dim, part, self._place).shape for dim in range(len(part))]


class RowSelection:
    """Chooses the rows of hidden states to keep in a pass; equal shapes get equal rows.

    Args:
        memory: Memory limit of the rows, with their sampler.
        tokens: The tokens of the pass.
        split: How ranks share hidden states.

    Attributes:
        memory: Memory limit of the rows, with their sampler.
        split: How ranks share hidden states.
        dtype: Data type of the hidden states in the model.
        why_not_read: Why hidden states of some layer were not read; "" if all were.
    """

    def __init__(self, memory: MemoryLimit, tokens: PassTokens, split: SequenceSplit) -> None:
        self.memory, self.split = memory, split
        self.dtype = torch.float32
        self.why_not_read = ""
        self._tokens = tokens
        self._draws: dict[tuple[Slice, torch.device], Draw] = {}

    def part_of(self, hidden: Tensor, rows: Tensor) -> Slice | None:
        """Locate this rank's hidden states in the whole tensor; None if they cannot be read."""
        if type(hidden) is not Tensor and is_sharded(hidden):
            try:
                return slice_of(hidden)
            except ShardingError as error:
                self.why_not_read = f"{error}"
                return None
        return self.split.part_of(tuple(rows.shape[:-1]))

    def draw(self, part: Slice, rows: Tensor, stream: Stream, *, with_last: bool) -> Draw:
        """Return which rows to copy of this part of hidden states."""
        found = self._draws.get((part, rows.device))
        if found is not None:
            return found
        tokens = self._tokens
        tokens.ids.meet(part.shape, lambda: stream.rows_of(rows) if part.is_whole else {})
        if not tokens.shape:
            self.memory.fit_rows(rows.shape[-1])
            tokens.begin(part.shape)
            self.dtype = rows.dtype
        indices, last = tokens.rows(part.shape), None
        own, places = part.inside(indices)
        if with_last and (ends := tokens.last(part.shape)) is not None:
            own_ends, more = part.inside(ends)
            last, places = ends[own_ends], torch.cat([places, more])
        start = () if part.is_whole else part.start
        found = Draw(send(places, rows.device), indices[own], last, part.shape, start)
        self._draws[part, rows.device] = found
        return found

    def begin_anew(self, why: str) -> None:
        """Choose rows anew, because the hidden states have another shape; earlier ones are lost."""
        self._draws.clear()
        self.why_not_read = why
