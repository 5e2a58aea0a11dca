"""Attention that is written out by hand: seen at its softmax, and at the products before it.

Not every softmax in a block is one of attention: linear attention has softmaxes over the features
of queries and of keys, a router one over experts. Scores of attention are products of two tensors
that were made of the tokens; where no product was seen, their shape has to leave no doubt.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from geomon.capture.attending.attention import (
    NO_SCORES,
    NotUnderstoodError,
    SoftmaxCall,
    at_sampled_rows,
    local_shard,
)
from geomon.capture.tokens.sampling import RowSampler

SEVERAL_SOFTMAXES = (
    "it takes several softmaxes (landmarks, chunks, both dimensions), and none of them is its own"
)
_UNCLEAR = (
    "a softmax of shape {shape} over dimension {dim} was seen, of products of queries with keys, "
    "but not which of its dimensions are sequences, heads and queries: give the attention module "
    "the number of its heads as num_heads"
)

# Roles of the dimensions of scores before the keys, the likelier first: Sequences, Heads, Queries.
# A pattern whose heads are not in their usual place needs their number to be known.
_USUAL = ("SHQ", "SHHQ", "SSHQ")
_UNUSUAL = ("SQH", "HSQ", "SHQQ", "SQHH", "HHSQ")


class Known(NamedTuple):
    """What is known of an attention before its scores are seen.

    Attributes:
        shape: Shape of the hidden states that entered the block, without the width.
        width: Width of the hidden states.
        heads: Number of query heads, or None.
        head_width: Head width, or None.
    """

    shape: tuple[int, ...]
    width: int
    heads: int | None = None
    head_width: int | None = None


class Product(NamedTuple):
    """A product of two tensors that are no weights.

    Attributes:
        size: Number of its entries.
        rows: Sampled rows of it, [sequences, heads, queries, keys], if its shape is that of scores
            and nothing is added to it.
    """

    size: int
    rows: Tensor | None


def weight_storages(module: nn.Module) -> frozenset[int]:
    """List the addresses of what a module's parameters and buffers are stored in.

    Args:
        module: The module.
    """
    weights = map(local_shard, itertools.chain(module.parameters(), module.buffers()))
    return frozenset(filter(None, map(_address, weights)))


def _address(values: Tensor) -> int | None:
    """Return the address of a tensor's storage; None where it only holds others, quantised say."""
    holds_others = hasattr(values, "__tensor_flatten__")
    return None if holds_others else values.untyped_storage().data_ptr()


def has_weights(factors: Iterable[Any], storages: frozenset[int]) -> bool:
    """Whether a factor of a product is a weight, or a view of one.

    A tensor that only holds others is taken for one: weights are quantised, and scores are not.

    Args:
        factors: Arguments of the product: tensors, lists of tensors, and others.
        storages: Addresses of what the weights are stored in.
    """
    for factor in factors:
        if isinstance(factor, Tensor):
            address = _address(local_shard(factor))
            if address is None or address in storages:
                return True
        elif isinstance(factor, list | tuple) and has_weights(factor, storages):
            return True
    return False


def record_product(
    sampler: RowSampler, product: Tensor, known: Known, *, alone: bool = True
) -> Product:
    """Record a product that may become scores, before the model changes it in place.

    Args:
        sampler: Sampler of the queries.
        product: The product.
        known: What is known of the attention.
        alone: Whether it is the product alone; a mask may be in it otherwise.
    """
    product = local_shard(product)
    scores = arrange_scores(product, -1, known) if alone else None
    if scores is None:
        return Product(product.numel(), None)
    rows = at_sampled_rows(scores, *sampler.sample_queries(scores.shape[0], scores.shape[2]))
    return Product(product.numel(), rows)


def record_softmax(
    sampler: RowSampler, scores: Tensor, dim: Any, known: Known, products: Sequence[Product] = ()
) -> SoftmaxCall | None:
    """Record the sampled rows of a softmax of attention scores.

    Args:
        sampler: Sampler of the queries.
        scores: Input of the softmax.
        dim: The dimension that the softmax runs over: the keys.
        known: What is known of the attention.
        products: Products that were made in the attention before.

    Returns:
        The recorded call, or None where the softmax is nothing like one of attention (a router's).

    Raises:
        NotUnderstoodError: The softmax is one of an attention whose weights it does not give, or
            whose scores cannot be arranged.
    """
    if scores.is_nested or not isinstance(dim, int) or not -scores.ndim <= dim < scores.ndim:
        return None
    scores = local_shard(scores)
    fitting = [product for product in products if _makes(product, scores, dim)]
    arranged = arrange_scores(scores, dim, known)
    if arranged is None:
        if fitting and scores.ndim > 2:
            raise NotUnderstoodError(_UNCLEAR.format(shape=list(scores.shape), dim=dim))
        return None
    sequences, heads, length, keys = arranged.shape
    features = known.head_width or known.width // heads
    if not fitting:
        if heads == 1 != known.heads and keys != length:
            return None  # a router's: a single head counts where it is known
        if keys != length or keys == features:
            raise NotUnderstoodError(NO_SCORES.format(keys=keys))
    chosen, places = sampler.sample_queries(sequences, length)
    rows = at_sampled_rows(arranged, chosen, places)
    # The rows of a product over another dimension would be keys.
    made = [p.rows for p in fitting if p.rows is not None and p.rows.shape == rows.shape]
    last = dim % scores.ndim == scores.ndim - 1
    return SoftmaxCall(
        rows, chosen, places, (sequences, length),
        products=made[-1] if made and last else None,
        doubtful=keys == features,
        source=(scores.data_ptr(), tuple(scores.shape), dim % scores.ndim),
    )  # fmt: skip


