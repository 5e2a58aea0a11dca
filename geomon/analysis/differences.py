"""Compare two runs: which of their values differ by more than their errors."""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from geomon.analysis.curves import measured, single_source
from geomon.analysis.phase import Point, change_between
from geomon.analysis.quantities import Quantity, quantities_of
from geomon.record import NAN, Reading, Readings, student, tags

# Values whose relative difference is at most this are equal: with different threads, the same run
# adds its sums in a different order.
_ROUNDING = 1e-6
# Largest relative difference between the steps of two readings that are compared.
_APART = 0.1
# Probability that any layer or head of a metric differs by chance.
_CHANCE = 0.05
_FEWEST_LAYERS = 2  # of which one can differ most


@dataclass(frozen=True)
class Difference:
    """A value of two runs at one step.

    Attributes:
        tag: Name of the value.
        step: Step of the reading of the first run.
        first: Value of the first run.
        second: Value of the second run.
        margin: Half width of the 95 % interval of second minus first; NaN if an error is unknown.
        second_step: Step of the reading of the second run. Defaults to None, for the same step.
        place: Layer, or layer and head, that differ although the mean over them does not. Defaults
            to (), for the value of all layers.
        most: Difference of the layer that differs most, if the value of all layers differs or its
            error is unknown. Defaults to None.
    """

    tag: str
    step: int
    first: float
    second: float
    margin: float
    second_step: int | None = None
    place: tuple[int, ...] = ()
    most: "Difference | None" = None

    @property
    def change(self) -> float:
        """The second value minus the first."""
        return self.second - self.first

    @property
    def share(self) -> float:
        """The change as a share of the first value; NaN if a sign makes that meaningless."""
        return self.change / self.first if self.first > 0 and self.second >= 0 else math.nan

    @property
    def verdict(self) -> str:
        """The verdict: "higher", "lower", "within the errors", "equal" or "error unknown"."""
        if math.isclose(self.first, self.second, rel_tol=_ROUNDING):
            return "equal"
        if not math.isfinite(self.margin):
            return "error unknown"
        if abs(self.change) <= self.margin:
            return "within the errors"
        return "higher" if self.change > 0 else "lower"

    @property
    def where(self) -> str:
        """The place in words to append to a name, such as ", layer 1, head 0"."""
        return "".join(map(", {} {}".format, ("layer", "head"), self.place))

    @property
    def differs(self) -> bool:
        """Whether the second value is higher or lower than the first, beyond the errors."""
        return self.verdict in ("higher", "lower")


def compare(
    first: Readings, second: Readings, steps: tuple[int, int] | None = None
) -> list[Difference]:
    """Compare two runs: means over layers, and layers and heads that differ though a mean agrees.

    By default, each value is compared at the last step that both runs have read; if they have read
    different steps, at the last two that are at most 10 % apart.

    An interval covers what other sequences would change in the two readings. It does not cover what
    another seed of the training would change; for that, compare several runs of each kind. The
    intervals of layers and heads are wider, so that 5 % of metrics would have any of them outside
    by chance. A head has no margin of its own: it gets its layer's margin times the root of the
    number of heads.

    Args:
        first: Readings of one run.
        second: Readings of the other run.
        steps: A step of the first run and a step of the second, for instance the end of a
            pretraining and the start of its fine-tuning. Defaults to None, for the last ones.

    Returns:
        A difference for each metric that both have at such steps, in the order of the first, with
        the layer that differs most if the metric does; and one for each layer and head that is
        higher or lower although the mean over it is not.

    Raises:
        ValueError: If a run was not read at its given step; without given steps, if the runs lack
            values at near steps, or have them only at step 0.
    """
    runs = [_by_step(run) for run in (first, second)]
    if steps is not None:
        _check_read(runs, steps)
    compared: list[Difference] = []
    for quantity in filter(_is_compared, quantities_of(first).values()):
        curves = [quantity.curve(run.values()) for run in runs]
        if at := steps or _last_near(curves[0].steps, curves[1].steps):
            compared += _differences(quantity, runs[0][at[0]], runs[1][at[1]])
    is_trained = min(max(run, default=0) for run in runs) > 0
    is_late = any(each.step for each in compared)
    if not compared or not (steps or is_late or not is_trained):
        raise ValueError(
            "the runs have no values at steps near one another (10 %) once they train: name a step "
            "of each run (--steps A:B), or compare runs of the same schedule"
        )
    return compared


