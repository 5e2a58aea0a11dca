"""Any other logger, by functions; MLflow and trackio, read back by their own readers."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace
from tagged import TEXTS, alert_of

from geomon import Logger, MLflow, Trackio
from geomon.record import Sink

WORDS = "rank collapse (layer 2)"


def run_through(sink, make_readings):
    """Write a run with an alert, as a monitor does; returns its readings."""
    readings = list(make_readings(layers=2, heads=2))
    readings[5] = replace(readings[5], notes=(alert_of("rank_collapse", WORDS),))
    sink.describe({"model": "Decoder", "metrics": TEXTS})
    for reading in readings:
        sink.write(reading)
    sink.close()
    sink.close()
    return readings


def test_functions_get_values_pictures_and_alerts(make_readings):
    rows, pictures, alerts, saved = [], [], [], []
    sink = Logger(
        lambda values, step: rows.append((step, values)),
        picture=lambda name, image, step: pictures.append((name, image, step)),
        alert=lambda *alert: alerts.append(alert),
        save=lambda: saved.append(True),
        name="Aim",
    )
    assert isinstance(sink, Sink)
    assert str(sink) == "Aim"
    readings = run_through(sink, make_readings)
    assert [step for step, _ in rows] == [reading.step for reading in readings]
    assert rows[-1][1]["geomon/twonn"] == 5.3
    assert alerts == [("geomon: rank collapse", WORDS, 256)]
    names = {name for name, _, _ in pictures}
    assert {"1 intrinsic dimension", "7 attention entropy by head"} <= names
    assert all(image.dtype == np.uint8 and image.ndim == 3 for _, image, _ in pictures)
    assert saved


def test_a_logger_of_values_alone_needs_one_function(make_readings):
    rows = []
    run_through(Logger(lambda values, step: rows.append(step)), make_readings)
    assert len(rows) == 9
    with pytest.raises(ValueError, match="detail is 'headline', 'layers' or a tuple of names"):
        Logger(print, detail="layer")


def test_a_function_that_fails_leaves_the_others_as_they_are(make_readings):
    rows = []

    def refuse(*_):
        raise OSError("full")

    sink = Logger(lambda values, step: rows.append(step), picture=refuse, name="Aim")
    with pytest.raises(ExceptionGroup, match="Aim failed in part: OSError: full"):
        sink.write(make_readings()[0])
    assert rows == [0]


@pytest.mark.parametrize(("given", "used"), [(None, "active"), ("mine", "mine")])
def test_mlflow_logs_to_the_run_that_is_given_or_active(given, used, make_readings, monkeypatch):
    """By a stand-in for mlflow, which few machines have."""
    rows = []
    client = SimpleNamespace(log_batch=lambda run_id, metrics: rows.append((run_id, metrics)))
    active = SimpleNamespace(info=SimpleNamespace(run_id="active"))
    mlflow = SimpleNamespace(active_run=lambda: active, MlflowClient=lambda: client)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    entities = SimpleNamespace(Metric=lambda name, value, now, step: (name, value, step))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    MLflow(given, pictures=False).write(make_readings((16,))[0])
    ((run_id, metrics),) = rows
    assert run_id == used
    assert ("geomon/twonn", 2.5, 16) in metrics


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mlflow's own code
def test_mlflow_has_every_value_the_pictures_and_the_alert(make_readings, tmp_path, monkeypatch):
    pytest.importorskip("sqlalchemy")  # which mlflow-skinny comes without
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no run of MLflow is active: call mlflow.start_run"):
        MLflow()
    experiment = mlflow.create_experiment("test", artifact_location=(tmp_path / "art").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        readings = run_through(MLflow(detail="layers"), make_readings)
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "geomon/twonn")
    assert [(each.step, each.value) for each in history] == [
        (reading.step, reading.column("twonn").mean) for reading in readings
    ]
    assert client.get_metric_history(run.info.run_id, "anisotropy/layer_01")
    tags = client.get_run(run.info.run_id).data.tags
    assert tags["geomon: rank collapse"] == f"Step 256: {WORDS}"
    images = [path.name for path in tmp_path.rglob("*.png")]
    assert any("intrinsic dimension" in name for name in images)


def test_trackio_has_every_value_the_pictures_and_the_alert(make_readings, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    run = trackio.init(project="test", name="a", auto_log_cpu=False, auto_log_gpu=False)
    readings = run_through(Trackio(run), make_readings)
    trackio.finish()
    (found,) = trackio.Api().runs("test")
    rows = trackio.SQLiteStorage.get_logs("test", found.name)
    values = {row["step"]: row["geomon/twonn"] for row in rows if "geomon/twonn" in row}
    assert values == {reading.step: reading.column("twonn").mean for reading in readings}
    assert any("geomon/1 intrinsic dimension" in row for row in rows)
    (alert,) = trackio.Api().alerts("test")
    assert (alert["title"], alert["text"], alert["step"]) == ("geomon: rank collapse", WORDS, 256)
