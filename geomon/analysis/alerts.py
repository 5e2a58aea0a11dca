"""Alerts: findings in a reading that call for a look at the training.

A rule is a function of one stack of a reading and of the values outside their bands; it finds the
affected places. `AlertWatch` keeps what it needs of earlier readings, so that each reading costs
the same however long the run is. An alert is raised if the run's first reading was within the
limit, and again once four times as much is found. docs/warnings.md says how often the rules are
wrong, and what they notice.
"""

import difflib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from geomon.analysis.bands import QUIET, SCATTER, SCATTER_READINGS, BandFindings, Bands
from geomon.note import Note
from geomon.record import Course, RaisedAlert, Reading, Readings
from geomon.record.columns import Column, Place

# Entropy of a head, relative to uniform attention, below which nearly all attention is on one key,
# and the share of a stack's heads above which that is a collapse, if they are in several layers.
# Heads that learn to copy attend to one token in good health: mostly all heads of one layer.
_ENTROPY, _HEADS, _LAYERS = 0.05, 0.25, 2
# Score before the softmax. The authors of Kimi K2 (2507.20534) saw it passed in an unstable run. In
# healthy trainings the largest was 40 at width 128, and 304 at width 768.
_LOGIT = 1000.0
# Effective rank at which the variance has nearly a single direction. In 94 healthy trainings of
# small decoders, the lowest rank was 1.2, near step 32.
_RANK = 1.1
# Share of the variance in rows of massive norm, as in the notes of a reading.
_MASSIVE = 0.5
# An alert is raised again once this many times as much is found.
_AGAIN = 4.0
_NAMED = 3  # most places that are named
_COURSES = 16  # most values whose course an alert shows
_BATCHES = 4096  # most batches that are remembered

# Steps of healthy trainings in which false alarms were counted: docs/warnings.md.
HEALTHY_STEPS = 61_608
_STEPS_WITH_LOSS = 10_000  # and those with every loss watched


# Positional and keyword arguments of a call of the model.
Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Alert:
    """A finding in a reading that calls for a look at the training.

    Attributes:
        name: Name of the rule, such as "rank_collapse".
        step: Step of the reading.
        stack: Name of the stack of blocks; "" if the model has only one.
        layers: Indices of the layers, those furthest beyond the limit first.
        heads: (layer, head) pairs, in the same order.
        numbers: Numbers that were found, by name.
        advice: What to look at.
        courses: The values that left their bands, first one first, over the last 32 readings or
            checks. Defaults to (), for a rule without bands.
        inputs: Positional and keyword arguments of the model's call in the forward pass, for
            `on_alert`. Defaults to None, for a probe or an alert from a record.
    """

    name: str
    step: int
    stack: str = ""
    layers: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)
    advice: str = ""
    courses: tuple[Course, ...] = field(default=(), compare=False, repr=False)
    inputs: Inputs | None = field(default=None, compare=False, repr=False)

    @property
    def where(self) -> str:
        """The places furthest beyond the limit, and the number of others."""
        places = [f"layer {layer}, head {head}" for layer, head in self.heads]
        places = places or [f"layer {layer}" for layer in self.layers]
        more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
        return "; ".join(places[:_NAMED]) + more

    def words(self) -> str:
        """Describe the alert in one sentence.

        Example:
            >>> Alert("logit_growth", 80, heads=((3, 1),),
            ...       numbers={"largest": 1300.0, "limit": 1000.0}, advice="look there").words()
            'logit growth (layer 3, head 1): largest score before the softmax 1,300, above 1,000; \
look there; false alarms: 0 in 61,608 healthy steps (geomon alerts logit_growth)'
        """
        return self.note().words()

    def note(self) -> Note:
        """Build the note of the reading, whose kind is the name of the rule."""
        where = f" ({self.where})" if self.where else ""
        rule = RULES[self.name]
        return Note(
            self.name,
            f"{self.name.replace('_', ' ')}{where}: {rule.text}; {self.advice}; {rule.odds} "
            f"(geomon alerts {self.name})",
            stack=self.stack, layers=self.layers, heads=self.heads,
            numbers=self.numbers, advice=self.advice,
        )  # fmt: skip


