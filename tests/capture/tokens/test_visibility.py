"""One rule for hidden keys, whichever way attention is seen."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from support.watched import blocks_of, look

LENGTH, WIDTH = 12, 32
LOWER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
DISTANCE = (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).abs().float()


def fused(q, k, v, mask):
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_hand(q, k, v, mask):
    scores = torch.einsum("bhid,bhjd->bhij", q / math.sqrt(q.shape[-1]), k)
    return (scores + mask).softmax(dim=-1) @ v


def in_place(q, k, v, mask):
    return (q @ k.mT).div_(math.sqrt(q.shape[-1])).add_(mask).softmax(dim=-1) @ v


def with_the_mask(q, k, v, mask):
    """The mask is added by the operator of the product."""
    sequences, heads = q.shape[:2]
    mask = mask.expand(sequences, heads, LENGTH, LENGTH).flatten(0, 1)
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    scores = torch.baddbmm(mask, q / math.sqrt(q.shape[-1]), k.mT)
    return scores.softmax(dim=-1).unflatten(0, (sequences, heads)) @ v


def of_unknown_products(q, k, v, mask):
    """Sort products before the mask is added, which is not followed."""
    return ((q @ k.mT / math.sqrt(q.shape[-1])).sort(dim=-1).values + mask).softmax(-1) @ v


def visible_by(route, mask, heads=4, sharpness=1.0, length=LENGTH):
    model = blocks_of(lambda q, k, v: route(q, k, v, mask), WIDTH, heads=heads)
    with torch.no_grad():
        for block in model:
            block.attention.q_proj.weight *= sharpness
    seen = look(model, torch.randn(2, length, WIDTH))
    assert route is fused or seen.routes("") == {"softmax"}
    return [
        layer.captured["visible"].expand(2, heads, length, length)
        for layer in seen.snapshot().layers[1:]
    ]


ROUTES = pytest.mark.parametrize("route", [fused, by_hand, in_place, with_the_mask])
ALIBI = -DISTANCE * 2.0 ** -torch.arange(1, 5)[:, None, None]


@ROUTES
@pytest.mark.parametrize("sharpness", [1.0, 1000.0], ids=["", "collapsed"])
@pytest.mark.parametrize(
    ("heads", "bias"),
    [(4, torch.zeros(1)), (1, torch.zeros(1)), (4, ALIBI), (1, -8 * DISTANCE)],
    ids=["", "one head", "ALiBi", "a steep bias of one head"],
)
@pytest.mark.parametrize("lowest", [-10_000.0, torch.finfo(torch.float32).min, -torch.inf])
def test_every_route_sees_the_same_keys(lowest, heads, bias, sharpness, route):
    for visible in visible_by(route, bias + torch.where(LOWER, 0.0, lowest), heads, sharpness):
        assert torch.equal(visible, LOWER.expand_as(visible))


@ROUTES
@pytest.mark.parametrize("heads", [1, 4])
def test_every_route_sees_masks_of_moderate_size_and_no_mask_in_sharp_heads(heads, route):
    for seen in (0.0, 400.0):  # what all scores have in common counts for nothing
        for visible in visible_by(route, torch.where(LOWER, seen, seen - 100.0), heads):
            assert torch.equal(visible, LOWER.expand_as(visible))
    nothing = torch.zeros(1, 1, LENGTH, LENGTH)
    assert all(x.all() for x in visible_by(route, nothing, heads, sharpness=3000.0))


@pytest.mark.parametrize(
    ("heads", "lowest", "hides"), [(1, -60, False), (4, -60, True), (1, -60_000, True)]
)
def test_without_products_one_head_hides_only_what_no_score_reaches(heads, lowest, hides):
    for visible in visible_by(of_unknown_products, torch.where(LOWER, 0.0, lowest), heads):
        assert torch.equal(visible, (LOWER if hides else LOWER | True).expand_as(visible))


# Biases of the scores of the first query, in one of four heads or in all -> hidden keys.
ADDED = [
    ([0, -51], None, [1]),
    ([0, -49], None, []),
    ([0, -49, -71], None, [2]),
    ([0, -49, -68], None, []),  # it falls smoothly
    ([-4_900, -4_930], None, []),
    ([-5_100, -5_100], None, [0, 1]),
    ([0, -torch.inf], 1, [1]),
    ([0, -32_000], 1, [1]),
    ([0, -28_000], 1, []),  # in one head alone: sharpness
    ([0, -1, -10_000], 1, []),
    ([0] * 5, None, []),
]


@pytest.mark.parametrize(("added", "head", "hidden"), ADDED)
def test_a_key_is_hidden_that_is_far_below_the_others_and_apart_from_them(added, head, hidden):
    length = len(added)
    mask = torch.zeros(1, 4, length, length)
    mask[:, slice(None) if head is None else head, 0] = torch.tensor(added).float()
    expected = torch.ones(2, 4, length, length, dtype=torch.bool)
    expected[:, slice(None) if head is None else head, 0, hidden] = False
    for visible in visible_by(fused, mask, length=length):
        assert torch.equal(visible, expected)


@pytest.mark.parametrize("heads", [1, 4])
def test_biases_that_fall_with_the_distance_hide_nothing(heads):
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    bias = -slopes[:, None, None] * torch.arange(400).float()
    bias = bias.expand(1, heads, 400, 400)
    assert all(x.all() for x in visible_by(fused, bias, heads, length=400))


@pytest.mark.parametrize("route", [fused, by_hand, of_unknown_products])
def test_one_key_or_one_query_is_never_hidden(route):
    """A feature map that is one place by the last stage: there is nothing to compare."""
    assert all(x.all() for x in visible_by(route, torch.zeros(1, 1, 1, 1), length=1))


@pytest.mark.parametrize(("lowest", "hides"), [(-30_000.0, False), (-30_002.0, True)])
def test_a_single_head_hides_what_no_bias_reaches(lowest, hides):
    mask = torch.zeros(4, LENGTH, LENGTH)
    mask[1, :, 5] = lowest
    for visible in visible_by(fused, mask):
        expected = torch.ones_like(visible)
        expected[:, 1, :, 5] = not hides
        assert torch.equal(visible, expected)
