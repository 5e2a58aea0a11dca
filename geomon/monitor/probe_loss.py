"""The loss on the inputs of a probe, computed from the model's output in the reading's pass.

One pass thus gives the geometry and the validation loss of the same weights on the same inputs.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from geomon.capture import MeanLoss
from geomon.monitor.logged import copy_number
from geomon.monitor.warnings import Warnings

# Function of the model's output and inputs that returns a number or a one-element tensor.
LossFunction = Callable[[Any, Any], Any]


class ProbeLoss:
    """Computes the loss of a probe's pass; an error becomes a warning, and the loss NaN."""

    def __init__(self, function: LossFunction, warnings: Warnings) -> None:
        self._function = function
        self._warnings = warnings

    def __call__(self, outputs: Any, inputs: Any) -> MeanLoss:
        """Compute the loss of the output and the inputs (or batch), waiting for the device."""
        found = math.nan

        def compute() -> None:
            nonlocal found
            loss = copy_number(self._function(outputs, inputs))
            if loss is None:
                raise TypeError("expected a number or a tensor of one, got None")
            found = float(loss)

        message = "probe_loss failed, and training/probe_loss is missing"
        self._warnings.attempt(compute, message, once=True)
        return MeanLoss(found, count_sequences(inputs))


def count_sequences(inputs: Any) -> int:
    """Count the sequences of a batch: the first size of its first tensor, or 1 without a tensor.

    Trainers weight the losses of batches by it.

    Example:
        >>> import torch
        >>> count_sequences({"name": "x", "ids": torch.zeros(4, 16)}), count_sequences([])
        (4, 1)
    """
    return next((tensor.shape[0] for tensor in tensors_of(inputs) if tensor.ndim), 1)


def tensors_of(inputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in dicts, tuples and lists, in order."""
    if isinstance(inputs, Tensor):
        yield inputs
        return
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs
    if isinstance(inputs, Mapping | tuple | list):
        for part in parts:
            yield from tensors_of(part)


__all__ = ["LossFunction", "ProbeLoss", "count_sequences", "tensors_of"]
