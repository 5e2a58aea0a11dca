"""Group modules whose names differ only in a number, and decide which groups are stacks of blocks.

Stacks are found by structure, never by class names, which change between releases and under
sharding.
"""

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

# Parts of module names that wrappers add; people know the names without them.
_WRAPPERS = re.compile(
    r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)(?=\.|$)"
)
# Names of attention modules, for attentions whose projections are not recognised by name.
_ATTENTION_NAME = re.compile(r"att(n|ention)|(^|_)att(_|$)|mha", re.IGNORECASE)

# Families with a smaller share of the largest family's parameters are auxiliary: feature
# extractors, mergers, heads.
_SMALLEST_SHARE = 1 / 20
_SMALLEST_SHARE_WITHOUT = 1 / 4  # in a model without attention
_MOST_STAGES = 6  # of a convolutional network; longer families are not treated as stages

Family = list[nn.Module]


@dataclass(frozen=True)
class LeftOut:
    """A family that looks like a stack of blocks but is not watched.

    Attributes:
        pattern: Names of its modules, with "#" where their numbers differ.
        count: Number of its modules.
        reason: Why it is not watched.
        is_large: Whether it has at least half as many parameters as a watched stack, and is not a
            copy of one.
    """

    pattern: str
    count: int
    reason: str
    is_large: bool = False


def shown_name(name: str) -> str:
    """Remove the parts of a module's name that wrappers added.

    Args:
        name: Name of the module.

    Example:
        >>> shown_name("_orig_mod.transformer.h.0._checkpoint_wrapped_module")
        'transformer.h.0'
    """
    return _WRAPPERS.sub("", name).removeprefix(".")


def pattern_of(name: str) -> str:
    """Replace every number in a module's name by "#"."""
    return re.sub(r"\d+", "#", name)


