"""A pretended processor whose float32 products round their factors, as a training may have it."""

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from geomon.capture import private

aten = torch.ops.aten

# Products of matrices, by the place of their first factor.
FIRST_FACTOR = {
    aten.mm: 0, aten.bmm: 0, aten.mv: 0, aten.dot: 0, aten.vdot: 0, aten._cdist_forward: 0,
    aten.addmm: 1, aten.addmm_: 1, aten.addmv: 1, aten.addmv_: 1, aten.baddbmm: 1, aten.baddbmm_: 1,
}  # fmt: skip


class Hardware(TorchDispatchMode):
    """A mode that stands for what a machine does: geomon, which hides from modes, meets it too."""

    def __enter__(self) -> Any:
        self._top = private.top_mode
        private.top_mode = functools.partial(_top_but_hardware, self._top)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        private.top_mode = self._top


def _top_but_hardware(top: Any) -> Any:
    mode = top()
    return None if isinstance(mode, Hardware) else mode


class ShortProducts(Hardware):
    """Rounds the factors of float32 products while it is entered.

    A processor with matrix units does so after `torch.set_float32_matmul_precision("medium")`.

    Args:
        dtype: What factors are rounded to; None for no rounding.
    """

    def __init__(self, dtype: torch.dtype | None = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype
        self.rounded = 0

    def __enter__(self) -> "ShortProducts":
        if self.dtype is not None:
            torch.set_float32_matmul_precision("medium")
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.set_float32_matmul_precision("highest")
        if hasattr(torch.backends.mkldnn, "matmul"):
            torch.backends.mkldnn.matmul.fp32_precision = "none"  # the setting above leaves "ieee"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = FIRST_FACTOR.get(func.overloadpacket)
        if first is not None and self.dtype is not None:
            args = tuple(
                self._rounded(x) if first <= place < first + 2 else x
                for place, x in enumerate(args)
            )
        return func(*args, **(kwargs or {}))

    def _rounded(self, factor: torch.Tensor) -> torch.Tensor:
        if factor.dtype != torch.float32:
            return factor
        self.rounded += 1
        return factor.to(self.dtype).float()
