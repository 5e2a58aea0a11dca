"""Find the modules of an attention that make queries and keys, by the field's names for them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from geomon.capture.weights import has_weight, said, stored_weight

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
# Siblings that project to queries and to keys with values (DeepSeek makes them from a latent).
_JOINT = (
    ("q_attn", "c_attn"),  # cross-attention of GPT-2
    ("q_proj", "kv_proj"),
    ("to_q", "to_kv"),
    ("q", "kv"),
    ("wq", "wkv"),
    ("q_b_proj", "kv_b_proj"),
    ("q_proj", "kv_b_proj"),
    ("wq_b", "wkv_b"),
    ("wq", "wkv_b"),
)
# One projection to queries, keys and values.
_FUSED = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "to_qkv", "att_proj")

# Attributes that give a matrix's output and input widths; `nf` belongs to transformers' Conv1D.
_WIDTHS = (("out_features", "in_features"), ("nf", "nx"), ("num_embeddings", "embedding_dim"))

Kind = Literal["separate", "joint", "fused", "multihead"]
# The part of a name that marks a query projection, and its counterpart in the key projection's
# name: c_q and c_k, attn_query and attn_key, wQ and wK.
_QUERY_PART = re.compile(r"(?<![A-Za-z])(?:query|q)(?![A-Za-z])|(?<=[a-z])Q(?![a-z])")
_KEY_OF = {"query": "key", "q": "k", "Q": "K"}

_PAIRS: tuple[tuple[Kind, tuple[tuple[str, str], ...]], ...] = (
    ("separate", _SEPARATE),
    ("joint", _JOINT),
)


@dataclass(frozen=True)
class Projections:
    """The modules that make queries and keys.

    Attributes:
        kind: "separate" if queries and keys have a module each; "joint" if the second makes keys
            and values; "fused" if one makes queries, keys and values; "multihead" for
            `nn.MultiheadAttention`, which holds weights instead of modules.
        query: The module that makes queries.
        key: The module that makes keys; equal to `query` if one module makes both.
        names: Names of the modules in the attention.
    """

    kind: Kind
    query: nn.Module
    key: nn.Module
    names: tuple[str, ...]


def _named_alike(children: dict[str, nn.Module]) -> Projections | None:
    """Find two matrices with equal input widths whose names differ only in "q" and "k"."""
    for query, module in children.items():
        part = _QUERY_PART.search(query)
        if part is None:
            continue
        key = query[: part.start()] + _KEY_OF[part.group()] + query[part.end() :]
        if key not in children:
            continue
        made, other = find_widths(module), find_widths(children[key])
        if made is not None and other is not None and made[1] == other[1]:
            return Projections("separate", module, children[key], (query, key))
    return None


def find_projections(module: nn.Module) -> Projections | None:
    """Find the query and key projections among the children of a module."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    # A wrapper such as an adapter may forward these attributes, but it changes the weights.
    if _is_multihead(module) and not any(map(_is_multihead, children.values())):
        return Projections("multihead", module, module, ("in_proj_weight",))
    for kind, pairs in _PAIRS:
        for query, key in pairs:
            if query in children and key in children:
                return Projections(kind, children[query], children[key], (query, key))
    named_alike = _named_alike(children)
    if named_alike is not None:
        return named_alike
    for name in _FUSED:
        if name in children and find_widths(children[name]) is not None:
            return Projections("fused", children[name], children[name], (name,))
    return None


def are_heads(attentions: Sequence[Projections | None]) -> bool:
    """Whether the attentions of a list are heads: all outputs together are as wide as one input."""
    known = [each for each in attentions if each is not None and each.kind == "separate"]
    widths = {find_widths(each.query) for each in known}
    if len(known) != len(attentions) or len(known) < 2 or len(widths) > 1:
        return False
    width = widths.pop()
    return width is not None and width[0] * len(known) == width[1]


def _is_multihead(module: nn.Module) -> bool:
    return all(has_weight(module, name) for name in ("in_proj_weight", "in_proj_bias", "num_heads"))


def find_widths(module: nn.Module) -> tuple[int, int] | None:
    """Return (output width, input width) of a matrix, or None if the module is not a matrix.

    A module's own attributes come first, because a weight flattened by FSDP1 has lost its shape.
    """
    for names in _WIDTHS:
        made, taken = (said(module, name) for name in names)
        if isinstance(made, int) and isinstance(taken, int):
            return made, taken
    weight = stored_weight(module)
    if weight is None or weight.ndim != 2:
        return None
    rows, columns = weight.shape
    # Conv1D in older releases of transformers has only `nf`; its weight is transposed.
    return (columns, rows) if said(module, "nf") == columns else (rows, columns)


def projects_in_its_own_way(module: nn.Module) -> bool:
    """Whether a projection is more than product and bias: adapted, quantised, sharded or hooked."""
    if type(module) is not nn.Linear:
        return True
    # DDP keeps shards of weights as plain tensors and joins them for the forward pass.
    is_sharded = hasattr(module.weight, "to_local") or hasattr(module.weight, "_st_info")
    return bool(module._forward_hooks) or is_sharded
