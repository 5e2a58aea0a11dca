"""Notices a loss that is not finite, without waiting for the device that computes it."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.capture.modes import unseen
from geomon.failures import ignored
from geomon.monitor.host_copy import HostCopy, copy_to_host
from geomon.monitor.logged import copy_number

_LOSS = "loss"  # is in the names of losses
_OTHERS = ("val", "test")  # are in those of losses that are NaN where nothing was evaluated


class NotFinite(NamedTuple):
    """A logged loss that is not finite.

    Attributes:
        step: Step of the loss.
        name: Name under which it was logged.
        value: NaN or an infinity.
    """

    step: int
    name: str
    value: float


class LossWatch:
    """Looks at each logged loss; one that has not been finite before is not news."""

    def __init__(self) -> None:
        self._copies: list[tuple[int, str, HostCopy]] = []
        self._finite: set[str] = set()  # names whose last loss was finite

    def put(self, step: int, values: Mapping[str, Any]) -> list[NotFinite]:
        """Take the values of a step, and return the losses that are not finite any more.

        Losses of a CUDA device are returned by the call after their copies are made. Other
        accelerators would have to be waited for, so their losses are passed over.
        """
        with ignored(), unseen():  # the reading of a step says why a value cannot be read
            for name, value in values.items():
                words = name.lower()
                is_watched = _LOSS in words and not any(other in words for other in _OTHERS)
                if is_watched and (copy := _copied(value)) is not None:
                    self._copies.append((step, name, copy))
        found = []
        while self._copies and self._copies[0][2].is_made:
            of, name, copy = self._copies.pop(0)
            number = copy.values.item()
            if math.isfinite(number):
                self._finite.add(name)
            elif name in self._finite:
                self._finite.remove(name)
                found.append(NotFinite(of, name, number))
        return found


def _copied(value: Any) -> HostCopy | None:
    """Copy a loss to the host, unless it is complex or its device would have to be waited for."""
    number = copy_number(value)
    if number is None:
        return None
    loss = number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)
    if loss.device.type not in ("cpu", "cuda") or loss.is_complex():
        return None
    return copy_to_host(loss)


__all__ = ["LossWatch", "NotFinite"]
