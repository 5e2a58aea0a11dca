"""The parts of all ranks: of each layer one union, on the rank that measures it.

A rank has some rows, some heads and some depths of what it reads. Ranks with the same tokens put
their parts together by their true numbers; the rows of other tokens follow, in the order of the
ranks. The layers are shared out, and what is on other ranks of a layer is sent to the rank that
measures it. So a reading is that of all tokens and of the whole model, never an average of
readings, and its time falls with the number of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from geomon.capture.snapshot import OF_THE_BATCH, Layer, Part, PassInfo, Snapshot, source_of
from geomon.distributed.group import RankFailedError, RankGroup
from geomon.distributed.merge import (
    Shape,
    attention_shape,
    mean_loss,
    merge_layers,
    take_share,
)
from geomon.distributed.mesh import Mesh
from geomon.note import Note

_Value = TypeVar("_Value")

_Key = tuple[str, int]  # stack and depth of a layer
_Parcel = list[tuple[int, Layer]]  # parts of layers, with the numbers of these

# Sources of which ranks have other rows, and those of which they have other heads.
_OF_ROWS = frozenset({"hidden", "last"})
_OF_HEADS = frozenset({"attention", "projection"})
# Sources of a block as a whole, which go with the rows.
_WITH_ROWS = frozenset({"weights", "routing"})


class _Owned(NamedTuple):
    """What a rank has of one layer; plain values.

    Attributes:
        name: Name of the layer.
        attention: Shape of what was kept of its attention; None for nothing.
        lacking: The sources of which nothing was seen, with the reasons.
        rows: Number of rows of hidden states.
        start: First index of the hidden states that the rank has; () for all.
        heads: Number of the first feature of each head that is known, by view.
        tokens_elsewhere: Whether the first stage knows the tokens of its rows.
    """

    name: str
    attention: Shape | None
    lacking: Mapping[str, str]
    rows: int
    start: tuple[int, ...]
    heads: tuple[tuple[str, tuple[int, ...]], ...]
    tokens_elsewhere: bool


class _Report(NamedTuple):
    """What a rank reports of its snapshot to the others before any row is sent; plain values.

    Attributes:
        layers: What the rank has of each of its layers, in order.
        info: Facts about the rank's forward pass.
        empty: Whether no block was seen.
    """

    layers: Mapping[_Key, _Owned]
    info: PassInfo
    empty: bool


@dataclass(frozen=True)
class GatheredLayers:
    """The layers that this rank measures, with the rows of all ranks.

    Attributes:
        parts: For each layer of this rank, in order of depth, what each rank has of it;
            `merge_layers` makes one layer of them.
        count: Number of layers on all ranks.
        info: Facts about the forward passes of all ranks.
        empty: Whether no block was seen on any rank.
    """

    parts: list[tuple[Layer, ...]]
    count: int
    info: PassInfo
    empty: bool

    def interleave(self, shares: Sequence[Sequence[_Value]]) -> list[_Value]:
        """Put what the ranks have of their layers into the order of all layers.

        Args:
            shares: For each rank, one entry for each of its layers.

        Example:
            >>> gathered = GatheredLayers([], 5, PassInfo(0, "", ""), empty=True)
            >>> gathered.interleave([["a", "c", "e"], ["b", "d"]])
            ['a', 'b', 'c', 'd', 'e']
        """
        ranks = len(shares)
        return [shares[index % ranks][index // ranks] for index in range(self.count)]


def gather(
    seen: Sequence[Snapshot] | Exception,
    about: tuple[int, str],
    group: RankGroup,
    *,
    rows: int,
    queries: int,
    copies: bool = False,
) -> GatheredLayers:
    """Bring the parts of all ranks together; a collective.

    First the ranks agree whether each has a snapshot, for the same reading, and of which layers.
    What the ranks kept of attention is reduced so that together it is what one rank would keep.

    Args:
        seen: Snapshot of each pass that this rank has made, at least one, or why there is none.
        about: Step and source of the reading.
        group: The ranks.
        rows: Number of rows of hidden states for all ranks together.
        queries: Number of attention rows in a layer for all ranks together.
        copies: Whether all ranks were given the same inputs (a probe). The union would then hold
            every row once for each of them, so only the rows of the first are taken.

    Raises:
        RankFailedError: A rank has no snapshot, or has other layers; raised on every rank alike. A
            single rank raises its own exception.
        RanksLostError: A rank does not answer.
    """
    snapshot: Snapshot | Exception
    try:
        snapshot = seen if isinstance(seen, Exception) else _merge_passes(seen, rows, queries)
    except Exception as error:  # the other ranks wait for this one's report
        snapshot = error
    if group.members == 1:
        if isinstance(snapshot, Exception):
            raise snapshot
        parts: list[tuple[Layer, ...]] = [(layer,) for layer in snapshot.layers]
        return GatheredLayers(parts, len(parts), snapshot.info, snapshot.is_empty)
    met = group.meet(about[0], (about, _report(snapshot)))
    mesh = group.mesh if group.connected else Mesh()
    reports = _checked(met, mesh)
    assert isinstance(snapshot, Snapshot)
    tokens = _Tokens(reports, mesh, copies=copies)
    table = _Table(reports, tokens)
    received: list[_Parcel] = []
    for rank, given in enumerate(group.all_to_all(_parcels(snapshot, table, group, rows, queries))):
        if isinstance(given, str):
            raise RankFailedError(f"rank {rank}: {given}")
        received.append(given)
    if not copies:
        group.share_rows_among(len(tokens.giving))
    first = next((report for report in reports if not report.empty), reports[0]).info
    return GatheredLayers(
        parts=_in_order(received, table, group),
        count=len(table.keys),
        info=PassInfo(
            sum(map(table.count_rows, tokens.giving)), first.mode, first.dtype,
            _notes(reports, tokens), mean_loss(tokens.infos()),
        ),
        empty=all(report.empty for report in reports),
    )  # fmt: skip


# -- who gives what --------------------------------------------------------------------------------


class _Tokens:
    """Which ranks have the same tokens, by the mesh, and which tokens are measured.

    Args:
        reports: What each rank has reported.
        mesh: The places of the ranks.
        copies: Whether all tokens are the same.

    Attributes:
        ranks: For each data rank, its ranks.
        giving: The data ranks whose rows are measured: of those with the same tokens the first.
    """

    def __init__(self, reports: Sequence[_Report], mesh: Mesh, *, copies: bool) -> None:
        self._reports = reports
        self.mesh = mesh
        self.copies = copies
        self.ranks: list[list[int]] = [[] for _ in range(mesh.data_size)]
        for rank, data in enumerate(mesh.data_ranks):
            self.ranks[data].append(rank)
        found: dict[str, int] = {}
        for data in range(mesh.data_size):
            found.setdefault(self.batch(data) or f"tokens {data}", data)
        self.giving = [0] if copies else list(found.values())

    def first(self, data: int) -> int:
        """Return the first rank with some tokens that runs the first stage."""
        ranks = self.ranks[data]
        return next((rank for rank in ranks if 0 in self.mesh.places[rank].stages), ranks[0])

    def batch(self, data: int) -> str:
        """Return what tells some tokens from others; "" where nothing was seen."""
        return self._reports[self.first(data)].info.batch

    def infos(self) -> list[PassInfo]:
        """List the facts about one pass over each of the tokens that are measured."""
        return [self._reports[self.first(data)].info for data in self.giving]


class _Table:
    """Send plan: which rank contributes which parts of each layer; every rank makes the same one.

    If several ranks hold the same part, they take turns.

    Args:
        reports: What each rank has reported.
        tokens: Which ranks have the same tokens.

    Attributes:
        keys: Stack and depth of all layers, in order.
        firsts: Number of the first layer of each stack.
    """

    def __init__(self, reports: Sequence[_Report], tokens: _Tokens) -> None:
        self._reports = reports
        self._tokens = tokens
        found = dict.fromkeys(key for report in reports for key in report.layers)
        stacks = list(dict.fromkeys(stack for stack, _ in found))
        self.keys: list[_Key] = sorted(found, key=lambda key: (stacks.index(key[0]), key[1]))
        self.firsts = [[stack for stack, _ in self.keys].index(stack) for stack in stacks]

    def gives(self, rank: int, number: int) -> frozenset[str]:
        """Return the sources of a layer that a rank gives.

        Args:
            rank: The rank.
            number: Number of the layer in `keys`.
        """
        data = self._tokens.mesh.data_ranks[rank]
        if data not in self._tokens.giving:
            return frozenset()
        given = (each for each in (_OF_ROWS, _OF_HEADS) if rank in self._givers(data, number, each))
        sources = frozenset().union(*given)
        return sources | _WITH_ROWS if sources & _OF_ROWS else sources

    def gives_tokens(self, rank: int, first: int) -> bool:
        """Whether a rank gives ids and places of the tokens for layers of later stages."""
        of, _ = self.keys[first]
        needed = any(self.is_later((stack, depth)) for stack, depth in self.keys if stack == of)
        return needed and self.gives(rank, first) >= _OF_ROWS

    def shapes(self, number: int) -> list[Shape | None]:
        """Return the shapes of what was kept of a layer's attention, of each of the tokens."""
        key = self.keys[number]
        found = []
        for data in self._tokens.giving:
            owned = (self._reports[rank].layers.get(key) for rank in self._tokens.ranks[data])
            known = (one.attention for one in owned if one is not None and one.attention)
            found.append(next(known, None))
        return found

    def place_of(self, rank: int) -> int:
        """Return the place of a rank's tokens among those that are measured."""
        return self._tokens.giving.index(self._tokens.mesh.data_ranks[rank])

    def is_later(self, key: _Key) -> bool:
        """Whether a layer is of a stage that does not know the tokens of its rows."""
        owned = (report.layers[key] for report in self._reports if key in report.layers)
        return any(one.tokens_elsewhere for one in owned)

    def count_rows(self, data: int) -> int:
        """Count the rows of some tokens, at the first layer that has any."""
        for number, key in enumerate(self.keys):
            givers = self._givers(data, number, _OF_ROWS)
            rows = sum(self._reports[rank].layers[key].rows for rank in givers)
            if rows:
                return rows
        return 0

    def _givers(self, data: int, number: int, sources: frozenset[str]) -> list[int]:
        """List the ranks that give sources of a layer: one for each part that differs."""
        key = self.keys[number]
        parts: dict[Any, list[int]] = {}
        for rank in self._tokens.ranks[data]:
            owned = self._reports[rank].layers.get(key)
            if owned is not None:
                part = owned.start if sources == _OF_ROWS else owned.heads
                parts.setdefault(part, []).append(rank)
        lacking = {
            rank
            for ranks in parts.values()
            for rank in ranks
            if sources <= self._reports[rank].layers[key].lacking.keys()
        }
        alike = [[r for r in ranks if r not in lacking] or ranks for ranks in parts.values()]
        return [ranks[number % len(ranks)] for ranks in alike]


