"""Pretended hardware: what torch does on a machine that is not here, and what it allocates.

`Accelerator` is a device of its own, whose tensors have numbers of the host. Code that runs on them
finds what it would on a CUDA device, as far as it matters to geomon: tensors of two devices cannot
be mixed, numpy cannot read them, integers have no matrix products, and float32 products are rounded
to TF32 if the user's settings allow it. It counts how often the host waits for the device. The
device is called "meta", the one name that every build of torch knows and that has no numbers of its
own. `ShortProducts` is a processor that rounds the factors of float32 products.
"""

import functools
from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from geomon.capture import private

DEVICE = torch.device("meta")
aten = torch.ops.aten

# Operators that give the host a number, or a shape that depends on numbers.
_WAITS = {
    aten._local_scalar_dense, aten.nonzero, aten._unique2, aten.unique_dim, aten.masked_select,
    aten.unique_consecutive, aten.equal, aten.bincount,
}  # fmt: skip
_COPIES = {aten.copy_, aten._to_copy}
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
        dtype: Precision that factors are rounded to; None for no rounding.
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


class OnDevice(torch.Tensor):
    """A tensor on the pretended device.

    Args:
        held: The same numbers on the host.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "OnDevice":
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=DEVICE,
        )  # fmt: skip

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"OnDevice({self.held!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(self._lists_put(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(self._lists_put(index), value)

    def _lists_put(self, index: Any) -> Any:
        """Put the lists of places in an index on the device, as torch does."""
        if isinstance(index, tuple):
            return tuple(map(self._lists_put, index))
        return OnDevice(torch.tensor(index)) if isinstance(index, list) else index

    def new_tensor(self, numbers: Any) -> "OnDevice":
        return OnDevice(self.held.new_tensor(numbers))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} was called outside of Accelerator")


class Accelerator(Hardware):
    """The pretended device, which exists while this is entered.

    Attributes:
        launches: Number of operations on the device.
        waits: How often the host waited for the device, by the operation.
        tf32: Whether float32 products are rounded to TF32.
    """

    def __init__(self, *, tf32: bool = True) -> None:
        super().__init__()
        self.launches = 0
        self.waits: Counter[str] = Counter()
        self.tf32 = tf32

    def put(self, value: torch.Tensor) -> OnDevice:
        """Copy a tensor of the host to the device."""
        return OnDevice(value.detach().clone())

    def __enter__(self) -> Any:
        # torch.tensor puts numbers on a device without a call that could be seen here.
        self._tensor = torch.tensor
        torch.tensor = self._make_tensor
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.tensor = self._tensor

    def _make_tensor(self, numbers: Any, *, device: Any = "cpu", **options: Any) -> torch.Tensor:
        made = self._tensor(numbers, device="cpu", **options)
        return OnDevice(made) if torch.device(device) == DEVICE else made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        from_device = any(isinstance(x, OnDevice) for x in given)
        target = kwargs.get("device")
        if packet is aten.copy_:
            on_device = isinstance(args[0], OnDevice)
        elif target is not None:
            on_device = torch.device(target) == DEVICE
        else:
            on_device = from_device
        if not from_device and not on_device:
            return func(*args, **kwargs)
        if packet not in _COPIES:
            _require_one_device(func, given)
        self.launches += 1
        if packet in _WAITS or not on_device or _chooses_by_mask(packet, args):
            self.waits[func.name().removeprefix("aten::")] += 1
        if packet in FIRST_FACTOR:
            args = self._as_multiplied(func, args)
        inner, options = pytree.tree_map(
            lambda x: x.held if isinstance(x, OnDevice) else x, (args, kwargs)
        )
        if target is not None:
            options["device"] = torch.device("cpu")
        out = func(*inner, **options)
        if not on_device:
            return args[0] if packet is aten.copy_ else out
        made = pytree.tree_map(lambda x: OnDevice(x) if isinstance(x, torch.Tensor) else x, out)
        return return_and_correct_aliasing(func, args, kwargs, made)

    def _as_multiplied(self, func: Any, args: Any) -> Any:
        """The arguments of a product as the device reads them."""
        first = FIRST_FACTOR[func.overloadpacket]
        if not args[first].is_floating_point():
            raise NotImplementedError(f'"{func}" not implemented for {args[first].dtype}')
        if not self.tf32:
            return args
        return tuple(
            OnDevice(_tf32(x.held)) if place >= first and isinstance(x, OnDevice) else x
            for place, x in enumerate(args)
        )


def _require_one_device(func: Any, given: list[torch.Tensor]) -> None:
    """Raise as torch does for tensors of two devices: only numbers may be the host's."""
    elementwise = torch.Tag.pointwise in func.tags
    for tensor in given:
        if not isinstance(tensor, OnDevice) and (tensor.ndim > 0 or not elementwise):
            raise RuntimeError(f"{func}: expected all tensors on {DEVICE}, one is on the host")


def _chooses_by_mask(packet: Any, args: Any) -> bool:
    """Whether rows are chosen by a mask, whose number of True decides on the shape."""
    if packet is not aten.index:
        return False
    return any(x is not None and x.dtype == torch.bool for x in args[1])


def _tf32(values: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 10 bits after the point that TF32 keeps."""
    if values.dtype != torch.float32:
        return values
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class LargestNewTensor(TorchDispatchMode):
    """Remembers the bytes of the largest storage that an operation makes."""

    def __init__(self, *inputs):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.bytes = max(self.bytes, storage.nbytes())
        return out
