"""The rows of all ranks: of each layer one union, on the rank that measures it.

Every rank keeps its share of the rows; the layers are shared out; each layer's rows are sent to the
rank that measures it and stand there in rank order. So a reading is that of all tokens, never an
average of readings, and its time falls with the number of ranks.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from geomon.capture.snapshot import CAPTURED, Layer, PassInfo, Snapshot
from geomon.distributed.group import RankFailedError, RankGroup
from geomon.distributed.merge import (
    Shape,
    attention_shape,
    mean_loss,
    merge_layers,
    take_share,
)
from geomon.note import Note

_Value = TypeVar("_Value")
_NO_PASS = PassInfo(0, "", "")


@dataclass(frozen=True)
class _Report:
    """What a rank reports to the others before any row is sent; plain values.

    Attributes:
        about: Step and source of the reading.
        failure: Why there is no snapshot, or None.
        layers: Stack, depth and name of each layer.
        attention: For each layer, the shape of what was kept of its attention; None for nothing.
        lacking: For each layer, the sources of which nothing was seen, with the reasons.
        info: Facts about the rank's forward pass; None without a snapshot.
        fingerprint: Checksum of the first rows, to see whether two ranks had the same inputs.
        empty: Whether no block was seen.
    """

    about: tuple[int, str]
    failure: str | None
    layers: tuple[tuple[str, int, str], ...] = ()
    attention: tuple[Shape | None, ...] = ()
    lacking: tuple[Mapping[str, str], ...] = ()
    info: PassInfo = _NO_PASS
    fingerprint: int = 0
    empty: bool = False


@dataclass(frozen=True)
class GatheredLayers:
    """The layers that this rank measures, with the rows of all ranks.

    Attributes:
        parts: For each layer of this rank, in order of depth, the layer as each rank captured it;
            `merge_layers` makes one layer of them.
        count: Number of layers on all ranks.
        info: Facts about the forward passes of all ranks.
        empty: Whether no block was seen on any rank.
    """

    parts: list[tuple[Layer, ...]]
    count: int
    info: PassInfo
    empty: bool = False

    def interleave(self, shares: Sequence[Sequence[_Value]]) -> list[_Value]:
        """Put what the ranks have of their layers into the order of all layers.

        Args:
            shares: For each rank, one entry for each of its layers.

        Example:
            >>> gathered = GatheredLayers([], 5, PassInfo(0, "", ""))
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
    """Bring the rows of all ranks together; a collective.

    First the ranks agree whether each has a snapshot, of the same layers, for the same reading.
    What the ranks kept of attention is reduced so that together it is what one rank would keep.

    Args:
        seen: Snapshot of each pass that this rank has made, at least one, or why there is none.
        about: Step and source of the reading.
        group: The ranks.
        rows: Number of rows of hidden states for all ranks together.
        queries: Number of attention rows in a layer for all ranks together.
        copies: Whether all ranks were given the same inputs (a probe). The union would then hold
            every row once for each rank, so only the first rank's rows are taken.

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
    if group.members == 1 and isinstance(snapshot, Exception):
        raise snapshot
    reports = group.meet(about[0], _report(snapshot, about))
    _check_reports(reports)
    assert isinstance(snapshot, Snapshot)
    givers = [0] if copies else _givers(reports)
    giving = [reports[rank] for rank in givers]
    parcels = _parcels(snapshot, giving, givers, group, rows, queries)
    everything = group.all_to_all(parcels)
    received = [everything[rank] for rank in givers]
    for rank, parcel in zip(givers, received, strict=True):
        if isinstance(parcel, str):
            raise RankFailedError(f"rank {rank}: {parcel}")
    if not copies:
        group.share_rows_among(len(givers))
    first = next((report for report in giving if not report.empty), reports[0]).info
    infos = [report.info for report in giving]
    tokens = sum(info.tokens for info in infos)
    notes, loss = _notes(giving, givers), mean_loss(infos)
    if copies and len({report.fingerprint for report in reports}) > 1:
        notes.append(_PROBES_DIFFER)
    elif not copies and len(givers) < len(reports):
        notes.append(_same_tokens(reports, givers))
    return GatheredLayers(
        parts=list(zip(*received, strict=True)),
        count=len(snapshot.layers),
        info=PassInfo(tokens, first.mode, first.dtype, notes, loss),
        empty=all(report.empty for report in reports),
    )


def _givers(reports: Sequence[_Report]) -> list[int]:
    """List the ranks whose rows are measured: of ranks with the same tokens the first one."""
    found: dict[str, int] = {}
    for rank, report in enumerate(reports):
        found.setdefault(report.info.batch or f"rank {rank}", rank)
    return list(found.values())


def _same_tokens(reports: Sequence[_Report], givers: Sequence[int]) -> Note:
    """Make a note of ranks that have the same tokens as others."""
    rank = next(rank for rank in range(len(reports)) if rank not in givers)
    same = next(other for other in givers if reports[other].info.batch == reports[rank].info.batch)
    others = len(reports) - len(givers) - 1
    more = f" (and {others} other ranks alike)" if others else ""
    text = (
        f"rank {rank} had the same tokens as rank {same}{more}: they are counted once, and of what "
        f"ranks share out among them (heads, in a tensor-parallel model) the part of rank {same} "
        "was measured. Where ranks should have had tokens of their own, look at the data loader"
    )
    return Note("ranks with the same tokens", text)


_PROBES_DIFFER = Note(
    "probes differ", "the ranks probe with different inputs: rank 0's were measured"
)


def _merge_passes(passes: Sequence[Snapshot], rows: int, queries: int) -> Snapshot:
    """Make one snapshot of those of several passes, as one of those of several ranks is made.

    Raises:
        ValueError: The passes have other layers.
    """
    first = passes[0]
    if len(passes) == 1:
        return first
    names = [[(layer.stack, layer.index, layer.name) for layer in one.layers] for one in passes]
    if any(other != names[0] for other in names):
        counts = ", ".join(str(len(one)) for one in names)
        raise ValueError(
            f"the batches of the probe have different layers ({counts} of them): expected batches "
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


def _parcels(
    snapshot: Snapshot,
    reports: Sequence[_Report],
    givers: Sequence[int],
    group: RankGroup,
    rows: int,
    queries: int,
) -> list[list[Layer]] | list[str]:
    """For each rank its layers with this rank's rows, or why there are none."""
    parcels: list[list[Layer]] = [[] for _ in range(group.members)]
    if group.place not in givers:
        return parcels
    place = givers.index(group.place)
    try:
        for index, layer in enumerate(snapshot.layers):
            shapes = [report.attention[index] for report in reports]
            share = take_share(layer, shapes, place, rows, queries)
            parcels[index % group.members].append(share)
    except Exception as error:  # the others wait for this rank's rows
        return [f"{type(error).__name__}: {error}"] * group.members
    return parcels