def _parcels(
    snapshot: Snapshot, table: _Table, group: RankGroup, rows: int, queries: int
) -> Sequence[_Parcel | str]:
    """For each rank what this rank gives of its layers, or why there is nothing.

    Numbers are those of the layers in the table, or -1 for the tokens of later stages.
    """
    parcels: list[_Parcel] = [[] for _ in range(group.members)]
    own = {(layer.stack, layer.index): layer for layer in snapshot.layers}
    try:
        for number, key in enumerate(table.keys):
            sources = table.gives(group.place, number)
            if not sources:
                continue
            place = table.place_of(group.place)
            layer = take_share(_only(own[key], sources), table.shapes(number), place, rows, queries)
            parcels[number % group.members].append((number, _of_tokens(layer, place)))
        for number in table.firsts:
            if table.gives_tokens(group.place, number):
                place = table.place_of(group.place)
                tokens = _of_tokens(_tokens_alone(own[table.keys[number]]), place)
                for member in range(group.members):
                    parcels[member].append((-1, tokens))
    except Exception as error:  # the others wait for this rank's rows
        return [f"{type(error).__name__}: {error}"] * group.members
    return parcels


def _in_order(
    received: Sequence[_Parcel], table: _Table, group: RankGroup
) -> list[tuple[Layer, ...]]:
    """For each layer that this rank measures, what it was given of it, by tokens and by rank."""
    given = [part for parcel in received for part in parcel]
    found = []
    for number in range(group.place, len(table.keys), group.members):
        key = table.keys[number]
        parts = [layer for of, layer in given if of == number]
        if table.is_later(key):
            parts += [layer for of, layer in given if of < 0 and layer.stack == key[0]]
        found.append(tuple(sorted(parts, key=lambda layer: layer.part.tokens or 0)))
    return found


