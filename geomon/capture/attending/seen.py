"""Collects observations of one attention during one call of a block."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from geomon.capture import apart
from geomon.capture.attending.attention import AttentionCall, SoftmaxCall
from geomon.capture.storage import Shape, send
from geomon.capture.tap import AttentionWeights, Columns, Projection
from geomon.capture.tap.columns import Integers, Pattern
from geomon.capture.tokens.sampling import SampledRows, copy_rows


class Precedence(NamedTuple):
    """Decides which call in a block is its attention: the greatest, or the first of equals.

    Attributes:
        inside: Whether the call came from the attention's own module.
        of_tokens: Whether its queries are the block's tokens.
        fused: Whether it is a call of fused attention rather than a softmax.
        made: Whether its scores were seen to be products of queries and keys.
    """

    inside: bool = False
    of_tokens: bool = False
    fused: bool = False
    made: bool = False


@dataclass
class SeenAttention:
    """One attention in one call of a block, and what was kept of it.

    Attributes:
        call: The recorded call, or None.
        route: How it was seen: "sdpa", "flex", "flash" or "softmax"; "" if it was not seen.
        refused: Why its call was not kept or must not be; "" if it was kept.
        passed_over: Why a softmax was not accepted as this attention.
        max_logits: Largest score of each row, [sequences, heads, queries], one tensor per call.
        precedence: Precedence of the recorded call among the block's calls.
        further: Whether attention was called again; further calls are not measured.
        weights: Later changes of the softmax weights.
        heads: Columns of the projections that make up its queries and keys, or None if unknown.
        projected: Rows of queries and keys as projected, [rows, heads, head width].
        numbers: Index of each head's first feature on all ranks, by view: "query",
            "key", "projected_query" and "projected_key".
        other_source: Whether keys are made from a different tensor than queries.
        left_out: Share of the sampled tokens whose projected query or key is unknown.
        has_other_keys: Whether some keys belong to tokens outside the block.
    """

    call: AttentionCall | SoftmaxCall | None = None
    route: str = ""
    refused: str = ""
    passed_over: str = ""
    max_logits: list[Tensor] = field(default_factory=list)
    precedence: Precedence = field(default_factory=Precedence)
    further: bool = False
    heads: tuple[Columns, Columns] | None = None
    projected: tuple[SampledRows, SampledRows] | None = None
    numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    other_source: bool = False
    left_out: float = 0.0
    has_other_keys: bool = False
    weights: AttentionWeights = field(default_factory=AttentionWeights)

    def awaits(self, precedence: Precedence) -> bool:
        """Whether a softmax of this precedence may still count."""
        refused = self.refused and precedence.inside <= self.precedence.inside
        return precedence >= self.precedence and not refused

    def takes(self, precedence: Precedence) -> bool:
        """Return whether to record a call; an earlier one of lower precedence is then dropped."""
        if self.call is not None and precedence < self.precedence:
            return False
        if precedence > self.precedence:
            self.call, self.route, self.heads = None, "", None
            self.max_logits.clear()
        if precedence.inside > self.precedence.inside:  # what was refused came from elsewhere
            self.refused = self.passed_over = ""
        self.precedence = precedence
        return True

    def refuse(self, reason: str) -> None:
        """Drop what was recorded, for a reason."""
        self.refused = reason
        self.call, self.route = None, ""
        self.max_logits.clear()

    def add_heads(self, query: Columns | None, key: Columns | None) -> None:
        """Remember which projections made the queries and keys of the measured call."""
        if query is None or key is None or self.heads is not None:
            return
        self.heads = query, key
        sources = query.projections[0].given, key.projections[0].given
        self.other_source = None not in sources and sources[0] != sources[1]

    def number_heads(self, query: Columns | None, key: Columns | None) -> None:
        """Number the heads of the recorded call by the columns that made them."""
        if query is not None:
            self.numbers["query"] = query.numbers
        if key is not None:
            self.numbers["key"] = key.numbers[:: key.repeats]

    def project(
        self,
        rows: Callable[[Shape, str], Tensor],
        input_shape: Shape,
        *,
        length_first: bool,
        key_role: str,
        numbered: bool,
    ) -> None:
        """Copy sampled rows of projected queries and keys, then release the projections."""
        if self.heads is None or self.projected is not None:
            return
        query, key = (columns.distinct() for columns in self.heads)
        sampled = [
            _sample(columns, rows, input_shape, role, length_first=length_first)
            for columns, role in ((query, ""), (key, key_role))
        ]
        self.projected = sampled[0][0], sampled[1][0]
        self.left_out = max(sampled[0][1], sampled[1][1])
        own = None if key_role else key.tokens
        self.has_other_keys = own is not None and bool(((own < 0) & (key.pattern.kinds >= 0)).any())
        self.heads = None
        if numbered:
            self.numbers |= {"projected_query": query.numbers, "projected_key": key.numbers}


def _sample(
    columns: Columns,
    rows: Callable[[Shape, str], Tensor],
    input_shape: Shape,
    role: str,
    *,
    length_first: bool,
) -> tuple[SampledRows, float]:
    """Copy sampled rows of heads; also return the share of rows that are not known."""
    pattern, grid = columns.pattern, columns.pattern.kinds.shape
    tokens = None if role else pattern.tokens
    turned = not role and input_shape == grid[::-1] and (length_first or input_shape != grid)
    if tokens is None and turned:
        tokens = np.arange(pattern.kinds.size).reshape(input_shape).T
    shape = grid if tokens is None else input_shape
    indices, left_out = rows(shape, role), 0.0
    if pattern.is_plain and not turned and math.prod(shape) == pattern.kinds.size:  # nearly always
        values = _rows_of(columns.projections[0], indices, pattern.run)
    else:
        indices, places, left_out = _find(pattern, tokens, indices, math.prod(shape))
        values = _gather(columns, places)
    heads = pattern.which.shape[1:]
    return SampledRows(values.unflatten(1, heads), indices, shape, role), left_out


def _find(
    pattern: Pattern, tokens: Integers | None, indices: Tensor, count: int
) -> tuple[Tensor, Integers, float]:
    """Find the place in a pattern of each sampled token, and the share of those without one.

    `tokens` numbers the tokens of the pattern among all `count` tokens; None if in order.
    """
    order = np.arange(pattern.kinds.size) if tokens is None else tokens.ravel()
    known = np.flatnonzero((pattern.kinds.ravel() >= 0) & (order >= 0))
    places = np.full(count, -1)
    places[order[known]] = known
    taken = places[indices.numpy()]
    # A token may have no query or key at all; only unknown ones can have been left out.
    unknown = (pattern.kinds < 0).sum() / max(1, count)
    left_out = min(float((taken < 0).mean()), float(unknown)) if len(taken) else 0.0
    return indices[torch.from_numpy(taken >= 0)], taken[taken >= 0], left_out


def _gather(columns: Columns, places: Integers) -> Tensor:
    """Copy the heads of the tokens at some places, [tokens, heads x width], by kind and product."""
    pattern, kinds = columns.pattern, columns.pattern.kinds.ravel()[places]
    device = columns.projections[0].by_token[0].device
    shape = len(places), pattern.which[0].size
    values = apart.empty(shape, torch.float32, device)
    for kind in np.unique(kinds):
        of_kind, which = kinds == kind, pattern.which[kind].ravel()
        chosen = send(torch.from_numpy(of_kind).nonzero(), device)
        for number in np.unique(which):
            own = torch.from_numpy(np.flatnonzero(which == number))
            rows = torch.from_numpy(pattern.rows[number].ravel()[places[of_kind]])
            wanted = torch.from_numpy(pattern.columns[kind].ravel())[own]
            part = _rows_of(columns.projections[number], rows, wanted)
            values[chosen, send(own, device)] = part
    return values


def _rows_of(projection: Projection, rows: Tensor, columns: Tensor | slice) -> Tensor:
    """Copy some columns of some rows of a projection, in float32."""
    values, tokens = projection.by_token
    if isinstance(columns, Tensor):
        columns = send(columns, values.device)
    if values.ndim > tokens + 1:
        at = torch.unravel_index(send(rows, values.device), values.shape[:tokens])
        return apart.keep(values[at].flatten(1)[:, columns].float())
    if isinstance(columns, slice):
        return copy_rows(values[..., columns], rows)
    return copy_rows(values, rows)[:, columns]
