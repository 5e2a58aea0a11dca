"""Meshes: trainings that are shared out in any way, beside unwatched twins and one process.

python -m benchmarks.meshes

Each cell (mesh x model x dropout) is trained twice, with and without a monitor. Compared are the
weights, losses and random states of both; the last reading with that of one process on hidden
states and projections that were gathered by hand; and the first one with that of one process that
has the whole model, from which it differs by the rounding of the forward pass that is shared out.
"""

import math
import statistics
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.mesh_models import (
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
from geomon import METRICS, Memory, Monitor, every
from geomon.capture import QUERIES, Window, derive_seed, find_anatomy
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
_FIRST, _LAST = 0, 2  # steps that are read


class Found(NamedTuple):
    """What one cell has shown, as the first rank saw it.

    Attributes:
        identical: Whether weights, losses and random states of all ranks are those of the twin.
        by_hand: Largest relative difference between the values of the last reading and those of one
            process on what was gathered by hand.
        rounding: The same of the first reading and one process with the whole model; NaN with
            dropout, whose random numbers differ.
        values: Number of values of a reading.
        calls: Collectives of one reading.
        sent: Bytes that all ranks sent in one reading.
        seconds: Time of a reading.
    """

    identical: bool
    by_hand: float
    rounding: float
    values: int
    calls: int
    sent: int
    seconds: float


def run_cell(
    spec: MeshSpec,
    family: str,
    dropout: float,
    metrics: Mapping[str, Any] = METRICS,
) -> Found | None:
    """Run one cell on all ranks; returns what it has shown on the first one.

    Args:
        spec: The mesh; there are as many ranks.
        family: "GPT" or "Llama".
        dropout: Probability of dropout.
        metrics: Metrics of the readings.
    """
    plain = _train(Training(spec, family, dropout), None)
    watched, memory, outputs = Training(spec, family, dropout), Memory(), Outputs()
    monitor = Monitor(
        watched.watched, metrics=metrics, tokens=TOKENS, directory=None, sinks=[memory],
        schedule=every(_LAST), strict=True, budget=None,
    )  # fmt: skip
    before = monitor.communication
    end = _train(watched, monitor, outputs)
    calls, sent = (now - then for now, then in zip(monitor.communication, before, strict=True))
    identical = plain.keys() == end.keys() and all(map(torch.equal, plain["w"], end["w"]))
    identical = identical and plain["losses"] == end["losses"]
    identical = identical and torch.equal(plain["random"], end["random"])
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (identical, sent))
    whole = gathered_by_hand(watched, outputs)
    monitor.close()
    if whole is None:
        return None
    readings = [tagged(reading.stacks) for reading in memory.readings]
    alone = _read_alone(spec, family, dropout, whole, _LAST, metrics)
    rounding = math.nan
    if not dropout:
        rounding = largest_difference(
            readings[0], _read_alone(spec, family, dropout, None, _FIRST, metrics)
        )
    return Found(
        identical=all(same for same, _ in everywhere),
        by_hand=largest_difference(readings[-1], alone),
        rounding=rounding,
        values=len(readings[0]),
        calls=calls // len(readings),
        sent=sum(sent for _, sent in everywhere) // len(readings),
        seconds=statistics.median(reading.seconds for reading in memory.readings),
    )


def _train(
    training: Training, monitor: Monitor | None, outputs: Outputs | None = None
) -> dict[str, Any]:
    """Train a few steps; in the last one that is read, outputs are recorded."""
    training.seed()
    losses = []
    for step in range(STEPS):
        around = nullcontext if monitor is None else partial(monitor, step)
        keeps = outputs is not None and step == _LAST
        with recorded(training.parts, outputs) if keeps else nullcontext():
            losses += training.step(step, around)
    return {"w": training.state(), "losses": losses, "random": torch.get_rng_state()}


def _read_alone(
    spec: MeshSpec,
    family: str,
    dropout: float,
    whole: list[Outputs] | None,
    step: int,
    metrics: Mapping[str, Any],
) -> dict[str, float]:
    """Read one process on the rows that the ranks drew.

    Args:
        spec: The mesh.
        family: "GPT" or "Llama".
        dropout: Probability of dropout: with it torch computes attention in another way.
        whole: For each data rank, what is replayed; None for what the untrained model computes.
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
    gathered = gather(snapshots, (step, "inline"), RankGroup(), rows=TOKENS, queries=QUERIES)
    layers = [merge_layers(parts) for parts in gathered.parts]
    return tagged(evaluator.evaluate(layers, TOKENS).stacks)


def largest_difference(values: Mapping[str, float], others: Mapping[str, float]) -> float:
    """Return the largest relative difference of values; infinite where only one side has some.

    Args:
        values: Values by tag.
        others: Values that they are compared with.
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
