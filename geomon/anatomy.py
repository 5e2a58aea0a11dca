"""Anatomy: where the stacks of blocks, their attention and the token embeddings of a model are.

Found by structure, never by a table of class names: those change from release to release and under
sharding. A *family* is all modules whose names differ by a number alone ("model.layers.#"); the
outermost families that are made of blocks and hold most of the parameters are the *stacks*.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from geomon.projections import Projections, find_projections

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NOT_CALLABLE = (nn.ModuleList, nn.ModuleDict)

# What wrappers put into module names; people know the names without.
_WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)(?=\.|$)"
)
# What attention is called where its projections are not known by name.
_ATTENTION_NAME = re.compile(r"att(n|ention)", re.IGNORECASE)
# What attention to another stack is called.
_CROSS_NAME = re.compile(r"cross|enc_?dec|encoder_att|multihead_attn|memory|src_att", re.IGNORECASE)

# Families that hold less than this share of the largest one's parameters are auxiliary: feature
# extractors, mergers, heads.
_SMALLEST_SHARE = 1 / 20
_SMALLEST_SHARE_WITHOUT = 1 / 4  # the same where there is no attention to go by
_MOST_STAGES = 6  # of a convolutional network; no more blocks than that are taken for stages


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
class LeftOut:
    """Blocks that are not watched: their names as a pattern, how many, and why."""

    pattern: str
    count: int
    reason: str


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
        families = _by_pattern(_chosen(model, blocks, names), names)
    else:
        families, left_out = _found(model, names)
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


def shown_name(name: str) -> str:
    """A module's name without what wrappers put into it.

    Example:
        >>> shown_name("_orig_mod.transformer.h.0._checkpoint_wrapped_module")
        'transformer.h.0'
    """
    return _WRAPPERS.sub("", name).removeprefix(".")


def pattern_of(name: str) -> str:
    """A module's name with every number as "#".

    Example:
        >>> pattern_of("encoder.layers.11")
        'encoder.layers.#'
    """
    return re.sub(r"\d+", "#", name)


# -- which modules are blocks --------------------------------------------------------------------

_Names = dict[nn.Module, str]
_Family = list[nn.Module]


def _chosen(model: nn.Module, blocks: str | Sequence[nn.Module], names: _Names) -> _Family:
    if isinstance(blocks, str):
        pattern = re.compile(blocks)
        found = [m for m, name in names.items() if pattern.fullmatch(shown_name(name))]
        if not found:
            raise ValueError(
                f"no module's name matches blocks={blocks!r} as a whole; names are such as "
                f"{', '.join(shown_name(n) for n in list(names.values())[1:9])}"
            )
        return found
    outside = [type(block).__name__ for block in blocks if block not in names]
    if outside:
        raise ValueError(
            f"blocks holds modules that are not part of {type(model).__name__}: {outside}"
        )
    return list(blocks)


def _by_pattern(modules: Iterable[nn.Module], names: _Names) -> list[_Family]:
    families: dict[str, _Family] = defaultdict(list)
    for module in modules:
        families[pattern_of(names[module])].append(module)
    return list(families.values())


def _found(model: nn.Module, names: _Names) -> tuple[list[_Family], list[LeftOut]]:
    """The families that are stacks, in the order of the modules, and those that are not."""
    families = _all_families(model, names)
    outermost: list[str] = []
    for pattern in families:  # outer modules come before those inside
        if not any(pattern.startswith(f"{outer}.") for outer in outermost):
            outermost.append(pattern)
    candidates = [
        found
        for pattern in outermost
        for found in _expanded(pattern, model, families, names)
        if found
    ]
    watched = _main(candidates)
    left_out = [
        LeftOut(shown_name(pattern_of(names[family[0]])), len(family), _why_not(family, watched))
        for family in candidates
        if family not in watched and len(family) > 1
    ]
    return watched, left_out


def _all_families(model: nn.Module, names: _Names) -> dict[str, _Family]:
    """Modules that may be blocks or hold blocks, by pattern, outer ones first.

    One module alone is a family where it stands in a container, and not where a number is merely
    part of its name.
    """
    families: dict[str, _Family] = defaultdict(list)
    in_container: set[str] = set()
    for module, name in names.items():
        last = name.rpartition(".")[2]
        if any(c.isdigit() for c in last) and _has_children(module) and _size(module) > 0:
            pattern = pattern_of(name)
            families[pattern].append(module)
            if isinstance(model.get_submodule(name.rpartition(".")[0]), _CONTAINERS):
                in_container.add(pattern)
    return {p: f for p, f in families.items() if len(f) > 1 or p in in_container}


def _expanded(
    pattern: str, model: nn.Module, families: dict[str, _Family], names: _Names
) -> list[_Family]:
    """The family itself, or the families of blocks that its members only hold."""
    family = families[pattern]
    parent = model.get_submodule(names[family[0]].rpartition(".")[0])
    inner = [p for p in families if p.startswith(f"{pattern}.")]
    inner.sort(key=lambda p: _size_of(families[p]), reverse=True)
    for candidate in inner:
        if _are_stages(family, families[candidate]):
            by_member = [
                [block for block in families[candidate] if names[block].startswith(f"{names[m]}.")]
                for m in family
            ]
            if _are_towers(family, by_member) and not isinstance(parent, _CONTAINERS):
                return by_member
            return [families[candidate]]
    if any(isinstance(member, _NOT_CALLABLE) for member in family):
        # Sublayers in lists: the first of each, where that is the attention.
        first = [next(member.children()) for member in family]
        return (
            [first] if all(map(_attends, first)) and _are_first_parts(model, first, names) else []
        )
    return [family if isinstance(parent, nn.ModuleList) else _without_ends(family)]


def _are_stages(family: _Family, inner: _Family) -> bool:
    """Whether the members of a family do little but hold the blocks of an inner one."""
    if any(isinstance(block, _NOT_CALLABLE) for block in inner):
        return False
    if 2 * _size_of(inner) < _size_of(family):
        return False
    if len({type(block) for block in inner}) > 1 and all(
        isinstance(member, _NOT_CALLABLE) for member in family
    ):
        return False  # pairs of sublayers, whose sums are made outside any module
    attention = {module for member in family for module in _attention_modules(member)}
    if attention:
        held = [set(_attention_modules(block)) for block in inner]
        return all(held) and attention == set().union(*held)
    sizes = {_size(member) for member in family}
    return (
        len(inner) > len(family)
        and len(family) <= _MOST_STAGES
        and (len(sizes) > 1 or all(isinstance(member, _CONTAINERS) for member in family))
    )


def _are_first_parts(model: nn.Module, family: _Family, names: _Names) -> bool:
    """Whether each member is the first of several modules in a list of its own."""
    parents = [model.get_submodule(names[member].rpartition(".")[0]) for member in family]
    return len(set(parents)) == len(family) and all(
        isinstance(parent, nn.ModuleList)
        and len(parent) > 1
        and parent[0] is member
        and not isinstance(member, _NOT_CALLABLE)
        and any(type(other) is not type(member) for other in parent)
        for parent, member in zip(parents, family, strict=True)
    )


def _are_towers(family: _Family, by_member: list[_Family]) -> bool:
    """Whether members that hold blocks may run side by side: all alike, none a mere container."""
    return (
        len(family) > 1
        and len({_size(member) for member in family}) == 1
        and all(len(blocks) > 1 for blocks in by_member)
        and not any(isinstance(member, _CONTAINERS) for member in family)
    )


def _without_ends(family: _Family) -> _Family:
    """The family without what stands before and after the blocks of a Sequential.

    An embedding, a pooling, a head: of a class of its own and, where others attend, without
    attention. In a list all are blocks: a first one of another class is a hybrid's.
    """
    classes = [type(member) for member in family]
    if len(set(classes)) == len(classes):
        return family
    some_attend = any(_attends(member) for member in family)

    def odd(member: nn.Module) -> bool:
        alone = classes.count(type(member)) == 1
        return alone and not (some_attend and _attends(member))

    kept = list(family)
    while kept and odd(kept[0]):
        kept.pop(0)
    while kept and odd(kept[-1]):
        kept.pop()
    return kept


def _main(candidates: list[_Family]) -> list[_Family]:
    """The families that are watched."""
    largest = max(map(_size_of, candidates), default=0)
    kept = [family for family in candidates if _size_of(family) >= _SMALLEST_SHARE * largest]
    attending = [family for family in kept if any(map(_attends, family))]
    kept = attending or [f for f in kept if _size_of(f) >= _SMALLEST_SHARE_WITHOUT * largest]
    return [family for family in kept if not any(_is_copy(family, other) for other in kept)]


def _is_copy(family: _Family, other: _Family) -> bool:
    """Whether the family is a frozen twin of one that is trained: a moving average, a teacher."""
    return (
        family is not other
        and not any(p.requires_grad for block in family for p in block.parameters())
        and any(p.requires_grad for block in other for p in block.parameters())
        and [[p.shape for p in block.parameters()] for block in family]
        == [[p.shape for p in block.parameters()] for block in other]
    )


def _why_not(family: _Family, watched: list[_Family]) -> str:
    if any(_is_copy(family, other) for other in watched):
        return "a frozen copy of a stack that is watched"
    if not any(map(_attends, family)) and any(_attends(b) for other in watched for b in other):
        return "no attention in them, unlike in others"
    return "few parameters beside the largest stack"


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _size_of(family: _Family) -> int:
    return sum(map(_size, family))


def _attention_modules(module: nn.Module) -> list[nn.Module]:
    """Modules with known projections of queries and keys, else those that are called attention."""
    known = [inner for inner in module.modules() if find_projections(inner) is not None]
    return known or [
        inner
        for name, inner in module.named_modules()
        if _ATTENTION_NAME.search(name.rpartition(".")[2]) and _has_children(inner)
    ]


def _attends(module: nn.Module) -> bool:
    return bool(_attention_modules(module))


# -- what stands in and around the blocks --------------------------------------------------------


def _stacks(model: nn.Module, families: list[_Family], names: _Names) -> tuple[Stack, ...]:
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
                entering=_are_first_parts(model, family, names),
            )
        )
    return tuple(stacks)


def _block(module: nn.Module, names: _Names, *, second: bool) -> Block:
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
        any(not a.cross for a in found) if found else _attends(module),
    )


def _list_path(family: _Family, names: _Names) -> list[str]:
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


def _around(model: nn.Module, family: _Family, names: _Names) -> list[nn.Module]:
    """Modules that hold the whole family and are no lists, outermost first."""
    names_of = [names[block] for block in family]
    parts = names_of[0].split(".")
    paths = [".".join(parts[:length]) for length in range(len(parts))]
    return [
        module
        for path in paths
        if all(not path or name.startswith(f"{path}.") for name in names_of)
        and not isinstance(module := model.get_submodule(path), _NOT_CALLABLE)
    ]


def _owner(family: _Family, around: Sequence[nn.Module], names: _Names) -> nn.Module | None:
    """The innermost module of which one call runs all blocks.

    What stands in a list itself may be called several times (the shared layers of ALBERT), and a
    Sequential may be iterated and never called.
    """
    listed = pattern_of(names[family[0]]).partition("#")[0]
    own: Iterator[nn.Module] = (
        module
        for module in reversed(around)
        if not isinstance(module, _CONTAINERS) and listed.startswith(names[module])
    )
    return next(own, around[0] if around else None)
