"""How much of a model's pass a window may hold, and what fits into it."""

from torch import Tensor

from geomon.capture.attention import AttentionCall, SoftmaxCall
from geomon.capture.sampling import RowDraw
from geomon.metrics.cautions import Note

# Rows that are kept however little memory is allowed: with fewer nothing can be measured.
_FEWEST_ROWS = 16

# Bytes of a number: what is kept in fewer is turned to float32 before it is measured.
_BYTES = 4

# Part of the room that is planned for rows; masks, and scores written by hand, take of the rest.
_FOR_ROWS = 0.5


class Room:
    """The largest memory of what one window keeps, shared out before anything is kept.

    Rows of hidden states, queries and keys are thinned to fit. What a call of attention needs
    besides (all keys of a sequence, rows of masks, scores) either fits into its block's share of
    what is left, or the call is not kept, and why is said.

    Args:
        max_mb: In millions of bytes; None for no limit.
        draw: Of the rows, which it limits.
        layers: Hidden states that are kept.
        blocks: With attention of which rows are kept; 0 where none are.
    """

    def __init__(self, max_mb: float | None, draw: RowDraw, *, layers: int, blocks: int) -> None:
        self._max_mb = max_mb
        self._draw = draw
        self._asked = draw.budget
        self._layers = layers
        self._blocks = blocks
        self._share: float | None = None  # bytes for one attention

    def limit(self, width: int) -> None:
        """Thin the rows, now that it is known how wide they are.

        Of each row go a hidden state for every layer, and its query and key as projected and as
        attended for every block.
        """
        if self._max_mb is None:
            return
        room = 1e6 * self._max_mb
        row = _BYTES * width * (self._layers + 4 * self._blocks)
        self._draw.limit(max(_FEWEST_ROWS, int(_FOR_ROWS * room / row)))
        projected = _BYTES * width * (self._layers + 2 * self._blocks) * self._draw.budget
        self._share = max(0.0, room - projected) / max(1, self._blocks)

    def refusal(self, call: AttentionCall | SoftmaxCall) -> str | None:
        """Why what was recorded of an attention is not to be kept; None where it fits."""
        if self._share is None:
            return None
        parts = [value for value in vars(call).values() if isinstance(value, Tensor)]
        taken = _BYTES * sum(part.numel() for part in parts)
        if taken <= self._share:
            return None
        return (
            f"of each attention {_in_mb(taken)} would be kept, and of "
            f"max_capture_mb={self._max_mb:g} only {_in_mb(self._share)} are left for one: "
            "allow more, or leave the metrics of attention out"
        )

    def notes(self) -> list[Note]:
        """What a reader of the numbers should know."""
        if self._draw.budget >= self._asked:
            return []
        text = (
            f"at most {self._draw.budget} rows instead of {self._asked} are kept: a window "
            f"may hold {self._max_mb:g} MB (max_capture_mb)"
        )
        return [Note("rows thinned for memory", text)]


def _in_mb(count: float) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 1e8 else f"{count / 1e6:.2g} MB"
