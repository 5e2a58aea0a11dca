"""Clouds of known intrinsic dimension: curved, noisy, of uneven density.

The families are those that the estimators of intrinsic dimension are customarily tried on (Hein and
Audibert 2005; Rozza et al. 2012; Campadelli et al. 2015; listed in scikit-dimension's
`BenchmarkManifolds`), written here from their formulas, and a few beside them: products of
spirals, heavy tails, clusters, and noise far below the distance of neighbours.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Cloud = NDArray[np.float64]


@dataclass(frozen=True)
class Manifold:
    """A manifold that can be sampled.

    Attributes:
        name: What it is called in tables.
        dimension: Its intrinsic dimension.
        draw: Points from a source of random numbers and their count.
    """

    name: str
    dimension: int
    draw: Callable[[Generator, int], Cloud]


def sphere(random: Generator, n: int, d: int) -> Cloud:
    """Uniform on the unit sphere in width d + 1."""
    points = random.standard_normal((n, d + 1))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def affine(random: Generator, n: int, d: int, width: int) -> Cloud:
    """A uniform cube under a linear map without symmetry, off the origin."""
    slant = np.random.default_rng(d).standard_normal((d, width))
    return random.random((n, d)) @ slant + 3


def gaussian(random: Generator, n: int, d: int, width: int) -> Cloud:
    """Isotropic Gaussian in d directions of a larger space."""
    frame = np.linalg.qr(np.random.default_rng(width).standard_normal((width, d)))[0]
    return random.standard_normal((n, d)) @ frame.T


def concentrated(random: Generator, n: int) -> Cloud:
    """Four parameters in width 6, so crowded in places that it passes for three."""
    a, b, c, d = random.random((4, n))
    turn = 2 * np.pi * a
    return np.stack(
        [
            b**2 * np.cos(turn),
            c**2 * np.sin(turn),
            b + c + (b - d) ** 2,
            b - 2 * c + (a - d) ** 2,
            -b - 2 * c + (c - d) ** 2,
            a**2 - b**2 + c**2 - d**2,
        ],
        axis=1,
    )


def curled(random: Generator, n: int, d: int, copies: int) -> Cloud:
    """Each parameter sets the angle of one circle and the radius of the one before; 2 d copies."""
    p = random.random((n, d))
    radius, angle = np.roll(p, -1, axis=1), 2 * np.pi * p
    return np.tile(np.hstack([radius * np.cos(angle), radius * np.sin(angle)]), copies)


def twisted(random: Generator, n: int, d: int) -> Cloud:
    """Tangents and arc tangents of products of pairs of parameters, in width 4 d."""
    p = random.random((n, d))
    other = p[:, ::-1]
    return np.tile(np.hstack([np.tan(p * np.cos(other)), np.arctan(other * np.sin(p))]), 2)


def crowded(random: Generator, n: int, d: int) -> Cloud:
    """Beta-distributed parameters, most of them close to 1, in width 4 d."""
    p = random.beta(10, 0.5, (n, d))
    turn = 2 * np.pi * p
    return np.tile(np.hstack([p * np.sin(np.cos(turn)), p * np.cos(np.sin(turn))]), 2)


def paraboloid(random: Generator, n: int, d: int) -> Cloud:
    """A paraboloid over a Burr-distributed base, with its sines and squares: width 3 (d + 1)."""
    rate = random.exponential(size=(n, d + 1))
    base = 1 / (1 + rate[:, 1:] / rate[:, :1])
    whole = np.hstack([base, (base**2).sum(axis=1, keepdims=True)])
    return np.hstack([whole, np.sin(whole), whole**2])


def cube_surface(random: Generator, n: int, d: int) -> Cloud:
    """Uniform on the 2 (d + 1) faces of a cube."""
    points = random.random((n, d + 1))
    points[np.arange(n), random.integers(0, d + 1, n)] = random.integers(0, 2, n)
    return points


def swiss_roll(random: Generator, n: int, noise: float = 0.0) -> Cloud:
    """A sheet rolled up; `noise` is the standard deviation added to each coordinate."""
    turn = 1.5 * np.pi * (1 + 2 * random.random(n))
    points = np.stack([turn * np.cos(turn), 21 * random.random(n), turn * np.sin(turn)], axis=1)
    return points + noise * random.standard_normal(points.shape)


def s_curve(random: Generator, n: int) -> Cloud:
    """A sheet bent into an S."""
    turn = 3 * np.pi * (random.random(n) - 0.5)
    bend = np.sign(turn) * (np.cos(turn) - 1)
    return np.stack([np.sin(turn), 2 * random.random(n), bend], axis=1)


def moebius(random: Generator, n: int) -> Cloud:
    """A band twisted ten half turns."""
    turn, across = 2 * np.pi * random.random(n), random.random(n) - 0.5
    radius = 1 + across * np.cos(5 * turn)
    return np.stack(
        [radius * np.cos(turn), radius * np.sin(turn), across * np.sin(5 * turn)], axis=1
    )


def helicoid(random: Generator, n: int) -> Cloud:
    """A winding stair of five turns: dense at its axis, sparse at its rim."""
    radius, turn = 10 * np.pi * random.random((2, n))
    return np.stack([radius * np.cos(turn), radius * np.sin(turn), 0.5 * turn], axis=1)


def spirals(random: Generator, n: int, d: int) -> Cloud:
    """The product of d spirals on a torus, each a closed curve of eight windings."""
    turn = 2 * np.pi * random.random((n, d))
    radius = 2 + np.cos(8 * turn)
    return np.hstack([radius * np.cos(turn), radius * np.sin(turn), np.sin(8 * turn)])


def heavy_tails(random: Generator, n: int, d: int, width: int) -> Cloud:
    """Student's t with four degrees of freedom: a dense middle and far outliers."""
    return gaussian(random, n, d, width) / np.sqrt(random.chisquare(4, (n, 1)) / 4)


