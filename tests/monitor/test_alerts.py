"""Alerts are lines of their own, recorded, printed and shown; functions are called."""

import itertools
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from geomon import Memory, Monitor, read, select
from geomon.analysis import Phase, find_phase
from support.models import PlainDecoder, batch
from support.scenarios import Scenario, check

# Steps, dimensions and least ranks of a training: it expands, peaks and is compressed.
COURSE = [
    *((2**n, dimension, 20.0) for n, dimension in enumerate([2.0, 2.0, 2.1, 3, 5, 7, 7.5, 7.5])),
    (256, 6.5, 1.09), (512, 5.5, 1.08), (1024, 5.0, 1.06),
]  # fmt: skip
PHASES = ["level", "expanding", "compressing"]
COLLAPSED = ["rank collapse (layer 0): effective", "rank collapse (layer 0 and 3 more): effective"]


def follow(course, directory=None, probed=None, **options):
    """Run a training whose dimensions and ranks follow a course; it may be probed, too.

    A metric is called nine times at each layer: of all sequences, and without each eighth of them.
    """
    now: dict[str, Any] = {}

    def move_to(step, dimension, rank):
        now.update(step=step, dimension=dimension, rank=rank)
        now.update(of_dimension=itertools.count(), of_rank=itertools.count())

    def twonn(hidden):
        call = next(now["of_dimension"]) % 9
        return now["dimension"] + (0.02 * (-1) ** call if call else 0.0)

    def effective_rank(hidden):
        return now["rank"] if next(now["of_rank"]) // 9 < now["step"] // 256 else 20.0

    model, inputs = PlainDecoder(width=8, layers=4, heads=2), batch(8, 2)
    given = {"alerts": ["rank_collapse"], "tokens": 16, "splits": 1, "checks": None, "budget": None}
    given |= {"metrics": {"twonn": twonn, "effective_rank": effective_rank}, "directory": directory}
    with Monitor(model, schedule=lambda step: True, **given | options) as monitor:
        for step, dimension, rank in course:
            move_to(step, dimension, rank)
            with monitor(step):
                model(inputs)
            if probed is not None:
                move_to(step, probed, 20.0)
                monitor.probe(step, inputs)


def names(phases):
    return [phase.name for phase in phases]


def test_the_phase_is_given_when_it_changes_and_alerts_as_they_are_seen(caplog):
    phases, alerts = [], []
    unknown = [(step, math.nan, 20.0) for step in (3, 96, 300, 700)]  # change nothing
    follow(sorted([*COURSE, *unknown]), on_phase=phases.append, on_alert=alerts.append)
    assert all(isinstance(phase, Phase) for phase in phases)
    assert names(phases) == PHASES
    assert (phases[-1].peak.step, phases[-1].peak.value) == (64, 7.5)
    found = [(alert.name, alert.step) for alert in alerts]
    assert found == [("rank_collapse", 256), ("rank_collapse", 1024)]
    said = [message for message in caplog.messages if message.startswith("alert at")]
    assert [words in message for words, message in zip(COLLAPSED, said, strict=True)] == [True] * 2


def test_the_highest_dimension_so_far_is_given_at_its_step(tmp_path):
    """Also next to another source, and when a run is taken up again."""
    for cut in (0, 3, 8):
        peaks = []
        for part in (COURSE[:cut], COURSE[cut:]):
            follow(part, tmp_path / str(cut), on_peak=peaks.append)
        highest = [
            (step, value)
            for n, (step, value, _) in enumerate(COURSE)
            if value > max((before for _, before, _ in COURSE[:n]), default=0)
        ]
        assert [(phase.last.step, phase.last.value) for phase in peaks] == highest


def test_two_sources_are_two_curves():
    """Inputs that are probed besides are other tokens: a change between the two is no phase."""
    phases = []
    follow(COURSE, probed=3.0, on_phase=phases.append)
    assert names(phases) == ["level", *PHASES]


def test_a_run_that_is_taken_up_again_goes_on_where_it_was(tmp_path):
    for cut in (0, 2, 5, 8, 9):
        phases, alerts = [], []
        for part in (COURSE[:cut], COURSE[cut:]):
            called = {"on_phase": phases.append, "on_alert": alerts.append}
            follow(part, tmp_path / str(cut), **called)
            assert len(phases) == len(set(names(phases)))  # nothing is called for what is past
        assert names(phases) == PHASES
        assert [alert.step for alert in alerts] == [256, 1024]
        assert [alert.step for alert in read(tmp_path / str(cut)).alerts] == [256, 1024]


def test_a_run_that_goes_back_to_its_first_step_begins_its_phases_anew():
    phases = []
    follow([*COURSE[:3], *COURSE[:3]], on_phase=phases.append)
    assert names(phases) == ["level", "level"]


@pytest.mark.parametrize(("hook", "calls"), [("on_alert", 2), ("on_phase", 3)])
def test_a_function_that_raises_is_one_warning_and_the_run_goes_on(caplog, hook, calls):
    called = []

    def fail(argument):
        called.append(argument)
        raise RuntimeError(f"attempt {len(called)}")

    follow(COURSE, **{hook: fail})
    assert len(called) == calls
    (said,) = [message for message in caplog.messages if hook in message]
    assert said == (
        f"{hook} failed and will be called again the next time; the training goes on: "
        "RuntimeError: attempt 1"
    )


