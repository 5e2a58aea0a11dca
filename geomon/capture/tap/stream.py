"""Follow tensors outside of blocks: sums that complete a block, and outputs of embedding tables."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from geomon.capture.storage import followed_part, storage_of
from geomon.capture.tap.columns import Projection, find_rows
from geomon.capture.tap.operators import SUMS, Op, tensors_in
from geomon.capture.tap.provenance import Provenance

# Marks of a tensor that was made from the last block's input or output ("given", "returned"):
# whether the input is in it, number by number (scaled, normalised, through dropout ...), and
# whether something that was made from the output was added to that.
_IN_PLACE = {"input", "sum"}


class Stream:
    """Follows tensors outside of blocks.

    It follows the last block's input and output, to distinguish a sum that the model makes outside
    of the blocks from a new stream. It also follows the outputs of embedding tables, to identify
    the tokens that enter a block.
    """

    def __init__(self) -> None:
        self._origins: dict[int, frozenset[str]] = {}
        self._embedded = Provenance()
        self._tables: dict[int, Projection] = {}  # output of each call of a table
        # Called with the weight, the integers and the result of a lookup operator.
        self.on_lookup: Callable[[Tensor, Tensor, Tensor], None] | None = None
        self._alive: dict[int, StorageWeakRef] = {}  # storages made from these outputs

    def take_table(self, number: int, output: Tensor) -> None:
        """Follow the output of an embedding table."""
        root = self._embedded.begin_at(output)
        if root is not None:
            self._tables[number] = root
            self._keep_track([output])

    def rows_of(self, hidden: Tensor) -> dict[int, Tensor]:
        """Trace hidden states to the outputs of embedding tables.

        Args:
            hidden: Hidden states, [..., width].

        Returns:
            By number of the call, the row of its output behind each row of hidden states, or -1.
            Calls that did not contribute are left out.
        """
        made = self._embedded.made_of(hidden)
        place = storage_of(hidden)
        # Blocks are not followed, so memory freed since may hold their results.
        if made is None or place not in self._alive or self._alive[place].expired():
            return {}
        return {
            number: torch.from_numpy(find_rows(made, hidden, root))
            for number, root in self._tables.items()
            if root in made.inputs
        }

    def _keep_track(self, values: Iterable[Tensor]) -> None:
        for tensor in values:
            place = storage_of(tensor)
            if place is not None:
                self._alive[place] = StorageWeakRef(followed_part(tensor).untyped_storage())

    def start(self, given: Tensor | None, returned: Tensor) -> None:
        """Follow a block's input, if known, and its output, and nothing else.

        Args:
            given: The hidden states that entered the block.
            returned: The hidden states that it returned.
        """
        places = {"given": given, "returned": returned}
        known = {name: storage_of(x) for name, x in places.items() if x is not None}
        self._origins = {
            place: frozenset(["given", "input"] if name == "given" else [name])
            for name, place in known.items()
            if place is not None
        }

    def origins(self, values: Tensor) -> frozenset[str]:
        """Return what is known of a tensor: "given" or "returned" if it was made from these."""
        return self._origins.get(storage_of(values) or 0, frozenset())

    def is_sum(self, values: Tensor) -> bool:
        """Whether a tensor is the block's input plus something made from its output.

        A product with weights, a concatenation, or any other operator that moves numbers to other
        places ends what is known of the input.
        """
        return "sum" in self.origins(values)

    def forget(self) -> None:
        """Follow nothing."""
        self._origins = {}
        self._embedded.forget()
        self._tables.clear()
        self._alive.clear()

    def before_write(self, name: str, written: Iterable[Any], args: tuple[Any, ...]) -> None:
        """Keep what an operator is about to change in place (see `Provenance`)."""
        self._embedded.before_write(name, written, args)

    def follow(self, op: Op) -> None:
        """Follow floating-point tensors through one operator (see `Provenance`)."""
        if self._tables:
            self._embedded.follow(op)
            self._keep_track(tensors_in((op.out,)))
        if op.name == "embedding" and self.on_lookup is not None:
            self.on_lookup(op.args[0], op.args[1], op.out)
        if self._origins:
            self._follow_block(op)

    def _follow_block(self, op: Op) -> None:
        """Follow what was made from the last block's input and output."""
        given = {storage_of(x): x for x in op.given if x.is_floating_point()}
        found = _origins_of_result(op, [self.origins(x) for x in given.values()])
        for result in tensors_in((op.out,)):
            place = storage_of(result)
            if place is None or (place in given and not op.kind.name.endswith("_")):  # a view
                continue
            self._origins.pop(place, None)
            if found and result.is_floating_point():
                self._origins[place] = found


def _origins_of_result(op: Op, known: list[frozenset[str]]) -> frozenset[str]:
    """Return what is known of an operator's result, given what is known of its arguments."""
    found = frozenset[str]().union(*known)
    if not op.kind.keeps_places:
        return found - _IN_PLACE
    added = any("returned" in each and "input" not in each for each in known)
    return found | {"sum"} if added and op.name in SUMS and "input" in found else found
