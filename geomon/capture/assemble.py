"""From what a window kept to layers: views on the host, and why those that are missing are."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.capture.anatomy import projections
from geomon.capture.anatomy.blocks import Attention, Block
from geomon.capture.anatomy.projections import Evidence, Sizes, UndecidedError, find_sizes
from geomon.capture.attention import (
    HIDDEN,
    AttentionCall,
    NotUnderstoodError,
    SoftmaxCall,
    captured_attention,
)
from geomon.capture.first_pass import Kept, Pass, Visit, sample_places
from geomon.capture.sampling import at_places
from geomon.capture.snapshot import CAPTURED, SOURCES, Layer, Snapshot
from geomon.metrics.cautions import Note, grouped

CROSS = "cross"

_HIDDEN_ONLY = frozenset({"hidden"})
_HEADS_ONLY = SOURCES - _HIDDEN_ONLY
_OF_ROWS = ("hidden", "token_ids", "positions", "precision")
_OF_QUERIES = ("query", "key", "bias", "scale", "softcap", "sink")
_OF_PROJECTIONS = ("projected_query", "projected_key")

NOT_RUN = (
    "the block was not run under the window (called by .forward() directly, skipped, or compiled "
    "in a way that hides it); call the model itself, or measure by a probe"
)
ELSEWHERE = (
    "the block was run in another thread than the one that opened the window (nn.DataParallel): "
    "train with DistributedDataParallel, or measure the wrapped module by a probe"
)
DROPPED = "the block was not run in this pass, as others were (layers dropped at random, say)"
NO_ATTENTION = (
    "no attention call was seen in the block: it goes neither through transformers' attention "
    "interface nor through torch.nn.functional.scaled_dot_product_attention, and no softmax of "
    "scores of its tokens was seen"
)
_BY_HAND = (
    "attention is written out by hand: its scores were seen, and not the queries and keys that it "
    "attends with"
)
_BY_NAME_ALONE = (
    "a module is called attention, but neither queries and keys nor scores of it were seen: only "
    "hidden states are measured"
)
LAST = (
    "the blocks are lists of sublayers, whose sums are made outside any module: a layer is seen "
    "where it enters the next block, and the last one enters none"
)
_NO_TOKENS = "no embedding outside the blocks was given integers of the hidden states' shape"
_NESTED = "the hidden states are nested tensors, or there are none in what the block returns"


class Drawn(NamedTuple):
    """Which rows of the model's own tensors a layer holds.

    Attributes:
        rows: Of the hidden states, flat indices into all dimensions but the width.
        query_rows: Of what makes the projected queries, likewise.
        key_rows: Of what makes the projected keys, likewise.
        sequences: Of the attention call, [sequences].
        places: Of the sampled queries, [sequences, queries].
    """

    rows: Tensor | None
    query_rows: Tensor | None
    key_rows: Tensor | None
    sequences: Tensor | None
    places: Tensor | None


def assembled(passes: Sequence[Pass], sources: set[str], *, elsewhere: bool) -> Snapshot:
    """The layers of all stacks.

    A stack that was not run is left out where another was: the decoder of a model of which the
    encoder alone is used.

    Args:
        passes: What was kept, stack by stack.
        sources: What was wanted: of "hidden", "attention", "projection".
        elsewhere: Whether blocks were run in another thread.
    """
    layers: list[Layer] = []
    notes: list[Note] = []
    run = [found for found in passes if found.visits]
    for found in run or passes:
        stack = _StackLayers(found, sources, ELSEWHERE if elsewhere else NOT_RUN)
        layers += stack.layers()
        layers += stack.cross_layers(_cross_name(found, passes))
        notes += stack.notes()
    for found in passes:
        if run and found not in run:
            text = f"the blocks of '{found.stack.name}' were not run: they are left out"
            notes.append(Note(text, text))
    first = (run or [*passes])[0]
    rows = [len(found.entered.rows) for found in run if found.entered is not None]
    dtype = str(first.dtype).removeprefix("torch.") if run else ""
    return Snapshot(layers, min(rows, default=0), first.mode, dtype, notes)


def drawn(passes: Sequence[Pass], stack: str, index: int) -> Drawn:
    """Which rows a layer holds, by the stack and the index of the layer."""
    for found in passes:
        cross = stack == _cross_name(found, passes)
        if cross or stack == found.stack.name:
            if index == 0:
                return Drawn(found.entered and found.entered.rows, *[None] * 4)
            block, visit, _ = found.at(index)
            place = place_in(block, cross=cross)
            if visit is None or place is None:
                return Drawn(*[None] * 5)
            call = visit.calls.get(place)
            query = visit.projected.get((place, "query"))
            key = visit.projected.get((place, "key"), query)
            return Drawn(
                visit.hidden and visit.hidden.rows,
                query and query.rows,
                key and key.rows,
                None if call is None else call.sequences,
                None if call is None else call.places,
            )
    raise KeyError(f"there is no stack '{stack}'")


def place_in(block: Block, *, cross: bool) -> int | None:
    """Which attention of a block is its own or its cross-attention; 0 where none is known."""
    return 0 if not block.attentions and not cross else block.place_of(cross=cross)


def _cross_name(found: Pass, passes: Sequence[Pass]) -> str:
    """The name of the layers of a stack's cross-attention."""
    several = sum(_has_cross(other) for other in passes) > 1
    return f"{found.stack.name}.{CROSS}" if several else CROSS if _has_cross(found) else "-"


