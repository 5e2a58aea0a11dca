"""Projections of queries and keys: where they are, and how their outputs are laid out.

The field has few names for these modules, and one output may hold queries, keys and values in
several layouts of the same width. A layout is never taken from a name: every one that fits the
width is compared with the queries and keys, or the scores, that the model attended with.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Siblings that project to queries and to keys.
_SEPARATE = (
    ("q_proj", "k_proj"),  # Llama, OPT, Gemma, Whisper, ViT
    ("query", "key"),  # BERT, RoBERTa, ALBERT
    ("q_lin", "k_lin"),  # DistilBERT
    ("query_proj", "key_proj"),  # DeBERTa
    ("q", "k"),  # T5
    ("wq", "wk"),  # Llama's own code, torchtitan
    ("to_q", "to_k"),  # x-transformers, diffusers
    ("linear_q", "linear_k"),  # Conformer
    ("Wq", "Wk"),  # CTRL
    ("project_q", "project_k"),  # CPM-Ant
    ("projection_query", "projection_key"),  # CvT
)
# Siblings that project to queries and to [keys | values].
_HALVES = (
    ("q_attn", "c_attn"),  # cross-attention of GPT-2
    ("q_proj", "kv_proj"),
    ("to_q", "to_kv"),
    ("q", "kv"),
    ("wq", "wkv"),
)
# One projection to queries, keys and values.
_FUSED = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "to_qkv", "att_proj")

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KEY_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "n_kv_head", "kv_heads",
    "num_query_groups",
)  # fmt: skip
_HEAD_WIDTH = (
    "head_dim", "key_value_proj_dim", "d_kv", "attention_head_size", "head_size", "d_head",
    "dim_head",
)  # fmt: skip

# A split agrees when its norms, or its scores, follow the attended ones to within this share; the
# rounding of bfloat16 stays below it, and a wrong split, whose norms vary by about
# 1/sqrt(2 head width) on their own, above it.
_AGREES = 0.05
_TELLS_APART = 3.0  # how much better than every other layout it has to be
_FEWEST_ROWS = 8

Kind = Literal["separate", "halves", "fused", "multihead"]
_PAIRS: tuple[tuple[Kind, tuple[tuple[str, str], ...]], ...] = (
    ("separate", _SEPARATE),
    ("halves", _HALVES),
)


class UndecidedError(ValueError):
    """How a projection is laid out cannot be told; the message says why."""


@dataclass(frozen=True)
class Projections:
    """The modules that make queries and keys.

    Attributes:
        kind: "separate": one module each; "halves": the second makes [keys | values]; "fused": one
            makes queries, keys and values; "multihead": `nn.MultiheadAttention`, which holds
            weights and no module.
        query: The module that makes queries.
        key: The module that makes keys; the same where there is one.
        names: What the modules are called in the attention.
    """

    kind: Kind
    query: nn.Module = field(repr=False)
    key: nn.Module = field(repr=False)
    names: tuple[str, ...]


class Sizes(NamedTuple):
    """Heads, key heads and head width; None where not known."""

    heads: int | None
    key_heads: int | None
    head_width: int | None


class Evidence(NamedTuple):
    """What is known of some rows as attended, to tell layouts apart.

    Attributes:
        query: Norms of the queries as attended (rotation keeps them), [rows, heads], or None.
        key: Norms of the keys, [rows, key heads], or None.
        diagonal: Scores of each row with itself, which rotation leaves alone, [rows, heads], NaN
            where they are masked; used where queries and keys are not seen.
        places: Where each row stands, of which a bias may be a linear function: its position in
            its sequence, and the number of keys that it sees (padding counts for one only),
            [rows, 2].
    """

    query: Tensor | None
    key: Tensor | None
    diagonal: Tensor | None
    places: Tensor


def find_projections(module: nn.Module) -> Projections | None:
    """The projections that are children of the module, or None."""
    if all(hasattr(module, name) for name in ("in_proj_weight", "in_proj_bias", "num_heads")):
        return Projections("multihead", module, module, ("in_proj_weight",))
    children = {name: child for name, child in module._modules.items() if child is not None}
    for kind, pairs in _PAIRS:
        for query, key in pairs:
            if query in children and key in children:
                return Projections(kind, children[query], children[key], (query, key))
    for name in _FUSED:
        if name in children and _made_and_taken(children[name]) is not None:
            return Projections("fused", children[name], children[name], (name,))
    return None


def find_sizes(projections: Projections | None, holders: Iterable[Any]) -> Sizes:
    """Heads and their width, as the attributes of the holders and of their `config` name them.

    Args:
        projections: Their widths give what no attribute does.
        holders: The attention module, and what knows better or besides; the first counts.
    """
    known = [*(given := list(holders)), *(getattr(holder, "config", None) for holder in given)]
    heads, key_heads, width = (
        _first_of(names, known) for names in (_HEADS, _KEY_HEADS, _HEAD_WIDTH)
    )
    if projections is None or heads is None:
        return Sizes(heads, key_heads, width)
    if projections.kind == "multihead":
        return Sizes(heads, heads, width)
    query = _made_and_taken(projections.query)
    if query is None:
        return Sizes(heads, key_heads, width)
    made, taken = query
    if projections.kind == "fused":
        width = width or taken // heads
        key_heads = _key_heads(made, heads, width)
    else:
        width = made // heads if made % heads == 0 else width
        key = _made_and_taken(projections.key)
        if key is not None and width:
            key_heads = key[0] // width // (2 if projections.kind == "halves" else 1)
    return Sizes(heads, key_heads, width)


def _first_of(names: Iterable[str], holders: list[Any]) -> int | None:
    for holder, name in itertools.product(holders, names):
        value = getattr(holder, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _made_and_taken(module: nn.Module) -> tuple[int, int] | None:
    """Widths of a projection's output and input; None for what is no matrix."""
    made, taken = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if isinstance(made, int) and isinstance(taken, int):
        return made, taken
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    if getattr(module, "nf", None) == weight.shape[1]:  # transformers' Conv1D is transposed
        return weight.shape[1], weight.shape[0]
    return weight.shape[0], weight.shape[1]


