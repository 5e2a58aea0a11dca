"""Patches: what a window changes outside the model, for the whole process, and puts back.

Several windows may be open at once and close in any order, so each patch counts its holders: the
first one applies it, the last one restores what was there before.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch


class AttentionObserver(Protocol):
    """An object that is notified of every attention call and of every softmax of the process."""

    def on_attention(
        self, route: str, module: Any, query: Any, key: Any, mask: Any, options: dict[str, Any]
    ) -> None:
        """Take a call of an attention function.

        Args:
            route: "interface" (of transformers) or "sdpa" (of torch).
            module: The module that calls; None where the route does not pass it on.
            query: Queries as the function is given them.
            key: Keys as the function is given them.
            mask: Mask as the function is given it.
            options: All other arguments by name.
        """

    def on_softmax(self, scores: Any, dim: Any) -> None:
        """Take a call of a softmax.

        Args:
            scores: Input of the softmax.
            dim: The dimension that the softmax runs over.
        """


class _SharedPatch:
    """A context manager that is entered by its first holder and left by its last."""

    def __init__(self, patch: Callable[[], AbstractContextManager[Any]]) -> None:
        self._patch = patch
        self._holders = 0
        self._stack = ExitStack()
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._holders == 0:
                self._stack.enter_context(self._patch())
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0:
                    self._stack.close()


_observers: list[AttentionObserver] = []


@contextmanager
def observing(observer: AttentionObserver) -> Iterator[None]:
    """Notify an observer of every attention call of the process, and leave nothing behind.

    Args:
        observer: The object that is notified.
    """
    with _attention_observed():
        _observers.append(observer)
        try:
            yield
        finally:
            _observers.remove(observer)


def _notify_attention(
    route: str, module: Any, query: Any, key: Any, mask: Any, **options: Any
) -> None:
    for observer in tuple(_observers):
        observer.on_attention(route, module, query, key, mask, options)


def _notify_softmax(scores: Any, dim: Any) -> None:
    for observer in tuple(_observers):
        observer.on_softmax(scores, dim)


@contextmanager
def _attention_patched() -> Iterator[None]:
    """Wrap the functions that attention goes through; each wrapper notifies, then delegates.

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
    def observed_attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        options = dict(zip(("dropout_p", "is_causal"), args, strict=False)) | kwargs
        _notify_attention("sdpa", None, query, key, attn_mask, **options)
        return attend(query, key, value, attn_mask, *args, **kwargs)

    _replace(stack, torch.nn.functional, "scaled_dot_product_attention", observed_attend)


def _wrap_interface(stack: ExitStack) -> None:
    """Wrap the interface of transformers, where it is loaded; absent before release 5.1."""
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    find = getattr(interface, "get_interface", None)
    if interface is None or find is None:
        return

    @functools.wraps(find)
    def find_observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        attention = find(self, *args, **kwargs)

        @functools.wraps(attention)
        def observed(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            _notify_attention("interface", module, query, key, attention_mask, **kwargs)
            return attention(module, query, key, value, attention_mask, *args, **kwargs)

        return observed

    _replace(stack, interface, "get_interface", find_observed)


def _wrap_softmax(stack: ExitStack) -> None:
    """Wrap `torch.softmax` and the method of tensors that `torch.nn.functional.softmax` calls."""
    for holder in (torch, torch.Tensor):
        softmax = getattr(holder, "softmax")  # noqa: B009  # mypy knows it by another type
        _replace(stack, holder, "softmax", _observed_softmax(softmax))


def _observed_softmax(softmax: Any) -> Any:
    @functools.wraps(softmax)
    def observed(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
        _notify_softmax(given.get("input"), given.get("dim"))
        return softmax(*args, **kwargs)

    return observed


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


_attention_observed = _SharedPatch(_attention_patched)
run_eagerly = _SharedPatch(_eager)
without_fast_path = _SharedPatch(_no_fast_path)
