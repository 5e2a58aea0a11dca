"""Blocks: the stacks of blocks of a model, their attentions, and the embeddings of tokens.

A *family* is all modules whose names differ by a number alone ("model.layers.#"); the outermost
families that are made of blocks and hold most of the parameters are the *stacks*
(`geomon.capture.anatomy.families`).
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from geomon.capture.anatomy.families import (
    CONTAINERS,
    NOT_CALLABLE,
    Family,
    LeftOut,
    ModuleTree,
    are_first_parts,
    attends,
    choose_blocks,
    find_families,
    group_by_pattern,
    has_children,
    leading_lists,
    pattern_of,
    shown_name,
)
from geomon.capture.anatomy.projections import (
    Projections,
    are_heads,
    find_projections,
    find_widths,
)
from geomon.capture.weights import said, stored_weight

# What attention to another stack is called.
_CROSS_NAME = re.compile(r"cross|enc_?dec|encoder_att|multihead_attn|memory|src_att", re.IGNORECASE)


CROSS = "cross"


@dataclass(frozen=True)
class Attention:
    """An attention of a block.

    Attributes:
        name: Path of the attention in the block.
        module: The module that holds the projections.
        projections: The modules that make queries and keys.
        cross: Whether the keys come from another stack, going by names.
        label: Which of the block's attentions it is: "" for the one to its own stack, "cross" for
            the one to another; a further one has its name in the block. Heads that are modules of
            a list have the same.
        is_head: Whether it is one of the heads of an attention, which are modules of a list.
    """

    name: str
    module: nn.Module
    projections: Projections
    cross: bool
    label: str = ""
    is_head: bool = False


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        name: Name of the block, as shown to people.
        module: The block itself.
        attentions: Attentions whose projections are known, in the order of the modules.
        attends: Whether the block attends to its own stack, going by projections and names.
        parts: Modules that are called one after another where the block itself is a list of them:
            what enters the first one enters the block, what leaves the last one leaves it.
        matrices: Modules in the block that have the widths of a matrix.
    """

    name: str
    module: nn.Module
    attentions: tuple[Attention, ...]
    attends: bool
    parts: tuple[nn.Module, ...]
    matrices: tuple[nn.Module, ...]

    def attention_index(self, label: str = "") -> int | None:
        """Return the index in `attentions` of the one with a label; None if there is none.

        Args:
            label: Label of the attention: "" for the one to the block's own stack.
        """
        return next(iter(self.attention_indices(label)), None)

    def attention_indices(self, label: str = "") -> list[int]:
        """Return the indices in `attentions` of all with a label: heads that are modules of a list.

        Args:
            label: Label of the attention: "" for the one to the block's own stack.
        """
        return [index for index, each in enumerate(self.attentions) if each.label == label]


@dataclass(frozen=True)
class Stack:
    """Blocks that are run one after another.

    Attributes:
        name: Name that tells the stack from others of the model; "" in a model with one stack.
        blocks: Blocks in order: the output of block l (counted from 1) is layer l.
        owner: The module whose forward runs the blocks; None if only the model's caller does.
        above: Modules around the blocks, outermost first: their calls carry padding masks.
        entering: Whether layer l is the input of block l + 1 instead: each block is the first of
            several sublayers whose sums are made outside any module.
        part: Number of the part of the model that holds the blocks; of a pipeline, a rank's stage.
        before: Number of blocks before these that are in other parts.
        behind: The same behind them.
    """

    name: str
    blocks: tuple[Block, ...]
    owner: nn.Module | None
    above: tuple[nn.Module, ...]
    entering: bool
    part: int = 0
    before: int = 0
    behind: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether no other part has blocks of the stack."""
        return self.before == self.behind == 0

    @property
    def side_labels(self) -> list[str]:
        """Labels of the attentions besides those to the stack itself, in order."""
        every = [attention.label for block in self.blocks for attention in block.attentions]
        return [label for label in dict.fromkeys(every) if label]


@dataclass(frozen=True)
class Anatomy:
    """Anatomy of a model: the modules that are watched.

    Attributes:
        stacks: Stacks of blocks, in the order of the model's modules.
        embeddings: Embedding tables outside the blocks: the input of one is the token ids.
        norms: Names and modules of the norms outside the blocks, one of which may be the final one.
        output: The module whose weight makes logits of hidden states, [vocabulary, width]; None
            if none is known.
        of_output: Those of the embeddings that have one row for each output of that module.
        adapted: Those of the embeddings and the output around which a module of the same widths
            has parameters of its own: what it adds is not in their weights.
        left_out: Families that look like a stack and are not watched.
    """

    stacks: tuple[Stack, ...]
    embeddings: tuple[nn.Module, ...]
    norms: tuple[tuple[str, nn.Module], ...]
    output: nn.Module | None
    of_output: tuple[nn.Module, ...]
    adapted: tuple[nn.Module, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, stack by stack."""
        return tuple(block for stack in self.stacks for block in stack.blocks)


