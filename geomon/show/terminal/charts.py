"""Charts of characters: curves over steps, profiles over depth, heads by layers."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.style import Style
from rich.text import Text

from geomon.analysis import Curve
from geomon.analysis.numbers import number
from geomon.analysis.profile import is_far_above
from geomon.record import Reading
from geomon.show.terminal.scales import axis_marks, axis_range, place, step_marks

Colour = tuple[int, int, int]

# Okabe and Ito's colours, which colour-blind readers can distinguish; those that are light enough
# for a dark ground.
RUNS: tuple[Colour, ...] = (
    (86, 180, 233), (230, 159, 0), (0, 178, 130), (204, 121, 167), (240, 228, 66), (230, 110, 40),
)  # fmt: skip
# How runs are drawn where there are no colours, and their marks in lists.
MARKERS = ("braille", "•", "x", "+", "o", "*")
_GREY: Colour = (120, 120, 120)
PEAK: Colour = (230, 159, 0)
# Share of a line's colour in that of its band.
_DIM = 0.6

# From low to high: cividis without its darkest end; and blue, black, orange around zero.
_RISING: tuple[Colour, ...] = (
    (20, 40, 86), (67, 78, 108), (124, 123, 120), (183, 170, 100), (250, 231, 70),
)  # fmt: skip
_AROUND_ZERO: tuple[Colour, ...] = (
    (86, 180, 233), (10, 90, 140), (38, 38, 38), (150, 85, 0), (245, 170, 20),
)  # fmt: skip
_SHADES, _SIGNS = " ░▒▓█", "▼▽·△▲"
_UPPER_HALF = "▀"


@dataclass(frozen=True)
class Line:
    """A curve as it is drawn.

    Attributes:
        xs: Places along the horizontal axis, ascending.
        values: Finite values.
        margins: Half widths of their intervals; 0 where they are unknown.
        colour: Colour of the line.
        marker: Marker of plotext.
    """

    xs: list[float]
    values: list[float]
    margins: list[float]
    colour: Colour
    marker: str = "braille"

    def from_x(self, x: float) -> "Line":
        """Return the part of the line from a place on.

        Args:
            x: The place.
        """
        start = bisect_left(self.xs, x)
        xs, values, margins = self.xs[start:], self.values[start:], self.margins[start:]
        return Line(xs, values, margins, self.colour, self.marker)


def line_of(curve: Curve, colour: Colour, marker: str, *, logarithmic: bool) -> Line:
    """Make the line of a curve over steps.

    Args:
        curve: The curve.
        colour: Colour of the line.
        marker: Marker of plotext.
        logarithmic: Whether the axis of steps is logarithmic.
    """
    xs = [place(step, logarithmic=logarithmic) for step in curve.steps]
    return Line(xs, curve.values, curve.margins, colour, marker)


def thin_line(line: Line, columns: int) -> Line:
    """Leave out points that the columns of a chart cannot show.

    Of the points in one column the first, the last, the lowest and the highest are left.

    Args:
        line: The line.
        columns: Number of columns.
    """
    count = len(line.xs)
    if count <= 4 * columns or line.xs[-1] == line.xs[0]:
        return line
    width = (line.xs[-1] - line.xs[0]) / columns
    kept: set[int] = {count - 1}
    start = 0
    for column in range(1, columns + 1):
        end = (
            bisect_left(line.xs, line.xs[0] + column * width, start) if column < columns else count
        )
        if end > start:
            inside = range(start, end)
            lowest = min(inside, key=line.values.__getitem__)
            highest = max(inside, key=line.values.__getitem__)
            kept |= {start, end - 1, lowest, highest}
        start = end
    chosen = sorted(kept)
    return Line(
        [line.xs[i] for i in chosen], [line.values[i] for i in chosen],
        [line.margins[i] for i in chosen], line.colour, line.marker,
    )  # fmt: skip


def draw_over_steps(
    plot: Any, lines: Sequence[Line], size: tuple[int, int], *, steps: tuple[int, int],
    logarithmic: bool, cursor: int | None = None, peak: tuple[int, float] | None = None,
) -> None:  # fmt: skip
    """Draw curves over steps, each with its band.

    Args:
        plot: Plot of plotext, which is cleared.
        lines: The curves.
        size: Columns and rows of the chart.
        steps: First and last step.
        logarithmic: Whether the axis of steps is logarithmic.
        cursor: Step that a line marks; None for none.
        peak: Step and value that a dot marks; None for none.
    """
    columns, rows = size
    marks = step_marks(*steps, max(2, columns // 9), logarithmic=logarithmic)
    ends = [place(step, logarithmic=logarithmic) for step in steps]
    at = None if cursor is None else place(cursor, logarithmic=logarithmic)
    _draw(plot, lines, columns, rows, (ends[0], ends[1]), marks, at)
    if peak is not None:
        at = place(peak[0], logarithmic=logarithmic)
        plot.scatter([at], [peak[1]], marker="●", color=PEAK)


def draw_profile(
    plot: Any, lines: Sequence[Line], size: tuple[int, int], *, layers: Sequence[int]
) -> None:
    """Draw values over depth.

    The axis of values is that of the blocks. Where layer 0, the embedding, lies far above it, its
    mark says how high, and no point is drawn there: it would flatten all others.

    Args:
        plot: Plot of plotext, which is cleared.
        lines: Values of layers, each line of one step or run.
        size: Columns and rows of the chart.
        layers: Numbers of the layers, ascending.
    """
    columns, rows = size
    every = math.ceil(len(layers) / max(2, columns // 5))
    marks = [(float(layer), str(layer)) for layer in layers[::every]]
    ends = layers[0], layers[-1]
    drawn = [line.from_x(1.0) for line in lines]
    first = [line.values[0] for line in lines if line.xs[:1] == [0.0]]
    if is_far_above(first, (value for line in drawn for value in line.values)):
        marks[0] = (0.0, f"0: {number(max(first))}↑")
    else:
        drawn = list(lines)
    _draw(plot, drawn, columns, rows, ends, marks, None)


def _draw(
    plot: Any, lines: Sequence[Line], columns: int, rows: int, ends: tuple[float, float],
    marks: Sequence[tuple[float, str]], cursor: float | None,
) -> None:  # fmt: skip
    plot.clear_figure()
    plot.clear_data()
    lines = [thin_line(line, max(columns, 10)) for line in lines if line.values]
    if not lines:
        return
    values = [value for line in lines for value in line.values]
    low, high = axis_range(values, [margin for line in lines for margin in line.margins])
    first, last = ends if ends[1] > ends[0] else (ends[0] - 0.5, ends[0] + 0.5)
    for line in lines:
        _draw_band(plot, line, (first, last), (low, high), (columns, rows))
    if cursor is not None:
        plot.vline(cursor, color=_GREY)
    for line in lines:
        if len(line.xs) == 1:
            plot.scatter(line.xs, line.values, marker="●", color=line.colour)
        else:
            plot.plot(line.xs, line.values, marker=line.marker, color=line.colour)
    plot.xlim(first, last)
    plot.ylim(low, high)
    plot.xticks([mark for mark, _ in marks], [text for _, text in marks])
    # Three rows apart at least: marks are rounded to rows, and nearer ones look unevenly spaced.
    shown = axis_marks(low, high, max(3, rows // 3))
    plot.yticks([mark for mark, _ in shown], [text for _, text in shown])
    plot.xaxes(True, False)
    plot.yaxes(True, False)


def _draw_band(
    plot: Any, line: Line, xs: tuple[float, float], ys: tuple[float, float], size: tuple[int, int]
) -> None:
    """Shade what is within the margins of a line with every second dot."""
    if not any(line.margins):
        return
    columns, rows = 2 * size[0], 4 * size[1]  # dots of Braille characters
    width, height = (xs[1] - xs[0]) / columns, (ys[1] - ys[0]) / rows
    found: list[tuple[float, float]] = []
    for column in range(columns):
        x = xs[0] + (column + 0.5) * width
        if line.xs[0] <= x <= line.xs[-1]:
            value, margin = _between(line, x)
            first = math.ceil((value - margin - ys[0]) / height - 0.5)
            last = math.floor((value + margin - ys[0]) / height - 0.5)
            found += [
                (x, ys[0] + (row + 0.5) * height)
                for row in range(first, last + 1)
                if (row + column) % 2
            ]
    if found:
        dim = tuple(int(_DIM * part) for part in line.colour)
        marker = "braille" if line.marker == "braille" else "·"
        plot.scatter([x for x, _ in found], [y for _, y in found], marker=marker, color=dim)


def _between(line: Line, x: float) -> tuple[float, float]:
    """Interpolate the value and the margin of a line."""
    right = min(max(bisect_left(line.xs, x), 1), len(line.xs) - 1)
    left = right - 1
    if right == 0 or line.xs[right] == line.xs[left]:
        return line.values[right], line.margins[right]
    share = (x - line.xs[left]) / (line.xs[right] - line.xs[left])
    value, margin = (
        known[left] + share * (known[right] - known[left]) for known in (line.values, line.margins)
    )
    return value, margin


@dataclass(frozen=True)
class Scale:
    """Colours of the values of heads.

    Attributes:
        low: Value of the first colour.
        high: Value of the last colour.
    """

    low: float
    high: float

    @property
    def is_around_zero(self) -> bool:
        """Whether zero is in the middle."""
        return self.low < 0

    def share(self, value: float) -> float:
        """Place a value between the ends, [0, 1]."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def colour(self, value: float) -> Colour:
        """Return the colour of a value."""
        colours = _AROUND_ZERO if self.is_around_zero else _RISING
        at = self.share(value) * (len(colours) - 1)
        left = min(int(at), len(colours) - 2)
        red, green, blue = (
            round(one + (at - left) * (other - one))
            for one, other in zip(colours[left], colours[left + 1], strict=True)
        )
        return red, green, blue

    def shade(self, value: float) -> str:
        """Return the character of a value, for terminals without colours."""
        return (_SIGNS if self.is_around_zero else _SHADES)[min(int(self.share(value) * 5), 4)]


