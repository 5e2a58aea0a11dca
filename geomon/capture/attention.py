"""From one recorded attention call to what the kernels read.

Implementations say the same things in different ways: the mask may be boolean, additive, or only a
flag; the scale may be absent. Everything is turned into views here: query, key, visible, bias,
scale, softcap and sink, or scores and visible. What is not understood is refused with a reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from geomon.capture.sampling import RowDraw, at_places

# Scores below this are those of masks (-10,000 and lower), and not of queries and keys.
HIDDEN = -5_000.0


SEVERAL = "it takes several softmaxes (landmarks, chunks), and none of them is its own"


class NotUnderstoodError(ValueError):
    """The call does something that cannot be rebuilt; the message says what."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function, thinned to sampled queries.

    Attributes:
        query: [sequences, heads, queries, head width].
        key: [sequences, key heads, keys, head width].
        mask: Rows of the mask for the sampled queries: boolean (True = attend), additive, or None.
        sequences: Which sequences of the batch these are, [sequences].
        places: Position of each sampled query in its sequence, [sequences, queries].
        shape: Sequences and length of the whole batch.
        causal: Whether a query may see no later key, apart from `mask`.
        scale: Factor on the scores; None stands for 1/sqrt(head width).
        bias: Rows of what is added to the scores besides the mask (T5), or None.
        reach: How far back a query sees where no mask says so, or None.
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
    reach: int | None = None
    softcap: float | None = None
    sink: Tensor | None = None

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.query.shape[1]


@dataclass(frozen=True)
class SoftmaxCall:
    """The softmax of an attention that is written out by hand, thinned to sampled queries.

    Attributes:
        scores: What it was given, masked, [sequences, heads, queries, keys].
        sequences: Which sequences of the batch these are, [sequences].
        places: Position of each sampled query in its sequence, [sequences, queries].
        shape: Sequences and length of the whole batch.
    """

    scores: Tensor
    sequences: Tensor
    places: Tensor
    shape: tuple[int, int]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.scores.shape[1]


# -- recording: nothing but copies of sampled rows -----------------------------------------------


