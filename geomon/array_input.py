"""Rows and labels from arrays and tensors of any kind, or one line that says what is wrong."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from geomon.note import Note

# From here on, float64 does not hold every whole number.
_WHOLE_IN_FLOAT64 = 2**53


class Rows(NamedTuple):
    """Rows that kernels take, and what is known of the numbers that were given.

    Attributes:
        values: The rows on the host, [tokens, width], floating-point with 2 bytes a number or more.
        precision: Spacing of the given numbers at 1: eps of the type they had.
        notes: Remarks on what the conversion changed.
    """

    values: Tensor
    precision: float
    notes: list[Note]


def as_rows(hidden: Any) -> Rows:
    """Convert a matrix of hidden states to rows that the kernels take.

    Masked entries become NaN. Sparse tensors become dense ones, whole numbers float64.

    Args:
        hidden: Rows, [tokens, width]: a tensor, an array, or nested lists.

    Raises:
        ValueError: `hidden` is no matrix of real numbers, or has no columns.
    """
    given = _as_tensor("hidden states [tokens, width]", hidden)
    if given.is_complex():
        raise ValueError(
            f"expected real hidden states, got {given.dtype}: give the real part, or both parts "
            "side by side, torch.view_as_real(hidden).flatten(1)"
        )
    if given.ndim != 2:
        raise ValueError(
            f"expected hidden states [tokens, width], got {list(given.shape)}: flatten the leading "
            "dimensions, as in hidden.reshape(-1, hidden.shape[-1])"
        )
    if given.shape[1] < 1:
        raise ValueError(
            f"expected hidden states [tokens, width] of width 1 or more, got {list(given.shape)}"
        )
    if given.is_floating_point():
        # Types of one byte have no arithmetic of their own.
        values = given if given.element_size() > 1 else given.float()
        return Rows(values, torch.finfo(given.dtype).eps, [])
    values, notes = given.double(), []
    if bool((values.abs() >= _WHOLE_IN_FLOAT64).any()):
        words = "hidden holds whole numbers of 2^53 and above, which float64 rounds"
        notes.append(Note(words, words))
    return Rows(values, torch.finfo(torch.float64).eps, notes)


def as_labels(name: str, given: Any, count: int) -> Tensor:
    """Convert one label for each row to int64; labels that differ stay different.

    Args:
        name: Name of the argument, for the message.
        given: Whole numbers in any type, `count` of them in any shape.
        count: Number of rows.

    Raises:
        ValueError: There is another number of labels, or one is no whole number.
    """
    labels = _as_tensor(f"{name} as whole numbers", given).flatten()
    if len(labels) != count:
        raise ValueError(
            f"expected {count} {name}, one for each row of hidden states, got {len(labels)}"
        )
    if labels.dtype == torch.uint64:
        return labels.view(torch.int64)  # the same bits: only which are equal matters
    if labels.is_floating_point():
        labels = labels.double()
        # At 2^63 the conversion overflows; NaN fails both comparisons.
        whole = (labels == labels.round()) & (labels.abs() < 2.0**63)
    else:
        whole = torch.full_like(labels, not labels.is_complex(), dtype=torch.bool)
    if not bool(whole.all()):
        row = int((~whole).nonzero()[0])
        raise ValueError(
            f"expected {name} as whole numbers, got {labels[row].item()} at row {row}: number "
            f"other labels with numpy.unique({name}, return_inverse=True)[1]"
        )
    return labels.long()


def _as_tensor(expected: str, given: Any) -> Tensor:
    """Convert to a plain tensor on the host, whatever the default dtype and device are."""
    if isinstance(given, list | tuple) and given and all(isinstance(x, Tensor) for x in given):
        shapes = {tuple(x.shape) for x in given}
        if len(shapes) > 1:
            raise ValueError(
                f"expected {expected}, got a list of tensors of shapes {sorted(shapes)}: join them "
                "first, as in torch.cat(hidden)"
            )
        given = torch.stack([_plain(expected, x) for x in given])
    if isinstance(given, Tensor):
        return _plain(expected, given)
    return torch.from_numpy(_as_array(expected, given)).to("cpu")


def _plain(expected: str, given: Tensor) -> Tensor:
    """Bring a tensor of any layout to a dense one on the host."""
    if given.is_nested:
        raise ValueError(
            f"expected {expected}, got a nested tensor: join its parts first, as in "
            "torch.cat(hidden.unbind())"
        )
    if given.is_quantized:
        raise ValueError(f"expected {expected}, got a quantised tensor: give hidden.dequantize()")
    if given.is_meta:
        raise ValueError(f"expected {expected}, got a tensor on the meta device, without numbers")
    given = given.detach()
    dense = given if given.layout == torch.strided else given.to_dense()
    return dense.cpu()


def _as_array(expected: str, given: Any) -> np.ndarray[Any, Any]:
    """Convert to an array of numbers in memory of its own, in the machine's order of bytes."""
    try:
        array: np.ndarray[Any, Any] = np.asanyarray(given)
        if array.dtype == object:
            array = np.array(array.tolist())
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).split(". ")[0]
        raise ValueError(f"expected {expected}, got what makes no array: {reason}") from error
    if array.dtype.kind not in "biufc":
        kind = "objects" if array.dtype == object else str(array.dtype)
        raise ValueError(
            f"expected {expected}, got an array of {kind}: convert it to numbers first, as in "
            "array.astype(numpy.float32); labels with numpy.unique(labels, return_inverse=True)[1]"
        )
    if array.dtype.kind in "fc" and array.dtype.itemsize > (8 if array.dtype.kind == "f" else 16):
        with np.errstate(over="ignore", under="ignore"):  # too large is inf, which is left out
            array = array.astype(np.float64 if array.dtype.kind == "f" else np.complex128)
    if np.ma.is_masked(array):
        floating: Any = array if array.dtype.kind == "f" else array.astype(np.float64)
        array = floating.filled(np.nan)
    # A copy: a tensor cannot have negative strides, another order of bytes or read-only memory.
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
