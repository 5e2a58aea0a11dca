"""Alerts: what a reading shows that a training should be looked at for.

A rule is a function of one reading; it finds the places where a limit is passed. `AlertWatch` keeps
what earlier readings had, so that the work for each reading is the same however long the run is. An
alert is raised where the first reading of the run was within the limit, and again when four times
as much is found. How often the rules are wrong: benchmarks/README.md.
"""

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from geomon.analysis.curves import standard_error
from geomon.record import Reading, Readings, tags

# Entropy of a head as a share of that of uniform attention: nearly all attention is on one key.
_ENTROPY = 0.05
# Score before the softmax: the weight of a key doubles with each 0.7 of it, so that a hundred more
# is a weight of 0 or 1 in every data type. Healthy runs of the recipe stay below 40.
_LOGIT = 100.0
# Directions over which the variance is spread: fewer than two. Healthy runs of the recipe have 6.
_RANK = 2.0
# Share of the variance in rows of massive norm: the same as in the notes of a reading.
_MASSIVE = 0.5
# Range of a profile over its largest value, as in the words of a run.
_FLAT = 0.1
# Least number of layers of which a profile has a shape.
_PROFILE = 4
# Change of the dimension over its value that counts as none, over an octave of steps with at least
# so many readings.
_FROZEN, _FROZEN_READINGS = 0.002, 4
# An alert is raised again when what is found is so many times what it was.
_AGAIN = 4.0
_NAMED = 3  # places that are named
_LEFT_OUT = re.compile(r"hidden states, (.+): (\d+) of (\d+) rows are not finite")
# How a note of a reading begins that is an alert.
_PREFIX = "alert: "


@dataclass(frozen=True)
class Alert:
    """Something in a reading that a training should be looked at for.

    Attributes:
        name: Name of the rule, for instance "rank_collapse".
        step: Step of the reading.
        where: Places in the model, in words.
        evidence: What was found, with numbers.
        advice: What to look at.
    """

    name: str
    step: int
    where: str
    evidence: str
    advice: str

    def words(self) -> str:
        """Describe the alert in one sentence.

        Example:
            >>> Alert("logit_growth", 80, "layer 3, head 1", "score 130", "look there").words()
            'logit growth (layer 3, head 1): score 130; look there'
        """
        where = f" ({self.where})" if self.where else ""
        return f"{self.name.replace('_', ' ')}{where}: {self.evidence}; {self.advice}"

    def note(self) -> str:
        """Format the alert as a note of its reading, which `alert_notes` finds again."""
        return f"{_PREFIX}{self.words()} (docs/alerts.md#{self.name})"


def alert_notes(reading: Reading) -> list[str]:
    """Select the notes of a reading that are alerts, without the word at their beginning.

    Args:
        reading: A reading of a record.
    """
    return [note.removeprefix(_PREFIX) for note in reading.notes if is_alert(note)]


def kind_of(words: str) -> str:
    """Return the name of the rule in the words of an alert.

    Example:
        >>> kind_of("logit growth (layer 3, head 1): score 130; look there")
        'logit growth'
    """
    return words.partition(" (")[0].partition(":")[0]


def is_alert(note: str) -> bool:
    """Return whether a note of a reading is an alert.

    Example:
        >>> is_alert("alert: rank collapse (layer 4): ..."), is_alert("another note")
        (True, False)
    """
    return note.startswith(_PREFIX)


class Finding(NamedTuple):
    """Places of a reading that pass a limit.

    Attributes:
        size: How much is found: a number of places, or a value. 0 for nothing.
        where: Places in the model, in words.
        evidence: What was found, with numbers.
    """

    size: float
    where: str
    evidence: str


_NOTHING = Finding(0, "", "")


class Rule(NamedTuple):
    """One kind of alert.

    Attributes:
        start: Makes the function from a reading to what is found in it, at the start of a run.
        advice: What to look at.
        by_default: Whether the alert is raised where none are chosen: those that healthy runs do
            not raise.
        may_begin: Whether what the first reading has already is no reason for an alert.
    """

    start: Callable[[], Callable[[Reading], Finding]]
    advice: str
    by_default: bool = True
    may_begin: bool = True


def _entropy_collapse(reading: Reading) -> Finding:
    found = {
        place: value
        for place, value in _heads(reading, "attention_entropy_normalised")
        if value < _ENTROPY
    }
    if not found:
        return _NOTHING
    lowest = min(found.values())
    return Finding(
        len(found),
        _places(found, found.__getitem__),
        f"entropy of {len(found)} head{'s' * (len(found) > 1)} below {_ENTROPY:.0%} of that of "
        f"uniform attention, lowest {lowest:.2%}".replace("%", " %"),
    )


