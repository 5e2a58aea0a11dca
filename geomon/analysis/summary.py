"""A run in words: its alerts, and one sentence for each fact."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from geomon.analysis.alerts import alert_opening, first_alerts
from geomon.analysis.bands import FEWEST_READINGS, FIRST
from geomon.analysis.curves import plain_curve, single_source
from geomon.analysis.facts import Fact, facts_of
from geomon.record import Reading, Readings, with_noun


def summarise(readings: Iterable[Reading], facts: Sequence[Fact] | None = None) -> list[str]:
    """Describe a run in plain sentences: alerts first, then its facts (`facts_of`), then its cost.

    Args:
        readings: Readings of a run.
        facts: Facts of the run. Defaults to the facts of the readings. Pages that keep few readings
            pass the facts of all.

    Returns:
        Sentences, at least one; metrics that were not measured are not mentioned.
    """
    whole = readings if isinstance(readings, Readings) else Readings([], list(readings))
    selected = Readings(whole.runs, single_source(whole))
    sentences = [fact.sentence for fact in (facts_of(selected) if facts is None else facts)]
    if not sentences:
        none = f"{with_noun(len(selected), 'reading')} without a headline quantity."
        sentences = [none if selected else "No readings yet."]
    return [*whole.remarks(), *alert_sentences(whole), *sentences, *_cost(selected)]


def alert_sentences(readings: Readings) -> list[str]:
    """Say for each kind of alert when it came first, and how many there were.

    Args:
        readings: Readings of a run, with its alerts.

    Returns:
        For each kind a line of at most 100 characters, and after a line break what stands behind
        it, if anything does.
    """
    found = []
    for first in first_alerts(readings):
        lines = first.alert.note.lines(alert_opening(first.step).capitalize())
        line, more = (" ".join(each.split()) for each in lines)
        many = f"first of {first.total} such alerts" if first.total > 1 else ""
        found.append("\n".join(filter(None, (line, "; ".join(filter(None, (many, more)))))))
    return found


def bands_so_far(readings: Readings) -> str:
    """Say from which step on bands watched a run, as far as its readings show; "" if unknown.

    Args:
        readings: Readings of a run, of one source.
    """
    # Readings of older records do not count themselves.
    looks = [(reading.count or n) + reading.checks for n, reading in enumerate(readings, 1)]
    is_banded = [
        count > FEWEST_READINGS and reading.step >= FIRST
        for count, reading in zip(looks, readings, strict=True)
    ]
    if not any(is_banded[-1:]):
        return f"not watched by bands yet: they need {FEWEST_READINGS + 1} looks and step {FIRST:,}"
    if not readings[-1].count:  # perhaps of checkpoints, which are not watched
        return ""
    return f"not watched by bands before step {readings[is_banded.index(True)].step:,}"


def _cost(readings: Readings) -> list[str]:
    """Say how often the run was looked at, and in what share of its time."""
    if not len(readings):
        return []
    curve = plain_curve(readings, lambda reading: reading.overhead)
    last, steps = readings[-1], [reading.step for reading in readings]
    count, gap = last.count, last.gap
    if not count:  # an older record
        count, gap = len(steps), max((b - a for a, b in pairwise(steps)), default=0)
    parts = [
        with_noun(count, "reading"),
        f"at most {with_noun(gap, 'step')} apart" if gap else "",
        with_noun(last.checks, "check") if last.checks else "",
        bands_so_far(readings),
    ]
    looked = f"{', '.join(filter(None, parts))}."
    if not len(curve):  # of checkpoints, or of a single reading
        return [f"Until step {last.step:,}: {looked}"]
    share = curve.values[-1] * 100
    took = f"geomon took {share:.{int(share < 10)}f} % of the time until step {last.step:,}"
    return [f"{took}: {looked}"]