class ModuleTree:
    """The modules of a model with their names and parents; `lists` also searches plain containers.

    Keras keeps its layers in plain lists and dicts, which torch does not register.
    """

    def __init__(self, model: nn.Module, *, lists: bool = False) -> None:
        self.names: dict[nn.Module, str] = {}
        self.holders: dict[nn.Module, nn.Module] = {}
        self._add(model, None, "")
        waiting = [*self.names] if lists else []
        for module in waiting:  # which grows meanwhile
            by_public = sorted(vars(module).items(), key=lambda pair: pair[0].startswith("_"))
            for attribute, value in by_public:
                for key, member in _members(value):
                    if isinstance(member, nn.Module) and member not in self.names:
                        known = len(self.names)
                        self._add(member, module, f"{attribute}.{key}")
                        waiting += [*self.names][known:]

    def _add(self, module: nn.Module, holder: nn.Module | None, name: str) -> None:
        if holder is not None:
            self.holders[module] = holder
            name = f"{self.names[holder]}.{name}".removeprefix(".")
        self.names[module] = name
        for inner, child in module.named_children():
            if child not in self.names:
                self._add(child, module, inner)

    def above(self, module: nn.Module) -> Iterator[nn.Module]:
        """Iterate over the ancestors of a module, innermost first."""
        while (holder := self.holders.get(module)) is not None:
            yield holder
            module = holder


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    """List the keys and members of a plain list, tuple or dict; other values have none."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def choose_blocks(
    model: nn.Module, blocks: str | Sequence[nn.Module], names: Mapping[nn.Module, str]
) -> Family:
    """List the blocks that the user named."""
    if isinstance(blocks, str):
        pattern = re.compile(blocks)
        found = [m for m, name in names.items() if pattern.fullmatch(shown_name(name))]
        if not found:
            raise ValueError(
                f"no module's full name matches blocks={blocks!r}; names look like "
                f"{', '.join(shown_name(n) for n in list(names.values())[1:9])}"
            )
        _refuse_lists(found, names)
        return found
    outside = [type(block).__name__ for block in blocks if block not in names]
    if outside:
        raise ValueError(
            f"blocks contains modules that are not part of {type(model).__name__}: {outside}"
        )
    _refuse_lists(blocks, names)
    return list(blocks)


def _refuse_lists(blocks: Sequence[nn.Module], names: Mapping[nn.Module, str]) -> None:
    """Raise if a block is a ModuleList or ModuleDict, which is never called."""
    for block in blocks:
        if isinstance(block, NOT_CALLABLE):
            name = shown_name(names[block])
            members = rf"{re.escape(name)}\.\w+"
            raise ValueError(
                f"{name or 'the model'} is a {type(block).__name__}, which is never called: give "
                f'its members, with blocks=r"{members}", or as a list of modules'
            )


def group_by_pattern(
    modules: Iterable[nn.Module], names: Mapping[nn.Module, str]
) -> dict[str, Family]:
    """Group modules whose names differ only in a number."""
    families: dict[str, Family] = defaultdict(list)
    for module in modules:
        families[pattern_of(names[module])].append(module)
    return families


def find_families(tree: ModuleTree) -> tuple[list[Family], list[LeftOut]]:
    """Return the families that are stacks of blocks, and those that only look like one."""
    families = _numbered_families(tree)
    outermost: list[str] = []
    for pattern in families:  # outer modules come before those inside
        if not any(pattern.startswith(f"{outer}.") for outer in outermost):
            outermost.append(pattern)
    candidates = [
        found for pattern in outermost for found in _expand(pattern, families, tree) if found
    ]
    watched = _main(candidates)
    others = (family for family in candidates if family not in watched and len(family) > 1)
    return watched, [_left_out(family, watched, tree.names) for family in others]


def _left_out(family: Family, watched: list[Family], names: Mapping[nn.Module, str]) -> LeftOut:
    """Say why a family is not watched."""
    is_large = 2 * _size_of(family) >= max(map(_size_of, watched))
    if any(_is_copy(family, other) for other in watched):
        reason, is_large = "a frozen copy of a watched stack", False
    elif not any(map(attends, family)) and any(attends(b) for other in watched for b in other):
        reason = "no attention was found in them by name, but others have some"
    else:
        reason = "few parameters compared with the largest stack"
    parts = [shown_name(names[member]).split(".") for member in family]
    shown = (
        step[0] if len({*step}) == 1 else pattern_of(step[0]) for step in zip(*parts, strict=True)
    )
    return LeftOut(".".join(shown), len(family), reason, is_large)


def _numbered_families(tree: ModuleTree) -> dict[str, Family]:
    """List families that may be blocks or hold blocks, outermost first.

    A single module counts only if it is in a container; a number in its name is not enough.
    """
    numbered = (
        module
        for module, name in tree.names.items()
        if any(c.isdigit() for c in name.rpartition(".")[2])
        and has_children(module)
        and _size(module) > 0
    )
    families = group_by_pattern(numbered, tree.names)
    return {
        pattern: family
        for pattern, family in families.items()
        if len(family) > 1
        or pattern.rpartition(".")[2] == "#"
        or isinstance(tree.holders.get(family[0]), CONTAINERS)
    }


def _expand(pattern: str, families: dict[str, Family], tree: ModuleTree) -> list[Family]:
    """Return the family itself, or the families of blocks that its members merely hold."""
    family = families[pattern]
    holder = tree.holders.get(family[0])
    inner = _blocks_of_stages(pattern, families, tree)
    if inner:
        by_member = _by_member(family, inner)
        are_towers = _are_towers(family, by_member) and not isinstance(holder, CONTAINERS)
        return by_member if are_towers else [inner]
    if leading := leading_lists(family):
        return [leading]
    if any(isinstance(member, NOT_CALLABLE) for member in family):
        # Sublayers in lists: the first of each list represents the block if it attends.
        first = [next(member.children()) for member in family]
        return [first] if all(map(attends, first)) and are_first_parts(first, tree) else []
    return [family if isinstance(holder, nn.ModuleList) else _without_ends(family)]


def _blocks_of_stages(pattern: str, families: dict[str, Family], tree: ModuleTree) -> Family:
    """Return the outermost inner family whose blocks the members of a family merely hold."""
    for candidate in [p for p in families if p.startswith(f"{pattern}.")]:  # outer ones first
        inner = families[candidate]
        if _ATTENTION_NAME.search(candidate.rpartition(".")[2]):
            continue  # attn1 and attn2 of one block
        if not _are_lists_of_heads(inner, tree) and _are_stages(families[pattern], inner):
            return inner
    return []


def _are_lists_of_heads(family: Family, tree: ModuleTree) -> bool:
    """Whether the members are attention heads, which all run on the same hidden states."""
    lists: dict[Any, list[Projections | None]] = defaultdict(list)
    for member in family:
        lists[tree.holders.get(member)].append(find_projections(member))
    return all(map(are_heads, lists.values()))


def _are_stages(family: Family, inner: Family) -> bool:
    """Whether the members of a family mainly hold the blocks of an inner family."""
    if any(isinstance(block, NOT_CALLABLE) for block in inner) or _are_pairs(family, inner):
        return False
    if 2 * _size_of(inner) < _size_of(family):
        return False
    attention = {module for member in family for module in _attention_modules(member)}
    if attention:
        return _hold_attention(family, inner, attention)
    are_containers = all(isinstance(member, CONTAINERS) for member in family)
    differ = are_containers or len({_size(member) for member in family}) > 1
    return len(family) <= _MOST_STAGES and len(family) < len(inner) and differ


def _are_pairs(family: Family, inner: Family) -> bool:
    """Whether the members are lists of sublayers, whose sums are made outside any module."""
    are_lists = all(isinstance(member, NOT_CALLABLE) for member in family)
    return are_lists and len({*map(type, inner)}) > 1


def _hold_attention(family: Family, inner: Family, attention: set[nn.Module]) -> bool:
    """Whether the blocks hold all attention of stages, in each block or in whole stages.

    The first stages may be convolutions and the last ones attention.
    """
    held = [set(_attention_modules(block)) for block in inner]
    if attention != set().union(*held):
        return False
    some = [{*map(attends, each)} for each in _by_member(family, inner)]
    return all(held) or (len(inner) > len(family) and all(len(each) == 1 for each in some))


def _by_member(family: Family, inner: Family) -> list[Family]:
    """Group the inner modules by the family member that contains them."""
    return [[block for block in inner if block in m.modules()] for m in family]


def leading_lists(family: Family) -> Family:
    """List the [norms, sublayer, residual] lists with which blocks begin.

    A block begins at an attending sublayer that follows one that does not attend. The residual
    module of each list makes the sums.
    """
    attending = [isinstance(member, nn.ModuleList) and attends(member) for member in family]
    if all(attending) or not any(attending) or not all(map(_ends_in_residual, family)):
        return []
    behind = [True, *(not before for before in attending)]
    begins = zip(family, attending, behind, strict=False)
    return [member for member, attend, first in begins if attend and first]


def _ends_in_residual(member: nn.Module) -> bool:
    """Whether the last module of a list takes two inputs: the sublayer's output and the stream."""
    last = [*member.children()][-1]
    if not isinstance(member, nn.ModuleList) or isinstance(last, NOT_CALLABLE):
        return False
    parameters = inspect.signature(last.forward).parameters.values()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) > 1


