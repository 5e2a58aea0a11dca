"""A model and its process as seen from outside: everything that geomon must leave unchanged."""

import random
import sys
import threading

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_backward_hooks",
    "_backward_pre_hooks", "_state_dict_hooks",
)  # fmt: skip


def fingerprint(model: nn.Module) -> dict[str, object]:
    """Hooks, attributes and flags of every module; patched functions, switches, threads."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return {
        "hooks": [[len(getattr(m, kind)) for kind in HOOKS] for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "classes": [type(m) for m in model.modules()],
        "training": [m.training for m in model.modules()],
        "call": nn.Module.__call__,
        "slot": vars(nn.Module)["_compiled_call_impl"],  # filled while a window is open
        "modes": _len_torch_dispatch_stack(),
        "attention": torch.nn.functional.scaled_dot_product_attention,
        "class of tensors": "__new__" in vars(torch.Tensor),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "stance": dynamo._stance.stance if dynamo else "default",
        "threads": {thread.name for thread in threading.enumerate()},
        "cores": (torch.get_num_threads(), _cores_of_a_new_thread()),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_default_dtype(),
    }


def is_watched() -> bool:
    """Whether a window is open: calls of modules are seen."""
    return nn.Module._compiled_call_impl is not None


def _cores_of_a_new_thread() -> int:
    """Count the cores that torch gives to a new thread, such as a data loader's."""
    asked: list[int] = []
    thread = threading.Thread(target=lambda: asked.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return asked[0]


def random_state() -> tuple[object, ...]:
    """Return the states of the shared generators: torch's, numpy's and Python's."""
    _, key, *place = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), key.tobytes(), *place, random.getstate()


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters and buffers."""
    return [tensor.detach().clone() for tensor in model.state_dict().values()]
