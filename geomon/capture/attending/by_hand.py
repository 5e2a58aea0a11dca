"""Recognise attention that is written out by hand, by its softmax and the product that feeds it.

Not every softmax in a block is attention: linear attention takes softmaxes over features, and a
router over experts. Attention scores are products of two tensors made from the tokens; if no
product was seen, the shape of the scores must leave no doubt.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from geomon.capture.attending.attention import (
    NO_SCORES,
    ON_SEVERAL_RANKS,
    NotUnderstoodError,
    SoftmaxCall,
    at_sampled_rows,
)
from geomon.capture.shards import sharded_dims
from geomon.capture.snapshot import at_places
from geomon.capture.storage import local_shard
from geomon.capture.tap import Columns, Product
from geomon.capture.tokens.sampling import RowSampler

SEVERAL_SOFTMAXES = (
    "it takes several softmaxes (landmarks, chunks, both dimensions), and none of them is the "
    "attention itself"
)
_SEVERAL_PRODUCTS = (
    "attention is written out by hand: its scores are the sum of {count} products, and it is not "
    "clear which of them multiplies queries and keys"
)
_UNCLEAR = (
    "a softmax of query-key products was seen, with shape {shape} over dimension {dim}, but it is "
    "not clear which dimensions are sequences, heads and queries"
)
# Roles of the dimensions before the keys, likeliest first: Sequences, Heads, Queries.
_ORDERS = ("SHQ", "SHHQ", "SSHQ")


class AttentionHints(NamedTuple):
    """Facts about an attention that are known before its scores are seen.

    Attributes:
        shape: Shape of the hidden states that entered the block, without the width.
        width: Width of the hidden states.
    """

    shape: tuple[int, ...]
    width: int


def record_softmax(
    sampler: RowSampler,
    scores: Tensor,
    dim: int,
    hints: AttentionHints,
    products: Sequence[Product] = (),
    scale: float | None = None,
    find_columns: Callable[[Tensor], Columns | None] = lambda heads: None,
) -> tuple[SoftmaxCall | None, tuple[Columns | None, Columns | None]]:
    """Record the sampled rows of a softmax of attention scores."""
    unknown = None, None
    if scores.is_nested:
        return None, unknown
    if sharded_dims(scores) & {dim % scores.ndim, scores.ndim - 1, scores.ndim - 2}:
        raise NotUnderstoodError(ON_SEVERAL_RANKS)
    scores = local_shard(scores)
    fitting = [product for product in products if _makes(product, scores, dim)]
    arranged = arrange_scores(scores, dim, hints)
    if arranged is None:
        if fitting and scores.ndim > 2:
            raise NotUnderstoodError(_UNCLEAR.format(shape=list(scores.shape), dim=dim))
        if scores.ndim > 3 and scores.numel():
            raise NotUnderstoodError(NO_SCORES.format(keys=scores.shape[dim]))
        return None, unknown
    sequences, heads, length, keys = arranged.shape
    features = hints.width // heads
    if not fitting:
        if heads == 1 and keys != length:
            return None, unknown  # a router
        if keys != length or keys == features:
            raise NotUnderstoodError(NO_SCORES.format(keys=keys))
    chosen, places = sampler.sample_queries(sequences, length)
    rows = at_sampled_rows(arranged, chosen, places)
    call = SoftmaxCall(
        rows, chosen, places, (sequences, length),
        doubtful=keys == features,
        source=(weakref.ref(scores), dim % scores.ndim),
    )  # fmt: skip
    turned = dim % scores.ndim != scores.ndim - 1  # the product was keys times queries
    factors = [_factors(product, arranged.shape, turned=turned) for product in fitting]
    columns = [each and (find_columns(each[0]), find_columns(each[1])) for each in factors]
    if fitting and len(products) > 1:
        call = replace(call, unknown=_SEVERAL_PRODUCTS.format(count=len(products)))
        own = [each for each in columns if each is not None and _are_of_one_input(*each)]
        return call, own[0] if len(own) == 1 else unknown
    if not fitting or factors[0] is None or columns[0] is None:
        return call, unknown
    query, key = factors[0]
    repeats = 1 if columns[0][1] is None else columns[0][1].repeats
    query, key = at_places(query[chosen], places), key[chosen, ::repeats]
    if (factor := fitting[0].factor) != 1:
        query, key = query / factor, key / factor
        scale = None if scale is None else scale * factor**2
    doubtful = call.doubtful and columns[0][1] is None  # else keys were traced to tokens
    return replace(call, made_of=(query, key), scale=scale, doubtful=doubtful), columns[0]


def _factors(
    product: Product, shape: Sequence[int], *, turned: bool
) -> tuple[Tensor, Tensor] | None:
    """View the factors of a product as queries and keys; None if their sizes do not fit."""
    sequences, heads, queries, keys = shape
    left, right = product.left.detach(), product.right.detach().transpose(-1, -2)
    if turned and left.shape[-2] in (keys, keys - 1):
        left, right = right, left
    if left.ndim == 2:
        left, right = left[None], right[None]
    width, count = left.shape[-1], len(right)
    key_heads, odd = divmod(count, sequences)
    if odd or not key_heads or heads % key_heads or right.shape[1] not in (keys, keys - 1):
        return None
    query = left.reshape(sequences, heads, queries, width)
    return query, right.unflatten(0, (sequences, key_heads))


def _are_of_one_input(query: Columns | None, key: Columns | None) -> bool:
    """Whether queries and keys project the same tensor (keys made from positions do not)."""
    if query is None or key is None:
        return False
    given = {projection.given for each in (query, key) for projection in each.projections}
    return len(given) == 1


def is_second_softmax(recorded: SoftmaxCall, scores: Tensor, dim: int) -> bool:
    """Whether a softmax is a further one of the recorded attention, not the same scores again."""
    if scores.ndim != 4 or dim % 4 < 2:
        return False
    # Addresses would not do: other scores may get the address of freed ones.
    given, over = recorded.source or (lambda: None, -1)
    same = given() is scores and over == dim % 4
    return scores.shape[:2] == (recorded.shape[0], recorded.heads) and not same


def _makes(product: Product, scores: Tensor, dim: int) -> bool:
    """Whether a product may have become the scores; one key (a sink) may have been joined."""
    joined = scores.movedim(dim, -1)[..., 1:]
    return 0 < product.size in (scores.numel(), joined.numel())


# -- which dimension is which ----------------------------------------------------------------------


def arrange_scores(scores: Tensor, dim: int, hints: AttentionHints) -> Tensor | None:
    """View scores as [sequences, heads, queries, keys], or return None if they do not fit.

    Sequences times queries must equal the block's number of tokens (windows of a sequence count as
    sequences). Sequences and heads may share a dimension, and heads may have two (groups).
    """
    tokens = math.prod(hints.shape)
    if 0 in scores.shape:
        return None
    scores = scores.movedim(dim, -1)
    if scores.ndim == 3:
        return _unfold(scores, tokens)
    if scores.ndim == 2:  # one sequence, one head
        fits = len(scores) == tokens and math.prod(hints.shape[:-1]) == 1
        return scores[None, None] if fits else None
    for order in _ORDERS:
        sizes = {
            role: math.prod(itertools.compress(scores.shape, (role == each for each in order)))
            for role in "SHQ"
        }
        if len(order) == scores.ndim - 1 and sizes["S"] * sizes["Q"] == tokens:
            return scores.reshape(*sizes.values(), scores.shape[-1])
    return None


def _unfold(scores: Tensor, tokens: int) -> Tensor | None:
    """View [sequences x heads, queries, keys] in four dimensions; None if it does not fit."""
    folded, length, _ = scores.shape
    if tokens % length or folded % (tokens // length):
        return None
    return scores.unflatten(0, (tokens // length, -1))
