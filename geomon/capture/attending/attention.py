"""Attention: one recorded call of an attention function, and the captured views made of it.

Implementations express the same attention in different ways: the mask may be boolean, additive, or
only a flag; the scale may be absent. Here everything becomes views: query, key, visible, bias,
scale, softcap and sink, or scores and visible. A call that cannot be rebuilt is refused with the
reason.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from geomon.capture.attending.rules import FlexRule, PlaceRule, Rule, heads_of
from geomon.capture.snapshot import HOST, at_places
from geomon.capture.tokens.sampling import RowSampler
from geomon.capture.tokens.visibility import are_made_of, hidden_in_scores, hidden_keys

NO_SCORES = (
    "a softmax over {keys} numbers was seen that are not seen to be products of queries with all "
    "keys: features (linear attention), chunks of keys or experts"
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
        bias: What is added to the scores besides the mask (T5), or None.
        sliding_window: Number of keys, counted back from its own, that a query sees where no mask
            says so; None for all.
        softcap: Bound on the scores (Gemma 2), or None.
        sink: Logits of learned sinks, [heads] (GPT-OSS), or None.
        rule: Which keys a query sees where that is no tensor (fused or packed attention), or None.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    bias: Tensor | None
    sliding_window: int | None
    softcap: float | None
    sink: Tensor | None
    rule: Rule | None = None


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function, with the sampled queries only.

    Attributes:
        given: Arguments of the call: queries, and rows of the mask and of the bias, at the sampled
            places; keys of the sampled sequences.
        sequences: Indices of the sampled sequences in the batch, [sequences].
        places: Position of each sampled query in its sequence, [sequences, queries].
        shape: Number of sequences and length of the whole batch.
    """

    given: Arguments
    sequences: Tensor
    places: Tensor
    shape: tuple[int, int]

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.given.query.shape[1]


@dataclass(frozen=True)
class SoftmaxCall:
    """The softmax of an attention that is written out by hand, with the sampled queries only.

    Attributes:
        scores: Masked input of the softmax, [sequences, heads, queries, keys].
        sequences: Indices of the sampled sequences in the batch, [sequences].
        places: Position of each sampled query in its sequence, [sequences, queries].
        shape: Number of sequences and length of the whole batch.
        products: Products of queries and keys that the scores were made of, of the same shape; None
            where they were not seen.
        doubtful: Whether they may be other products, as there are as many keys as features.
        source: Address, shape and dimension of the whole input of the softmax.
    """

    scores: Tensor
    sequences: Tensor
    places: Tensor
    shape: tuple[int, int]
    products: Tensor | None = None
    doubtful: bool = False
    source: tuple[Any, ...] = ()

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.scores.shape[1]


def tensors_of(call: AttentionCall | SoftmaxCall) -> list[Tensor]:
    """List the tensors that a recorded call holds.

    Args:
        call: The recorded call.
    """
    values = [*vars(call).values()]
    if isinstance(call, AttentionCall):
        values += call.given
    return [value for value in values if isinstance(value, Tensor)]


# -- recording: nothing but copies of sampled rows -----------------------------------------------


