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
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from geomon.analysis.bands import (
    LOSS,
    QUIET_READINGS,
    SCATTER,
    SCATTER_READINGS,
    BandFindings,
    Bands,
    Departure,
    rule_of,
)
from geomon.analysis.resume import KEPT, Change, compare_resumed
from geomon.note import Note
from geomon.note_kinds import NoteKind
from geomon.record import Column, Course, Place, RaisedAlert, Reading, Readings

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
# Healthy resumes in which false alarms were counted: docs/alerts.md.
HEALTHY_RESUMES = 1_304
_STEPS_WITH_LOSS = 10_000  # healthy steps with every loss watched


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
        advice: Advice on what to look at.
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
        return _some(self._places, _NAMED)

    @property
    def _places(self) -> list[str]:
        heads = [f"layer {layer}, head {head}" for layer, head in self.heads]
        return heads or [f"layer {layer}" for layer in self.layers]

    def words(self) -> str:
        """Describe the alert in one sentence.

        Example:
            >>> Alert("logit_growth", 80, heads=((3, 1),),
            ...       numbers={"largest": 1300.0, "limit": 1000.0}, advice="look there").words()
            'logit growth (layer 3, head 1): largest attention score 1,300, above 1,000; \
look there; false alarms: 0 in 61,608 healthy steps (geomon alerts logit_growth)'
        """
        return self.note().words()

    def note(self) -> Note:
        """Build the note of the reading, whose kind is the name of the rule.

        With the step before it, its sentence fits a line.
        """
        rule, kind = RULES[self.name], self.name.replace("_", " ")
        places = self._places
        parts = (
            f"at {self.where}" if len(places) > 1 else "", rule.more, self.advice,
            f"{rule.odds} (geomon alerts {self.name})",
        )  # fmt: skip
        for where in (_some(places, 1), *places[:1], ""):
            note = Note(
                self.name,
                f"{kind}{f' ({where})' if where else ''}: {rule.text}",
                stack=self.stack, layers=self.layers, heads=self.heads,
                numbers=self.numbers, advice=self.advice, more="; ".join(filter(None, parts)),
            )  # fmt: skip
            if not note.lines(alert_opening(self.step))[0].endswith("..."):
                break
        return note


def alert_opening(step: int) -> str:
    """Return the first words of the line that tells of an alert."""
    return f"alert at step {step:,}: "


def _some(names: Sequence[str], most: int, separator: str = "; ") -> str:
    """List the first names, and the number of others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


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
        excess: How far beyond its limit the furthest value is. Defaults to 0, for unknown.
    """

    size: float
    numbers: _Numbers
    layers: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    excess: float = 0.0


class AlertRule(NamedTuple):
    """One kind of alert.

    Attributes:
        find: Function of a reading, the name of a stack and its bands that finds what is beyond a
            limit; None if something else than the values of a reading is watched.
        seeks: Condition that it looks for.
        text: The finding in a few words, as a `str.format` template for the numbers.
        advice: Things to look at.
        more: Details that follow the finding, as a template too. Defaults to "".
        false_alarms: Number of false alarms in healthy trainings; None if the alert states a fact,
            without a threshold. Defaults to 0.
        healthy: How much of healthy trainings that is. Defaults to `HEALTHY_STEPS` steps.
        may_begin: Whether a finding in the first reading is not a reason for an alert. Defaults to
            True.
        passes: Number of readings without a finding after which the next one is a new alert if it
            finds more, or other places. Defaults to None: an alert is new only if it finds four
            times as much.
    """

    find: Callable[[Reading, str, BandFindings], Finding | None] | None
    seeks: str
    text: str
    advice: str
    more: str = ""
    false_alarms: int | None = 0
    healthy: str = f"{HEALTHY_STEPS:,} healthy steps"
    may_begin: bool = True
    passes: int | None = None

    @property
    def odds(self) -> str:
        """How often the alert is false, in words."""
        if self.false_alarms is None:
            return "a fact, without a threshold"
        return f"false alarms: {self.false_alarms} in {self.healthy}"