def spoil(watched):
    """Make the state of one token not finite."""
    with torch.no_grad():
        watched.model.tokens.weight[7] = torch.nan


class Told(Memory):
    """A sink that says in which order it was told of readings and alerts."""

    def __init__(self):
        super().__init__()
        self.told = []

    def write(self, reading):
        self.told.append(("reading", reading.step))

    def alert(self, alert):
        self.told.append(("alert", alert.step))


FINITE = {"metrics": select("effective_rank"), "budget": None}


@pytest.mark.parametrize("background", [False, True])
def test_an_alert_is_recorded_printed_and_shown_before_the_function_is_called(
    tmp_path, caplog, background
):
    calls, told = [], Told()

    def on_alert(alert):
        calls.append((alert, read(tmp_path), threading.current_thread(), [*told.told]))

    options = FINITE | {"on_alert": on_alert, "sinks": [told], "background": background}
    said = ["hidden states", "alert at step 2: not finite", "look at the loss"]
    events = [0, 1, spoil, 2, 3, 4, 5]
    watched = check(Scenario(events, range(6), options, said), tmp_path, caplog)
    ((alert, recorded, thread, before),) = calls
    assert (alert.name, alert.step) == ("not_finite", 2)
    (raised,) = recorded.alerts
    assert (raised.step, raised.source, raised.note) == (2, "inline", alert.note())
    assert raised.time >= recorded[2].time
    assert before[-2:] == [("reading", 2), ("alert", 2)]
    assert [note for reading in recorded for note in reading.notes if note.is_alert] == [
        raised.note
    ]
    assert thread is threading.current_thread()
    assert watched.alerts == [(2, "not_finite")]
    # A run that goes on raises no alert again that its record holds.
    again = Scenario(
        [spoil, 6, 7], [6, 7], FINITE, ["hidden states"], {"alerts": []}, read=range(8)
    )
    watched = check(again, tmp_path, caplog)
    assert (watched.alerts, len(watched.record.alerts)) == ([], 1)


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "alerts.md"
    given: dict[str, Any] = {"model": PlainDecoder()}
    exec(page.read_text().partition("```python\n")[2].partition("```")[0], given)
    given["save"](find_phase([0, 8, 16], [2.0, 7.4, 5.2], [0.1] * 3))
    assert (tmp_path / "peak.pt").is_file()
    given["turn"](find_phase([0, 1], [2.0, 1.0], [5.0, 5.0]))
    assert capsys.readouterr().out == "unclear\n"
    follow(COURSE[:9], on_alert=(alerts := []).append)
    (alert,) = alerts
    given["keep"](replace(alert, inputs=((), {"input_ids": [3]})))
    assert f"{alert.words()}\n" == capsys.readouterr().out
    assert torch.load(tmp_path / "batch.pt") == ((), {"input_ids": [3]})
    given["monitor"].close()


NAN = float("nan")
LOSSES = {
    "numbers": ([1.0, NAN, 1.0], "loss", [1]),
    "tensors": ([torch.tensor(1.0), torch.tensor(NAN)], "loss", [1]),
    "infinite": ([1.0, -math.inf], "loss", [1]),
    "under a name": ([1.0, NAN], "train/Loss_ce", [1]),
    "said once until it is finite": ([1.0, NAN, NAN, *[1.0] * 12, NAN], "loss", [1, 15]),
    "finite now and then": ([1.0, NAN, 0.0, NAN, 0.0, 0.0, NAN], "loss", [1]),
    "never finite": ([NAN, NAN], "loss", []),
    "unknown": ([1.0, None, 1.0], "loss", []),
    "of a validation, where there was none": ([1.0, NAN], "eval/loss", []),
    "not a number": ([1.0, torch.zeros(2), "NaN"], "loss", []),
    "a gradient norm, infinite where a scaler looks for its scale": ([1.0, NAN], "grad_norm", []),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_finite_is_an_alert_at_its_own_step(name, tmp_path):
    losses, tag, expected = LOSSES[name]
    model, inputs, told = PlainDecoder(), batch(), []
    with Monitor(
        model,
        schedule=lambda step: step == 0,
        directory=tmp_path,
        on_alert=told.append,
        budget=None,
    ) as monitor:
        for step, loss in enumerate(losses):
            with monitor(step):
                model(inputs)
            monitor.log(step, **{tag: loss})
    recorded = read(tmp_path).alerts
    assert [alert.step for alert in told] == [alert.step for alert in recorded] == expected
    assert all(f"loss not finite: {tag} was" in alert.words() for alert in recorded)


def test_no_alert_comes_of_a_loss_if_none_is_wanted(tmp_path):
    model, told = PlainDecoder(), []
    with Monitor(model, directory=tmp_path, alerts=(), on_alert=told.append) as monitor:
        for step, loss in enumerate((1.0, NAN)):
            with monitor(step):
                model(batch())
            monitor.log(step, loss=loss)
    assert told == []
