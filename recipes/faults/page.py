"""The odds as a page of Markdown, docs/warnings.md: every number is computed from the records."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, quantiles

from recipes.faults.detectors import DETECTORS
from recipes.faults.kinds import FAULTS
from recipes.faults.results import Outcome, Result

_KINDS = ("loud", "silent", "creeping")


def share(outcomes: Sequence[Outcome]) -> str:
    """Format the share of trainings with an alarm.

    Args:
        outcomes: Outcomes of a detector.
    """
    if not outcomes:
        return "-"
    return f"{sum(o.delay is not None for o in outcomes) / len(outcomes):.0%}".replace("%", " %")


def spread(numbers: Sequence[float]) -> str:
    """Format the median with the quartiles, "3 (1 to 12)"; "-" for none.

    Args:
        numbers: Numbers of steps.

    Example:
        >>> spread([1, 3, 12]), spread([])
        ('3 (1 to 12)', '-')
    """
    if not numbers:
        return "-"
    if len(numbers) < 2:
        return f"{numbers[0]:.0f}"
    low, _, high = quantiles(numbers, n=4, method="inclusive")
    middle = median(numbers)
    low, high = (low, high) if len(numbers) > 3 else (min(numbers), max(numbers))
    return f"{middle:.0f}" if low == high else f"{middle:.0f} ({low:.0f} to {high:.0f})"


def delays(outcomes: Iterable[Outcome]) -> list[int]:
    """List the steps from the fault to the alarm, of the trainings with one."""
    return [outcome.delay for outcome in outcomes if outcome.delay is not None]


def leads(first: Sequence[Outcome], second: Sequence[Outcome]) -> tuple[list[int], int]:
    """Compare two detectors on the same trainings.

    Args:
        first: Outcomes of one detector.
        second: Outcomes of the other, in the same order.

    Returns:
        Steps by which the first was earlier where both have an alarm, negative where it was later;
        and the number of trainings in which only the first has one.
    """
    pairs = [(a.delay, b.delay) for a, b in zip(first, second, strict=True)]
    both = [later - earlier for earlier, later in pairs if None not in (earlier, later)]  # type: ignore[operator]
    return both, sum(b is None and a is not None for a, b in pairs)


def located(outcomes: Iterable[Outcome]) -> str:
    """Format how often the layer that was named is that of the faulty block."""
    known = [outcome.located for outcome in outcomes if outcome.located is not None]
    return f"{sum(known)} of {len(known)}" if known else "-"


def by_fault(results: Mapping[str, Result]) -> list[str]:
    """Make the table of the faults: what loss, gradient norm and geometry noticed, and when.

    Args:
        results: Results by detector, at one rate of false alarms.
    """
    rows = [
        "| | fault | loss | gradient norm | geometry | steps until geometry | earlier than the loss"
        " | earlier than the gradient norm | right block |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in _KINDS:
        for fault in FAULTS.values():
            found = {name: results[name].of([fault.name]) for name in results}
            if fault.kind != kind or not found["geometry"]:
                continue
            cells = [share(found[name]) for name in ("loss", "gradient_norm", "geometry")]
            cells.append(spread(delays(found["geometry"])))
            for other in ("loss", "gradient_norm"):
                both, alone = leads(found["geometry"], found[other])
                words = [spread(both)] * bool(both) + [f"alone in {alone}"] * bool(alone)
                cells.append("; ".join(words) or "-")
            cells.append(located(found["geometry"]))
            name = f"{fault.words}{' *' if fault.held_out else ''}"
            rows.append(f"| {kind} | {name} | {' | '.join(cells)} |")
    return rows


def by_detector(
    results: Mapping[str, Result], strict: Mapping[str, Result], faults: Sequence[str]
) -> list[str]:
    """Make the table of the detectors: what each noticed, at two rates of false alarms.

    Args:
        results: Results at one false alarm in 1,000 healthy readings, by detector.
        strict: Results at one in 10,000.
        faults: Names of the faults.
    """
    kinds = {kind: [name for name in faults if FAULTS[name].kind == kind] for kind in _KINDS}
    rows = [
        "| | looks at | loud | silent | creeping | loud | silent | creeping | right block"
        " | AUROC | false in 1,000 |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, detector in DETECTORS.items():
        if name not in results:
            continue
        cells = []
        for found in (results[name], strict[name]):
            cells += [share(found.of(chosen)) for chosen in kinds.values()]
        cells.append(located(strict[name].of(faults)))
        area = results[name].area(faults)
        cells.append("-" if math.isnan(area) else f"{area:.2f}")
        rate = results[name].rate
        cells.append(
            f"{1000 * rate.count / rate.trials:.1f} "
            f"({1000 * rate.low:.1f} to {1000 * rate.high:.1f})"
            if rate.trials
            else "-"
        )
        rows.append(f"| {detector.group} | {detector.words} | {' | '.join(cells)} |")
    return rows
