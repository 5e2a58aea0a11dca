"""Token ids: those of one pass, among all integers that embedding tables were given."""

import zlib
from collections.abc import Sequence

from torch import Tensor, nn

from geomon.capture.tokens.lookups import (
    Found,
    Lookup,
    agreement,
    agrees,
    candidates,
    choose,
    no_positions,
)

Shape = tuple[int, ...]


class TokenIds:
    """The calls of embedding tables of one pass, and which of them were given the token ids.

    Attributes:
        lookups: Calls of tables, in the order seen.
    """

    def __init__(self) -> None:
        self.lookups: list[Lookup] = []
        self.forget_states()

    def forget_states(self) -> None:
        """Forget the hidden states: another pass begins, whose tables were called before it."""
        self._begun: int | None = None  # lookups that were seen before hidden states
        self._found: dict[Shape, Found | None] = {}  # by the shape of hidden states

    def begin(self) -> None:
        """Note that hidden states are there.

        What tables are given from here on (the tokens to be predicted next, say) is not what
        entered the blocks.
        """
        self._begun = len(self.lookups)

    def meet(self, shape: Shape, hidden: Tensor | None) -> None:
        """Find the token ids of hidden states of a shape, where that was not done before.

        Args:
            shape: Shape of the hidden states, without the width.
            hidden: The hidden states, [..., width]; None if some of them are on other ranks.
        """
        if shape not in self._found:
            self._found[shape] = self._choose(shape, hidden)

    def first_fitting(self, shapes: Sequence[Shape]) -> Shape | None:
        """Return the first shape that hidden states of the token ids may have; None for none.

        Integers that look like positions come last, and before them ids that have to be turned.

        Args:
            shapes: Shapes of hidden states, without the width.
        """
        found = [
            (not no_positions(one.lookup), one.layout.turned, shape)
            for shape in shapes
            for one in candidates(self.lookups, shape, streams=False)
        ]
        return min(found, key=lambda fit: fit[:2])[2] if found else None

    def may_have_made(self, hidden: Tensor) -> bool:
        """Whether a table may have given one row for each row of a tensor, of the same width.

        Args:
            hidden: Any tensor.
        """
        shape, width = hidden.shape[:-1], hidden.shape[-1:]
        return any(
            found.lookup.rows is None or found.lookup.rows.shape[1:] == width
            for found in candidates(self.lookups, shape, streams=False)
        )

    def find(self, shape: Shape) -> Found | None:
        """Return the token ids of hidden states of a shape; None if no table was given any.

        Args:
            shape: Shape of the hidden states, without the width.
        """
        return self._found.get(shape) or self._choose(shape, None)

    def turned(self, shape: Shape) -> bool:
        """Whether ids [batch, length] are those of hidden states [length, batch, width].

        Args:
            shape: Shape of the hidden states, without the width.
        """
        found = self._found.get(shape)
        return found is not None and found.layout.turned

    def streams(self, shape: Shape) -> Found | None:
        """Return the token ids of hidden states that have several rows for each; None for others.

        Args:
            shape: Shape of the hidden states, without the width.
        """
        found = self._found.get(shape)
        return found if found is not None and found.layout.streams > 1 else None

    def table(self, shape: Shape) -> nn.Module | None:
        """Return the embedding table of the tokens; None if no table was given token ids.

        Args:
            shape: Shape of the hidden states, without the width.
        """
        found = self.find(shape)
        return None if found is None else found.lookup.table

    def fewer_than(self, shape: Shape) -> bool:
        """Whether tables were given integers of the same sequences, and of none all tokens.

        Args:
            shape: Shape of the hidden states, without the width.
        """
        found = self.find(shape)
        if len(shape) != 2 or (found is not None and no_positions(found.lookup)):
            return False
        given = [x.ids.shape for x in self.lookups]
        return any(len(x) == 2 and x[0] == shape[0] and x[1] < shape[1] for x in given)

    def checksum(self) -> str:
        """Return what tells these integers from others."""
        ids = (lookup.ids.cpu().contiguous() for lookup in self.lookups)
        return "-".join(f"{zlib.crc32(each.numpy().tobytes()):08x}" for each in ids)

    def _choose(self, shape: Shape, hidden: Tensor | None) -> Found | None:
        """Find token ids of a shape, by hidden states where several may be those."""
        before, behind = self.lookups[: self._begun], self.lookups[self._begun :]
        found = [*candidates(before, shape, streams=False)]
        found = found or [*candidates(behind, shape, streams=False)]
        if len(found) == 1:
            return found[0]
        if found:
            return choose(
                [(one, None if hidden is None else agreement(*one, hidden)) for one in found]
            )
        if hidden is None:
            return None
        streams = [*candidates(before, shape, streams=True)]
        strong = [(one, known) for one in streams if agrees(known := agreement(*one, hidden))]
        return choose(strong) if strong else None
