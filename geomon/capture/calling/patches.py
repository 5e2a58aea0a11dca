"""Patches: what a window changes outside the model, for the whole process, and puts back.

Several windows may be open at once and close in any order, so each patch knows its holders: the
first one applies it, the last one restores what was there before. Ctrl-C may come between any two
of these lines: what undoes a change is noted before the change is made, and everything can be
undone twice.
"""

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

Undo = Callable[[Callable[[], Any]], None]  # takes note of what undoes a change


class AttentionObserver(Protocol):
    """An object that is notified of the attention calls, softmaxes and products of the process.

    Nothing that it raises reaches the model, but for Ctrl-C.
    """

    def on_attention(
        self, route: str, module: Any, query: Any, key: Any, mask: Any, options: dict[str, Any]
    ) -> None:
        """Take a call of an attention function.

        Args:
            route: "interface" (of transformers), "sdpa" (of torch), "flex" or "flash" (fused).
            module: The module that calls; None where the route does not pass it on.
            query: Queries as the function is given them.
            key: Keys as the function is given them.
            mask: Mask as the function is given it.
            options: All other arguments by name; of fused attention all arguments.
        """

    def on_softmax(self, scores: Any, dim: Any) -> None:
        """Take a call of a softmax.

        Args:
            scores: Input of the softmax.
            dim: The dimension that the softmax runs over.
        """

    def on_product(self, factors: tuple[Any, ...], product: Any, *, alone: bool) -> None:
        """Take a matrix product that has been made, before anything changes it.

        Args:
            factors: Arguments of the call, tensors and others.
            product: The result.
            alone: Whether the result is the product alone; False where the call adds something.
        """

    def on_failure(self, error: Exception) -> None:
        """Take an error of geomon's own, met while a call was looked at.

        Args:
            error: The error.
        """


_not_around_compiled: list["Patch"] = []


