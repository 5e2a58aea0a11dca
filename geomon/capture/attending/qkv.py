"""QKV: queries and keys, head by head, in the outputs of projections.

One output may hold queries, keys and values in several layouts of the same width. A layout is never
taken from a name: every one that fits the width is compared with the queries and keys, or the
scores, that the model attended with.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from geomon.capture.anatomy.projections import Sizes, fused_key_heads
from geomon.capture.anatomy.weights import present_weight

# A layout agrees when its norms, or its scores, follow the attended ones to within this share. The
# rounding of bfloat16 stays below it; a wrong layout, whose norms vary by about
# 1/sqrt(2 head width) on their own, stays above it.
_AGREES = 0.05
_TELLS_APART = 3.0  # ratio by which the best layout has to be better than every other
_FEWEST_ROWS = 8

# Correlations of the right layout of queries that were normalised (with weights) after projecting,
# and of every other.
_LIKE = 0.8
_UNLIKE = 0.5


class UndecidedError(ValueError):
    """The layout of a projection cannot be decided; the message says why."""


class Evidence(NamedTuple):
    """Evidence by which layouts are distinguished: some rows as the model attended with them.

    Attributes:
        query: Norms of the queries as attended (rotation keeps norms), [rows, heads], or None.
        key: Norms of the keys as attended, [rows, key heads], or None.
        diagonal: Score of each row with itself, which rotation does not change, [rows, heads]; NaN
            where it is masked. Used where queries and keys are not seen.
        places: Position of each row in its sequence, and number of keys that it sees: a bias on the
            scores may be a linear function of either (padding counts in the position alone),
            [rows, 2].
        rows: Queries as attended, [rows, heads, head width], or None.
        key_rows: Keys as attended, [rows, key heads, head width], or None.
    """

    query: Tensor | None
    key: Tensor | None
    diagonal: Tensor | None
    places: Tensor
    rows: Tensor | None = None
    key_rows: Tensor | None = None


def split_separate(
    query: Tensor,
    key: Tensor,
    sizes: Sizes,
    *,
    halves: bool = False,
    sample: Tensor | None = None,
    evidence: Evidence | None = None,
) -> tuple[Tensor, Tensor]:
    """Split the outputs of two projections into heads.

    Args:
        query: Output of the projection to queries, [rows, heads x head width]; twice as wide where
            each query has a gate.
        key: Output of the projection to keys, [rows, key heads x head width].
        sizes: Heads of the attention; their number has to be known.
        halves: Whether `key` is [keys | values].
        sample: Output of the projection to queries at the rows of `evidence`, [rows of evidence,
            width].
        evidence: Rows as the model attended with them; they decide where a gate stands.

    Returns:
        Queries, [rows, heads, head width], and keys, [rows, key heads, head width].

    Raises:
        UndecidedError: The number of heads is not known, the widths do not fit it, or it cannot be
            decided where the gate stands.
    """
    heads, _, width = sizes
    if halves:
        key = key.chunk(2, dim=-1)[0]
    if heads is None:
        raise UndecidedError("the number of heads is not known")
    width = width or query.shape[-1] // heads
    if query.shape[-1] == 2 * heads * width and key.shape[-1] % width == 0:
        gated = _gated_layout(sample, evidence, heads, width)
        return gated(query.unflatten(-1, (-1, width))), key.unflatten(-1, (-1, width))
    if query.shape[-1] != heads * width or key.shape[-1] % width:
        raise UndecidedError(
            f"projections {query.shape[-1]} and {key.shape[-1]} wide do not make {heads} heads of "
            f"width {width} (a gate beside the queries?)"
        )
    return query.unflatten(-1, (heads, width)), key.unflatten(-1, (-1, width))


def split_latent(
    outputs: Sequence[Tensor],
    samples: Sequence[Tensor],
    evidence: Evidence,
    sizes: Sizes,
    latent: int | None,
) -> tuple[Tensor, Tensor]:
    """Split the outputs of the projections of latent attention into heads.

    A key is what its head makes of the latent, and behind it a part that all heads have in common.

    Args:
        outputs: Outputs of the projections to queries, to the keys and values of each head, and to
            the latent and the common part, [rows, width] each.
        samples: The same at the rows of `evidence`.
        evidence: Rows as the model attended with them.
        sizes: Heads of the attention; their number has to be known.
        latent: Width of the latent.

    Returns:
        Queries and keys, [rows, heads, head width] each.

    Raises:
        UndecidedError: The widths do not fit one another, or no layout, or more than one, agrees
            with what was attended.
    """
    heads, _, width = sizes
    query, key, shared = outputs
    if heads is None or latent is None or query.shape[-1] % heads or key.shape[-1] % heads:
        raise UndecidedError("the number of heads or the width of the latent is not known")
    width = width or query.shape[-1] // heads
    common = shared.shape[-1] - latent
    own = width - common
    if query.shape[-1] != heads * width or not 0 < own <= key.shape[-1] // heads or common < 0:
        raise UndecidedError(
            f"projections {query.shape[-1]}, {key.shape[-1]} and {shared.shape[-1]} wide do not "
            f"make {heads} heads of width {width} from a latent of width {latent}"
        )
    if len(samples[0]) < _FEWEST_ROWS or evidence.query is None or evidence.key is None:
        raise UndecidedError("nothing was seen as attended that could verify the latent keys")

    def keys_by(layout: tuple[bool, bool], key: Tensor, shared: Tensor) -> Tensor:
        own_first, latent_first = layout
        parts = key.unflatten(-1, (heads, -1))
        parts = parts[..., :own] if own_first else parts[..., -own:]
        rest = shared[:, latent:] if latent_first else shared[:, :common]
        return torch.cat([parts, rest[:, None].expand(-1, heads, -1)], dim=-1)

    asked = samples[0].unflatten(-1, (heads, width))
    layouts = [(True, True), (True, False), (False, True), (False, False)]
    attended = evidence.key
    errors = {layout: _spread(keys_by(layout, *samples[1:]), attended) for layout in layouts}
    best, second, *_ = sorted(layouts, key=errors.__getitem__)
    clear = errors[second] > _TELLS_APART * errors[best]
    if not clear or not errors[best] < _AGREES or not _spread(asked, evidence.query) < _AGREES:
        raise UndecidedError("the latent keys do not agree with what was attended in one way")
    return query.unflatten(-1, (heads, width)), keys_by(best, key, shared)


# Where queries stand among [query | gate] of each head, or [all queries | all gates].
_GATED: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda parts: parts[:, ::2],
    lambda parts: parts[:, 1::2],
    lambda parts: parts[:, : parts.shape[1] // 2],
    lambda parts: parts[:, parts.shape[1] // 2 :],
)


def _gated_layout(
    sample: Tensor | None, evidence: Evidence | None, heads: int, width: int
) -> Callable[[Tensor], Tensor]:
    """Decide which half of the output of a projection are queries.

    Norms decide as they do for fused projections. Where queries are normalised after projecting,
    the distribution of a row's squares over what a rotation mixes has to follow the attended one.
    """
    if sample is None or evidence is None or evidence.rows is None or len(sample) < _FEWEST_ROWS:
        raise UndecidedError("nothing was seen as attended that could distinguish query and gate")
    parts = sample.unflatten(-1, (-1, width))
    norms = evidence.rows.norm(dim=-1)
    errors = {layout: _spread(layout(parts), norms) for layout in _GATED}
    best, second, *_ = sorted(errors, key=errors.__getitem__)
    if errors[best] < _AGREES and errors[second] > _TELLS_APART * errors[best]:
        return best
    likeness = {layout: _likeness(layout(parts), evidence.rows) for layout in _GATED}
    best, second, *_ = sorted(likeness, key=likeness.__getitem__, reverse=True)
    if likeness[best] < _LIKE or likeness[second] > _UNLIKE:
        raise UndecidedError("queries and gates are in one projection, and it is not clear where")
    return best


def _likeness(rows: Tensor, attended: Tensor) -> float:
    """Correlate over rows how the squares of a row are distributed, before and after a rotation.

    A rotation by position keeps the squares of each pair of dimensions that it mixes. Pairs are
    neighbours, or dimensions of two halves, of the whole width or of its first part.
    """
    width = rows.shape[-1]
    best = 0.0
    if rows.shape != attended.shape:
        return best
    for turned in (width, width // 2, width // 4):
        half = turned // 2
        if not half:
            continue
        first = torch.arange(half, dtype=torch.int64, device="cpu")
        for pairs in ((first, first + half), (2 * first, 2 * first + 1)):
            one, other = (_shares(x.double(), *pairs, turned) for x in (rows, attended))
            likeness = (one * other).mean() / (one.square().mean() * other.square().mean()).sqrt()
            best = max(best, float(likeness.nan_to_num()))
    return best


def _shares(rows: Tensor, some: Tensor, others: Tensor, turned: int) -> Tensor:
    """Compute the share of each pair of dimensions in the squares of a row, less its mean."""
    squares = rows.square()
    pairs = torch.cat([squares[..., some] + squares[..., others], squares[..., turned:]], dim=-1)
    shares = pairs / pairs.sum(dim=-1, keepdim=True)
    return shares - shares.mean(dim=0)


class Multihead(NamedTuple):
    """Weights and biases with which `nn.MultiheadAttention` projects to queries and keys."""

    heads: int
    query: tuple[Tensor, Tensor | None]
    key: tuple[Tensor, Tensor | None]


@torch.no_grad()
def copy_multihead_weights(module: Any) -> Multihead | None:
    """Copy the weights of an `nn.MultiheadAttention`, which an optimizer may change in between.

    Args:
        module: The attention, which projects inside a function and has no module for it.

    Returns:
        The weights, or None where they are sharded: gathering them would be a collective.
    """
    if any(hasattr(parameter, "to_local") for parameter in module.parameters(recurse=False)):
        return None
    fused, bias = (present_weight(module, f"in_proj_{name}") for name in ("weight", "bias"))
    apart = (present_weight(module, f"{name}_proj_weight") for name in ("q", "k"))
    query, key = apart if fused is None else fused.chunk(3)[:2]
    if query is None or key is None:
        return None
    biases = (None, None) if bias is None else bias.chunk(3)[:2]
    pairs = [
        (weight.detach().clone(), None if bias is None else bias.detach().clone())
        for weight, bias in zip((query, key), biases, strict=True)
    ]
    return Multihead(module.num_heads, *pairs)


def project_multihead(weights: Multihead, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Project rows as `nn.MultiheadAttention` does.

    Args:
        weights: Weights of the attention at the time of its call.
        query: Rows of its argument `query`, [rows, width].
        key: Rows of its argument `key`, [rows, width].

    Returns:
        Queries and keys, [rows, heads, head width] each.
    """
    made = (
        F.linear(rows.to(weight.device), weight.float(), None if bias is None else bias.float())
        for rows, (weight, bias) in ((query, weights.query), (key, weights.key))
    )
    projected_query, projected_key = (rows.unflatten(-1, (weights.heads, -1)) for rows in made)
    return projected_query, projected_key


