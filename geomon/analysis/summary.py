"""A run in words: plain sentences, each of which holds within the errors of the record."""

import math
from collections.abc import Callable, Iterable

from geomon.analysis.alerts import first_alerts
from geomon.analysis.curves import (
    Curve,
    curve_of,
    mean_abs_over_heads,
    measured,
    plain_curve,
    single_source,
)
from geomon.analysis.numbers import number, with_margin
from geomon.analysis.queries_keys import queries_and_keys
from geomon.record import Reading, Readings

# Smallest change of a scale of gride, as a share, that is worth a sentence.
_MIN_CHANGE = 0.05
# "At the end" means since the step that is this factor below the last: two octaves.
_END_FACTOR = 4
# A profile is flat where its range is below this share of its largest value.
_FLAT = 0.1


def summarise(readings: Iterable[Reading]) -> list[str]:
    """Describe a run in plain sentences; a metric that was not measured is not mentioned.

    Alerts come first, then the intrinsic dimension with its phase (`find_phase`). Another change is
    mentioned where it exceeds 1.96 standard errors of the two values that it compares; one between
    scales of gride, where it exceeds 5 % too.

    Args:
        readings: Readings of a run, in any order.

    Returns:
        Sentences, at least one.
    """
    whole = readings if isinstance(readings, Readings) else Readings([], list(readings))
    selected = Readings(whole.runs, single_source(whole))
    if not len(selected):
        return [*whole.remarks(), *alert_sentences(whole), "No readings yet."]
    describers: tuple[Callable[[Readings], list[str]], ...] = (
        dimension_sentences, _start, _first_rise, _scales, _entropy, _alignment, _beyond_chance,
        _profile, _cost,
    )  # fmt: skip
    sentences = [sentence for describe in describers for sentence in describe(selected)]
    sentences = sentences or [
        f"{len(selected)} readings, none of the metrics that this summary speaks of."
    ]
    return [*whole.remarks(), *alert_sentences(whole), *sentences]


def alert_sentences(readings: Readings) -> list[str]:
    """Say, for each kind of alert, when it came first, and how many there were.

    Args:
        readings: Readings of a run, with its alerts.
    """
    return [
        f"Alert at step {first.step:,}{f' (first of {first.total})' if first.total > 1 else ''}: "
        f"{first.alert.words()}."
        for first in first_alerts(readings)
    ]


def headline(readings: Readings) -> str:
    """Say in one line what a reader must know first: the alerts, and how the dimension goes.

    Args:
        readings: Readings of a run, of one stack.

    Returns:
        "Alerts: rank collapse at step 64, logit growth at step 80. Intrinsic dimension ...", for
        instance.
    """
    found = [f"{first.kind} at step {first.step:,}" for first in first_alerts(readings)]
    alerts = [f"Alert{'s' * (len(found) > 1)}: {', '.join(found)}."] if found else []
    course = dimension_sentences(readings)
    course = course or [f"{readings.text_of('twonn').title}: not measured."]
    return " ".join([*alerts, *course])


def dimension_sentences(readings: Readings) -> list[str]:
    """Describe both estimates of the intrinsic dimension in one line: values, and phases in words.

    A second sentence says why the two differ, where the last reading notes that.

    Args:
        readings: Readings of a run, of one stack.

    Returns:
        Sentences; none where neither was measured.
    """
    selected = Readings(readings.runs, single_source(readings))
    parts = []
    for name, curve in estimates(selected):
        phase = curve.phase()
        known = f" (known to {_at(curve, -1)})" if curve.steps[-1] < selected[-1].step else ""
        parts.append(f"{name} {_last(curve)}, {phase.words()}{phase.span()}{known}")
    if not parts:
        return []
    sentences = [f"{'; '.join(parts)}."]
    if "twonn and twonn_distinct disagree" in {note.kind for note in selected[-1].notes}:
        sentences.append(
            "The two estimates differ because of near-duplicates: the first counts every copy of a "
            "token at the same position, the second counts one of them."
        )
    return sentences


