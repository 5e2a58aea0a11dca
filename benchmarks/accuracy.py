"""Compares the intrinsic dimension with other packages: error and robustness.

The manifolds are customary tests of dimension estimators (Hein and Audibert 2005; Rozza et al.
2012; Campadelli et al. 2015; scikit-dimension's `BenchmarkManifolds`), written here from their
formulas. Products of spirals, heavy tails and noise far below the distance of neighbours are added.
See README.md.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.timing import print_machine, print_table
from geomon.kernels.dimension import gride, twonn
from geomon.kernels.neighbours import copies_of, nearest, unique_rows
from support.definitions import distances
from support.definitions import twonn as exact_twonn

Cloud = NDArray[np.float64]
Rows = NDArray[np.floating]
Estimator = Callable[[Rows], float]

# Means in units of the spread, each with the dtype of the rows; shares of copied rows.
DISTURBED = ((0.0, "float32"), (1e2, "float32"), (1e4, "float32"), (1e10, "float64"))
DUPLICATED = (0.0, 0.1, 0.5)
TOLERATED = 0.03


def _gaussian(random: Generator, n: int, d: int, width: int) -> Cloud:
    """Draw an isotropic Gaussian in d directions of a larger space."""
    frame = np.linalg.qr(np.random.default_rng(width).standard_normal((width, d)))[0]
    return random.standard_normal((n, d)) @ frame.T


def _swiss_roll(random: Generator, n: int) -> Cloud:
    """Draw a rolled-up sheet."""
    turn = 1.5 * np.pi * (1 + 2 * random.random(n))
    return np.stack([turn * np.cos(turn), 21 * random.random(n), turn * np.sin(turn)], axis=1)


def _spirals(random: Generator, n: int, d: int) -> Cloud:
    """Draw the product of d spirals on a torus, each a closed curve of eight windings."""
    turn = 2 * np.pi * random.random((n, d))
    radius = 2 + np.cos(8 * turn)
    return np.hstack([radius * np.cos(turn), radius * np.sin(turn), np.sin(8 * turn)])


def _noisy_ball(random: Generator, n: int, d: int, width: int) -> Cloud:
    """Draw uniformly from a unit ball, with noise of 0.002 in every one of `width` directions."""
    points = random.standard_normal((n, d))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    points *= random.random((n, 1)) ** (1 / d)
    flat = np.hstack([points, np.zeros((n, width - d))])
    return flat + 0.002 * random.standard_normal(flat.shape)


def _curled(random: Generator, n: int, d: int, copies: int) -> Cloud:
    """Each parameter sets the angle of one circle and the radius of the previous; 2 d copies."""
    p = random.random((n, d))
    radius, angle = np.roll(p, -1, axis=1), 2 * np.pi * p
    return np.tile(np.hstack([radius * np.cos(angle), radius * np.sin(angle)]), copies)


def _heavy_tails(random: Generator, n: int, d: int, width: int) -> Cloud:
    """Draw from Student's t with four degrees of freedom: a dense middle and far outliers."""
    return _gaussian(random, n, d, width) / np.sqrt(random.chisquare(4, (n, 1)) / 4)


def _sphere(random: Generator, n: int, d: int) -> Cloud:
    """Draw uniformly from the unit sphere in width d + 1."""
    points = random.standard_normal((n, d + 1))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def _crowded(random: Generator, n: int, d: int) -> Cloud:
    """Transform beta-distributed parameters, most of them close to 1, to width 4 d."""
    p = random.beta(10, 0.5, (n, d))
    turn = 2 * np.pi * p
    return np.tile(np.hstack([p * np.sin(np.cos(turn)), p * np.cos(np.sin(turn))]), 2)


def _twisted(random: Generator, n: int, d: int) -> Cloud:
    """Map pairs of parameters through tangents and arc tangents of products, to width 4 d."""
    p = random.random((n, d))
    other = p[:, ::-1]
    return np.tile(np.hstack([np.tan(p * np.cos(other)), np.arctan(other * np.sin(p))]), 2)


# By name: intrinsic dimension, and function that draws points.
MANIFOLDS: dict[str, tuple[int, Callable[[Generator, int], Cloud]]] = {
    "swiss roll": (2, _swiss_roll),
    "product of spirals": (2, lambda r, n: _spirals(r, n, 2)),
    "noisy ball 5 in 32": (5, lambda r, n: _noisy_ball(r, n, 5, 32)),
    "curled 6 in 36": (6, lambda r, n: _curled(r, n, 6, 3)),
    "heavy tails 8 in 64": (8, lambda r, n: _heavy_tails(r, n, 8, 64)),
    "sphere 10 in 11": (10, lambda r, n: _sphere(r, n, 10)),
    "Beta 10 in 40": (10, lambda r, n: _crowded(r, n, 10)),
    "twisted 24 in 96": (24, lambda r, n: _twisted(r, n, 24)),
}
DISTURBED_MANIFOLDS = {
    "Gaussian 10 in 64": lambda r, n: _gaussian(r, n, 10, 64),
    **{
        name: MANIFOLDS[name][1] for name in ("swiss roll", "curled 6 in 36", "heavy tails 8 in 64")
    },
}


def geomon(part: Callable[[Tensor], Tensor] = lambda near: twonn(near).value) -> Estimator:
    """Make geomon's estimator from the distances of two neighbours; copies count once."""

    def answer(rows: Rows) -> float:
        points = torch.from_numpy(rows)
        return part(nearest(points[unique_rows(copies_of(points))], 2).distances).item()

    return answer


