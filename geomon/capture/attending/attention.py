"""Record one attention call, and make the captured views from it.

Implementations express attention differently: a mask may be boolean, additive or only a flag, and
the scale may be absent. Here all of them become the views query, key, visible, bias, scale, softcap
and sink, or scores and visible. A call that cannot be rebuilt is refused with a reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.capture import apart
from geomon.capture.attending.rules import AttentionRule
from geomon.capture.snapshot import at_places, cover_all
from geomon.capture.storage import send
from geomon.capture.tokens.sampling import RowSampler
from geomon.capture.tokens.visibility import MASKED, hidden_in_scores, hidden_keys
from geomon.failures import failures
from geomon.kernels.products import as_factor, without_autocast

NO_SCORES = (
    "a softmax over {keys} numbers was seen, but they are not known to be products of queries with "
    "all keys: they may be features (linear attention), chunks of keys or experts"
)

ON_SEVERAL_RANKS = (
    "the queries or keys of a sequence are on several ranks (context parallelism), which attend to "
    "each other's keys in turn; if ranks hold parts of sequences, positions of hidden states are "
    "counted within these parts"
)

_ALIKE = 1e-2  # relative change of a logit by rounding to bfloat16

_BY_HAND = "attention is written out by hand: its scores were seen, but not its queries and keys"
_JOINED = "attention is written out by hand: unknown columns were joined to its scores"


class NotUnderstoodError(ValueError):
    """An attention call cannot be rebuilt; the message says why."""


class Arguments(NamedTuple):
    """Arguments of an attention call, in one form for all implementations.

    Attributes:
        query: Queries, [sequences, heads, queries, head width].
        key: Keys, [sequences, key heads, keys, head width].
        mask: Boolean (True = attend) or additive mask, broadcastable to [sequences, heads, queries,
            keys], or None.
        causal: Whether later keys are hidden from a query in addition to `mask`.
        scale: Factor on the products of queries and keys.
        softcap: Bound on the scores (Gemma 2), or None.
        rule: Rule that says which keys a query sees if the mask is not a tensor (fused or packed
            attention), or None.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    softcap: float | None = None
    rule: AttentionRule | None = None


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function, with the sampled queries only.

    Attributes:
        given: Arguments of the call: queries and mask rows at the sampled places, and keys of the
            sampled sequences.
        sequences: Indices of the sampled sequences in the batch, [sequences].
        places: Position of each sampled query in its sequence, [sequences, queries].
        shape: Number of sequences and length of the whole batch.
        bias: Bias that a rule adds to the scores of these queries, or None.
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
    """The softmax of an attention written out by hand, with the sampled queries only.

    Attributes:
        scores: Masked input of the softmax, [sequences, heads, queries, keys].
        sequences: Indices of the sampled sequences in the batch, [sequences].
        places: Position of each sampled query in its sequence, [sequences, queries].
        shape: Number of sequences and length of the whole batch.
        made_of: Queries, [sequences, heads, queries, head width], and keys, [sequences, key heads,
            keys, head width], whose product became the scores, or None if it was not seen.
        scale: Factor from these products to the scores, or None if it is unknown.
        unknown: Why queries and keys are not known.
        doubtful: Whether the scores may be other products, because there are as many keys as
            features.
        source: Weak reference to the whole input of the softmax, and its dimension.
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
        """Whether one more column, the sink of each head, was joined to the products."""
        return self.made_of is not None and self.made_of[1].shape[2] == self.scores.shape[3] - 1

    @property
    def why_unknown(self) -> str:
        """Why the views of the call lack queries and keys."""
        return self.unknown if self.made_of is None else _JOINED

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.scores.shape[1]

    @property
    def key_heads(self) -> int:
        """Number of key heads, or of query heads if the keys were not seen."""
        return self.heads if self.made_of is None else self.made_of[1].shape[1]


# -- recording: nothing but copies of sampled rows -----------------------------------------------


def record_call(sampler: RowSampler, given: Arguments) -> AttentionCall:
    """Record an attention call: sampled queries, and all keys of the sampled sequences."""
    count, _, length, _ = given.query.shape
    sequences, places = sampler.sample_queries(count, length)
    sampled = given._replace(
        query=apart.keep(at_places(given.query[sequences], places)),
        key=apart.select(given.key, sequences),
        mask=_sampled_rows(given.mask, sequences, places),
        rule=None,
    )
    bias = None
    if given.rule is not None:
        mask, bias = _at_rule(sampled, given.rule, sequences, places)
        sampled = sampled._replace(mask=mask)
    return AttentionCall(sampled, sequences, places, (count, length), bias)


def _at_rule(
    sampled: Arguments, rule: AttentionRule, sequences: Tensor, places: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Write a rule for the sampled queries as a mask and a bias (the change of their scores)."""
    try:
        mask = rule.visible(sequences, places)
        if rule.changed is None:
            return mask, None
        scores = multiply(sampled.query, sampled.key) * sampled.scale
        changed = rule.changed(scores, sequences, places)
    except failures(RuntimeError, TypeError, ValueError, IndexError) as error:
        raise NotUnderstoodError(
            f"the functions of the mask or of the scores (mask_mod, score_mod) cannot be evaluated "
            f"at many places at once: {error}"
        ) from error
    hidden = ~mask | (changed == -torch.inf)
    return ~hidden, torch.where(hidden, 0, changed - scores)


