"""Trainable weights that do not move while others do are an alert; nothing else is."""

import pytest
import torch
from models import PlainDecoder, batch
from torch import nn

from geomon import Monitor, every

STEPS = 121


class Small(nn.Module):
    """Weights of a few numbers, of none, and one that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.few = nn.Parameter(torch.ones(5))
        self.none = nn.Parameter(torch.ones(0, 3))
        self.turned = nn.Parameter(torch.ones(40, 30).T)


def decoder(**held):
    torch.manual_seed(0)
    return PlainDecoder(width=16, layers=3, heads=2, **held)


def moving(*still, when=lambda step: True):
    """Move all weights a little at each step, but not those whose names begin so."""

    def move(model, step):
        if when(step):
            for name, weight in model.named_parameters():
                if not name.startswith(still):
                    weight.data += 1e-3 * torch.randn_like(weight)

    return move


def alternating(model, step):
    """Train two parts in turns of 20 steps."""
    moving("blocks" if step // 20 % 2 else "head")(model, step)


def gains_in_bfloat16(model, step):
    """Steps of 1e-3 are lost beside a gain of 1."""
    moving("blocks.1.ln")(model, step)
    for module in (model.blocks[1].ln_1, model.blocks[1].ln_2):
        module.weight.data += 1e-3


def last_rows(model, step):
    moving("tokens", "places")(model, step)
    model.tokens.weight.data[-1] += 1e-3  # the others' tokens never come


# How weights move, and the first alert: its step, layers and the names in it.
COURSES = {
    "all": (moving(), None),
    "none": (moving(when=lambda step: False), None),
    "none of a block": (moving("blocks.1."), (40, (2,), "6 trainable weights did not move in 40")),
    "one matrix in all blocks": (
        moving("blocks.0.c_attn", "blocks.1.c_attn", "blocks.2.c_attn"),
        (40, (1, 2, 3), "blocks.0.c_attn.weight, blocks.1.c_attn.weight, blocks.2.c_attn.weight"),
    ),
    "outside the blocks": (moving("head"), (40, (), "1 trainable weight did not move in 40 steps")),
    "gains that rounding keeps": (gains_in_bfloat16, (40, (2,), "blocks.1.ln_1.weight")),
    "rows of an embedding": (last_rows, None),
    "biases": (moving("blocks.1.c_attn.bias"), None),
    "in turns": (alternating, None),
    "from a step on": (
        lambda model, step: moving("blocks.1." if step >= 40 else "no")(model, step),
        (80, (2,), "6 trainable weights did not move in 40 steps"),
    ),
    "after a warm-up of 30 steps": (moving(when=lambda step: step >= 30), None),
}


def alerts_of(move, model=None, tmp_path=None, **options):
    model, told = decoder() if model is None else model, []
    if move is gains_in_bfloat16:
        model.bfloat16()
    given = {"schedule": every(20), "checks": None, "budget": None, "metrics": ["variance"]}
    with Monitor(model, directory=tmp_path, on_alert=told.append, **given | options) as monitor:
        for step in range(STEPS):
            with torch.no_grad(), monitor(step):
                model(batch(4, 8))
            move(model, step)
    return told


@pytest.mark.parametrize("name", COURSES)
def test_weights_that_stand_still_beside_others_are_an_alert_once(name):
    move, expected = COURSES[name]
    found = [(alert.step, alert.layers, alert.words()) for alert in alerts_of(move)]
    if expected is None:
        assert found == []
    else:
        ((step, layers, words),) = found
        assert (step, layers) == expected[:2]
        assert expected[2] in words


def test_frozen_weights_need_not_move_unless_they_did_train():
    model = decoder()
    model.blocks[1].requires_grad_(False)
    assert alerts_of(moving("blocks.1."), model) == []

    def frozen_later(model, step):
        model.blocks[1].requires_grad_(step < 40)
        moving("blocks.1." if step >= 40 else "no")(model, step)

    assert [(alert.step, alert.layers) for alert in alerts_of(frozen_later)] == [(80, (2,))]


def test_weights_of_any_size_and_layout_are_compared():
    (alert,) = alerts_of(moving("more"), decoder(more=Small()))
    assert "more.scalar, more.few, more.turned; look" in alert.words()


def test_a_probe_is_a_look_too():
    (alert,) = alerts_of(moving("blocks.1."), probe=batch(4, 8))
    assert (alert.step, alert.layers) == (40, (2,))


def test_what_moves_again_and_stands_still_again_is_said_again():
    def twice(model, step):
        moving("blocks.1." if step < 40 or step >= 60 else "no")(model, step)

    assert [alert.step for alert in alerts_of(twice)] == [40, 100]
