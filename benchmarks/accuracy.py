"""Intrinsic dimension beside its peers: error, coverage, robustness. See README.md."""

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from enum import StrEnum
from io import StringIO
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.manifolds import MANIFOLDS, Cloud, Manifold, gaussian
from geomon.kernels.dimension import gride, twonn, twonn_censored
from geomon.kernels.neighbours import nearest, unique_rows

Rows = NDArray[np.floating]
Estimator = Callable[[Rows], float]

GEOMON = ("geomon twonn", "geomon censored", "geomon gride k1")
# What estimates the same thing in the same way; the rest differ by what they do with the tail.
SAME_KIND = {
    "geomon twonn": ("scikit-dimension fit", "DADApy base"),
    "geomon censored": ("scikit-dimension mle",),
    "geomon gride k1": ("DADApy ml",),
}

# Means in units of the spread, as the rows are given; and what the answer may move by.
DISTURBED = ((0.0, "float32"), (1e2, "float32"), (1e4, "float32"), (1e10, "float64"))
DUPLICATED = (0.0, 0.1, 0.5)
SIZES = (400, 600, 4096, 16384)
TOLERATED = 0.03

console = Console(width=175)


class Part(StrEnum):
    """A table of the benchmark."""

    ALL = "all"
    ERROR = "error"
    COVERAGE = "coverage"
    ROBUSTNESS = "robustness"


def main(
    part: Annotated[Part, typer.Option(help="The table to make.")] = Part.ALL,
    points: Annotated[int, typer.Option(help="Points of a cloud in the table of errors.")] = 2500,
    seeds: Annotated[int, typer.Option(help="Clouds per manifold.")] = 5,
    replicates: Annotated[int, typer.Option(help="Samples behind each coverage.")] = 5000,
    size: Annotated[
        list[int], typer.Option(help="Rows of a cloud in the table of robustness; repeatable.")
    ] = list(SIZES),  # noqa: B006
    largest_for_peers: Annotated[
        int, typer.Option(help="Largest cloud that the peers are given there.")
    ] = 4096,
) -> None:
    """Print the tables of error, of coverage, and of robustness."""
    peers = _peers()
    torch.set_num_threads(2)
    if part in (Part.ALL, Part.ERROR):
        _error_table(peers, points, seeds)
    if part in (Part.ALL, Part.COVERAGE):
        _coverage_table(replicates)
    if part in (Part.ALL, Part.ROBUSTNESS):
        _robustness_tables(peers, size, largest_for_peers)


def geomon_twonn(rows: Rows) -> float:
    """`twonn` as the monitor takes it: on distinct rows."""
    return twonn(_distances(rows)).item()


def geomon_censored(rows: Rows) -> float:
    """`twonn_censored` on distinct rows."""
    return twonn_censored(_distances(rows))[0].item()


def geomon_gride(rows: Rows) -> float:
    """`gride` at its smallest scale on distinct rows: maximum likelihood that keeps the tail."""
    return gride(_distances(rows), scales=[1]).item()


def _distances(rows: Rows) -> Tensor:
    points = torch.from_numpy(rows)
    return nearest(points[unique_rows(points)], 2).distances


def _peers() -> dict[str, Estimator]:
    """The estimators of the peers that are installed; a missing one is said in one line."""
    found: dict[str, Estimator] = {}
    try:
        from skdim.id import TwoNN
    except ImportError:
        console.print("scikit-dimension is not installed: its columns are left out")
    else:
        found["scikit-dimension fit"] = lambda rows: (
            TwoNN(discard_fraction=0.1).fit(rows).dimension_
        )
        found["scikit-dimension mle"] = lambda rows: (
            TwoNN(discard_fraction=0.1, method="mle").fit(rows).dimension_
        )
    try:
        from dadapy import Data
    except ImportError:
        console.print("DADApy is not installed: its columns are left out")
    else:

        def two_nearest(rows: Rows, algorithm: str) -> float:
            data = Data(coordinates=rows, maxk=2, n_jobs=2)
            return float(data.compute_id_2NN(algorithm=algorithm, mu_fraction=0.9)[0])

        found["DADApy base"] = lambda rows: two_nearest(rows, "base")
        found["DADApy ml"] = lambda rows: two_nearest(rows, "ml")
    return {name: _quiet(estimator) for name, estimator in found.items()}


def _quiet(estimator: Estimator) -> Estimator:
    """The estimator without what it prints, and NaN where it raises."""

    def answer(rows: Rows) -> float:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                return float(estimator(rows))
            except (ValueError, FloatingPointError, RuntimeError):
                return math.nan

    return answer


