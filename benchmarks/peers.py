"""Cost and accuracy of an intrinsic dimension, compared with other packages.

From rows to the value, of all rows, on one thread; all packages take turns. TwoNN, Gride and the
maximum likelihood of Levina and Bickel need 2, 64 and 20 neighbours. A value counts as right within
0.5 % of float64 distances between the distinct rows, centred first. See README.md.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.accuracy import Rows, installed, quiet
from benchmarks.cost import Training
from benchmarks.timing import print_machine, print_table
from geomon import geometry
from geomon.kernels.dimension import gride, twonn
from geomon.kernels.neighbours import copies_of, nearest, unique_rows
from recipes.enwik8.text import load
from support.definitions import distances

CLOUDS = ((2048, 64), (4096, 128), (4096, 768))
CONTEXT = 64
NEIGHBOURS = 20  # of the maximum likelihood
RIGHT = 0.005
# Added to trained hidden states, and how many of 4,096 rows copy another.
OFFSET, COPIES = 1000, 72
# Runs that warm up, in which geomon tries both of its searches.
_FIRST = 10

Estimator = Callable[[Rows], float]


def _levina_bickel(near: Tensor) -> float:
    """Combine the local estimates by the mean of their inverses (MacKay and Ghahramani)."""
    logs = (near[:, NEIGHBOURS - 1, None] / near[:, : NEIGHBOURS - 1]).log()
    return 1 / logs.mean(dim=1).mean().item()


# By name: number of neighbours, and the estimate from their distances.
ESTIMATES: dict[str, tuple[int, Callable[[Tensor], float]]] = {
    "TwoNN": (2, lambda near: twonn(near).value.item()),
    "Gride, k = 32": (64, lambda near: gride(near)[-1].item()),
    "maximum likelihood": (NEIGHBOURS, _levina_bickel),
}


def _geomon(estimate: str) -> Estimator:
    count, value = ESTIMATES[estimate]

    def answer(rows: Rows) -> float:
        points = torch.from_numpy(rows)
        return value(nearest(points, count, among=unique_rows(copies_of(points))).distances)

    return answer


def _torch(estimate: str) -> Estimator:
    count, value = ESTIMATES[estimate]

    def answer(rows: Rows) -> float:
        points = torch.from_numpy(rows)
        near = torch.cdist(points, points).topk(count + 1, largest=False).values[:, 1:]
        return value(near)

    return answer


def _dadapy(estimate: str) -> Estimator:
    from dadapy import Data

    def answer(rows: Rows) -> float:
        count = ESTIMATES[estimate][0]
        data = Data(coordinates=rows, maxk=count, n_jobs=1)
        if count == 2:
            return float(data.compute_id_2NN()[0])
        return float(data.return_id_scaling_gride(range_max=count)[0][-1])

    return answer


def _scikit(estimate: str) -> Estimator:
    from skdim.id import MLE, TwoNN

    if estimate == "TwoNN":
        return lambda rows: TwoNN(discard_fraction=0.1).fit(rows).dimension_
    return lambda rows: MLE().fit(rows, n_neighbors=NEIGHBOURS).dimension_


def _torchid(estimate: str) -> Estimator:
    from torchid.functional import mle_id, twonn_id

    found = twonn_id if estimate == "TwoNN" else partial(mle_id, n_neighbors=NEIGHBOURS)
    return lambda rows: found(torch.from_numpy(rows)).item()


def _fastwonn(estimate: str) -> Estimator:
    from fastwonn import twonn_id

    return lambda rows: twonn_id(torch.from_numpy(rows)).item()


# By estimate and package. `geometry` measures all its metrics, TwoNN from 1,024 of the rows.
PEERS: dict[str, dict[str, Callable[[], Estimator]]] = {
    "TwoNN": {
        "geomon": lambda: _geomon("TwoNN"),
        "geometry, all metrics": lambda: lambda rows: geometry(rows)["twonn"],
        "geometry, twonn": lambda: lambda rows: geometry(rows, metrics=["twonn"])["twonn"],
        "torch.cdist": lambda: _torch("TwoNN"),
        "torchid": lambda: _torchid("TwoNN"),
        "fastwonn": lambda: _fastwonn("TwoNN"),
        "DADApy": lambda: _dadapy("TwoNN"),
        "scikit-dimension": lambda: _scikit("TwoNN"),
    },
    "Gride, k = 32": {
        "geomon": lambda: _geomon("Gride, k = 32"),
        "torch.cdist": lambda: _torch("Gride, k = 32"),
        "DADApy": lambda: _dadapy("Gride, k = 32"),
    },
    "maximum likelihood": {
        "geomon": lambda: _geomon("maximum likelihood"),
        "torch.cdist": lambda: _torch("maximum likelihood"),
        "torchid": lambda: _torchid("maximum likelihood"),
        "scikit-dimension": lambda: _scikit("maximum likelihood"),
    },
}


def _cloud(rows: int, width: int) -> Rows:
    """Draw rows whose variance falls over the directions, as in hidden states."""
    spread = np.arange(1, width + 1) ** -0.5
    drawn = np.random.default_rng(0).standard_normal((rows, width)) * spread
    return drawn.astype(np.float32)


def _trained(steps: int) -> Rows:
    """Train the recipe's model, and return 4,096 far hidden states, some of them twice."""
    corpus, training = load(), Training(4, 128, CONTEXT, rate=1e-3)
    text, places = torch.from_numpy(corpus.train).long(), torch.arange(CONTEXT)
    for _ in range(steps):
        training.step(text[torch.randint(len(text) - CONTEXT, (16, 1)) + places])
    ids = torch.from_numpy(corpus.validation[: 64 * CONTEXT]).long().view(64, -1)
    with torch.no_grad():
        states = training.model.eval()(input_ids=ids, output_hidden_states=True).hidden_states
    rows = states[2].flatten(0, 1) + OFFSET
    rows[:COPIES] = rows[-COPIES:]
    return rows.numpy()


