"""What a window changes outside the model, and puts back: the three process-wide switches.

Several windows may be open at once and close in any order, so each switch counts its holders: the
first turns it, the last restores what was there before.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch


class Listener(Protocol):
    """What is told of every attention call while it listens."""

    def __call__(
        self, route: str, module: Any, query: Any, key: Any, mask: Any, options: dict[str, Any], /
    ) -> None:
        """Take a call.

        The route ("interface" or "sdpa"), the module that calls (None where the route does not
        tell), query, key and mask as given, and all other arguments by name.
        """


class _Switch:
    """A context manager that is entered by the first holder and left by the last."""

    def __init__(self, turn: Callable[[], AbstractContextManager[Any]]) -> None:
        self._turn = turn
        self._holders = 0
        self._stack = ExitStack()
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._holders == 0:
                self._stack.enter_context(self._turn())
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    self._stack.close()


_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` of every attention call of the process, and leave nothing behind."""
    with _attention_calls():
        _listeners.append(listener)
        try:
            yield
        finally:
            _listeners.remove(listener)


def _tell(route: str, module: Any, query: Any, key: Any, mask: Any, **options: Any) -> None:
    for listener in tuple(_listeners):
        listener(route, module, query, key, mask, options)


@contextmanager
def _patched_attention() -> Iterator[None]:
    """Wrap the two places that attention goes through: transformers' interface and torch's own.

    Registering an attention implementation by name would drop its mask; a TorchFunctionMode misses
    `nn.MultiheadAttention` and breaks compiled models. Each wrapper tells, then delegates.
    """
    with ExitStack() as stack:
        functional = torch.nn.functional
        attend = functional.scaled_dot_product_attention

        @functools.wraps(attend)
        def told_attend(
            query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            options = dict(zip(("dropout_p", "is_causal"), args, strict=False)) | kwargs
            _tell("sdpa", None, query, key, attn_mask, **options)
            return attend(query, key, value, attn_mask, *args, **kwargs)

        functional.scaled_dot_product_attention = told_attend
        stack.callback(setattr, functional, "scaled_dot_product_attention", attend)

        # Only where the program has loaded transformers itself; absent before its release 5.1.
        modeling = sys.modules.get("transformers.modeling_utils")
        interface = getattr(modeling, "AttentionInterface", None)
        find = getattr(interface, "get_interface", None)
        if interface is not None and find is not None:

            @functools.wraps(find)
            def told_find(self: Any, *args: Any, **kwargs: Any) -> Any:
                attention = find(self, *args, **kwargs)

                @functools.wraps(attention)
                def told(
                    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None,
                    *args: Any, **kwargs: Any,
                ) -> Any:  # fmt: skip
                    _tell("interface", module, query, key, attention_mask, **kwargs)
                    return attention(module, query, key, value, attention_mask, *args, **kwargs)

                return told

            interface.get_interface = told_find
            stack.callback(setattr, interface, "get_interface", find)
        yield


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled code eagerly: hooks placed after the first compiled call never fire."""
    if "torch._dynamo" not in sys.modules:  # nothing can have been compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Keep `nn.TransformerEncoder` from its fused inference path, which calls no module inside."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_attention_calls = _Switch(_patched_attention)
run_eagerly = _Switch(_eager)
without_fast_path = _Switch(_no_fast_path)