def _left_band(reading: Reading, stack: str, bands: BandFindings) -> Finding | None:
    if not bands.departures:
        return None
    first = bands.left[0]
    others = [
        (f"at step {left.step:,} " if left.step > before.step else "") + _words_of(left.place)
        for before, left in itertools.pairwise(bands.left)
    ]
    numbers: _Numbers = {
        "metric": _name_of(first.place), "value": first.value, "low": first.low, "high": first.high,
        "since": first.step, "count": len(bands.left), "tag": first.place.tag,
        "then": "; then " + ", ".join(others[:_NAMED]) if others else "",
    }  # fmt: skip
    excess = max(departure.size for departure in bands.departures)
    return Finding(
        len(bands.left), numbers, **_places_of([x.place for x in bands.left]), excess=excess
    )


def _places_of(places: Sequence[Place]) -> dict[str, Any]:
    """Return the heads if the first place is one, or else the layers."""
    if places[0].kind == "head":
        heads = [(place.layer or 0, place.head) for place in places if place.kind == "head"]
        return {"heads": tuple(dict.fromkeys(heads))}
    layers = [place.layer for place in places if place.layer is not None]
    return {"layers": tuple(dict.fromkeys(layers))}


def _name_of(place: Place) -> str:
    """Return the name of a place's metric and part, shortened for a line."""
    if place.metric == LOSS:
        return place.part
    metric = place.metric.replace("attention_entropy_normalised", "attention entropy")
    return "/".join(filter(None, (metric, place.part)))


def _words_of(place: Place) -> str:
    if place.layer is None:
        return _name_of(place)
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
        "count": len(found), "limit": 100 * _ENTROPY, "lowest": 100 * min(found.values()),
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
        note
        for note in reading.notes
        if note.kind == NoteKind.ROWS_NOT_FINITE and not note.about and note.stack == stack
    ]
    if not lost:
        return None
    most = max(lost, key=lambda note: float(note.numbers["lost"]))
    numbers = {name: most.numbers[name] for name in ("lost", "rows")}
    return Finding(float(numbers["lost"]), numbers, most.layers)


def _odd_layer(reading: Reading, stack: str, bands: BandFindings) -> Finding | None:
    found = [note for note in reading.notes if note.kind in _OF_FUNCTION and note.stack == stack]
    if not found:
        return None
    layers = dict.fromkeys(layer for note in found for layer in note.layers)
    heads = dict.fromkeys(place for note in found for place in note.heads)
    places = len(layers) + len(heads)
    return Finding(places, {"kind": found[0].kind}, tuple(layers), tuple(heads))


_AFTER_FALL = "look at what the model sees of its labels (the mask), and for batches that repeat"
_ATTENTION = "look at the learning rate, and at the norms of the queries and keys"
# Rules of a fixed limit, which say nothing of a cause.
_FIXED = ("rank_collapse", "logit_growth", "entropy_collapse")

