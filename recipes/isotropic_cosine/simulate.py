"""The cosine between two isotropic rows: its density in closed form, and simulated quantiles."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special  # type: ignore[import-untyped]

from recipes.study import begin_training, finish_training

FILE_NAME = "quantiles.json"

# Rows of which all pairs are taken: two million pairs, whose 95th percentile has an error of 0.1 %.
ROWS = 2048


def density(cosines: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Compute the density of the cosine between two isotropic rows.

    (cos + 1) / 2 ~ Beta(a, a) with a = (width - 1) / 2, so that the density of the cosine is
    (1 - cos^2)^(a - 1) / (2^(2a - 1) B(a, a)): Godey et al. (2401.12143, figure 17).

    Args:
        cosines: Cosines, inside (-1, 1).
        width: Number of columns of a row, at least 2.

    Example:
        >>> density(np.array([-0.5, 0.0, 0.5]), 3)  # on a sphere all cosines are equally likely
        array([0.5, 0.5, 0.5])
    """
    a = (width - 1) / 2
    logarithm = (a - 1) * np.log1p(-np.square(cosines))
    return np.exp(logarithm - (2 * a - 1) * math.log(2) - special.betaln(a, a))


def simulated_quantile(
    width: int, rows: int, generator: torch.Generator, probability: float = 0.95
) -> float:
    """Draw normal rows, and take a quantile of the cosine over all their pairs.

    The cosines of two pairs that share a row are independent too, so that all pairs of n rows tell
    as much of one quantile as n (n - 1) / 2 pairs of rows of their own.

    Args:
        width: Number of columns of a row.
        rows: Number of rows, at least 2.
        generator: Source of the random numbers; its state advances.
        probability: Probability of a cosine below the quantile.
    """
    drawn = torch.randn(rows, width, generator=generator)
    drawn /= drawn.norm(dim=1, keepdim=True)
    first, second = torch.triu_indices(rows, rows, offset=1)
    cosines = (drawn @ drawn.T)[first, second].numpy()
    return float(np.quantile(cosines, probability))


def quantile_error(width: int, rows: int, probability: float = 0.95) -> float:
    """Compute the standard error of a simulated quantile: sqrt(p (1 - p) / pairs) / density.

    Args:
        width: Number of columns of a row, at least 2.
        rows: Number of rows.
        probability: Probability of a cosine below the quantile.
    """
    a, pairs = (width - 1) / 2, rows * (rows - 1) / 2
    quantile = 2 * special.betaincinv(a, a, probability) - 1
    height = density(np.array([quantile]), width)[0]
    return math.sqrt(probability * (1 - probability) / pairs) / float(height)


def simulate(widths: tuple[int, ...], rows: int, seed: int, folder: Path) -> None:
    """Simulate the 95th percentile at several widths, and write it to a folder.

    Args:
        widths: Numbers of columns.
        rows: Number of rows of which all pairs are taken.
        seed: Seed of the rows.
        folder: Folder of the seed.
    """
    settings = {"widths": widths, "rows": rows, "seed": seed}
    began = begin_training(folder, settings)
    if began is None:
        return
    generator = torch.Generator().manual_seed(seed)
    found = {str(width): simulated_quantile(width, rows, generator) for width in widths}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE_NAME).write_text(json.dumps({"rows": rows, "quantiles": found}) + "\n")
    finish_training(folder, settings, began)


def load_quantiles(folder: Path) -> tuple[int, dict[int, float]]:
    """Read the simulated quantiles of a seed.

    Args:
        folder: Folder of the seed.

    Returns:
        Number of rows of which all pairs were taken, and the quantiles by width.
    """
    content = json.loads((folder / FILE_NAME).read_text())
    return content["rows"], {int(width): value for width, value in content["quantiles"].items()}