class Patch:
    """A change of the process that is made for its first holder and undone for its last.

    Args:
        apply: Makes the change; it is given a function that takes note of what undoes it.
        around_compiled: Whether the change stays while a compiled function runs as compiled. Its
            code is guarded by what it refers to, and would be compiled again.
    """

    def __init__(self, apply: Callable[[Undo], None], *, around_compiled: bool = True) -> None:
        self._apply = apply
        if not around_compiled:
            _not_around_compiled.append(self)
        self._holders: list[object] = []
        self._suspensions: list[object] = []
        self._undo: list[Callable[[], Any]] = []
        self._applied = False
        self._lock = threading.RLock()

    @property
    def holders(self) -> tuple[Any, ...]:
        """All objects that hold the patch, in the order in which they came."""
        return tuple(self._holders)

    def hold(self, holder: object) -> None:
        """Make the change, if it is not made yet, and keep it until the holder releases it.

        Args:
            holder: Any object.
        """
        with self._lock:
            self._holders.append(holder)
            self._settle()

    def release(self, holder: object) -> None:
        """Undo the change if nobody else holds it; an object that does not hold it changes nothing.

        Args:
            holder: The object.
        """
        with self._lock:
            self._holders[:] = [other for other in self._holders if other is not holder]
            if not self._holders:
                self._suspensions.clear()
            self._settle()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Undo the change for a while, whoever holds it."""
        token = object()
        try:
            with self._lock:
                self._suspensions.append(token)
                self._settle()
            yield
        finally:
            with self._lock:
                self._suspensions[:] = [other for other in self._suspensions if other is not token]
                self._settle()

    def _settle(self) -> None:
        wanted = bool(self._holders) and not self._suspensions
        if wanted and not self._applied:
            self._applied = True
            self._apply(self._undo.append)
        elif not wanted:
            while self._undo:
                self._undo[-1]()
                self._undo.pop()
            self._applied = False


def replace(undo: Undo, holder: Any, name: str, value: Any) -> None:
    """Set an attribute until that is undone; one that was inherited is inherited again.

    Args:
        undo: Takes note of what undoes the change.
        holder: The object that has the attribute.
        name: Name of the attribute.
        value: Its value.
    """
    if name in vars(holder):
        undo(functools.partial(setattr, holder, name, vars(holder)[name]))
    else:
        undo(functools.partial(_inherit, holder, name))
    setattr(holder, name, value)


def _inherit(holder: Any, name: str) -> None:
    if name in vars(holder):
        delattr(holder, name)


# -- attention -----------------------------------------------------------------------------------


def _patch_attention(undo: Undo) -> None:
    """Wrap the functions that attention goes through; each wrapper notifies, then delegates.

    Registering an attention implementation by name would drop its mask; a TorchFunctionMode misses
    `nn.MultiheadAttention` and breaks compiled models.
    """
    _wrap_sdpa(undo)
    _wrap_interface(undo)
    _wrap_flex(undo)
    _wrap_imported(undo)
    for holder, name in _SOFTMAXES:
        softmax = getattr(holder, name)
        replace(undo, holder, name, _observed(softmax, _notify_softmax))
    for holder, name in _PRODUCTS:
        alone = name != "baddbmm"
        replace(undo, holder, name, _observed_product(getattr(holder, name), alone=alone))


# The functions of `torch.nn.functional` call the methods of tensors.
_SOFTMAXES: tuple[tuple[Any, str], ...] = (
    (torch, "softmax"),
    (torch, "log_softmax"),
    (torch, "_softmax"),
    (torch, "_log_softmax"),
    (torch.special, "softmax"),
    (torch.special, "log_softmax"),
    (torch.Tensor, "softmax"),
    (torch.Tensor, "log_softmax"),
)

# `torch.einsum` and `torch.tensordot` call those of `torch._VF`, also where a model has imported
# them by name.
_PRODUCTS: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("matmul", "bmm", "baddbmm", "mm")),
    *((torch.Tensor, name) for name in ("matmul", "__matmul__", "bmm", "baddbmm", "mm")),
    (torch.linalg, "matmul"),
    *((torch.functional._VF, name) for name in ("einsum", "tensordot")),  # type: ignore[attr-defined]
)

watch_attention = Patch(
    _patch_attention, around_compiled=False
)  # its holders are AttentionObservers


def _wrap_sdpa(undo: Undo) -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    notify = functools.partial(_notify_attention, "sdpa", _SDPA)
    replace(undo, torch.nn.functional, "scaled_dot_product_attention", _observed(attend, notify))


def _wrap_interface(undo: Undo) -> None:
    """Wrap the interface of transformers, where it is loaded; absent before release 5.1."""
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    find = getattr(interface, "get_interface", None)
    if interface is None or find is None:
        return
    notify = functools.partial(_notify_attention, "interface", _INTERFACE)

    @functools.wraps(find)
    def find_observed(*args: Any, **kwargs: Any) -> Any:
        return _observed(find(*args, **kwargs), notify)

    replace(undo, interface, "get_interface", find_observed)


def _wrap_flex(undo: Undo) -> None:
    """Wrap the operator behind flex attention, where it is loaded.

    All that calls `flex_attention` eagerly comes to it, under whatever name that was imported.
    """
    operators = sys.modules.get("torch._higher_order_ops.flex_attention")
    operator = getattr(operators, "FlexAttentionHOP", None)
    if operator is not None:
        notify = functools.partial(_notify_fused, "flex", _FLEX)
        replace(undo, operator, "__call__", _observed_once(operator.__call__, notify))


def _wrap_imported(undo: Undo) -> None:
    """Wrap attention functions in every module that has imported them by their names.

    A module that is not loaded has imported nothing; none is asked for names that it makes lazily.
    """
    attend = getattr(torch.nn.functional.scaled_dot_product_attention, "__wrapped__", None)
    for module in _importers():
        names = vars(module)
        if attend is not None and names.get(_BY_NAME) is attend:
            replace(undo, module, _BY_NAME, torch.nn.functional.scaled_dot_product_attention)
        for name in _FLASH:
            function = names.get(name)
            if callable(function):
                parameters = _parameters(function)
                if {"q", "qkv", "query"} & set(parameters):
                    notify = functools.partial(_notify_fused, "flash", parameters)
                    replace(undo, module, name, _observed_once(function, notify))


def _importers() -> list[Any]:
    """List the modules that have a name of an attention function.

    It takes some milliseconds, once for a holder: the patch is suspended at every compiled block.
    """
    holder = watch_attention.holders[0]
    if _scan.holder is None or _scan.holder() is not holder:
        modules = [*sys.modules.values()]
        _scan.found = [
            m for m in modules if not getattr(m, "__dict__", {}).keys().isdisjoint(_NAMES)
        ]
        _scan.holder = weakref.ref(holder)
    return _scan.found


class _Scan:
    """What was found for a holder of the patch."""

    def __init__(self) -> None:
        self.holder: weakref.ref[Any] | None = None
        self.found: list[Any] = []


_scan = _Scan()


# The attention function of torch, and functions that attend with flash attention, by the names that
# their packages and torch give them.
_BY_NAME = "scaled_dot_product_attention"
_FLASH = (
    "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_kvpacked_func",
    "flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func", "varlen_attn",
)  # fmt: skip
_NAMES = frozenset((_BY_NAME, *_FLASH))


def _parameters(function: Any) -> tuple[str, ...]:
    """List the parameters of a function by name; none where they are not known."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


