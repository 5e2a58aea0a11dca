"""Two runs side by side: which of their values differ by more than their errors."""

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from geomon.analysis.curves import Curve, curve_of, training_curve
from geomon.record import Readings, tags
from geomon.record.printable import printable

# Largest relative difference that is rounding: the same run with other threads adds its sums in
# another order.
_ROUNDING = 1e-9
# Largest share by which the steps of two readings differ that are compared with one another.
_APART = 0.1
# What describes a start of a run and is no setting of it.
_OF_A_START = ("time", "from_step")


@dataclass(frozen=True)
class Difference:
    """A value of two runs at one step.

    Attributes:
        tag: Name of the value.
        step: Step of the reading of the first run.
        first: Value of the first run.
        second: Value of the second run.
        margin: Half width of the 95 % interval of second minus first; NaN where an error is
            unknown.
        second_step: Step of the reading of the second run; None for the same.
    """

    tag: str
    step: int
    first: float
    second: float
    margin: float
    second_step: int | None = None

    @property
    def change(self) -> float:
        """The second value minus the first."""
        return self.second - self.first

    @property
    def share(self) -> float:
        """The change as a share of the first value; NaN where a sign makes that meaningless."""
        return self.change / self.first if self.first > 0 and self.second >= 0 else math.nan

    @property
    def verdict(self) -> str:
        """What can be said: "higher", "lower", "within the errors", "equal" or "error unknown"."""
        if math.isclose(self.first, self.second, rel_tol=_ROUNDING):
            return "equal"
        if not math.isfinite(self.margin):
            return "error unknown"
        if abs(self.change) <= self.margin:
            return "within the errors"
        return "higher" if self.change > 0 else "lower"


def compare(first: Readings, second: Readings) -> list[Difference]:
    """Compare the means over layers of two runs at the last step that both have read.

    Where they have read different steps, it is the last two that are at most 10 % apart.

    An interval holds what other sequences would change in the two readings. It does not hold what
    another seed of the training would change: for that, compare several runs of each kind.

    Args:
        first: Readings of one run.
        second: Readings of the other run.

    Returns:
        A difference for each metric that both have at such steps, in the order of the first.

    Raises:
        ValueError: The runs have no value at steps that are near one another, or at step 0 alone.
    """
    others = _curves(second)
    found = (
        _at_last_common(name, curve, others[name])
        for name, curve in _curves(first).items()
        if name in others
    )
    compared = [each for each in found if each is not None]
    trained = min(max((reading.step for reading in each), default=0) for each in (first, second))
    if not compared or (trained and not any(each.step for each in compared)):
        raise ValueError(
            "the runs have no values at steps near one another (10 %) once they train: compare "
            "runs of the same schedule, which reads the same steps"
        )
    return compared


def _curves(readings: Readings) -> dict[str, Curve]:
    """Collect the means over layers, those of scales too, and what the training logs."""
    parts: dict[tuple[str, str], None] = {}
    logged: dict[str, None] = {}
    for reading in readings:
        logged |= dict.fromkeys(reading.training)
        for metric, column in reading.columns.items():
            scales = [part for part in column.parts if part[1:].isdigit()]
            parts |= dict.fromkeys((metric, part) for part in ("", *scales))
    curves = {
        tags.mean_tag(metric, part): curve_of(readings, metric, part=part) for metric, part in parts
    }
    curves |= {tags.training_tag(name): training_curve(readings, name) for name in logged}
    return {name: curve for name, curve in curves.items() if len(curve)}


def _at_last_common(name: str, first: Curve, second: Curve) -> Difference | None:
    near = _last_near(first.steps, second.steps)
    if near is None:
        return None
    step, second_step = near
    one, other = first.steps.index(step), second.steps.index(second_step)
    # One margin that is unknown, 0, makes that of the difference unknown. A deviation over splits
    # of the rows is none: with it two readings of one model differed in 38 % of 200 pairs.
    margins = first.margins[one], second.margins[other]
    margin = math.hypot(*margins) if all(margins) else math.nan
    shown = None if second_step == step else second_step
    return Difference(name, step, first.values[one], second.values[other], margin, shown)


def _last_near(first: list[int], second: list[int]) -> tuple[int, int] | None:
    """Find the last steps of two runs that are near one another, equal ones if there are any."""
    pairs = [(step, _nearest(step, second)) for step in first]
    near = [pair for pair in pairs if abs(pair[0] - pair[1]) <= _APART * max(pair)]
    if not near:
        return None
    last = max(min(pair) for pair in near)
    reached = [pair for pair in near if min(pair) >= (1 - _APART) * last]
    return max(reached, key=lambda pair: (-abs(pair[0] - pair[1]), pair))


