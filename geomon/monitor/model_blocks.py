"""The blocks of the watched model, which are found again when its modules change."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from geomon.capture import Anatomy, ModelParts, Plans
from geomon.distributed import RankGroup
from geomon.failures import ignored
from geomon.note import Note
from geomon.note_kinds import NoteKind


class ModelBlocks:
    """Finds the blocks of a model, and their places in the whole model.

    Adapters are put around projections, merged and removed, and blocks are added or wrapped; an old
    anatomy would then watch modules that the model no longer runs.

    Args:
        model: The watched model, or the parts of it that this rank has.
        group: The ranks.
        blocks: The blocks, or a regular expression that matches their names; None to search for
            them.
        anatomy: The blocks that were found, in their stacks.

    Attributes:
        model: The argument.
        anatomy: The blocks, in their stacks.
        plans: Plans of the blocks' operators.
    """

    def __init__(
        self,
        model: ModelParts,
        group: RankGroup,
        blocks: str | Sequence[nn.Module] | None,
        anatomy: Anatomy,
    ) -> None:
        self.model, self._group, self._blocks = model, group, blocks
        self.anatomy, self.plans = self._placed(anatomy), Plans()
        self._modules = tuple(model.root.modules())  # for which the anatomy was found
        self._names_at_first = self.names

    @property
    def names(self) -> list[str]:
        """Names of the blocks, in order of depth."""
        return [block.name for block in self.anatomy.blocks]

    def places(self) -> dict[int, tuple[str, int]]:
        """Return stack and depth of each module in a block, by the module's `id`."""
        return {
            id(module): (stack.name, depth)
            for stack in self.anatomy.stacks
            for depth, block in enumerate(stack.blocks, 1 + stack.before)
            for module in block.module.modules()
        }

    def modules_around(self) -> tuple[nn.Module, ...]:
        """Return the model and its modules that hold blocks; a training calls one of them."""
        self.renew()
        blocks = [block.module for block in self.anatomy.blocks]
        inside = {module for block in blocks for module in block.modules()}
        return tuple(
            module
            for module in self.model.root.modules()
            if module not in inside and not inside.isdisjoint(module.modules())
        )

    def notes(self) -> list[Note]:
        """Notes on the model, for every reading."""
        notes = self.model.note_on_ties(self.anatomy)
        if self.names == self._names_at_first:
            return notes
        text = "the model's blocks have changed since the run began: {now} now, {then} then"
        numbers = {"now": len(self.names), "then": len(self._names_at_first)}
        return [*notes, Note(NoteKind.OTHER_BLOCKS, text, numbers=numbers)]

    def renew(self) -> None:
        """Find the blocks again if modules of the model were added, removed or replaced.

        If no blocks are found any more, the old ones are expected, and a reading says that they did
        not run.
        """
        modules = tuple(self.model.root.modules())
        if list(map(id, modules)) == list(map(id, self._modules)):
            return
        self._modules = modules
        with ignored(ValueError):
            anatomy = self.model.find_anatomy(self._blocks)
            self.anatomy, self.plans = self._placed(anatomy), Plans()

    def _placed(self, anatomy: Anatomy) -> Anatomy:
        """Give the stacks of this rank their places in the whole model."""
        mesh, own = self._group.mesh, self._group.own
        stacks = []
        for stack in anatomy.stacks:
            stage = own.stages[stack.part]
            blocks = stack.blocks
            if mesh.names_clash(stack.name):
                blocks = tuple(replace(x, name=f"stage_{stage}.{x.name}") for x in blocks)
            before, behind = mesh.blocks_around(stage, stack.name)
            stacks.append(replace(stack, blocks=blocks, before=before, behind=behind))
        return replace(anatomy, stacks=tuple(stacks))


__all__ = ["ModelBlocks"]
