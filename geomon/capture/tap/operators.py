"""Operators as a mode of torch sees them: which kind they are, and whether two calls are alike."""

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.capture.shards import is_sharded, starts_of
from geomon.capture.storage import followed_part

# Appears or not, depending on who else holds a reference to a tensor; it is no more than a view.
DETACH = torch.ops.aten.detach.default

# Arguments of the higher-order operator of flex attention, which has no schema.
_FLEX = ("query", "key", "value", "score_mod", "block_mask", "scale")


ROUTES = ("sdpa", "flex", "flash")  # of fused attention
SUMS = ("add", "sub", "rsub", "addcmul", "addcdiv", "lerp")  # operators that add their arguments


class Kind(NamedTuple):
    """Kind of an operator.

    Attributes:
        role: "softmax", the route of a fused attention (one of `ROUTES`), "choice" (`topk`), or ""
            for all others.
        name: Its name; "" if it is unknown how results are made from the arguments.
        names: Names of its arguments.
        writes: Names of arguments that it changes.
        keeps_places: Whether results only use numbers at the same place.
    """

    role: str
    name: str
    names: tuple[str, ...]
    writes: tuple[str, ...]
    keeps_places: bool = False

    def by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by their names."""
        return dict(zip(self.names, args, strict=False)) | {**kwargs}


# Operators that keep places although torch does not tag them as pointwise.
_KEEPING_PLACES = (
    "native_layer_norm", "_fused_rms_norm", "native_dropout", "_to_copy", "copy_",
    "native_batch_norm", "_native_batch_norm_legit", "repeat", "rsub", "masked_fill",
    "masked_fill_",
)  # fmt: skip
_ROLES = dict.fromkeys(
    ("aten::_softmax", "aten::_safe_softmax", "aten::_log_softmax"), "softmax"
) | {"aten::topk": "choice"}


@functools.cache
def kind_of(func: Any) -> Kind:
    """Return the kind of an operator."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        is_flex = getattr(func, "__name__", "") == "flex_attention"
        return Kind("flex", "", _FLEX, ()) if is_flex else Kind("", "", (), ())
    space, _, name = schema.name.rpartition("::")
    names = tuple(argument.name for argument in schema.arguments)
    changed = (a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    role = _ROLES.get(schema.name) or _route_of(name, {*names})
    is_known = space == "aten" and role not in ROUTES
    return Kind(
        role,
        name if is_known else "",
        names,
        tuple(argument.name for argument in changed),
        torch.Tag.pointwise in func.tags or name in _KEEPING_PLACES,
    )


def _route_of(name: str, arguments: set[str]) -> str:
    """Return the route of an operator that attends to queries, keys and values, or ""."""
    if {"query", "key", "value"} <= arguments or {"q", "k", "v"} <= arguments:
        return "sdpa" if name.startswith("_scaled_dot_product") else "flash"
    return ""


class Op(NamedTuple):
    """An operator that has run, with this rank's parts of its tensors.

    Attributes:
        kind: Its kind.
        args: Arguments by position.
        kwargs: Arguments by name.
        out: The value that it returned.
        starts: By id of a tensor that is a part of a sharded one, its first index by dimension.
    """

    kind: Kind
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any
    starts: Mapping[int, tuple[int, ...]] = MappingProxyType({})

    @property
    def name(self) -> str:
        """Its name, without the underscore of operators that work in place."""
        return self.kind.name.removesuffix("_")

    @property
    def given(self) -> list[Tensor]:
        """Its arguments that are tensors, also those in containers."""
        found = tensors_in(self.args)
        return found + tensors_in(self.kwargs.values()) if self.kwargs else found


def op_of(func: Any, types: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> Op:
    """Return an operator that has run; `types` are the classes of its tensors, if wrapped."""
    if not types:
        return Op(kind_of(func), args, kwargs, out)
    starts: dict[int, tuple[int, ...]] = {}
    own, named, made = on_this_rank([args, kwargs, out], starts)
    return Op(kind_of(func), own, named, made, starts)


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """List the tensors among arguments, including those in lists, tuples and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in _PLAIN:  # nearly all others; the Mapping check below is slow
            continue
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
        elif isinstance(value, Mapping):
            found += tensors_in(value.values())
    return found


def plain_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, int], list[int], list[str], list[Any]]:
    """Return the numbers of arguments, and position or name and value of those without tensors."""
    places = [place for place, value in enumerate(args) if _is_plain(value)]
    names = [name for name, value in kwargs.items() if _is_plain(value)]
    values = [args[place] for place in places] + [kwargs[name] for name in names]
    return (len(args), len(kwargs)), places, names, values


def _is_plain(value: Any) -> bool:
    """Whether a value holds no tensors, and can be compared."""
    return not isinstance(value, torch.ScriptObject) and not tensors_in((value,))


def on_this_rank(values: Any, starts: dict[int, tuple[int, ...]]) -> Any:
    """Replace wrapped tensors, also in containers, by this rank's part of them."""
    if isinstance(values, Tensor):
        part = followed_part(values)
        if is_sharded(values):
            starts[id(part)] = starts_of(values)
        return part
    if isinstance(values, list | tuple) and not hasattr(values, "_fields"):
        return type(values)([on_this_rank(value, starts) for value in values])
    if isinstance(values, dict):
        return {name: on_this_rank(value, starts) for name, value in values.items()}
    return values
