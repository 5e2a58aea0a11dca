"""The rows of all ranks: of each layer one union, on the rank that measures it.

Every rank keeps its share of the rows; the layers are shared out; each layer's rows are sent to the
rank that measures it and stand there one rank's after the other's, in rank order. So a reading is
that of all tokens, never an average of readings, and its time falls with the number of ranks.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from geomon.capture.snapshot import CAPTURED, Layer, Snapshot
from geomon.distributed.group import Ranks
from geomon.distributed.merge import Shape, attention_shape, thinned, union
from geomon.kernels.streaming import Moments, merge
from geomon.metrics.cautions import Note


class RankFailedError(RuntimeError):
    """A rank has nothing to give to this reading; the message names it and says why."""


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others before any row is sent; plain values.

    Attributes:
        about: Which reading: step and source.
        failure: Why there is no snapshot, or None.
        layers: Stack, depth and name of each.
        attention: Of each layer, the shape of what was kept of its attention; None for nothing.
        lacking: What was not seen of each layer: source and reason.
        tokens: Rows that were kept.
        mode: As of the snapshot, and so are `dtype` and `notes`.
        print: Of the first rows, to tell whether two ranks saw the same.
    """

    about: tuple[int, str]
    failure: str | None
    layers: tuple[tuple[str, int, str], ...] = ()
    attention: tuple[Shape | None, ...] = ()
    lacking: tuple[Mapping[str, str], ...] = ()
    tokens: int = 0
    mode: str = ""
    dtype: str = ""
    notes: tuple[Note, ...] = ()
    print: int = 0


@dataclass(frozen=True)
class Gathered:
    """What all ranks saw at one step, and the layers of it that this rank measures.

    Attributes:
        layers: Of this rank, in order of depth; each is put together when it is asked for.
        count: Number of layers of the whole.
        tokens: Rows that were kept, on all ranks together.
        mode: As of a snapshot, and so are `dtype` and `notes`.
    """

    layers: Iterator[Layer]
    count: int
    tokens: int
    mode: str
    dtype: str
    notes: list[Note]


def share_of_rows(rows: int, ranks: Ranks) -> int:
    """How many of `rows` this rank keeps: as many as the others, the first ones one of the rest.

    Example:
        >>> [share_of_rows(10, Ranks(rank, 4)) for rank in range(4)]
        [3, 3, 2, 2]
    """
    return rows // ranks.size + (ranks.rank < rows % ranks.size)


def gather(
    seen: Snapshot | Exception,
    about: tuple[int, str],
    ranks: Ranks,
    *,
    rows: int,
    queries: int,
    copies: bool = False,
) -> Gathered:
    """Bring the rows of all ranks together; a collective.

    First the ranks agree: whether each has a snapshot, of the same layers, for the same reading.
    What the ranks keep of attention is thinned so that together it is what one rank would keep.

    Args:
        seen: What this rank saw, or why it saw nothing.
        about: Step and source of the reading.
        ranks: With a line between them.
        rows: Of hidden states, for all ranks together.
        queries: Rows of attention in a layer, for all ranks together.
        copies: Whether all ranks were given the same inputs (a probe): the union would hold every
            row once for each rank, so the first rank's rows alone are taken.

    Raises:
        RankFailedError: On every rank alike, where one has no snapshot or another one's layers.
        RanksLostError: A rank does not answer.
    """
    reports = ranks.share(_report(seen, about))
    _agree(reports)
    assert isinstance(seen, Snapshot)
    givers = 1 if copies else ranks.size
    parcels = _parcels(seen, reports[:givers], ranks, rows, queries)
    received = ranks.exchange(parcels)[:givers]
    for rank, parcel in enumerate(received):
        if isinstance(parcel, str):
            raise RankFailedError(f"rank {rank}: {parcel}")
    return Gathered(
        layers=map(union, zip(*received, strict=True)),
        count=len(seen.layers),
        tokens=sum(report.tokens for report in reports[:givers]),
        mode=reports[0].mode,
        dtype=reports[0].dtype,
        notes=_notes(reports, givers),
    )


