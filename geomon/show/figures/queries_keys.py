"""Queries and keys of two heads over training, in a plane: their means, and single ones.

After figures 11, 12 and 19 to 22 of Godey et al. (2401.12143). Queries and keys are as projected,
before any rotation by position.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from geomon.record import Readings, tags
from geomon.show.collect import array_layers, arrays_by_step
from geomon.show.colours import BLUE, GREY, VERMILLION
from geomon.show.figures import axes
from geomon.show.panels import Floats, NotMeasuredError, spread_steps

# Readings whose means are joined by arrows, and those whose clouds are drawn.
_MOST_ARROWS = 14
_MOST_CLOUDS = 4


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
        with np.errstate(invalid="ignore", over="ignore"):
            products = (self.mean_query * self.mean_key).sum(axis=1)
            norms = np.linalg.norm(self.mean_query, axis=1) * np.linalg.norm(self.mean_key, axis=1)
            return np.divide(products, norms, out=np.full_like(products, np.nan), where=norms > 0)


def means_figure(readings: Readings) -> Figure:
    """Draw how the mean query and the mean key of two heads move over training, in three planes.

    The planes are those of the two leading singular directions, not centred, of queries and keys of
    all steps together, of the keys alone and of the queries alone.
    """
    heads = _similar_and_opposite(readings)
    figure = axes.new_figure(11.4, 0.6 + 3.6 * len(heads))
    grid = figure.subplots(len(heads), 3, squeeze=False)
    letters = iter("abcdef")
    for row, one in zip(grid, heads, strict=True):
        spans = (
            ("queries and keys", [*one.queries, *one.keys]),
            ("keys alone", one.keys),
            ("queries alone", one.queries),
        )
        for panel, (name, rows) in zip(row, spans, strict=True):
            basis, shares = _plane(rows, one)
            for words, path, colour in (
                ("mean query", one.mean_query, BLUE), ("mean key", one.mean_key, VERMILLION),
            ):  # fmt: skip
                _draw_path(panel, path[np.isfinite(path).all(axis=1)] @ basis.T, colour, words)
            _label_plane(panel, shares)
            axes.caption(panel, next(letters), f"plane of {name}")
        _name_row(row[0], one, heads, -0.32)
    axes.show_legend(grid[0, 0], loc="best")
    first, last = heads[0].steps[0], heads[0].steps[-1]
    axes.title(
        figure,
        f"Mean query and mean key from step {first:,} (open) to step {last:,} (filled), "
        "arrows from reading to reading",
    )
    return figure


def clouds_figure(readings: Readings) -> Figure:
    """Draw single queries and keys of two heads at a few steps, in the plane of all of them.

    The plane is that of the two leading singular directions, not centred, of queries and keys of
    all steps together.
    """
    heads = _similar_and_opposite(readings)
    if not any(len(rows) for rows in heads[0].queries):
        raise NotMeasuredError(
            "no single queries and keys stand beside the record: the model has so many heads that "
            "only their means fit"
        )
    shown = spread_steps(heads[0].steps, _MOST_CLOUDS)
    figure = axes.new_figure(1.2 + 2.9 * len(shown), 0.8 + 2.9 * len(heads))
    grid = figure.subplots(len(heads), len(shown), squeeze=False, sharex="row", sharey="row")
    letters = iter("abcdefgh")
    for row, one in zip(grid, heads, strict=True):
        basis, shares = _plane([*one.queries, *one.keys], one)
        for panel, step in zip(row, shown, strict=True):
            at = one.steps.index(step)
            for words, rows, mean, colour, marker in (
                ("queries", one.queries[at], one.mean_query[at], BLUE, "o"),
                ("keys", one.keys[at], one.mean_key[at], VERMILLION, "^"),
            ):
                if len(rows):
                    dots: axes.Style = {"ms": 3.6, "alpha": 0.55, "mew": 0, "zorder": 2}
                    panel.plot(*(rows @ basis.T).T, marker, color=colour, label=words, **dots)
                if not np.isfinite(mean).all():
                    continue
                centre = mean @ basis.T
                panel.annotate(
                    "", centre, (0, 0), zorder=3,
                    arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.8, "shrinkA": 0,
                                "shrinkB": 0},
                )  # fmt: skip
            _label_plane(panel, shares, outer=panel is row[0])
            axes.caption(
                panel, next(letters), f"step {step:,}: cosine {axes.signed(one.cosines[at])}"
            )
        _name_row(row[0], one, heads, -0.42)
    axes.show_legend(grid[0, 0], loc="best")
    axes.title(
        figure, "Queries and keys of single tokens, and their means (arrows from the origin)"
    )
    return figure


# -- heads, and what stands beside the record ------------------------------------------------------


def _similar_and_opposite(readings: Readings) -> list[HeadHistory]:
    """The head whose mean query and mean key are most similar at the end, and the most opposite."""
    found = list(_histories(readings))
    known = [one for one in found if math.isfinite(one.cosines[-1])]
    if not known:
        raise NotMeasuredError(
            "no mean queries and keys stand beside the record: a Monitor with arrays=True keeps "
            "them where qk_cosine or qk_dot is measured"
        )
    known.sort(key=lambda one: -one.cosines[-1])
    return [known[0], known[-1]] if len(known) > 1 else known


def _histories(readings: Readings) -> Iterator[HeadHistory]:
    """All heads that have arrays at every one of a few steps."""
    by_step = arrays_by_step(readings, "mean_query", _MOST_ARROWS)
    if not by_step:
        return
    steps, last = sorted(by_step), by_step[max(by_step)]
    for layer in array_layers(last, "mean_query", readings):
        tag, key_tag = (tags.layer_tag(name, layer) for name in ("mean_query", "mean_key"))
        if not all(tag in by_step[step] and key_tag in by_step[step] for step in steps):
            continue
        heads, key_heads = len(last[tag]), len(last[key_tag])
        for head in range(heads):
            key = head * key_heads // heads
            yield HeadHistory(
                layer, head, steps,
                np.stack([_floats(by_step[step][tag])[head] for step in steps]),
                np.stack([_floats(by_step[step][key_tag])[key] for step in steps]),
                [_rows(by_step[step], tags.layer_tag("queries", layer), head) for step in steps],
                [_rows(by_step[step], tags.layer_tag("keys", layer), key) for step in steps],
            )  # fmt: skip


def _floats(array: NDArray[np.generic]) -> Floats:
    return np.asarray(array, dtype=np.float64)


def _rows(arrays: dict[str, NDArray[np.generic]], tag: str, head: int) -> Floats:
    """Single queries or keys of a head, [rows, width]; those that are not finite are left out."""
    if tag not in arrays:
        return np.zeros((0, 0))
    rows = _floats(arrays[tag])[:, head]
    return rows[np.isfinite(rows).all(axis=1)]


# -- planes ----------------------------------------------------------------------------------------


def _plane(rows: Sequence[Floats], one: HeadHistory) -> tuple[Floats, Floats]:
    """Compute two leading directions of rows, [2, width], and their shares of the mean square.

    If no single rows are kept, the means are used. The last mean key has no negative coordinate.
    """
    kept = [each for each in rows if len(each)]
    whole = np.concatenate(kept) if kept else np.concatenate([one.mean_query, one.mean_key])
    whole = whole[np.isfinite(whole).all(axis=1)]
    _, values, directions = np.linalg.svd(whole, full_matrices=False)
    basis, shares = np.zeros((2, whole.shape[1])), np.zeros(2)
    count = min(2, len(directions))
    basis[:count] = directions[:count]
    shares[:count] = (values**2 / max(float((values**2).sum()), 1e-300))[:count]
    signs = np.where(one.mean_key[-1] @ basis.T < 0, -1.0, 1.0)
    return basis * signs[:, None], shares


def _draw_path(panel: Axes, path: Floats, colour: str, words: str) -> None:
    for start, end in itertools.pairwise(path):
        panel.annotate(
            "", end, start,
            arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.3, "shrinkA": 0,
                        "shrinkB": 0, "mutation_scale": 9},
        )  # fmt: skip
    panel.plot(*path.T, color=colour, lw=0)  # for the limits of the axes
    panel.plot(*path[0], "o", ms=6, mfc=panel.get_facecolor(), mec=colour, mew=1.5, zorder=4)
    panel.plot(*path[-1], "o", ms=6.5, color=colour, zorder=4, label=words)


def _label_plane(panel: Axes, shares: Floats, *, outer: bool = True) -> None:
    axes.style_axes(panel)
    panel.grid(visible=False)
    panel.margins(0.12)
    panel.axhline(0, color=GREY, lw=0.7, zorder=0)
    panel.axvline(0, color=GREY, lw=0.7, zorder=0)
    panel.set_xlabel(f"1st direction ({100 * shares[0]:.0f} % of squares)", fontsize=9.5)
    if outer:
        panel.set_ylabel(f"2nd direction ({100 * shares[1]:.0f} %)", fontsize=9.5)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5))


def _name_row(panel: Axes, one: HeadHistory, heads: Sequence[HeadHistory], place: float) -> None:
    """Write beside a row of panels which head it is of, and why that one."""
    words = f"layer {one.layer}, head {one.head}, cosine {axes.signed(one.cosines[-1])}"
    if len(heads) > 1:
        words = f"{'most similar' if one is heads[0] else 'most opposite'} head\n{words}"
    panel.text(
        place, 0.5, words, transform=panel.transAxes, rotation=90, ha="center", va="center",
        fontsize=10,
    )  # fmt: skip
