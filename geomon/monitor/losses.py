"""Notices a loss that is not finite, without waiting for the device that computes it."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.capture.modes import unseen
from geomon.failures import ignored
from geomon.monitor.logged import copy_number

_LOSS = "loss"  # is in the names of losses


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


class _Copy(NamedTuple):
    """A loss, or its copy on the way from a CUDA device.

    Attributes:
        step: Step of the loss.
        name: Name under which it was logged.
        value: The loss.
        event: Event behind the copy; None for a loss of the host.
    """

    step: int
    name: str
    value: Tensor | float
    event: Any


class LossWatch:
    """Looks at each logged loss; one that has not been finite before is not news."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self._finite: set[str] = set()  # names whose last loss was finite

    def put(self, step: int, values: Mapping[str, Any]) -> list[NotFinite]:
        """Take the values of a step, and return the losses that are not finite any more.

        Losses of a CUDA device are returned by the call after their copies are made. Other
        accelerators would have to be waited for, so their losses are passed over.
        """
        with ignored(), unseen():  # the reading of a step says why a value cannot be read
            for name, value in values.items():
                if _LOSS in name.lower() and value is not None:
                    self._copies += _queued(step, name, copy_number(value))
        found = []
        while self._copies and (self._copies[0].event is None or self._copies[0].event.query()):
            copy = self._copies.pop(0)
            value = float(copy.value)
            if math.isfinite(value):
                self._finite.add(copy.name)
            elif copy.name in self._finite:
                self._finite.remove(copy.name)
                found.append(NotFinite(copy.step, copy.name, value))
        return found


def _queued(step: int, name: str, value: Tensor | float | None) -> list[_Copy]:
    """Queue the copy of a loss to the host, without waiting for it."""
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return [] if value is None else [_Copy(step, name, float(value), None)]
    if not value.is_cuda or value.is_complex():
        return []
    copy = torch.empty((), dtype=value.dtype, pin_memory=True)
    copy.copy_(value.reshape(()), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return [_Copy(step, name, copy, event)]


__all__ = ["LossWatch", "NotFinite"]
