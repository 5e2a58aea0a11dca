"""Build layers from what a window kept, with their views on one device.

Padding, masks and projection layouts are decided on the host, from small tensors. Rows stay where
they were captured until a layer is complete and `Layer.to` moves it. Every missing view gets a
reason.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from geomon.capture.additions import with_additions
from geomon.capture.anatomy import CROSS, Block
from geomon.capture.first_pass import BlockCall, StackPass, attention_key
from geomon.capture.head_views import HEADS_ONLY, HeadViews
from geomon.capture.remarks import LayerRemarks
from geomon.capture.row_views import OWN_ROW_VIEWS, RowViews, sources_of
from geomon.capture.snapshot import (
    ADDITIONS,
    EMBEDDING,
    FINAL_NORM,
    HOST,
    UNEMBEDDING,
    Layer,
    Part,
    PassInfo,
    Snapshot,
    source_of,
    wait_for_copies,
)
from geomon.capture.tokens.sampling import RowSampler, SampledRows, copy_rows
from geomon.capture.weights import present_weight, to_numbers
from geomon.failures import failures
from geomon.note import Note
from geomon.note_kinds import NoteKind

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
_NOT_BEFORE = "the layer before was not seen, or has other rows or another width"
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
    dtype = str(first.selection.dtype).removeprefix("torch.") if run else ""
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
    missing = {} if captured else dict.fromkeys(OWN_ROW_VIEWS, reason)
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
        self._sources = set(map(source_of, views))
        self._wanted_additions = views & ADDITIONS
        self._not_run = _DROPPED if stack_pass.block_calls else not_run
        self._before = stack_pass.stack.before
        self._remarks = LayerRemarks(stack_pass.stack.name)
        self._rows = RowViews(
            stack_pass, self._tokens, self._remarks,
            keeps_last="last" in self._sources, alone=alone,
        )  # fmt: skip
        self._heads = HeadViews(
            stack_pass, self._tokens, self._remarks,
            not_run=self._not_run, projects="projection" in self._sources,
        )  # fmt: skip

    def layers(self) -> list[Layer]:
        """Build the outputs of all blocks, and the first block's input if this rank has it."""
        first: list[Layer] = []
        if not self._before:
            why = self._why_no_rows(ran=bool(self._pass.block_calls))
            stack, rows = self._pass.stack.name, self._pass.input_rows
            first = [self._of_hidden_states(0, "input of the blocks", rows, why, stack)]
        kept = [self._rows_behind(block_call) for _, block_call, _ in self._layers]
        if self._wanted_additions:
            of_last = "last" in map(source_of, self._wanted_additions)
            kept = with_additions([self._pass.input_rows, *kept], of_last=of_last)
        made = zip(self._layers, kept, strict=True)
        return [*first, *(self._layer(n, *each, rows) for n, (each, rows) in enumerate(made, 1))]

    def input_counts(self) -> list[int]:
        """Return the number of rows that enter the first block, if they were read."""
        rows = self._pass.input_rows
        if rows is None:
            return []
        places, _ = self._tokens.of(rows.shape).among(rows.indices)
        return [len(places)]

    def side_layers(self, label: str, stack: str) -> list[Layer]:
        """Build the cross-attention, or a further attention, of each block that has one."""
        layers = []
        for depth, (block, block_call, name) in enumerate(self._layers, 1):
            index = block.attention_index(label)
            if index is None or not self._sources & HEADS_ONLY:
                continue
            place = self._before + depth
            captured, missing = self._heads.of(place, block_call, index, stack)
            shown = f"{name}.{block.attentions[index].name}"
            part = Part(heads=self._heads.numbers(block_call, index))
            layers.append(Layer(place, shown, captured, missing, stack, HEADS_ONLY, part=part))
        if any(layer.captured for layer in layers):
            return layers
        if self._pass.block_calls and label != CROSS:
            for layer in layers:
                self._remarks.add(
                    NoteKind.ATTENTION_NOT_CALLED, "attention", layer.index, _SIDE_NOT_CALLED, stack
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
        captured, missing, part = self._rows.of(depth, kept, why)
        return Layer(depth, name, captured, missing, stack, sources_of(kept), part=part)

    def notes(self) -> list[Note]:
        """Turn the remarks on the layers built so far into notes."""
        stack_pass, stack = self._pass, self._pass.stack.name
        notes = self._remarks.notes()
        notes += self._tokens.notes(stack)
        texts = {**stack_pass.remarks}
        if self._are_sums:
            last = stack_pass.block_calls[-1].summed
            texts[NoteKind.SUMS_OUTSIDE] = (
                _ADDS_OUTSIDE + _LAST_BRANCH if last is None else _ADDS_OUTSIDE
            )
        if stack_pass.owner_call.passed_over:
            ran = _PASSED_OVER.format(count=stack_pass.owner_call.passed_over + 1)
            texts[NoteKind.RAN_SEVERAL_TIMES] = ran
        return notes + [Note(kind, text, stack) for kind, text in texts.items()]

    def _layer(
        self, depth: int, block: Block, block_call: BlockCall | None, name: str,
        kept: SampledRows | None,
    ) -> Layer:  # fmt: skip
        """Build the output of a block from its rows, which were compared with the layer before."""
        depth += self._before
        stack = self._pass.stack.name
        why = self._why_no_rows(ran=block_call is not None)
        captured, missing, part = self._rows.of(depth, kept, why)
        sources = sources_of(kept) | {"weights"}
        for view in self._wanted_additions - captured.keys():
            if source_of(view) in sources:
                missing.setdefault(view, _NOT_BEFORE)
        more, lacking = self._block_views(block_call)
        captured, missing = captured | more, missing | lacking
        if "expert_counts" in captured:
            sources |= {"routing"}
        indices = _attentions_of(block, block_call)
        if indices:
            sources |= HEADS_ONLY
        if indices and self._sources & HEADS_ONLY:
            more, lacking = self._heads.of_block(depth, block_call, indices, stack)
            captured, missing = captured | more, missing | lacking
            if len(indices) == 1:
                part = replace(part, heads=self._heads.numbers(block_call, indices[0]))
        elif block.attends and block_call is not None and self._sources & HEADS_ONLY:
            self._remarks.add(NoteKind.BY_NAME_ALONE, "attention", depth, _BY_NAME_ALONE, stack)
        return Layer(depth, name, captured, missing, stack, sources, part=part)

    def _block_views(self, block_call: BlockCall | None) -> tuple[dict[str, Any], dict[str, str]]:
        """Make the views of a block's weights and of the choice of its experts."""
        captured: dict[str, Any] = {}
        missing: dict[str, str] = {}
        if id(block_call) in self._norms:
            captured["weight_norms"] = self._norms[id(block_call)]
        elif "weights" in self._sources:
            missing["weight_norms"] = self._not_run if block_call is None else _NO_MATRICES
        if block_call is not None and block_call.expert_counts is not None:
            captured["expert_counts"] = block_call.expert_counts
        return captured, missing

    def _rows_behind(self, block_call: BlockCall | None) -> SampledRows | None:
        """Return the rows that a block hands on, or of the sum that the model makes of them."""
        if block_call is None or not self._are_sums or block_call.summed is None:
            return None if block_call is None else block_call.hidden
        return block_call.summed

    def _why_no_rows(self, *, ran: bool) -> str:
        """Say why the hidden states of a block are missing."""
        if not ran:
            return self._not_run
        unread = _LAST if self._pass.stack.entering else _NESTED
        return self._pass.selection.why_not_read or unread


def _attentions_of(block: Block, block_call: BlockCall | None) -> list[int]:
    """List the attentions that make up the heads of a block; none if it is not known to attend."""
    index = attention_key(block)
    if index is None:
        return []
    seen = None if block_call is None else block_call.attentions.get(index)
    called = seen is not None and seen.call is not None
    shown = called or (block.attends and block.attentions)
    return (block.attention_indices() or [index]) if shown else []
