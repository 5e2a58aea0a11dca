"""Read attributes and weights of modules without side effects on training.

A weight under `torch.nn.utils.parametrize` is computed at each access, and computing it may change
state: spectral norm iterates in train mode. A property may do the same, and a config may raise
anything.
"""

import inspect
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from geomon.failures import failures


def said(holder: Any, name: str) -> Any:
    """Return an attribute of a module or a config, or None if it is missing or raises an error.

    Args:
        holder: Any object.
        name: Name of the attribute, which must not be a weight.
    """
    try:
        return getattr(holder, name, None)
    except failures():  # for example, because the value differs between layers
        return None


def has_weight(module: nn.Module, name: str) -> bool:
    """Whether a module has an attribute that may be a weight, without computing it."""
    return is_parametrized(module, name) or hasattr(module, name)


def stored_weight(module: nn.Module, name: str = "weight") -> Tensor | None:
    """Return the parameter behind a weight, or None if there is not exactly one.

    A weight that is a property is not read.
    """
    if is_parametrized(module, name):
        made_of = getattr(module.parametrizations, name)._parameters
        return made_of.get("original")
    if isinstance(inspect.getattr_static(type(module), name, None), property):
        return None
    weight = getattr(module, name, None)
    return weight if isinstance(weight, Tensor) else None


@torch.no_grad()
def present_weight(module: nn.Module, name: str = "weight") -> Tensor | None:
    """Return a weight as in a forward pass in eval mode, or None if there is none."""
    if not is_parametrized(module, name):
        return stored_weight(module, name)
    makers = list(getattr(module.parametrizations, name).modules())
    flags = [maker.training for maker in makers]
    try:
        for maker in makers:
            maker.training = False
        weight = getattr(module, name)
    finally:
        for maker, flag in zip(makers, flags, strict=True):
            maker.training = flag
    return weight if isinstance(weight, Tensor) else None


@torch.no_grad()
def weight_norms(module: nn.Module) -> dict[str, Tensor]:
    """Compute the Frobenius norm of each weight in a module except vectors, by name.

    Indices of modules in lists are removed from the names: the matrices of listed experts share one
    norm, as stacked experts in one parameter do.

    Args:
        module: A block.

    Returns:
        float32 scalars on the device of the weights, or {} if this rank has only a shard of one.
    """
    norms: dict[str, list[Tensor]] = defaultdict(list)
    lists = {place for place, each in module.named_modules() if isinstance(each, nn.ModuleList)}
    paths = {"": ""}  # paths of modules, without their indices in lists
    for place, inner in module.named_modules():
        above, _, own = place.rpartition(".")
        paths[place] = paths[above] + ("" if above in lists or not own else f"{own}.")
        if "parametrizations" in place.split("."):  # the originals of computed weights
            continue
        made = inner.parametrizations if is_parametrized(inner) else ()
        for name in (*inner._parameters, *made):
            weight = present_weight(inner, name)
            if hasattr(weight, "to_local"):
                return {}
            if weight is None or is_lazy(weight) or weight.ndim < 2 or weight.is_meta:
                continue
            if not weight.is_floating_point() or weight.element_size() < 2:
                continue  # quantised, for example
            norm = torch.linalg.vector_norm(weight, dtype=torch.float32)
            norms[(paths[place] + name).removesuffix(".weight")].append(norm)
    return {name: torch.linalg.vector_norm(torch.stack(each)) for name, each in norms.items()}
