"""Gather the parts of all ranks: each layer becomes one union on the rank that measures it.

A rank holds some rows, heads and depths. Ranks with the same tokens join their parts by index; rows
of other tokens follow in rank order. The layers are divided among the ranks, and each rank receives
the other ranks' parts of its layers. A reading thus covers all tokens and the whole model, never an
average of readings, and takes less time with more ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from geomon.capture import (
    OF_THE_BATCH,
    Layer,
    PassInfo,
    Snapshot,
    source_of,
    sources_shared_by,
)
from geomon.distributed.group import RankFailedError, RankGroup
from geomon.distributed.joining import Shape, attention_shape
from geomon.distributed.merge import mean_loss, merge_layers, subsample_attention
from geomon.distributed.mesh import Mesh
from geomon.failures import failures
from geomon.note import Note
from geomon.note_kinds import NoteKind

_Value = TypeVar("_Value")

_Key = tuple[str, int]  # stack and depth of a layer
_Parcel = list[tuple[int, Layer]]  # (number of the layer, part of it)

_OF_ROWS, _OF_HEADS = sources_shared_by("rows"), sources_shared_by("heads")
_WITH_ROWS = sources_shared_by("whole")


class _Owned(NamedTuple):
    """A rank's part of one layer, as plain values.

    Attributes:
        name: Name of the layer.
        attention: Shape of the captured attention, or None.
        lacking: Sources that were not seen at all, with the reasons.
        rows: Number of rows of hidden states.
        start: First index of the rank's hidden states; () if it has all.
        heads: By view, index of the first feature of each head, if known.
        tokens_elsewhere: Whether the tokens of its rows are known only to the first stage.
    """

    name: str
    attention: Shape | None
    lacking: Mapping[str, str]
    rows: int
    start: tuple[int, ...]
    heads: tuple[tuple[str, tuple[int, ...]], ...]
    tokens_elsewhere: bool


class _Report(NamedTuple):
    """A rank's report on its snapshot before any row is sent, as plain values.

    Attributes:
        layers: The rank's part of each of its layers, in order.
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
        parts: For each layer of this rank, in order of depth, the parts of all ranks;
            `merge_layers` joins them.
        count: Number of layers on all ranks.
        info: Facts about the forward passes of all ranks.
        empty: Whether no block was seen on any rank.
    """

    parts: list[tuple[Layer, ...]]
    count: int
    info: PassInfo
    empty: bool

    def interleave(self, shares: Sequence[Sequence[_Value]]) -> list[_Value]:
        """Interleave lists with one entry for each of a rank's layers into the order of all layers.

        Example:
            >>> gathered = GatheredLayers([], 5, PassInfo(0, "", ""), empty=True)
            >>> gathered.interleave([["a", "c", "e"], ["b", "d"]])
            ['a', 'b', 'c', 'd', 'e']
        """
        ranks = len(shares)
        return [shares[index % ranks][index // ranks] for index in range(self.count)]


def gather(
    seen: Sequence[Snapshot] | Exception,
    reading_key: tuple[int, str],
    group: RankGroup,
    *,
    rows: int,
    queries: int,
    same_inputs: bool = False,
) -> GatheredLayers:
    """Bring the parts of all ranks together; a collective.

    First the ranks agree that each has a snapshot, for the same reading, and which layers it holds.
    Then attention is thinned so that all ranks together keep as much as one rank would.

    Args:
        seen: Snapshots of the passes that this rank made (at least one), or the error that
            prevented them.
        reading_key: Step and source of the reading.
        group: The ranks.
        rows: Number of rows of hidden states for all ranks together.
        queries: Number of attention rows per layer for all ranks together.
        same_inputs: Whether all ranks received the same inputs (a probe). The union would then
            repeat every row, so only the first rank's rows are used. Defaults to False.

    Returns:
        The layers that this rank measures.

    Raises:
        RankFailedError: If a rank lacks a snapshot or has different layers; raised on every rank. A
            single rank raises its own exception instead.
        RanksLostError: If a rank does not answer.
    """
    snapshot: Snapshot | Exception
    try:
        snapshot = seen if isinstance(seen, Exception) else _merge_passes(seen, rows, queries)
    except failures() as error:  # the other ranks wait for this rank's report
        snapshot = error
    if group.members == 1:
        if isinstance(snapshot, Exception):
            raise snapshot
        parts: list[tuple[Layer, ...]] = [(layer,) for layer in snapshot.layers]
        return GatheredLayers(parts, len(parts), snapshot.info, snapshot.is_empty)
    met = group.meet(reading_key[0], (reading_key, _report(snapshot)))
    mesh = group.mesh if group.connected else Mesh()
    reports = _checked(met, mesh)
    assert isinstance(snapshot, Snapshot)
    tokens = _Tokens(reports, mesh, same_inputs=same_inputs)
    table = _Table(reports, tokens)
    received: list[_Parcel] = []
    for rank, given in enumerate(group.all_to_all(_parcels(snapshot, table, group, rows, queries))):
        if isinstance(given, str):
            raise RankFailedError(f"rank {rank}: {given}")
        received.append(given)
    if not same_inputs:
        group.share_rows_among(len(tokens.giving))
    first = next((report for report in reports if not report.empty), reports[0]).info
    return GatheredLayers(
        parts=_in_order(received, table, group),
        count=len(table.keys),
        info=PassInfo(
            sum(map(table.count_rows, tokens.giving)), first.mode, first.dtype,
            _notes(reports, tokens), mean_loss(tokens.infos()),
            token_ids=_join_if_known("-", [info.token_ids for info in tokens.infos()]),
        ),
        empty=all(report.empty for report in reports),
    )  # fmt: skip


# -- who gives what --------------------------------------------------------------------------------


class _Tokens:
    """Groups of ranks with the same tokens, judged by the mesh, and the tokens to measure.

    Args:
        reports: Report of each rank.
        mesh: The places of the ranks.
        same_inputs: Whether all tokens are the same.

    Attributes:
        ranks: For each data rank, its ranks.
        giving: Data ranks whose rows are measured: the first among those with equal tokens.
    """

    def __init__(self, reports: Sequence[_Report], mesh: Mesh, *, same_inputs: bool) -> None:
        self._reports = reports
        self.mesh = mesh
        self.same_inputs = same_inputs
        self.ranks: list[list[int]] = [[] for _ in range(mesh.data_size)]
        for rank, data in enumerate(mesh.data_ranks):
            self.ranks[data].append(rank)
        found: dict[str, int] = {}
        for data in range(mesh.data_size):
            found.setdefault(self.batch(data) or f"tokens {data}", data)
        self.giving = [0] if same_inputs else list(found.values())

    def first(self, data: int) -> int:
        """Return the first rank with these tokens that runs the first stage."""
        ranks = self.ranks[data]
        return next((rank for rank in ranks if 0 in self.mesh.places[rank].stages), ranks[0])

    def batch(self, data: int) -> str:
        """Return the checksum of these tokens, or "" if nothing was seen."""
        return self._reports[self.first(data)].info.batch

    def infos(self) -> list[PassInfo]:
        """List the facts about one pass for each of the measured tokens."""
        return [self._reports[self.first(data)].info for data in self.giving]


class _Table:
    """Send plan: which rank contributes which sources of each layer; every rank makes the same one.

    Ranks that hold the same part take turns.

    Args:
        reports: Report of each rank.
        tokens: Groups of ranks with the same tokens.

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
        """Return the sources of a layer that a rank contributes."""
        data = self._tokens.mesh.data_ranks[rank]
        if data not in self._tokens.giving:
            return frozenset()
        given = (each for each in (_OF_ROWS, _OF_HEADS) if rank in self._givers(data, number, each))
        sources = frozenset().union(*given)
        return sources | _WITH_ROWS if sources & _OF_ROWS else sources

    def gives_tokens(self, rank: int, first: int) -> bool:
        """Whether a rank sends token ids and positions for layers of later stages."""
        of, _ = self.keys[first]
        needed = any(self.is_later((stack, depth)) for stack, depth in self.keys if stack == of)
        return needed and "hidden" in self.gives(rank, first)

    def shapes(self, number: int) -> list[Shape | None]:
        """Return the shape of a layer's captured attention for each of the measured tokens."""
        key = self.keys[number]
        found = []
        for data in self._tokens.giving:
            owned = (self._reports[rank].layers.get(key) for rank in self._tokens.ranks[data])
            known = (one.attention for one in owned if one is not None and one.attention)
            found.append(next(known, None))
        return found

    def place_of(self, rank: int) -> int:
        """Return the index of a rank's tokens among those that are measured."""
        return self._tokens.giving.index(self._tokens.mesh.data_ranks[rank])

    def is_later(self, key: _Key) -> bool:
        """Whether a layer belongs to a stage that does not know the tokens of its rows."""
        owned = (report.layers[key] for report in self._reports if key in report.layers)
        return any(one.tokens_elsewhere for one in owned)

    def count_rows(self, data: int) -> int:
        """Count the rows of these tokens at the first layer that has any."""
        for number, key in enumerate(self.keys):
            givers = self._givers(data, number, _OF_ROWS)
            rows = sum(self._reports[rank].layers[key].rows for rank in givers)
            if rows:
                return rows
        return 0

    def _givers(self, data: int, number: int, sources: frozenset[str]) -> list[int]:
        """List the ranks that contribute sources of a layer: one for each distinct part."""
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
    """Return the layers to send to each rank, or the reason why there are none.

    Layers are numbered as in the table; -1 marks tokens for later stages.
    """
    parcels: list[_Parcel] = [[] for _ in range(group.members)]
    own = {(layer.stack, layer.index): layer for layer in snapshot.layers}
    try:
        for number, key in enumerate(table.keys):
            sources = table.gives(group.place, number)
            if not sources:
                continue
            place = table.place_of(group.place)
            layer = subsample_attention(
                _only(own[key], sources), table.shapes(number), place, rows, queries
            )
            parcels[number % group.members].append((number, _of_tokens(layer, place)))
        for number in table.firsts:
            if table.gives_tokens(group.place, number):
                place = table.place_of(group.place)
                tokens = _of_tokens(_tokens_alone(own[table.keys[number]]), place)
                for member in range(group.members):
                    parcels[member].append((-1, tokens))
    except failures() as error:  # the others wait for this rank's rows
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
    """Keep the views of some sources of a layer."""
    kept = {view: value for view, value in layer.captured.items() if source_of(view) in sources}
    return replace(layer, captured=kept)


