"""Data of one forward pass: layers with their captured views, facts about the pass, and notes.

A captured view is a tensor or number that the window kept of a layer. Nothing is computed here;
`geomon.metrics` derives further views.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from geomon.capture.storage import send
from geomon.failures import failures
from geomon.note import Note
from geomon.note_kinds import NoteKind

# Rows stay here unless an accelerator measures them.
HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Declares a source: something that the window observes, from which it captures views.

    Attributes:
        shared: How ranks with the same tokens share its views: "rows" or "heads" if each may have
            some of them; "whole" if one rank's views are the layer's.
        number: Attribute of `Part` with the index of each row, for shared rows.
        queries: View of the queries, one for each head, for shared heads.
        keys: View of the keys, one for each key head, for shared heads.
        is_one: Whether its views describe one operation, so that parts with different views cannot
            be joined. Sums and extremes can.
        shown_by: View that is there if the source was seen. The others are missing together with
            it, or for harmless reasons (a model without token ids, attention whose queries are not
            seen). "" if nobody expects the source.
        text: Name of the source, as shown to people.
    """

    shared: Literal["rows", "heads", "whole"]
    number: str = ""
    queries: str = ""
    keys: str = ""
    is_one: bool = False
    shown_by: str = ""
    text: str = ""


# Sources of a transformer's layer; the input of the first block has hidden states only.
SOURCES: dict[str, Source] = {
    "hidden": Source(shared="rows", number="rows", shown_by="hidden", text="hidden states"),
    "last": Source(
        shared="rows", number="last_rows", shown_by="last_hidden",
        text="hidden states of the last tokens",
    ),
    "attention": Source(
        shared="heads", queries="query", keys="key", is_one=True, shown_by="visible",
        text="attention",
    ),
    "projection": Source(
        shared="heads", queries="projected_query", keys="projected_key",
        shown_by="projected_query", text="queries and keys as projected",
    ),
    "weights": Source(shared="whole"),
    "moves": Source(shared="whole"),
    "routing": Source(shared="whole"),
}  # fmt: skip


def sources_shared_by(shared: Literal["rows", "heads", "whole"]) -> frozenset[str]:
    """Return the sources whose views ranks with the same tokens share in this way.

    Args:
        shared: The way (see `Source`).
    """
    return frozenset(name for name, source in SOURCES.items() if source.shared == shared)


@dataclass(frozen=True, kw_only=True)
class CapturedView:
    """Declares a captured view: all that other rooms need to know about it.

    Attributes:
        source: Source that the window reads, from `SOURCES`. A window observes only the sources
            that are requested.
        rows: Unit of its first dimension: "tokens", "queries", "keys" (as projected) or
            "sequences"; "" for none of these.
        heads: Dimension of its heads: "first" or "second"; "shared" if the second may be 1 for all
            heads; "" if it has none.
        merge: How parts of ranks with different tokens are joined. "rows" are concatenated;
            "numbers" (of sequences) are concatenated and renumbered; "padded" (dimension 2) and
            "grid" (queries and keys) are padded to the longest, then concatenated; "largest" and
            "sum" are reduced; "same" must be equal on all ranks; "first" is known to be equal.
        without: How to leave out a group of sequences, for margins: "sliced" by rows, "same", or
            "refused".
        text: One line of meaning, with the shape.
        origin: "batch" if it is known before any block has run, so that rows of weights lack it;
            "block" if it compares a block's output with the layer before, so that other layers lack
            it. Defaults to "", for the layer itself.
        is_sampled: Whether dimension 2 counts the sampled queries, or is 1 for all of them.
            Defaults to False.
    """

    source: str
    rows: Literal["tokens", "queries", "keys", "sequences", ""]
    heads: Literal["first", "second", "shared", ""]
    merge: Literal["rows", "numbers", "padded", "grid", "largest", "sum", "same", "first"]
    without: Literal["sliced", "same", "refused"]
    text: str
    origin: Literal["batch", "block", ""] = ""
    is_sampled: bool = False


