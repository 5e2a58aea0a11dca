"""Keep sampled queries, keys and scores of the attentions that a tap sees."""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from geomon.capture.anatomy import Block
from geomon.capture.attending.attention import (
    Arguments,
    AttentionCall,
    NotUnderstoodError,
    SoftmaxCall,
    record_call,
)
from geomon.capture.attending.by_hand import (
    SEVERAL_SOFTMAXES,
    MadeOf,
    arrange_scores,
    arranged_sizes,
    is_second_softmax,
    record_softmax,
)
from geomon.capture.attending.fused import read_flash, read_flex, read_output, read_sdpa
from geomon.capture.attending.max_logit import max_logits_of_call, max_logits_of_scores
from geomon.capture.attending.outputs import OutputSizes
from geomon.capture.attending.proof import refute
from geomon.capture.attending.seen import Precedence, SeenAttention
from geomon.capture.first_pass import BlockCall, StackPass
from geomon.capture.modes import unseen
from geomon.capture.storage import local_shard
from geomon.capture.tap import (
    Columns,
    Known,
    Learner,
    Origins,
    Plans,
    Product,
    Shown,
    Stream,
    form_of,
)
from geomon.capture.tracker import Tracker

_DEPARTED = (
    "the block ran other operators than in the passes before: this pass was not measured, and the "
    "next one is understood anew"
)
_OTHER_TOKENS = "attention had {} x {} queries, but the block has {} tokens"

# Functions that read the arguments of a fused attention call, by route.
_FUSED = {"sdpa": read_sdpa, "flex": read_flex, "flash": read_flash}

Current = tuple[StackPass, BlockCall, Block]


# Guard while no window is open: nobody collects errors then.
failing_silently = functools.partial(suppress, Exception)