# -- what the ranks agree on -----------------------------------------------------------------------


def _report(snapshot: Snapshot | Exception, about: tuple[int, str]) -> _Report:
    if isinstance(snapshot, Exception):
        return _Report(about, f"{type(snapshot).__name__}: {snapshot}")
    return _Report(
        about=about,
        failure=None,
        layers=tuple((layer.stack, layer.index, layer.name) for layer in snapshot.layers),
        attention=tuple(attention_shape(layer) for layer in snapshot.layers),
        lacking=tuple(_lacking(layer) for layer in snapshot.layers),
        info=snapshot.info,
        fingerprint=_fingerprint(snapshot.layers[0]),
        empty=snapshot.is_empty,
    )


def _lacking(layer: Layer) -> dict[str, str]:
    """By source, why nothing of it was seen."""
    present = {CAPTURED[view] for view in layer.captured}
    return {
        CAPTURED[view]: why for view, why in layer.missing.items() if CAPTURED[view] not in present
    }


def _fingerprint(layer: Layer) -> int:
    hidden = layer.captured.get("hidden")
    return 0 if hidden is None else zlib.crc32(hidden[:64].cpu().contiguous().numpy().tobytes())


def _check_reports(reports: Sequence[_Report]) -> None:
    """Raise the same error on every rank, or none on any."""
    first = reports[0]
    for rank, report in enumerate(reports):
        if report.about != first.about:
            raise RankFailedError(
                f"rank {rank} reads step {report.about[0]} {report.about[1]} where rank 0 reads it "
                f"{first.about[1]}: every rank builds the monitor with the same options"
            )
    failures = [f"rank {r}: {report.failure}" for r, report in enumerate(reports) if report.failure]
    if failures:
        more = f" (and {len(failures) - 1} other ranks)" if len(failures) > 1 else ""
        raise RankFailedError(failures[0] + more)
    for rank, report in enumerate(reports):
        if report.layers != first.layers:
            raise RankFailedError(
                f"rank {rank} has {len(report.layers)} layers, {_names(report)}, where rank 0 has "
                f"{len(first.layers)}, {_names(first)}: rows are gathered where every rank holds "
                "the whole depth; use gather=False"
            )


def _names(report: _Report) -> str:
    return f"from '{report.layers[0][2]}' to '{report.layers[-1][2]}'"


def _notes(reports: Sequence[_Report], givers: Sequence[int]) -> list[Note]:
    """The notes of the ranks that give, one of each kind, and how they differ from one another."""
    found: dict[tuple[str, str], dict[int, Note]] = {}
    for rank, report in zip(givers, reports, strict=True):
        own = [*report.info.notes]
        if report.empty and not all(other.empty for other in reports):
            why = next((why for lacking in report.lacking for why in lacking.values()), "")
            own.append(Note("nothing of some ranks", f"nothing was seen: {why}"))
        else:
            own += _lacking_here(report, reports)
        for note in own:
            found.setdefault((note.stack, note.kind), {})[rank] = note
    notes = [_of_several(alike, len(givers), "rank") for alike in found.values()]
    if len({report.info.mode for report in reports if not report.empty}) > 1:
        notes.append(Note("modes", "some ranks were in train mode and some in eval mode"))
    return notes


def _lacking_here(report: _Report, reports: Sequence[_Report]) -> list[Note]:
    """Make a note of each source that a rank has not seen at a layer where another one has."""
    return [
        Note(
            f"no {source} at {report.layers[index][2]} of some ranks",
            "{name}: no {source} was seen: {why}",
            numbers={"name": report.layers[index][2], "source": source, "why": why},
        )
        for index, lacking in enumerate(report.lacking)
        for source, why in lacking.items()
        if any(source not in other.lacking[index] for other in reports)
    ]


def _of_several(notes: Mapping[int, Note], size: int, word: str) -> Note:
    """Make one note of those of ranks or batches on one matter: that of the first, and how many."""
    number, note = next(iter(notes.items()))
    if len(notes) == size and all(other == note for other in notes.values()):
        return note
    words = f"{word}es" if word.endswith("ch") else f"{word}s"
    others = f" (and {len(notes) - 1} other {words} alike)" if len(notes) > 1 else ""
    return msgspec.structs.replace(note, text=f"{word} {number}: {note.text}{others}")
