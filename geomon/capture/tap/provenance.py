"""Follow which products of queries and keys flowed into a tensor, whatever came between.

Tensors are identified by storage, so views need no rule. A tensor is followed if it was made from a
block's input; weights are not. A product of two followed tensors is therefore queries times keys,
or attention weights times values, and a product of one with weights is a projection. Nothing is
computed or copied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from geomon.capture.modes import unseen
from geomon.capture.storage import storage_of
from geomon.capture.tap.columns import (
    Columns,
    ElementOrigin,
    Projection,
    find_columns,
    layout_of,
)
from geomon.capture.tap.operators import ROUTES, Op, tensors_in
from geomon.capture.tap.outputs import HeadOutputs, OutputOrigins, Shown
from geomon.capture.tap.rules import FACTORS, find_origin, is_bias, projection_of

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

_Answer = TypeVar("_Answer")


class Product(NamedTuple):
    """A product of two tensors that were both made from tokens.

    Attributes:
        left: The left factor, [..., rows, width]: queries, if the product becomes scores.
        right: The right factor, [..., width, columns]: keys, if the product becomes scores.
        factor: Number by which both factors were multiplied beforehand, if equal.
        made_at: Number of the operator that made it, among the operators of the block.
        position: Position of the left factor among its arguments.
    """

    left: Tensor
    right: Tensor
    factor: float
    made_at: int = -1
    position: int = 0

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
        outputs: Takes the outputs of the heads, or None if they are not wanted.
    """

    changed: bool | None = None
    outputs: HeadOutputs | None = None


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


