"""Two runs side by side: which of their values differ by more than their errors."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from geomon.analysis.curves import Curve, curve_of
from geomon.record import Readings, tags

# Largest relative difference that is rounding: the same run with other threads adds its sums in
# another order.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Difference:
    """A value of two runs at one step.

    Attributes:
        tag: Name of the value.
        step: Step of both readings.
        first: Value of the first run.
        second: Value of the second run.
        margin: Half width of the 95 % interval of second minus first; NaN where an error is
            unknown.
    """

    tag: str
    step: int
    first: float
    second: float
    margin: float

    @property
    def change(self) -> float:
        """The second value minus the first."""
        return self.second - self.first

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

    An interval holds what other sequences would change in the two readings. It does not hold what
    another seed of the training would change: for that, compare several runs of each kind.

    Args:
        first: Readings of one run.
        second: Readings of the other run.

    Returns:
        A difference for each metric that both have at a common step, in the order of the first.

    Raises:
        ValueError: The runs have no value at the same step.
    """
    compared = []
    known = set(second.tags())
    for name in _means(first.tags()):
        if name in known:
            found = _at_last_common(name, curve_of(first, name), curve_of(second, name))
            compared += [] if found is None else [found]
    if not compared:
        raise ValueError(
            "the runs have no value at the same step: compare runs of the same schedule, which "
            "reads the same steps"
        )
    return compared


def _means(names: Iterable[str]) -> list[str]:
    """Select the means over layers, their scales, and what the training logs."""
    shown = []
    for name in names:
        tag = tags.parse(name)
        part = tag.part if tag is not None else ""
        mean = tag is not None and tag.layer is None and (not part or part[1:].isdigit())
        if mean or name.startswith(tags.training_tag("x")[:-1]):
            shown.append(name)
    return shown


def _at_last_common(name: str, first: Curve, second: Curve) -> Difference | None:
    common = set(first.steps) & set(second.steps)
    if not common:
        return None
    step = max(common)
    one, other = first.steps.index(step), second.steps.index(step)
    # One margin that is unknown, 0, makes that of the difference unknown. A deviation over splits
    # of the rows is none: with it two readings of one model differed in 38 % of 200 pairs.
    margins = first.margins[one], second.margins[other]
    margin = math.hypot(*margins) if all(margins) else math.nan
    return Difference(name, step, first.values[one], second.values[other], margin)


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
    steps = sorted({each.step for each in found})
    at = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    lines = [f"{names[1]} against {names[0]}, at {at}"]
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
        lines += [f"  {_line(each)}" for each in members]
    equal = sum(each.verdict == "equal" for each in found)
    lines += [f"{equal} equal"] if equal else []
    return [*lines, "errors are those over other sequences: another seed changes a run too"]


def _line(each: Difference) -> str:
    margin = f" ± {each.margin:.2g}" if math.isfinite(each.margin) else ""
    share = f" ({each.change / abs(each.first):+.0%})".replace("%", " %") if each.first else ""
    direction = "higher" if each.change > 0 else "lower"
    return (
        f"{each.tag}: {each.first:.4g} -> {each.second:.4g}, {direction} by "
        f"{abs(each.change):.3g}{margin}{share}"
    )


__all__ = ["Difference", "compare", "describe_differences"]
