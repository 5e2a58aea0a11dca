"""Families: modules whose names differ by a number alone, and which of them are stacks of blocks.

Stacks are found by structure, never by a table of class names: those change from release to release
and under sharding.
"""

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from geomon.capture.anatomy.projections import (
    Projections,
    are_heads,
    find_projections,
    find_widths,
)

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
NOT_CALLABLE = (nn.ModuleList, nn.ModuleDict)
# What modules may lie in without being registered there.
_UNREGISTERED = (list, tuple, dict)

# Parts of module names that wrappers add; people know the names without them.
_WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)(?=\.|$)"
)
# Names of attention modules whose projections are not known by name.
_ATTENTION_NAME = re.compile(r"att(n|ention)|(^|_)att(_|$)|mha", re.IGNORECASE)

# Families with less than this share of the largest one's parameters are auxiliary: feature
# extractors, mergers, heads.
_SMALLEST_SHARE = 1 / 20
_SMALLEST_SHARE_WITHOUT = 1 / 4  # the same in a model without attention
_MOST_STAGES = 6  # of a convolutional network; a longer family is not taken for stages

Names = dict[nn.Module, str]
Family = list[nn.Module]


@dataclass(frozen=True)
class LeftOut:
    """A family that looks like a stack of blocks and is not watched.

    Attributes:
        pattern: Names of its modules, with "#" for the numbers in which they differ.
        count: Number of its modules.
        reason: Why it is not watched.
        is_large: Whether it has at least half as many parameters as a stack that is watched, and is
            no copy of one.
    """

    pattern: str
    count: int
    reason: str
    is_large: bool = False


def shown_name(name: str) -> str:
    """Remove from a module's name the parts that wrappers add.

    Args:
        name: Name of the module.

    Example:
        >>> shown_name("_orig_mod.transformer.h.0._checkpoint_wrapped_module")
        'transformer.h.0'
    """
    return _WRAPPERS.sub("", name).removeprefix(".")


def pattern_of(name: str) -> str:
    """Replace every number in a module's name by "#".

    Args:
        name: Name of the module.

    Example:
        >>> pattern_of("encoder.layers.11")
        'encoder.layers.#'
    """
    return re.sub(r"\d+", "#", name)


def name_members_of_lists(names: Names) -> Names:
    """Name also the modules in plain lists and dicts, which torch does not register.

    Keras keeps its layers there, and tracks their weights in its own way.
    """
    found = dict(names)
    waiting = [*names]
    for module in waiting:  # which grows meanwhile
        by_public = sorted(vars(module).items(), key=lambda pair: pair[0].startswith("_"))
        for attribute, value in by_public:
            members = value.items() if isinstance(value, dict) else ()
            for key, member in enumerate(value) if isinstance(value, (list, tuple)) else members:
                if not isinstance(member, nn.Module) or member in found:
                    continue
                path = ".".join(filter(None, (found[module], attribute, str(key))))
                new = [(n, m) for n, m in member.named_modules(prefix=path) if m not in found]
                found |= {inner: name for name, inner in new}
                waiting += [inner for _, inner in new]
    return found


def member_at(model: nn.Module, path: str) -> Any:
    """Return what a path leads to: a module, or the plain list or dict that holds one."""
    found: Any = model
    for part in filter(None, path.split(".")):
        if isinstance(found, nn.Module):
            found = found._modules[part] if part in found._modules else vars(found)[part]
        else:
            found = found[part if isinstance(found, dict) else int(part)]
    return found


def choose_blocks(model: nn.Module, blocks: str | Sequence[nn.Module], names: Names) -> Family:
    """List the blocks that the user named."""
    if isinstance(blocks, str):
        pattern = re.compile(blocks)
        found = [m for m, name in names.items() if pattern.fullmatch(shown_name(name))]
        if not found:
            raise ValueError(
                f"no module's name matches blocks={blocks!r} as a whole; names are such as "
                f"{', '.join(shown_name(n) for n in list(names.values())[1:9])}"
            )
        _refuse_lists(found, names)
        return found
    outside = [type(block).__name__ for block in blocks if block not in names]
    if outside:
        raise ValueError(
            f"blocks holds modules that are not part of {type(model).__name__}: {outside}"
        )
    _refuse_lists(blocks, names)
    return list(blocks)