def in_order(shares: Sequence[Sequence[Any]], count: int) -> list[Any]:
    """What the ranks have of their layers, in the order of all layers.

    Args:
        shares: Of each rank, one entry for each of its layers.
        count: Number of all layers.

    Example:
        >>> in_order([["a", "c", "e"], ["b", "d"]], 5)
        ['a', 'b', 'c', 'd', 'e']
    """
    return [shares[place % len(shares)][place // len(shares)] for place in range(count)]


def merged_moments(part: Moments, ranks: Ranks) -> Moments:
    """The moments of the rows of all ranks, on every rank, without moving a row; a collective.

    They are merged in rank order, so every rank has the same bits.

    Args:
        part: Of this rank's rows; a rank without rows gives the neutral element.
        ranks: With a line between them.

    Raises:
        RanksLostError: A rank does not answer.
    """
    return reduce(merge, ranks.share(part))


def _parcels(
    seen: Snapshot, reports: Sequence[_Report], ranks: Ranks, rows: int, queries: int
) -> list[list[Layer]] | list[str]:
    """What each rank gets of this one's rows: its layers, or why there are none."""
    parcels: list[list[Layer]] = [[] for _ in range(ranks.size)]
    if ranks.rank >= len(reports):
        return parcels
    try:
        for place, layer in enumerate(seen.layers):
            shapes = [report.attention[place] for report in reports]
            parcels[place % ranks.size].append(thinned(layer, shapes, ranks.rank, rows, queries))
    except Exception as error:  # the others wait for this rank's rows
        return [f"{type(error).__name__}: {error}"] * ranks.size
    return parcels


# -- what the ranks agree on -----------------------------------------------------------------------


def _report(seen: Snapshot | Exception, about: tuple[int, str]) -> _Report:
    if isinstance(seen, Exception):
        return _Report(about, f"{type(seen).__name__}: {seen}")
    return _Report(
        about=about,
        failure=None,
        layers=tuple((layer.stack, layer.index, layer.name) for layer in seen.layers),
        attention=tuple(attention_shape(layer) for layer in seen.layers),
        lacking=tuple(_lacking(layer) for layer in seen.layers),
        tokens=seen.tokens,
        mode=seen.mode,
        dtype=seen.dtype,
        notes=tuple(seen.notes),
        print=_print(seen.layers[0]),
    )


def _lacking(layer: Layer) -> dict[str, str]:
    """By source, why nothing of it was seen."""
    present = {CAPTURED[view] for view in layer.captured}
    return {
        CAPTURED[view]: why for view, why in layer.missing.items() if CAPTURED[view] not in present
    }


def _print(layer: Layer) -> int:
    hidden = layer.captured.get("hidden")
    return 0 if hidden is None else zlib.crc32(hidden[:64].cpu().contiguous().numpy().tobytes())


def _agree(reports: Sequence[_Report]) -> None:
    """Raise the same error on every rank, or none on any."""
    first = reports[0]
    for rank, report in enumerate(reports):
        if report.about != first.about:
            raise RankFailedError(
                f"rank {rank} reads step {report.about[0]} ({report.about[1]}) where rank 0 reads "
                f"step {first.about[0]} ({first.about[1]}): every rank calls the monitor with the "
                "same steps, and its schedule depends on the step alone"
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


def _notes(reports: Sequence[_Report], givers: int) -> list[Note]:
    """The notes of all ranks, one of each kind, and what the ranks say of one another."""
    found: dict[str, dict[int, str]] = {}
    for rank, report in enumerate(reports[:givers]):
        for note in report.notes:
            found.setdefault(note.kind, {})[rank] = note.text
        for place, lacking in enumerate(report.lacking):
            for source, why in lacking.items():
                if any(source not in other.lacking[place] for other in reports[:givers]):
                    name = report.layers[place][2]
                    kind = f"no {source} at {name} of some ranks"
                    found.setdefault(kind, {})[rank] = f"{name}: no {source} was seen: {why}"
    notes = [Note(kind, _of_ranks(texts, givers)) for kind, texts in found.items()]
    if any(report.mode != reports[0].mode for report in reports[:givers]):
        notes.append(Note("modes", "some ranks were in train mode and some in eval mode"))
    if any(report.print != reports[0].print for report in reports[givers:]):
        notes.append(
            Note("probes differ", "the ranks probe with different inputs: rank 0's were measured")
        )
    return notes


def _of_ranks(texts: Mapping[int, str], size: int) -> str:
    """What the ranks say on one matter, in one line however many they are."""
    rank, text = next(iter(texts.items()))
    if len(texts) == size and set(texts.values()) == {text}:
        return text
    others = f" (and {len(texts) - 1} other ranks alike)" if len(texts) > 1 else ""
    return f"rank {rank}: {text}{others}"
