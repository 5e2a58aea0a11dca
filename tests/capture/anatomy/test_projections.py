from types import SimpleNamespace

import pytest
import torch
from torch import nn

from geomon.capture.anatomy import find_sizes
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
        assert found.apart == ((query, key) if kind == "separate" else ())


@pytest.mark.parametrize(
    "name",
    ["c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv", "to_qkv", "att_proj"],
)
def test_one_matrix_may_make_queries_keys_and_values(name):
    matrix = nn.Linear(8, 24)
    found = find_projections(holder(**{name: matrix}))
    assert (found.kind, found.names, found.query, found.key) == ("fused", (name,), matrix, matrix)
    assert found.apart == ()


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
    ("children", "sizes"),
    [
        ({"q_proj": nn.Linear(32, 32), "k_proj": nn.Linear(32, 16)}, (4, 2, 8)),
        ({"q": nn.Linear(32, 64), "k": nn.Linear(32, 64)}, (4, 4, 16)),
        ({"to_q": nn.Linear(32, 32), "to_kv": nn.Linear(32, 64)}, (4, None, 8)),
        ({"qkv": nn.Linear(32, 96)}, (4, 4, 8)),
        ({"qkv": nn.Linear(32, 192)}, (4, 4, 16)),
        ({"qkv_proj": nn.Linear(32, 64)}, (4, 2, 8)),
        ({"query_key_value": nn.Linear(32, 48)}, (4, 1, 8)),
        ({"q": weighted(64, 32), "k": weighted(32, 32)}, (4, 2, 16)),
        ({"c_attn": weighted(32, 96, nf=96)}, (4, 4, 8)),  # of transformers' Conv1D, transposed
        # Quantised: the weight is a list of bytes that says nothing of its widths.
        (
            {
                "q_proj": weighted(1024, 1, in_features=32, out_features=64),
                "k_proj": weighted(256, 1, in_features=32, out_features=16),
            },
            (4, 1, 16),
        ),
        ({"c_attn": weighted(0, nf=96, nx=32)}, (4, 4, 8)),  # flattened by FSDP1, on a rank
        ({"q": nn.Identity(), "k": nn.Identity()}, (4, None, None)),
        ({"q": nn.Linear(32, 30), "k": nn.Linear(32, 30)}, (4, None, None)),
        ({"qkv": nn.Linear(32, 32)}, (4, None, 8)),  # of queries alone
        ({"qkv": nn.Linear(2, 96)}, (4, 4, 8)),
        ({"qkv": nn.Linear(2, 50)}, (4, None, 1)),
    ],
)
def test_sizes_follow_from_heads_and_widths(children, sizes):
    module = holder(4, **children)
    assert find_sizes(find_projections(module), [module]) == sizes
    for unknown in (None, 0):
        module.num_heads = unknown
        assert find_sizes(find_projections(module), [module]).heads is None


@pytest.mark.parametrize(
    ("number", "names"),
    [
        (0, "num_heads num_attention_heads n_heads n_head nhead heads"),
        (1, "num_key_value_heads num_kv_heads n_kv_heads n_head_kv n_kv_head kv_heads"),
        (1, "num_query_groups"),
        (2, "head_dim key_value_proj_dim d_kv attention_head_size head_size d_head dim_head"),
    ],
)
def test_sizes_have_the_names_of_the_field_in_a_module_or_its_config(number, names):
    for name in names.split():
        holder = SimpleNamespace(**{name: 5})
        for known in (holder, SimpleNamespace(config=holder)):
            sizes = find_sizes(None, [SimpleNamespace(), known])
            assert sizes == tuple(5 if place == number else None for place in range(3))


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


def test_a_head_width_that_a_module_says_goes_before_that_of_its_input():
    module = holder(4, qkv=nn.Linear(32, 128))
    module.head_dim = 16
    assert find_sizes(find_projections(module), [module]) == (4, 2, 16)
    single = holder(1, q=nn.Linear(8, 8), k=nn.Linear(8, 8))
    assert find_sizes(find_projections(single), [single]) == (1, 1, 8)


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


@pytest.mark.parametrize(
    ("queries", "keys", "key_heads", "expected"),
    [
        (64, 64, None, (8, 8, 8)),  # two queries and two keys for each of 4 heads
        (64, 32, 2, (8, 4, 8)),  # the same, with grouped keys
        (64, 32, None, (4, 4, 8)),  # a gate beside the queries
        (64, 16, 2, (4, 2, 8)),
        (32, 32, None, (4, 4, 8)),
    ],
)
def test_heads_with_two_queries_and_two_keys_are_two_heads(queries, keys, key_heads, expected):
    module = holder(4, q_proj=nn.Linear(32, queries), k_proj=nn.Linear(32, keys))
    module.head_dim = 8
    if key_heads:
        module.num_kv_heads = key_heads
    assert find_sizes(find_projections(module), [module]) == expected
