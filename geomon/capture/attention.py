"""Attention: one recorded call of an attention function, and the captured views made of it.

Implementations express the same attention in different ways: the mask may be boolean, additive, or
only a flag; the scale may be absent. Here everything becomes views: query, key, visible, bias,
scale, softcap and sink, or scores and visible. A call that cannot be rebuilt is refused with the
reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geomon.capture.sampling import RowSampler
from geomon.capture.snapshot import at_places

# Scores below this come from masks (-10,000 and lower), not from queries and keys.
MASKED_SCORE = -5_000.0

SEVERAL_SOFTMAXES = "it takes several softmaxes (landmarks, chunks), and none of them is its own"


class NotUnderstoodError(ValueError):
    """An attention call does something that cannot be rebuilt; the message says what."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function, with the sampled queries only.

    Attributes:
        query: Sampled queries, [sequences, heads, queries, head width].
        key: All keys of the sampled sequences, [sequences, key heads, keys, head width].
        mask: Rows of the mask for the sampled queries: boolean (True = attend), additive, or None.
        sequences: Indices of the sampled sequences in the batch, [sequences].
        places: Position of each sampled query in its sequence, [sequences, queries].
        shape: Number of sequences and length of the whole batch.
        causal: Whether a query may see no later key, apart from what `mask` says.
        scale: Factor on the scores; None stands for 1/sqrt(head width).
        bias: Rows of what is added to the scores besides the mask (T5), or None.
        sliding_window: Number of keys, counted back from its own, that a query sees where no mask
            says so; None for all.
        softcap: Bound on the scores (Gemma 2), or None.
        sink: Logits of learned sinks, [heads] (GPT-OSS), or None.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    sequences: Tensor
    places: Tensor
    shape: tuple[int, int]
    causal: bool = False
    scale: float | None = None
    bias: Tensor | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sink: Tensor | None = None

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.query.shape[1]


@dataclass(frozen=True)
class SoftmaxCall:
    """The softmax of an attention that is written out by hand, with the sampled queries only.

    Attributes:
        scores: Masked input of the softmax, [sequences, heads, queries, keys].
        sequences: Indices of the sampled sequences in the batch, [sequences].
        places: Position of each sampled query in its sequence, [sequences, queries].
        shape: Number of sequences and length of the whole batch.
    """

    scores: Tensor
    sequences: Tensor
    places: Tensor
    shape: tuple[int, int]

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.scores.shape[1]


def tensors_of(call: AttentionCall | SoftmaxCall) -> list[Tensor]:
    """List the tensors that a recorded call holds.

    Args:
        call: The recorded call.
    """
    return [value for value in vars(call).values() if isinstance(value, Tensor)]


# -- recording: nothing but copies of sampled rows -----------------------------------------------