class Provenance:
    """Follows a block's input through the operators of its call.

    Attributes:
        at: Number of the operator that runs, from 0.
        reads_numbers: Whether an answer depended on the numbers in a tensor, not on shapes alone.
        failed: Whether an error of geomon's own came in between.
        asked: Answers that were given, by number of the operator, in the order of the questions.
        outputs: Follows the outputs of heads.
        sees_modules: Whether outputs of modules that project in their own way are asked for.
    """

    sees_modules = True

    def __init__(self) -> None:
        self.at = -1
        self.reads_numbers = self.failed = False
        self.asked: dict[int, list[Any]] = {}
        self._events = 0  # modules that projected in their own way
        self._tags: dict[int, _Tags] = {}
        # To be made by the next softmax, or inside of the fused attention that runs.
        self._expected: AttentionWeights | None = None
        self.outputs = OutputOrigins(self.is_followed)

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

    # -- what is asked ---------------------------------------------------------------------------

    def products(self, values: Tensor) -> tuple[Product, ...]:
        """Return the products that flowed into a tensor."""
        return self._answered(self._of(values).products)

    def scale(self, values: Tensor) -> float | None:
        """Return the factor from a product to this tensor; None if it is not a known number."""
        return self._answered(self._of(values).factor)

    def columns(self, heads: Tensor) -> Columns | None:
        """Return the projection columns behind heads, [sequences, heads, places, head width]."""
        made = self._of(heads).made
        self.reads_numbers |= made is not None and made.by_values
        return self._answered(None if made is None else find_columns(made, heads))

    def token_counts(self, values: Tensor) -> list[int]:
        """List the token counts of the projections that a tensor was made from."""
        made = self._of(values).made
        roots = () if made is None else made.roots
        return self._answered(sorted({root.rows for root in roots if not root.is_input}))

    def expect(self, weights: AttentionWeights) -> None:
        """Record in `weights` what becomes of the result of the softmax that runs next."""
        self._expected = self._answered(weights)
        self.outputs.expect(weights.outputs)

    def _answered(self, answer: _Answer) -> _Answer:
        self.asked.setdefault(self.at, []).append(answer)
        return answer

    def made_of(self, values: Any) -> ElementOrigin | None:
        """Return how a tensor was made, or None if that is unknown."""
        return self._of(values).made

    def is_followed(self, values: Tensor) -> bool:
        """Whether a tensor was made from the block's input."""
        return storage_of(values) in self._tags

    def is_of_tokens(self, values: Tensor) -> bool:
        """Whether a tensor of floating-point numbers depends on the hidden states."""
        return values.is_floating_point() and self._of(values).of_tokens

    # -- what happens ----------------------------------------------------------------------------

    def projected(self, output: Tensor, given: Tensor, first: int = 0) -> None:
        """Follow a module's output as a projection, unless its input already was one (a norm)."""
        self._events += 1
        made, before = self._of(output).made, self._of(given).made
        found = None if made is None else made.projection
        if found is None or found.width != output.shape[-1] or found.is_input:
            if made and before and made.roots and made.roots <= before.roots:
                return
            made = projection_of(output, (-1,), given, self)
            found, place = made.projection, storage_of(output)
            assert found is not None
            found.made_at = -self._events
            if place is not None:
                self._tags[place] = _Tags(made=made, of_tokens=True)
        found.first = first

    def forget(self) -> None:
        """Follow nothing, and free what was kept alive."""
        self._tags.clear()
        self.outputs.forget()

    def take_shown(self) -> list[Shown]:
        """Return the outputs of heads that the last operator projected."""
        shown, self.outputs.shown = self.outputs.shown, []
        return shown

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is awaited of the attentions that were seen."""
        return self.outputs.are_complete

    def before_write(self, name: str, written: Iterable[Any], args: tuple[Any, ...]) -> None:
        """Copy projections that an operator is about to change in place."""
        for values in tensors_in(written):
            made = self._of(values).made
            projection = None if made is None else made.projection
            if projection is None or projection.is_input or projection.changes:
                continue
            if name == "add_" and is_bias(args[1], projection.width):
                projection.made_at = self.at
                continue
            with unseen():
                projection.keep()

    def follow(self, op: Op) -> None:
        """Follow tensors through one operator."""
        given, results = _placed(op.given), _placed(tensors_in((op.out,)))
        places, outputs = [place for place, _ in given], [place for place, _ in results]
        known = [self._tags[place] for place in places if place in self._tags]
        self.outputs.at = self.at
        self._forget_contents({*outputs} - {*places})
        fused = self._taken() if op.kind.role in ROUTES else None
        if not known or op.name.endswith("_like"):  # uses only the shape
            return
        if outputs == places:  # a view, or a change in place
            if op.name in _SCALINGS:
                self._tags[places[0]] = self._scaled(known[0], op.name, op.args[1])
            return
        mixing = self._mixing(op) if fused is None else fused
        tags = self._tags_of_result(op, known)
        self.outputs.follow(op, results)
        for place, result in results:
            self._tags[place] = tags._replace(made=find_origin(op, result, self))
        if mixing is not None:
            self.outputs.begin(mixing.outputs, op)

    def _forget_contents(self, places: set[int]) -> None:
        """Forget what storages held that an operator has filled anew."""
        for place in places:
            self._tags.pop(place, None)
        self.outputs.leave(places)

    def _mixing(self, op: Op) -> AttentionWeights | None:
        """Return the softmax weights with which a matrix product mixes values, or None."""
        if op.name not in FACTORS:
            return None
        left = self._tags.get(storage_of(op.args[FACTORS[op.name]]) or 0, _TOKENS)
        return None if left.weights is None else left.weights[0]

    def _tags_of_result(self, op: Op, known: Sequence[_Tags]) -> _Tags:
        """Return what is known of an operator's result, apart from the origin of its elements."""
        if op.name in FACTORS:
            given = [self._tags.get(storage_of(x) or 0) for x in op.args[:3]]
            tags = _multiplied(op, given, self.at)
        else:
            tags = self._flowed(op, known)
        of_tokens = any(each.of_tokens for each in known)
        return tags._replace(of_tokens=of_tokens, weights=self._weights(op.name, known))

    def _taken(self) -> AttentionWeights | None:
        """Return the weights that were expected, which are expected no more."""
        expected, self._expected = self._expected, None
        return expected

    def _of(self, values: Any) -> _Tags:
        place = storage_of(values) if isinstance(values, Tensor) else None
        return _TOKENS if place is None else self._tags.get(place, _TOKENS)

    def _weights(self, name: str, known: Sequence[_Tags]) -> tuple[AttentionWeights, bool] | None:
        """Return the attention weights in an operator's result, and whether they were changed."""
        if name.endswith("softmax") and self._expected is not None:
            weights = self._taken()
            return None if weights is None or name == "_log_softmax" else (weights, False)
        given = [each.weights for each in known if each.weights is not None]
        if given and name not in FACTORS:
            changed = any(was for _, was in given) or _changes_weights(name, known)
            return given[0][0], changed
        for weights, changed in given:  # multiplied with values
            weights.changed = changed if weights.changed is None else weights.changed
        return None

    def _flowed(self, op: Op, known: Sequence[_Tags]) -> _Tags:
        """Return the products that flow on into a result, and their factor since."""
        products = tuple(dict.fromkeys(p for each in known for p in each.products))
        if op.name in _SCALINGS and known[0].products == products:
            return self._scaled(known[0], op.name, op.args[1])
        if op.name in _COPIES:
            return known[0]
        if op.name in _KEEPING and products:
            return _Tags(products, next(each.factor for each in known if each.products))
        return _changed(products)

    def _scaled(self, tags: _Tags, name: str, other: Any) -> _Tags:
        """Return tags of a tensor that was multiplied; the factor is unknown if it was a tensor."""
        if isinstance(other, Tensor):
            is_number = other.ndim == 0 and other.device.type == "cpu"
            self.reads_numbers |= is_number
            with unseen():
                other = other.item() if is_number else None
        if not isinstance(other, int | float) or not other or tags.factor is None:
            return tags._replace(factor=_changed(tags.products).factor)
        return tags._replace(factor=tags.factor * other ** _SCALINGS[name])


def _multiplied(op: Op, known: Sequence[_Tags | None], number: int) -> _Tags:
    """Return the tags of a matrix product, given the tags of its arguments.

    A product with weights is not a query-key one.
    """
    at = FACTORS[op.name]
    summand = (known[0] or _TOKENS) if at else _TOKENS
    left, right = known[at : at + 2]
    if left is None or right is None:
        return _changed(summand.products)
    factor = left.factor if left.factor == right.factor and left.factor else 1.0
    product = Product(op.args[at], op.args[at + 1], factor, number, at)
    alpha = op.kwargs.get("alpha", 1.0)
    return _Tags((*summand.products, product), None if summand.products else alpha)


def _changes_weights(name: str, known: Sequence[_Tags]) -> bool:
    """Whether an operator changes the softmax weights among its arguments."""
    others = any(each.of_tokens and each.weights is None for each in known)
    return others or name not in _KEEPING_WEIGHTS


def _placed(tensors: Iterable[Tensor]) -> list[tuple[int, Tensor]]:
    """Pair tensors with their storages, and leave out those that have none."""
    return [(place, each) for each in tensors if (place := storage_of(each)) is not None]


def _changed(products: tuple[Product, ...]) -> _Tags:
    """Return tags of products that an operator changed in an unknown way."""
    return _Tags(products, None if products else 1.0)