def _tokens_alone(layer: Layer) -> Layer:
    """Keep the token ids and positions of a layer."""
    kept = {view: value for view, value in layer.captured.items() if view in OF_THE_BATCH}
    return replace(layer, captured=kept)


def _of_tokens(layer: Layer, number: int) -> Layer:
    """Record which tokens the rows of a layer belong to."""
    return replace(layer, part=replace(layer.part, tokens=number))


# -- several passes --------------------------------------------------------------------------------


def _merge_passes(passes: Sequence[Snapshot], rows: int, queries: int) -> Snapshot:
    """Merge the snapshots of several passes into one, as snapshots of ranks are merged."""
    if len(passes) == 1:
        return passes[0]
    _check_layers(passes)
    layers = []
    for parts in zip(*(one.layers for one in passes), strict=True):
        shapes = [attention_shape(layer) for layer in parts]
        shares = [subsample_attention(one, shapes, n, rows, queries) for n, one in enumerate(parts)]
        layers.append(merge_layers(shares))
    return Snapshot(layers, _merge_infos([one.info for one in passes]))


def _check_layers(passes: Sequence[Snapshot]) -> None:
    """Raise an error if passes have different layers."""
    names = [[(layer.stack, layer.index, layer.name) for layer in one.layers] for one in passes]
    if any(other != names[0] for other in names):
        counts = ", ".join(str(len(one)) for one in names)
        raise ValueError(
            f"the batches of a reading have different layers ({counts} of them): expected batches "
            "on which the model runs the same blocks"
        )


