"""Follow the outputs of attention heads to the product that projects them.

An output is softmax weights times values. Whatever comes before the output projection (a gate, a
norm, a hook that zeroes a head) keeps each number's head and token. So the input of that projection
is shown, which is all that a block gets of its heads.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakMethod

import numpy as np
import torch
from torch import Tensor

from geomon.capture.modes import unseen
from geomon.capture.storage import storage_of
from geomon.capture.tap.columns import (
    ElementOrigin,
    Integers,
    Projection,
    layout_of,
    remembered,
)
from geomon.capture.tap.operators import SUMS, Op, tensors_in
from geomon.capture.tap.rules import FACTORS, find_origin


class HeadOutputs(Protocol):
    """Takes the outputs of the heads of one attention call.

    Attributes:
        sizes: Number of sequences, heads and queries.
    """

    sizes: tuple[int, int, int]

    def take(self, rows: Tensor, where: "HeadColumns") -> None:
        """Take the input of the output projection, [rows, width]."""


class HeadColumns(NamedTuple):
    """Columns and rows of heads in the input of an output projection.

    Attributes:
        columns: Columns of all heads, in order; a slice if they stand side by side.
        rows: Row of each query of each sequence, [sequences x queries], -1 if it has none; None if
            queries are rows in order.
    """

    columns: Tensor | slice
    rows: Tensor | None


class Shown(NamedTuple):
    """Outputs of heads that are being projected."""

    outputs: HeadOutputs
    rows: Tensor
    where: HeadColumns


class ShownAgain(NamedTuple):
    """Finds the same outputs again in a later call.

    Attributes:
        number: Number of the attention, among those whose outputs were expected.
        at: Position of the projected tensor among the operator's arguments.
        dim: Dimension of its features.
        where: Columns and rows of the heads.
    """

    number: int
    at: int
    dim: int
    where: HeadColumns

    def find(self, outputs: Sequence[HeadOutputs | None], args: Sequence[Any]) -> list[Shown]:
        """Return the outputs that an operator projects; none if they are not wanted."""
        known = outputs[self.number]
        return [] if known is None else [Shown(known, _by_row(args[self.at], self.dim), self.where)]


class OutputOrigins:
    """Follows outputs of heads through the operators of a block's call (see `Followed`).

    Args:
        is_of_block: Method that says whether a tensor was made from the block's input, and so
            is not a weight. Its object holds this one, so it is referenced weakly.

    Attributes:
        at: Number of the operator that runs.
        shown: Outputs that were just projected.
        again: How to find them again, by number of the operator.
        reads_numbers: Whether an answer depended on the numbers in a tensor.
    """

    def __init__(self, is_of_block: Callable[[Tensor], bool]) -> None:
        self.at = -1
        self.shown: list[Shown] = []
        self.again: dict[int, list[ShownAgain]] = {}
        self.reads_numbers = False
        self._weakly = WeakMethod(is_of_block)
        self._expected: list[HeadOutputs | None] = []
        self._made: dict[int, ElementOrigin] = {}
        self._roots: dict[Projection, int] = {}  # numbers of attentions
        self._projected: set[int] = set()

    def expect(self, outputs: HeadOutputs | None) -> None:
        """Expect the outputs of a further attention."""
        self._expected.append(outputs)

    @property
    def are_complete(self) -> bool:
        """Whether all expected outputs have been projected."""
        wanted = (n for n, outputs in enumerate(self._expected) if outputs is not None)
        return self._projected.issuperset(wanted)

    def begin(self, outputs: HeadOutputs | None, op: Op) -> None:
        """Follow the result of an operator that multiplies softmax weights with values."""
        if outputs is None:
            return
        number = next(n for n, each in enumerate(self._expected) if each is outputs)
        result = tensors_in((op.out,))[0]
        mixed, place = _by_head(result, op.kind.role, outputs.sizes), storage_of(result)
        if mixed is None or place is None or number in self._roots.values():
            return
        root = Projection(mixed, (1, 3), is_input=True, made_at=self.at)
        self._roots[root] = number
        self._made[place] = ElementOrigin(layout_of(mixed), projection=root)

    def forget(self) -> None:
        """Follow nothing, and free what was kept alive."""
        self._made.clear()
        self._roots.clear()

    # -- what rules ask (see `Followed`) -----------------------------------------------------------

    def made_of(self, values: Any) -> ElementOrigin | None:
        """Return how a tensor was made of outputs, or None if it was not."""
        place = storage_of(values) if isinstance(values, Tensor) else None
        return None if place is None else self._made.get(place)

    def is_followed(self, values: Tensor) -> bool:
        """Whether a tensor was made of outputs."""
        return self.made_of(values) is not None

    def is_of_tokens(self, values: Tensor) -> bool:
        """Return False: other tensors (gates) change outputs, but not their places."""
        return False

    # -- what happens ------------------------------------------------------------------------------

    def leave(self, places: set[int]) -> None:
        """Forget the earlier contents of some memory."""
        for place in places & self._made.keys():
            del self._made[place]

    def follow(self, op: Op, results: Sequence[tuple[int, Tensor]]) -> None:
        """Follow outputs through one operator, until it projects them."""
        followed = [values for values in op.given if self.is_followed(values)]
        if not followed:
            return
        if op.name in SUMS and (len(followed) > 1 or self._adds_tokens(op)):
            self.leave({place for place, _ in results})  # no longer the output of one head
            return
        for place, result in results:
            made = find_origin(op, result, self)
            if made is not None and made.projection is None:
                self._made[place] = made
            elif made is not None:
                self._project(op)
                return

    def _adds_tokens(self, op: Op) -> bool:
        """Whether a sum has a summand that was made from tokens (the residual stream)."""
        others = (values for values in op.given if not self.is_followed(values))
        return any(map(self._is_of_block, others))

    def _is_of_block(self, values: Any) -> bool:
        is_of_block = self._weakly()
        return is_of_block is not None and is_of_block(values)

    def _project(self, op: Op) -> None:
        """Show the outputs that an operator multiplies with weights."""
        first = FACTORS.get(op.name, 0)
        factors = [*enumerate(op.args)][first : first + 2]
        (at, values), *others = sorted(factors, key=lambda each: not self.is_followed(each[1]))
        if op.name in FACTORS and self._is_of_block(others[0][1]):
            return  # they attend, or are attended to
        dim = 1 if op.name == "convolution" else -2 if at > first else -1
        rows, made = _by_row(values, dim), self.made_of(values)
        assert made is not None
        self.reads_numbers |= made.by_values
        for root, where in _find_heads(made, rows).items():
            number = self._roots.get(root)
            outputs = None if number is None else self._expected[number]
            if number is None or outputs is None or number in self._projected:
                continue
            self._projected.add(number)
            self.shown.append(Shown(outputs, rows, where))
            self.again.setdefault(self.at, []).append(ShownAgain(number, at, dim, where))


def _by_head(mixed: Tensor, role: str, sizes: tuple[int, int, int]) -> Tensor | None:
    """View the result of attention as [sequences, heads, queries, width]; None if it cannot be."""
    count = math.prod(sizes)
    with unseen():
        if role == "flash":
            mixed = (mixed[None] if mixed.ndim == 3 else mixed).transpose(1, 2)
        elif not role and count and mixed.numel() % count == 0 and mixed.is_contiguous():
            mixed = mixed.view(*sizes, -1)  # a product of scores, whose order it has
    return mixed if mixed.shape[:3] == sizes and mixed.numel() else None


def _by_row(values: Tensor, dim: int) -> Tensor:
    """View a projected tensor with its features last."""
    with unseen():
        return values.detach().movedim(dim, -1)


def _find_heads(made: ElementOrigin, values: Tensor) -> dict[Projection, HeadColumns]:
    """Find the heads of each attention in a tensor, [..., width]; those that are not whole lack."""
    roots: list[Projection] = []
    key, layout = made.outline(roots), layout_of(values)

    def find() -> dict[int, HeadColumns]:
        *lead, width = values.shape

        def trace(rows: Integers, columns: Integers) -> Integers:
            indices = np.stack([*np.unravel_index(rows, lead), columns])
            return made.trace(layout.addresses(indices), roots)

        every = np.arange(math.prod(lead))
        of_columns = trace(np.zeros(width, dtype=np.int64), np.arange(width))
        found = {}
        for number in np.unique(of_columns[0][of_columns[0] >= 0]).tolist():
            own = np.flatnonzero(of_columns[0] == number)
            of_rows = trace(every, np.full_like(every, own[0]))
            found[number] = _columns_of(roots[number], own, of_columns[2, own], of_rows, number)
        return {number: where for number, where in found.items() if where is not None}

    found = find() if made.by_values else remembered((key, layout, "outputs"), find)
    return {roots[number]: where for number, where in found.items()}


def _columns_of(
    root: Projection, own: Integers, features: Integers, of_rows: Integers, number: int
) -> HeadColumns | None:
    """Return where heads are, given the feature of each of their columns, and the token of rows."""
    (_, heads, _, width), _ = root.sizes
    counts = np.bincount(features // width, minlength=heads)
    known = of_rows[0] == number
    if len({*counts}) > 1 or (of_rows[2, known] != features[0]).any():
        return None
    columns = own[np.argsort(features // width, kind="stable")]
    first, count = int(columns[0]), len(columns)
    in_order = np.array_equal(columns, np.arange(first, first + count))
    rows = np.full(root.rows, -1)
    rows[of_rows[1, known]] = np.flatnonzero(known)
    are_rows = np.array_equal(rows, np.arange(len(of_rows[0])))
    return HeadColumns(
        slice(first, first + count) if in_order else torch.from_numpy(columns),
        None if are_rows else torch.from_numpy(rows),
    )
