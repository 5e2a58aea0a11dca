"""The group of ranks of a run, and geomon's own collectives in it.

geomon has a gloo process group of its own beside those of the training: it moves tensors of the
host, and its collectives never mix with the training's. Every method of `RankGroup` that exchanges
values is a collective: all ranks call it, in the same order, whatever they saw. One process is a
group of one rank, in which every collective gives back what was put in.
"""

import contextlib
import logging
import math
import reprlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from geomon.distributed.mesh import Mesh, RankPlace
from geomon.distributed.packing import pack, unpack

log = logging.getLogger("geomon")

# Seconds between two looks whether a collective has ended: a signal is handled in between.
_POLL = 0.05

# Seconds that a process group of torch.distributed waits where nobody says otherwise.
_DEFAULT_PATIENCE = 600.0

_Value = TypeVar("_Value")


class RanksLostError(ConnectionError):
    """Another rank did not answer in time, or is gone."""


class RankFailedError(RuntimeError):
    """A rank has nothing to give to this reading; the message names the rank and the reason."""


class RankGroup:
    """The ranks of a run, as one of them sees them.

    Args:
        rank: Rank of this process.
        size: Number of processes.
        process_group: geomon's process group of torch.distributed; None if the ranks do not
            exchange anything.
        timeout: Largest time in seconds that this rank waits for the others in one reading.
        why_not_connected: Why the rows of this model's ranks cannot be gathered, or None.
        mesh: The places of all ranks; where they exchange nothing, that of this rank alone.

    Attributes:
        rank: The argument.
        size: The argument.
        why_not_connected: The argument.
        mesh: The argument.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        process_group: Any = None,
        *,
        timeout: float = math.inf,
        why_not_connected: str | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.why_not_connected = why_not_connected
        self.mesh = mesh or Mesh(tuple(RankPlace(other) for other in range(size)))
        self._process_group = process_group
        self._timeout = timeout
        self._waited = 0.0  # seconds, in this reading
        self._givers: int | None = None

    @property
    def connected(self) -> bool:
        """Whether the ranks exchange rows and decisions."""
        return self._process_group is not None

    @property
    def members(self) -> int:
        """Number of ranks whose rows make one reading: all that are connected, or one."""
        return self.size if self.connected else 1

    @property
    def place(self) -> int:
        """Place of this rank among the members, from 0."""
        return self.rank if self.connected else 0

    @property
    def own(self) -> RankPlace:
        """Place of this rank in the mesh."""
        return self.mesh.places[self.rank if len(self.mesh.places) > 1 else 0]

    @property
    def data_rank(self) -> int:
        """Number of the tokens of this rank, from 0: ranks that share one model have the same."""
        return self.data_rank_of(self.rank)

    def data_rank_of(self, rank: int) -> int:
        """Return the number of the tokens of a rank.

        Args:
            rank: The rank.
        """
        return self.mesh.data_ranks[rank] if self.connected else 0

    @property
    def data_size(self) -> int:
        """Number of members, or of groups of them, that have tokens of their own."""
        return self.mesh.data_size if self.connected else 1

    def rows_of(self, rows: int) -> int:
        """Number of rows of its tokens that a reading takes; the first take one more if uneven.

        Args:
            rows: Number of rows for all members together.

        Example:
            >>> [RankGroup(rank, 4, process_group=object()).rows_of(10) for rank in range(4)]
            [3, 3, 2, 2]
        """
        if self._givers is not None and self.connected:
            return -(-rows // self._givers)
        return rows // self.data_size + (self.data_rank < rows % self.data_size)

    def share_rows_among(self, givers: int) -> None:
        """Share rows out among fewer tokens from here on: others are the same as these."""
        self._givers = None if givers == self.data_size else givers

    def disconnect(self) -> None:
        """Exchange nothing with the other ranks from here on.

        Ranks that wait for this one learn of it at once.
        """
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            with contextlib.suppress(Exception):  # it may be gone already
                dist.destroy_process_group(process_group)

    def begin_reading(self) -> None:
        """Begin a reading: in all of its exchanges this rank waits no longer than the timeout."""
        self._waited = 0.0

    def meet(self, step: int, value: _Value) -> list[_Value]:
        """Give every rank the values of all ranks, in rank order, once all are at the same step.

        A rank that is at a later step than others (they missed a reading, say) waits for them
        there; a rank that is at an earlier one leaves its reading out.

        Args:
            step: The step that this rank reads.
            value: Value of this rank, which can be pickled.

        Raises:
            RankFailedError: Another rank is at a later step.
            RanksLostError: A rank does not answer.
        """
        while True:
            met = self.all_gather((step, value))
            steps = [other for other, _ in met]
            if max(steps) > step:
                raise RankFailedError(
                    f"rank {steps.index(max(steps))} reads step {max(steps)} where rank "
                    f"{self.rank} reads step {step}: every rank calls the monitor with the same "
                    "steps, and its schedule depends on the step alone"
                )
            if min(steps) == step:
                return [other for _, other in met]

    def all_gather(self, value: _Value) -> list[_Value]:
        """Give every rank the values of all ranks, in rank order.

        Args:
            value: Value of this rank, which can be pickled.

        Raises:
            RanksLostError: A rank does not answer.
        """
        if not self.connected:
            return [value]
        values: list[Any] = [None] * self.size
        self._call(dist.all_gather_object, values, value)
        return values

    def gather(self, value: _Value) -> list[_Value] | None:
        """Give the first rank the values of all ranks, in rank order; the others get None.

        Args:
            value: Value of this rank, which can be pickled.

        Raises:
            RanksLostError: A rank does not answer.
        """
        if not self.connected:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._call(dist.gather_object, value, values, dst=0)
        return values

    def broadcast(self, value: _Value) -> _Value:
        """Give every rank the value of the first one.

        Args:
            value: Value of this rank, which can be pickled; only the first rank's is used.

        Raises:
            RanksLostError: A rank does not answer.
        """
        if not self.connected:
            return value
        values = [value]
        self._call(dist.broadcast_object_list, values, src=0)
        return values[0]

    def all_to_all(self, parcels: Sequence[_Value]) -> list[_Value]:
        """Send each rank its parcel, which may hold tensors of any size: they are not pickled."""
        if not self.connected:
            return list(parcels)
        packed = [
            torch.empty(0, dtype=torch.uint8, device="cpu") if rank == self.rank else pack(parcel)
            for rank, parcel in enumerate(parcels)
        ]
        sizes = torch.tensor([len(part) for part in packed], dtype=torch.int64, device="cpu")
        coming = torch.empty_like(sizes)
        self._call(dist.all_to_all_single, coming, sizes)
        received = torch.empty(int(coming.sum()), dtype=torch.uint8, device="cpu")
        self._call(
            dist.all_to_all_single, received, torch.cat(packed), coming.tolist(), sizes.tolist()
        )
        return [
            parcels[rank] if rank == self.rank else unpack(part)
            for rank, part in enumerate(received.split(coming.tolist()))
        ]

    def _call(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call a collective; every way in which the others fail to answer is one error.

        It is called in a thread of its own, while this one waits for it: a collective cannot be
        interrupted, and Ctrl-C or the signal of a preemption would wait for its timeout. That one
        holds for each collective; what is left of the reading's is waited for here.
        """
        failures: list[BaseException] = []
        group = self._process_group

        def call() -> None:
            try:
                collective(*args, group=group, **kwargs)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=call, name="geomon ranks", daemon=True)
        began = time.monotonic()
        thread.start()
        try:
            while thread.is_alive():
                left = self._timeout - self._waited - (time.monotonic() - began)
                if left <= 0:
                    limit = f"no answer within the {self._timeout:g} s of a reading"
                    raise RanksLostError(limit)
                thread.join(min(_POLL, left))
        except BaseException:  # the others would wait for what is not finished
            self._process_group = None
            raise
        finally:
            self._waited += time.monotonic() - began
        if not failures:
            return
        # Out of the list, which its traceback holds: that circle would keep the process group, and
        # the others would not learn that this rank has left it.
        failure = failures.pop()
        if not isinstance(failure, RuntimeError):
            raise failure
        reason = str(failure).splitlines()[0].split(". ")[0]
        raise RanksLostError(reason) from failure


