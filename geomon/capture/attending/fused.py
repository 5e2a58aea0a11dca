"""Read calls of fused attention: torch's operators, flex attention and flash attention.

Flash attention takes [sequences, queries, heads, width], or [tokens, heads, width] with the ends of
packed sequences. A window counts keys to the left and to the right.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from geomon.capture.attending.attention import (
    ON_SEVERAL_RANKS,
    Arguments,
    NotUnderstoodError,
)
from geomon.capture.attending.rules import FlexRule, PlaceRule
from geomon.capture.shards import sharded_dims
from geomon.capture.storage import local_shard

# Options that change visible keys or scores in ways that are not rebuilt here.
_NOT_REBUILT = ("alibi_slopes", "block_table", "page_table", "seqused_k", "attn_bias", "qv")


def read_sdpa(given: Mapping[str, Any]) -> Arguments:
    """Read a call of an operator behind `scaled_dot_product_attention`; nothing is copied."""
    query, key = (_plain(given.get(name), name, 4, heads=1) for name in ("query", "key"))
    mask = _first(given, "attn_mask", "attn_bias")
    if mask is not None:
        mask = local_shard(mask).detach()
        mask = mask[(None,) * (4 - mask.ndim)]
        if mask.shape[3] not in (1, key.shape[2]):
            raise NotUnderstoodError(
                f"the mask covers {mask.shape[3]} keys, but there are {key.shape[2]}"
            )
    return Arguments(
        query=query, key=key, mask=mask,
        causal=bool(given.get("is_causal")) and mask is None,
        scale=_scale(query, given.get("scale")),
    )  # fmt: skip


def read_flex(given: Mapping[str, Any]) -> Arguments:
    """Read a call of flex attention; nothing is copied."""
    query, key = (_plain(given.get(name), name, 4, heads=1) for name in ("query", "key"))
    block, score = given["block_mask"], given.get("score_mod")
    counts = next(part for part in block if isinstance(part, Tensor))  # [sequences, heads, ...]
    return Arguments(
        query=query, key=key, mask=None, causal=False, scale=_scale(query, given.get("scale")),
        rule=FlexRule(
            key.shape[2], query.device, block[-1],
            heads=counts.shape[1],
            score=None if getattr(score, "__name__", "") == "_identity" else score,
        ),
    )  # fmt: skip


def read_flash(given: Mapping[str, Any]) -> Arguments:
    """Read a call of flash attention; nothing is copied."""
    for name in _NOT_REBUILT:
        if given.get(name) is not None:
            raise NotUnderstoodError(f"fused attention was given {name}")
    ends, (left, right) = _ends(given), _window(given)
    query, key = (
        _sequences_first(_first(given, *names), what, packed=ends is not None)
        for names, what in ((("q", "query"), "queries"), (("k", "key"), "keys"))
    )
    return Arguments(
        query=query, key=key, mask=None, causal=False,
        scale=_scale(query, _first(given, "softmax_scale", "scale")),
        softcap=given.get("softcap") or None,
        rule=PlaceRule(
            key.shape[2], query.device, left=left, right=right,
            offset=key.shape[2] - query.shape[2], ends=ends,
        ),
    )  # fmt: skip


def _ends(given: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the ends of packed queries and of packed keys; None if they are not packed."""
    queries, keys = (
        _first(given, f"cu_seqlens_{side}", f"cu_seq_{side}", f"cum_seq_{side}") for side in "qk"
    )
    if queries is None:
        return None
    return queries.detach(), (queries if keys is None else keys).detach()


def _window(given: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return how many keys to the left and right of its place a query sees; None for all."""
    sides = [given.get(f"window_size_{side}") for side in ("left", "right")]
    window = given.get("window_size") or sides
    left, right = (None if side is None or side < 0 else side for side in window)
    return left, 0 if given.get("causal") or given.get("is_causal") else right


def _sequences_first(values: Any, what: str, *, packed: bool) -> Tensor:
    """View queries or keys of flash attention as [sequences, heads, places, width]."""
    values = _plain(values, what, 3 if packed else 4, heads=1 if packed else 2)
    return (values[None] if packed else values).transpose(1, 2)


def read_output(route: str, given: Mapping[str, Any], result: Any) -> tuple[Tensor, Tensor] | None:
    """Read values and output of a call, [sequences, heads, places, width]; None with dropout."""
    if _first(given, "dropout_p", "dropout", "p_dropout"):
        return None
    output = result if isinstance(result, Tensor) else result[0]
    value = given["value"] if "value" in given else given["v"]
    value, output = (local_shard(x).detach() for x in (value, output))
    if route == "flash":
        packed = value.ndim == 3
        value, output = ((x[None] if packed else x).transpose(1, 2) for x in (value, output))
    return value, output


_TRACED = ("FakeTensor", "FunctionalTensor")  # tensors of a compiler's tracing


def _first(given: Mapping[str, Any], *names: str) -> Any:
    """Return the first of several names' arguments that was given, or None."""
    return next((given[name] for name in names if given.get(name) is not None), None)


def _scale(query: Tensor, given: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if given is None else given


def _plain(values: Any, what: str, dimensions: int, *, heads: int) -> Tensor:
    """Return a tensor, or this rank's shard of it, detached from the graph."""
    if not isinstance(values, Tensor) or values.is_nested or values.ndim != dimensions:
        raise NotUnderstoodError(f"the {what} are not a plain {dimensions}-dimensional tensor")
    if sharded_dims(values) - {heads}:
        raise NotUnderstoodError(ON_SEVERAL_RANKS)
    values = local_shard(values).detach()
    if type(values).__name__ in _TRACED:
        raise NotUnderstoodError(f"the {what} are a {type(values).__name__}")
    return values