def _merge_infos(infos: Sequence[PassInfo]) -> PassInfo:
    """Merge the facts about several passes, with one note of each kind."""
    notes = [(number, note) for number, info in enumerate(infos) for note in info.notes]
    return PassInfo(
        tokens=sum(info.tokens for info in infos),
        mode=infos[0].mode,
        dtype=infos[0].dtype,
        notes=[_of_several(alike, len(infos), "batch") for alike in _by_key(notes)],
        loss=mean_loss(infos),
        batch=_join_if_known(" and ", [info.batch for info in infos]),
        token_ids=_join_if_known("-", [info.token_ids for info in infos]),
    )


def _join_if_known(between: str, checksums: Sequence[str]) -> str:
    """Join the checksums of several passes; "" if some are unknown."""
    return between.join(checksums) if all(checksums) else ""


# -- what the ranks agree on -----------------------------------------------------------------------


def _report(snapshot: Snapshot | Exception) -> _Report | str:
    """Make the report on a snapshot, or say why there is none."""
    if isinstance(snapshot, Exception):
        return f"{type(snapshot).__name__}: {snapshot}"
    layers = {(layer.stack, layer.index): _owned(layer) for layer in snapshot.layers}
    return _Report(layers, snapshot.info, snapshot.is_empty)


def _owned(layer: Layer) -> _Owned:
    hidden = layer.captured.get("hidden")
    part = layer.part
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
    """Return the reason for each source that was not seen at all."""
    present = {source_of(view) for view in layer.captured}
    return {
        source_of(view): why
        for view, why in layer.missing.items()
        if source_of(view) not in present
    }


