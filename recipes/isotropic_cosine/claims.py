"""What the paper says of isotropic cosines and of models beside them, and what was measured."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from geomon.kernels.baselines import isotropic_cosine_quantile
from recipes.isotropic_cosine.levels import Level
from recipes.isotropic_cosine.simulate import quantile_error
from recipes.study import Claim

# The 95th percentiles that appendix B draws, to three digits.
PUBLISHED = {16: 0.412, 768: 0.0594, 8192: 0.0182}
# Largest distance from a published number that counts as agreement, over that number. Rounding to
# three digits alone moves .0182 by 0.15 %, and a simulation of two million pairs by 0.1 %.
_TOLERANCE = 0.01
_SOURCE = "2401.12143, appendix B"
_COMMAND = "make isotropic_cosine"
_PICTURE = "docs/pictures/isotropic_cosine.png"


def quantile_claims(
    rows: int, found: Sequence[Mapping[int, float]], seconds: float = math.nan
) -> list[Claim]:
    """Compare simulated 95th percentiles with the published ones, and with the closed form.

    Args:
        rows: Number of rows of which all pairs were taken.
        found: Simulated quantiles by width, of each seed.
        seconds: Time of the command.
    """
    claims = [
        Claim(
            name=f"isotropic_95th_percentile_{width}",
            asserts=f"95 % of the cosines of isotropic pairs in width {width} are below {value}.",
            published=f"{value}, to three digits, on the curve of figure 18",
            source=f"{_SOURCE}, figure 18",
            command=_COMMAND,
            quantity=f"95th percentile over all pairs of {rows} normal rows, width {width}",
            values=tuple(quantiles[width] for quantiles in found),
            above=value * (1 - _TOLERANCE),
            below=value * (1 + _TOLERANCE),
            picture=_PICTURE,
            seconds=seconds,
        )
        for width, value in PUBLISHED.items()
        if all(width in quantiles for quantiles in found)
    ]
    claims.append(
        Claim(
            name="isotropic_closed_form",
            asserts="(cos + 1) / 2 ~ Beta((d - 1) / 2, (d - 1) / 2) gives the simulated curve.",
            published="a curve by simulation, without a formula",
            source=f"{_SOURCE}, figure 18",
            command=_COMMAND,
            quantity="root mean square over widths of (simulated - closed form) / standard error",
            values=tuple(_distance(rows, quantiles) for quantiles in found),
            below=2.0,
            picture=_PICTURE,
            seconds=seconds,
        )
    )
    return claims


def level_claims(
    width: int, runs: Sequence[Sequence[Level]], seconds: float = math.nan
) -> list[Claim]:
    """Compare the mean cosine of trained models with the 95th percentile of isotropic pairs.

    Args:
        width: Width of the hidden states.
        runs: Levels of the training of each seed, steps ascending.
        seconds: Time of the command.
    """
    steps = runs[0][-1].step
    common: dict[str, Any] = {
        "source": f"{_SOURCE}, figure 18",
        "command": _COMMAND,
        "above": 1.0,
        "picture": _PICTURE,
        "differs": f"character decoder of 4 layers after {steps} steps, not a released model",
        "seconds": seconds,
    }
    over = f"over the 95th percentile of isotropic pairs, {isotropic_cosine_quantile(width):.3f}"
    return [
        Claim(
            name=f"level_above_isotropic_{width}",
            asserts="The mean cosine of a Transformer is unlikely for a pair of isotropic rows: "
            f"mean over layers, width {width}.",
            published="models of text, vision and speech lie above the curve",
            quantity=f"mean over layers of the mean cosine, {over}",
            values=tuple(run[-1].mean / run[-1].null for run in runs),
            **common,
        ),
        Claim(
            name=f"every_layer_above_isotropic_{width}",
            asserts=f"The same holds for the least of the layers, width {width}.",
            published="not said of single layers in the appendix",
            quantity=f"smallest mean cosine of a layer, {over}",
            values=tuple(run[-1].least / run[-1].null for run in runs),
            **common,
        ),
    ]


def _distance(rows: int, quantiles: Mapping[int, float]) -> float:
    """Root mean square of the distances from the closed form, in standard errors."""
    distances = [
        (value - isotropic_cosine_quantile(width)) / quantile_error(width, rows)
        for width, value in quantiles.items()
    ]
    return math.sqrt(math.fsum(z * z for z in distances) / len(distances))
