"""What would be watched in a model, by which route, and what cannot be seen: as text."""

import inspect
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from geomon.capture.anatomy.blocks import Anatomy, Attention, Block, Stack, find_anatomy
from geomon.capture.anatomy.families import shown_name
from geomon.capture.anatomy.projections import Sizes, find_sizes
from geomon.capture.assemble import CROSS
from geomon.capture.masks import NAMES as MASKS
from geomon.capture.masks import OF_MEMORY
from geomon.capture.probe import extra_pass
from geomon.capture.selfcheck import complaint
from geomon.capture.snapshot import CAPTURED, Layer
from geomon.capture.window import Window
from geomon.routes import ROUTES, UNKNOWN, forecast

_WIDTH = 100
_ROWS = 1024  # of the pass that settles what is seen
_FORECAST = "read off the source; describe(model, inputs) settles them in one pass"

_Row = tuple[str, str]


@dataclass(frozen=True, repr=False)
class Description:
    """What would be watched in a model; `print` it.

    Attributes:
        title: The model, and what is watched of it in a line.
        rows: Label and text of each further line.
    """

    title: str
    rows: tuple[_Row, ...]

    def __str__(self) -> str:
        """The lines, texts aligned and folded."""
        column = max(len(label) for label, _ in self.rows) + 2
        lines = [self.title]
        for label, text in self.rows:
            folded = textwrap.wrap(text, _WIDTH - column) or [""]
            lines.append(f"{label:{column}}{folded[0]}".rstrip())
            lines += [" " * column + rest for rest in folded[1:]]
        return "\n".join(lines)

    __repr__ = __str__


def describe(
    model: nn.Module, inputs: Any = None, *, blocks: str | Sequence[nn.Module] | None = None
) -> Description:
    """Say what would be watched in a model: layers, heads, routes, and what cannot be seen and why.

    Without inputs nothing is run, and routes are read off the model's source. With inputs one pass
    settles them.

    Args:
        model: Any module that contains a transformer, or another stack of blocks.
        inputs: As of `measure`: a tensor, a dict of keyword arguments, a tuple of arguments, or a
            function of the model.
        blocks: Overrides the search for the blocks, as of `Monitor`.

    Raises:
        ValueError: No blocks, or none that the pattern matches.
    """
    anatomy = find_anatomy(model, blocks)
    seen = None if inputs is None else _Seen(model, anatomy, inputs)
    rows: list[_Row] = []
    for stack in anatomy.stacks:
        rows += _stack(stack, seen, several=len(anatomy.stacks) > 1)
    rows.append(("token ids", _token_ids(model, anatomy)))
    rows.append(("padding", _padding(anatomy)))
    for left_out in anatomy.left_out:
        what = f"{_count(left_out.count, 'block')} {left_out.pattern}"
        rows.append(("not watched", f"{what}: {left_out.reason}"))
    if seen is not None:
        rows += seen.remarks()
    elif any(block.attends for block in anatomy.blocks):
        rows.append(("routes", _FORECAST))
    return Description(f"{type(model).__name__}: {_in_a_line(anatomy)}", tuple(rows))


def _in_a_line(anatomy: Anatomy) -> str:
    parts = [
        _count(len(stack.blocks), "block") + (f" of the {stack.name}" if stack.name else "")
        for stack in anatomy.stacks
    ]
    return f"{_listed(parts)} watched"


# -- one stack -----------------------------------------------------------------------------------


def _stack(stack: Stack, seen: "_Seen | None", *, several: bool) -> list[_Row]:
    depth = None if seen is None else seen.depth(stack)
    indent = "  " if several else ""
    rows = [(stack.name, "")] if several else []
    rows.append((f"{indent}blocks", _blocks(stack)))
    rows.append((f"{indent}hidden states", _hidden(stack, depth)))
    attending = [block for block in stack.blocks if block.attends]
    if attending:
        rows += _attention(stack, attending, seen, indent, cross=False)
    else:
        rows.append((f"{indent}attention", "none in these blocks: hidden states only"))
    crossing = [block for block in stack.blocks if block.place_of(cross=True) is not None]
    if crossing:
        rows += _attention(stack, crossing, seen, indent, cross=True)
    return rows


def _blocks(stack: Stack) -> str:
    first, last = stack.blocks[0].name, stack.blocks[-1].name
    return first if len(stack.blocks) == 1 else f"{first} to {last}"


def _hidden(stack: Stack, depth: int | None) -> str:
    if depth is None and len(stack.blocks) == 1:
        return "layer 0 enters the block; what leaves it is a layer for each call"
    count = depth or len(stack.blocks)
    if stack.entering:
        return f"layers 0 to {count - 1} enter the blocks, which are lists of sublayers"
    calls = ", one for each call" if count != len(stack.blocks) else ""
    return f"layer 0 enters the first block, layers 1 to {count} leave the blocks{calls}"