def scikit_dimension(**options: str) -> Estimator:
    """Make scikit-dimension's estimator."""
    from skdim.id import TwoNN

    return quiet(lambda rows: TwoNN(discard_fraction=0.1, **options).fit(rows).dimension_)


def dadapy(algorithm: str) -> Estimator:
    """Make DADApy's estimator."""
    from dadapy import Data

    return quiet(
        lambda rows: Data(coordinates=rows, maxk=2, n_jobs=2).compute_id_2NN(
            algorithm=algorithm, mu_fraction=0.9
        )[0]
    )


# By name: a function that makes the estimator, if its package is installed.
ESTIMATORS: dict[str, Callable[[], Estimator]] = {
    "geomon twonn": geomon,
    "geomon censored": lambda: geomon(lambda near: twonn(near).censored),
    "geomon gride k1": lambda: geomon(lambda near: gride(near, scales=[1])),
    "scikit-dimension fit": scikit_dimension,
    "scikit-dimension mle": lambda: scikit_dimension(method="mle"),
    "DADApy base": lambda: dadapy("base"),
    "DADApy ml": lambda: dadapy("ml"),
}


def installed(estimators: dict[str, Callable[[], Estimator]]) -> dict[str, Estimator]:
    """Make the estimators of installed packages, and print one line for a missing one."""
    found = {}
    for name, make in estimators.items():
        try:
            found[name] = make()
        except ImportError as error:
            print(f"{name}: {error.name} is not installed")
    return found


def quiet(estimator: Estimator) -> Estimator:
    """Silence an estimator, and make it return NaN instead of raising.

    Args:
        estimator: Function from rows to a dimension.
    """

    def answer(rows: Rows) -> float:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                return float(estimator(rows))
            except (ValueError, ArithmeticError, RuntimeError):
                return math.nan

    return answer


def _errors(
    estimators: dict[str, Estimator], points: int, seeds: int
) -> Iterator[tuple[object, ...]]:
    """Yield one row per manifold: relative error in %, signed mean (mean of the absolute)."""
    for name, (dimension, draw) in MANIFOLDS.items():
        clouds = [draw(np.random.default_rng(seed), points) for seed in range(seeds)]
        found = [
            [100 * (estimator(rows) / dimension - 1) for rows in clouds]
            for estimator in estimators.values()
        ]
        yield name, dimension, *(f"{np.mean(x):+.1f} ({np.abs(x).mean():.1f})" for x in found)


def _deviations(
    estimators: dict[str, Estimator], n: int, counts: dict[str, list[int]]
) -> Iterator[tuple[object, ...]]:
    """Yield one row per disturbance: the largest deviation in % from the undisturbed answer."""
    clean = {
        (name, share): _duplicated(draw, n, share)
        for name, draw in DISTURBED_MANIFOLDS.items()
        for share in DUPLICATED
    }
    truth = {key: exact_twonn(distances(rows)) for key, (rows, _) in clean.items()}
    for mean, dtype in DISTURBED:
        for share in DUPLICATED:
            cells = []
            for name, estimator in estimators.items():
                moved = []
                for manifold in DISTURBED_MANIFOLDS:
                    rows, order = clean[manifold, share]
                    given = (rows + mean).astype(dtype)[order]
                    moved.append(estimator(given) / truth[manifold, share] - 1)
                finite = [x for x in moved if math.isfinite(x)]
                lost, outside = len(moved) - len(finite), sum(abs(x) > TOLERATED for x in finite)
                for place, count in enumerate((lost, outside, len(moved))):
                    counts[name][place] += count
                text = f"{100 * max(finite, key=abs):+.2f}" if finite else ""
                cells.append(f"{text}; {lost} NaN".lstrip("; ") if lost else text)
            yield f"{mean:g}, {dtype}", f"{share:.0%}", *cells


def _duplicated(
    draw: Callable[[Generator, int], Cloud], n: int, share: float
) -> tuple[Cloud, NDArray[np.int64]]:
    """Return distinct rows of spread 1, and an index that turns them into n rows with copies."""
    random = np.random.default_rng(1)
    copies = round(share * n)
    clean = draw(random, n - copies)
    clean = (clean - clean.mean(axis=0)) / np.sqrt(clean.var(axis=0).mean())
    order = np.concatenate([np.arange(n - copies), random.integers(0, n - copies, copies)])
    return clean, random.permutation(order)


def main(
    points: Annotated[int, typer.Option(help="Points of a cloud in the table of errors.")] = 2500,
    seeds: Annotated[int, typer.Option(help="Clouds of each manifold.")] = 5,
    size: Annotated[int, typer.Option(help="Rows of a cloud in the table of robustness.")] = 4096,
) -> None:
    """Print the tables of error and robustness."""
    torch.set_num_threads(2)
    estimators = installed(ESTIMATORS)
    print_table(
        f"Relative error, %: signed mean (mean of the absolute); {points:,} points, {seeds} seeds",
        ("manifold", "d", *estimators),
        _errors(estimators, points, seeds),
    )
    kind = ("geomon twonn", "scikit-dimension fit", "DADApy base")
    same = {name: estimators[name] for name in kind if name in estimators}
    counts = {name: [0, 0, 0] for name in same}
    print_table(
        f"Largest deviation from the undisturbed answer, %; {size:,} rows of "
        f"{', '.join(DISTURBED_MANIFOLDS)}",
        ("mean / spread", "rows duplicated", *same),
        _deviations(same, size, counts),
    )
    for name, (lost, outside, whole) in counts.items():
        print(f"{name}: of {whole}, {lost} NaN or refused, {outside} more outside {TOLERATED:.0%}")
    print_machine("rows in float32")


if __name__ == "__main__":
    typer.run(main)
