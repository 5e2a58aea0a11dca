"""Find the stacks of blocks of a model, their attentions, and the token embeddings.

A *family* is a set of modules whose names differ only in a number ("model.layers.#"). The outermost
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
    is_callable,
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

# Names of attention to another stack.
_CROSS_NAME = re.compile(r"cross|enc_?dec|encoder_att|multihead_attn|memory|src_att", re.IGNORECASE)


CROSS = "cross"


@dataclass(frozen=True)
class Attention:
    """An attention of a block.

    Attributes:
        name: Path of the attention in the block.
        module: The module that holds the projections.
        projections: The modules that make queries and keys.
        cross: Whether the keys come from another stack, judged by names.
        label: Tells the block's attentions apart: "" for self-attention, "cross" for
            cross-attention, and its name in the block for any further one. Heads that are modules
            of one list share a label.
        is_head: Whether this module is one head of an attention that keeps its heads in a list.
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
        attentions: Attentions with known projections, in module order.
        attends: Whether the block has self-attention, judged by projections and names.
        parts: If the block is a list of modules, the modules that are called one after another: the
            first receives the block's input, the last returns its output.
        matrices: Modules in the block whose weight is a matrix.
    """

    name: str
    module: nn.Module
    attentions: tuple[Attention, ...]
    attends: bool
    parts: tuple[nn.Module, ...]
    matrices: tuple[nn.Module, ...]

    def attention_index(self, label: str = "") -> int | None:
        """Return the index of the first attention with a label, or None if there is none.

        Args:
            label: Label of the attention. Defaults to "", the block's self-attention.
        """
        return next(iter(self.attention_indices(label)), None)

    def attention_indices(self, label: str = "") -> list[int]:
        """Return the indices of all attentions with a label; several if heads are separate modules.

        Args:
            label: Label of the attention. Defaults to "", the block's self-attention.
        """
        return [index for index, each in enumerate(self.attentions) if each.label == label]


@dataclass(frozen=True)
class Stack:
    """Blocks that run one after another.

    Attributes:
        name: Name that tells the stack from others of the model; "" if the model has only one.
        blocks: Blocks in order: the output of block l (counted from 1) is layer l.
        owner: The module whose forward runs the blocks, or None if the model's caller runs them.
        above: Modules around the blocks, outermost first. Their arguments carry padding masks.
        entering: If True, layer l is the input of block l + 1 instead, because each block is the
            first of several sublayers whose sums are made outside any module.
        part: Index of the part of the model that holds the blocks, such as a pipeline stage.
        before: Number of earlier blocks that are in other parts.
        behind: Number of later blocks that are in other parts.
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
        """Whether this part holds all blocks of the stack."""
        return self.before == self.behind == 0

    @property
    def side_labels(self) -> list[str]:
        """Labels of all attentions other than self-attention, in order."""
        every = [attention.label for block in self.blocks for attention in block.attentions]
        return [label for label in dict.fromkeys(every) if label]


@dataclass(frozen=True)
class Anatomy:
    """Anatomy of a model: the modules that are watched.

    Attributes:
        stacks: Stacks of blocks, in module order.
        embeddings: Embedding tables outside the blocks. One of them receives the token ids.
        norms: Names and modules of the norms outside the blocks; one may be the final norm.
        output: The module whose weight, [vocabulary, width], maps hidden states to logits, or None
            if it was not found.
        of_output: The embeddings that have one row for each output of that module.
        adapted: The embeddings and output that are wrapped by an adapter with parameters of its
            own, so that their weight alone is not what the model applies.
        left_out: Families that look like a stack but are not watched.
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

    A block is a callable module with children whose name differs from its siblings' only in a
    number. Only the outermost such families count, so that lists inside blocks (experts, for
    example) are ignored. Families with attention take precedence over families without, and all but
    the smallest are watched. If the members of a family only hold lists of blocks (the stages of a
    convolutional or windowed network), the blocks of all members in turn form one stack.

    Args:
        model: Any module that contains a transformer, or another stack of blocks.
        blocks: Overrides the search: a regular expression that matches the whole names of the
            blocks, or the blocks themselves. Defaults to None, which searches.

    Raises:
        ValueError: If no blocks are found, or none match `blocks`.
        TypeError: If `model` is not a module.
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
    return _around(families, tree, left_out)


def _around(families: list[Family], tree: ModuleTree, left_out: list[LeftOut]) -> Anatomy:
    """Describe the stacks and the modules outside of their blocks."""
    inside = {module for family in families for block in family for module in block.modules()}
    outside = {module: name for module, name in tree.names.items() if module not in inside}
    norms = ((shown_name(name), module) for module, name in outside.items() if _is_norm(module))
    embeddings = tuple(filter(_is_table, outside))
    output = _find_output(outside, embeddings)
    matrices = [*embeddings, *filter(None, [output])]
    return Anatomy(
        stacks=_stacks(families, tree),
        embeddings=embeddings,
        norms=tuple(norms),
        output=output,
        of_output=tuple(table for table in embeddings if _makes_rows_of(output, table)),
        adapted=tuple(m for m in matrices if _is_adapted(m, tree)),
        left_out=tuple(left_out),
    )


def join_anatomies(parts: Sequence[Anatomy]) -> Anatomy:
    """Join the anatomies of the parts of a model into one, which is empty without parts."""
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
    """Return the families to watch, and those left out."""
    if blocks is not None:
        chosen = choose_blocks(model, blocks, tree.names)
        return [*group_by_pattern(chosen, tree.names).values()], []
    found, left_out = find_families(tree)
    if found:
        return found, left_out
    children = ", ".join(name for name, _ in model.named_children()) or "none"
    raise ValueError(
        f"no transformer blocks in {type(model).__name__} (its children: {children}): expected "
        "modules with children, in a ModuleList or Sequential; name them with "
        r'blocks="regular expression of their names", such as r"encoder\.layer\.\d+", or as a '
        "list of modules. If layers are not modules, pass the output of each through an "
        "nn.Identity of its own, and name those"
    )


# -- modules in and around the blocks --------------------------------------------------------


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, judged by its class name."""
    return not has_children(module) and "norm" in type(module).__name__.lower()