def _only(layer: Layer, sources: frozenset[str]) -> Layer:
    """Take the views of some sources of a layer."""
    kept = {view: value for view, value in layer.captured.items() if source_of(view) in sources}
    return replace(layer, captured=kept)


def _tokens_alone(layer: Layer) -> Layer:
    """Take ids and places of the tokens of a layer."""
    wanted = OF_THE_BATCH | {f"last_{view}" for view in OF_THE_BATCH}
    kept = {view: value for view, value in layer.captured.items() if view in wanted}
    return replace(layer, captured=kept)


def _of_tokens(layer: Layer, number: int) -> Layer:
    """Say of which tokens the rows of a layer are."""
    return replace(layer, part=replace(layer.part, tokens=number))


# -- several passes --------------------------------------------------------------------------------


def _merge_passes(passes: Sequence[Snapshot], rows: int, queries: int) -> Snapshot:
    """Make one snapshot of those of several passes, as one of those of several ranks is made."""
    first = passes[0]
    if len(passes) == 1:
        return first
    names = [[(layer.stack, layer.index, layer.name) for layer in one.layers] for one in passes]
    if any(other != names[0] for other in names):
        counts = ", ".join(str(len(one)) for one in names)
        raise ValueError(
            f"the batches of a reading have different layers ({counts} of them): expected batches "
            "on which the model runs the same blocks"
        )
    layers = []
    for parts in zip(*(one.layers for one in passes), strict=True):
        shapes = [attention_shape(layer) for layer in parts]
        shares = [take_share(one, shapes, n, rows, queries) for n, one in enumerate(parts)]
        layers.append(merge_layers(shares))
    found: dict[tuple[str, str], dict[int, Note]] = {}
    for number, one in enumerate(passes):
        for note in one.info.notes:
            found.setdefault((note.stack, note.kind), {})[number] = note
    notes = [_of_several(alike, len(passes), "batch") for alike in found.values()]
    infos = [one.info for one in passes]
    tokens = sum(info.tokens for info in infos)
    loss = mean_loss(infos)
    batch = " and ".join(info.batch for info in infos) if all(i.batch for i in infos) else ""
    return Snapshot(layers, PassInfo(tokens, first.info.mode, first.info.dtype, notes, loss, batch))


