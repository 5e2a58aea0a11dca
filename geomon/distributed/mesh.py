"""The mesh: which ranks have the same tokens, and which part of the model each of them has.

Under data parallelism (DDP, FSDP, HSDP), ranks have tokens of their own. Under tensor parallelism
they share the weights of one model, and in a pipeline its blocks, so they have the same tokens. A
rank finds its own place without asking the others; all places together form the mesh.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from geomon.note import Note
from geomon.note_kinds import NoteKind

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class RankPlace:
    """Place of a rank in the mesh, as far as the rank itself knows it; plain values.

    Attributes:
        rank: Rank of the process.
        tensor: Ranks that share the weights of the blocks, in shard order; () if weights are whole.
        tensor_name: Name of that mesh dimension; "" if unnamed.
        pipeline: Ranks that run the stages of one pipeline; () without a pipeline.
        stages: Index of each stage that this rank runs. Defaults to (0,).
        num_stages: Number of stages of the whole pipeline. Defaults to 1, for no pipeline.
        blocks: For each stage, the names of the blocks by stack.
    """

    rank: int = 0
    tensor: Ranks = ()
    tensor_name: str = ""
    pipeline: Ranks = ()
    stages: tuple[int, ...] = (0,)
    num_stages: int = 1
    blocks: tuple[Mapping[str, tuple[str, ...]], ...] = ()

    @property
    def shard(self) -> int:
        """Index of this rank's shard of the weights."""
        return self.tensor.index(self.rank) if self.tensor else 0

    @property
    def shards(self) -> int:
        """Number of shards of the weights; 1 if they are whole."""
        return max(1, len(self.tensor))

    @property
    def is_whole(self) -> bool:
        """Whether the rank has the whole model."""
        return self.shards == 1 and len(self.stages) == self.num_stages

    def part(self) -> str:
        """Say which part of the model the rank has."""
        parts = []
        if len(self.stages) < self.num_stages:
            numbers = " and ".join(map(str, self.stages))
            word = "stages" if len(self.stages) > 1 else "stage"
            parts.append(f"{word} {numbers} of {self.num_stages} (from 0)")
        if self.shards > 1:
            parts.append(f"shard {self.shard} of {self.shards} of the weights")
        return ", ".join(parts) or "the whole model"

    def words(self, ranks: int) -> str:
        """Describe the dimensions of the mesh, as far as the rank itself knows them.

        Args:
            ranks: Number of all ranks.
        """
        parts = []
        if self.pipeline:
            runs = len(self.pipeline)
            stages = f" ({self.num_stages} stages)" if self.num_stages != runs else ""
            parts.append(f"{runs} pipeline{stages}")
        if self.shards > 1:
            name = f" ({self.tensor_name})" if self.tensor_name else ""
            parts.append(f"{self.shards} tensor{name}")
        data = ranks // (max(1, len(self.pipeline)) * self.shards)
        if data > 1:
            parts.insert(0, f"{data} data")
        return f"{ranks} ranks: {' x '.join(parts)}" if ranks > 1 else "1 rank"

    def notes_alone(self) -> list[Note]:
        """Make the note that values cover only this rank's part of the model, if they do."""
        if self.is_whole:
            return []
        text = "only the part of the model on rank {rank} is measured: {part}"
        numbers: dict[str, int | str] = {"rank": self.rank, "part": self.part()}
        return [Note(NoteKind.PART_OF_MODEL, text, numbers=numbers)]


@dataclass(frozen=True)
class Mesh:
    """The places of all ranks.

    Attributes:
        places: The place of each rank, in rank order. Defaults to a single rank.
    """

    places: tuple[RankPlace, ...] = field(default_factory=lambda: (RankPlace(),))

    @functools.cached_property
    def data_ranks(self) -> tuple[int, ...]:
        """For each rank, the index of its tokens; ranks that share one model have the same."""
        # For each rank, the first rank with the same tokens.
        first = {place.rank: place.rank for place in self.places}
        for place in self.places:
            ranks = {place.rank, *place.tensor, *place.pipeline} & first.keys()
            joined = {first[rank] for rank in ranks}
            first = {rank: min(joined) if own in joined else own for rank, own in first.items()}
        numbers = {rank: number for number, rank in enumerate(dict.fromkeys(first.values()))}
        return tuple(numbers[rank] for rank in first.values())

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of ranks, with tokens of their own."""
        return max(self.data_ranks) + 1

    def blocks_around(self, stage: int, stack: str) -> tuple[int, int]:
        """Count the blocks of a stack in the stages before one, and in those after it.

        Args:
            stage: Index of the stage.
            stack: Name of the stack.
        """
        before = sum(len(names) for number, names in self._stages(stack) if number < stage)
        behind = sum(len(names) for number, names in self._stages(stack) if number > stage)
        return before, behind

    def block_names(self) -> list[str]:
        """List the names of all blocks, stack by stack and stage by stage."""
        stacks = dict.fromkeys(
            stack for place in self.places for blocks in place.blocks for stack in blocks
        )
        return [
            f"stage_{stage}.{name}" if self.names_clash(stack) else name
            for stack in stacks
            for stage, names in self._stages(stack)
            for name in names
        ]

    def names_clash(self, stack: str) -> bool:
        """Whether blocks of several stages share names, because each stage counts from 0.

        Args:
            stack: Name of the stack.
        """
        names = [name for _, stage in self._stages(stack) for name in stage]
        return len(set(names)) < len(names)

    def _stages(self, stack: str) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yield each known stage once, with the names of its blocks."""
        seen: dict[int, tuple[str, ...]] = {}
        for place in self.places:
            for stage, blocks in zip(place.stages, place.blocks, strict=False):
                seen.setdefault(stage, blocks.get(stack, ()))
        yield from sorted(seen.items())

    def difference(self) -> str | None:
        """Say how a rank's blocks differ from another rank's in the same stage, or return None."""
        known: dict[int, tuple[int, Mapping[str, tuple[str, ...]]]] = {}
        for place in self.places:
            if place.num_stages != self.places[0].num_stages:
                return (
                    f"rank {place.rank} was built with {place.num_stages} stages, but rank 0 with "
                    f"{self.places[0].num_stages}"
                )
            for stage, blocks in zip(place.stages, place.blocks, strict=False):
                rank, others = known.setdefault(stage, (place.rank, blocks))
                if blocks != others:
                    return (
                        f"rank {place.rank} was built with other layers than rank {rank} (in a "
                        "pipeline, pass the schedule or its stages instead of a module)"
                    )
        return None

    def words(self) -> str:
        """Describe the dimensions of the mesh."""
        return self.places[0].words(len(self.places))


