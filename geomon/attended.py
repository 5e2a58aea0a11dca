"""From one recorded attention call to what the kernels read.

Implementations say the same things in different ways: the mask may be boolean, additive, or only a
flag; the scale may be absent. Everything is turned into (query, key, visible, bias, scale) here.
What is not understood is refused with a reason.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Arguments that change the scores in a way that is not rebuilt here, and what they are.
_REFUSED = {
    "softcap": "scores are soft-capped",
    "s_aux": "there are learned attention sinks",
    "position_bias": "there is a relative position bias",
    "cu_seq_lens_q": "sequences are packed without padding",
}
# The arguments of a call that are kept with it.
RELEVANT = frozenset({*_REFUSED, "sliding_window"})


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
        causal: Whether a query may see no later key, apart from `mask`.
        scale: Factor on the scores; None stands for 1/sqrt(head width).
        options: Those of the `RELEVANT` arguments that were given.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    sequences: Tensor
    places: Tensor
    causal: bool
    scale: float | None
    options: dict[str, Any] = field(default_factory=dict)


def captured_attention(call: AttentionCall, valid: Tensor | None) -> dict[str, Any]:
    """The captured views of an attention call, on the host.

    Args:
        call: What was recorded.
        valid: False where a sampled query is padding, [sequences, queries], or None.

    Raises:
        NotUnderstoodError: The call has a mask or an option that cannot be rebuilt.
    """
    refused = [why for name, why in _REFUSED.items() if call.options.get(name) is not None]
    if refused:
        raise NotUnderstoodError("; ".join(refused))
    query, key = call.query.cpu().float(), call.key.cpu().float()
    if query.ndim != 4 or key.ndim != 4:
        raise NotUnderstoodError(
            f"queries have shape {list(query.shape)}, not [sequences, heads, length, head width]"
        )
    keys = key.shape[2]
    places = call.places[:, None, :, None]
    visible, bias = _visibility(call.mask)
    if call.causal:
        # Aligned at the first key, as scaled_dot_product_attention does.
        seen = torch.arange(keys) <= places
        visible = seen if visible is None else visible & seen
    reach = call.options.get("sliding_window")
    if reach is not None and (call.mask is None or call.mask.shape[2] == 1):
        # A mask with a row for each query holds the window already.
        near = places - torch.arange(keys) < reach
        visible = near if visible is None else visible & near
    if visible is None:
        visible = torch.ones(1, 1, 1, keys, dtype=torch.bool)
    if valid is not None:
        visible = visible & valid.cpu()[:, None, :, None]
    scale = call.scale if call.scale is not None else query.shape[-1] ** -0.5
    return {"query": query, "key": key, "visible": visible, "bias": bias, "scale": float(scale)}


def _visibility(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask into what is visible and what is added to the scores."""
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
