"""Pages of W&B: rows beside the training's own, charts, the summary, alerts; all of it offline."""

import contextlib
import gc
import json
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from models import PlainDecoder, batch
from tagged import TEXTS, raised_of, reading_of
from wandb_file import wandb_records, wandb_rows, work_offline

from geomon import Monitor, WandB, read, select
from geomon.show.loggers.wandb_run import WandBRows, WandBSummary


class Run:
    """The counting of W&B: what is logged below the counter is dropped."""

    def __init__(self):
        self.rows, self.metrics, self.dropped, self.step, self._row = [], {}, [], 0, {}
        self.summary, self.alerts = {}, []

    @property
    def config(self):
        return {}

    def define_metric(self, name, step_metric=None, hidden=None):
        self.metrics[name] = step_metric, hidden

    def alert(self, **given):
        self.alerts.append(given)

    def log(self, row, step=None, commit=None):
        self._log(row, step, commit)

    def _log(self, row, step=None, commit=None):
        if step is not None and step < self.step:
            self.dropped.append(row)
            return
        if step is not None and step > self.step:
            self.end_row()
            self.step = step
        self._row |= row
        if commit or (commit is None and step is None):
            self.end_row()
            self.step += 1

    def end_row(self):
        if self._row:
            self.rows.append(self._row)
        self._row = {}


def reading(step, value=None, notes=(), source="inline"):
    values = {"twonn/mean": 0.1 + step if value is None else value, "twonn/mean/margin": 0.2}
    return reading_of(values, step, source, notes)


def rows_of(run, **options):
    rows = WandBRows(run, **options)
    rows.describe({"metrics": TEXTS})
    return rows


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


def log_as_a_training(run, sink, habit, steps=20):
    for step in range(steps):
        sink.write(reading(step))
        given = HABITS[habit](step)
        if given is not None:
            run.log({f"loss_{step}": float(step)}, **given)


def steps_of(run):
    return {row["geomon/step"]: row["geomon/twonn"] for row in run.rows if "geomon/step" in row}


NO_ROOM = {
    "every epoch of ten",
    "few numbers, and a row counted",
    "never",
}  # fewer numbers than readings


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("habit", HABITS)
def test_every_row_of_both_arrives_and_readings_at_the_latest_with_the_next_row(habit, by_step):
    if by_step and habit in NO_ROOM - {"never"}:
        pytest.skip("by_step says that nobody numbers so")
    run = Run()
    sink = WandB(run, by_step=by_step, pictures=False)
    log_as_a_training(run, sink, habit)
    behind = set(range(20)) if habit in NO_ROOM and not by_step else {19}
    assert steps_of(run).keys() >= set(range(20)) - behind
    sink.close()
    run.end_row()
    assert not run.dropped
    assert steps_of(run) == {step: 0.1 + step for step in range(20)}
    kept = {name for row in run.rows for name in row if name.startswith("loss")}
    assert kept == {f"loss_{s}" for s in range(20) if HABITS[habit](s) is not None}
    assert habit == "in tokens" or run.step <= len(run.rows)  # no number is left out


def test_two_readings_of_one_step_are_two_rows():
    run = Run()
    sink = WandB(run, pictures=False)
    for step in range(3):
        sink.write(reading(step))
        sink.write(reading(step, 7.0, source="probe"))
        run.log({"loss": 1.0})
    sink.close()
    run.end_row()
    found = [(r["geomon/step"], r["geomon/twonn"]) for r in run.rows if "geomon/step" in r]
    assert sorted(found) == sorted((s, v) for s in range(3) for v in (s + 0.1, 7.0))


def test_what_fails_beside_a_row_of_the_training_is_a_warning(caplog):
    class Broken(Run):
        def log(self, row, step=None, commit=None):
            if "loss" not in row:
                raise OSError("gone")
            super().log(row, step, commit)

    run = Broken()
    sink = rows_of(run)
    for step in range(2):
        with contextlib.suppress(OSError):
            sink.write(reading(step))
    run.log({"loss": 1.0})
    assert run.rows == [{"loss": 1.0}]
    assert any("a reading was not logged: OSError: gone" in message for message in caplog.messages)


def test_what_waits_when_the_user_has_torn_wandb_down_is_a_warning(caplog):
    run = Run()
    sink = rows_of(run)
    run.log({"loss": 1.0}, step=0)
    for step in range(2):
        sink.write(reading(step))
    del run.step  # W&B raises where it is asked
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
        rows = weakref.ref(second.parts()[0])
        del sink, sinks, first, second
        gc.collect()
        assert "_log" not in vars(run)
        assert rows() is None


def test_a_run_whose_rows_cannot_be_watched_has_every_reading_in_the_end():
    class Unwatched(Run):
        log, _log = Run._log, None

    run = Unwatched()
    sink = WandB(run, pictures=False)
    for step in range(3):
        sink.write(reading(step))
    sink.close()
    assert steps_of(run).keys() == {0, 1, 2}