def scale_of(metric: str, lowest: float, highest: float) -> Scale:
    """Choose the scale of a metric, which is the same during the whole run.

    Args:
        metric: Name of the metric.
        lowest: Lowest value of a head in the run.
        highest: Highest value of a head in the run.
    """
    if metric.endswith("cosine") and lowest < 0:
        return Scale(-1.0, 1.0)
    if lowest < 0:
        limit = max(-lowest, highest)
        return Scale(-limit, limit)
    if highest <= 1 and not metric.endswith("entropy"):
        return Scale(0.0, 1.0)
    return Scale(0.0, highest or 1.0)


def head_rows(reading: Reading, metric: str) -> tuple[list[int], list[list[float]]]:
    """Collect the values of heads.

    Args:
        reading: A reading.
        metric: Name of the metric.

    Returns:
        Numbers of the layers, and the values of each head by layer; NaN where there is none.
    """
    column = reading.column(metric)
    rows = {layer: heads for layer, heads in enumerate(column.heads, column.first) if heads}
    known = column.by_head()
    heads = range(max(map(len, rows.values()), default=0))
    return [*rows], [[known.get((layer, head), math.nan) for layer in rows] for head in heads]


def draw_heads(
    layers: Sequence[int], heads: Sequence[Sequence[float]], scale: Scale, size: tuple[int, int],
    *, coloured: bool,
) -> Text:  # fmt: skip
    """Draw heads by layers as fields of colour, with their values where there is room.

    Args:
        layers: Numbers of the layers, from left to right.
        heads: Values of each head by layer.
        scale: Colours of the values.
        size: Columns and rows of the chart.
        coloured: Whether the terminal shows colours.
    """
    columns, rows = size
    left = 3
    most = max(1, min(len(layers), columns - left))
    named = [group[0] for group in _groups(layers, most)]
    room = max(1, rows - 2)
    halves = coloured and len(heads) > room
    by_layer = zip(*(_means(row, most) for row in heads), strict=True)
    averaged = [_means(column, room * (2 if halves else 1)) for column in by_layer]
    table = list(zip(*averaged, strict=True))
    wide = min((columns - left) // len(named), 9)
    text = Text(no_wrap=True, overflow="crop")
    shown = [table[i : i + 2] for i in range(0, len(table), 2)] if halves else [[r] for r in table]
    tall = 1 if halves or not coloured else min(room // len(shown), 3)
    per_row = len(heads) / len(shown)
    for index, pair in enumerate(shown):
        for part in range(tall):
            named_here = part == (tall - 1) // 2
            name = f"{int(index * per_row):>2} " if named_here else " " * left
            text.append(name, style="dim")
            for column in range(len(named)):
                values = [row[column] for row in pair]
                _append_field(text, values, scale, wide, coloured=coloured, with_number=named_here)
            text.append("\n")
    text.append(_numbered(named, wide, left), style="dim")
    text.append("\n")
    return text.append_text(_legend(scale, columns, coloured=coloured))


def _append_field(
    text: Text, values: Sequence[float], scale: Scale, wide: int, *, coloured: bool,
    with_number: bool,
) -> None:  # fmt: skip
    """Append one field: of one value, or of two above one another."""
    if not coloured:
        value = values[0]
        if math.isnan(value):
            text.append(" " * wide)
        elif wide >= 5:
            text.append(f"{number(value):^{wide}}")
        else:
            text.append(scale.shade(value) * wide)
        return
    colours = [None if math.isnan(value) else scale.colour(value) for value in values]
    if len(colours) == 2:
        text.append(
            _UPPER_HALF * wide, style=Style(color=_hex(colours[0]), bgcolor=_hex(colours[1]))
        )
    elif colours[0] is None:
        text.append(" " * wide)
    else:
        red, green, blue = colours[0]
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 128
        words = f"{number(values[0]):^{wide}}" if wide >= 5 and with_number else " " * wide
        text.append(
            words, style=Style(color="#ffffff" if dark else "#000000", bgcolor=_hex(colours[0]))
        )


def _hex(colour: Colour | None) -> str | None:
    return None if colour is None else "#{:02x}{:02x}{:02x}".format(*colour)


def _legend(scale: Scale, columns: int, *, coloured: bool) -> Text:
    known = ("   columns: layers, rows: heads   ", " by layer  ", "")
    room = columns - 12 - len(number(scale.low)) - len(number(scale.high))
    text = Text(next(words for words in known if len(words) <= max(room, 0)), style="dim")
    text.append(f"{number(scale.low)} ", style="dim")
    for step in range(10):
        value = scale.low + (step + 0.5) / 10 * (scale.high - scale.low)
        if coloured:
            text.append(" ", style=Style(bgcolor=_hex(scale.colour(value))))
        else:
            text.append(scale.shade(value))
    return text.append(f" {number(scale.high)}", style="dim")


def _numbered(layers: Sequence[int], wide: int, left: int) -> str:
    """Write the numbers of layers below their fields, as many as there is room for."""
    line, end = " " * left, left + len(layers) * wide
    for index, layer in enumerate(layers):
        name = str(layer)
        start = left + index * wide + max(0, (wide - len(name)) // 2)
        if index == 0 or (start > len(line) and start + len(name) <= end):
            line += " " * (start - len(line)) + name
    return line


def _groups(values: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Split a sequence into a number of neighbouring groups of nearly equal size."""
    count = min(count, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    return [values[edges[i] : edges[i + 1]] for i in range(count)]


def _means(values: Sequence[float], count: int) -> list[float]:
    """Average neighbouring values until a number of them is left, without those that are NaN."""
    return [_mean(group) for group in _groups(values, count)]


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
