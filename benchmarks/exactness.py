"""Neighbours of hard inputs held to differences of all pairs in float64: none may be wrong.

Each input is searched four times: as geomon chooses, by lower bounds in a few random coordinates,
and by 8-bit integers of all coordinates and of the leading half, which most of these small inputs
would not get by themselves.
"""

import time
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from geomon.kernels import certified, quantised
from geomon.kernels._candidates import distances_to
from geomon.kernels.neighbours import Neighbours, nearest

# Both sides subtract the same numbers and differ in the order of a sum of squares alone.
TOLERANCE = 1e-12

console = Console(width=120)


@dataclass
class Tally:
    """What came of the inputs of one kind."""

    inputs: int = 0
    rows: int = 0
    certified: int = 0
    by_integers: int = 0
    by_few: int = 0
    wrong: int = 0
    others: int = 0
    largest: float = 0.0


def main(
    inputs: Annotated[int, typer.Option(help="Random inputs.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the first input.")] = 0,
) -> None:
    """Search the neighbours of random hard inputs, and count the rows that are wrong."""
    tallies = {kind: Tally() for kind in KINDS}
    began = time.perf_counter()
    for number in range(seed, seed + inputs):
        random = np.random.default_rng(number)
        kind = list(KINDS)[number % len(KINDS)]
        rows = KINDS[kind](random)
        k = int(random.choice([1, 2, 8, 64]))
        tally = tallies[kind]
        tally.inputs += 1
        tally.rows += len(rows)
        named = _named(rows, k)
        few, count = _by_lower_bounds(rows, k)
        tally.certified += count
        integers, count = _by_integers(rows, k)
        tally.by_integers += count
        leading, count = _by_few_integers(rows, k)
        tally.by_few += count
        for got in (nearest(rows, k), few, integers, leading):
            error = largest_error(rows, got)
            tally.wrong += int((error > TOLERANCE).sum())
            tally.largest = max(tally.largest, float(error.max()))
            tally.others += int((got.indices != named).any(dim=1).sum())
    table = Table(title=f"Neighbours of {inputs:,} inputs from seed {seed}")
    columns = (
        "inputs", "n", "rows", "certified", "by integers", "of half", "wrong rows",
        "other indices", "largest relative error",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "inputs" else "right")
    for kind, tally in tallies.items():
        table.add_row(
            kind, f"{tally.inputs:,}", f"{tally.rows:,}", f"{tally.certified / tally.rows:.0%}",
            f"{tally.by_integers / tally.rows:.0%}", f"{tally.by_few / tally.rows:.0%}",
            f"{tally.wrong:,}", f"{tally.others:,}", f"{tally.largest:.1e}",
        )  # fmt: skip
    console.print(table)
    console.print(f"{time.perf_counter() - began:.0f} s")
    raise typer.Exit(int(any(tally.wrong + tally.others for tally in tallies.values())))


def largest_error(rows: Tensor, got: Neighbours) -> Tensor:
    """Compare distances, and the pairs that the indices name, with all pairs, [tokens].

    Args:
        rows: Rows, [tokens, width].
        got: Their neighbours.
    """
    exact = rows.double()
    pairs = torch.cdist(exact, exact, compute_mode="donot_use_mm_for_euclid_dist")
    pairs.fill_diagonal_(torch.inf)  # a row that is its own neighbour has an infinite error
    want = pairs.topk(got.distances.shape[1], dim=1, largest=False).values
    named = pairs.gather(1, got.indices)
    off = torch.stack([(got.distances - want).abs(), (named - want).abs()]).amax(dim=0)
    return torch.where(off == 0, 0.0, off / want).amax(dim=1)


def _named(rows: Tensor, k: int) -> Tensor:
    """Name the nearest by differences of all pairs, those at one distance in order of the index."""
    everyone = torch.arange(len(rows))
    apart = [distances_to(rows, part, everyone.expand(len(part), -1), 1.0)
             for part in everyone.split(64)]  # fmt: skip
    return torch.cat(apart).sort(dim=1, stable=True).indices[:, : min(k, len(rows) - 1)]