def thinned(
    draw: RowDraw, route: str, module: Any, query: Any, key: Any, mask: Any,
    options: Mapping[str, Any],
) -> AttentionCall:  # fmt: skip
    """The call with sampled queries only, against all keys of the sampled sequences.

    Args:
        draw: Chooses the queries.
        route: "interface" or "sdpa".
        module: The one that calls, or None.
        query: As given, and so are the rest.
        key: [sequences, key heads, keys, head width].
        mask: Boolean, additive, or None.
        options: All other arguments by name.

    Raises:
        NotUnderstoodError: It is none of the calls that are understood.
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
    query, key = local(query), local(key)
    sequences, places = draw.queries(query.shape[0], query.shape[2])
    by_key = route == "interface" and mask is not None and mask.ndim == 2  # [sequences, keys]
    if mask is not None:
        mask = local(mask)
        mask = mask[:, None, None, :] if by_key else mask[(None,) * (4 - mask.ndim)]
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", False)
    scale = options.get("scaling", options.get("scale"))
    # A mask with a row for each query holds the window already.
    window = options.get("sliding_window") if mask is None or mask.shape[2] == 1 else None
    sink = options.get("s_aux")
    return AttentionCall(
        query=at_places(query[sequences], places),
        key=key.detach()[sequences],
        mask=_rows_of(mask, sequences, places),
        sequences=sequences,
        places=places,
        shape=(query.shape[0], query.shape[2]),
        causal=bool(causal) and query.shape[2] > 1 and (mask is None or by_key),
        scale=None if scale is None else float(scale),
        bias=_rows_of(options.get("position_bias"), sequences, places),
        reach=window,
        softcap=options.get("softcap"),
        sink=None if sink is None else local(sink).detach().clone(),
    )


def softened(
    draw: RowDraw, scores: Tensor, dim: Any, shape: tuple[int, ...], heads: int | None
) -> SoftmaxCall | None:
    """The sampled rows of a softmax, or None where it is not one of attention scores.

    Scores are [sequences, heads, length, keys], or the same with sequences and heads in one
    dimension, over as many tokens as the block was given: which routers' logits are not.

    Args:
        draw: Chooses the queries.
        scores: What the softmax was given.
        dim: The dimension that it runs over.
        shape: Of the hidden states that entered the block, without the width.
        heads: Query heads, where known.
    """
    if scores.is_nested or scores.ndim not in (3, 4) or dim not in (-1, scores.ndim - 1):
        return None
    tokens = torch.Size(shape).numel()
    whole = local(scores) if scores.ndim == 4 else _unfolded(local(scores), shape, heads)
    if whole is None:
        return None
    scores = whole
    if scores.shape[0] * scores.shape[2] != tokens or 0 in scores.shape:
        return None
    if heads is not None and scores.shape[1] != heads:
        return None
    sequences, places = draw.queries(scores.shape[0], scores.shape[2])
    return SoftmaxCall(
        at_places(scores[sequences], places), sequences, places, (scores.shape[0], scores.shape[2])
    )


def again(before: SoftmaxCall, scores: Tensor, dim: Any) -> bool:
    """Whether an attention whose scores were kept takes a softmax of scores once more.

    Args:
        before: What was kept.
        scores: What the softmax is given.
        dim: The dimension that it runs over.
    """
    return (
        scores.ndim == 4 and dim in (-1, 3) and scores.shape[:2] == (before.shape[0], before.heads)
    )


def _unfolded(scores: Tensor, shape: tuple[int, ...], heads: int | None) -> Tensor | None:
    """[sequences x heads, length, keys] as four dimensions; None for what is no attention."""
    together, length, keys = scores.shape
    tokens = torch.Size(shape).numel()
    if length == 0 or tokens % length or together % (tokens // length):
        return None
    sequences = tokens // length
    if together == sequences and heads != 1 and keys != length:
        return None  # one head is taken for attention where it is known, or all sees all
    return scores.unflatten(0, (sequences, together // sequences))


def local(values: Tensor) -> Tensor:
    """The part of a sharded tensor that is on this rank; any other tensor as it is."""
    to_local = getattr(values, "to_local", None)
    return values if to_local is None else to_local()


def _rows_of(values: Any, sequences: Tensor, places: Tensor) -> Tensor | None:
    """Rows of a mask or a bias, [sequences (or 1), heads (or 1), length (or 1), keys]."""
    if not isinstance(values, Tensor):
        return None
    values = local(values).detach()
    chosen = values[sequences] if values.shape[0] > 1 else values
    return at_places(chosen, places) if chosen.shape[2] > 1 else chosen.clone()


# -- reading -------------------------------------------------------------------------------------


def captured_attention(call: AttentionCall | SoftmaxCall, valid: Tensor | None) -> dict[str, Any]:
    """The captured views of a recorded call, on the host.

    Args:
        call: What was recorded.
        valid: False where a sampled query is padding, [sequences, queries], or None.

    Raises:
        NotUnderstoodError: The call has a mask or an option that cannot be rebuilt.
    """
    real = None if valid is None else valid.cpu()[:, None, :, None]
    if isinstance(call, SoftmaxCall):
        scores = call.scores.cpu().float()
        visible = scores > HIDDEN
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
        "sink": _sink(call),
    }


def _visibility(call: AttentionCall, keys: int) -> tuple[Tensor, Tensor | None]:
    """What is visible, and what is added to the scores."""
    places = call.places[:, None, :, None]
    visible = torch.ones(1, 1, 1, keys, dtype=torch.bool)
    bias: Tensor | None = None
    for given in (call.mask, call.bias):
        seen, added = _taken_apart(given)
        if seen is not None:
            visible = visible & seen
        if added is not None:
            bias = added if bias is None else bias + added
    if call.causal:
        # Aligned at the first key, as scaled_dot_product_attention does.
        visible = visible & (torch.arange(keys) <= places)
    if call.reach is not None:
        visible = visible & (places - torch.arange(keys) < call.reach)
    return visible, bias


def _taken_apart(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What a mask lets through, and what it adds."""
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


def _sink(call: AttentionCall) -> Tensor | None:
    if call.sink is None:
        return None
    if call.sink.numel() != call.heads:
        raise NotUnderstoodError(
            f"there are {call.sink.numel()} learned sinks for {call.heads} heads"
        )
    return call.sink.flatten().cpu().float()