def find_place(parts: Sequence[nn.Module], stages: Sequence[Any] = ()) -> RankPlace:
    """Find the place of this rank, without the names of its blocks.

    Args:
        parts: The model, or the parts of it that this rank has.
        stages: The pipeline stages of these parts, as in `torch.distributed.pipelining`. Defaults
            to ().
    """
    if not (dist.is_available() and dist.is_initialized()):
        return RankPlace()
    rank = dist.get_rank()
    tensor, name = _tensor_group(parts)
    if not stages:
        return RankPlace(rank, tensor, name)
    numbers = tuple(stage.stage_index for stage in stages)
    pipeline, count = _ranks_of(stages[0].group), stages[0].num_stages
    return RankPlace(rank, tensor, name, pipeline, numbers, count)


def _ranks_of(group: Any) -> Ranks:
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


# -- tensor parallelism ----------------------------------------------------------------------------


def _tensor_group(parts: Iterable[nn.Module]) -> tuple[Ranks, str]:
    """Find the ranks that share the weights of a model, and the name of their mesh dimension.

    Ranks with different data do not count, because experts may be spread over them.
    """
    data: set[frozenset[int]] = set()
    found: dict[Ranks, str] = {}
    for part in parts:
        held = _held_by_fsdp(part)
        data |= set(_ddp_groups(part))
        for parameter in part.parameters():
            mesh, placements = _layout_of(parameter)
            if mesh is None:
                continue
            count = 0
            if parameter in held:
                count = held[parameter] or _count_data_dimensions(placements)
                data.add(frozenset(_along(mesh, range(count))))
            rest = range(count, mesh.ndim)
            ranks = _along(mesh, rest)
            if len(ranks) > 1:
                names = mesh.mesh_dim_names or ()
                found.setdefault(ranks, ", ".join(names[dim] for dim in rest if names))
    own = {
        ranks: name
        for ranks, name in found.items()
        if not any(len(group.intersection(ranks)) > 1 for group in data)
    }
    return max(own.items(), key=lambda item: len(item[0]), default=((), ""))


def _layout_of(parameter: Tensor) -> tuple[Any, Any]:
    """Return mesh and placements of a sharded parameter, or None for a plain one.

    DDP keeps the local shard as a plain tensor that knows them.
    """
    known = getattr(parameter, "_st_info", None)
    mesh = getattr(parameter, "device_mesh", None) or getattr(known, "mesh", None)
    return mesh, getattr(parameter, "placements", None) or getattr(known, "placements", None)


def _along(mesh: Any, dims: range) -> Ranks:
    """List the ranks along some dimensions of a mesh, at this rank's place in the others."""
    ranks, coordinate = mesh.mesh, mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = tuple(slice(None) if dim in dims else at for dim, at in enumerate(coordinate))
    return tuple(ranks[index].flatten().tolist())


def _held_by_fsdp(part: nn.Module) -> dict[Tensor, int]:
    """Map each parameter held by FSDP2 to its number of data dimensions, which come first."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[Tensor, int] = {}
    for module in part.modules():  # outermost first, so the innermost holder wins
        if isinstance(module, FSDPModule):
            found |= dict.fromkeys(module.parameters(), _fsdp_dimensions(module))
    return found


def _fsdp_dimensions(module: Any) -> int:
    """Return the number of dimensions of FSDP2's mesh, or 0 if this release hides it."""
    try:
        groups = module._get_fsdp_state()._fsdp_param_groups
        return max((int(group.mesh_info.mesh.ndim) for group in groups), default=0)
    except AttributeError:
        return 0


def _count_data_dimensions(placements: Sequence[Any]) -> int:
    """Guess the data dimensions: HSDP replicates along the first and shards along the second."""
    return 2 if len(placements) > 1 and placements[0].is_replicate() else 1


def _ddp_groups(part: nn.Module) -> Iterator[frozenset[int]]:
    for module in part.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            yield frozenset(_ranks_of(module.process_group))
