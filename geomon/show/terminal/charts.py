"""Panels of lines drawn by plotext, in characters."""

import math
import statistics
from dataclasses import replace
from typing import Any

from rich.text import Text

from geomon.record.printable import printable
from geomon.show.panels import Line, Lines, StepAxis

# Okabe and Ito's colours, which colour-blind readers can distinguish; those that are light enough
# for a dark ground.
COLOURS = ("#56B4E9", "#E69F00", "#00B282", "#CC79A7", "#F0E442", "#E66E28")
GREY, ALERT = "#828282", "#CC79A7"
# Characters of a line, by its dash: lines differ in them where there are no colours.
_MARKERS = {"solid": "braille", "dash": "•", "dot": "+", "dashdot": "x"}
# Least range of an axis: as a share of the largest value, and in typical margins.
_FLAT, _MARGINS = 0.04, 4
_LEAST = 1e-9  # below it all values are drawn as 0: plotext writes its marks in full


def mark_of(dash: str) -> str:
    """Return the character that stands for a line in a legend."""
    return "━" if dash == "solid" else _MARKERS[dash]


def title_of(panel: Lines) -> Text:
    """Say what a panel shows: its label, its null, the names of its lines."""
    text = Text(printable(panel.label), "bold")
    said = [(panel.null[1], "dim")] if panel.null is not None else []
    names = [line for line in panel.lines if line.name] if panel.lines[1:] else []
    said += [(f"{mark_of(line.dash)} {line.name}", line.colour) for line in names]
    said += [("not measured", "dim")] if not panel.lines else []
    for words, style in said:
        text.append(f"  {printable(words)}", f"not bold {style}")
    return text


def build(panel: Lines, width: int, height: int) -> str:
    """Draw a panel over steps, each line between the ends of its interval, and its remark below.

    Args:
        panel: The panel.
        width: Characters of a line.
        height: Lines.

    Returns:
        Lines of characters with colours of ANSI; "" if nothing was measured.
    """
    try:
        import plotext
    except ImportError as error:
        raise ImportError("charts need plotext: pip install 'geomon[terminal]'") from error
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    _draw(plotext, panel)
    return str(plotext.build()) if any(map(bool, (line.x for line in panel.lines))) else ""


def _draw(plot: Any, panel: Lines) -> None:
    panel = replace(panel, lines=[_finite(line) for line in panel.lines])
    if not any(line.x for line in panel.lines):
        return
    at = sorted({*panel.steps})
    axis = StepAxis(at)

    def places(steps: Any) -> list[float]:
        return [math.log10(each) for each in axis.places(steps)]

    plot.xticks(places(axis.ticks()), [f"{step:,}" for step in axis.ticks()])
    for step, words in panel.alerts:
        if words:
            plot.vline(places([step])[0], color=_rgb(ALERT))
    for line in panel.lines:
        dim = tuple(part // 2 for part in _rgb(line.colour))
        for ends in (line.low, line.high) if line.dash == "solid" and line.low else ():
            plot.plot(places(line.x), ends, marker="braille", color=dim)
    for line in panel.lines:
        marker = _MARKERS[line.dash] if len(line.x) > 1 else "●"
        plot.plot(places(line.x), line.y, marker=marker, color=_rgb(line.colour))
    _frame(plot, panel)
    if panel.remark:
        plot.xlabel(printable(panel.remark))


def _frame(plot: Any, panel: Lines) -> None:
    """Draw two axes; the axis of values is as coarse as the errors, so noise looks flat."""
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


def _finite(line: Line) -> Line:
    """Leave out the places of a line that have no value."""
    known = [place for place, value in enumerate(line.y) if math.isfinite(value)]
    y, low, high = (
        [row[place] for place in known] if row else [] for row in (line.y, line.low, line.high)
    )
    return replace(line, x=[line.x[place] for place in known], y=y, low=low, high=high)


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[place : place + 2], 16) for place in (1, 3, 5))