def _refuse_lists(blocks: Sequence[nn.Module], names: Names) -> None:
    """Refuse lists of modules, which are never called: their members are the blocks."""
    for block in blocks:
        if isinstance(block, NOT_CALLABLE):
            name = shown_name(names[block])
            members = rf"{re.escape(name)}\.\w+"
            raise ValueError(
                f"{name or 'the model'} is a {type(block).__name__}, which is never called: give "
                f'its members, with blocks=r"{members}", or as a list of modules'
            )


def group_by_pattern(modules: Iterable[nn.Module], names: Names) -> list[Family]:
    """Group modules whose names differ by a number alone."""
    families: dict[str, Family] = defaultdict(list)
    for module in modules:
        families[pattern_of(names[module])].append(module)
    return list(families.values())


def find_families(model: nn.Module, names: Names) -> tuple[list[Family], list[LeftOut]]:
    """Find the families that are stacks of blocks."""
    families = _all_families(model, names)
    outermost: list[str] = []
    for pattern in families:  # outer modules come before those inside
        if not any(pattern.startswith(f"{outer}.") for outer in outermost):
            outermost.append(pattern)
    candidates = [
        found
        for pattern in outermost
        for found in _expand(pattern, model, families, names)
        if found
    ]
    watched = _main(candidates)
    left_out = [
        LeftOut(
            _shown_pattern(family, names),
            len(family),
            _why_not(family, watched),
            2 * _size_of(family) >= max(map(_size_of, watched))
            and not any(_is_copy(family, other) for other in watched),
        )
        for family in candidates
        if family not in watched and len(family) > 1
    ]
    for family in watched:
        inside = {module for member in family for module in member.modules()} - {*family}
        held = [inner for inner in families.values() if inside.issuperset(inner)]
        whole = next((inner for inner in held if _are_whole_stages(family, inner)), None)
        if whole is not None:
            reason = f"the {len(family)} {_shown_pattern(family, names)} around them are watched"
            left_out.append(
                LeftOut(_shown_pattern(whole, names), len(whole), reason, is_large=True)
            )
    return watched, left_out


def _shown_pattern(family: Family, names: Names) -> str:
    """Return the name that all members share, with "#" where their names differ."""
    parts = [shown_name(names[member]).split(".") for member in family]
    return ".".join(
        step[0] if len(set(step)) == 1 else pattern_of(step[0]) for step in zip(*parts, strict=True)
    )


def _all_families(model: nn.Module, names: Names) -> dict[str, Family]:
    """List modules that may be blocks or hold blocks, by pattern, outer ones first.

    A single module is a family if it is in a container, not if its name merely has a number.
    """
    families: dict[str, Family] = defaultdict(list)
    in_container: set[str] = set()
    for module, name in names.items():
        last = name.rpartition(".")[2]
        if any(c.isdigit() for c in last) and has_children(module) and _size(module) > 0:
            pattern = pattern_of(name)
            families[pattern].append(module)
            if isinstance(member_at(model, name.rpartition(".")[0]), CONTAINERS + _UNREGISTERED):
                in_container.add(pattern)
    return {p: f for p, f in families.items() if len(f) > 1 or p in in_container}


