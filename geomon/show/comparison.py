"""Describes the differences between two runs in lines of text."""

import math
from collections.abc import Sequence

from geomon.analysis import Difference, significant
from geomon.record import Readings

# Largest number of layers and heads that are listed, farthest beyond their errors first.
_MOST = 24


def parse_steps(words: str, runs: Sequence[Readings]) -> tuple[int, int]:
    """Read a step of each of two runs, such as "1500:0" or "last:first"."""
    steps = ([reading.step for reading in run] for run in runs)
    try:
        pairs = zip(words.split(":"), steps, strict=True)
        one, other = (int({"first": min(x), "last": max(x)}.get(word, word)) for word, x in pairs)
    except ValueError as error:
        raise ValueError(
            f"--steps takes a step of each run, such as 1500:0 or last:first, not {words!r}"
        ) from error
    return one, other


def describe_differences(
    found: Sequence[Difference], names: tuple[str, str], *, are_given: bool = False
) -> list[str]:
    """Describe the differences between two runs, those beyond the errors first.

    Args:
        found: The differences, at least one.
        names: Names of the runs.
        are_given: Whether the user chose the steps. Defaults to False, for the last of both.

    Example:
        >>> found = [Difference("twonn/mean", 100, 5.0, 6.0, 0.5)]
        >>> for line in describe_differences(found, ("a", "b"))[:3]:
        ...     print(line)
        b against a, at step 100 (the last that both have read)
        beyond the errors (95 %; of 1 compared 0 would be so by chance):
          twonn/mean: 5 -> 6, higher by 1 ± 0.5 (+20 %)
    """
    last = max(found, key=lambda each: each.step)
    lines = [f"{names[1]} against {names[0]}, at {_steps(last)} ({_choice(last, are_given)})"]
    whole = [each for each in found if not each.place]
    verdicts: dict[str, list[Difference]] = {}
    for each in whole:
        verdicts.setdefault(each.verdict, []).append(each)
    groups = {
        _by_chance(whole): [each for each in whole if each.differs],
        **_of_places([each for each in found if each.place]),
        "within the errors": verdicts.get("within the errors", []),
        "error unknown": verdicts.get("error unknown", []),
    }
    for title, members in groups.items():
        lines += [f"{title}:"] if members else []
        lines += [f"  {_line(each, _steps(last))}" for each in members]
    equal = len(verdicts.get("equal", ()))
    lines += [f"{equal} equal to 6 digits"] if equal else []
    return [*lines, "errors are those over other sequences: another seed changes a run too"]


def _choice(last: Difference, are_given: bool) -> str:
    """Say why the runs are compared at these steps."""
    if are_given:
        return "as asked"
    if last.second_step in (None, last.step):
        return "the last that both have read"
    return "the last at most 10 % apart"


def _by_chance(whole: Sequence[Difference]) -> str:
    """Return the title of differences beyond their errors, with the number expected by chance."""
    tested = sum(math.isfinite(each.margin) for each in whole)
    chance = f"of {tested} compared {0.05 * tested:.0f} would be so by chance"
    return f"beyond the errors (95 %; {chance})"


def _of_places(parts: Sequence[Difference]) -> dict[str, list[Difference]]:
    """Choose the layers and heads to list, farthest beyond their errors first, with a title."""
    farthest = sorted(parts, key=lambda each: -abs(each.change) / each.margin)[:_MOST]
    some = f" (the {_MOST} farthest of {len(parts)})" if len(parts) > _MOST else ""
    return {f"layers and heads beyond the errors, though their mean is not{some}": farthest}


def _steps(each: Difference) -> str:
    if each.second_step in (None, each.step):
        return f"step {each.step:,}"
    return f"steps {each.second_step:,} and {each.step:,}"


def _line(each: Difference, last: str) -> str:
    margin = f" ± {significant(each.margin, 2)}" if math.isfinite(each.margin) else ""
    direction = "higher" if each.change > 0 else "lower"
    at = f", at {_steps(each)}" if _steps(each) != last else ""
    first, second = _apart(each.first, each.second)
    name = each.tag.replace("/mean", "") + each.where if each.place else each.tag
    change = f"{direction} by {significant(abs(each.change), 3)}{margin}"
    words = f"{name}: {first} -> {second}, {change}{_percent(each.share)}{at}"
    if each.most is None:
        return words
    first, second = _apart(each.most.first, each.most.second)
    return f"{words}; most at layer {each.most.place[0]}: {first} -> {second}"


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