def estimates(readings: Readings) -> list[tuple[str, Curve]]:
    """List the estimates of the intrinsic dimension: of all rows, and of distinct tokens.

    Args:
        readings: Readings of a run, from one source.

    Returns:
        Name and curve of each that was measured. Beside the first, the second is called by the end
        of its title.
    """
    names = [readings.text_of(metric).title for metric in ("twonn", "twonn_distinct")]
    curves = [curve_of(readings, metric) for metric in ("twonn", "twonn_distinct")]
    if len(curves[0]):
        names[1] = names[1].rpartition(", ")[2]
    return [(name, curve) for name, curve in zip(names, curves, strict=True) if len(curve)]


def _start(readings: Readings) -> list[str]:
    """Say where both estimates of the dimension started."""
    starts: dict[str, list[str]] = {}
    for name, curve in estimates(readings):
        if len(curve) > 1:
            value = with_margin(curve.values[0], curve.margins[0])
            starts.setdefault(_at(curve, 0), []).append(f"{name} {value}")
    return [f"At {step}: {', '.join(values)}." for step, values in starts.items()]


def _first_rise(readings: Readings) -> list[str]:
    """Say what distinct tokens did while twonn rose from its start to its highest value."""
    twonn, distinct = (curve_of(readings, name) for name in ("twonn", "twonn_distinct"))
    if len(twonn) < 2:
        return []
    peak = twonn.values.index(max(twonn.values))
    ends = (twonn.steps[0], twonn.steps[peak])
    if twonn.direction(0, peak) != 1 or not all(step in distinct.steps for step in ends):
        return []
    first, last = (distinct.steps.index(step) for step in ends)
    meanwhile = distinct.direction(first, last)
    if not meanwhile:
        return []
    change = f"{number(distinct.values[first])} to {number(distinct.values[last])}"
    (name, _), (other, _) = estimates(readings)
    rise = (
        f"{name} rose from {number(twonn.values[0])} to {number(twonn.values[peak])} between steps "
        f"{ends[0]:,} and {ends[1]:,}, {other}"
    )
    if meanwhile == 1:
        return [f"{rise} rose from {change}: the rise is not only near-duplicates."]
    return [
        f"{rise} fell from {change}: the rise is near-duplicates (equal tokens at equal "
        "positions), not new dimensions."
    ]


def _scales(readings: Readings) -> list[str]:
    """Say if the smallest and the largest scale of gride move apart over the last two octaves."""
    parts = readings[-1].column("gride").parts
    scales = sorted(int(part[1:]) for part in parts if part[:1] == "k" and part[1:].isdigit())
    if len(scales) < 2:
        return []
    moves = [_late_change(curve_of(readings, "gride", part=f"k{k}")) for k in scales]
    small, large = moves[0], moves[-1]
    if (
        not small
        or not large
        or min(abs(small[2]), abs(large[2])) < _MIN_CHANGE
        or small[2] * large[2] > 0
    ):
        return []
    verb = {True: "rose", False: "fell"}
    return [
        f"{readings.text_of('gride').title} differs by scale since step {small[0]:,}: at scale "
        f"{scales[0]} it {verb[small[2] > 0]} ({_p(small[2], sign=True)}, to {number(small[1])}), "
        f"at scale {scales[-1]} it {verb[large[2] > 0]} ({_p(large[2], sign=True)}, to "
        f"{number(large[1])})."
    ]


def _late_change(curve: Curve) -> tuple[int, float, float] | None:
    """Return the step two octaves ago, the last value, and the share by which it changed since.

    None if there is no reading so long ago, or no change above the errors.
    """
    before = [
        index for index, step in enumerate(curve.steps) if step * _END_FACTOR <= curve.steps[-1]
    ]
    if not before or curve.steps[before[-1]] == curve.steps[-1] or not curve.values[before[-1]]:
        return None
    if not curve.direction(before[-1], len(curve) - 1):
        return None
    start, end = curve.values[before[-1]], curve.values[-1]
    return curve.steps[before[-1]], end, end / start - 1


def _entropy(readings: Readings) -> list[str]:
    curve, text = curve_of(readings, "attention_entropy"), readings.text_of("attention_entropy")
    if not len(curve):
        return []
    unit = f" {text.unit}" * bool(text.unit)
    has_start = len(curve) > 1 and curve.values[0] > 0
    share = f" ({_p(curve.values[-1] / curve.values[0])} of its start)" if has_start else ""
    return [f"{text.title}: {_ends(curve, unit)}{share}."]