def _expand(
    pattern: str, model: nn.Module, families: dict[str, Family], names: Names
) -> list[Family]:
    """Return the family itself, or the families of blocks that its members only hold."""
    family = families[pattern]
    parent = member_at(model, names[family[0]].rpartition(".")[0])
    for candidate in [p for p in families if p.startswith(f"{pattern}.")]:  # outer ones first
        if _ATTENTION_NAME.search(candidate.rpartition(".")[2]):
            continue  # attn1 and attn2 of one block
        if _are_lists_of_heads(families[candidate], names):
            continue
        if _are_stages(family, families[candidate]):
            by_member = [
                [block for block in families[candidate] if names[block].startswith(f"{names[m]}.")]
                for m in family
            ]
            if _are_towers(family, by_member) and not isinstance(parent, CONTAINERS):
                return by_member
            return [families[candidate]]
    if leading := leading_lists(family):
        return [leading]
    if any(isinstance(member, NOT_CALLABLE) for member in family):
        # Sublayers in lists: the first of each list stands for the block, if it is the attention.
        first = [next(member.children()) for member in family]
        return [first] if all(map(attends, first)) and are_first_parts(model, first, names) else []
    return [family if isinstance(parent, nn.ModuleList) else _without_ends(family)]


def _are_lists_of_heads(family: Family, names: Names) -> bool:
    """Whether the members are heads of attentions, which are run on the same hidden states."""
    lists: dict[str, list[Projections | None]] = {}
    for member in family:
        lists.setdefault(names[member].rpartition(".")[0], []).append(find_projections(member))
    return all(map(are_heads, lists.values()))


def _are_stages(family: Family, inner: Family) -> bool:
    """Whether the members of a family mainly hold the blocks of an inner family."""
    if any(isinstance(block, NOT_CALLABLE) for block in inner):
        return False
    if not _are_most_of(inner, family):
        return False
    if len({type(block) for block in inner}) > 1 and all(
        isinstance(member, NOT_CALLABLE) for member in family
    ):
        return False  # pairs of sublayers, whose sums are made outside any module
    attention = {module for member in family for module in _attention_modules(member)}
    if attention:
        held = [set(_attention_modules(block)) for block in inner]
        if attention != set().union(*held):
            return False
        # Convolutions may make the first stages, and attention the last ones.
        some = [{attends(block) for block in each} for each in _by_member(family, inner)]
        return all(held) or (len(inner) > len(family) and all(len(each) == 1 for each in some))
    sizes = {_size(member) for member in family}
    return (
        len(inner) > len(family)
        and len(family) <= _MOST_STAGES
        and (len(sizes) > 1 or all(isinstance(member, CONTAINERS) for member in family))
    )


def _are_whole_stages(family: Family, inner: Family) -> bool:
    """Whether members of different sizes mainly hold modules, of one class several in a member."""
    sizes = {_size(member) for member in family}
    classes = [[type(block) for block in each] for each in _by_member(family, inner)]
    return (
        1 < len(family) == len(sizes)
        and _are_most_of(inner, family)
        and any(len(set(each)) < len(each) for each in classes)
    )


def _are_most_of(inner: Family, family: Family) -> bool:
    """Whether modules have at least half of the parameters of those that hold them."""
    return 2 * _size_of(inner) >= _size_of(family)


def _by_member(family: Family, inner: Family) -> list[Family]:
    """Group modules by the member of a family in which they are."""
    return [[block for block in inner if block in m.modules()] for m in family]


def leading_lists(family: Family) -> Family:
    """List those lists of [norms, sublayer, residual] with which blocks begin.

    A block begins at a sublayer that attends, behind one that does not; the sums are made in the
    residual module of each list.
    """
    attending = [isinstance(member, nn.ModuleList) and attends(member) for member in family]
    if all(attending) or not any(attending) or not all(map(_ends_in_residual, family)):
        return []
    behind = [True, *(not before for before in attending)]
    begins = zip(family, attending, behind, strict=False)
    return [member for member, attend, first in begins if attend and first]


def _ends_in_residual(member: nn.Module) -> bool:
    """Whether a list holds one sublayer, and behind it what adds its output to the stream."""
    children = list(member.children())
    if not isinstance(member, nn.ModuleList) or isinstance(children[-1], NOT_CALLABLE):
        return False
    sizes = [_size(child) for child in children]
    if _takes_two(children[-1]):  # a gate may have more parameters than what it adds
        sizes[-1] = 0
    largest = sizes.index(max(sizes))
    return (
        largest < len(sizes) - 1
        and 4 * sizes[largest] > 3 * sum(sizes)
        and not isinstance(children[largest], NOT_CALLABLE)
    )