class AttentionRecorder:
    """Keeps what a tap sees of the attentions of the running block.

    Args:
        tracker: Knows which block is running.
        stream: Follows tensors between blocks.
        attends: Whether attention is wanted.
        max_logits: Whether the largest scores are wanted.
        outputs: Whether the outputs of heads are wanted.
        projects: Whether queries and keys as projected are wanted.
        plans: Plans of the blocks, which are made and used here.

    Attributes:
        guarded: Returns a context manager that keeps an error of its body for the notes.
        attends_outside: Whether attention was called outside the blocks.
    """

    def __init__(
        self,
        tracker: Tracker,
        stream: Stream,
        *,
        attends: bool,
        max_logits: bool,
        outputs: bool,
        projects: bool,
        plans: Plans,
    ) -> None:
        self._tracker, self._stream, self._plans = tracker, stream, plans
        self._attends, self._wants_max_logits = attends, max_logits
        self._wants_outputs, self._projects = outputs, projects
        self._unproved: SeenAttention | None = None  # its operator runs
        # By the shape of a batch: the sampled queries, and their indices if they are not all.
        self._queries: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
        self.guarded: Callable[[], AbstractContextManager[Any]] = failing_silently
        self.attends_outside = False

    def _current(self) -> Current | None:
        return self._tracker.current if self._attends else None

    def _outside(self) -> bool:
        return not (self._tracker.in_block or self._tracker.is_ignored())

    def on_failure(self, error: Exception) -> None:
        """Keep one of geomon's own errors for the notes (see `TapObserver`)."""
        self._spoil()
        with self.guarded():
            raise error

    def sight(self) -> Origins | Stream | None:
        """Return what answers for the tensors of the operators that run now."""
        current = self._current()
        if current is not None:
            return None if current[1].finished else current[1].provenance
        return self._stream if self._outside() else None

    def begin(self, block_call: BlockCall, module: nn.Module, given: Sequence[Any]) -> None:
        """Go along the plan of a block that is called, or follow its tensors to make one."""
        wanted = self._projects, self._wants_max_logits, self._wants_outputs
        block_call.known_as = module, form_of(module, given, wanted)
        plan = self._plans.of(*block_call.known_as)
        block_call.provenance = Learner() if plan is None else Known(plan)

    def _showing(self) -> Current | None:
        """Return the block call whose attention or choice is shown now; None outside of blocks."""
        current = self._current()
        if current is not None:
            current[1].goes_on |= current[1].finished
        return current

    def on_fused(self, route: str, given: dict[str, Any]) -> None:
        """Record the sampled queries of a call of fused attention (see `TapObserver`)."""
        current = self._showing()
        if current is None:
            self.attends_outside |= self._outside()
            return
        with self.guarded(), torch.no_grad(), unseen():
            self._take_fused(current, route, given)

    def _take_fused(self, current: Current, route: str, given: dict[str, Any]) -> None:
        """Find out which attention a fused call is, and measure it or say why not."""
        stack_pass, block_call, _ = current
        index = block_call.running_attention or 0
        inside = block_call.running_attention == index
        seen, provenance = block_call.seen(index), block_call.provenance
        again = isinstance(seen.call, AttentionCall)
        seen.further |= again
        try:
            call = _FUSED[route](given)
            _show_shape(call, stack_pass, block_call)
            columns = provenance.columns(call.query), provenance.columns(call.key)
            of_tokens = _are_tokens(call, columns[0], stack_pass.shape_at(block_call))
            if not seen.takes(Precedence(inside, of_tokens, fused=True)):
                return
            if route != "sdpa" and not of_tokens:
                count = math.prod(stack_pass.shape_at(block_call))
                raise NotUnderstoodError(_OTHER_TOKENS.format(*call.query.shape[::2], count))
            again = seen.call is not None
            seen.add_heads(*columns)
            call = _as_made(call, *columns)
            if not again:
                self._record_fused(current, index, route, call, columns)
            self._keep_max_logits(seen, call)
        except NotUnderstoodError as error:
            if not again and inside >= seen.precedence.inside:
                seen.refused = seen.refused or str(error)

    def _record_fused(
        self, current: Current, index: int, route: str, call: Arguments, columns: MadeOf
    ) -> None:
        """Record the first call of an attention, and what it shows of the tokens."""
        stack_pass, block_call, _ = current
        seen = block_call.seen(index)
        seen.call, seen.route = record_call(stack_pass.selection.memory.sampler, call), route
        self._unproved = seen if isinstance(block_call.provenance, Learner) else None
        if self._wants_outputs:
            self._await_outputs(block_call, seen, seen.call)
        if stack_pass.is_part:
            seen.number_heads(*columns)
        if call.rule is not None and call.query.shape[0] == 1:
            stack_pass.tokens.take_begins(call.query.shape[2], call.rule.begins)
        if call.mask is not None:
            _take_hidden_keys(current, index, len(call.query), call.mask, columns[1])

    def on_fused_output(self, route: str, given: dict[str, Any], result: Any) -> None:
        """Prove that the call just recorded was understood (see `TapObserver`)."""
        seen, self._unproved = self._unproved, None
        if seen is None or not isinstance(seen.call, AttentionCall):
            return
        with self.guarded(), torch.no_grad(), unseen(), suppress(NotUnderstoodError):
            read = read_output(route, given, result)
            refuted = "" if read is None else refute(seen.call, *read)
            if refuted:
                seen.refuse(refuted)
                self._spoil()

    def _await_outputs(
        self, block_call: BlockCall, seen: SeenAttention, call: AttentionCall | SoftmaxCall
    ) -> None:
        """Follow what becomes of the softmax weights of a recorded call, and of its outputs."""
        if self._wants_outputs:
            count, length = call.shape
            places, queries = self._queries.get(call.shape, (None, None))
            if places is not call.places:
                flat = (call.sequences[:, None] * length + call.places).flatten()
                queries = None if len(flat) == count * length else flat
                self._queries[call.shape] = call.places, queries
            seen.weights.outputs = OutputSizes((count, call.heads, length), queries)
        block_call.provenance.expect(seen.weights)

    def on_head_outputs(self, shown: Shown) -> None:
        """Keep the sizes of outputs of heads (see `TapObserver`)."""
        with self.guarded(), torch.no_grad(), unseen():
            shown.outputs.take(shown.rows, shown.where)

    def _spoil(self) -> None:
        """Make no plan of the running block."""
        current = self._current()
        if current is not None:
            current[1].provenance.failed = True

    def on_softmax(self, scores: Tensor, dim: int, *, logarithm: bool) -> None:
        """Record the sampled rows of a softmax of scores (see `TapObserver`)."""
        current = self._showing()
        if current is None:
            self.attends_outside |= scores.ndim >= 3 and not logarithm and self._outside()
            return
        stack_pass, block_call, block = current
        products = block_call.provenance.products(scores)
        index = _index_of_softmax(block, block_call, made=bool(products))
        if index is None or (logarithm and not products) or not stack_pass.shape:
            return
        seen = block_call.seen(index)
        inside = block_call.running_attention == index
        precedence = Precedence(inside, of_tokens=True, made=bool(products))
        if not seen.awaits(precedence):
            return
        if precedence > seen.precedence or not isinstance(seen.call, SoftmaxCall):
            with self.guarded(), torch.no_grad(), unseen():
                self._record_softmax(current, index, precedence, scores, dim, products)
        elif is_second_softmax(seen.call, scores, dim):
            if index < len(block.attentions):
                seen.refuse(SEVERAL_SOFTMAXES)
            else:
                seen.further = True

    def _record_softmax(
        self, current: Current, index: int, precedence: Precedence,
        scores: Tensor, dim: int, products: Sequence[Product],
    ) -> None:  # fmt: skip
        """Record a softmax if its scores belong to an attention, or say why not."""
        stack_pass, block_call, _ = current
        seen, provenance = block_call.seen(index), block_call.provenance
        possible = stack_pass.possible_shapes(block_call)
        # Attention may use one of several streams: its projections have that stream's tokens.
        taken = [(n,) for each in products[:1] for n in provenance.token_counts(each.left)]
        shape = min((*possible, *taken), key=lambda shape: not _fits(scores, dim, shape))
        rows = stack_pass.input_rows
        try:
            call, columns = record_softmax(
                stack_pass.selection.memory.sampler, scores, dim,
                (*shape, 0 if rows is None else rows.values.shape[-1]), products,
                scale=provenance.scale(scores), find_columns=provenance.columns,
            )  # fmt: skip
        except NotUnderstoodError as error:
            seen.passed_over = seen.passed_over or str(error)
            return
        if call is None or not seen.takes(precedence):
            return
        if shape in possible:
            stack_pass.take_attention(block_call, shape)
        seen.add_heads(*columns)
        seen.call, seen.route = call, "softmax"
        self._await_outputs(block_call, seen, call)
        if stack_pass.is_part:
            seen.number_heads(*columns)
        arranged = arrange_scores(local_shard(scores), dim, shape)
        if arranged is not None:
            if call.joined:  # measure scores relative to the sink's logit
                arranged = arranged[..., :-1] - arranged[..., -1:]
            self._keep_max_logits(seen, arranged)
            sequences = len(arranged)
            _take_hidden_keys(current, index, sequences, arranged, columns[1], are_scores=True)

    def on_choice(self, scores: Tensor, chosen: Tensor) -> None:
        """Count which experts the tokens of a block choose (see `TapObserver`).

        A router chooses once per token. The last choice counts, because groups of experts may be
        chosen first.
        """
        current = self._showing()
        if current is None or current[0].shape_at(current[1]) == ():
            return
        stack_pass, block_call, _ = current
        with self.guarded(), torch.no_grad(), unseen():
            scores, chosen = local_shard(scores), local_shard(chosen)
            tokens = math.prod(stack_pass.shape_at(block_call))
            if scores.ndim > 1 and scores.shape[:-1].numel() == tokens == chosen[..., 0].numel():
                flat = chosen.flatten()
                counts = torch.zeros(scores.shape[-1], device=flat.device)
                block_call.expert_counts = counts.index_add_(0, flat, torch.ones_like(flat).float())

    def finish(self, stack_pass: StackPass, block_call: BlockCall, block: Block) -> bool:
        """Copy queries and keys as projected when all attention of a block was seen.

        Returns whether anything may still be seen in the block.
        """
        origins, goes_on = block_call.provenance, True
        if isinstance(origins, Known):
            goes_on = origins.goes_on
            if origins.has_left() and block_call.known_as is not None:
                self._plans.leave(*block_call.known_as)
                for index in range(max(1, len(block.attentions))):
                    block_call.seen(index).refuse(_DEPARTED)
        elif isinstance(origins, Learner):
            block_call.plan = origins.plan()
        for index, seen in block_call.attentions.items() if self._projects else ():
            seen.project(
                stack_pass.tokens.rows,
                stack_pass.shape_at(block_call),
                length_first=stack_pass.tokens.length_first,
                key_role=role_of_keys(block, block_call, index),
                numbered=stack_pass.is_part,
            )
        return goes_on

    def end(self, block_call: BlockCall) -> None:
        """Keep what was understood of a block whose call is over."""
        plan, block_call.plan = block_call.plan, None
        if block_call.known_as is not None and plan is not None:
            plan = replace(plan, goes_on=block_call.goes_on)
            self._plans.learn(*block_call.known_as, plan)

    def _keep_max_logits(self, seen: SeenAttention, given: Arguments | Tensor) -> None:
        """Keep the largest scores of a call, given its arguments or its arranged scores."""
        if self._wants_max_logits:
            found = (
                max_logits_of_scores(given)
                if isinstance(given, Tensor)
                else max_logits_of_call(given)
            )
            if not seen.max_logits or seen.max_logits[0].shape[1] == found.shape[1]:
                seen.max_logits.append(found)


