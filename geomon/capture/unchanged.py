"""Unchanged: what an extra forward pass must leave as it was."""

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Action = Callable[[], Any]


@contextmanager
def left_unchanged(model: nn.Module) -> Iterator[None]:
    """Run a body without autograd, and put back whatever it changes in the model and the process.

    These are the random states of torch, NumPy and Python, the training flags, all buffers and the
    tensors and numbers that modules have as plain attributes (a forward pass may grow a table of
    rotations, count its calls or watch ranges), and the cache of autocast. Parameters that FSDP
    gathered are sharded again.

    Args:
        model: Any module.
    """
    restore: list[Action] = []
    _keep_random_states(model, restore.append)
    _keep_switches(restore.append)
    restore.append(lambda: _reshard(model))
    _keep_state(model, restore.append)
    kept = _Kept(restore)
    with kept, kept:  # twice: Ctrl-C may come as the inner one begins to restore
        torch.set_grad_enabled(False)
        # Weights that autocast keeps from here would be without gradient in training.
        torch.set_autocast_cache_enabled(False)
        yield


@contextmanager
def random_states_kept(model: nn.Module) -> Iterator[None]:
    """Run a body, and put the random states of torch, NumPy and Python back afterwards.

    Args:
        model: Any module; the random state of its device is put back too.
    """
    restore: list[Action] = []
    _keep_random_states(model, restore.append)
    kept = _Kept(restore)
    with kept, kept:
        yield


class _Kept:
    """A context manager that restores what is kept; may be left more than once.

    Args:
        restore: What restores it, from the last to the first; each can be done twice.
    """

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
                self._restore[-1]()
            except Exception as error:
                failure = failure or error
            self._restore.pop()
        if failure is not None:
            raise failure


def refuse_lazy(model: nn.Module) -> None:
    """Refuse a model that has parameters without values, which its first forward pass makes.

    An extra pass would make them in place of training's own, from other random numbers.

    Args:
        model: Any module.

    Raises:
        ValueError: There is such a parameter.
    """
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(value):
            raise ValueError(
                f"{name} has no values yet (torch.nn.Lazy...): run the model once "
                "before an extra pass is made on it"
            )


# -- random states -------------------------------------------------------------------------------


def _keep_random_states(model: nn.Module, keep: Callable[[Action], None]) -> None:
    keep(functools.partial(random.setstate, random.getstate()))
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        keep(functools.partial(numpy.set_state, numpy.get_state()))
    keep(functools.partial(torch.set_rng_state, torch.get_rng_state()))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        keep(functools.partial(module.set_rng_state, module.get_rng_state(device), device))


def _keep_switches(keep: Callable[[Action], None]) -> None:
    cached, grad = torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
    keep(functools.partial(torch.set_autocast_cache_enabled, cached))
    keep(functools.partial(torch.set_grad_enabled, grad))


# -- flags, buffers and attributes ---------------------------------------------------------------


def _keep_state(model: nn.Module, keep: Callable[[Action], None]) -> None:
    """Keep flags, buffers and plain attributes: the same objects, with the same values."""
    flat = _is_fsdp1(model)  # its parameters are plain attributes, gathered and freed
    for module in model.modules():
        keep(functools.partial(setattr, module, "training", module.training))
        _keep_buffers(module, keep)
        if not flat:
            _keep_attributes(module, keep)


def _keep_buffers(module: nn.Module, keep: Callable[[Action], None]) -> None:
    buffers, transient = module._buffers, module._non_persistent_buffers_set
    objects, names = dict(buffers), set(transient)
    for value in objects.values():
        if value is not None:
            keep(_keep_values(value))

    def restore() -> None:
        if not _same_objects(buffers, objects):
            buffers.clear()
            buffers.update(objects)
        if transient != names:
            transient.clear()
            transient.update(names)

    keep(restore)


def _same_objects(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(one[name] is other[name] for name in one)


def _keep_attributes(module: nn.Module, keep: Callable[[Action], None]) -> None:
    attributes = vars(module)
    objects = {name: value for name, value in attributes.items() if _is_plain(value)}
    known = set(attributes)
    for value in objects.values():
        if isinstance(value, Tensor):
            keep(_keep_values(value))

    def restore() -> None:
        for name, value in objects.items():
            if attributes.get(name) is not value:
                attributes[name] = value
        for name in set(attributes) - known:
            if _is_plain(attributes[name]):
                del attributes[name]

    keep(restore)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) or type(value) in (int, float)


def _keep_values(tensor: Tensor) -> Callable[[], None]:
    """Copy a tensor; returns what writes the copy back, if the tensor has changed."""
    if tensor.device.type == "meta":
        return lambda: None
    kept, version = tensor.detach().clone(), _version(tensor)

    def restore() -> None:
        own = tensor.detach()
        if _version(tensor) != version or not torch.equal(own, kept):
            own.copy_(kept)

    return restore


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


# -- sharding ------------------------------------------------------------------------------------


def _reshard(model: nn.Module) -> None:
    """Shard the parameters again that FSDP gathered for the pass.

    FSDP keeps its outermost parameters after a forward pass, for a backward pass that never comes
    here. An optimizer step in between would leave the next forward pass with old weights.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
        elif isinstance(module, fsdp.FullyShardedDataParallel):
            _reshard_flat(module)


def _is_fsdp1(model: nn.Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()
    )


def _reshard_flat(module: Any) -> None:
    """Shard the parameters of one FSDP1 module again, for which FSDP1 has no public function."""
    handle = getattr(module, "_handle", None)
    if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
        handle.reshard(True)
        handle.post_reshard()
        handle._prefetched = False


__all__ = ["left_unchanged", "random_states_kept", "refuse_lazy"]
