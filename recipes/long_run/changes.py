"""What a curve does after the end of the demo, with its interval."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from geomon import Readings
from geomon.analysis import Curve, Phase, curve_of

# Steps of the recipe enwik8 on two cores, which the longer training is compared with.
DEMO_STEPS = 1500

# Name, metric and part of each value, in the order in which the page shows them.
DIMENSIONS = {
    "TwoNN, all tokens": ("twonn", ""),
    "TwoNN, one row per (character, position)": ("twonn_distinct", ""),
    "TwoNN, no ratio dropped (the paper's text)": ("twonn", "discard_0"),
    "TwoNN, smallest 20 % kept (the authors' code)": ("twonn", "discard_80"),
    **{f"Gride, scale {k}": ("gride", f"k{k}") for k in (1, 2, 4, 8, 16, 32)},
}
OTHERS = {
    "anisotropy": ("anisotropy", ""),
    "attention entropy (nats)": ("attention_entropy", ""),
    "mean cosine": ("cosine", ""),
}


@dataclass(frozen=True)
class Change:
    """Change of one value between the end of the demo and the end of the record.

    Attributes:
        name: Name of the value.
        peak: Largest value after step 0, and its step.
        before: Value at the reading nearest to the end of the demo.
        after: Value at the last reading.
        margin: Half width of the 95 % interval of after - before.
        phase: Phase at the end of the curve.
    """

    name: str
    peak: tuple[float, int]
    before: float
    after: float
    margin: float
    phase: Phase

    @property
    def verdict(self) -> str:
        """Whether the value falls or grows by more than its interval, or neither is decided."""
        change = self.after - self.before
        if abs(change) <= self.margin:
            return "undecided"
        return "falls" if change < 0 else "grows"


def changes(readings: Readings, names: Iterable[str], *, since: int = DEMO_STEPS) -> list[Change]:
    """Compare the end of a record with an earlier step, for each value that it holds.

    The margins are those over sequences. Both readings look at the same sequences, so that the
    interval is rather too wide.

    Args:
        readings: Readings of a run.
        names: Names of values in `DIMENSIONS` or `OTHERS`.
        since: Step to compare with.
    """
    curves = {name: value_curve(readings, name) for name in names}
    return [_change(name, curve, since) for name, curve in curves.items() if len(curve) > 1]


def value_curve(readings: Readings, name: str) -> Curve:
    """Collect the curve of a value.

    Args:
        readings: Readings of a run.
        name: Name of a value in `DIMENSIONS` or `OTHERS`.
    """
    metric, part = (DIMENSIONS | OTHERS)[name]
    return curve_of(readings, metric, part=part)


def nearest(steps: list[int], step: int) -> int:
    """Find the index of the step that is nearest on a logarithmic axis.

    Args:
        steps: Steps, ascending.
        step: Step to look for.

    Example:
        >>> nearest([0, 1024, 1448, 1722], 1500)
        2
    """
    return min(range(len(steps)), key=lambda i: abs(math.log1p(steps[i]) - math.log1p(step)))


def _change(name: str, curve: Curve, since: int) -> Change:
    begin = nearest(curve.steps, since)
    margins = curve.margins
    peak = max(range(1, len(curve)), key=lambda i: curve.values[i])
    return Change(
        name,
        (curve.values[peak], curve.steps[peak]),
        curve.values[begin],
        curve.values[-1],
        math.hypot(margins[begin], margins[-1]),
        curve.phase(),
    )
