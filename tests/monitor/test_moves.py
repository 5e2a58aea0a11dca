"""How far weights move from look to look is measured; those that stand still are an alert."""

import math

import pytest
import torch
from torch import nn

from geomon import Monitor, every, read
from support.models import PlainDecoder, batch

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
    """Steps of 1e-3 are lost next to a gain of 1."""
    moving("blocks.1.ln")(model, step)
    for module in (model.blocks[1].ln_1, model.blocks[1].ln_2):
        module.weight.data += 1e-3


def embedding_frozen_later(model, step):
    """The rows of a few tokens move, until none does."""
    moving("tokens", "places")(model, step)
    if step < 40:
        model.tokens.weight.data[:20] += 1e-3


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
    "an embedding from a step on": (
        embedding_frozen_later,
        (80, (0,), "1 trainable weight did not move in 40 steps; tokens"),
    ),
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
                if step % 20 == 0:  # what is not read costs only time
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


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ((3, 7, 0, 0, 0, 0), [(120, "in 80 steps; kinds.weight")]),  # 5 in 20 steps: 20 in 80
        ((3, 6, 0, 0, 0, 0), []),
        ((4, 8, 12, 0, 0, 0), [(120, "in 60 steps; kinds.weight")]),
        ((9, 9, 0, 9, 0, 0), []),  # counted anew
        ((20, 0, 0, 0, 0, 0), [(60, "in 40 steps; kinds.weight")]),
    ],
)
def test_an_embedding_stands_still_once_twenty_numbers_should_have_moved(numbers, found):
    """All its numbers are compared; so many move in each 20 steps."""

    def move(model, step):
        moving("kinds")(model, step)
        if step < STEPS - 1:
            model.kinds.weight.data.view(-1)[: numbers[step // 20]] += 1e-3

    alerts = alerts_of(move, decoder(kinds=nn.Embedding(32, 8)))
    assert [(alert.step, alert.words().split("not move ")[1][:25]) for alert in alerts] == found


def test_weights_of_any_size_and_layout_are_compared():
    (alert,) = alerts_of(moving("more"), decoder(more=Small()))
    assert "more.scalar, more.few, more.turned; look" in alert.words()


def test_a_probe_is_a_look_too():
    (alert,) = alerts_of(moving("blocks.1."), probe=batch(4, 8))
    assert (alert.step, alert.layers) == (40, (2,))


def test_weights_that_move_again_and_stand_still_again_are_another_alert():
    def twice(model, step):
        moving("blocks.1." if step < 40 or step >= 60 else "no")(model, step)

    assert [alert.step for alert in alerts_of(twice)] == [40, 100]


def norm(of):
    return math.sqrt(sum(float(each.detach().double().square().sum()) for each in of))


@pytest.mark.parametrize("offset", [0.0, 100.0])  # squares of both, less their product, fail at 100
def test_the_size_of_an_update_is_that_of_all_weights(tmp_path, offset):
    """From samples, for each step; of embeddings at layer 0, and of vectors and the head."""
    model = PlainDecoder(width=48, layers=3, heads=2)
    matrices = [[w for w in block.parameters() if w.ndim > 1] for block in model.blocks]
    for weight in model.parameters():
        weight.data += offset
    embeddings = [model.tokens.weight, model.places.weight]
    groups = [embeddings, *matrices, [model.head.weight]]
    before, after = ([], [])

    def move(model, step):
        before[:] = before or [[w.clone() for w in group] for group in groups]
        for number, group in enumerate(groups, 1):
            for weight in group:
                weight.data += 1e-4 * number * torch.randn_like(weight)

    given = {"schedule": every(4), "checks": None, "budget": None, "directory": tmp_path}
    with Monitor(model, metrics=["update_size"], **given) as monitor:
        for step in range(5):
            after[:] = [[w.clone() for w in group] for group in groups]
            with torch.no_grad(), monitor(step):
                model(batch(4, 8))
            move(model, step)
    first, second = read(tmp_path)
    assert not first.column("update_size").layers
    column = second.column("update_size")
    found = [*column.layers, column.whole["head"]]
    for value, was, now in zip(found, before, after, strict=True):
        changes = [x - y for x, y in zip(now, was, strict=True)]
        assert value == pytest.approx(norm(changes) / norm(was) / 4, rel=0.1)
    assert column.whole["norms"] == 0
    relative = second.column("update_size", "relative").layers[1:]
    assert relative == pytest.approx([value / column.layers[2] for value in column.layers[1:]])


# Learning rates that are logged at steps 0 to 44, and the rate that updates are compared with:
# the mean since step 41, if rates of 40 steps are known and none is twice as high as another.
RATES = {
    "steady": (lambda step: 0.01, 0.01),
    "as far as it may": (lambda step: 0.02 if step >= 43 else 0.01, 0.015),
    "too far": (lambda step: 0.0201 if step >= 43 else 0.01, math.nan),
    "known for 40 steps": (lambda step: 0.01 if step >= 5 else None, 0.01),
    "known for 39 steps": (lambda step: 0.01 if step >= 6 else None, math.nan),
    "changed long ago": (lambda step: 0.01 if step >= 5 else 1.0, 0.01),
    "not known lately": (lambda step: 0.01 if step < 41 else None, math.nan),
    "zero": (lambda step: 0.0, math.nan),
}


@pytest.mark.parametrize("name", RATES)
def test_sizes_of_updates_are_exact_if_every_number_of_a_weight_moves_alike(name, tmp_path):
    """Then it does not matter which numbers of each weight are compared."""
    logged, rate = RATES[name]
    model = PlainDecoder(width=32, layers=3, heads=2)
    for number, weight in enumerate(model.parameters()):
        weight.data.fill_(0.5 + number / 16)
    blocks = [[w for w in block.parameters() if w.ndim > 1] for block in model.blocks]
    gains = [w for n, w in model.named_parameters() if w.ndim == 1 and not n.endswith("bias")]
    groups = [[model.tokens.weight, model.places.weight], *blocks, [model.head.weight], gains]
    before = [[w.detach().clone() for w in group] for group in groups]
    given = {"schedule": lambda step: step in (0, 41, 45), "checks": None, "budget": None}
    given |= {"metrics": ["update_size", "unmoved"], "directory": tmp_path, "alerts": []}
    with Monitor(model, **given) as monitor:
        for step in range(46):
            if step in (0, 41, 45):
                with torch.no_grad(), monitor(step):
                    model(batch(2, 4))
            if (lr := logged(step)) is not None:
                monitor.log(step, learning_rate=lr)
            for number, group in enumerate(groups, 1):
                for weight in group if step in (41, 44) else ():
                    if weight is not model.blocks[1].c_attn.weight:
                        weight.data += number / 256
    *_, last = read(tmp_path)
    moved = [[now - was for now, was in zip(*each, strict=True)]
             for each in zip(groups, before, strict=True)]  # fmt: skip
    sizes = [norm(m) / norm(was) / 4 for m, was in zip(moved, before, strict=True)]
    column = last.column("update_size")
    assert [*column.layers, *map(column.whole.get, ("head", "norms"))] == pytest.approx(sizes)
    of_blocks = sizes[1:4]
    middle = sorted(of_blocks)[1]
    relative = last.column("update_size", "relative").layers
    assert relative == pytest.approx([math.nan, *(x / middle for x in of_blocks)], nan_ok=True)
    over_rate = [math.nan, *(size / rate for size in of_blocks)] if rate > 0 else []
    assert last.column("update_size", "over_rate").layers == pytest.approx(over_rate, nan_ok=True)
    still = blocks[1][0].numel() / sum(w.numel() for w in blocks[1])
    assert last.column("unmoved").layers == pytest.approx([0, 0, still, 0])
    assert last.column("unmoved", "relative").layers == pytest.approx([0, 0, still, 0])


def test_rates_of_the_last_1024_steps_are_remembered(tmp_path):
    model = decoder()
    given = {"schedule": lambda step: step in (0, 1100), "checks": None, "budget": None}
    given |= {"metrics": ["update_size"], "directory": tmp_path, "alerts": []}
    with Monitor(model, **given) as monitor:
        for step in range(1100):
            if step == 0:
                with torch.no_grad(), monitor(step):
                    model(batch(2, 4))
            monitor.watch_rate(step, 0.01 if step < 1100 - 1024 else 0.015)
            monitor.watch_rate(step + 1, math.nan)  # no rate
            monitor.watch_rate(step + 1, "0.3")
        moving()(model, 0)
        with torch.no_grad(), monitor(1100):
            model(batch(2, 4))
    last = read(tmp_path)[-1]
    sizes, over_rate = (last.column("update_size", part).layers for part in ("", "over_rate"))
    assert over_rate[1:] == pytest.approx([size / 0.015 for size in sizes[1:]])


def drifting(factors, *, rate=lambda step: 1.0, rounds=False, shrinks=1.0):
    """Move blocks by factors of a rate from step 300 on, or round the second one."""

    def move(model, step):
        for number, block in enumerate(model.blocks):
            size = 1e-3 * rate(step) * (factors[number] if step >= 300 else 1)
            for weight in block.parameters():
                weight.data += size * torch.randn_like(weight)
        for each in (model.tokens, model.places, model.head):
            each.weight.data += 1e-3 * rate(step) * torch.randn_like(each.weight)
        if rounds and step >= 300:
            for weight in model.blocks[1].parameters():
                weight.data = weight.data.bfloat16().float()

    move.rate = rate
    return move


# A change at step 300; metric and layers of the first alert, or None.
DRIFTS = {
    "nothing": (drifting([1, 1, 1]), None),
    "one block stands still": (drifting([1, 0, 1]), ("unmoved/relative", {2})),
    "one block moves further": (drifting([1, 1, 3]), ("update_size/over_rate", {3})),
    "one block is rounded": (drifting([1, 1, 1], rounds=True), ("unmoved/relative", {2})),
    "all move less at the same rate": (drifting([0.3] * 3), ("update_size/over_rate", {1, 2, 3})),
    "the rate drops": (drifting([1, 1, 1], rate=lambda step: 0.1 if step >= 300 else 1.0), None),
    "the rate rises": (drifting([1, 1, 1], rate=lambda step: 5.0 if step >= 300 else 1.0), None),
    "the rate warms up": (drifting([1, 1, 1], rate=lambda step: min(1.0, step / 300)), None),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_a_block_that_moves_differently_leaves_its_band(name):
    """Other learning rates do not, because each block is compared with the others."""
    move, expected = DRIFTS[name]
    torch.manual_seed(0)
    model, told = PlainDecoder(width=32, layers=3, heads=2), []
    options = {"metrics": ["update_size", "unmoved"], "alerts": ["left_band"], "budget": None}
    options |= {"directory": None, "log": ["lr"]}
    with Monitor(model, schedule=every(8), checks=None, on_alert=told.append, **options) as monitor:
        for step in range(345):
            if step % 8 == 0:
                with torch.no_grad(), monitor(step):
                    model(batch(2, 4))
            monitor.log(step, lr=move.rate(step))
            move(model, step)
    if expected is None:
        assert [alert.words() for alert in told] == []
        return
    metric, layers = expected
    assert told[0].step <= 328
    assert told[0].numbers["metric"] == metric
    assert set(told[0].layers) <= layers


@pytest.mark.parametrize("has_any", [True, False])
def test_layers_without_trainable_weights_have_no_size(tmp_path, has_any):
    model = decoder()
    model.requires_grad_(has_any)
    model.blocks.requires_grad_(False)
    model.tokens.requires_grad_(False)
    model.places.requires_grad_(False)
    options = {"metrics": ["update_size", "variance"], "budget": None, "directory": tmp_path}
    with Monitor(model, schedule=every(1), checks=None, **options) as monitor:
        for step in range(3):
            with torch.no_grad(), monitor(step):
                model(batch(4, 8))
            moving("blocks", "tokens", "places")(model, step)
    readings = [*read(tmp_path)]
    assert [reading.step for reading in readings] == [0, 1, 2]
    assert all(len(reading.column("variance").layers) == 4 for reading in readings)
    assert "update_size" not in readings[-1].columns


def test_looks_of_every_kind_know_the_moves_since_the_last_one(tmp_path):
    """Checks look as well, so that a reading holds what happened since the last check."""
    model = decoder()
    options = {"metrics": ["update_size", "variance"], "budget": None, "directory": tmp_path}
    with Monitor(model, schedule=every(6), checks=lambda step: step % 6 == 4, **options) as monitor:
        for step in range(7):
            with torch.no_grad(), monitor(step):
                model(batch(4, 8))
            if step < 4:
                moving()(model, step)
    assert read(tmp_path)[-1].column("update_size").layers == [0.0] * 4


def test_a_look_that_fails_leaves_no_moves_of_the_look_before(tmp_path, caplog):
    model = decoder()
    weight = model.blocks[0].c_attn.weight

    def gone():
        raise OSError("gone")

    options = {"metrics": ["update_size", "variance"], "budget": None, "directory": tmp_path}
    with Monitor(model, schedule=every(1), checks=None, **options) as monitor:
        for step in range(5):
            if step == 3:
                weight.to_local = gone  # as if a sharded weight could not be read
            with torch.no_grad(), monitor(step):
                model(batch(4, 8))
            weight.__dict__.pop("to_local", None)
            moving()(model, step)
    sizes = ["update_size" in reading.columns for reading in read(tmp_path)]
    assert sizes == [False, True, True, False, True]
    assert "how far weights move is not measured: OSError: gone" in caplog.text