def _alignment(readings: Readings) -> list[str]:
    curve = mean_abs_over_heads(readings, "qk_cosine")
    if not len(curve):
        return []
    last = next(
        reading for reading in reversed(readings.readings) if reading.step == curve.steps[-1]
    )
    cosines = last.column("qk_cosine").by_head().values()
    along = sum(value > 0.5 for value in cosines)
    against = sum(value < -0.5 for value in cosines)
    return [
        f"{readings.text_of('qk_cosine').title}, mean size over heads: {_ends(curve)}. At the end "
        f"it is above 0.5 in {along} of {len(cosines)} heads, and below -0.5 in {against}."
    ]


def _ends(curve: Curve, unit: str = "") -> str:
    """Format the first and the last value of a curve, with their steps."""
    ends = dict.fromkeys((0, len(curve) - 1))
    return ", ".join(f"{number(curve.values[i])}{unit} at {_at(curve, i)}" for i in ends)


def _beyond_chance(readings: Readings) -> list[str]:
    """Describe which heads align beyond chance; nothing where the record has no null of heads."""
    found = queries_and_keys(readings)
    return found.words() if found is not None else []


def _profile(readings: Readings) -> list[str]:
    """Describe at which layer the anisotropy is highest at the end, and the profile's shape."""
    last = readings[-1]
    points = [
        (layer, value, measured(last, "anisotropy", layer=layer).margin)
        for layer, value in last.column("anisotropy").by_layer().items()
    ]
    if len(points) < 3:
        return []
    values = [value for _, value, _ in points]
    top = values.index(max(values))
    margin = math.sqrt(2) * max(margin for _, _, margin in points)  # of a difference
    spread = max(values) - min(values)
    start = f"{readings.text_of('anisotropy').title} over depth at step {last.step:,}: "
    if spread < max(margin, _FLAT * max(values)):
        return [f"{start}flat, {min(values):.2f} to {max(values):.2f}; no layer stands out."]
    depth = _depth(top, len(points) - 1)
    ends = f"{values[0]:.2f} at layer {points[0][0]}, {values[-1]:.2f} at layer {points[-1][0]}"
    shape = _shape(values, max(margin, 0.05 * spread))
    return [
        f"{start}highest, {max(values):.2f}, at layer {points[top][0]}, {depth} ({ends}); {shape}."
    ]


def _depth(top: int, last: int) -> str:
    """Describe in words at which depth a layer lies, given its index and that of the last."""
    if top in (0, last):
        return "the first" if top == 0 else "the last"
    third = 3 * top // last  # in integers: a third is a rounding error away from 1/3
    return ("in the first third", "in the middle", "in the last third")[third]


def _shape(values: list[float], slack: float) -> str:
    """Describe the shape of a profile over depth.

    It is bell-shaped if it rises to an inner layer and falls after it, where changes against the
    trend of up to `slack` are ignored.
    """
    top = values.index(max(values))
    rises = _climbs(values[: top + 1], slack)
    falls = _climbs(values[top:][::-1], slack)
    if 0 < top < len(values) - 1 and values[top] - max(values[0], values[-1]) > slack:
        return (
            "bell-shaped"
            if rises and falls
            else "higher inside than at both ends, but not one bell"
        )
    if not (rises and falls):
        return "not bell-shaped"
    if top == 0:
        return "not bell-shaped: it falls with depth"
    levels = " and levels off" if top < len(values) - 1 else ""
    return f"not bell-shaped: it rises with depth{levels}"


def _climbs(values: list[float], slack: float) -> bool:
    """Return whether no value is below an earlier one by more than `slack`."""
    highest = -math.inf
    for value in values:
        if value < highest - slack:
            return False
        highest = max(highest, value)
    return True


def _cost(readings: Readings) -> list[str]:
    curve = plain_curve(readings, lambda reading: reading.overhead)
    if not len(curve):
        return []
    share = curve.values[-1] * 100
    digits = 1 if share < 10 else 0
    return [f"geomon took {share:.{digits}f} % of the time until step {curve.steps[-1]:,}."]


def _at(curve: Curve, index: int) -> str:
    return f"step {curve.steps[index]:,}"


def _last(curve: Curve) -> str:
    return with_margin(curve.values[-1], curve.margins[-1])


def _p(share: float, *, sign: bool = False) -> str:
    return f"{share * 100:+.0f} %" if sign else f"{share * 100:.0f} %"
