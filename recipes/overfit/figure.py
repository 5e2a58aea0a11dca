"""The figure of the experiment: losses and geometry, on few texts and on plenty."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.overfit.claims import (
    HELD_OUT,
    TRAIN,
    WATCHED,
    Runs,
    geometry_turn,
    last_layer,
    load_runs,
    loss_turn,
)
from recipes.study.drawing import BLUE, GREY, ORANGE, draw_seeds, explain_seeds, plain_axes

_SHOWN = {"few": ("few texts, many epochs", ORANGE), "plenty": ("plenty of text: control", BLUE)}
_TITLES = {
    "local_dimension": ("Local dimension, last layer", "mean of TwoNN on 64 nearest rows"),
    "twonn": ("Intrinsic dimension, last layer", "TwoNN on all rows"),
    "effective_rank": ("Effective rank, last layer", "exp of the entropy of the spectrum"),
}


def draw(folder: Path) -> Figure:
    """Draw an experiment in four panels.

    Args:
        folder: Folder of the experiment, with a folder for each seed.
    """
    runs = load_runs(folder)
    figure = Figure(figsize=(10.2, 7.0), dpi=110, layout="constrained")
    panels = figure.subplots(2, 2)
    _draw_losses(panels[0, 0], runs)
    step = "training step"
    plain_axes(
        panels[0, 0], "a", "Loss: held-out text solid, training text dashed", step,
        "cross-entropy (nats per character)",
    )  # fmt: skip
    for letter, panel, watched in zip("bcd", panels.flat[1:], WATCHED[:3], strict=True):
        title, label = _TITLES[watched.metric]
        for name, (words, colour) in _SHOWN.items():
            places, curves = _curves(runs, name, last_layer(runs[name][0], watched.metric))
            draw_seeds(panel, places, curves, colour=colour, label=words)
            for readings, curve in zip(runs[name], curves, strict=True):
                turn = geometry_turn(readings, watched)
                if turn is not None:
                    panel.plot(
                        [turn], [curve[places.index(turn)]], "o", ms=7, color=colour, mec="white"
                    )
        plain_axes(panel, letter, title, step, label)
        panel.set_ylim(bottom=0)
    turns = [turn for turn in map(loss_turn, runs["few"]) if turn is not None]
    for panel in panels.flat:
        for turn in turns:
            panel.axvline(turn, color=GREY, lw=1, ls=":", zorder=0)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=10)
    note = (
        f"{explain_seeds(len(runs['few']))}; dots: where a seed turns; dotted: where the held-out "
        "loss of few texts does"
    )
    figure.supxlabel(note, fontsize=9, color=GREY)
    return figure


def _draw_losses(panel: Axes, runs: Runs) -> None:
    for name, (words, colour) in _SHOWN.items():
        places, curves = _curves(runs, name, HELD_OUT)
        draw_seeds(panel, places, curves, colour=colour, label=words)
    for name, (_, colour) in _SHOWN.items():
        places, curves = _curves(runs, name, TRAIN)
        draw_seeds(panel, places, curves, colour=colour, label="", lw=1.6, ls="--")
    panel.set_ylim(bottom=0)


def _curves(runs: Runs, name: str, tag: str) -> tuple[list[int], list[list[float]]]:
    series = [readings.series(tag) for readings in runs[name]]
    return series[0][0], [values for _, values in series]
