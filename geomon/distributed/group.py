"""The group of ranks of a run, with geomon's own collectives.

geomon uses its own gloo process group: it moves host tensors, and its collectives never mix with
the training's. Every method of `RankGroup` that exchanges values is a collective that all ranks
call in the same order. In a group of one rank, collectives return what was passed in.
"""

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
from geomon.failures import failures, ignored

log = logging.getLogger("geomon")

# Seconds between two checks whether a collective has ended; signals are handled in between.
_POLL = 0.05

# Default timeout of a process group of torch.distributed, in seconds.
_DEFAULT_PATIENCE = 600.0

_Value = TypeVar("_Value")


class RanksLostError(ConnectionError):
    """Another rank did not answer in time, or is gone."""


class RankFailedError(RuntimeError):
    """A rank cannot contribute to this reading; the message names the rank and the reason."""


class RankGroup:
    """The ranks of a run, as seen by one of them.

    Args:
        rank: Rank of this process. Defaults to 0.
        size: Number of processes. Defaults to 1.
        process_group: geomon's process group of torch.distributed, or None if the ranks exchange
            nothing.
        timeout: Longest total time in seconds that this rank waits for others during one reading.
            Defaults to no limit.
        why_not_connected: Why the rows of this model's ranks cannot be gathered, or None.
        mesh: The places of all ranks; without a connection, of this rank only.

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
        self._waited = 0.0  # seconds waited during this reading
        self._givers: int | None = None

    @property
    def connected(self) -> bool:
        """Whether the ranks exchange rows and decisions."""
        return self._process_group is not None

    @property
    def members(self) -> int:
        """Number of ranks whose rows make one reading: all if they are connected, else one."""
        return self.size if self.connected else 1

    @property
    def place(self) -> int:
        """Index of this rank among the members, from 0."""
        return self.rank if self.connected else 0

    @property
    def own(self) -> RankPlace:
        """Place of this rank in the mesh."""
        return self.mesh.places[self.rank if len(self.mesh.places) > 1 else 0]

    @property
    def data_rank(self) -> int:
        """Index of this rank's tokens, from 0; ranks that share one model have equal tokens."""
        return self.data_rank_of(self.rank)

    def data_rank_of(self, rank: int) -> int:
        """Return the index of a rank's tokens.

        Args:
            rank: The rank.
        """
        return self.mesh.data_ranks[rank] if self.connected else 0

    @property
    def data_size(self) -> int:
        """Number of members, or groups of members, with tokens of their own."""
        return self.mesh.data_size if self.connected else 1

    def rows_of(self, rows: int) -> int:
        """Return how many of its rows this rank contributes; the first ranks add one if uneven.

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
        """Divide rows among fewer token sets from now on, because some ranks have equal tokens."""
        self._givers = None if givers == self.data_size else givers

    def disconnect(self) -> None:
        """Stop exchanging values with the other ranks, and tell those that wait."""
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            with ignored():  # it may be gone already
                dist.destroy_process_group(process_group)

    def begin_reading(self) -> None:
        """Begin a reading: from now on, all exchanges together wait at most for the timeout."""
        self._waited = 0.0

    def meet(self, step: int, value: _Value) -> list[_Value]:
        """Return the values of all ranks, in rank order, once all are at the same step.

        A rank at a later step (others missed a reading) waits for the others there; a rank at an
        earlier step gives up its reading.

        Args:
            step: The step that this rank reads.
            value: Value of this rank, which can be pickled.

        Raises:
            RankFailedError: If another rank is at a later step.
            RanksLostError: If a rank does not answer.
        """
        while True:
            met = self.all_gather((step, value))
            steps = [other for other, _ in met]
            if max(steps) > step:
                raise RankFailedError(
                    f"rank {steps.index(max(steps))} reads step {max(steps)} but rank "
                    f"{self.rank} reads step {step}: call the monitor with the same steps on "
                    "every rank, with a schedule that depends only on the step"
                )
            if min(steps) == step:
                return [other for _, other in met]

    def all_gather(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks, in rank order.

        Args:
            value: Value of this rank, which can be pickled.

        Raises:
            RanksLostError: If a rank does not answer.
        """
        if not self.connected:
            return [value]
        values: list[Any] = [None] * self.size
        self._call(dist.all_gather_object, values, value)
        return values

    def gather(self, value: _Value) -> list[_Value] | None:
        """Return the values of all ranks, in rank order, on the first rank, and None on the others.

        Args:
            value: Value of this rank, which can be pickled.

        Raises:
            RanksLostError: If a rank does not answer.
        """
        if not self.connected:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._call(dist.gather_object, value, values, dst=0)
        return values

    def broadcast(self, value: _Value) -> _Value:
        """Return the first rank's value on every rank.

        Args:
            value: Value of this rank, which can be pickled; only the first rank's is used.

        Raises:
            RanksLostError: If a rank does not answer.
        """
        if not self.connected:
            return value
        values = [value]
        self._call(dist.broadcast_object_list, values, src=0)
        return values[0]

    def all_to_all(self, parcels: Sequence[_Value]) -> list[_Value]:
        """Send each rank its parcel, which may hold tensors of any size (they are not pickled)."""
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
        """Call a collective, and turn any failure of the others to answer into one error.

        A collective cannot be interrupted, so it runs in a thread of its own; otherwise Ctrl-C or a
        preemption signal would wait for its timeout. That timeout applies to each collective,
        whereas here the time left for the whole reading is waited.
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
        except BaseException:  # an unfinished collective would make the others wait
            self._process_group = None
            raise
        finally:
            self._waited += time.monotonic() - began
        if not failures:
            return
        # Removed from the list, which its traceback refers to: this cycle would keep the process
        # group alive, and the others would not learn that this rank has left it.
        failure = failures.pop()
        if not isinstance(failure, RuntimeError):
            raise failure
        reason = str(failure).splitlines()[0].split(". ")[0]
        raise RanksLostError(reason) from failure


def find_ranks() -> RankGroup:
    """Return the ranks that torch.distributed knows, without connecting them."""
    if dist.is_available() and dist.is_initialized():
        return RankGroup(dist.get_rank(), dist.get_world_size())
    return RankGroup()


def join_ranks(
    place: RankPlace | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    timeout: float = 60.0,
) -> RankGroup:
    """Connect the ranks that torch.distributed knows, if there are several.

    A collective: every rank calls it. The connection ends with the training's process groups, when
    `torch.distributed.destroy_process_group` is called. If no connection is possible, the returned
    group has none, and `why_not_connected` or a warning says why.

    Args:
        place: Place of this rank in the mesh. Defaults to a rank with a whole model and its own
            tokens.
        options: Plain values by name that must be equal on every rank.
        timeout: Longest total time in seconds that a rank waits for the others during one reading.
            At most half of the training's own timeout is used, so that geomon gives up first.
            Defaults to 60.
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
            "the rows of the ranks are not gathered, and the first rank measures only its own: no "
            "gloo group could be made; every rank must build its monitor to take part (%s)",
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
    """Seconds that the training's own process group waits; torch's default if unknown.

    Torch lacks a public name for it.
    """
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds())
    except failures():  # an accelerator-only backend, or another release
        return _DEFAULT_PATIENCE


def _difference(options: Sequence[Mapping[str, Any]]) -> str | None:
    """Name an option where a rank differs from the first one, or return None."""
    for rank, given in enumerate(options):
        for name, value in options[0].items():
            if given[name] != value:
                own, first = map(reprlib.repr, (given[name], value))
                return f"rank {rank} was built with {name}={own}, rank 0 with {first}"
    return None
