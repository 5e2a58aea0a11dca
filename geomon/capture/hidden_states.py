"""Copy rows of hidden states that enter and leave blocks, and of the final norm's output."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from geomon.capture import private
from geomon.capture.first_pass import LANDMARKS, BlockCall, StackPass, TensorId
from geomon.capture.shards import ShardingError, Slice
from geomon.capture.storage import local_shard
from geomon.capture.tap import Stream
from geomon.capture.tap.provenance import tensors_in
from geomon.capture.tokens.sampling import (
    SampledRows,
    copy_rows,
    move_width_last,
    spread_indices,
)
from geomon.capture.tracker import Tracker

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


class HiddenStates:
    """Copies sampled rows that enter and leave blocks.

    The residual stream is a block's output, or a sum that the model makes after the block.

    Args:
        tracker: Knows the passes.
        keeps_last: Whether the last token of each sequence is wanted.
        keeps_final_norm: Whether the final norm's output is wanted.

    Attributes:
        stream: Follows tensors between blocks.
    """

    def __init__(self, tracker: Tracker, *, keeps_last: bool, keeps_final_norm: bool) -> None:
        self._tracker = tracker
        self._keeps_last, self._keeps_final_norm = keeps_last, keeps_final_norm
        self.stream = Stream()
        self._last_input: Tensor | None = None  # input of the running block
        # Passes whose final norm is running, by id of the norm.
        self._norming: dict[int, StackPass] = {}

    def forget(self) -> None:
        """Release all tensors of the model."""
        self.stream.forget()
        self._last_input = None

    def enter(
        self,
        stack_pass: StackPass,
        block_call: BlockCall,
        module: nn.Module,
        given: list[Any],
        hidden: Tensor | None,
        *,
        sees_between: bool,
    ) -> None:
        """Handle the input of a block whose call counts (None if unknown), and follow it."""
        rows = None
        if hidden is not None:
            rows = move_width_last(local_shard(hidden), module, entering=True)
        if len(block_call.called) == 1:
            if hidden is not None and rows is not None:
                self._place(stack_pass, block_call, hidden, rows)
            self._take_before(stack_pass, module, hidden, rows, sees_between=sees_between)
        block_call.given = frozenset(place_of(x) for x in _floating(given))
        block_call.finished = False
        is_whole = rows is not None and tuple(rows.shape[:-1]) == block_call.shape
        block_call.provenance.start(given, rows if is_whole else None)  # else ranks have others

    def _place(
        self, stack_pass: StackPass, block_call: BlockCall, hidden: Tensor, rows: Tensor
    ) -> None:
        """Relate a call to earlier ones by comparing its input with their outputs."""
        earlier, place = stack_pass.block_calls[:-1], place_of(hidden)
        part = self._part(stack_pass, hidden, rows)
        block_call.shape = None if part is None else part.shape
        block_call.input_shape = tuple(hidden.shape)
        block_call.handed_on = stack_pass.last_output_id in (None, place)
        if not block_call.handed_on:
            again = any(call.block == block_call.block for call in earlier)
            if again and not self.stream.origins(hidden):
                stack_pass.remarks[_RESTARTS] = None
            if self._last_input is not None and earlier and place == place_of(self._last_input):
                stack_pass.remarks[_SIDE_BY_SIDE] = None

    def _take_before(
        self,
        stack_pass: StackPass,
        module: nn.Module,
        hidden: Tensor | None,
        rows: Tensor | None,
        *,
        sees_between: bool,
    ) -> None:
        """Copy the first block's input; a later block's input may complete the block before."""
        *earlier, block_call = stack_pass.block_calls
        self._last_input = hidden
        if not earlier:
            stack_pass.mode = "train" if module.training else "eval"
            stack_pass.input_rows = self._sample(stack_pass, hidden, module, entering=True)
            if stack_pass.input_rows is not None and rows is not None:
                places = spread_indices(math.prod(rows.shape[:-1]), LANDMARKS)
                stack_pass.tokens.landmarks = copy_rows(rows, places)
            return
        before = earlier[-1]
        if hidden is not None and block_call.block == before.block + 1:
            self._take_sum(stack_pass, before, hidden, module, sees_between=sees_between)
        # Going back to an earlier block may bring other rows.
        if stack_pass.stack.entering and block_call.block > before.block:
            before.hidden = self._sample(stack_pass, hidden, module, entering=True)

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
        hidden = first_tensor(output)
        if hidden is None:
            return
        if hidden is not output:
            hidden = self._choose(stack_pass, block_call, _floating(output))
        self.hand_on(stack_pass, hidden)
        stack_pass.normed = None
        if sees_between:  # otherwise reused memory would mislead
            self.stream.start(self._last_input, hidden)
        if not stack_pass.stack.entering:
            block_call.hidden = self._sample(stack_pass, hidden, module)

    def _choose(
        self, stack_pass: StackPass, block_call: BlockCall, returned: list[Tensor]
    ) -> Tensor:
        """Choose the hidden states among the tensors that a block returns.

        Tensors that only pass through (earlier states in a list, for example) are not its output.
        """
        made = [x for x in returned if place_of(x) not in block_call.given] or returned
        alike = [x for x in made if x.shape == block_call.input_shape]
        hidden = next(iter(alike), made[0])
        wide = [x for x in made if x.ndim == hidden.ndim and x.shape[-1] == hidden.shape[-1]]
        if len(alike) > 1:
            stack_pass.remarks[_SEVERAL] = None
        elif len(wide) > 1 and hidden.ndim > 2:
            stack_pass.remarks[_OTHER_LENGTHS] = None
        return hidden

    def hand_on(self, stack_pass: StackPass, hidden: Tensor) -> None:
        """Remember which tensor a block hands on."""
        stack_pass.last_output_id = place_of(hidden)
        if self._keeps_final_norm:
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
            last_output = stack_pass.last_output
            if last_output is not None and place_of(given) == place_of(last_output):
                self._norming[id(module)] = stack_pass

    def leave_norm(self, name: str, module: nn.Module, output: Any) -> None:
        """Handle the output of such a norm."""
        stack_pass, normed = self._norming.pop(id(module), None), first_tensor(output)
        if stack_pass is None or normed is None or stack_pass.normed is not None:
            return
        rows = self._sample(stack_pass, normed, stack_pass.stack.blocks[-1].module)
        if rows is not None:
            stack_pass.normed = rows, name

    def _take_sum(
        self,
        stack_pass: StackPass,
        before: BlockCall,
        stream: Tensor,
        module: nn.Module,
        *,
        sees_between: bool,
    ) -> None:
        """Copy the sum of a block's input and output, if the model makes one."""
        if tuple(stream.shape) != before.input_shape:
            return
        if not sees_between:
            if place_of(stream) != stack_pass.last_output_id:
                stack_pass.remarks[_HIDES_BETWEEN] = None
        elif self.stream.is_sum(stream) and _SIDE_BY_SIDE not in stack_pass.remarks:
            before.summed = self._sample(stack_pass, stream, module, entering=True)

    def _sample(
        self,
        stack_pass: StackPass,
        hidden: Tensor | None,
        block: nn.Module,
        *,
        entering: bool = False,
    ) -> SampledRows | None:
        """Copy the sampled rows of a tensor of hidden states; None if its rows cannot be read."""
        if hidden is None:
            return None
        rows = move_width_last(local_shard(hidden), block, entering=entering)
        part = self._part(stack_pass, hidden, rows)
        if part is None:
            return None
        tokens = stack_pass.tokens
        tokens.ids.meet(part.shape, lambda: self.stream.rows_of(rows) if part.is_whole else {})
        if not tokens.shape:
            stack_pass.memory.fit_rows(rows.shape[-1])
            tokens.begin(part.shape)
            stack_pass.dtype = rows.dtype
        last = tokens.last(part.shape) if self._keeps_last else None
        ends = None if last is None else _copy_slice(rows, last, part)
        return _copy_slice(rows, stack_pass.row_indices(part.shape), part)._replace(last=ends)

    def _part(self, stack_pass: StackPass, hidden: Tensor, rows: Tensor) -> Slice | None:
        """Find which part of the hidden states is on this rank; None if they cannot be read."""
        try:
            return stack_pass.slice_of(hidden, rows)
        except ShardingError as error:
            stack_pass.why_not_read = f"{error}"
            return None


