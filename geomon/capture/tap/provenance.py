"""Provenance: which products of queries and keys flowed into a tensor, whatever came between.

Tensors are known by their storage, so views need no rule. A tensor is followed where it was made of
what a block was given; weights are not, so a product of two followed tensors is one of queries and
keys, or of weights of attention and values. Nothing is computed and nothing is copied.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from geomon.capture.tap.unseen import unseen

# Matrix products by operator: where their factors stand, behind a summand.
_FACTORS = {"bmm": 0, "mm": 0, "baddbmm": 1, "addmm": 1, "baddbmm_": 1, "addmm_": 1}
# What a tensor is after these no longer says which product it came from.
_STOPS = frozenset((
    "native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm", "embedding",
    "convolution", "_convolution", "_softmax", "_safe_softmax", "_log_softmax",
))  # fmt: skip
# Operators that do nothing but multiply by a number.
_SCALINGS = {"mul": 1, "mul_": 1, "div": -1, "div_": -1}
_COPIES = frozenset(("clone", "_to_copy", "copy"))
# Operators that add to scores, hide some or join more: what they were multiplied by stays.
_KEEPING = _COPIES | {
    "add", "add_", "sub", "sub_", "masked_fill", "masked_fill_", "where", "copy_", "cat", "slice",
    "maximum", "constant_pad_nd", "index",
}  # fmt: skip


class Product(NamedTuple):
    """A product of two tensors that were both made of tokens.

    Attributes:
        left: The left factor, [..., rows, width]: queries, if it becomes scores.
        right: The right factor, [..., width, columns]: keys, if it becomes scores.
        factor: What both factors were multiplied by before, where that is the same number.
    """

    left: Tensor
    right: Tensor
    factor: float = 1.0

    def __hash__(self) -> int:
        """Products are told apart as objects."""
        return id(self)

    def __eq__(self, other: object) -> bool:
        """Products are told apart as objects."""
        return self is other

    @property
    def size(self) -> int:
        """Number of its entries."""
        return self.left.numel() // max(self.left.shape[-1], 1) * self.right.shape[-1]


class _Tags(NamedTuple):
    """What is known of a storage: products in it, and what these were multiplied by since."""

    products: tuple[Product, ...] = ()
    factor: float | None = 1.0
    repeats: tuple[int, int] | None = None  # number of copies in a row, and how far apart they are


_TOKENS = _Tags()


class Provenance:
    """Follows what a block was given through the operators of its call."""

    def __init__(self) -> None:
        self._tags: dict[int, _Tags] = {}

    def start(self, values: Iterable[Any]) -> None:
        """Follow tensors; those in lists, tuples and dicts too.

        Args:
            values: Arguments of a block.
        """
        for tensor in tensors_in(values):
            if tensor.is_floating_point() and (place := _storage(tensor)) is not None:
                self._tags.setdefault(place, _TOKENS)

    def products(self, values: Tensor) -> tuple[Product, ...]:
        """Return the products that flowed into a tensor.

        Args:
            values: Any tensor.
        """
        place = _storage(values)
        return () if place is None else self._tags.get(place, _TOKENS).products

    def scale(self, values: Tensor) -> float | None:
        """Return what the product that flowed into a tensor was multiplied by.

        Args:
            values: Any tensor.

        Returns:
            The number; None where it was multiplied by tensors, or changed in another way.
        """
        place = _storage(values)
        tags = _TOKENS if place is None else self._tags.get(place, _TOKENS)
        return tags.factor if len(tags.products) == 1 else None

    def without_repeats(self, keys: Tensor) -> Tensor:
        """Return keys without copies that were made of each head for several query heads.

        Args:
            keys: [sequences, heads, keys, head width].
        """
        place = _storage(keys)
        repeats = None if place is None else self._tags.get(place, _TOKENS).repeats
        if repeats is None or keys.ndim != 4:
            return keys
        count, apart = repeats
        fits = keys.stride(1) == apart and keys.shape[1] % count == 0
        return keys[:, ::count] if fits and keys.storage_offset() == 0 else keys

    def forget(self) -> None:
        """Follow nothing; what was kept alive is freed."""
        self._tags.clear()

    def follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Follow tensors through one operator.

        Args:
            name: Name of the operator, without its overload.
            args: Positional arguments.
            kwargs: Arguments by name.
            out: What it returned.
        """
        given = [*tensors_in(args), *tensors_in(kwargs.values())]
        places = [place for tensor in given if (place := _storage(tensor)) is not None]
        known = [tags for place in places if (tags := self._tags.get(place)) is not None]
        outputs = [place for x in tensors_in((out,)) if (place := _storage(x)) is not None]
        if not known:
            for place in outputs:
                self._tags.pop(place, None)
            return
        if name in _FACTORS:
            tags = self._multiplied(args, kwargs, _FACTORS[name])
        elif name in _STOPS:
            tags = _TOKENS
        elif len(given) == 1 and outputs == places:
            tags = known[0]  # a view, or a change in place
            if name in _SCALINGS:
                tags = _scaled(tags, name, args)
        else:
            products = tuple(dict.fromkeys(p for each in known for p in each.products))
            tags = _Tags(products, None if products else 1.0)
            holds = known[0].products == products
            if name in _SCALINGS and holds:
                tags = _scaled(known[0], name, args)
            elif name in _COPIES and holds:
                tags = _Tags(products, known[0].factor, _repeats(given[0], out))
            elif name in _KEEPING and products:
                tags = _Tags(products, next(each.factor for each in known if each.products))
        for place in outputs:
            self._tags[place] = tags

    def _multiplied(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], at: int) -> _Tags:
        """Return the tags of a product: a product of weights holds none."""
        summand = self._tags.get(_storage(args[0]) or 0, _TOKENS) if at else _TOKENS
        left, right = args[at : at + 2]
        known = [self._tags.get(_storage(each) or 0) for each in (left, right)]
        if known[0] is None or known[1] is None:
            return _Tags(summand.products, None if summand.products else 1.0)
        factor = known[0].factor if known[0].factor == known[1].factor else None
        product = Product(left, right, factor or 1.0)
        alpha = kwargs.get("alpha", 1.0)
        return _Tags((*summand.products, product), None if summand.products else float(alpha))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Iterate over the tensors among values, and in lists, tuples and dicts among them.

    Args:
        values: Arguments of a call, say.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, Mapping):
            yield from tensors_in(value.values())