def clusters(random: Generator, n: int, d: int, width: int) -> Cloud:
    """Eight Gaussian balls of the same dimension, sizes from 1 to 8, each in its own directions."""
    fixed = np.random.default_rng(d)
    frames = np.linalg.qr(fixed.standard_normal((8, width, d)))[0]
    centres = 100 * fixed.standard_normal((8, width))
    which = random.integers(0, 8, n)
    local = random.standard_normal((n, d)) * (1 + which[:, None])
    return centres[which] + np.einsum("nd,nwd->nw", local, frames[which])


def noisy_ball(random: Generator, n: int, d: int, width: int) -> Cloud:
    """Uniform in a ball of radius 1, with noise of 0.002 in every one of `width` directions."""
    points = random.standard_normal((n, d))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    points *= random.random((n, 1)) ** (1 / d)
    flat = np.hstack([points, np.zeros((n, width - d))])
    return flat + 0.002 * random.standard_normal(flat.shape)


MANIFOLDS = (
    Manifold("swiss roll", 2, swiss_roll),
    Manifold("swiss roll, noise 0.01", 2, lambda r, n: swiss_roll(r, n, 0.01)),
    Manifold("S-curve", 2, s_curve),
    Manifold("Moebius band", 2, moebius),
    Manifold("helicoid", 2, helicoid),
    Manifold("product of spirals", 2, lambda r, n: spirals(r, n, 2)),
    Manifold("affine 3 in 5", 3, lambda r, n: affine(r, n, 3, 5)),
    Manifold("paraboloid 3 in 12", 3, lambda r, n: paraboloid(r, n, 3)),
    Manifold("concentrated 4 in 6", 4, concentrated),
    Manifold("curled 4 in 8", 4, lambda r, n: curled(r, n, 4, 1)),
    Manifold("noisy ball 5 in 32", 5, lambda r, n: noisy_ball(r, n, 5, 32)),
    Manifold("clusters 6 in 40", 6, lambda r, n: clusters(r, n, 6, 40)),
    Manifold("curled 6 in 36", 6, lambda r, n: curled(r, n, 6, 3)),
    Manifold("paraboloid 6 in 21", 6, lambda r, n: paraboloid(r, n, 6)),
    Manifold("heavy tails 8 in 64", 8, lambda r, n: heavy_tails(r, n, 8, 64)),
    Manifold("paraboloid 9 in 30", 9, lambda r, n: paraboloid(r, n, 9)),
    Manifold("sphere 10 in 11", 10, lambda r, n: sphere(r, n, 10)),
    Manifold("cube surface 10 in 11", 10, lambda r, n: cube_surface(r, n, 10)),
    Manifold("Beta 10 in 40", 10, lambda r, n: crowded(r, n, 10)),
    Manifold("curled 12 in 72", 12, lambda r, n: curled(r, n, 12, 3)),
    Manifold("cube surface 17 in 18", 17, lambda r, n: cube_surface(r, n, 17)),
    Manifold("twisted 18 in 72", 18, lambda r, n: twisted(r, n, 18)),
    Manifold("affine 20 in 60", 20, lambda r, n: affine(r, n, 20, 60)),
    Manifold("Gaussian 20 in 20", 20, lambda r, n: gaussian(r, n, 20, 20)),
    Manifold("cube surface 24 in 25", 24, lambda r, n: cube_surface(r, n, 24)),
    Manifold("twisted 24 in 96", 24, lambda r, n: twisted(r, n, 24)),
)
