"""A logged loss that jumps, or falls as no earlier loss predicts, is an alert; nothing else is."""

import math
import random

import pytest
import torch

from geomon import Monitor, read
from support.models import PlainDecoder, batch


def falling(step):
    """The loss of a healthy training: it falls by the logarithm of the step."""
    return 1.5 + 4 / (1 + step / 20) ** 0.5


def changed(change, at=400):
    """A healthy loss until a step, and then its value times a function of the steps since."""
    return lambda step: falling(step) * (change(step - at) if step >= at else 1)


def copied(step):
    """A model of 32 tokens that learns nothing, until it finds out how to copy."""
    return math.log(32) * (1 - 0.5 / (1 + math.exp((450 - step) / 10)))


# A loss by step, its scatter, and the step of the first alert with the mean and its band, or None.
LOSSES = {
    "healthy": (falling, 0.1, None),
    "healthy, with much scatter": (falling, 0.3, None),
    "healthy, with little scatter": (falling, 0.001, None),
    "jumps": (changed(lambda since: 1.5), 0.1, (407, 3.596127, 1.890856, 2.81026)),
    "jumps before step 200": (changed(lambda since: 1.5, at=150), 0.1, None),
    "leaps once": (changed(lambda since: 1 + 999 * (since == 0)), 0.1, None),
    "creeps up": (changed(lambda since: 1.01**since), 0.05, (483, 5.169207, 0.974397, 3.993318)),
    "sees its labels": (
        changed(lambda since: max(0.3, 1 - since / 80)),
        0.1,
        (447, 1.025932, 1.269912, 3.405129),
    ),
    "falls with the learning rate": (changed(lambda since: 0.94), 0.02, None),
    "learns to copy": (copied, 0.05, None),
    "stays within 15 %": (lambda step: 2.0 + 0.299 * (step >= 400), 0.0, None),
    "leaves 15 %": (lambda step: 2.0 + 0.302 * (step >= 400), 0.0, (407, 2.302, 1.7, 2.3)),
    "is negative": (lambda step: -falling(step), 0.1, None),
    "is negative and jumps": (
        lambda step: -changed(lambda since: 0.5)(step),
        0.1,
        (407, -1.138301, -2.842689, -1.90489),
    ),
}


def alerts_of(losses, name="loss", **options):
    model, told = PlainDecoder(width=8, layers=2, heads=2), []
    given = {"schedule": lambda step: step == 0, "checks": None, "budget": None, "directory": None}
    given |= {"metrics": ["variance"], "on_alert": told.append}
    given |= options
    with Monitor(model, **given) as monitor:
        for step, loss in losses:
            with torch.no_grad(), monitor(step):
                if given["schedule"](step):  # what is not read costs only time
                    model(batch(2, 4))
            monitor.log(step, **{name: loss})
    return told


NAN, INF = math.nan, math.inf
# Losses of steps, and the steps of the alerts that one is not finite.
NOT_FINITE = [
    ([NAN, NAN, INF], []),  # it never was
    ([NAN, 1.0, NAN, NAN], [2]), ([1.0, -INF], [1]), ([1.0, 1.0, INF, 1.0, NAN], [2]),
    ([1.0, NAN, *[1.0] * 11, NAN], [1]), ([1.0, NAN, *[1.0] * 12, NAN], [1, 14]),
    ([1.0, NAN, *[1.0] * 6, NAN, *[1.0] * 6, NAN, *[1.0] * 12, NAN], [1, 28]),
    ([1.0, torch.tensor(NAN)], [1]), ([torch.tensor(1.0), torch.tensor([INF])], [1]),
    ([1.0, None, NAN], [2]), ([1.0, torch.tensor(NAN + 1j)], []), ([1.0, "nan"], []),
]  # fmt: skip


@pytest.mark.parametrize(("losses", "steps"), NOT_FINITE, ids=range(len(NOT_FINITE)))
def test_a_loss_that_is_not_finite_is_news_after_twelve_that_were(losses, steps):
    found = alerts_of(enumerate(losses), alerts=["loss_not_finite"])
    assert [(alert.name, alert.step) for alert in found] == [("loss_not_finite", n) for n in steps]


def test_each_loss_of_a_step_is_watched_by_itself():
    model, told = PlainDecoder(width=8, layers=2, heads=2), []
    given = {"schedule": lambda step: step == 0, "checks": None, "budget": None}
    given |= {"metrics": ["variance"], "directory": None, "alerts": ["loss_not_finite"]}
    losses = ("aux_loss", "Loss/train", "val_loss", "test_LOSS", "accuracy")
    with Monitor(model, on_alert=told.append, **given) as monitor:
        for step in range(4):
            monitor.advance(step)
            values = {name: NAN if step > number else 1.0 for number, name in enumerate(losses)}
            monitor.log(step, **values)
    found = [(alert.step, alert.numbers["name"]) for alert in told]
    assert found == [(1, "aux_loss"), (2, "Loss/train")]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_an_alert_if_no_earlier_loss_predicts_it(name):
    loss, scatter, expected = LOSSES[name]
    chance = random.Random(0)
    found = alerts_of((step, chance.gauss(loss(step), scatter)) for step in range(520))
    if expected is None:
        assert [alert.words() for alert in found] == []
        return
    assert found[0].name == "loss_jump"
    numbers = found[0].numbers
    at = (found[0].step, *(numbers[each] for each in ("value", "low", "high")))
    assert at == pytest.approx(expected, rel=1e-5)
    is_above = numbers["value"] > numbers["high"]
    assert ("mask" in found[0].words()) is not is_above


def test_a_loss_that_is_logged_now_and_then_is_watched_too():
    losses = [(step, 3.0 + 0.01 * (step % 20 == 0) + (step >= 400)) for step in range(0, 600, 10)]
    assert [(alert.name, alert.step) for alert in alerts_of(losses)] == [("loss_jump", 410)]


@pytest.mark.parametrize("before", [0, 300], ids=["begins late", "goes back"])
def test_a_run_that_begins_at_a_later_step_is_watched_as_from_the_first(before):
    """One that goes back is compared with the losses to come."""
    losses = [(step, 2.0) for step in range(before)]
    losses += [(step, 5.0 + 3.0 * (step >= 400)) for step in range(100, 420)]
    assert [(alert.name, alert.step) for alert in alerts_of(losses)] == [("loss_jump", 407)]


def test_the_losses_of_a_validation_are_not_watched():
    losses = [(step, 2.0 + (step >= 400)) for step in range(500)]
    assert alerts_of(losses, name="val_loss") == []


def test_a_loss_that_jumps_at_a_resume_is_compared_with_the_losses_before(tmp_path):
    given = {"schedule": lambda step: step % 20 == 0, "directory": tmp_path, "log": ["loss"]}
    given["alerts"] = ["loss_jump"]
    assert alerts_of([(step, 2.4) for step in range(400)], **given) == []
    (alert,) = alerts_of([(step, 5.4) for step in range(400, 440)], **given)
    assert (alert.name, alert.step <= 412) == ("loss_jump", True)
    assert [one.step for one in read(tmp_path).alerts] == [alert.step]
