"""Observe which modules are called, without replacing how modules are called.

`nn.Module.__call__` first looks in a slot that `Module.compile` fills and that copies and pickles
leave behind. While a window is open, the slot holds a function that notifies observers.

Compiled code hides what it calls: modules, and operators. One rule, stated only here, deals with it
wherever it is (the model, its blocks, parts of them, functions that blocks call):

- The outermost watched call that has compiled code in it and can be made twice is made once more
  beforehand, eagerly, on the same arguments, without gradients and with its state put back. That
  *twin* is observed. Then the training's own call runs with all patches removed, as compiled.
- Watched calls with compiled code are calls of a compiled module, of the module that runs the
  blocks (a stack's owner), and of a block, for blocks that nobody's call surrounds.
- A call cannot be made twice if ranks exchange something in it (a second call would wait for ranks
  that do not look), if it would draw parameters, if its arguments cannot be copied, or, of the
  owner, if its `forward` was replaced on the object: Lightning so runs a whole training step inside
  a call, and a second one would log, and might optimize, twice. Then calls inside are looked at.
- If no call inside is left, the training's own call runs eagerly while it is watched, and a note
  says so: compiled code does not run under a torch mode.
- In an extra pass, compiled code always runs eagerly.

Compiled functions are therefore searched for before the pass: in it, eager code could no longer be
told from compiled code, whose dropout draws other numbers.
"""

import functools
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from io import BytesIO
from types import CellType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from geomon.capture import private
from geomon.capture.calling.patches import (
    Patch,
    Undo,
    end_extra_passes,
    extra_pass_begun,
    in_extra_pass,
    replace,
    run_eagerly,
    subclasses,
    without_fast_path,
)
from geomon.capture.modes import without_modes
from geomon.capture.unchanged import left_unchanged
from geomon.capture.weights import said
from geomon.failures import failures


class CallObserver(Protocol):
    """An object that is notified of module calls; it must catch its own errors."""

    def timed(self) -> AbstractContextManager[None]:
        """Return a context manager for work, such as a twin, that costs the training time."""

    def modules(self) -> Iterable[nn.Module]:
        """List the modules that may be compiled in place."""

    def watches(self, module: nn.Module) -> bool:
        """Whether to be notified of calls of this module (any module of the process)."""

    def before_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Handle a call that begins."""

    def after_call(self, module: nn.Module, output: Any) -> None:
        """Handle a call that has returned."""

    def needs_twin(self, module: nn.Module) -> bool:
        """Whether a module's compiled code would hide something that must be seen."""

    def on_failure(self, error: Exception) -> None:
        """Handle one of geomon's own errors."""

    def forces_eager(self) -> bool:
        """Whether the training's compiled code must run eagerly because a twin is impossible."""

    def seeing(self, module: nn.Module) -> AbstractContextManager[None] | None:
        """Return what shows the observer operators of this module's call; None if not needed."""

    def hides(self, module: nn.Module) -> bool:
        """Whether a module that is not compiled has compiled code in it that hides something."""

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context manager in which the observer sees no operators."""

    def on_compiled_end(self, module: nn.Module, output: Any) -> None:
        """Handle the output of the training's compiled call; its twin ran before."""


# -- the slot ------------------------------------------------------------------------------------

# Private names of torch.
_SLOT = "_compiled_call_impl"
_plain_call: Any = getattr(nn.Module, "_call_impl", None)
SEES_CALLS = _plain_call is not None and _SLOT in vars(nn.Module)