class FirstAlert(NamedTuple):
    """The first alert of a kind.

    Attributes:
        step: Step at which it was raised.
        alert: The alert. If several alerts report one departure, the last of them, which names all
            places.
        total: Number of alerts of the kind.
    """

    step: int
    alert: RaisedAlert
    total: int


def first_alerts(readings: Readings) -> list[FirstAlert]:
    """Find the first alert of each kind, most serious kind first.

    Args:
        readings: Readings of a run, with its alerts.
    """
    found: dict[str, FirstAlert] = {}
    for alert in readings.alerts:
        note = alert.note
        first = found.get(note.kind, FirstAlert(alert.step, alert, 0))
        since = note.numbers.get("since")
        goes_on = since is not None and since == first.alert.note.numbers.get("since")
        found[note.kind] = first._replace(
            total=first.total + 1, alert=alert if goes_on else first.alert
        )
    known = [found.pop(kind) for kind in RULES if kind in found]
    return [*known, *found.values()]  # unknown kinds come from a newer version


_Numbers = dict[str, int | float | str]


class Finding(NamedTuple):
    """Places of a stack that pass a limit.

    Attributes:
        size: How much was found: a number of places, or a value.
        numbers: Numbers that were found, by their names in the text of the rule.
        layers: Indices of the layers, those furthest beyond the limit first.
        heads: (layer, head) pairs, in the same order.
    """

    size: float
    numbers: _Numbers
    layers: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()


class AlertRule(NamedTuple):
    """One kind of alert.

    Attributes:
        find: Function of a reading, the name of a stack and its bands that finds what is beyond a
            limit; None if something else than the values of a reading is watched.
        seeks: Condition that it looks for.
        text: The finding, as a `str.format` template for the numbers.
        advice: Things to look at.
        false_alarms: Number of false alarms in healthy trainings; None if the alert states a fact,
            without a threshold. Defaults to 0.
        may_begin: Whether a finding in the first reading is not a reason for an alert. Defaults to
            True.
        passes: Number of readings without a finding after which the next one is a new alert.
            Defaults to None: an alert is new only if it finds four times as much.
        healthy: Number of these healthy steps. Defaults to `HEALTHY_STEPS`.
    """

    find: Callable[[Reading, str, BandFindings], Finding | None] | None
    seeks: str
    text: str
    advice: str
    false_alarms: int | None = 0
    may_begin: bool = True
    passes: int | None = None
    healthy: int = HEALTHY_STEPS

    @property
    def odds(self) -> str:
        """How often the alert is false, in words."""
        if self.false_alarms is None:
            return "a fact, without a threshold"
        return f"false alarms: {self.false_alarms} in {self.healthy:,} healthy steps"


def _left_band(reading: Reading, stack: str, bands: BandFindings) -> Finding | None:
    if not bands.departures:
        return None
    first = bands.left[0]
    others = [
        f"at step {left.step:,} " * (left.step > before.step) + _words_of(left.place)
        for before, left in itertools.pairwise(bands.left)
    ]
    numbers: _Numbers = {
        "metric": _name_of(first.place), "value": first.value, "low": first.low, "high": first.high,
        "since": first.step, "count": len(bands.left),
        "then": "; then " + ", ".join(others[:_NAMED]) if others else "",
    }  # fmt: skip
    places = [left.place for left in bands.left]
    if first.place.kind != "head":
        layers = dict.fromkeys(place.layer or 0 for place in places)
        return Finding(len(places), numbers, layers=tuple(layers))
    heads = dict.fromkeys((p.layer or 0, p.head) for p in places if p.kind == "head")
    return Finding(len(places), numbers, heads=tuple(heads))


def _name_of(place: Place) -> str:
    return "/".join(filter(None, (place.metric, place.part)))


def _words_of(place: Place) -> str:
    head = f", head {place.head}" if place.kind == "head" else ""
    return f"{_name_of(place)} of layer {place.layer}{head}"


def _scatter_growth(reading: Reading, stack: str, bands: BandFindings) -> Finding | None:
    if not bands.scatter > SCATTER:
        return None
    factor = math.exp(bands.scatter)
    return Finding(factor, {"factor": math.sqrt(factor), "readings": SCATTER_READINGS})