def find_ranks() -> RankGroup:
    """Find the ranks that torch.distributed knows of, without connecting them."""
    if dist.is_available() and dist.is_initialized():
        return RankGroup(dist.get_rank(), dist.get_world_size())
    return RankGroup()


def join_ranks(
    place: RankPlace | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    timeout: float = 60.0,
) -> RankGroup:
    """Connect the ranks that torch.distributed knows of, where there are several.

    A collective: every rank calls it. The connection goes away with the process groups of the
    training, when `torch.distributed.destroy_process_group` is called. Where none can be made, the
    group comes back without one; `why_not_connected` or a warning says why.

    Args:
        place: Place of this rank in the mesh; None if it has a whole model and its own tokens.
        options: Plain values that have to be the same on every rank, by name.
        timeout: Largest time in seconds that a rank waits for the others in one reading. At most
            half of what the training's own process group waits is used, so that geomon gives up
            first.
    """
    group = find_ranks()
    group.mesh = Mesh((place or RankPlace(group.rank),))
    if group.size == 1:
        return group
    try:
        limit = min(timeout, _patience_of_training() / 2)
        process_group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=limit), group_desc="geomon"
        )
        joined = RankGroup(group.rank, group.size, process_group, timeout=limit)
        reports = joined.all_gather((group.own, options or {}))
    except (RuntimeError, ValueError, RanksLostError) as error:
        log.warning(
            "the rows of the ranks are not gathered, the first rank measures its own: no gloo "
            "group could be made, which every rank has to ask for by building its monitor (%s)",
            error,
        )
        return group
    joined.mesh = Mesh(tuple(found for found, _ in reports))
    reason = _difference([given for _, given in reports]) or joined.mesh.difference()
    if reason is None:
        return joined
    joined.disconnect()
    return RankGroup(group.rank, group.size, why_not_connected=reason, mesh=group.mesh)


def _patience_of_training() -> float:
    """Seconds that the training's own process group waits; torch's default where it is not known.

    There is no public name that tells it.
    """
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds())
    except Exception:  # a backend of accelerators alone, or another release
        return _DEFAULT_PATIENCE


def _difference(options: Sequence[Mapping[str, Any]]) -> str | None:
    """Say in which option a rank differs from the first one; None if all are the same."""
    for rank, given in enumerate(options):
        for name, value in options[0].items():
            if given[name] != value:
                own, first = map(reprlib.repr, (given[name], value))
                return f"rank {rank} was built with other {name} than rank 0 ({own}, there {first})"
    return None
