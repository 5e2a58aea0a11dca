"""The curves behind the claims: means over seeds with their bands, single seeds thin."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from geomon import Reading, read
from geomon.analysis.curves import measured
from geomon.analysis.profile import profile_of
from geomon.show.figures import draw
from recipes.decoder.questions.question import NORMED
from recipes.decoder.train import complete_seeds
from recipes.study.drawing import BLUE, GREEN, GREY, IN_ORDER, ORANGE, draw_seeds, label_panel
from recipes.study.history import History, drift_and_cosine, over_heads, over_layers, value_of

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_PURPLE, _SKY = "#CC79A7", "#56B4E9"

_Line = tuple[str, str, Callable[[Reading], float]]


def decoder_figure(folder: Path) -> Figure:
    """Draw the curves on which the claims stand, in nine panels.

    Args:
        folder: Folder of the experiment.

    Raises:
        RunError: The folder holds no experiment, or no seed is complete.
    """
    histories = [History(read(seed)) for seed in complete_seeds(folder)]
    last = histories[0].last
    depth = len(profile_of(last, "anisotropy")) - 1
    figure = Figure(figsize=(13.2, 11.0), dpi=80, layout="constrained")
    axes = figure.subplots(3, 3)
    over_training = partial(_over_training, histories=histories)

    by_layer = partial(_by_layer, depth=depth)
    over_training(axes[0, 0], by_layer("anisotropy"))
    label_panel(axes[0, 0], "a", "Anisotropy", "share of variance in the first direction")
    over_training(axes[0, 1], [
        ("TwoNN, all tokens", BLUE, partial(value_of, tag="twonn/mean")),
        ("TwoNN, one per (character, position)", ORANGE,
         partial(value_of, tag="twonn_distinct/mean")),
        ("Gride at scale 8", GREEN, partial(value_of, tag="gride/mean/k8")),
        ("Gride at scale 32", _PURPLE, partial(value_of, tag="gride/mean/k32")),
    ])  # fmt: skip
    axes[0, 1].set_yscale("log")
    axes[0, 1].set_yticks([2, 3, 5, 10, 20, 30], ["2", "3", "5", "10", "20", "30"])
    axes[0, 1].yaxis.set_minor_locator(NullLocator())
    label_panel(axes[0, 1], "b", "Intrinsic dimension", "dimension, mean over layers (log)")
    axes[0, 1].set_xlabel(f"{axes[0, 1].get_xlabel()}\n{_protocols(histories)}", fontsize=8.5)
    over_training(axes[0, 2], [
        ("64 nearest rows", ORANGE, partial(value_of, tag="local_anisotropy/mean")),
        ("all rows", BLUE, partial(value_of, tag="anisotropy/mean")),
    ])  # fmt: skip
    _null(axes[0, 2], last.values["local_anisotropy/null"], "64 rows of noise")
    _null(axes[0, 2], last.values["anisotropy/null"], "all rows of noise", "--")
    label_panel(axes[0, 2], "c", "Local and global anisotropy", "anisotropy, mean over layers")

    over_training(axes[1, 0], [
        ("cosine, last layer", BLUE, partial(_at_layer, metric="cosine", layer=depth)),
        ("cosine, mean over layers", _SKY, partial(value_of, tag="cosine/mean")),
        ("without the mean row", ORANGE, partial(value_of, tag="cosine_centred/mean")),
    ])  # fmt: skip
    _null(axes[1, 0], last.values["cosine/isotropic_pair"], "95 % point, one isotropic pair")
    label_panel(axes[1, 0], "d", "Mean cosine between tokens", "mean cosine")
    _draw_drift(axes[1, 1], histories)
    over_training(axes[1, 2], [
        ("size, mean over all heads", "black",
         partial(over_heads, metric="qk_cosine", size=True)),
        ("layer 1, mean with sign", IN_ORDER[0],
         partial(over_heads, metric="qk_cosine", layers=[1])),
        (f"layer {depth}, mean with sign", ORANGE,
         partial(over_heads, metric="qk_cosine", layers=[depth])),
    ])  # fmt: skip
    _null(axes[1, 2], last.values["qk_cosine/null_magnitude"], "size by chance")
    axes[1, 2].axhline(0, color=GREY, lw=0.8)
    label_panel(axes[1, 2], "f", "Mean query against mean key", "cosine")

    over_training(axes[2, 0], by_layer("attention_entropy"))
    label_panel(axes[2, 0], "g", "Attention entropy", "nats")
    rank, alpha = (f"{name}/{NORMED}" for name in ("effective_rank_last", "alpha_last"))
    over_training(axes[2, 1], [
        ("effective rank", BLUE, partial(value_of, tag=rank)),
        ("10 x alpha (decay of the spectrum)", ORANGE, lambda reading: 10 * reading.values[alpha]),
    ])  # fmt: skip
    label_panel(axes[2, 1], "h", "Spectrum of the last tokens", "after the final norm")
    _draw_shares(axes[2, 2], histories)
    return figure


def _protocols(histories: Sequence[History]) -> str:
    """Say how TwoNN is computed, and what two other protocols give at the start and the end."""
    others = (("discard_0", "none dropped"), ("discard_80", "smallest 20 % kept"))
    found = []
    for part, words in others:
        first, last = (
            np.mean([measured(reading, "twonn", part=part).value for reading in readings])
            for readings in ([h.first for h in histories], [h.last for h in histories])
        )
        found += [f"{words}: {first:.1f} to {last:.1f}"] if np.isfinite(first + last) else []
    return "; ".join(["TwoNN drops the largest 10 % of the ratios", *found])


def seeds_figure(folder: Path) -> Figure:
    """Draw mean query against mean key over training, a line for each seed.

    Args:
        folder: Folder of the experiment.

    Raises:
        RunError: The folder holds no experiment, or no seed is complete.
    """
    figure = draw("stability", [read(seed) for seed in complete_seeds(folder)])
    figure.set_dpi(80)
    return figure


def _by_layer(metric: str, *, depth: int) -> list[_Line]:
    return [
        (f"layer {layer}", IN_ORDER[(layer - 1) % len(IN_ORDER)],
         partial(_at_layer, metric=metric, layer=layer))
        for layer in range(1, depth + 1)
    ]  # fmt: skip


def _at_layer(reading: Reading, metric: str, layer: int) -> float:
    return over_layers(reading, metric, lambda profile: profile[layer - 1])


def _over_training(panel: Axes, lines: Sequence[_Line], *, histories: Sequence[History]) -> None:
    """Draw lines over training steps, on a logarithmic axis with step 0 at its left."""
    steps = histories[0].steps
    for label, colour, value in lines:
        table = np.array([[value(reading) for reading in h.readings] for h in histories])
        _draw(panel, steps, table, label, colour)
    panel.set_xscale("symlog", linthresh=steps[1], linscale=0.5)
    panel.set_xlim(0, steps[-1] * 1.1)
    ticks = [0, steps[1], *(10**power for power in range(2, 7) if steps[1] < 10**power < steps[-1])]
    panel.set_xticks(ticks)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    panel.set_xlabel("training step (logarithmic)")
    panel.legend(fontsize=8.5, frameon=False)


def _draw(
    panel: Axes, places: Sequence[float], table: NDArray[np.float64], label: str, colour: str
) -> None:
    """Draw the rows of a table where all of them are known, and their mean with its interval."""
    measured = np.isfinite(table).all(axis=0)
    if not measured.any():
        return
    x, table = np.asarray(places)[measured].tolist(), table[:, measured]
    draw_seeds(panel, x, table.tolist(), colour=colour, label=label)
    # Where few seeds make a band wide, the curves themselves decide the axis.
    low, high = panel.get_ylim() if panel.get_autoscale_on() is False else (np.inf, -np.inf)
    spare = 0.04 * float(table.max() - table.min())
    low, high = min(low, float(table.min()) - spare), max(high, float(table.max()) + spare)
    panel.set_ylim(low, high)


def _draw_drift(panel: Axes, histories: Sequence[History]) -> None:
    """Draw cosine against the norm of the mean, one line over depth for each seed, at the end."""
    for seed, history in enumerate(histories):
        drift, cosine = (profile_of(history.last, m) for m in ("drift_norm", "cosine"))
        fit = drift_and_cosine(history.last, "spearman")
        panel.plot(
            drift, cosine, "o-", color=IN_ORDER[seed % len(IN_ORDER)], ms=5, lw=1.2,
            label=f"seed {seed}: Spearman {fit.value:.1f}, p = {fit.p_value:.3f}",
        )  # fmt: skip
        if seed == 0:
            for layer, place in enumerate(zip(drift, cosine, strict=True)):
                panel.annotate(
                    f"{layer}", place, xytext=(5, -9), textcoords="offset points", fontsize=8.5
                )
    panel.legend(fontsize=8.5, frameon=False)
    panel.set_xlabel("norm of the mean row")
    label_panel(panel, "e", "Drift and cosine over layers 0 to the last", "mean cosine")


def _draw_shares(panel: Axes, histories: Sequence[History]) -> None:
    """Draw how the mean squared norm is shared over depth, at the end."""
    shares = [
        ("mean row", BLUE, "mean"),
        ("between characters", ORANGE, "between"),
        ("within a character", GREEN, "within"),
    ]
    for label, colour, part in shares:
        table = np.array([profile_of(h.last, "variance_shares", part=part) for h in histories])
        layers = range(table.shape[1])
        _draw(panel, layers, table, label, colour)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("layer (0 = what enters the first block)")
    panel.set_ylim(0, 1)
    panel.legend(fontsize=8.5, frameon=False)
    label_panel(panel, "i", "Shares of the mean squared norm", "share, at the end")


def _null(panel: Axes, value: float, label: str, style: str = ":") -> None:
    """Draw a grey line at what rows without structure give, and name it in the legend."""
    panel.axhline(value, color=GREY, lw=1.2, ls=style, label=f"{label}: {value:.2g}")
    low, high = panel.get_ylim()
    panel.set_ylim(min(low, value), max(high, value))
    panel.legend(fontsize=8.5, frameon=False)
