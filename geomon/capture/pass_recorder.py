"""Keep what the calls of a model's modules show of a pass.

The embedding tables, the modules around the blocks, the blocks, their attentions and the modules
that project in them each show something else. `PassRecorder` hands it on to those who keep it.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from geomon.capture.anatomy import Anatomy, Block
from geomon.capture.anatomy.families import is_callable
from geomon.capture.anatomy.projections import projects_in_its_own_way
from geomon.capture.calling.calls import unwrap
from geomon.capture.first_pass import BlockCall, StackPass
from geomon.capture.hidden_states import HiddenStates, find_entering, first_tensor, floating
from geomon.capture.operator_watch import OperatorWatch
from geomon.capture.recorder import AttentionRecorder
from geomon.capture.shards import TensorPlace, first_feature
from geomon.capture.storage import local_shard
from geomon.capture.tap import Plans
from geomon.capture.tap.operators import tensors_in
from geomon.capture.tokens.sampling import move_width_last
from geomon.capture.tracker import Tracker
from geomon.capture.wanted import Wanted
from geomon.capture.watched_calls import WatchedCalls
from geomon.capture.weights import WeightNorms


class PassRecorder:
    """Keeps what the calls of modules show of a pass.

    Args:
        anatomy: Anatomy of the model.
        wanted: The views and layers that are wanted.
        tracker: Decides which calls count.
        place: Place of this rank among those that share the weights of the blocks.
        plans: Plans of the blocks, from earlier windows.

    Attributes:
        calls: The calls that are watched.
        operators: The operators that are seen.
        attention: Keeps what operators show of attention.
        has_seen_all: Whether nothing more is to be seen in the running block.
    """

    def __init__(
        self, anatomy: Anatomy, wanted: Wanted, tracker: Tracker, *, place: TensorPlace,
        plans: Plans,
    ) -> None:  # fmt: skip
        self._wanted, self._tracker, self._place = wanted, tracker, place
        tables = anatomy.embeddings if wanted.tokens else ()
        self._states = HiddenStates(tracker, tables, keeps_last=wanted.last)
        self._weights = WeightNorms([unwrap(block.module) for block in anatomy.blocks])
        self.attention = AttentionRecorder(
            tracker,
            self._states.stream,
            attends=wanted.attention,
            max_logits="max_logits" in wanted.views,
            outputs="head_outputs" in wanted.views,
            projects="projection" in wanted.sources,
            plans=plans,
        )
        self.operators = OperatorWatch(anatomy, tracker, self.attention)
        self.calls = WatchedCalls()
        self.has_seen_all = False

    def forget(self) -> None:
        """Release the model's tensors and watch no calls."""
        self.calls.forget()
        self._states.forget()
        for stack_pass in self._tracker.passes:
            stack_pass.last_output = None
            for block_call in stack_pass.block_calls:
                block_call.forget_tensors()

    def hand_on(self, module: nn.Module, output: Any) -> None:
        """Remember the output of a block that ran compiled, which replaces its twin's output."""
        left = first_tensor(output)
        for stack_pass in self._tracker.passes:
            if left is not None and any(module is x.module for x in stack_pass.stack.blocks):
                self._states.hand_on(stack_pass, left)

    # -- which calls are watched -----------------------------------------------------------------

    def watch(self, anatomy: Anatomy) -> None:
        """Choose the calls to watch."""
        wanted, add = self._wanted, self.calls.add
        for table in anatomy.embeddings if wanted.tokens else ():
            add(table, partial(self._states.enter_table, table), self._states.leave_table)
        for name, norm in anatomy.norms if wanted.operators or wanted.extra_layers else ():
            leaves = partial(self._states.leave_norm, name) if wanted.final_norm else None
            add(norm, self._on_norm, leaves)
        for number, stack in enumerate(anatomy.stacks):
            for module in stack.above:
                add(module, partial(self._on_call_above, number), self._on_return_above)
            if stack.owner is not None:
                called, left = partial(self._on_owner, number), partial(self._on_owner_left, number)
                add(stack.owner, called, left)
            for index, block in enumerate(stack.blocks):
                for part in (*block.parts, block.module):
                    add(part, partial(self._on_block, number, index), self._on_block_left)
                if wanted.attention:
                    self._watch_attention(block)

    def _watch_attention(self, block: Block) -> None:
        for index, attention in enumerate(block.attentions):
            before, after = partial(self._on_attending, index), partial(self._on_attending, None)
            if attention.module is not block.module:
                self.calls.add(attention.module, before, after)
        # Outputs of heads may be projected beside the module that makes them.
        attending = {attention.module for attention in block.attentions}
        for module in filter(is_callable, block.module.children()):
            if module not in attending and not attending.isdisjoint(module.modules()):
                self.calls.add(module, None, self._on_attended)
        traces = "projection" in self._wanted.sources or self._place.shards > 1
        for module in block.matrices if traces else ():
            if projects_in_its_own_way(module):
                self.calls.add_projecting(module, self._on_projecting, self._on_projected)

    # -- around the blocks -----------------------------------------------------------------------

    def _on_call_above(
        self, number: int, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        around, shared = self._tracker.call_above(number, module)
        if around:
            self._states.take_arguments(args, kwargs)
        for other in around:
            other.tokens.take_arguments(module, args, kwargs, shared=shared)

    def _on_return_above(self, module: nn.Module, output: Any) -> None:
        self._tracker.leave_above(module)
        if not self._tracker.above:
            self._states.stream.forget()  # operators outside of the model are not seen

    def _on_norm(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        self._states.enter_norm(module, given, sees_between=self.operators.sees_between)

    def _on_owner(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        origins = map(self._states.stream.origins, tensors_in([args, kwargs]))
        self._tracker.call_owner(number, goes_on=any("returned" in x for x in origins))

    def _on_owner_left(self, number: int, module: nn.Module, output: Any) -> None:
        self._tracker.leave_owner(number)

    # -- blocks ----------------------------------------------------------------------------------

    def _on_block(
        self, number: int, index: int, module: nn.Module, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Handle the call of a block, or of one module of a block that is a list."""
        stack_pass = self._tracker.passes[number]
        given = floating([*args, *kwargs.values()])
        hidden = find_entering(stack_pass, given)
        block_call = self._tracker.begin_call(number, index, module, hidden)
        if block_call is None:
            return
        if len(block_call.called) == 1 == len(stack_pass.block_calls):
            stack_pass.tokens.take_arguments(module, args, kwargs)
        if self._wanted.attention:
            self.attention.begin(block_call, module, [args, kwargs])
            self.calls.sees_projecting = block_call.provenance.sees_modules
        self._states.enter(
            stack_pass, block_call, module, given, hidden,
            sees_between=self.operators.sees_between,
        )  # fmt: skip
        reads_weights = "weights" in self._wanted.sources and self._place.shards == 1
        if reads_weights and not block_call.weight_norms:
            # Read now, before the optimizer changes them.
            block = stack_pass.stack.blocks[index]
            block_call.weight_norms = self._weights.of(unwrap(block.module))

    def _on_block_left(self, module: nn.Module, output: Any) -> None:
        ended = self._tracker.end_call(module)
        if ended is not None:
            stack_pass, block_call = ended
            self._finish(stack_pass, block_call, stack_pass.stack.blocks[block_call.block])
            self.has_seen_all = False
            self.attention.end(block_call)
            self._states.leave(
                stack_pass, block_call, module, output, sees_between=self.operators.sees_between
            )

    # -- attention -------------------------------------------------------------------------------

    def _on_attending(self, index: int | None, module: nn.Module, *call: Any) -> None:
        current = self._tracker.current
        if current is None:
            return
        current[1].running_attention = index
        if index is None:
            self._on_attended()

    def _on_attended(self, *call: Any) -> None:
        """Finish the block that runs if all of its attentions were seen."""
        current = self._tracker.current
        if current is None:
            return
        _, block_call, block = current
        seen = all(block_call.seen(n).call for n in range(len(block.attentions)))
        if seen and block_call.provenance.is_complete:
            self._finish(*current)

    def _finish(self, stack_pass: StackPass, block_call: BlockCall, block: Block) -> None:
        """Stop following the tensors of a block."""
        if block_call.finished:
            return
        goes_on = self.attention.finish(stack_pass, block_call, block)
        block_call.forget_tensors()
        self.has_seen_all = not goes_on  # and the block still runs

    def _on_projecting(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        current, given = self._tracker.current, first_tensor([*args, *kwargs.values()])
        if current is not None and given is not None:
            # FSDP has gathered the weight by now, so a sharded weight means tensor parallelism.
            current[1].inputs[id(module)] = given, first_feature(module)

    def _on_projected(self, module: nn.Module, output: Any) -> None:
        current, output = self._tracker.current, first_tensor(output)
        taken = None if current is None else current[1].inputs.pop(id(module), None)
        if current is None or taken is None or output is None:
            return
        # A convolution's output does not have its width last.
        output = move_width_last(local_shard(output), module, entering=False)
        given, first = taken
        current[1].provenance.projected(output, local_shard(given), first)
