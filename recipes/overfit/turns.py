"""Turning points of curves: peaks and troughs."""

from collections.abc import Sequence
from typing import Literal

Kind = Literal["peak", "trough"]


def turning_points(values: Sequence[float], share: float) -> list[tuple[int, Kind]]:
    """Find the peaks and troughs that a curve leaves by a share of their value, alternately.

    The first one is the beginning of the curve or an extremum close to it in value. A curve leaves
    a peak when it is lower by the factor 1 + share, and a trough when it is higher by that factor.
    With two different factors, a curve could pass its last trough unseen.

    Returns:
        Index and kind of each extremum, ascending.

    Example:
        >>> [place for place, _ in turning_points([1.0, 3.0, 3.1, 2.0, 2.05, 4.0], 0.1)]
        [0, 2, 3]
    """
    found: list[tuple[int, Kind]] = []
    high = low = 0
    for index, value in enumerate(values):
        high = index if value > values[high] else high
        low = index if value < values[low] else low
        last = found[-1][1] if found else None
        if last != "peak" and value * (1 + share) < values[high]:
            found.append((high, "peak"))
            low = index
        elif last != "trough" and value > values[low] * (1 + share):
            found.append((low, "trough"))
            high = index
    return found


def first_turn(
    values: Sequence[float], share: float, kind: Kind, *, after_other: bool = False
) -> int | None:
    """Find the first peak or trough of a curve after its beginning.

    Returns:
        Index of the extremum, or None if there is none or if the curve has not left it yet.

    Example:
        >>> first_turn([5.0, 3.0, 2.0, 2.5], 0.1, "trough")
        2
        >>> first_turn([5.0, 3.0, 6.0, 4.0, 5.0], 0.1, "trough", after_other=True)
        3
    """
    inner = [(place, own) for place, own in turning_points(values, share) if place > 0]
    candidates = inner[1:] if after_other else inner  # kinds alternate
    return next((place for place, own in candidates if own == kind), None)
