import pytest
import torch
from torch import nn

from geomon.capture.anatomy import find_sizes
from geomon.capture.anatomy.projections import find_projections


def holder(heads=None, **children):
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    if heads:
        module.num_heads = heads
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
        ({"qkv_proj": nn.Linear(32, 64)}, (4, 2, 8)),
        ({"query_key_value": nn.Linear(32, 48)}, (4, 1, 8)),
    ],
)
def test_sizes_follow_from_heads_and_widths(children, sizes):
    module = holder(4, **children)
    assert find_sizes(find_projections(module), [module]) == sizes
    module.num_heads = None
    assert find_sizes(find_projections(module), [module]).heads is None


class Packed(nn.Module):
    """A quantised projection: its weight is a list of bytes that says nothing of its widths."""

    def __init__(self, taken, made):
        super().__init__()
        self.in_features, self.out_features = taken, made
        self.weight = nn.Parameter(torch.zeros(taken * made // 2, 1), requires_grad=False)


def test_widths_are_what_a_quantised_projection_says_of_itself():
    module = holder(4, q_proj=Packed(32, 64), k_proj=Packed(32, 16))
    assert find_sizes(find_projections(module), [module]) == (4, 1, 16)


def test_widths_of_a_weight_that_fsdp1_has_flattened():
    """Each rank holds a part of it without a shape, or nothing."""

    class Flat(nn.Module):
        nf, nx = 96, 32

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(0))

    module = holder(4, c_attn=Flat())
    assert find_sizes(find_projections(module), [module]) == (4, 4, 8)


def test_widths_without_names_are_those_of_the_weight():
    """Of transformers' Conv1D the weight is transposed."""

    class Plain(nn.Module):
        def __init__(self, *shape):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(shape))

    class Transposed(Plain):
        nf = 96

    module = holder(4, q=Plain(64, 32), k=Plain(32, 32))
    assert find_sizes(find_projections(module), [module]) == (4, 2, 16)
    module = holder(4, c_attn=Transposed(32, 96))
    assert find_sizes(find_projections(module), [module]) == (4, 4, 8)


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
