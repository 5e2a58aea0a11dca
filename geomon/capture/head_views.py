"""Views of attention: queries and keys as attended and as projected, scores, outputs of heads."""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from geomon.capture.attending.attention import (
    NO_SCORES,
    AttentionCall,
    NotUnderstoodError,
    SoftmaxCall,
    read_calls,
)
from geomon.capture.attending.max_logit import over_rows
from geomon.capture.attending.outputs import OutputSizes, sums_of_squares
from geomon.capture.attending.seen import SeenAttention
from geomon.capture.first_pass import BlockCall, StackPass
from geomon.capture.remarks import LayerRemarks
from geomon.capture.snapshot import (
    CAPTURED,
    PROJECTED,
    concat_heads,
    source_of,
    sources_shared_by,
    views_of,
)
from geomon.capture.tokens.known_tokens import KnownTokens
from geomon.failures import failures
from geomon.note_kinds import NoteKind

HEADS_ONLY = sources_shared_by("heads")
_LAST_QUERIES = 64  # per sequence, enough to show whether queries see keys of another sequence
_QUERY_VIEWS = ("query", "key", "bias", "scale", "softcap", "sink")
_PROJECTED_VIEWS = ("projected_query", "projected_key")
_PROJECTED_SEQUENCES = ("query_sequences", "key_sequences")

_NOT_PROJECTED = "its queries and keys were not traced back to products of tokens with weights"
_NOT_PROJECTED_ON = (
    "the outputs of its heads were not traced to an output projection: none was seen in the block, "
    "or it does not take each head's numbers whole"
)
_AS_ATTENDED = (
    "queries and keys were not traced back to products of tokens with weights: Q and K as attended "
    "are used instead"
)
_LEFT_OUT = (
    "at {percent:.0f} % of the tokens, queries or keys were not traced back to products with "
    "weights: these tokens are left out"
)
_OTHER_KEYS = (
    "some keys belong to other tokens (of another stack, for example): they are left out of keys "
    "as projected"
)
_NO_ATTENTION = (
    "no attention was seen in the block: neither fused attention (torch's own, flex attention, or "
    "a kernel registered as a torch operator; a kernel called through pybind is invisible), nor a "
    "softmax of scores of its tokens (linear attention has none; the fused inference path of "
    "nn.TransformerEncoder, in eval mode without gradients, shows none: measure by a probe)"
)
_WEIGHTS_CHANGED = (
    "the model changes the softmax weights before it mixes values with them: entropy and related "
    "values describe the softmax"
)
_CALLED_AGAIN = (
    "attention is called more than once in the block, and only one call is measured: the first "
    "from its own module, or else the first (a second attention is measured separately if it is a "
    "module with query and key projections under names such as to_q and to_k)"
)
_ACROSS = (
    "queries see keys of other sequences in their row: no mask separates packed sequences (models "
    "of transformers make one from position_ids if they get use_cache=False and no attention_mask)"
)

Views = tuple[dict[str, Any], dict[str, str]]  # captured ones, and reasons for missing ones


