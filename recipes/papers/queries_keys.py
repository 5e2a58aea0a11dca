"""Queries and keys of two heads over training, and of a layer in several runs (2401.12143).

After figures 11, 12 and 19 to 23 of Godey et al. Queries and keys are as projected, before any
rotation by position.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from geomon import Readings
from geomon.analysis import chance_limit
from geomon.record import layer_tag
from recipes.papers.alignment import align_layers, cosine
from recipes.papers.arrays import (
    Arrays,
    Floats,
    MissingError,
    arrays_over_training,
    spread,
    spread_evenly,
)
from recipes.study.drawing import BLUE, GREY, IN_ORDER, ORANGE, label_panel, step_axis

# Readings whose means are joined by arrows, those whose clouds are drawn, and panels of layers.
_MOST_ARROWS, _MOST_CLOUDS, _MOST_LAYERS = 14, 4, 4
_NO_MEANS = (
    "no mean queries and keys stand beside the record: a Monitor with arrays=True keeps them if "
    "qk_cosine or qk_dot is measured"
)
_ARROW: dict[str, Any] = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0}


class HeadHistory(NamedTuple):
    """Queries and keys of one head over training.

    Attributes:
        layer: Number of the layer.
        head: Number of the query head.
        steps: Steps with arrays, ascending.
        mean_query: Mean query at each step, [steps, width].
        mean_key: Mean key of the head's key head at each step, [steps, width].
        queries: A few queries at each step, [rows, width] each.
        keys: A few keys at each step, [rows, width] each.
    """

    layer: int
    head: int
    steps: list[int]
    mean_query: Floats
    mean_key: Floats
    queries: list[Floats]
    keys: list[Floats]

    @property
    def cosines(self) -> Floats:
        """Cosine of mean query and mean key at each step; NaN if one of them is 0."""
        return cosine(self.mean_query, self.mean_key)


def means_figure(run: Readings) -> Figure:
    """Draw how the mean query and the mean key of two heads move over training, in three planes.

    Each plane is spanned by two leading singular directions, not centred: of the queries and keys
    of all steps together, of the keys alone, and of the queries alone.

    Args:
        run: Readings of a run, of one stack.
    """
    heads = _similar_and_opposite(run)
    figure = Figure(figsize=(11.4, 0.6 + 3.6 * len(heads)), dpi=110, layout="constrained")
    grid = figure.subplots(len(heads), 3, squeeze=False)
    letters = iter("abcdef")
    for row, one in zip(grid, heads, strict=True):
        for panel, name, rows in zip(
            row, ("queries and keys", "keys alone", "queries alone"),
            ([*one.queries, *one.keys], one.keys, one.queries), strict=True,
        ):  # fmt: skip
            basis, shares = _plane(rows, one)
            _label_plane(panel, next(letters), f"plane of {name}", shares)
            for words, path, colour in (
                ("mean query", one.mean_query, BLUE), ("mean key", one.mean_key, ORANGE),
            ):  # fmt: skip
                _draw_path(panel, path[np.isfinite(path).all(axis=1)] @ basis.T, colour, words)
        _name_row(row[0], one, heads)
    grid[0, 0].legend(loc="best", fontsize=9, edgecolor="none")
    steps = heads[0].steps
    figure.suptitle(
        f"Mean query and mean key from step {steps[0]:,} (open) to step {steps[-1]:,} (filled), "
        "arrows from reading to reading"
    )
    return figure


def clouds_figure(run: Readings) -> Figure:
    """Draw single queries and keys of two heads at a few steps, in the plane of all of them.

    Args:
        run: Readings of a run, of one stack.
    """
    heads = _similar_and_opposite(run)
    if not any(len(rows) for rows in heads[0].queries):
        raise MissingError(
            "no single queries and keys stand beside the record: the model has so many heads that "
            "only their means fit"
        )
    shown = spread(heads[0].steps, _MOST_CLOUDS)
    size = 1.2 + 2.9 * len(shown), 0.8 + 2.9 * len(heads)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid = figure.subplots(len(heads), len(shown), squeeze=False, sharex="row", sharey="row")
    letters = iter("abcdefgh")
    for row, one in zip(grid, heads, strict=True):
        basis, shares = _plane([*one.queries, *one.keys], one)
        for panel, step in zip(row, shown, strict=True):
            at = one.steps.index(step)
            title = f"step {step:,}: cosine {one.cosines[at]:+.2f}"
            _label_plane(panel, next(letters), title, shares)
            panel.label_outer()
            for words, rows, mean, colour, marker in (
                ("queries", one.queries[at], one.mean_query[at], BLUE, "o"),
                ("keys", one.keys[at], one.mean_key[at], ORANGE, "^"),
            ):
                if len(rows):
                    panel.plot(
                        *(rows @ basis.T).T, marker, color=colour, label=words, ms=3.6, alpha=0.55,
                        mew=0, zorder=2,
                    )  # fmt: skip
                if np.isfinite(mean).all():
                    arrow = {**_ARROW, "color": colour, "lw": 1.8}
                    panel.annotate("", mean @ basis.T, (0, 0), zorder=3, arrowprops=arrow)
        _name_row(row[0], one, heads)
    grid[0, 0].legend(loc="best", fontsize=9, edgecolor="none")
    figure.suptitle("Queries and keys of single tokens, and their means (arrows from the origin)")
    return figure


def stability_figure(runs: Mapping[str, Readings]) -> Figure:
    """Draw the cosine of mean query and mean key over training, a line for each run.

    The heads of a layer are joined to one vector; up to four layers have a panel, the first and the
    last among them. The band holds 95 % of the cosines of isotropic directions of that width.

    Args:
        runs: Readings of each run, of one stack, by name.
    """
    found = {
        name: align_layers(arrays_over_training(run, "mean_query")) for name, run in runs.items()
    }
    for name, layers in found.items():
        if not any(math.isfinite(value) for each in layers.values() for value in each.cosines):
            raise MissingError(f"{name}: {_NO_MEANS}" if len(runs) > 1 else _NO_MEANS)
    common = sorted(set.intersection(*map(set, found.values())))
    if not common:
        raise MissingError("the runs have no layers in common: give runs of one model")
    shown = spread_evenly(common, _MOST_LAYERS)
    figure = Figure(figsize=(3.3 * max(len(shown), 2), 3.8), dpi=110, layout="constrained")
    agreeing = 0
    for panel, layer in zip(
        figure.subplots(1, len(shown), squeeze=False, sharey=True)[0], shown, strict=True
    ):
        alignments = {name: layers[layer] for name, layers in found.items()}
        label_panel(panel, "", f"layer {layer}", "training step (logarithmic)",
                    "cosine of mean query and mean key\n(all heads as one vector)")  # fmt: skip
        limit = chance_limit(max(2, min(each.width for each in alignments.values())))
        panel.axhspan(
            -limit, limit, color=GREY, alpha=0.18, lw=0, label="95 % of random directions"
        )
        for number, (name, each) in enumerate(alignments.items()):
            colour = IN_ORDER[number % len(IN_ORDER)]
            panel.plot(each.steps, each.cosines, color=colour, label=name.replace("$", r"\$"))
        panel.set_ylim(-1.05, 1.05)
        panel.label_outer()
        step_axis(panel, sorted({step for each in alignments.values() for step in each.steps}))
        ends = np.array([each.cosines[-1] for each in alignments.values()])
        agreeing += bool((ends > limit).all() or (ends < -limit).all())
    handles, names = panel.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 5),
                  frameon=False, fontsize=9)  # fmt: skip
    some = f" ({len(shown)} of {len(common)} layers)" if len(shown) < len(common) else ""
    words = f"Mean query against mean key, heads of a layer together{some}"
    if len(runs) > 1:
        words = (
            f"Mean query against mean key in {len(runs)} runs{some}: all end on the same side, "
            f"beyond chance, in {agreeing} of {len(shown)} layers"
        )
    figure.suptitle(words)
    return figure


def _similar_and_opposite(run: Readings) -> list[HeadHistory]:
    """The head whose mean query and mean key are most similar at the end, and the most opposite."""
    known = [one for one in _histories(run) if math.isfinite(one.cosines[-1])]
    if not known:
        raise MissingError(_NO_MEANS)
    known.sort(key=lambda one: -one.cosines[-1])
    return [known[0], known[-1]] if len(known) > 1 else known


def _histories(run: Readings) -> Iterator[HeadHistory]:
    """All heads that have mean queries and keys at every one of a few steps."""
    by_step = arrays_over_training(run, "mean_query", _MOST_ARROWS)
    for layer, means in align_layers(by_step).items():
        heads = means.queries.shape[1]
        for head in range(heads if len(means.steps) == len(by_step) else 0):
            queries, keys = (
                [_rows(arrays, layer_tag(name, layer), head, heads) for arrays in by_step.values()]
                for name in ("queries", "keys")
            )
            yield HeadHistory(
                layer, head, list(by_step), means.queries[:, head], means.keys[:, head],
                queries, keys,
            )  # fmt: skip


def _rows(arrays: Arrays, tag: str, head: int, heads: int) -> Floats:
    """Single finite queries or keys of one of the query heads, [rows, width]."""
    rows = arrays.get(tag, np.zeros((0, 1, 0)))
    rows = rows[:, head * rows.shape[1] // heads]  # heads may share a key head
    return rows[np.isfinite(rows).all(axis=1)]


def _plane(rows: Sequence[Floats], one: HeadHistory) -> tuple[Floats, Floats]:
    """Compute two leading directions of rows, [2, width], and their shares of the mean square.

    If no single rows are kept, the means are used. The last mean key has no negative coordinate.
    """
    kept = [each for each in rows if len(each)] or [one.mean_query, one.mean_key]
    whole = np.concatenate(kept)
    whole = whole[np.isfinite(whole).all(axis=1)]
    _, values, directions = np.linalg.svd(whole, full_matrices=False)
    basis, shares = np.zeros((2, whole.shape[1])), np.zeros(2)
    count = min(2, len(directions))
    basis[:count] = directions[:count]
    shares[:count] = (values**2 / max(float((values**2).sum()), 1e-300))[:count]
    signs = np.where(one.mean_key[-1] @ basis.T < 0, -1.0, 1.0)
    return basis * signs[:, None], shares


def _draw_path(panel: Axes, path: Floats, colour: str, words: str) -> None:
    arrow = {**_ARROW, "color": colour, "lw": 1.3, "mutation_scale": 9}
    for start, end in itertools.pairwise(path):
        panel.annotate("", end, start, arrowprops=arrow)
    panel.plot(*path.T, color=colour, lw=0)  # for the limits of the axes
    panel.plot(*path[0], "o", ms=6, mfc=panel.get_facecolor(), mec=colour, mew=1.5, zorder=4)
    panel.plot(*path[-1], "o", ms=6.5, color=colour, zorder=4, label=words)


def _label_plane(panel: Axes, letter: str, title: str, shares: Floats) -> None:
    first, second = 100 * shares
    words = f"1st direction ({first:.0f} % of squares)", f"2nd direction ({second:.0f} %)"
    label_panel(panel, letter, title, *words)
    panel.grid(visible=False)
    panel.margins(0.12)
    panel.axhline(0, color=GREY, lw=0.7, zorder=0)
    panel.axvline(0, color=GREY, lw=0.7, zorder=0)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5))


def _name_row(panel: Axes, one: HeadHistory, heads: Sequence[HeadHistory]) -> None:
    """Write next to a row of panels which head it shows, and why this one."""
    words = f"layer {one.layer}, head {one.head}, cosine {one.cosines[-1]:+.2f}"
    if len(heads) > 1:
        words = f"{'most similar' if one is heads[0] else 'most opposite'} head\n{words}"
    panel.set_ylabel(f"{words}\n\n{panel.get_ylabel()}", fontsize=9.5)
