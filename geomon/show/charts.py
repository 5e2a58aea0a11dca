"""Plotly charts of panels, for W&B and for the report."""

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from geomon.advice import to_install
from geomon.record import Readings, printable
from geomon.show.collect import cards_of
from geomon.show.colours import GREY, NOTHING, PURPLE, SIGNED, UNSIGNED, faded
from geomon.show.panels import AXES, Line, Lines, Matrix, StepAxis

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise ImportError(f"charts need plotly: {to_install('wandb')}") from error

# Largest number of names that fit into a legend.
_MOST_NAMES = 8
# Layout of every chart.
_LAYOUT = {
    "template": "none",
    "font": {"size": 12},
    "margin": {"l": 58, "r": 14, "t": 12, "b": 46},
    "legend": {"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0,
               "font": {"size": 11}},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "hoverlabel": {"namelength": -1},
}  # fmt: skip
# Layout of a legend below the chart.
_NAMES_BELOW = {"yref": "container", "y": 0, "yanchor": "bottom"}


def charts_of(readings: Readings, metrics: Iterable[str] = ()) -> dict[str, go.Figure]:
    """Draw every chart that a run has values for, and return the charts by name."""
    charts = {}
    for name, panel in cards_of(readings, metrics):
        chart = draw(panel)
        if isinstance(panel, Lines):  # W&B shows no title for a chart
            mean = ", mean over layers" if panel.over == "step" else ""
            bands = " (band: 95 % interval)" if panel.has_bands else ""
            title = {"text": _plain(panel.label + mean + bands), "font": {"size": 13}, "x": 0.02}
            chart.update_layout(title=title, margin={"t": 40}, legend=_NAMES_BELOW)
        charts[re.sub(r"\W+", "_", name)] = chart
    return charts


def draw(panel: Lines | Matrix) -> go.Figure:
    """Draw a panel as a plotly figure; a panel of lines needs at least one."""
    return _draw_matrix(panel) if isinstance(panel, Matrix) else _draw_lines(panel)


def choose(panels: Mapping[str, Lines | Matrix | dict[int, Matrix]]) -> go.Figure:
    """Draw several panels in one figure that shows one at a time.

    `layout.meta` lists the name of each panel and the arguments for `Plotly.update` that show it.

    Args:
        panels: The panels by name, at least one. Matrices by step get a slider for the step.
    """
    by_step = [panel for panel in panels.values() if isinstance(panel, dict)]
    charts = {
        name: draw(panel[max(panel)] if isinstance(panel, dict) else panel)
        for name, panel in panels.items()
    }
    whole = _one_at_a_time(charts) if len(charts) > 1 else next(iter(charts.values()))
    if by_step:
        _slide(whole, by_step)
    return whole


def _one_at_a_time(charts: Mapping[str, go.Figure]) -> go.Figure:
    whole = go.Figure(layout=next(iter(charts.values())).layout)
    choices: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    count = sum(len(chart.data) for chart in charts.values())
    for name, chart in charts.items():
        start, end = len(whole.data), len(whole.data) + len(chart.data)
        whole.add_traces(chart.update_traces(visible=not choices).data)
        visible = [start <= place < end for place in range(count)]
        layout = chart.layout.to_plotly_json()
        wanted = {part: layout.get(part) for part in ("xaxis", "yaxis", "shapes", "annotations")}
        choices.append((printable(name), {"visible": visible}, wanted))
    return whole.update_layout(meta=choices, legend=_NAMES_BELOW)


def _slide(chart: go.Figure, panels: Sequence[Mapping[int, Matrix]]) -> None:
    """Add a slider for the step, which moves each matrix to its nearest step."""
    moves = []
    for step in sorted({step for by_step in panels for step in by_step}):
        nearest = [
            by_step[min(by_step, key=lambda at: abs(math.log1p(at) - math.log1p(step)))]
            for by_step in panels
        ]
        values = [_colours_of(each)["z"] for each in nearest]
        moves.append({"label": f"{step:,}", "method": "restyle", "args": [{"z": values}]})
    chart.update_layout(
        sliders=[{"steps": moves, "active": len(moves) - 1, "currentvalue": {"prefix": "step "},
                  "pad": {"t": 38}, "font": {"size": 11}}],
        margin={"b": 10},
    )  # fmt: skip


