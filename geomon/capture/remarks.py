"""Remarks on layers, for the reader of the numbers."""

from collections import defaultdict
from collections.abc import Mapping

from geomon.capture.snapshot import note_on_layers
from geomon.note import Note
from geomon.note_kinds import NoteKind

HIDDEN = "hidden states"  # the subject of remarks on them


class LayerRemarks:
    """Remarks on the layers of one stack and of its side stacks, each said once for all layers.

    Args:
        stack: Name of the stack.
    """

    def __init__(self, stack: str) -> None:
        self._stack = stack
        # Per stack: depths of each (kind, subject, remark).
        self._depths: dict[str, dict[tuple[NoteKind, str, str], list[int]]] = defaultdict(dict)
        # Per subject and depth: number of rows that are not finite, and of all rows.
        self._lost: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)

    def add(
        self, kind: NoteKind, subject: str, depth: int, remark: str, stack: str | None = None
    ) -> None:
        """Add a remark on a layer of the stack, or of a side stack."""
        depths = self._depths[self._stack if stack is None else stack]
        found = depths.setdefault((kind, subject, remark), [])
        if depth not in found:
            found.append(depth)

    def lose(self, subject: str, depth: int, lost: int, rows: int) -> None:
        """Remember how many rows of a layer are not finite."""
        self._lost[subject][depth] = lost, rows

    def notes(self) -> list[Note]:
        """Turn the remarks into notes."""
        found = [
            note_on_layers(kind, subject, why, depths, stack)
            for stack, remarks in self._depths.items()
            for (kind, subject, why), depths in remarks.items()
        ]
        return found + [_rows_lost(subject, x, self._stack) for subject, x in self._lost.items()]


def _rows_lost(subject: str, lost: Mapping[int, tuple[int, int]], stack: str) -> Note:
    """Make the note on rows that are not finite, with the counts of the worst layer."""
    count, rows = max(lost.values())
    up_to = "up to " if len(set(lost.values())) > 1 else ""
    return Note(
        NoteKind.ROWS_NOT_FINITE,
        "{subject}{where}: " + up_to + "{lost} of {rows} rows are not finite and were left out",
        stack, tuple(lost), numbers={"subject": subject, "lost": count, "rows": rows},
        about=subject if subject != HIDDEN else "",
    )  # fmt: skip
