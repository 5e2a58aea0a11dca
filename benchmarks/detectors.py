"""Measures how often phases are wrong, and how late they are right.

Nulls: curves without a change, or with a drift in one direction; their phase is computed at every
reading. Errors have a deviation of 1 and are independent or correlated between neighbours (AR(1)).
A drifting curve rises by 4 errors from its first reading to its last, so only "falling" and
"compressing" are false.

Peaks: curves that rise to a peak in the middle and fall as far, by a share of their value; margins
are 6.5 % of it. The table shows how many are called expanding, how many have fallen from their peak
and after how many readings this is seen, and whether the interval contains the peak.
"""

import math
import statistics
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.timing import print_table
from geomon.analysis import Phase, find_phase

_Array = NDArray[np.float64]
_MOVES = {"expanding", "compressing", "falling"}
# Level of all curves, in errors: a margin of 1.96 errors is 6.5 % of it.
_LEVEL = 30.0
# Rise of a drifting curve, in errors.
_DRIFT = 4.0


def noise(series: int, readings: int, correlation: float, seed: int) -> _Array:
    """Draw errors of deviation 1 with a correlation between neighbours, [series, readings]."""
    random = np.random.default_rng(seed)
    fresh = random.standard_normal((series, readings))
    errors = fresh.copy()
    for index in range(1, readings):
        errors[:, index] = (
            correlation * errors[:, index - 1] + math.sqrt(1 - correlation**2) * fresh[:, index]
        )
    return errors


def phases(errors: _Array) -> Iterator[Phase]:
    """Yield the phase at each reading of a curve with these errors around `_LEVEL`."""
    listed, margins = (errors + _LEVEL).tolist(), [1.96] * len(errors)
    for count in range(1, len(listed) + 1):
        yield find_phase(range(count), listed[:count], margins[:count])


def nulls(series: int, readings: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kind of error: the share of curves with a false phase."""
    for correlation in (0.0, 0.3, 0.6, 0.9):
        curves = noise(series, readings, correlation, seed=11)
        share = statistics.fmean(
            any(phase.name in _MOVES for phase in phases(curve)) for curve in curves
        )
        yield "no change", str(correlation), f"{share:.1%}"
    for correlation in (0.0, 0.6):
        curves = noise(series, readings, correlation, seed=12) + np.linspace(0, _DRIFT, readings)
        share = statistics.fmean(
            any(phase.name in ("falling", "compressing") for phase in phases(curve))
            for curve in curves
        )
        yield f"rises by {_DRIFT:.0f} errors", str(correlation), f"{share:.1%}"


def peaks(series: int, readings: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each height: how many peaks are found, how late, whether intervals hold."""
    top = (readings - 1) // 2
    for share in (0.1, 0.2, 0.33, 0.5):
        shape = share * _LEVEL * (1 - np.abs(np.arange(readings) - top) / top)
        rises, delays, held = 0, [], 0
        for curve in noise(series, readings, 0.0, seed=13) + shape:
            course = list(phases(curve))
            rises += any(phase.name == "expanding" for phase in course)
            fell = (i for i, phase in enumerate(course) if i > top and phase.has_fallen)
            at = next(fell, None)
            if at is not None:
                delays.append(at - top)
                first, last = course[-1].peak_steps
                held += first <= top <= last
        falls = len(delays)
        delay = f"{statistics.median(delays):.0f}" if falls else "-"
        holds = f"{held / falls:.0%}" if falls else "-"
        yield f"{share:.0%}", f"{rises / series:.0%}", f"{falls / series:.0%}", delay, holds


def main(
    series: Annotated[int, typer.Option(help="Curves of each kind; a tenth of them peaks.")] = 1000,
    readings: Annotated[int, typer.Option(help="Readings of a curve.")] = 41,
) -> None:
    """Print the tables of curves without a change, and of curves with a peak."""
    print_table(
        f"{series} curves of {readings} readings",
        ("curve", "correlation", "called falsely"),
        nulls(series, readings),
    )
    print_table(
        f"{series // 10} curves of {readings} readings with a peak",
        ("height of the peak", "rise seen", "fall seen", "readings after the peak (median)",
         "interval holds the peak"),
        peaks(series // 10, readings),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
