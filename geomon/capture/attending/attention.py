"""Attention: one recorded call of an attention function, and the captured views made of it.

Implementations express the same attention in different ways: the mask may be boolean, additive, or
only a flag; the scale may be absent. Here everything becomes views: query, key, visible, bias,
scale, softcap and sink, or scores and visible. A call that cannot be rebuilt is refused with the
reason.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.capture.attending.rules import Rule
from geomon.capture.snapshot import at_places, cover_all
from geomon.capture.tokens.sampling import RowSampler
from geomon.capture.tokens.visibility import MASKED, hidden_in_scores, hidden_keys
from geomon.kernels.products import as_factor, without_autocast

NO_SCORES = (
    "a softmax over {keys} numbers was seen that are not seen to be products of queries with all "
    "keys: features (linear attention), chunks of keys or experts"
)

ON_SEVERAL_RANKS = (
    "the queries or keys of a sequence are on several ranks (context parallelism), each of which "
    "attends to those of the others in turn; where ranks are given parts of sequences, positions "
    "of hidden states are counted within these parts"
)

_ALIKE = 1e-2  # share by which the rounding of bfloat16 moves a logit

_BY_HAND = (
    "attention is written out by hand: its scores were seen, and not the queries and keys that it "
    "attends with"
)
_JOINED = (
    "attention is written out by hand: keys were joined to its scores, and what these are was not "
    "seen"
)


class NotUnderstoodError(ValueError):
    """An attention call does something that cannot be rebuilt; the message says what."""


class Arguments(NamedTuple):
    """Arguments of a call of an attention function, as all implementations mean them.

    Attributes:
        query: Queries, [sequences, heads, queries, head width].
        key: Keys, [sequences, key heads, keys, head width].
        mask: Mask: boolean (True = attend), additive, or None; broadcastable to [sequences, heads,
            queries, keys].
        causal: Whether a query may see no later key, apart from what `mask` says.
        scale: Factor on the products of queries and keys.
        softcap: Bound on the scores (Gemma 2), or None.
        rule: Which keys a query sees where that is no tensor (fused or packed attention), or None.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    softcap: float | None = None
    rule: Rule | None = None


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function, with the sampled queries only.

    Attributes:
        given: Arguments of the call: queries, and rows of the mask, at the sampled places; keys of
            the sampled sequences.
        sequences: Indices of the sampled sequences in the batch, [sequences].
        places: Position of each sampled query in its sequence, [sequences, queries].
        shape: Number of sequences and length of the whole batch.
        bias: What a rule adds to the scores of these queries, or None.
    """

    given: Arguments
    sequences: Tensor
    places: Tensor
    shape: tuple[int, int]
    bias: Tensor | None = None

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.given.query.shape[1]

    @property
    def key_heads(self) -> int:
        """Number of key heads."""
        return self.given.key.shape[1]


@dataclass(frozen=True)
class SoftmaxCall:
    """The softmax of an attention that is written out by hand, with the sampled queries only.

    Attributes:
        scores: Masked input of the softmax, [sequences, heads, queries, keys].
        sequences: Indices of the sampled sequences in the batch, [sequences].
        places: Position of each sampled query in its sequence, [sequences, queries].
        shape: Number of sequences and length of the whole batch.
        made_of: Queries and keys of the product that the scores were made of, [sequences, heads,
            queries, head width] and [sequences, key heads, keys, head width]; None if it was not
            seen.
        scale: Factor from products of these to scores; None if it is not known.
        unknown: Why queries and keys are not known.
        doubtful: Whether they may be other products, as there are as many keys as features.
        source: Weak reference to the whole input of the softmax, and the dimension it is over.
    """

    scores: Tensor
    sequences: Tensor
    places: Tensor
    shape: tuple[int, int]
    made_of: tuple[Tensor, Tensor] | None = None
    scale: float | None = None
    unknown: str = _BY_HAND
    doubtful: bool = False
    source: tuple[Any, ...] = ()

    @property
    def joined(self) -> bool:
        """Whether one more key was joined to the products: the sink of each head."""
        return self.made_of is not None and self.made_of[1].shape[2] == self.scores.shape[3] - 1

    @property
    def why_unknown(self) -> str:
        """Why there are no queries and keys in the views of the call."""
        return self.unknown if self.made_of is None else _JOINED

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.scores.shape[1]

    @property
    def key_heads(self) -> int:
        """Number of key heads; that of query heads where the keys were not seen."""
        return self.heads if self.made_of is None else self.made_of[1].shape[1]


# -- recording: nothing but copies of sampled rows -----------------------------------------------


def record_call(sampler: RowSampler, given: Arguments) -> AttentionCall:
    """Record an attention call: sampled queries, against all keys of the sampled sequences."""
    count, _, length, _ = given.query.shape
    sequences, places = sampler.sample_queries(count, length)
    sampled = given._replace(
        query=at_places(given.query[sequences], places),
        key=given.key[sequences],
        mask=_sampled_rows(given.mask, sequences, places),
        rule=None,
    )
    bias = None
    if given.rule is not None:
        mask, bias = _at_rule(sampled, given.rule, sequences, places)
        sampled = sampled._replace(mask=mask)
    return AttentionCall(sampled, sequences, places, (count, length), bias)


def _at_rule(
    sampled: Arguments, rule: Rule, sequences: Tensor, places: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Write what a rule says of the sampled queries as a mask and a bias.

    A rule may change scores in any way: what it adds to those of these queries is a bias.
    """
    try:
        mask = rule.visible(sequences, places)
        if rule.changed is None:
            return mask, None
        scores = _products(sampled.query, sampled.key) * sampled.scale
        changed = rule.changed(scores, sequences, places)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise NotUnderstoodError(
            f"the functions of the mask or of the scores (mask_mod, score_mod) cannot be asked of "
            f"many places at once: {error}"
        ) from error
    hidden = ~mask | (changed == -torch.inf)
    return ~hidden, torch.where(hidden, 0, changed - scores)