def _takes_two(module: nn.Module) -> bool:
    """Whether a module has to be given two values: the stream, and what is added to it."""
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) > 1


def are_first_parts(model: nn.Module, family: Family, names: Names) -> bool:
    """Whether each member is the first of several modules in a list of its own."""
    parents = [member_at(model, names[member].rpartition(".")[0]) for member in family]
    return all(
        isinstance(parent, nn.ModuleList)
        and parent[0] is member
        and not isinstance(member, NOT_CALLABLE)
        and any(type(other) is not type(member) for other in parent)
        for parent, member in zip(parents, family, strict=True)
    )


def _are_towers(family: Family, by_member: list[Family]) -> bool:
    """Whether members that hold blocks may run side by side: all alike, none a mere container."""
    return (
        len({_size(member) for member in family}) == 1
        and all(len(blocks) > 1 for blocks in by_member)
        and not any(isinstance(member, CONTAINERS) for member in family)
    )


def _without_ends(family: Family) -> Family:
    """Remove from a Sequential's family the modules before and after the blocks.

    An embedding, a pooling or a head has a class of its own and, where others attend, no attention.
    In a ModuleList all modules are blocks: a first one of another class belongs to a hybrid.
    """
    classes = [type(member) for member in family]
    if len(set(classes)) == len(classes):
        return family
    blocks = [
        place
        for place, member in enumerate(family)
        if classes.count(type(member)) > 1 or attends(member)
    ]
    return family[blocks[0] : blocks[-1] + 1]


def _main(candidates: list[Family]) -> list[Family]:
    """Choose the families that are watched."""
    largest = _size_of(max(candidates, key=_size_of, default=[]))
    kept = [family for family in candidates if _size_of(family) >= _SMALLEST_SHARE * largest]
    attending = [family for family in kept if any(map(attends, family))]
    kept = attending or [f for f in kept if _size_of(f) >= _SMALLEST_SHARE_WITHOUT * largest]
    return [family for family in kept if not any(_is_copy(family, other) for other in kept)]


def _is_copy(family: Family, other: Family) -> bool:
    """Whether the family is a frozen twin of one that is trained: a moving average, a teacher."""
    return (
        not any(p.requires_grad for block in family for p in block.parameters())
        and any(p.requires_grad for block in other for p in block.parameters())
        and [[p.shape for p in block.parameters()] for block in family]
        == [[p.shape for p in block.parameters()] for block in other]
    )


def _why_not(family: Family, watched: list[Family]) -> str:
    """Say why a family is not watched."""
    if any(_is_copy(family, other) for other in watched):
        return "a frozen copy of a stack that is watched"
    if not any(map(attends, family)) and any(attends(b) for other in watched for b in other):
        return "no attention was found in them by name, unlike in others"
    return "few parameters beside the largest stack"


def has_children(module: nn.Module) -> bool:
    """Whether a module holds others."""
    return next(module.children(), None) is not None


def _size(module: nn.Module) -> int:
    size = sum(parameter.numel() for parameter in module.parameters())
    if not any(getattr(inner, "_is_fsdp_managed_module", False) for inner in module.modules()):
        return size
    # FSDP1 has made one flat parameter of many, of which this rank may hold nothing of a block.
    widths = filter(None, map(find_widths, module.modules()))
    return sum(map(math.prod, widths)) or size


def _size_of(family: Family) -> int:
    return sum(map(_size, family))


def _attention_modules(module: nn.Module) -> list[nn.Module]:
    """List modules with projections of queries and keys, or else those named attention."""
    known = [inner for inner in module.modules() if find_projections(inner) is not None]
    return known or [
        inner
        for name, inner in module.named_modules()
        if _ATTENTION_NAME.search(name.rpartition(".")[2]) and has_children(inner)
    ]


def attends(module: nn.Module) -> bool:
    """Whether there is attention in a module, going by projections and names.

    Args:
        module: A module that may be a block.
    """
    return bool(_attention_modules(module))
