"""What a chart of the terminal can show of a record, by names that need no glossary."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from geomon.analysis import Curve, curve_of, mean_abs_over_heads
from geomon.record import Reading, tags

# Titles of metrics; another one goes by its own name. The first are shown first.
TITLES = {
    "twonn": "intrinsic dimension",
    "twonn_distinct": "intrinsic dimension, distinct tokens",
    "gride": "intrinsic dimension, larger scale",
    "anisotropy": "anisotropy: share of one direction",
    "effective_rank": "effective rank",
    "attention_entropy": "attention entropy (nats)",
    "qk_cosine": "cosine of mean query and mean key",
    "max_logit": "largest attention logit",
    "attention_sink": "attention on the first token",
    "cosine": "mean cosine between tokens",
    "drift_norm": "norm of the mean hidden state",
    "variance": "variance of hidden states",
    "mean_square_norm": "mean square norm of hidden states",
    "anisotropy_no_sinks": "anisotropy without massive rows",
    "sink_share": "share of massive rows in the variance",
    "participation_ratio": "participation ratio",
    "within_variance": "variance within token types",
    "between_variance": "variance between token types",
    "qk_dot": "dot product of mean query and mean key",
    "query_mean_norm": "norm of the mean query",
    "key_mean_norm": "norm of the mean key",
    "query_cosine": "mean cosine between queries",
    "key_cosine": "mean cosine between keys",
    "query_anisotropy": "anisotropy of queries",
    "key_anisotropy": "anisotropy of keys",
    "attention_entropy_normalised": "attention entropy, share of its maximum",
    "attention_max": "largest attention weight",
    "attention_min": "smallest attention weight",
    "mean_share": "share of the mean in the square norm",
    "within_share": "variance within token types, share",
    "between_share": "variance between token types, share",
    "qk_cosine_concatenated": "cosine of mean query and key, all heads",
}
# Metrics of both signs: over all heads their sizes are averaged, for signs would cancel.
_SIGNED = frozenset({"qk_cosine"})
# The heads that are shown before one has chosen others.
_FIRST_OF_HEADS = "attention_entropy"


class Quantity(NamedTuple):
    """A value of each reading that a chart draws over steps.

    Attributes:
        metric: Name of the metric; the whole tag of a value that is of no metric.
        part: Name of a part of the metric, for instance "k32"; "" for its value.
        has_layers: Whether layers have the value.
        has_mean: Whether a mean over layers has it.
    """

    metric: str
    part: str = ""
    has_layers: bool = False
    has_mean: bool = False

    def title(self, layer: int | None = None) -> str:
        """Name the quantity at a layer, or over all of them, in words.

        Args:
            layer: Number of a layer; None for the mean.

        Example:
            >>> Quantity("twonn", "", True, True).title(3)
            'intrinsic dimension, layer 3'
        """
        name = TITLES.get(self.metric, self.metric.replace("_", " "))
        if self.metric == "gride" and self.part[1:].isdigit():
            name = f"intrinsic dimension, scale of {self.part[1:]} neighbours"
        elif self.metric.partition("/")[0] in tags.OF_RUN:
            group, _, rest = self.metric.partition("/")
            name = rest.replace("_", " ") if group == "geomon" else f"training {rest}"
            return f"geomon's {name}" if group == "geomon" else name.replace("_", " ")
        elif self.part:
            name = f"{name}, {self.part}"
        if layer is not None:
            return f"{name}, layer {layer}"
        if self.metric in _SIGNED:
            return f"{name}, size, mean over heads"
        return f"{name}, mean over layers" if self.has_layers else name

    def tag(self, layer: int | None = None) -> str:
        """Build the tag of the value at a layer, or of the mean."""
        if not self.has_layers and not self.has_mean:
            return self.metric
        if layer is None:
            return tags.mean_tag(self.metric, self.part)
        return tags.layer_tag(self.metric, layer, self.part)

    def curve(self, readings: Iterable[Reading], layer: int | None = None) -> Curve:
        """Extract the curve of the quantity.

        Args:
            readings: Readings of one source.
            layer: Number of a layer; None for the mean.
        """
        if layer is None and self.metric in _SIGNED:
            return mean_abs_over_heads(readings, self.metric)
        return curve_of(readings, self.tag(layer))


class Contents(NamedTuple):
    """What a record holds for charts.

    Attributes:
        quantities: Quantities that can be drawn over steps.
        layers: Numbers of the layers of each quantity that has any.
        with_heads: Names of the metrics that heads have.
    """

    quantities: list[Quantity]
    layers: dict[Quantity, list[int]]
    with_heads: list[str]


def contents_of(names: Iterable[str]) -> Contents:
    """List what charts can show, the best known first.

    Args:
        names: Tags of a record, in order of appearance.

    Example:
        >>> [quantity.title() for quantity in contents_of(["own/mean", "twonn/mean"]).quantities]
        ['intrinsic dimension', 'own']
    """
    layers: dict[tuple[str, str], set[int]] = {}
    means: set[tuple[str, str]] = set()
    heads: dict[str, None] = {}
    others: dict[str, None] = {}
    for name in names:
        tag = tags.parse(name)
        if tag is None:
            if not name.rpartition("/")[2].startswith("null"):
                others[name] = None
        elif tag.head is not None:
            heads[tag.metric] = None
        elif tags.is_charted(name):
            key = tag.metric, tag.part
            layers.setdefault(key, set())
            if tag.layer is None:
                means.add(key)
            else:
                layers[key].add(tag.layer)
    chosen = {}
    for key in _one_for_each_metric(layers):
        chosen[Quantity(*key, has_layers=bool(layers[key]), has_mean=key in means)] = layers[key]
    of_run = [Quantity(name) for name in others]
    ordered = sorted([*chosen, *of_run], key=_rank)
    return Contents(
        ordered,
        {quantity: sorted(found) for quantity, found in chosen.items() if found},
        sorted(heads, key=lambda metric: metric != _FIRST_OF_HEADS),
    )


def _one_for_each_metric(keys: Mapping[tuple[str, str], object]) -> list[tuple[str, str]]:
    """Leave out parts where the metric has a value of its own; of scales, keep the largest."""
    plain = {metric for metric, part in keys if not part}
    scales: dict[str, int] = {}
    for metric, part in keys:
        if metric == "gride" and part[1:].isdigit():
            scales[metric] = max(scales.get(metric, 0), int(part[1:]))
    return [
        (metric, part)
        for metric, part in keys
        if not part
        or (metric not in plain and (metric not in scales or part == f"k{scales[metric]}"))
    ]


_ORDER: dict[str, int] = {metric: index for index, metric in enumerate(TITLES)}


def _rank(quantity: Quantity) -> int:
    return _ORDER.get(quantity.metric, len(_ORDER))


def loss_of(quantities: Sequence[Quantity]) -> Quantity | None:
    """Find the loss of the training, or else another value that it logs; None without any.

    Args:
        quantities: Quantities of a record.
    """
    wanted = tags.training_tag(tags.LOSS)
    logged = [q for q in quantities if q.metric.startswith(wanted.partition("/")[0] + "/")]
    return min(logged, key=lambda quantity: quantity.metric != wanted, default=None)
