"""Convert arrays and tensors to rows and labels, or say in one line what is wrong."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

# From here on, float64 cannot represent every whole number.
_WHOLE_IN_FLOAT64 = 2**53


def as_rows(hidden: Any) -> tuple[Tensor, float]:
    """Convert a matrix of hidden states to rows for the kernels.

    Sparse tensors become dense, and whole numbers float64.

    Args:
        hidden: Rows, [tokens, width]: a tensor, an array, or nested lists.

    Returns:
        The rows on the host, [tokens, width], floating-point with at least 2 bytes per number, and
        the spacing of the given numbers at 1 (eps of their original type).

    Raises:
        ValueError: If `hidden` is not a matrix of real numbers, or has no columns.
    """
    given = _as_tensor("hidden states [tokens, width]", hidden)
    if given.is_complex():
        raise ValueError(
            f"expected real hidden states, got {given.dtype}: pass the real part, or both parts "
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
        # One-byte types have no arithmetic.
        values = given if given.element_size() > 1 else given.float()
        return values, torch.finfo(given.dtype).eps
    values = given.double()
    if (values.abs() >= _WHOLE_IN_FLOAT64).any():
        raise ValueError(
            "expected hidden states of whole numbers below 2^53, got larger ones: pass them as "
            "floating-point numbers"
        )
    return values, torch.finfo(torch.float64).eps


def as_labels(name: str, given: Any, count: int) -> Tensor:
    """Convert one label per row to int64, such that different labels stay different.

    Args:
        name: Name of the argument, for the message.
        given: Whole numbers of any type, `count` of them in any shape.
        count: Number of rows.

    Returns:
        The labels, int64, [count].

    Raises:
        ValueError: If there is a different number of labels, or one is not a whole number.
    """
    labels = _as_tensor(f"{name} as whole numbers", given).flatten()
    if len(labels) != count:
        raise ValueError(
            f"expected {count} {name}, one for each row of hidden states, got {len(labels)}"
        )
    if labels.dtype == torch.uint64:
        return labels.view(torch.int64)  # same bits, because only equality matters
    if labels.is_floating_point():
        labels = labels.double()
        # At 2^63 the conversion overflows; NaN fails both comparisons.
        whole = (labels == labels.round()) & (labels.abs() < 2.0**63)
    else:
        whole = torch.full_like(labels, not labels.is_complex(), dtype=torch.bool)
    if not whole.all():
        row = int((~whole).nonzero()[0])
        raise ValueError(
            f"expected {name} as whole numbers, got {labels[row].item()} at row {row}: number "
            f"other labels with numpy.unique({name}, return_inverse=True)[1]"
        )
    return labels.long()


def _as_tensor(expected: str, given: Any) -> Tensor:
    """Convert to a plain tensor on the host, regardless of default dtype and device."""
    if isinstance(given, list | tuple) and given and all(isinstance(x, Tensor) for x in given):
        shapes = {tuple(x.shape) for x in given}
        if len(shapes) > 1:
            raise ValueError(
                f"expected {expected}, got a list of tensors of shapes {sorted(shapes)}: join them "
                "first, as in torch.cat(hidden)"
            )
        given = torch.stack(given)
    if not isinstance(given, Tensor):
        return torch.from_numpy(_as_array(expected, given)).to("cpu")
    kinds = {"nested": given.is_nested, "quantised": given.is_quantized, "meta": given.is_meta}
    for kind, is_so in kinds.items():
        if is_so:
            raise ValueError(
                f"expected {expected}, got a {kind} tensor: pass a plain one with numbers, such as "
                "torch.cat(hidden.unbind()) or hidden.dequantize()"
            )
    return given.detach().to_dense().cpu()


def _as_array(expected: str, given: Any) -> np.ndarray[Any, Any]:
    """Convert to an array of numbers with its own memory, in native byte order."""
    if isinstance(given, np.ma.MaskedArray):
        raise ValueError(
            f"expected {expected}, got a masked array: pass array.filled(numpy.nan), because rows "
            "that are not finite are left out"
        )
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).split(". ")[0]
        raise ValueError(f"expected {expected}, but the input is not an array: {reason}") from error
    if array.dtype.kind not in "biufc" or array.dtype.char in "gG":
        kind = "objects" if array.dtype == object else array.dtype
        raise ValueError(
            f"expected {expected}, got an array of {kind}: convert it to numbers first, as in "
            "array.astype(numpy.float32); labels with numpy.unique(labels, return_inverse=True)[1]"
        )
    # A copy, because tensors cannot have negative strides, other byte orders or read-only memory.
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)


__all__ = ["as_labels", "as_rows"]
