"""Recognise attention that is written out by hand, by its softmax and the product that feeds it.

Not every softmax in a block is attention: linear attention takes softmaxes over features, and a
router over experts. Attention scores are products of two tensors made from the tokens; if no
product was seen, the shape of the scores must leave no doubt.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
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
from geomon.capture.storage import Shape, local_shard
from geomon.capture.tap import Columns, Product
from geomon.capture.tokens.sampling import RowSampler
from geomon.capture.tokens.visibility import MASKED
from geomon.kernels.products import as_factor, without_autocast

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
_HEADS_FIRST = (
    "attention is written out by hand, with its heads before the sequences of the batch: "
    "[heads x sequences, queries, keys]"
)
# Two orders of dimensions are told apart if products explain at least this share of the scores in
# one, and this many times more than in the other.
_LEAST_EXPLAINED, _MORE_EXPLAINED = 0.1, 4.0

# Roles of the dimensions before the keys, likeliest first: Sequences, Heads, Queries.
_ORDERS = ("SHQ", "SHHQ", "SSHQ")

FindColumns = Callable[[Tensor], Columns | None]
MadeOf = tuple[Columns | None, Columns | None]  # of queries and of keys
_UNKNOWN: MadeOf = None, None


class Factors(NamedTuple):
    """The factors of scores.

    Attributes:
        query: Queries, [sequences, heads, queries, head width].
        key: Keys, [sequences, key heads, keys, head width].
        columns: Columns of the projections that make them up.
        factor: Number by which both were multiplied beforehand.
    """

    query: Tensor
    key: Tensor
    columns: MadeOf
    factor: float


def record_softmax(
    sampler: RowSampler,
    scores: Tensor,
    dim: int,
    hidden: Shape,
    products: Sequence[Product] = (),
    scale: float | None = None,
    find_columns: FindColumns = lambda heads: None,
) -> tuple[SoftmaxCall | None, MadeOf]:
    """Record the sampled rows of a softmax of attention scores, and what made their factors.

    `hidden` is the shape of the hidden states that entered the block.
    """
    if scores.is_nested:
        return None, _UNKNOWN
    if sharded_dims(scores) & {dim % scores.ndim, scores.ndim - 1, scores.ndim - 2}:
        raise NotUnderstoodError(ON_SEVERAL_RANKS)
    scores = local_shard(scores)
    fitting = [product for product in products if _makes(product, scores, dim)]
    arranged = _attention_scores(scores, dim, hidden, find_columns, made=bool(fitting))
    if arranged is None:
        return None, _UNKNOWN
    turned = dim % scores.ndim != scores.ndim - 1  # the product was keys times queries
    every = (_factors(each, arranged.shape, find_columns, turned=turned) for each in fitting)
    factors = [*filter(None, every)]
    _check_heads(scores.movedim(dim, -1), arranged, factors)
    sequences, heads, length, keys = arranged.shape
    chosen, places = sampler.sample_queries(sequences, length)
    call = SoftmaxCall(
        at_sampled_rows(arranged, chosen, places), chosen, places, (sequences, length),
        doubtful=keys == hidden[-1] // heads,
        source=(weakref.ref(scores), dim % scores.ndim),
    )  # fmt: skip
    if fitting and len(products) > 1:
        own = [each.columns for each in factors if _are_of_one_input(*each.columns)]
        call = replace(call, unknown=_SEVERAL_PRODUCTS.format(count=len(products)))
        return call, own[0] if len(own) == 1 else _UNKNOWN
    return _with_factors(call, factors[0], scale) if factors else (call, _UNKNOWN)


def _with_factors(
    call: SoftmaxCall, made: Factors, scale: float | None
) -> tuple[SoftmaxCall, MadeOf]:
    """Add the sampled queries and keys to a call, and return it with their columns."""
    keys = made.columns[1]
    query = at_places(made.query[call.sequences], call.places)
    key = made.key[call.sequences, :: 1 if keys is None else keys.repeats]
    if made.factor != 1:
        query, key = query / made.factor, key / made.factor
        scale = None if scale is None else scale * made.factor**2
    doubtful = call.doubtful and keys is None  # else keys were traced to tokens
    return replace(call, made_of=(query, key), scale=scale, doubtful=doubtful), made.columns


# -- is it attention -------------------------------------------------------------------------------


def _attention_scores(
    scores: Tensor, dim: int, hidden: Shape, find_columns: FindColumns, *, made: bool
) -> Tensor | None:
    """Arrange scores, or return None if they are not attention's; raises if that is unclear.

    `made` says that they are a product of two tensors made from tokens.
    """
    arranged = arrange_scores(scores, dim, hidden[:-1])
    if arranged is None:
        if made and scores.ndim > 2:
            raise NotUnderstoodError(_UNCLEAR.format(shape=list(scores.shape), dim=dim))
        if scores.ndim > 3 and scores.numel():
            raise NotUnderstoodError(NO_SCORES.format(keys=scores.shape[dim]))
        return None
    if made:
        return arranged
    _, heads, length, keys = arranged.shape
    if heads == 1 and keys != length:
        return None  # a router
    doubtful = keys != length or keys == hidden[-1] // heads
    if doubtful or _are_projected(scores, dim, find_columns):
        raise NotUnderstoodError(NO_SCORES.format(keys=keys))
    return arranged


def _are_projected(scores: Tensor, dim: int, find_columns: FindColumns) -> bool:
    """Whether scores are columns of a projection of tokens.

    A softmax may be over the columns, or over the tokens of each column.
    """
    rows = scores.movedim(dim, -1)
    rows = rows if rows.ndim > 3 else rows.unsqueeze(-3)
    rows = rows.flatten(0, -4) if rows.ndim > 3 else rows[None]
    return any(find_columns(each) is not None for each in (rows, rows.mT))


def _makes(product: Product, scores: Tensor, dim: int) -> bool:
    """Whether a product may have become the scores; one key (a sink) may have been joined."""
    count = scores.numel()
    return 0 < product.size in (count, count - count // max(1, scores.shape[dim]))


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


# -- which dimension is which ----------------------------------------------------------------------


def arrange_scores(scores: Tensor, dim: int, of_tokens: Shape) -> Tensor | None:
    """View scores as [sequences, heads, queries, keys], or return None if they do not fit.

    Sequences times queries must equal the block's number of tokens (windows of a sequence count as
    sequences). Sequences and heads may share a dimension, and heads may have two (groups).
    """
    sizes = arranged_sizes(tuple(scores.shape), dim % scores.ndim, of_tokens)
    return None if sizes is None else scores.movedim(dim, -1).reshape(sizes)


@functools.lru_cache(maxsize=64)
def arranged_sizes(shape: Shape, dim: int, of_tokens: Shape) -> Shape | None:
    """Return the sizes of scores as [sequences, heads, queries, keys] (see `arrange_scores`)."""
    tokens = math.prod(of_tokens)
    *before, keys = (*shape[:dim], *shape[dim + 1 :], shape[dim])
    if 0 in shape:
        return None
    if len(before) == 1:  # one sequence, one head
        fits = before[0] == tokens and math.prod(of_tokens[:-1]) == 1
        return (1, 1, *before, keys) if fits else None
    if len(before) == 2:  # sequences and heads share a dimension
        folded, length = before
        sequences, odd = divmod(tokens, length)
        return None if odd or folded % sequences else (sequences, folded // sequences, length, keys)
    for order in _ORDERS:
        sizes = {
            role: math.prod(itertools.compress(before, (role == each for each in order)))
            for role in "SHQ"
        }
        if len(order) == len(before) and sizes["S"] * sizes["Q"] == tokens:
            return (*sizes.values(), keys)
    return None


def _factors(
    product: Product, shape: Sequence[int], find_columns: FindColumns, *, turned: bool
) -> Factors | None:
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
    key = right.unflatten(0, (sequences, key_heads))
    columns = find_columns(query), find_columns(key)
    unknown = [x for x, known in zip((query, key), columns, strict=True) if known is None]
    if any(find_columns(each.mT) is not None for each in unknown):
        raise NotUnderstoodError(NO_SCORES.format(keys=keys))  # features attend to one another
    if min(sequences, heads) > 1 and not _are_alike(columns[0]):
        heads_first = query.flatten(0, 1).unflatten(0, (heads, sequences)).transpose(0, 1)
        if _are_alike(find_columns(heads_first)):
            raise NotUnderstoodError(_HEADS_FIRST)
    return Factors(query, key, columns, product.factor)


def _are_alike(columns: Columns | None) -> bool:
    """Whether the same columns make the heads of all tokens."""
    return columns is not None and len(columns.pattern.which) == 1


def _check_heads(scores: Tensor, arranged: Tensor, factors: Sequence[Factors]) -> None:
    """Raise if another dimension is as long as queries, unless products show which is which.

    `scores` have their keys last.
    """
    for dim in range(1, scores.ndim - 2):
        if not 1 < scores.shape[dim] == scores.shape[-2]:
            continue
        swapped = scores.transpose(dim, -2).reshape(arranged.shape)
        own, other = (
            max((_explained(each, made) for made in factors), default=0.0)
            for each in (arranged, swapped)
        )
        if own < _LEAST_EXPLAINED or own < _MORE_EXPLAINED * other:
            raise NotUnderstoodError(_UNCLEAR.format(shape=list(scores.shape), dim=-1))


def _explained(scores: Tensor, made: Factors) -> float:
    """Return the share of the variance of scores that a product explains, from 0 to 1.

    Differences between two sequences are compared, because biases of places are equal in both.
    """
    ends = [0, -1][: len(scores)]
    key = made.key[ends].repeat_interleave(scores.shape[1] // made.key.shape[1], dim=1)
    with without_autocast([scores.device.type]):
        products = (as_factor(made.query[ends]) @ as_factor(key).mT).float()
    scores = scores.detach()[ends][..., : key.shape[2]].float()
    seen = (scores > MASKED).all(dim=0)
    pair = torch.stack(
        [(x[0] - x[-1] if len(ends) > 1 else x[0])[seen] for x in (products, scores)]
    )
    share = pair.corrcoef()[0, 1].square().item() if pair.shape[1] > 1 else 0.0
    return 0.0 if math.isnan(share) else share
