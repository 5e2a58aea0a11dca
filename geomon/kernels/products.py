"""Matrix products that are exact at least to float32, regardless of the training's settings.

Process-wide settings, which the training needs and geomon must not change, may round float32
factors before they are multiplied: to TF32 on an accelerator, to bfloat16 on a processor with
matrix units (`torch.set_float32_matmul_precision`, `torch.backends`). Autocast is a per-thread
setting.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

# Most and fewest columns that are multiplied at a time with themselves and all later ones.
_COLUMNS, _FEW_COLUMNS = 128, 32


def as_factor(values: Tensor) -> Tensor:
    """Convert numbers so that their matrix products are exact at least to float32.

    Args:
        values: Floating-point numbers, of any shape.

    Returns:
        The numbers in float32, or in float64 if they are float64 or float32 products are inexact.
    """
    dtype = values.dtype
    # No setting rounds to fewer bits than bfloat16 has; TF32 has as many as float16.
    keeps = dtype == torch.bfloat16 or (dtype == torch.float16 and values.device.type != "cpu")
    if keeps:
        return values.float()
    return values.to(torch.promote_types(dtype, factor_type(values.device)))


def factor_type(device: torch.device) -> torch.dtype:
    """Return the shortest factor type whose products are exact to float32 (see `as_factor`).

    Args:
        device: Device where the products are computed.
    """
    # MPS rounds nothing, and lacks float64.
    exact = device.type == "mps" or (device.type == "cpu" and _is_exact_on_host())
    return torch.float32 if exact else torch.float64


@contextlib.contextmanager
def without_autocast(kinds: Iterable[str]) -> Iterator[None]:
    """Disable autocast in this thread if it is on.

    If it is off, as in every measuring thread, nothing is done: a thread that leaves its outermost
    autocast empties the cache of cast weights, which all threads share.

    Args:
        kinds: Kinds of devices, "cpu" or "cuda".
    """
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def product_with_itself(rows: Tensor) -> Tensor:
    """Multiply rows^T by rows, [..., width, width].

    For wide rows, the part below the diagonal is copied. Numpy also computes only half of such a
    product, but its threads wait by spinning and take cores from torch's.

    Args:
        rows: Matrices in float64, [..., tokens, width].
    """
    width = rows.shape[-1]
    if width < 4 * _FEW_COLUMNS:
        return rows.mT @ rows
    whole = rows.new_empty(*rows.shape[:-2], width, width)
    step = min(_COLUMNS, width // 4)
    for start in range(0, width, step):
        own, others = slice(start, start + step), slice(start, None)
        found = rows[..., own].mT @ rows[..., others]
        whole[..., own, others] = found
        whole[..., others, own] = found.mT
    return whole


def _is_exact_on_host() -> bool:
    """Whether all settings keep float32 products on the host from being rounded.

    The effect of a setting depends on the processor, and there on the product's shape, so a trial
    product proves nothing. The older interface of the settings cannot be read after the newer one
    was used.
    """
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return matmul.fp32_precision in ("none", "ieee")