def _has_cross(found: Pass) -> bool:
    return any(block.place_of(cross=True) is not None for block in found.stack.blocks)


class _StackLayers:
    """Makes the layers of one stack."""

    def __init__(self, found: Pass, sources: set[str], not_run: str) -> None:
        self._pass = found
        self._sources = sources
        self._not_run = DROPPED if found.visits else not_run
        self._remarks: dict[tuple[str, str], list[int]] = {}  # and the layers where they are true

    def layers(self) -> list[Layer]:
        """What enters the first block, and what leaves each."""
        name = self._pass.stack.name
        captured, missing = self._rows(0, self._pass.entered)
        first = Layer(0, "input of the blocks", captured, missing, name, _HIDDEN_ONLY)
        return [first, *(self._layer(depth) for depth in range(1, self._pass.depth + 1))]

    def cross_layers(self, stack: str) -> list[Layer]:
        """The cross-attention of each block that has one, if any was run."""
        layers = []
        for depth in range(1, self._pass.depth + 1):
            block, visit, name = self._pass.at(depth)
            place = block.place_of(cross=True)
            if place is None or not self._sources & _HEADS_ONLY:
                continue
            captured, missing = self._heads(depth, block, visit, place, stack)
            name = f"{name}.{block.attentions[place].name}"
            layers.append(Layer(depth, name, captured, missing, stack, _HEADS_ONLY))
        return layers if any(layer.captured for layer in layers) else []

    def notes(self) -> list[Note]:
        """What is true of the layers made so far."""
        found = self._pass
        notes = grouped(self._remarks)
        valid = found.valid(found.shape) if found.shape else None
        if valid is not None and not bool(valid.all()):
            share = float((~valid).float().mean())
            stack = f"{found.stack.name}: " if found.stack.name else ""
            text = f"{stack}padding, {share:.0%} of the tokens, was left out"
            notes.append(Note(f"{stack}padding", text))
        return notes

    def _remark(self, subject: str, depth: int, remark: str, stack: str) -> None:
        subject = f"{stack}: {subject}" if stack else subject
        self._remarks.setdefault((subject, remark), []).append(depth)

    def _layer(self, depth: int) -> Layer:
        block, visit, name = self._pass.at(depth)
        kept = None if visit is None else visit.hidden
        captured, missing = self._rows(depth, kept, ran=visit is not None)
        place = place_in(block, cross=False)
        called = visit is not None and place is not None and place in visit.calls
        if place is None or not (called or (block.attends and block.attentions)):
            if block.attends and visit is not None and self._sources & _HEADS_ONLY:
                self._remark("attention", depth, _BY_NAME_ALONE, self._pass.stack.name)
            return Layer(depth, name, captured, missing, self._pass.stack.name, _HIDDEN_ONLY)
        if self._sources & _HEADS_ONLY:
            more, lacking = self._heads(depth, block, visit, place, self._pass.stack.name)
            captured, missing = captured | more, missing | lacking
        return Layer(depth, name, captured, missing, self._pass.stack.name)

    # -- hidden states -----------------------------------------------------------------------------

    def _rows(
        self, depth: int, kept: Kept | None, *, ran: bool = True
    ) -> tuple[dict[str, Any], dict[str, str]]:
        if kept is None:
            ran = ran and bool(self._pass.visits)
            seen = LAST if self._pass.stack.entering else _NESTED
            return {}, dict.fromkeys(_OF_ROWS, seen if ran else self._not_run)
        stack = self._pass.stack.name
        hidden = kept.values.cpu()
        finite = hidden.isfinite().all(dim=1)
        if not finite.all():
            lost = int((~finite).sum())
            remark = f"{lost} of {len(hidden)} rows are not finite and were left out"
            self._remark("hidden states", depth, remark, stack)
        if self._pass.local:
            self._remark("hidden states", depth, "this rank's part of a sharded tensor", stack)
        captured: dict[str, Any] = {
            "hidden": hidden[finite],
            "precision": torch.finfo(self._pass.dtype).eps,
            "positions": self._positions(kept)[finite],
        }
        ids = self._token_ids(kept.shape)
        if ids is None:
            return captured, {"token_ids": _NO_TOKENS}
        return captured | {"token_ids": ids.flatten().cpu()[kept.rows][finite]}, {}

    def _positions(self, kept: Kept) -> Tensor:
        """Place of each row in its sequence or in its feature map."""
        inner = math.prod(kept.shape[1:])
        if len(kept.shape) == 1:
            return kept.rows
        return kept.rows // inner if self._length_first() else kept.rows % inner

    def _length_first(self) -> bool:
        """Whether hidden states are [length, batch, width], by the modules or by the calls."""
        shape = self._pass.shape
        calls = [call for visit in self._pass.visits for call in visit.calls.values()]
        return self._pass.length_first or (
            len(shape) == 2
            and shape[0] != shape[1]
            and any(call.shape == shape[::-1] for call in calls)
        )

    def _token_ids(self, shape: tuple[int, ...]) -> Tensor | None:
        tables = [ids for ids in self._pass.token_ids if ids.shape == shape]
        tables = tables or [ids.T for ids in self._pass.token_ids if ids.shape == shape[::-1]]
        # Several tables may be given the tokens' shape (token types, positions): the token ids are
        # those that vary most.
        if len(tables) < 2:
            return tables[0] if tables else None
        return max(tables, key=lambda table: len(table.unique()))

    # -- heads -------------------------------------------------------------------------------------

    def _heads(
        self, depth: int, block: Block, visit: Visit | None, place: int, stack: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Captured views of one attention, and why others are missing."""
        wanted = {view for view, source in CAPTURED.items() if source in _HEADS_ONLY}
        if visit is None:
            return {}, dict.fromkeys(wanted, self._not_run)
        captured, missing = self._attention(visit, place)
        if "projection" not in self._sources:
            return captured, missing
        attention = block.attentions[place] if place < len(block.attentions) else None
        try:
            query, key = _projected(visit, place, attention, self._pass)
        except UndecidedError as error:
            if "query" not in captured:
                missing |= dict.fromkeys(_OF_PROJECTIONS, str(error))
                return captured, missing
            query, key = _as_attended(captured)
            remark = f"{error}: Q and K as attended stand for them"
            self._remark("projected Q and K", depth, remark, stack)
        captured |= {"projected_query": query.cpu(), "projected_key": key.cpu()}
        return captured, missing

    def _attention(self, visit: Visit, place: int) -> tuple[dict[str, Any], dict[str, str]]:
        call = visit.calls.get(place)
        reason = NO_ATTENTION
        if place in visit.refused:
            reason = f"attention is not rebuilt here: {visit.refused[place]}"
        if call is not None:
            try:
                captured = captured_attention(call, self._pass.valid_queries(call))
            except NotUnderstoodError as error:
                reason = f"attention is not rebuilt here: {error}"
            else:
                if isinstance(call, SoftmaxCall):
                    return captured, dict.fromkeys(_OF_QUERIES, _BY_HAND)
                return captured, {}
        return {}, dict.fromkeys((*_OF_QUERIES, "visible", "scores"), reason)


# -- queries and keys as projected ---------------------------------------------------------------


def _projected(
    visit: Visit, place: int, attention: Attention | None, found: Pass
) -> tuple[Tensor, Tensor]:
    """Queries and keys as projected, [rows, heads, head width] each.

    Raises:
        UndecidedError: There are none, or how they are laid out cannot be told.
    """
    if attention is None:
        raise UndecidedError("no projections of queries and keys were found")
    query, key = (visit.projected.get((place, which)) for which in ("query", "key"))
    kind, weights = attention.projections.kind, visit.weights.get(place)
    if query is None or (key is None and kind != "fused"):
        raise UndecidedError(
            f"the projections {', '.join(attention.projections.names)} were not called as modules"
        )
    if kind == "multihead":
        if weights is None or key is None:
            raise UndecidedError("in_proj_weight is sharded among ranks")
        return projections.multihead(weights, query.values, key.values)
    call = visit.calls.get(place)
    sizes = _sizes(attention, call)
    if kind == "fused":
        sample = visit.samples.get(place)
        evidence = (
            _evidence(call)
            if call is not None and found.as_batch(query.shape) == call.shape
            else None
        )
        return projections.fused(
            query.values.cpu(), None if sample is None else sample.cpu(), evidence, sizes
        )
    assert key is not None
    return projections.separate(query.values, key.values, sizes, halves=kind == "halves")


def _sizes(attention: Attention, call: AttentionCall | SoftmaxCall | None) -> Sizes:
    """Heads as attended, and where that is not seen, as the modules say."""
    said = find_sizes(attention.projections, [attention.module])
    if isinstance(call, AttentionCall):
        return said._replace(heads=call.heads, head_width=call.query.shape[-1])
    if isinstance(call, SoftmaxCall):
        return find_sizes(attention.projections, [_Heads(call.heads), attention.module])
    return said


class _Heads(NamedTuple):
    """What was seen of the number of heads, by the name that modules give it."""

    num_heads: int


def _evidence(call: AttentionCall | SoftmaxCall) -> Evidence:
    """What the rows of `Visit.samples` were attended with."""
    count = call.places.numel()
    chosen = sample_places(count)

    def rows(values: Tensor) -> Tensor:  # [sequences, heads, queries, ...] -> [samples, heads, ...]
        return values.transpose(1, 2).flatten(0, 1)[chosen.to(values.device)].cpu().float()

    places = call.places.flatten()[chosen, None].expand(-1, 2)
    if isinstance(call, SoftmaxCall):
        index = call.places.to(call.scores.device)[:, None, :, None]
        own = call.scores.gather(3, index.expand(-1, call.heads, -1, 1)).squeeze(3)
        own = own.masked_fill(own < HIDDEN, torch.nan)
        seen = rows((call.scores > HIDDEN).sum(dim=3))[:, :1]
        return Evidence(None, None, rows(own), torch.cat([places[:, :1], seen], dim=1))
    ahead = call.key.shape[2] - call.shape[1]  # keys kept from before
    key = at_places(call.key, call.places + ahead)
    return Evidence(rows(call.query).norm(dim=-1), rows(key).norm(dim=-1), None, places)


def _as_attended(captured: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Queries that are no padding, and keys that anyone may see, as rows."""
    query, key, visible = captured["query"], captured["key"], captured["visible"]
    visible = visible.expand(*query.shape[:3], key.shape[2])
    real, seen = visible.any(dim=3).any(dim=1), visible.any(dim=2).any(dim=1)
    return query.transpose(1, 2)[real], key.transpose(1, 2)[seen]
