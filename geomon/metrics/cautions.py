"""Cautions: notes on values that are missing, or mean something else than they seem to."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

from geomon.capture.snapshot import Note
from geomon.record import tags

# Shares and ratios from which a number means something else than it seems to.
DUPLICATES = 0.05  # of the rows
DISAGREEMENT = 1.5  # twonn over twonn_distinct, or the other way
BENDING = 2.0  # largest over smallest dimension among the scales
SINKS = 0.5  # of the variance
ROUNDING = 0.1  # of the median nearest distance
_FEWEST = 3  # rows that TwoNN takes

_EQUAL_ROWS = "all rows are equal"
_NO_PAIR = "fewer than two rows have a norm above 0"
_NO_TYPE_TWICE = "no token type has two rows"
_FEW_ROWS = "fewer than 3 rows differ from one another"
_FEW_NEIGHBOURS = "fewer than 4 rows differ from one another"
_TIES = (
    "the two distances that are compared are equal at every row that counts, as on a lattice or "
    "in numbers that were rounded coarsely"
)
_NO_TWO_KEYS = "no query that was sampled sees two keys"
_FEW_TYPES = (
    "fewer than 3 token types have between 10 and 100,000 rows, or the norms of their means are "
    "all the same"
)

# When a metric has no value, going by its kernel.
_NO_VALUE = {
    "anisotropy": _EQUAL_ROWS,
    "anisotropy_no_sinks": _EQUAL_ROWS,
    "sink_share": _EQUAL_ROWS,
    "effective_rank": _EQUAL_ROWS,
    "participation_ratio": _EQUAL_ROWS,
    "cosine": _NO_PAIR,
    "within_variance": _NO_TYPE_TWICE,
    "between_variance": _NO_TYPE_TWICE,
    "norm_variance_slope": _FEW_TYPES,
    "norm_variance_slope/r_squared": "the variances of the token types are all the same",
    "norm_variance_slope/q_variation": "no token type has between 10 and 100,000 rows",
    "mean_share": "all rows are 0",
    "within_share": f"{_EQUAL_ROWS}, or {_NO_TYPE_TWICE}",
    "between_share": f"{_EQUAL_ROWS}, or {_NO_TYPE_TWICE}",
    "qk_cosine_concatenated": "the mean query or the mean key of all heads is 0",
    "cosine_centred": "fewer than two rows differ from their mean",
    "cosine_within": "no two rows of one sequence have a norm above 0",
    "cosine_between": "no two rows of different sequences have a norm above 0",
    "token_frequency": "no token type is of this class of frequency",
    "mean_query_share": "the scores of every query are the same for all keys that it sees",
    "score_mean": "no query that was sampled sees a key",
    "score_spread": _NO_TWO_KEYS,
    "attention_sequence_max": _NO_TWO_KEYS,
    "attention_sequence_median": _NO_TWO_KEYS,
    "attention_sequence_min": _NO_TWO_KEYS,
    "twonn": _FEW_ROWS,
    "twonn_distinct": _FEW_ROWS,
    "twonn_gaussian": _FEW_ROWS,
    "alpha": "fewer than 19 eigenvalues are above 0: a layer this narrow has no ranks 11 to 15",
    "local_dimension": _FEW_NEIGHBOURS,
    "local_anisotropy": _FEW_NEIGHBOURS,
    "local_cosine": _FEW_NEIGHBOURS,
    "gride": "scale k takes 2k + 1 rows that differ from one another",
    "qk_cosine": "the mean query or the mean key of a head is 0",
    "query_cosine": "fewer than two queries of a head have a norm above 0",
    "key_cosine": "fewer than two keys of a head have a norm above 0",
    "query_anisotropy": "all queries of a head are equal",
    "key_anisotropy": "all keys of a head are equal",
    "attention_entropy_normalised": _NO_TWO_KEYS,
    "drift_cosine": "drift_norm or cosine is the same at all layers",
    "anisotropy_profile": "anisotropy is missing at an end or in the middle of the layers",
}


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
        _few_rows(values),
        _disagreement(values),
        _bending(values),
    ]  # fmt: skip
    return [note for note in notes if note is not None]


def explain_not_finite(values: Mapping[str, float], explained: Collection[str]) -> list[Note]:
    """Name every value that is not finite, and say why there is none.

    A part of a value that is not finite itself is not named beside it.

    Args:
        values: Values of one reading by tag, of layers or of plain rows (`twonn/n`).
        explained: Tags of values for which another note gives the reason.
    """
    missing = {tag for tag, value in values.items() if not math.isfinite(value)}
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for tag in values:
        subject, whole, layer = _place(tag)
        if tag not in missing or whole in explained or (whole != tag and whole in missing):
            continue
        if values.get(f"{whole}/n", math.inf) < _FEWEST:  # `cautions` has a note on these
            continue
        found = places[subject, _reason(tag, values[tag])]
        if layer is not None:
            found.append(layer)
    # What is missing for one reason at the same layers is named together.
    together: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (subject, reason), layers in places.items():
        together[reason, tuple(dict.fromkeys(layers))].append(subject)
    notes = []
    for (reason, at), subjects in together.items():
        names = ", ".join(subjects)
        where = f", layer {', '.join(map(str, at))}" if at else ""
        notes.append(Note(f"{names}: {reason}", f"{names}{where}: {reason}"))
    return notes


def _place(name: str) -> tuple[str, str, int | None]:
    """Name what a tag is of, the tag of the whole value, and the layer."""
    tag = tags.parse(name)
    if tag is None:
        metric, _, part = name.partition("/")
        return name, metric if part else name, None
    subject = f"{tag.stack}: {tag.metric}" if tag.stack else tag.metric
    plain = (
        tags.mean_tag(tag.metric) if tag.layer is None else tags.layer_tag(tag.metric, tag.layer)
    )
    whole = tags.in_stack(plain, tag.stack)
    return f"{subject}/{tag.part}" if tag.part else subject, whole, tag.layer


def _reason(name: str, value: float) -> str:
    """Say why a value is not finite, going by its tag."""
    tag = tags.parse(name)
    metric, _, part = name.partition("/") if tag is None else (tag.metric, "", tag.part)
    if part == "std":
        return "NaN: there is no value in one of the splits"
    if math.isinf(value):
        of_neighbours = metric.startswith(("twonn", "gride", "local_dimension"))
        return f"infinite: {_TIES if of_neighbours else 'too large for float64'}"
    known = _NO_VALUE.get(f"{metric}/{part}", _NO_VALUE.get(metric))
    return f"NaN: {known or 'the metric returned it'}"


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


def _few_rows(values: Mapping[str, float]) -> Note | None:
    """A note on the dimensions for which there are too few rows."""
    few = {
        f"{tag.metric}, layer {tag.layer}"
        for name, value in values.items()
        if (tag := tags.parse(name)) is not None
        and tag.metric in ("twonn", "twonn_distinct", "local_dimension")
        and (tag.part, tag.layer is None) == ("n", False)
        and value < _FEWEST
    }
    if not few:
        return None
    words = f"{_FEW_ROWS}, so that there is no dimension"
    return Note(words, f"{'; '.join(sorted(few))}: {words}")


def _disagreement(values: Mapping[str, float]) -> Note | None:
    one, other = (values.get(tags.mean_tag(name), 0.0) for name in ("twonn", "twonn_distinct"))
    if (
        not (0 < one < math.inf and 0 < other < math.inf)
        or max(one / other, other / one) < DISAGREEMENT
    ):
        return None
    return Note(
        "twonn and twonn_distinct disagree",
        f"twonn/mean is {one:.1f}, but {other:.1f} with each token at each position once "
        "(twonn_distinct/mean): near-duplicates make the difference",
    )


def _bending(values: Mapping[str, float]) -> Note | None:
    scales = {
        tag.part: value
        for name, value in values.items()
        if (tag := tags.parse(name)) is not None
        and (tag.metric, tag.layer) == ("gride", None)
        and tag.part[1:].isdigit()
        and 0 < value < math.inf
    }
    if not scales or max(scales.values()) < BENDING * min(scales.values()):
        return None
    low, high = min(scales, key=scales.__getitem__), max(scales, key=scales.__getitem__)
    return Note(
        "gride changes with the scale",
        f"gride/mean runs from {scales[low]:.1f} ({low}) to {scales[high]:.1f} ({high}): there is "
        "no one dimension at all scales",
    )
