"""Compares trainings on many meshes with unwatched twins and with a single process.

OMP_NUM_THREADS=1 python -W ignore -m benchmarks.meshes

Each cell (mesh x model x dropout) is trained twice, with and without a monitor. Three things are
compared: the weights, losses and random states of both trainings; the last reading with a single
process on hidden states and projections that were gathered by hand; and the first reading with a
single process on the whole model. The last comparison includes the rounding of the distributed
forward pass, which is also measured on the hidden states themselves.

Then, in each mesh, one rank is late for a reading, and one is lost before it.
"""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from benchmarks.forked import on_ranks
from benchmarks.mesh_models import (
    FAMILIES,
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
from geomon import METRICS, Memory, Monitor, every, select
from geomon.capture import ATTENTION_QUERIES, Window, derive_seed, find_anatomy
from geomon.distributed import RankGroup, gather, merge_layers
from geomon.metrics import Evaluator
from geomon.record.columns import tagged

MESHES = (
    MeshSpec(tensor=2),
    MeshSpec(tensor=2, hidden="sequence"),
    MeshSpec(tensor=2, hidden="DTensor"),
    MeshSpec(pipeline=2, schedule="GPipe"),
    MeshSpec(pipeline=2, schedule="1F1B"),
    MeshSpec(pipeline=2, schedule="interleaved"),
    MeshSpec(data=2, tensor=2, wrap="DDP"),
    MeshSpec(data=2, tensor=2, wrap="FSDP2"),
    MeshSpec(data=2, tensor=2, wrap="FSDP2", hidden="sequence"),
    MeshSpec(data=2, pipeline=2, wrap="DDP", schedule="1F1B"),
    MeshSpec(data=2, pipeline=2, wrap="FSDP2", schedule="interleaved"),
    MeshSpec(pipeline=2, tensor=2, schedule="GPipe"),
    MeshSpec(pipeline=2, tensor=2, schedule="1F1B", hidden="sequence"),
    MeshSpec(pipeline=2, tensor=2, schedule="interleaved", hidden="DTensor"),
    MeshSpec(tensor=4, hidden="sequence"),
    MeshSpec(pipeline=4, schedule="interleaved"),
    MeshSpec(data=2, pipeline=2, tensor=2, wrap="DDP", schedule="1F1B"),
    MeshSpec(data=2, pipeline=2, tensor=2, wrap="FSDP2", schedule="1F1B", hidden="sequence"),
    MeshSpec(data=2, pipeline=2, tensor=2, wrap="FSDP2", schedule="interleaved"),
    MeshSpec(data=4, tensor=2, wrap="FSDP2", hidden="DTensor"),
)
DROPOUTS = (0.0, 0.1)
STEPS, TOKENS = 3, 96
# Weights are left out, because hooks do not record them.
OF_STATES = {name: metric for name, metric in METRICS.items() if name != "weight_norm"}
_FIRST, _LAST = 0, 2  # steps that are read
_PATIENCE, _LATE = 1.5, 2.5  # seconds that ranks wait for another, and seconds that one is late


class Found(NamedTuple):
    """Results of one cell, as the first rank saw them.

    Attributes:
        identical: Whether weights, losses and random states of all ranks equal the twin's.
        by_hand: Largest relative difference between the values of the last reading and of a single
            process on the gathered outputs.
        rounding: Largest relative difference between the first reading and a single process with
            the whole model; NaN with dropout, because random numbers differ.
        forward: Largest difference between gathered hidden states of the first reading and a single
            process, relative to the largest entry; NaN with dropout.
        values: Number of values of a reading.
    """

    identical: bool
    by_hand: float
    rounding: float
    forward: float
    values: int


def run_cell(
    spec: MeshSpec,
    family: str,
    dropout: float,
    metrics: Mapping[str, Any] = OF_STATES,
) -> Found | None:
    """Run one cell on all ranks; only the first rank returns its results.

    Args:
        spec: The mesh; its size is the number of ranks.
        family: "GPT" or "Llama".
        dropout: Probability of dropout.
        metrics: Metrics of the readings. Defaults to `OF_STATES`.
    """
    plain = _train(Training(spec, family, dropout))
    watched, memory = Training(spec, family, dropout), Memory()
    outputs: dict[int, Outputs] = {_FIRST: {}, _LAST: {}}
    monitor = Monitor(
        watched.watched, metrics=metrics, tokens=TOKENS, directory=None, sinks=[memory],
        schedule=every(_LAST), strict=True, budget=None,
    )  # fmt: skip
    end = _train(watched, monitor, outputs)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, _is_same(plain, end))
    first, last = (gathered_by_hand(watched, outputs[step]) for step in (_FIRST, _LAST))
    monitor.close()
    if first is None or last is None:
        return None
    readings = [tagged(reading.stacks) for reading in memory.readings]
    rounding = forward = math.nan
    if not dropout:
        alone = _read_alone(spec, family, dropout, None, _FIRST, metrics)
        rounding = largest_difference(readings[0], alone)
        forward = _rounding_of_forward(spec, family, first)
    return Found(
        identical=all(everywhere),
        by_hand=largest_difference(
            readings[-1], _read_alone(spec, family, dropout, last, _LAST, metrics)
        ),
        rounding=rounding,
        forward=forward,
        values=len(readings[0]),
    )