def test_a_disabled_run_is_left_as_it_is():
    run = Run()
    run.disabled = True
    sink = WandB(run, pictures=False)
    sink.write(reading(0, notes=["a note"]))
    assert "_log" not in vars(run)
    sink.close()
    assert (run.rows, run.summary) == ([], {})


def test_while_no_run_is_active_nothing_is_logged():
    rows = rows_of(None)
    rows.write(reading(0))
    assert rows.run is None
    rows.close()


def test_a_run_to_which_nobody_else_logs_is_said_once(caplog):
    sink = WandB(Run(), pictures=False)
    with caplog.at_level("WARNING", "geomon"):
        for step in range(20):
            sink.write(reading(step))
            assert len(caplog.messages) == (step >= 3)  # the first joins the open row
    assert "WandB(run, by_step=True)" in caplog.text
    run = Run()
    sink = WandB(run, pictures=False)
    run.log({"loss": 1.0}, step=0)
    for step in range(5):
        sink.write(reading(step))
    assert len(caplog.messages) == 1


def test_a_reading_joins_the_row_that_is_open_and_its_charts_follow():
    run = Run()
    sink = rows_of(run)
    sink.write(reading(3))
    assert run.metrics["geomon/step"] == (None, True)  # an axis and no chart
    run.define_metric("geomon/twonn", "tokens")
    sink.log({"charts/a": "chart"}, 3)
    run.log({"loss": 1.0})
    sink.write(reading(4))
    assert run.metrics["geomon/twonn"] == ("tokens", None)  # as the user has it
    sink.log({"charts/a": "chart"}, 4)
    run.log({"early": 1.0}, commit=False)
    run.log({"loss": 2.0})
    shown = {"geomon/twonn", "geomon/twonn_low", "geomon/twonn_high", "geomon/step", "loss"}
    chart = {"charts/a", "geomon/step"}
    assert [set(row) for row in run.rows] == [shown, chart, {*shown, "early"}, chart]


PEAKED = {0: 2.0, 8: 4.0, 16: 6.0, 32: 8.0, 64: 6.0, 128: 4.0, 256: 3.0}


def test_the_summary_holds_phase_peak_and_last_value_and_is_kept_up_to_date():
    run = Run()
    summary = WandBSummary(rows_of(run))
    found = []
    for step, value in PEAKED.items():
        summary.write(reading(step, value))
        summary.write(reading(step, 1.0, source="probe") if step == 0 else reading(step, math.nan))
        found.append(dict(run.summary))
    assert found[3]["geomon/phase"] == "expanding"
    assert found[3]["geomon/peak_step"] is None
    facts = run.summary.pop("geomon/facts")
    assert facts == (
        "twonn, mean over layers: 3.0 ± 0.2 at step 256, compressing, -1.0 ± 0.5 since step 128; "
        "peak 8.0 ± 0.2 at step 32, -5.0 ± 0.5 since; start 2.0 ± 0.2 at step 0, +1.0 ± 0.5 since."
    )
    assert run.summary == {
        "geomon/alerts": 0, "geomon/phase": "compressing", "geomon/peak_step": 32,
        "geomon/peak": 8.0, "geomon/final": 3.0,
    }  # fmt: skip
    summary.alert(raised_of("rank_collapse", 256))
    assert run.summary["geomon/alerts"] == 1  # at once
    summary.close()


# A program that logs as a training does, and ends by `finish` or without.
_PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, "tests/show/loggers"), sys.path.insert(0, "tests")
import wandb
from test_wandb_run import HABITS, reading
from geomon import WandB
folder, habit, ending = sys.argv[1:]
run = wandb.init(project="test", dir=folder)
sink = WandB(run, pictures=False)
for step in range(20):
    sink.write(reading(step))
    given = HABITS[habit](step)
    if given is not None:
        run.log({f"loss_{step}": float(step)}, **given)
if ending == "finish":
    run.log({"last": 1.0}, step=int(run.step))  # what is waiting has not moved the counter
    run.finish()
if ending == "an exception":
    raise RuntimeError
if ending == "a signal":
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("ending", "habit"),
    [
        ("finish", "every step, by number"), ("the last line", "every epoch of ten"),
        ("an exception", "every fifth step, counted"), ("a signal", "every epoch of ten"),
    ],
)  # fmt: skip
def test_however_a_program_ends_the_file_has_every_row_of_both(habit, ending, tmp_path):
    subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path), habit, ending],
        cwd=Path(__file__).parents[3], check=False, timeout=300, stderr=subprocess.DEVNULL,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    )  # fmt: skip
    rows = wandb_rows(tmp_path)
    assert sorted(int(r["geomon/step"]) for r in rows if "geomon/twonn" in r) == list(range(20))
    names = {name for row in rows for name in row}
    assert ("last" in names) == (ending == "finish")
    assert {name for name in names if name.startswith("loss_")} == {
        f"loss_{s}" for s in range(20) if HABITS[habit](s) is not None
    }


