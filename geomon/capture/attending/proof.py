"""Prove once that a fused attention was understood: its output is computed from what was read."""

import torch
from torch import Tensor

from geomon.capture.attending.attention import AttentionCall, multiply, read_call
from geomon.capture.snapshot import at_places

_QUERIES = 8  # of one sequence
_ALIKE = 1e-4  # relative difference, or this many times the precision of the numbers
_PRECISIONS = 32

_DIFFERS = (
    "what was read of the attention (queries, keys, mask, scale) gives another output than its "
    "operator returned: they differ by {share:.1g} of the largest value"
)


@torch.no_grad()
def refute(call: AttentionCall, value: Tensor, output: Tensor) -> str:
    """Say how the output of some queries differs from the one that a recorded call gives.

    Args:
        call: The recorded call.
        value: Values, [sequences, heads (or fewer), keys, width].
        output: Output of the operator, [sequences, heads, queries, width].

    Returns:
        The reason; "" if both are alike.
    """
    views, places = read_call(call, None), call.places[:1, :_QUERIES]
    queries, value = places.shape[1], value[call.sequences[:1]].float()
    query, key = views["query"][:1, :, :queries], views["key"][:1]
    visible = _first(views["visible"], queries).to(query.device)
    scores = multiply(query, key) * views["scale"]
    if views["softcap"] is not None:
        scores = views["softcap"] * torch.tanh(scores / views["softcap"])
    if views["bias"] is not None:
        scores = scores + _first(views["bias"], queries).to(scores.device)
    weights = torch.nan_to_num(scores.masked_fill(~visible, -torch.inf).softmax(-1))
    found = at_places(output[call.sequences[:1]], places).float()
    difference = (found - multiply(weights, value.mT)).abs() * visible.any(-1, keepdim=True)
    share = float(difference.amax() / value.abs().amax().clamp_min(1e-30))
    limit = max(_ALIKE, _PRECISIONS * torch.finfo(output.dtype).eps)
    return _DIFFERS.format(share=share) if share > limit else ""


def _first(values: Tensor, queries: int) -> Tensor:
    """Return the part of a mask or bias for some queries of the first sequence."""
    values = values[:1]
    return values if values.shape[2] == 1 else values[:, :, :queries]
