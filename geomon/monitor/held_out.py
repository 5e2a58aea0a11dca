"""Held-out batches, from a loader or from a trainer's validation, used for every reading.

A loader given by the user is drawn from once. From a trainer's validation, batches that it draws
itself are kept: its loader, samplers and workers are never touched.
"""

import copy
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from geomon.capture import random_states_kept
from geomon.distributed import RankGroup
from geomon.failures import failures, ignored
from geomon.monitor.probe_loss import count_sequences, tensors_of

# Most batches of one rank: they stay in host memory, and each adds a forward pass to every reading.
MOST_BATCHES = 64
# Wanted number of sequences, in addition to rows: with fewer, the 95 % intervals are wider.
_SEQUENCES = 16
# Expected rows of a sequence without token ids, as for a small image.
_ROWS_WITHOUT_IDS = 64


class HeldOut:
    """Held-out batches, drawn from a loader or offered by a trainer; copies share them.

    Args:
        loader: Iterable of batches as the model takes them (see `capture.calling.batch`), the same
            on every rank, or None if batches are offered.
        rows: Number of rows for which offered batches are kept.

    Attributes:
        batches: Batches of this rank, on the host; empty before `settle`.
        rows: Expected number of rows of each batch.
    """

    def __init__(self, loader: Iterable[Any] | None = None, rows: int = 0) -> None:
        self._loader = loader
        self._wanted = rows
        self._offered: list[Any] | None = None  # by the current validation
        self._source: Iterator[Any] | None = None
        self.batches: list[Any] = []
        self.rows: list[int] = []

    @property
    def is_ready(self) -> bool:
        """Whether there are batches or a source of them; otherwise a validation must come first."""
        return bool(self.batches) or self._loader is not None or self._source is not None

    def begin(self) -> None:
        """Begin to collect the batches of a validation, unless an earlier one was collected."""
        self._offered = None if self.is_ready else []

    @property
    def takes(self) -> bool:
        """Whether another batch of the validation is wanted."""
        kept = self._offered
        if kept is None or len(kept) == MOST_BATCHES:
            return False
        return not _is_enough(map(_count, kept), self._wanted)

    def offer(self, batch: Any) -> None:
        """Keep a copy of a validation batch if it is wanted."""
        if self._offered is not None and self.takes:
            self._offered.append(_to_host(batch))

    def end(self) -> None:
        """End the validation; from now on, every rank reads the batches that were kept."""
        if self._offered is not None:
            self._source, self._offered = iter(self._offered), None

    def settle(self, model: nn.Module, group: RankGroup, rows: int) -> None:
        """Take batches until they hold enough rows and sequences; a collective, done once.

        Every rank takes the same number of batches; from a loader, ranks take turns. If the ranks
        exchange nothing, each takes one batch.
        """
        if self._loader is not None:
            turns = _batches_of(self._loader), group.data_rank, None, group.data_size
            self._source, self._loader = itertools.islice(*turns), None
        if self._source is None:
            return
        most = MOST_BATCHES if group.connected or group.size == 1 else 1
        counts: list[tuple[int, int]] = []  # rows and sequences of every batch of every rank
        with random_states_kept(model):
            while len(self.batches) < most and not _is_enough(counts, rows):
                batch, found = _draw(self._source, group)
                if found is None:
                    break
                counts += found
                self.batches.append(batch)
                self.rows.append(_count(batch)[0])
        if not self.batches:
            each = f" for each of {group.members} ranks" if group.members > 1 else ""
            raise ValueError(
                f"the loader of the probe has no batch{each}: expected held-out batches, as from a "
                "validation loader"
            )
        self._source = None

    def shares(self, rows: int) -> list[int]:
        """Divide the wanted rows evenly among the batches, as far as each has enough.

        If all together have too few, every batch may contribute more rows than expected.

        Example:
            >>> held_out = HeldOut([])
            >>> held_out.rows = [100, 10, 100]
            >>> held_out.shares(110), held_out.shares(420)
            ([50, 10, 50], [200, 20, 200])
        """
        found = [0] * len(self.rows)
        more = max(1.0, rows / sum(self.rows))
        order = sorted(range(len(self.rows)), key=lambda number: self.rows[number])
        for place, number in enumerate(order):
            even = -(-(rows - sum(found)) // (len(order) - place))
            found[number] = max(1, min(math.ceil(more * self.rows[number]), even))
        return found


def is_loader(inputs: Any) -> bool:
    """Whether a probe's inputs are a loader, rather than inputs of one forward pass.

    Example:
        >>> import torch
        >>> is_loader(torch.zeros(2, 3)), is_loader({}), is_loader(iter([1])), is_loader([1])
        (False, False, True, False)
    """
    plain = isinstance(inputs, Tensor | Mapping | tuple | list | str | bytes) or callable(inputs)
    if plain or not isinstance(inputs, Iterable):
        return False
    # Arrays and dict-like objects are inputs of a model.
    return not (hasattr(inputs, "shape") or hasattr(inputs, "keys"))


def describe_probe(probe: Any) -> str:
    """Describe a monitor's probe in a few words, with a digest of the tensors of fixed inputs.

    Example:
        >>> describe_probe(None), describe_probe(len)
        ('the training forward', 'a function')
    """
    if probe is None:
        return "the training forward"
    if isinstance(probe, HeldOut):
        return "batches of a loader"
    digest = hashlib.sha256()
    for tensor in tensors_of(probe):
        digest.update(f"{tensor.dtype} {tensor.shape}".encode())
        with ignored(RuntimeError):  # a layout without bytes to read, such as sparse
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return "a function" if callable(probe) else f"inputs {digest.hexdigest()[:8]}"


def _is_enough(counts: Iterable[tuple[int, int]], wanted: int) -> bool:
    """Whether batches together hold enough rows and sequences."""
    rows, sequences = map(sum, zip((0, 0), *counts, strict=True))
    return rows >= wanted and sequences >= min(_SEQUENCES, wanted)


def _count(batch: Any) -> tuple[int, int]:
    """Return the expected rows of a batch, judged by its mask or token ids, and its sequences."""
    sequences = count_sequences(batch)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return int(mask.count_nonzero()), sequences
    ids = [one for one in tensors_of(batch) if one.ndim > 1 and not one.is_floating_point()]
    return ids[0].shape[:2].numel() if ids else _ROWS_WITHOUT_IDS * sequences, sequences


def _batches_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a copy of a loader, so that its owner's iteration goes on undisturbed."""
    if isinstance(loader, DataLoader):
        loader = copy.copy(loader)
        # Persistent workers would restart for their owner too; a loader refuses to be changed.
        vars(loader).update(_iterator=None, pin_memory=False)
    yield from loader


def _draw(batches: Iterator[Any], group: RankGroup) -> tuple[Any, list[tuple[int, int]] | None]:
    """Draw this rank's next batch, and count the rows and sequences of all ranks; a collective.

    Ranks with the same tokens count once. There is no count if some rank has no more batches.
    Raises ValueError if a rank's loader fails.
    """
    batch, failure = _next(batches)
    reports = group.all_gather((None if batch is None else _count(batch), failure))
    for rank, (_, why) in enumerate(reports):
        if why:
            where = f"rank {rank}: " if group.members > 1 else ""
            raise ValueError(f"{where}the loader of the probe failed: {why}")
    by_tokens = {group.data_rank_of(rank): one for rank, (one, _) in enumerate(reports)}
    counts = [one for one in by_tokens.values() if one is not None]
    return batch, counts if len(counts) == len(by_tokens) else None


def _next(batches: Iterator[Any]) -> tuple[Any, str]:
    """Return the next batch on the host (None at the end), and the error message if that failed."""
    try:
        return _to_host(next(batches, None)), ""
    except failures() as error:  # the loader belongs to the user
        return None, f"{type(error).__name__}: {error}"


def _to_host(batch: Any) -> Any:
    """Copy a batch to the host, because a loader may fill the same tensors again.

    Offered batches are copied once more when they are taken, outside of inference mode.
    """
    if isinstance(batch, Tensor):
        return batch.detach().to("cpu", copy=True)
    if isinstance(batch, Mapping):
        return {name: _to_host(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(map(_to_host, batch))
    return batch


__all__ = ["HeldOut", "describe_probe", "is_loader"]