SECTIONS = {
    "geomon": {"twonn", "twonn_distinct", "gride_k32", "anisotropy_max",
               "attention_entropy", "attention_entropy_min", "qk_cosine_size"},
    "geomon_charts": {
        "1_Intrinsic_dimension", "2_anisotropy_over_depth", "4_anisotropy_by_layer",
        "5_attention_entropy_by_layer", "6_cosine_of_mean_query_and_mean_key_by_head",
        "7_attention_entropy_by_head", "9_anisotropy_over_depth",
    },
}  # fmt: skip


def test_offline_the_file_has_panels_in_sections_configuration_summary_and_alerts(
    tmp_path, monkeypatch, make_readings
):
    import wandb

    work_offline(monkeypatch, tmp_path)
    readings = make_readings(without=["geomon"], layers=2, heads=2)
    run = wandb.init(project="test", dir=str(tmp_path), config={"own": 1})
    sink = WandB(run, detail=["anisotropy"])
    assert [*map(str, (sink, *sink.parts()[1:]))] == [
        "W&B", "the summary of the W&B run", "sending alerts to W&B", "drawing charts for W&B",
    ]  # fmt: skip
    for model in ("of an earlier monitor", "Decoder"):
        sink.describe({"model": model, "metrics": TEXTS})
    for each in readings:
        sink.write(each)
        run.log({"loss": 1.0}, step=each.step)
    sink.alert(raised_of("rank_collapse", 1700))
    sink.close()
    run.finish()
    records = wandb_records(tmp_path)

    panels = {}
    for record in records:
        metric = record.metric
        if record.HasField("metric") and metric.name and not metric.options.hidden:
            assert metric.step_metric == "geomon/step"
            panels.setdefault(metric.name.partition("/")[0], set()).add(
                metric.name.partition("/")[2]
            )
    assert panels == SECTIONS
    assert len(panels["geomon"]) <= 12

    config = {item.key: json.loads(item.value_json) for r in records for item in r.config.update
              if r.HasField("config")} | {
        item.key: json.loads(item.value_json) for r in records if r.HasField("run")
        for item in r.run.config.update
    }  # fmt: skip
    assert config["own"] == 1
    assert config["geomon"]["model"] == "Decoder"
    assert config["geomon"]["metrics"].keys() == TEXTS.keys()
    assert config["geomon"]["metrics"]["twonn"] == TEXTS["twonn"]["meaning"]

    summary = {}
    for record in records:
        if record.HasField("summary"):
            for item in record.summary.update:
                summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    numbers = {key: summary[key] for key in ("geomon/phase", "geomon/peak_step", "geomon/alerts")}
    assert numbers == {"geomon/phase": "compressing", "geomon/peak_step": 256, "geomon/alerts": 1}
    assert summary["geomon/peak"] == 7.4
    assert summary["geomon/final"] == 5.3

    (alert,) = [record.alert for record in records if record.HasField("alert")]
    assert (alert.title, alert.level, alert.wait_duration) == (
        "geomon: rank collapse", "WARN", 600_000,
    )  # fmt: skip
    assert alert.text.startswith("Step 1700: rank collapse (layer 2)")

    media = [json.loads(path.read_text()) for path in tmp_path.rglob("*.plotly.json")]
    assert {trace["type"] for chart in media for trace in chart["data"]} == {"scatter", "heatmap"}


def test_the_configuration_of_a_wandb_run_describes_the_monitored_one(tmp_path, monkeypatch):
    import wandb

    work_offline(monkeypatch, tmp_path)
    sink = WandB(pictures=False)  # before there is a run
    model = PlainDecoder(layers=1)
    metrics = select("variance")
    with wandb.init(project="test", dir=str(tmp_path), config={"own": 1}) as run:
        monitor = Monitor(
            model, metrics=metrics, directory=tmp_path, sinks=[sink], strict=True,
            schedule=lambda step: True,
        )  # fmt: skip
        for step in range(2):
            with monitor(step):
                model(batch())
        monitor.close()
        assert "_log" in vars(run)  # the second reading waits for a row
        run.log({"loss": 1.0})
        sink.close()
        assert "_log" not in vars(run)
        (described,) = read(tmp_path).runs
        found = dict(run.config)
    assert found["own"] == 1
    assert found["geomon"]["metrics"].keys() == described["metrics"].keys()
    assert all(found["geomon"]["metrics"].values())
    assert found["geomon"].keys() == monitor.describe().keys()