def record_call(
    sampler: RowSampler, route: str, module: Any, query: Any, key: Any, mask: Any,
    options: Mapping[str, Any],
) -> AttentionCall:  # fmt: skip
    """Record an attention call: sampled queries, against all keys of the sampled sequences.

    Args:
        sampler: Sampler of the queries.
        route: "interface" or "sdpa".
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
    if mask is not None and not isinstance(mask, Tensor):
        raise NotUnderstoodError(
            f"the mask is a {type(mask).__name__}, not a tensor (flex attention?); run the model "
            'with attn_implementation="sdpa" or "eager"'
        )
    if any(options.get(name) is not None for name in ("cu_seq_lens_q", "cu_seqlens")):
        raise NotUnderstoodError("sequences are packed without padding (cu_seq_lens_q)")
    query, key = local_shard(query), local_shard(key)
    sequences, places = sampler.sample_queries(query.shape[0], query.shape[2])
    by_key = route == "interface" and mask is not None and mask.ndim == 2  # [sequences, keys]
    if mask is not None:
        mask = local_shard(mask)
        mask = mask[:, None, None, :] if by_key else mask[(None,) * (4 - mask.ndim)]
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", False)
    scale = options.get("scaling", options.get("scale"))
    # A mask with a row for each query has the sliding window in it.
    window = options.get("sliding_window") if mask is None or mask.shape[2] == 1 else None
    sink = options.get("s_aux")
    return AttentionCall(
        query=at_places(query[sequences], places),
        key=key.detach()[sequences],
        mask=_sampled_rows(mask, sequences, places),
        sequences=sequences,
        places=places,
        shape=(query.shape[0], query.shape[2]),
        causal=bool(causal) and query.shape[2] > 1 and (mask is None or by_key),
        scale=None if scale is None else float(scale),
        bias=_sampled_rows(options.get("position_bias"), sequences, places),
        sliding_window=window,
        softcap=options.get("softcap"),
        sink=None if sink is None else local_shard(sink).detach().clone(),
    )


def record_softmax(
    sampler: RowSampler, scores: Tensor, dim: Any, shape: tuple[int, ...], heads: int | None
) -> SoftmaxCall | None:
    """Record the sampled rows of a softmax of attention scores.

    Scores are [sequences, heads, length, keys], or the same with sequences and heads in one
    dimension, over as many tokens as the block was given; the logits of a router are not.

    Args:
        sampler: Sampler of the queries.
        scores: Input of the softmax.
        dim: The dimension that the softmax runs over.
        shape: Shape of the hidden states that entered the block, without the width.
        heads: Number of query heads, or None where it is not known.

    Returns:
        The recorded call, or None where the softmax is not one of attention scores.
    """
    if scores.is_nested or scores.ndim not in (3, 4) or dim not in (-1, scores.ndim - 1):
        return None
    tokens = torch.Size(shape).numel()
    scores = local_shard(scores)
    unfolded = scores if scores.ndim == 4 else _unfold(scores, shape, heads)
    if unfolded is None:
        return None
    scores = unfolded
    if scores.shape[0] * scores.shape[2] != tokens or 0 in scores.shape:
        return None
    if heads is not None and scores.shape[1] != heads:
        return None
    sequences, places = sampler.sample_queries(scores.shape[0], scores.shape[2])
    return SoftmaxCall(
        at_places(scores[sequences], places), sequences, places, (scores.shape[0], scores.shape[2])
    )


def is_second_softmax(recorded: SoftmaxCall, scores: Tensor, dim: Any) -> bool:
    """Whether a softmax is a further one of the attention whose scores were recorded.

    Args:
        recorded: The first softmax of the attention.
        scores: Input of the softmax.
        dim: The dimension that the softmax runs over.
    """
    same = (recorded.shape[0], recorded.heads)
    return scores.ndim == 4 and dim in (-1, 3) and scores.shape[:2] == same


def _unfold(scores: Tensor, shape: tuple[int, ...], heads: int | None) -> Tensor | None:
    """View [sequences x heads, length, keys] as four dimensions; None for what is no attention."""
    folded, length, keys = scores.shape
    tokens = torch.Size(shape).numel()
    if length == 0 or tokens % length or folded % (tokens // length):
        return None
    sequences = tokens // length
    if folded == sequences and heads != 1 and keys != length:
        return None  # a single head counts where it is known, or with as many keys as queries
    return scores.unflatten(0, (sequences, folded // sequences))


def local_shard(values: Tensor) -> Tensor:
    """Return the part of a sharded tensor that is on this rank, or any other tensor as it is.

    Args:
        values: A tensor, sharded among ranks or not.
    """
    to_local = getattr(values, "to_local", None)
    return values if to_local is None else to_local()


def _sampled_rows(values: Any, sequences: Tensor, places: Tensor) -> Tensor | None:
    """Copy rows of a mask or a bias, [sequences (or 1), heads (or 1), length (or 1), keys]."""
    if not isinstance(values, Tensor):
        return None
    values = local_shard(values).detach()
    chosen = values[sequences] if values.shape[0] > 1 else values
    return at_places(chosen, places) if chosen.shape[2] > 1 else chosen.clone()


# -- reading -------------------------------------------------------------------------------------


def read_call(call: AttentionCall | SoftmaxCall, valid: Tensor | None) -> dict[str, Any]:
    """Make the captured views of a recorded call, on the host.

    Args:
        call: The recorded call.
        valid: False where a sampled query is padding, [sequences, queries]; None without padding.

    Raises:
        NotUnderstoodError: The call has a mask or an option that cannot be rebuilt.
    """
    real = None if valid is None else valid.cpu()[:, None, :, None]
    if isinstance(call, SoftmaxCall):
        scores = call.scores.cpu().float()
        visible = scores > MASKED_SCORE
        return {"scores": scores, "visible": visible if real is None else visible & real}
    query, key = call.query.cpu().float(), call.key.cpu().float()
    visible, bias = _visibility(call, key.shape[2])
    scale = call.scale if call.scale is not None else query.shape[-1] ** -0.5
    return {
        "query": query,
        "key": key,
        "visible": visible if real is None else visible & real,
        "bias": bias,
        "scale": float(scale),
        "softcap": None if call.softcap is None else float(call.softcap),
        "sink": _sink_logits(call),
    }


def _visibility(call: AttentionCall, keys: int) -> tuple[Tensor, Tensor | None]:
    """Tell which keys each query sees, and what is added to the scores."""
    places = call.places[:, None, :, None]
    visible = torch.ones(1, 1, 1, keys, dtype=torch.bool, device="cpu")
    bias: Tensor | None = None
    for given in (call.mask, call.bias):
        seen, added = _split_mask(given)
        if seen is not None:
            visible = visible & seen
        if added is not None:
            bias = added if bias is None else bias + added
    order = torch.arange(keys, dtype=torch.int64, device="cpu")
    if call.causal:
        # Query 0 is aligned with key 0, as scaled_dot_product_attention does.
        visible = visible & (order <= places)
    if call.sliding_window is not None:
        visible = visible & (places - order < call.sliding_window)
    return visible, bias


def _split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask into the keys that it lets through and the finite bias that it adds."""
    if mask is None:
        return None, None
    mask = mask.cpu()
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise NotUnderstoodError(f"the mask holds {mask.dtype}, neither boolean nor additive")
    # Masks hold -inf, or the smallest number of whatever dtype they were built in.
    visible = mask > torch.finfo(torch.float16).min / 2
    bias = torch.where(visible, mask, 0).float()
    return visible, bias if bool(bias.any()) else None


def _sink_logits(call: AttentionCall) -> Tensor | None:
    """Return the logits of learned sinks, one for each head."""
    if call.sink is None:
        return None
    if call.sink.numel() != call.heads:
        raise NotUnderstoodError(
            f"there are {call.sink.numel()} learned sinks for {call.heads} heads"
        )
    return call.sink.flatten().cpu().float()