def _key_heads(made: int, heads: int, width: int) -> int | None:
    """Key heads of an output that holds `heads` queries and as many keys as values."""
    rest, odd = divmod(made - heads * width, 2 * width)
    return rest if not odd and rest > 0 and heads % rest == 0 else None


# -- splits ------------------------------------------------------------------------------------


def separate(
    query: Tensor, key: Tensor, sizes: Sizes, *, halves: bool = False
) -> tuple[Tensor, Tensor]:
    """What two projections gave, head by head.

    Args:
        query: [rows, heads x head width].
        key: [rows, key heads x head width].
        sizes: What is known of the heads; their number has to be.
        halves: Whether `key` is [keys | values].

    Returns:
        [rows, heads, head width] and [rows, key heads, head width].

    Raises:
        UndecidedError: The widths do not fit the heads.
    """
    heads, _, width = sizes
    if halves:
        key = key.chunk(2, dim=-1)[0]
    if heads is None:
        raise UndecidedError("the number of heads is not known")
    width = width or query.shape[-1] // heads
    if query.shape[-1] != heads * width or key.shape[-1] % width:
        raise UndecidedError(
            f"projections {query.shape[-1]} and {key.shape[-1]} wide do not make {heads} heads of "
            f"width {width} (a gate beside the queries?)"
        )
    return query.unflatten(-1, (heads, width)), key.unflatten(-1, (-1, width))


class Multihead(NamedTuple):
    """The weights with which `nn.MultiheadAttention` projects its query and key arguments."""

    heads: int
    query: tuple[Tensor, Tensor | None]
    key: tuple[Tensor, Tensor | None]


