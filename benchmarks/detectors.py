"""Measures how often and how late the word of a curve is right, and how often it is wrong.

Curves of 41 readings are flat, rise, rise to a peak in the middle and fall as far, or rise in 15
readings and stay there. The margin of a reading is 6.5 % of its value. Errors are independent, as
those of new rows at every reading; or paired, as those of a probe: each of 8 groups of sequences
has an error that is the same at all readings, with 80 % of the variance, and one of its own.
`jitter` is a scatter of the curve itself, which no margin of sampling knows.
"""

from collections.abc import Iterator
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.timing import print_table
from geomon.analysis.phase import Phase, Point, phase_of
from geomon.record.columns import margin

_Array = NDArray[np.float64]
_READINGS, _PEAK = 41, 20
_AT = np.arange(_READINGS)
# Standard error of a reading as a share of its value: a margin of 6.5 %.
_ERROR = 0.033
_SHARED = 0.8  # share of the variance that all readings of a probe have in common
# Curves as shares above their level, and the word that is right from the turn on.
SHAPES: dict[str, tuple[_Array, str]] = {
    "flat": (0.0 * _AT, ""),
    **{f"rise of {share:.0%}": (share * _AT / (_READINGS - 1), "expanding")
       for share in (0.1, 0.2, 0.33)},
    **{f"peak of {share:.0%}": (share * (1 - np.abs(_AT - _PEAK) / _PEAK), "compressing")
       for share in (0.1, 0.2, 0.33)},
    "rise of 33 %, then flat": (0.33 * np.minimum(_AT / 15, 1.0), "level"),
}  # fmt: skip
# Words that contradict each shape at its end.
_WRONG = {
    "": {"expanding", "compressing", "falling"},
    "expanding": {"compressing", "falling"},
    "compressing": {"expanding"},
    "level": {"expanding", "compressing", "falling"},
}


def curve(
    shape: _Array, random: np.random.Generator, *, paired: bool, jitter: float
) -> list[Point]:
    """Draw the readings of a curve."""
    level = 30 * (1 + shape) * (1 + jitter * random.standard_normal(_READINGS))
    spread = _ERROR * np.sqrt(8)
    shared = np.sqrt(_SHARED) * random.standard_normal((1, 8))
    own = np.sqrt(1 - _SHARED) * random.standard_normal((_READINGS, 8))
    groups = spread * (shared + own if paired else random.standard_normal((_READINGS, 8)))
    values = level * (1 + groups.mean(axis=1))
    without = level[:, None] * (1 + (groups.sum(axis=1, keepdims=True) - groups) / 7)
    return [
        Point(step, value, margin(each), each.tolist(), "probe" if paired else "")
        for step, value, each in zip(25 * _AT, values.tolist(), without, strict=True)
    ]


def rows(series: int, *, paired: bool, jitter: float) -> Iterator[tuple[str, ...]]:
    """Yield a row for each shape: how often its word is right, and wrong."""
    for name, (shape, word) in SHAPES.items():
        right, wrong = dict.fromkeys((5, 10, 20), 0), 0
        for seed in range(series):
            points = curve(shape, np.random.default_rng(seed), paired=paired, jitter=jitter)
            if not word:
                course = (phase_of(points[:count]) for count in range(2, _READINGS + 1))
                wrong += any(_is_wrong(phase, word) for phase in course)
                continue
            turn = 0 if word == "expanding" else 15 if word == "level" else _PEAK
            for after in right:
                right[after] += phase_of(points[: turn + after + 1]).name == word
            wrong += _is_wrong(phase_of(points), word)
        shares = [f"{count / series:.0%}" if word else "" for count in right.values()]
        yield name, *shares, f"{wrong / series:.0%}"


def _is_wrong(phase: Phase, word: str) -> bool:
    return phase.name in _WRONG[word]


def main(series: Annotated[int, typer.Option(help="Curves of each kind.")] = 100) -> None:
    """Print a table for each kind of error."""
    for paired, jitter in ((False, 0.0), (True, 0.0), (True, 0.01)):
        kind = "paired" if paired else "independent"
        print_table(
            f"{series} curves of {_READINGS} readings; {kind} errors, jitter {jitter:.0%}",
            ("curve", "right 5 readings after the turn", "10", "20",
             "wrong at the end (flat: at any reading)"),
            rows(series, paired=paired, jitter=jitter),
        )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
