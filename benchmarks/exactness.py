"""Neighbours of hard inputs held to differences of all pairs in float64: none may be wrong.

Each input is searched twice: with FAISS, and as where FAISS is missing.
"""

import time
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from geomon.kernels import neighbours
from geomon.kernels.neighbours import Neighbours, nearest

# Both sides subtract the same numbers and differ in the order of a sum of squares alone.
TOLERANCE = 1e-12

console = Console(width=120)


@dataclass
class Tally:
    """What came of the inputs of one kind."""

    inputs: int = 0
    rows: int = 0
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
        want = all_pairs(rows, k)
        for got in (nearest(rows, k), _without_faiss(rows, k)):
            error = largest_error(rows, got, want)
            tally.wrong += int((error > TOLERANCE).sum())
            tally.largest = max(tally.largest, float(error.max()))
            tally.others += int((got.indices != want.indices).any(dim=1).sum())
    table = Table(title=f"Neighbours of {inputs:,} inputs from seed {seed}")
    columns = ("inputs", "n", "rows", "wrong rows", "other indices", "largest relative error")
    for column in columns:
        table.add_column(column, justify="left" if column == "inputs" else "right")
    for kind, tally in tallies.items():
        table.add_row(
            kind, f"{tally.inputs:,}", f"{tally.rows:,}",
            f"{tally.wrong:,}", f"{tally.others:,}", f"{tally.largest:.1e}",
        )  # fmt: skip
    console.print(table)
    console.print(f"{time.perf_counter() - began:.0f} s")
    raise typer.Exit(int(any(tally.wrong + tally.others for tally in tallies.values())))


def all_pairs(rows: Tensor, k: int) -> Neighbours:
    """Find the nearest by differences of all pairs, those at one distance in order of the index.

    Args:
        rows: Rows, [tokens, width].
        k: Number of neighbours.
    """
    exact = rows.double()
    pairs = torch.cat([torch.linalg.vector_norm(exact - row, dim=1)[None] for row in exact])
    near = pairs.fill_diagonal_(torch.inf).sort(dim=1, stable=True)
    count = min(k, len(rows) - 1)
    return Neighbours(near.values[:, :count], near.indices[:, :count])


def largest_error(rows: Tensor, got: Neighbours, want: Neighbours) -> Tensor:
    """Compare distances, and those of the pairs that the indices name, with all pairs, [tokens].

    Args:
        rows: Rows, [tokens, width].
        got: Their neighbours.
        want: Their neighbours by all pairs.
    """
    exact = rows.double()
    named = torch.stack([torch.linalg.vector_norm(exact[near] - row, dim=1)
                         for row, near in zip(exact, got.indices, strict=True)])  # fmt: skip
    named[(got.indices == torch.arange(len(rows))[:, None]).nonzero(as_tuple=True)] = torch.inf
    off = torch.maximum((got.distances - want.distances).abs(), (named - want.distances).abs())
    return torch.where(off == 0, 0.0, off / want.distances).amax(dim=1)


def _without_faiss(rows: Tensor, k: int) -> Neighbours:
    """Search in torch alone."""
    library, neighbours.faiss = neighbours.faiss, None
    try:
        return nearest(rows, k)
    finally:
        neighbours.faiss = library


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
    """Groups of 3 to 200 rows at 1e-2 to 1e-12 of the distance between groups, some off centre."""
    centres = _cloud(random)
    size = int(random.integers(3, 201))
    groups = centres[: max(2, len(centres) // size)].repeat_interleave(size, dim=0)
    noise = torch.from_numpy(random.standard_normal(groups.shape))
    rows = groups + 10 ** random.uniform(-12, -2) * noise + 50 * float(random.integers(0, 2))
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