@torch.no_grad()
def at_sampled_rows(scores: Tensor, sequences: Tensor, places: Tensor) -> Tensor:
    """Copy the sampled rows of scores.

    Returns:
        [sampled sequences, heads, sampled queries, keys].
    """
    if cover_all(places, scores.shape[2]):
        return scores.detach()[sequences.to(scores.device)]
    sequences, places = sequences.to(scores.device), places.to(scores.device)
    return scores.detach()[sequences[:, None], :, places].transpose(1, 2)


def _sampled_rows(values: Tensor | None, sequences: Tensor, places: Tensor) -> Tensor | None:
    """Copy rows of a mask, [sequences (or 1), heads (or 1), length (or 1), keys]."""
    if values is None:
        return None
    chosen = values[sequences] if values.shape[0] > 1 else values
    return at_places(chosen, places) if chosen.shape[2] > 1 else chosen.clone()


# -- reading -------------------------------------------------------------------------------------


def read_call(call: AttentionCall | SoftmaxCall, valid: Tensor | None) -> dict[str, Any]:
    """Make the captured views of a recorded call.

    Masks and scores are read on the host; queries and keys stay where they are.
    """
    real = None if valid is None else valid.cpu()[:, None, :, None]
    if isinstance(call, SoftmaxCall):
        views = read_scores(call)
        if real is not None:
            views["visible"] = views["visible"] & real
        return views
    query, key = call.given.query.float(), call.given.key.float()
    visible, bias = _visibility(call, key.shape[2])
    return {
        "query": query,
        "key": key,
        "visible": visible if real is None else visible & real,
        "bias": bias,
        "scale": call.given.scale,
        "softcap": call.given.softcap,
        "sink": None,
    }


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Multiply queries with keys, exactly to float32, whatever the training has set."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    with without_autocast([query.device.type]):
        return (as_factor(query) @ as_factor(key).transpose(-1, -2)).float()


