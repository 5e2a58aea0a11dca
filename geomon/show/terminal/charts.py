"""Charts of characters: curves over steps and profiles over depth, drawn by plotext."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from geomon.analysis import Curve

Colour = tuple[int, int, int]

# Okabe and Ito's colours, which colour-blind readers can distinguish; those that are light enough
# for a dark ground.
COLOURS: tuple[Colour, ...] = (
    (86, 180, 233), (230, 159, 0), (0, 178, 130), (204, 121, 167), (240, 228, 66), (230, 110, 40),
)  # fmt: skip
GREY: Colour = (130, 130, 130)
# How lines differ where there are no colours.
MARKERS = ("braille", "•", "x", "+", "o", "*")
# Least range of an axis: as a share of the largest value, and in typical margins.
_FLAT, _MARGINS = 0.04, 4
_LEAST = 1e-9  # below it all values are drawn as 0: plotext writes its marks in full
_COLUMNS = 400  # of dots, two in a character


class Line(NamedTuple):
    """A line of a chart.

    Attributes:
        name: Name in the legend.
        curve: Its values, at steps or at layers.
        colour: Its colour.
        marker: Marker of plotext.
    """

    name: str
    curve: Curve
    colour: Colour
    marker: str = "braille"


def draw_over_steps(
    plot: Any, lines: Sequence[Line], *, logarithmic: bool, chosen: int | None = None,
    peak: tuple[int, float] | None = None,
) -> None:  # fmt: skip
    """Draw curves over steps, each between the ends of its interval.

    Args:
        plot: Plot of plotext.
        lines: The curves.
        logarithmic: Whether the axis of steps is logarithmic; it has room for step 0.
        chosen: Step that a line marks; None for none.
        peak: Step and value that a dot marks; None for none.
    """

    def place(step: int) -> float:
        return math.log10(step + 1) if logarithmic else step

    lines = [line._replace(curve=_thin(line.curve, place)) for line in lines if len(line.curve)]
    if chosen is not None and lines:
        plot.vline(place(chosen), color=GREY)
    _draw_lines(plot, lines, place)
    if peak is not None:
        plot.scatter([place(peak[0])], [peak[1]], marker="●", color=COLOURS[1])
    if logarithmic and lines:
        steps = [step for line in lines for step in line.curve.steps]
        powers = [10**power for power in range(len(str(max(steps))))]
        marks = [step for step in (0, *powers) if min(steps) <= step <= max(steps)]
        plot.xticks([place(step) for step in marks], [f"{step:,}" for step in marks])
    _frame(plot, lines)


def _thin(curve: Curve, place: Callable[[int], float]) -> Curve:
    """Keep, of the values in one column of a wide chart's dots, the last."""
    first, last = place(curve.steps[0]), place(curve.steps[-1])
    width = (last - first) / _COLUMNS or 1.0
    kept = {round((place(step) - first) / width): at for at, step in enumerate(curve.steps)}
    chosen = sorted({0, *kept.values()})
    return Curve(
        [curve.steps[at] for at in chosen],
        [curve.values[at] for at in chosen],
        [curve.margins[at] for at in chosen],
    )


def draw_over_depth(plot: Any, lines: Sequence[Line]) -> None:
    """Draw values over depth, each between the ends of its interval.

    Args:
        plot: Plot of plotext.
        lines: Values of layers, each line of one reading.
    """
    lines = [line for line in lines if len(line.curve)]
    _draw_lines(plot, lines, float)
    layers = sorted({layer for line in lines for layer in line.curve.steps})
    layers = layers[:: math.ceil(len(layers) / 8) or 1]
    plot.xticks(layers, list(map(str, layers)))
    _frame(plot, lines)


def _draw_lines(plot: Any, lines: Sequence[Line], place: Callable[[int], float]) -> None:
    """Draw lines above the ends of their intervals."""
    for _, curve, colour, marker in lines:
        at = [place(step) for step in curve.steps]
        pairs = list(zip(curve.values, curve.margins, strict=True))
        dim = tuple(part // 2 for part in colour)
        for sign in (-1, 1) if any(curve.margins) and marker == MARKERS[0] else ():
            ends = [value + sign * margin for value, margin in pairs]
            plot.plot(at, ends, marker=marker, color=dim)
    for _, curve, colour, marker in lines:
        at = [place(step) for step in curve.steps]
        plot.plot(at, curve.values, marker=marker if len(at) > 1 else "●", color=colour)


def _frame(plot: Any, lines: Sequence[Line]) -> None:
    """Draw two axes, of which that of values is no finer than the errors: noise is drawn flat."""
    plot.xaxes(True, False)
    plot.yaxes(True, False)
    curves = [line.curve for line in lines]
    pairs = [p for c in curves for p in zip(c.values, c.margins, strict=True)]
    if not pairs:
        return
    low = min(value - margin for value, margin in pairs)
    high = max(value + margin for value, margin in pairs)
    margin = statistics.median(margin for _, margin in pairs)
    size = max(abs(low), abs(high))
    least = max(_FLAT * size, _MARGINS * margin) if size > _LEAST else 1.0
    if high - low < least:
        start = max((low + high - least) / 2, 0.0 if low >= 0 else -math.inf)
        low, high = start, start + least
    plot.ylim(low, high)