def _by_lower_bounds(rows: Tensor, k: int) -> tuple[Neighbours, int]:
    """Search by lower bounds in half as many coordinates, and count the rows certified."""
    width = rows.shape[1]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(width, (width + 1) // 2, generator=generator, dtype=torch.float64)
    plan = certified.Plan(torch.linalg.qr(start).Q, 3 * k + 20, 0.0)
    choose, pays = certified.choose, quantised.pays
    certified.choose, quantised.pays = lambda *_: plan, lambda *_: False
    try:
        return _counted(certified, rows, k)
    finally:
        certified.choose, quantised.pays = choose, pays


def _by_integers(rows: Tensor, k: int) -> tuple[Neighbours, int]:
    """Search by 8-bit integers wherever there are enough rows, and count the rows certified."""
    pays = quantised.pays
    quantised.pays = lambda points, width, wanted, k: quantised.fits(points, width, k)
    try:
        return _counted(quantised, rows, k)
    finally:
        quantised.pays = pays


def _by_few_integers(rows: Tensor, k: int) -> tuple[Neighbours, int]:
    """Search by 8-bit integers of the leading half of the coordinates."""
    directions = quantised._directions

    def leading(values: Tensor, wanted: int, k: int) -> Tensor:
        del wanted, k
        count = max(1, min(values.shape) // 2)
        return certified.leading(values, count, torch.Generator().manual_seed(0))

    quantised._directions = leading
    try:
        return _by_integers(rows, k)
    finally:
        quantised._directions = directions


def _counted(module: ModuleType, rows: Tensor, k: int) -> tuple[Neighbours, int]:
    """Count the rows that the search of a module certifies."""
    counts: list[int] = []
    search = module.search

    def counting(*given: Any) -> certified.Certified:
        found: certified.Certified = search(*given)
        counts.append(int(found.certain.sum()))
        return found

    module.search = counting
    try:
        return nearest(rows, k), sum(counts)
    finally:
        module.search = search


def _size(random: np.random.Generator) -> tuple[int, int]:
    """Rows and width."""
    if random.random() < 0.25:
        return int(random.integers(1024, 1600)), int(random.integers(192, 320))
    return int(random.integers(2, 900)), int(2 ** random.uniform(0, 8))


def _cloud(random: np.random.Generator) -> Tensor:
    tokens, width = _size(random)
    decay = np.arange(1, width + 1) ** -random.uniform(0, 1.5)
    return torch.from_numpy(random.standard_normal((tokens, width)) * decay)


def _near_duplicates(random: np.random.Generator) -> Tensor:
    """Groups of 3 to 200 rows at 1e-4 to 1e-12 of the distance between groups."""
    centres = _cloud(random)
    size = int(random.integers(3, 201))
    groups = centres[: max(2, len(centres) // size)].repeat_interleave(size, dim=0)
    noise = torch.from_numpy(random.standard_normal(groups.shape))
    rows = groups + 10 ** random.uniform(-12, -4) * noise
    return rows[torch.from_numpy(random.permutation(len(rows)))]


def _massive(random: np.random.Generator) -> Tensor:
    """A few rows or many, alike and 10 to 1e8 times as long as the others."""
    rows = _cloud(random)
    count = int(random.integers(1, max(2, len(rows) // 2)))
    direction = torch.from_numpy(random.standard_normal(rows.shape[1]))
    rows[:count] *= 10 ** random.uniform(-3, 1)
    rows[:count] += 10 ** random.uniform(1, 8) * direction
    return rows


def _offset(random: np.random.Generator) -> Tensor:
    return _cloud(random) + 10 ** random.uniform(0, 8)


def _ties(random: np.random.Generator) -> Tensor:
    """Points of a lattice: many equal distances, and copies."""
    return (_cloud(random) * random.integers(1, 8)).round() + float(random.integers(0, 100))


def _single(random: np.random.Generator) -> Tensor:
    """Near-duplicates, offset and massive rows together, captured in float32 or bfloat16."""
    rows = _near_duplicates(random) + 10 ** random.uniform(-2, 3)
    rows[:3] *= 10 ** random.uniform(0, 4)
    return rows.to(torch.float32 if random.random() < 0.5 else torch.bfloat16)


KINDS = {
    "clouds": _cloud,
    "near-duplicates": _near_duplicates,
    "massive rows": _massive,
    "offsets": _offset,
    "ties": _ties,
    "float32 and bfloat16": _single,
}


if __name__ == "__main__":
    typer.run(main)
