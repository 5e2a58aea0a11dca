"""Copy rows of hidden states that enter and leave blocks, and of the final norm's output.

The calls of embedding tables are kept too, because they made what enters the first block.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from geomon.capture import private
from geomon.capture.anatomy.projections import find_widths
from geomon.capture.first_pass import LANDMARKS, BlockCall, StackPass, TensorId
from geomon.capture.shards import Slice
from geomon.capture.storage import Shape, local_shard, storage_of
from geomon.capture.tap import Stream
from geomon.capture.tap.operators import tensors_in
from geomon.capture.tokens.sampling import (
    SampledRows,
    copy_rows,
    has_width_second,
    spread_indices,
)
from geomon.capture.tokens.token_ids import Lookup
from geomon.capture.tracker import Tracker
from geomon.note_kinds import NoteKind

_SEVERAL = (
    "blocks return several tensors of the shape of hidden states, and the first is measured. If "
    "the hidden state is their sum (a branch and its residual), this is only one part of it"
)
_OTHER_LENGTHS = (
    "blocks return several tensors as wide as the hidden states, of different lengths (streams of "
    "text and image, for example): one of them is measured, and the others are not"
)
_RESTARTS = (
    "blocks are called again on something other than the last block's output (another part of the "
    "sequences, for example): each call is a layer, and its rows may differ from those of the "
    "layers before"
)
_SIDE_BY_SIDE = (
    "blocks receive the same hidden states, side by side: a layer is not made from the one before"
)
_HIDES_BETWEEN = (
    "a block's input is not the output of the block before, and what happens between them was not "
    "seen (it is seen only with metrics of attention or token ids, outside compiled code): layers "
    "are the outputs of the blocks, which may be a branch without its residual"
)


class Boundary(NamedTuple):
    """Hidden states that enter or leave a block.

    Attributes:
        whole: The tensor as the model has it.
        rows: Those on this rank, [..., width].
        part: Their place in the hidden states of all ranks, or None if they cannot be read.
    """

    whole: Tensor
    rows: Tensor
    part: Slice | None


class HiddenStates:
    """Copies sampled rows that enter and leave blocks.

    The residual stream is a block's output, or a sum that the model makes after the block.

    Args:
        tracker: Knows the passes.
        tables: Embedding tables, if token ids are wanted.
        keeps_last: Whether the last token of each sequence is wanted.

    Attributes:
        stream: Follows tensors between blocks.
    """

    def __init__(
        self,
        tracker: Tracker,
        tables: Sequence[nn.Module],
        *,
        keeps_last: bool,
    ) -> None:
        self._tracker, self._tables = tracker, tables
        self._keeps_last = keeps_last
        self.stream = Stream()
        self.stream.on_lookup = self._take_operator
        self._last_input: Tensor | None = None  # input of the running block
        # Whether hidden states are feature maps, by class of the block (id of a container), their
        # shape, and whether they enter it.
        self._are_maps: dict[tuple[type | int, Shape, bool], bool] = {}
        # Passes whose final norm is running, by id of the norm.
        self._norming: dict[int, StackPass] = {}
        self._passed: set[int | None] = set()  # storages of integers among the model's arguments
        self._lookups = 0  # number of lookups
        self._lookup: Lookup | None = None  # by the table that is being called

    def forget(self) -> None:
        """Release all tensors of the model."""
        self.stream.on_lookup = None  # it refers to this object
        self.stream.forget()
        self._last_input = None
        self._norming.clear()

    # -- embedding tables ------------------------------------------------------------------------

    def take_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember which integers are arguments of the model."""
        given = (x for x in tensors_in([args, kwargs]) if not x.is_floating_point())
        self._passed.update(filter(None, (storage_of(local_shard(x)) for x in given)))

    def enter_table(
        self, table: nn.Module, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Keep the integers that a table receives.

        Its operator may receive others (a rank that has a part of the vocabulary replaces the rest)
        or be no lookup.
        """
        self._lookup = self._look_up(table, next(iter([*args, *kwargs.values()]), None))

    def leave_table(self, module: nn.Module, output: Any) -> None:
        """Handle the output of a table."""
        lookup, self._lookup = self._lookup, None
        self._take_rows(lookup, output)

    def _take_operator(self, weight: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Handle a lookup in a matrix with the shape of a table that is not being called.

        Some modules hold a table, change its weights and never call it.
        """
        if self._lookup is None:
            fitting = (table for table in self._tables if find_widths(table) == weight.shape)
            self._take_rows(self._look_up(next(fitting, None), ids), rows)

    def _look_up(self, table: nn.Module | None, ids: Any) -> Lookup | None:
        """Copy the integers that a table receives, which may be written into later."""
        if table is None or not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_nested:
            return None
        self._lookups, ids = self._lookups + 1, local_shard(ids)
        return Lookup(ids.detach().clone(), table, storage_of(ids) in self._passed, self._lookups)

    def _take_rows(self, lookup: Lookup | None, output: Any) -> None:
        """Keep a lookup, and follow its rows if there is one for each integer."""
        passes = self._tracker.ids_to_come()
        if lookup is None or not passes:
            return
        rows = [x for x in map(local_shard, floating([output])) if x.shape[:-1] == lookup.ids.shape]
        if rows:
            lookup = lookup._replace(width=rows[0].shape[-1])
            self.stream.take_table(lookup.number, rows[0])
        for ids in passes:
            ids.lookups.append(lookup)

    # -- blocks ----------------------------------------------------------------------------------

    def _look_at(
        self, stack_pass: StackPass, hidden: Tensor, block: nn.Module, *, entering: bool = False
    ) -> Boundary:
        """Find the rows of hidden states."""
        rows, shape = local_shard(hidden), tuple(hidden.shape)
        kind = id(block) if isinstance(block, nn.Sequential) else type(block)
        form = kind, shape, entering
        if form not in self._are_maps:
            self._are_maps[form] = has_width_second(rows, block, entering=entering)
        rows = rows.movedim(1, -1) if self._are_maps[form] else rows
        return Boundary(hidden, rows, stack_pass.selection.part_of(hidden, rows))

    def _copy(self, stack_pass: StackPass, states: Boundary) -> SampledRows | None:
        """Copy the sampled rows of hidden states; None if they cannot be read."""
        if states.part is None:
            return None
        draw = stack_pass.selection.draw(
            states.part, states.rows, self.stream, with_last=self._keeps_last
        )
        return draw.copy(states.rows)

    def enter(
        self,
        stack_pass: StackPass,
        block_call: BlockCall,
        module: nn.Module,
        given: list[Tensor],
        hidden: Tensor | None,
        *,
        sees_between: bool,
    ) -> None:
        """Handle the input of a block whose call counts (None if unknown), and follow it."""
        states = None
        if hidden is not None:
            states = self._look_at(stack_pass, hidden, module, entering=True)
            alike = (x for x in given if x.ndim == hidden.ndim and x.shape[-1] == hidden.shape[-1])
            block_call.given = frozenset(map(place_of, alike))
        if len(block_call.called) == 1:
            if states is not None:
                self._place(stack_pass, block_call, states)
            self._take_before(stack_pass, module, states, sees_between=sees_between)
            self._last_input = hidden
        block_call.finished = False
        is_whole = states is not None and tuple(states.rows.shape[:-1]) == block_call.shape
        block_call.provenance.start(given, states.rows if states and is_whole else None)

    def _place(self, stack_pass: StackPass, block_call: BlockCall, states: Boundary) -> None:
        """Relate a call to earlier ones by comparing its input with their outputs."""
        earlier = stack_pass.block_calls[:-1]
        block_call.shape = None if states.part is None else states.part.shape
        tensor_id = place_of(states.whole)
        block_call.input_shape = tensor_id[1]
        block_call.handed_on = stack_pass.last_output_id in (None, tensor_id)
        if not block_call.handed_on:
            again = any(call.block == block_call.block for call in earlier)
            if again and not self.stream.origins(states.whole):
                stack_pass.remarks[NoteKind.CALLED_ON_OTHERS] = _RESTARTS
            before = self._last_input
            if before is not None and earlier and tensor_id == place_of(before):
                stack_pass.remarks[NoteKind.SIDE_BY_SIDE] = _SIDE_BY_SIDE

    def _take_before(
        self, stack_pass: StackPass, module: nn.Module, states: Boundary | None, *,
        sees_between: bool,
    ) -> None:  # fmt: skip
        """Copy the first block's input; a later block's input may complete the block before."""
        *earlier, block_call = stack_pass.block_calls
        if not earlier:
            stack_pass.mode = "train" if module.training else "eval"
        if states is None:
            return
        if not earlier:
            stack_pass.input_rows = self._copy(stack_pass, states)
            if stack_pass.input_rows is not None:
                places = spread_indices(math.prod(states.rows.shape[:-1]), LANDMARKS)
                stack_pass.tokens.landmarks = copy_rows(states.rows, places)
            return
        before = earlier[-1]
        if block_call.block == before.block + 1:
            self._take_sum(stack_pass, before, states.whole, module, sees_between=sees_between)
        # Going back to an earlier block may bring other rows.
        if stack_pass.stack.entering and block_call.block > before.block:
            before.hidden = self._copy(stack_pass, states)

    def leave(
        self,
        stack_pass: StackPass,
        block_call: BlockCall,
        module: nn.Module,
        output: Any,
        *,
        sees_between: bool,
    ) -> None:
        """Handle the output of a block (or part of a block) whose call counts."""
        hidden = _choose(stack_pass, block_call, floating(output))
        if hidden is None:
            return
        self.hand_on(stack_pass, hidden)
        stack_pass.normed = None
        if sees_between:  # otherwise reused memory would mislead
            self.stream.start(self._last_input, hidden)
        if not stack_pass.stack.entering:
            block_call.hidden = self._copy(stack_pass, self._look_at(stack_pass, hidden, module))

    def hand_on(self, stack_pass: StackPass, hidden: Tensor) -> None:
        """Remember which tensor a block hands on."""
        stack_pass.last_output_id = place_of(hidden)
        # Kept alive, so that no other tensor gets its address while the window is open.
        stack_pass.last_output = hidden.detach()

    def enter_norm(self, module: nn.Module, given: Any, *, sees_between: bool) -> None:
        """Look at the input of a norm outside the blocks.

        After the last block, it may be the sum, and the norm the final one.
        """
        given = first_tensor(given)
        if given is None or self._tracker.in_block:
            return
        for stack_pass in self._tracker.passes:
            last = stack_pass.block_calls[-1:]
            if last and last[0].block == len(stack_pass.stack.blocks) - 1:
                self._take_sum(stack_pass, last[0], given, module, sees_between=sees_between)
            if place_of(given) == stack_pass.last_output_id:
                self._norming[id(module)] = stack_pass

    def leave_norm(self, name: str, module: nn.Module, output: Any) -> None:
        """Handle the output of such a norm."""
        stack_pass, normed = self._norming.pop(id(module), None), first_tensor(output)
        if stack_pass is None or normed is None or stack_pass.normed is not None:
            return
        states = self._look_at(stack_pass, normed, stack_pass.stack.blocks[-1].module)
        rows = self._copy(stack_pass, states)
        if rows is not None:
            stack_pass.normed = rows, name

    def _take_sum(
        self, stack_pass: StackPass, before: BlockCall, hidden: Tensor, module: nn.Module, *,
        sees_between: bool,
    ) -> None:  # fmt: skip
        """Copy the sum of a block's input and output, if the model makes one."""
        if tuple(hidden.shape) != before.input_shape:
            return
        if not sees_between:
            if place_of(hidden) != stack_pass.last_output_id:
                stack_pass.remarks[NoteKind.UNSEEN_BETWEEN] = _HIDES_BETWEEN
        elif self.stream.is_sum(hidden) and NoteKind.SIDE_BY_SIDE not in stack_pass.remarks:
            states = self._look_at(stack_pass, hidden, module, entering=True)
            before.summed = self._copy(stack_pass, states)


def _choose(stack_pass: StackPass, block_call: BlockCall, returned: list[Tensor]) -> Tensor | None:
    """Choose the hidden states among the tensors that a block returns.

    Tensors that only pass through (earlier states in a list, for example) are not its output.
    """
    if len(returned) < 2:
        return next(iter(returned), None)
    made = [x for x in returned if place_of(x) not in block_call.given] or returned
    alike = [x for x in made if x.shape == block_call.input_shape]
    hidden = next(iter(alike), made[0])
    wide = [x for x in made if x.ndim == hidden.ndim and x.shape[-1] == hidden.shape[-1]]
    if len(alike) > 1:
        stack_pass.remarks[NoteKind.SEVERAL_OUTPUTS] = _SEVERAL
    elif len(wide) > 1 and hidden.ndim > 2:
        stack_pass.remarks[NoteKind.OUTPUTS_OF_OTHER_LENGTHS] = _OTHER_LENGTHS
    return hidden


def floating(values: Any) -> list[Tensor]:
    """List floating-point tensors that are not nested; top-level ones come first."""
    if isinstance(values, Tensor):
        return [values] if values.is_floating_point() and not values.is_nested else []
    if not isinstance(values, list | tuple):  # an iterator is the model's to use up
        values = values.values() if isinstance(values, Mapping) else ()
    found, inner = list[Tensor](), list[Any]()
    for value in values:
        (found if isinstance(value, Tensor) else inner).append(value)
    every = found + tensors_in(inner)
    return [x for x in every if x.is_floating_point() and not x.is_nested]


def find_entering(stack_pass: StackPass, given: Sequence[Tensor]) -> Tensor | None:
    """Choose the hidden states among the arguments of a block, after rotary tables and masks.

    Prefers the previous block's output, then a tensor with the shape and width of the embeddings,
    then the first argument.
    """
    known = [x for x in given if not private.is_batched(local_shard(x))]
    handed_on = (x for x in known if place_of(x) == stack_pass.last_output_id)
    fitting = (x for x in known if stack_pass.tokens.ids.may_have_made(x))
    return next(itertools.chain(handed_on, fitting, given), None)


def place_of(values: Tensor) -> TensorId:
    """Return the address and the shape of a tensor, which identify it while it lives.

    Args:
        values: Any tensor.
    """
    return local_shard(values).data_ptr(), tuple(values.shape)


def first_tensor(values: Any) -> Tensor | None:
    """Return the first floating-point tensor."""
    return next(iter(floating(values)), None)
