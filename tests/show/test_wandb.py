"""Pages of W&B: rows next to the training's own, charts, the summary, alerts; all of it offline."""

import contextlib
import copy
import gc
import json
import math
import os
import weakref

import pytest

from geomon import WandB
from support.forks import Forks
from support.readings import TEXTS, raised_of, reading_of
from support.wandb_file import Run, wandb_records, wandb_rows, work_offline


def reading(step, value=None, notes=(), source="inline"):
    values = {"twonn/mean": 0.1 + step if value is None else value, "twonn/mean/margin": 0.2}
    return reading_of(values, step, source, notes)


# How a training logs to W&B itself: the step (or the counter) of its row after a training step.
HABITS = {
    "every step, by number": lambda step: {"step": step},
    "every step, counted": lambda step: {},
    "every fifth step, by number": lambda step: {"step": step} if step % 5 == 4 else None,
    "every fifth step, counted": lambda step: {} if step % 5 == 4 else None,
    "in tokens": lambda step: {"step": 512 * step} if step % 5 == 4 else None,
    "every epoch of ten": lambda step: {"step": step // 10} if step % 10 == 9 else None,
    "few numbers, and a row counted": {0: {"step": 0}, 5: {}, 10: {"step": 2}}.get,
    "never": lambda step: None,
    "rows in two calls": lambda step: {"commit": step % 2 == 1},
}
# Fewer numbers than readings.
NO_ROOM = {"every epoch of ten", "few numbers, and a row counted", "never"}


def log_as_a_training(run, sink, habit, steps=20):
    for step in range(steps):
        sink.write(reading(step))
        if (given := HABITS[habit](step)) is not None:
            run.log({f"loss_{step}": float(step)}, **given)


def watched(*arguments, **options):
    """A run of W&B, and a sink without pictures on it."""
    run = Run()
    return run, WandB(run, *arguments, pictures=False, **options)


def steps_of(run):
    return {row["geomon/step"]: row["geomon/twonn"] for row in run.rows if "geomon/step" in row}


def losses_of(habit):
    return {f"loss_{step}" for step in range(20) if HABITS[habit](step) is not None}


@pytest.mark.parametrize(
    ("habit", "by_step"),
    # by_step says that nobody numbers as the habits without room do.
    [(habit, by_step) for habit in HABITS for by_step in (False, True)
     if not by_step or habit not in NO_ROOM - {"never"}],
)  # fmt: skip
def test_every_row_of_both_arrives_and_readings_at_the_latest_with_the_next_row(habit, by_step):
    run, sink = watched(by_step=by_step)
    log_as_a_training(run, sink, habit)
    behind = set(range(20)) if habit in NO_ROOM and not by_step else {19}
    assert steps_of(run).keys() >= set(range(20)) - behind
    sink.close()
    run.end_row()
    assert not run.dropped
    assert steps_of(run) == {step: 0.1 + step for step in range(20)}
    assert {name for row in run.rows for name in row if name[:4] == "loss"} == losses_of(habit)
    assert habit == "in tokens" or run.step <= len(run.rows)  # no number is left out


def test_two_readings_of_one_step_are_two_rows():
    run, sink = watched()
    for step in range(3):
        sink.write(reading(step))
        sink.write(reading(step, 7.0, source="probe"))
        run.log({"loss": 1.0})
    sink.close()
    run.end_row()
    found = [(r["geomon/step"], r["geomon/twonn"]) for r in run.rows if "geomon/step" in r]
    assert sorted(found) == sorted((s, v) for s in range(3) for v in (s + 0.1, 7.0))


def test_an_error_in_the_row_of_a_reading_is_a_warning_and_the_training_has_its_row(caplog):
    class Broken(Run):
        def log(self, row, step=None, commit=None):
            if "loss" not in row:
                raise OSError("gone")
            super().log(row, step, commit)

    run = Broken()
    sink = WandB(run, pictures=False)
    for step in range(2):
        with contextlib.suppress(OSError):
            sink.write(reading(step))
    run.log({"loss": 1.0})
    assert run.rows == [{"loss": 1.0}]
    assert any("a reading was not logged: OSError: gone" in message for message in caplog.messages)


def test_a_run_that_was_torn_down_is_a_warning(caplog):
    run, sink = watched()
    run.log({"loss": 1.0}, step=0)
    for step in range(2):
        sink.write(reading(step))
    del run.step  # W&B raises where it is asked after it was torn down
    sink.close()
    assert [each for each in caplog.messages if "a reading was not logged" in each]
    assert "_log" not in vars(run)


@pytest.mark.parametrize("order", [1, -1])
def test_nothing_is_left_on_the_run(order):
    run = Run()
    sinks = [WandB(run, pictures=False), WandB(run, pictures=False)]
    for sink in sinks:
        sink.write(reading(0))
    assert "_log" in vars(run)
    first, second = sinks[::order]
    first.close()
    second.write(reading(1))
    run.log({"loss": 1.0}, step=7)
    assert steps_of(run).keys() == {0, 1}
    second.close()
    if order < 0:
        left = [weakref.ref(second.parts()[0]), weakref.ref(run)]
        assert "_log" not in vars(run)
        del sink, sinks, first, second, run
        gc.collect()
        assert [each() for each in left] == [None, None]


@pytest.mark.parametrize("count", [1, 3])
def test_rows_that_wait_when_a_sink_is_closed_come_when_the_run_is_finished(count):
    run = Run()
    run._teardown_hooks = []
    sink = WandB(run, pictures=False)
    for step in range(count):
        sink.write(reading(step))
    sink.close()
    assert ("_log" in vars(run)) == (count > 1)  # the first joins the open row, others wait
    assert run.rows == []
    (hook,) = run._teardown_hooks
    hook.call()
    run.end_row()
    assert [row["geomon/step"] for row in run.rows] == [*range(count)]
    assert "_log" not in vars(run)


def test_the_training_s_own_wrapper_of_a_run_is_put_back():
    run, kept = Run(), []
    log = run._log
    run._log = own = lambda *given: (kept.append(given[0]), log(*given))
    sink = WandB(run, pictures=False)
    assert run._log is not own
    sink.write(reading(0))
    run.log({"loss": 1.0})
    sink.close()
    assert run._log is own
    assert [{*row} for row in kept][-1] == {"loss"}
    assert run.rows[0].keys() > {"loss", "geomon/twonn"}


@pytest.mark.parametrize("by_step", [False, True])
def test_readings_ahead_of_numbered_rows_leave_these_their_numbers(by_step):
    run, sink = watched(by_step=by_step)
    run.log({"loss": 0.0}, step=0)
    for step in range(5, 10):
        sink.write(reading(step))
    run.log({"loss": 2.0}, step=2)
    run.log({"loss": 9.0}, step=9)
    sink.close()
    run.end_row()
    assert not run.dropped
    assert [row.get("loss") for row in run.rows] == [0.0, None, 2.0, None, None, 9.0]
    assert [row.get("geomon/step") for row in run.rows] == [5, 6, 7, 8, 9, None]


def test_a_run_that_cannot_be_watched_gets_its_rows():
    class Unwatched(Run):
        log, _log = Run._log, None

    run = Unwatched()
    sink = WandB(run, pictures=False)
    for step in range(3):
        sink.write(reading(step))
    sink.close()
    assert steps_of(run).keys() == {0, 1, 2}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_is_disabled_or_not_there_costs_nothing(is_there, monkeypatch):
    monkeypatch.setattr("wandb.run", None)
    disabled = Run()
    disabled.disabled = True
    before = copy.deepcopy(vars(disabled))
    sink = WandB(disabled if is_there else None)
    sink.write(reading(0, notes=["a note"]))
    sink.alert(raised_of("rank_collapse", 1))
    sink.close()
    assert vars(disabled) == before


def test_a_run_that_begins_after_the_sink_was_made_has_later_readings(monkeypatch):
    monkeypatch.setattr("wandb.run", None)
    sink = WandB(pictures=False)
    sink.describe({"model": "Decoder", "metrics": TEXTS})
    sink.write(reading(0))
    run = Run()
    monkeypatch.setattr("wandb.run", run)
    sink.write(reading(1))
    monkeypatch.setattr("wandb.run", Run())  # the first one is kept
    sink.write(reading(2))
    sink.close()
    run.end_row()
    assert steps_of(run).keys() == {1, 2}
    assert run.config["geomon"]["model"] == "Decoder"
    assert run.config["geomon"]["metrics"]["anisotropy"] == TEXTS["anisotropy"]["meaning"]


def test_a_run_to_which_nobody_else_logs_is_said_once(caplog):
    _, sink = watched()
    with caplog.at_level("WARNING", "geomon"):
        for step in range(20):
            sink.write(reading(step))
            assert len(caplog.messages) == (step >= 3)  # the first joins the open row
    assert "WandB(run, by_step=True)" in caplog.text
    for by_step in (False, True):
        run, sink = watched(by_step=by_step)
        if not by_step:
            run.log({"loss": 1.0}, step=0)
        for step in range(5):
            sink.write(reading(step * (not by_step)))
    assert len(caplog.messages) == 1


def test_a_reading_joins_the_row_that_is_open_and_its_charts_follow():
    run = Run()
    sink = WandB(run)
    sink.describe({"metrics": TEXTS})
    sink.write(reading(3))
    assert run.metrics["geomon/step"] == (None, True)  # an axis and no chart
    assert run.metrics["geomon/twonn_low"] == ("geomon/step", True)
    run.define_metric("geomon/twonn", "tokens")
    run.log({"loss": 1.0})
    sink.write(reading(400))
    assert run.metrics["geomon/twonn"] == ("tokens", None)  # as the user has it
    run.log({"early": 1.0}, commit=False)
    run.log({"loss": 2.0})
    shown = {"geomon/twonn", "geomon/twonn_low", "geomon/twonn_high", "geomon/step", "loss"}
    chart = {"geomon_charts/1_Intrinsic_dimension", "geomon/step"}
    assert [set(row) for row in run.rows] == [shown, chart, {*shown, "early"}, chart]


PEAKED = {0: 2.0, 8: 4.0, 16: 6.0, 32: 8.0, 64: 6.0, 128: 4.0, 256: 3.0}


def test_the_summary_holds_phase_peak_and_last_value_and_is_kept_up_to_date():
    run, sink = watched()
    for step, value in PEAKED.items():
        sink.write(reading(step, value))
        sink.write(reading(step, 1.0, source="probe") if step == 0 else reading(step, math.nan))
        if step == 32:
            early = dict(run.summary)
    assert (early["geomon/phase"], early["geomon/peak_step"]) == ("expanding", None)
    assert run.summary == {
        "geomon/alerts": 0, "geomon/phase": "compressing", "geomon/peak_step": 32,
        "geomon/peak": 8.0, "geomon/final": 3.0, "geomon/facts":
        "twonn, mean over layers: 3.0 ± 0.2 at step 256, compressing, -5.1 ± 2.2 since step 32; "
        "start 2.0 ± 0.2 at step 0; peak 8.0 ± 0.2 at step 32.",
    }  # fmt: skip
    sink.alert(raised_of("rank_collapse", 256))
    assert run.summary["geomon/alerts"] == 1  # at once
    sink.close()


# A program that logs as a training does, and ends by `finish` or without.
_PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, "tests/show")
import wandb
from test_wandb import log_as_a_training
from geomon import WandB
folder, habit, ending = sys.argv[1:]
run = wandb.init(project="test", dir=folder)
log_as_a_training(run, WandB(run, pictures=False), habit)
if ending == "finish":
    run.log({"last": 1.0}, step=int(run.step))  # what is waiting has not moved the counter
    run.finish()
