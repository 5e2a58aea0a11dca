"""A run in words: plain sentences, each said only where the record bears it out."""

import math
from collections.abc import Callable, Iterable

from geomon.analysis.curves import Curve, curve_of, of_one_source, size_over_heads
from geomon.record import tags
from geomon.record.reading import Reading, layers_of

# Change at the end of a run that counts as one: scales of gride have no errors of their own.
_MOVED = 0.05
# How far back "at the end" reaches: two octaves of steps.
_END = 4
# A profile is flat where its range is below this share of its largest value.
_FLAT = 0.1


def summarise(readings: Iterable[Reading]) -> list[str]:
    """The run in plain sentences; what was not measured is not spoken of.

    A change is told where it exceeds 1.96 standard errors of the two values that it compares (see
    `geomon.analysis.curves`), and between scales where it exceeds 5 %.

    Args:
        readings: What a run recorded, in any order.
    """
    seen = of_one_source(readings)
    if not seen:
        return ["No readings yet."]
    tellers: tuple[Callable[[list[Reading]], list[str]], ...] = (
        _dimension, _near_duplicates, _scales, _entropy, _alignment, _profile, _cost,
    )  # fmt: skip
    said = [sentence for teller in tellers for sentence in teller(seen)]
    return said or [f"{len(seen)} readings, none of the metrics that this summary speaks of."]


def key_numbers(readings: Iterable[Reading]) -> dict[str, float]:
    """The numbers that stand for a run; what was not measured is left out.

    Keys: `first_step`, `last_step`; `twonn_start`, `twonn_peak`, `twonn_peak_step`, `twonn_end`;
    `distinct_start`, `distinct_end` (`twonn_distinct/mean`); `entropy_start`, `entropy_end`
    (`attention_entropy/mean`, nats); `qk_start`, `qk_end` (mean |`qk_cosine`| over heads);
    `overhead` (geomon's share of the time).

    Args:
        readings: What a run recorded, in any order.
    """
    seen = of_one_source(readings)
    if not seen:
        return {}
    numbers = {"first_step": float(seen[0].step), "last_step": float(seen[-1].step)}
    twonn = curve_of(seen, tags.mean_tag("twonn"))
    if len(twonn):
        phase = twonn.phase()
        numbers |= {"twonn_peak": phase.peak, "twonn_peak_step": float(phase.peak_step)}
    ends = {
        "twonn": twonn,
        "distinct": curve_of(seen, tags.mean_tag("twonn_distinct")),
        "entropy": curve_of(seen, tags.mean_tag("attention_entropy")),
        "qk": size_over_heads(seen, "qk_cosine"),
    }
    for name, curve in ends.items():
        if len(curve):
            numbers |= {f"{name}_start": curve.values[0], f"{name}_end": curve.values[-1]}
    overhead = curve_of(seen, tags.OVERHEAD)
    return numbers | ({"overhead": overhead.values[-1]} if len(overhead) else {})


def _dimension(seen: list[Reading]) -> list[str]:
    """The paper's curve: start, peak, end."""
    curve = curve_of(seen, tags.mean_tag("twonn"))
    if len(curve) < 2:
        return [f"twonn/mean: {_n(curve.values[0])} at {_at(curve, 0)}."] if len(curve) else []
    phase = curve.phase()
    start = f"twonn/mean: {_n(curve.values[0])} at {_at(curve, 0)}"
    end = f"{_n(curve.values[-1])} at the end ({_at(curve, -1)}"
    peak = f"peak {_n(phase.peak)} at step {phase.peak_step}"
    if phase.name == "compressing":
        return [f"{start}, {peak}, {end}, {_p(-phase.change)} below the peak)."]
    if phase.name == "peak" and phase.change < 0:
        return [
            f"{start}, {peak}, {end}, {_p(-phase.change)} below the peak, which is within the "
            "scatter of the curve)."
        ]
    if phase.name in ("peak", "expanding"):
        still = "and still expanding" if phase.name == "expanding" else "no longer told to rise"
        return [f"{start}, {end}, {still})."]
    if phase.name == "falling":
        return [f"{start}, {end}); it fell from the first reading on and never expanded."]
    low, high = min(curve.values), max(curve.values)
    return [f"{start}, {end}); between {_n(low)} and {_n(high)}, no change above its errors."]


def _near_duplicates(seen: list[Reading]) -> list[str]:
    """The curve of distinct tokens, and what it says of the first rise of the paper's."""
    distinct = curve_of(seen, tags.mean_tag("twonn_distinct"))
    if not len(distinct):
        return []
    ends = f"from {_n(distinct.values[0])} to {_n(distinct.values[-1])}"
    if len(distinct) < 2:
        return [f"twonn_distinct/mean: {_n(distinct.values[0])} at {_at(distinct, 0)}."]
    if not distinct.differs(0, -1):
        told = f"twonn_distinct/mean went {ends}, not more than its errors"
    else:
        fell = distinct.values[-1] < distinct.values[0]
        told = f"twonn_distinct/mean {'fell' if fell else 'rose'} {ends}"
    twonn = curve_of(seen, tags.mean_tag("twonn"))
    rise, meanwhile = _first_rise(twonn, distinct)
    if rise and meanwhile < 0:
        return [
            f"{told}: the first rise of twonn is near-duplicates (equal tokens at equal "
            "positions), not new dimensions."
        ]
    if rise and meanwhile > 0:
        return [f"{told}: it rises with twonn at first, which is then not only near-duplicates."]
    return [f"{told}."]


