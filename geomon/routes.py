"""Where attention goes, going by the source: a forecast, which the first pass settles."""

import functools
import inspect
from typing import Any

from torch import nn

from geomon.capture.anatomy.blocks import Attention

# In words, by the routes of `geomon.capture.patches.Listener`.
ROUTES = {
    "interface": "through transformers' attention interface",
    "sdpa": "through torch's scaled_dot_product_attention",
    "softmax": "by hand: its scores are seen at the softmax",
}
UNKNOWN = "by a route that the first pass shows"


def forecast(attention: Attention) -> str | None:
    """The route of an attention: "interface", "sdpa", "softmax", or None where it cannot be told.

    Args:
        attention: Of a block.
    """
    if attention.projections.kind == "multihead":
        return "sdpa"
    source = _source(attention.module)
    if "get_interface(" in source:
        return "interface"
    attends, softens = "scaled_dot_product_attention(" in source, "oftmax(" in source
    if attends and softens:
        asked = getattr(getattr(attention.module, "config", None), "_attn_implementation", None)
        return {"sdpa": "sdpa", "eager": "softmax"}.get(str(asked))
    return "sdpa" if attends else "softmax" if softens else None


def _source(module: nn.Module) -> str:
    """The source of the module's class and of those that it comes from, as far as it is there."""
    return "\n".join(
        _text(kind) for kind in type(module).__mro__ if kind not in (nn.Module, object)
    )


@functools.cache  # all blocks of a model have the same classes
def _text(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