if ending == "an exception":
    raise RuntimeError
if ending == "a signal":
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.fixture(scope="module")
def loggers(forks):
    """Start programs from a process that has imported W&B too, and what it imports to log."""
    prepared = Forks("import pandas, pytest, wandb; from support import wandb_file", forks)
    yield prepared
    prepared.close()


@pytest.mark.parametrize(
    ("ending", "habit"),
    [
        ("finish", "every step, by number"), ("the last line", "every epoch of ten"),
        ("an exception", "every fifth step, counted"), ("a signal", "every epoch of ten"),
    ],
)  # fmt: skip
def test_however_a_program_ends_the_file_has_every_row_of_both(habit, ending, loggers, tmp_path):
    offline = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    loggers.run(_PROGRAM, tmp_path, habit, ending, environment=offline)
    rows = wandb_rows(tmp_path)
    assert sorted(int(r["geomon/step"]) for r in rows if "geomon/twonn" in r) == list(range(20))
    names = {name for row in rows for name in row if name.startswith(("loss_", "last"))}
    assert names == losses_of(habit) | ({"last"} if ending == "finish" else set())


SECTIONS = {
    "geomon": {"alerts", "twonn", "twonn_distinct", "gride_k32", "anisotropy_max",
               "attention_entropy", "attention_entropy_min", "qk_cosine_size"},
    "geomon_charts": {
        "1_Intrinsic_dimension", "2_anisotropy_over_depth", "4_anisotropy_by_layer",
        "5_attention_entropy_by_layer", "6_cosine_of_mean_query_and_mean_key_by_head",
        "7_attention_entropy_by_head", "9_anisotropy_over_depth",
    },
}  # fmt: skip