def _take_hidden_keys(
    current: Current, index: int, sequences: int, mask: Tensor, keys: Columns | None, *,
    are_scores: bool = False,
) -> None:  # fmt: skip
    """Keep which keys an attention hides from every query, because they may be padding.

    Keys that are not tokens of the block are removed from the mask or scores first.
    """
    stack_pass, block_call, block = current
    if keys is not None and keys.tokens is not None and mask.shape[-1] == keys.tokens.shape[1]:
        own = np.flatnonzero((keys.tokens >= 0).all(axis=0))
        if len(own) < mask.shape[-1] and (np.diff(keys.tokens[:, own], axis=1) == 1).all():
            mask = mask[..., torch.from_numpy(own)]
    role = role_of_keys(block, block_call, index)
    stack_pass.tokens.padding.take_attention(
        role, sequences, local_shard(mask), are_scores=are_scores
    )


def role_of_keys(block: Block, block_call: BlockCall, index: int) -> str:
    """Return the role of an attention's keys: "key" if they come from another stack, else ""."""
    if index >= len(block.attentions):
        return ""
    attention = block.attentions[index]
    side = attention.label and block_call.seen(index).other_source
    return "key" if attention.cross or side else ""


def _as_made(call: Arguments, query: Columns | None, key: Columns | None) -> Arguments:
    """Undo zero padding of head widths and repetition of keys for grouped queries."""
    if query is not None and query.width < call.query.shape[-1]:
        width = query.width
        call = call._replace(query=call.query[..., :width], key=call.key[..., :width])
    return call if key is None else call._replace(key=call.key[:, :: key.repeats])