# -- what the ranks agree on -----------------------------------------------------------------------


def _report(snapshot: Snapshot | Exception) -> _Report | str:
    """Report of a snapshot, or why there is none."""
    if isinstance(snapshot, Exception):
        return f"{type(snapshot).__name__}: {snapshot}"
    layers = {(layer.stack, layer.index): _owned(layer) for layer in snapshot.layers}
    return _Report(layers, snapshot.info, snapshot.is_empty)


def _owned(layer: Layer) -> _Owned:
    hidden = layer.captured.get("hidden")
    part: Part = layer.part
    return _Owned(
        name=layer.name,
        attention=attention_shape(layer),
        lacking=_lacking(layer),
        rows=0 if hidden is None else len(hidden),
        start=part.start,
        heads=tuple(part.heads.items()),
        tokens_elsewhere=part.tokens_elsewhere,
    )


def _lacking(layer: Layer) -> dict[str, str]:
    """By source, why nothing of it was seen."""
    present = {source_of(view) for view in layer.captured}
    return {
        source_of(view): why
        for view, why in layer.missing.items()
        if source_of(view) not in present
    }


def _checked(met: Sequence[tuple[tuple[int, str], _Report | str]], mesh: Mesh) -> list[_Report]:
    """Take the reports of all ranks on the same reading, or raise the same error on every rank."""
    for rank, ((step, source), _) in enumerate(met):
        if source != met[0][0][1]:
            raise RankFailedError(
                f"rank {rank} reads step {step} {source} where rank 0 reads it {met[0][0][1]}: "
                "every rank builds the monitor with the same options"
            )
    reports = [report for _, report in met if isinstance(report, _Report)]
    failures = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(met) if isinstance(why, str)]
    if failures:
        more = f" (and {len(failures) - 1} other ranks)" if len(failures) > 1 else ""
        raise RankFailedError(failures[0] + more)
    known: dict[tuple[int, ...], int] = {}
    for rank, (report, place) in enumerate(zip(reports, mesh.places, strict=True)):
        other = known.setdefault(place.stages, rank)
        if _names(report) != _names(reports[other]):
            raise RankFailedError(
                f"rank {rank} has {len(report.layers)} layers, {_range(report)}, where rank "
                f"{other} has {len(reports[other].layers)}, {_range(reports[other])}: ranks that "
                "have the same blocks are expected to run the same ones; use gather=False"
            )
    return reports


def _names(report: _Report) -> list[tuple[_Key, str]]:
    return [(key, owned.name) for key, owned in report.layers.items()]


def _range(report: _Report) -> str:
    names = [owned.name for owned in report.layers.values()]
    return f"from '{names[0]}' to '{names[-1]}'"


# -- notes -----------------------------------------------------------------------------------------

_PROBES_DIFFER = Note(
    "probes differ", "the ranks probe with different inputs: rank 0's were measured"
)


