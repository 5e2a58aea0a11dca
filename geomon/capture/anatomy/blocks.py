"""Anatomy: where the stacks of blocks, their attention and the token embeddings of a model are.

A *family* is all modules whose names differ by a number alone ("model.layers.#"); the outermost
families that are made of blocks and hold most of the parameters are the *stacks*
(`geomon.capture.anatomy.families`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from geomon.capture.anatomy.families import (
    CONTAINERS,
    NOT_CALLABLE,
    Family,
    LeftOut,
    Names,
    are_first_parts,
    attends,
    by_pattern,
    chosen,
    find_families,
    pattern_of,
    shown_name,
)
from geomon.capture.anatomy.projections import Projections, find_projections

# What attention to another stack is called.
_CROSS_NAME = re.compile(r"cross|enc_?dec|encoder_att|multihead_attn|memory|src_att", re.IGNORECASE)


@dataclass(frozen=True)
class Attention:
    """An attention of a block.

    Attributes:
        name: Its path in the block.
        module: The module that holds the projections.
        projections: Where queries and keys are made.
        cross: Whether its keys come from another stack.
    """

    name: str
    module: nn.Module = field(repr=False)
    projections: Projections
    cross: bool


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        name: As shown to people.
        module: The block itself.
        attentions: Those whose projections are known, in the order of the modules.
        attends: Whether there is attention in it to its own stack, going by projections and names.
    """

    name: str
    module: nn.Module = field(repr=False)
    attentions: tuple[Attention, ...]
    attends: bool

    def place_of(self, *, cross: bool) -> int | None:
        """Which of `attentions` is the one to its own stack, or the one to another."""
        return next((i for i, a in enumerate(self.attentions) if a.cross is cross), None)


@dataclass(frozen=True)
class Stack:
    """Blocks that are run one after another.

    Attributes:
        name: What tells it from the other stacks of the model; "" where there is one.
        blocks: In order: what leaves block l (counted from 1) is layer l.
        owner: The module whose forward runs the blocks; None where only the model's caller does.
        above: Modules around the blocks, outermost first: their calls carry padding masks.
        entering: Whether layer l is what enters block l + 1: each block is the first of several
            sublayers whose sums are made outside any module.
    """

    name: str
    blocks: tuple[Block, ...]
    owner: nn.Module | None = field(repr=False)
    above: tuple[nn.Module, ...] = field(repr=False)
    entering: bool = False


@dataclass(frozen=True)
class Anatomy:
    """What is watched in a model.

    Attributes:
        stacks: In the order of the model's modules.
        embeddings: Embedding tables outside the blocks: the input of one is the token ids.
        left_out: What looks like a stack and is not watched.
    """

    stacks: tuple[Stack, ...]
    embeddings: tuple[nn.Embedding, ...] = field(repr=False)
    left_out: tuple[LeftOut, ...] = ()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of all stacks."""
        return tuple(block for stack in self.stacks for block in stack.blocks)


def find_anatomy(model: nn.Module, blocks: str | Sequence[nn.Module] | None = None) -> Anatomy:
    """Find the stacks of a model and what stands around them.

    Blocks are modules that are no leaves, can be called, and have names that differ by a number
    alone. Of all such families the outermost count (lists inside blocks, such as experts, do not);
    those with attention go before those without, and all but the smallest are watched. Where the
    members of a family only hold lists of blocks (the stages of a convolutional or a windowed
    network), the blocks of all of them in turn are one stack.

    Args:
        model: Any module that contains a transformer, or another stack of blocks.
        blocks: Overrides the search: a regular expression that matches the whole names of the
            blocks, or the blocks themselves.

    Raises:
        ValueError: No blocks, or none that the pattern matches.
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a torch.nn.Module, got {type(model).__name__}: pass the model itself"
        )
    names = {module: name for name, module in model.named_modules()}
    left_out: list[LeftOut] = []
    if blocks is not None:
        families = by_pattern(chosen(model, blocks, names), names)
    else:
        families, left_out = find_families(model, names)
    if not families:
        children = ", ".join(name for name, _ in model.named_children()) or "none"
        raise ValueError(
            f"no transformer blocks in {type(model).__name__} (its children: {children}): expected "
            "modules that hold others, in a ModuleList or Sequential; give them with "
            r'blocks="regular expression of their names", such as r"encoder\.layer\.\d+", or as a '
            "list of modules"
        )
    inside = {module for family in families for block in family for module in block.modules()}
    return Anatomy(
        stacks=_stacks(model, families, names),
        embeddings=tuple(
            module for module in names if isinstance(module, nn.Embedding) and module not in inside
        ),
        left_out=tuple(left_out),
    )


