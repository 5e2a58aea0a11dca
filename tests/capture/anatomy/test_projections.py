import pytest
import torch
from torch import nn

from geomon.capture.anatomy.projections import are_heads, find_projections, find_widths


def holder(heads=None, **children):
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    if heads:
        module.num_heads = heads
    return module


def weighted(*shape, **says):
    """A module with a weight, that may say its widths."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape))
    for name, value in says.items():
        setattr(module, name, value)
    return module


def test_projections_are_found_by_the_names_of_the_field():
    linear = nn.Linear(8, 8)
    for names in (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("wq", "wk")):
        found = find_projections(holder(**dict.fromkeys(names, linear)))
        assert (found.kind, found.names) == ("separate", names)
    assert find_projections(holder(q=linear, kv=nn.Linear(8, 16))).kind == "joint"
    assert find_projections(holder(qkv=nn.Linear(8, 24))).kind == "fused"
    assert find_projections(holder(qkv=nn.Conv2d(8, 24, 1))) is None
    assert find_projections(holder(q_proj=linear, v_proj=linear)) is None


SEPARATE = (
    "q_proj k_proj, query key, q_lin k_lin, query_proj key_proj, q k, wq wk, to_q to_k, Wq Wk, "
    "linear_q linear_k, project_q project_k, projection_query projection_key"
)
JOINT = (
    "q_attn c_attn, q_proj kv_proj, to_q to_kv, q kv, wq wkv, q_b_proj kv_b_proj, "
    "q_proj kv_b_proj, wq_b wkv_b, wq wkv_b"
)


@pytest.mark.parametrize(("kind", "pairs"), [("separate", SEPARATE), ("joint", JOINT)])
def test_names_of_the_field_hold_for_modules_that_do_not_say_their_widths(kind, pairs):
    for pair in pairs.split(", "):
        names = tuple(pair.split())
        query, key = nn.Identity(), nn.Identity()
        found = find_projections(holder(**dict(zip(names, (query, key), strict=True))))
        assert (found.kind, found.names, found.query, found.key) == (kind, names, query, key)


@pytest.mark.parametrize(
    "name",
    ["c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "to_qkv", "att_proj"],
)
def test_one_matrix_may_make_queries_keys_and_values(name):
    matrix = nn.Linear(8, 24)
    found = find_projections(holder(**{name: matrix}))
    assert (found.kind, found.names, found.query, found.key) == ("fused", (name,), matrix, matrix)


def test_projections_are_found_by_names_that_differ_in_one_part():
    linear = nn.Linear(8, 8)
    for names in (("c_q", "c_k"), ("attn_query", "attn_key"), ("wQ", "wK"), ("q_w", "k_w")):
        found = find_projections(holder(**dict.fromkeys(names, linear)))
        assert (found.kind, found.names) == ("separate", names)
    norms = {"q_norm": nn.LayerNorm(8), "k_norm": nn.LayerNorm(8)}
    assert find_projections(holder(**norms)) is None
    assert find_projections(holder(qkv=nn.Linear(8, 24), **norms)).kind == "fused"
    other = {"q_b": nn.Linear(4, 8), "k_b": nn.Linear(2, 8)}  # of two latents
    assert find_projections(holder(**other)) is None
    assert find_projections(holder(freq=linear, frek=linear)) is None


@pytest.mark.parametrize(
    ("module", "widths"),
    [
        (nn.Linear(3, 5), (5, 3)),
        (nn.Embedding(5, 3), (5, 3)),
        (weighted(5, 3), (5, 3)),
        (weighted(3, 5, nf=5), (5, 3)),
        (weighted(2, nf=5, nx=3), (5, 3)),
        (weighted(2, num_embeddings=5, embedding_dim=3), (5, 3)),
        (weighted(5, 3, 1), None),
        (weighted(2, out_features=5), None),
        (nn.ReLU(), None),
    ],
)
def test_a_matrix_says_its_widths_or_its_weight_does(module, widths):
    assert find_widths(module) == widths


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([("k", 16), ("k", 16)], True),
        ([("k", 16)] * 3, False),  # wider than their input
        ([("k", 16), ("k", 8)], False),
        ([("k", 16), ("kv", 16)], False),
        ([("k", 16), ("v", 16)], False),  # no attention
        ([("k", 32)], False),
    ],
)
def test_a_list_of_attentions_is_one_where_they_are_together_as_wide_as_their_input(
    members, expected
):
    heads = [holder(q=nn.Linear(32, width), **{k: nn.Linear(32, width)}) for k, width in members]
    assert are_heads([*map(find_projections, heads)]) == expected
