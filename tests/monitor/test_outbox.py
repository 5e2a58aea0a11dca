"""What a run shows: alerts as lines of their own, and functions of the user's that are called."""

import logging
import math
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from models import PlainDecoder, batch
from tagged import reading_of

from geomon import Memory, Monitor, every, read, select
from geomon.analysis import Phase
from geomon.analysis.alerts import Alert
from geomon.analysis.bands import Bands
from geomon.distributed import RankGroup
from geomon.monitor.options import check_options
from geomon.monitor.outbox import Outbox
from geomon.monitor.planner import Account, Planner
from geomon.monitor.warnings import Warnings


def monitor(model, directory=None, **options):
    defaults = {"tokens": 64, "metrics": select("effective_rank"), "schedule": every(1)}
    return Monitor(model, directory=directory, **(defaults | options))


def spoil(model):
    """Make the state of one token not finite."""
    with torch.no_grad():
        next(p for p in model.parameters() if p.shape[0] == 50)[7] = torch.nan


def run(seen, model, steps, change=spoil, at=2):
    for step in range(steps):
        if step == at:
            change(model)
        with seen(step):
            model(batch(seed=step))


class Told(Memory):
    """A sink that says in which order it was told of readings and alerts."""

    def __init__(self):
        super().__init__()
        self.told = []

    def write(self, reading):
        self.told.append(("reading", reading.step))

    def alert(self, alert):
        self.told.append(("alert", alert.step))


