"""Interactive charts of a run, made with plotly: those of the cards of TensorBoard."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from geomon.analysis import Curve, curve_of, single_source
from geomon.analysis.alerts import first_alerts
from geomon.analysis.profile import profile_of
from geomon.record import Reading, Readings
from geomon.show.loggers.history import BY_HEAD, BY_LAYER

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise ImportError("charts for W&B need plotly: pip install 'geomon[wandb]'") from error

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_CURVES = (
    ("twonn", "", "0,114,178"),
    ("twonn_distinct", "", "213,94,0"),
    ("gride", "k32", "0,158,115"),
)
_ALERT = "#A8488A"
# Viridis without its pale end, which vanishes on white.
_STEPS = ("#440154", "#404387", "#29788E", "#22A784", "#79D151", "#C2C21D")
_PROFILES = len(_STEPS)
# Ratio of the estimates above which their axis is logarithmic.
_MAX_LINEAR_RATIO = 4.0


def charts_of(
    readings: Readings, reading: Reading, metrics: Iterable[str] = ()
) -> dict[str, go.Figure]:
    """Draw the charts that there are values for, by their names.

    Args:
        readings: Readings of the main stack of a run, thinned.
        reading: The last reading, with all its values.
        metrics: Names of metrics that are drawn over training and over depth besides.
    """
    uniform = reading.column("attention_entropy").whole.get("null", math.nan)
    ranges = {"qk_cosine": (-1.0, 1.0), "attention_entropy": (0.0, uniform)}
    drawn = [
        ("twonn", "", _over_training(readings, "twonn", _CURVES)),
        ("anisotropy", "over_depth", _profile(readings, "anisotropy")),
        *((metric, "by_layer", _layers(readings, metric)) for metric in BY_LAYER),
        *(
            (metric, "by_head", _heads(readings, reading, metric, *ranges[metric]))
            for metric in BY_HEAD
        ),
    ]
    for metric in metrics:
        curves = ((metric, "", _CURVES[0][-1]),)
        drawn.append((metric, "", _over_training(readings, metric, curves)))
        drawn.append((metric, "over_depth", _profile(readings, metric)))
    charts = {}
    for number, (metric, how, chart) in enumerate(drawn, start=1):
        if chart is not None:
            title = re.sub(r"\W+", "_", readings.text_of(metric).title)
            charts["_".join(filter(None, (str(number), title, how)))] = chart
    return charts


def _over_training(
    readings: Readings, metric: str, drawn: Sequence[tuple[str, str, str]]
) -> go.Figure | None:
    """Draw means over layers with bands for the 95 % intervals; of metric, part and colour."""
    curves = [
        (readings.text_of(name).title_of(part), curve_of(readings, name, part=part), colour)
        for name, part, colour in drawn
    ]
    curves = [entry for entry in curves if len(entry[1])]
    if not curves:
        return None
    axis = _StepAxis(sorted({step for _, curve, _ in curves for step in curve.steps}))
    band = " (band: 95 % interval)" * any(any(curve.margins) for _, curve, _ in curves)
    chart = _figure(f"{readings.text_of(metric).label}, mean over layers{band}")
    for name, curve, colour in curves:
        chart.add_traces(_band(axis, curve, colour))
        chart.add_scatter(
            x=axis.places(curve.steps), y=curve.values, customdata=curve.steps, name=name,
            line={"color": f"rgb({colour})"}, mode="lines+markers", marker={"size": 4},
            hovertemplate="step %{customdata}: %{y:.2f}",
        )  # fmt: skip
    for alert in first_alerts(readings):
        chart.add_vline(
            axis.place(alert.step), line={"color": _ALERT, "dash": "dot"},
            annotation={"text": alert.kind, "font": {"color": _ALERT}},
        )  # fmt: skip
    if len(drawn) == 1:
        _add_null(chart, readings, metric)
    lowest, highest = (pick(v for _, c, _ in curves for v in c.values) for pick in (min, max))
    far_apart = lowest > 0 and highest / lowest > _MAX_LINEAR_RATIO
    scale = {"type": "log", "dtick": "D2"} if far_apart else {"rangemode": "tozero"}
    chart.update_layout(xaxis=axis.layout(), yaxis=scale)
    return chart


def _band(axis: "_StepAxis", curve: Curve, colour: str) -> list[go.Scatter]:
    if not any(curve.margins):
        return []
    places = axis.places(curve.steps)
    pairs = list(zip(curve.values, curve.margins, strict=True))
    ends = [value + margin for value, margin in pairs]
    # Not below 0.1, for a logarithmic axis.
    ends += [max(value - margin, min(value, 0.1)) for value, margin in reversed(pairs)]
    return [
        go.Scatter(
            x=[*places, *reversed(places)], y=ends, fill="toself", mode="none",
            fillcolor=f"rgba({colour},0.18)", hoverinfo="skip", showlegend=False,
        )
    ]  # fmt: skip


def _profile(readings: Readings, metric: str) -> go.Figure | None:
    """Draw a metric over depth, one line for each of a few steps."""
    selected = [reading for reading in single_source(readings) if reading.layers(metric)]
    if not selected:
        return None
    count = min(_PROFILES, len(selected))
    indices = {round(i * (len(selected) - 1) / max(count - 1, 1)) for i in range(count)}
    drawn = [selected[index] for index in sorted(indices)]
    chart = _figure(readings.text_of(metric).label)
    for place, reading in enumerate(drawn):
        colour = _STEPS[round(place * (_PROFILES - 1) / max(len(drawn) - 1, 1))]
        profile = profile_of(reading, metric)
        chart.add_scatter(
            x=list(range(len(profile))), y=_shown(profile), name=f"step {reading.step}",
            line={"color": colour}, hovertemplate="layer %{x}: %{y:.3f}",
        )  # fmt: skip
    chart.update_layout(
        xaxis={"title": {"text": "layer (0 = what enters the first block)"}, "dtick": None},
        yaxis={"rangemode": "tozero"},
    )
    _add_null(chart, readings, metric)
    return chart


def _add_null(chart: go.Figure, readings: Readings, metric: str) -> None:
    """Draw a line at the null of a metric, where the last reading has one."""
    null = readings[-1].column(metric).whole.get("null", math.nan)
    if math.isfinite(null):
        words = readings.text_of(metric).null_label
        chart.add_hline(
            null, line={"color": "#767676", "dash": "dot", "width": 1},
            annotation={"text": f"{words}: {null:.2g}", "font": {"size": 10}},
        )  # fmt: skip


def _layers(readings: Readings, metric: str) -> go.Figure | None:
    """Draw a metric at every layer and step as a map of colours."""
    selected = [reading for reading in single_source(readings) if reading.layers(metric)]
    if not selected:
        return None
    axis = _StepAxis([reading.step for reading in selected])
    profiles = [profile_of(reading, metric) for reading in selected]
    depth = max(map(len, profiles))
    table = [[_shown(profile)[layer] for profile in profiles] for layer in range(depth)]
    known = [value for row in table for value in row if value is not None]
    if not known:
        return None
    first = 0 if any(value is not None for value in table[0]) else 1
    # The dimension of layer 0 is often many times as high.
    blocks = [value for row in table[1:] for value in row if value is not None] or known
    beyond = max(known) > max(blocks)
    chart = _figure("layer 0 lies beyond the colours" if beyond else "")
    chart.add_heatmap(
        z=table[first:], x=axis.edges(), y=list(range(first, depth)), colorscale="Cividis",
        zmin=min(0.0, *known), zmax=max(blocks),
        colorbar={"title": _side(readings.text_of(metric).label)},
        customdata=[[reading.step for reading in selected]] * (depth - first),
        hovertemplate="step %{customdata}, layer %{y}: %{z:.3f}<extra></extra>",
    )  # fmt: skip
    chart.update_layout(xaxis=axis.layout(), yaxis={"title": {"text": "layer"}})
    return chart


def _heads(
    readings: Readings, reading: Reading, metric: str, low: float, high: float
) -> go.Figure | None:
    """Draw a metric of heads as a matrix of layers and heads, on a scale that stays as it is."""
    places = reading.column(metric).by_head()
    if not places:
        return None
    layers = sorted({layer for layer, _ in places})
    heads = sorted({head for _, head in places})
    chart = _figure(f"step {reading.step}")
    signed = low < 0
    chart.add_heatmap(
        z=[[places.get((layer, head)) for head in heads] for layer in layers],
        x=heads, y=layers, zmin=low, zmax=high if math.isfinite(high) else max(places.values()),
        colorscale="RdBu" if signed else "Cividis", reversescale=signed,
        colorbar={"title": _side(readings.text_of(metric).label)},
        hovertemplate="layer %{y}, head %{x}: %{z:.3f}<extra></extra>",
    )  # fmt: skip
    chart.update_layout(
        xaxis={"title": {"text": "head"}, "tickmode": "auto"},
        yaxis={"title": {"text": "layer"}, "autorange": "reversed"},
    )
    return chart


class _StepAxis:
    """Logarithmic axis of steps, with step 0 to the left of the first step after it.

    Args:
        steps: Steps, ascending.
    """

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = list(steps)
        after = min((step for step in steps if step > 0), default=1)
        self._zero = math.log10(after) - 0.45

    def place(self, step: int) -> float:
        """Return the place of a step."""
        return math.log10(step) if step > 0 else self._zero

    def places(self, steps: Iterable[int]) -> list[float]:
        """Return the places of steps."""
        return [self.place(step) for step in steps]

    def edges(self) -> list[float]:
        """Return the ends of the columns of the steps, one more than there are steps."""
        at = self.places(self._steps)
        inner = [(one + other) / 2 for one, other in itertools.pairwise(at)]
        if not inner:
            return [at[0] - 0.5, at[0] + 0.5]
        return [2 * at[0] - inner[0], *inner, 2 * at[-1] - inner[-1]]

    def layout(self) -> dict[str, Any]:
        """Describe the axis for plotly."""
        last = self._steps[-1]
        powers = [10**power for power in range(len(str(last)) + 1)]
        first = min((step for step in self._steps if step > 0), default=0)
        named = [step for step in powers if first <= step <= last]
        if first and first not in named and first * 2 <= min(named, default=last):
            named.insert(0, first)
        if self._steps[0] == 0:
            named.insert(0, 0)
        return {
            "title": {"text": "training step (logarithmic)"},
            "tickvals": self.places(named),
            "ticktext": [f"{step:,}" for step in named],
        }


def _shown(values: Sequence[float]) -> list[float | None]:
    """Return the values, with None where there is none: JSON has no NaN."""
    return [value if math.isfinite(value) else None for value in values]


def _side(text: str) -> dict[str, Any]:
    return {"text": text, "side": "right", "font": {"size": 11}}


def _figure(title: str) -> go.Figure:
    return go.Figure(
        layout={
            "template": "plotly_white",
            "title": {"text": title, "font": {"size": 13}, "x": 0.02},
            "margin": {"l": 50, "r": 20, "t": 40, "b": 50},
            "legend": {"orientation": "h", "y": -0.25},
        }
    )


__all__ = ["charts_of"]