# Kinds of notes on layers that compute something else than the others.
_OF_FUNCTION = (NoteKind.LATER_KEYS, NoteKind.OTHER_SCALE, NoteKind.EQUAL_HEADS)

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
        "{name} {value:.3g}, expected {low:.3g} to {high:.3g}",
        "look at the batches, their labels and the learning rate",
        healthy=f"{_STEPS_WITH_LOSS:,} healthy steps",
    ),
    "same_batch": AlertRule(
        None,
        "the same token ids as before, where batches have differed",
        "token ids of step {before:,} again",
        "look at the order of the data: the sampler, its seed, and what a resumed run skips",
        false_alarms=None,
    ),
    "unmoved_weights": AlertRule(
        None,
        "trainable weights that do not move while others do",
        "{count} trainable weight{plural} did not move in {steps:,} steps",
        "look at the parameters that the optimizer got, and at their gradients and data type",
        "{names}",
        false_alarms=None,
    ),
    "odd_layer": AlertRule(
        _odd_layer,
        "a layer that begins to attend in another way than the others: later keys, another scale, "
        "equal heads",
        "{kind}",
        "look at what changed in this layer: its mask, its code, the weights that were copied",
        "the other layers do not, and it did not before",
        false_alarms=None,
    ),
    "changed_at_resume": AlertRule(
        None,
        "values of the first reading after a resume that moved further than between earlier ones",
        "{metric} {value:.3g}, before {before:.3g}",
        "look at what the checkpoint holds, and at what was loaded",
        "before is at step {last:,}{usual}{then}",
        healthy=f"{HEALTHY_RESUMES:,} healthy resumes",
    ),
    "left_band": AlertRule(
        _left_band,
        "a value at a layer or head outside the band that earlier readings predict",
        "{metric} {value:.3g}, expected {low:.3g} to {high:.3g}",
        "look at what changed at this step: data, learning rate, the weights of that block",
        "{tag} left its band at step {since:,}{then}",
        false_alarms=3,
        passes=QUIET_READINGS,
    ),
    "scatter_growth": AlertRule(
        _scatter_growth,
        "values at all layers and heads that scatter half as far again as before, or more",
        "all values scatter {factor:.1f} times as far as before",
        "look at the learning rate, at the gradients and at the data",
        "over {readings} readings, all watched values together",
        false_alarms=2,
        passes=QUIET_READINGS,
    ),
    "rank_collapse": AlertRule(
        _rank_collapse,
        f"an effective rank of the hidden states below {_RANK:g}",
        "effective rank {lowest:.2f}, below {limit:g}",
        "look at the learning rate, its warm-up and the initialisation",
        "the hidden states have hardly more than one direction",
    ),
    "logit_growth": AlertRule(
        _logit_growth,
        f"a score before the softmax above {_LOGIT:,.0f}",
        "largest attention score {largest:,.0f}, above {limit:,.0f}",
        f"{_ATTENTION}, or normalise both",
    ),
    "entropy_collapse": AlertRule(
        _entropy_collapse,
        f"more than {100 * _HEADS:.0f} % of the heads, in {_LAYERS} or more layers, with an "
        f"entropy below {100 * _ENTROPY:.0f} % of uniform attention's entropy",
        "at {lowest:.2f} % of uniform, below {limit:.0f} %",
        _ATTENTION,
        "{count} heads attend to nearly one key",
    ),
}


class _News:
    """Findings that were said, so that only a new or a worse one is said again.

    Findings are told apart by the name of their rule and their stack.
    """

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], Finding] = {}  # the largest
        self._quiet: dict[tuple[str, str], int] = {}  # readings since the last finding

    def add(self, key: tuple[str, str], rule: AlertRule, found: Finding | None) -> bool:
        """Whether a finding is the first of its kind, or worse than what was said before."""
        quiet = self._quiet.get(key, 0)
        self._quiet[key] = 0 if found else quiet + 1
        if not found:
            return False
        said = self._said.get(key)
        # After a quiet time it is another event; else it has to be four times as large.
        is_other = said is not None and rule.passes is not None and quiet >= rule.passes
        is_more = said is None or found.size >= _AGAIN * said.size
        if not (is_more or (is_other and said is not None and _is_worse(found, said))):
            return False
        self._said[key] = found
        return True