def is_second_softmax(recorded: SoftmaxCall, scores: Tensor, dim: Any) -> bool:
    """Whether a softmax is a further one of the attention whose scores were recorded.

    One of the same scores over the same keys is not (the logarithm for a loss, say).

    Args:
        recorded: The first softmax of the attention.
        scores: Input of the softmax.
        dim: The dimension that the softmax runs over.
    """
    if scores.ndim != 4 or not isinstance(dim, int) or dim % 4 < 2:
        return False
    same = (scores.data_ptr(), tuple(scores.shape), dim % 4) == recorded.source
    return scores.shape[:2] == (recorded.shape[0], recorded.heads) and not same


def _makes(product: Product, scores: Tensor, dim: int) -> bool:
    """Whether scores may have been made of a product; one key may have been joined (a sink)."""
    keys = scores.shape[dim]
    joined = scores.numel() // max(keys, 1) * (keys - 1)
    return 0 < product.size in (scores.numel(), joined)


# -- which dimension is which ----------------------------------------------------------------------


def arrange_scores(scores: Tensor, dim: int, known: Known) -> Tensor | None:
    """View scores as [sequences, heads, queries, keys].

    There are as many queries as tokens that the block was given: sequences times queries (windows
    of a sequence are sequences). Sequences and heads may be in one dimension, heads in two
    (groups).

    Args:
        scores: Scores of any number of dimensions.
        dim: The dimension of the keys.
        known: What is known of the attention.

    Returns:
        The scores, or None where the sizes of their dimensions do not fit these numbers.
    """
    tokens, heads = math.prod(known.shape), known.heads
    if 0 in scores.shape or tokens == 0:
        return None
    scores = scores.movedim(dim, -1)
    if scores.ndim == 3:
        return _unfold(scores, tokens, heads)
    if scores.ndim == 2:  # one sequence, one head
        fits = len(scores) == tokens and heads in (None, 1) and math.prod(known.shape[:-1]) == 1
        return scores[None, None] if fits else None
    for pattern in (*_USUAL, *_UNUSUAL):
        if len(pattern) != scores.ndim - 1 or (heads is None and pattern not in _USUAL):
            continue
        sizes = {
            role: math.prod(itertools.compress(scores.shape, (role == each for each in pattern)))
            for role in "SHQ"
        }
        if sizes["S"] * sizes["Q"] == tokens and heads in (None, sizes["H"]):
            order = sorted(range(len(pattern)), key=lambda place: "SHQ".index(pattern[place]))
            return scores.permute(*order, -1).reshape(*sizes.values(), scores.shape[-1])
    return None


def arrange_call(query: Any, key: Any, mask: Any, known: Known) -> tuple[Any, Any, Any]:
    """View the arguments of an attention call of three or five dimensions with four.

    Args:
        query: Queries, [sequences x heads, queries, head width], or with heads in two dimensions.
        key: Keys in the same order.
        mask: Mask that can be broadcast to the scores, or None.
        known: What is known of the attention.

    Returns:
        Queries, keys and mask, [sequences, heads, ...]; as they are where they have four dimensions
        or cannot be arranged.
    """
    plain = all(isinstance(given, Tensor) and not given.is_nested for given in (query, key))
    if not plain or query.ndim == 4 or query.ndim != key.ndim:
        return query, key, mask
    arranged = arrange_scores(query, -1, known)
    if arranged is None:
        return query, key, mask
    lead, sizes = query.shape[:-2], arranged.shape[:2]

    def view(values: Tensor) -> Tensor:
        return values.expand(*lead, -1, -1).reshape(*sizes, *values.shape[-2:])

    if view(query).shape != arranged.shape or view(query).stride() != arranged.stride():
        return query, key, mask  # heads come before sequences
    return arranged, view(key), view(mask) if isinstance(mask, Tensor) and mask.ndim > 2 else mask


def _unfold(scores: Tensor, tokens: int, heads: int | None) -> Tensor | None:
    """View [sequences x heads, queries, keys] as four dimensions; None where that does not fit."""
    folded, length, _ = scores.shape
    if tokens % length or folded % (tokens // length):
        return None
    sequences = tokens // length
    if heads not in (None, folded // sequences):
        return None
    return scores.unflatten(0, (sequences, folded // sequences))
