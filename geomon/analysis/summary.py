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

    The phase of `twonn/mean` is that of `find_phase`. Another change is mentioned where it exceeds
    1.96 standard errors of the two values that it compares; one between scales of gride, where it
    exceeds 5 % too.

    Args:
        readings: Readings of a run, in any order.

    Returns:
        Sentences, at least one.
    """
    remarks = readings.remarks() if isinstance(readings, Readings) else []
    everything = list(readings)
    selected = single_source(everything)
    if not selected:
        return ["No readings yet."]
    describers: tuple[Callable[[list[Reading]], list[str]], ...] = (
        _dimension, _near_duplicates, _scales, _entropy, _alignment, _beyond_chance, _profile,
        _cost,
    )  # fmt: skip
    sentences = [sentence for describe in describers for sentence in describe(selected)]
    sentences = sentences or [
        f"{len(selected)} readings, none of the metrics that this summary speaks of."
    ]
    return [*remarks, *_alerts(everything), *sentences]


def _alerts(readings: list[Reading]) -> list[str]:
    """Say, for each kind of alert, when it came first, and how many there were."""
    return [
        f"Alert at step {first.step:,}{f' (first of {first.total})' if first.total > 1 else ''}: "
        f"{first.note.words()}."
        for first in first_alerts(readings)
    ]


def _dimension(readings: list[Reading]) -> list[str]:
    """Describe the start, peak and end of the paper's estimate of the dimension."""
    curve = curve_of(readings, "twonn")
    if len(curve) < 2:
        return [f"twonn/mean: {_n(curve.values[0])} at {_at(curve, 0)}."] if len(curve) else []
    phase = curve.phase()
    start = f"twonn/mean: {_n(curve.values[0])} at {_at(curve, 0)}"
    end = f"{_n(curve.values[-1])} at the end ({_at(curve, -1)}"
    peak = f"peak {_n(phase.peak)} at step {phase.peak_step:,}{phase.span()}"
    if phase.name == "compressing":
        return [f"{start}, {peak}, {end}, {_p(-phase.change)} below the peak)."]
    if phase.name == "peak" and phase.change < 0:
        return [
            f"{start}, {peak}, {end}, {_p(-phase.change)} below the peak, which is within the "
            "scatter of the curve)."
        ]
    if phase.name in ("peak", "expanding"):
        trend = (
            "and still expanding" if phase.name == "expanding" else "with no rise above its errors"
        )
        return [f"{start}, {end}, {trend})."]
    if phase.name == "falling":
        first = phase.peak_step == curve.steps[0]
        since = "from the first reading on" if first else f"from step {phase.peak_step:,} on"
        return [f"{start}, {end}); it fell {since} and never expanded."]
    low, high = min(curve.values), max(curve.values)
    return [f"{start}, {end}); between {_n(low)} and {_n(high)}, no change above its errors."]


def _near_duplicates(readings: list[Reading]) -> list[str]:
    """Describe the estimate of distinct tokens, and what it means for the first rise of twonn."""
    distinct = curve_of(readings, "twonn_distinct")
    if not len(distinct):
        return []
    ends = f"from {_n(distinct.values[0])} to {_n(distinct.values[-1])}"
    if len(distinct) < 2:
        return [f"twonn_distinct/mean: {_n(distinct.values[0])} at {_at(distinct, 0)}."]
    if not distinct.differs(0, -1):
        sentence = f"twonn_distinct/mean went {ends}, not more than its errors"
    else:
        fell = distinct.values[-1] < distinct.values[0]
        sentence = f"twonn_distinct/mean {'fell' if fell else 'rose'} {ends}"
    twonn = curve_of(readings, "twonn")
    rise, meanwhile = _first_rise(twonn, distinct)
    if rise and meanwhile < 0:
        return [
            f"{sentence}: the first rise of twonn is near-duplicates (equal tokens at equal "
            "positions), not new dimensions."
        ]
    if rise and meanwhile > 0:
        return [
            f"{sentence}: it rises with twonn at first, which is then not only near-duplicates."
        ]
    return [f"{sentence}."]


def _first_rise(twonn: Curve, distinct: Curve) -> tuple[bool, int]:
    """Return whether twonn rises from its start to its peak, and the sign of distinct's change.

    A sign of 0: the change is within the errors, or distinct was not measured at both steps.
    """
    if len(twonn) < 2:
        return False, 0
    peak = twonn.values.index(max(twonn.values))
    ends = (twonn.steps[0], twonn.steps[peak])
    rise = peak > 0 and twonn.differs(0, peak)
    if not rise or not all(step in distinct.steps for step in ends):
        return rise, 0
    first, last = (distinct.steps.index(step) for step in ends)
    if not distinct.differs(first, last):
        return rise, 0
    return rise, 1 if distinct.values[last] > distinct.values[first] else -1