def read_arguments(
    route: str, module: Any, query: Any, key: Any, mask: Any, options: Mapping[str, Any]
) -> Arguments:
    """Read the arguments of an attention call; nothing is copied.

    Args:
        route: "interface" or "sdpa" (`geomon.capture.attending.fused` reads the others).
        module: The module that calls, or None.
        query: Queries of the call, [sequences, heads, queries, head width].
        key: Keys of the call, [sequences, key heads, keys, head width].
        mask: Mask of the call: boolean, additive, or None.
        options: All other arguments of the call by name.

    Raises:
        NotUnderstoodError: The call cannot be rebuilt from what it was given.
    """
    for name, given in (("queries", query), ("keys", key)):
        if not isinstance(given, Tensor) or given.ndim != 4 or given.is_nested:
            raise NotUnderstoodError(f"the {name} are no plain tensor of four dimensions")
    block = mask if callable(getattr(mask, "mask_mod", None)) else None  # a BlockMask
    if mask is not None and not isinstance(mask, Tensor) and block is None:
        raise NotUnderstoodError(
            f"the mask is a {type(mask).__name__}, and neither a tensor nor one with a function of "
            'places (mask_mod); run the model with attn_implementation="sdpa" or "eager"'
        )
    mask = mask if isinstance(mask, Tensor) else None
    query, key = local_shard(query), local_shard(key)
    by_key = route == "interface" and mask is not None and mask.ndim == 2  # [sequences, keys]
    if mask is not None:
        mask = local_shard(mask)
        mask = mask[:, None, None, :] if by_key else mask[(None,) * (4 - mask.ndim)]
        if (
            route == "interface"
        ):  # of a mask for more keys (a cache of fixed length) the first count
            mask = mask[..., : key.shape[2]]
        if mask.shape[3] not in (1, key.shape[2]):
            raise NotUnderstoodError(
                f"the mask is for {mask.shape[3]} keys, and there are {key.shape[2]}"
            )
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", False)
    scale = options.get("scaling", options.get("scale"))
    bias, sink, softcap = (options.get(name) for name in ("position_bias", "s_aux", "softcap"))
    window = options.get("sliding_window")
    rule: Rule | None = None
    if block is not None:
        rule = FlexRule(key.shape[2], key.device, block.mask_mod, heads_of(block))
    elif mask is None and route == "interface" and _implementation(module) not in _BY_MASKS:
        ends = _ends_of_packed(query, key, options)
        if ends is not None:
            left, right = None if window is None else window - 1, 0 if causal else None
            rule = PlaceRule(key.shape[2], key.device, left, right, ends=(ends, ends))
    return Arguments(
        query=query.detach(),
        key=key.detach(),
        mask=None if mask is None else mask.detach(),
        causal=bool(causal) and rule is None and query.shape[2] > 1 and (mask is None or by_key),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        bias=local_shard(bias).detach() if isinstance(bias, Tensor) else None,
        # A mask with a row for each query has the sliding window in it.
        sliding_window=window if rule is None and (mask is None or mask.shape[2] == 1) else None,
        softcap=None if softcap is None else float(softcap),
        sink=None if sink is None else local_shard(sink).detach(),
        rule=rule,
    )


# Implementations of transformers that see no more of a batch than its mask.
_BY_MASKS = ("eager", "sdpa", "flex_attention")


