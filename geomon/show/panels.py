"""Panels as plain data, which matplotlib, plotly and plotext draw.

A panel is either `Lines` over steps or layers, or a `Matrix` of colours with a row for each layer,
from bottom to top. The module `collect` builds panels from the readings of a run.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from geomon.analysis import Curve

# Labels of x axes other than steps, and whether these axes are logarithmic.
AXES = {
    "layer": ("layer (0 = what enters the first block)", False),
    "scale": ("scale k: distances to neighbours k and 2k (logarithmic)", True),
}

# Number of steps at which profiles are drawn.
_MAX_PROFILES = 7
# Distance of step 0 from the first step after it, in powers of ten.
_ZERO = 0.45
# Least distance between the tick labels of a step axis, as a share of its length.
_LEAST_APART = 0.15
# A gap between two readings is longer than this share of the run.
_GAP = 0.2
# How far the colours of a reading reach into a gap of a map, as a share of the axis.
_INTO_GAP = 0.02
# The values of a line with at most this many are marked with dots.
_MOST_DOTS = 60

# Mark of a step at which a run was resumed with other settings.
BREAK = "other settings"

Floats = NDArray[np.float64]


class NotMeasuredError(ValueError):
    """Raised if a run lacks values for a figure; the message names them in one line."""


@dataclass(frozen=True)
class Line:
    """Line of a panel.

    Attributes:
        name: Name in the legend; "" for none.
        x: Steps, layers or scales, ascending.
        y: Values; NaN if missing.
        colour: Colour as "#RRGGBB".
        low: Lower ends of a band around the line; empty for no band.
        high: Upper ends of the band.
        dash: "solid", "dot" or "dashdot"; "dash" across a gap between readings.
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

    @property
    def dot(self) -> float:
        """Diameter of the dots that mark its values, in points; 0 for no dots."""
        return 1.5 + self.width if len(self.x) <= _MOST_DOTS else 0.0

    def part(self, start: int, end: int) -> "Line":
        """Return the line from one place of its points to another."""
        return replace(
            self,
            x=self.x[start:end],
            y=self.y[start:end],
            low=self.low[start:end],
            high=self.high[start:end],
        )


@dataclass(frozen=True)
class Lines:
    """Panel of lines.

    Attributes:
        label: Label of the y axis.
        lines: The lines; empty if nothing was measured.
        over: Quantity of the x axis: "step", or a key of `AXES`.
        named_by: "step" or "layer" if the names of the lines are such numbers and a colour bar
            shows them; "" for a legend.
        null: Value for structureless rows, with a label; None if unknown.
        usual: Ends of a grey band of usual values, with a label; None for no band.
        alerts: Steps of alerts, with the alert kinds that occur there for the first time, and of
            breaks.
        ends: Ends of the y axis in pictures; None to fit the lines.
        remark: Further remark for the reader.
        is_logarithmic: Whether the y axis is logarithmic.
        bands: Meaning of the bands.
        covers: Further steps that the axis has to cover.
    """

    label: str
    lines: Sequence[Line]
    over: str = "step"
    named_by: str = ""
    null: tuple[float, str] | None = None
    usual: tuple[float, float, str] | None = None
    alerts: Sequence[tuple[int, str]] = ()
    ends: tuple[float, float] | None = None
    remark: str = ""
    is_logarithmic: bool = False
    bands: str = "95 % interval"
    covers: Sequence[int] = ()

    @property
    def steps(self) -> list[int]:
        """Steps that the axis has to cover: the steps of all lines and alerts, and further ones."""
        rows = itertools.chain(self.covers, *(line.x for line in self.lines))
        return [*rows, *(at for at, _ in self.alerts)]

    @property
    def axis(self) -> "StepAxis | None":
        """The axis of steps; None for an axis of layers or scales."""
        if self.over != "step":
            return None
        # Curves begin anew where a resume changed what is measured.
        breaks = [step for step, words in self.alerts if BREAK in words]
        return StepAxis(self.steps, breaks, [line.x for line in self.lines])

    @property
    def has_bands(self) -> bool:
        """Whether any line has a band."""
        return any(line.low for line in self.lines)

    @property
    def null_inside(self) -> tuple[float, str] | None:
        """The null if it lies within the range of the y axis, else None."""
        values = [0.0, *(v for line in self.lines for v in (*line.y, *line.high))]  # NaN is skipped
        low, high = self.ends or (min(values), 1.1 * max(values))
        return self.null if self.null is not None and low < self.null[0] < high else None


