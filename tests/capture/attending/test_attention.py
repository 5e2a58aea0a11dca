"""Read what is added to scores, and refuse calls that cannot be rebuilt."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from support.hardware import ShortProducts
from support.watched import HEADS, blocks_of, look

LENGTH = 6
SINKS = torch.arange(float(HEADS))[:, None, None]
GENERATOR = torch.Generator().manual_seed(0)
OTHERS = torch.randn(2, HEADS, LENGTH, 1, generator=GENERATOR)
BIAS = torch.rand(HEADS, LENGTH, LENGTH, generator=GENERATOR)


def first_layer(attend):
    model = blocks_of(attend)
    layer = look(model, torch.randn(2, LENGTH, 32)).snapshot().layers[1]
    return layer, model[0].attention


@pytest.mark.parametrize("kind", ["a sink", "another number in each row", "no scale"])
def test_a_key_that_is_joined_to_scores_is_a_sink_if_it_is_one_number_of_a_head(kind):
    def joining(q, k, v):
        scores = q @ k.mT * 0.25
        scores = 3 * torch.tanh(scores / 3) if kind == "no scale" else scores
        joined = SINKS.expand(len(q), HEADS, LENGTH, 1)
        joined = OTHERS if kind.startswith("another") else joined
        moved = torch.cat([scores, joined], -1)
        moved = moved - moved.max(-1, keepdim=True).values
        return moved.softmax(-1)[..., :-1] @ v

    views = first_layer(joining)[0].captured
    assert ("sink" in views and views["sink"] is not None) == (kind == "a sink")
    if kind == "a sink":
        torch.testing.assert_close(views["sink"], SINKS.flatten())
        assert views["scale"] == pytest.approx(0.25)
        assert views["bias"] is None
    else:
        assert views["scores"].shape == (2, HEADS, LENGTH, LENGTH + 1)


def by_hand(q, k, v):
    return ((q.double() @ k.double().mT / 4).float() + BIAS).softmax(-1) @ v.float()


def thrice(score, b, h, i, j):
    return 3 * score


def by_flex(q, k, v):
    torch.compiler.reset()
    return flex.flex_attention(q.float(), k.float(), v.float(), score_mod=thrice)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("rounded", "attend"),
    [
        (ShortProducts, by_hand),  # what a training may have set, which rounds its own products
        (lambda: torch.autocast("cpu"), by_hand),
        (lambda: torch.autocast("cpu"), by_flex),
    ],
)
def test_biases_of_scores_are_found_whatever_rounds_the_training_s_products(rounded, attend):
    with rounded():
        layer, own = first_layer(attend)
    query, key = own.query.double(), own.key.double()
    expected = BIAS if attend is by_hand else 2 * query @ key.mT / 8**0.5
    found = layer.captured["bias"].double()
    torch.testing.assert_close(found, expected.double().expand_as(found), rtol=1e-5, atol=1e-5)
