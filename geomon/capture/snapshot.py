"""Data of one forward pass: layers with their captured views, what is true of the pass, and notes.

A captured view is a tensor or a number that the window kept of a layer. Nothing is computed here:
the views that are derived from captured ones are those of `geomon.metrics`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from geomon.note import Note

# Where rows stay unless an accelerator is to measure them.
HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class CapturedView:
    """What is known of a captured view: all that other rooms ask of it stands here.

    Attributes:
        source: What the window takes it from: "hidden", "last", "attention", "projection",
            "weights" or "routing". A window places only the hooks that are asked for.
        rows: What it has an entry for along its first dimension: "tokens", "queries", "keys" (as
            projected) or "sequences"; "" for none of these.
        heads: Dimension of its heads: "first" or "second"; "shared" if that one may be 1 for all
            heads; "" if it has none.
        merge: How the parts of ranks with other tokens are put together: "rows" follow one another;
            "numbers" of sequences do, and go on counting; "padded" (dimension 2) and "grid"
            (queries and keys) are made as long as the longest first; of "largest" and "sum" one is
            made; "same" has to be equal, "first" is known to be.
        without: How it is had without a group of sequences, for margins: "sliced" by its rows,
            "same", or "refused".
        text: One line of meaning, with the shape.
    """

    source: str
    rows: Literal["tokens", "queries", "keys", "sequences", ""]
    heads: Literal["first", "second", "shared", ""]
    merge: Literal["rows", "numbers", "padded", "grid", "largest", "sum", "same", "first"]
    without: Literal["sliced", "same", "refused"]
    text: str


def _of_rows(
    source: str, rows: Literal["tokens", "queries", "keys"], text: str, *, numbers: bool = False,
    heads: Literal["second", ""] = "",
) -> CapturedView:  # fmt: skip
    """Declare a view with an entry for each row."""
    return CapturedView(
        source=source, rows=rows, heads=heads, merge="numbers" if numbers else "rows",
        without="sliced", text=text,
    )  # fmt: skip


def _of_layer(source: str, text: str) -> CapturedView:
    """Declare a number, or one for each head, that all rows of a layer have in common."""
    return CapturedView(source=source, rows="", heads="", merge="same", without="same", text=text)


def _of_sequences(
    merge: Literal["padded", "grid"], text: str, heads: Literal["second", "shared"] = "second"
) -> CapturedView:
    """Declare a view of the sampled sequences of attention."""
    return CapturedView(
        source="attention", rows="sequences", heads=heads, merge=merge, without="sliced", text=text
    )


_HIDDEN = {
    "hidden": _of_rows("hidden", "tokens", "hidden states, [tokens, width]"),
    "token_ids": _of_rows("hidden", "tokens", "token ids, [tokens]"),
    "positions": _of_rows("hidden", "tokens", "positions in their sequences, [tokens]"),
    "sequences": _of_rows(
        "hidden", "tokens", "number of the sequence of each row, [tokens]", numbers=True
    ),
    "precision": _of_layer("hidden", "spacing of the captured numbers at 1: eps of their dtype"),
}

# Beginning of the names of views of the last token of each sequence that is no padding.
LAST = "last_"

CAPTURED: dict[str, CapturedView] = {
    **_HIDDEN,
    **{LAST + name: replace(view, source="last") for name, view in _HIDDEN.items()},
    "query": _of_sequences("padded", "as attended, [sequences, heads, queries, head width]"),
    "key": _of_sequences("padded", "as attended, [sequences, key heads, keys, head width]"),
    "visible": _of_sequences(
        "grid", "bool, broadcastable to [sequences, heads, queries, keys]", "shared"
    ),
    "bias": _of_sequences("grid", "added to the scores, or None", "shared"),
    "scale": _of_layer("attention", "factor on the dot products"),
    "softcap": _of_layer("attention", "bound on the scores before the bias, or None"),
    "sink": replace(
        _of_layer("attention", "logits of learned sinks, [heads], or None"), heads="first"
    ),
    "scores": _of_sequences(
        "grid", "before the softmax, if it is written out by hand and queries are not seen"
    ),
    "max_logits": CapturedView(
        source="attention", rows="", heads="first", merge="largest", without="refused",
        text="largest score of all rows and visible keys, [heads]",
    ),
    "projected_query": _of_rows(
        "projection", "queries", "[tokens, heads, head width]", heads="second"
    ),
    "projected_key": _of_rows(
        "projection", "keys", "[tokens, key heads, head width]", heads="second"
    ),
    "query_sequences": _of_rows(
        "projection", "queries", "number of the sequence of each query, [tokens]", numbers=True
    ),
    "key_sequences": _of_rows(
        "projection", "keys", "number of the sequence of each key, [tokens]", numbers=True
    ),
    "weight_norms": CapturedView(
        source="weights", rows="", heads="", merge="first", without="refused",
        text="Frobenius norms of the block's matrices, numbers by name",
    ),
    "expert_counts": CapturedView(
        source="routing", rows="", heads="", merge="sum", without="refused",
        text="how often the tokens chose each expert, float32, [experts]",
    ),
}  # fmt: skip


def source_of(view: str) -> str:
    """Return what a captured view is taken from.

    Args:
        view: Name of a captured view.
    """
    return CAPTURED[view].source


# All that a layer of a transformer has; what enters the first block has hidden states only.
SOURCES = frozenset(map(source_of, CAPTURED))

# Captured views with one entry for each row of hidden states.
ROW_VIEWS = tuple(
    name for name, view in CAPTURED.items() if (view.source, view.rows) == ("hidden", "tokens")
)

# Those that a batch has before any block has run, and that rows of weights do not have.
OF_THE_BATCH = frozenset(ROW_VIEWS) - {"hidden"}

# Layers beside those of the blocks, which are measured where they are asked for by name: the hidden
# states that the final norm makes of what leaves the last block, and the rows of two matrices.
FINAL_NORM = "final_norm"
EMBEDDING = "embedding"
UNEMBEDDING = "unembedding"
EXTRA_LAYERS = (FINAL_NORM, EMBEDDING, UNEMBEDDING)

# What remarks on queries and keys as projected are about.
PROJECTED = "projected Q and K"


def check_extra_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of extra layers in the order in which they are measured.

    Args:
        names: Names out of `EXTRA_LAYERS`; one name alone stands for itself.

    Raises:
        ValueError: There is no extra layer of a name.
    """
    asked = [names] if isinstance(names, str) else [*names]
    for name in asked:
        if name not in EXTRA_LAYERS:
            raise ValueError(f"extra_layers are some of {', '.join(EXTRA_LAYERS)}, got {name!r}")
    return tuple(name for name in EXTRA_LAYERS if name in asked)