def _notes(reports: Sequence[_Report], tokens: _Tokens) -> list[Note]:
    """The notes of the ranks that give, one of each kind, and how they differ from one another."""
    found: dict[tuple[str, str], dict[int, Note]] = {}
    for data in tokens.giving:
        for rank, note in _notes_of(tokens.ranks[data], reports, tokens.mesh):
            found.setdefault((note.stack, note.kind), {})[rank] = note
    notes = [_of_several(alike, len(tokens.giving), "rank") for alike in found.values()]
    if len({report.info.mode for report in reports if not report.empty}) > 1:
        notes.append(Note("modes", "some ranks were in train mode and some in eval mode"))
    if tokens.copies:
        if len(set(map(tokens.batch, range(len(tokens.ranks))))) > 1:
            notes.append(_PROBES_DIFFER)
    elif len(tokens.giving) < len(tokens.ranks):
        notes.append(_same_tokens(tokens))
    return notes + _other_tokens(reports, tokens)


def _notes_of(
    ranks: Sequence[int], reports: Sequence[_Report], mesh: Mesh
) -> Iterator[tuple[int, Note]]:
    """Iterate over the notes of ranks with the same tokens, each with the rank that it is of.

    What all of them say is said once; layers of several stages are put together.
    """
    found: dict[tuple[str, str], dict[int, Note]] = {}
    for rank in ranks:
        report = reports[rank]
        own = [*report.info.notes]
        if report.empty and report.layers and not all(other.empty for other in reports):
            lacking = [one.lacking for one in report.layers.values()]
            why = next((why for each in lacking for why in each.values()), "")
            own.append(Note("nothing of some ranks", f"nothing was seen: {why}"))
        else:
            own += _lacking_here(report, reports)
        for note in own:
            found.setdefault((note.stack, note.kind), {})[rank] = note
    for alike in found.values():
        rank, note = next(iter(alike.items()))
        layers = sorted({layer for other in alike.values() for layer in other.layers})
        joined = msgspec.structs.replace(note, layers=tuple(layers))
        stages = {mesh.places[other].stages for other in ranks}
        if len(alike) < len(ranks) and len(stages) == 1:
            joined = msgspec.structs.replace(joined, text=f"rank {rank}: {joined.text}")
        yield ranks[0], joined


def _lacking_here(report: _Report, reports: Sequence[_Report]) -> list[Note]:
    """Make a note of each source that a rank has not seen at a layer where another one has."""
    return [
        Note(
            f"no {source} at {owned.name} of some ranks",
            "{name}: no {source} was seen: {why}",
            numbers={"name": owned.name, "source": source, "why": why},
        )
        for key, owned in report.layers.items()
        for source, why in owned.lacking.items()
        if any(source not in other.layers[key].lacking for other in reports if key in other.layers)
    ]


def _same_tokens(tokens: _Tokens) -> Note:
    """Make a note of ranks that have the same tokens as others, though the mesh does not say so."""
    data = next(data for data in range(len(tokens.ranks)) if data not in tokens.giving)
    same = next(d for d in tokens.giving if tokens.batch(d) == tokens.batch(data))
    others = len(tokens.ranks) - len(tokens.giving) - 1
    more = f" (and {others} other ranks alike)" if others else ""
    text = (
        f"rank {tokens.first(data)} had the same tokens as rank {tokens.first(same)}{more}: they "
        "are counted once, and of what ranks share out among them (heads, in a tensor-parallel "
        f"model without DTensors) the part of rank {tokens.first(same)} was measured. Where ranks "
        "should have had tokens of their own, look at the data loader"
    )
    return Note("ranks with the same tokens", text)


def _other_tokens(reports: Sequence[_Report], tokens: _Tokens) -> list[Note]:
    """Make a note of ranks that share one model and were given different tokens."""
    for ranks in tokens.ranks:
        known = {
            rank: ids
            for rank in ranks
            if (ids := reports[rank].info.batch.partition(" ")[0])
            and 0 in tokens.mesh.places[rank].stages
        }
        if len(set(known.values())) > 1:
            first = min(known)
            other = next(rank for rank, ids in known.items() if ids != known[first])
            text = (
                f"rank {other} was given other tokens than rank {first}, with which it shares one "
                "model: their rows and heads do not belong together. Look at the data loader: "
                "ranks of one tensor-parallel group need the same batches"
            )
            return [Note("other tokens", text)]
    return []


def _of_several(notes: Mapping[int, Note], size: int, word: str) -> Note:
    """Make one note of those of ranks or batches on one matter: that of the first, and how many."""
    number, note = next(iter(notes.items()))
    if len(notes) == size and all(other == note for other in notes.values()):
        return note
    words = f"{word}es" if word.endswith("ch") else f"{word}s"
    others = f" (and {len(notes) - 1} other {words} alike)" if len(notes) > 1 else ""
    return msgspec.structs.replace(note, text=f"{word} {number}: {note.text}{others}")
