"""Products of 8-bit integers, and whether they are exact and fast on this machine."""

import functools
import threading
import time
from typing import Any

import torch
from torch import Tensor

LARGEST = 127  # of integers on both sides of 0

# Seconds of a product in float32 over that of integers from which on the integers are used.
_FASTER = 2.0
# Rows of the two factors that are tried, and columns.
_ROWS, _OTHERS, _TRIED = 128, 1024, 256
# Threads that ask at once wait for one answer: trials beside each other would time each other.
_TRYING = threading.Lock()


def multiply(one: Tensor, other: Tensor, out: Tensor) -> None:
    """Multiply two matrices of 8-bit integers.

    Args:
        one: [rows, width], int8; of one column alone, the product is wrong in torch 2.13.
        other: [width, columns], int8.
        out: Where the product goes, [rows, columns], int32.
    """
    torch._int_mm(one, other, out=out)


@functools.cache
def is_fast() -> bool:
    """Say whether 8-bit integers are multiplied exactly, and much faster than float32.

    This is tried once in a process.
    """
    with _TRYING:
        return _try_once()


@functools.cache
def _try_once() -> bool:
    """Try whether 8-bit integers are multiplied exactly, and much faster than float32."""
    if not is_exact(_TRIED):
        return False
    one, other = _factors(_TRIED)
    numbers = one.float(), other.float()
    out = torch.empty(len(one), other.shape[1], dtype=torch.int32, device="cpu")
    return _FASTER * _quickest(multiply, one, other, out) < _quickest(torch.mm, *numbers)


def is_exact(width: int) -> bool:
    """Try whether this build of torch multiplies 8-bit integers here, and exactly.

    Args:
        width: Number of products in each sum, 1,000 at most.
    """
    one, other = _factors(width)
    product = torch.empty(len(one), other.shape[1], dtype=torch.int32, device="cpu")
    try:
        multiply(one, other, product)
    except (AttributeError, RuntimeError):  # not built for this processor
        return False
    # Below 2^24 the sums in float32 are exact.
    return torch.equal(product, torch.mm(one.float(), other.float()).int())


def _factors(width: int) -> tuple[Tensor, Tensor]:
    """Draw factors of the largest integers, whose pairs some processors cannot add in 16 bits."""
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (_ROWS + _OTHERS, width)
    sign = torch.randint(2, shape, generator=generator, dtype=torch.int8, device="cpu")
    integers = LARGEST * (2 * sign - 1)
    return integers[:_ROWS], integers[_ROWS:].T


def _quickest(product: Any, *factors: Tensor) -> float:
    """Measure the shortest time of some products, in seconds."""
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        product(*factors)
        taken.append(time.perf_counter() - began)
    return min(taken)
