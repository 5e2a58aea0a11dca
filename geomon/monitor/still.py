"""Finds trainable weights that do not move, for example because no optimizer got them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from geomon.capture.modes import unseen
from geomon.monitor.host_copy import HostCopy, copy_to_host

# Numbers of each weight that are compared, and the fewest steps from one comparison to the next.
_NUMBERS, _EVERY = 64, 20
# Steps without a move after which weights stand still. A learning rate warms up from 0, and two
# optimizers may take turns.
_STILL = 40


class Still(NamedTuple):
    """Weights that have not moved.

    Attributes:
        names: Their names in the model.
        layers: Depths of the blocks that hold them, in a model with one stack.
        steps: Number of steps since they were first seen as they are.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]
    steps: int


class _Look(NamedTuple):
    step: int
    names: list[str]
    copy: HostCopy


class StillWeights:
    """Compares some numbers of each trainable weight between looks.

    A weight stands still if its numbers stay equal while those of another weight change. Embeddings
    are left out, because a row moves only if its token comes, and so are biases, because the bias
    of keys gets no gradient. On CUDA, a look compares the two looks before it, since it does not
    wait for its own copy. If ranks share a weight, the part on this rank counts.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._looks: list[_Look] = []
        self._since: dict[str, int] = {}  # step since which a weight is as it is
        self._said: set[str] = set()
        self._trainable: set[str] = set()  # names of weights that are, or once were

    def look(self, step: int, blocks: Sequence[str]) -> Still | None:
        """Look at the weights of a step; return those that are found to stand still, once.

        Args:
            step: Number of optimizer updates already in the weights.
            blocks: Names of the blocks by depth; none if they belong to several stacks.
        """
        last = self._looks[-1].step if self._looks else -_EVERY
        if step < last:  # training went back
            self._looks.clear()
            self._since.clear()
        elif step < last + _EVERY:
            return None
        with torch.no_grad(), unseen():
            found = [*self._numbers()]
            if not found:
                return None
            names, numbers = zip(*found, strict=True)
            self._looks.append(_Look(step, [*names], copy_to_host(_joined(numbers))))
        still: list[str] = []
        while len(self._looks) > 1 and self._looks[1].copy.is_made:
            if self._compare(*self._looks[:2]):
                still = self._standing(self._looks[1].step)
            self._looks.pop(0)
        return self._news(still, self._looks[0].step, blocks)

    def _standing(self, step: int) -> list[str]:
        return [name for name, since in self._since.items() if step - since >= _STILL]

    def _news(self, still: Sequence[str], step: int, blocks: Sequence[str]) -> Still | None:
        """Return the weights that stand still if some of them are new."""
        is_news = not self._said.issuperset(still)
        self._said = set(still)
        if not is_news:
            return None
        layers = [
            depth
            for depth, block in enumerate(blocks, 1)
            if any(name.startswith(f"{block}.") for name in still)
        ]
        steps = min(step - self._since[name] for name in still)
        return Still(tuple(still), tuple(layers), steps)

    def _numbers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and some numbers of the weights that training should move."""
        for place, module in self._model.named_modules():
            for own, weight in module._parameters.items():
                name = f"{place}.{own}".lstrip(".")
                if weight is None or own.endswith("bias") or isinstance(module, nn.Embedding):
                    continue
                if weight.requires_grad:
                    self._trainable.add(name)
                if name in self._trainable and (numbers := _numbers_of(weight)) is not None:
                    yield name, numbers

    def _compare(self, before: _Look, now: _Look) -> bool:
        """Note which weights have moved between two looks; return whether any has."""
        if before.names != now.names or before.copy.values.shape != now.copy.values.shape:
            self._since.clear()
            return False
        changed = (before.copy.values != now.copy.values).view(len(now.names), -1).any(dim=1)
        for name, has_moved in zip(now.names, changed.tolist(), strict=True):
            since = self._since.setdefault(name, before.step)
            self._since[name] = now.step if has_moved else since
        return bool(changed.any())


def _numbers_of(weight: Tensor) -> Tensor | None:
    """Return some numbers of a weight; None of one that has none here."""
    if is_lazy(weight):
        return None
    to_local: Any = getattr(weight, "to_local", weight.detach)
    values: Tensor | None = to_local()  # this rank's part, if ranks share the weight
    if (
        values is None
        or not values.numel()
        or not values.is_floating_point()
        or not values.data_ptr()
    ):
        return None  # a rank without a part, a quantised weight, or one that FSDP has freed
    flat = (values if values.is_contiguous() else values[:1]).reshape(-1)
    flat = flat if len(flat) >= _NUMBERS else flat.repeat(-(-_NUMBERS // len(flat)))
    return flat[:: len(flat) // _NUMBERS][:_NUMBERS]


def _joined(numbers: Sequence[Tensor]) -> Tensor:
    """Concatenate numbers, which may be on several devices."""
    device = numbers[0].device
    return torch.cat([each.to(device) for each in numbers])


__all__ = ["Still", "StillWeights"]