def _nearest(step: int, steps: list[int]) -> int:
    """Return the step of a sorted list that is nearest to a step."""
    place = bisect.bisect_left(steps, step)
    return min(steps[max(place - 1, 0) : place + 1], key=lambda other: abs(other - step))


def describe_differences(differences: Iterable[Difference], names: tuple[str, str]) -> list[str]:
    """Describe differences in lines of text, those beyond the errors first.

    Args:
        differences: What `compare` found.
        names: Names of the two runs.

    Example:
        >>> found = [Difference("twonn/mean", 100, 5.0, 6.0, 0.5)]
        >>> for line in describe_differences(found, ("a", "b"))[:3]:
        ...     print(line)
        b against a, at step 100
        beyond the errors (95 %; of 1 compared 0 would be so by chance):
          twonn/mean: 5 -> 6, higher by 1 ± 0.5 (+20 %)
    """
    found = list(differences)
    last = _steps(max(found, key=lambda each: each.step)) if found else "step 0"
    lines = [f"{names[1]} against {names[0]}, at {last}"]
    tested = sum(math.isfinite(each.margin) for each in found)
    chance = f"of {tested} compared {0.05 * tested:.0f} would be so by chance"
    groups = (
        (f"beyond the errors (95 %; {chance})", ("higher", "lower")),
        ("within the errors", ("within the errors",)),
        ("error unknown", ("error unknown",)),
    )
    for title, verdicts in groups:
        members = [each for each in found if each.verdict in verdicts]
        lines += [f"{title}:"] if members else []
        lines += [f"  {_line(each, last)}" for each in members]
    equal = sum(each.verdict == "equal" for each in found)
    lines += [f"{equal} equal"] if equal else []
    return [*lines, "errors are those over other sequences: another seed changes a run too"]


def describe_settings(first: Readings, second: Readings) -> str:
    """Say in one line in which settings two records differ, or "" where in none.

    Args:
        first: Readings of one run.
        second: Readings of the other run.
    """
    if not (first.runs and second.runs):
        return ""
    one, other = first.runs[-1], second.runs[-1]
    names = [name for name in {**one, **other} if name not in _OF_A_START]
    differing = [
        f"{name} {_both(one.get(name), other.get(name))}"
        for name in names
        if one.get(name) != other.get(name)
    ]
    return f"the records differ in {', '.join(differing)}" if differing else ""


def _both(one: Any, other: Any) -> str:
    """Format two settings that differ, with more digits or more of a text where both look alike."""
    short = _setting(one), _setting(other)
    if short[0] != short[1]:
        return " and ".join(short)
    if isinstance(one, list | Mapping):
        return f"({short[0]}, with other names or values)"
    return printable(f"{one!r} and {other!r}")


def _setting(value: Any) -> str:
    """Format a setting briefly; of a list or a dict its length."""
    if isinstance(value, list | Mapping):
        return f"of {len(value)}"
    if value is None:
        return "unknown"
    text = (
        f"{value:,}"
        if type(value) is int
        else f"{value:.4g}"
        if type(value) is float
        else str(value)
    )
    return printable(text if len(text) <= 60 else f"{text[:60]} ...")


def _steps(each: Difference) -> str:
    if each.second_step is None:
        return f"step {each.step:,}"
    return f"steps {each.second_step:,} and {each.step:,}"


def _line(each: Difference, last: str) -> str:
    margin = f" ± {each.margin:.2g}" if math.isfinite(each.margin) else ""
    direction = "higher" if each.change > 0 else "lower"
    at = f", at {_steps(each)}" if _steps(each) != last else ""
    first, second = _apart(each.first, each.second)
    return (
        f"{each.tag}: {first} -> {second}, {direction} by {abs(each.change):.3g}{margin}"
        f"{_percent(each.share)}{at}"
    )


def _apart(first: float, second: float) -> tuple[str, str]:
    """Format two values with as few digits, three at least, as show by how much they differ."""
    change = second - first
    for digits in range(3, 10):
        texts = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if abs(float(texts[1]) - float(texts[0]) - change) <= 0.3 * abs(change):
            break
    return texts


def _percent(share: float) -> str:
    """Format a relative change in percent or as a factor; "" where neither says anything."""
    if not math.isfinite(share):
        return ""
    if abs(share) < 0.001:
        return " (less than 0.1 %)"
    if share >= 10:
        return f" ({share + 1:,.3g} times as high)" if share < 1e3 else ""
    return f" ({100 * share:+.{1 if abs(share) < 0.01 else 0}f} %)"


__all__ = ["Difference", "compare", "describe_differences", "describe_settings"]