# Arguments of the attention functions, in the order in which they may be given without a name.
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_INTERFACE = ("module", "query", "key", "value", "attention_mask")
_FLEX = (
    "operator", "query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options",
    "score_mod_other_buffers", "mask_mod_other_buffers",
)  # fmt: skip

_Notify = Callable[[AttentionObserver, tuple[Any, ...], dict[str, Any]], None]


def _observed(function: Any, notify: _Notify) -> Any:
    """Wrap a function: observers are notified of a call, which then goes on as it was made.

    Names of arguments are the model's: any may be among them, so they are never mixed with
    parameters of this project's functions.
    """

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        for observer in watch_attention.holders:
            try:
                notify(observer, args, kwargs)
            except Exception as error:
                observer.on_failure(error)
        return function(*args, **kwargs)

    return observed


def _observed_once(function: Any, notify: _Notify) -> Any:
    """Wrap a function of fused attention: of calls inside one another the outermost counts."""
    observed = _observed(function, notify)

    @functools.wraps(function)
    def once(*args: Any, **kwargs: Any) -> Any:
        if _fused.running:
            return function(*args, **kwargs)
        _fused.running = True
        try:
            return observed(*args, **kwargs)
        finally:
            _fused.running = False

    return once


class _Fused(threading.local):
    """Whether a thread is in a function of fused attention."""

    running = False


_fused = _Fused()


def _observed_product(function: Any, *, alone: bool) -> Any:
    """Wrap a matrix product: observers are notified of its result."""

    @functools.wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        product = function(*args, **kwargs)
        for observer in watch_attention.holders:
            try:
                observer.on_product((*args, *kwargs.values()), product, alone=alone)
            except Exception as error:
                observer.on_failure(error)
        return product

    return observed


