"""Compares the first reading after a resume with the readings before it.

A training that goes on from a checkpoint has the weights that it had, so its values move as far as
they moved between earlier readings. A value that moves further was changed by the resume.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from geomon.analysis.bands import FIRST, LOSS, rule_of, watched_rows
from geomon.record import Place, Reading, student, tags

_Array = NDArray[np.float64]
_Values = dict[Place, float]

# Most earlier readings that are kept, and fewest changes between them that say what is usual. They
# are of the last half of the training, or, if that has few, the last ones.
KEPT, _FEWEST, _ENOUGH, _SHARE = 13, 2, 4, 0.5
# Farther back than this share of the training, nothing is compared.
_NEAR = 0.7
# Probability that any place is named by chance, and that any loss is; and the number of changes at
# other places of its metric that count as its own, since few changes say little of a place.
_CHANCE, _SHRUNK = 0.002, 4


class Change(NamedTuple):
    """A value that moved further at a resume than before.

    Attributes:
        place: Its place; its metric is "loss", and its part the name, for a loss.
        before: Value before the resume.
        now: Value after it.
        usual: How far it has moved between earlier readings; 0 if both readings are of the same
            step, so that nothing explains a change. For a variance and the norm of weights, a
            share of the value.
        size: The change, relative to what is explained by chance; above 1.
    """

    place: Place
    before: float
    now: float
    usual: float
    size: float


class Resume(NamedTuple):
    """Changes in the first reading after a resume.

    Attributes:
        step: Step of the last reading before it.
        changes: Values that moved further than usual, furthest first.
        is_fresh: Whether most of them are nearer to the run's first reading, as if the weights were
            drawn anew.
    """

    step: int
    changes: Sequence[Change]
    is_fresh: bool = False


def compare_resumed(
    earlier: Sequence[Reading], reading: Reading, twin: Reading | None = None
) -> Resume:
    """Compare the first reading after a resume with those before it, place by place.

    Args:
        earlier: Earlier readings of the same source, steps ascending: the first one of the run and
            the last ones.
        reading: First reading after the resume.
        twin: A reading of the same step on a branch that was given up. Defaults to None. If it saw
            the same rows, both should agree.
    """
    rows, now = [_values(each) for each in earlier], _values(reading)
    before, changes = (earlier or [reading])[-1], []
    is_near = reading.step >= FIRST and before.step >= _NEAR * reading.step
    if is_near and len(pairs := _pairs(earlier, reading.step)) >= _FEWEST:
        gap = reading.step - before.step
        usual = [
            (rows[one], rows[one + 1], gap / (earlier[one + 1].step - earlier[one].step))
            for one in pairs
        ]
        changes = _unusual(usual, rows[-1], now)
    if twin is not None and _is_same(reading, twin):
        # The rows are the same, the batches of the training need not be.
        before, changes = twin, [one for one in changes if _is_of_batches(one.place)]
        changes += _differences(_values(twin), now)
    changes.sort(key=lambda change: -change.size)
    return Resume(before.step, changes, _is_fresh(changes, rows[0] if rows else {}))


def _is_of_batches(place: Place) -> bool:
    """Whether a value is a loss of the training, and not of the probe."""
    return place.metric == LOSS and place.part != tags.PROBE_LOSS


def _is_same(one: Reading, other: Reading) -> bool:
    """Whether readings of one model would agree: the same rows, at one step, without dropout."""
    keys = {(each.step, each.source, each.fingerprint, each.mode) for each in (one, other)}
    return len(keys) == 1 and bool(one.fingerprint) and one.mode == "eval"


def _pairs(earlier: Sequence[Reading], step: int) -> list[int]:
    """Choose the readings whose changes to the next one say what is usual."""
    pairs = [at for at in range(len(earlier) - 1) if earlier[at + 1].step > earlier[at].step]
    recent = [at for at in pairs if earlier[at].step >= _SHARE * step]
    return recent if len(recent) >= _ENOUGH else pairs[-_ENOUGH:]


def _values(reading: Reading) -> _Values:
    """Collect the finite values that alerts watch, and the logged losses."""
    found = {
        Place(stack, metric, part, layer, kind, head): value
        for stack, columns in reading.stacks.items()
        for (metric, part, kind, first), rows in watched_rows(columns)
        for layer, row in enumerate(rows, first)
        for head, value in enumerate(row)
    }
    found |= {
        Place("", LOSS, name): value for name, value in reading.training.items() if LOSS in name
    }
    return {place: value for place, value in found.items() if math.isfinite(value)}


def _differences(before: _Values, now: _Values) -> list[Change]:
    """List the values that differ though they should agree."""
    found = []
    for place in before.keys() & now.keys():
        if not _is_of_batches(place):
            size = abs(_moved(place, before, now)) / rule_of(place).least_at(place.part)
            if size > 1:
                found.append(Change(place, before[place], now[place], 0.0, size))
    return found


def _moved(place: Place, before: _Values, now: _Values) -> float:
    """Return how far a value has moved; NaN if one is unknown."""
    if place not in before or place not in now:
        return math.nan
    rule = rule_of(place)
    return rule.scaled(now[place]) - rule.scaled(before[place])


def _unusual(
    usual: Sequence[tuple[_Values, _Values, float]], before: _Values, now: _Values
) -> list[Change]:
    """List the values that moved much further than between earlier readings.

    `usual` holds the values of two readings each, and how many times as many steps the resume is
    apart.
    """
    places = [place for place in before if place in now]
    changes = np.array([
        [max(1.0, factor) * _moved(place, first, after) for place in places]
        for first, after, factor in usual
    ])  # fmt: skip
    known = np.isfinite(changes)
    counts, squares = known.sum(axis=0), np.where(known, changes, 0.0) ** 2
    losses = sum(place.metric == LOSS for place in places)
    found = []
    for metric in dict.fromkeys((place.stack, place.metric) for place in places):
        own = [n for n, place in enumerate(places) if (place.stack, place.metric) == metric]
        chance = _CHANCE / (losses if metric[1] == LOSS else len(places) - losses)
        moves = _usual_moves(squares[:, own], counts[own].tolist())
        for n, (typical, freedom) in zip(own, moves, strict=True):
            place = places[n]
            limit = max(typical * student(freedom, chance), rule_of(place).least_at(place.part))
            change = abs(_moved(place, before, now))
            if change > limit:
                found.append(Change(place, before[place], now[place], typical, change / limit))
    return found


def _usual_moves(squares: _Array, counts: Sequence[int]) -> list[tuple[float, int]]:
    """Return the root mean square change of each place of a metric, and its degrees of freedom.

    A place's own changes, `squares` [changes, places], are few, so their mean is moderated by the
    mean over all places. Without any change the usual one is infinite.
    """
    total = sum(counts)
    if not total:
        return [(math.inf, 1) for _ in counts]
    common = squares.sum() / total
    found = []
    for count, own in zip(counts, squares.T, strict=True):
        others = min(_SHRUNK, total - count)
        freedom = count + others
        found.append((math.sqrt((own.sum() + others * common) / freedom), freedom))
    return found


def _is_fresh(changes: Sequence[Change], first: _Values) -> bool:
    """Whether values of most places went back to the run's first reading."""
    back = []
    for change in changes:
        if change.place in first and change.place.metric != LOSS:
            scaled = rule_of(change.place).scaled
            start, before, now = map(scaled, (first[change.place], change.before, change.now))
            back.append(abs(now - start) < _SHARE * abs(now - before))
    return len(back) >= _ENOUGH and sum(back) > 0.8 * len(back)


__all__ = ["KEPT", "Change", "Resume", "compare_resumed"]