def _attention(
    stack: Stack, blocks: list[Block], seen: "_Seen | None", indent: str, *, cross: bool
) -> list[_Row]:
    places = [(block, block.place_of(cross=cross)) for block in blocks]
    found = [block.attentions[place] for block, place in places if place is not None]
    few = len(blocks) < len(stack.blocks)
    some = f"in {len(blocks)} of {len(stack.blocks)} blocks, " if few else ""
    routes = seen.routes(stack, cross) if seen else {forecast(attention) for attention in found}
    words = " or ".join(ROUTES.get(str(route), UNKNOWN) for route in sorted(routes, key=str))
    heads = _heads({find_sizes(a.projections, [a.module]) for a in found})
    label = f"{indent}{CROSS}-attention" if cross else f"{indent}attention"
    return [
        (label, f"{some}{heads}{words or UNKNOWN}"),
        (f"{indent}Q, K projected", _projected(found, settled=seen is not None)),
    ]


def _heads(sizes: set[Sizes]) -> str:
    """The heads in words, with a comma after them; nothing where they are not known."""
    known = sorted({size for size in sizes if size.heads is not None}, key=str)
    if len(known) != 1:
        counts = sorted({size.heads for size in known if size.heads is not None})
        return f"{counts[0]} to {counts[-1]} heads, " if len(counts) > 1 else ""
    heads, key_heads, width = known[0]
    text = _count(heads or 0, "head") + (f" of width {width}" if width else "")
    grouped = key_heads is not None and key_heads != heads
    return f"{text}, {_count(key_heads or 0, 'key head')}, " if grouped else f"{text}, "


def _projected(found: list[Attention], *, settled: bool) -> str:
    if not found:
        return "not seen: no projections under a name that the field gives them"
    first = found[0]
    path = f"{first.name}." if first.name else ""
    names = first.projections.names
    if first.projections.kind == "multihead":
        return f"{first.name}, from its inputs and in_proj_weight"
    if first.projections.kind == "fused":
        how = "verified" if settled else "to be verified on the first pass"
        return f"{path}{names[0]}, with V; layout {how}"
    return f"{path}{names[0]} and {path}{names[1]}"


# -- around the stacks ---------------------------------------------------------------------------


def _token_ids(model: nn.Module, anatomy: Anatomy) -> str:
    names = {module: shown_name(name) for name, module in model.named_modules()}
    tables = [names[table] for table in anatomy.embeddings]
    if not tables:
        return "none: no embedding outside the blocks; metrics of token types are missing"
    return f"inputs of {_listed(tables, most=2)}"


def _padding(anatomy: Anatomy) -> str:
    known: dict[str, None] = {}
    for stack in anatomy.stacks:
        for module in stack.above:
            parameters = inspect.signature(module.forward).parameters
            known |= dict.fromkeys(name for name in MASKS if name in parameters)
    if not any(block.place_of(cross=True) is not None for block in anatomy.blocks):
        known = {name: None for name in known if not name.startswith(OF_MEMORY)}
    if not known:
        return "no mask is taken by the modules around the blocks: all rows count"
    return f"left out, going by {_listed(known)}"


def _listed(words: Iterable[str], most: int = 3) -> str:
    every = list(words)
    shown, rest = every[:most], len(every) - most
    if rest > 0:
        return f"{', '.join(shown)} and {rest} more"
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -- what one pass shows -------------------------------------------------------------------------


class _Seen:
    """What was seen of a model in one pass."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, inputs: Any) -> None:
        views = set(CAPTURED)
        self._window = Window(anatomy, views, rows=_ROWS, seed=0)
        extra_pass(model, inputs, self._window)
        self._snapshot = self._window.snapshot()
        self._complaint = complaint(self._snapshot, views)

    def depth(self, stack: Stack) -> int:
        """Number of layers."""
        layers = [x for x in self._snapshot.layers if x.stack == stack.name and x.index > 0]
        return len(layers) or len(stack.blocks)

    def routes(self, stack: Stack, cross: bool) -> set[str]:
        """Where attention was seen."""
        return self._window.routes(stack.name, cross=cross)

    def remarks(self) -> list[_Row]:
        """What is true of what was seen, and what was not seen."""
        rows = [("note", note.text) for note in self._snapshot.notes]
        for view, words in (("query", "Q, K as attended"), ("token_ids", "token ids")):
            for stack, reason in self._reasons(view):
                where = f" of the {stack}" if stack else ""
                rows.append(("not seen", f"{words}{where}: {reason}"))
        return rows + ([("not seen", self._complaint)] if self._complaint else [])

    def _reasons(self, view: str) -> dict[tuple[str, str], None]:
        layers: list[Layer] = [
            layer for layer in self._snapshot.layers if CAPTURED[view] in layer.sources
        ]
        return dict.fromkeys((x.stack, x.missing[view]) for x in layers if view in x.missing)