def _checked(met: Sequence[tuple[tuple[int, str], _Report | str]], mesh: Mesh) -> list[_Report]:
    """Return the reports of all ranks on one reading, or raise the same error on every rank."""
    for rank, ((step, source), _) in enumerate(met):
        if source != met[0][0][1]:
            raise RankFailedError(
                f"rank {rank} reads step {step} {source} but rank 0 reads it {met[0][0][1]}: "
                "build the monitor with the same options on every rank"
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
                f"rank {rank} has {len(report.layers)} layers, {_range(report)}, but rank "
                f"{other} has {len(reports[other].layers)}, {_range(reports[other])}: ranks that "
                "have the same blocks must run the same ones, or use gather=False"
            )
    return reports


def _names(report: _Report) -> list[tuple[_Key, str]]:
    return [(key, owned.name) for key, owned in report.layers.items()]


def _range(report: _Report) -> str:
    names = [owned.name for owned in report.layers.values()]
    return f"from '{names[0]}' to '{names[-1]}'"


# -- notes -----------------------------------------------------------------------------------------

_PROBES_DIFFER = Note(
    NoteKind.PROBES_DIFFER, "the ranks probe with different inputs: rank 0's were measured"
)


def _notes(reports: Sequence[_Report], tokens: _Tokens) -> list[Note]:
    """Collect the notes of the measured ranks, one of each kind, and how the ranks differ."""
    each = (_notes_of(tokens.ranks[data], reports, tokens.mesh) for data in tokens.giving)
    found = _by_key(note for notes in each for note in notes)
    notes = [_of_several(alike, len(tokens.giving), "rank") for alike in found]
    if len({report.info.mode for report in reports if not report.empty}) > 1:
        notes.append(Note(NoteKind.MODES, "some ranks were in train mode and some in eval mode"))
    if tokens.same_inputs:
        if len(set(map(tokens.batch, range(len(tokens.ranks))))) > 1:
            notes.append(_PROBES_DIFFER)
    elif len(tokens.giving) < len(tokens.ranks):
        notes.append(_same_tokens(tokens))
    return notes + _other_tokens(reports, tokens)