def _show_shape(given: Arguments, stack_pass: StackPass, block_call: BlockCall) -> None:
    """Take the shape of hidden states over all ranks from queries, which a rank has in full."""
    sequences, _, queries, _ = given.query.shape
    possible = stack_pass.possible_shapes(block_call)
    attended = {(sequences, queries), (queries, sequences)}
    shown = next((shape for shape in possible if shape in attended), None)
    if shown is not None:
        stack_pass.take_attention(block_call, shown)


def _fits(scores: Tensor, dim: int, shape: tuple[int, ...]) -> bool:
    """Whether scores have as many sequences and queries as hidden states of a shape."""
    scores = local_shard(scores)
    sizes = arranged_sizes(tuple(scores.shape), dim % scores.ndim, shape)
    return sizes is not None and (len(shape) == 1 or sorted(sizes[::2]) == sorted(shape))


def _are_tokens(given: Arguments, query: Columns | None, shape: tuple[int, ...]) -> bool:
    """Whether queries are the block's tokens, or those that are not padding.

    A function may share another's name but order its arguments differently.
    """
    sequences, _, queries, _ = given.query.shape
    traced = query is not None and query.tokens is not None
    return traced or not shape or sequences * queries == math.prod(shape)


def _index_of_softmax(block: Block, block_call: BlockCall, *, made: bool) -> int | None:
    """Return the index of the attention that a softmax belongs to, or None."""
    inside = block_call.running_attention is not None or all(
        attention.module is block.module for attention in block.attentions
    )
    return (block_call.running_attention or 0) if inside or made else None
