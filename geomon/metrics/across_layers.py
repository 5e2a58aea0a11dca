"""What is said across layers, and what chance alone would give: values of a whole reading."""

import functools
import math
from collections.abc import Mapping

import torch

from geomon.kernels.baselines import isotropic_anisotropy, isotropic_cosine_quantile
from geomon.kernels.dimension import twonn
from geomon.kernels.neighbours import nearest
from geomon.kernels.profile import correlation, profile_shape
from geomon.record import tags

# Layers from which a correlation over depth, or the shape of a profile, means anything.
_ENOUGH = 4


def across_layers(values: Mapping[str, float]) -> dict[str, float]:
    """Values that compare the layers of one reading.

    `drift_cosine/pearson`, `/pearson_p`, `/spearman`, `/spearman_p`: correlation over layers of
    `drift_norm` and `cosine` (Godey et al., 2401.12143, figures 5 and 16).
    `anisotropy_profile/peak_depth` and `/bulge`: where the profile peaks, and how far its middle
    stands above its ends (Razzhigaev et al., 2311.05928, figure 1).

    Args:
        values: By tag, of one reading.
    """
    drift, cosine, anisotropy = (
        _profile(values, metric) for metric in ("drift_norm", "cosine", "anisotropy")
    )
    found: dict[str, float] = {}
    if len(drift) == len(cosine) >= _ENOUGH:
        fit = correlation(drift, cosine)
        found |= {
            "drift_cosine/pearson": float(fit.pearson),
            "drift_cosine/pearson_p": float(fit.pearson_p),
            "drift_cosine/spearman": float(fit.spearman),
            "drift_cosine/spearman_p": float(fit.spearman_p),
        }
    if len(anisotropy) >= _ENOUGH:
        shape = profile_shape(anisotropy)
        found |= {
            "anisotropy_profile/peak_depth": float(shape.peak_depth),
            "anisotropy_profile/bulge": float(shape.bulge),
        }
    return found


def nulls(metrics: Mapping[str, object], rows: int, width: int) -> dict[str, float]:
    """What structureless rows of the same number and width would give.

    `anisotropy/null` and `twonn/null`: of an isotropic Gaussian; `cosine/null`: the 95th percentile
    of the cosine of two isotropic rows.

    Args:
        metrics: The metrics that are measured; only theirs are given.
        rows: In one batch.
        width: Of the hidden states.
    """
    found: dict[str, float] = {}
    if rows < 3 or width < 2:
        return found
    if "anisotropy" in metrics:
        found["anisotropy/null"] = isotropic_anisotropy(rows, width)
    if "cosine" in metrics:
        found["cosine/null"] = isotropic_cosine_quantile(width)
    if "twonn" in metrics:
        found["twonn/null"] = _gaussian_dimension(rows, width)
    return found


# Rows of noise whose neighbours, among as many rows as were measured, are looked for.
_NULL_ROWS = 4096


@functools.lru_cache(maxsize=64)
def _gaussian_dimension(rows: int, width: int) -> float:
    """TwoNN of Gaussian noise: far below the width, since distances concentrate."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(min(rows, _NULL_ROWS), width, generator=generator)
    near = nearest(noise, k=2).distances
    own = noise.double()
    # The others are drawn and let go block by block: rows by the million would be held for a null.
    for start in range(_NULL_ROWS, rows, _NULL_ROWS // 16):
        count = min(rows - start, _NULL_ROWS // 16)
        others = torch.randn(count, width, generator=generator).double()
        apart = torch.cdist(own, others, compute_mode="use_mm_for_euclid_dist")
        near = torch.cat([near, apart], dim=1).topk(2, dim=1, largest=False).values
    return float(twonn(near))


def _profile(values: Mapping[str, float], metric: str) -> torch.Tensor:
    """The metric at each layer, by depth."""
    by_layer = {
        tag.layer: value
        for name, value in values.items()
        if (tag := tags.parse(name)) is not None
        and tag.metric == metric
        and tag.layer is not None
        and not tag.part
        and tag.head is None
        and math.isfinite(value)
    }
    return torch.tensor([by_layer[layer] for layer in sorted(by_layer)], dtype=torch.float64)