class _End(NamedTuple):
    """State of a training at its end on this rank."""

    weights: list[Tensor]
    losses: list[float]
    random: Tensor


def _is_same(end: _End, other: _End) -> bool:
    same = all(map(torch.equal, end.weights, other.weights))
    return same and end.losses == other.losses and torch.equal(end.random, other.random)


def _train(
    training: Training,
    monitor: Monitor | None = None,
    outputs: Mapping[int, Outputs] | None = None,
    then: Mapping[int, float] | None = None,
) -> _End:
    """Train a few steps.

    Args:
        training: The training of this rank.
        monitor: Monitor of the training, if any.
        outputs: By step, dict for the outputs of modules.
        then: By step, the seconds that this rank sleeps before it reads.
    """

    @contextmanager
    def around(step: int) -> Iterator[None]:
        with nullcontext() if monitor is None else monitor(step):
            yield
            time.sleep((then or {}).get(step, 0.0))

    training.seed()
    losses = []
    for step in range(STEPS):
        into = (outputs or {}).get(step)
        with nullcontext() if into is None else recorded(training.parts, into):
            losses += training.step(step, partial(around, step))
    return _End(training.state(), losses, torch.get_rng_state())


def _rounding_of_forward(spec: MeshSpec, family: str, whole: Sequence[Outputs]) -> float:
    """Compare gathered hidden states with a single process."""
    model, found = Decoder(family, spec.layers), 0.0
    for data, outputs in enumerate(whole):
        alone: Outputs = {}
        with recorded([model], alone), torch.no_grad():
            for ids in batch_of(data, _FIRST).chunk(MICRO_BATCHES if spec.schedule else 1):
                model(ids)
        for name in model.blocks:
            for made, other in zip(outputs[name], alone[name], strict=True):
                found = max(found, float((made - other).abs().max() / other.abs().max()))
    return found


