"""How often are phases and alerts wrong, and how late are they right?

    python -m benchmarks.detectors [--series 1000] [--readings 41] [--part nulls|peaks|alerts ...]
        [--correlation 0.0|0.3|0.6|0.8|0.9 ...] [--run DIR ...] [--healthy DIR ...]

nulls: curves without a change, or with a drift one way, whose phase is asked at every reading.
Errors have a deviation of 1; those of neighbours are independent, or correlated (AR(1)). A drifting
curve rises by 4 errors from its first reading to its last; only "falling" and "compressing" are
false there.

peaks: curves that rise to a peak in the middle and fall as far, in errors of a single reading. How
many are called expanding or at their peak, and compressing, and by how many readings after the peak
that is late; whether the interval holds the peak.

alerts: records of trainings (folders with a `readings.jsonl`, and with a `csv/metrics.csv` if the
recipe was run with `--logger csv`). The step of the first alert of each kind, and the step at which
the loss says so: by itself, where the mean of its last three values is above the lowest such mean
so far by a tenth; and beside the runs `--healthy`, where it is above their median by a tenth, after
the first 30 steps.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from geomon import read
from geomon.analysis import Phase, find_phase
from geomon.analysis.alerts import RULES, find_alerts

_Array = NDArray[np.float64]
_QUIET = {"steady", "unknown"}
# Rise of a drifting curve, in errors.
_DRIFT = 4.0
_LOSS_ROSE = 1.1
# Steps in which a larger learning rate lowers the loss faster.
_BEGINNING = 30


def noise(series: int, readings: int, correlation: float, seed: int) -> _Array:
    """Errors of deviation 1 whose neighbours have a correlation, [series, readings]."""
    random = np.random.default_rng(seed)
    fresh = random.standard_normal((series, readings))
    errors = fresh.copy()
    for index in range(1, readings):
        errors[:, index] = (
            correlation * errors[:, index - 1] + math.sqrt(1 - correlation**2) * fresh[:, index]
        )
    return errors


def phases(values: _Array, *, known: bool) -> Iterator[Phase]:
    """The phase at each reading of one curve."""
    listed, margins = values.tolist(), [1.96] * len(values)
    for count in range(1, len(listed) + 1):
        yield find_phase(range(count), listed[:count], margins[:count] if known else None)


def report_nulls(series: int, readings: int, correlations: list[float]) -> None:
    """Print how many curves without a change, or that only rise, are called something else."""
    print(f"| {series} curves of {readings} readings | errors | correlation | called falsely |")
    print("|---|---|---:|---:|", flush=True)
    flat = [(True, 0.0), (True, 0.3), (True, 0.6), (True, 0.8), (True, 0.9), (False, 0.0)]
    flat += [(False, 0.6), (False, 0.8)]
    for known, correlation in flat:
        if correlations and correlation not in correlations:
            continue
        curves = noise(series, readings, correlation, seed=11)
        share = statistics.fmean(
            any(phase.name not in _QUIET for phase in phases(curve, known=known))
            for curve in curves
        )
        _print_null("no change", known, correlation, share)
    for correlation in sorted({0.0, 0.6} & set(correlations or (0.0, 0.6))):
        curves = noise(series, readings, correlation, seed=12)
        curves = curves + np.linspace(0, _DRIFT, readings)
        share = statistics.fmean(
            any(phase.name in ("falling", "compressing") for phase in phases(curve, known=True))
            for curve in curves
        )
        _print_null(f"rises by {_DRIFT:.0f} errors", True, correlation, share)


def _print_null(kind: str, known: bool, correlation: float, share: float) -> None:
    words = "known" if known else "unknown"
    print(f"| {kind} | {words} | {correlation:.1f} | {share:.1%} |".replace("%", " %"), flush=True)


def report_peaks(series: int, readings: int) -> None:
    """Print how many peaks are found, how late, and how often the interval holds them."""
    top = (readings - 1) // 2
    print(f"| {series} curves of {readings} readings: height in errors | correlation | rise seen | "
          "fall seen | readings after the peak (median) | interval holds the peak |")  # fmt: skip
    print("|---:|---:|---:|---:|---:|---:|", flush=True)
    for correlation in (0.0, 0.6):
        for height in (1.0, 2.0, 4.0, 8.0):
            shape = height * (1 - np.abs(np.arange(readings) - top) / top)
            rises, falls, delays, held = 0, 0, [], 0
            for curve in noise(series, readings, correlation, seed=13) + shape:
                course = list(phases(curve, known=True))
                rises += any(p.name in ("expanding", "level") for p in course)
                at = next((i for i, p in enumerate(course) if p.earliest is not None), None)
                last = course[-1]
                if at is not None:
                    falls += 1
                    delays.append(at - top)
                    low, high = last.earliest, last.latest
                    held += low is not None and high is not None and low <= top <= high
            delay = f"{statistics.median(delays):.0f}" if delays else "-"
            holds = f"{held / falls:.0%}" if falls else "-"
            row = [f"{height:.0f}", f"{correlation:.1f}", f"{rises / series:.0%}",
                   f"{falls / series:.0%}", delay, holds]  # fmt: skip
            print(f"| {' | '.join(row)} |".replace("%", " %"), flush=True)


def report_alerts(folders: list[Path], healthy: list[Path]) -> None:
    """Print the step of the first alert of each kind, beside the step at which the loss says so."""
    names = [*(name.replace("_", " ") for name in RULES), "loss rises", "loss above healthy runs"]
    print(f"| run | {' | '.join(names)} |")
    print(f"|---|{'---:|' * len(names)}", flush=True)
    others = [losses_of(folder) for folder in healthy]
    for folder in folders:
        first: dict[str, int] = {}
        for alert in find_alerts(read(folder), RULES):
            first.setdefault(alert.name, alert.step)
        losses = losses_of(folder)
        steps = [*(first.get(name) for name in RULES), loss_rose(losses)]
        steps += [loss_above(losses, others)]
        row = " | ".join("-" if step is None else str(step) for step in steps)
        print(f"| {folder.name} | {row} |", flush=True)


def losses_of(folder: Path) -> dict[int, float]:
    """The training loss of a run of the recipe, by step; none where it was not logged."""
    path = folder / "csv" / "metrics.csv"
    if not path.is_file():
        return {}
    with path.open() as file:
        return {
            int(row["step"]): float(row["train/bits_per_character"])
            for row in csv.DictReader(file)
            if row.get("train/bits_per_character")
        }


def loss_rose(losses: dict[int, float]) -> int | None:
    """The step at which a loss has risen by a tenth; None if never."""
    values, lowest = list(losses.items()), math.inf
    for index in range(2, len(values)):
        mean = statistics.fmean(loss for _, loss in values[index - 2 : index + 1])
        if not mean < _LOSS_ROSE * lowest:
            return values[index][0]
        lowest = min(lowest, mean)
    return None


def loss_above(losses: dict[int, float], others: list[dict[int, float]]) -> int | None:
    """The step at which a loss is above the median of others by a tenth; None if never."""
    for step, loss in losses.items():
        beside = [other[step] for other in others if step in other]
        if step >= _BEGINNING and beside and loss > _LOSS_ROSE * statistics.median(beside):
            return step
    return None


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--series", type=int, default=1000)
    parser.add_argument("--readings", type=int, default=41)
    parts = ("nulls", "peaks", "alerts")
    parser.add_argument("--part", choices=parts, action="append")
    parser.add_argument("--correlation", type=float, nargs="*", default=[])
    parser.add_argument("--run", type=Path, nargs="*", default=[])
    parser.add_argument("--healthy", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    chosen = given.part or parts
    if "nulls" in chosen:
        report_nulls(given.series, given.readings, given.correlation)
    if "peaks" in chosen:
        report_peaks(given.series, given.readings)
    if "alerts" in chosen and given.run:
        report_alerts(given.run, given.healthy)


if __name__ == "__main__":
    main()
