"""Between readings few values are looked at: alerts come at once, and the training is the same."""

import copy

import pytest
import torch
from torch import nn

from geomon import Monitor, every, read
from support import measuring


def model_of():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def train(monitor, model, steps, fault_at=None):
    """Train on noise; at a step the queries and keys of the last layer grow tenfold."""
    generator = torch.Generator().manual_seed(0)

    def loss_of(step):
        if step == fault_at:
            model.layers[1].self_attn.in_proj_weight.data[:32] *= 10
        return model(torch.randn(16, 12, 16, generator=generator)).square().mean()

    return measuring.train(model, loss_of, steps, monitor, 1e-3)


def test_a_record_counts_readings_checks_and_the_largest_gap_over_resumes_and_rewinds(tmp_path):
    model = model_of()
    options = {"directory": tmp_path, "schedule": every(10), "checks": 4, "alerts": ["left_band"]}
    for spans in ([range(23)], [range(43, 52)], [range(52, 62), range(55, 71)]):
        monitor = Monitor(model, **options)
        for steps in spans:
            train(monitor, model, steps)
        monitor.close()
    # Every fourth step is checked, but 0, 20 and 60 are read. Step 60 is read again after step 55.
    assert [(x.step, x.count, x.gap, x.checks) for x in read(tmp_path)] == [
        (0, 1, 0, 0), (10, 2, 10, 2), (20, 3, 10, 4), (50, 4, 30, 6), (60, 5, 30, 7), (70, 6, 30, 9)
    ]  # fmt: skip


def test_a_run_that_can_have_few_readings_says_so_once_in_log_and_record(tmp_path, caplog):
    caplog.set_level("INFO", "geomon")
    model = model_of()
    monitor = Monitor(model, directory=tmp_path)
    monitor.expect_end(30)
    train(monitor, model, range(31))
    monitor.close()
    told = [text for text in caplog.messages if "can have only" in text]
    assert len(told) == 1
    assert "readings until step 30, " in told[0]
    noted = [note.words() for reading in read(tmp_path) for note in reading.notes]
    assert [words for words in noted if "can have only" in words] == told
    assert [reading.step for reading in read(tmp_path)][::2] == [0, 30]


@pytest.mark.parametrize(
    ("checks", "background", "at"),
    [
        (4, False, 1061),  # a strange value at the check of step 1,060, and the one after
        (1, True, 1059),
    ],
)
def test_a_fault_between_readings_is_an_alert_at_its_step_and_the_step_after_is_read(
    tmp_path, checks, background, at
):
    model, seen = model_of(), []
    monitor = Monitor(
        model, directory=tmp_path, schedule=every(1000), checks=checks, on_alert=seen.append,
        alerts=["left_band"], background=background,
    )  # fmt: skip
    train(monitor, model, range(1000, 1080), fault_at=1058)
    with monitor(1080, force=True):
        model(torch.randn(16, 12, 16))
    monitor.close()
    assert seen[0].name == "left_band"
    assert {layer for layer, _ in seen[0].heads} == {2}
    record = read(tmp_path)
    assert len(record.alerts) == len(record.raised)
    raised = record.alerts[0]
    assert (raised.step, raised.source, raised.note.kind) == (at, "check", "left_band")
    assert raised.note == seen[0].note()
    if background:  # which step is read then says how busy the machine is
        return
    (hidden,), named = seen[0].inputs
    assert (hidden.shape, named) == ((16, 12, 16), {})
    assert [reading.step for reading in record] == [1000, 1062, 1080]
    noted = {r.step: [note.kind for note in r.notes if note.is_alert] for r in record}
    assert noted == {1000: [], 1062: ["left_band"], 1080: []}  # for sinks of readings alone
    named = {f"max_logit/layer_02/head_{head}" for head in (0, 1)}
    assert named & {course.tag for course in raised.courses}
    for course in raised.courses:  # the reading, and the checks at each fourth step
        assert course.steps == (*range(1000, 1060 + 1, 4), 1061)
        before = course.values[:-2]
        if course.tag in named:
            assert abs(course.values[-1] - before[-1]) > 3 * (max(before) - min(before))


def test_rows_that_are_not_finite_are_an_alert_of_the_check_that_sees_them():
    model, seen = model_of(), []
    monitor = Monitor(model, directory=None, schedule=every(1000), checks=4, on_alert=seen.append)
    for step in range(1000, 1020):
        with monitor(step):
            model(torch.full((16, 12, 16), torch.nan if step == 1016 else 1.0))
    monitor.close()
    assert [(alert.step, alert.name) for alert in seen] == [(1016, "not_finite")]


@pytest.mark.parametrize("background", [False, True])
def test_a_check_changes_nothing_of_the_training(background):
    watched, alone = model_of(), model_of()
    ends = []
    for model, checks in ((watched, 1), (alone, None)):
        torch.manual_seed(1)
        monitor = Monitor(
            model, directory=None, schedule=every(10_000), checks=checks, metrics=["max_logit"],
            background=background,
        )  # fmt: skip
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
def test_there_are_no_checks_if_there_is_nothing_to_look_at(options):
    monitor = Monitor(model_of(), **{"directory": None, "checks": 1, "schedule": 10, **options})
    for step in (1, 2):
        monitor.advance(step)
        assert not monitor.is_due(step)


def test_a_step_is_checked_once(tmp_path):
    """Only the first batch of an accumulated gradient is looked at."""
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
    """A twin needs a copy of the inputs; its time counts as time of the check."""
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
    assert not monitor.is_due(1)  # each step is checked once
    monitor.advance(2)
    assert monitor.is_due(2) is goes_on


@pytest.mark.parametrize("value", ["often", 0, -1, 1.5, lambda step: False])
def test_a_value_that_is_no_schedule_of_checks_is_refused(value):
    with pytest.raises(ValueError, match=r"^checks"):
        Monitor(model_of(), directory=None, checks=value)
