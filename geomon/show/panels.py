"""Panels: what pages show, as data that matplotlib, plotly and plotext draw.

A panel is `Lines` over steps or layers, or a `Matrix` of colours whose rows are layers, the first
at the bottom. `collect` makes them of the readings of a run.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from geomon.analysis import Curve

# Labels of the axes that lines run over, and whether these axes are logarithmic.
AXES = {
    "step": ("training step (logarithmic)", True),
    "layer": ("layer (0 = what enters the first block)", False),
    "scale": ("scale k: distances to neighbours k and 2k (logarithmic)", True),
}

# Largest number of steps at which profiles are drawn.
_MAX_PROFILES = 7
# How far to the left of the first step step 0 stands, in powers of ten.
_ZERO = 0.45
# Least distance of the steps that an axis names, as a share of its length.
_LEAST_APART = 0.15

Floats = NDArray[np.float64]


class NotMeasuredError(ValueError):
    """A run cannot give a figure; the message says in one line what was not measured."""


@dataclass(frozen=True)
class Line:
    """A line of a panel.

    Attributes:
        name: What it is; "" to leave it out of the legend.
        x: Steps, layers or scales, ascending.
        y: Values; NaN if there is none.
        colour: Its colour, as "#RRGGBB".
        low: Lower ends of a band about it; empty for none.
        high: Upper ends.
        dash: "solid", "dash", "dot" or "dashdot".
        width: Width in points.
    """

    name: str
    x: Sequence[int]
    y: Sequence[float]
    colour: str
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dash: str = "solid"
    width: float = 2.0


@dataclass(frozen=True)
class Lines:
    """A panel of lines.

    Attributes:
        label: Label of the axis of values.
        lines: The lines; none where nothing was measured.
        over: What they run over, a key of `AXES`.
        named_by: What the names of lines are numbers of, "step" or "layer", where a colour bar
            shows them; "" for a legend.
        null: Value of rows without structure and its words; None if it is not known.
        chance: Half width of a band about 0 and its words; None for none.
        alerts: Steps of alerts, and the kinds that are there first, in words.
        ends: Lowest and highest value of the axis in pictures; None if it follows the lines.
        remark: What a reader has to know besides.
        is_logarithmic: Whether the axis of values is.
        bands: What the bands of lines are.
    """

    label: str
    lines: Sequence[Line]
    over: str = "step"
    named_by: str = ""
    null: tuple[float, str] | None = None
    chance: tuple[float, str] | None = None
    alerts: Sequence[tuple[int, str]] = ()
    ends: tuple[float, float] | None = None
    remark: str = ""
    is_logarithmic: bool = False
    bands: str = "95 % interval"

    @property
    def steps(self) -> list[int]:
        """Steps of all lines and alerts, which the axis spans."""
        return [*(at for line in self.lines for at in line.x), *(at for at, _ in self.alerts)]

    @property
    def has_bands(self) -> bool:
        """Whether a line has a band."""
        return any(line.low for line in self.lines)

    @property
    def null_inside(self) -> tuple[float, str] | None:
        """The null, unless it lies outside of what the lines reach over, or 0."""
        values = [0.0, *(v for line in self.lines for v in (*line.y, *line.high))]  # NaN is no end
        low, high = self.ends or (min(values), 1.1 * max(values))
        return self.null if self.null is not None and low < self.null[0] < high else None


@dataclass(frozen=True)
class Matrix:
    """A panel of colours.

    Attributes:
        label: What the colours stand for.
        values: Values, [layers, columns]; NaN if there is none.
        layers: Number of the layer of each row.
        columns: Step or number of the head of each column.
        low: Lowest value of the scale.
        high: Highest value of the scale.
        over: "step" or "head".
        remark: What a reader has to know besides.
        is_logarithmic: Whether the scale is logarithmic.
    """

    label: str
    values: Floats
    layers: Sequence[int]
    columns: Sequence[int]
    low: float
    high: float
    over: str = "head"
    remark: str = ""
    is_logarithmic: bool = False

    @property
    def is_signed(self) -> bool:
        """Whether the scale is one of both signs, about 0."""
        return self.low < 0


class StepAxis:
    """Logarithmic axis of steps, with step 0 to the left of the first step after it.

    Args:
        steps: Steps that are shown, one at least.
    """

    def __init__(self, steps: Iterable[int]) -> None:
        self.steps = sorted(set(steps))
        self._after = min((step for step in self.steps if step > 0), default=1)

    def places(self, steps: Iterable[int]) -> list[float]:
        """Return where steps stand: a step above 0 at its own number."""
        return [float(step) if step > 0 else self._after * 10**-_ZERO for step in steps]

    def edges(self) -> list[float]:
        """Return the ends of the columns of the steps, one more than there are steps."""
        at = self.places(self.steps)
        if len(at) == 1:
            return [at[0] / 1.5, at[0] * 1.5]
        inner = [math.sqrt(one * other) for one, other in itertools.pairwise(at)]
        return [at[0] ** 2 / inner[0], *inner, at[-1] ** 2 / inner[-1]]

    def ticks(self) -> list[int]:
        """Return the steps that the axis names: its ends, the first step after 0, powers of ten.

        Those whose names would touch are left out, the ends never.
        """
        first, last = self.steps[0], self.steps[-1]
        low, high = map(math.log10, self.places([first, last]))
        powers = [10**power for power in range(len(str(last)))]
        kept = [first, last]
        for step in (self._after, *powers):
            apart = min(abs(math.log10(step / at)) for at in self.places(kept))
            if self._after <= step < last and apart >= _LEAST_APART * (high - low):
                kept.append(step)
        return sorted({*kept})


def spread_steps(steps: Sequence[int], most: int = _MAX_PROFILES) -> list[int]:
    """Choose the first and the last step and some between, denser after the first.

    Args:
        steps: Steps to choose from.
        most: Largest number of steps chosen.

    Returns:
        Chosen steps, ascending.

    Example:
        >>> spread_steps([0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32], 4)
        [0, 2, 8, 32]
    """
    steps = sorted(steps)
    if len(steps) <= most:
        return steps
    logarithms = np.log1p(np.array(steps) - steps[0])
    targets = np.linspace(0, logarithms[-1], most)
    nearest = {int(np.abs(logarithms - target).argmin()) for target in targets}
    return [steps[index] for index in sorted(nearest)]


def ends_and_middle(steps: Sequence[int]) -> list[int]:
    """Choose the first step, the last, and the one nearest to the middle of the run.

    Args:
        steps: Steps to choose from, ascending, one at least.

    Example:
        >>> ends_and_middle([0, 16, 32, 64, 181, 362, 724])
        [0, 362, 724]
    """
    middle = (steps[0] + steps[-1]) / 2
    return sorted({steps[0], min(steps, key=lambda step: abs(step - middle)), steps[-1]})


def spread_items(items: Sequence[int], most: int) -> list[int]:
    """Choose at most so many of the items, evenly spaced, the first and the last among them.

    Args:
        items: Items to choose from.
        most: Largest number of items chosen, at least 2.

    Example:
        >>> spread_items([1, 2, 3, 4, 5, 6, 7], 3)
        [1, 4, 7]
    """
    if len(items) <= most:
        return list(items)
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def spread_both(steps: Sequence[int], most: int) -> set[int]:
    """Choose at most so many steps: half of them evenly, half denser after the first."""
    return {*spread_items(steps, most // 2), *spread_steps(steps, most // 2)}


def thin(curve: Curve, most: int = 400) -> Curve:
    """Choose some hundred points of a curve, its ends and its extremes among them."""
    if len(curve) <= most:
        return curve
    extremes = {curve.steps[curve.values.index(pick(curve.values))] for pick in (min, max)}
    kept = spread_both(curve.steps, most) | extremes
    places = [place for place, step in enumerate(curve.steps) if step in kept]
    rows = ([row[place] for place in places] for row in (curve.values, curve.margins))
    return Curve([curve.steps[place] for place in places], *rows)
