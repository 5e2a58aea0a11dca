"""Mean query against mean key of several runs, the heads of a layer joined to one vector.

After figure 23 of Godey et al. (2401.12143, appendix D): runs that differ in their seed alone.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from geomon.analysis.queries_keys import LayerAlignment, align_layers, chance_limit
from geomon.record import Readings
from geomon.show.colours import GREY, SERIES
from geomon.show.figures import axes
from geomon.show.loading import name_runs
from geomon.show.panels import NotMeasuredError, StepAxis, spread_items

# Layers that have a panel of their own.
_MOST_LAYERS = 4
# Runs beyond the number of colours have them again, in another style of line.
_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)))


def stability_figure(runs: Sequence[Readings]) -> Figure:
    """Draw the cosine of mean query and mean key over training, a line for each run.

    The heads of a layer are joined to one vector; up to four layers have a panel, the first and the
    last among them. The band holds 95 % of the cosines of isotropic directions of that width.

    Args:
        runs: Readings of runs of one kind of model, for instance of several seeds.

    Raises:
        NotMeasuredError: A run has no mean queries and keys, or they have no layer in common.
    """
    names = name_runs(map(_folder, runs))
    found = [align_layers(run) for run in runs]
    for name, layers in zip(names, found, strict=True):
        if not any(math.isfinite(value) for each in layers.values() for value in each.cosines):
            subject = f"{name}: no" if len(runs) > 1 else "no"
            raise NotMeasuredError(
                f"{subject} mean queries and keys stand beside the record: a Monitor with "
                "arrays=True keeps them where qk_cosine or qk_dot is measured"
            )
    common = sorted(set.intersection(*(set(layers) for layers in found)))
    if not common:
        raise NotMeasuredError("the runs have no layers in common: give runs of one model")
    shown = spread_items(common, _MOST_LAYERS)
    figure = axes.new_figure(1.2 + 2.9 * max(len(shown), 2), 4.1)
    row = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for panel, layer in zip(row, shown, strict=True):
        _draw_layer(panel, [layers[layer] for layers in found])
        panel.set_title(f"layer {layer}", loc="left", fontsize=10.5)
    title = runs[0].text_of("qk_cosine").title
    row[0].set_ylabel(f"{title}\n(all heads as one vector)", fontsize=10)
    _add_legend(figure, names)
    figure.suptitle(
        _words([[layers[layer] for layers in found] for layer in shown], len(common)),
        fontsize=12, x=0.012, ha="left",
    )  # fmt: skip
    return figure


def _draw_layer(panel: Axes, alignments: Sequence[LayerAlignment]) -> None:
    axis = StepAxis(step for each in alignments for step in each.steps)
    for number, each in enumerate(alignments):
        style: axes.Style = {"marker": "o", "ms": 4} if len(each.steps) == 1 else {}
        panel.plot(axis.places(each.steps), each.cosines, lw=1.7, **_style(number), **style)
    axes.step_axis(panel, axis)
    panel.set_ylim(-1.05, 1.05)
    panel.set_yticks([-1, -0.5, 0, 0.5, 1])
    panel.axhline(0, color=GREY, lw=0.8, zorder=0)
    limit = _limit(alignments)
    panel.axhspan(-limit, limit, color=GREY, alpha=0.18, lw=0, zorder=0)


def _limit(alignments: Sequence[LayerAlignment]) -> float:
    """The limit of chance, that of the shortest vectors where runs differ in their width."""
    return chance_limit(max(2, min(each.width for each in alignments)))


def _style(number: int) -> axes.Style:
    style = _STYLES[number // len(SERIES) % len(_STYLES)]
    return {"color": axes.ink(SERIES[number % len(SERIES)]), "ls": style}


def _add_legend(figure: Figure, names: Sequence[str]) -> None:
    handles: list[Line2D | Patch] = [
        Line2D([], [], lw=1.7, label=axes.literal(name), **_style(number))
        for number, name in enumerate(names)
    ]
    handles.append(Patch(color=GREY, alpha=0.18, lw=0, label="95 % of random directions"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 6), fontsize=9,
        frameon=False, handlelength=2.2,
    )  # fmt: skip


def _words(by_layer: Sequence[Sequence[LayerAlignment]], layers: int) -> str:
    """Say how many runs there are, and in how many layers they end on one side of chance."""
    some = f" ({len(by_layer)} of {layers} layers)" if len(by_layer) < layers else ""
    count = len(by_layer[0])
    if count == 1:
        return f"Mean query against mean key, heads of a layer together{some}"
    agreeing = 0
    for runs in by_layer:
        ends, limit = np.array([each.cosines[-1] for each in runs]), _limit(runs)
        agreeing += bool((ends > limit).all() or (ends < -limit).all())
    return (
        f"Mean query against mean key in {count} runs{some}: all end on the same side, beyond "
        f"chance, in {agreeing} of {len(by_layer)} layers"
    )


def _folder(run: Readings) -> Path:
    return run.folder.path.parent if run.folder is not None else Path("run")
