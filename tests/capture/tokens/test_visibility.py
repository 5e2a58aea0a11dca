"""One rule for hidden keys, whichever way attention is seen."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from watched import blocks_of, look

from geomon.capture.tokens.visibility import hidden_in_scores, hidden_keys

LENGTH, WIDTH = 12, 32
LOWER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
DISTANCE = (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).abs().float()
LOWEST = [-100.0, -10_000.0, -65504.0, -1e9, torch.finfo(torch.float32).min, -torch.inf]


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("length", [12, 3000])
def test_biases_that_fall_with_the_distance_hide_nothing(heads, length):
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    distance = torch.arange(length).float()
    added = (-slopes[:, None] * distance)[None, :, None]
    assert not hidden_keys(added).any()


def test_rows_that_are_masked_as_a_whole_and_masks_of_one_head():
    assert hidden_keys(torch.full((1, 4, 2, 5), -1e4)).all()
    added = torch.zeros(1, 4, 2, 5)
    added[0, 1, 0, 3] = -torch.inf
    assert hidden_keys(added).nonzero().tolist() == [[0, 1, 0, 3]]
    added[0, 1, 0, 3] = -32_000.0
    assert hidden_keys(added).nonzero().tolist() == [[0, 1, 0, 3]]
    added[0, 1, 0, 3] = -28_000.0  # in one head alone: sharpness
    assert not hidden_keys(added).any()


@pytest.mark.parametrize(
    ("added", "hidden"),
    [
        ([0, -51], [False, True]),
        ([0, -49], [False, False]),
        ([0, -49, -71], [False, False, True]),
        ([0, -49, -68], [False, False, False]),  # it falls smoothly
        ([-4_900, -4_930], [False, False]),
        ([-5_100, -5_100], [True, True]),
        ([0, torch.nan], [False, True]),
    ],
)
def test_a_key_is_hidden_that_is_far_below_the_others_and_apart_from_them(added, hidden):
    assert hidden_keys(torch.tensor(added).float()[None, None, None])[0, 0, 0].tolist() == hidden


@pytest.mark.parametrize(("heads", "hidden"), [(1, False), (2, True)])
def test_without_products_one_head_hides_only_what_no_score_reaches(heads, hidden):
    scores = torch.tensor([0.0, 0.0, -60.0]).expand(1, heads, 1, 3)
    assert hidden_in_scores(scores).any() == hidden
    assert hidden_in_scores(1000 * scores).any()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    heads=st.sampled_from([1, 3]),
    lowest=st.sampled_from(LOWEST),
    sharpness=st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
    scale=st.sampled_from([1.0, 0.125]),
    slope=st.sampled_from([0.0, 1.0]),
    filled=st.booleans(),
)
def test_products_tell_hidden_keys_from_sharp_heads(
    seed, heads, lowest, sharpness, scale, slope, filled
):
    generator = torch.Generator().manual_seed(seed)
    products = (1 + sharpness) * torch.randn(2, heads, LENGTH, LENGTH, generator=generator)
    scores = products * scale - slope * DISTANCE
    if filled:
        lowest = min(lowest, -10_000.0)  # less is no mask for such scores
        scores = scores.masked_fill(~LOWER, lowest)
    else:
        scores = scores + torch.where(LOWER, 0.0, lowest)
    hidden = hidden_in_scores(scores, scores - scale * products)
    masked = ~LOWER.expand_as(hidden)
    # A key that is not far below the others has weight, whatever was added to it.
    far = scores < scores.masked_fill(masked, -torch.inf).amax(dim=-1, keepdim=True) - 16
    far = far.all(dim=1, keepdim=True) | (scores < -5_000)
    assert not (hidden & ~masked).any()
    assert torch.equal(hidden | ~far, masked | ~far)


# -- the same model by every route -----------------------------------------------------------------


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


ROUTES = pytest.mark.parametrize("route", [fused, by_hand, in_place, with_the_mask])


def visible_by(route, mask, heads, sharpness=1.0):
    model = blocks_of(lambda q, k, v: route(q, k, v, mask), WIDTH, heads=heads)
    with torch.no_grad():
        for block in model:
            block.attention.q_proj.weight *= sharpness
    seen = look(model, torch.randn(2, LENGTH, WIDTH))
    assert route is fused or seen.routes("") == {"softmax"}
    return [
        layer.captured["visible"].expand(2, heads, LENGTH, LENGTH)
        for layer in seen.snapshot().layers[1:]
    ]


ALIBI = -DISTANCE * 2.0 ** -torch.arange(1, 5)[:, None, None]


@ROUTES
@pytest.mark.parametrize("sharpness", [1.0, 1000.0], ids=["", "collapsed"])
@pytest.mark.parametrize(
    ("heads", "bias"),
    [(4, torch.zeros(1)), (1, torch.zeros(1)), (4, ALIBI), (1, -8 * DISTANCE)],
    ids=["", "one head", "ALiBi", "a steep bias of one head"],
)
@pytest.mark.parametrize("lowest", [-10_000.0, -torch.inf])
def test_every_route_sees_the_same_keys(lowest, heads, bias, sharpness, route):
    for visible in visible_by(route, bias + torch.where(LOWER, 0.0, lowest), heads, sharpness):
        assert torch.equal(visible, LOWER.expand_as(visible))


@ROUTES
@pytest.mark.parametrize("heads", [1, 4])
def test_every_route_sees_masks_of_moderate_size_and_no_mask_in_sharp_heads(heads, route):
    for visible in visible_by(route, torch.where(LOWER, 0.0, -100.0), heads):
        assert torch.equal(visible, LOWER.expand_as(visible))
    nothing = torch.zeros(1, 1, LENGTH, LENGTH)
    for visible in visible_by(route, nothing, heads, sharpness=3000.0):
        assert visible.all()


@pytest.mark.parametrize("shape", [(2, 3, 4, 1), (2, 3, 1, 1), (2, 3, 0, 5), (1, 1, 1, 2)])
def test_few_keys_and_queries(shape):
    """A feature map that is one place by the last stage: there is nothing to compare."""
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert not hidden_in_scores(scores, 0 * scores).any()
    assert not hidden_in_scores(scores).any()