def _logit_growth(reading: Reading) -> Finding:
    found = {place: value for place, value in _heads(reading, "max_logit") if value > _LOGIT}
    if not found:
        return _NOTHING
    largest = max(found.values())
    return Finding(
        largest,
        _places(found, lambda place: -found[place]),
        f"largest score before the softmax {largest:.0f}, above {_LOGIT:.0f}",
    )


def _rank_collapse(reading: Reading) -> Finding:
    # Where a few rows carry the variance, the rank is that of these rows.
    massive = {place for place, value in _layers(reading, "sink_share") if value >= _MASSIVE}
    found = {
        place: value
        for place, value in _layers(reading, "effective_rank")
        if value < _RANK and place not in massive
    }
    if not found:
        return _NOTHING
    return Finding(
        len(found),
        _places(found, found.__getitem__),
        f"effective rank of the hidden states down to {min(found.values()):.2f}, below {_RANK:.0f}",
    )


def _massive_rows(reading: Reading) -> Finding:
    found = {place: value for place, value in _layers(reading, "sink_share") if value >= _MASSIVE}
    if not found:
        return _NOTHING
    share = f"{max(found.values()):.0%}".replace("%", " %")
    return Finding(
        len(found),
        _places(found, lambda place: -found[place]),
        f"a few rows of massive norm carry up to {share} of the variance",
    )


def _not_finite(reading: Reading) -> Finding:
    lost = [
        (int(match[2]), int(match[3]), match[1])
        for note in reading.notes
        for match in [_LEFT_OUT.match(note)]
        if match is not None
    ]
    if not lost:
        return _NOTHING
    most, rows, where = max(lost)
    return Finding(most, where, f"{most} of {rows} rows are not finite")


def _flat_profile(reading: Reading) -> Finding:
    profile = [
        value
        for place, value in _layers(reading, "anisotropy")
        if not place.endswith("layer 0")
    ]  # fmt: skip
    if len(profile) < _PROFILE or max(profile) - min(profile) >= _FLAT * max(profile):
        return _NOTHING
    return Finding(
        1,
        "all layers",
        f"anisotropy between {min(profile):.3f} and {max(profile):.3f} over {len(profile)} layers",
    )


class _Frozen:
    """Finds a dimension that has not moved while the step has doubled.

    It keeps the reading since which the dimension has been the same, and nothing else.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, float, int]] = {}  # by source: step, value, readings

    def __call__(self, reading: Reading) -> Finding:
        value, _ = dimension_of(reading)
        if not math.isfinite(value):
            return _NOTHING
        step, before, readings = self._since.get(reading.source, (reading.step, value, 0))
        if abs(value - before) > _FROZEN * abs(before):
            step, before, readings = reading.step, value, 0
        self._since[reading.source] = step, before, readings + 1
        if readings + 1 <= _FROZEN_READINGS or reading.step < 2 * max(step, 1):
            return _NOTHING
        return Finding(
            1,
            "",
            f"mean dimension {value:.4g} since step {step}, within {_FROZEN:.1%}".replace(
                "%", " %"
            ),
        )


_ATTENTION = "look at the learning rate, and at the norms of the queries and keys"

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "entropy_collapse": Rule(lambda: _entropy_collapse, _ATTENTION),
        "logit_growth": Rule(lambda: _logit_growth, f"{_ATTENTION}, or normalise both"),
        "rank_collapse": Rule(
            lambda: _rank_collapse, "look at the learning rate, its warm-up and the initialisation"
        ),
        "massive_rows": Rule(lambda: _massive_rows, "read anisotropy_no_sinks there"),
        "not_finite": Rule(
            lambda: _not_finite,
            "look at the loss and the data type, and for the first step with it",
            may_begin=False,
        ),
        "dimension_frozen": Rule(
            _Frozen,
            "look at whether the weights still change (learning rate, frozen modules)",
            by_default=False,
        ),
        "flat_profile": Rule(
            lambda: _flat_profile, "look at the profile over depth", by_default=False
        ),
    }
)

DEFAULT_ALERTS = tuple(name for name, rule in RULES.items() if rule.by_default)


class AlertWatch:
    """Raises alerts of a run, reading by reading.

    Args:
        names: Names of the rules that are watched (see `RULES`).

    Raises:
        ValueError: A rule has a name that does not exist.

    Example:
        >>> watch = AlertWatch(["rank_collapse"])
        >>> def at(step, rank):
        ...     values = {"effective_rank/layer_02": rank}
        ...     return Reading(step, 0.0, 0.0, "probe", "eval", 8192, 1, "float32", values)
        >>> watch.add(at(0, 60.0)), [alert.where for alert in watch.add(at(8, 1.2))]
        ([], ['layer 2'])
        >>> watch.add(at(9, 1.1))
        []
    """

    def __init__(self, names: Collection[str] = DEFAULT_ALERTS) -> None:
        check_alerts(names)
        self._rules = {name: RULES[name] for name in names}
        self._find = {name: rule.start() for name, rule in self._rules.items()}
        self._largest: dict[str, float] = {}
        self._begun: set[str] = set()  # sources of which there has been a reading

    def add(self, reading: Reading) -> list[Alert]:
        """Take the next reading, and return the alerts that it raises.

        Args:
            reading: A reading of a later step than those before.
        """
        first = reading.source not in self._begun
        self._begun.add(reading.source)
        alerts = []
        for name, rule in self._rules.items():
            found = self._find[name](reading)
            largest = self._largest.get(name, 0.0)
            if found.size <= 0 or found.size < _AGAIN * largest:
                continue
            self._largest[name] = found.size
            if not (first and rule.may_begin):
                alerts.append(Alert(name, reading.step, found.where, found.evidence, rule.advice))
        return alerts


def check_alerts(names: Collection[str]) -> None:
    """Raise unless all names are those of rules.

    Args:
        names: Names of alerts.

    Raises:
        TypeError: No collection of names.
        ValueError: A name that does not exist.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        advice = f': write ["{names}"]' if isinstance(names, str) else ""
        raise TypeError(f"alerts is a sequence of names, () for none, got {names!r}{advice}")
    for name in names:
        if name not in RULES:
            close = difflib.get_close_matches(str(name), RULES, n=1)
            advice = f" (did you mean '{close[0]}'?)" if close else ""
            raise ValueError(f"no alert is called {name!r}{advice}; there are {', '.join(RULES)}")


