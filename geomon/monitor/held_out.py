"""Held-out batches: the first ones of a data loader, taken once, and read at every reading.

The loader is the training's: its sampler, its worker processes and the random states are left as
they were. A random or endless loader is drawn from once only.
"""

import copy
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from geomon.capture.unchanged import random_states_kept
from geomon.distributed import RankFailedError, RankGroup

# Batches that are taken at most by each rank: they stay in the memory of the host, and each is one
# more forward pass in every reading.
MOST_BATCHES = 64
# Sequences that are wanted besides the rows: with fewer the 95 % intervals are wider.
_SEQUENCES = 16

# Makes a pass over a batch; returns the rows and the sequences that can be read of it.
Look = Callable[[Any], tuple[int, int]]


class HeldOut:
    """The first batches of a loader.

    A copy shares the batches: a generator can be drawn from once.

    Args:
        loader: Any iterable of batches, each as the model takes it (see `capture.calling.batch`).

    Attributes:
        batches: The batches of this rank, on the host; empty before `settle`.
        rows: Number of rows that can be read of each.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader: Iterable[Any] | None = loader  # None once there are enough batches
        self._iterator: Iterator[Any] | None = None
        self._drawn: tuple[int, Any] | None = None  # a batch that no pass was made over yet
        self._skipped = 0  # batches of other ranks between two of this rank's
        self._counts = [0, 0]  # rows and sequences of all ranks so far
        self._failure = ""
        self.batches: list[Any] = []
        self.rows: list[int] = []

    def settle(self, model: nn.Module, group: RankGroup, rows: int, look: Look) -> None:
        """Take batches until they hold enough rows and sequences; a collective, done once.

        Every rank takes as many batches. Ranks whose loaders give the same batches share them out:
        each takes every so-manieth. Where the ranks exchange nothing each takes one batch.

        Args:
            model: The model, whose device may have a random state that the loader draws from.
            group: The ranks.
            rows: Number of rows that are wanted of all ranks together.
            look: Makes a pass over a batch.

        Raises:
            ValueError: The loader has failed or has no batch, on this rank or another.
            RankFailedError: A pass over a batch has failed on a rank.
            RanksLostError: Another rank does not answer.
        """
        if self._failure:
            raise ValueError(self._failure)
        if self._loader is None:
            return
        with random_states_kept(model):
            if self._iterator is None:
                self._iterator = _batches_of(self._loader)
            alone = group.size > 1 and not group.connected
            most = 1 if alone else MOST_BATCHES
            while len(self.batches) < most and not self._has_enough(rows):
                if not self._draw(self._iterator, group):
                    break
                self._look(group, look)
        if not self.batches:
            each = f" for each of {group.members} ranks" * (group.members > 1)
            self._failure = (
                f"the loader of the probe has no batch{each}: expected held-out batches, as a "
                "validation loader gives them"
            )
            raise ValueError(self._failure)
        self._loader = self._iterator = self._drawn = None

    def shares(self, rows: int) -> list[int]:
        """Share out the rows that are wanted among the batches, evenly as far as they reach.

        Args:
            rows: Number of rows that are wanted.

        Example:
            >>> held_out = HeldOut([])
            >>> held_out.rows = [100, 10, 100]
            >>> held_out.shares(110)
            [50, 10, 50]
        """
        found = [0] * len(self.rows)
        order = sorted(range(len(self.rows)), key=lambda number: self.rows[number])
        for place, number in enumerate(order):
            even = -(-(rows - sum(found)) // (len(order) - place))
            found[number] = max(1, min(self.rows[number], even))
        return found

    def _has_enough(self, rows: int) -> bool:
        return self._counts[0] >= rows and self._counts[1] >= min(_SEQUENCES, rows)

    def _draw(self, batches: Iterator[Any], group: RankGroup) -> bool:
        """Take this rank's next batch, and return whether every rank has one: a collective."""
        number = len(self.batches)
        if self._drawn is None or self._drawn[0] != number:
            batch, failure = _next(batches, self._skipped)
            if number == 0 and group.data_size > 1:
                marks = group.all_gather(None if failure else _mark(batch))
                if None not in marks and len(set(marks)) == 1:
                    self._skipped = group.data_size - 1
                    if group.data_rank:
                        batch, failure = _next(batches, group.data_rank - 1)
            reasons = group.all_gather(failure)
            if any(reasons):  # what was drawn is gone, and other batches would not compare
                place = next(place for place, why in enumerate(reasons) if why)
                where = f"rank {place}: " if group.members > 1 else ""
                self._failure = f"{where}the loader of the probe failed: {reasons[place]}"
                raise ValueError(self._failure)
            self._drawn = number, batch
        return all(group.all_gather(self._drawn[1] is not None))

    def _look(self, group: RankGroup, look: Look) -> None:
        """Make a pass over the batch that was drawn, and keep it. A collective.

        What fails is tried again with the same batch at the next reading.
        """
        assert self._drawn is not None
        seen: tuple[int, int] = 0, 0
        failure = None
        try:
            seen = look(self._drawn[1])
        except Exception as error:
            if group.members == 1:
                raise
            failure = f"{type(error).__name__}: {error}"
        reports = group.all_gather((failure, seen))
        failures = [(place, why) for place, (why, _) in enumerate(reports) if why is not None]
        if failures:
            raise RankFailedError(f"rank {failures[0][0]}: {failures[0][1]}")
        self.batches.append(self._drawn[1])
        self.rows.append(seen[0])
        of_tokens = {group.data_rank_of(rank): own for rank, (_, own) in enumerate(reports)}
        for index in range(2):
            self._counts[index] += sum(own[index] for own in of_tokens.values())


