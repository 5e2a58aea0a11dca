"""Prove once that a fused attention was understood: its output is computed from what was read."""

import torch
from torch import Tensor

from geomon.capture.attending.attention import AttentionCall, read_call
from geomon.capture.snapshot import at_places
from geomon.kernels.products import as_factor, without_autocast

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
        output: What the operator returned, [sequences, heads, queries, width].

    Returns:
        The reason; "" if both are alike.
    """
    views = read_call(call, None)
    places = call.places[:1, :_QUERIES]
    queries, heads = places.shape[1], call.heads
    query, key = views["query"][:1, :, :queries], views["key"][:1]
    key, own = (
        x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value[call.sequences[:1]])
    )
    with without_autocast([query.device.type]):
        scores = (as_factor(query) @ as_factor(key).transpose(-1, -2)).float() * views["scale"]
        if views["softcap"] is not None:
            scores = views["softcap"] * torch.tanh(scores / views["softcap"])
        hidden, bias = ~_first(views["visible"], queries), views["bias"]
        if bias is not None:
            scores = scores + _first(bias, queries).to(scores.device)
        scores = scores.masked_fill(hidden.to(scores.device), -torch.inf)
        weights = torch.nan_to_num(scores.softmax(-1))
        expected = weights @ own.float()
    found = at_places(output[call.sequences[:1]], places).float()
    seen = (~hidden).any(-1, keepdim=True).expand_as(expected[..., :1]).to(found.device)
    difference = ((found - expected).abs() * seen).amax() / own.float().abs().amax().clamp_min(
        1e-30
    )
    share = float(difference)
    limit = max(_ALIKE, _PRECISIONS * torch.finfo(output.dtype).eps)
    return _DIFFERS.format(share=share) if share > limit else ""


def _first(values: Tensor, queries: int) -> Tensor:
    """Return the part of a mask or bias for some queries of the first sequence."""
    values = values[:1]
    return values if values.shape[2] == 1 else values[:, :, :queries]
