"""Seen attention: what was seen of one attention in one call of a block."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from geomon.capture.attending.attention import AttentionCall, SoftmaxCall
from geomon.capture.tap import Columns, Projection
from geomon.capture.tokens.sampling import SampledRows, copy_rows

Shape = tuple[int, ...]


@dataclass
class SeenAttention:
    """One attention in one call of a block, and what was kept of it.

    Attributes:
        call: Its recorded call; None where none was kept.
        route: Where it was seen: "sdpa", "flex", "flash" or "softmax"; "" where it was not.
        refused: Why its call was not kept, or must not be; "" for no reason.
        passed_over: Why a softmax was not taken for its own.
        max_logits: Largest score of each row of each of its calls, [sequences, heads, queries].
        inside: Whether the call came from its own module, and not from elsewhere in the block:
            such a call goes before another.
        further: Whether it was called again, which is not measured.
        heads: Columns of projections of which its queries and its keys are made; None where these
            are not known.
        projected: Rows of its queries and of its keys as projected, [rows, heads, head width].
        numbers: Number of the first feature of each head among those of all ranks, by the view that
            has these heads: "query", "key", "projected_query" and "projected_key".
        other_source: Whether its keys are made of another tensor than its queries.
    """

    call: AttentionCall | SoftmaxCall | None = None
    route: str = ""
    refused: str = ""
    passed_over: str = ""
    max_logits: list[Tensor] = field(default_factory=list)
    inside: bool = False
    further: bool = False
    heads: tuple[Columns, Columns] | None = None
    projected: tuple[SampledRows, SampledRows] | None = None
    numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    other_source: bool = False

    def refuse(self, reason: str) -> None:
        """Drop what was recorded.

        Args:
            reason: Why the call is not kept.
        """
        self.refused = reason
        self.call, self.route = None, ""
        self.max_logits.clear()

    def add_heads(self, query: Columns | None, key: Columns | None) -> None:
        """Take note of what the queries and keys of a call are made of.

        Args:
            query: Columns of the queries; None where they are not known.
            key: Columns of the keys, or None.
        """
        if query is None or key is None:
            return
        if self.heads is None:
            self.heads = query, key
            sources = query.projections[0].given, key.projections[0].given
            self.other_source = None not in sources and sources[0] != sources[1]
        else:
            self.heads = self.heads[0].with_heads_of(query), self.heads[1].with_heads_of(key)

    def number_heads(self, query: Columns | None, key: Columns | None) -> None:
        """Number the heads of the call that was recorded, by what they are made of.

        Args:
            query: Columns of the queries; None where they are not known.
            key: Columns of the keys, or None; of repeated ones the first is kept.
        """
        if query is not None:
            self.numbers["query"] = query.numbers
        if key is not None:
            self.numbers["key"] = key.numbers[:: key.repeats]

    def project(
        self,
        rows: Callable[[Shape, str], Tensor],
        entered: Shape,
        *,
        length_first: bool,
        key_role: str,
    ) -> None:
        """Copy sampled rows of queries and keys as projected; the projections are let go.

        Args:
            rows: Returns flat indices of the sampled rows of a shape, for a role.
            entered: Shape of the hidden states that entered the block, without the width.
            length_first: Whether these are [length, batch].
            key_role: Role of the keys: "key" where they come from another stack.
        """
        if self.heads is None or self.projected is not None:
            return
        query, key = (columns.distinct() for columns in self.heads)
        sampled = [
            _sample(columns, rows, entered, role, length_first=length_first)
            for columns, role in ((query, ""), (key, key_role))
        ]
        self.heads = None
        if sampled[0] is not None and sampled[1] is not None:
            self.projected = sampled[0], sampled[1]
            self.numbers |= {"projected_query": query.numbers, "projected_key": key.numbers}


def columns_of_all(
    projection: Projection,
    shape: Shape,
    entered: Shape,
    heads: int | None,
    key_heads: int | None,
    width: int | None,
    *,
    length_first: bool,
) -> Columns | None:
    """Take all columns of a projection for heads, one after another.

    Args:
        projection: The projection.
        shape: Shape of its output, without the width.
        entered: Shape of the hidden states that entered the block, without the width.
        heads: Number of query heads.
        key_heads: Number of key heads.
        width: Head width.
        length_first: Whether hidden states are [length, batch]: as many tokens as sequences do not
            tell.

    Returns:
        The columns; None where heads do not make up the width of the projection.
    """
    if not heads or not width:
        return None
    count, odd = divmod(projection.width, width)
    if odd or count not in (heads, key_heads):
        return None
    columns = np.arange(projection.width).reshape(count, width)
    sequences, step = 0, (0, 0)
    if len(shape) == 2:
        turned = shape == entered[::-1] and (entered != shape or length_first)
        sequences, step = (shape[1], (1, shape[1])) if turned else (shape[0], (shape[1], 1))
    return Columns((projection,), np.zeros_like(columns), columns, (step,), sequences)


def _sample(
    columns: Columns,
    rows: Callable[[Shape, str], Tensor],
    entered: Shape,
    role: str,
    *,
    length_first: bool,
) -> SampledRows | None:
    """Copy sampled rows of heads; None where projections are not of the same tokens."""
    count, sequences = columns.projections[0].rows, columns.sequences
    if any(projection.rows != count for projection in columns.projections):
        return None
    length = count // sequences if sequences and count % sequences == 0 else 0
    square = len(entered) == 2 and entered[0] == entered[1]
    turned = length_first if square else len(entered) == 2 and entered[1] == sequences
    ordered = (length, sequences) if turned else (sequences, length)
    shape: Shape = ordered if length else (count,)
    if not role and count == math.prod(entered):
        shape = entered
    indices = rows(shape, role)
    in_order = length and shape == ordered
    width = columns.which.shape[1]
    values: Tensor | None = None
    for number, projection in enumerate(columns.projections):
        own = torch.from_numpy(columns.which.flatten() == number)
        if not own.any():
            continue
        wanted = torch.from_numpy(columns.columns.flatten())[own]
        order = _order(columns.steps[number], sequences, length) if in_order else None
        steps = order[::-1] if order is not None and turned else order
        taken = indices
        if steps is not None and (turned or steps != (length, 1)):  # not in the order of indices
            across, along = torch.unravel_index(indices, shape)
            taken = across * steps[0] + along * steps[1]
        part = _rows_of(projection, taken, wanted)
        if own.all():  # of one projection, as nearly always
            values = part
            break
        if values is None:
            values = part.new_empty(len(part), len(own))
        values[:, own.to(part.device)] = part
    assert values is not None
    return SampledRows(values.unflatten(1, (-1, width)), indices, shape, role)


def _rows_of(projection: Projection, rows: Tensor, columns: Tensor) -> Tensor:
    """Copy some columns of some rows of a projection, in float32."""
    values, tokens = projection.by_token
    if values.ndim > tokens + 1:
        at = torch.unravel_index(rows.to(values.device), values.shape[:tokens])
        return values[at].flatten(1)[:, columns.to(values.device)].float()
    first, count = int(columns[0]), len(columns)
    if torch.equal(columns, torch.arange(first, first + count, dtype=torch.int64, device="cpu")):
        return copy_rows(values.narrow(-1, first, count), rows)
    return copy_rows(values, rows)[:, columns.to(values.device)]


def _order(steps: tuple[int, int], sequences: int, length: int) -> tuple[int, int] | None:
    """Return the steps between sequences and tokens in rows of a projection; None for neither."""
    for order in ((length, 1), (1, sequences)):
        across = sequences == 1 or steps[0] == order[0]
        if across and (length == 1 or steps[1] == order[1]):
            return order
    return None
