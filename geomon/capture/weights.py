"""Read attributes and weights of modules without side effects on training.

A weight under `torch.nn.utils.parametrize` is computed at each access, and computing it may change
state: spectral norm iterates in train mode. A property may do the same, and a config may raise
anything.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from geomon.capture import private
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


class Norms(NamedTuple):
    """Frobenius norms of the weights of a block.

    Attributes:
        names: Names of the weights.
        values: Their norms, float32, on the device of the weights.
    """

    names: tuple[str, ...]
    values: Tensor


class WeightNorms:
    """Reads the norms of the weights of all blocks when the first of them is called.

    Weights that are not whole then (FSDP gathers the weights of a block for its call) and weights
    that are computed are read at the block's own call.

    Args:
        blocks: The blocks.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._read: dict[int, Norms | None] = {}  # of blocks to be called in this pass
        self._called: set[int] = set()

    @torch.no_grad()
    def of(self, block: nn.Module) -> Norms | None:
        """Return the norms of a block that is being called.

        Indices of modules in lists are removed from the names: the matrices of listed experts share
        one norm, as stacked experts in one parameter do. Vectors have no norm.

        Args:
            block: One of the blocks.

        Returns:
            The norms, or None if this rank has only a shard of a weight, or no matrix.
        """
        if id(block) in self._called or not self._called:  # a pass begins
            ready = {id(each): _stored_matrices(each) for each in self._blocks}
            self._read = _norms({key: found for key, found in ready.items() if found})
            self._called = set()
        self._called.add(id(block))
        if id(block) not in self._read:
            found = _stored_matrices(block) or _present_matrices(block)
            self._read |= _norms({id(block): found})
        return self._read[id(block)]


def to_numbers(norms: Sequence[Norms]) -> list[dict[str, float]]:
    """Move the norms of several blocks to the host, by name, with one wait for the device.

    Args:
        norms: The norms of each block.
    """
    together = [each.values.to(norms[0].values.device) for each in norms]
    numbers = iter(torch.cat(together).tolist() if together else ())
    return [dict(zip(each.names, numbers, strict=False)) for each in norms]


Matrices = list[tuple[str, Tensor]]  # names of norms, and weights
Form = tuple[torch.Size, torch.dtype]
Found = list[tuple[str, "ref[nn.Module]", str, Form]]  # of the norm, holder, of the weight

# The structure of blocks at an earlier call, and the matrices that were found in it.
_known: "WeakKeyDictionary[nn.Module, tuple[list[Any], Found]]" = WeakKeyDictionary()

_PLAIN = (nn.Parameter, Tensor)


def _structure(block: nn.Module) -> list[Any]:
    """List the modules of a block and the names of their parameters."""
    return [(id(module), *module._parameters) for module in block.modules()]


def _stored_matrices(block: nn.Module) -> Matrices:
    """List the matrices of a block if they are whole, as they were at its last call; else none."""
    structure, matrices = _known.get(block, (None, Found()))
    weights = Matrices()
    for norm, holder, name, form in matrices if structure == _structure(block) else ():
        weight: Any = getattr(holder(), "_parameters", {}).get(name)
        if type(weight) not in _PLAIN or private.is_wrapped_by_grad(weight):
            return []
        # FSDP shards weights or frees them outside of their block.
        if (weight.shape, weight.dtype) != form or not weight.data_ptr():
            return []
        weights.append((norm, weight))
    return weights


def _present_matrices(block: nn.Module) -> Matrices:
    """List the matrices of a block that is being called; none if one of them is a shard."""
    found, weights, stays = Found(), Matrices(), True
    for path, module in _paths(block):
        made: Any = module.parametrizations if is_parametrized(module) else ()
        for name in (*module._parameters, *made):
            weight = present_weight(module, name)
            if hasattr(weight, "to_local"):
                return []
            is_there = weight is None or not (is_lazy(weight) or weight.is_meta)
            stays &= is_there and name not in made
            if weight is None or not is_there or weight.ndim < 2:
                continue
            if not weight.is_floating_point() or weight.element_size() < 2:
                continue  # quantised, for example
            norm = (path + name).removesuffix(".weight")
            found.append((norm, ref(module), name, (weight.shape, weight.dtype)))
            weights.append((norm, weight))
    if weights and stays:
        _known[block] = _structure(block), found
    return weights


def _paths(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over modules that may hold weights, with their paths without indices in lists."""
    lists = {place for place, each in block.named_modules() if isinstance(each, nn.ModuleList)}
    paths = {"": ""}
    for place, module in block.named_modules():
        above, _, own = place.rpartition(".")
        paths[place] = paths[above] + ("" if above in lists or not own else f"{own}.")
        if "parametrizations" not in place.split("."):  # the originals of computed weights
            yield paths[place], module


def _norms(blocks: Mapping[int, Matrices]) -> dict[int, Norms | None]:
    """Compute the norms of the matrices of several blocks together."""
    every = [
        weight.float() if weight.dtype == torch.float64 else weight  # else torch refuses
        for weights in blocks.values()
        for _, weight in weights
    ]
    if every and private.norms is not None and all(type(weight) in _PLAIN for weight in every):
        norms = iter(private.norms(every, dtype=torch.float32))
    else:
        norms = iter([torch.linalg.vector_norm(x, dtype=torch.float32) for x in every])
    found = dict[int, Norms | None]()
    for block, weights in blocks.items():
        named: dict[str, list[Tensor]] = defaultdict(list)
        for name, _ in weights:
            named[name].append(next(norms))
        values = [
            each[0] if len(each) == 1 else torch.linalg.vector_norm(torch.stack(each))
            for each in named.values()
        ]
        found[block] = Norms(tuple(named), torch.stack(values)) if values else None
    return found