# -- what stands in and around the blocks --------------------------------------------------------


def _stacks(model: nn.Module, families: list[Family], names: Names) -> tuple[Stack, ...]:
    labels = _tell_apart([_list_path(family, names) for family in families])
    around = [_around(model, family, names) for family in families]
    stacks = []
    for place, (family, label) in enumerate(zip(families, labels, strict=True)):
        blocks = [_block(block, names, second=place > 0) for block in family]
        if any(block.attentions for block in blocks):
            # In a hybrid what is merely called attention ("linear_attn") has no queries and keys.
            blocks = [replace(b, attends=b.attends and bool(b.attentions)) for b in blocks]
        shared = {m for other in around[:place] for m in other}
        stacks.append(
            Stack(
                label,
                tuple(blocks),
                _owner(family, around[place], names),
                tuple(module for module in around[place] if module not in shared),
                entering=are_first_parts(model, family, names),
            )
        )
    return tuple(stacks)


def _block(module: nn.Module, names: Names, *, second: bool) -> Block:
    """A block with its attentions; `second` where another stack comes before its own."""
    found: list[Attention] = []
    covered: set[nn.Module] = set()
    for name, inner in module.named_modules():
        projections = None if inner in covered else find_projections(inner)
        if projections is not None:
            covered |= set(inner.modules())
            shown = shown_name(name)
            cross = bool(_CROSS_NAME.search(shown)) or (second and len(found) == 1)
            found.append(Attention(shown, inner, projections, cross))
    # Alone in a plain block, an attention of any name is the block's own.
    if len(found) == 1 and found[0].cross and not re.search("cross", found[0].name, re.IGNORECASE):
        found = [Attention(found[0].name, found[0].module, found[0].projections, cross=False)]
    return Block(
        shown_name(names[module]) or type(module).__name__,
        module,
        tuple(found),
        any(not a.cross for a in found) if found else attends(module),
    )


def _list_path(family: Family, names: Names) -> list[str]:
    """What the shown names of all members begin with, as parts."""
    parts = [shown_name(names[block]).split(".") for block in family]
    common = []
    for step in zip(*(p[:-1] for p in parts), strict=False):
        if len(set(step)) > 1:
            break
        common.append(step[0])
    return common


def _tell_apart(paths: list[list[str]]) -> list[str]:
    """Names of stacks: the first parts of their paths that tell them apart; "" for one alone."""
    if len(paths) == 1:
        return [""]
    ends = [list(path) for path in paths]
    while all(ends) and len({path[0] for path in ends}) == 1:
        ends = [path[1:] for path in ends]
    count = max(map(len, ends))
    for length in range(1, count + 1):
        labels = [".".join(path[:length]) for path in ends]
        if len(set(labels)) == len(labels):
            return [label or "main" for label in labels]
    return [f"stack_{place}" for place in range(1, len(paths) + 1)]


def _around(model: nn.Module, family: Family, names: Names) -> list[nn.Module]:
    """Modules that hold the whole family and are no lists, outermost first."""
    names_of = [names[block] for block in family]
    parts = names_of[0].split(".")
    paths = [".".join(parts[:length]) for length in range(len(parts))]
    return [
        module
        for path in paths
        if all(not path or name.startswith(f"{path}.") for name in names_of)
        and not isinstance(module := model.get_submodule(path), NOT_CALLABLE)
    ]


def _owner(family: Family, around: Sequence[nn.Module], names: Names) -> nn.Module | None:
    """The innermost module of which one call runs all blocks.

    What stands in a list itself may be called several times (the shared layers of ALBERT), and a
    Sequential may be iterated and never called.
    """
    listed = pattern_of(names[family[0]]).partition("#")[0]
    own: Iterator[nn.Module] = (
        module
        for module in reversed(around)
        if not isinstance(module, CONTAINERS) and listed.startswith(names[module])
    )
    return next(own, around[0] if around else None)
