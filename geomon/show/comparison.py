"""Describes the differences between two runs in lines of text."""

import math
from collections.abc import Iterable

from geomon.analysis.compare import Difference
from geomon.analysis.numbers import significant


def describe_differences(differences: Iterable[Difference], names: tuple[str, str]) -> list[str]:
    """Describe the differences between two runs, those beyond the errors first.

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


def _steps(each: Difference) -> str:
    if each.second_step is None:
        return f"step {each.step:,}"
    return f"steps {each.second_step:,} and {each.step:,}"


def _line(each: Difference, last: str) -> str:
    margin = f" ± {significant(each.margin, 2)}" if math.isfinite(each.margin) else ""
    direction = "higher" if each.change > 0 else "lower"
    at = f", at {_steps(each)}" if _steps(each) != last else ""
    first, second = _apart(each.first, each.second)
    change = f"{direction} by {significant(abs(each.change), 3)}{margin}"
    return f"{each.tag}: {first} -> {second}, {change}{_percent(each.share)}{at}"


def _apart(first: float, second: float) -> tuple[str, str]:
    """Format two values with three digits, or with more if their difference needs them."""
    change = second - first
    for digits in range(3, 10):
        texts = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if abs(float(texts[1]) - float(texts[0]) - change) <= 0.3 * abs(change):
            break
    return texts


def _percent(share: float) -> str:
    """Format a relative change as a percentage or a factor; return "" if neither is informative."""
    if not math.isfinite(share):
        return ""
    if abs(share) < 0.001:
        return " (less than 0.1 %)"
    if share >= 10:
        return f" ({share + 1:,.3g} times as high)" if share < 1e3 else ""
    return f" ({100 * share:+.{1 if abs(share) < 0.01 else 0}f} %)"


__all__ = ["describe_differences"]