@torch.no_grad()
def multihead_weights(module: Any) -> Multihead | None:
    """A copy of the weights: an optimizer may change them before they are used.

    Args:
        module: The attention, which projects inside a function and has no module for it.

    Returns:
        None where they are sharded: to put them together would be a collective.
    """
    if any(hasattr(parameter, "to_local") for parameter in module.parameters(recurse=False)):
        return None
    if module.in_proj_weight is not None:
        query, key, _ = module.in_proj_weight.chunk(3)
    else:
        query, key = module.q_proj_weight, module.k_proj_weight
    biases = (None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[:2]
    pairs = [
        (weight.detach().clone(), None if bias is None else bias.detach().clone())
        for weight, bias in zip((query, key), biases, strict=True)
    ]
    return Multihead(module.num_heads, *pairs)


def multihead(weights: Multihead, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """What `nn.MultiheadAttention` projects rows of its query and key arguments to.

    Args:
        weights: As they were when it ran.
        query: [rows, width].
        key: [rows, width].

    Returns:
        [rows, heads, head width] each.
    """
    made = (
        F.linear(rows.to(weight.device), weight.float(), None if bias is None else bias.float())
        for rows, (weight, bias) in ((query, weights.query), (key, weights.key))
    )
    projected_query, projected_key = (rows.unflatten(-1, (weights.heads, -1)) for rows in made)
    return projected_query, projected_key


def _contiguous(rows: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor]:
    """[q | k | v]: GPT-2, Phi-3, MPT, ModernBERT, timm, nanoGPT."""
    parts = rows.unflatten(-1, (heads + 2 * key_heads, -1))
    return parts[:, :heads], parts[:, heads : heads + key_heads]


def _grouped(rows: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor]:
    """[its queries | k | v] of each key head in turn: GPT-NeoX, BLOOM, Falcon, InternLM 2."""
    parts = rows.unflatten(-1, (key_heads, heads // key_heads + 2, -1))
    return parts[:, :, :-2].flatten(1, 2), parts[:, :, -2]


def _quartered(rows: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor]:
    """[q | v | k] of each quarter of the heads in turn: CodeGen."""
    parts = rows.unflatten(-1, (4, 3, heads // 4, -1))
    return parts[:, :, 0].flatten(1, 2), parts[:, :, 2].flatten(1, 2)


Layout = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def _layouts(heads: int, key_heads: int) -> dict[str, Layout]:
    """The layouts that differ from one another for these numbers of heads."""
    found: dict[str, Layout] = {"q | k | v": _contiguous}
    if key_heads > 1:
        found["by key head"] = _grouped
    if key_heads == heads and heads % 4 == 0:
        found["in quarters"] = _quartered
    return found


def fused(
    output: Tensor, sample: Tensor | None, evidence: Evidence | None, sizes: Sizes
) -> tuple[Tensor, Tensor]:
    """Queries and keys in the output of one projection to queries, keys and values.

    Args:
        output: What it gave, [rows, width].
        sample: What it gave at the rows of `evidence`, [rows, width].
        evidence: The same rows as attended.
        sizes: What is known of the heads; the number of heads has to be.

    Returns:
        [rows, heads, head width] and [rows, key heads, head width].

    Raises:
        UndecidedError: No layout agrees with what was attended, or more than one does.
    """
    width = output.shape[-1]
    heads, _, head_width = sizes
    key_heads = None if not heads or not head_width else _key_heads(width, heads, head_width)
    if heads is None or key_heads is None:
        raise UndecidedError(
            f"{width} numbers for each token cannot be shared out among {heads or 'unknown'} heads "
            f"of width {head_width or 'unknown'}"
        )
    layouts = _layouts(heads, key_heads)
    if sample is None or evidence is None or len(sample) < _FEWEST_ROWS:
        if len(layouts) > 1:
            raise UndecidedError("nothing was seen as attended that could tell its layouts apart")
        return _contiguous(output, heads, key_heads)
    errors = {
        name: _disagreement(*layout(sample, heads, key_heads), evidence)
        for name, layout in layouts.items()
    }
    best, *others = sorted(errors, key=errors.__getitem__)
    if not errors[best] < _AGREES:
        raise UndecidedError(
            "none of the known layouts agrees with what was attended (queries and keys may be "
            "normalised after projecting)"
        )
    if any(errors[other] < _TELLS_APART * errors[best] for other in others):
        raise UndecidedError("several layouts agree with what was attended")
    return layouts[best](output, heads, key_heads)


def _disagreement(query: Tensor, key: Tensor, evidence: Evidence) -> float:
    """How far a split is from what was attended, but for a constant factor for each head."""
    if evidence.query is not None and evidence.key is not None:
        return max(_spread(query, evidence.query), _spread(key, evidence.key))
    if evidence.diagonal is None:
        return 1.0
    group = query.shape[1] // key.shape[1]
    products = (query.double() * key.double().repeat_interleave(group, dim=1)).sum(dim=-1)
    return _residue(products, evidence.diagonal.double(), evidence.places.double())


def _spread(rows: Tensor, norms: Tensor) -> float:
    """Largest relative deviation, over heads, of attended norms from those of the split rows."""
    own = rows.double().norm(dim=-1)
    if own.shape[1] != norms.shape[1]:  # keys may have been repeated for every query head
        own = own.repeat_interleave(norms.shape[1] // own.shape[1], dim=1)
    if own.shape != norms.shape or not bool((own > 0).all()):
        return 1.0
    ratio = norms.double() / own
    return float((ratio.std(dim=0) / ratio.mean(dim=0)).max())


def _residue(products: Tensor, scores: Tensor, places: Tensor) -> float:
    """Largest share, over heads, of scores that products and a bias linear in position leave."""
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