def _entropy_collapse(reading: Reading, stack: str, bands: BandFindings) -> Finding | None:
    heads = _column(reading, stack, "attention_entropy_normalised").by_head()
    found = {place: value for place, value in heads.items() if value < _ENTROPY}
    layers = len({layer for layer, _ in found})
    if len(found) <= _HEADS * len(heads) or layers < _LAYERS:
        return None
    numbers: _Numbers = {
        "count": len(found), "plural": "s" * (len(found) > 1), "limit": 100 * _ENTROPY,
        "lowest": 100 * min(found.values()),
    }  # fmt: skip
    return Finding(len(found), numbers, heads=tuple(sorted(found, key=found.__getitem__)))


def _logit_growth(reading: Reading, stack: str, bands: BandFindings) -> Finding | None:
    heads = _column(reading, stack, "max_logit").by_head()
    found = {place: value for place, value in heads.items() if value > _LOGIT}
    if not found:
        return None
    largest = max(found.values())
    places = tuple(sorted(found, key=lambda place: -found[place]))
    return Finding(largest, {"largest": largest, "limit": _LOGIT}, heads=places)


def _rank_collapse(reading: Reading, stack: str, bands: BandFindings) -> Finding | None:
    # If a few rows carry the variance, the rank only describes these rows.
    massive = _column(reading, stack, "massive_share").by_layer()
    found = {
        layer: value
        for layer, value in _column(reading, stack, "effective_rank").by_layer().items()
        if value < _RANK and massive.get(layer, 0.0) < _MASSIVE
    }
    if not found:
        return None
    numbers: _Numbers = {"lowest": min(found.values()), "limit": _RANK}
    return Finding(len(found), numbers, tuple(sorted(found, key=found.__getitem__)))


def _not_finite(reading: Reading, stack: str, bands: BandFindings) -> Finding | None:
    lost = [
        note for note in reading.notes if note.kind == "rows not finite" and note.stack == stack
    ]
    if not lost:
        return None
    most = max(lost, key=lambda note: float(note.numbers["lost"]))
    numbers = {name: most.numbers[name] for name in ("lost", "rows")}
    return Finding(float(numbers["lost"]), numbers, most.layers)


_AFTER_FALL = "look at what the model sees of its labels (the mask), and for batches that repeat"
_ATTENTION = "look at the learning rate, and at the norms of the queries and keys"

# Most serious first, the order in which pages list the alerts of a run.
RULES: Mapping[str, AlertRule] = {
    "not_finite": AlertRule(
        _not_finite,
        "rows that are not finite",
        "{lost} of {rows} rows are not finite",
        "look at the loss and the data type, and for the first step with it",
        may_begin=False,
    ),
    "loss_not_finite": AlertRule(
        None,
        "a logged loss that is not finite after a finite one",
        "{name} was {value}",
        "look at the batch of this step, at the learning rate and the data type",
        false_alarms=None,
    ),
    "loss_jump": AlertRule(
        None,
        "a logged loss that jumps up, or falls as no earlier loss predicts",
        "{name} was {value:.3g}, {side} the expected {low:.3g} to {high:.3g}",
        "look at the batches, their labels and the learning rate",
        healthy=_STEPS_WITH_LOSS,
    ),
    "same_batch": AlertRule(
        None,
        "the same token ids as before, where batches have differed",
        "the batch has the token ids of the one at step {before:,}",
        "look at the order of the data: the sampler, its seed, and what a resumed run skips",
        false_alarms=None,
    ),
    "unmoved_weights": AlertRule(
        None,
        "trainable weights that do not move while others do",
        "{count} trainable weight{plural} did not move in {steps:,} steps: {names}",
        "look at the parameters that the optimizer got, and at their gradients and data type",
        false_alarms=None,
    ),
    "left_band": AlertRule(
        _left_band,
        "a value at a layer or head outside the band that earlier readings predict",
        "{metric} was {value:.3g} at step {since:,}, outside the expected {low:.3g} to "
        "{high:.3g}{then}",
        "look at what changed at this step: data, learning rate, the weights of that block",
        false_alarms=3,
        passes=QUIET,
    ),
    "scatter_growth": AlertRule(
        _scatter_growth,
        "values at all layers and heads that scatter nearly twice as much as before",
        "over {readings} readings, all watched values together have scattered {factor:.1f} "
        "times as far from their lines as before, or more",
        "look at the learning rate, at the gradients and at the data",
        false_alarms=2,
        passes=QUIET,
    ),
    "rank_collapse": AlertRule(
        _rank_collapse,
        f"an effective rank of the hidden states below {_RANK:g}",
        "effective rank of the hidden states down to {lowest:.2f}, below {limit:g}",
        "look at the learning rate, its warm-up and the initialisation",
    ),
    "logit_growth": AlertRule(
        _logit_growth,
        f"a score before the softmax above {_LOGIT:,.0f}",
        "largest score before the softmax {largest:,.0f}, above {limit:,.0f}",
        f"{_ATTENTION}, or normalise both",
    ),
    "entropy_collapse": AlertRule(
        _entropy_collapse,
        f"more than {100 * _HEADS:.0f} % of the heads, in {_LAYERS} or more layers, with an "
        f"entropy below {100 * _ENTROPY:.0f} % of uniform attention's entropy",
        "entropy of {count} head{plural} below {limit:.0f} % of uniform attention's entropy, "
        "lowest {lowest:.2f} %",
        _ATTENTION,
    ),
}