def _observed(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or private.tracing_state() is not None or in_cuda_graph():
        return _plain_call(module, *args, **kwargs)  # what is recorded must not depend on geomon
    hidden, observers = is_compiled(module), []
    for holder in _calls.holders:
        if isinstance(holder, FirstCall):
            if holder.takes(module):
                return holder.run(module, args, kwargs)
            continue
        hidden = hidden or holder.hides(module)
        if holder.watches(module):
            observers.append(holder)
    if hidden:
        return _call_compiled(module, args, kwargs)
    return _call_observed(observers, module, args, kwargs)


def in_cuda_graph() -> bool:
    """Whether a CUDA graph captures what runs now; its capture fails if the host waits."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _fill_slots(undo: Undo) -> None:
    """Fill the slot of the class, and the slots of modules that are compiled in place."""
    replace(undo, nn.Module, _SLOT, _observed)
    for holder in _calls.holders:
        for module in holder.modules():
            if vars(module).get(_SLOT) is not None:
                replace(undo, module, _SLOT, functools.partial(_observed, module))


_NOTHING: AbstractContextManager[Any] = nullcontext()
_calls = Patch(_fill_slots)  # held by observers and by `FirstCall`
_placed: list[tuple[nn.Module, "_Hook"]] = []  # hooks that are in place until a call begins


def _observers() -> list[CallObserver]:
    return [holder for holder in _calls.holders if not isinstance(holder, FirstCall)]


def _watching(module: nn.Module) -> list[CallObserver]:
    return [observer for observer in _observers() if observer.watches(module)]


def watch_calls(observer: CallObserver) -> None:
    """Notify an observer of module calls until `unwatch_calls`."""
    if not SEES_CALLS:
        raise RuntimeError(f"torch {torch.__version__} calls modules in a way geomon does not know")
    _calls.hold(observer)


def unwatch_calls(observer: CallObserver) -> None:
    """Stop notifying an observer; may be called more than once."""
    _calls.release(observer)
    if not _observers():
        while _placed:  # left by Ctrl-C
            _take_away(*_placed[-1])
            _placed.pop()
        end_extra_passes()


def _call_observed(
    observers: list[CallObserver], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not observers:
        return _plain_call(module, *args, **kwargs)
    opening = [opens for observer in observers if (opens := observer.seeing(module)) is not None]
    with ExitStack() if opening else _NOTHING as stack:
        for opens in opening:
            stack.enter_context(opens)
        output = _call_between(observers, module, args, kwargs)
    for observer in observers:
        observer.after_call(module, output)
    return output


def _call_between(
    observers: list[CallObserver], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make a call and observe its arguments after the module's own pre-hooks changed them."""
    if not module._forward_pre_hooks:
        for observer in observers:
            observer.before_call(module, args, kwargs)
        return _plain_call(module, *args, **kwargs)
    hook = _Hook(observers)  # runs after the module's own hooks
    try:
        _placed.append((module, hook))
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return _plain_call(module, *args, **kwargs)
    finally:
        _take_away(module, hook)
        _placed[:] = [other for other in _placed if other[1] is not hook]


def _take_away(module: nn.Module, hook: "_Hook") -> None:
    """Remove a hook, as its handle would; may be called more than once."""
    for key in [key for key, other in [*module._forward_pre_hooks.items()] if other is hook]:
        module._forward_pre_hooks_with_kwargs.pop(key, None)
        module._forward_pre_hooks.pop(key, None)


class _Hook:
    """A pre-hook that removes itself as the call begins; copies and pickles of it do nothing."""

    def __init__(self, observers: Sequence[CallObserver]) -> None:
        self._observers = observers
        self._thread = threading.get_ident()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        if threading.get_ident() == self._thread:
            _take_away(module, self)
            for observer in self._observers:
                observer.before_call(module, args, kwargs)

    def __reduce__(self) -> tuple[Callable[[Sequence[CallObserver]], "_Hook"], tuple[Any, ...]]:
        return _Hook, ((),)


class FirstCall:
    """Runs functions around the first call of one of some modules, in the thread that made this.

    A call that records gradients takes precedence: what a training step generates or scores without
    gradients is not what it trains on. The first call without gradients is handled as well, because
    a call with gradients may never come.

    Args:
        modules: The modules.
        before: Called before the call; called again if a call with gradients follows one without.
        after: Called when the call has ended, with the exception that ended it or None.
        between: Called instead of `after` when a call without gradients has returned.

    Attributes:
        came: Whether a call has come.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        before: Callable[[], object],
        after: Callable[[BaseException | None], object],
        between: Callable[[], object],
    ) -> None:
        self._modules = set(map(id, modules))
        self._kept = modules  # keeps their addresses valid
        self._before = before
        self._after = after
        self._between = between
        self.came = False
        self._thread = threading.get_ident()

    def begin(self) -> None:
        """Start waiting for the call."""
        _calls.hold(self)

    def end(self) -> None:
        """Stop waiting; may be called more than once."""
        _calls.release(self)

    def modules(self) -> tuple[nn.Module, ...]:
        """List the modules that may be compiled in place."""
        return self._kept

    def takes(self, module: nn.Module) -> bool:
        """Return whether this call is the awaited one.

        Args:
            module: The module that is called.
        """
        return (
            threading.get_ident() == self._thread
            and private.graph_task() == -1
            and (torch.is_grad_enabled() or not self.came)
            and (id(module) in self._modules or id(unwrap(module)) in self._modules)
        )

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, with the functions around it.

        Args:
            module: The module that is called.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        self.end()
        self.came, last = True, torch.is_grad_enabled()
        self._before()
        try:
            output = nn.Module.__call__(module, *args, **kwargs)
        except BaseException as error:
            self._after(error)
            raise
        if last:
            self._after(None)
        else:
            self._between()
            self.begin()
        return output


# -- compiled code -------------------------------------------------------------------------------


def is_compiled(module: nn.Module) -> bool:
    """Whether calling a module runs compiled code."""
    own, of_class = vars(module), getattr(type(module), "forward", None)
    return own.get(_SLOT) is not None or _is_compiled_function(own.get("forward", of_class))


def _is_compiled_function(value: Any) -> bool:
    """Whether a value is a function compiled by `torch.compile`, not one excluded from it."""
    return (
        getattr(value, "_torchdynamo_orig_callable", None) is not None
        and not getattr(value, "_torchdynamo_disable", False)
    )  # fmt: skip


def compiled_in(modules: Iterable[nn.Module], *, inside: bool) -> set[int]:
    """Return ids of modules whose call runs compiled code.

    If `inside`, also of those that reach compiled functions by attributes or by forward's globals.
    """
    if "_dynamo" not in vars(torch):  # nothing can have been compiled
        return set()
    modules = [*modules]
    kinds = {*map(type, modules)}
    classes = {kind for kind in kinds if _is_compiled_function(getattr(kind, "forward", None))}
    if inside:
        classes |= _reaching_compiled(kinds)
    return {
        id(module)
        for module in modules
        if type(module) in classes
        or vars(module).get(_SLOT) is not None
        or _is_compiled_function(vars(module).get("forward"))
        or (inside and (_compiles_itself(module) or _holds_compiled(vars(module))))
    }


def _reaching_compiled(kinds: Iterable[type]) -> set[type]:
    """Return the classes that reach compiled functions; what they share is searched once."""
    above = {each for kind in kinds for each in kind.__mro__ if _is_of_user(each)}
    scopes = {id(names): names for names in map(_globals_of, above)}
    found = {number for number, names in scopes.items() if _holds_compiled(names)}
    reaching = {
        each for each in above if id(_globals_of(each)) in found or _holds_compiled(vars(each))
    }
    return {kind for kind in kinds if not reaching.isdisjoint(kind.__mro__)}


def _is_of_user(kind: type) -> bool:
    return not kind.__module__.startswith("torch.")


def _compiles_itself(module: nn.Module) -> bool:
    return said(vars(module).get("config"), "_attn_implementation") == _COMPILED_BY_ITSELF


def _holds_compiled(names: Mapping[str, Any]) -> bool:
    functions = [value for value in [*names.values()] if type(value) in _FUNCTIONS]
    return any(map(_reaches_compiled, functions))


_FUNCTIONS = (FunctionType, functools.partial)  # a few among hundreds of names


def _reaches_compiled(value: Any) -> bool:
    """Whether a value is a compiled function, or refers to one."""
    if isinstance(value, functools.partial):
        return any(map(_reaches_compiled, (value.func, *value.args, *value.keywords.values())))
    if not isinstance(value, FunctionType):
        return False
    cells = [cell for cell in value.__closure__ or () if cell != _EMPTY]  # others are not set yet
    return any(map(_is_compiled_function, (value, *(cell.cell_contents for cell in cells))))


_EMPTY = CellType()
_COMPILED_BY_ITSELF = "flex_attention"  # transformers compiles it on first use


def _globals_of(kind: type) -> dict[str, Any]:
    """Return the globals of the `forward` that a class has in Python."""
    forward = vars(kind).get("forward")
    return forward.__globals__ if isinstance(forward, FunctionType) else {}


def unwrap(module: nn.Module) -> nn.Module:
    """Remove the wrappers of `torch.compile` and `DistributedDataParallel`."""
    while True:
        inner = _compiled_inside(module)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def _compiled_inside(module: nn.Module) -> nn.Module | None:
    """Return the module inside a `torch.compile` wrapper, or None."""
    modules = vars(module).get("_modules")  # TorchScript has no dict
    return modules.get("_orig_mod") if isinstance(modules, dict) else None


def _call_compiled(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if in_extra_pass():
        return _call_eagerly(module, args, kwargs)
    target = unwrap(module)
    observers = [observer for observer in _observers() if observer.needs_twin(target)]
    if observers:
        inside = not is_compiled(module) and _hides_inside(observers, module)
        try:
            with observers[0].timed(), without_modes():
                if inside and "forward" in vars(module):
                    raise ValueError(f"the forward pass of {type(module).__name__} was replaced")
                copies = _copies(target, args, kwargs)
        except failures():  # the call cannot be made twice
            if inside:
                return _call_observed(_watching(module), module, args, kwargs)
            forced = [observer.forces_eager() for observer in observers]
            if any(forced):
                with extra_pass_begun(), run_eagerly.held():
                    return _call_eagerly(module, args, kwargs)
        else:
            _run_twin(observers, target, *copies)
    with _unpatched():
        output = nn.Module.__call__(module, *args, **kwargs)
    for observer in observers:
        observer.on_compiled_end(target, output)
    return output


def _call_eagerly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inner = _compiled_inside(module)
    if inner is None or module._forward_hooks or module._forward_pre_hooks:
        return _call_observed(_watching(module), module, args, kwargs)
    return nn.Module.__call__(inner, *args, **kwargs)  # the wrapper would bypass observers


def _run_twin(
    observers: list[CallObserver], target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run the eager twin of a compiled call for the observers to see."""
    with observers[0].timed():
        try:
            with (
                _suspended(observers), without_modes(), extra_pass_begun(), run_eagerly.held(),
                without_fast_path.held(), left_unchanged(target), warnings.catch_warnings(),
            ):  # fmt: skip
                warnings.simplefilter("ignore")  # the training itself does not run this eagerly
                nn.Module.__call__(target, *args, **kwargs)
        except failures() as error:
            for observer in observers:
                observer.on_failure(error)


@contextmanager
def _suspended(observers: Iterable[CallObserver]) -> Iterator[None]:
    """Hide operators from observers; code in the body may show them again."""
    with ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.suspended())
        yield


