"""Packages that a user may not have: what needs them says what to install."""

import sys

import pytest

from geomon import MLflow


def test_what_is_missing_is_said_with_what_to_install(make_readings, monkeypatch):
    """The extras of geomon itself: test_wheel.py."""
    for missing in ("mlflow", "matplotlib"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r": pip install mlflow$"):
        MLflow()
    with pytest.raises(ImportError, match=r": pip install matplotlib$"):
        make_readings()["twonn/mean"].plot()


def test_without_matplotlib_a_notebook_shows_the_words(make_readings, monkeypatch):
    monkeypatch.setitem(sys.modules, "geomon.show.figures", None)
    assert "pip install matplotlib" in make_readings()._repr_html_()


def test_a_checkout_that_was_not_installed_reads_and_shows(forks, tmp_path):
    """A folder on the path of Python, as on many clusters: no metadata says which version it is."""
    program = """
import importlib.metadata as metadata, sys
def version(name, found=metadata.version):
    if name == "geomon":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
for name in [name for name in sys.modules if name.partition(".")[0] in ("geomon", "support")]:
    del sys.modules[name]
import geomon
from support import models
model = models.PlainDecoder()
monitor = geomon.Monitor(model, directory=sys.argv[1])
with monitor(0):
    model(models.batch(8))
monitor.close()
readings = geomon.read(sys.argv[1])
assert len(readings) == 1 and readings.runs[0]["geomon"] == "unknown"
assert "newer geomon" not in "".join(geomon.Readings([{"geomon": "9.0"}], []).remarks())
"""
    done = forks.run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a reading failed" not in done.stderr
