"""Mean queries and keys of a run: which heads align beyond chance, from when on, and at what depth.

Chance is two isotropic directions: their cosine c has c^2 ~ Beta(1/2, (width - 1)/2), whatever the
number of tokens that the means were taken over. An untrained head is exactly that, since its mean
query and its mean key are made by independent random matrices (Godey et al., 2401.12143, equation
1).
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from geomon.analysis.curves import single_source
from geomon.record import Reading, Readings, tags

Direction = Literal["similar", "opposite", "chance"]

_COSINE, _DOT = "qk_cosine", "qk_dot"
_NULL = "null_magnitude"
# Probability of one head among all of them beyond the null by chance.
_ALPHA = 0.05
# Mean absolute cosines that have a width: 0.64 is that of 2, the lower end that of 640,000.
_MAGNITUDES = (1e-3, 0.7)


@dataclass(frozen=True)
class HeadAlignment:
    """Mean query against mean key of one head.

    Attributes:
        layer: Number of the layer.
        head: Number of the head in it.
        cosine: Cosine of mean query and mean key at the last step.
        p_value: Probability of a cosine of at least that size between isotropic directions.
        direction: "similar" or "opposite" where the cosine is beyond chance, with Holm's correction
            over all heads; else "chance".
        onset: First step from which the cosine has kept its sign and a size above the limit of all
            heads up to the last step; None for a head that is not beyond chance.
    """

    layer: int
    head: int
    cosine: float
    p_value: float
    direction: Direction
    onset: int | None


@dataclass(frozen=True)
class QueriesKeys:
    """Mean queries and keys of all heads of a run.

    Attributes:
        width: Width of one head.
        limit: Size of the cosine at the last step above which a head is beyond chance.
        heads: All heads, by layer.
        depth: Kendall's tau-b of layer and cosine over all heads: below 0 where cosines fall with
            depth; NaN with one layer.
        depth_p: Its two-sided p-value for independent heads.
        dot: Mean |mean query . mean key| over heads at the first and at the last step; NaN if it
            was not recorded.
    """

    width: int
    limit: float
    heads: tuple[HeadAlignment, ...]
    depth: float
    depth_p: float
    dot: tuple[float, float]

    def of(self, direction: Direction) -> list[HeadAlignment]:
        """List the heads of one direction, the largest cosine first.

        Args:
            direction: "similar", "opposite" or "chance".
        """
        chosen = [head for head in self.heads if head.direction == direction]
        return sorted(chosen, key=lambda head: -abs(head.cosine))

    def words(self) -> list[str]:
        """Describe the heads in plain sentences."""
        similar, opposite = self.of("similar"), self.of("opposite")
        sentences = [
            f"Mean query and mean key are similar beyond chance in {len(similar)} of "
            f"{len(self.heads)} heads{_onsets(similar)}, and opposite in {len(opposite)}"
            f"{_onsets(opposite)}. By chance (random directions in {self.width} dimensions) any of "
            f"the {len(self.heads)} heads would be beyond the limit in 5 % of the readings."
        ]
        if self.depth_p < _ALPHA:
            verb = "falls" if self.depth < 0 else "rises"
            sentences.append(
                f"The cosine of mean query and mean key {verb} with depth (Kendall's tau "
                f"{self.depth:+.2f}, p {_probability(self.depth_p)})."
            )
        first, last = self.dot
        if first > 0 and math.isfinite(last):
            sentences.append(
                f"Mean query · mean key, mean size over heads: {first:.3g} at the start, "
                f"{last:.3g} at the end."
            )
        return sentences


@dataclass(frozen=True)
class LayerAlignment:
    """Mean query against mean key of one layer over training, its heads joined to one vector.

    Attributes:
        layer: Number of the layer.
        width: Length of the vectors: number of query heads times width of one head.
        steps: Steps with mean queries and mean keys, ascending.
        cosines: Cosine of the two vectors at each step; NaN if one of them is 0 or not finite.
    """

    layer: int
    width: int
    steps: tuple[int, ...]
    cosines: tuple[float, ...]


def queries_and_keys(readings: Iterable[Reading]) -> QueriesKeys | None:
    """Find the heads whose mean query and mean key align beyond chance, and since when.

    Args:
        readings: Readings of a run, of one stack.

    Returns:
        What was found at the last step with values of heads; None if the record has none, or no
        null, off which the width of a head is read.
    """
    every = [(each, each.column(_COSINE).by_head()) for each in single_source(readings)]
    known = [(each, heads) for each, heads in every if heads]
    if not known:
        return None
    (first, _), (reading, last) = known[0], known[-1]
    null = reading.column(_COSINE).whole.get(_NULL, math.nan)
    size = _width_of(null)
    if size is None:
        return None
    p_values = {place: cosine_p_value(cosine, size) for place, cosine in last.items()}
    level = _holm_level(p_values.values())
    steps = [each.step for each, _ in known]
    limit = chance_limit(size, 1 - level)
    heads = tuple(
        _head(place, p, steps, [heads.get(place, math.nan) for _, heads in known], limit,
              is_beyond=p <= level)
        for place, p in p_values.items()
    )  # fmt: skip
    dots = first.column(_DOT).mean_size(), reading.column(_DOT).mean_size()
    return QueriesKeys(size, limit, heads, *_trend(last), dots)


def align_layers(readings: Readings) -> dict[int, LayerAlignment]:
    """Compute the cosine of mean query and mean key of each layer, its heads joined to one vector.

    Where several query heads share a key head, its mean key stands once for each of them (Godey et
    al., 2401.12143, appendix D, figure 23).

    Args:
        readings: Readings of a run, of one stack.

    Returns:
        What was found by number of the layer; nothing where no mean queries and keys stand beside
        the record.
    """
    selected = single_source(readings)
    if readings.folder is None or not selected:
        return {}
    source = selected[0].source
    kept = set(readings.folder.steps(source))
    found: dict[int, dict[int, tuple[float, int]]] = {}
    for step in [reading.step for reading in selected if reading.step in kept]:
        arrays = readings.arrays(step, source)
        for layer, cosine in _joined_cosines(arrays, layers_of(readings)).items():
            found.setdefault(layer, {})[step] = cosine
    return {
        layer: LayerAlignment(
            layer,
            width=next(reversed(by_step.values()))[1],
            steps=tuple(by_step),
            cosines=tuple(cosine for cosine, _ in by_step.values()),
        )
        for layer, by_step in sorted(found.items())
    }


def chance_limit(width: int, probability: float = 0.95) -> float:
    """Compute the size below which cosines of isotropic directions lie with a probability.

    Args:
        width: Number of dimensions, at least 2.
        probability: Probability, (0, 1).

    Example:
        >>> round(chance_limit(3), 6)  # on a sphere all cosines are equally likely
        0.95
    """
    from scipy import special  # type: ignore[import-untyped]  # only where it is needed

    return math.sqrt(float(special.betaincinv(0.5, (width - 1) / 2, probability)))


def cosine_p_value(cosine: float, width: int) -> float:
    """Compute the probability of a cosine of at least that size between isotropic directions.

    Two-sided: c^2 ~ Beta(1/2, (width - 1)/2).

    Args:
        cosine: Cosine, [-1, 1].
        width: Number of dimensions, at least 2.

    Example:
        >>> round(cosine_p_value(0.5, 3), 6)  # on a sphere all cosines are equally likely
        0.5
    """
    from scipy import special  # only where it is needed

    size = min(1.0, abs(cosine))
    # (1 - c)(1 + c) keeps the digits that 1 - c^2 loses next to 1.
    return float(special.betainc((width - 1) / 2, 0.5, (1 - size) * (1 + size)))


def layers_of(readings: Iterable[Reading]) -> range:
    """Return all depths of the main stack of a run.

    Args:
        readings: Readings of a run.
    """
    columns = (column for reading in readings for column in reading.columns.values())
    return range(max((column.first + len(column.layers) for column in columns), default=0))


def _joined_cosines(
    arrays: Mapping[str, NDArray[Any]], layers: Iterable[int]
) -> dict[int, tuple[float, int]]:
    """Compute the cosine of joined mean queries and keys, with their width, by layer."""
    found = {}
    for layer in layers:
        of_queries, of_keys = (
            arrays.get(tags.layer_tag(name, layer)) for name in ("mean_query", "mean_key")
        )
        if of_queries is None or of_keys is None:
            continue
        query = np.asarray(of_queries, dtype=np.float64)
        shared = np.arange(len(query)) * len(of_keys) // len(query)
        key = np.asarray(of_keys, dtype=np.float64)[shared]
        found[layer] = (_cosine(query.ravel(), key.ravel()), query.size)
    return found


def _cosine(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    # Each is scaled by its largest entry first: the squares of long or short ones leave the range.
    sizes = float(np.abs(one).max()), float(np.abs(other).max())
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        return math.nan
    one, other = one / sizes[0], other / sizes[1]
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def _head(
    place: tuple[int, int],
    p_value: float,
    steps: Sequence[int],
    cosines: Sequence[float],
    limit: float,
    *,
    is_beyond: bool,
) -> HeadAlignment:
    cosine = cosines[-1]
    if not is_beyond:
        return HeadAlignment(*place, cosine, p_value, "chance", None)
    side = math.copysign(1, cosine)
    onset = steps[-1]
    for step, value in zip(reversed(steps), reversed(cosines), strict=True):
        # A NaN, of a head that was not measured then, is neither: the comparison is False.
        if not side * value > limit:
            break
        onset = step
    direction: Direction = "similar" if cosine > 0 else "opposite"
    return HeadAlignment(*place, cosine, p_value, direction, onset)


def _holm_level(p_values: Collection[float]) -> float:
    """Find the p-value up to which Holm's step-down procedure rejects at level .05."""
    level = _ALPHA
    for rank, p_value in enumerate(sorted(p_values)):
        level = _ALPHA / (len(p_values) - rank)
        if p_value > level:
            break
    return level


