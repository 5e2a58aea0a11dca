"""The odds as a page of Markdown, docs/warnings.md: every number is computed from the records."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from recipes.faults.detectors import DETECTORS, OF_MARGINS
from recipes.faults.kinds import FAULTS, Fault
from recipes.faults.odds import Rate
from recipes.faults.results import Outcome, Result
from recipes.study.markdown import table

KINDS = ("loud", "silent", "creeping")
# Columns of what loss, gradient norm and alerts noticed, and of how much earlier alerts came.
_NOTICED = ("loss", "gradient norm", "alerts", "steps until the alert", "right block")
# Share of the silent or of the creeping faults that a detector of the page notices.
_ENOUGH = 0.3
_EARLIER = ("earlier than the loss", "earlier than the gradient norm")
_HEAD = """# Warnings and their odds

Would you have known before the loss? We put faults into healthy trainings of small decoders. Each
quantity got one threshold, set on healthy runs so that all quantities raise false alarms equally
often. `make faults` trains the models and writes this page:
[what was done](../recipes/faults/README.md).

We expected *loud* faults to show in the loss at once, *silent* ones to be absorbed by it, and
*creeping* ones to grow. A fault marked with * was not looked at while alerts were chosen. *Steps*
are median and quartiles.
"""


@dataclass(frozen=True)
class Verified:
    """Alerts that were counted in healthy trainings.

    Attributes:
        steps: Steps that were read.
        trainings: Number of trainings.
        alerts: Number of alerts by kind.
        stretches: The same for parts of these trainings: words, steps and number of alerts.
    """

    steps: int
    trainings: int
    alerts: Counter[str]
    stretches: list[tuple[str, int, int]]


def write(
    by_step: Mapping[str, Result],
    strict: Mapping[str, Result],
    sparse: Mapping[str, Mapping[str, Result]],
    of_margins: Mapping[str, Result],
    other_text: Mapping[str, Result],
    verified: Verified,
    live: Sequence[str] = (),
) -> str:
    """Write the page."""
    seen = [name for name in FAULTS if not FAULTS[name].held_out]
    by_chance, stretches = by_step["geometry"].by_chance(160)
    parts = [
        _HEAD,
        "## In short\n",
        *in_short(by_step, verified),
        "\n## By fault\n",
        "Every step was read, for 40 steps after a loud fault, 80 after a silent and 160 after a "
        "creeping one, at one false alarm in 10,000 healthy steps.\n",
        *by_fault(by_step),
        "\n![Share noticed, by the steps since the fault](pictures/warnings.png)\n",
        *(["## As a user gets it\n", *live, ""] if live else []),
        "## By detector\n",
        "Those that notice 30 % of the silent or of the creeping faults at one false alarm in "
        "10,000 healthy readings, and the loss; without the faults marked with *. By "
        f"chance an alert fell into {by_chance} of {stretches} healthy stretches of 160 steps.\n",
        *by_detector(strict, seen),
        "\n## By schedule\n",
        "Log-spaced readings are too few for a band. These trainings had no "
        "[checks](alerts.md#checks) between readings.\n",
        *by_schedule(sparse, seen),
        "\n## Intrinsic dimension and phases\n",
        "Read with their intervals every 20 steps. A number is strange if it lies many errors from "
        "the reading before, at one false alarm in 100 readings; a phase, if it has changed.\n",
        *by_margins(of_margins, seen),
        "\n## False alarms\n",
        *false_alarm_rows(verified),
    ]
    if other_text["geometry"].outcomes:
        parts += [
            "\n## On another text\n",
            "The same thresholds on models of the source of Python's standard library.\n",
            *by_kinds(other_text),
        ]
    return "\n".join(parts) + "\n"


def in_short(results: Mapping[str, Result], verified: Verified) -> list[str]:
    """Write one row for each kind of fault: what was noticed, and how much earlier."""
    total = sum(verified.alerts.values())
    counts = [len(results["geometry"].of([name])) for name in FAULTS]
    fewest, most = min(filter(None, counts)), max(counts)
    each = f"{fewest} to {most}" if fewest < most else f"{most}"
    rows = [
        (kind, *_cells(results, names), *_earlier(results, names))
        for kind, names in by_kind(FAULTS).items()
    ]
    return [
        *table(["faults", *_NOTICED, *_EARLIER], rows),
        '\n"Alone" counts trainings in which only the alert came. '
        f"Each fault was put into {each} trainings. "
        f"In {verified.trainings} healthy trainings with {verified.steps:,} steps read "
        f"{total} alert{'s' * (total != 1)} came: {per(Rate(total, verified.steps), 10_000)} in "
        "10,000 steps. The rule that one strange reading raises no alert was made after we had "
        "seen these trainings, so the rate may be higher in others.",
    ]


def by_kind(faults: Iterable[str]) -> dict[str, list[str]]:
    """Group names of faults by their kinds."""
    names = list(faults)
    return {kind: [name for name in names if FAULTS[name].kind == kind] for kind in KINDS}


def _cells(results: Mapping[str, Result], names: Sequence[str]) -> list[str]:
    found = {name: results[name].of(names) for name in ("loss", "gradient_norm", "geometry")}
    shares = [share(outcomes) for outcomes in found.values()]
    return [*shares, spread(delays(found["geometry"])), located(found["geometry"])]


def _earlier(results: Mapping[str, Result], names: Sequence[str]) -> list[str]:
    cells = []
    for other in ("loss", "gradient_norm"):
        both, alone = leads(results["geometry"].of(names), results[other].of(names))
        words = [spread(both)] * bool(both) + [f"alone in {alone}"] * bool(alone)
        cells.append("; ".join(words) or "-")
    return cells


def per(rate: Rate, number: int, interval: str = "95 % interval ") -> str:
    """Format a rate in so many trials with its interval, "0.5 (95 % interval 0.1 to 1.5)"."""
    if not rate.trials:
        return "-"
    one, low, high = (number * each for each in (rate.count / rate.trials, rate.low, rate.high))
    return f"{one:.1f} ({interval}{low:.1f} to {high:.1f})"


def share(outcomes: Sequence[Outcome]) -> str:
    """Format the share of trainings with an alarm."""
    if not outcomes:
        return "-"
    return f"{sum(o.delay is not None for o in outcomes) / len(outcomes):.0%}".replace("%", " %")


def spread(numbers: Sequence[float]) -> str:
    """Format the median with the quartiles, "3 (1 to 12)"; "-" for none.

    Example:
        >>> spread([1, 3, 12]), spread([])
        ('3 (1 to 12)', '-')
    """
    if not numbers:
        return "-"
    if len(numbers) < 2:
        return f"{numbers[0]:.0f}"
    low, _, high = quantiles(numbers, n=4, method="inclusive")
    low, high = (low, high) if len(numbers) > 3 else (min(numbers), max(numbers))
    ends = "" if low == high else f" ({low:.0f} to {high:.0f})"
    return f"{median(numbers):.0f}{ends}"


def delays(outcomes: Iterable[Outcome]) -> list[int]:
    """List the steps from the fault to the alarm, of the trainings with one."""
    return [outcome.delay for outcome in outcomes if outcome.delay is not None]


def leads(first: Sequence[Outcome], second: Sequence[Outcome]) -> tuple[list[int], int]:
    """Compare two detectors on the same trainings.

    Returns:
        Steps by which the first was earlier where both have an alarm, negative where it was later;
        and the number of trainings in which only the first has one.
    """
    pairs = [(one.delay, other.delay) for one, other in zip(first, second, strict=True)]
    both = [other - one for one, other in pairs if one is not None and other is not None]
    return both, sum(one is not None and other is None for one, other in pairs)


def located(outcomes: Iterable[Outcome]) -> str:
    """Format how often the layer that was named is that of the faulty block."""
    known = [outcome.located for outcome in outcomes if outcome.located is not None]
    return f"{sum(known)} of {len(known)}" if known else "-"


def by_fault(results: Mapping[str, Result]) -> list[str]:
    """Make the table of the faults: what loss, gradient norm and alerts noticed, and when."""
    return table(
        ["", "fault", *_NOTICED],
        [
            (kind, words_of(FAULTS[name]), *_cells(results, [name]))
            for kind, names in by_kind(FAULTS).items()
            for name in names
            if results["geometry"].of([name])
        ],
        words=2,
    )


def by_kinds(results: Mapping[str, Result]) -> list[str]:
    """Make a row for each kind of fault: what loss, gradient norm and alerts noticed."""
    cells = {kind: _cells(results, names) for kind, names in by_kind(FAULTS).items()}
    head = ["faults", *_NOTICED[:3], _NOTICED[-1]]
    return table(head, [(kind, *row[:3], row[-1]) for kind, row in cells.items()])


def words_of(fault: Fault) -> str:
    """Name a fault, with a mark if it was held out."""
    return f"{fault.words}{' *' * fault.held_out}"


def by_detector(results: Mapping[str, Result], faults: Sequence[str]) -> list[str]:
    """Make the table of the detectors that notice enough, and the loss."""
    kinds = by_kind(faults)
    own = {
        name: {kind: results[name].noticed(kinds[kind]) for kind in KINDS}
        for name in DETECTORS
        if name in results and not math.isnan(results[name].limit)
    }
    rows = [
        (DETECTORS[name].words, *(share(results[name].of(kinds[kind])) for kind in KINDS))
        for name, found in own.items()
        if name == "loss" or max(found["silent"], found["creeping"]) >= _ENOUGH
    ]
    return table(["looks at", *KINDS], rows)


def by_schedule(sparse: Mapping[str, Mapping[str, Result]], faults: Sequence[str]) -> list[str]:
    """Make the table of the schedules: what alerts notice if not every step is read."""
    results = {schedule: found["geometry"] for schedule, found in sparse.items()}
    head = ["steps until the alert", "right block", "false in 10,000 readings"]
    return table(
        ["read", *KINDS, *head],
        [
            (
                schedule, *(share(result.of(own)) for own in by_kind(faults).values()),
                spread(delays(result.of(faults))), located(result.of(faults)),
                per(result.rate, 10_000, ""),
            )
            for schedule, result in results.items()
        ],
    )  # fmt: skip


def by_margins(results: Mapping[str, Result], faults: Sequence[str]) -> list[str]:
    """Make the table of the numbers that are compared by their margins."""
    return table(
        ["looks at", *KINDS, "false in 100 readings"],
        [
            (
                OF_MARGINS[name][0], *(share(result.of(own)) for own in by_kind(faults).values()),
                per(result.rate, 100, ""),
            )
            for name, result in results.items()
        ],
    )  # fmt: skip


def false_alarm_rows(verified: Verified) -> list[str]:
    """Make the table of the alerts in healthy trainings, whose steps were read from step 200 on."""
    everything = ("all", verified.steps, sum(verified.alerts.values()))
    kinds = ", ".join(f"{name} {count}" for name, count in verified.alerts.most_common())
    rows = [
        (words, f"{steps:,}", f"{alerts}", per(Rate(alerts, steps), 10_000, ""))
        for words, steps, alerts in (*verified.stretches, everything)
    ]
    head = ["healthy trainings", "steps read", "alerts", "in 10,000 steps"]
    return [*table(head, rows), f"\nBy kind: {kinds or 'none'}."]