@torch.no_grad()
def at_sampled_rows(scores: Tensor, sequences: Tensor, places: Tensor) -> Tensor:
    """Copy the sampled rows of scores: [sampled sequences, heads, sampled queries, keys]."""
    sequences = send(sequences, scores.device)
    if cover_all(places, scores.shape[2]):
        return apart.select(scores.detach(), sequences)
    rows = scores.detach()[sequences[:, None], :, send(places, scores.device)]
    return apart.keep(rows).transpose(1, 2)


def _sampled_rows(values: Tensor | None, sequences: Tensor, places: Tensor) -> Tensor | None:
    """Copy the sampled rows of a mask, [sequences (or 1), heads (or 1), length (or 1), keys]."""
    if values is None:
        return None
    chosen = values[sequences] if values.shape[0] > 1 else values
    return apart.keep(at_places(chosen, places) if chosen.shape[2] > 1 else chosen.clone())


# -- reading -------------------------------------------------------------------------------------


Recorded = AttentionCall | SoftmaxCall

# Numbers of masks or scores up to which calls are read together: then operators cost more than
# their arithmetic.
_FEW = 1 << 20


def read_call(call: Recorded, valid: Tensor | None) -> dict[str, Any]:
    """Make the captured views of a recorded call."""
    (views,) = read_calls([call], valid)
    if isinstance(views, Exception):
        raise views
    return views


def read_calls(calls: Sequence[Recorded], valid: Tensor | None) -> list[dict[str, Any] | Exception]:
    """Make the captured views of calls of one shape, or the error that says why there are none.

    Small calls that are alike are read together. Only queries and keys of fused attention stay on
    their device.
    """
    groups: dict[Any, list[int]] = {}
    for number, call in enumerate(calls):
        groups.setdefault(_form_of(call, number), []).append(number)
    real = None if valid is None else valid.cpu()[:, None, :, None]
    found: dict[int, dict[str, Any] | Exception] = {}
    for group in groups.values():
        try:
            read = _read_alike([calls[number] for number in group])
            for views in read if real is not None else ():
                views["visible"] = views["visible"] & real
            found |= zip(group, read, strict=True)
        except failures() as error:  # other calls do not depend on it
            found |= dict.fromkeys(group, error.with_traceback(None))  # its frames hold tensors
    return [found[number] for number in range(len(calls))]


def _form_of(call: Recorded, number: int) -> Any:
    """Describe what calls that are read together must have in common."""
    if isinstance(call, AttentionCall):
        parts: Sequence[Tensor | None] = (call.given.mask, call.bias)
        form: Any = call.given.causal, call.given.key.shape[2]
    else:
        parts, form = (call.scores, *(call.made_of or ())), (call.scale, call.doubtful)
    few = all(x is None or x.numel() <= _FEW for x in parts)
    alone = isinstance(call, SoftmaxCall) and call.joined
    alike = [None if x is None else (x.shape, x.dtype) for x in parts]
    return type(call), form, tuple(alike), None if few and not alone else number


def _read_alike(calls: Sequence[Recorded]) -> list[dict[str, Any]]:
    softmaxes = [call for call in calls if isinstance(call, SoftmaxCall)]
    if softmaxes:
        return read_scores(softmaxes)
    fused = [call for call in calls if isinstance(call, AttentionCall)]
    return [
        {
            "query": apart.convert(call.given.query),
            "key": apart.convert(call.given.key),
            "visible": visible,
            "bias": bias,
            "scale": call.given.scale,
            "softcap": call.given.softcap,
            "sink": None,
        }
        for call, (visible, bias) in zip(fused, _visibility(fused), strict=True)
    ]


def _together(values: Iterable[Tensor]) -> Tensor:
    """Concatenate tensors of one shape, on the host."""
    every = [*values]
    return (every[0] if len(every) == 1 else apart.keep(torch.cat(every))).cpu()