def _of_rows(
    source: str, rows: Literal["tokens", "queries", "keys"], text: str, *, numbers: bool = False,
    heads: Literal["second", ""] = "", origin: Literal["batch", "block", ""] = "",
) -> CapturedView:  # fmt: skip
    """Declare a view with an entry for each row."""
    return CapturedView(
        source=source, rows=rows, heads=heads, merge="numbers" if numbers else "rows",
        without="sliced", text=text, origin=origin,
    )  # fmt: skip


def _of_layer(source: str, text: str) -> CapturedView:
    """Declare a number, or one number per head, that all rows of a layer share."""
    return CapturedView(source=source, rows="", heads="", merge="same", without="same", text=text)


def _of_sequences(
    merge: Literal["padded", "grid"], text: str, heads: Literal["second", "shared"] = "second", *,
    is_sampled: bool = True,
) -> CapturedView:  # fmt: skip
    """Declare a view of the sampled sequences of attention."""
    return CapturedView(
        source="attention", rows="sequences", heads=heads, merge=merge, without="sliced",
        text=text, is_sampled=is_sampled,
    )  # fmt: skip


_HIDDEN = {
    "hidden": _of_rows("hidden", "tokens", "hidden states, [tokens, width]"),
    "token_ids": _of_rows("hidden", "tokens", "token ids, [tokens]", origin="batch"),
    "positions": _of_rows(
        "hidden", "tokens", "positions in their sequences, [tokens]", origin="batch"
    ),
    "sequences": _of_rows(
        "hidden", "tokens", "number of the sequence of each row, [tokens]", numbers=True,
        origin="batch",
    ),
    "additions": _of_rows(
        "hidden", "tokens", "norm before the block, norm, cosine of row and addition, [tokens, 3]",
        origin="block",
    ),
    "precision": _of_layer("hidden", "spacing of the captured numbers at 1: eps of their dtype"),
}  # fmt: skip

# Name prefix of views of each sequence's last token that is not padding.
LAST = "last_"