def group_by_layer(reasons: Mapping[tuple[str, str], Iterable[int]], stack: str = "") -> list[Note]:
    """Make one note for each (subject, reason), with the layers to which it applies.

    Args:
        reasons: Depths of the layers, by subject and reason.
        stack: Name of their stack.
    """
    return [
        Note(
            f"{subject}: {reason}", "{subject}{where}: {reason}", stack, tuple(layers),
            numbers={"subject": subject, "reason": reason},
        )
        for (subject, reason), layers in reasons.items()
    ]  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Which part of a layer a rank has, where ranks with the same tokens share it out.

    Numbers are those of the whole layer, the same on every rank.

    Attributes:
        rows: Number of each row of hidden states, by which rows are put in order; None if ranks
            share nothing out.
        last_rows: The same of the last tokens.
        start: First index of the hidden states that the rank has, by dimension; () for all.
        heads: Number of the first feature of each head, by the view that has these heads: "query",
            "key", "projected_query" and "projected_key". Of a view that is not named all heads are
            here, or it is not known which.
        tokens: Number of the tokens that the rows are of: parts of the same tokens belong together.
            None if no other part is of these.
        tokens_elsewhere: Whether ids and places of the tokens are known elsewhere: at the first
            stage of a pipeline.
    """

    rows: Tensor | None = None
    last_rows: Tensor | None = None
    start: tuple[int, ...] = ()
    heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tokens: int | None = None
    tokens_elsewhere: bool = False


EVERYTHING = Part()


@dataclass(frozen=True)
class Layer:
    """The captured views of one layer.

    Attributes:
        index: Depth of the layer: 0 is the input of the first block, l the output of block l.
        name: Name of the module, as shown to people.
        captured: Captured views by name.
        missing: For each captured view that is not there, the reason.
        stack: Name of the stack of blocks ("encoder", say); "" in a model with one stack.
        sources: Kinds of captured views that a layer of this kind has ("hidden", "last",
            "attention", "projection"). Metrics that read other sources are not asked of the layer.
        of_weights: Whether the rows are those of a matrix of weights, the same on every rank: of no
            token, so that metrics of token ids and positions are not asked of the layer.
        part: Which part of the layer these views are.
    """

    index: int
    name: str
    captured: Mapping[str, Any]
    missing: Mapping[str, str] = field(default_factory=dict)
    stack: str = ""
    sources: frozenset[str] = SOURCES
    of_weights: bool = False
    part: Part = EVERYTHING

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the captured tensors; more than one where not all of them were moved."""
        return {value.device for value in self.captured.values() if isinstance(value, Tensor)}

    def only(self, sources: frozenset[str]) -> "Layer":
        """Return the layer with the captured views of some sources alone.

        Args:
            sources: Some of `SOURCES`.
        """
        kept = {name: view for name, view in self.captured.items() if source_of(name) in sources}
        return replace(self, captured=kept, sources=self.sources & sources)

    def to(self, device: torch.device, *, wait: bool = True) -> "Layer":
        """Return the layer with its captured tensors on a device; itself where they are there.

        Args:
            device: Any device of torch.
            wait: Whether copies from CUDA to the host are there when this returns. If not, they are
                queued behind what the device has to do, and are read only when that is done.
        """
        if self.devices <= {device}:
            return self
        move = _queue_copy if device == HOST else Tensor.to
        moved = {
            name: move(value, device) if isinstance(value, Tensor) else value
            for name, value in self.captured.items()
        }
        if wait and device == HOST:
            wait_for_copies(self.devices)
        return replace(self, captured=moved)