def _first_rise(twonn: Curve, distinct: Curve) -> tuple[bool, int]:
    """Whether twonn rises from its start to its peak, and the sign of distinct's change meanwhile.

    A sign of 0: not told apart from no change, or not measured at both steps.
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


def _scales(seen: list[Reading]) -> list[str]:
    """Whether the smallest and the largest scale of gride move apart over the last two octaves."""
    parts = {
        tag.part for name in seen[-1].values if (tag := tags.parse(name)) and tag.metric == "gride"
    }
    scales = sorted(int(part[1:]) for part in parts if part[:1] == "k" and part[1:].isdigit())
    if len(scales) < 2:
        return []
    moves = [_late_change(curve_of(seen, tags.mean_tag("gride", f"k{k}"))) for k in scales]
    small, large = moves[0], moves[-1]
    if (
        not small
        or not large
        or min(abs(small[2]), abs(large[2])) < _MOVED
        or small[2] * large[2] > 0
    ):
        return []
    verb = {True: "grows", False: "compresses"}
    return [
        f"The scales disagree at the end (since step {small[0]}): at the smallest scale the "
        f"dimension {verb[small[2] > 0]} ({_p(small[2], sign=True)}), at scale {scales[-1]} it "
        f"{verb[large[2] > 0]} ({_p(large[2], sign=True)}, to {_n(large[1])})."
    ]


def _late_change(curve: Curve) -> tuple[int, float, float] | None:
    """Step two octaves ago, the last value, and the share by which it changed since."""
    before = [index for index, step in enumerate(curve.steps) if step * _END <= curve.steps[-1]]
    if not before or curve.steps[before[-1]] == curve.steps[-1] or not curve.values[before[-1]]:
        return None
    start, end = curve.values[before[-1]], curve.values[-1]
    return curve.steps[before[-1]], end, end / start - 1


def _entropy(seen: list[Reading]) -> list[str]:
    curve = curve_of(seen, tags.mean_tag("attention_entropy"))
    if len(curve) < 2:
        return [f"attention_entropy/mean: {_n(curve.values[0])} nats."] if len(curve) else []
    share = (
        f" ({_p(curve.values[-1] / curve.values[0])} of its start)" if curve.values[0] > 0 else ""
    )
    return [
        f"attention_entropy/mean: {_n(curve.values[0])} nats at {_at(curve, 0)}, "
        f"{_n(curve.values[-1])} at the end{share}."
    ]


def _alignment(seen: list[Reading]) -> list[str]:
    curve = size_over_heads(seen, "qk_cosine")
    if not len(curve):
        return []
    last = next(reading for reading in reversed(seen) if reading.step == curve.steps[-1])
    cosines = [
        value
        for name, value in last.values.items()
        if (tag := tags.parse(name)) and tag.metric == "qk_cosine" and tag.head is not None
    ]
    along = sum(value > 0.5 for value in cosines)
    against = sum(value < -0.5 for value in cosines)
    return [
        f"Mean |qk_cosine| over heads: {curve.values[0]:.2f} at {_at(curve, 0)}, "
        f"{curve.values[-1]:.2f} at the end; there mean query and mean key point the same way "
        f"(above 0.5) in {along} of {len(cosines)} heads, and opposite ways (below -0.5) in "
        f"{against}."
    ]


def _profile(seen: list[Reading]) -> list[str]:
    """Where the anisotropy is highest at the end, and the profile's shape."""
    last = seen[-1].values
    points = [
        (layer, last[tag], _finite(last.get(f"{tag}/std", 0.0)))
        for layer in layers_of(last, "anisotropy")
        if math.isfinite(last.get(tag := tags.layer_tag("anisotropy", layer), math.nan))
    ]
    if len(points) < 3:
        return []
    values = [value for _, value, _ in points]
    top = values.index(max(values))
    error = max(error for _, _, error in points)
    spread = max(values) - min(values)
    said = f"Anisotropy over depth at the end (step {seen[-1].step}): "
    if spread < max(2 * error, _FLAT * max(values)):
        return [f"{said}flat, {min(values):.2f} to {max(values):.2f}; no layer stands out."]
    place = _place(top, len(points) - 1)
    ends = f"{values[0]:.2f} at layer {points[0][0]}, {values[-1]:.2f} at layer {points[-1][0]}"
    shape = _shape(values, max(2 * error, 0.05 * spread))
    return [
        f"{said}highest, {max(values):.2f}, at layer {points[top][0]}, {place} ({ends}); {shape}."
    ]


def _place(top: int, last: int) -> str:
    """Where in depth a layer lies, in words."""
    if top in (0, last):
        return "the first" if top == 0 else "the last"
    depth = top / last
    return (
        "in the first quarter"
        if depth < 0.25
        else "in the last quarter"
        if depth > 0.75
        else "in the middle"
    )


def _shape(values: list[float], slack: float) -> str:
    """Bell-shaped only if it rises to an inner layer and falls after it, give or take `slack`."""
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
    """Whether no value is below an earlier one by more than `slack`."""
    highest = -math.inf
    for value in values:
        if value < highest - slack:
            return False
        highest = max(highest, value)
    return True


def _cost(seen: list[Reading]) -> list[str]:
    curve = curve_of(seen, tags.OVERHEAD)
    if not len(curve):
        return []
    seconds = sum(_finite(reading.seconds) for reading in seen)
    spent = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    share = curve.values[-1] * 100
    return [
        f"geomon took {share:.{1 if share < 10 else 0}f} % of the run's time: {len(seen)} "
        f"reading{'s' * (len(seen) != 1)}, {spent} in all."
    ]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _at(curve: Curve, index: int) -> str:
    return f"step {curve.steps[index]}"


def _n(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def _p(share: float, *, sign: bool = False) -> str:
    return f"{share * 100:+.0f} %" if sign else f"{share * 100:.0f} %"