def are_first_parts(family: Family, tree: ModuleTree) -> bool:
    """Whether each member is the first of several modules in a list of its own."""
    lists = map(tree.holders.get, family)
    return all(
        isinstance(siblings, nn.ModuleList)
        and siblings[0] is member
        and not isinstance(member, NOT_CALLABLE)
        and any(type(other) is not type(member) for other in siblings)
        for siblings, member in zip(lists, family, strict=True)
    )


def _are_towers(family: Family, by_member: list[Family]) -> bool:
    """Whether members that hold blocks may run side by side: all alike, none a plain container."""
    return (
        len({_size(member) for member in family}) == 1
        and all(len(blocks) > 1 for blocks in by_member)
        and not any(isinstance(member, CONTAINERS) for member in family)
    )


def _without_ends(family: Family) -> Family:
    """Drop modules before and after the blocks from a Sequential's family.

    An embedding, pooling or head has a class of its own and no attention. In a ModuleList all
    modules are blocks: a first one of a different class belongs to a hybrid.
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
    """Choose the families to watch."""
    largest = _size_of(max(candidates, key=_size_of, default=[]))
    kept = [family for family in candidates if _size_of(family) >= _SMALLEST_SHARE * largest]
    attending = [family for family in kept if any(map(attends, family))]
    kept = attending or [f for f in kept if _size_of(f) >= _SMALLEST_SHARE_WITHOUT * largest]
    return [family for family in kept if not any(_is_copy(family, other) for other in kept)]


def _is_copy(family: Family, other: Family) -> bool:
    """Whether the family is a frozen twin of a trained one: a moving average or a teacher."""
    return (
        not any(p.requires_grad for block in family for p in block.parameters())
        and any(p.requires_grad for block in other for p in block.parameters())
        and [[p.shape for p in block.parameters()] for block in family]
        == [[p.shape for p in block.parameters()] for block in other]
    )


def is_callable(module: nn.Module) -> bool:
    """Whether a module has a `forward`; others only hold modules."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def has_children(module: nn.Module) -> bool:
    """Whether a module holds others."""
    return next(module.children(), None) is not None


def _size(module: nn.Module) -> int:
    size = sum(parameter.numel() for parameter in module.parameters())
    if not any(getattr(inner, "_is_fsdp_managed_module", False) for inner in module.modules()):
        return size
    # FSDP1 flattens parameters into one, and this rank's shard may hold none of a block.
    widths = filter(None, map(find_widths, module.modules()))
    return sum(map(math.prod, widths)) or size


def _size_of(family: Family) -> int:
    return sum(map(_size, family))


def _attention_modules(module: nn.Module) -> list[nn.Module]:
    """List modules with query and key projections, or else modules named attention."""
    known = [inner for inner in module.modules() if find_projections(inner) is not None]
    return known or [
        inner
        for name, inner in module.named_modules()
        if _ATTENTION_NAME.search(name.rpartition(".")[2]) and has_children(inner)
    ]


def attends(module: nn.Module) -> bool:
    """Whether a module contains attention, judged by projections and names.

    Args:
        module: A module that may be a block.
    """
    return bool(_attention_modules(module))
