"""One rule for hidden keys, whichever way attention is seen."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from geomon.capture.anatomy import find_anatomy
from geomon.capture.snapshot import CAPTURED
from geomon.capture.tokens.visibility import hidden_in_scores, hidden_keys
from geomon.capture.window import Window

LENGTH, WIDTH = 12, 32
LOWER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
DISTANCE = (torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]).abs().float()
LOWEST = [-100.0, -10_000.0, -65504.0, -1e9, torch.finfo(torch.float32).min, -torch.inf]


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("lowest", LOWEST)
def test_masks_of_any_size_hide(lowest, heads):
    bias = 3 * torch.randn(2, heads, LENGTH, LENGTH)
    added = bias + torch.where(LOWER, 0.0, lowest)
    assert torch.equal(hidden_keys(added), ~LOWER.expand_as(added))


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
    added[0, 1, 0, 3] = -100.0  # in one head alone: sharpness
    assert not hidden_keys(added).any()


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
    hidden = hidden_in_scores(scores, products)
    masked = ~LOWER.expand_as(hidden)
    # A key that is not far below the others has weight, whatever was added to it.
    far = scores < scores.masked_fill(masked, -torch.inf).amax(dim=-1, keepdim=True) - 16
    far = far.all(dim=1, keepdim=True) | (scores < -5_000)
    assert not (hidden & ~masked).any()
    assert torch.equal(hidden | ~far, masked | ~far)


# -- the same model by every route -----------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mask = torch.zeros(1)
        self.by_hand = False
        self.in_place = False
        self.fused = False

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if not self.by_hand:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        elif self.fused:
            q, k = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
            mask = self.mask.expand(len(x), self.num_heads, -1, LENGTH).flatten(0, 1)
            scores = torch.baddbmm(mask, q / math.sqrt(q.shape[-1]), k)
            mixed = scores.softmax(dim=-1).unflatten(0, (len(x), -1)) @ v
        elif self.in_place:
            scores = (q @ k.transpose(-1, -2)).div_(math.sqrt(q.shape[-1]))
            mixed = scores.add_(self.mask).softmax(dim=-1) @ v
        else:
            scores = torch.einsum("bhid,bhjd->bhij", q / math.sqrt(q.shape[-1]), k)
            mixed = nn.functional.softmax(scores + self.mask, dim=-1) @ v
        return mixed.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention = Attention(heads)

    def forward(self, x):
        return x + self.attention(x)


def visible_by_route(heads, mask, sharpness, route):
    torch.manual_seed(0)
    model = nn.Sequential(Block(heads), Block(heads))
    with torch.no_grad():
        for block in model:
            attention = block.attention
            attention.mask = mask
            attention.by_hand, attention.in_place = route != "sdpa", route == "in place"
            attention.fused = route == "with the mask"
            attention.q_proj.weight *= sharpness
        x = torch.randn(2, LENGTH, WIDTH)
        with Window(find_anatomy(model), set(CAPTURED), rows=1000, seed=0) as window:
            model(x)
    layers = window.snapshot().layers[1:]
    assert window.routes("") <= {"sdpa", "softmax"} - ({"sdpa"} if route != "sdpa" else set())
    return [layer.captured["visible"].expand(2, heads, LENGTH, LENGTH) for layer in layers]


ALIBI = -DISTANCE * 2.0 ** -torch.arange(1, 5)[:, None, None]


@pytest.mark.parametrize("route", ["sdpa", "by hand", "in place"])
@pytest.mark.parametrize("sharpness", [1.0, 1000.0], ids=["", "collapsed"])
@pytest.mark.parametrize(
    ("heads", "bias"),
    [(4, torch.zeros(1)), (1, torch.zeros(1)), (4, ALIBI), (1, -8 * DISTANCE)],
    ids=["", "one head", "ALiBi", "a steep bias of one head"],
)
@pytest.mark.parametrize("lowest", [-10_000.0, torch.finfo(torch.float32).min, -torch.inf])
def test_every_route_sees_the_same_keys(lowest, heads, bias, sharpness, route):
    mask = bias + torch.where(LOWER, 0.0, lowest)
    for visible in visible_by_route(heads, mask, sharpness, route):
        assert torch.equal(visible, LOWER.expand_as(visible))


@pytest.mark.parametrize("lowest", LOWEST)
def test_a_product_with_the_mask_in_it_hides_the_same_keys(lowest):
    mask = torch.where(LOWER, 0.0, lowest)
    for visible in visible_by_route(4, mask, 1.0, "with the mask"):
        assert torch.equal(visible, LOWER.expand_as(visible))


@pytest.mark.parametrize("route", ["sdpa", "by hand", "in place"])
@pytest.mark.parametrize("heads", [1, 4])
def test_every_route_sees_masks_of_moderate_size(heads, route):
    mask = torch.where(LOWER, 0.0, -100.0)
    for visible in visible_by_route(heads, mask, 1.0, route):
        assert torch.equal(visible, LOWER.expand_as(visible))


@pytest.mark.parametrize("route", ["sdpa", "by hand", "in place"])
@pytest.mark.parametrize("heads", [1, 4])
def test_heads_that_attend_to_one_key_hide_none(heads, route):
    for visible in visible_by_route(heads, torch.zeros(1, 1, LENGTH, LENGTH), 3000.0, route):
        assert visible.all()


@pytest.mark.parametrize("shape", [(2, 3, 4, 1), (2, 3, 1, 1), (2, 3, 0, 5), (1, 1, 1, 2)])
def test_few_keys_and_queries(shape):
    """A feature map that is one place by the last stage: there is nothing to compare."""
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert not hidden_in_scores(scores, scores).any()
    assert not hidden_in_scores(scores, None).any()
