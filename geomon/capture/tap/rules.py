"""How the elements of an operator's result were made: one rule for each kind of operator.

A rule is a function of the operator and of its arguments' known origins. It returns the origin of
the result's elements, or None if that is unknown.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from geomon.capture.storage import storage_of
from geomon.capture.tap.columns import (
    ElementOrigin,
    Integers,
    Layout,
    Projection,
    SourceSlice,
    layout_of,
)
from geomon.capture.tap.operators import Op

# Operators are named without a trailing underscore: "add" includes "add_".

# Position of the first factor among the arguments of matrix products.
FACTORS = {"bmm": 0, "mm": 0, "baddbmm": 1, "addmm": 1}


class Followed(Protocol):
    """Answers how the tensors that operators receive were made."""

    at: int

    def made_of(self, values: Any) -> ElementOrigin | None:
        """Return how a tensor was made, or None if that is unknown."""

    def is_followed(self, values: Tensor) -> bool:
        """Whether a tensor was made from the block's input."""

    def is_of_tokens(self, values: Tensor) -> bool:
        """Whether a tensor of floating-point numbers depends on the hidden states."""


Rule = Callable[[Op, Tensor, Followed], ElementOrigin | None]


def find_origin(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Return the origin of an operator's result, or None if it is unknown."""
    return _rule_of(op.name)(op, out, known)


def _rule_of(name: str) -> Rule:
    if name in RULES:
        return RULES[name]
    if "mm" in name or name.endswith("linear"):  # other number formats
        return _projected
    return _alike if name else _unknown


# -- products ------------------------------------------------------------------------------------


def _multiplied(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Record a product of followed tensors with weights as a projection."""
    left, right = op.args[FACTORS[op.name] :][:2]
    on_left, on_right = map(known.is_followed, (left, right))
    if on_left == on_right:
        return None
    weight, tokens = (right, left) if on_left else (left, right)
    features: tuple[int, ...] = (-1,) if on_left else (-2,)
    if out.ndim == 3 and weight.shape[0] > 1 and weight.stride(0):
        features = (0, *features)  # a matrix for each head
    made = projection_of(out, features, tokens, known)
    if made.projection is not None and id(weight) in op.starts:
        made.projection.first = op.starts[id(weight)][-1 if on_left else -2]
    return made


def _projected(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Record the result as a projection of the first argument, whose width is last."""
    tokens = op.args[0]
    return projection_of(out, (-1,), tokens, known) if known.is_followed(tokens) else None


def _convolved(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Record a convolution of all channels as a projection; a filter for each keeps them."""
    values, strides, groups = op.args[0], op.args[3], op.args[8]
    if groups != values.shape[1]:
        return projection_of(out, (1,), values, known)
    made = known.made_of(values)
    if made is None:
        return None
    # If a filter makes more places than there are, the first of them belong to the tokens, as a
    # causal filter is used; if it makes fewer, padding was put before the tokens.
    more = [own - other for own, other in zip(out.shape, values.shape, strict=True)][2:]
    start = (0, 0, *(min(size, 0) for size in more))
    moves = any(size > 0 for size in more) or any(step != 1 for step in strides)
    return ElementOrigin(layout_of(out), [SourceSlice(made, layout_of(values), start)], moves=moves)


def projection_of(
    out: Tensor, features: tuple[int, ...], tokens: Tensor, known: Followed
) -> ElementOrigin:
    """Return the origin of a projection of tokens."""
    before = known.made_of(tokens)
    in_order = before is not None and features[-1] == -1  # the width of the tokens is last
    source = (before, layout_of(tokens)) if before is not None and in_order else None
    given = storage_of(tokens), tuple(tokens.shape)
    projection = Projection(out, features, given, source, made_at=known.at)
    return ElementOrigin(layout_of(out), projection=projection)


# -- sums ----------------------------------------------------------------------------------------


def _added(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Record a projection plus a bias, or plus one of the same tokens, as a projection."""
    made = [known.made_of(values) for values in op.given]
    own = [each for each in made if each is not None]
    roots = [*dict.fromkeys(root for each in own for root in each.roots)]
    if len(made) != 2 or not out.ndim or not roots or any(root.is_input for root in roots):
        return _alike(op, out, known)
    if len(own) == 1:
        values, bias = op.given if made[1] is None else op.given[::-1]
        return _with_bias(op, own[0], values, bias, out, known)
    return _summed(op, roots, out, known)


def _summed(
    op: Op, roots: Sequence[Projection], out: Tensor, known: Followed
) -> ElementOrigin | None:
    """Return the origin of the sum of two tensors that were both made from projections."""
    fits = len(roots) == 2 and all(_covers(root, out) for root in roots)
    return _whole(roots[0].like(out, known.at), out) if fits else _alike(op, out, known)


def _with_bias(
    op: Op, made: ElementOrigin, values: Tensor, bias: Tensor, out: Tensor, known: Followed
) -> ElementOrigin | None:
    """Return the origin of the sum of a tensor made from projections and one that was not."""
    root, *others = made.roots
    if not others and is_bias(bias, root.width) and _covers(root, out):
        return _whole(root.like(out, known.at), out)
    if made.projection is None or known.is_followed(bias) or bias.ndim < 2:
        return _alike(op, out, known)
    return _with_bias_of_heads(made, made.projection, values, bias, out, known)


def _with_bias_of_heads(
    made: ElementOrigin,
    root: Projection,
    values: Tensor,
    bias: Tensor,
    out: Tensor,
    known: Followed,
) -> ElementOrigin | None:
    """Record a view of a projection plus a bias of each head as a projection, or return None."""
    lines = _traced_lines(made, root, values) if values.shape == out.shape else None
    if lines is None:
        return None
    rows, columns = lines
    features = [dim for dim, line in enumerate(columns) if np.ptp(line) > 0]
    tokens = [dim for dim in range(out.ndim) if dim not in features]
    padded = (1,) * (out.ndim - bias.ndim) + tuple(bias.shape)
    if any(padded[dim] > 1 for dim in tokens):  # a number for each place: no bias
        return ElementOrigin(layout_of(out), [SourceSlice(made, layout_of(values))])
    count, first = math.prod(out.shape[dim] for dim in tokens), int(columns[0][0])
    if root.rows != count or not _are_in_order(rows, tokens, 0):
        return None
    if not _are_in_order(columns, features, first):
        return None
    found = root.like(out, known.at, tuple(features))
    found.first = root.first + first
    return _whole(found, out)


def _traced_lines(
    made: ElementOrigin, root: Projection, values: Tensor
) -> tuple[list[Integers], list[Integers]] | None:
    """Trace a tensor's first elements along each dimension to rows and columns of a projection.

    None if any comes from elsewhere.
    """
    if 0 in values.shape:
        return None
    rows, columns, roots = list[Integers](), list[Integers](), [root]
    for dim, size in enumerate(values.shape):
        indices = np.zeros((values.ndim, size), dtype=np.int64)
        indices[dim] = np.arange(size)
        projection, row, column = made.trace(layout_of(values).addresses(indices), roots)
        if len(roots) > 1 or projection.any():
            return None
        rows.append(row)
        columns.append(column)
    return rows, columns


def _are_in_order(lines: Sequence[Integers], dims: Sequence[int], first: int) -> bool:
    """Whether numbers along each dimension count `dims` alone, the last one fastest."""
    step, steps = 1, dict[int, int]()
    for dim in reversed(dims):
        steps[dim], step = step, step * len(lines[dim])
    return all(
        np.array_equal(line, first + np.arange(len(line)) * steps.get(dim, 0))
        for dim, line in enumerate(lines)
    )


def _covers(root: Projection, out: Tensor) -> bool:
    """Whether a result may have one row for each row of a projection."""
    width = out.shape[-1]
    return root.rows * width == out.numel() and root.width >= width


def _whole(projection: Projection, out: Tensor) -> ElementOrigin:
    return ElementOrigin(layout_of(out), projection=projection)


def is_bias(values: Any, width: int) -> bool:
    """Whether an added tensor has one number per feature."""
    return isinstance(values, Tensor) and values.shape == (width,)


# -- elements at the same place ------------------------------------------------------------------


def _alike(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Record that the result combines numbers at the same place of several tensors."""
    place = storage_of(out)
    if any(storage_of(values) == place for values in op.given):
        return _changed_in_place(op, out, known)
    return _like(op, op.given, out, known)


def _changed_in_place(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    place, before = storage_of(out), known.made_of(out)
    if op.name == "copy":
        return _like(op, [op.args[1]], out, known, before=before) or before
    changed = _like(op, op.given, out, known)
    if before is None or changed is None:
        return before
    others = [values for values in op.given if storage_of(values) != place]
    moves = not op.kind.keeps_places and any(map(known.is_of_tokens, others))
    if not changed.mixes and not moves:
        return before
    layout = layout_of(out)
    return ElementOrigin(layout, [SourceSlice(before, layout)], before=before, mixes=True)


def _like(
    op: Op,
    given: Iterable[Tensor],
    out: Tensor,
    known: Followed,
    before: ElementOrigin | None = None,
) -> ElementOrigin | None:
    """Combine numbers at the same place.

    If one number per element has an unknown origin in the tokens, the result is unknown; one number
    per row (as in a norm) does no harm.
    """
    pieces: list[SourceSlice] = []
    mixes = False
    for values in given:
        if not known.is_followed(values):
            continue
        made = known.made_of(values)
        layout = None if made is None else _fitted(layout_of(values), out)
        if made is None or layout is None:
            mixes |= known.is_of_tokens(values) and _is_one_for_each(values, out)
            continue
        mixes |= bool(pieces) and made.roots.isdisjoint(pieces[0].made.roots)
        pieces.append(SourceSlice(made, layout))
    if not pieces and before is None:
        return None
    moves = not op.kind.keeps_places
    return ElementOrigin(layout_of(out), pieces, before=before, mixes=mixes, moves=moves)


def _is_one_for_each(values: Tensor, out: Tensor) -> bool:
    """Whether a tensor has one number per element of another, rather than one per row."""
    alike = bool(values.ndim and out.ndim) and values.shape[-1] == out.shape[-1] > 1
    return alike and values.is_floating_point() and values.stride(-1) != 0


def _fitted(layout: Layout, out: Tensor) -> Layout | None:
    """Give a layout as many dimensions as a tensor; None if it cannot be expanded to it."""
    layout = layout.with_dimension(0, out.ndim - len(layout.shape))
    if len(layout.shape) != out.ndim or not out.ndim or 0 in layout.shape:
        return None
    sizes = zip(layout.shape, out.shape, strict=True)
    fits = layout.shape[-1:] == out.shape[-1:] and all(other % size == 0 for size, other in sizes)
    return layout if fits else None


# -- elements that are moved ---------------------------------------------------------------------


def _joined(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Record which part of a concatenation or stack comes from which tensor."""
    dim = (op.args[1] if len(op.args) > 1 else 0) % out.ndim
    pieces, start = list[SourceSlice](), 0
    for values in op.args[0]:
        layout = layout_of(values)
        if op.name == "stack":
            layout = layout.with_dimension(dim)
        if len(layout.shape) != out.ndim:
            continue  # empty tensor
        made = known.made_of(values)
        if made is not None:
            at = tuple(start * (each == dim) for each in range(out.ndim))
            pieces.append(SourceSlice(made, layout, at))
        start += layout.shape[dim]
    return ElementOrigin(layout_of(out), pieces)


def _padded(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Record the places that the elements of a padded tensor had before."""
    values, widths = op.args[:2]
    made = known.made_of(values)
    if made is None:
        return None
    before = (*(0,) * (out.ndim - len(widths) // 2), *widths[::2][::-1])
    return ElementOrigin(layout_of(out), [SourceSlice(made, layout_of(values), before)], pads=True)


def _selected(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Record which elements were selected along one dimension."""
    return _taken(op.args[0], [None] * (op.args[1] % out.ndim) + [op.args[2]], out, known)


def _indexed(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Record which elements were selected along several dimensions."""
    return _taken(op.args[0], op.args[1], out, known)


def _taken(
    values: Tensor, indices: Sequence[Tensor | None], out: Tensor, known: Followed
) -> ElementOrigin | None:
    made, layout = known.made_of(values), layout_of(values)
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if made is None:
        return None
    orders: list[Tensor] = []
    for index in indices:
        if index is not None:
            orders += index.nonzero().unbind(1) if index.dtype == torch.bool else [index]
    if dims == [*range(dims[0], dims[-1] + 1)]:
        orders = [*torch.broadcast_tensors(*orders)]
        return ElementOrigin(
            layout_of(out), [SourceSlice(made, layout, None, (dims[0], tuple(orders)))]
        )
    if dims[0]:
        return None
    # Tokens are selected, so their order is no longer known.
    layout = layout._replace(
        shape=layout.shape[len(orders) :], strides=layout.strides[len(orders) :]
    )
    layout = layout.with_dimension(0, out.ndim - len(layout.shape))
    return ElementOrigin(layout_of(out), [SourceSlice(made, layout)], moves=True)


def _turned(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Record the former places of the elements of a rolled or flipped tensor."""
    made, layout = known.made_of(op.args[0]), layout_of(op.args[0])
    dims = op.args[-1] if op.name == "flip" or len(op.args) > 2 else ()
    if made is None or not dims:
        return None
    found = made
    for number, dim in enumerate(dims):
        order = torch.arange(out.shape[dim], dtype=torch.int64, device="cpu")
        order = order.flip(0) if op.name == "flip" else order.roll(op.args[1][number])
        found = ElementOrigin(
            layout, [SourceSlice(found, layout, None, (dim % out.ndim, (order,)))]
        )
    return ElementOrigin(layout_of(out), [SourceSlice(found, layout)])


def _chosen(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Record the tensor from which `torch.where` took each element."""
    if len(op.args) != 3:
        return _alike(op, out, known)
    condition, pieces = op.args[0].expand(out.shape), []
    for values, own in ((op.args[1], condition), (op.args[2], ~condition)):
        made = known.made_of(values)
        layout = None if made is None else _fitted(layout_of(values), out)
        if made is not None and layout is not None:
            pieces.append(SourceSlice(made, layout, where=own))
    return ElementOrigin(layout_of(out), pieces) if pieces else None


def _unknown(op: Op, out: Tensor, known: Followed) -> ElementOrigin | None:
    """Return None: the elements are not made from those at the same place."""
    return None


# By name of the operator; all others combine numbers at the same place.
RULES: dict[str, Rule] = {
    **dict.fromkeys(FACTORS, _multiplied),
    "convolution": _convolved,
    "add": _added,
    "cat": _joined,
    "stack": _joined,
    "constant_pad_nd": _padded,
    "index_select": _selected,
    "index": _indexed,
    "roll": _turned,
    "flip": _turned,
    "where": _chosen,
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "sort", "gather", "scatter"), _unknown),
}
