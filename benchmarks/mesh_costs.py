"""Measures the cost of a reading on each mesh: its collectives, their bytes and its time.

OMP_NUM_THREADS=1 python -W ignore -m benchmarks.mesh_costs

The cost of one training step is measured too. Bytes of the training are those that a ring would
send, and bytes of geomon are those that its ranks pass to others.
"""

import logging
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.forked import on_ranks
from benchmarks.mesh_models import MeshSpec, Sizes, Training
from benchmarks.timing import print_machine, print_table
from geomon import Memory, Monitor, every

SIZES = Sizes(
    width=256, heads=8, key_heads=4, inner=1024, vocabulary=1024, length=128, batch=8, layers=8
)
MESHES = (
    MeshSpec(),
    MeshSpec(data=2, wrap="DDP"),
    MeshSpec(tensor=2),
    MeshSpec(tensor=2, hidden="sequence"),
    MeshSpec(pipeline=2, schedule="1F1B"),
    MeshSpec(tensor=4, hidden="sequence"),
    MeshSpec(pipeline=4, schedule="interleaved"),
    MeshSpec(data=2, tensor=2, wrap="FSDP2"),
    MeshSpec(data=2, pipeline=2, wrap="DDP", schedule="1F1B"),
    MeshSpec(pipeline=2, tensor=2, schedule="1F1B", hidden="sequence"),
    MeshSpec(data=4, tensor=2, wrap="FSDP2", hidden="DTensor"),
    MeshSpec(data=2, pipeline=2, tensor=2, wrap="FSDP2", schedule="1F1B", hidden="sequence"),
)
_NO_CALLS = ("wait_tensor", "_wrap_tensor_autograd", "recv_", "barrier")


class _Cost(NamedTuple):
    """Cost of a reading and of a training step, on this rank."""

    calls: int
    sent: int
    seconds: float
    training_calls: int
    training_sent: float
    training_seconds: float


class _Collectives(TorchDispatchMode):
    """Counts the collectives of this rank, and the bytes that it sends in a ring."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sent = 0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls collectives of its own
        name = func.overloadpacket.__name__
        if "c10d" in func.namespace and name not in _NO_CALLS:
            self.calls += 1
            self.sent += _SENT[name](_bytes(args[_INPUTS.get(name, 0)]), _size(args))
        return func(*args, **(kwargs or {}))


# Bytes that a rank sends, as a function of its input's bytes and the number of ranks.
_SENT: dict[str, Callable[[int, int], float]] = {
    **dict.fromkeys(("all_reduce", "allreduce_"), lambda given, n: 2 * given * (n - 1) / n),
    **dict.fromkeys(
        ("all_gather_into_tensor", "_allgather_base_"), lambda given, n: given * (n - 1)
    ),
    **dict.fromkeys(
        ("reduce_scatter_tensor", "_reduce_scatter_base_"), lambda given, n: given * (n - 1) / n
    ),
    "send": lambda given, n: given,
}
_INPUTS = {"_allgather_base_": 1, "_reduce_scatter_base_": 1}  # others have it first


class _ObjectCollectives:
    """Counts geomon's collectives on this rank, and the bytes that the rank passes to others."""

    def __init__(self) -> None:
        self.calls = self.sent = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the collectives in the body."""
        plain = {name: getattr(dist, name) for name in _HANDED_OVER}

        def call(name: str, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.sent += _HANDED_OVER[name](*args[:2])
            return plain[name](*args, **kwargs)

        try:
            for name in plain:
                setattr(dist, name, partial(call, name))
            yield
        finally:
            for name, function in plain.items():
                setattr(dist, name, function)


def _packed(value: Any) -> int:
    return len(pickle.dumps(value))


# Bytes that a rank passes on, as a function of the first two arguments.
_HANDED_OVER: dict[str, Callable[..., int]] = {
    "all_gather_object": lambda values, value: (len(values) - 1) * _packed(value),
    "gather_object": lambda value, values: 0 if values else _packed(value),
    "broadcast_object_list": lambda values: (
        0 if dist.get_rank() else (dist.get_world_size() - 1) * _packed(values[0])
    ),
    "all_to_all_single": lambda output, given: _bytes(given),
}


def _bytes(given: Any) -> int:
    tensors: list[Tensor] = [given] if isinstance(given, Tensor) else list(given)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _size(args: Any) -> int:
    """Return the number of ranks in a collective from its group or the group's name."""
    for given in args:
        if isinstance(given, torch.ScriptObject):
            with_group = given
            try:
                return int(dist.ProcessGroup.unbox(with_group).size())
            except (RuntimeError, ValueError, TypeError):
                continue  # the operation of a reduction
    group = dist.distributed_c10d._resolve_process_group(args[-1])
    return int(group.size())


def run(spec: MeshSpec, tokens: int, runs: int) -> _Cost:
    """Measure a mesh on this rank.

    Args:
        spec: The mesh.
        tokens: Rows of a reading, over all ranks.
        runs: Number of timed steps, after one for warm-up.
    """
    training = Training(spec, "Llama", 0.0, sizes=SIZES)
    taken = []
    for step in range(runs + 1):
        began = time.perf_counter()
        training.step(step)
        taken.append(time.perf_counter() - began)
    with _Collectives() as counted:
        training.step(runs + 1)
    memory = Memory()
    monitor = Monitor(
        training.watched, tokens=tokens, directory=None, sinks=[memory], schedule=every(1),
        budget=None, strict=True,
    )  # fmt: skip
    own = _ObjectCollectives()

    @contextmanager
    def around(step: int) -> Iterator[None]:
        with monitor(step):
            yield
            dist.barrier()  # time only the reading, not the wait for another forward pass

    with own.counted():
        for step in range(runs + 1):
            training.step(step, partial(around, step))
    monitor.close()
    seconds = [reading.seconds for reading in memory.readings][1:]
    return _Cost(
        own.calls // (runs + 1), own.sent // (runs + 1),
        statistics.median(seconds) if seconds else 0.0,
        counted.calls, counted.sent, statistics.median(taken[1:]),
    )  # fmt: skip


def _rows(tokens: int, runs: int) -> Iterator[tuple[str, ...]]:
    for spec in MESHES:
        found: list[_Cost] = on_ranks(spec.size, run, spec, tokens, runs)
        first = found[0]
        sent, trained = sum(x.sent for x in found), sum(x.training_sent for x in found)
        yield (
            str(spec), str(spec.size), str(first.calls), str(max(x.training_calls for x in found)),
            f"{sent / 1e6:.1f}", f"{trained / 1e6:.1f}", f"{first.seconds:.2f}",
            f"{first.training_seconds:.2f}",
        )  # fmt: skip


def main(
    tokens: Annotated[int, typer.Option(help="Rows of a reading, over all ranks.")] = 1024,
    runs: Annotated[int, typer.Option(help="Readings, and steps; the median counts.")] = 3,
) -> None:
    """Measure one reading and one training step on each mesh."""
    logging.getLogger("geomon").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print_table(
        f"One reading of {SIZES.layers} layers, width {SIZES.width}, {tokens:,} rows, and one "
        f"training step of {SIZES.batch * SIZES.length:,} tokens a data rank",
        (
            "mesh", "ranks", "calls of a reading", "of a step", "MB of a reading", "of a step",
            "s of a reading", "of a step",
        ),
        _rows(tokens, runs),
    )  # fmt: skip
    print_machine(f"medians of {runs}", "one thread to a rank")


if __name__ == "__main__":
    typer.run(main)
