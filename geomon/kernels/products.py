"""Factors of matrix products, so that products are exact at least to float32.

Settings of the whole process, which the training needs and which are not geomon's to change, may
have float32 factors rounded before they are multiplied: on an accelerator to TF32, on a processor
with matrix units to bfloat16 (`torch.set_float32_matmul_precision`, `torch.backends`).
"""

import torch
from torch import Tensor

# Side of the matrix that is tried: smaller products are exact in any case. Its numbers are 0 and
# 1 + 2^-20, of which TF32 and bfloat16 keep the 1.
_SIDE, _BEYOND = 64, 2**-20


def as_factor(values: Tensor) -> Tensor:
    """Convert numbers so that the products of matrices of them are exact at least to float32.

    Args:
        values: Floating-point numbers, of any shape.

    Returns:
        The numbers in float32, or where its products are not exact, or for float64, in float64.
    """
    device, dtype = values.device.type, values.dtype
    if dtype == torch.float64:
        return values
    # No setting rounds to fewer bits than bfloat16 has; TF32 has as many as float16. On MPS nothing
    # is rounded, and there is no float64.
    keeps = dtype == torch.bfloat16 or (dtype == torch.float16 and device != "cpu")
    if keeps or device == "mps" or (device == "cpu" and _is_exact_on_host()):
        return values.float()
    return values.double()


def _is_exact_on_host() -> bool:
    """Try whether float32 products are exact on the host at present.

    The settings have two interfaces, of which one refuses to be read once the other was used, and
    what they do depends on the processor.
    """
    tried = torch.eye(_SIDE, dtype=torch.float32, device="cpu") * (1 + _BEYOND)
    return bool((tried @ tried)[0, 0] == 1 + 2 * _BEYOND)