class HeadViews:
    """Makes the views of the attentions of one stack.

    Args:
        stack_pass: The pass.
        tokens: The known facts about its tokens.
        remarks: Takes remarks on the layers.
        not_run: Reason for missing views if a block did not run.
        projects: Whether queries and keys as projected are wanted.
    """

    def __init__(
        self, stack_pass: StackPass, tokens: KnownTokens, remarks: LayerRemarks, *, not_run: str,
        projects: bool,
    ) -> None:  # fmt: skip
        self._pass, self._tokens, self._remarks = stack_pass, tokens, remarks
        self._not_run, self._projects = not_run, projects
        self._block_calls = [call for _, call, _ in stack_pass.layers() if call is not None]

    def of_block(
        self, depth: int, block_call: BlockCall | None, indices: Sequence[int], stack: str
    ) -> Views:
        """Make the views of the heads of a block, which may be modules of their own."""
        return concat_heads([self.of(depth, block_call, index, stack) for index in indices])

    def of(self, depth: int, block_call: BlockCall | None, index: int, stack: str) -> Views:
        """Make the captured views of one attention, and the reasons for missing ones."""
        why = self._not_run if block_call is None else self._tokens.inverted_mask
        if block_call is None or why is not None:
            wanted = (view for view in CAPTURED if source_of(view) in HEADS_ONLY)
            return {}, dict.fromkeys(wanted, why or "")
        seen = block_call.seen(index)
        captured, missing = self._attention_views(seen)
        if seen.call is not None:
            for is_so, kind, remark in (
                (seen.weights.changed, NoteKind.WEIGHTS_CHANGED, _WEIGHTS_CHANGED),
                (seen.further, NoteKind.CALLED_AGAIN, _CALLED_AGAIN),
                (self._goes_across(seen.call, captured), NoteKind.ACROSS_SEQUENCES, _ACROSS),
            ):
                if is_so:
                    self._remarks.add(kind, "attention", depth, remark, stack)
        if self._projects:
            more, lacking = self._projected_views(depth, seen, captured, stack)
            captured, missing = captured | more, missing | lacking
        return captured, missing

    def _projected_views(
        self, depth: int, seen: SeenAttention, captured: Mapping[str, Any], stack: str
    ) -> Views:
        """Make the views of queries and keys as projected, or as attended if they are unknown."""
        sequences: Sequence[Tensor | None]
        if seen.projected is not None:
            left_out = _LEFT_OUT.format(percent=100 * seen.left_out)
            remarks = [
                (seen.has_other_keys, NoteKind.OTHER_KEYS, _OTHER_KEYS),
                (seen.left_out > 0, NoteKind.TOKENS_LEFT_OUT, left_out),
            ]
            both = [(rows, self._tokens.of(rows.shape, rows.role)) for rows in seen.projected]
            kept = [(rows.at(*tokens.among(rows.indices)), tokens) for rows, tokens in both]
            found = [rows.values for rows, _ in kept]
            sequences = [tokens.numbers(rows.indices) for rows, tokens in kept]
        elif "query" in captured:
            remarks = [(True, NoteKind.AS_ATTENDED, _AS_ATTENDED)]
            *found, sequences = _attended_rows(captured)
        else:
            return {}, dict.fromkeys(_PROJECTED_VIEWS, _NOT_PROJECTED)
        for is_so, kind, remark in remarks:
            if is_so:
                self._remarks.add(kind, PROJECTED, depth, remark, stack)
        known = (
            ()
            if any(x is None for x in sequences)
            else zip(_PROJECTED_SEQUENCES, sequences, strict=True)
        )
        return {**dict(zip(_PROJECTED_VIEWS, found, strict=True)), **dict(known)}, {}

    def numbers(self, block_call: BlockCall | None, index: int) -> dict[str, tuple[int, ...]]:
        """Return the traced numbers of an attention's heads if other ranks may hold others."""
        if block_call is None or not self._pass.is_part or index not in block_call.attentions:
            return {}
        seen = block_call.attentions[index]
        numbers = dict(seen.numbers)
        if seen.projected is None:  # queries and keys as attended are used instead
            numbers |= {f"projected_{v}": numbers[v] for v in ("query", "key") if v in numbers}
        return numbers

    def _goes_across(self, call: AttentionCall | SoftmaxCall, captured: dict[str, Any]) -> bool:
        """Whether the last queries of a packed row see keys of another sequence."""
        packed = self._tokens.of(self._pass.shape).packed
        if packed is None or "visible" not in captured:
            return False
        if (*packed.numbers.shape, captured["visible"].shape[3]) != (*call.shape, call.shape[1]):
            return False
        numbers = packed.numbers[call.sequences]
        asking = numbers.gather(1, call.places)[:, -_LAST_QUERIES:]
        visible = captured["visible"]
        visible = visible.expand(-1, -1, call.places.shape[1], -1)[:, :, -_LAST_QUERIES:]
        return bool((visible & (asking[:, None, :, None] != numbers[:, None, None])).any())

    def _attention_views(self, seen: SeenAttention) -> Views:
        """Make the views of queries and keys as attended, and the reasons for missing ones."""
        call, refusal = seen.call, seen.refused or seen.passed_over
        reason = f"attention is not rebuilt here: {refusal}" if refusal else _NO_ATTENTION
        if call is not None:
            try:
                mixes_nothing = seen.weights.changed is None  # no product with the weights
                if isinstance(call, SoftmaxCall) and call.made_of is None and mixes_nothing:
                    raise NotUnderstoodError(NO_SCORES.format(keys=call.scores.shape[3]))
                read = self._read[id(call)]
                if isinstance(read, dict):
                    return self._with_max_logits(seen, call, read)
                reason = _not_rebuilt(read)
            except failures() as error:  # hidden states, and other layers, do not depend on it
                reason = _not_rebuilt(error)
        return {}, dict.fromkeys(views_of("attention"), reason)

    def _with_max_logits(
        self, seen: SeenAttention, call: AttentionCall | SoftmaxCall, read: dict[str, Any]
    ) -> Views:
        """Add the largest scores to the views of a call, and say why views are missing."""
        captured = read | self._max_logits(seen.max_logits)
        if isinstance(call, SoftmaxCall) and call.joined and "max_logits" in captured:
            sink = captured.get("sink")
            captured["max_logits"] += torch.nan if sink is None else sink.cpu()
        lacking = _QUERY_VIEWS if "query" not in captured else ()
        missing = dict.fromkeys(lacking, getattr(call, "why_unknown", ""))
        if id(seen) in self._output_sums:
            captured["head_outputs"] = self._output_sums[id(seen)]
        elif seen.weights.outputs is not None:
            missing["head_outputs"] = _NOT_PROJECTED_ON
        return captured, missing

    def _called(self) -> Iterator[tuple[SeenAttention, AttentionCall | SoftmaxCall]]:
        """Iterate over the attentions of all layers whose call was seen."""
        for block_call in self._block_calls:
            for seen in block_call.attentions.values():
                if seen.call is not None:
                    yield seen, seen.call

    @functools.cached_property
    def _output_sums(self) -> dict[int, Tensor]:
        """Sums of the outputs of heads, by id of the attention; alike ones are added together."""
        groups: dict[Any, list[tuple[int, Tensor]]] = defaultdict(list)
        masks: dict[Any, Tensor | None] = {}
        for seen, call in self._called():
            outputs = seen.weights.outputs
            if not isinstance(outputs, OutputSizes) or outputs.norms is None:
                continue
            norms, known = outputs.norms, outputs.known
            form = norms.shape, norms.device, call.shape, None if known is None else id(seen)
            if form not in groups:
                valid = self._tokens.valid_at(call.shape, call.sequences, call.places)
                counted = None if valid is None else valid.cpu().flatten()
                masks[form] = counted if counted is None or known is None else counted[known]
            groups[form].append((id(seen), norms))
        found: dict[int, Tensor] = {}
        for form, group in groups.items():
            sums = sums_of_squares([norms for _, norms in group], masks[form])
            found |= zip((key for key, _ in group), sums, strict=True)
        return found

    @functools.cached_property
    def _read(self) -> dict[int, dict[str, Any] | Exception]:
        """The calls of all layers as read, by id; calls of one shape have the same padding."""
        groups: dict[Any, list[AttentionCall | SoftmaxCall]] = defaultdict(list)
        for _, call in self._called():
            groups[call.shape].append(call)
        found: dict[int, dict[str, Any] | Exception] = {}
        for calls in groups.values():
            valid = self._tokens.valid_at(calls[0].shape, calls[0].sequences, calls[0].places)
            found |= zip(map(id, calls), read_calls(calls, valid), strict=True)
        return found

    def _max_logits(self, calls: Sequence[Tensor]) -> dict[str, Any]:
        """Return the largest score of each head over all calls of one attention."""
        if not calls:
            return {}
        valid = self._tokens.valid_queries
        of_calls = [over_rows(x.cpu(), valid((x.shape[0], x.shape[2]))) for x in calls]
        largest = torch.stack(of_calls).amax(dim=0)
        return {"max_logits": largest.masked_fill(largest == -torch.inf, torch.nan)}


def _not_rebuilt(error: Exception) -> str:
    """Say why attention is missing."""
    if isinstance(error, NotUnderstoodError):
        return f"attention is not rebuilt here: {error}"
    return f"attention could not be rebuilt: {type(error).__name__}: {error}"


def _attended_rows(
    captured: Mapping[str, Any],
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return the real queries and the keys that some query sees, as rows, with sequence numbers."""
    query, key, visible = captured["query"], captured["key"], captured["visible"]
    visible = visible.expand(*query.shape[:3], key.shape[2])
    real, seen = visible.any(dim=3).any(dim=1), visible.any(dim=2).any(dim=1)
    sequences = (real.nonzero()[:, 0].cpu(), seen.nonzero()[:, 0].cpu())
    return query.transpose(1, 2)[real], key.transpose(1, 2)[seen], sequences
