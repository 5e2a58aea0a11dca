"""Rules that say which keys a query sees if a model passes functions instead of a mask tensor.

A mask of all pairs would not fit into memory, so fused attention is told how far a query sees and
where packed sequences end, or gets functions of two places (flex attention). A rule evaluates
either for the sampled queries, and for one block of queries at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geomon.capture import private
from geomon.capture.storage import send

# (scores, sequence indices, query positions [sequences, queries]) -> changed scores, [sequences,
# heads, queries, keys].
Change = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PlaceRule:
    """How far a query sees, and where packed sequences end.

    Attributes:
        keys: Number of keys.
        device: Device of the queries.
        left: Number of keys before its own place that a query sees; None for all.
        right: Number of keys after its own place that a query sees; None for all.
        offset: Place of the first query among the keys, so that the last query meets the last key.
        ends: Cumulative ends of the packed queries and keys, [sequences + 1] each, starting at 0,
            or None if nothing is packed.
    """

    keys: int
    device: torch.device
    left: int | None = None
    right: int | None = None
    offset: int = 0
    ends: tuple[Tensor, Tensor] | None = None

    @property
    def changed(self) -> None:
        """The function that changes scaled scores before the softmax: none."""

    def visible(self, sequences: Tensor, places: Tensor) -> Tensor:
        """Return which keys some queries see: bool, [sequences, heads (or 1), queries, keys].

        Args:
            sequences: Indices of their sequences, [sequences].
            places: Position of each query in its sequence, [sequences, queries].
        """
        order = torch.arange(self.keys, dtype=torch.int64, device=self.device)
        asking = send(places, self.device)[..., None] + self.offset
        seen = torch.ones(*places.shape, self.keys, dtype=torch.bool, device=self.device)
        if self.ends is not None:
            queries, keys = (ends.to(self.device, torch.int64) for ends in self.ends)
            places = send(places, self.device)
            number = torch.searchsorted(queries, places, right=True) - 1
            inside = (number >= 0) & (number < len(queries) - 1)
            number = number.clamp(0, len(queries) - 2)
            facing = torch.searchsorted(keys, order, right=True) - 1
            seen = (facing == number[..., None]) & inside[..., None]
            # The last query of a sequence aligns with its last key.
            asking = (places + keys[number + 1] - queries[number + 1])[..., None]
        if self.left is not None:
            seen &= order >= asking - self.left
        if self.right is not None:
            seen &= order <= asking + self.right
        return seen[:, None]

    def reach(self, rows: slice) -> tuple[int, int]:
        """Return the first key that any of these query positions may see, and one past the last.

        Packed queries may see all keys.

        Args:
            rows: Positions of the queries.
        """
        if self.ends is not None:
            return 0, self.keys
        # The last query meets the last key, so no first key is behind it.
        first = 0 if self.left is None else max(0, rows.start + self.offset - self.left)
        last = self.keys if self.right is None else rows.stop + self.offset + self.right
        return first, max(min(last, self.keys), first + 1)

    def begins(self, length: int) -> Tensor:
        """Return which tokens of a packed row do not see the token before them: bool, [length].

        Args:
            length: Number of tokens in the row.
        """
        starts = torch.zeros(length, dtype=torch.bool, device=self.device)
        if self.ends is not None:
            ends = self.ends[0].to(self.device, torch.int64)
            # Buffers of ends are padded with the last end.
            starts[ends[ends < length]] = True
        starts[:1] = True
        return starts


@dataclass(frozen=True)
class FlexRule:
    """The functions of two places that flex attention is given.

    Attributes:
        keys: Number of keys.
        device: Device of the queries.
        mask: Function of (sequence, head, query, key) that returns whether the key is visible.
        heads: Number of heads if the mask depends on the head, else 1.
        score: Function of (score, sequence, head, query, key) that returns the changed score, or
            None if scores stay as they are.
    """

    keys: int
    device: torch.device
    mask: Callable[..., Any]
    heads: int
    score: Callable[..., Any] | None = None

    def visible(self, sequences: Tensor, places: Tensor) -> Tensor:
        """Return which keys some queries see: bool, [sequences, heads (or 1), queries, keys].

        Args:
            sequences: Indices of their sequences, [sequences].
            places: Position of each query in its sequence, [sequences, queries].
        """
        return self._at_all(self.mask, (), sequences, places, self.heads)

    @property
    def changed(self) -> Change | None:
        """The function that changes scaled scores before the softmax, or None."""
        score = self.score
        if score is None:
            return None

        def change(scores: Tensor, sequences: Tensor, places: Tensor) -> Tensor:
            return self._at_all(score, (scores,), sequences, places, scores.shape[1])

        return change

    def reach(self, rows: slice) -> tuple[int, int]:
        """Return all keys, because a function does not say which range it hides.

        Args:
            rows: Positions of the queries.
        """
        return 0, self.keys

    def begins(self, length: int) -> Tensor:
        """Return which tokens of a packed row do not see the token before them: bool, [length].

        Args:
            length: Number of tokens in the row.
        """
        starts = torch.ones(length, dtype=torch.bool, device=self.device)
        if length > 1:
            mask, first = self.mask, torch.zeros((), dtype=torch.int64, device=self.device)
            places = torch.arange(1, length, dtype=torch.int64, device=self.device)
            with _indexable():
                seen = torch.vmap(lambda place: mask(first, first, place, place - 1))(places)
            starts[1:] = ~seen
        return starts

    def _at_all(
        self,
        function: Callable[..., Any],
        lead: tuple[Tensor, ...],
        sequences: Tensor,
        places: Tensor,
        heads: int,
    ) -> Tensor:
        """Evaluate a function of places for some queries, with every head and every key."""
        at = function
        # Innermost dimension first: keys, queries with their places, heads, sequences.
        of_lead = (0,) * len(lead)
        for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
            at = torch.vmap(at, in_dims=(*of_lead, *dims))
        at = torch.vmap(at, in_dims=(*of_lead, 0, None, 0, None))
        order = (
            send(sequences, self.device),
            torch.arange(heads, dtype=torch.int64, device=self.device),
            send(places, self.device),
            torch.arange(self.keys, dtype=torch.int64, device=self.device),
        )
        with _indexable():
            found: Tensor = at(*lead, *order)
        return found


AttentionRule = PlaceRule | FlexRule  # which keys a query sees, and how its scores are changed


@contextmanager
def _indexable() -> Iterator[None]:
    """Let functions of places index tensors by them, as flex attention does."""
    try:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex as Mode
    except ImportError:  # evaluate the functions as they are
        yield
        return
    with private.with_functions(), Mode():
        yield
