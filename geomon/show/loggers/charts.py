"""Interactive charts of a run, made with plotly: those of the cards of TensorBoard."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from geomon.analysis import Curve, curve_of, single_source
from geomon.analysis.alerts import alert_notes, kind_of
from geomon.analysis.profile import head_values, profile_of
from geomon.record import Reading, Readings, tags

try:
    import plotly.graph_objects as go
except ImportError as error:
    raise ImportError("charts for W&B need plotly: pip install 'geomon[wandb]'") from error

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_CURVES = (
    ("TwoNN, all tokens", tags.mean_tag("twonn"), "0,114,178"),
    ("TwoNN, one per (token, position)", tags.mean_tag("twonn_distinct"), "213,94,0"),
    ("Gride at scale 32, all tokens", tags.mean_tag("gride", "k32"), "0,158,115"),
)
_ALERT = "#A8488A"
# Viridis without its pale end, which vanishes on white.
_STEPS = ("#440154", "#404387", "#29788E", "#22A784", "#79D151", "#C2C21D")
_PROFILES = len(_STEPS)
# Ratio of the estimates above which their axis is logarithmic.
_MAX_LINEAR_RATIO = 4.0
_LABELS = {
    "twonn": "intrinsic dimension (TwoNN)",
    "anisotropy": "anisotropy (share of variance along the first direction)",
    "attention_entropy": "attention entropy (nats)",
    "qk_cosine": "cosine of mean query and mean key",
}


def charts_of(readings: Readings, reading: Reading) -> dict[str, go.Figure]:
    """Draw the charts that there are values for, by their names.

    Args:
        readings: Readings of the main stack of a run, thinned.
        reading: The last reading, with all its values.
    """
    uniform = reading.values.get("attention_entropy/null", math.nan)
    charts = {
        "1_intrinsic_dimension": _dimension(readings),
        "2_anisotropy_over_depth": _profile(readings, "anisotropy"),
        "3_intrinsic_dimension_by_layer": _layers(readings, "twonn"),
        "4_anisotropy_by_layer": _layers(readings, "anisotropy"),
        "5_attention_entropy_by_layer": _layers(readings, "attention_entropy"),
        "6_query_and_key_by_head": _heads(reading, "qk_cosine", -1.0, 1.0),
        "7_attention_entropy_by_head": _heads(reading, "attention_entropy", 0.0, uniform),
    }
    return {name: chart for name, chart in charts.items() if chart is not None}


def _dimension(readings: Readings) -> go.Figure | None:
    """Draw the intrinsic dimension over training, with bands for the 95 % intervals."""
    curves = [(name, curve_of(readings, tag), colour) for name, tag, colour in _CURVES]
    curves = [entry for entry in curves if len(entry[1])]
    if not curves:
        return None
    axis = _StepAxis(sorted({step for _, curve, _ in curves for step in curve.steps}))
    chart = _figure("intrinsic dimension, mean over layers (band: 95 % interval)")
    for name, curve, colour in curves:
        chart.add_traces(_band(axis, curve, colour))
        chart.add_scatter(
            x=axis.places(curve.steps), y=curve.values, customdata=curve.steps, name=name,
            line={"color": f"rgb({colour})"}, mode="lines+markers", marker={"size": 4},
            hovertemplate="step %{customdata}: %{y:.2f}",
        )  # fmt: skip
    for step, words in _alerts(readings):
        chart.add_vline(
            axis.place(step), line={"color": _ALERT, "dash": "dot"},
            annotation={"text": kind_of(words), "font": {"color": _ALERT}},
        )  # fmt: skip
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
    chart = _figure(_LABELS[metric])
    for place, reading in enumerate(drawn):
        colour = _STEPS[round(place * (_PROFILES - 1) / max(len(drawn) - 1, 1))]
        profile = profile_of(reading.values, metric)
        chart.add_scatter(
            x=list(range(len(profile))), y=_shown(profile), name=f"step {reading.step}",
            line={"color": colour}, hovertemplate="layer %{x}: %{y:.3f}",
        )  # fmt: skip
    chart.update_layout(
        xaxis={"title": {"text": "layer (0 = what enters the first block)"}, "dtick": None},
        yaxis={"rangemode": "tozero"},
    )
    return chart


def _layers(readings: Readings, metric: str) -> go.Figure | None:
    """Draw a metric at every layer and step as a map of colours."""
    selected = [reading for reading in single_source(readings) if reading.layers(metric)]
    if not selected:
        return None
    axis = _StepAxis([reading.step for reading in selected])
    profiles = [profile_of(reading.values, metric) for reading in selected]
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
        zmin=min(0.0, *known), zmax=max(blocks), colorbar={"title": _side(_LABELS[metric])},
        customdata=[[reading.step for reading in selected]] * (depth - first),
        hovertemplate="step %{customdata}, layer %{y}: %{z:.3f}<extra></extra>",
    )  # fmt: skip
    chart.update_layout(xaxis=axis.layout(), yaxis={"title": {"text": "layer"}})
    return chart


def _heads(reading: Reading, metric: str, low: float, high: float) -> go.Figure | None:
    """Draw a metric of heads as a matrix of layers and heads, on a scale that stays as it is."""
    places = head_values(reading.values, metric)
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
        colorbar={"title": _side(_LABELS[metric])},
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


def _alerts(readings: Readings) -> list[tuple[int, str]]:
    """List the first alert of each kind, with its step."""
    found: dict[str, tuple[int, str]] = {}
    for reading in readings:
        for words in alert_notes(reading):
            found.setdefault(kind_of(words), (reading.step, words))
    return list(found.values())


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
