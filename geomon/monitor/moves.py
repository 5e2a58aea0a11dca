"""How far trainable weights move from look to look, and which of them stand still."""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from geomon.capture import Layer, unseen
from geomon.monitor.host_copy import HostCopy, copy_to_host
from geomon.record import Stacks, main_stack

# Numbers of each weight that are compared. With them the size of a block's update is known to 5 %.
_NUMBERS = 256
# Steps without a move after which weights stand still. A learning rate warms up from 0, and two
# optimizers may take turns.
_STILL = 40
# An embedding moves where tokens come. It stands still if so many of its numbers should have moved,
# judged by the looks before.
_MISSED = 20.0
# A learning rate is steady if it changed by no more than a factor over so many steps. Else momentum
# still carries updates of another rate.
_STEADY, _FACTOR = 40, 2.0
_RATES = 1024  # most that are remembered between two looks
# Smallest size of an update in a ratio of two, so that blocks that all stand still are equal.
_TINY = 1e-12
# Name of the view, and of its source.
_VIEW, _SOURCE = "weight_moves", "moves"


class Still(NamedTuple):
    """Weights that have not moved.

    Attributes:
        names: Their names in the model.
        layers: Depths of the blocks that hold them, in a model with one stack; 0 for an embedding.
        steps: Number of steps since they were first seen as they are.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]
    steps: int


# Stack and depth of a block.
Place = tuple[str, int]


class _Weight(NamedTuple):
    """A watched weight: its name, its block, its size on this rank, and what it is."""

    name: str
    place: Place | None  # None outside of all blocks
    size: int
    is_matrix: bool
    is_embedding: bool


class _Look(NamedTuple):
    step: int
    weights: list[_Weight]
    numbers: Tensor  # [weights, _NUMBERS], on their device


@dataclass(frozen=True)
class Moves:
    """How far the weights have moved between two looks.

    Attributes:
        step: Step of the later look.
        steps: Number of steps between the two.
        weights: The weights.
        copy: Sums over some numbers of each weight, [3, weights]: squares of changes, squares of
            the numbers before, and how many did not change.
        stacks: Names of the stacks of blocks.
        rate: Learning rate between the looks; NaN if it is unknown or not steady.
    """

    step: int
    steps: int
    weights: Sequence[_Weight]
    copy: HostCopy
    stacks: Sequence[str]
    rate: float

    @functools.cached_property
    def sums(self) -> NDArray[np.float64]:
        """The sums for whole weights, which wait for the copy."""
        self.copy.wait()
        counts = np.array([weight.size for weight in self.weights])
        return self.copy.values.double().numpy() * (counts / _NUMBERS)

    def complete(self, stacks: Stacks) -> None:
        """Put the sizes of vectors (gains of norms) and of the output layer into a reading."""
        vectors = [not weight.is_matrix for weight in self.weights]
        head = [
            weight.is_matrix and not weight.is_embedding and weight.place is None
            for weight in self.weights
        ]
        found = {name: of for name, of in (("norms", vectors), ("head", head)) if any(of)}
        if stacks and (column := stacks[main_stack(stacks)].get("update_size")) is not None:
            column.whole |= {name: self._size(of) for name, of in found.items()}

    def added_to(self, layer: Layer) -> Layer:
        """Return a layer with the view of its block's moves, or of the embeddings' at depth 0."""
        view = None if layer.of_weights else self._views.get((layer.stack, layer.index))
        if view is None:
            return layer
        captured = {**layer.captured, _VIEW: view}
        return replace(layer, captured=captured, sources=layer.sources | {_SOURCE})

    @functools.cached_property
    def _views(self) -> dict[Place, Tensor]:
        """Size and share of unmoved numbers of each layer, with those relative to the median."""
        members = self._members()
        found: dict[Place, Tensor] = {}
        for stack in dict.fromkeys(stack for stack, _ in members):
            sizes = {place: self._size(of) for place, of in members.items() if place[0] == stack}
            unmoved = {place: self._unmoved(members[place]) for place in sizes}
            blocks = [place for place in sizes if place[1]] or [*sizes]
            median = statistics.median(sizes[place] for place in blocks)
            usual = statistics.median(unmoved[place] for place in blocks)
            for place, size in sizes.items():
                # Embeddings, of which few rows move in a step, go their own way.
                relative = (size + _TINY) / (median + _TINY) if place[1] else math.nan
                over_rate = size / self.rate if place[1] else math.nan
                share = unmoved[place]
                values = size, relative, share, share - usual, over_rate
                found[place] = torch.tensor(values, dtype=torch.float64, device="cpu")
        return found

    def _members(self) -> dict[Place, list[int]]:
        """Find the matrices of each block, and the embeddings, which are layer 0 of all stacks."""
        members: dict[Place, list[int]] = {}
        for index, weight in enumerate(self.weights):
            if weight.place is not None and weight.is_matrix:
                members.setdefault(weight.place, []).append(index)
            elif weight.place is None and weight.is_embedding:
                for stack in self.stacks:
                    members.setdefault((stack, 0), []).append(index)
        return members

    def _size(self, of: Sequence[int] | Sequence[bool]) -> float:
        """Norm of the change over the norm of some weights, for each step."""
        change, norm, _ = self.sums[:, of].sum(axis=1)
        return float(np.sqrt(change / norm)) / self.steps if norm > 0 else 0.0

    def _unmoved(self, of: Sequence[int]) -> float:
        return float(self.sums[2, of].sum() / sum(self.weights[index].size for index in of))


class WeightWatch:
    """Compares some numbers of each trainable weight between looks.

    A weight stands still if its numbers stay equal while another weight's numbers change. Rows of
    an embedding move only if their tokens come, so it counts once many numbers that used to move
    have not. Biases are left out, because the bias of keys gets no gradient. Nothing waits for a
    CUDA device: weights that stand still there are found at the look after the copy is made. If
    ranks share a weight, the part on this rank counts.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last: _Look | None = None
        self._latest: Moves | None = None  # that end at the last look
        self._pending: list[Moves] = []
        self._since: dict[str, int] = {}  # step since which a weight is as it is
        self._usual: dict[str, tuple[float, int]] = {}  # moved numbers of embeddings, and looks
        self._missed: dict[str, float] = {}  # numbers of embeddings that should have moved
        self._said: set[str] = set()
        self._trainable: set[str] = set()  # names of weights that are, or once were
        self._rates: dict[int, float] = {}  # learning rates of the last steps

    def note_rate(self, step: int, rate: float) -> None:
        """Note the learning rate of a step, for the looks after it."""
        self._rates[step] = rate
        if len(self._rates) > _RATES:
            del self._rates[next(iter(self._rates))]

    def look(self, step: int, places: Callable[[], Mapping[int, Place]]) -> Moves | None:
        """Look at the weights of a step; return how they moved since the look before, if known.

        Args:
            step: Number of optimizer updates already in the weights.
            places: Returns the block of each module in one, by the module's `id`.
        """
        last = self._last
        if last is not None and step == last.step:
            return self._latest
        with torch.no_grad(), unseen():
            blocks = places()
            now = self._see(step, blocks)
            self._last, self._latest = now, None
            if last is None or now is None or step < last.step or not _are_alike(last, now):
                self._pending.clear()
                self._since.clear()
                self._missed.clear()
                return None
            copy = copy_to_host(_sums(last.numbers, now.numbers))
        stacks = [*dict.fromkeys(stack for stack, _ in blocks.values())]
        rate = self._rate(last.step, step)
        self._latest = Moves(step, step - last.step, now.weights, copy, stacks, rate)
        self._pending.append(self._latest)
        return self._latest

    def _rate(self, begin: int, end: int) -> float:
        """Return the mean learning rate between two steps; NaN if it is unknown or not steady."""
        since = max((step for step in self._rates if step <= end - _STEADY), default=-1)
        self._rates = {step: rate for step, rate in self._rates.items() if step >= since}
        between = [rate for step, rate in self._rates.items() if begin <= step < end]
        before = [rate for step, rate in self._rates.items() if step < end]
        lowest, highest = (of(before, default=0.0) for of in (min, max))
        is_steady = since >= 0 and bool(between) and 0 < highest <= _FACTOR * lowest
        return sum(between) / len(between) if is_steady else math.nan

    def news(self) -> tuple[int, Still] | None:
        """Return the weights that were found to stand still by now, once, and the step."""
        still: list[str] = []
        step = -1
        while self._pending and self._pending[0].copy.is_made:
            moves = self._pending.pop(0)
            step = moves.step
            still = self._standing(moves)
        is_news = not self._said.issuperset(still)
        self._said = set(still) if step >= 0 else self._said
        if not is_news:
            return None
        of = [weight for weight in moves.weights if weight.name in still]
        depths = {
            each.place[1] if each.place else 0 for each in of if each.place or each.is_embedding
        }
        layers = sorted(depths) if len(moves.stacks) == 1 else ()  # else a depth is ambiguous
        steps = min(step - self._since[name] for name in still)
        return step, Still(tuple(still), tuple(layers), steps)

    def _standing(self, moves: Moves) -> list[str]:
        """Note which weights have moved; return the names of those that stand still by now."""
        moved = _NUMBERS - moves.copy.values[2].double().numpy()
        if not moved.any():
            return []
        before = moves.step - moves.steps
        found = []
        for weight, count in zip(moves.weights, moved.tolist(), strict=True):
            since = self._since.setdefault(weight.name, before)
            self._since[weight.name] = moves.step if count else since
            if count:
                self._missed.pop(weight.name, None)
            is_still = moves.step - self._since[weight.name] >= _STILL
            if weight.is_embedding:
                is_still = self._misses(weight.name, count) and is_still
            if is_still:
                found.append(weight.name)
        return found

    def _misses(self, name: str, count: float) -> bool:
        """Whether many numbers of an embedding should have moved since one did."""
        mean, looks = self._usual.get(name, (0.0, 0))
        if count:
            self._usual[name] = mean + (count - mean) / (looks + 1), looks + 1
            return False
        self._missed[name] = self._missed.get(name, 0.0) + mean
        return self._missed[name] >= _MISSED

    def _see(self, step: int, places: Mapping[int, Place]) -> _Look | None:
        """Take some numbers of the weights that training should move."""
        weights: list[_Weight] = []
        numbers: list[Tensor] = []
        for weight, some in self._numbers(places):
            weights.append(weight)
            numbers.append(some)
        if not weights:
            return None
        joined = torch.cat([each.to(numbers[0].device) for each in numbers])
        wide = joined if joined.element_size() >= 4 else joined.float()  # exact
        return _Look(step, weights, wide.view(len(weights), _NUMBERS))

    def _numbers(self, places: Mapping[int, Place]) -> Iterator[tuple[_Weight, Tensor]]:
        seen: set[int] = set()  # tied weights count once
        for place, module in self._model.named_modules():
            for own, weight in module._parameters.items():
                name = f"{place}.{own}".lstrip(".")
                if weight is None or own.endswith("bias") or id(weight) in seen:
                    continue
                seen.add(id(weight))
                if weight.requires_grad:
                    self._trainable.add(name)
                if name in self._trainable and (part := _part_of(weight)) is not None:
                    is_matrix = weight.ndim > 1 or part.ndim > 1 or "flat_param" in own
                    is_embedding = isinstance(module, nn.Embedding)
                    held = places.get(id(module)), part.numel(), is_matrix, is_embedding
                    yield _Weight(name, *held), _some(part)