def find_alerts(
    readings: Iterable[Reading], names: Collection[str] = DEFAULT_ALERTS
) -> list[Alert]:
    """Find the alerts of a run.

    Args:
        readings: Readings of a run, steps ascending.
        names: Names of the rules (see `RULES`).

    Raises:
        ValueError: A rule has a name that does not exist.
    """
    watch = AlertWatch(names)
    return [alert for reading in readings for alert in watch.add(reading)]


def dimension_of(reading: Reading) -> tuple[float, float]:
    """Return `twonn/mean` of the main stack of a reading, and its standard error.

    Args:
        reading: A reading.

    Returns:
        The value, NaN where there is none, and its error, 0 where it is unknown.
    """
    main = Readings([], [reading]).of_stack()[0]
    tag = tags.mean_tag("twonn")
    return main.values.get(tag, math.nan), standard_error(main, tag)


def _layers(reading: Reading, metric: str) -> Iterator[tuple[str, float]]:
    """Place and finite value of a metric at each layer."""
    for tag, value in _of_layers(reading, metric):
        if tag.head is None and not tag.part:
            yield _place(tag), value


def _heads(reading: Reading, metric: str) -> Iterator[tuple[str, float]]:
    """Place and finite value of a metric at each head of each layer."""
    for tag, value in _of_layers(reading, metric):
        if tag.head is not None:
            yield _place(tag), value


def _of_layers(reading: Reading, metric: str) -> Iterator[tuple[tags.Tag, float]]:
    prefix = f"{metric}/"
    for name, value in reading.values.items():
        if name.startswith(prefix) and math.isfinite(value):
            tag = tags.parse(name)
            if tag is not None and tag.layer is not None:
                yield tag, value


def _place(tag: tags.Tag) -> str:
    stack = f"{tag.stack} " if tag.stack else ""
    head = "" if tag.head is None else f", head {tag.head}"
    return f"{stack}layer {tag.layer}{head}"


def _places(found: Collection[str], order: Callable[[str], float]) -> str:
    """List the places that are furthest beyond the limit, and the number of the others."""
    listed = sorted(found, key=order)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return "; ".join(listed[:_NAMED]) + more


__all__ = [
    "DEFAULT_ALERTS",
    "RULES",
    "Alert",
    "AlertWatch",
    "alert_notes",
    "check_alerts",
    "dimension_of",
    "find_alerts",
    "is_alert",
    "kind_of",
]
