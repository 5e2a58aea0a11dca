"""A run in words: its alerts, and one sentence for each fact."""

from collections.abc import Iterable, Sequence

from geomon.analysis.alerts import first_alerts
from geomon.analysis.curves import plain_curve, single_source
from geomon.analysis.facts import Fact, facts_of
from geomon.record import Reading, Readings


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
        none = f"{len(selected)} readings without a headline quantity."
        sentences = [none if selected else "No readings yet."]
    return [*whole.remarks(), *alert_sentences(whole), *sentences, *_cost(selected)]


def alert_sentences(readings: Readings) -> list[str]:
    """Say for each kind of alert when it came first, and how many there were.

    Args:
        readings: Readings of a run, with its alerts.
    """
    return [
        f"Alert at step {first.step:,}{f' (first of {first.total})' if first.total > 1 else ''}: "
        f"{first.alert.words()}."
        for first in first_alerts(readings)
    ]


def _cost(readings: Readings) -> list[str]:
    curve = plain_curve(readings, lambda reading: reading.overhead)
    if not len(curve):
        return []
    share = curve.values[-1] * 100
    digits = 1 if share < 10 else 0
    return [f"geomon took {share:.{digits}f} % of the time until step {curve.steps[-1]:,}."]