def add_linear_axis(chart: go.Figure) -> go.Figure:
    """Let the reader of a page switch the step axis between logarithmic and linear."""
    axis = chart.layout.xaxis
    linear = {
        "xaxis.type": "linear", "xaxis.tickmode": "auto", "xaxis.title.text": "training step",
        "xaxis.range": [-0.02 * 10 ** axis.range[1], 1.02 * 10 ** axis.range[1]],
    }  # fmt: skip
    back = {
        "xaxis.type": "log", "xaxis.tickmode": "array", "xaxis.title.text": axis.title.text,
        "xaxis.range": axis.range,
    }  # fmt: skip
    choices: list[Any] = [("logarithmic steps", {}, back), ("linear steps", {}, linear)]
    return chart.update_layout(meta=choices, legend=_NAMES_BELOW)


def _draw_lines(panel: Lines) -> go.Figure:
    chart = go.Figure(layout=_LAYOUT)
    axis = panel.axis
    x_axis = _number_axis(panel.over) if axis is None else _step_axis(axis, "dashed")
    for number, line in enumerate(panel.lines):
        _add_line(chart, panel, line, number)
    _add_marks(chart, panel)
    if panel.remark:
        x_axis["title"]["text"] += f"<br>{_plain(panel.remark)}"
    names = sum(bool(_name_of(panel, line)) for line in panel.lines)
    chart.update_layout(xaxis=x_axis, yaxis=_value_axis(panel), showlegend=1 < names <= _MOST_NAMES)
    return chart


def _name_of(panel: Lines, line: Line) -> str:
    return f"{panel.named_by} {line.name}".strip()


def _add_line(chart: go.Figure, panel: Lines, line: Line, number: int) -> None:
    """Draw a line in pieces, each with its band, that the legend shows and hides together."""
    axis, name = panel.axis, _name_of(panel, line)
    group = name or str(number)
    for place, piece in enumerate([line] if axis is None else axis.pieces(line)):
        at = piece.x if axis is None else axis.places(piece.x)
        opacity = 0.07 if piece.dash == "dash" else 0.18
        if piece.low:
            chart.add_scatter(
                x=[*at, *reversed(at)], y=_shown([*piece.high, *reversed(piece.low)]),
                mode="none", fill="toself", fillcolor=faded(line.colour, opacity),
                hoverinfo="skip", showlegend=False, legendgroup=group,
            )  # fmt: skip
        chart.add_scatter(
            x=at, y=_shown(piece.y), customdata=piece.x, name=_plain(name),
            legendgroup=group, showlegend=bool(name) and not place,
            mode="lines+markers" if piece.dot else "lines",
            line={"color": line.colour, "width": line.width, "dash": piece.dash},
            marker={"size": 1.5 * piece.dot},
            hovertemplate=f"{panel.over} %{{customdata:,d}}: %{{y:.4g}}",
        )  # fmt: skip


def _add_marks(chart: go.Figure, panel: Lines) -> None:
    """Mark alerts, the null and the healthy range of a panel."""
    if panel.axis is not None:
        for step, words in panel.alerts:
            _mark(chart, "x", panel.axis.places([step])[0], words, PURPLE, is_logarithmic=True)
    if panel.null_inside is not None:
        _mark(chart, "y", *panel.null_inside, GREY, is_logarithmic=panel.is_logarithmic)
    if panel.usual is not None:
        low, high, words = panel.usual
        chart.add_hrect(low, high, fillcolor=faded(GREY, 0.18), line_width=0, layer="below")
        chart.add_annotation(
            x=0.004, xref="paper", xanchor="left", yanchor="bottom", borderpad=0,
            y=math.log10(low) if panel.is_logarithmic else low, **_small(words, GREY),
        )  # fmt: skip


def _mark(
    chart: go.Figure, axis: str, at: float, words: str, colour: str, *, is_logarithmic: bool
) -> None:
    """Draw a labelled line across a chart."""
    other = "y" if axis == "x" else "x"
    dash = "dash" if axis == "x" else "dot"
    chart.add_shape(
        {"type": "line", f"{axis}0": at, f"{axis}1": at, f"{other}0": 0, f"{other}1": 1,
         f"{other}ref": "paper", "line": {"color": colour, "dash": dash, "width": 1.2}}
    )  # fmt: skip
    if words:
        place = math.log10(at) if is_logarithmic else at  # plotly takes exponents for text
        chart.add_annotation(
            {axis: place, other: 0.02 if axis == "x" else 1, f"{other}ref": "paper",
             "textangle": -90 if axis == "x" else 0, "xanchor": "right", "yanchor": "bottom",
             **_small(words, colour)}
        )  # fmt: skip


