"""Products of matrices that are exact at least to float32, whatever the training has set.

Settings of the whole process, which the training needs and which are not geomon's to change, may
have float32 factors rounded before they are multiplied: on an accelerator to TF32, on a processor
with matrix units to bfloat16 (`torch.set_float32_matmul_precision`, `torch.backends`). Autocast is
a setting of a thread.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

# Columns that are multiplied at a time with themselves and all that follow: at most, and at least.
_COLUMNS, _FEW_COLUMNS = 128, 32


def as_factor(values: Tensor) -> Tensor:
    """Convert numbers so that the products of matrices of them are exact at least to float32.

    Args:
        values: Floating-point numbers, of any shape.

    Returns:
        The numbers in float32, or where its products are not exact, or for float64, in float64.
    """
    dtype = values.dtype
    # No setting rounds to fewer bits than bfloat16 has; TF32 has as many as float16.
    keeps = dtype == torch.bfloat16 or (dtype == torch.float16 and values.device.type != "cpu")
    if keeps:
        return values.float()
    return values.to(torch.promote_types(dtype, factor_type(values.device)))


def factor_type(device: torch.device) -> torch.dtype:
    """Choose the shortest type of factors whose products are exact to float32 (see `as_factor`).

    Args:
        device: Where the products are made.
    """
    # On MPS nothing is rounded, and there is no float64.
    exact = device.type == "mps" or (device.type == "cpu" and _is_exact_on_host())
    return torch.float32 if exact else torch.float64


@contextlib.contextmanager
def without_autocast(kinds: Iterable[str]) -> Iterator[None]:
    """Leave autocast out in this thread, where it is on.

    Where it is off, as in each thread that measures, nothing is entered: a thread that leaves its
    outermost autocast empties the cache of cast weights, which all threads of the process share.

    Args:
        kinds: Kinds of devices, "cpu" or "cuda".
    """
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def product_with_itself(rows: Tensor) -> Tensor:
    """Multiply rows^T with rows, [..., width, width].

    Of wide rows what lies below the diagonal is copied. By torch alone: numpy computes half of such
    a product too, but its threads wait for work by running, and take the cores from torch's.

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
    """Say whether no setting allows float32 products on the host to be rounded.

    What becomes of one that does depends on the processor, and there on the shape of the product:
    trying one product says nothing of others. The older interface of the settings refuses to be
    read once the newer one was used.
    """
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    return matmul.fp32_precision in ("none", "ieee")