def _error_table(peers: dict[str, Estimator], points: int, seeds: int) -> None:
    estimators = {
        "geomon twonn": geomon_twonn, "geomon censored": geomon_censored,
        "geomon gride k1": geomon_gride, **peers,
    }  # fmt: skip
    table = Table(
        title=f"Relative error, %: signed mean (mean of absolute); {points:,} points, {seeds} seeds"
    )
    table.add_column("manifold")
    table.add_column("d", justify="right")
    for name in estimators:
        table.add_column(name, justify="right")
    table.add_column("worse than its own kind")
    table.add_column("worse than any peer")
    whole: dict[str, list[NDArray[np.float64]]] = {name: [] for name in estimators}
    apart = dict.fromkeys((peer for kind in SAME_KIND.values() for peer in kind), 0.0)
    for manifold in MANIFOLDS:
        errors = _errors(manifold, estimators, points, seeds)
        for name, values in errors.items():
            whole[name].append(values)
        for mine, kind in SAME_KIND.items():
            for peer in set(kind) & set(errors):
                apart[peer] = max(apart[peer], float(np.abs(errors[mine] - errors[peer]).max()))
        own = {mine: [peer for peer in kind if peer in peers] for mine, kind in SAME_KIND.items()}
        table.add_row(
            manifold.name, str(manifold.dimension), *map(_signed_and_absolute, errors.values()),
            _worse(errors, own), _worse(errors, {mine: list(peers) for mine in GEOMON}),
        )  # fmt: skip
    table.add_section()
    table.add_row("mean", "", *(_signed_and_absolute(np.stack(v)) for v in whole.values()), "", "")
    console.print(table)
    console.print(
        "worse: the absolute error is larger than the smallest of the peers' by more than its own "
        "standard error over the seeds"
    )
    for peer in apart:
        if peer in peers:
            console.print(f"largest difference from {peer} on the same cloud: {apart[peer]:.1e}")


def _errors(
    manifold: Manifold, estimators: dict[str, Estimator], points: int, seeds: int
) -> dict[str, NDArray[np.float64]]:
    """Relative errors, one for each seed."""
    found: dict[str, list[float]] = {name: [] for name in estimators}
    for seed in range(seeds):
        rows = manifold.draw(np.random.default_rng(seed), points)
        for name, estimator in estimators.items():
            found[name].append(estimator(rows) / manifold.dimension - 1)
    return {name: np.array(values) for name, values in found.items()}


def _signed_and_absolute(errors: NDArray[np.float64]) -> str:
    return f"{100 * errors.mean():+.1f} ({100 * np.abs(errors).mean():.1f})"


def _worse(errors: dict[str, NDArray[np.float64]], against: dict[str, list[str]]) -> str:
    """Where the absolute error exceeds the best peer's by more than its own standard error."""
    said = []
    for mine, peers in against.items():
        if not peers:
            continue
        own = np.abs(errors[mine])
        best = min(peers, key=lambda peer: np.abs(errors[peer]).mean())
        excess = own.mean() - np.abs(errors[best]).mean()
        # Rounding of a different order of summation is no difference of method.
        if excess > max(own.std(ddof=1) / len(own) ** 0.5, 1e-9):
            said.append(f"{mine.removeprefix('geomon ')}, {best} by {100 * excess:.1f}")
    return "; ".join(said)