def find_anatomy(model: nn.Module, blocks: str | Sequence[nn.Module] | None = None) -> Anatomy:
    """Find the stacks of blocks of a model, their attentions and the embedding tables.

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
        ValueError: There are no blocks, or none that `blocks` names.
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a torch.nn.Module, got {type(model).__name__}: pass the model itself"
        )
    tree = ModuleTree(model)
    try:
        families, left_out = _families(model, blocks, tree)
    except ValueError:
        tree = ModuleTree(model, lists=True)
        families, left_out = _families(model, blocks, tree)
    inside = {module for family in families for block in family for module in block.modules()}
    outside = {module: name for module, name in tree.names.items() if module not in inside}
    embeddings = tuple(module for module in outside if _is_table(module))
    output = _find_output(outside, embeddings)
    matrices = [*embeddings, *([] if output is None else [output])]
    return Anatomy(
        stacks=_stacks(families, tree),
        embeddings=embeddings,
        norms=tuple(
            (shown_name(name), module) for module, name in outside.items() if _is_norm(module)
        ),
        output=output,
        of_output=tuple(table for table in embeddings if _makes_rows_of(output, table)),
        adapted=tuple(m for m in matrices if _is_adapted(m, tree)),
        left_out=tuple(left_out),
    )


def join_anatomies(parts: Sequence[Anatomy]) -> Anatomy:
    """Make one anatomy of those of the parts of a model: of none, one without blocks."""
    return Anatomy(
        stacks=tuple(stack for part in parts for stack in part.stacks),
        embeddings=tuple(table for part in parts for table in part.embeddings),
        norms=tuple(norm for part in parts for norm in part.norms),
        output=next((part.output for part in reversed(parts) if part.output is not None), None),
        of_output=tuple(table for part in parts for table in part.of_output),
        adapted=tuple(module for part in parts for module in part.adapted),
        left_out=tuple(family for part in parts for family in part.left_out),
    )


def _families(
    model: nn.Module, blocks: str | Sequence[nn.Module] | None, tree: ModuleTree
) -> tuple[list[Family], list[LeftOut]]:
    """Find the families that are watched, and the others."""
    if blocks is not None:
        chosen = choose_blocks(model, blocks, tree.names)
        return [*group_by_pattern(chosen, tree.names).values()], []
    found, left_out = find_families(tree)
    if found:
        return found, left_out
    children = ", ".join(name for name, _ in model.named_children()) or "none"
    raise ValueError(
        f"no transformer blocks in {type(model).__name__} (its children: {children}): expected "
        "modules that hold others, in a ModuleList or Sequential; give them with "
        r'blocks="regular expression of their names", such as r"encoder\.layer\.\d+", or as a '
        "list of modules. Where layers are no modules, pass what leaves each of them through "
        "an nn.Identity of its own, and name these"
    )


# -- modules in and around the blocks --------------------------------------------------------


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, going by the name of its class."""
    return not has_children(module) and "norm" in type(module).__name__.lower()


