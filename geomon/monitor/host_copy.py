"""Copies from a device to the host that nobody waits for."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.capture import HOST, queue_copy


class HostCopy(NamedTuple):
    """A tensor on the host, or on its way there from a CUDA device.

    Attributes:
        values: The tensor, whose numbers may not be there yet.
        event: Event behind the copy, or None if it is made.
    """

    values: Tensor
    event: Any = None

    @property
    def is_made(self) -> bool:
        """Whether the numbers are there."""
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Wait until the numbers are there."""
        if self.event is not None:
            self.event.synchronize()


def copy_to_host(values: Tensor) -> HostCopy:
    """Copy a tensor to the host, behind the queued work of its device.

    Only a CUDA device makes copies later; others are waited for.

    Args:
        values: The tensor.
    """
    if not values.is_cuda:
        return HostCopy(values.detach().to(HOST, copy=True))
    copy = queue_copy(values.detach(), HOST)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return HostCopy(copy, event)


__all__ = ["HostCopy", "copy_to_host"]