def _storage(values: Tensor) -> int | None:
    """Return the address of a tensor's storage; None where it has none (sparse, nested, traced)."""
    try:
        return values.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def _scaled(tags: _Tags, name: str, args: tuple[Any, ...]) -> _Tags:
    """Return the tags of a tensor that was multiplied; by a tensor, its factor is not known."""
    number = _number(args)
    if number is None or tags.factor is None:
        return tags._replace(factor=None if tags.products else 1.0, repeats=None)
    return tags._replace(factor=tags.factor * number ** _SCALINGS[name])


def _number(args: tuple[Any, ...]) -> float | None:
    """Return the number by which an operator multiplies or divides; None where it is a tensor."""
    other = args[1] if len(args) > 1 else None
    if isinstance(other, Tensor):
        with unseen():
            other = other.item() if other.ndim == 0 and other.device.type == "cpu" else None
    return float(other) if isinstance(other, int | float) and other else None


def _repeats(given: Tensor, out: Any) -> tuple[int, int] | None:
    """Return how many copies of each entry a tensor that was expanded becomes when it is copied."""
    if not isinstance(out, Tensor) or out.shape != given.shape:
        return None
    expanded = [i for i, step in enumerate(given.stride()) if step == 0 and given.shape[i] > 1]
    if len(expanded) != 1 or not out.is_contiguous():
        return None
    return given.shape[expanded[0]], out.stride(expanded[0])
