"""Private names of torch: if a release lacks one, only the ability that needs it is lost.

Missing names are reported in a note of every reading; they never end a training.
"""

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

MISSING: dict[str, str] = {}  # names that this release of torch lacks, and what is lost


def _find(path: str, instead: Any, lost: str) -> Any:
    """Return the attribute at a dotted path, or a replacement if it does not exist."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        MISSING[path] = lost
        return instead


def _itself(value: Any) -> Any:
    return value


def _no(value: Any = None) -> bool:
    return False


def _none() -> None:
    """Stand in for a function that returns nothing."""


_FUNCTORCH = "code inside torch.func.grad or torch.func.vmap is not recognised as such"
_MODES = "modes of the training may see operators of a reading"

graph_task: Callable[[], int] = _find(
    "torch._C._current_graph_task_id",
    lambda: -1,
    "recomputation under activation checkpointing may be mistaken for a pass",
)
tracing_state: Callable[[], Any] = _find(
    "torch._C._get_tracing_state", _none, "code that is traced while it is watched may be observed"
)
is_wrapped_by_grad: Callable[[Any], bool] = _find(
    "torch._C._functorch.is_gradtrackingtensor", _no, _FUNCTORCH
)
unwrapped: Callable[[Any], Any] = _find("torch._C._functorch.get_unwrapped", _itself, _FUNCTORCH)
is_batched: Callable[[Any], bool] = _find("torch._C._functorch.is_batchedtensor", _no, _FUNCTORCH)
transforms: Callable[[], Any] = _find(
    "torch._C._functorch.peek_interpreter_stack", _none, _FUNCTORCH
)
leave_transforms: Callable[[], Any] = _find("torch._C._DisableFuncTorch", nullcontext, _FUNCTORCH)
without_functions: Callable[[], Any] = _find("torch._C.DisableTorchFunction", nullcontext, _MODES)
with_functions: Callable[[], Any] = _find(
    "torch._C._EnableTorchFunction", nullcontext, "functions of places that index tensors fail"
)
hide_modes: Callable[[], Any] = _find(
    "torch.utils._python_dispatch._disable_current_modes", nullcontext, _MODES
)
function_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack", lambda: 0, _MODES)
pop_function_mode: Callable[[], Any] = _find("torch._C._pop_torch_function_stack", _none, _MODES)
push_function_mode: Callable[[Any], Any] = _find(
    "torch._C._push_on_torch_function_stack", _itself, _MODES
)
device_mode: Any = _find("torch.utils._device.DeviceContext", (), _MODES)
traced_modes: Callable[[], int] = _find(
    "torch._ops._len_torch_dispatch_stack_pre_dispatch", lambda: 1, _MODES
)
_STACK = "torch.utils._python_dispatch."
_OUT_OF_TURN = "a mode that is left open inside a window may take the window's place"
top_mode: Callable[[], Any] | None = _find(
    _STACK + "_get_current_dispatch_mode", None, _OUT_OF_TURN
)
pop_mode: Callable[[], Any] | None = _find(f"{_STACK}_pop_mode", None, _OUT_OF_TURN)
push_mode: Callable[[Any], Any] | None = _find(f"{_STACK}_push_mode", None, _OUT_OF_TURN)
norms: Callable[..., Any] | None = _find(
    "torch._foreach_norm", None, "norms of weights take longer to read"
)
