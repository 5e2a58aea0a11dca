"""`geometry` on random hard rows agrees with the definitions by differences of all pairs."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq

from geomon import geometry, select

SCALES = (1, 2, 4, 8)
OF_ROWS = select(
    "twonn", "gride", "anisotropy", "anisotropy_no_sinks", "sink_share", "effective_rank",
    "participation_ratio", "cosine", "drift_norm", "variance", "mean_square_norm",
)  # fmt: skip


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
    far = np.linalg.norm(rows - lower_median(rows), axis=1)
    scale = lower_median(far)
    massive_rows = far > 10 * scale
    if not scale > 0 or (far > 5 * scale).sum() > 0.05 * n:
        massive_rows[:] = False
    share = np.square(centred[massive_rows]).sum() / max(np.square(centred).sum(), 1e-300)
    rest = rows[~massive_rows] - rows[~massive_rows][0]
    first = np.sort(np.unique(rows + 0.0, axis=0, return_index=True)[1])
    return {
        "drift_norm": float(np.linalg.norm(rows.mean(axis=0))),
        "mean_square_norm": float(np.square(rows).sum() / n),
        "variance": float(np.square(centred).sum() / n),
        **spectral(centred),
        "sink_share": float(share) if massive_rows.any() else 0.0,
        "anisotropy_no_sinks": spectral(rest - rest.mean(axis=0))["anisotropy"],
        "cosine": pairwise_cosine(rows),
        **dimensions(rows[first]),
        "twonn/n": float(len(first)),
        "twonn/duplicates": 1 - len(first) / n,
    }


def lower_median(values):
    return np.sort(values, axis=0)[(len(values) - 1) // 2]


def spectral(centred):
    energy = np.linalg.svd(centred, compute_uv=False) ** 2
    if not energy.sum() > 0:
        return dict.fromkeys(("anisotropy", "effective_rank", "participation_ratio"), math.nan)
    share = energy / energy.sum()
    positive = share[share > 0]
    return {
        "anisotropy": float(share[0]),
        "effective_rank": float(np.exp(-(positive * np.log(positive)).sum())),
        "participation_ratio": float(1 / np.square(share).sum()),
    }


def pairwise_cosine(rows):
    norms = np.linalg.norm(rows, axis=1)
    unit = rows[norms > 0] / norms[norms > 0, None]
    return (
        float((unit @ unit.T)[~np.eye(len(unit), dtype=bool)].mean()) if len(unit) > 1 else math.nan
    )


def dimensions(rows):
    """TwoNN and Gride of distinct rows."""
    n = len(rows)
    if n < 3:
        return {"twonn": math.nan}
    distance = np.sqrt(np.square(rows[:, None] - rows[None]).sum(axis=2))
    np.fill_diagonal(distance, np.inf)
    distance.sort(axis=1)
    distance = distance[:, :-1]

    def ratios(near, far):  # equal spacings are equal but for the rounding of their distances
        logs = np.log(distance[:, far] / distance[:, near])
        return np.where(logs < 1e-12, 0.0, logs)

    logs = np.sort(ratios(0, 1))
    kept = min(int(n * 0.9), n - 1)
    x, y = logs[:kept], -np.log1p(-np.arange(1, kept + 1) / n)
    values = {"twonn": float((x * y).sum() / np.square(x).sum()) if x.any() else math.inf}
    for k in SCALES:
        enough = distance.shape[1] >= 2 * k
        values[f"gride/k{k}"] = likeliest(ratios(k - 1, 2 * k - 1), k) if enough else math.nan
    return values


def likeliest(x, k):
    """The root of Gride's likelihood equation."""
    n, total = len(x), float(x.sum())
    if total == 0:
        return math.inf

    def score(d):
        rest = np.where(x > 0, x / np.where(x > 0, -np.expm1(-d * x), 1), 1 / d)
        return float((n - 1) / d + (k - 1) * rest.sum() - (2 * k - 1) * total)

    low, high = n / total / 8, n / total
    while score(high) > 0:
        high *= 2
    return float(brentq(score, low, high, xtol=1e-300, rtol=1e-13))


def wrong(values, rows):
    """The values that differ from their definitions by more than rounding explains."""
    expected = definitions(rows)
    spread = math.sqrt(expected["variance"])
    loss = np.finfo(float).eps * (np.abs(rows).max() / spread if spread else 1)
    found = []
    for tag, there in expected.items():
        here, least = values.get(tag, -1.0), 1e-9 if tag in ("cosine", "sink_share") else 1e-12
        if tag == "drift_norm":  # a sum of rows that can cancel
            least += 1e-13 * math.sqrt(expected["mean_square_norm"])
        if tag.startswith(("twonn", "gride")) and math.isfinite(there):
            least += 50 * np.finfo(float).eps * there**2  # the inverse of log(r2 / r1)
        if math.isfinite(there) != math.isfinite(here) or (
            math.isfinite(there)
            and not math.isclose(here, there, rel_tol=1e-8 + 1e3 * loss, abs_tol=least)
        ):
            found.append(f"{tag} {here} not {there}")
    words = " ".join(values.notes)
    return found + [
        f"{tag}, without a note"
        for tag, value in values.items()
        if not math.isfinite(value) and tag.split("/")[0] not in words
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", range(0, 48, 16))
def test_values_are_those_of_the_definitions(start):
    check(range(start, start + 16))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_values_are_those_of_the_definitions_for_many_rows():
    check(range(1000, 1200))


def check(seeds):
    faults = {}
    for seed in seeds:
        rows = draw(seed)
        found = wrong(geometry(rows, metrics=OF_ROWS), rows.astype(np.float64))
        if found:
            faults[seed] = found[:3]
    assert faults == {}


def test_a_wrong_value_is_found():
    rows = np.random.default_rng(0).standard_normal((60, 4))
    values = geometry(rows, metrics=OF_ROWS)
    assert wrong(values, rows) == []
    for tag in ("twonn", "gride/k4", "anisotropy", "cosine"):
        value = values[tag]
        values[tag] = value + 1e-4
        assert wrong(values, rows)[0].startswith(tag)
        values[tag] = value