class AlertWatch:
    """Raises the alerts of a run, reading by reading.

    Args:
        names: Names of the watched rules (see `RULES`). Defaults to all rules.

    Attributes:
        asks_again: Whether the next reading decides whether a value of the last one has left its
            band.

    Raises:
        ValueError: If a rule does not exist.

    Example:
        >>> from geomon.record.columns import Column
        >>> watch = AlertWatch(["rank_collapse"])
        >>> def at(step, rank):
        ...     stacks = {"": {"effective_rank": Column(first=2, layers=[rank])}}
        ...     return Reading(step, 0.0, 0.0, "probe", "eval", 8192, 1, "float32", stacks)
        >>> watch.add(at(0, 60.0)), [alert.layers for alert in watch.add(at(8, 1.05))]
        ([], [(2,)])
        >>> watch.add(at(9, 1.04))
        []
    """

    def __init__(self, names: Collection[str] = RULES) -> None:
        check_alerts(names)
        self._rules = {name: RULES[name] for name in names}
        # By source (other tokens have other values) and stack.
        self._bands: dict[tuple[str, str], Bands] = {}
        self._largest: dict[tuple[str, str], float] = {}  # by name and stack
        self._quiet: dict[tuple[str, str], int] = {}  # readings since the last finding
        self._begun: set[str] = set()  # sources that have had a reading
        self._batches: dict[str, int] = {}  # first step with a batch, last batches last
        self._last_batch: tuple[str, int] | None = None  # and its step
        self._resumes = False  # whether the readings so far are of earlier starts
        self.asks_again = False

    def recall(self, reading: Reading) -> None:
        """Process a reading of an earlier start, which raises nothing.

        Args:
            reading: A reading of a later step than the ones before.
        """
        self.add(reading)
        self._resumes = True

    def add(self, reading: Reading) -> list[Alert]:
        """Process the next reading, and return the alerts that it raises.

        Args:
            reading: A reading of a later step than the ones before.
        """
        stacks = dict.fromkeys([*reading.stacks, *(note.stack for note in reading.notes)])
        # A check and a reading of one rank look at the same pass.
        alone = reading.source == "inline" and reading.world_size == 1
        source = "check" if alone else reading.source
        first = source not in self._begun
        self._begun.add(source)
        own = {
            stack: self._bands.setdefault((source, stack), Bands(stack))
            for stack in stacks
            if not self._rules.keys().isdisjoint({"left_band", "scatter_growth"})
        }
        bands = {stack: own[stack].add(reading) if own else BandFindings() for stack in stacks}
        is_watched = "left_band" in self._rules
        self.asks_again = is_watched and any(found.is_strange for found in bands.values())
        alerts = []
        for (name, rule), stack in itertools.product(self._rules.items(), stacks):
            if rule.find is not None:
                found = rule.find(reading, stack, bands[stack])
                is_news = self._is_news((name, stack), rule, found)
                if found and is_news and not (first and rule.may_begin):
                    left = bands[stack].left[:_COURSES] if name == "left_band" else []
                    courses = tuple(own[stack].course(one.place) for one in left)
                    alerts.append(
                        Alert(
                            name, reading.step, stack, found.layers, found.heads, found.numbers,
                            rule.advice, courses,
                        )
                    )  # fmt: skip
        return alerts + self._same_batch(reading)

    def _same_batch(self, reading: Reading) -> list[Alert]:
        """Return the alert on a batch that came at the last look too, or before a resume.

        Data may be passed through again, so a batch counts only if the last look was the first to
        see it, and another batch came before.
        """
        batch = reading.batch
        if not batch or reading.source == "probe":
            return []
        before = self._batches.setdefault(batch, reading.step)
        repeats = (batch, before) == self._last_batch
        is_news = len(self._batches) > 1 and (repeats or self._resumes) and before < reading.step
        self._last_batch, self._resumes = (batch, reading.step), False
        if len(self._batches) > _BATCHES:
            self._batches.pop(next(iter(self._batches)))
        if not is_news:
            return []
        return self._of_fact("same_batch", reading.step, {"before": before})

    def add_loss(self, step: int, name: str, value: float) -> list[Alert]:
        """Return the alert that a logged loss raises because it is not finite any more.

        Args:
            step: Step of the loss.
            name: Name under which it was logged.
            value: NaN or an infinity.
        """
        words = "NaN" if math.isnan(value) else f"{value:g}"
        return self._of_fact("loss_not_finite", step, {"name": name, "value": words})

    def add_jump(self, step: int, name: str, value: float, low: float, high: float) -> list[Alert]:
        """Return the alert that a logged loss raises because it left its band.

        Args:
            step: Step of the loss.
            name: Name under which it was logged.
            value: Mean of the last losses.
            low: Lower end of the band.
            high: Upper end of the band.
        """
        side = "above" if value > high else "below"
        numbers: _Numbers = {"name": name, "value": value, "low": low, "high": high, "side": side}
        found = self._of_fact("loss_jump", step, numbers)
        return [replace(each, advice=_AFTER_FALL) if side == "below" else each for each in found]

    def add_still(
        self, step: int, names: Sequence[str], layers: Sequence[int], steps: int
    ) -> list[Alert]:
        """Return the alert that weights raise because they have not moved.

        Args:
            step: The present step.
            names: Names of the weights.
            layers: Depths of the blocks that hold some of them.
            steps: Number of steps without a move.
        """
        others = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        numbers: _Numbers = {
            "count": len(names), "plural": "s" * (len(names) > 1), "steps": steps,
            "names": ", ".join(names[:_NAMED]) + others,
        }  # fmt: skip
        return self._of_fact("unmoved_weights", step, numbers, tuple(layers))

    def _of_fact(
        self, name: str, step: int, numbers: _Numbers, layers: tuple[int, ...] = ()
    ) -> list[Alert]:
        """Return the alert on a fact, if it is wanted."""
        if name not in self._rules:
            return []
        return [Alert(name, step, layers=layers, numbers=numbers, advice=RULES[name].advice)]

    def _is_news(self, key: tuple[str, str], rule: AlertRule, found: Finding | None) -> bool:
        """Whether a finding is the first of its kind, or four times as large as the largest."""
        self._quiet[key] = 0 if found else self._quiet.get(key, 0) + 1
        if self._quiet[key] == rule.passes:
            self._largest.pop(key, None)
        if found and found.size >= _AGAIN * self._largest.get(key, 0.0):
            self._largest[key] = found.size
            return True
        return False


def check_alerts(names: Collection[str]) -> None:
    """Raise unless all names are names of rules.

    Args:
        names: Names of alerts.

    Raises:
        TypeError: If it is not a collection of names.
        ValueError: If a name does not exist.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        advice = f': write ["{names}"]' if isinstance(names, str) else ""
        raise TypeError(f"alerts must be a sequence of names, () for none, got {names!r}{advice}")
    for name in names:
        if name not in RULES:
            close = difflib.get_close_matches(str(name), RULES, n=1)
            advice = f" (did you mean '{close[0]}'?)" if close else ""
            raise ValueError(f"no alert is called {name!r}{advice}; there are {', '.join(RULES)}")


def _column(reading: Reading, stack: str, metric: str) -> Column:
    return reading.stacks.get(stack, {}).get(metric, Column())
