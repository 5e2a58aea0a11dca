"""`geometry` on random hard rows agrees with the definitions by differences of all pairs."""

import math

import definitions as by_book
import numpy as np
import pytest

from geomon import geometry, select

OF_ROWS = select(
    "twonn", "anisotropy", "effective_rank", "participation_ratio", "cosine", "variance"
)


def massive(rng, n, width):
    rows, count = rng.standard_normal((n, width)), int(rng.integers(1, max(2, n // 15)))
    rows[rng.choice(n, count, replace=False)] *= 10.0 ** rng.uniform(1, 5)
    return rows


def clusters(rng, n, width, count, extent, spread):
    centres = extent * rng.standard_normal((count, width))
    return centres[rng.integers(count, size=n)] + spread * rng.standard_normal((n, width))


CLOUDS = (
    lambda rng, n, w: rng.standard_normal((n, w)) * np.exp(rng.normal(0, rng.choice([0, 1, 3]), w)),
    lambda rng, n, w: (
        rng.standard_normal((n, (w + 1) // 2)) @ rng.standard_normal(((w + 1) // 2, w))
    ),
    lambda rng, n, w: clusters(rng, n, w, max(1, n // 3), 1, 10.0 ** rng.choice([-3, -5, -8, -10])),
    lambda rng, n, w: clusters(rng, n, w, int(rng.integers(1, 6)), 10.0 ** rng.uniform(0, 4), 1),
    massive,
    lambda rng, n, w: rng.standard_normal((n, w))[rng.integers(max(1, n // 4), size=n)],  # copies
    lambda rng, n, w: rng.integers(0, int(rng.integers(2, 6)), (n, w)).astype(float),  # a grid
    lambda rng, n, w: rng.standard_t(rng.choice([1.5, 3, 5]), (n, w)),
)


def draw(seed):
    """Rows as they are given, in float32 or float64, some far from the origin."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 40)) if rng.random() < 0.7 else int(rng.integers(40, 250))
    rows = CLOUDS[seed % len(CLOUDS)](rng, n, int(rng.integers(1, 13)))
    if rng.random() < 0.3:
        rows = rows + 10.0 ** rng.uniform(-1, 6) * rng.standard_normal(rows.shape[1])
    return rows.astype(str(rng.choice(["float32", "float64"])))


def definitions(rows):
    distinct = np.unique(rows + 0.0, axis=0)
    return {
        "variance": by_book.squares(rows).mean(),
        "anisotropy": by_book.shares(rows)[0],
        "effective_rank": by_book.effective_rank(rows),
        "participation_ratio": by_book.participation_ratio(rows),
        "cosine": by_book.mean_cosine(rows),
        "twonn": by_book.twonn(by_book.distances(distinct)[:, :2]),
        "twonn/n": len(distinct),
        "twonn/duplicates": 1 - len(distinct) / len(rows),
    }


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
