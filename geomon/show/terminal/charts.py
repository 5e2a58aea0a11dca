"""Draws panels of lines in characters with plotext."""

import math
import statistics
from collections.abc import Iterable
from typing import Any

from rich.color import Color
from rich.text import Text

from geomon.advice import to_install
from geomon.record import printable
from geomon.show.panels import Lines, StepAxis

# Okabe and Ito's colours, which colour-blind readers can distinguish, as far as they are light
# enough for a dark background.
COLOURS = ("#56B4E9", "#E69F00", "#00B282", "#CC79A7", "#F0E442", "#E66E28")
GREY, ALERT = "#828282", "#CC79A7"
# Character of a line by its dash, to tell lines apart without colours.
_MARKERS = {"solid": "braille", "dash": "•", "dot": "+", "dashdot": "x"}
# Least range of the y axis: as a share of the largest value, and in typical margins.
_FLAT, _MARGINS = 0.04, 4
_LEAST = 1e-9  # smaller values count as 0, because plotext writes tick labels in full


def mark_of(dash: str) -> str:
    """Return the legend character of a line with this dash."""
    return "━" if dash == "solid" else _MARKERS[dash]


def title_of(panel: Lines) -> Text:
    """Format the label of a panel, with its null and the names of its lines."""
    text = Text(printable(panel.label), "bold")
    said = [(panel.null[1], "dim")] if panel.null is not None else []
    said += [
        (f"{mark_of(line.dash)} {line.name}", line.colour)
        for line in panel.lines
        if line.name and len(panel.lines) > 1
    ]
    said += [("not measured", "dim")] if not panel.lines else []
    for words, style in said:
        text.append(f"  {printable(words)}", f"not bold {style}")
    return text


def build(panel: Lines, width: int, height: int) -> str:
    """Draw a panel over steps as text, each line with the ends of its interval.

    Args:
        panel: The panel, with at least one line.
        width: Width in characters.
        height: Height in lines.

    Returns:
        Lines of characters with ANSI colours.
    """
    try:
        import plotext
    except ImportError as error:
        raise ImportError(f"charts need plotext: {to_install('terminal')}") from error
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    axis = StepAxis(panel.steps)

    def places(steps: Iterable[int]) -> list[float]:
        return [math.log10(each) for each in axis.places(steps)]

    plotext.xticks(places(axis.ticks()), [f"{step:,}" for step in axis.ticks()])
    for at in places(step for step, words in panel.alerts if words):
        plotext.vline(at, color=_rgb(ALERT))
    for line in panel.lines:
        dim = tuple(part // 2 for part in _rgb(line.colour))
        for ends in (line.low, line.high) if line.dash == "solid" and line.low else ():
            plotext.plot(places(line.x), ends, marker="braille", color=dim)
    for line in panel.lines:
        marker = _MARKERS[line.dash] if len(line.x) > 1 else "●"
        plotext.plot(places(line.x), line.y, marker=marker, color=_rgb(line.colour))
    _frame(plotext, panel)
    return str(plotext.build())


def _frame(plot: Any, panel: Lines) -> None:
    """Draw the axes; the y axis spans at least a few typical errors, so that noise looks flat."""
    plot.xaxes(True, False)
    plot.yaxes(True, False)
    values = [v for line in panel.lines for v in (*line.y, *line.low, *line.high)]
    pairs = [pair for x in panel.lines for pair in zip(x.low, x.high, strict=True)]
    low, high = min(values), max(values)
    margin = statistics.median((above - below) / 2 for below, above in pairs) if pairs else 0.0
    size = max(abs(low), abs(high))
    least = max(_FLAT * size, _MARGINS * margin) if size > _LEAST else 1.0
    if high - low < least:
        start = max((low + high - least) / 2, 0.0 if low >= 0 else -math.inf)
        low, high = start, start + least
    plot.ylim(low, high)


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(Color.parse(colour).get_truecolor())