def _is_table(module: nn.Module) -> bool:
    """Whether a module is an nn.Embedding, or a matrix with "embed" in its class name."""
    if isinstance(module, nn.Embedding):
        return True
    named = "embed" in type(module).__name__.lower()
    return named and not has_children(module) and find_widths(module) is not None


def _find_output(outside: Iterable[nn.Module], embeddings: Sequence[nn.Module]) -> nn.Module | None:
    """Find the last linear module with one output per embedding row; trained copies come first."""
    shapes = {*filter(None, map(find_widths, embeddings))}
    rows = {shape[0] for shape in shapes}
    heads = [m for m in outside if isinstance(m, nn.Linear) and m.out_features in rows]
    # A low-rank factor has as many outputs, but not as many inputs.
    heads = [m for m in heads if (m.out_features, m.in_features) in shapes] or heads
    heads = [*filter(_is_trained, heads)] or heads
    weights = [x for x in map(stored_weight, embeddings) if x is not None]
    tied = [m for m in heads if any(stored_weight(m) is weight for weight in weights)]
    return next(reversed(tied or heads), None)


def _makes_rows_of(output: nn.Module | None, table: nn.Module) -> bool:
    """Whether the output layer has as many features as an embedding table has rows."""
    shape = find_widths(table)
    return shape is not None and said(output, "out_features") == shape[0]


def _is_adapted(matrix: nn.Module, tree: ModuleTree) -> bool:
    """Whether an adapter around a matrix, of the same widths, has parameters of its own."""
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
            # In a hybrid, a module may be named attention ("linear_attn") but have no queries.
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
    """Map the first sublayer list of each block to all of its lists; {} if blocks are not lists."""
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
    """Describe a block and its attentions; `second` if its stack is not the model's first."""
    found: list[Attention] = []
    covered: set[nn.Module] = set()
    held = nn.ModuleList(lists) if lists else module
    for name, inner in held.named_modules():
        projections = None if inner in covered else find_projections(inner)
        if projections is not None:
            covered |= set(inner.modules())
            shown = shown_name(name)
            # Names do not say what attn2 attends to if there is an attn1: the pass will show it.
            after_own = (
                second
                and len(found) == 1
                and not found[0].cross
                and pattern_of(found[0].name) != pattern_of(shown)
            )
            cross = bool(_CROSS_NAME.search(shown)) or after_own
            found.append(Attention(shown, inner, projections, cross))
    # A block's only attention is self-attention, unless "cross" is in its name.
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
    """Yield the callable members of nested lists."""
    for child in module.children():
        if isinstance(child, NOT_CALLABLE):
            yield from _called(child)
        else:
            yield child


def _labelled(attentions: list[Attention]) -> tuple[Attention, ...]:
    """Give each attention of a block a label of its own."""
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
    """Return the leading parts that the shown names of all members share."""
    return _shared_parts([shown_name(tree.names[block]).split(".")[:-1] for block in family])


def _shared_parts(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the leading parts that all paths share."""
    steps = zip(*paths, strict=False)  # until the shortest ends
    return [step[0] for step in itertools.takewhile(lambda step: len({*step}) == 1, steps)]


def _name_stacks(paths: list[list[str]]) -> list[str]:
    """Name stacks by the shortest path prefix that tells them apart; "" if there is only one."""
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
    """List the callable modules that hold the whole family, outermost first."""
    held_by = [{*tree.above(block)} for block in family]
    around = [*tree.above(family[0])][::-1]
    shared = set.intersection(*held_by)
    return [m for m in around if m in shared and not isinstance(m, NOT_CALLABLE)]


def _owner(family: Family, above: Sequence[nn.Module], tree: ModuleTree) -> nn.Module | None:
    """Return the innermost module that runs all blocks in one call.

    A module in a list may be called several times (ALBERT's shared layers), a Sequential may be
    iterated without being called, and a module without `forward` is never called: none counts.
    """
    listed = pattern_of(tree.names[family[0]]).partition("#")[0]
    own: Iterator[nn.Module] = (
        module
        for module in reversed(above)
        if not isinstance(module, CONTAINERS)
        and is_callable(module)
        and listed.startswith(tree.names[module])
    )
    return next(own, above[0] if above else None)
