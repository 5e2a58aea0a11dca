"""Restore everything that an extra forward pass may change."""

import logging
import operator
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from geomon.failures import failures

log = logging.getLogger("geomon")

# A function and its arguments. Thousands of closures would start the garbage collector.
Action = tuple[Any, ...]

# Containers that are looked into; the first class that fits reads and writes them.
_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set, tuple)
# Nested containers are looked into down to this depth, if they are not larger than this.
_DEPTH = 4
_MOST_ITEMS = 1000
_MOST_COPIED = 8 * 2**20  # bytes of all copies of parameters
_MOST_BYTES = 2**20  # of one array
_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, types.FunctionType)
_PLAIN = (Tensor, nn.Parameter)  # exactly: subclasses may have no storage of their own
# Modules that keep their state elsewhere: only training flags and buffers are kept.
_WRAPPERS = (torch.jit.ScriptModule, nn.parallel.DistributedDataParallel)
# Private names of FSDP1.
_FSDP1 = ("uses_sharded_strategy", "needs_unshard", "reshard", "post_reshard", "_prefetched")

# Tensors that an extra pass has changed for good, by id.
_written: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


class _Made:
    """Extra passes that were begun so far."""

    passes = 0


def extra_passes() -> int:
    """Return how many extra passes this process has begun, including those that failed."""
    return _Made.passes


@contextmanager
def left_unchanged(model: nn.Module) -> Iterator[None]:
    """Run a body without autograd, then restore what it changed in the model and the process.

    Restored are

    - the random states of torch, NumPy and Python, and of generators that modules hold;
    - the attributes of all modules, including parameters, buffers, submodules, hooks and training
      flags, as the same objects. Lists, dicts, deques and sets get their former contents back, and
      so do containers in them, up to 4 levels deep (but not inside containers of more than 1,000
      items); tensors and arrays of at most 1 MiB get their former values back;
    - the values of parameters and of tensors with a graph (at most 8 MiB are copied, tensors
      without gradient and small ones first);
    - caches of autocast and of `torch.nn.utils.parametrize.cached`, and parameters gathered by
      FSDP.

    Other objects of the user's are not looked into. If the body writes into a tensor without a
    copy, a warning names it, and no further extra pass is made on the model. Hooks placed or
    removed in the body must be removed or placed again there.
    """
    restore: list[Action] = []
    _keep_random_states(model, restore.append)
    _keep_switches(restore.append)
    _keep_cached_weights(model, restore.append)
    state = _ModelState(model, restore.append)
    restore.append((_reshard, model))  # restored first, because it exchanges parameters
    kept = _Kept(restore)
    try:
        with kept, kept:  # twice, because Ctrl-C may come as the inner one begins to restore
            torch.set_grad_enabled(False)
            # Weights cached by autocast here would have no gradient in training.
            torch.set_autocast_cache_enabled(False)
            _Made.passes += 1
            yield
    finally:
        state.report_written()


@contextmanager
def random_states_kept(model: nn.Module) -> Iterator[None]:
    """Run a body, then restore the random states of torch, NumPy and Python.

    Args:
        model: Any module. The random states of its devices are restored as well.
    """
    restore: list[Action] = []
    _keep_random_states(model, restore.append)
    kept = _Kept(restore)
    with kept, kept:
        yield


class _Kept:
    """Restores kept state on exit, last action first; may exit more than once."""

    def __init__(self, restore: list[Action]) -> None:
        self._restore = restore

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        try:
            self._finish()
        except BaseException:  # Ctrl-C in between
            self._finish()
            raise

    def _finish(self) -> None:
        failure: Exception | None = None
        while self._restore:
            try:
                function, *arguments = self._restore[-1]
                function(*arguments)
            except failures() as error:  # the others are restored all the same
                failure = error
            self._restore.pop()
        if failure is not None:
            raise failure


# -- the process ---------------------------------------------------------------------------------


def _keep_random_states(model: nn.Module, keep: Callable[[Action], None]) -> None:
    keep((random.setstate, random.getstate()))
    keep((np.random.set_state, np.random.get_state()))
    keep((torch.set_rng_state, torch.get_rng_state()))
    for device in {parameter.device for parameter in model.parameters()}:
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device)
            keep((module.set_rng_state, module.get_rng_state(device), device))


def _keep_switches(keep: Callable[[Action], None]) -> None:
    keep((torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()))
    keep((torch.set_grad_enabled, torch.is_grad_enabled()))


