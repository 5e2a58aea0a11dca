"""Build layers from what a window kept, with their views on one device.

Padding, masks and projection layouts are decided on the host, from small tensors. Rows stay where
they were captured until a layer is complete and `Layer.to` moves it. Every missing view gets a
reason.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from geomon.capture.additions import with_additions
from geomon.capture.anatomy import CROSS, Block
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
from geomon.capture.first_pass import BlockCall, Shape, StackPass, attention_key
from geomon.capture.snapshot import (
    ADDITIONS,
    CAPTURED,
    EMBEDDING,
    FINAL_NORM,
    HOST,
    LAST,
    PROJECTED,
    ROW_VIEWS,
    UNEMBEDDING,
    Layer,
    Part,
    PassInfo,
    Snapshot,
    concat_heads,
    group_by_layer,
    source_of,
    wait_for_copies,
)
from geomon.capture.tokens.pass_tokens import once
from geomon.capture.tokens.sampling import RowSampler, SampledRows, copy_rows
from geomon.capture.weights import present_weight, to_numbers
from geomon.failures import failures
from geomon.note import Note
from geomon.note_kinds import NoteKind

# A kind, its subject and the reason.
_Remark = tuple[NoteKind, str, str]

_HIDDEN_ONLY = frozenset({"hidden", "last"})
_HIDDEN = "hidden states"  # the subject of remarks on them
_LAST_QUERIES = 64  # per sequence, enough to show whether queries see keys of another sequence
_HEADS_ONLY = frozenset({"attention", "projection"})
_ROW_VIEWS = *(view for view in ROW_VIEWS if view not in ADDITIONS), "precision"
_QUERY_VIEWS = ("query", "key", "bias", "scale", "softcap", "sink")
_PROJECTED_VIEWS = ("projected_query", "projected_key")
_PROJECTED_SEQUENCES = ("query_sequences", "key_sequences")

_NOT_RUN = (
    "the block did not run while the window was open (it was called by .forward() directly, was "
    "skipped, was compiled in a way that hides it, was captured in a CUDA graph or replayed from "
    "one, or a copy of the model ran instead); call the model itself, or measure by a probe"
)
_OTHER_THREAD = (
    "the block ran in a thread other than the one that opened the window (nn.DataParallel): "
    "train with DistributedDataParallel, or measure the wrapped module by a probe"
)
_DROPPED = (
    "the block did not run in this pass although others did (layers may be dropped at random, or "
    "blocks may have been replaced while the model was watched)"
)
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
_SIDE_NOT_CALLED = "it was not seen in this pass: it is left out"
_BY_NAME_ALONE = (
    "a module is named attention, but neither its queries and keys nor its scores were seen: only "
    "hidden states are measured"
)
_LAST = (
    "the blocks are lists of sublayers, whose sums are made outside any module: a layer is seen "
    "when it enters the next block, and the last layer enters none"
)
_ADDS_OUTSIDE = (
    "blocks return branches, and their input is added outside of them: layers are the sums, which "
    "enter the next block or the final norm"
)
_LAST_BRANCH = "; the last layer is the branch, because its sum does not enter a norm module"
_PASSED_OVER = (
    "the blocks ran {count} times: the first run is measured (the first that records gradients, if "
    "any does)"
)
_ROUTED = (
    "the block received fewer tokens than other blocks (tokens may be routed past it): it is not "
    "known which tokens of the sequence these are"
)
_NO_TOKENS = "no embedding outside the blocks received integers of the hidden states' shape"
_FEWER_TOKENS = (
    "; one received fewer: some hidden states belong to no token of the text (virtual tokens of "
    "prompt tuning, for example), and they count as rows"
)
_LATER_STAGE = "only the first pipeline stage knows them, and its rows were not gathered"
_ACROSS = (
    "queries see keys of other sequences in their row: no mask separates packed sequences (models "
    "of transformers make one from position_ids if they get use_cache=False and no attention_mask)"
)
_NOT_BEFORE = "the layer before was not seen, or has other rows or another width"
_PACKED = "the hidden states are [tokens, width]: the boundaries between sequences are unknown"
_LAST_UNKNOWN = (
    "it became known only after the pass which token is the last of its sequence: pass the model a "
    "mask [batch, length] as attention_mask"
)
_ENDS_LATE = (
    "the hidden states are [tokens, width]: only the attention that follows shows where a sequence "
    "ends, after the rows were kept"
)
_NESTED = (
    "the hidden states are nested tensors (the fused inference path of nn.TransformerEncoder makes "
    "them from a padded batch: measure by a probe), or the block returned none"
)
_NO_FINAL_NORM = (
    "no module outside the blocks with a norm class received the output of the last block (blocks "
    "that end in a norm need none; a norm that is a function is invisible)"
)
_NO_MATRIX = {
    EMBEDDING: "no embedding table was found outside the blocks",
    UNEMBEDDING: (
        "no linear module outside the blocks has one output for each row of an embedding table"
    ),
}
_NO_ROWS_OF = "its weight, of class {kind}, does not give its rows ({error})"
_NO_MATRICES = "its weights are not whole matrices on this rank (they may be sharded)"
_IN_PARTS = "its weight is not a matrix on this rank (it may be sharded)"


def build_snapshot(
    passes: Sequence[StackPass],
    views: set[str],
    *,
    other_thread: bool,
    no_rows: str | None = None,
    final_norm: bool = False,
    matrices: Iterable[Layer] = (),
    notes: Iterable[Note] = (),
    device: torch.device = HOST,
    wait: bool = True,
) -> Snapshot:
    """Build the snapshot of a pass; stacks that did not run are left out if another one ran."""
    run = [stack_pass for stack_pass in passes if stack_pass.block_calls]
    counted = run or passes
    if not counted:  # a stage of a pipeline without blocks
        return Snapshot([], PassInfo(0, "", "", [*notes]))
    not_run = no_rows or (_OTHER_THREAD if other_thread else _NOT_RUN)
    layers, rows, remarks = list[Layer](), list[int](), list[Note]()
    for stack_pass in counted:
        builder = StackBuilder(stack_pass, views, not_run, alone=len(passes) == 1)
        layers += builder.layers()
        rows += builder.input_counts()
        for label in stack_pass.stack.side_labels:
            layers += builder.side_layers(label, side_stack_name(stack_pass, label, passes))
        if final_norm and not stack_pass.stack.behind:
            alone = len({other.stack.name for other in counted}) < 2
            layers.append(builder.final_norm(_name_side_stack(stack_pass, FINAL_NORM, alone=alone)))
        remarks += builder.notes()
    remarks += [*_of_stacks_left_out(passes, counted), *notes]
    first = counted[0]
    dtype = str(first.dtype).removeprefix("torch.") if run else ""
    info = PassInfo(
        min(rows, default=0), first.mode, dtype, remarks,
        batch=first.tokens.checksum, token_ids=first.tokens.ids_checksum,
    )  # fmt: skip
    return _on_device(Snapshot([*layers, *(matrices if run else ())], info), device, wait=wait)


def _of_stacks_left_out(
    passes: Sequence[StackPass], counted: Sequence[StackPass]
) -> Iterator[Note]:
    """Make a note on each stack that did not run although others did."""
    for stack_pass in passes:
        if stack_pass not in counted:
            text = f"the blocks of '{stack_pass.stack.name}' did not run: they are left out"
            yield Note(NoteKind.STACK_LEFT_OUT, text, about=stack_pass.stack.name)


def _on_device(snapshot: Snapshot, device: torch.device, *, wait: bool) -> Snapshot:
    """Move the layers of a snapshot to a device."""
    moved = [layer.to(device, wait=False) for layer in snapshot.layers]
    if wait and device == HOST:
        wait_for_copies(set().union(*(layer.devices for layer in snapshot.layers)))
    return Snapshot(moved, snapshot.info)


def matrix_layer(name: str, module: nn.Module | None, sampler: RowSampler) -> Layer:
    """Make a layer from rows of a weight matrix, in a stack of its own."""
    captured: dict[str, Any] = {}
    reason = _NO_MATRIX[name] if module is None else _IN_PARTS
    weight = None if module is None else present_weight(module)
    if weight is not None and weight.ndim == 2 and not hasattr(weight, "to_local"):
        try:
            rows = copy_rows(weight, sampler.sample_places(len(weight))).cpu()
            captured = {"hidden": rows, "precision": torch.finfo(weight.dtype).eps}
        except failures() as error:  # a quantised weight does what its own code can do
            kind = type(weight).__name__
            reason = _NO_ROWS_OF.format(kind=kind, error=type(error).__name__)
    missing = {} if captured else dict.fromkeys(_ROW_VIEWS, reason)
    return Layer(0, name, captured, missing, name, frozenset({"hidden"}), of_weights=True)


def side_stack_name(stack_pass: StackPass, label: str, passes: Sequence[StackPass]) -> str:
    """Name the stack that holds the layers of cross-attention or of a further attention."""
    having = {other.stack.name for other in passes if label in other.stack.side_labels}
    taken = any(other.stack.name == label for other in passes)
    return _name_side_stack(stack_pass, label, alone=len(having) < 2 and not taken)


def _name_side_stack(stack_pass: StackPass, label: str, *, alone: bool) -> str:
    """Name a side stack: the label if it is unique, else "stack.label"."""
    return label if alone else f"{stack_pass.stack.name}.{label}".strip(".")


class StackBuilder:
    """Builds the layers of one stack; `not_run` is the reason for missing views if no block ran."""

    def __init__(
        self,
        stack_pass: StackPass,
        views: set[str],
        not_run: str,
        *,
        alone: bool,
    ) -> None:
        self._pass, self._layers = stack_pass, stack_pass.layers()
        self._tokens = stack_pass.settle()
        self._are_sums = stack_pass.adds_outside
        read = {id(x): x.weight_norms for x in stack_pass.block_calls if x.weight_norms is not None}
        self._norms = dict(zip(read, to_numbers([*read.values()]), strict=True))
        self._alone = alone
        self._sources = set(map(source_of, views))
        self._wanted_additions = views & set(ADDITIONS)
        self._not_run = _DROPPED if stack_pass.block_calls else not_run
        self._inverted = self._tokens.padding.contradiction(self._tokens.batch)
        self._before = stack_pass.stack.before
        self._answers: dict[tuple[Any, ...], Any] = {}  # shared by layers with equal rows
        # Per stack: depths of each remark.
        self._remarks: dict[str, dict[_Remark, list[int]]] = defaultdict(dict)
        # Per subject and depth: number of rows that are not finite, and of all rows.
        self._lost: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)

    def layers(self) -> list[Layer]:
        """Build the outputs of all blocks, and the first block's input if this rank has it."""
        first: list[Layer] = []
        if not self._before:
            why = self._why_no_rows(ran=bool(self._pass.block_calls))
            stack, rows = self._pass.stack.name, self._pass.input_rows
            first = [self._of_hidden_states(0, "input of the blocks", rows, why, stack)]
        kept = [self._rows_behind(block_call) for _, block_call, _ in self._layers]
        if self._wanted_additions:
            of_last = ADDITIONS[1] in self._wanted_additions
            kept = with_additions([self._pass.input_rows, *kept], of_last=of_last)
        made = zip(self._layers, kept, strict=True)
        return [*first, *(self._layer(n, *each, rows) for n, (each, rows) in enumerate(made, 1))]

    def input_counts(self) -> list[int]:
        """Return the number of rows that enter the first block, if they were read."""
        rows = self._pass.input_rows
        return [] if rows is None else [len(self._pass.without_padding(rows, self._tokens).indices)]

    def side_layers(self, label: str, stack: str) -> list[Layer]:
        """Build the cross-attention, or a further attention, of each block that has one."""
        layers = []
        for depth, (block, block_call, name) in enumerate(self._layers, 1):
            index = block.attention_index(label)
            if index is None or not self._sources & _HEADS_ONLY:
                continue
            place = self._before + depth
            captured, missing = self._head_views(place, block_call, index, stack)
            shown = f"{name}.{block.attentions[index].name}"
            part = Part(heads=self._head_numbers(block_call, index))
            layers.append(Layer(place, shown, captured, missing, stack, _HEADS_ONLY, part=part))
        if any(layer.captured for layer in layers):
            return layers
        if self._pass.block_calls and label != CROSS:
            for layer in layers:
                self._remark(
                    (NoteKind.ATTENTION_NOT_CALLED, "attention", _SIDE_NOT_CALLED),
                    layer.index,
                    stack,
                )
        return []

    def final_norm(self, stack: str) -> Layer:
        """Build the layer of the final norm's output."""
        rows, name = self._pass.normed or (None, FINAL_NORM)
        why = _NO_FINAL_NORM if self._pass.block_calls else self._not_run
        return self._of_hidden_states(self._before + len(self._layers), name, rows, why, stack)

    def _of_hidden_states(
        self, depth: int, name: str, kept: SampledRows | None, why: str, stack: str
    ) -> Layer:
        captured, missing, part = self._row_views(depth, kept, why)
        return Layer(depth, name, captured, missing, stack, _sources_of(kept), part=part)

    def notes(self) -> list[Note]:
        """Turn the remarks on the layers built so far into notes."""
        stack_pass, stack = self._pass, self._pass.stack.name
        notes = [
            note
            for of, remarks in self._remarks.items()
            for (kind, subject, why), depths in remarks.items()
            for note in group_by_layer(kind, {(subject, why): depths}, of)
        ]
        notes += [_rows_lost(subject, lost, stack) for subject, lost in self._lost.items()]
        notes += self._tokens.notes(stack)
        texts = {**stack_pass.remarks}
        if self._are_sums:
            last = stack_pass.block_calls[-1].summed
            texts[NoteKind.SUMS_OUTSIDE] = _ADDS_OUTSIDE + _LAST_BRANCH * (last is None)
        if stack_pass.passed_over:
            ran = _PASSED_OVER.format(count=stack_pass.passed_over + 1)
            texts[NoteKind.RAN_SEVERAL_TIMES] = ran
        return notes + [Note(kind, text, stack) for kind, text in texts.items()]

    def _remark(self, remark: _Remark, depth: int, stack: str) -> None:
        depths = self._remarks[stack].setdefault(remark, [])
        if depth not in depths:
            depths.append(depth)

    def _layer(
        self, depth: int, block: Block, block_call: BlockCall | None, name: str,
        kept: SampledRows | None,
    ) -> Layer:  # fmt: skip
        """Build the output of a block from its rows, which were compared with the layer before."""
        depth += self._before
        stack = self._pass.stack.name
        why = self._why_no_rows(ran=block_call is not None)
        captured, missing, part = self._row_views(depth, kept, why)
        sources = _sources_of(kept) | {"weights"}
        for view in self._wanted_additions - captured.keys():
            if source_of(view) in sources:
                missing.setdefault(view, _NOT_BEFORE)
        if id(block_call) in self._norms:
            captured["weight_norms"] = self._norms[id(block_call)]
        elif "weights" in self._sources:
            missing["weight_norms"] = self._not_run if block_call is None else _NO_MATRICES
        if block_call is not None and block_call.expert_counts is not None:
            captured["expert_counts"] = block_call.expert_counts
            sources |= {"routing"}
        indices = _attentions_of(block, block_call)
        if indices:
            sources |= _HEADS_ONLY
        if indices and self._sources & _HEADS_ONLY:
            heads = [self._head_views(depth, block_call, i, stack) for i in indices]
            more, lacking = concat_heads(heads)
            captured, missing = captured | more, missing | lacking
            if len(indices) == 1:
                part = replace(part, heads=self._head_numbers(block_call, indices[0]))
        elif block.attends and block_call is not None and self._sources & _HEADS_ONLY:
            self._remark((NoteKind.BY_NAME_ALONE, "attention", _BY_NAME_ALONE), depth, stack)
        return Layer(depth, name, captured, missing, stack, sources, part=part)

    def _rows_behind(self, block_call: BlockCall | None) -> SampledRows | None:
        """Return the rows that a block hands on, or those of the sum that the model makes of it."""
        if block_call is None or not self._are_sums or block_call.summed is None:
            return None if block_call is None else block_call.hidden
        return block_call.summed

    # -- hidden states -----------------------------------------------------------------------------

    def _why_no_rows(self, *, ran: bool) -> str:
        """Say why the hidden states of a block are missing."""
        not_read = self._pass.why_not_read or (_LAST if self._pass.stack.entering else _NESTED)
        return not_read if ran else self._not_run

    def _row_views(
        self, depth: int, kept: SampledRows | None, why: str
    ) -> tuple[dict[str, Any], dict[str, str], Part]:
        """Make the captured views of hidden states, and the reasons for missing ones."""
        if kept is None or self._inverted is not None:
            wanted = (view for view in CAPTURED if source_of(view) in _HIDDEN_ONLY)
            reason = why if kept is None else self._inverted or ""
            return {}, dict.fromkeys(wanted, reason), Part()
        kept = self._pass.without_padding(kept, self._tokens)
        for kind, text in self._tokens.remarks(kept.shape):
            self._remark((kind, _HIDDEN, text), depth, self._pass.stack.name)
        captured, missing, rows = self._views_of(depth, kept, _HIDDEN)
        last_rows = None
        if "last" in self._sources & _sources_of(kept):
            last = self._last_tokens(kept)
            if isinstance(last, str):
                missing |= {LAST + view: last for view in _ROW_VIEWS}
            else:
                more, lacking, last_rows = self._views_of(depth, last, "last tokens")
                captured |= {LAST + view: value for view, value in more.items()}
                missing |= {LAST + view: why for view, why in lacking.items()}
        part = Part(rows, last_rows, kept.start, tokens_elsewhere=self._before > 0)
        return captured, missing, part

    def _last_tokens(self, kept: SampledRows) -> SampledRows | str:
        """Return the last tokens, now that padding is known, or the reason why there are none."""
        if self._pass.is_routed(kept.shape):
            return _ROUTED
        if kept.last is None:
            return _PACKED if self._tokens.packed(kept.shape) is None else _ENDS_LATE
        places = self._tokens.last_of(kept.shape, self._pass.tokens.max_rows)
        among, indices = self._among(kept.last.indices, places)
        if len(among) < len(places) and not kept.last.start:
            return _LAST_UNKNOWN
        return kept.last.at(among, indices)

    @once
    def _among(self, indices: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Find which of some rows are at given places, and their indices."""
        among = torch.isin(indices, places).nonzero().squeeze(1)
        return among, indices[among]

    def _views_of(
        self, depth: int, kept: SampledRows, subject: str
    ) -> tuple[dict[str, Any], dict[str, str], Tensor | None]:
        """Make the captured views of finite rows, the reasons for missing ones, and row numbers.

        Row numbers are returned only if ranks share the rows.
        """
        finite = kept.values.isfinite().all(dim=1).cpu()
        if not finite.all():
            self._lost[subject][depth] = int((~finite).sum()), len(finite)
            kept = kept.at(finite.nonzero().squeeze(1))
        captured, missing, rows = self._facts_of(kept.indices, kept.shape)
        if "positions" in missing:
            remark = NoteKind.ROUTED, subject, missing["positions"]
            self._remark(remark, depth, self._pass.stack.name)
        rest = {"hidden": kept.values, "precision": torch.finfo(self._pass.dtype).eps}
        rest |= {} if kept.additions is None else {"additions": kept.additions}
        return rest | captured, dict(missing), rows

    @once
    def _facts_of(
        self, indices: Tensor, shape: Shape
    ) -> tuple[dict[str, Any], dict[str, str], Tensor | None]:
        """Make the views of the tokens of some rows, which layers with these rows share."""
        tokens, routed = self._tokens, self._pass.is_routed(shape)
        ids = tokens.ids.find(shape)
        found = {
            "positions": None if routed else tokens.positions(indices, shape),
            "sequences": tokens.numbers(indices, shape),
            "token_ids": ids and ids.arrange(ids.lookup.ids).flatten().cpu()[indices],
        }
        # With several stacks, the integers may belong to another one.
        fewer = ids is None and self._alone and tokens.ids.fewer_than(self._pass.shape)
        no_ids = _LATER_STAGE if self._before else _NO_TOKENS + _FEWER_TOKENS * fewer
        why = {"positions": _ROUTED, "sequences": _PACKED, "token_ids": no_ids}
        captured = {view: value for view, value in found.items() if value is not None}
        missing = {view: why[view] for view in found if view not in captured}
        rows = self._pass.tokens.number(indices, shape) if self._pass.is_part else None
        return captured, missing, rows

    # -- heads -------------------------------------------------------------------------------------

    def _head_views(
        self, depth: int, block_call: BlockCall | None, index: int, stack: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Make the captured views of one attention, and the reasons for missing ones."""
        why = self._not_run if block_call is None else self._inverted
        if block_call is None or why is not None:
            wanted = (view for view in CAPTURED if source_of(view) in _HEADS_ONLY)
            return {}, dict.fromkeys(wanted, why or "")
        seen = block_call.seen(index)
        captured, missing = self._attention_views(seen)
        if seen.call is not None:
            for is_so, kind, text in (
                (seen.weights.changed, NoteKind.WEIGHTS_CHANGED, _WEIGHTS_CHANGED),
                (seen.further, NoteKind.CALLED_AGAIN, _CALLED_AGAIN),
                (self._goes_across(seen.call, captured), NoteKind.ACROSS_SEQUENCES, _ACROSS),
            ):
                if is_so:
                    self._remark((kind, "attention", text), depth, stack)
        if "projection" in self._sources:
            more, lacking = self._projected_views(depth, seen, captured, stack)
            captured, missing = captured | more, missing | lacking
        return captured, missing

    def _projected_views(
        self, depth: int, seen: SeenAttention, captured: Mapping[str, Any], stack: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Make the views of queries and keys as projected, or as attended if they are unknown."""
        sequences: Sequence[Tensor | None]
        if seen.projected is not None:
            left_out = _LEFT_OUT.format(percent=100 * seen.left_out)
            remarks = [
                (seen.has_other_keys, NoteKind.OTHER_KEYS, _OTHER_KEYS),
                (seen.left_out > 0, NoteKind.TOKENS_LEFT_OUT, left_out),
            ]
            kept = [self._tokens.without_padding(rows, rows.shape) for rows in seen.projected]
            found = [rows.values for rows in kept]
            sequences = [self._tokens.numbers(x.indices, x.shape, x.role) for x in kept]
        elif "query" in captured:
            remarks = [(True, NoteKind.AS_ATTENDED, _AS_ATTENDED)]
            *found, sequences = _attended_rows(captured)
        else:
            return {}, dict.fromkeys(_PROJECTED_VIEWS, _NOT_PROJECTED)
        for is_so, kind, text in remarks:
            if is_so:
                self._remark((kind, PROJECTED, text), depth, stack)
        known = (
            ()
            if any(x is None for x in sequences)
            else zip(_PROJECTED_SEQUENCES, sequences, strict=True)
        )
        return {**dict(zip(_PROJECTED_VIEWS, found, strict=True)), **dict(known)}, {}

    def _head_numbers(self, block_call: BlockCall | None, index: int) -> dict[str, tuple[int, ...]]:
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
        packed = self._tokens.packed(self._pass.shape)
        if packed is None or "visible" not in captured:
            return False
        if (*packed.numbers.shape, captured["visible"].shape[3]) != (*call.shape, call.shape[1]):
            return False
        numbers = packed.numbers[call.sequences]
        asking = numbers.gather(1, call.places)[:, -_LAST_QUERIES:]
        visible = captured["visible"]
        visible = visible.expand(-1, -1, call.places.shape[1], -1)[:, :, -_LAST_QUERIES:]
        return bool((visible & (asking[:, None, :, None] != numbers[:, None, None])).any())

    def _attention_views(self, seen: SeenAttention) -> tuple[dict[str, Any], dict[str, str]]:
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
        return {}, dict.fromkeys(
            (*_QUERY_VIEWS, "visible", "scores", "max_logits", "head_outputs"), reason
        )

    def _with_max_logits(
        self, seen: SeenAttention, call: AttentionCall | SoftmaxCall, read: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, str]]:
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

    @functools.cached_property
    def _output_sums(self) -> dict[int, Tensor]:
        """Sums of the outputs of heads, by id of the attention; alike ones are added together."""
        groups: dict[Any, list[tuple[int, Tensor]]] = defaultdict(list)
        masks: dict[Any, Tensor | None] = {}
        for _, block_call, _ in self._layers:
            for seen in () if block_call is None else block_call.attentions.values():
                outputs, call = seen.weights.outputs, seen.call
                if call is None or not isinstance(outputs, OutputSizes) or outputs.norms is None:
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
        """The calls of all layers as read, by id; those of one shape have the same padding."""
        groups: dict[Any, list[AttentionCall | SoftmaxCall]] = defaultdict(list)
        for _, block_call, _ in self._layers:
            for seen in () if block_call is None else block_call.attentions.values():
                if seen.call is not None:
                    groups[seen.call.shape].append(seen.call)
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


def _attentions_of(block: Block, block_call: BlockCall | None) -> list[int]:
    """List the attentions that make up the heads of a block; none if it is not known to attend."""
    index = attention_key(block)
    if index is None:
        return []
    seen = None if block_call is None else block_call.attentions.get(index)
    called = seen is not None and seen.call is not None
    shown = called or (block.attends and block.attentions)
    return (block.attention_indices() or [index]) if shown else []


def _rows_lost(subject: str, lost: Mapping[int, tuple[int, int]], stack: str) -> Note:
    """Make the note on rows that are not finite, with the counts of the worst layer."""
    count, rows = max(lost.values())
    up_to = "up to " if len(set(lost.values())) > 1 else ""
    return Note(
        NoteKind.ROWS_NOT_FINITE,
        "{subject}{where}: " + up_to + "{lost} of {rows} rows are not finite and were left out",
        stack, tuple(lost), numbers={"subject": subject, "lost": count, "rows": rows},
        about=subject if subject != _HIDDEN else "",
    )  # fmt: skip


def _sources_of(kept: SampledRows | None) -> frozenset[str]:
    """Return the sources of hidden states; feature maps do not have a last token."""
    return _HIDDEN_ONLY - ({"last"} if kept is not None and len(kept.shape) > 2 else set())


def _attended_rows(
    captured: Mapping[str, Any],
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return the real queries and the keys that some query sees, as rows, with sequence numbers."""
    query, key, visible = captured["query"], captured["key"], captured["visible"]
    visible = visible.expand(*query.shape[:3], key.shape[2])
    real, seen = visible.any(dim=3).any(dim=1), visible.any(dim=2).any(dim=1)
    sequences = (real.nonzero()[:, 0].cpu(), seen.nonzero()[:, 0].cpu())
    return query.transpose(1, 2)[real], key.transpose(1, 2)[seen], sequences