@contextmanager
def _unpatched() -> Iterator[None]:
    """Remove all patches for compiled code, whose guards would otherwise trigger recompilation."""
    with _suspended(_observers()), ExitStack() as stack:
        for patch in (_calls, run_eagerly, subclasses):
            stack.enter_context(patch.suspended())
        yield


def _hides_inside(observers: Iterable[CallObserver], module: nn.Module) -> bool:
    """Whether compiled code in a module is also in one of the watched modules that it calls."""
    parts = [part for part in module.modules() if part is not module]
    return any(observer.hides(part) for observer in observers for part in parts)


def _copies(
    target: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the arguments of a call, because a forward pass may write into them (a key cache)."""
    sharded = any(hasattr(parameter, "to_local") for parameter in target.parameters())
    if sharded or any(map(_is_collective, target.modules())):
        raise ValueError(f"ranks communicate in the forward pass of {type(target).__name__}")
    if any(nn.parameter.is_lazy(parameter) for parameter in target.parameters()):
        raise ValueError(f"parameters of {type(target).__name__} have no values yet")
    file, kept = BytesIO(), list[Any]()
    _Pickler(file, kept).dump((args, kwargs))
    file.seek(0)
    copied: tuple[tuple[Any, ...], dict[str, Any]] = _Unpickler(file, kept).load()
    return copied


class _Pickler(pickle.Pickler):
    """Pickles values but keeps copies of tensors, and modules and functions themselves, aside."""

    def __init__(self, file: BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor | nn.Module | FunctionType):
            return None
        self._kept.append(value.detach().clone() if isinstance(value, Tensor) else value)
        return len(self._kept) - 1


class _Unpickler(pickle.Unpickler):
    """Puts back what a `_Pickler` kept aside."""

    def __init__(self, file: BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, place: int) -> Any:
        return self._kept[place]


def _is_collective(module: nn.Module) -> bool:
    """Whether a module's own forward pass waits for other ranks."""
    managed = getattr(module, "_is_fsdp_managed_module", False)
    return managed or isinstance(module, nn.SyncBatchNorm)
