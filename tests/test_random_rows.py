"""`geometry` on random hard rows agrees with the definitions by differences of all pairs."""

import math

import numpy as np
import pytest

from geomon import geometry, select

OF_ROWS = select(
    "twonn", "anisotropy", "effective_rank", "participation_ratio", "cosine", "variance"
)


def gaussian(rng, n, width):
    return rng.standard_normal((n, width)) * np.exp(rng.normal(0, rng.choice([0, 1, 3]), width))


def low_rank(rng, n, width):
    rank = int(rng.integers(1, width + 1))
    return rng.standard_normal((n, rank)) @ rng.standard_normal((rank, width))


def near_duplicates(rng, n, width):
    groups = int(rng.integers(1, max(2, n // 3)))
    centres = rng.standard_normal((groups, width))
    noise = 10.0 ** rng.choice([-3, -5, -8, -8, -10]) * rng.standard_normal((n, width))
    return centres[rng.integers(groups, size=n)] + noise


def massive(rng, n, width):
    rows = rng.standard_normal((n, width))
    count = int(rng.integers(1, max(2, n // 15)))
    rows[rng.choice(n, count, replace=False)] *= 10.0 ** rng.uniform(1, 5)
    return rows


def copies(rng, n, width):
    rows = rng.standard_normal((n, width))
    return rows[rng.integers(max(1, n // int(rng.integers(1, 9))), size=n)]


def grid(rng, n, width):
    return rng.integers(0, int(rng.integers(2, 6)), (n, width)).astype(float)


def heavy(rng, n, width):
    return rng.standard_t(rng.choice([1.5, 3, 5]), (n, width))


def far_clusters(rng, n, width):
    centres = 10.0 ** rng.uniform(0, 4) * rng.standard_normal((int(rng.integers(1, 6)), width))
    return centres[rng.integers(len(centres), size=n)] + rng.standard_normal((n, width))


CLOUDS = (gaussian, low_rank, near_duplicates, massive, copies, grid, heavy, far_clusters)


def draw(seed):
    """Rows as they are given, in float32 or float64, some far from the origin."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 40)) if rng.random() < 0.7 else int(rng.integers(40, 250))
    rows = CLOUDS[seed % len(CLOUDS)](rng, n, int(rng.integers(1, 13)))
    if rng.random() < 0.3:
        rows = rows + 10.0 ** rng.uniform(-1, 6) * rng.standard_normal(rows.shape[1])
    return rows.astype(str(rng.choice(["float32", "float64"])))


def definitions(rows):
    """The values of rows by their definitions."""
    n = len(rows)
    centred = rows - rows[0]
    centred = centred - centred.mean(axis=0)
    energy = np.linalg.svd(centred, compute_uv=False) ** 2
    share = energy / energy.sum() if energy.sum() > 0 else np.full(1, math.nan)
    positive = share[~(share <= 0)]
    norms = np.linalg.norm(rows, axis=1)
    unit = rows[norms > 0] / norms[norms > 0, None]
    cosines = (unit @ unit.T)[~np.eye(len(unit), dtype=bool)]
    first = np.sort(np.unique(rows + 0.0, axis=0, return_index=True)[1])
    return {
        "variance": float(np.square(centred).sum() / n),
        "anisotropy": float(share[0]),
        "effective_rank": float(np.exp(-(positive * np.log(positive)).sum())),
        "participation_ratio": float(1 / np.square(share).sum()),
        "cosine": float(cosines.mean()) if len(cosines) else math.nan,
        "twonn": twonn(rows[first]),
        "twonn/n": float(len(first)),
        "twonn/duplicates": 1 - len(first) / n,
    }


def twonn(rows):
    """The fit through 0 over the 90 % of smallest ratios, of distinct rows."""
    n = len(rows)
    if n < 3:
        return math.nan
    distance = np.sqrt(np.square(rows[:, None] - rows[None]).sum(axis=2))
    np.fill_diagonal(distance, np.inf)
    distance.sort(axis=1)
    logs = np.sort(np.log(distance[:, 1] / distance[:, 0]))
    logs[logs < 1e-12] = 0.0  # equal spacings are equal but for the rounding of their distances
    kept = min(int(n * 0.9), n - 1)
    x, y = logs[:kept], -np.log1p(-np.arange(1, kept + 1) / n)
    return float((x * y).sum() / np.square(x).sum()) if x.any() else math.inf


@pytest.mark.parametrize("seed", range(48))
def test_values_are_those_of_the_definitions_within_what_rounding_explains(seed):
    given = draw(seed)
    values, rows = geometry(given, metrics=OF_ROWS), given.astype(np.float64)
    expected = definitions(rows)
    spread = math.sqrt(expected["variance"])
    loss = np.finfo(float).eps * (np.abs(rows).max() / spread if spread else 1)
    for tag, there in expected.items():
        least = 1e-9 if tag == "cosine" else 1e-12
        if tag == "twonn":
            least += 50 * np.finfo(float).eps * there**2  # the inverse of log(r2 / r1)
        if math.isfinite(there):
            assert values[tag] == pytest.approx(there, rel=1e-8 + 1e3 * loss, abs=least), tag
        else:
            assert not math.isfinite(values[tag]), tag
            assert tag in " ".join(values.notes)