class _SeenBatches:
    """Batches of the training's forward passes, to notice one that comes again."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}  # first step with a batch, last batches last
        self._last: tuple[str, int] | None = None  # last batch, and its step
        self._repeats = 0  # batches that came again
        self._resumes = False  # whether the batches so far are of earlier starts

    def resume(self) -> None:
        """Note that the batches so far are of earlier starts of the run."""
        self._resumes = True

    def add(self, reading: Reading) -> Finding | None:
        """Look for a batch that came at the last look too, or before a resume.

        Data may be passed through again, so a batch counts only if the last look was the first to
        see it, and another batch came before.
        """
        batch = reading.batch
        if not batch or reading.source == "probe":
            return None
        before = self._steps.setdefault(batch, reading.step)
        repeats = (batch, before) == self._last
        is_repeat = len(self._steps) > 1 and (repeats or self._resumes) and before < reading.step
        self._last, self._resumes = (batch, reading.step), False
        if len(self._steps) > _BATCHES:
            self._steps.pop(next(iter(self._steps)))
        if not is_repeat:
            return None
        self._repeats += 1
        return Finding(self._repeats, {"before": before})


class _EarlierStarts:
    """Readings of earlier starts of a run, until the first reading of this one is compared."""

    def __init__(self) -> None:
        self._origins: dict[str, Reading] = {}  # the first reading, by source
        self._last: defaultdict[str, deque[Reading]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._given_up: dict[tuple[str, int], Reading] = {}  # by source and step

    def add(self, reading: Reading) -> None:
        """Add a reading of a later step than the ones before."""
        self._origins.setdefault(reading.source, reading)
        self._last[reading.source].append(reading)

    def give_up(self, readings: Sequence[Reading]) -> None:
        """Add the readings of branches that were given up, the last branch last."""
        self._given_up = {(reading.source, reading.step): reading for reading in readings}

    def compare(self, reading: Reading) -> list[Alert]:
        """Return the alert on the first reading of a source after a resume."""
        earlier = self._last.pop(reading.source, None)
        if earlier is None:
            return []
        origin = self._origins.pop(reading.source)
        rows = [*([] if earlier[0] is origin else [origin]), *earlier]
        twin = self._given_up.pop((reading.source, reading.step), None)
        found = compare_resumed(rows, reading, twin)
        if not found.changes:
            return []
        return [_of_resume(reading.step, found.step, found.changes, is_fresh=found.is_fresh)]


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
        self._begun: set[str] = set()  # sources that have had a reading
        self._news, self._batches = _News(), _SeenBatches()
        self._earlier = _EarlierStarts()
        self.asks_again = False

    def recall(self, reading: Reading) -> None:
        """Process a reading of an earlier start, which raises nothing.

        Args:
            reading: A reading of a later step than the ones before.
        """
        self._look(reading)
        self._batches.resume()
        if "changed_at_resume" in self._rules:
            self._earlier.add(reading)

    def recall_given_up(self, readings: Sequence[Reading]) -> None:
        """Remember readings of branches that were given up, to which the next ones can be compared.

        Args:
            readings: The readings; the last branch comes last.
        """
        self._earlier.give_up(readings)

    def add(self, reading: Reading) -> list[Alert]:
        """Process the next reading, and return the alerts that it raises.

        Args:
            reading: A reading of a later step than the ones before.
        """
        return [*self._earlier.compare(reading), *self._look(reading)]

    def _look(self, reading: Reading) -> list[Alert]:
        """Look for everything but what a resume changed."""
        # A check and a reading of one rank look at the same pass.
        alone = reading.source == "inline" and reading.world_size == 1
        source = "check" if alone else reading.source
        is_first = source not in self._begun
        self._begun.add(source)
        stacks = dict.fromkeys([*reading.stacks, *(note.stack for note in reading.notes)])
        bands = {stack: self._compare(reading, source, stack) for stack in stacks}
        is_watched = "left_band" in self._rules
        self.asks_again = is_watched and any(each.is_strange for each in bands.values())
        alerts = []
        for (name, rule), stack in itertools.product(self._rules.items(), stacks):
            if rule.find is not None:
                found = rule.find(reading, stack, bands[stack])
                is_news = self._news.add((name, stack), rule, found)
                if found and is_news and not (is_first and rule.may_begin):
                    left = bands[stack].left if is_watched else []
                    alerts.append(self._alert(name, reading.step, (source, stack), found, left))
        return alerts + self._same_batch(reading)

    def _compare(self, reading: Reading, source: str, stack: str) -> BandFindings:
        """Compare the values of a stack with their bands, if a rule wants them."""
        if self._rules.keys().isdisjoint({"left_band", "scatter_growth"}):
            return BandFindings()
        return self._bands.setdefault((source, stack), Bands(stack)).add(reading)

    def _alert(
        self,
        name: str,
        step: int,
        key: tuple[str, str],
        found: Finding,
        left: Sequence[Departure],
    ) -> Alert:
        """Make the alert on a finding, with the values that have left their bands."""
        shown = left[:_COURSES] if name == "left_band" else []
        return Alert(
            name, step, key[1], found.layers, found.heads, found.numbers, _advice(name, left),
            tuple(self._bands[key].course(one.place) for one in shown),
        )  # fmt: skip

    def _same_batch(self, reading: Reading) -> list[Alert]:
        """Return the alert on a batch that came before."""
        found = self._batches.add(reading)
        if not found or not self._news.add(("same_batch", ""), RULES["same_batch"], found):
            return []
        return self._of_fact("same_batch", reading.step, found)

    def add_loss(self, step: int, name: str, value: float) -> list[Alert]:
        """Return the alert that a logged loss raises because it is not finite any more.

        Args:
            step: Step of the loss.
            name: Name under which it was logged.
            value: NaN or an infinity.
        """
        words = "NaN" if math.isnan(value) else f"{value:g}"
        return self._of_fact("loss_not_finite", step, Finding(1, {"name": name, "value": words}))

    def add_jump(self, step: int, name: str, value: float, low: float, high: float) -> list[Alert]:
        """Return the alert that a logged loss raises because it left its band.

        Args:
            step: Step of the loss.
            name: Name under which it was logged.
            value: Mean of the last losses.
            low: Lower end of the band.
            high: Upper end of the band.
        """
        numbers: _Numbers = {"name": name, "value": value, "low": low, "high": high}
        found = self._of_fact("loss_jump", step, Finding(1, numbers))
        return [replace(each, advice=_AFTER_FALL) if value < low else each for each in found]

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
        numbers: _Numbers = {
            "count": len(names), "plural": "" if len(names) == 1 else "s", "steps": steps,
            "names": _some(names, _NAMED, ", "),
        }  # fmt: skip
        found = Finding(len(names), numbers, tuple(layers))
        return self._of_fact("unmoved_weights", step, found)

    def _of_fact(self, name: str, step: int, found: Finding) -> list[Alert]:
        """Return the alert on a fact, if it is wanted."""
        if name not in self._rules:
            return []
        advice = RULES[name].advice
        return [Alert(name, step, layers=found.layers, numbers=found.numbers, advice=advice)]


def _is_worse(found: Finding, said: Finding) -> bool:
    """Whether a finding is larger than another one, or is at other places."""
    are_new = {*found.layers, *found.heads} - {*said.layers, *said.heads}
    return bool(are_new) or found.size > said.size or found.excess > said.excess


def _advice(name: str, left: Sequence[Departure]) -> str:
    """Return the advice of a rule; a fixed limit sends to what has left its band first."""
    advice = RULES[name].advice
    if name not in _FIXED or not left:
        return advice
    first = next((one for one in left if one.place.metric == "weight_norm"), left[0])
    place = f"{_words_of(first.place)}, out of its band at step {first.step:,}"
    return f"look first at {place}; then {advice.removeprefix('look ')}"


# What changes at a resume suggest, and what to look at, by their kind.
_WHY = {
    "fresh": (
        "most are back at the values of the first reading, as if weights were drawn anew",
        "look at whether the checkpoint was loaded: its keys, and strict=False",
    ),
    "weights": ("", "look at what was loaded into these weights"),
    "layers": (
        "the norms of all weights are as before",
        "look at the configuration (rotary base, scale, masks), the order of the rows of queries "
        "and keys, the gains of norms, and the data",
    ),
    "losses": (
        "no value of a layer moved further than usual",
        "look at the head and whether it is tied, the labels, the data and the configuration",
    ),
}


def _kind_of_change(changes: Sequence[Change], *, is_fresh: bool) -> str:
    if is_fresh:
        return "fresh"
    if any(change.place.metric == "weight_norm" for change in changes):
        return "weights"
    is_inner = any(change.place.layer is not None for change in changes)
    return "layers" if is_inner else "losses"


def _of_resume(step: int, last: int, changes: Sequence[Change], *, is_fresh: bool) -> Alert:
    """Return the alert on values that moved at a resume, in the words that fit them."""
    weights = [change for change in changes if change.place.metric == "weight_norm"]
    rest = [each for each in changes if each not in weights]
    first, *others = [*weights, *sorted(rest, key=lambda each: each.place.layer is None)]
    then = [f"{_words_of(one.place)} {one.now:.3g}, before {one.before:.3g}" for one in others]
    cause, advice = _WHY[_kind_of_change(changes, is_fresh=is_fresh)]
    by_share = rule_of(first.place).by_logarithm
    size = f"{100 * first.usual:.2g} %" if by_share else f"{first.usual:.2g}"
    usual = f" (it moves by about {size} between readings)" if first.usual else ""
    also = f"also {_some(then, _NAMED)}" if then else ""
    numbers: _Numbers = {
        "metric": _name_of(first.place), "value": first.now, "before": first.before, "last": last,
        "count": len(changes), "usual": usual,
        "then": "".join(f"; {words}" for words in (also, cause) if words),
    }  # fmt: skip
    stack = first.place.stack
    places = _places_of([first.place, *(x.place for x in changes if x.place.stack == stack)])
    return Alert("changed_at_resume", step, stack, numbers=numbers, advice=advice, **places)


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