def test_the_file_of_an_offline_run_has_panels_in_sections_configuration_summary_and_alerts(
    tmp_path, monkeypatch, make_readings
):
    import wandb

    work_offline(monkeypatch, tmp_path)
    sink = WandB(detail=["anisotropy"])  # before there is a run
    run = wandb.init(project="test", dir=str(tmp_path), config={"own": 1})
    for model in ("of an earlier monitor", "Decoder"):
        sink.describe({"model": model, "metrics": TEXTS})
    for each in make_readings(without=["geomon"], layers=2, heads=2):
        sink.write(each)
        run.log({"loss": 1.0}, step=each.step)
    sink.alert(raised_of("rank_collapse", 1700))
    sink.close()
    run.finish()  # its row of the alert waited for others
    assert "_log" not in vars(run)
    records = wandb_records(tmp_path)

    metrics = [record.metric for record in records if record.HasField("metric")]
    shown = [each for each in metrics if each.name and not each.options.hidden]
    assert {each.step_metric for each in shown} == {"geomon/step"}
    assert {each.name for each in shown} == {
        f"{section}/{name}" for section, names in SECTIONS.items() for name in names
    }
    updates = [record.config for record in records if record.HasField("config")]
    updates += [record.run.config for record in records if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for update in updates for item in update.update}
    assert (config["own"], config["geomon"]["model"]) == (1, "Decoder")
    meanings = {name: text.get("meaning", "") for name, text in TEXTS.items()}
    assert config["geomon"]["metrics"] == meanings

    summary = {
        item.key or "/".join(item.nested_key): json.loads(item.value_json)
        for record in records if record.HasField("summary") for item in record.summary.update
    }  # fmt: skip
    expected = {"phase": "compressing", "peak_step": 256, "alerts": 1, "peak": 7.4, "final": 5.3}
    assert {name: summary[f"geomon/{name}"] for name in expected} == expected
    (alert,) = [record.alert for record in records if record.HasField("alert")]
    assert (alert.title, alert.level, alert.wait_duration) == (
        "geomon: rank collapse", "WARN", 600_000,
    )  # fmt: skip
    assert alert.text.startswith("Step 1700: rank collapse (layer 2)")
    media = [json.loads(path.read_text()) for path in tmp_path.rglob("*.plotly.json")]
    assert {trace["type"] for chart in media for trace in chart["data"]} == {"scatter", "heatmap"}


def test_a_run_that_was_finished_is_left_alone_and_this_is_said_once(tmp_path, monkeypatch, caplog):
    """It answers nothing: whatever is asked of it raises an error, or waits for 30 seconds."""
    import wandb

    work_offline(monkeypatch, tmp_path)
    run = wandb.init(project="test", dir=str(tmp_path))
    sink = WandB(run)
    sink.describe({"model": "Decoder"})
    sink.write(reading(0))
    run.finish()
    for step in (1, 2):
        sink.write(reading(step))
        sink.alert(raised_of("rank_collapse", step))
    sink.close()
    assert [record.message for record in caplog.records if record.name == "geomon"] == [
        "W&B: the run was finished, so later readings are not shown there"
    ]
    assert {json.loads(row["geomon/step"]) for row in wandb_rows(tmp_path)} == {0}
