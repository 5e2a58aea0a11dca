"""Measures how late a phase is right: curves with a peak in the middle.

Curves rise to a peak and fall as far, by a share of their value, with independent errors of
deviation 1; margins are 6.5 % of the value. The table shows how many are called expanding, how many
have fallen from their peak and after how many readings this is seen, and whether the interval
contains the peak. How often a curve without a change is called one is a test of the suite
(tests/analysis/test_phase.py).
"""

import statistics
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.timing import print_table
from geomon.analysis import Phase, find_phase

_Array = NDArray[np.float64]
# Level of all curves, in errors: a margin of 1.96 errors is 6.5 % of it.
_LEVEL = 30.0


def phases(errors: _Array) -> Iterator[Phase]:
    """Yield the phase at each reading of a curve with these errors around `_LEVEL`."""
    listed, margins = (errors + _LEVEL).tolist(), [1.96] * len(errors)
    for count in range(1, len(listed) + 1):
        yield find_phase(range(count), listed[:count], margins[:count])


def peaks(series: int, readings: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for each height: how many peaks are found, how late, whether intervals hold."""
    top = (readings - 1) // 2
    for share in (0.1, 0.2, 0.33, 0.5):
        shape = share * _LEVEL * (1 - np.abs(np.arange(readings) - top) / top)
        rises, delays, held = 0, [], 0
        for curve in np.random.default_rng(13).standard_normal((series, readings)) + shape:
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
    series: Annotated[int, typer.Option(help="Curves of each kind.")] = 100,
    readings: Annotated[int, typer.Option(help="Readings of a curve.")] = 41,
) -> None:
    """Print the table of curves with a peak."""
    print_table(
        f"{series} curves of {readings} readings with a peak",
        ("height of the peak", "rise seen", "fall seen", "readings after the peak (median)",
         "interval holds the peak"),
        peaks(series, readings),
    )  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
