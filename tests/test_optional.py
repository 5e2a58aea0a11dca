"""Packages that a user may not have: what needs them says what to install."""

import sys

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