def _is_table(module: nn.Module) -> bool:
    """Whether a module is an embedding table: torch's, or a matrix whose class is called one."""
    if isinstance(module, nn.Embedding):
        return True
    named = "embed" in type(module).__name__.lower()
    return named and not has_children(module) and find_widths(module) is not None


def _find_output(outside: Iterable[nn.Module], embeddings: Sequence[nn.Module]) -> nn.Module | None:
    """Find the last linear module with one output for each row of an embedding table.

    Where an adapter trains a copy of one, the copy is meant and not what it is a copy of.
    """
    shapes = set(map(find_widths, embeddings))
    rows = {shape[0] for shape in shapes if shape}
    heads = [m for m in outside if isinstance(m, nn.Linear) and m.out_features in rows]
    # A factor of low rank has as many outputs.
    heads = [m for m in heads if (m.out_features, m.in_features) in shapes] or heads
    heads = [m for m in heads if _is_trained(m)] or heads
    weights = [stored_weight(table) for table in embeddings]
    tied = [m for m in heads if any(stored_weight(m) is w for w in weights if w is not None)]
    return next(reversed(tied or heads), None)


def _makes_rows_of(output: nn.Module | None, table: nn.Module) -> bool:
    """Whether the output has as many features as an embedding table has rows."""
    shape = find_widths(table)
    return shape is not None and said(output, "out_features") == shape[0]


def _is_adapted(matrix: nn.Module, tree: ModuleTree) -> bool:
    """Whether a module of the same widths around a matrix has parameters of its own."""
    around = tree.holders.get(matrix)
    says = {said(around, name) for name in ("in_features", "out_features")}
    if around is None or says != {*(find_widths(matrix) or ())}:
        return False
    return {*around.parameters()} != {*matrix.parameters()}


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _stacks(families: list[Family], tree: ModuleTree) -> tuple[Stack, ...]:
    """Make a stack of each family."""
    labels = _name_stacks([_common_path(family, tree) for family in families])
    shared: set[nn.Module] = set()
    stacks: list[Stack] = []
    for family, label in zip(families, labels, strict=True):
        lists = _lists_of_blocks(family, tree)
        second = bool(stacks)
        blocks = [_block(block, tree, lists.get(block, ()), second=second) for block in family]
        if any(block.attentions for block in blocks):
            # In a hybrid, a module may be called attention ("linear_attn") and have no queries.
            blocks = [replace(b, attends=any(not a.cross for a in b.attentions)) for b in blocks]
        above = _modules_above(family, tree)
        stacks.append(
            Stack(
                label,
                tuple(blocks),
                _owner(family, above, tree),
                tuple(module for module in above if module not in shared),
                entering=are_first_parts(family, tree),
            )
        )
        shared |= {*above}
    return tuple(stacks)


def _lists_of_blocks(family: Family, tree: ModuleTree) -> dict[nn.Module, Sequence[nn.Module]]:
    """Find the lists of sublayers that make each block, by the first one; {} for other blocks."""
    holder = tree.holders.get(family[0])
    siblings = list(holder) if isinstance(holder, nn.ModuleList) else []
    if leading_lists(siblings) != family:
        return {}
    starts = [siblings.index(block) for block in family]
    starts[0] = 0  # a sublayer before the first attention belongs to the first block
    ends = [*starts[1:], len(siblings)]
    return {
        block: siblings[start:end] for block, start, end in zip(family, starts, ends, strict=True)
    }