@dataclass(frozen=True)
class Matrix:
    """Panel of colours.

    Attributes:
        label: Meaning of the colours.
        values: Values [layers, columns]; NaN if missing.
        layers: Layer of each row.
        columns: Step or head of each column.
        low: Lowest value of the colour scale.
        high: Highest value of the colour scale.
        over: Quantity of the columns, "step" or "head".
        remark: Further remark for the reader.
        is_logarithmic: Whether the colour scale is logarithmic.
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
        """Whether the colour scale includes negative values."""
        return self.low < 0


class StepAxis:
    """Logarithmic axis for at least one step, with step 0 left of the first step after it.

    Args:
        steps: Steps that the axis has to cover.
        breaks: Steps at which curves begin anew. Defaults to ().
        rows: Steps of each line. Defaults to None, for all in a row.
    """

    def __init__(
        self,
        steps: Iterable[int],
        breaks: Iterable[int] = (),
        rows: Iterable[Sequence[int]] | None = None,
    ) -> None:
        self.steps, self._breaks = sorted(set(steps)), [*breaks]
        self._rows = [self.steps] if rows is None else rows
        self._after = min((step for step in self.steps if step > 0), default=1)

    def places(self, steps: Iterable[int]) -> list[float]:
        """Return the positions of steps on the axis: a step above 0 is at its own number."""
        return [float(step) if step > 0 else self._after * 10**-_ZERO for step in steps]

    def edges(self) -> list[float]:
        """Return the column edges of a map, one more than there are steps."""
        at = self.places(self.steps)
        if len(at) == 1:
            return [at[0] / 1.5, at[0] * 1.5]
        inner = [math.sqrt(one * other) for one, other in itertools.pairwise(at)]
        return [at[0] ** 2 / inner[0], *inner, at[-1] ** 2 / inner[-1]]

    def gaps(self, steps: Sequence[int]) -> list[int]:
        """List the indices of steps before a gap of more than a fifth of the drawn axis.

        Step 0 has no place on a logarithmic axis, so the gap after it is measured in steps.
        """
        first, last = self.places([self.steps[0], self.steps[-1]])
        return [
            place
            for place, (one, other) in enumerate(itertools.pairwise(steps))
            if (
                math.log(other / one) > _GAP * math.log(last / first)
                if one
                else other > _GAP * self.steps[-1]
            )
        ]

    def pieces(self, line: Line) -> list[Line]:
        """Cut a line at its gaps, which dashed pieces bridge, and at breaks."""
        breaks = {bisect.bisect_left(line.x, step) - 1 for step in self._breaks}
        gaps = {*self.gaps(line.x)} - breaks
        ends = itertools.pairwise([0, *(cut + 1 for cut in sorted(gaps | breaks)), len(line.x)])
        bridges = (replace(line.part(gap, gap + 2), dash="dash") for gap in sorted(gaps))
        return [*itertools.starmap(line.part, ends), *bridges]

    def label(self, look: str) -> str:
        """Return the label of the axis; if any row of steps has a gap, with the look of gaps."""
        gaps = f"; {look}: no readings" if any(map(self.gaps, self._rows)) else ""
        return f"training step (logarithmic{gaps})"

    def blanks(self) -> list[tuple[float, float]]:
        """List the ends of the gaps of a map on the axis."""
        at = self.places(self.steps)
        into = (at[-1] / at[0]) ** _INTO_GAP
        return [(at[gap] * into, at[gap + 1] / into) for gap in self.gaps(self.steps)]

    def ticks(self) -> list[int]:
        """Return the steps to label: both ends, the first step after 0, powers of ten with room."""
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
    """Choose at most `most` steps, first and last included, denser after the first.

    Example:
        >>> spread_steps([0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32], 4)
        [0, 2, 8, 32]
    """
    steps = sorted(steps)
    if len(steps) <= most:
        return steps
    logarithms = np.log1p(np.array(steps) - steps[0])
    nearest = {
        int(np.abs(logarithms - target).argmin()) for target in np.linspace(0, logarithms[-1], most)
    }
    return [steps[index] for index in sorted(nearest)]


def ends_and_middle(steps: Sequence[int]) -> list[int]:
    """Choose the first step, the last, and the one nearest to the middle of the run.

    Example:
        >>> ends_and_middle([0, 16, 32, 64, 181, 362, 724])
        [0, 362, 724]
    """
    ends = steps[0], steps[-1]
    return sorted({*ends, min(steps, key=lambda step: abs(2 * step - sum(ends)))})


def spread_items(items: Sequence[int], most: int) -> list[int]:
    """Choose at most `most` items, evenly spaced, first and last included; `most` is at least 2.

    Example:
        >>> spread_items([1, 2, 3, 4, 5, 6, 7], 3)
        [1, 4, 7]
    """
    if len(items) <= most:
        return list(items)
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]


def spread_both(steps: Sequence[int], most: int) -> set[int]:
    """Choose at most `most` steps, half of them evenly and half denser after the first."""
    return {*spread_items(steps, most // 2), *spread_steps(steps, most // 2)}


def thin(curve: Curve, most: int = 400) -> Curve:
    """Reduce a curve to at most a few hundred points, keeping its ends and its extremes."""
    if len(curve) <= most:
        return curve
    extremes = {curve.steps[curve.values.index(pick(curve.values))] for pick in (min, max)}
    kept = spread_both(curve.steps, most) | extremes
    return Curve([point for point in curve.points if point.step in kept])
