"""Cautions: notes on values that mean something else than they seem to, going by other values."""

from collections.abc import Mapping

from geomon.capture.snapshot import Note
from geomon.record import tags

# Shares and ratios from which a number means something else than it seems to.
DUPLICATES = 0.05  # of the rows
DISAGREEMENT = 1.5  # twonn over twonn_distinct, or the other way
BENDING = 2.0  # largest over smallest dimension among the scales
SINKS = 0.5  # of the variance
ROUNDING = 0.1  # of the median nearest distance


def cautions(values: Mapping[str, float]) -> list[Note]:
    """Find the values of a reading that should be read with caution, going by one another.

    Args:
        values: Values of one reading by tag.
    """
    notes = [
        _at_layers(
            values, "twonn", "duplicates", DUPLICATES,
            "of the rows are exact copies of others and were left out of the dimension",
        ),
        _at_layers(
            values, "sink_share", "", SINKS,
            "of the variance is carried by a few rows of massive norm: read anisotropy_no_sinks",
        ),
        _at_layers(
            values, "twonn", "rounding", ROUNDING,
            "of the median nearest distance is rounding of the captured numbers: the dimension is "
            "too high",
        ),
        _disagreement(values),
        _bending(values),
    ]  # fmt: skip
    return [note for note in notes if note is not None]


def _at_layers(
    values: Mapping[str, float], metric: str, part: str, limit: float, words: str
) -> Note | None:
    """A note on the layers at which a part of a metric is above its limit."""
    above = {
        tag.layer: values[name]
        for name in values
        if (tag := tags.parse(name)) is not None
        and (tag.metric, tag.part, tag.head) == (metric, part, None)
        and tag.layer is not None
        and values[name] > limit
    }
    if not above:
        return None
    layers = ", ".join(map(str, sorted(above)))
    return Note(words, f"{metric}, layer {layers}: up to {max(above.values()):.0%} {words}")


def _disagreement(values: Mapping[str, float]) -> Note | None:
    one, other = (values.get(tags.mean_tag(name), 0.0) for name in ("twonn", "twonn_distinct"))
    if not (one > 0 and other > 0) or max(one / other, other / one) < DISAGREEMENT:
        return None
    return Note(
        "twonn and twonn_distinct disagree",
        f"twonn/mean is {one:.1f}, twonn_distinct/mean {other:.1f}: near-duplicates (equal tokens "
        "at equal positions) decide the first",
    )


def _bending(values: Mapping[str, float]) -> Note | None:
    scales = {
        tag.part: value
        for name, value in values.items()
        if (tag := tags.parse(name)) is not None
        and (tag.metric, tag.layer) == ("gride", None)
        and tag.part[1:].isdigit()
        and value > 0
    }
    if not scales or max(scales.values()) < BENDING * min(scales.values()):
        return None
    low, high = min(scales, key=scales.__getitem__), max(scales, key=scales.__getitem__)
    return Note(
        "gride changes with the scale",
        f"gride/mean runs from {scales[low]:.1f} ({low}) to {scales[high]:.1f} ({high}): there is "
        "no one dimension at all scales",
    )