def _notify_attention(
    route: str,
    names: tuple[str, ...],
    observer: AttentionObserver,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    given = dict(zip(names, args, strict=False)) | kwargs
    mask = given.pop("attn_mask" if route == "sdpa" else "attention_mask", None)
    module = given.pop("module", None) if route == "interface" else None
    query, key = given.pop("query", None), given.pop("key", None)
    observer.on_attention(route, module, query, key, mask, given)


def _notify_fused(
    route: str,
    names: tuple[str, ...],
    observer: AttentionObserver,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    given = dict(zip(names, args, strict=False)) | kwargs
    traced = any(isinstance(value, FakeTensor | FunctionalTensor) for value in given.values())
    if not traced:  # by a compiler, which computes nothing
        observer.on_attention(route, None, None, None, None, given)


def _notify_softmax(
    observer: AttentionObserver, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    observer.on_softmax(given.get("input"), given.get("dim"))


# -- switches of torch ---------------------------------------------------------------------------


def _force_eager(undo: Undo) -> None:
    """Run compiled functions eagerly: what is compiled calls no module and no attention function.

    Holders are notified of each compiled function that the training calls: with dropout it draws
    other random numbers when it is run eagerly.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:  # nothing can have been compiled
        return
    before = compiler._stance
    choose = getattr(compiler, "_callback_from_stance", None)
    if choose is not None and hasattr(compiler, "set_eval_frame"):
        leaf = _Leaf(compiler, before)

        @functools.wraps(choose)
        def observed(callback: Any) -> Any:
            if callback in (None, False) or leaf.running:
                return choose(callback)
            frame = sys._getframe(1)
            function, args, kwargs = _called(frame)
            of_flex = getattr(function, "__module__", None) == _FLEX_MODULE
            name = getattr(function, "__name__", "") if of_flex else ""
            if name == "flex_attention":
                notify_of_flex(args, kwargs)
            if name in _FLEX_FUNCTIONS:
                leaf.begin(frame)
            elif of_flex:  # what flex attention compiles where it is not compiled itself
                pass
            elif all(holder.finished for holder in run_eagerly.holders):
                leaf.begin(frame)  # a loss, say: nothing more is to be seen
            elif not in_extra_pass():
                for holder in run_eagerly.holders:
                    holder.on_forced_eager()
            return choose(callback)

        _replace_ending(undo, compiler, leaf)
        replace(undo, compiler, "_callback_from_stance", observed)
    undo(lambda: compiler._set_stance(before))
    torch.compiler.set_stance("force_eager")


# Flex attention and what makes its masks, compiled by themselves by a model or by transformers. Run
# eagerly they would hold all scores, and round them differently; what is to be seen of them are
# their arguments.
_FLEX_MODULE = "torch.nn.attention.flex_attention"
_FLEX_FUNCTIONS = ("flex_attention", "create_block_mask", "create_mask")


def _called(frame: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Find which compiled function is called, and with which arguments.

    Args:
        frame: Frame of the wrapper that `torch.compile` has made.
    """
    given = frame.f_locals
    function, args, kwargs = given.get("fn"), given.get("args", ()), given.get("kwargs", {})
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), function.keywords | kwargs
        function = function.func
    return function, args, kwargs


def notify_of_flex(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notify observers of a call of compiled flex attention, which they see nothing else of.

    Args:
        args: Positional arguments.
        kwargs: Arguments by name.
    """
    for observer in watch_attention.holders:
        try:
            _notify_fused("flex", _FLEX[1:], observer, args, kwargs)
        except Exception as error:
            observer.on_failure(error)


class _Leaf:
    """A compiled function that is run as compiled, with the process as it is without windows.

    Args:
        compiler: The module of torch that runs compiled functions.
        before: Its stance without windows.
    """

    def __init__(self, compiler: Any, before: Any) -> None:
        self._compiler = compiler
        self._before = before
        self._forced: Any = None
        self._frame: Any = None
        self._stack = ExitStack()

    @property
    def running(self) -> bool:
        """Whether a call goes on; compiled functions that it calls are a part of it."""
        return self._frame is not None

    def begin(self, frame: Any) -> None:
        """Put the process in order for a call.

        Args:
            frame: Frame of the wrapper that makes the call.
        """
        self._frame, self._forced = frame, self._compiler._stance
        for patch in _not_around_compiled:
            self._stack.enter_context(patch.suspended())
        self._compiler._stance = self._before

    def end(self, frame: Any) -> None:
        """Watch again, if the call that a frame makes is over.

        Args:
            frame: Frame of a wrapper.
        """
        if frame is self._frame:
            self._frame = None
            self._compiler._stance = self._forced
            self._stack.close()


def _replace_ending(undo: Undo, compiler: Any, leaf: _Leaf) -> None:
    """Have a leaf notified when the wrapper of a compiled function has made its call."""
    leave = compiler.set_eval_frame

    @functools.wraps(leave)
    def left(callback: Any) -> Any:
        result = leave(callback)
        leaf.end(sys._getframe(1))
        return result

    replace(undo, compiler, "set_eval_frame", left)


class _Marker(threading.local):
    """Which passes of the monitor's own a thread is in."""

    def __init__(self) -> None:
        self.passes: list[object] = []


_marker = _Marker()


@contextmanager
def extra_pass_begun() -> Iterator[None]:
    """Mark what this thread runs as a pass of the monitor's own, which is no part of training."""
    own, passes = object(), _marker.passes
    try:
        passes.append(own)
        yield
    finally:
        passes[:] = [other for other in passes if other is not own]


def end_extra_passes() -> None:
    """Take away marks that Ctrl-C has left in this thread."""
    _marker.passes.clear()


def in_extra_pass() -> bool:
    """Whether this thread is running a pass of the monitor's own."""
    return bool(_marker.passes)


def _forbid_fast_path(undo: Undo) -> None:
    """Keep `nn.TransformerEncoder` from its fused inference path, which calls no module inside."""
    before = torch.backends.mha.get_fastpath_enabled()
    undo(lambda: torch.backends.mha.set_fastpath_enabled(before))
    torch.backends.mha.set_fastpath_enabled(False)


run_eagerly = Patch(_force_eager)
without_fast_path = Patch(_forbid_fast_path, around_compiled=False)