def is_loader(inputs: Any) -> bool:
    """Whether the inputs of a probe are a loader, and not the inputs of one forward pass.

    Args:
        inputs: What was given as `probe`.

    Example:
        >>> is_loader(torch.zeros(2, 3)), is_loader({}), is_loader(iter([1])), is_loader([1])
        (False, False, True, False)
    """
    plain = isinstance(inputs, Tensor | Mapping | tuple | list | str | bytes) or callable(inputs)
    # Arrays, and objects that stand for a dict, are inputs of a model.
    like_inputs = hasattr(inputs, "shape") or hasattr(inputs, "keys")
    return isinstance(inputs, Iterable) and not plain and not like_inputs


def first_loader(loaders: Any) -> Any:
    """The first of several loaders, which trainers hold in lists and dicts; None for none.

    Args:
        loaders: A loader, or loaders in lists, tuples and dicts.
    """
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, list | tuple):
        return next((one for each in loaders if (one := first_loader(each)) is not None), None)
    return loaders


def _batches_of(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches; what beginning with them raises is raised with the first."""
    yield from _own(loader)


def _own(loader: Iterable[Any]) -> Iterable[Any]:
    """A loader of the same batches, with a sampler of its own, and no worker of the training's."""
    # What accelerate prepares counts its own passes; inside is the loader that gives the batches.
    loader = getattr(loader, "base_dataloader", loader)
    if not isinstance(loader, DataLoader):
        return loader
    own = copy.copy(loader)
    memo: dict[int, Any] = {id(loader.dataset): loader.dataset}
    changed: dict[str, Any] = {
        name: _copied(vars(loader).get(name), memo)
        for name in ("generator", "sampler", "batch_sampler")
    }
    # Of a dataset that is drawn from by its own workers each has its share.
    ordered = not isinstance(loader.dataset, IterableDataset)
    changed["num_workers"] = min(loader.num_workers, 1) if ordered else loader.num_workers
    changed |= {"_iterator": None, "pin_memory": False}
    vars(own).update(changed)  # a loader refuses to have them set
    return own


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # objects of the user's own that cannot be copied
        return value


def _next(batches: Iterator[Any], skipped: int) -> tuple[Any, str | None]:
    """The next batch after some that are skipped, on the host; None at the end, or why not."""
    try:
        for _ in range(skipped):
            next(batches)
        return _to_host(next(batches)), None
    except StopIteration:
        return None, None
    except Exception as error:  # the loader is the user's
        return None, f"{type(error).__name__}: {error}"


def _to_host(batch: Any) -> Any:
    """A copy of a batch on the host: a loader may fill the same tensors again."""
    if isinstance(batch, Tensor):
        return batch.detach().to("cpu", copy=True)
    if isinstance(batch, Mapping):
        return {name: _to_host(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(map(_to_host, batch))
    return batch


def _mark(batch: Any) -> int:
    """A checksum of a batch, to see whether the ranks are given the same."""
    if isinstance(batch, Tensor):
        plain = batch.reshape(-1).contiguous().view(torch.uint8)
        return zlib.crc32(plain.numpy().tobytes(), zlib.crc32(str(batch.shape).encode()))
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(parts, tuple | list):
        parts = [_mark(part) for part in parts]
    return zlib.crc32(repr(parts).encode())


__all__ = ["HeldOut", "first_loader", "is_loader"]