def test_an_alert_is_recorded_printed_and_shown_before_the_function_is_called(tmp_path, caplog):
    calls = []

    def on_alert(alert):
        calls.append((alert, read(tmp_path), threading.current_thread(), [*told.told]))

    model, told = PlainDecoder(), Told()
    seen = monitor(model, tmp_path, on_alert=on_alert, background=True, sinks=[told])
    with caplog.at_level(logging.WARNING, "geomon"):
        run(seen, model, 6)
        seen.close()
    ((alert, recorded, thread, before),) = calls
    assert isinstance(alert, Alert)
    assert (alert.name, alert.step) == ("not_finite", 2)
    (raised,) = recorded.alerts
    assert (raised.step, raised.source, raised.note) == (2, "inline", alert.note())
    assert raised.time >= recorded[2].time
    assert before[-2:] == [("reading", 2), ("alert", 2)]
    assert [note for reading in recorded for note in reading.notes if note.is_alert] == [
        raised.note
    ]
    assert thread is threading.current_thread()
    assert sum("alert at step 2: not finite" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("names", [(), ("rank_collapse", "logit_growth")])
def test_without_alerts_that_need_bands_none_are_made(tmp_path, monkeypatch, names):
    monkeypatch.setattr(Bands, "add", None)
    model = PlainDecoder()
    seen = monitor(model, tmp_path, alerts=names, strict=True)
    run(seen, model, 4, change=lambda model: None)
    seen.close()
    assert len(read(tmp_path)) == 4
    assert not read(tmp_path).alerts


@pytest.mark.parametrize("hook", ["on_alert", "on_phase"])
def test_a_function_that_raises_is_one_warning_and_the_run_goes_on(caplog, hook):
    calls = []

    def fail(argument):
        calls.append(argument)
        raise RuntimeError(f"attempt {len(calls)}")

    with caplog.at_level(logging.WARNING, "geomon"):
        follow(outbox_of(**{hook: fail}), COURSE)
    assert len(calls) == {"on_alert": 2, "on_phase": 3}[hook]
    (record,) = [r for r in caplog.records if hook in r.message]
    assert record.message == (
        f"{hook} failed and will be called again the next time; the training goes on: "
        "RuntimeError: attempt 1"
    )


class Jobs:
    """An executor whose jobs are finished."""

    def __init__(self):
        self.jobs = deque()

    def first_finished(self):
        return self.jobs[0] if self.jobs else None

    def take_first(self):
        self.jobs.popleft()


class Job:
    inputs, arrays, failed = None, {}, False

    def __init__(self, reading):
        self.step, self.result = reading.step, lambda: reading


class Recorded:
    """A record that holds readings of an earlier start."""

    def __init__(self, readings):
        self.path = Path("record")
        self.arrays = self
        self.begin = lambda step, description: readings
        self.write = self.write_alert = lambda line: None
        self.write_arrays = lambda reading, arrays: None


def outbox_of(earlier=None, strict=False, **options):
    account, warnings = Account(), Warnings(RankGroup(), strict=strict)
    planner = Planner(every(1), None, None, RankGroup(), account, source="inline")
    given = {"alerts": ["rank_collapse"], **options}
    found = Outbox(
        None if earlier is None else Recorded(earlier), check_options(given, "Monitor"), Jobs(),
        planner, account, warnings, list,
    )  # fmt: skip
    found.begin(0, {})
    return found


# Steps, dimensions and least ranks of a training: it expands, peaks and is compressed.
COURSE = [
    *((2**n, dimension, 20.0) for n, dimension in enumerate([2.0, 2.0, 2.1, 3, 5, 7, 7.5, 7.5])),
    (256, 6.5, 1.09), (512, 5.5, 1.08), (1024, 5.0, 1.06),
]  # fmt: skip


def course(step, dimension, rank):
    values = {"twonn/mean": dimension, "twonn/mean/margin": 0.1}
    values |= {f"effective_rank/layer_{n:02d}": rank if n < step // 256 else 20.0
               for n in range(5)}  # fmt: skip
    return reading_of(values, step, time=0.0)


def publish(outbox, reading):
    outbox._executor.jobs.append(Job(reading))
    outbox.publish(wait=False)


def follow(outbox, steps):
    for values in steps:
        publish(outbox, course(*values))


def called(phases, alerts, earlier=None):
    return outbox_of(earlier, strict=True, on_phase=phases.append, on_alert=alerts.append)


def test_the_phase_is_given_when_it_changes():
    phases, alerts = [], []
    unknown = [(step, math.nan, 20.0) for step in (3, 96, 300, 700)]  # change nothing
    follow(called(phases, alerts), sorted([*COURSE, *unknown]))
    assert all(isinstance(phase, Phase) for phase in phases)
    assert [phase.name for phase in phases] == ["level", "expanding", "compressing"]
    assert (phases[-1].peak.step, phases[-1].peak.value) == (64, 7.5)
    assert [(alert.name, alert.step) for alert in alerts] == [
        ("rank_collapse", 256), ("rank_collapse", 1024),
    ]  # fmt: skip


def test_two_sources_are_two_curves():
    """Inputs that are probed besides are other tokens: a change between the two is no phase."""
    phases = []
    outbox = called(phases, [])
    for values in COURSE:
        publish(outbox, course(*values))
        publish(outbox, msgspec.structs.replace(course(values[0], 3.0, 20.0), source="inline"))
    assert [phase.name for phase in phases] == [
        "level", "level", "expanding", "compressing",
    ]  # fmt: skip


def test_a_run_that_is_taken_up_again_goes_on_where_it_was():
    whole, parts = [], []
    follow(called(whole, []), COURSE)
    for cut in range(len(COURSE)):
        before, after = [], []
        follow(called(before, []), COURSE[:cut])
        outbox = called(after, [], earlier=[course(*values) for values in COURSE[:cut]])
        assert after == []  # nothing is called for what is past
        follow(outbox, COURSE[cut:])
        parts.append(before + after)
    assert all(phases == whole for phases in parts)


def test_a_resumed_monitor_raises_no_alert_again_that_its_record_holds(tmp_path):
    model, alerts = PlainDecoder(), []
    spoil(model)
    first = monitor(model, tmp_path, on_alert=alerts.append)
    run(first, model, 3, at=None)
    first.close()
    second = monitor(model, tmp_path)
    for step in range(3, 6):
        with second(step):
            model(batch(seed=step))
    second.close()
    assert [alert.step for alert in alerts] == [0]
    assert [alert.step for alert in read(tmp_path).alerts] == [0]
    assert len(read(tmp_path)) == 6


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"on_phase": 3}, TypeError, "on_phase must be a function of one argument, or None, got 3"),
        (
            {"on_alert": "x"},
            TypeError,
            "on_alert must be a function of one argument, or None, got 'x'",
        ),
        ({"alerts": ["rank"]}, ValueError, "no alert is called 'rank'"),
        ({"alerts": "rank_collapse"}, TypeError, "a sequence of names"),
    ],
)
def test_bad_options_are_said(options, error, words):
    with pytest.raises(error, match=words):
        monitor(PlainDecoder(), **options)


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "alerts.md"
    names: dict[str, Any] = {"model": PlainDecoder()}
    exec(page.read_text().partition("```python\n")[2].partition("```")[0], names)
    names["save"](Phase("compressing"))
    assert (tmp_path / "peak.pt").is_file()
    alert = Alert("logit_growth", 8, heads=((2, 1),), numbers={"largest": 130.0, "limit": 100.0})
    names["keep"](replace(alert, inputs=((), {"input_ids": [3]})))
    assert capsys.readouterr().out == f"{alert.words()}\n"
    assert torch.load(tmp_path / "batch.pt") == ((), {"input_ids": [3]})
    names["monitor"].close()