def _by_step(readings: Readings) -> dict[int, Reading]:
    return {reading.step: reading for reading in single_source(readings)}


def _check_read(runs: Sequence[Mapping[int, Reading]], steps: Sequence[int]) -> None:
    """Raise ValueError unless each run, as readings by step, was read at its step."""
    for run, asked, name in zip(runs, steps, ("first", "second"), strict=True):
        if asked not in run:
            raise ValueError(
                f"the {name} run has no reading at step {asked:,}; the nearest is at step "
                f"{min(run, key=lambda step: abs(step - asked)):,}"
            )


def _is_compared(quantity: Quantity) -> bool:
    """Select the means over layers (also of scales), and the values that the training logs."""
    is_mean = quantity.is_mean and (not quantity.part or quantity.part[1:].isdigit())
    return is_mean or not (quantity.metric or quantity.tag == tags.OVERHEAD)


def _differences(quantity: Quantity, one: Reading, other: Reading) -> list[Difference]:
    """List the difference of a value, and of layers and heads that differ though a mean agrees."""
    first, second = _by_place(quantity, one), _by_place(quantity, other)
    places = [place for place in first if place in second]
    column = one.column(quantity.metric, quantity.part)
    found = [
        Difference(
            quantity.tag, one.step, first[place].value, second[place].value,
            _margin(first[place], second[place], len(places) if place else 1)
            * math.sqrt(len(column.heads_at(place[0])) if place[1:] else 1),
            other.step, place,
        )
        for place in places
    ]  # fmt: skip
    apart = {each.place for each in found if each.differs}
    return [
        each if each.place else replace(each, most=_furthest(each, found))
        for each in found
        if not each.place or (each.differs and not apart & {(), each.place[:-1]})
    ]


def _furthest(whole: Difference, parts: Sequence[Difference]) -> Difference | None:
    """Return the layer that differs most, relative to its error if errors are known."""
    layers = [each for each in parts if len(each.place) == 1]
    others = [each for each in layers if each.verdict != "equal"]
    is_open = whole.differs or whole.verdict == "error unknown"
    if len(layers) < _FEWEST_LAYERS or not (others and is_open):
        return None
    has_errors = all(each.margin > 0 for each in others)
    return max(others, key=lambda each: abs(each.change) / (each.margin if has_errors else 1.0))


def _by_place(quantity: Quantity, reading: Reading) -> dict[tuple[int, ...], Point]:
    """Collect the finite values over all layers, of each layer and of each head.

    The margin of a head is the margin of its layer.
    """
    metric, part = quantity.metric, quantity.part
    column = reading.column(metric, part)
    values = [
        *(((layer,), value) for layer, value in column.by_layer().items()),
        *column.by_head().items(),
    ]
    return dict(
        [
            *zip([()], quantity.curve([reading]).points, strict=False),
            *(
                (at, measured(reading, metric, part=part, layer=at[0])._replace(value=value))
                for at, value in values
            ),
        ]
    )


def _margin(one: Point, other: Point, count: int) -> float:
    """Compute the margin of a difference at one of so many places; NaN if it is unknown."""
    # Errors are over 8 groups of sequences, which leave 7 degrees of freedom.
    wide, usual = (student(7, _CHANCE / n) for n in (count, 1))
    # The deviation over splits of the rows cannot replace an unknown margin, 0: with it, two
    # readings of one model differed in 38 % of 200 pairs.
    return (change_between(one, other).margin or NAN) * float(wide / usual)


def _last_near(first: list[int], second: list[int]) -> tuple[int, int] | None:
    """Find the last steps of two runs that are near one another, preferring equal ones."""
    pairs = [(step, _nearest(step, second)) for step in first]
    near = [pair for pair in pairs if abs(pair[0] - pair[1]) <= _APART * max(pair)]
    last = max(map(min, near), default=0)
    reached = [pair for pair in near if min(pair) >= (1 - _APART) * last]
    return max(reached, key=lambda pair: (-abs(pair[0] - pair[1]), pair), default=None)


def _nearest(step: int, steps: list[int]) -> int:
    """Return the step of a sorted list that is nearest to a step."""
    place = bisect.bisect_left(steps, step)
    return min(steps[max(place - 1, 0) : place + 1], key=lambda other: abs(other - step))
