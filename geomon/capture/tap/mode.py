"""A torch mode that sees the operators of a window's thread.

It works below autograd and replaces nothing: each operator runs as it was called.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch

from geomon.capture import private
from geomon.capture.shards import is_sharded, starts_of
from geomon.capture.storage import followed_part
from geomon.capture.tap.provenance import Provenance
from geomon.capture.tap.stream import Stream
from geomon.failures import failures


class TapObserver(Protocol):
    """An object that is notified of attention; none of its errors reach the model."""

    def following(self) -> Provenance | Stream | None:
        """Return the object that follows tensors, in or between blocks, or None."""

    def on_fused(self, route: str, given: dict[str, Any]) -> None:
        """Handle a call of a fused attention operator."""

    def on_softmax(self, scores: Tensor, dim: int, *, logarithm: bool) -> None:
        """Handle a softmax."""

    def on_choice(self, scores: Tensor, chosen: Tensor) -> None:
        """Handle a choice of the largest entries (`topk`)."""

    def on_failure(self, error: Exception) -> None:
        """Handle one of geomon's own errors, raised while looking at a call."""


class Tap(dispatch.TorchDispatchMode):
    """Notifies an observer of the attention in its thread."""

    supports_higher_order_operators = True  # flex attention

    def __init__(self, observer: TapObserver) -> None:
        super().__init__()
        self._observer: TapObserver | None = observer
        self._thread = threading.get_ident()
        self._open = False

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """See the operators of the body, in the thread that made the tap; bodies may be nested.

        The mode stays inside the call that it is opened for, because code around the call (compiled
        code, for example) saves and restores the state of torch's dispatcher.
        """
        if self._open or self._observer is None or threading.get_ident() != self._thread:
            yield
            return
        try:
            self._open = True
            self.__enter__()
            yield
        finally:
            self._leave()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Remove the mode for a while, because compiled code runs compiled only without modes."""
        if not self._open or threading.get_ident() != self._thread:
            yield
            return
        try:
            self._leave()
            yield
        finally:
            self._open = True
            self.__enter__()

    def close(self) -> None:
        """See nothing more; may be called more than once, inside a body and after Ctrl-C."""
        self._observer = None

    def take_away(self) -> None:
        """Remove the mode if Ctrl-C left it, after all bodies have ended."""
        if self._open and threading.get_ident() == self._thread:
            self._leave()

    def _leave(self) -> None:
        """Remove the mode from the stack, even from below modes that Ctrl-C left there."""
        top, pop, push = private.top_mode, private.pop_mode, private.push_mode
        if top is None or pop is None or push is None:
            self._open = False
            self.__exit__(None, None, None)
            return
        above: list[Any] = []
        while (mode := top()) is not None and mode is not self:
            above.append(pop())
        if mode is self:
            pop()
        for other in reversed(above):
            push(other)
        self._open = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and show it to the observer if it belongs to attention."""
        kwargs = kwargs or {}
        observer = self._observer
        # Recomputation in a backward pass was seen before.
        if observer is None or private.graph_task() != -1:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:  # in inference mode, composite operators arrive undecomposed
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        kind, name, names, writes, keeps_places = _kind_of(func)
        followed = observer.following()
        try:
            if writes and followed is not None:
                own = _on_this_rank(args, {}) if types else args
                given = dict(zip(names, own, strict=False)) | kwargs
                followed.before_write(name, [given[each] for each in writes if each in given], own)
            if kind == "softmax":
                observer.on_softmax(args[0], args[1], logarithm=name == "_log_softmax")
            elif kind not in ("other", "choice"):
                given = dict(zip(names, args, strict=False)) | kwargs
                observer.on_fused(kind, given)
        except failures() as error:
            observer.on_failure(error)
        result = func(*args, **kwargs)
        try:
            if kind == "choice":
                observer.on_choice(args[0], result[1])
            if followed is not None:  # follow this rank's parts of DTensors
                starts: dict[int, tuple[int, ...]] = {}
                own = [args, kwargs, result]
                own = _on_this_rank(own, starts) if types else own
                followed.follow(name, own[0], own[1], own[2], starts, keeps_places=keeps_places)
        except failures() as error:
            observer.on_failure(error)
        return result


def _on_this_rank(values: Any, starts: dict[int, tuple[int, ...]]) -> Any:
    """Replace wrapped tensors, also in containers, by this rank's part of them."""
    if isinstance(values, Tensor):
        part = followed_part(values)
        if is_sharded(values):
            starts[id(part)] = starts_of(values)
        return part
    if isinstance(values, list | tuple) and not hasattr(values, "_fields"):
        return type(values)([_on_this_rank(value, starts) for value in values])
    if isinstance(values, dict):
        return {name: _on_this_rank(value, starts) for name, value in values.items()}
    return values


# Arguments of the higher-order operator of flex attention, which has no schema.
_FLEX = ("query", "key", "value", "score_mod", "block_mask", "scale")


class _Kind(NamedTuple):
    """Kind and name of an operator."""

    kind: str  # "softmax", the route of a fused attention, "choice", or "other"
    name: str  # "" if it is unknown how results are made from the arguments
    names: tuple[str, ...]  # names of its arguments
    writes: tuple[str, ...]  # names of arguments that it changes
    keeps_places: bool = False  # whether results only use numbers at the same place


# Operators that keep places although torch does not tag them as pointwise.
_KEEPING_PLACES = (
    "native_layer_norm", "_fused_rms_norm", "native_dropout", "_to_copy", "copy_",
    "native_batch_norm", "_native_batch_norm_legit", "repeat",
)  # fmt: skip


@functools.cache
def _kind_of(func: Any) -> _Kind:
    schema = getattr(func, "_schema", None)
    if schema is None:
        flex = getattr(func, "__name__", "") == "flex_attention"
        return _Kind("flex" if flex else "other", "", _FLEX * flex, ())
    space, _, name = schema.name.rpartition("::")
    names = tuple(argument.name for argument in schema.arguments)
    changed = (a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    writes = tuple(argument.name for argument in changed)
    if space == "aten" and name in ("_softmax", "_safe_softmax", "_log_softmax"):
        return _Kind("softmax", name, names, writes)
    if space == "aten" and name == "topk":
        return _Kind("choice", name, names, writes)
    given = set(names)
    if {"query", "key", "value"} <= given or {"q", "k", "v"} <= given:
        kind = "sdpa" if name.startswith("_scaled_dot_product") else "flash"
        return _Kind(kind, "", names, writes)
    keeps = torch.Tag.pointwise in func.tags or name in _KEEPING_PLACES
    return _Kind("other", name if space == "aten" else "", names, writes, keeps)