def _implementation(module: Any) -> str | None:
    """Return the name of the implementation that an attention of transformers calls."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) else None


def _ends_of_packed(query: Tensor, key: Tensor, options: Mapping[str, Any]) -> Tensor | None:
    """Return the ends of the sequences that lie behind one another in the only row of a batch.

    Kernels for sequences of any length are told where they end by lengths that are summed up, or,
    in transformers, find where they begin themselves where positions are 0.

    Returns:
        The ends, from 0 on, [sequences + 1]; None where nothing is packed.

    Raises:
        NotUnderstoodError: There are lengths, and more than one row, or other queries than keys.
    """
    summed = next((options[n] for n in _SUMMED if isinstance(options.get(n), Tensor)), None)
    positions = options.get("position_ids")
    alone = query.shape[0] == 1 and query.shape[2] == key.shape[2]
    if summed is not None:
        if not alone:
            raise NotUnderstoodError("sequences are packed without padding (cu_seq_lens_q)")
        return summed.detach()
    if not alone or not isinstance(positions, Tensor) or positions.shape != (1, key.shape[2]):
        return None
    begins = (positions.detach()[0] == 0).nonzero().squeeze(1)
    ends = begins.new_tensor([0, key.shape[2]])
    return torch.cat([ends[:1], begins[begins > 0], ends[1:]])


_SUMMED = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens")


def record_call(sampler: RowSampler, given: Arguments) -> AttentionCall:
    """Record an attention call: sampled queries, against all keys of the sampled sequences.

    Args:
        sampler: Sampler of the queries.
        given: Arguments of the call.
    """
    count, _, length, _ = given.query.shape
    sequences, places = sampler.sample_queries(count, length)
    sampled = given._replace(
        query=at_places(given.query[sequences], places),
        key=given.key[sequences],
        mask=_sampled_rows(given.mask, sequences, places),
        bias=_sampled_rows(given.bias, sequences, places),
        sink=None if given.sink is None else given.sink.clone(),
        rule=None,
    )
    if given.rule is not None:
        sampled = _at_rule(sampled, given.rule, sequences, places)
    return AttentionCall(sampled, sequences, places, (count, length))


def _at_rule(sampled: Arguments, rule: Rule, sequences: Tensor, places: Tensor) -> Arguments:
    """Write what a rule says of the sampled queries as a mask and a bias.

    A rule may change scores in any way: what it adds to those of these queries is a bias.

    Raises:
        NotUnderstoodError: The functions of the rule cannot be asked of many places at once.
    """
    try:
        mask = rule.visible(sequences, places)
        if not rule.changes_scores:
            return sampled._replace(mask=mask)
        group = sampled.query.shape[1] // sampled.key.shape[1]
        key = sampled.key.repeat_interleave(group, dim=1).float()
        scores = sampled.query.float() @ key.transpose(-1, -2) * sampled.scale
        changed = rule.changed(scores, sequences, places)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise NotUnderstoodError(
            f"the functions of the mask or of the scores (mask_mod, score_mod) cannot be asked of "
            f"many places at once: {error}"
        ) from error
    hidden = ~mask | (changed == -torch.inf)
    return sampled._replace(mask=~hidden, bias=torch.where(hidden, 0, changed - scores))


def local_shard(values: Tensor) -> Tensor:
    """Return the part of a sharded tensor that is on this rank, or any other tensor as it is.

    What `torch.func.grad` wraps around a tensor, which has no address, is taken away.

    Args:
        values: A tensor, sharded among ranks or not.
    """
    while torch._C._functorch.is_gradtrackingtensor(values):
        values = torch._C._functorch.get_unwrapped(values)
    to_local = getattr(values, "to_local", None)
    return values if to_local is None else to_local()


@torch.no_grad()
def at_sampled_rows(scores: Tensor, sequences: Tensor, places: Tensor) -> Tensor:
    """Copy the sampled rows of scores.

    Args:
        scores: [sequences, heads, queries, keys].
        sequences: Indices of the sampled sequences.
        places: Position of each sampled query in its sequence, [sampled sequences, queries].

    Returns:
        [sampled sequences, heads, sampled queries, keys].
    """
    sequences, places = sequences.to(scores.device), places.to(scores.device)
    return scores.detach()[sequences[:, None], :, places].transpose(1, 2)


def _sampled_rows(values: Tensor | None, sequences: Tensor, places: Tensor) -> Tensor | None:
    """Copy rows of a mask or a bias, [sequences (or 1), heads (or 1), length (or 1), keys]."""
    if values is None:
        return None
    chosen = values[sequences] if values.shape[0] > 1 else values
    return at_places(chosen, places) if chosen.shape[2] > 1 else chosen.clone()


# -- reading -------------------------------------------------------------------------------------


def read_call(
    call: AttentionCall | SoftmaxCall, valid: Tensor | None, device: torch.device = HOST
) -> dict[str, Any]:
    """Make the captured views of a recorded call.

    Masks and scores are read on the host; queries and keys go where they stay at once.

    Args:
        call: The recorded call.
        valid: False where a sampled query is padding, [sequences, queries]; None without padding.
        device: Where the views stay.

    Raises:
        NotUnderstoodError: The call has a mask or an option that cannot be rebuilt, or a softmax is
            not one of attention.
    """
    real = None if valid is None else valid.cpu()[:, None, :, None]
    if isinstance(call, SoftmaxCall):
        scores, products = _on_host(call)
        if call.doubtful and products is not None and not are_made_of(scores, products):
            raise NotUnderstoodError(NO_SCORES.format(keys=scores.shape[3]))
        visible = ~hidden_in_scores(scores, products)
        return {
            "scores": scores.to(device),
            "visible": (visible if real is None else visible & real).to(device),
        }
    query, key = (rows.to(device).float() for rows in (call.given.query, call.given.key))
    visible, bias = _visibility(call, key.shape[2])
    sink = _sink_logits(call)
    return {
        "query": query,
        "key": key,
        "visible": (visible if real is None else visible & real).to(device),
        "bias": None if bias is None else bias.to(device),
        "scale": call.given.scale,
        "softcap": call.given.softcap,
        "sink": None if sink is None else sink.to(device),
    }


def visible_in_scores(call: SoftmaxCall) -> Tensor:
    """Find the keys that each query sees, from the scores of an attention by hand, on the host.

    Args:
        call: The recorded softmax.

    Returns:
        True where a key is visible, of the shape of the scores.
    """
    return ~hidden_in_scores(*_on_host(call))


def _on_host(call: SoftmaxCall) -> tuple[Tensor, Tensor | None]:
    """Return the scores and the products, on the host and in float32."""
    products = None if call.products is None else call.products.cpu().float()
    return call.scores.cpu().float(), products


def _visibility(call: AttentionCall, keys: int) -> tuple[Tensor, Tensor | None]:
    """Find which keys each query sees, and what is added to the scores."""
    places = call.places[:, None, :, None]
    given = [None if mask is None else mask.cpu() for mask in (call.given.mask, call.given.bias)]
    hidden, bias = split_masks(given, keys)
    visible = torch.ones(1, 1, 1, keys, dtype=torch.bool, device="cpu")
    visible = visible if hidden is None else visible & ~hidden
    order = torch.arange(keys, dtype=torch.int64, device="cpu")
    if call.given.causal:
        # Query 0 is aligned with key 0, as scaled_dot_product_attention does.
        visible = visible & (order <= places)
    if call.given.sliding_window is not None:
        visible = visible & (places - order < call.given.sliding_window)
    return visible, bias if bias is not None and bool(bias.any()) else None


def split_masks(masks: Iterable[Tensor | None], keys: int) -> tuple[Tensor | None, Tensor | None]:
    """Split masks and biases into the keys that they hide and the bias that they add.

    Args:
        masks: Boolean masks (True = attend), additive masks and biases, each broadcastable to
            [sequences, heads, queries, keys]; None for none.
        keys: Number of keys.

    Returns:
        True where a key is hidden, or None where none is, and the bias or None; both broadcastable
        to that shape.

    Raises:
        NotUnderstoodError: A mask is neither boolean nor additive.
    """
    hidden: Tensor | None = None
    added: Tensor | None = None
    for given in masks:
        if given is None:
            continue
        mask = given.expand(*given.shape[:-1], keys)
        if mask.dtype == torch.bool:
            hidden = ~mask if hidden is None else hidden | ~mask
        elif mask.is_floating_point():
            added = mask.float() if added is None else added + mask.float()
        else:
            raise NotUnderstoodError(f"the mask holds {mask.dtype}, neither boolean nor additive")
    if added is None:
        return hidden, None
    masked = hidden_keys(added)
    return masked if hidden is None else hidden | masked, torch.where(masked, 0, added)


def _sink_logits(call: AttentionCall) -> Tensor | None:
    """Return the logits of learned sinks, one for each head."""
    if call.given.sink is None:
        return None
    if call.given.sink.numel() != call.heads:
        raise NotUnderstoodError(
            f"there are {call.given.sink.numel()} learned sinks for {call.heads} heads"
        )
    return call.given.sink.flatten().cpu().float()
