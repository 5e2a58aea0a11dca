"""The command line: `geomon scan` and `metrics`; commands of pages are in show/test_commands."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import geomon
from geomon import METRICS, read, scan
from geomon.cli import main, make_app
from geomon.sweep import text_windows
from support.models import batch, transformer


def invoke(*arguments):
    return CliRunner().invoke(make_app(), list(map(str, arguments)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with two checkpoints of the Trainer, a text, and token ids in a file."""
    folder = tmp_path_factory.mktemp("run")
    for step in (20, 3):
        transformer("gpt2").save_pretrained(folder / f"checkpoint-{step}")
    (folder / "text").write_text("to be or not to be, that is the question; " * 40)
    torch.save({"input_ids": batch(9, 16)}, folder / "ids.pt")
    (folder / "in_this_folder.py").write_text("build = None")
    return folder


def test_scan_prints_a_row_for_each_checkpoint_and_pages_show_the_record(run, tmp_path):
    folder = tmp_path / "scan"
    arguments = ["scan", run, "--inputs", run / "ids.pt", "--directory", folder, "--tokens", 64]
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "Anisotropy" in lines[0]
    rows = lines[[line[:4] for line in lines].index("----") + 1 :]
    assert [row.split()[0] for row in rows[:2]] == ["3", "20"]
    assert rows[2:] == [f"2 steps in {folder}: geomon watch {folder}"]
    readings = read(folder)
    assert list(readings.runs[0]["metrics"]) == list(METRICS)
    assert [reading.tokens for reading in readings] == [64, 64]
    assert invoke(*arguments).stdout == f"2 steps in {folder}: geomon watch {folder}\n"
    assert "anisotropy" in invoke("summary", folder).stdout.lower()
    assert "step 20" in invoke("watch", folder, "--once").stdout
    assert invoke("figure", folder).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./nowhere"], "no checkpoints in nowhere"),
        (["{run}"], "pass one of --text FILE, for a model that reads text"),
        (["{run}", "--text", "{run}/text"], "there is no tokenizer in {run}: name the folder"),
        (["{run}", "--inputs", "{run}/text"], "is not a file of tensors and plain values"),
        (["{run}", "--text", "{run}/none"], "No such file"),
        (["{run}", "--text", "{run}/text", "--length", "0"], "length must be a whole number"),
        (["no.such.module:build", "--checkpoints", "{run}"], "cannot be imported"),
        (
            ["in_this_folder:build", "--checkpoints", "{run}"],
            "in_this_folder:build is not a function",
        ),
        (["{run}", "--checkpoints", "{run}", "--revisions", "a, b"], "not both"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(run)
    own = [text.format(run=run) for text in arguments]
    result = invoke("scan", *own, "--directory", tmp_path / "scan")
    assert result.exit_code == 2, result.output
    assert words.format(run=run) in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_the_version_is_told_by_both_names_of_the_command():
    assert invoke("--version").stdout == f"geomon {geomon.__version__}\n"
    done = subprocess.run(
        [sys.executable, "-m", "geomon", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"geomon {geomon.__version__}\n"


def test_the_command_has_the_defaults_of_the_functions():
    (command,) = [c for c in make_app().registered_commands if c.callback.__name__ == "scan"]
    typed, scanned, cut = (
        inspect.signature(each).parameters for each in (command.callback, scan, text_windows)
    )
    for function, names in (
        (scanned, ("directory", "tokens", "splits", "seed", "blocks", "device")),
        (cut, ("sequences", "length")),
    ):
        for name in names:
            default = function[name].default
            assert typed[name].default == (Path(default) if name == "directory" else default)


@pytest.mark.parametrize("command", [[], ["watch"], ["figure"], ["summary"], ["scan"]], ids=str)
def test_help_waits_for_nothing_heavy(command):
    """Torch alone takes seconds to load: help is printed without it, and without any drawing."""
    heavy = {"torch", "scipy", "faiss", "matplotlib", "plotly", "pandas", "plotext"}
    code = (
        "import sys, atexit; from geomon.cli import main; "
        f"sys.argv = {['geomon', *command, '--help']!r}; "
        f"atexit.register(lambda: print('loaded', sorted({heavy!r} & set(sys.modules)))); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: geomon" in done.stdout
    assert done.stdout.endswith("loaded []\n")


def test_without_transformers_it_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = invoke("scan", run, "--inputs", run / "ids.pt", "--directory", tmp_path / "scan")
    assert result.exit_code == 2
    assert "pip install transformers accelerate" in result.stderr.splitlines()[-1]


def test_without_typer_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    words = r"needs typer and rich \(.*\): pip install rich typer plotext$"
    with pytest.raises(SystemExit, match=words):
        main()


def test_metrics_are_listed_with_the_default_ones_first(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    result = invoke("metrics")
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in METRICS)  # none is broken, however narrow it is
    first, more = result.stdout.split("Measured on request")
    assert "twonn" in first
    assert "alpha" in more
    assert "alpha" not in first
    monkeypatch.setenv("COLUMNS", "200")
    page = invoke("metrics").stdout
    for metric in METRICS.values():
        has_unit = f"{metric.text.title}, in {metric.text.unit} " in page
        assert has_unit == bool(metric.text.unit)


def test_without_a_command_all_are_listed():
    page = invoke().output
    assert all(command.callback.__name__ in page for command in make_app().registered_commands)