def _block(
    module: nn.Module, tree: ModuleTree, lists: Sequence[nn.Module] = (), *, second: bool
) -> Block:
    """Find the attentions of a block; `second` if its stack is not the model's first one."""
    found: list[Attention] = []
    covered: set[nn.Module] = set()
    held = nn.ModuleList(lists) if lists else module
    for name, inner in held.named_modules():
        projections = None if inner in covered else find_projections(inner)
        if projections is not None:
            covered |= set(inner.modules())
            shown = shown_name(name)
            # attn1 and attn2 are alike by name: what the second one attends to is seen in the pass.
            after_own = (
                second
                and len(found) == 1
                and not found[0].cross
                and pattern_of(found[0].name) != pattern_of(shown)
            )
            cross = bool(_CROSS_NAME.search(shown)) or after_own
            found.append(Attention(shown, inner, projections, cross))
    # The only attention of a block is to its own stack, unless "cross" is in its name.
    if len(found) == 1 and "cross" not in found[0].name.lower():
        found = [replace(found[0], cross=False)]
    return Block(
        shown_name(tree.names[module]) or type(module).__name__,
        module,
        _labelled(found),
        attends(module),
        tuple(_called(held)) if lists else (),
        tuple(inner for inner in held.modules() if find_widths(inner) is not None),
    )


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the members of nested lists that can be called."""
    for child in module.children():
        if isinstance(child, NOT_CALLABLE):
            yield from _called(child)
        else:
            yield child


def _labelled(attentions: list[Attention]) -> tuple[Attention, ...]:
    """Label the attentions of a block, each in its own way."""
    patterns = {pattern_of(attention.name) for attention in attentions}
    alike = len(patterns) == 1 and not any(attention.cross for attention in attentions)
    if alike and are_heads([attention.projections for attention in attentions]):
        return tuple(replace(attention, is_head=True) for attention in attentions)
    labels: list[str] = []
    for attention in attentions:
        label = CROSS if attention.cross else ""
        if label in labels:
            last = attention.name.rpartition(".")[2]
            alone = sum(other.name.rpartition(".")[2] == last for other in attentions) == 1
            label = last if alone else attention.name
            if label.replace(".", "").isdigit():  # in lists, where nothing has a name
                label = f"attention_{len(labels) + 1}"
        labels.append(label)
    return tuple(replace(a, label=x) for a, x in zip(attentions, labels, strict=True))


def _common_path(family: Family, tree: ModuleTree) -> list[str]:
    """Return the parts with which the shown names of all members begin."""
    return _shared_parts([shown_name(tree.names[block]).split(".")[:-1] for block in family])


def _shared_parts(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the parts with which all of several paths begin."""
    steps = zip(*paths, strict=False)  # until the shortest ends
    return [step[0] for step in itertools.takewhile(lambda step: len({*step}) == 1, steps)]


def _name_stacks(paths: list[list[str]]) -> list[str]:
    """Name stacks by the first parts of their paths that tell them apart; "" for a single one."""
    if len(paths) == 1:
        return [""]
    shared = len(_shared_parts(paths))
    ends = [path[shared:] for path in paths]
    for length in range(1, max(map(len, ends)) + 1):
        labels = [".".join(path[:length]) for path in ends]
        if len(set(labels)) == len(labels):
            return [label or "main" for label in labels]
    return [f"stack_{number}" for number in range(1, len(paths) + 1)]


def _modules_above(family: Family, tree: ModuleTree) -> list[nn.Module]:
    """List the modules that hold the whole family and can be called, outermost first."""
    held_by = [{*tree.above(block)} for block in family]
    around = [*tree.above(family[0])][::-1]
    shared = set.intersection(*held_by)
    return [m for m in around if m in shared and not isinstance(m, NOT_CALLABLE)]


def _owner(family: Family, above: Sequence[nn.Module], tree: ModuleTree) -> nn.Module | None:
    """Return the innermost module of which one call runs all blocks.

    A module in a list may be called several times (the shared layers of ALBERT), and a Sequential
    may be iterated and never called.
    """
    listed = pattern_of(tree.names[family[0]]).partition("#")[0]
    own: Iterator[nn.Module] = (
        module
        for module in reversed(above)
        if not isinstance(module, CONTAINERS) and listed.startswith(tree.names[module])
    )
    return next(own, above[0] if above else None)
