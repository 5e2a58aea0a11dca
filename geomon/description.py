"""Description of a model as text: what would be watched, by which route, and what not."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from geomon.capture import Window, extra_pass, find_anatomy, padding_arguments
from geomon.capture.anatomy import CROSS, Anatomy, Attention, Block, Stack, shown_name
from geomon.capture.snapshot import CAPTURED, Layer, explain_missing
from geomon.record.printable import printable

# In words, by the routes of `geomon.capture.tap`.
ROUTES = {
    "sdpa": "through torch's scaled_dot_product_attention",
    "flex": "through torch's flex_attention",
    "flash": "through a function of flash attention",
    "softmax": "by hand: its scores are seen at the softmax",
}
_UNKNOWN = "by a route that the first pass shows"
_AS_IT_RUNS = "seen as it runs"

_WIDTH = 100
_ROWS = 1024  # rows that are kept in the pass that shows what is seen
_NOT_SEEN = "not seen in this pass"
_NAME_ALONE = (
    "a module is called so, and has no projections of queries and keys under a name that the field "
    "gives them: the first pass shows whether it attends"
)
_NOT_ATTENTION = "none was seen in the modules that are called so: hidden states only"
_ALL_COUNT = "none in this pass, going by its arguments and by attention: all rows count"
_ONE_PASS = "shown by one pass: describe(model, inputs)"

_Row = tuple[str, str]


@dataclass(frozen=True, repr=False)
class Description:
    """Description of what would be watched in a model; `print` it.

    Attributes:
        title: Class of the model and number of its blocks that are watched.
        rows: Label and text of each further line.
    """

    title: str
    rows: tuple[_Row, ...]

    def __str__(self) -> str:
        """Align the texts in a column and fold long ones."""
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
    model: nn.Module, inputs: Any = None, *, blocks: str | Sequence[nn.Module] | None = None
) -> Description:
    """Say what would be watched in a model: layers, heads, routes, and what cannot be seen and why.

    Without inputs the model is not run: it is described by its modules, and attention, which is
    seen as it runs, by their names. With inputs one pass shows how attention is seen.

    Args:
        model: Any module that contains a transformer, or another stack of blocks.
        inputs: Inputs of one pass: a tensor, a dict of keyword arguments, a tuple of arguments, or
            a function of the model. None for no pass.
        blocks: Regular expression that matches the whole names of the blocks, or the blocks
            themselves; None to search for them.

    Raises:
        ValueError: There are no blocks, or none that `blocks` names.
    """
    anatomy = find_anatomy(model, blocks)
    seen = None if inputs is None else _SeenModel(model, anatomy, inputs)
    rows: list[_Row] = []
    for stack in anatomy.stacks:
        rows += _stack_rows(stack, seen, several=len(anatomy.stacks) > 1)
    tables = anatomy.embeddings if seen is None else seen.token_tables() or anatomy.embeddings
    rows.append(("token ids", _token_ids(model, tables)))
    rows.append(("padding", _padding(anatomy) if seen is None else seen.padding(anatomy)))
    for left_out in anatomy.left_out:
        what = f"{_count(left_out.count, 'block')} {left_out.pattern}"
        rows.append(("not watched", f"{what}: {left_out.reason}"))
    if seen is not None:
        rows += seen.remarks()
    elif any(block.attends for block in anatomy.blocks):
        rows.append(("routes", _ONE_PASS))
    return Description(f"{type(model).__name__}: {_count_blocks(anatomy)}", tuple(rows))


def _count_blocks(anatomy: Anatomy) -> str:
    parts = [
        _count(len(stack.blocks), "block") + (f" of the {stack.name}" if stack.name else "")
        for stack in anatomy.stacks
    ]
    return f"{_listed(parts)} watched"


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
        by_name = ", by name" if seen is None else ""
        rows.append((f"{indent}attention", f"none in these blocks{by_name}: hidden states only"))
    for label in stack.side_labels:
        having = [block for block in stack.blocks if block.attention_index(label) is not None]
        rows += _attention_rows(stack, having, seen, indent, label)
    return rows


def _blocks(stack: Stack) -> str:
    first, last = stack.blocks[0].name, stack.blocks[-1].name
    lists = ", each with the lists of sublayers behind it" if stack.blocks[0].parts else ""
    return (first if len(stack.blocks) == 1 else f"{first} to {last}") + lists


def _hidden(stack: Stack, depth: int | None) -> str:
    if depth is None and len(stack.blocks) == 1:
        return "layer 0 enters the block; what leaves it is a layer for each call"
    count = depth or len(stack.blocks)
    if stack.entering:
        return f"layers 0 to {count - 1} enter the blocks, which are lists of sublayers"
    calls = ", one for each call" if count != len(stack.blocks) else ""
    return f"layer 0 enters the first block, layers 1 to {count} leave the blocks{calls}"


def _attention_rows(
    stack: Stack, blocks: list[Block], seen: "_SeenModel | None", indent: str, label: str
) -> list[_Row]:
    indices = [(block, block.attention_index(label)) for block in blocks]
    found = [block.attentions[index] for block, index in indices if index is not None]
    apart = max((len(block.attention_indices(label)) for block in blocks), default=1)
    few = len(blocks) < len(stack.blocks)
    some = f"in {len(blocks)} of {len(stack.blocks)} blocks, " if few else ""
    if label in ("", CROSS):
        named = "cross-attention" if label else "attention"
    else:
        named, some = "further attention", f"{label}: {some}"
    routes = seen.routes(stack, label) if seen else set()
    if not routes and not (found and seen is None):
        reason = _NOT_SEEN if found else _NAME_ALONE if seen is None else _NOT_ATTENTION
        return [(f"{indent}{named}", f"{some}{_heads(found, apart)}{reason}")]
    words = " or ".join(ROUTES.get(route, _UNKNOWN) for route in sorted(routes))
    if label not in ("", CROSS) and seen is not None and seen.attends_elsewhere(stack, label):
        some += "to keys of another source, "
    projected = seen is not None and seen.projects(stack, label)
    return [
        (f"{indent}{named}", f"{some}{_heads(found, apart)}{words or _AS_IT_RUNS}"),
        (f"{indent}Q, K projected", _projections(found, seen=seen is not None, found=projected)),
    ]


def _heads(attentions: list[Attention], apart: int) -> str:
    """Say how many heads there are, with a comma after it; "" where that is not known.

    Where heads are modules of their own, so many are `apart`.
    """
    if apart > 1:
        width = attentions[0].sizes.head_width
        return f"{_count(apart, 'head')} of width {width}, each a module, "
    sizes = {a.sizes for a in attentions}
    known = sorted({size for size in sizes if size.heads is not None}, key=str)
    if len(known) != 1:
        counts = sorted({size.heads for size in known if size.heads is not None})
        return f"{counts[0]} to {counts[-1]} heads, " if len(counts) > 1 else ""
    heads, key_heads, width = known[0]
    text = _count(heads or 0, "head") + (f" of width {width}" if width else "")
    grouped = key_heads is not None and key_heads != heads
    return f"{text}, {_count(key_heads or 0, 'key head')}, " if grouped else f"{text}, "


def _projections(attentions: list[Attention], *, seen: bool, found: bool) -> str:
    """Say where queries and keys are projected.

    Args:
        attentions: The attentions of one label.
        seen: Whether a pass was seen.
        found: Whether they were found in it.
    """
    if seen and not found:
        return "not found in this pass"
    if not attentions:
        return "found in what attention was computed of" if found else "known after a pass"
    first = attentions[0]
    path = f"{first.name}." if first.name else ""
    names = first.projections.names
    if first.projections.kind == "multihead":
        return f"{first.name}, by in_proj_weight"
    if first.projections.kind == "fused":
        return f"{path}{names[0]}, with V"
    return _listed(path + name for name in names)


# -- around the stacks ---------------------------------------------------------------------------


def _token_ids(model: nn.Module, embeddings: Iterable[nn.Module]) -> str:
    names = {module: shown_name(name) for name, module in model.named_modules()}
    tables = [names.get(table, type(table).__name__) for table in embeddings]
    if not tables:
        return "none: no embedding outside the blocks; metrics of token types are missing"
    return f"inputs of {_listed(tables, most=2)}"


def _padding(anatomy: Anatomy) -> str:
    known = padding_arguments(anatomy)
    if known:
        return f"left out, going by {_listed(known)}"
    return (
        "no mask of a known name is taken by the modules around the blocks: known after a pass, by "
        "the keys that attention hides"
    )


def _listed(words: Iterable[str], most: int = 3) -> str:
    """Join words with commas; those after the first `most` are counted."""
    every = list(words)
    shown, rest = every[:most], len(every) - most
    if rest > 0:
        return f"{', '.join(shown)} and {rest} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -- what one pass shows -------------------------------------------------------------------------


class _SeenModel:
    """Everything that was seen of a model in one pass.

    Args:
        model: The model.
        anatomy: Anatomy of the model.
        inputs: Inputs of the pass.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, inputs: Any) -> None:
        views = set(CAPTURED)
        self._window = Window(anatomy, views, rows=_ROWS, seed=0)
        extra_pass(model, inputs, self._window)
        self._snapshot = self._window.snapshot()
        self._unseen = explain_missing(self._snapshot, views)

    def depth(self, stack: Stack) -> int:
        """Count the layers of a stack."""
        layers = [x for x in self._snapshot.layers if x.stack == stack.name and x.index > 0]
        return len(layers) or len(stack.blocks)

    def routes(self, stack: Stack, label: str) -> set[str]:
        """List the routes by which attention was seen."""
        return self._window.routes(stack.name, label)

    def token_tables(self) -> tuple[nn.Module, ...]:
        """List the embedding tables whose inputs were the token ids."""
        return self._window.token_tables()

    def attends_elsewhere(self, stack: Stack, label: str) -> bool:
        """Whether the keys of an attention are not those of the stack."""
        return self._window.attends_elsewhere(stack.name, label)

    def projects(self, stack: Stack, label: str) -> bool:
        """Whether queries and keys were found as projected."""
        return self._window.projects(stack.name, label)

    def padding(self, anatomy: Anatomy) -> str:
        """Say what the padding was known by in the pass."""
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
        """Make the rows on what was seen, and on what was not seen and why."""
        rows = [("note", note.words()) for note in self._snapshot.info.notes]
        for view, words in (("query", "Q, K as attended"), ("token_ids", "token ids")):
            for stack, reason in self._reasons(view):
                where = f" of the {stack}" if stack else ""
                rows.append(("not seen", f"{words}{where}: {reason}"))
        return rows + ([("not seen", self._unseen)] if self._unseen else [])

    def _reasons(self, view: str) -> dict[tuple[str, str], None]:
        layers: list[Layer] = [
            layer for layer in self._snapshot.layers if CAPTURED[view] in layer.sources
        ]
        return dict.fromkeys((x.stack, x.missing[view]) for x in layers if view in x.missing)