def _truth(rows: Rows) -> dict[str, float]:
    exact = rows.astype(np.float64)
    exact = np.unique(exact - exact.mean(axis=0), axis=0)
    near = torch.from_numpy(distances(exact))
    return {name: value(near) for name, (_, value) in ESTIMATES.items()}


def _compared(name: str, rows: Rows, runs: int) -> list[tuple[object, ...]]:
    """Return one row per estimate and package: value, time, and time over geomon's."""
    truth, lines = _truth(rows), []
    for estimate, makers in PEERS.items():
        estimators = {each: quiet(found) for each, found in installed(makers).items()}
        taken: dict[str, list[float]] = {each: [] for each in estimators}
        values = {}
        for _ in range(_FIRST + runs):
            for each, estimator in estimators.items():
                began = time.process_time()
                values[each] = estimator(rows)
                taken[each].append(time.process_time() - began)
        own = min(taken["geomon"][_FIRST:])
        for each, times in taken.items():
            error = values[each] / truth[estimate] - 1
            of_some = each.startswith("geometry")
            words = (
                "of 1,024 rows" if of_some else "right" if abs(error) < RIGHT else f"{error:+.1%}"
            )
            least = min(times[_FIRST:])
            lines.append((
                name, estimate, each, f"{values[each]:.4f}",
                "none" if math.isnan(error) else words, f"{1e3 * least:.0f}", f"{least / own:.2f}",
            ))  # fmt: skip
    return lines


def main(
    runs: Annotated[int, typer.Option(help="Timed runs of each, of which the fastest counts.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps of the training of the hidden states.")] = 600,
) -> None:
    """Print one table of values and times."""
    torch.set_num_threads(1)
    inputs = {f"{rows:,} x {width}": partial(_cloud, rows, width) for rows, width in CLOUDS}
    inputs[f"trained, + {OFFSET:,}, {COPIES} copies"] = partial(_trained, steps)
    print_table(
        "Intrinsic dimension of all rows, one thread",
        ("rows", "estimate", "package", "value", "", "ms", "over geomon"),
        (line for name, make in inputs.items() for line in _compared(name, make(), runs)),
    )
    print_machine("one thread: set OMP_NUM_THREADS=1", f"least of {runs}, processor time")


if __name__ == "__main__":
    typer.run(main)