def multiply(query: Tensor, key: Tensor) -> Tensor:
    """Multiply queries with keys, exactly to float32, regardless of the training's settings."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    with without_autocast([query.device.type]):
        return (as_factor(query) @ as_factor(key).transpose(-1, -2)).float()


def read_scores(calls: Sequence[SoftmaxCall]) -> list[dict[str, Any]]:
    """Make the captured views of attention written out by hand, on the host.

    If queries and keys were seen, the views hold them with a scale and a bias that reproduce the
    scores exactly; otherwise they hold the scores alone. The bias also absorbs an unknown factor.
    The calls must be of one shape.
    """
    call = calls[0]
    whole = _together(each.scores for each in calls).float()
    made_of = [each.made_of for each in calls if each.made_of is not None]
    if made_of:
        query, key = (apart.convert(_together(x)) for x in zip(*made_of, strict=True))
        products = multiply(query, key)
        scores, sink = _without_sink(whole, products, call.scale)
        if call.doubtful and call.scale is None:
            raise NotUnderstoodError(NO_SCORES.format(keys=scores.shape[3]))
        if scores.shape == products.shape:
            parts = zip(query.chunk(len(calls)), key.chunk(len(calls)), strict=True)
            scaled = products if call.scale is None else call.scale * products
            rest = _explained(calls, scores, scaled)
            scale = 1.0 if call.scale is None else call.scale
            return [
                {
                    "query": own_query, "key": own_key, "visible": visible, "bias": bias,
                    "scale": scale, "softcap": None, "sink": sink,
                }
                for (own_query, own_key), (visible, bias) in zip(parts, rest, strict=True)
            ]  # fmt: skip
    return [
        {"scores": scores, "visible": ~hidden_in_scores(scores)}
        for scores in whole.chunk(len(calls))
    ]


def _explained(
    calls: Sequence[SoftmaxCall], scores: Tensor, scaled: Tensor
) -> list[tuple[Tensor, Tensor | None]]:
    """Find which keys each query sees and the bias added to its products, for each of some calls.

    Heads that share a mask get one.
    """
    call, count = calls[0], len(calls)
    added = scores - scaled
    hidden = hidden_in_scores(scores, None if call.scale is None else added)
    bias = added.masked_fill(hidden, 0)
    eps = 8 * torch.finfo(call.scores.dtype).eps
    largest = [x.abs().reshape(count, -1).amax(dim=1) for x in (bias, scaled)]
    adds = (largest[0] > eps * largest[1]).tolist()
    shared = (hidden == hidden[:, :1]).reshape(count, -1).all(dim=1).tolist()
    return [
        (~own[:, :1] if one else ~own, part if any_ else None)
        for own, one, part, any_ in zip(
            hidden.chunk(count), shared, bias.chunk(count), adds, strict=True
        )
    ]


def _without_sink(
    scores: Tensor, products: Tensor, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    """Split off the sink logits that were joined to the scores as one more key.

    The model may have subtracted a number from all scores of a row, which the softmax ignores.
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


def _visibility(calls: Sequence[AttentionCall]) -> list[tuple[Tensor, Tensor | None]]:
    """Find which keys each query sees and the bias added to its scores, in calls that are alike."""
    given, keys, count = calls[0].given, calls[0].given.key.shape[2], len(calls)
    masks = [call.given.mask for call in calls if call.given.mask is not None]
    hidden, bias = split_mask(_together(masks) if masks else None, keys)
    added = [call.bias for call in calls if call.bias is not None]
    bias = _together(added) if added else bias
    visible = torch.ones(keys, dtype=torch.bool, device="cpu")[None, None, None]
    if given.causal:
        # Query 0 is aligned with key 0, as scaled_dot_product_attention does.
        order = torch.arange(keys, dtype=torch.int64, device="cpu")
        visible = order <= calls[0].places[:, None, :, None]
    every = [visible] * count
    if hidden is not None:
        every = [visible & own for own in (~hidden).chunk(count)]
    if bias is None:
        return [(own, None) for own in every]
    adds = bias.reshape(count, -1).any(dim=1).tolist()
    parts = zip(every, bias.chunk(count), adds, strict=True)
    return [(own, part if any_ else None) for own, part, any_ in parts]


def split_mask(mask: Tensor | None, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask into where keys are hidden (True) and the bias that it adds; None if neither."""
    if mask is None:
        return None, None
    mask = mask.expand(*mask.shape[:-1], keys)
    if mask.dtype == torch.bool:
        return ~mask, None
    if not mask.is_floating_point():
        raise NotUnderstoodError(f"the mask has dtype {mask.dtype}: neither boolean nor additive")
    added = mask.float()
    hidden = hidden_keys(added)
    return hidden, torch.where(hidden, 0, added)