def _small(words: str, colour: str) -> dict[str, Any]:
    return {"text": _plain(words), "showarrow": False, "font": {"size": 10, "color": colour}}


def _value_axis(panel: Lines) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": _plain(panel.label)}, "zeroline": False}
    if not panel.is_logarithmic:
        return axis | {"rangemode": "tozero"}
    ticks = [digit * 10.0**power for power in range(-6, 9) for digit in (1, 2, 5)]
    return axis | {
        "type": "log", "tickmode": "array", "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }  # fmt: skip


def _number_axis(over: str) -> dict[str, Any]:
    """Describe the axis of layers, scales or ranks."""
    title, is_logarithmic = AXES[over]
    return {
        "title": {"text": title, "standoff": 8}, "automargin": True, "tickformat": "d",
        "type": "log" if is_logarithmic else "linear", "zeroline": False,
    }  # fmt: skip


def _step_axis(axis: StepAxis, gaps: str) -> dict[str, Any]:
    ticks, ends = axis.ticks(), axis.places([axis.steps[0], axis.steps[-1]])
    low, high = (math.log10(end) for end in ends)
    space = 0.03 * (high - low or 1)
    return {
        "title": {"text": axis.label(gaps), "standoff": 8}, "automargin": True, "type": "log",
        "tickmode": "array", "zeroline": False,
        "tickvals": axis.places(ticks), "ticktext": [f"{step:,}" for step in ticks],
        "range": [low - space, high + space],
    }  # fmt: skip


def _draw_matrix(panel: Matrix) -> go.Figure:
    chart = go.Figure(layout=_LAYOUT)
    x_axis: dict[str, Any] = {"title": {"text": "head"}, "dtick": _every(panel.columns)}
    x: Sequence[float] = panel.columns
    axis = StepAxis(panel.columns) if panel.over == "step" else None
    if axis is not None:
        x, x_axis = axis.edges(), _step_axis(axis, "white")
        x_axis["range"] = [math.log10(x[0]), math.log10(x[-1])]
    if panel.remark:
        x_axis["title"]["text"] += f"<br>{_plain(panel.remark)}"
    value = "text" if panel.is_logarithmic else "z:.4g"
    chart.add_heatmap(
        x=x, y=panel.layers, customdata=[panel.columns] * len(panel.layers),
        hovertemplate=f"layer %{{y}}, {panel.over} %{{customdata:,d}}: %{{{value}}}<extra></extra>",
        **_colours_of(panel),
    )  # fmt: skip
    for start, end in axis.blanks() if axis is not None else ():
        chart.add_vrect(start, end, fillcolor="white", line_width=0)
    chart.data[0].colorbar.update(
        title={"text": _plain(panel.label), "side": "right", "font": {"size": 11}},
        thickness=12, outlinewidth=0,
    )  # fmt: skip
    chart.update_layout(
        xaxis={**x_axis, "showgrid": False, "zeroline": False},
        yaxis={"title": {"text": "layer"}, "dtick": _every(panel.layers), "showgrid": False,
               "zeroline": False},
        plot_bgcolor=NOTHING,
    )  # fmt: skip
    return chart


def _colours_of(panel: Matrix) -> dict[str, Any]:
    """Return the values of a matrix and its colour scale as arguments of a plotly heat map."""
    scale: dict[str, Any] = {"colorscale": SIGNED if panel.is_signed else UNSIGNED}
    if not panel.is_logarithmic:
        shown = [_shown(row) for row in panel.values]
        return {"z": shown, **scale, "zmin": panel.low, "zmax": panel.high}
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.log10(panel.values)
    powers = np.linspace(math.log10(panel.low), math.log10(panel.high), 5).tolist()
    return {
        "z": [_shown(row) for row in logs],
        "text": [[f"{value:.4g}" for value in row] for row in panel.values],
        **scale, "zmin": powers[0], "zmax": powers[-1],
        "colorbar": {"tickvals": powers, "ticktext": [f"{10**power:.2g}" for power in powers]},
    }  # fmt: skip


def _every(numbers: Sequence[int]) -> int:
    """Return the spacing of tick labels that names at most sixteen of the numbers."""
    return math.ceil(len(numbers) / 16)


def _shown(values: Iterable[float]) -> list[float | None]:
    """Round values to five digits, and turn NaN into None, because JSON has no NaN."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]


def _plain(text: str) -> str:
    """Make text printable and escape HTML, so that text from a record is never interpreted."""
    return html.escape(printable(text), quote=False)
