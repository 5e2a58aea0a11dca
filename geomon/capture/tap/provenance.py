"""Follow which products of queries and keys flowed into a tensor, whatever came between.

Tensors are identified by storage, so views need no rule. A tensor is followed if it was made from a
block's input; weights are not. A product of two followed tensors is therefore queries times keys,
or attention weights times values, and a product of one with weights is a projection. Nothing is
computed or copied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from geomon.capture.modes import unseen
from geomon.capture.storage import followed_part, storage_of
from geomon.capture.tap.columns import (
    Columns,
    ElementOrigin,
    Layout,
    Projection,
    SourceSlice,
    find_columns,
    find_rows,
    layout_of,
)

# Operators are named without a trailing underscore: "add" includes "add_".

# Position of the first factor among the arguments of matrix products.
_FACTORS = {"bmm": 0, "mm": 0, "baddbmm": 1, "addmm": 1}
# Operators that only multiply by a number.
_SCALINGS = {"mul": 1, "div": -1}
_COPIES = ("clone", "_to_copy")
# Operators that add to scores, hide some or join more, but keep their factor.
_KEEPING = (
    "add", "sub", "masked_fill", "where", "copy", "cat", "maximum", "constant_pad_nd", "index",
)  # fmt: skip
# Operators that keep the softmax weights: dropout, masks, type conversion, and those by which
# numbers that are not finite are found (the last line) and replaced.
_KEEPING_WEIGHTS = (
    "clone", "_to_copy", "copy", "native_dropout", "mul", "div", "masked_fill", "where", "cat",
    "index", "index_select", "index_put", "constant_pad_nd", "nan_to_num", "repeat",
    "isnan", "isinf", "abs", "eq", "ne", "bitwise_not", "logical_not",
)  # fmt: skip
# Operators whose elements are not made from those at the same place.
_MIXING = ("_softmax", "_log_softmax", "cumsum", "sort", "gather", "scatter")


class Product(NamedTuple):
    """A product of two tensors that were both made from tokens.

    Attributes:
        left: The left factor, [..., rows, width]: queries, if the product becomes scores.
        right: The right factor, [..., width, columns]: keys, if the product becomes scores.
        factor: Number by which both factors were multiplied beforehand, if equal.
    """

    left: Tensor
    right: Tensor
    factor: float

    @property
    def size(self) -> int:
        """Number of its entries."""
        return self.left.shape[:-1].numel() * self.right.shape[-1]


@dataclass
class AttentionWeights:
    """Softmax weights, followed until they are multiplied with values.

    Attributes:
        changed: Whether they were changed before they were first multiplied with values; None
            before that. Later products are of derivatives (`torch.func.jvp`), for example.
    """

    changed: bool | None = None


class _Tags(NamedTuple):
    """Known facts about a storage.

    Attributes:
        products: Products that flowed into it.
        factor: Number by which the products were multiplied since, or None if unknown.
        made: Origin of its elements.
        of_tokens: Whether it depends on the block's hidden states, not only on other arguments.
        weights: Softmax weights in it, and whether they were changed.
    """

    products: tuple[Product, ...] = ()
    factor: float | None = 1.0
    made: ElementOrigin | None = None
    of_tokens: bool = False
    weights: tuple[AttentionWeights, bool] | None = None


_TOKENS = _Tags()


class Stream:
    """Follows tensors outside of blocks.

    It follows the last block's input and output, to distinguish a sum that the model makes outside
    of the blocks from a new stream. It also follows the outputs of embedding tables, to identify
    the tokens that enter a block.
    """

    def __init__(self) -> None:
        self._origins: dict[int, frozenset[str]] = {}
        self._embedded = Provenance()
        self._tables: dict[int, Projection] = {}  # output of each call of a table
        # Called with the weight, the integers and the result of a lookup operator.
        self.on_lookup: Callable[[Tensor, Tensor, Tensor], None] | None = None
        self._alive: dict[int, StorageWeakRef] = {}  # storages made from these outputs

    def take_table(self, number: int, output: Tensor) -> None:
        """Follow the output of an embedding table."""
        root = self._embedded.begin_at(output)
        if root is not None:
            self._tables[number] = root
            self._keep_track([output])

    def rows_of(self, hidden: Tensor) -> dict[int, Tensor]:
        """Trace hidden states to the outputs of embedding tables.

        Args:
            hidden: Hidden states, [..., width].

        Returns:
            By number of the call, the row of its output behind each row of hidden states, or -1.
            Calls that did not contribute are left out.
        """
        made = self._embedded.made_of(hidden)
        place = storage_of(hidden)
        # Blocks are not followed, so memory freed since may hold their results.
        if made is None or place not in self._alive or self._alive[place].expired():
            return {}
        return {
            number: torch.from_numpy(find_rows(made, hidden, root))
            for number, root in self._tables.items()
            if root in made.inputs
        }

    def _keep_track(self, values: Iterable[Tensor]) -> None:
        for tensor in values:
            place = storage_of(tensor)
            if place is not None:
                self._alive[place] = StorageWeakRef(followed_part(tensor).untyped_storage())

    def start(self, given: Tensor | None, returned: Tensor) -> None:
        """Follow a block's input, if known, and its output, and nothing else.

        Args:
            given: The hidden states that entered the block.
            returned: The hidden states that it returned.
        """
        places = {"given": given, "returned": returned}
        known = {name: storage_of(x) for name, x in places.items() if x is not None}
        self._origins = {
            place: frozenset([name]) for name, place in known.items() if place is not None
        }

    def origins(self, values: Tensor) -> frozenset[str]:
        """Return which of the two ("given", "returned") a tensor was made from."""
        return self._origins.get(storage_of(values) or 0, frozenset())

    def forget(self) -> None:
        """Follow nothing."""
        self._origins = {}
        self._embedded.forget()
        self._tables.clear()
        self._alive.clear()

    def before_write(self, name: str, written: Iterable[Any], args: tuple[Any, ...]) -> None:
        """Keep what an operator is about to change in place (see `Provenance`)."""
        self._embedded.before_write(name, written, args)

    def follow(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        starts: Mapping[int, tuple[int, ...]],
        *,
        keeps_places: bool = True,
    ) -> None:
        """Follow floating-point tensors through one operator (see `Provenance`)."""
        if self._tables:
            self._embedded.follow(name, args, kwargs, out, starts, keeps_places=keeps_places)
            self._keep_track(tensors_in((out,)))
        if name == "embedding" and self.on_lookup is not None:
            self.on_lookup(args[0], args[1], out)
        if not self._origins:
            return
        given = [x for x in tensors_in([args, kwargs]) if x.is_floating_point()]
        found = frozenset[str]().union(*map(self.origins, given))
        for result in tensors_in((out,)):
            place = storage_of(result)
            if place is not None:
                self._origins.pop(place, None)
                if found and result.is_floating_point():
                    self._origins[place] = found


class Provenance:
    """Follows a block's input through the operators of its call."""

    def __init__(self) -> None:
        self._tags: dict[int, _Tags] = {}
        # State of the operator that is being followed.
        self._starts: Mapping[int, tuple[int, ...]]
        self._moves: bool
        self._expected: AttentionWeights | None = None  # to be made by the next softmax

    def start(self, values: Iterable[Any], hidden: Tensor | None = None) -> None:
        """Follow the tensors in a block's arguments, and the rows of `hidden` if given."""
        for tensor in tensors_in(values):
            if tensor.is_floating_point() and (place := storage_of(tensor)) is not None:
                self._tags.setdefault(place, _TOKENS)
        if hidden is not None:
            self.begin_at(hidden)

    def begin_at(self, values: Tensor) -> Projection | None:
        """Trace rows back to this tensor; returns None for a tensor without memory of its own."""
        place = storage_of(values)
        if place is None:
            return None
        root = Projection(values, (-1,), is_input=True)
        self._tags[place] = _Tags(
            made=ElementOrigin(layout_of(values), projection=root), of_tokens=True
        )
        return root

    def made_of(self, values: Tensor) -> ElementOrigin | None:
        """Return how a tensor was made, or None if that is unknown."""
        return self._of(values).made

    def products(self, values: Tensor) -> tuple[Product, ...]:
        """Return the products that flowed into a tensor."""
        return self._of(values).products

    def scale(self, values: Tensor) -> float | None:
        """Return the factor from a product to this tensor; None if it is not a known number."""
        return self._of(values).factor

    def expect(self, weights: AttentionWeights) -> None:
        """Record in `weights` what becomes of the next softmax's result."""
        self._expected = weights

    def columns(self, heads: Tensor) -> Columns | None:
        """Return the projection columns behind heads, [sequences, heads, places, head width]."""
        made = self._of(heads).made
        return None if made is None else find_columns(made, heads)

    def token_counts(self, values: Tensor) -> list[int]:
        """List the token counts of the projections that a tensor was made from."""
        made = self._of(values).made
        return sorted({x.rows for x in made.roots if not x.is_input}) if made is not None else []

    def projected(self, output: Tensor, given: Tensor, first: int = 0) -> None:
        """Follow a module's output as a projection, unless its input already was one (a norm)."""
        made, before = self._of(output).made, self._of(given).made
        found = None if made is None else made.projection
        if found is None or found.width != output.shape[-1] or found.is_input:
            if (
                made is not None
                and before is not None
                and made.roots
                and made.roots <= before.roots
            ):
                return
            made = self._projection(output, (-1,), given)
            found, place = made.projection, storage_of(output)
            if place is not None:
                self._tags[place] = _Tags(made=made, of_tokens=True)
        assert found is not None
        found.first = first

    def forget(self) -> None:
        """Follow nothing, and free what was kept alive."""
        self._tags.clear()

    def before_write(self, name: str, written: Iterable[Any], args: tuple[Any, ...]) -> None:
        """Copy projections that an operator is about to change in place."""
        for values in tensors_in(written):
            made = self._of(values).made
            projection = None if made is None else made.projection
            if (
                projection is None
                or projection.is_input
                or (name == "add_" and _is_bias(args[1], projection.width))
            ):
                continue
            with unseen():
                projection.keep()

    def follow(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        starts: Mapping[int, tuple[int, ...]],
        *,
        keeps_places: bool = True,
    ) -> None:
        """Follow tensors through one operator.

        `starts` gives, by tensor id, the first index of shards by dimension; `keeps_places` says
        whether results only use numbers at the same place.
        """
        self._starts, name, self._moves = starts, name.removesuffix("_"), not keeps_places
        given = tensors_in(args)
        if kwargs:
            given += tensors_in(kwargs.values())
        places = [place for tensor in given if (place := storage_of(tensor)) is not None]
        known = [tags for place in places if (tags := self._tags.get(place)) is not None]
        results = [(x, place) for x in tensors_in((out,)) if (place := storage_of(x)) is not None]
        outputs = [place for _, place in results]
        for place in {*outputs} - {*places}:  # earlier contents are gone
            self._tags.pop(place, None)
        if not known or name.endswith("_like"):  # uses only the shape
            return
        if outputs == places:  # a view, or a change in place
            if name in _SCALINGS:
                self._tags[places[0]] = _scaled(known[0], name, args[1])
            return
        if name in _FACTORS:
            tags = self._multiplied(args, kwargs, _FACTORS[name])
        else:
            products = tuple(dict.fromkeys(p for each in known for p in each.products))
            tags = _changed(products)
            if name in _SCALINGS and known[0].products == products:
                tags = _scaled(known[0], name, args[1])
            elif name in _COPIES:
                tags = known[0]
            elif name in _KEEPING and products:
                tags = _Tags(products, next(each.factor for each in known if each.products))
        of_tokens = any(each.of_tokens for each in known)
        tags = tags._replace(weights=self._weights(name, known))
        for result, place in results:
            made = self._made(name, args, given, result, place)
            self._tags[place] = tags._replace(made=made, of_tokens=of_tokens)

    def _of(self, values: Any) -> _Tags:
        place = storage_of(values) if isinstance(values, Tensor) else None
        return _TOKENS if place is None else self._tags.get(place, _TOKENS)

    def _is_followed(self, values: Tensor) -> bool:
        return storage_of(values) in self._tags

    def _weights(self, name: str, known: Sequence[_Tags]) -> tuple[AttentionWeights, bool] | None:
        """Return the attention weights in an operator's result, and whether they were changed."""
        if name.endswith("softmax") and self._expected is not None:
            weights, self._expected = self._expected, None
            return None if name == "_log_softmax" else (weights, False)
        given = [each.weights for each in known if each.weights is not None]
        if not given or name in _FACTORS:
            for weights, changed in given:
                weights.changed = changed if weights.changed is None else weights.changed
            return None
        others = any(each.of_tokens and each.weights is None for each in known)
        changed = name not in _KEEPING_WEIGHTS or others or any(was for _, was in given)
        return given[0][0], changed

    def _is_of_tokens(self, values: Tensor) -> bool:
        return values.is_floating_point() and self._of(values).of_tokens

    def _multiplied(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], at: int) -> _Tags:
        """Return the tags of a matrix product; a product with weights is not a query-key one."""
        summand = self._of(args[0]) if at else _TOKENS
        left, right = args[at : at + 2]
        if not self._is_followed(left) or not self._is_followed(right):
            return _changed(summand.products)
        factor, other = self._of(left).factor, self._of(right).factor
        product = Product(left, right, factor if factor == other and factor else 1.0)
        alpha = kwargs.get("alpha", 1.0)
        return _Tags((*summand.products, product), None if summand.products else alpha)

    # -- which columns of projections ------------------------------------------------------------

    def _made(
        self, name: str, args: tuple[Any, ...], given: list[Tensor], out: Tensor, place: int
    ) -> ElementOrigin | None:
        """Return the origin of an operator's result, or None if it is unknown."""
        layout = layout_of(out)
        if name in _FACTORS:
            return self._made_by_product(args[_FACTORS[name] :], out)
        if "mm" in name or name.endswith("linear"):  # other number formats
            return self._projection(out, (-1,), args[0]) if self._is_followed(args[0]) else None
        if name in _MIXING or not name:
            return None
        if name == "add" and (found := self._sum(given, out)) is not None:
            return found
        if any(storage_of(values) == place for values in given):  # changed in place
            before = self._tags.get(place, _TOKENS).made
            if name == "copy":
                return self._like([args[1]], out, before=before) or before
            others = [values for values in given if storage_of(values) != place]
            changed = self._like(given, out)
            if before is None or changed is None:
                return before
            if not changed.mixes and not (self._moves and any(map(self._is_of_tokens, others))):
                return before
            return ElementOrigin(layout, [SourceSlice(before, layout)], before=before, mixes=True)
        if name == "convolution":
            if args[8] != args[0].shape[1]:  # groups
                return self._projection(out, (1,), args[0])
            made = self._of(args[0]).made  # a filter for each channel
            if made is None:
                return None
            # Padding before the tokens is seen by the first of them.
            shift = [own - other for own, other in zip(out.shape, args[0].shape, strict=True)][2:]
            is_short = any(size > 0 for size in shift) or any(step != 1 for step in args[3])
            start = (0, 0, *shift)
            return ElementOrigin(
                layout, [SourceSlice(made, layout_of(args[0]), start)], moves=is_short
            )
        if name in ("cat", "stack"):
            return ElementOrigin(layout, self._joined(name, args, out))
        if name == "constant_pad_nd":
            return self._padded(args, out)
        if name == "index_select":
            return self._taken(args[0], [None] * (args[1] % out.ndim) + [args[2]], out)
        if name == "index":
            return self._taken(args[0], args[1], out)
        if name == "where" and len(args) == 3:
            return self._chosen(args, out)
        if name in ("roll", "flip"):
            return self._turned(name, args, out)
        return self._like(given, out)

    def _made_by_product(self, factors: tuple[Any, ...], out: Tensor) -> ElementOrigin | None:
        """Record a product with weights as a projection."""
        left, right = factors[:2]
        on_left, on_right = map(self._is_followed, (left, right))
        if on_left == on_right:
            return None
        weight, tokens = (right, left) if on_left else (left, right)
        features: tuple[int, ...] = (-1,) if on_left else (-2,)
        if out.ndim == 3 and weight.shape[0] > 1 and weight.stride(0):
            features = (0, *features)  # a matrix for each head
        made = self._projection(out, features, tokens)
        if made.projection is not None and id(weight) in self._starts:
            made.projection.first = self._starts[id(weight)][-1 if on_left else -2]
        return made

    def _projection(self, out: Tensor, features: tuple[int, ...], tokens: Tensor) -> ElementOrigin:
        """Record an operator's result as a projection of tokens."""
        before = self._of(tokens).made
        in_order = before is not None and features[-1] == -1  # the width of the tokens is last
        source = (before, layout_of(tokens)) if before is not None and in_order else None
        given = storage_of(tokens), tokens.shape
        return ElementOrigin(layout_of(out), projection=Projection(out, features, given, source))

    def _taken(
        self, values: Tensor, indices: Sequence[Tensor | None], out: Tensor
    ) -> ElementOrigin | None:
        """Record which elements of a tensor were selected by index."""
        made, layout = self._of(values).made, layout_of(values)
        dims = [dim for dim, index in enumerate(indices) if index is not None]
        if made is None:
            return None
        orders: list[Tensor] = []
        for index in indices:
            if index is not None:
                orders += index.nonzero().unbind(1) if index.dtype == torch.bool else [index]
        if dims == [*range(dims[0], dims[-1] + 1)]:
            orders = [*torch.broadcast_tensors(*orders)]
            return ElementOrigin(
                layout_of(out), [SourceSlice(made, layout, None, (dims[0], tuple(orders)))]
            )
        if dims[0]:
            return None
        # Tokens are selected, so their order is no longer known.
        layout = layout._replace(
            shape=layout.shape[len(orders) :], strides=layout.strides[len(orders) :]
        )
        for _ in range(out.ndim - len(layout.shape)):
            layout = layout.with_dimension(0)
        return ElementOrigin(layout_of(out), [SourceSlice(made, layout)], moves=True)

    def _turned(self, name: str, args: tuple[Any, ...], out: Tensor) -> ElementOrigin | None:
        """Record the former places of the elements of a rolled or flipped tensor."""
        made, layout = self._of(args[0]).made, layout_of(args[0])
        dims = args[-1] if name == "flip" or len(args) > 2 else ()
        if made is None or not dims:
            return None
        found = made
        for number, dim in enumerate(dims):
            order = torch.arange(out.shape[dim], dtype=torch.int64, device="cpu")
            order = order.flip(0) if name == "flip" else order.roll(args[1][number])
            found = ElementOrigin(
                layout, [SourceSlice(found, layout, None, (dim % out.ndim, (order,)))]
            )
        return ElementOrigin(layout_of(out), [SourceSlice(found, layout)])

    def _chosen(self, args: tuple[Any, ...], out: Tensor) -> ElementOrigin | None:
        """Record from which tensor each element of `torch.where` comes."""
        condition, pieces = args[0].expand(out.shape), []
        for values, own in ((args[1], condition), (args[2], ~condition)):
            made = self._of(values).made if isinstance(values, Tensor) else None
            layout = None if made is None else _fitted(layout_of(values), out)
            if made is not None and layout is not None:
                pieces.append(SourceSlice(made, layout, where=own))
        return ElementOrigin(layout_of(out), pieces) if pieces else None

    def _like(
        self, given: Iterable[Tensor], out: Tensor, before: ElementOrigin | None = None
    ) -> ElementOrigin | None:
        """Record a result that combines numbers at the same place of several tensors.

        If one number per element has an unknown origin in the tokens, the result is unknown; one
        number per row (as in a norm) does no harm.
        """
        pieces: list[SourceSlice] = []
        mixes = False
        for values in given:
            tags = self._tags.get(storage_of(values) or 0)
            if tags is None:
                continue
            layout = None if tags.made is None else _fitted(layout_of(values), out)
            if tags.made is None or layout is None:
                mixes |= tags.of_tokens and _is_one_for_each(values, out)
                continue
            mixes |= bool(pieces) and tags.made.roots.isdisjoint(pieces[0].made.roots)
            pieces.append(SourceSlice(tags.made, layout))
        if not pieces and before is None:
            return None
        return ElementOrigin(layout_of(out), pieces, before=before, mixes=mixes, moves=self._moves)

    def _sum(self, given: list[Tensor], out: Tensor) -> ElementOrigin | None:
        """Treat a projection plus bias, or two projections of equal tokens, as a projection."""
        whole = [made for values in given if (made := self._of(values).made) is not None]
        roots = [*dict.fromkeys(root for made in whole for root in made.roots)]
        width = out.shape[-1] if out.ndim else 0
        if len(given) != 2 or not width or not roots or any(root.is_input for root in roots):
            return None
        if any(root.rows * width != out.numel() or root.width < width for root in roots):
            return None
        biased = len(whole) == len(roots) == 1 and _is_bias(given[1], width)
        joined = len(whole) == len(roots) == 2
        if not (joined or (biased and roots[0].width == width)):
            return None
        return ElementOrigin(layout_of(out), projection=roots[0].like(out))

    def _joined(self, name: str, args: tuple[Any, ...], out: Tensor) -> list[SourceSlice]:
        """Record that `out` concatenates these tensors."""
        dim = (args[1] if len(args) > 1 else 0) % out.ndim
        pieces, start = list[SourceSlice](), 0
        for values in args[0]:
            layout = layout_of(values)
            if name == "stack":
                layout = layout.with_dimension(dim)
            if len(layout.shape) != out.ndim:
                continue  # empty tensor
            made = self._of(values).made
            if made is not None:
                at = tuple(start * (each == dim) for each in range(out.ndim))
                pieces.append(SourceSlice(made, layout, at))
            start += layout.shape[dim]
        return pieces

    def _padded(self, args: tuple[Any, ...], out: Tensor) -> ElementOrigin | None:
        """Record the place of a tensor's elements after zero padding."""
        values, widths = args[:2]
        made = self._of(values).made
        if made is None:
            return None
        before = (*(0,) * (out.ndim - len(widths) // 2), *widths[::2][::-1])
        return ElementOrigin(
            layout_of(out), [SourceSlice(made, layout_of(values), before)], pads=True
        )


def _is_bias(values: Any, width: int) -> bool:
    """Whether an added tensor has one number per feature."""
    return isinstance(values, Tensor) and values.shape == (width,)


def _is_one_for_each(values: Tensor, out: Tensor) -> bool:
    """Whether a tensor has one number per element of another, rather than one per row."""
    alike = bool(values.ndim and out.ndim) and values.shape[-1] == out.shape[-1] > 1
    return alike and values.is_floating_point() and values.stride(-1) != 0


def _fitted(layout: Layout, out: Tensor) -> Layout | None:
    """Give a layout as many dimensions as a tensor; None if it cannot be expanded to it."""
    for _ in range(out.ndim - len(layout.shape)):
        layout = layout.with_dimension(0)
    if len(layout.shape) != out.ndim or 0 in layout.shape:
        return None
    sizes = zip(layout.shape, out.shape, strict=True)
    fits = layout.shape[-1] == out.shape[-1] and all(other % size == 0 for size, other in sizes)
    return layout if fits else None


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


def _changed(products: tuple[Product, ...]) -> _Tags:
    """Return tags of products that an operator changed in an unknown way."""
    return _Tags(products, None if products else 1.0)


def _scaled(tags: _Tags, name: str, other: Any) -> _Tags:
    """Return tags of a tensor that was multiplied; the factor is unknown if it was a tensor."""
    if isinstance(other, Tensor):
        with unseen():
            other = other.item() if other.ndim == 0 and other.device.type == "cpu" else None
    if not isinstance(other, int | float) or not other or tags.factor is None:
        return tags._replace(factor=_changed(tags.products).factor)
    return tags._replace(factor=tags.factor * other ** _SCALINGS[name])
