"""The model on this rank: a module, or the stages of a pipeline that this rank runs."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from geomon.capture.anatomy import Anatomy, find_anatomy, join_anatomies
from geomon.capture.calling.batch import has_forward
from geomon.capture.weights import said, stored_weight
from geomon.note import Note
from geomon.note_kinds import NoteKind

_FUNCTION = (
    "in a pipeline the probe is a function that runs one pass of the schedule on every rank, for "
    "example probe=lambda schedule: schedule.eval(inputs, target=targets): with a loss, the last "
    "stage needs targets"
)


class ModelParts:
    """The model, or the pipeline stages of it that this rank has.

    Args:
        model: A module; or a stage of `torch.distributed.pipelining`, a list of stages, or the
            schedule that runs them.

    Attributes:
        given: The argument.
        modules: The model, or the module of each stage.
        stages: The stages in ascending order, or () for a model.
        root: The model, or a module that holds the modules of all stages.

    Raises:
        TypeError: If it is neither a module nor stages.
    """

    def __init__(self, model: Any) -> None:
        self.given = model
        stages = _stages_of(model)
        if stages is None and not isinstance(model, nn.Module):
            raise TypeError(
                f"expected a torch.nn.Module, got {type(model).__name__}: pass the model, or, in "
                "a pipeline, the schedule or the stages that this rank runs"
            )
        self.stages: tuple[Any, ...] = stages or ()
        self.modules: tuple[nn.Module, ...] = tuple(x.submod for x in self.stages) or (model,)
        self.root: nn.Module = nn.ModuleList(self.modules) if stages else model

    @property
    def name(self) -> str:
        """Class name of the model, or of its first stage's module."""
        return type(self.modules[0]).__name__

    @property
    def micro_batches(self) -> tuple[Callable[[], int], ...]:
        """One function per stage that counts its micro-batches (0 before they are known)."""
        return tuple(functools.partial(_count_micro_batches, stage) for stage in self.stages)

    def find_anatomy(self, blocks: str | Sequence[nn.Module] | None = None) -> Anatomy:
        """Find the blocks of the model or its parts; a part may have none.

        Args:
            blocks: Overrides the search (see `geomon.capture.find_anatomy`). Defaults to None.

        Raises:
            ValueError: If no blocks are found, or none match `blocks`.
        """
        if not self.stages:
            return find_anatomy(self.root, blocks)
        found = []
        for number, module in enumerate(self.modules):
            inside = set(module.modules())
            own = blocks
            if blocks is not None and not isinstance(blocks, str):
                own = [block for block in blocks if block in inside]
            try:
                anatomy = find_anatomy(module, own)
            except ValueError:  # the first and the last stage may have none
                anatomy = join_anatomies(())
            stacks = tuple(replace(stack, part=number) for stack in anatomy.stacks)
            found.append(replace(anatomy, stacks=stacks))
        return join_anatomies(found)

    def note_on_ties(self, anatomy: Anatomy) -> list[Note]:
        """Note that embedding and unembedding are tied by the configuration alone, or without it.

        Args:
            anatomy: Anatomy of the model.
        """
        output = anatomy.output
        weights = [stored_weight(table) for table in anatomy.of_output]
        own = None if output is None else stored_weight(output)
        wanted = None if output is None else _ties_of(self.root, output)
        places = [0 if x is None or hasattr(x, "to_local") else x.data_ptr() for x in weights]
        if own is None or hasattr(own, "to_local") or wanted is None or not all(places):
            return []  # unknown, or ranks share the weights
        is_tied = own.data_ptr() in places
        if not places or not own.data_ptr() or is_tied == wanted:
            return []
        state = "one weight" if is_tied else "two weights"
        text = "tie_word_embeddings is {wanted}, but embedding and unembedding are {state}"
        numbers = {"wanted": str(wanted), "state": state}
        return [Note(NoteKind.TIES, text, numbers=numbers, is_odd=True)]

    def check_probe(self, inputs: Any) -> None:
        """Raise an error if no pass can be made over the inputs.

        Args:
            inputs: Inputs of a probe.

        Raises:
            ValueError: If the model is a pipeline and the inputs are not a function that runs it,
                or if the model has no `forward` for the inputs.
        """
        if self.stages and not (callable(inputs) and not isinstance(inputs, Mapping)):
            raise ValueError(_FUNCTION)
        if isinstance(inputs, Tensor | Mapping | tuple | list) and not has_forward(self.root):
            raise ValueError(
                f"{self.name} has no forward() to call with the inputs of the probe: define "
                "forward, pass a function, for example probe=lambda module: module.decoder(ids), "
                'or, in a callback, use probe="validation"'
            )


def _ties_of(root: nn.Module, output: nn.Module) -> bool | None:
    """Return whether the configuration of the model around an output ties it; None if unknown."""
    found = None
    for module in root.modules():  # the innermost model that has the output comes last
        wanted = said(said(module, "config"), "tie_word_embeddings")
        if isinstance(wanted, bool) and any(each is output for each in module.modules()):
            found = wanted
    return found


def _stages_of(model: Any) -> tuple[Any, ...] | None:
    """Return the stages of a pipeline, or None for anything else."""
    if isinstance(model, nn.Module):
        return None
    if _is_stage(model):
        return (model,)
    if isinstance(model, list | tuple):
        if model and all(map(_is_stage, model)):
            return tuple(sorted(model, key=lambda stage: stage.stage_index))
        return None
    # Schedules keep their stages under private names.
    stages = getattr(model, "_stages", None) or getattr(model, "_stage", None)
    return None if stages is None else _stages_of(stages)


def _is_stage(value: Any) -> bool:
    known = all(hasattr(value, name) for name in ("stage_index", "num_stages", "args_recv_info"))
    return known and isinstance(value.submod, nn.Module)


def _count_micro_batches(stage: Any) -> int:
    """Count the micro-batches for which a pipeline stage lists received inputs."""
    return len(stage.args_recv_info)