def _copy_slice(rows: Tensor, indices: Tensor, part: Slice) -> SampledRows:
    """Copy the rows that are on this rank, given flat indices over all ranks."""
    places, flat = part.inside(indices)
    start = () if part.is_whole else part.start
    return SampledRows(copy_rows(rows, flat), indices[places], part.shape, start=start)


def _floating(values: Any) -> list[Tensor]:
    """List floating-point tensors that are not nested; top-level ones come first."""
    given = [values] if isinstance(values, Tensor) else values or ()
    given = list(given.values() if isinstance(given, Mapping) else given)
    inner = tensors_in(x for x in given if not isinstance(x, Tensor))
    every = [*(x for x in given if isinstance(x, Tensor)), *inner]
    return [x for x in every if x.is_floating_point() and not x.is_nested]


def find_entering(stack_pass: StackPass, given: Sequence[Any]) -> Tensor | None:
    """Choose the hidden states among the arguments of a block, after rotary tables and masks.

    Prefers the previous block's output, then a tensor with the shape and width of the embeddings,
    then the first argument.
    """
    found = _floating(given)
    known = [x for x in found if not private.is_batched(local_shard(x))]
    handed_on = [x for x in known if place_of(x) == stack_pass.last_output_id]
    fitting = [x for x in known if stack_pass.tokens.ids.may_have_made(x)]
    return next(iter(handed_on or fitting or found), None)


def place_of(values: Tensor) -> TensorId:
    """Return the address and the shape of a tensor, which identify it while it lives.

    Args:
        values: Any tensor.
    """
    return local_shard(values).data_ptr(), tuple(values.shape)


def first_tensor(values: Any) -> Tensor | None:
    """Return the first floating-point tensor."""
    return next(iter(_floating(values)), None)