def _contiguous(rows: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor]:
    """Split [q | k | v]: GPT-2, Phi-3, MPT, ModernBERT, timm, nanoGPT."""
    parts = rows.unflatten(-1, (heads + 2 * key_heads, -1))
    return parts[:, :heads], parts[:, heads : heads + key_heads]


def _grouped(rows: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor]:
    """Split [its queries | k | v] of each key head: GPT-NeoX, BLOOM, Falcon, InternLM 2."""
    parts = rows.unflatten(-1, (key_heads, heads // key_heads + 2, -1))
    return parts[:, :, :-2].flatten(1, 2), parts[:, :, -2]


def _quartered(rows: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor]:
    """Split [q | v | k] of each quarter of the heads: CodeGen."""
    parts = rows.unflatten(-1, (4, 3, heads // 4, -1))
    return parts[:, :, 0].flatten(1, 2), parts[:, :, 2].flatten(1, 2)


Layout = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def _layouts(heads: int, key_heads: int) -> dict[str, Layout]:
    """List the layouts that differ from one another for these numbers of heads."""
    found: dict[str, Layout] = {"q | k | v": _contiguous}
    if key_heads > 1:
        found["by key head"] = _grouped
    if key_heads == heads and heads % 4 == 0:
        found["in quarters"] = _quartered
    return found


def split_fused(
    output: Tensor, sample: Tensor | None, evidence: Evidence | None, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """Split the output of one projection to queries, keys and values into heads.

    Args:
        output: Output of the projection, [rows, width].
        sample: Output of the projection at the rows of `evidence`, [rows of evidence, width].
        evidence: Rows as the model attended with them.
        sizes: Heads of the attention; their number has to be known.

    Returns:
        Queries, [rows, heads, head width], and keys, [rows, key heads, head width].

    Raises:
        UndecidedError: The heads are not known or do not fit the width; no layout agrees with what
            was attended, or more than one does.
    """
    width = output.shape[-1]
    heads, _, head_width = sizes
    key_heads = None if not heads or not head_width else fused_key_heads(width, heads, head_width)
    if heads is None or key_heads is None:
        raise UndecidedError(
            f"{width} numbers for each token cannot be shared out among {heads or 'unknown'} heads "
            f"of width {head_width or 'unknown'}"
        )
    layouts = _layouts(heads, key_heads)
    if sample is None or evidence is None or len(sample) < _FEWEST_ROWS:
        if len(layouts) > 1:
            raise UndecidedError("nothing was seen as attended that could distinguish its layouts")
        return _contiguous(output, heads, key_heads)
    errors = {
        name: _disagreement(*layout(sample, heads, key_heads), evidence)
        for name, layout in layouts.items()
    }
    best, *others = sorted(errors, key=errors.__getitem__)
    if not errors[best] < _AGREES:
        alike = _alike(layouts, sample, heads, key_heads, evidence)
        if alike is not None:
            return layouts[alike](output, heads, key_heads)
        raise UndecidedError(
            "none of the known layouts agrees with what was attended (queries and keys may be "
            "normalised after projecting)"
        )
    if any(errors[other] < _TELLS_APART * errors[best] for other in others):
        raise UndecidedError("several layouts agree with what was attended")
    return layouts[best](output, heads, key_heads)


def _alike(
    layouts: dict[str, Layout], sample: Tensor, heads: int, key_heads: int, evidence: Evidence
) -> str | None:
    """Find the layout of queries and keys that were normalised after projecting; None for none."""
    if evidence.rows is None or evidence.key_rows is None:
        return None
    likeness = {}
    for name, layout in layouts.items():
        pairs = zip(
            layout(sample, heads, key_heads), (evidence.rows, evidence.key_rows), strict=True
        )
        likeness[name] = min(_likeness(_repeated(own, seen), seen) for own, seen in pairs)
    best, *others = sorted(likeness, key=likeness.__getitem__, reverse=True)
    clear = all(likeness[other] <= _UNLIKE for other in others)
    return best if likeness[best] >= _LIKE and clear else None


def _repeated(own: Tensor, seen: Tensor) -> Tensor:
    """Repeat keys for every query head, where the attended ones were."""
    times, odd = divmod(seen.shape[1], own.shape[1])
    return own if odd else own.repeat_interleave(times, dim=1)


def _disagreement(query: Tensor, key: Tensor, evidence: Evidence) -> float:
    """Measure how far a layout is from what was attended, up to a factor for each head."""
    if evidence.query is not None and evidence.key is not None:
        return max(_spread(query, evidence.query), _spread(key, evidence.key))
    if evidence.diagonal is None:
        return 1.0
    group = query.shape[1] // key.shape[1]
    products = (query.double() * key.double().repeat_interleave(group, dim=1)).sum(dim=-1)
    return _residue(products, evidence.diagonal.double(), evidence.places.double())


def _spread(rows: Tensor, norms: Tensor) -> float:
    """Measure the largest relative deviation, over heads, of attended norms from those of rows."""
    own = rows.double().norm(dim=-1)
    if own.shape[1] != norms.shape[1]:  # keys may have been repeated for every query head
        own = own.repeat_interleave(norms.shape[1] // own.shape[1], dim=1)
    if own.shape != norms.shape or not bool((own > 0).all()):
        return 1.0
    ratio = norms.double() / own
    return float((ratio.std(dim=0) / ratio.mean(dim=0)).max())


def _residue(products: Tensor, scores: Tensor, places: Tensor) -> float:
    """Measure the largest share, over heads, of scores that no linear function explains.

    The functions are linear in the products of queries and keys and in the position.
    """
    worst = 0.0
    seen = scores.isfinite().all(dim=1)
    if int(seen.sum()) < _FEWEST_ROWS:
        return 1.0
    places = places[seen]
    for product, score in zip(products[seen].T, scores[seen].T, strict=True):
        known = torch.cat([product[:, None], places, torch.ones_like(places[:, :1])], dim=1)
        known = known / known.norm(dim=0).clamp(min=1e-30)
        left = (score - known @ (torch.linalg.pinv(known) @ score)).norm()
        whole = (score - score.mean()).norm()
        worst = max(worst, float(left / whole) if whole > 0 else 1.0)
    return worst