def _keep_cached_weights(model: nn.Module, keep: Callable[[Action], None]) -> None:
    """Keep the cache of `parametrize.cached`: a weight made in the pass would lack a gradient."""
    cache = getattr(parametrize, "_cache", None)
    if isinstance(cache, dict):
        keep((_put_parts_back, cache, dict, _parts(cache, dict)))
    elif any(map(parametrize.is_parametrized, model.modules())):
        raise ValueError(
            "this release of torch does not show which parametrised weights are cached: no extra "
            "pass can be made on a model with such weights"
        )


# -- the model -----------------------------------------------------------------------------------


class _ModelState:
    """State of a model's modules: kept by identity, and by value if it can be written into.

    Raises a ValueError if an earlier pass changed the model for good.
    """

    def __init__(self, model: nn.Module, keep: Callable[[Action], None]) -> None:
        self._model = model
        self._keep = keep
        # FSDP exchanges parameters as it gathers them; FSDP1 keeps them as attributes too.
        self._flat = _of_fsdp(model, "FullyShardedDataParallel")
        for module in self._flat:
            _refuse_unknown(module)
        self._sharded = self._flat or _of_fsdp(model, "FSDPModule")
        self._seen: dict[int, Any] = {}  # by id, and kept alive here
        self._modules: list[nn.Module] = []
        self._costly: list[Tensor] = []  # parameters, and tensors with a graph
        self._watched: list[tuple[Tensor, int]] = []  # tensors without a copy, with their version
        self._add_modules(model)
        for module in self._modules:  # grows by modules found in containers
            self._keep_module(module)
        self._keep_costly()

    def report_written(self) -> None:
        """Warn about tensors without a copy that the pass wrote into."""
        written = [tensor for tensor, version in self._watched if _version(tensor) != version]
        if not written:
            return
        _written.update((id(tensor), tensor) for tensor in written)
        log.warning(
            "the forward pass of %s writes into %s: an extra pass has changed it for good, because "
            "it was too large to copy, and no further extra pass will be made",
            type(self._model).__name__,
            self._named(written),
        )

    def _named(self, tensors: list[Tensor]) -> str:
        found = set(map(id, tensors))
        model = self._model
        named = (*model.named_parameters(), *model.named_buffers())
        names = [name for name, value in named if id(value) in found]
        return ", ".join(names[:3]) or "a tensor in a container"

    def _add_modules(self, module: nn.Module) -> None:
        for each in module.modules():
            if id(each) not in self._seen:
                self._seen[id(each)] = each
                self._modules.append(each)

    def _keep_module(self, module: nn.Module) -> None:
        attributes = vars(module)
        if isinstance(module, _WRAPPERS) or self._flat:
            self._keep((setattr, module, "training", module.training))
            self._keep_each([*module.buffers(recurse=False)], 0)
            return
        kept = attributes.copy()
        self._keep_each(kept.values(), 0)
        self._keep((_put_attributes_back, attributes, kept))

    def _keep_each(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            kind = type(value)  # not isinstance: a weak reference may have lost its object
            if kind in _UNCHANGING or id(value) in self._seen:
                continue
            if issubclass(kind, nn.Module):
                self._add_modules(value)
                continue
            self._seen[id(value)] = value
            if issubclass(kind, Tensor):
                self._keep_tensor(value)
            elif (base := _base(kind)) is not None:
                self._keep_container(value, base, depth)
            elif (restore := _keep_object(value, kind)) is not None:
                self._keep(restore)

    def _keep_container(self, container: Any, base: Any, depth: int) -> None:
        parts = _parts(container, base)
        if len(parts) <= _MOST_ITEMS and depth < _DEPTH:
            if self._sharded and any(issubclass(type(part), nn.Parameter) for part in parts):
                return
            self._keep_each(parts, depth + 1)
        if base is not tuple:
            self._keep((_put_parts_back, container, base, parts))

    def _keep_tensor(self, tensor: Tensor) -> None:
        if nn.parameter.is_lazy(tensor):  # a pass would initialise it with other random numbers
            raise ValueError(
                f"{self._named([tensor])} has no values yet (torch.nn.Lazy...): run the model once "
                "before measuring it by an extra pass"
            )
        if _written.get(id(tensor)) is tensor:
            raise ValueError(
                f"an earlier extra pass changed {self._named([tensor])}, because the forward pass "
                "writes into it: no further extra pass is made"
            )
        # An activation of the last step may be as large as parameters; isinstance is slow here.
        if issubclass(type(tensor), nn.Parameter) or tensor.grad_fn is not None:
            self._costly.append(tensor)
        else:
            self._keep_values(tensor, affordable=True)

    def _keep_costly(self) -> None:
        """Copy parameters, those without gradient and small ones first, and watch the others."""
        if self._sharded:
            return
        left = _MOST_COPIED
        for tensor in sorted(self._costly, key=lambda x: (x.requires_grad, x.numel())):
            left -= tensor.numel() * tensor.element_size()
            self._keep_values(tensor, affordable=left >= 0)

    def _keep_values(self, tensor: Tensor, *, affordable: bool) -> None:
        plain = type(tensor) in _PLAIN and tensor.layout == torch.strided and not tensor.is_nested
        copy = tensor.detach().clone() if plain and affordable and not tensor.is_meta else None
        if plain:
            version, requires_grad = _version(tensor), tensor.requires_grad
            self._keep((_put_values_back, tensor, tensor.data, copy, version, requires_grad))
        if copy is None:
            self._watched.append((tensor, _version(tensor)))


# -- values --------------------------------------------------------------------------------------


def _put_attributes_back(attributes: dict[str, Any], kept: dict[str, Any]) -> None:
    attributes.update(kept)
    for name in attributes.keys() - kept.keys():
        del attributes[name]


def _base(kind: type) -> Any:
    """Return the class whose methods read and write a container, or None for other objects."""
    return next((base for base in _CONTAINERS if issubclass(kind, base)), None)


def _parts(container: Any, base: Any) -> list[Any]:
    """List the items of a container; for a dict, its keys and then its values."""
    if issubclass(base, dict):
        return [*base.keys(container), *base.values(container)]
    return [*base.__iter__(container)]


def _put_parts_back(container: Any, base: Any, parts: list[Any]) -> None:
    now = _parts(container, base)
    if len(now) == len(parts) and all(map(operator.is_, now, parts)):
        return
    base.clear(container)
    if issubclass(base, dict):
        half = len(parts) // 2
        for key, value in zip(parts[:half], parts[half:], strict=True):
            base.__setitem__(container, key, value)
    elif base is set:
        base.update(container, parts)
    else:
        base.extend(container, parts)


def _put_values_back(
    tensor: Tensor, data: Tensor, copy: Any, version: int, requires_grad: bool
) -> None:
    # Undo `parameter.data = other`, except for empty data, which DeepSpeed gathers.
    if data.numel() and (tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape):
        tensor.data = data
    whole = copy is not None and tensor.shape == copy.shape
    # 0 equals -0, and writing into `tensor.data` does not change the version. Memory of the host
    # may be read-only; on a device a comparison would wait for all queued work.
    changed = _version(tensor) != version or not tensor.is_cpu
    if whole and (changed or not torch.equal(tensor.data, copy)):
        tensor.data.copy_(copy)  # hidden from autograd, because it saw these values
    if tensor.requires_grad != requires_grad:
        tensor.detach_().requires_grad_(requires_grad)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _keep_object(value: Any, kind: type) -> Action | None:
    """Keep the state of a random generator or a small array; None for other objects."""
    if issubclass(kind, torch.Generator):
        return value.set_state, value.get_state()
    if kind is random.Random:
        return value.setstate, value.getstate()
    if issubclass(kind, np.random.Generator):
        return setattr, value.bit_generator, "state", value.bit_generator.state
    if issubclass(kind, np.random.RandomState):
        return value.set_state, value.get_state()
    if kind is np.ndarray and value.nbytes <= _MOST_BYTES and value.flags.writeable:
        return np.copyto, value, value.copy()
    return None


# -- sharding ------------------------------------------------------------------------------------


def _reshard(model: nn.Module) -> None:
    """Shard parameters again that FSDP gathered for the pass.

    After a forward pass, FSDP keeps its outermost parameters for a backward pass, which never comes
    here. An optimizer step in between would leave the next forward pass with old weights.
    """
    for module in _of_fsdp(model, "FSDPModule"):
        module.reshard()
    for module in _of_fsdp(model, "FullyShardedDataParallel"):
        _reshard_flat(module)


def _of_fsdp(model: nn.Module, name: str) -> list[Any]:
    """List the model's modules of a class of FSDP."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), name, None)
    return [] if kind is None else [x for x in model.modules() if isinstance(x, kind)]


def _refuse_unknown(module: Any) -> None:
    """Refuse an FSDP1 module that could not be sharded again."""
    handle = getattr(module, "_handle", module)  # the module itself has none of the names
    if handle is not None and not all(hasattr(handle, name) for name in _FSDP1):
        raise ValueError(
            "no extra pass is made on a FullyShardedDataParallel of this release of torch: its "
            "parameters could not be sharded again (fully_shard can)"
        )


def _reshard_flat(module: Any) -> None:
    """Shard the parameters of one FSDP1 module again; FSDP1 lacks a public function for it."""
    handle = module._handle
    if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
        handle.reshard(True)
        handle.post_reshard()
        handle._prefetched = False


__all__ = ["extra_passes", "left_unchanged", "random_states_kept"]