def _queue_copy(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the host; from CUDA the copy is queued, into memory that is pinned.

    Each copy to other memory would wait for all that the training has queued.
    """
    if not value.is_cuda:
        return value.to(device)
    try:
        target = torch.empty(value.shape, dtype=value.dtype, device=device, pin_memory=True)
    except RuntimeError:  # a system limits the memory that can be pinned
        return value.to(device)
    return target.copy_(value, non_blocking=True)


def wait_for_copies(devices: Iterable[torch.device]) -> None:
    """Wait until copies to the host are there that this thread has queued."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def cover_all(places: Tensor, length: int) -> bool:
    """Whether places are all positions of each sequence, in order: then nothing is to be chosen."""
    if places.shape[1] != length or places.device.type != "cpu":
        return False
    order = torch.arange(length, dtype=places.dtype, device="cpu")
    return torch.equal(places, order.expand(len(places), -1))


# Parts of the sequences of which each covers all positions: those that margins leave out.
EIGHTHS = 8


def query_places(numbers: Tensor, count: int, each: int, length: int) -> Tensor:
    """Choose the positions of the sampled queries of some sequences.

    Positions are evenly spread, and shifted from sequence to sequence so that all are covered
    alike: under a causal mask the entropy of a query grows with its position. The shifts repeat in
    each eighth of the sequences, which a margin leaves out: what is left covers the same positions.

    Args:
        numbers: Numbers of the sequences among all that are sampled, int64.
        count: Number of all sequences that are sampled.
        each: Number of queries of each.
        length: Number of positions.

    Returns:
        [sequences, each], int64.
    """
    shifts = max(1, count // EIGHTHS)
    order = torch.arange(each, dtype=torch.int64, device="cpu")
    # (order + (shift + 1/2) / shifts) * length / each, in integers: nothing is rounded
    within = 2 * (shifts * order + numbers[:, None] % shifts) + 1
    return within * length // (2 * shifts * each)


@torch.no_grad()
def at_places(values: Tensor, places: Tensor) -> Tensor:
    """Take rows of a tensor of attention at places that differ from sequence to sequence.

    Args:
        values: [sequences (or 1), heads, length, width], where length counts queries or keys.
        places: Positions of the wanted rows in each sequence, [sequences, rows], integers.

    Returns:
        [sequences, heads, rows, width].
    """
    values = values.detach().expand(len(places), -1, -1, -1)
    if cover_all(places, values.shape[2]):
        return values.clone(memory_format=torch.contiguous_format)
    index = places.to(values.device)[:, None, :, None]
    return values.gather(2, index.expand(-1, values.shape[1], -1, values.shape[3]))


_HEADS_DIFFER = "its heads are apart (modules, or on several ranks) and differ in their {view}"


def beside(
    heads: Sequence[tuple[Mapping[str, Any], Mapping[str, str]]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Lay views of heads beside one another: of heads that are modules, or on several ranks.

    Args:
        heads: Captured views of some heads each, and the reasons for missing ones.

    Returns:
        The views of all heads, and the reasons for missing ones.
    """
    if len(heads) == 1:
        return dict(heads[0][0]), dict(heads[0][1])
    missing = {view: reason for _, lacking in reversed(heads) for view, reason in lacking.items()}
    found: dict[str, Any] = {}
    counts = [_count_heads(captured) for captured, _ in heads]
    for view in heads[0][0]:
        if view in missing or not all(view in captured for captured, _ in heads):
            continue
        values = [captured[view] for captured, _ in heads]
        tensors = [value for value in values if isinstance(value, Tensor)]
        dimension = CAPTURED[view].heads
        same = not dimension if tensors else all(value == values[0] for value in values)
        if same:
            found[view] = values[0]
        elif dimension == "shared" and tensors:
            found[view] = _grids_beside(values, counts)
        elif len(tensors) == len(values):
            found[view] = torch.cat(tensors, dim=0 if dimension == "first" else 1)
        else:
            return {}, missing | dict.fromkeys(heads[0][0].keys(), _HEADS_DIFFER.format(view=view))
    return found, missing


def _count_heads(captured: Mapping[str, Any]) -> int:
    return next((captured[v].shape[1] for v in ("query", "scores") if v in captured), 1)


def _grids_beside(values: Sequence[Tensor | None], counts: Sequence[int]) -> Tensor:
    """Join masks or biases of heads; equal ones are kept once for all heads."""
    known = next(value for value in values if value is not None)
    grids = [known.new_zeros(1, 1, 1, 1) if value is None else value for value in values]
    if all(grid.shape[1] == 1 and torch.equal(grid, known) for grid in grids):
        return known
    sides = [max(grid.shape[dim] for grid in grids) for dim in (0, 2, 3)]
    return torch.cat(
        [
            grid.expand(sides[0], count, sides[1], sides[2])
            for grid, count in zip(grids, counts, strict=True)
        ],
        dim=1,
    )


class MeanLoss(NamedTuple):
    """The loss of a probe's pass, a mean over its sequences.

    Attributes:
        value: The loss; NaN if it could not be computed.
        sequences: Number of sequences, by which the losses of several passes are weighted.
    """

    value: float
    sequences: int


@dataclass(frozen=True)
class PassInfo:
    """Facts about one forward pass as a whole.

    Attributes:
        tokens: Number of rows of hidden states that were kept at each layer.
        mode: "train" or "eval"; "" where no block was run. Dropout changes the numbers.
        dtype: Data type of the hidden states in the model, before they were copied to float32.
        notes: Remarks for the reader of the numbers.
        loss: Loss of a probe's pass; None if none was asked for.
        batch: What tells the tokens of the pass from others: ranks with the same one had the same
            tokens. "" where nothing was seen.
    """

    tokens: int
    mode: str
    dtype: str
    notes: list[Note] = field(default_factory=list)
    loss: MeanLoss | None = None
    batch: str = ""


@dataclass(frozen=True)
class Snapshot:
    """All layers of one forward pass.

    Attributes:
        layers: The layers of each stack by depth. Layer 0 has hidden states only.
        info: Facts about the pass as a whole.
    """

    layers: list[Layer]
    info: PassInfo

    @property
    def is_empty(self) -> bool:
        """Whether no block was seen: no forward pass was run, or another model's."""
        of_blocks = (layer for layer in self.layers if not layer.of_weights)
        return not any(layer.captured.keys() - OF_THE_BATCH for layer in of_blocks)


# One view of each source stands for it: the others are missing with it, or for reasons that are
# no fault (a model without token ids, attention whose queries are not seen).
_STANDS_FOR = {
    "hidden": "hidden",
    "last": "last_hidden",
    "attention": "visible",
    "projection": "projected_query",
}
_WORDS = {
    "hidden": "hidden states",
    "last": "hidden states of the last tokens",
    "attention": "attention",
    "projection": "queries and keys as projected",
}


class NotSeenError(RuntimeError):
    """Something that the metrics read is in the model, going by its anatomy, and was not seen."""


def explain_missing(snapshot: Snapshot, views: Iterable[str]) -> str | None:
    """Say which expected sources the first window did not see, why, and what to do.

    Every source that the views come from is expected in every stack that has it. A stack in which
    only some layers lack it (blocks dropped at random, linear attention in a hybrid) is not
    reported here: those layers get a note where they are measured.

    Args:
        snapshot: Snapshot of the first window.
        views: Captured views that the metrics read.

    Returns:
        The explanation, or None if everything expected was seen.
    """
    asked = {source_of(view) for view in views}
    found = []
    for source in _STANDS_FOR:
        reasons = _missing(snapshot.layers, source) if source in asked else {}
        for reason, layers in reasons.items():
            where = _where(layers, snapshot.layers)
            found.append(f"{_WORDS[source]} at {where}: {reason}")
        if source == "hidden" and found:  # nothing else can have been seen there
            break
    if not found:
        return None
    return (
        f"not seen in the first pass that was watched: {'; '.join(found)}. "
        "print(geomon.describe(model)) shows what is expected where; blocks=... names other "
        "blocks, metrics=select(...) leaves out what cannot be seen"
    )


def _missing(layers: Sequence[Layer], source: str) -> dict[str, list[Layer]]:
    """Layers of stacks that lack the source altogether, by the reason."""
    view = _STANDS_FOR[source]
    found: dict[str, list[Layer]] = {}
    for stack in dict.fromkeys(layer.stack for layer in layers):
        expected = [
            layer
            for layer in layers
            if layer.stack == stack
            and (layer.index > 0 or layer.of_weights)
            and source in layer.sources
        ]
        if any(view in layer.captured for layer in expected):
            continue
        for layer in expected:
            found.setdefault(layer.missing.get(view, "it was not seen"), []).append(layer)
    return found


def _where(layers: Sequence[Layer], everything: Sequence[Layer]) -> str:
    """Some layers in words: the first by name, and how many of how many."""
    stacks = {layer.stack for layer in layers}
    whole = sum(layer.stack in stacks and layer.index > 0 for layer in everything)
    return f"{layers[0].name} ({len(layers)} of {whole} layers)" if whole > 1 else layers[0].name