def _read_alone(
    spec: MeshSpec,
    family: str,
    dropout: float,
    whole: list[Outputs] | None,
    step: int,
    metrics: Mapping[str, Any],
) -> dict[str, float]:
    """Read a single process on the rows that the ranks drew.

    Args:
        spec: The mesh.
        family: "GPT" or "Llama".
        dropout: Probability of dropout, because torch then computes attention in another way.
        whole: Outputs to replay for each data rank, or None to run the untrained model.
        step: The step.
        metrics: Metrics of the reading.
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
    largest = 0.0
    for tag, value in values.items():
        if math.isnan(value) and math.isnan(others[tag]):
            continue
        difference = abs(value - others[tag]) / max(abs(others[tag]), 1e-3)
        largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest


# -- ranks that are late or lost -------------------------------------------------------------------


def run_late(spec: MeshSpec) -> tuple[bool, list[int]]:
    """Let the last rank be late for the second reading.

    Args:
        spec: The mesh.

    Returns:
        Whether the training ends on this rank like its unwatched twin, and the steps with readings.
    """
    plain = _train(Training(spec, "Llama", 0.1))
    watched, memory = Training(spec, "Llama", 0.1), Memory()
    monitor = _patient(watched, memory)
    is_late = dist.get_rank() == spec.size - 1
    end = _train(watched, monitor, then={1: _LATE} if is_late else None)
    monitor.close()
    return _is_same(plain, end), [reading.step for reading in memory.readings]


def run_lost(spec: MeshSpec, watch: bool) -> tuple[str, float, list[int]]:
    """Let the last rank end between the second forward pass and its reading.

    Args:
        spec: The mesh.
        watch: Whether a monitor watches.

    Returns:
        The end of the training on this rank, its time, and the steps with readings.
    """
    training, memory = Training(spec, "Llama", 0.1), Memory()
    monitor = _patient(training, memory, rank_timeout=60.0) if watch else None
    training.seed()
    began = time.perf_counter()

    @contextmanager
    def around(step: int) -> Iterator[None]:
        with nullcontext() if monitor is None else monitor(step):
            yield
            if step == 1 and dist.get_rank() == spec.size - 1:
                os._exit(0)

    how = "ends"
    for step in range(50):
        try:
            training.step(step, partial(around, step))
        except Exception as error:
            how = type(error).__name__
            break
    seconds = time.perf_counter() - began
    if monitor is not None:
        monitor.close()
    return how, seconds, [reading.step for reading in memory.readings]


def _patient(training: Training, memory: Memory, rank_timeout: float = _PATIENCE) -> Monitor:
    return Monitor(
        training.watched, metrics=select("variance", "attention_entropy"), tokens=TOKENS,
        directory=None, sinks=[memory], schedule=every(1), budget=None, rank_timeout=rank_timeout,
    )  # fmt: skip


# -- tables ----------------------------------------------------------------------------------------


def _rows(meshes: Sequence[MeshSpec]) -> Iterator[tuple[str, ...]]:
    for spec in meshes:
        cells = [
            found
            for family in FAMILIES
            for dropout in DROPOUTS
            if (found := on_ranks(spec.size, run_cell, spec, family, dropout)[0]) is not None
        ]
        without = [found for found in cells if not math.isnan(found.forward)]
        yield (
            str(spec),
            f"{sum(found.identical for found in cells)} of {len(cells)}",
            f"{max(found.by_hand for found in cells):.1g}",
            f"{max(found.rounding for found in without):.1g}",
            f"{max(found.forward for found in without):.1g}",
            str(max(found.values for found in cells)),
        )


def _late_and_lost(meshes: Sequence[MeshSpec]) -> Iterator[tuple[str, ...]]:
    for spec in meshes:
        late = on_ranks(spec.size, run_late, spec)
        lost = [
            [
                found
                for found in on_ranks(spec.size, run_lost, spec, watch, together=False)
                if found is not None
            ]
            for watch in (False, True)
        ]
        without, watched = ({how for how, *_ in found} for found in lost)
        slowest = [max(seconds for _, seconds, _ in found) for found in lost]
        yield (
            str(spec),
            f"{sum(same for same, _ in late)} of {spec.size}",
            " and ".join(map(str, late[0][1])),
            f"{', '.join(sorted(without))} ({len(lost[0])}), {slowest[0]:.1f}",
            f"{', '.join(sorted(watched))} ({len(lost[1])}), {slowest[1]:.1f}",
            " and ".join(map(str, lost[1][0][2])),
        )


def main(
    ranks: Annotated[list[int] | None, typer.Option(help="Meshes of so many ranks alone.")] = None,
    values: Annotated[bool, typer.Option(help="Compare values and trainings.")] = True,
    failures: Annotated[bool, typer.Option(help="Late and lost ranks.")] = True,
) -> None:
    """Compare readings of every mesh with a single process, and trainings with their twins."""
    for name in ("geomon", "torch.distributed.pipelining"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    meshes = [spec for spec in MESHES if not ranks or spec.size in ranks]
    if values:
        print_table(
            "Two models, with and without dropout: training as without, and the largest relative "
            "differences of values, and of hidden states",
            ("mesh", "identical", "by hand", "one process", "its forward", "values"),
            _rows(meshes),
        )
    if failures:
        print_table(
            "One rank is late for the second reading; one is lost before it",
            ("mesh", "identical", "read", "lost: without, s", "lost: with, s", "read"),
            _late_and_lost(meshes),
        )
    print_machine("one thread to a rank")


if __name__ == "__main__":
    typer.run(main)