def _coverage_table(replicates: int) -> None:
    table = Table(title=f"Coverage of the 95 % interval of twonn_censored, {replicates:,} samples")
    for column in ("points", "N", "d", "coverage, %", "expected, %", "mean / d", "sd / d",
                   "standard error / d", "within 93 to 97"):  # fmt: skip
        table.add_column(column, justify="right")
    generator = torch.Generator().manual_seed(0)
    torch.set_num_threads(1)  # small tensors: a second thread costs more than it brings
    for n in (500, 2000):
        for d in (2, 10, 30):
            samples = (_exact_model(n, d, generator) for _ in range(replicates))
            cells = _coverage(samples, d, _expected(n))
            table.add_row("exact model", f"{n:,}", str(d), *cells)
    for d in (2, 5):
        samples = (_flat_torus(500, d, generator) for _ in range(replicates // 5))
        *cells, _ = _coverage(samples, d, _expected(500))
        table.add_row("uniform, periodic", "500", str(d), *cells, "-")
    console.print(table)
    console.print(
        "expected: from the Gamma distribution of the denominator, for independent ratios, any d. "
        f"The periodic cube ({replicates // 5:,} samples) has no edge and no curvature: it differs "
        "from the exact model in that neighbours' ratios depend on one another"
    )


def _exact_model(n: int, d: int, generator: torch.Generator) -> Tensor:
    mu = torch.rand(n, dtype=torch.float64, generator=generator) ** (-1 / d)
    return torch.stack([torch.ones_like(mu), mu], dim=1)


def _flat_torus(n: int, d: int, generator: torch.Generator) -> Tensor:
    points = torch.rand(n, d, dtype=torch.float64, generator=generator)
    apart = (points[:, None] - points).abs()
    squared = torch.minimum(apart, 1 - apart).square_().sum(dim=-1).fill_diagonal_(torch.inf)
    return squared.topk(2, largest=False).values.sqrt()


def _expected(n: int) -> float:
    """P(|d - estimate| <= 1.96 estimate / sqrt k), where (k - 1) d / estimate is Gamma(k, 1)."""
    kept = int(n * 0.9)
    half = 1.96 / kept**0.5
    low, high = (
        torch.tensor((kept - 1) * side, dtype=torch.float64) for side in (1 - half, 1 + half)
    )
    shape = torch.tensor(float(kept), dtype=torch.float64)
    return (torch.special.gammainc(shape, high) - torch.special.gammainc(shape, low)).item()


def _coverage(samples: Iterable[Tensor], d: int, expected: float) -> list[str]:
    found = torch.stack([torch.stack(tuple(twonn_censored(sample))) for sample in samples])
    value, error = found.T
    covered = ((value - d).abs() <= 1.96 * error).double().mean().item()
    within = "yes" if 0.93 <= covered <= 0.97 else "NO"
    return [
        f"{100 * covered:.1f}", f"{100 * expected:.1f}", f"{value.mean() / d:.4f}",
        f"{value.std() / d:.4f}", f"{error.mean() / d:.4f}", within,
    ]  # fmt: skip


def _robustness_tables(
    peers: dict[str, Estimator], sizes: list[int], largest_for_peers: int
) -> None:
    chosen = {"curled 6 in 36", "heavy tails 8 in 64", "swiss roll"}
    clouds = [Manifold("Gaussian 10 in 64", 10, lambda r, n: gaussian(r, n, 10, 64))]
    clouds += [manifold for manifold in MANIFOLDS if manifold.name in chosen]
    kind = {name: peers[name] for name in SAME_KIND["geomon twonn"] if name in peers}
    estimators: dict[str, Estimator] = {"geomon twonn": geomon_twonn, **kind}
    seen: dict[str, list[tuple[float, str, float, int, str, float]]] = {n: [] for n in estimators}
    for manifold in clouds:
        for n in sizes:
            for share in DUPLICATED:
                clean, order = _duplicated(manifold, n, share)
                truth = _exact_twonn(clean)
                for mean, dtype in DISTURBED:
                    rows = (clean + mean).astype(dtype)[order]
                    for name, estimator in estimators.items():
                        if n <= largest_for_peers or name in GEOMON:
                            moved = estimator(rows) / truth - 1
                            seen[name].append((mean, dtype, share, n, manifold.name, moved))
    table = Table(
        title="Deviation from the clean answer, %: the largest over "
        + ", ".join(manifold.name for manifold in clouds)
    )
    for column in ("mean / spread", "given as", "rows duplicated", "estimator"):
        table.add_column(column)
    for n in sizes:
        table.add_column(f"n = {n:,}", justify="right")
    for mean, dtype in DISTURBED:
        for share in DUPLICATED:
            for name, cells in seen.items():
                here = [c for c in cells if c[:3] == (mean, dtype, share)]
                table.add_row(
                    f"{mean:g}", dtype, f"{share:.0%}", name,
                    *(_largest([c[5] for c in here if c[3] == n]) for n in sizes),
                )  # fmt: skip
            table.add_section()
    console.print(table)
    outside = [c for c in seen["geomon twonn"] if not abs(c[5]) <= TOLERATED]
    count = len(seen["geomon twonn"])
    console.print(f"geomon: {count - len(outside)} of {count} within {TOLERATED:.0%}")
    for mean, dtype, share, n, name, moved in outside:
        console.print(f"  outside: {name}, mean {mean:g} {dtype}, {share:.0%}, {n:,}: {moved:+.1%}")
    for name in kind:
        values = [c[5] for c in seen[name]]
        lost = sum(not math.isfinite(value) for value in values)
        far = sum(abs(value) > TOLERATED for value in values if math.isfinite(value))
        console.print(
            f"{name}: {lost} of {len(values)} NaN or infinite, {far} more outside "
            f"{TOLERATED:.0%} (given the rows as they are, up to n = {largest_for_peers:,})"
        )


def _duplicated(manifold: Manifold, n: int, share: float) -> tuple[Cloud, NDArray[np.int64]]:
    """Distinct rows of spread 1, and the index that makes n rows of them with copies."""
    random = np.random.default_rng(1)
    copies = round(share * n)
    clean = manifold.draw(random, n - copies)
    clean = (clean - clean.mean(axis=0)) / np.sqrt(clean.var(axis=0).mean())
    order = np.concatenate([np.arange(n - copies), random.integers(0, n - copies, copies)])
    return clean, random.permutation(order)


def _exact_twonn(rows: Cloud) -> float:
    """TwoNN written again: distances from float64 differences, and the fit in numpy."""
    from scipy.spatial.distance import cdist

    two = np.concatenate(
        [
            np.partition(cdist(rows[i : i + 256], rows), (1, 2))[:, 1:3]
            for i in range(0, len(rows), 256)
        ]
    )
    kept = int(len(rows) * 0.9)
    x = np.sort(np.log(two[:, 1] / two[:, 0]))[:kept]
    y = -np.log1p(-np.arange(1, kept + 1) / len(rows))
    return float((x @ y) / (x @ x))


def _largest(moved: list[float]) -> str:
    """The largest deviation, signed, and how many were NaN or infinite."""
    if not moved:
        return "-"
    finite = [value for value in moved if math.isfinite(value)]
    text = f"{100 * max(finite, key=abs):+.2f}" if finite else ""
    lost = len(moved) - len(finite)
    return f"{text} ({lost} of {len(moved)} NaN)" if lost else text


if __name__ == "__main__":
    typer.run(main)
