"""The device that measures rows, alongside the training's own work."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from geomon.capture import HOST, Layer
from geomon.failures import failures, ignored

AUTO = "auto"

# Upper estimate of the memory for measuring a layer, in addition to its rows: this many times the
# captured tensors (copies in float64, blocks of products), this many matrices [width, width] in
# float64 (the covariance and its eigenvalues), and the libraries' own buffers.
_COPIES, _MATRICES, _BUFFERS = 5, 5, 1e9
# Measuring may take this share of the memory that the training leaves free; less at the first
# reading, when its peak is still to come.
_SHARE, _SHARE_AT_FIRST = 0.5, 0.05

_DETERMINISTIC = (
    "torch.use_deterministic_algorithms is on, and medians and cumulative sums have no "
    "deterministic form on a device"
)


class MeasuringDevice:
    """Chooses where rows are measured: on the model's device, a named one, or the host.

    Args:
        name: "auto" for the model's device, or the name of a device.
        model: The watched model, which may be moved later.

    Raises:
        ValueError: If the named device is not available, or does not compute in float64.
    """

    def __init__(self, name: str, model: nn.Module) -> None:
        self._model = model
        self._chosen = None if name == AUTO else _open_device(name)
        self._share = _SHARE_AT_FIRST
        self._stream: Any = None

    @property
    def of_model(self) -> torch.device:
        """The model's device; the host for a model without data."""
        own = next((p.device for p in self._model.parameters()), HOST)
        return HOST if own.type == "meta" else own

    @property
    def device(self) -> torch.device:
        """The device on which rows are measured, as far as it is known before they are seen."""
        if self._chosen is not None:
            return self._chosen
        return self.of_model if self.why_host is None else HOST

    @property
    def why_host(self) -> str | None:
        """Why rows are measured on the host although the model is on an accelerator, or None."""
        own = self.of_model
        if self._chosen is not None or _computes_in_float64(own):
            return None
        return f"{own.type} does not compute in float64, which distances need"

    def why_not(self, layers: Sequence[Layer]) -> str | None:
        """Return why layers cannot be measured on the device now, or None if they can."""
        device = self.device
        if device == HOST:
            return None
        if torch.are_deterministic_algorithms_enabled():
            return _DETERMINISTIC
        free = None if self._chosen is not None else _free_bytes(device)
        needed = max(map(_needed_bytes, layers), default=0.0)
        share, self._share = self._share, _SHARE
        if free is None or needed <= share * free:
            return None
        return (
            f"measuring a layer takes up to {needed / 1e6:,.0f} MB, but the training leaves "
            f"{max(0, free) / 1e6:,.0f} MB of {device}, and only {100 * share:.0f} % of that may "
            "be used: fewer tokens, or a smaller max_capture_mb, need less"
        )

    def mark_ready(self) -> Any:
        """Record an event after the training's queued work, or return None on the host."""
        device = self.device if self.of_model == HOST else self.of_model
        module = _streams_of(device)
        return None if module is None else module.current_stream(device).record_event()

    @contextlib.contextmanager
    def alongside_training(self, ready: Any) -> Iterator[None]:
        """Queue this thread's work on a separate stream, so the training does not wait for it."""
        if ready is not None:
            _let_graphs_be_captured()
        module = None if ready is None else _streams_of(self.device)
        if module is None:
            yield
            return
        if self._stream is None:  # one for all readings, because every stream keeps memory
            self._stream = module.Stream(self.device)
        with module.stream(self._stream):
            self._stream.wait_event(ready)
            try:
                yield
            finally:
                self._stream.synchronize()  # rows may be freed only when nothing reads them


def check_device(name: Any) -> str:
    """Return the name of a device, checked as far as possible without the device."""
    if isinstance(name, torch.device):
        name = str(name)
    try:
        if isinstance(name, str) and (name == AUTO or torch.device(name)):
            return name
    except failures(RuntimeError):
        pass
    raise ValueError(
        "device must be 'auto' (the model's device), 'cpu', or the name of an accelerator, 'cuda' "
        f"or 'cuda:1', got {name!r}"
    )


def _open_device(name: str | torch.device) -> torch.device:
    """Compute something on a device to see that it is available; return it with its index."""
    try:
        tried = torch.zeros(1, dtype=torch.float64, device=name)
        tried.item()
    except failures() as error:  # errors differ between kinds of devices
        raise ValueError(
            f"device={name!r} cannot be used, because measuring needs float64 "
            f"({first_line(error)}): leave device='auto', or use 'cpu'"
        ) from error
    return tried.device


@functools.cache
def _computes_in_float64(device: torch.device) -> bool:
    try:
        _open_device(device)
    except failures(ValueError):
        return False
    return True


def first_line(error: object) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _streams_of(device: torch.device) -> Any:
    """Return torch's module with the streams of a device, or None for a device without streams."""
    module = None if device == HOST else getattr(torch, device.type, None)
    return module if hasattr(module, "Stream") else None


def _let_graphs_be_captured() -> None:
    """Let the training capture CUDA graphs while this thread measures.

    By default, a capture fails if any thread waits or allocates meanwhile. Threads are exempt if
    they ask CUDA to heed only their own captures.
    """
    with ignored(OSError):  # another kind of device
        mode = ctypes.c_int(1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _free_bytes(device: torch.device) -> float | None:
    """Return the memory that a training leaves at its peak, or None if unknown.

    Memory that torch holds counts as free, except for the training's peak, which it will need
    again: after the forward pass, its gradients are still to come.
    """
    module: Any = getattr(torch, device.type, None)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    return float(free + module.memory_reserved(device) - module.max_memory_allocated(device))


def _needed_bytes(layer: Layer) -> float:
    """Estimate an upper bound on the memory for measuring a layer, in addition to its rows."""
    tensors = [value for value in layer.captured.values() if isinstance(value, Tensor)]
    held = sum(tensor.nbytes for tensor in tensors)
    hidden = layer.captured.get("hidden")
    width = 0 if hidden is None else hidden.shape[1]
    return _COPIES * held + _MATRICES * 8 * width**2 + _BUFFERS


__all__ = ["AUTO", "MeasuringDevice", "check_device", "first_line"]