def _by_key(notes: Iterable[tuple[int, Note]]) -> list[dict[int, Note]]:
    """Group the notes of ranks or batches that say the same, each with its rank or batch."""
    found: dict[str, dict[int, Note]] = {}
    for number, note in notes:
        found.setdefault(note.key, {})[number] = note
    return [*found.values()]


def _notes_of(
    ranks: Sequence[int], reports: Sequence[_Report], mesh: Mesh
) -> Iterator[tuple[int, Note]]:
    """Yield the notes of ranks with the same tokens, each with a rank that has it.

    A note that all of them have is yielded once, with the layers of all stages.
    """
    is_split = len({mesh.places[rank].stages for rank in ranks}) > 1
    for alike in _by_key((rank, note) for rank in ranks for note in _own_notes(rank, reports)):
        rank, note = next(iter(alike.items()))
        layers = sorted({layer for other in alike.values() for layer in other.layers})
        joined = msgspec.structs.replace(note, layers=tuple(layers))
        if len(alike) < len(ranks) and not is_split:
            joined = msgspec.structs.replace(joined, text=f"rank {rank}: {joined.text}")
        yield ranks[0], joined


def _own_notes(rank: int, reports: Sequence[_Report]) -> list[Note]:
    """List the notes of one rank, and the notes on what it did not see although others did."""
    report = reports[rank]
    if report.empty and report.layers and not all(other.empty for other in reports):
        lacking = (why for one in report.layers.values() for why in one.lacking.values())
        unseen = Note(NoteKind.UNSEEN_ON_RANKS, f"nothing was seen: {next(lacking, '')}")
        return [*report.info.notes, unseen]
    return [*report.info.notes, *_lacking_here(report, reports)]


def _lacking_here(report: _Report, reports: Sequence[_Report]) -> list[Note]:
    """Make a note for each source that a rank has not seen at a layer although another has."""
    return [
        Note(
            NoteKind.UNSEEN_ON_RANKS,
            "{name}: no {source} was seen: {why}",
            numbers={"name": owned.name, "source": source, "why": why},
            about=f"{source} at {owned.name}",
        )
        for key, owned in report.layers.items()
        for source, why in owned.lacking.items()
        if any(source not in other.layers[key].lacking for other in reports if key in other.layers)
    ]


def _same_tokens(tokens: _Tokens) -> Note:
    """Make the note on ranks with equal tokens although the mesh says they differ."""
    data = next(data for data in range(len(tokens.ranks)) if data not in tokens.giving)
    same = next(d for d in tokens.giving if tokens.batch(d) == tokens.batch(data))
    others = len(tokens.ranks) - len(tokens.giving) - 1
    more = f" (and {others} other ranks alike)" if others else ""
    text = (
        f"rank {tokens.first(data)} had the same tokens as rank {tokens.first(same)}{more}: they "
        "are counted once, and if the ranks share heads (in a tensor-parallel model without "
        f"DTensors), only the heads of rank {tokens.first(same)} were measured. If each rank "
        "should have tokens of its own, look at the data loader"
    )
    return Note(NoteKind.SAME_TOKENS, text)


def _other_tokens(reports: Sequence[_Report], tokens: _Tokens) -> list[Note]:
    """Make the note on ranks that share one model but received different tokens."""
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
                f"rank {other} received other tokens than rank {first}, although they share one "
                "model: their rows and heads do not belong together. Look at the data loader: "
                "ranks of one tensor-parallel group need the same batches"
            )
            return [Note(NoteKind.OTHER_TOKENS, text)]
    return []


def _of_several(notes: Mapping[int, Note], size: int, word: str) -> Note:
    """Merge equal notes of ranks or batches into the first one, and say how many share it."""
    number, note = next(iter(notes.items()))
    if len(notes) == size and all(other == note for other in notes.values()):
        return note
    words = f"{word}es" if word.endswith("ch") else f"{word}s"
    others = f" (and {len(notes) - 1} other {words} alike)" if len(notes) > 1 else ""
    return msgspec.structs.replace(note, text=f"{word} {number}: {note.text}{others}")
