"""Watches each logged loss, without waiting for the device that computes it."""

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from geomon.analysis import (
    FEWEST_READINGS,
    MOST_READINGS,
    QUIET_READINGS,
    SLOW_STRIDE,
    measure_distance,
    start_of_window,
)
from geomon.capture import unseen
from geomon.failures import ignored
from geomon.monitor.host_copy import HostCopy, copy_to_host
from geomon.monitor.logged import copy_number

_LOSS = "loss"  # is in the names of losses
_OTHERS = ("val", "test")  # are in those of losses that are NaN where nothing was evaluated
# Losses of so many steps are averaged, because single batches scatter.
_STEPS = 4
# Smallest and largest half width of the band, as shares of the last losses. A learning rate that
# drops moves the loss by less.
_LEAST, _LARGEST = 0.15, 0.6
# The band is never narrower than so many deviations of one mean from the next, however large.
_DEVIATIONS = 6.0
# A fall is strange only once the loss is below this share of the first losses: a model that has
# learned nothing yet may suddenly find out how to copy.
_LEARNED = 0.85


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


class Jump(NamedTuple):
    """A logged loss that left its band.

    Attributes:
        step: Step of the last of the losses.
        name: Name under which they were logged.
        value: Their mean.
        low: Lower end of the band.
        high: Upper end of the band.
    """

    step: int
    name: str
    value: float
    low: float
    high: float


class _Line:
    """Means of a loss, to whose line the next one is compared."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._means: list[float] = []

    def add(self, step: int, mean: float) -> tuple[float, float] | None:
        """Add a mean; return expected value and half width if this one and the last are outside."""
        found = self._compare(step, mean) if len(self._means) >= FEWEST_READINGS else None
        self._steps = [*self._steps, step][-MOST_READINGS - 1 :]
        self._means = [*self._means, mean][-MOST_READINGS - 1 :]
        return found

    def _compare(self, step: int, mean: float) -> tuple[float, float] | None:
        usual = statistics.median(self._means[-QUIET_READINGS:])
        least = _LEAST * abs(usual)
        if abs(mean - usual) <= least:  # so that most steps cost nothing
            return None
        history = np.array(self._means[start_of_window(self._steps, step) :])[:, None]
        scatter = _DEVIATIONS * statistics.median(np.abs(np.diff(self._means)).tolist())
        limits = max(least, scatter), max(_LARGEST * abs(usual), scatter)
        distance = measure_distance(history, np.array([mean]), *limits)
        is_outside = bool(distance.size[0] > 1)
        return (distance.expected.item(), distance.width.item()) if is_outside else None


class LossBand:
    """The band of one logged loss, in means over 4 steps."""

    def __init__(self) -> None:
        self._all, self._slow = _Line(), _Line()  # all means, and every fifth
        self._group: list[float] = []
        self._began = self._last = -1
        self._count = 0
        self._first = math.nan  # the first mean
        self._quiet = QUIET_READINGS  # means since one was outside

    def add(self, step: int, loss: float) -> tuple[float, float, float] | None:
        """Add a finite loss; return the mean that it completes and its band, if that is left.

        Args:
            step: Step of the loss. If it is earlier than the last one, the band starts anew.
            loss: The loss.
        """
        if step < self._last:
            vars(self).update(vars(LossBand()))
        if not self._group:
            self._began = step
        self._group.append(loss)
        # Whether only some steps are logged cannot be known at the first one.
        is_sparse = 0 <= self._last <= step - _STEPS
        self._last = step
        return self._close() if is_sparse or step > self._began + _STEPS - 2 else None

    def _close(self) -> tuple[float, float, float] | None:
        """Compare the mean of a group of losses with the means before."""
        mean = statistics.fmean(self._group)
        self._group.clear()
        band = self._all.add(self._last, mean)
        if self._count % SLOW_STRIDE == 0:
            band = self._slow.add(self._last, mean) or band
        self._first = self._first if self._count else mean
        self._count += 1
        has_learned = band is not None and band[0] < _LEARNED * self._first
        if band is None or (mean < band[0] and not has_learned):
            self._quiet += 1
            return None
        is_news, self._quiet = self._quiet >= QUIET_READINGS, 0
        expected, width = band
        return (mean, expected - width, expected + width) if is_news else None


class LossWatch:
    """Looks at each logged loss; one that has not been finite before is not news.

    After a loss that is not finite, the next one is news once 12 in a row were finite. The Trainer
    logs 0 in between.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[int, str, HostCopy]] = []
        self._finite: dict[str, int] = {}  # how many losses in a row were finite, by name
        self._told: set[str] = set()  # names under which one was not
        self._bands: dict[str, LossBand] = {}

    def put(self, step: int, values: Mapping[str, Any]) -> list[NotFinite | Jump]:
        """Take the values of a step; return the losses that are not finite any more, and jumps.

        Losses of a CUDA device are looked at by the call after their copies are made. Other
        accelerators would have to be waited for, so their losses are passed over.
        """
        with ignored(), unseen():  # the reading of a step says why a value cannot be read
            for name, value in values.items():
                words = name.lower()
                is_watched = _LOSS in words and not any(other in words for other in _OTHERS)
                if is_watched and (copy := _copied(value)) is not None:
                    self._copies.append((step, name, copy))
        found: list[NotFinite | Jump] = []
        while self._copies and self._copies[0][2].is_made:
            of, name, copy = self._copies.pop(0)
            number = copy.values.item()
            if math.isfinite(number):
                self._finite[name] = self._finite.get(name, 0) + 1
                jump = self._bands.setdefault(name, LossBand()).add(of, number)
                if jump is not None:
                    found.append(Jump(of, name, *jump))
            elif self._finite.pop(name, 0) >= (QUIET_READINGS if name in self._told else 1):
                self._told.add(name)
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


__all__ = ["Jump", "LossWatch", "NotFinite"]