CAPTURED: dict[str, CapturedView] = {
    **_HIDDEN,
    **{LAST + name: replace(view, source="last") for name, view in _HIDDEN.items()},
    "query": _of_sequences("padded", "as attended, [sequences, heads, queries, head width]"),
    "key": _of_sequences(
        "padded", "as attended, [sequences, key heads, keys, head width]", is_sampled=False
    ),
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
    "head_outputs": CapturedView(
        source="attention", rows="", heads="first", merge="sum", without="refused",
        text="sum of the squared norms of each head's output and number of rows, [heads, 2]",
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
    "weight_moves": CapturedView(
        source="moves", rows="", heads="", merge="first", without="refused",
        text="size of the block's update, over the median of the blocks, share of unmoved weights, "
        "less the median of the blocks, size over the learning rate, [5]; NaN for unknown",
    ),
    "expert_counts": CapturedView(
        source="routing", rows="", heads="", merge="sum", without="refused",
        text="how often the tokens chose each expert, float32, [experts]",
    ),
}  # fmt: skip


def source_of(view: str) -> str:
    """Return the source of a captured view.

    Args:
        view: Name of a captured view.
    """
    return CAPTURED[view].source


def views_of(source: str) -> tuple[str, ...]:
    """Return the captured views of a source.

    Args:
        source: One of `SOURCES`.
    """
    return tuple(name for name in CAPTURED if source_of(name) == source)


# Views that exist before any block has run, but not for rows of weights.
OF_THE_BATCH = frozenset(name for name, view in CAPTURED.items() if view.origin == "batch")

# Views that compare the output of a block with the layer before. Other layers lack them.
ADDITIONS = frozenset(name for name, view in CAPTURED.items() if view.origin == "block")

# Extra layers that are measured if requested by name: the final norm's output, and the rows of two
# weight matrices.
FINAL_NORM = "final_norm"
EMBEDDING = "embedding"
UNEMBEDDING = "unembedding"
EXTRA_LAYERS = (FINAL_NORM, EMBEDDING, UNEMBEDDING)

# Subject of remarks on queries and keys as projected.
PROJECTED = "projected Q and K"


def check_extra_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of extra layers in the order in which they are measured.

    Args:
        names: Names from `EXTRA_LAYERS`, or a single name.

    Raises:
        ValueError: If a name does not belong to an extra layer.
    """
    asked = [names] if isinstance(names, str) else [*names]
    for name in asked:
        if name not in EXTRA_LAYERS:
            raise ValueError(f"extra_layers are some of {', '.join(EXTRA_LAYERS)}, got {name!r}")
    return tuple(name for name in EXTRA_LAYERS if name in asked)


def note_on_layers(
    kind: NoteKind, subject: str, reason: str, layers: Iterable[int], stack: str = ""
) -> Note:
    """Make the note that something is so at some layers, and why.

    Args:
        kind: Kind of the note.
        subject: The value, or the part of a layer, that it is about.
        reason: The reason.
        layers: Depths of the layers.
        stack: Name of their stack. Defaults to "".
    """
    return Note(
        kind, "{subject}{where}: {reason}", stack, tuple(layers),
        numbers={"subject": subject, "reason": reason}, about=f"{subject}: {reason}",
    )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Part of a layer that a rank has, if ranks with the same tokens share it.

    All indices count through the whole layer, so they are equal on every rank.

    Attributes:
        rows: Index of each row of hidden states, which orders the rows, or None if ranks share
            nothing.
        last_rows: Index of each row of last tokens, or None.
        start: First index of the rank's hidden states, by dimension; () if it has all.
        heads: Index of the first feature of each head, by view: "query", "key", "projected_query"
            and "projected_key". If a view is missing, all of its heads are here or their indices
            are unknown.
        tokens: Number that identifies the tokens of the rows, shared by all parts with the same
            tokens, or None without other parts.
        tokens_elsewhere: Whether another rank, the first pipeline stage, knows the ids and
            positions of the tokens. Defaults to False.
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
        missing: Reason for each captured view that is missing.
        stack: Name of the stack of blocks, such as "encoder"; "" if the model has only one.
        sources: Sources that a layer of this kind has ("hidden", "last", "attention",
            "projection" and others). Metrics that read other sources skip the layer.
        of_weights: Whether the rows belong to a weight matrix, equal on every rank, rather than to
            tokens. Metrics of token ids and positions skip the layer. Defaults to False.
        part: Part of the layer that these views hold. Defaults to the whole layer.
    """

    index: int
    name: str
    captured: Mapping[str, Any]
    missing: Mapping[str, str] = field(default_factory=dict)
    stack: str = ""
    sources: frozenset[str] = frozenset(SOURCES)
    of_weights: bool = False
    part: Part = EVERYTHING

    @property
    def views(self) -> frozenset[str]:
        """Captured views that a layer of this kind may have."""
        lacking = OF_THE_BATCH if self.of_weights else frozenset[str]()
        if "weights" not in self.sources:  # not the output of a block
            lacking |= ADDITIONS
        found = (name for name in CAPTURED if source_of(name) in self.sources)
        return frozenset(found) - lacking

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the captured tensors; more than one if only some tensors were moved."""
        return {value.device for value in self.captured.values() if isinstance(value, Tensor)}

    def only(self, sources: frozenset[str]) -> "Layer":
        """Return the layer with the captured views of some sources only.

        Args:
            sources: Some of `SOURCES`.
        """
        kept = {name: view for name, view in self.captured.items() if source_of(name) in sources}
        return replace(self, captured=kept, sources=self.sources & sources)

    def to(self, device: torch.device, *, wait: bool = True) -> "Layer":
        """Return the layer with its captured tensors on a device (itself if they are there).

        Args:
            device: Any torch device.
            wait: Whether to wait for copies from CUDA to the host. If False, the copies are queued
                and must not be read before the device has made them. Defaults to True.
        """
        if self.devices <= {device}:
            return self
        move = queue_copy if device == HOST else Tensor.to
        moved = {
            name: move(value, device) if isinstance(value, Tensor) else value
            for name, value in self.captured.items()
        }
        if wait and device == HOST:
            wait_for_copies(self.devices)
        return replace(self, captured=moved)


def queue_copy(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the host; a copy from CUDA is queued into pinned memory.

    A copy into pageable memory would wait for all work that the training has queued.

    Args:
        value: The tensor.
        device: The host.

    Returns:
        The copy, whose numbers may come later; the tensor itself if it is on the host.
    """
    if not value.is_cuda:
        return value.to(device)
    try:
        target = torch.empty(value.shape, dtype=value.dtype, device=device, pin_memory=True)
    except failures(RuntimeError):  # the system limits pinned memory
        return value.to(device)
    return target.copy_(value, non_blocking=True)


def wait_for_copies(devices: Iterable[torch.device]) -> None:
    """Wait for the copies to the host that this thread has queued."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def cover_all(places: Tensor, length: int) -> bool:
    """Whether places are all positions of each sequence in order, so there is nothing to choose."""
    if places.shape[1] != length or places.device.type != "cpu":
        return False
    order = torch.arange(length, dtype=places.dtype, device="cpu")
    return torch.equal(places, order.expand(len(places), -1))


# Number of groups of sequences for margins; each group covers all positions.
EIGHTHS = 8


def whole_sequences(rows: int, length: int) -> int:
    """Count the sequences that keep all their keys: as many as make up the rows, at least one.

    Up to 8 sequences keep them even if they have twice as many keys as rows are kept, because
    intervals leave out an eighth of the sequences.

    Args:
        rows: Number of rows that are kept.
        length: Number of keys of a sequence.

    Example:
        >>> [whole_sequences(4096, length) for length in (64, 1024, 2048, 9000)]
        [64, 8, 4, 1]
    """
    return max(1, rows // length, min(EIGHTHS, 2 * rows // length))


def query_places(numbers: Tensor, count: int, each: int, length: int) -> Tensor:
    """Choose the positions of the sampled queries of some sequences.

    Positions are evenly spread and shifted from sequence to sequence to cover all positions alike:
    under a causal mask, the entropy of a query grows with its position. The shifts repeat in each
    eighth of the sequences, so that leaving out an eighth (for a margin) keeps the same positions.

    Args:
        numbers: Indices of the sequences among all sampled ones, int64.
        count: Number of all sampled sequences.
        each: Number of queries per sequence.
        length: Number of positions.

    Returns:
        Positions, [sequences, each], int64.
    """
    shifts = max(1, count // EIGHTHS)
    order = torch.arange(each, dtype=torch.int64, device="cpu")
    # (order + (shift + 1/2) / shifts) * length / each, in integers: nothing is rounded
    within = 2 * (shifts * order + numbers[:, None] % shifts) + 1
    return within * length // (2 * shifts * each)


@torch.no_grad()
def at_places(values: Tensor, places: Tensor) -> Tensor:
    """Take rows of an attention tensor at places that differ between sequences.

    Args:
        values: [sequences (or 1), heads, length, width], where length counts queries or keys.
        places: Positions of the wanted rows in each sequence, [sequences, rows], integers.

    Returns:
        [sequences, heads, rows, width].
    """
    values = values.detach().expand(len(places), -1, -1, -1)
    if cover_all(places, values.shape[2]):
        return values.clone(memory_format=torch.contiguous_format)
    index = send(places, values.device)[:, None, :, None]
    return values.gather(2, index.expand(-1, values.shape[1], -1, values.shape[3]))


_HEADS_DIFFER = "its heads (modules of a list, or on several ranks) differ in their {view}"


def concat_heads(
    heads: Sequence[tuple[Mapping[str, Any], Mapping[str, str]]],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Concatenate views of heads that are separate modules or on several ranks.

    Args:
        heads: For each group of heads, its captured views and the reasons for missing ones.

    Returns:
        The views of all heads, and the reasons for missing ones.
    """
    if len(heads) == 1:
        return dict(heads[0][0]), dict(heads[0][1])
    missing = {view: reason for _, lacking in reversed(heads) for view, reason in lacking.items()}
    counts = [_count_heads(captured) for captured, _ in heads]
    found: dict[str, Any] = {}
    for view in heads[0][0]:
        if view not in missing and all(view in captured for captured, _ in heads):
            try:
                found[view] = _join(view, [captured[view] for captured, _ in heads], counts)
            except ValueError as error:
                return {}, missing | dict.fromkeys(heads[0][0], str(error))
    return found, missing


def _join(view: str, values: Sequence[Any], counts: Sequence[int]) -> Any:
    """Concatenate one view of groups of heads; raises a ValueError if they differ in it."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    dimension = CAPTURED[view].heads
    if not dimension if tensors else all(value == values[0] for value in values):
        return values[0]
    if dimension == "shared" and tensors:
        return _concat_grids(values, counts)
    if len(tensors) < len(values):
        raise ValueError(_HEADS_DIFFER.format(view=view))
    return torch.cat(tensors, dim=0 if dimension == "first" else 1)


def _count_heads(captured: Mapping[str, Any]) -> int:
    return next((captured[v].shape[1] for v in ("query", "scores") if v in captured), 1)


def _concat_grids(values: Sequence[Tensor | None], counts: Sequence[int]) -> Tensor:
    """Concatenate masks or biases along heads; if all are equal, keep one for all heads."""
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
        value: The loss, or NaN if it could not be computed.
        sequences: Number of sequences, the weight of this loss in a mean over passes.
    """

    value: float
    sequences: int


@dataclass(frozen=True)
class PassInfo:
    """Facts about one forward pass as a whole.

    Attributes:
        tokens: Number of rows of hidden states kept at each layer.
        mode: "train" or "eval"; "" if no block ran. Dropout changes the numbers.
        dtype: Data type of the hidden states in the model, before they were copied to float32.
        notes: Remarks for the reader of the numbers.
        loss: Loss of a probe's pass, or None if none was requested.
        batch: Checksum of the tokens: equal on ranks that had the same tokens. Defaults to "", for
            a pass where nothing was seen.
        token_ids: Checksum of the token ids: equal in passes over the same text, whatever the
            weights. Defaults to "", if they are unknown.
    """

    tokens: int
    mode: str
    dtype: str
    notes: list[Note] = field(default_factory=list)
    loss: MeanLoss | None = None
    batch: str = ""
    token_ids: str = ""


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
        """Whether no block was seen, because another model or none was called."""
        of_blocks = (layer for layer in self.layers if not layer.of_weights)
        return not any(layer.captured.keys() - OF_THE_BATCH for layer in of_blocks)


class NotSeenError(RuntimeError):
    """The metrics read something that the model has, judged by its anatomy, but it was not seen."""


def explain_missing(snapshot: Snapshot, views: Iterable[str]) -> str | None:
    """Say which expected sources the first window did not see, why, and what to do.

    Every source of the views is expected in every stack that has it. If only some layers of a stack
    lack it (blocks dropped at random, linear attention in a hybrid), nothing is reported here:
    those layers get a note when they are measured.

    Args:
        snapshot: Snapshot of the first window.
        views: Captured views that the metrics read.

    Returns:
        The explanation, or None if everything expected was seen.
    """
    asked = {source_of(view) for view in views}
    found = []
    for source, declared in SOURCES.items():
        expected = source in asked and declared.shown_by
        reasons = _missing(snapshot.layers, source) if expected else {}
        for reason, layers in reasons.items():
            where = _where(layers, snapshot.layers)
            found.append(f"{declared.text} at {where}: {reason}")
        if source == "hidden" and found:  # nothing else can have been seen there
            break
    if not found:
        return None
    failed = [note.text for note in snapshot.info.notes if note.kind is NoteKind.WATCHING_FAILED]
    return (
        f"not seen in the first pass that was watched: {'; '.join([*failed, *found])}. "
        "print(geomon.describe(model)) shows what is expected in which module; blocks=... names "
        "other blocks, metrics=select(...) leaves out what cannot be seen"
    )


def _missing(layers: Sequence[Layer], source: str) -> dict[str, list[Layer]]:
    """Layers of stacks that lack the source altogether, by reason."""
    view = SOURCES[source].shown_by
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
    """Name the first layer, and say how many of the stack's layers are affected."""
    stacks = {layer.stack for layer in layers}
    whole = sum(layer.stack in stacks and layer.index > 0 for layer in everything)
    return f"{layers[0].name} ({len(layers)} of {whole} layers)" if whole > 1 else layers[0].name
