"""Local dimension of every neighbourhood, beside scikit-dimension's pointwise fit."""

import argparse
import statistics
import time
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.speed import Rows, cloud, quiet
from geomon.kernels.neighbourhoods import local_dimension
from geomon.kernels.neighbours import nearest

SIZES = ((4096, 128), (4096, 768))
NEAR, ANCHORS = 64, 256


def fit_pointwise(rows: NDArray[np.float64], members: NDArray[np.int64]) -> NDArray[np.float64]:
    """Estimate the dimension of each neighbourhood by scikit-dimension, one after another.

    Args:
        rows: Rows, [tokens, width].
        members: Indices of the rows of each neighbourhood, [neighbourhoods, size].
    """
    from skdim.id import TwoNN

    fitted = TwoNN(discard_fraction=0.1).fit_pw(rows, precomputed_knn=members)
    return np.asarray(fitted.dimension_pw_)


def _searched(points: Tensor, own: Tensor, _: Rows) -> float:
    return float(nearest(points, NEAR, of=own).distances.mean())


def _measured(points: Tensor, members: Tensor, _: Rows) -> float:
    return float(local_dimension(points, members).mean())


def _fitted(exact: NDArray[np.float64], members: NDArray[np.int64], _: Rows) -> float:
    return float(fit_pointwise(exact, members).mean())


def main() -> None:
    """Time both in turn on the same neighbourhoods, and compare their values."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=5, help="of each, after one that warms up")
    runs = options.parse_args().runs
    torch.set_num_threads(1)
    for size in SIZES:
        rows = cloud("decaying", size)
        points = torch.from_numpy(rows)
        own = torch.arange(0, size[0], size[0] // ANCHORS)
        members: Tensor = nearest(points, NEAR, of=own).indices
        exact = rows.astype(np.float64), members.numpy()
        calls = {
            "neighbours": partial(_searched, points, own),
            "geomon": partial(_measured, points, members),
            "scikit-dimension": partial(_fitted, *exact),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(runs + 1):
            for name, call in calls.items():
                began = time.perf_counter()
                quiet(call, rows)
                times[name].append(time.perf_counter() - began)
        found, peer = local_dimension(points, members).numpy(), fit_pointwise(*exact)
        pairs = zip(times["geomon"][1:], times["scikit-dimension"][1:], strict=True)
        ratios = [peer_time / own_time for own_time, peer_time in pairs]
        medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
        print(
            f"{size[0]:,} x {size[1]}, {ANCHORS} neighbourhoods of {NEAR}: "
            + ", ".join(f"{name} {taken:.3f} s" for name, taken in medians.items())
            + f"; scikit-dimension / geomon {statistics.median(ratios):.1f} "
            f"({min(ratios):.1f} to {max(ratios):.1f}); largest relative difference "
            f"{np.abs(found / peer - 1).max():.1e}; mean dimension {found.mean():.2f}"
        )


if __name__ == "__main__":
    main()