def _are_alike(last: _Look, now: _Look) -> bool:
    return last.weights == now.weights and last.numbers.device == now.numbers.device


def _sums(last: Tensor, now: Tensor) -> Tensor:
    """Return sums over the numbers of each weight, [3, weights] (see `Moves`)."""
    unmoved = (now == last).sum(dim=1)
    return torch.stack([(now - last).square().sum(dim=1), last.square().sum(dim=1), unmoved])


def _part_of(weight: Tensor) -> Tensor | None:
    """Return this rank's part of a weight; None if it has none."""
    if is_lazy(weight):
        return None
    to_local: Any = getattr(weight, "to_local", weight.detach)
    values: Tensor | None = to_local()
    if (
        values is None
        or not values.numel()
        or not values.is_floating_point()
        or values.element_size() < 2
        or not values.data_ptr()
    ):
        return None  # a rank without a part, a quantised weight, or one that FSDP has freed
    return values


def _some(values: Tensor) -> Tensor:
    """Return some numbers of a weight, at places that no length of a row repeats."""
    stored = values.mT if values.ndim > 1 and values.mT.is_contiguous() else values
    stored = stored if stored.is_contiguous() else stored[:1].contiguous()
    if stored.numel() < _NUMBERS:
        stored = stored.reshape(-1).repeat(-(-_NUMBERS // stored.numel()))
    stride = stored.numel() // _NUMBERS
    while math.gcd(stride, stored.shape[-1]) > 1:
        stride -= 1
    return stored.as_strided((_NUMBERS,), (stride,), stored.storage_offset())


__all__ = ["Moves", "Still", "WeightWatch"]
