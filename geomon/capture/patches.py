"""What a window changes outside the model, and puts back: the process-wide switches.

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
    """What is told of every attention call and of every softmax while it listens."""

    def on_attention(
        self, route: str, module: Any, query: Any, key: Any, mask: Any, options: dict[str, Any]
    ) -> None:
        """Take a call of an attention function.

        The route ("interface" or "sdpa"), the module that calls (None where the route does not
        tell), query, key and mask as given, and all other arguments by name.
        """

    def on_softmax(self, scores: Any, dim: Any) -> None:
        """Take what a softmax is given, and the dimension that it runs over."""


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
        listener.on_attention(route, module, query, key, mask, options)


def _tell_softmax(scores: Any, dim: Any) -> None:
    for listener in tuple(_listeners):
        listener.on_softmax(scores, dim)


@contextmanager
def _patched_attention() -> Iterator[None]:
    """Wrap the places that attention goes through; each wrapper tells, then delegates.

    Registering an attention implementation by name would drop its mask; a TorchFunctionMode misses
    `nn.MultiheadAttention` and breaks compiled models.
    """
    with ExitStack() as stack:
        _wrap_sdpa(stack)
        _wrap_interface(stack)
        _wrap_softmax(stack)
        yield


def _replace(stack: ExitStack, holder: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack is closed; one that was inherited is inherited again."""
    if name in vars(holder):
        stack.callback(setattr, holder, name, vars(holder)[name])
    else:
        stack.callback(delattr, holder, name)
    setattr(holder, name, value)


def _wrap_sdpa(stack: ExitStack) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention

    @functools.wraps(attend)
    def told_attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        options = dict(zip(("dropout_p", "is_causal"), args, strict=False)) | kwargs
        _tell("sdpa", None, query, key, attn_mask, **options)
        return attend(query, key, value, attn_mask, *args, **kwargs)

    _replace(stack, torch.nn.functional, "scaled_dot_product_attention", told_attend)


def _wrap_interface(stack: ExitStack) -> None:
    """The interface of transformers, where it is loaded; absent before release 5.1."""
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    find = getattr(interface, "get_interface", None)
    if interface is None or find is None:
        return

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

    _replace(stack, interface, "get_interface", told_find)


def _wrap_softmax(stack: ExitStack) -> None:
    """`torch.softmax` and the method of tensors, which `torch.nn.functional.softmax` calls."""
    for holder in (torch, torch.Tensor):
        soften = getattr(holder, "softmax")  # noqa: B009  # mypy knows it by another type
        _replace(stack, holder, "softmax", _told_softmax(soften))


def _told_softmax(soften: Any) -> Any:
    @functools.wraps(soften)
    def told_soften(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
        _tell_softmax(given.get("input"), given.get("dim"))
        return soften(*args, **kwargs)

    return told_soften


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