def _trend(cosines: dict[tuple[int, int], float]) -> tuple[float, float]:
    """Compute Kendall's tau-b of layer and cosine, and its p-value; NaN if one does not vary."""
    layers = [layer for layer, _ in cosines]
    if len(set(layers)) < 2 or len(set(cosines.values())) < 2:
        return math.nan, math.nan
    from scipy import stats  # takes half a second, and is needed here alone

    found = stats.kendalltau(layers, list(cosines.values()))
    return float(found.statistic), float(found.pvalue)


def _width_of(magnitude: float) -> int | None:
    """Find the width at which two isotropic directions have a mean absolute cosine; None if none.

    E|cos| = Gamma(width / 2) / (sqrt(pi) Gamma((width + 1) / 2)), which falls with the width: about
    sqrt(2 / (pi (width - 1/2))).
    """
    if not _MAGNITUDES[0] < magnitude < _MAGNITUDES[1]:
        return None
    guess = round(2 / (math.pi * magnitude**2) + 0.5)
    near = range(max(2, guess - 2), guess + 3)
    return min(near, key=lambda width: abs(_magnitude(width) - magnitude))


def _magnitude(width: int) -> float:
    return math.exp(math.lgamma(width / 2) - math.lgamma((width + 1) / 2)) / math.sqrt(math.pi)


def _onsets(heads: Sequence[HeadAlignment]) -> str:
    """Say from which steps on the heads are beyond chance."""
    steps = sorted({head.onset for head in heads if head.onset is not None})
    if not steps:
        return ""
    if len(steps) == 1:
        return f" (from step {steps[0]:,} on)"
    return f" (the first from step {steps[0]:,} on, the last from step {steps[-1]:,})"


def _probability(p_value: float) -> str:
    return "below .001" if p_value < 0.001 else f"{p_value:.3f}".removeprefix("0")
