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
from recipes.study.drawing import (
    BLUE,
    GREEN,
    GREY,
    IN_ORDER,
    ORANGE,
    Line,
    Panel,
    draw_panels,
    step_axis,
)

# Rows of a type below which its mean and variance say little: the limit of 2409.11253.
_FEWEST = 10
# The parts of Q.
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
    last, fits = found[-1]
    drifts, cosines = (last.column(name).by_layer() for name in ("drift_norm", "cosine"))
    places = {layer: (drifts[layer], cosines[layer]) for layer in cosines if layer in drifts}
    words = [
        f"{name.title()} {fit.value:+.2f}, p = {fit.p_value:.2g}" for name, fit in fits.items()
    ]

    def name_layers(axes: Axes) -> None:
        for layer, place in places.items():
            axes.annotate(str(layer), place, xytext=(7, -11), textcoords="offset points")
        axes.margins(0.12)
        axes.text(0.03, 0.97, "\n".join(words), transform=axes.transAxes, va="top")

    def finish(axes: Axes) -> None:
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        step_axis(axes, steps)

    x, y = zip(*places.values(), strict=True)
    steps, count = [reading.step for reading, _ in found], len(places)
    least, exact = 2 / math.factorial(count), count <= 9
    how = "exact, by permutations" if exact else "of normal series"
    return draw_panels([
        Panel(f"A dot for each layer at step {last.step:,}", "norm of the mean row", "mean cosine",
              [Line("", BLUE, x, [y], {"marker": "o", "lw": 0.8})], finish=name_layers,
              legend=None),
        Panel("Two-sided p-value of the correlation over layers", _STEP,
              f"p-value, {how} (logarithmic)",
              [Line(name.title(), colour, steps,
                    [[max(each[name].p_value, 1e-16) for _, each in found]])
               for name, colour in (("spearman", BLUE), ("pearson", ORANGE))],
              [(least, f"least possible with {count} layers: {least:.2g}")] * exact
              + [(0.05, "0.05")], finish, {"yscale": "log"}),
    ], 2, (10.8, 4.3))  # fmt: skip


def norms_figure(run: Readings) -> Figure:
    """Draw variance against squared norm of token types, and parts of the mean square by depth.

    After the figures of Yamagiwa and Shimodaira (2409.11253): M, the squared norm of a mean, and V,
    the variance about it, sum to Q, the mean square norm.

    Args:
        run: Readings of a run, of one stack.
    """
    found = arrays_over_training(run, "type_rows", 2)
    step, arrays = max(found.items(), default=(0, Arrays()))
    shares = [
        reading
        for reading in single_source(run)
        if all(reading.column("variance_shares", part).by_layer() for part in ("", "mean"))
    ]
    layers = spread_evenly(layers_with(arrays, "type_rows"), 3)
    panels = [_types_panel(f"Layer {layer}, step {step:,}", arrays, layer) for layer in layers]
    if shares:
        last = shares[-1]
        title = f"Parts of Q over depth, step {last.step:,}"
        lines = [_profile(last, *each) for each in _SHARES]
        panels.append(Panel(title, _LAYER, "share of the mean square norm", lines))
        lines = [_profile(reading, "", f"step {reading.step:,}", colour)
                 for reading, colour in ((shares[0], GREY), (last, BLUE))]  # fmt: skip
        words = "within types of all variance, V_W / V"
        panels.append(Panel("What context does to tokens", _LAYER, words, lines))
    if not panels:
        raise MissingError(
            "token types were not measured in this run (within_variance, variance_shares): the "
            "model was given no token ids, or the metrics were not chosen"
        )
    return draw_panels(
        panels, 3, (11.2, 4.0 * -(-len(panels) // 3)),
        "of hidden states: M, squared norm of their mean; V, variance about it, between (V_B) and "
        "within (V_W) token types; Q = M + V, mean square norm",
    )  # fmt: skip


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
    curves = {f"Every layer at step {last:,}": [(f"layer {n}", last, n) for n in layers]} | {
        f"Layer {n} over training": [(f"step {step:,}", step, n) for step in by_step]
        for n in dict.fromkeys([layers[len(layers) // 2], layers[-1]])
    }
    panels = []
    for title, own in curves.items():
        lines = []
        for number, (name, step, layer) in enumerate(own):
            shares = _variance_shares(run, step, by_step[step], layer)
            colour = IN_ORDER[number * len(IN_ORDER) // len(own)]
            lines.append(
                Line(name, colour, range(1, len(shares) + 1), [shares.tolist()], {"lw": 1.4})
            )
        panels.append(
            Panel(title, "rank of the eigenvalue", "share of the variance", lines,
                  options={"xscale": "log", "yscale": "log"})
        )  # fmt: skip
    return draw_panels(panels, len(panels), (4.8 * len(panels), 4.2))


def _types_panel(title: str, arrays: Arrays, layer: int) -> Panel:
    """A dot for each token type, and the line through them."""
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
        words = f"fewer than 3 token types come {_FEWEST} times"
        return Panel(
            title, x_label, y_label, [], legend=None,
            finish=lambda axes: axes.text(0.5, 0.5, words, ha="center", transform=axes.transAxes),
        )  # fmt: skip
    total, ends = norm + variance, np.array([norm.min(), norm.max()])
    lines = [
        Line(
            "M + V = mean of Q (slope −1)",
            GREY,
            ends.tolist(),
            [(total.mean() - ends).tolist()],
            {"ls": "--"},
        )
    ]
    if norm.std() and variance.std():
        slope, offset = np.polyfit(norm, variance, 1)
        fitted = (slope * ends + offset).tolist()
        lines.append(Line("least squares", ORANGE, ends.tolist(), [fitted]))
        fit = np.corrcoef(norm, variance)[0, 1] ** 2
        title += f", {len(count)} token types"
        x_label += (
            f"\nslope {slope:+.2f}, R² {fit:.2f}; control: Q varies by "
            f"{100 * total.std() / total.mean():.0f} %"
        )

    def scatter_types(axes: Axes) -> None:
        size = 10 + 60 * np.sqrt(count / count.max())
        axes.scatter(norm, variance, s=size, color=BLUE, alpha=0.6, lw=0, zorder=2)
        axes.set_ylim(min(0.0, variance.min()), variance.max() * 1.35 or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(4))

    return Panel(title, x_label, y_label, lines, finish=scatter_types)


def _profile(reading: Reading, part: str, words: str, colour: str) -> Line:
    profile = reading.column("variance_shares", part).by_layer()
    return Line(words, colour, list(profile), [list(profile.values())], {"marker": "o"})


def _variance_shares(run: Readings, step: int, arrays: Arrays, layer: int) -> Floats:
    """Eigenvalues as shares of the whole variance, to which others, not kept, may contribute."""
    values = arrays.get(f"eigenvalues/layer_{layer:02d}", np.zeros(0))
    recorded = [
        each.column("variance").at(layer) for each in single_source(run) if each.step == step
    ]
    total = max([values.sum(), *recorded])
    return values[values > _LEAST_SHARE * total] / total
