"""Benchmarks of single passes at tiny sizes: they run, and compare what they should."""

import logging
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import cost, overhead, views


def printed(app, *arguments):
    done = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def rows_of(text):
    lines = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in lines}


def test_overhead_times_a_reading_and_a_check(caplog):
    caplog.set_level(logging.ERROR, "geomon")  # restored afterwards
    arguments = ("--runs", 1, "--layers", 1, "--models", "nano")
    found = rows_of(printed(cost.app, "overhead", *arguments))
    assert list(found) == ["model, layers", "nanoGPT, by hand, 1"]
    assert all(float(cell) > 0 for cell in found["nanoGPT, by hand, 1"])


def test_a_training_bound_by_python_loses_steps_by_looks(caplog):
    caplog.set_level(logging.ERROR, "geomon")
    sizes = ("--looks", 2, "--layers", 1, "--length", 16)
    found = rows_of(printed(cost.app, "python-bound", *sizes, "--ways", "waited,thread"))
    waited, beside = found["reading, waited for"], found["reading in a thread"]
    assert float(waited[0]) > float(beside[0]) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_peak_measures_plain_and_watched_passes(monkeypatch):
    here = lambda function, *args, **kwargs: function(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(overhead, "_in_child", here)  # a child would import nothing, but fork
    name, sizes = "nanoGPT, by hand", ("--tokens", 64, "--layers", 1, "--width", 64)
    found = rows_of(printed(cost.app, "peak", *sizes, "--models", name))
    for kind in ("no gradients", "gradients"):
        assert len([float(cell) for cell in found[f"{name}, {kind}"]]) == 3


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    out = tmp_path_factory.mktemp("views") / "old"
    printed(views.app, "dump", out, "nanoGPT")
    return out


def test_views_are_kept_for_three_passes_of_two_lengths(dumped):
    for entry in views.entries(dumped):
        assert [seen.inputs for seen in entry.passes] == ["same", "same", "shorter"]
        assert not any(seen.error for seen in entry.passes)
        shapes = [
            entry.arrays[seen.layers["", 1][0]["hidden"].removeprefix("#")].shape[0]
            for seen in entry.passes
        ]
        assert shapes[0] == shapes[1] > shapes[2]


def changed(layer, how):
    captured, missing = dict(layer.captured), dict(layer.missing)
    if how == "lost":
        del captured["hidden"]
        missing["hidden"] = "a reason"
    elif how == "gained":
        captured["another"] = torch.ones(2)
    elif how == "different":
        captured["hidden"] = captured["hidden"] + 0.5
    return replace(layer, captured=captured, missing=missing)


@pytest.mark.parametrize(
    ("how", "view", "place"),
    [("equal", "", 0), ("lost", "hidden", 1), ("gained", "another", 2), ("different", "hidden", 3)],
)
def test_views_that_change_are_counted_and_named(dumped, tmp_path, monkeypatch, how, view, place):
    layers_of = views._layers_of

    def planted(snapshot, arrays):
        own = [changed(layer, how) if layer.index == 1 else layer for layer in snapshot.layers]
        return layers_of(replace(snapshot, layers=own), arrays)

    monkeypatch.setattr(views, "_layers_of", planted)
    printed(views.app, "dump", tmp_path / "new", "nanoGPT")
    text = printed(views.app, "compare", dumped, tmp_path / "new")
    counts = rows_of(text)
    assert counts["A"][0] != "0"
    for verdict, name in enumerate(("lost", "gained", "different"), 1):
        assert (counts["A"][verdict] != "0") == (name == how)
    if view:
        assert counts[view][place] == str(3 * len([*views.entries(dumped)]))
        assert f"{view} {how}" in text
    if how == "lost":
        assert "a reason" in text
