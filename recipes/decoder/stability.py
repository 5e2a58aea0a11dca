"""Whether seeds agree on mean queries and keys (Godey et al., 2401.12143, appendix D)."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean

import numpy as np

from recipes.study.claim import Claim
from recipes.study.history import History


def stability_claims(seeds: Sequence[History]) -> Iterator[Claim]:
    """Measure the claims of this appendix; none on a single seed.

    Under the null each seed and layer takes its direction by chance, one sign or the other: curves
    of two seeds have no correlation on average, and all seeds end with one sign in 1 layer of
    2^(seeds - 1).

    Args:
        seeds: What was recorded of each seed.
    """
    if len(seeds) < 2:
        return
    ask = partial(
        Claim,
        source="2401.12143, appendix D, fig. 23",
        repeated="layer",
    )
    yield ask(
        "seeds_align_alike",
        "The cosine of mean query and mean key, the heads of a layer joined, follows similar "
        "trends across seeds.",
        quantity="correlation of two seeds' curves, mean over pairs of seeds",
        values=tuple(trend_correlations(seeds)),
        above=0,
    )
    chance = 0.5 ** (len(seeds) - 1)
    yield ask(
        "seeds_end_with_one_sign",
        "At the end that cosine has the same sign for all seeds.",
        quantity="share of layers in which it has",
        values=tuple(one_sign_at_end(seeds)),
        above=chance,
        counted=True,
    )


def trend_correlations(seeds: Sequence[History]) -> list[float]:
    """Correlate the curves of the joined cosine between seeds, for each layer.

    Args:
        seeds: What was recorded of two seeds or more, at the same steps.

    Returns:
        Pearson's correlation over the readings, mean over pairs of seeds, for each layer in which
        the curves of all seeds are known and vary.
    """
    found = []
    for curves in _curves(seeds):
        if all(np.ptp(curve) > 0 for curve in curves):
            table = np.atleast_2d(np.corrcoef(curves))
            found.append(fmean(float(table[pair]) for pair in combinations(range(len(curves)), 2)))
    return found


def one_sign_at_end(seeds: Sequence[History]) -> list[float]:
    """Say for each layer whether the joined cosine ends with the same sign for all seeds.

    Args:
        seeds: What was recorded of two seeds or more.

    Returns:
        1 or 0 for each layer in which the curves of all seeds are known.
    """
    ends = [[curve[-1] for curve in curves] for curves in _curves(seeds)]
    return [float(min(values) > 0 or max(values) < 0) for values in ends]


def _curves(seeds: Sequence[History]) -> Iterator[list[tuple[float, ...]]]:
    """The curve of each seed, for each layer in which all of them are known."""
    for layer in sorted(set.intersection(*(set(each.joined_heads) for each in seeds))):
        curves = [each.joined_heads[layer].cosines for each in seeds]
        if all(math.isfinite(value) for curve in curves for value in curve):
            yield curves
