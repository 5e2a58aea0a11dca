"""Drift against cosine over layers, norms of token types, and spectra."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from geomon import Reading, Readings
from geomon.analysis import single_source
from recipes.papers.arrays import (
    Arrays,
    Floats,
    MissingError,
    arrays_over_training,
    layers_with,
    spread_evenly,
)
from recipes.papers.correlation import correlate
from recipes.study.drawing import BLUE, GREEN, GREY, IN_ORDER, ORANGE, label_panel, step_axis

# Rows of a type below which its mean and variance say little: the limit of 2409.11253.
_FEWEST = 10
# The parts of Q, from below: common mean, between types, within types.
_SHARES = (
    ("mean", "common mean, M / Q", ORANGE),
    ("between", "between token types, V_B / Q", GREEN),
    ("within", "within token types, V_W / Q", BLUE),
)
_LEAST_SHARE = 1e-9  # of the variance: smaller eigenvalues are rounding
_MOST_SPECTRA = 6
_LAYER, _STEP = "layer (0 = what enters the first block)", "training step (logarithmic)"


def drift_figure(run: Readings) -> Figure:
    """Draw the norm of the mean row against the mean cosine across layers, with p-values.

    After figures 5 and 16 of Godey et al. (2401.12143).

    Args:
        run: Readings of a run, of one stack.
    """
    for name in ("drift_norm", "cosine"):
        if not run.layers(name):
            raise MissingError(f"{name} was not measured in this run")
    found = [
        (reading, correlate(reading.column("drift_norm"), reading.column("cosine")))
        for reading in single_source(run)
    ]
    found = [pair for pair in found if pair[1] and math.isfinite(pair[1]["pearson"].value)]
    if not found:
        raise MissingError(
            "the correlation of drift_norm and cosine needs 4 layers that vary or more"
        )
    figure = Figure(figsize=(10.8, 4.3), dpi=110, layout="constrained")
    across, over = figure.subplots(1, 2)
    last, fits = found[-1]
    drifts, cosines = (last.column(name).by_layer() for name in ("drift_norm", "cosine"))
    layers = [layer for layer in cosines if layer in drifts]
    across.plot([drifts[n] for n in layers], [cosines[n] for n in layers], "o-", color=BLUE, lw=0.8)
    for layer in layers:
        across.annotate(str(layer), (drifts[layer], cosines[layer]), xytext=(7, -11),
                        textcoords="offset points", fontsize=8.5)  # fmt: skip
    title = f"A dot for each layer at step {last.step:,}"
    label_panel(across, "a", title, "norm of the mean row", "mean cosine")
    across.margins(0.12)
    words = [
        f"{name.title()} {fit.value:+.2f}, p = {fit.p_value:.2g}" for name, fit in fits.items()
    ]
    across.text(0.03, 0.97, "\n".join(words), transform=across.transAxes, va="top", fontsize=9.5)

    steps, count = [reading.step for reading, _ in found], len(layers)
    for name, colour, style in (("spearman", BLUE, "-"), ("pearson", ORANGE, "--")):
        values = [max(each[name].p_value, 1e-16) for _, each in found]
        over.plot(steps, values, color=colour, ls=style, label=name.title())
    how = "exact, by permutations" if count <= 9 else "of normal series"
    if count <= 9:
        least = 2 / math.factorial(count)
        over.axhline(least, color=GREY, ls=":",
                     label=f"least possible with {count} layers: {least:.2g}")  # fmt: skip
    over.axhline(0.05, color=GREY, lw=0.9, label="0.05")
    over.set_yscale("log")
    over.yaxis.set_major_formatter("{x:g}")
    over.yaxis.set_minor_locator(NullLocator())
    title = "Two-sided p-value of the correlation over layers"
    label_panel(over, "b", title, _STEP, f"p-value, {how} (logarithmic)")
    step_axis(over, steps)
    over.legend(fontsize=9, edgecolor="none")
    return figure


def norms_figure(run: Readings) -> Figure:
    """Draw variance against squared norm of token types, and parts of the mean square by depth.

    After the figures of Yamagiwa and Shimodaira (2409.11253): M, the squared norm of a mean, and V,
    the variance about it, sum to Q, the mean square norm.

    Args:
        run: Readings of a run, of one stack.
    """
    found = arrays_over_training(run, "type_rows", 2)
    step, arrays = max(found.items(), default=(0, Arrays()))
    layers = spread_evenly(layers_with(arrays, "type_rows"), 3)
    shares = [
        reading
        for reading in single_source(run)
        if all(reading.column("variance_shares", part).by_layer() for part in ("", "mean"))
    ]
    if not layers and not shares:
        raise MissingError(
            "token types were not measured in this run (within_variance, variance_shares): the "
            "model was given no token ids, or the metrics were not chosen"
        )
    rows = bool(layers) + bool(shares)
    figure = Figure(figsize=(11.2, 0.6 + 3.8 * rows), dpi=110, layout="constrained")
    panels = iter(figure.subplots(rows, 3, squeeze=False).flat)
    letters = iter("abcdef")
    for layer in layers:
        _draw_types(next(panels), next(letters), f"Layer {layer}, step {step:,}", arrays, layer)
    for _ in range(-len(layers) % 3):
        next(panels).set_visible(False)
    for reading in (shares[0], shares[-1]) if shares else ():
        _draw_shares(next(panels), next(letters), reading)
    if shares:
        _draw_within(next(panels), next(letters), shares)
    figure.supxlabel(
        "of hidden states: M, squared norm of their mean; V, variance about it, between (V_B) and "
        "within (V_W) token types; Q = M + V, mean square norm", fontsize=9, color=GREY,
    )  # fmt: skip
    return figure


def spectra_figure(run: Readings) -> Figure:
    """Draw shares of the variance by rank: of each layer at the last step, of two over training.

    Args:
        run: Readings of a run, of one stack.
    """
    by_step = arrays_over_training(run, "eigenvalues", _MOST_SPECTRA)
    if not by_step:
        raise MissingError(
            "no eigenvalues stand beside the record: a Monitor with arrays=True keeps them if "
            "effective_rank or participation_ratio is measured"
        )
    last = max(by_step)
    layers = layers_with(by_step[last], "eigenvalues")
    some = dict.fromkeys([layers[len(layers) // 2], layers[-1]])
    panels = [
        (f"Every layer at step {last:,}", [(f"layer {n}", last, n) for n in layers]),
        *(
            (f"Layer {n} over training", [(f"step {step:,}", step, n) for step in by_step])
            for n in some
        ),
    ]
    figure = Figure(figsize=(4.8 * len(panels), 4.2), dpi=110, layout="constrained")
    for panel, letter, (title, lines) in zip(
        figure.subplots(1, len(panels)), "abc", panels, strict=False
    ):
        for number, (name, step, layer) in enumerate(lines):
            shares = _variance_shares(run, step, by_step[step], layer)
            colour = IN_ORDER[number * len(IN_ORDER) // len(lines)]
            panel.plot(range(1, len(shares) + 1), shares, color=colour, label=name)
        panel.set_xscale("log")
        panel.set_yscale("log")
        label_panel(panel, letter, title, "rank of the eigenvalue", "share of the variance")
        panel.legend(fontsize=8.5, frameon=False, ncols=math.ceil(len(lines) / 8))
    return figure


def _draw_types(panel: Axes, letter: str, title: str, arrays: Arrays, layer: int) -> None:
    """Draw a dot for each token type, and the line through them."""
    rows, square, scatter = (
        arrays[f"{name}/layer_{layer:02d}"]
        for name in ("type_rows", "type_square_of_mean", "type_scatter")
    )
    frequent = rows >= _FEWEST
    count = rows[frequent]
    variance = scatter[frequent] / (count - 1)
    norm = square[frequent] - variance / count
    x_label, y_label = "squared norm of the type's mean, M", "variance about it, V"
    if len(count) < 3:
        label_panel(panel, letter, title, x_label, y_label)
        panel.text(0.5, 0.5, f"fewer than 3 token types come {_FEWEST} times", ha="center",
                   transform=panel.transAxes, color=GREY)  # fmt: skip
        return
    size = 10 + 60 * np.sqrt(count / count.max())
    panel.scatter(norm, variance, s=size, color=BLUE, alpha=0.6, lw=0, zorder=2)
    total, ends = norm + variance, np.array([norm.min(), norm.max()])
    panel.plot(ends, total.mean() - ends, color=GREY, lw=1, ls="--",
               label="M + V = mean of Q (slope −1)")  # fmt: skip
    low, high = variance.min(), variance.max()
    panel.set_ylim(min(0.0, low), high * 1.35 if high > 0 else 1.0)
    panel.margins(x=0.08)
    if norm.std() and variance.std():
        slope, offset = np.polyfit(norm, variance, 1)
        panel.plot(ends, slope * ends + offset, color=ORANGE, lw=1.6, label="least squares")
        fit = np.corrcoef(norm, variance)[0, 1] ** 2
        title += f", {len(count)} token types"
        x_label += (
            f"\nslope {slope:+.2f}, R² {fit:.2f}; control: Q varies by "
            f"{100 * total.std() / total.mean():.0f} %"
        )
    label_panel(panel, letter, title, x_label, y_label)
    panel.xaxis.set_major_locator(MaxNLocator(4))
    if letter == "a":
        panel.legend(loc="upper right", fontsize=8.5, edgecolor="none")


def _draw_shares(panel: Axes, letter: str, reading: Reading) -> None:
    layers = list(reading.column("variance_shares", "mean").depths())
    below = np.zeros(len(layers))
    for part, words, colour in _SHARES:
        column = reading.column("variance_shares", part)
        height = np.nan_to_num([column.at(layer) for layer in layers])
        panel.bar(layers, height, bottom=below, width=0.82, color=colour, label=words)
        below = below + height
    title = f"Parts of Q over depth, step {reading.step:,}"
    label_panel(panel, letter, title, _LAYER, "share of the mean square norm")
    panel.set(ylim=(0, 1.42), yticks=[0, 0.25, 0.5, 0.75, 1])
    panel.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    panel.legend(loc="upper left", fontsize=9, edgecolor="none")


def _draw_within(panel: Axes, letter: str, readings: list[Reading]) -> None:
    for reading, colour in ((readings[0], GREY), (readings[-1], BLUE)):
        profile = reading.column("variance_shares").by_layer()
        panel.plot(*zip(*profile.items(), strict=True), "o-", color=colour,
                   label=f"step {reading.step:,}")  # fmt: skip
    title, label = "What context does to tokens", "within types of all variance, V_W / V"
    label_panel(panel, letter, title, _LAYER, label)
    panel.set_ylim(bottom=0)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.legend(fontsize=9, edgecolor="none")


def _variance_shares(run: Readings, step: int, arrays: Arrays, layer: int) -> Floats:
    """Eigenvalues as shares of the whole variance, some of which may lie beyond those kept."""
    values = arrays.get(f"eigenvalues/layer_{layer:02d}", np.zeros(0))
    recorded = [
        each.column("variance").at(layer) for each in single_source(run) if each.step == step
    ]
    total = max([values.sum(), *recorded])
    return values[values > _LEAST_SHARE * total] / total
