"""Packages that a user may not have: what needs them says what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from geomon import MLflow, TensorBoard, WandB
from geomon.cli import main
from geomon.record.reading import Series
from geomon.show.report import render


@pytest.mark.parametrize(
    ("missing", "call", "install"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoard("runs"), "'geomon[tensorboard]'"),
        ("wandb", WandB, "'geomon[wandb]'"),
        ("mlflow", MLflow, "mlflow"),
        ("jinja2", lambda: render([]), "'geomon[report]'"),
        ("matplotlib", lambda: Series([0], [1.0], [0.1]).plot(), "'geomon[figures]'"),
    ],
)
def test_what_is_missing_is_said_with_what_to_install(missing, call, install, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError) as raised:
        call()
    assert str(raised.value).endswith(f": pip install {install}")


def test_without_typer_the_command_line_ends_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value).endswith(": pip install 'geomon[terminal]'")


def test_without_matplotlib_a_notebook_shows_the_words(make_readings, monkeypatch):
    monkeypatch.setitem(sys.modules, "geomon.show.figures", None)
    assert "pip install 'geomon[figures]'" in make_readings()._repr_html_()


def test_a_checkout_that_was_not_installed_reads_and_shows(tmp_path):
    """A folder on the path of Python, as on many clusters: no metadata says which version it is."""
    program = """
import importlib.metadata as metadata, sys
def version(name, found=metadata.version):
    if name == "geomon":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
import models, geomon
from geomon.show.report import render
model = models.PlainDecoder()
monitor = geomon.Monitor(model, directory=sys.argv[1])
with monitor(0):
    model(models.batch(8))
monitor.close()
readings = geomon.read(sys.argv[1])
assert len(readings) == 1 and readings.runs[0]["geomon"] == "unknown"
assert "newer geomon" not in "".join(geomon.Readings([{"geomon": "9.0"}], []).remarks())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "a reading failed" not in done.stderr
