"""Norm against variance of token types, and shares of the mean square norm over depth.

After the figures of Yamagiwa and Shimodaira (2409.11253): M, the squared norm of a mean, and V, the
variance about it, sum to Q, the mean square norm.
"""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from geomon.analysis import single_source
from geomon.record import Reading, Readings, tags
from geomon.show.collect import array_layers, arrays_by_step, depth_panel
from geomon.show.colours import BLUE, GREEN, GREY, VERMILLION
from geomon.show.figures import axes
from geomon.show.panels import AXES, NotMeasuredError, spread_items

# Rows of a type below which its mean and variance say little: the authors' limit.
_FEWEST = 10
# The parts of Q, from below: common mean, between types, within types.
_SHARES = (
    ("mean", "common mean, M / Q", VERMILLION),
    ("between", "between token types, V_B / Q", GREEN),
    ("within", "within token types, V_W / Q", BLUE),
)


def norms_figure(readings: Readings) -> Figure:
    """Draw variance against squared norm of token types, and shares of the mean square by depth."""
    found = arrays_by_step(readings, "type_rows", 2)
    step = max(found, default=None)
    arrays = {} if step is None else found[step]
    layers = spread_items(array_layers(arrays, "type_rows", readings), 3)
    shares = [r for r in single_source(readings) if _has_shares(r)]
    if not layers and not shares:
        raise NotMeasuredError(
            "token types were not measured in this run (within_variance, variance_shares): the "
            "model was given no token ids, or the metrics were not chosen"
        )
    rows = bool(layers) + bool(shares)
    figure = axes.new_figure(11.2, 0.6 + 3.8 * rows)
    grid = iter(figure.subplots(rows, 3, squeeze=False))
    letters = iter("abcdef")
    if layers:
        row = next(grid)
        for panel, layer in zip(row, layers, strict=False):
            words = _draw_types(panel, arrays, layer)
            axes.caption(panel, next(letters), f"Layer {layer}, step {step:,}{words}")
        for panel in row[len(layers) :]:
            panel.set_visible(False)
        axes.show_legend(row[0], loc="upper right")
    if shares:
        row = next(grid)
        for panel, reading in zip(row, (shares[0], shares[-1]), strict=False):
            _draw_shares(panel, reading)
            axes.caption(panel, next(letters), f"Parts of Q over depth, step {reading.step:,}")
        axes.draw(row[2], depth_panel(readings, "variance_shares"))
        row[2].set_ylabel("within types of all variance, V_W / V", fontsize=10)
        axes.caption(row[2], next(letters), "What context does to tokens")
    axes.footnote(
        figure,
        "of hidden states: M, squared norm of their mean; V, variance about it, between (V_B) and "
        "within (V_W) token types; Q = M + V, mean square norm",
    )
    return figure


def _draw_types(panel: Axes, arrays: dict[str, NDArray[np.generic]], layer: int) -> str:
    """Draw a dot for each token type; returns what the line through them is."""
    rows, square, scatter = (
        np.asarray(arrays[tags.layer_tag(name, layer)], dtype=np.float64)
        for name in ("type_rows", "type_square_of_mean", "type_scatter")
    )
    frequent = rows >= _FEWEST
    count = rows[frequent]
    variance = scatter[frequent] / (count - 1)
    norm = square[frequent] - variance / count
    axes.style_axes(panel)
    panel.xaxis.set_major_locator(MaxNLocator(4))
    for axis in (panel.xaxis, panel.yaxis):  # a common factor would stand among the words below
        axis.set_major_formatter("{x:.3g}")
    panel.set_xlabel("squared norm of the type's mean, M", fontsize=10)
    panel.set_ylabel("variance about it, V", fontsize=10)
    if len(count) < 3:
        axes.show_message(panel, f"fewer than 3 token types come {_FEWEST} times")
        return ""
    size = 10 + 60 * np.sqrt(count / count.max())
    panel.scatter(norm, variance, s=size, color=BLUE, alpha=0.6, lw=0, zorder=2)
    total = norm + variance
    ends = np.array([norm.min(), norm.max()])
    middle = total.mean()
    low, high = variance.min(), variance.max()
    panel.plot(ends, middle - ends, color=GREY, lw=1, ls="--", label="M + V = mean of Q (slope −1)")
    panel.set_ylim(min(0.0, low), high * 1.35 if high > 0 else 1.0)
    panel.margins(x=0.08)
    if not norm.std() or not variance.std():
        return ""
    slope, offset = np.polyfit(norm, variance, 1)
    panel.plot(ends, slope * ends + offset, color=VERMILLION, lw=1.6, label="least squares")
    fit = np.corrcoef(norm, variance)[0, 1] ** 2
    control = total.std() / total.mean()
    line = f"slope {axes.signed(slope)}, R² {fit:.2f}"
    words = f"{line}; control: Q varies by {100 * control:.0f} %"
    # Below the axis: dots may lie anywhere within.
    panel.set_xlabel(f"{panel.get_xlabel()}\n{words}", fontsize=10)
    return f", {len(count)} token types"


def _draw_shares(panel: Axes, reading: Reading) -> None:
    layers = list(reading.column("variance_shares", "mean").depths())
    below = np.zeros(len(layers))
    for part, words, colour in _SHARES:
        column = reading.column("variance_shares", part)
        values = [column.at(layer) for layer in layers]
        height = np.nan_to_num(np.array(values))
        panel.bar(layers, height, bottom=below, width=0.82, color=colour, label=words)
        below = below + height
    axes.style_axes(panel)
    panel.set_ylim(0, 1.42)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
    every = math.ceil(len(layers) / 12)
    panel.set_xticks(layers[::every])
    panel.set_xlabel(AXES["layer"][0], fontsize=10)
    panel.set_ylabel("share of the mean square norm", fontsize=10)
    axes.show_legend(panel)


def _has_shares(reading: Reading) -> bool:
    parts = ("", "mean")
    return all(reading.column("variance_shares", part).by_layer() for part in parts)