def _scales(readings: list[Reading]) -> list[str]:
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
    verb = {True: "grows", False: "compresses"}
    return [
        f"The scales disagree at the end (since step {small[0]:,}): at the smallest scale the "
        f"dimension {verb[small[2] > 0]} ({_p(small[2], sign=True)}), at scale {scales[-1]} it "
        f"{verb[large[2] > 0]} ({_p(large[2], sign=True)}, to {_n(large[1])})."
    ]


def _late_change(curve: Curve) -> tuple[int, float, float] | None:
    """Return the step two octaves ago, the last value, and the share by which it changed since.

    None where there is no reading so long ago, or no change above the errors.
    """
    before = [
        index for index, step in enumerate(curve.steps) if step * _END_FACTOR <= curve.steps[-1]
    ]
    if not before or curve.steps[before[-1]] == curve.steps[-1] or not curve.values[before[-1]]:
        return None
    if not curve.differs(before[-1], len(curve) - 1):
        return None
    start, end = curve.values[before[-1]], curve.values[-1]
    return curve.steps[before[-1]], end, end / start - 1


def _entropy(readings: list[Reading]) -> list[str]:
    curve = curve_of(readings, "attention_entropy")
    if len(curve) < 2:
        return [f"attention_entropy/mean: {_n(curve.values[0])} nats."] if len(curve) else []
    share = (
        f" ({_p(curve.values[-1] / curve.values[0])} of its start)" if curve.values[0] > 0 else ""
    )
    return [
        f"attention_entropy/mean: {_n(curve.values[0])} nats at {_at(curve, 0)}, "
        f"{_n(curve.values[-1])} at the end{share}."
    ]


def _alignment(readings: list[Reading]) -> list[str]:
    curve = mean_abs_over_heads(readings, "qk_cosine")
    if not len(curve):
        return []
    last = next(reading for reading in reversed(readings) if reading.step == curve.steps[-1])
    cosines = last.column("qk_cosine").by_head().values()
    along = sum(value > 0.5 for value in cosines)
    against = sum(value < -0.5 for value in cosines)
    end = f", {curve.values[-1]:.2f} at the end" if len(curve) > 1 else ""
    return [
        f"Mean |qk_cosine| over heads: {curve.values[0]:.2f} at {_at(curve, 0)}{end}; there mean "
        f"query and mean key point the same way (above 0.5) in {along} of {len(cosines)} heads, "
        f"and opposite ways (below -0.5) in {against}."
    ]


def _beyond_chance(readings: list[Reading]) -> list[str]:
    """Describe which heads align beyond chance; nothing where the record has no null of heads."""
    found = queries_and_keys(readings)
    return found.words() if found is not None else []


def _profile(readings: list[Reading]) -> list[str]:
    """Describe at which layer the anisotropy is highest at the end, and the profile's shape."""
    last = readings[-1]
    points = [
        (layer, value, measured(last, "anisotropy", layer=layer).error)
        for layer, value in last.column("anisotropy").by_layer().items()
    ]
    if len(points) < 3:
        return []
    values = [value for _, value, _ in points]
    top = values.index(max(values))
    error = max(error for _, _, error in points)
    spread = max(values) - min(values)
    start = f"Anisotropy over depth at the end (step {last.step:,}): "
    if spread < max(2 * error, _FLAT * max(values)):
        return [f"{start}flat, {min(values):.2f} to {max(values):.2f}; no layer stands out."]
    depth = _depth(top, len(points) - 1)
    ends = f"{values[0]:.2f} at layer {points[0][0]}, {values[-1]:.2f} at layer {points[-1][0]}"
    shape = _shape(values, max(2 * error, 0.05 * spread))
    return [
        f"{start}highest, {max(values):.2f}, at layer {points[top][0]}, {depth} ({ends}); {shape}."
    ]


def _depth(top: int, last: int) -> str:
    """Describe in words at which depth a layer lies, given its index and that of the last."""
    if top in (0, last):
        return "the first" if top == 0 else "the last"
    share = top / last
    return (
        "in the first quarter"
        if share < 0.25
        else "in the last quarter"
        if share > 0.75
        else "in the middle"
    )


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


def _cost(readings: list[Reading]) -> list[str]:
    curve = plain_curve(readings, lambda reading: reading.overhead)
    if not len(curve):
        return []
    seconds = sum(reading.seconds for reading in readings)
    spent = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    share = curve.values[-1] * 100
    return [
        f"geomon took {share:.{1 if share < 10 else 0}f} % of the run's time: {len(readings)} "
        f"reading{'s' * (len(readings) != 1)}, {spent} in all."
    ]


def _at(curve: Curve, index: int) -> str:
    return f"step {curve.steps[index]:,}"


def _n(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def _p(share: float, *, sign: bool = False) -> str:
    return f"{share * 100:+.0f} %" if sign else f"{share * 100:.0f} %"