def read_scores(call: SoftmaxCall) -> dict[str, Any]:
    """Make the captured views of attention by hand, on the host.

    These are queries and keys, with a scale and a bias that make exactly the scores of them; or the
    scores alone, where queries and keys were not seen. If it was not seen what the products were
    multiplied by, the bias holds that too.
    """
    if call.made_of is None:
        return _scores_alone(call)
    query, key = (factor.cpu().float() for factor in call.made_of)
    products = _products(query, key)
    scores, sink = _without_sink(call.scores.cpu().float(), products, call.scale)
    if call.doubtful and call.scale is None:
        raise NotUnderstoodError(NO_SCORES.format(keys=scores.shape[3]))
    if scores.shape != products.shape:
        return _scores_alone(call)
    scaled = products if call.scale is None else call.scale * products
    added = scores - scaled
    hidden = hidden_in_scores(scores, None if call.scale is None else added)
    bias = added.masked_fill(hidden, 0)
    eps = 8 * torch.finfo(call.scores.dtype).eps
    adds_nothing = bias.abs().amax() <= eps * scaled.abs().amax()
    if torch.equal(hidden, hidden[:, :1].expand_as(hidden)):  # by the mask of all heads
        hidden = hidden[:, :1]
    return {
        "query": query,
        "key": key,
        "visible": ~hidden,
        "bias": None if adds_nothing else bias,
        "scale": 1.0 if call.scale is None else call.scale,
        "softcap": None,
        "sink": sink,
    }


def _scores_alone(call: SoftmaxCall) -> dict[str, Any]:
    scores = call.scores.cpu().float()
    return {"scores": scores, "visible": ~hidden_in_scores(scores)}


def _without_sink(
    scores: Tensor, products: Tensor, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    """Take the logits of sinks from scores, which they were joined to as one more key.

    A number may have been taken from all scores of a row, which does not change their softmax.
    """
    rest, joined = scores[..., :-1], scores[..., -1]
    if rest.shape != products.shape or scale is None:
        return scores, None
    largest, place = rest.max(dim=-1, keepdim=True)
    seen = largest > MASKED  # a row may see no key but the sink
    shift = torch.where(seen, largest - scale * products.gather(3, place), 0)
    sink = torch.where(seen, joined[..., None] - shift, torch.nan).transpose(0, 1).flatten(1)
    middle = sink.nanmedian(dim=1).values
    if ((sink - middle[:, None]).abs() > _ALIKE * (1 + middle.abs()[:, None])).any():
        return scores, None
    return rest - shift, middle


def _visibility(call: AttentionCall, keys: int) -> tuple[Tensor, Tensor | None]:
    """Find which keys each query sees, and what is added to the scores."""
    given = call.given
    hidden, bias = split_mask(None if given.mask is None else given.mask.cpu(), keys)
    bias = bias if call.bias is None else call.bias.cpu()
    every = torch.ones(keys, dtype=torch.bool, device="cpu")[None, None, None]
    visible = every if hidden is None else ~hidden
    if given.causal:
        # Query 0 is aligned with key 0, as scaled_dot_product_attention does.
        order = torch.arange(keys, dtype=torch.int64, device="cpu")
        visible = visible & (order <= call.places[:, None, :, None])
    return visible, bias if bias is not None and bias.any() else None


def split_mask(mask: Tensor | None, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask into the keys that it hides and the bias that it adds.

    Returns:
        True where a key is hidden, and the bias, both broadcastable to that shape; None for none.
    """
    if mask is None:
        return None, None
    mask = mask.expand(*mask.shape[:-1], keys)
    if mask.dtype == torch.bool:
        return ~mask, None
    if not mask.is_floating_point():
        raise NotUnderstoodError(f"the mask holds {mask.dtype}, neither boolean nor additive")
    added = mask.float()
    hidden = hidden_keys(added)
    return hidden, torch.where(hidden, 0, added)
