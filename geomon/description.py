"""Description of a model as text: what would be watched, by which route, and what would not."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from geomon.capture import (
    CAPTURED,
    CROSS,
    HOST,
    Anatomy,
    Attention,
    Block,
    Layer,
    ModelParts,
    Stack,
    TensorPlace,
    Window,
    explain_missing,
    extra_pass,
    shown_name,
    source_of,
)
from geomon.distributed import RankPlace, find_place, find_ranks
from geomon.metrics import odd_layers, searched_by
from geomon.record import printable, with_noun

# Words for the routes of `geomon.capture.tap`.
ROUTES = {
    "sdpa": "through torch's scaled_dot_product_attention",
    "flex": "through torch's flex_attention",
    "flash": "through a function of flash attention",
    "softmax": "by hand: its scores are seen at the softmax",
}
_UNKNOWN = "by a route that the first pass shows"
_AS_IT_RUNS = "seen as it runs"

_WIDTH = 100
_NAMED = 3  # most modules of one kind that a line names
_ROWS = 1024  # rows to keep in a pass that shows what is seen
_NOT_SEEN = "not seen in this pass"
_NAME_ALONE = (
    "a module has this name, but no query and key projections under a known name: the first pass "
    "shows whether it attends"
)
# Captured views whose absence is said, each for others that lack with it.
_MISSED = {
    "query": "Q, K as attended", "head_outputs": "outputs of heads", "token_ids": "token ids",
    "additions": "what blocks add to the hidden states",
}  # fmt: skip
_ONE_PASS = "shown by one pass: describe(model, inputs)"
_NO_NAME = f"none under a known name; {_ONE_PASS}"
_NONE_IN_PASS = "none in these blocks: hidden states only"
_NOT_ATTENTION = "none was seen in the modules of this name: hidden states only"
_PADDING = "left out, by a mask or by keys that attention hides, as a pass shows"
_ALL_COUNT = "none in this pass, going by its arguments and by attention: all rows count"
_GATHERED = "a reading of a Monitor gathers their layers, rows and heads under their true indices"

_Row = tuple[str, str]


@dataclass(frozen=True)
class Description:
    """Description of the parts of a model that would be watched; `print` it.

    Attributes:
        title: Class of the model and number of its watched blocks.
        rows: Label and text of each further line.
    """

    title: str
    rows: tuple[_Row, ...]

    def __str__(self) -> str:
        """Align the texts in a column and wrap long ones."""
        rows = [(printable(label), printable(text)) for label, text in self.rows]
        column = max(len(label) for label, _ in rows) + 2
        lines = [printable(self.title)]
        for label, text in rows:
            folded = textwrap.wrap(text, _WIDTH - column) or [""]
            lines.append(f"{label:{column}}{folded[0]}".rstrip())
            lines += [" " * column + rest for rest in folded[1:]]
        return "\n".join(lines)

    __repr__ = __str__


def describe(
    model: Any, inputs: Any = None, *, blocks: str | Sequence[nn.Module] | None = None
) -> Description:
    """Describe what would be watched in a model: layers, heads, routes, and what cannot be seen.

    Without inputs the model is not run. It is described by its modules, and attention, which is
    visible only while it runs, by their names. With inputs, one pass shows how attention is seen.
    If ranks share the model, all of them run that pass, and each describes its own part.

    Args:
        model: Any module that contains a transformer, or another stack of blocks; in a pipeline,
            the schedule or the stages that this rank runs.
        inputs: Inputs of one pass: a tensor, a dict of keyword arguments, a tuple of arguments, or
            a function of the model. Defaults to None, for no pass.
        blocks: Regular expression that matches the whole names of the blocks, or the blocks
            themselves. Defaults to None, which searches for them.

    Returns:
        The description.

    Raises:
        ValueError: If no blocks are found, or none match `blocks`.
    """
    parts = ModelParts(model)
    place = find_place(parts.modules, parts.stages)
    anatomy = parts.find_anatomy(blocks)
    if parts.stages:
        anatomy = replace(anatomy, stacks=tuple(_of_stage(x, place) for x in anatomy.stacks))
    seen = None if inputs is None else _SeenModel(parts, anatomy, inputs, place)
    rows = _mesh_rows(place)
    for stack in anatomy.stacks:
        rows += _stack_rows(stack, seen, several=bool(stack.name))
    tables = None if seen is None else seen.token_tables()
    rows.append(("token ids", _token_ids(parts.root, anatomy, tables, later=0 not in place.stages)))
    rows.append(("padding", _PADDING if seen is None else seen.padding(anatomy)))
    rows += [("note", note.words()) for note in parts.note_on_ties(anatomy)]
    rows.append(("neighbours", f"searched on the host by {searched_by(HOST)}"))
    for left_out in anatomy.left_out:
        what = f"{with_noun(left_out.count, 'block')} {left_out.pattern}"
        rows.append(("not watched", f"{what}: {left_out.reason}"))
    if seen is not None:
        rows += seen.remarks()
    elif any(block.attends for block in anatomy.blocks):
        rows.append(("routes", _ONE_PASS))
    return Description(f"{parts.name}: {_count_blocks(anatomy)}", tuple(rows))


def _of_stage(stack: Stack, place: RankPlace) -> Stack:
    """Name a stack by its stage; the number of blocks in other stages is not known here."""
    number = place.stages[stack.part]
    return replace(stack, name=f"stage {number} {stack.name}".strip(), before=number)


def _mesh_rows(place: RankPlace) -> list[_Row]:
    """Say where this rank is in the mesh, if it has only a part of the model."""
    if place.is_whole:
        return []
    rows = [
        ("mesh", place.words(find_ranks().size)),
        ("this rank", f"{place.rank}: {place.part()}"),
    ]
    rows.append(("other ranks", _GATHERED))
    return rows


def _count_blocks(anatomy: Anatomy) -> str:
    parts = [with_noun(len(stack.blocks), "block") + _whose(stack.name) for stack in anatomy.stacks]
    return f"{_listed(parts)} watched"


def _whose(stack: str) -> str:
    article = "" if stack.startswith("stage") else "the "
    return f" of {article}{stack}" if stack else ""


# -- one stack -----------------------------------------------------------------------------------


def _stack_rows(stack: Stack, seen: "_SeenModel | None", *, several: bool) -> list[_Row]:
    depth = None if seen is None else seen.depth(stack)
    indent = "  " if several else ""
    rows = [(stack.name, "")] if several else []
    rows.append((f"{indent}blocks", _blocks(stack)))
    rows.append((f"{indent}hidden states", _hidden(stack, depth)))
    attending = [block for block in stack.blocks if block.attends]
    if not attending and seen is not None and seen.routes(stack, ""):
        attending = list(stack.blocks)
    if attending:
        rows += _attention_rows(stack, attending, seen, indent, "")
    else:
        rows.append((f"{indent}attention", _NO_NAME if seen is None else _NONE_IN_PASS))
    for label in stack.side_labels:
        having = [block for block in stack.blocks if block.attention_index(label) is not None]
        rows += _attention_rows(stack, having, seen, indent, label)
    return rows


def _blocks(stack: Stack) -> str:
    first, last = stack.blocks[0].name, stack.blocks[-1].name
    lists = ", each with the lists of sublayers behind it" if stack.blocks[0].parts else ""
    return (first if len(stack.blocks) == 1 else f"{first} to {last}") + lists


def _hidden(stack: Stack, depth: int | None) -> str:
    if stack.before:
        leaving = with_noun(depth or len(stack.blocks), "block")
        return f"outputs of {leaving}: layers after those of earlier stages"
    if depth is None and len(stack.blocks) == 1:
        return "layer 0 enters the block; its output is a layer for each call"
    count = depth or len(stack.blocks)
    if stack.entering:
        return f"layers 0 to {count - 1} enter the blocks, which are lists of sublayers"
    calls = ", one for each call" if count != len(stack.blocks) else ""
    return f"layer 0 enters the first block, layers 1 to {count} leave the blocks{calls}"


def _attention_rows(
    stack: Stack, blocks: list[Block], seen: "_SeenModel | None", indent: str, label: str
) -> list[_Row]:
    """Describe the attentions with a label in the blocks of a stack that have one."""
    found = _attentions_with(label, blocks)
    modules = max((len(block.attention_indices(label)) for block in blocks), default=1)
    routes = seen.routes(stack, label) if seen else set()
    heads = _heads(seen.heads(stack, label) if seen else set(), modules)
    title, where = f"{indent}{_attention_title(label)}", _where_attention_is(stack, blocks, label)
    if not routes and not (found and seen is None):
        return [(title, f"{where}{heads}{_why_no_attention(found, seen)}")]
    words = " or ".join(ROUTES.get(route, _UNKNOWN) for route in sorted(routes))
    if _is_further(label) and seen is not None and seen.attends_elsewhere(stack, label):
        where += "to keys of another source, "
    projected = seen is not None and seen.projects(stack, label)
    return [
        (title, f"{where}{heads}{words or _AS_IT_RUNS}"),
        (f"{indent}Q, K projected", _projections(found, seen=seen is not None, found=projected)),
    ]


def _attentions_with(label: str, blocks: Iterable[Block]) -> list[Attention]:
    indices = [(block, block.attention_index(label)) for block in blocks]
    return [block.attentions[index] for block, index in indices if index is not None]


def _is_further(label: str) -> bool:
    """Whether a label names a further attention, neither self-attention nor cross-attention."""
    return label not in ("", CROSS)


def _attention_title(label: str) -> str:
    if _is_further(label):
        return "further attention"
    return "cross-attention" if label else "attention"


def _where_attention_is(stack: Stack, blocks: list[Block], label: str) -> str:
    """Name a further attention, and say which share of the blocks has it if not all do."""
    few = len(blocks) < len(stack.blocks)
    some = f"in {len(blocks)} of {len(stack.blocks)} blocks, " if few else ""
    return f"{label}: {some}" if _is_further(label) else some


def _why_no_attention(found: list[Attention], seen: "_SeenModel | None") -> str:
    """Say why a module is named attention although none was seen or found in it."""
    if found:
        return _NOT_SEEN
    return _NAME_ALONE if seen is None else _NOT_ATTENTION


def _heads(counts: set[tuple[int, int]], modules: int) -> str:
    """Say how many heads there are, followed by a comma, or "" if that is not known.

    `modules` counts heads that are modules of their own.
    """
    if modules > 1:
        return f"{with_noun(modules, 'head')}, each a module, "
    if len(counts) != 1:
        heads = sorted({queries for queries, _ in counts})
        return f"{heads[0]} to {heads[-1]} heads, " if len(heads) > 1 else ""
    queries, keys = next(iter(counts))
    text = f"{with_noun(queries, 'head')}, "
    return text if queries == keys else f"{text}{with_noun(keys, 'key head')}, "


def _projections(attentions: list[Attention], *, seen: bool, found: bool) -> str:
    """Say which modules project queries and keys of one label, and whether a pass showed them."""
    if seen and not found:
        return "not found in this pass"
    if not attentions:
        return "found behind the inputs of attention" if found else "known after a pass"
    first = attentions[0]
    path = f"{first.name}." if first.name else ""
    names = first.projections.names
    if first.projections.kind == "multihead":
        return f"{first.name}, by in_proj_weight"
    if first.projections.kind == "fused":
        return f"{path}{names[0]}, with V"
    return _listed(path + name for name in names)


# -- around the stacks ---------------------------------------------------------------------------


def _token_ids(
    model: nn.Module, anatomy: Anatomy, seen: Sequence[nn.Module] | None, *, later: bool
) -> str:
    """Say which tables receive the token ids; `seen` are those seen in a pass."""
    if not anatomy.embeddings and later:
        return "known at the first stage, whose ranks send them to the others"
    missing = "metrics of token types are missing"
    if not anatomy.embeddings:
        return f"none: no embedding outside the blocks; {missing}"
    if seen is not None and not seen:
        return f"none were seen in the pass; {missing}"
    names = {module: shown_name(name) for name, module in model.named_modules()}
    tables = seen or anatomy.of_output or anatomy.embeddings
    words = _listed(names.get(table, type(table).__name__) for table in tables)
    is_open = len(tables) > 1 and not (seen or anatomy.of_output)
    return f"inputs of one of {words}, as one pass shows" if is_open else f"inputs of {words}"


def _listed(words: Iterable[str]) -> str:
    """Join words with commas; only the number of those after the first three is given."""
    every = list(words)
    shown, rest = every[:_NAMED], len(every) - _NAMED
    if rest > 0:
        return f"{', '.join(shown)} and {rest} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


# -- what one pass shows -------------------------------------------------------------------------


class _SeenModel:
    """Everything seen of a model in one pass."""

    def __init__(self, parts: ModelParts, anatomy: Anatomy, inputs: Any, place: RankPlace) -> None:
        parts.check_probe(inputs)
        views = set(CAPTURED)
        self._window = Window(
            anatomy, views, rows=_ROWS, seed=0, place=TensorPlace(place.shard, place.shards),
            micro_batches=parts.micro_batches,
        )  # fmt: skip
        extra_pass(parts.root, inputs, self._window, given=parts.given)
        self._snapshot = self._window.snapshot()
        self._is_part = not place.is_whole
        self._unseen = explain_missing(self._snapshot, views)

    def depth(self, stack: Stack) -> int:
        """Count the layers of a stack."""
        layers = [x for x in self._snapshot.layers if x.stack == stack.name and x.index > 0]
        return len(layers) or len(stack.blocks)

    def routes(self, stack: Stack, label: str) -> set[str]:
        """List the routes by which attention was seen."""
        return self._window.routes(stack.name, label)

    def heads(self, stack: Stack, label: str) -> set[tuple[int, int]]:
        """Return the numbers of (query heads, key heads) of attentions."""
        return self._window.heads(stack.name, label)

    def token_tables(self) -> tuple[nn.Module, ...]:
        """List the embedding tables that received the token ids."""
        return self._window.token_tables()

    def attends_elsewhere(self, stack: Stack, label: str) -> bool:
        """Whether the keys of an attention come from another source than the stack."""
        return any(x.other_source for x in self._window.attentions(stack.name, label))

    def projects(self, stack: Stack, label: str) -> bool:
        """Whether queries and keys were found as projected."""
        found = self._window.attentions(stack.name, label)
        return any(x.projected is not None for x in found)

    def padding(self, anatomy: Anatomy) -> str:
        """Say what showed the padding in the pass."""
        stacks = [stack.name for stack in anatomy.stacks]
        sources = {stack: self._window.padding(stack) for stack in stacks}
        if len(set(sources.values())) == 1:
            source = sources[stacks[0]]
            return f"left out, going by {source}" if source else _ALL_COUNT
        parts = [
            f"of the {stack} left out, going by {source}"
            if source
            else f"none of the {stack} known"
            for stack, source in sources.items()
        ]
        return "; ".join(parts)

    def remarks(self) -> list[_Row]:
        """Make the rows on what was seen, what was not, and why."""
        rows = [("seen here", self._part())] if self._is_part else []
        snapshot = self._snapshot
        rows += [
            ("note", note.words()) for note in (*snapshot.info.notes, *odd_layers(snapshot.layers))
        ]
        said = set[tuple[str, str]]()
        for view, words in _MISSED.items():
            for stack, reason in self._reasons(view):
                where = f" of the {stack}" if stack else ""
                if (stack, reason) not in said:
                    rows.append(("not seen", f"{words}{where}: {reason}"))
                said.add((stack, reason))
        return rows + ([("not seen", self._unseen)] if self._unseen else [])

    def _part(self) -> str:
        """Say which part of the layers this rank has."""
        layers = self._snapshot.layers
        hidden = next((layer for layer in layers if "hidden" in layer.captured), None)
        parts = ["no hidden states"]
        if hidden is not None:
            start = ", ".join(map(str, hidden.part.start))
            parts = [f"hidden states from place ({start}) on" if start else "whole hidden states"]
        attending = next((layer for layer in layers if layer.part.heads.get("query")), None)
        if attending is not None:
            heads = attending.part.heads
            parts.append(f"{with_noun(len(heads['query']), 'head')} of several ranks")
        return _listed(parts)

    def _reasons(self, view: str) -> dict[tuple[str, str], None]:
        layers: list[Layer] = [
            layer
            for layer in self._snapshot.layers
            if source_of(view) in layer.sources
            and not (view == "token_ids" and layer.part.tokens_elsewhere)
        ]
        return dict.fromkeys((x.stack, x.missing[view]) for x in layers if view in x.missing)
