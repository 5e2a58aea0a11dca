"""Between readings few values are looked at: alerts come at once, and the training is the same."""

import copy
import itertools

import pytest
import torch
from torch import nn

from geomon import Monitor, every, read
from geomon.monitor.planning.checks import Checks


def model_of():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def train(monitor, model, steps, fault_at=None):
    """Train on noise; at a step the queries and keys of the last layer grow tenfold."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for step in steps:
        if step == fault_at:
            model.layers[1].self_attn.in_proj_weight.data[:32] *= 10
        batch = torch.randn(16, 12, 16, generator=generator)
        with monitor(step):
            loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_fault_between_readings_is_confirmed_at_the_next_step_and_read_at_the_one_after(tmp_path):
    model, seen = model_of(), []
    monitor = Monitor(
        model, directory=tmp_path, schedule=every(1000), checks=4, on_alert=seen.append,
        alerts=["left_band"],
    )  # fmt: skip
    train(monitor, model, range(1000, 1080), fault_at=1058)
    with monitor(1080, force=True):
        model(torch.randn(16, 12, 16))
    monitor.close()
    assert seen[0].step == 1061  # a strange value at the check of step 1,060, and the one after
    assert seen[0].name == "left_band"
    assert {layer for layer, _ in seen[0].heads} == {2}
    (hidden,), named = seen[0].inputs
    assert (hidden.shape, named) == ((16, 12, 16), {})
    noted = {r.step: [note.kind for note in r.notes if note.is_alert] for r in read(tmp_path)}
    assert noted == {1000: [], 1062: ["left_band"], 1080: []}


def test_a_check_changes_nothing_of_the_training(tmp_path):
    watched, alone = model_of(), model_of()
    ends = []
    for model, checks in ((watched, 1), (alone, None)):
        torch.manual_seed(1)
        monitor = Monitor(
            model, directory=None, schedule=every(10_000), checks=checks, metrics=["max_logit"]
        )
        losses = train(monitor, model, range(1000, 1020))
        ends.append((losses, torch.get_rng_state().tolist(), copy.deepcopy(model.state_dict())))
        monitor.close()
    (one, states, weights), (other, other_states, other_weights) = ends
    assert one == other
    assert states == other_states
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.parametrize(
    "options",
    [
        {"checks": None},
        {"alerts": ()},
        {"metrics": ["anisotropy"]},
        {"probe": torch.zeros(16, 12, 16)},
    ],
)
def test_there_are_no_checks_where_nothing_is_to_be_looked_at(options):
    monitor = Monitor(model_of(), **{"directory": None, "checks": 1, "schedule": 10, **options})
    for step in (1, 2):
        monitor.advance(step)
        assert not monitor.is_due(step)


def test_a_step_is_checked_once(tmp_path):
    """Of the batches of an accumulated gradient the first is looked at."""
    model = model_of()
    monitor = Monitor(model, directory=None, schedule=every(1000), checks=1)
    train(monitor, model, [1, 2])
    assert not monitor.is_due(2)
    monitor.advance(3)
    assert monitor.is_due(3)
    assert not monitor.is_due(3, source="probe")  # nor is it a reading


@pytest.mark.parametrize(("can_be_copied", "goes_on"), [(True, True), (False, False)])
def test_a_compiled_model_is_checked_by_its_twin_and_never_runs_eagerly_itself(
    can_be_copied, goes_on
):
    """A twin needs a copy of the inputs; its time counts as that of the check."""
    model = model_of()
    forward = model.forward

    def called(hidden, other):
        model.runs_compiled = torch.compiler.is_compiling()  # the twin is another module
        return forward(hidden)

    model.forward = called
    model.compile(backend="eager")
    monitor = Monitor(model, directory=None, schedule=every(1000), checks=1)
    with monitor(1):
        model(torch.randn(16, 12, 16), None if can_be_copied else (n for n in range(3)))
    assert model.runs_compiled
    monitor.advance(2)
    assert monitor.is_due(2) is goes_on


def test_checks_take_a_hundredth_of_the_time():
    """A check takes 2 s, a step 1 s: after the first one a check every 200 s."""
    now = [0.0]
    checks, made = Checks(None, clock=lambda: now[0]), []
    for step in range(2000):
        if checks.is_due(step):
            made.append(step)
            now[0] += 2.0
            checks.add(step, 2.0)
        now[0] += 1.0
    spaces = {later - one for one, later in itertools.pairwise(made[1:])}
    assert made[0] == 32
    assert spaces <= {198, 199, 200}
    assert 2.0 * len(made) <= 0.011 * now[0]


@pytest.mark.parametrize("value", ["often", 0, -1, 1.5, lambda step: False])
def test_what_is_no_schedule_of_checks_is_said(value):
    with pytest.raises(ValueError, match=r"^checks"):
        Monitor(model_of(), directory=None, checks=value)


def test_a_check_that_was_asked_for_asks_for_no_other():
    """A run in which every value is strange has two checks where it had one."""
    checks = Checks(every(100))
    made = []
    for step in range(1000):
        if checks.is_due(step):
            made.append(step)
            checks.add(step, 0.1, again=True)
    assert made == [step + second for step in range(0, 1000, 100) for second in (0, 1)]
