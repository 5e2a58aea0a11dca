"""Compares trainings on many meshes with unwatched twins and with a single process.

OMP_NUM_THREADS=1 python -W ignore -m benchmarks.meshes

Each cell (mesh x model x dropout) is trained twice, with and without a monitor. Three things are
compared: the weights, losses and random states of both trainings; the last reading with a single
process on hidden states and projections that were gathered by hand; and the first reading with a
single process on the whole model, whose forward pass rounds in another way.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from benchmarks.forked import on_ranks
from benchmarks.mesh_models import (
    FAMILIES,
    MESHES,
    MICRO_BATCHES,
    Decoder,
    MeshSpec,
    Outputs,
    Training,
    batch_of,
    gathered_by_hand,
    recorded,
    replayed,
)
from benchmarks.timing import print_machine, print_table
from geomon import METRICS, Memory, Monitor, every
from geomon.capture import ATTENTION_QUERIES, Window, derive_seed, find_anatomy
from geomon.distributed import RankGroup, gather, merge_layers
from geomon.metrics import Evaluator
from geomon.record.columns import tagged

DROPOUTS = (0.0, 0.1)
STEPS, TOKENS = 3, 96
_OF_WEIGHTS = {"weight_norms", "weight_moves", "head_outputs"}  # views that hooks do not record
OF_STATES = {
    name: metric for name, metric in METRICS.items() if _OF_WEIGHTS.isdisjoint(metric.reads)
}


class Found(NamedTuple):
    """Results of one cell, as the first rank saw them.

    Attributes:
        identical: Whether weights, losses and random states of all ranks equal the twin's.
        by_hand: Largest relative difference between the values of the last reading and of a single
            process on the gathered outputs.
        rounding: Largest relative difference between the first reading and a single process with
            the whole model; NaN with dropout, because random numbers differ.
        values: Number of values of a reading.
    """

    identical: bool
    by_hand: float
    rounding: float
    values: int


def run_cell(
    spec: MeshSpec, family: str, dropout: float, metrics: Mapping[str, Any] = OF_STATES,
    *, steps: int = STEPS,
) -> Found | None:  # fmt: skip
    """Run one cell on all ranks; only the first rank returns its results.

    Args:
        spec: The mesh; its size is the number of ranks.
        family: "GPT" or "Llama".
        dropout: Probability of dropout.
        metrics: Metrics of the readings. Defaults to `OF_STATES`.
        steps: Number of steps; the first and the last are read. Defaults to `STEPS`.
    """
    plain, last = _train(Training(spec, family, dropout), steps), steps - 1
    watched, memory = Training(spec, family, dropout), Memory()
    outputs: dict[int, Outputs] = {0: {}, last: {}}
    monitor = Monitor(
        watched.watched, metrics=metrics, tokens=TOKENS, directory=None, sinks=[memory],
        schedule=every(last), strict=True, budget=None,
    )  # fmt: skip
    same = all(map(torch.equal, plain, _train(watched, steps, monitor, outputs)))
    monitor.close()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, same)
    gathered = gathered_by_hand(watched, outputs[last])
    if gathered is None:
        return None
    first_values, last_values = (tagged(reading.stacks) for reading in memory.readings)
    alone = partial(_read_alone, spec, family, dropout, metrics)
    rounding = math.nan if dropout else largest_difference(first_values, alone(None, 0))
    by_hand = largest_difference(last_values, alone(gathered, last))
    return Found(all(everywhere), by_hand, rounding, len(first_values))


def _train(
    training: Training,
    steps: int,
    monitor: Monitor | None = None,
    outputs: Mapping[int, Outputs] | None = None,
) -> list[Tensor]:
    """Train a few steps; returns the weights of this rank, its losses and its random state.

    Args:
        training: The training of this rank.
        steps: Number of steps.
        monitor: Monitor of the training, if any.
        outputs: By step, dict for the outputs of modules.
    """
    training.seed()
    losses = []
    for step in range(steps):
        into = (outputs or {}).get(step)
        with nullcontext() if into is None else recorded(training.parts, into):
            losses += training.step(step, partial(monitor, step) if monitor else nullcontext)
    return [*training.state(), torch.tensor(losses), torch.get_rng_state()]


def _read_alone(
    spec: MeshSpec, family: str, dropout: float, metrics: Mapping[str, Any],
    whole: list[Outputs] | None, step: int,
) -> dict[str, float]:  # fmt: skip
    """Read a single process on the rows that the ranks drew.

    Args:
        spec: The mesh.
        family: "GPT" or "Llama".
        dropout: Probability of dropout, because torch then computes attention in another way.
        metrics: Metrics of the reading.
        whole: Outputs to replay for each data rank, or None to run the untrained model.
        step: The step.
    """
    evaluator = Evaluator(dict(metrics), 1)
    model = Decoder(family, spec.layers, dropout)
    count = MICRO_BATCHES if spec.schedule else 1
    snapshots = []
    for data in range(spec.data):
        own = TOKENS // spec.data + (data < TOKENS % spec.data)
        seed = derive_seed(0, step, data) if data else derive_seed(0, step)
        for number, ids in enumerate(batch_of(data, step).chunk(count)):
            rows = own // count + (number < own % count)
            window = Window(
                find_anatomy(model), evaluator.views, rows=rows,
                seed=derive_seed(seed, "micro-batch", number) if number else seed,
            )  # fmt: skip
            replay = nullcontext() if whole is None else replayed(model, whole[data], number)
            with replay, window:
                model(ids)
            snapshots.append(window.snapshot())
    gathered = gather(
        snapshots, (step, "inline"), RankGroup(), rows=TOKENS, queries=ATTENTION_QUERIES
    )
    layers = [merge_layers(parts) for parts in gathered.parts]
    return tagged(evaluator.evaluate(layers, TOKENS).stacks)


def largest_difference(values: Mapping[str, float], others: Mapping[str, float]) -> float:
    """Return the largest relative difference of values; infinite if one side lacks some.

    Args:
        values: Values by tag.
        others: Values to compare with.
    """
    if values.keys() != others.keys():
        return math.inf
    known = {tag: x for tag, x in values.items() if not (math.isnan(x) and math.isnan(others[tag]))}
    found = [abs(x - others[tag]) / max(abs(others[tag]), 1e-3) for tag, x in known.items()]
    return max([0.0, *(math.inf if math.isnan(each) else each for each in found)])


def _rows(meshes: list[MeshSpec]) -> Iterator[tuple[str, ...]]:
    for spec in meshes:
        cells = [
            on_ranks(spec.size, run_cell, spec, family, dropout)[0]
            for family in FAMILIES
            for dropout in DROPOUTS
        ]
        yield (
            str(spec),
            f"{sum(found.identical for found in cells)} of {len(cells)}",
            f"{max(found.by_hand for found in cells):.1g}",
            f"{max(x.rounding for x in cells if not math.isnan(x.rounding)):.1g}",
            str(max(found.values for found in cells)),
        )


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Meshes of so many ranks alone.")] = None,
) -> None:
    """Compare readings of every mesh with a single process, and trainings with their twins."""
    for name in ("geomon", "torch.distributed.pipelining"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    print_table(
        "Two models, with and without dropout: trainings as without, and the largest relative "
        "differences of values",
        ("mesh", "identical", "by hand", "one process", "values"),
        _rows([spec for spec in MESHES if not ranks or spec.size in ranks]),
    )
    print_machine("one thread to a rank")


if __name__ == "__main__":
    typer.run(main)
