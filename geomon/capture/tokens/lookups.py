"""Lookups: which integers embedding tables were given, and which of these are the token ids.

Several tables may be given integers of the tokens' shape: token types, positions, hashes of several
tokens, the sentences of another stack, the tokens that are to be predicted next. What a table
returned is compared with what entered the blocks, and so is where several rows stand for one token.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from geomon.capture.tokens.sampling import copy_rows, spread_indices

Shape = tuple[int, ...]

# Rows by which what a table returned is compared with hidden states.
_ROWS = 64

# Agreement above which hidden states are of what a table returned, and below which they are not:
# of 64 unrelated rows of width 32 it is within 0.05 of 0 in 19 of 20 cases.
_AGREES = 0.3
_UNRELATED = 0.1

# Share of steps by one from which integers are positions: of token ids few follow one another.
_BY_ONE = 0.5

# Most different values that types of tokens have.
_MOST_TYPES = 4


class Lookup(NamedTuple):
    """One call of an embedding table.

    Attributes:
        ids: The integers that it was given.
        table: The table.
        of_output: Whether the table has one row for each output of the model.
        passed: Whether the integers, or what they are a part of, are an argument of the model.
        rows: Rows of what it returned, [rows, width]; None if it was not seen.
    """

    ids: Tensor
    table: nn.Module
    of_output: bool = False
    passed: bool = False
    rows: Tensor | None = None


class Layout(NamedTuple):
    """A way in which hidden states may be those of token ids.

    Attributes:
        arrange: Takes values of the ids' shape to that of the hidden states.
        streams: Number of rows of hidden states of each token.
        turned: Whether ids [batch, length] are those of hidden states [length, batch].
    """

    arrange: Callable[[Tensor], Tensor]
    streams: int = 1
    turned: bool = False


class Found(NamedTuple):
    """The token ids of hidden states.

    Attributes:
        lookup: The call of the table that was given them.
        layout: How they lie in the hidden states.
    """

    lookup: Lookup
    layout: Layout


def rows_of(output: Tensor, ids: Tensor) -> Tensor | None:
    """Copy rows of what a table returned, which `agreement` compares with hidden states.

    Args:
        output: What it returned, [..., width].
        ids: The integers that it was given.

    Returns:
        The rows, [rows, width]; None if they are not one for each of the integers.
    """
    alike = output.is_floating_point() and output.shape[:-1] == ids.shape
    return copy_rows(output, spread_indices(ids.numel(), _ROWS)) if alike and ids.numel() else None


def layouts(ids: Shape, shape: Shape) -> list[Layout]:
    """List the ways in which hidden states may have one row for each token id.

    Args:
        ids: Shape of the token ids.
        shape: Shape of the hidden states, without the width.
    """
    if ids == shape:
        square = len(ids) == 2 and ids[0] == ids[1]
        return [Layout(lambda x: x)] + [Layout(lambda x: x.T, turned=True)] * square
    if len(ids) == 2 and ids[::-1] == shape:
        return [Layout(lambda x: x.T, turned=True)]
    # Packed hidden states are flattened ids, or ids without sequences have got a batch of one.
    if torch.Size(ids).numel() == torch.Size(shape).numel() and 1 in (len(shape), *shape[:-1]):
        return [Layout(lambda x: x.reshape(shape))]
    return []


def stream_layouts(ids: Shape, shape: Shape) -> list[Layout]:
    """List the ways in which hidden states may have several rows for each token id.

    Args:
        ids: Shape of the token ids.
        shape: Shape of the hidden states, without the width.
    """
    count = torch.Size(shape).numel() // max(torch.Size(ids).numel(), 1)
    if len(ids) != 2 or count < 2:
        return []
    found = []
    if shape == (ids[0] * count, ids[1]):
        found.append(Layout(lambda x: x.repeat_interleave(count, 0), count))
        found.append(Layout(lambda x: x.repeat(count, 1), count))
    if shape == (*ids, count):
        found.append(Layout(lambda x: x[..., None].expand(shape), count))
    if shape == (*ids[::-1], count):
        found.append(Layout(lambda x: x.T[..., None].expand(shape), count, turned=True))
    if shape == (count, *ids):
        found.append(Layout(lambda x: x.expand(shape), count))
    return found


def agreement(lookup: Lookup, layout: Layout, hidden: Tensor) -> float | None:
    """Compute how far hidden states point where the rows of a table point.

    The mean over some rows of the cosine of both, each about its mean: 1 where the blocks are given
    what the table returned, near 0 where they are given something else. Of several streams it is
    that of the one that agrees most: the others may be made of it.

    Args:
        lookup: The call of the table.
        layout: How its integers would lie in the hidden states.
        hidden: Hidden states, [..., width].

    Returns:
        The cosine; None if what the table returned was not seen, or has another width.
    """
    if lookup.rows is None or lookup.rows.shape[1] != hidden.shape[-1]:
        return None
    count = lookup.ids.numel()
    order = torch.arange(count, dtype=torch.int64, device="cpu").view(lookup.ids.shape)
    # Of each token the rows of hidden states that are its own, [tokens, streams].
    rows = layout.arrange(order).flatten().argsort(stable=True).view(count, -1)
    rows = rows[spread_indices(count, _ROWS)]
    given = copy_rows(hidden, rows.flatten()).unflatten(0, rows.shape)
    returned = lookup.rows.to(given.device)[:, None]
    cosine = torch.nn.functional.cosine_similarity(
        given - given.mean(dim=0), returned - returned.mean(dim=0), dim=2
    )
    return float(cosine.nan_to_num(0.0).mean(dim=0).max())


def choose(known: Sequence[tuple[Found, float | None]]) -> Found:
    """Choose the token ids among integers that tables were given.

    Args:
        known: At least one, with the agreement of the hidden states with it.
    """
    strongest = max(strength or 0.0 for _, strength in known)
    best: dict[int, tuple[float, Found]] = {}  # of each call the layout that agrees best
    for one, strength in known:
        strong, key = strength or 0.0, id(one.lookup)
        if strongest >= _AGREES and strong < _UNRELATED:
            continue
        if key not in best or strong > best[key][0] + _UNRELATED:
            best[key] = strong, one
    left = [one for _, one in best.values()]
    for is_better in (no_positions, _of_output, _passed):
        left = [one for one in left if is_better(one.lookup)] or left
    return max(left, key=lambda one: _values(one.lookup))


def agrees(strength: float | None) -> bool:
    """Whether hidden states are of what a table returned.

    Args:
        strength: The agreement; None if it is not known.
    """
    return strength is not None and strength >= _AGREES


def candidates(lookups: Sequence[Lookup], shape: Shape, *, streams: bool) -> Iterator[Found]:
    """Iterate over the integers that may be the token ids of hidden states.

    Args:
        lookups: Calls of tables.
        shape: Shape of the hidden states, without the width.
        streams: Whether several rows may stand for one token.
    """
    list_ways = stream_layouts if streams else layouts
    for lookup in lookups:
        for layout in list_ways(lookup.ids.shape, shape):
            yield Found(lookup, layout)


def no_positions(lookup: Lookup) -> bool:
    """Whether integers are no positions: of those, most are one more than the one before.

    Args:
        lookup: The call of a table that was given them.
    """
    ids = lookup.ids
    if ids.shape[-1:].numel() < 2:
        return True
    return float((ids.diff(dim=-1) == 1).float().mean()) < _BY_ONE


def _of_output(lookup: Lookup) -> bool:
    return lookup.of_output


def _passed(lookup: Lookup) -> bool:
    """Whether the integers are an argument of the model, and no types of tokens."""
    return lookup.passed and _values(lookup) > _MOST_TYPES


def _values(lookup: Lookup) -> int:
    return len(lookup.ids.unique())
