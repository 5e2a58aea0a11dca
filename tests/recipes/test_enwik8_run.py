"""The recipe's command, on a model small enough for a test."""

import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import Forks
from typer.testing import CliRunner

from geomon import read
from recipes.enwik8.__main__ import app

ROOT = Path(__file__).parent.parent.parent
# Batches of 64: the 512 windows of a validation are eight of them.
TINY = [
    "--layers", "2", "--width", "32", "--heads", "2", "--batch", "64", "--preset", "cpu",
    "--accelerator", "cpu",
]  # fmt: skip

# The steps at which a run of twenty updates is read: the first ones, and the last.
READ = [0, 16, 20]


# Nothing listens on port 9: no network, whatever the machine has.
OFFLINE = {"ENWIK8": "", **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")}
PREPARATION = """
import lightning.pytorch.loggers, torch.utils.tensorboard, matplotlib.backends.backend_agg
import transformers.models.gpt2.modeling_gpt2
import recipes.enwik8.__main__
from recipes.enwik8.builtin_text import builtin_text
builtin_text()
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the command in a process that need not import anything."""
    forks, folder = Forks(PREPARATION), tmp_path_factory.mktemp("stderr")

    def started(*arguments: object, file_size: int | None = None, **environment: str) -> Command:
        return Command(forks, folder, arguments, file_size, OFFLINE | environment)

    yield started
    forks.close()


class Command:
    """The command, running: its process, what it prints as it comes, and its errors at the end."""

    def __init__(self, forks, folder, arguments, file_size, environment) -> None:
        self._errors = folder / f"{len(list(folder.iterdir()))}"
        reader, writer = os.pipe()
        with self._errors.open("w") as errors:
            self.process = forks.start(
                "recipes.enwik8", *arguments, environment=os.environ | environment,
                stdout=writer, stderr=errors.fileno(), file_size=file_size,
            )  # fmt: skip
        os.close(writer)
        self.lines = open(reader)  # noqa: SIM115

    def end(self) -> tuple[int, str, str]:
        with self.lines:
            out = self.lines.read()
        return self.process.wait(400), out, self._errors.read_text()


def run_here(*arguments: object) -> tuple[int, str]:
    """In this process: for what ends before training begins."""
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"ENWIK8": ""})
    return result.exit_code, result.stderr


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory):
    """A run without data and without network, and its output."""
    folder = tmp_path_factory.mktemp("recipe")
    command = start(
        "--out", folder / "run", *TINY, "--steps", 20, GEOMON_CACHE=str(folder / "cache")
    )
    code, out, err = command.end()
    assert code == 0, err
    return folder / "run", out


def test_without_network_it_names_its_fallback_and_leaves_everything(finished):
    folder, out = finished
    assert "text that Python" in out.splitlines()[0]
    assert "could not be downloaded" in out.splitlines()[0]
    assert [r.step for r in read(folder)] == READ
    assert (folder / "geometry.png").stat().st_size > 20_000
    assert list((folder / "tensorboard").glob("events*"))
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert "bits per character" in out
    assert f"record: {folder / 'readings.jsonl'}" in out


def test_readings_are_shown_line_by_line_where_there_is_no_terminal(finished):
    _, out = finished
    assert [step for step in range(21) if f"step {step}:" in out] == READ


def test_every_reading_is_a_validation_and_all_windows_are_validated_on_once(finished):
    folder, out = finished
    readings = list(read(folder))
    probed = [reading.values["training/probe_loss"] for reading in readings]
    assert probed == sorted(probed, reverse=True)  # of each step's own weights: the loss falls
    *before, last = [r.values["training/validation/bits_per_character"] for r in readings]
    assert all(map(math.isnan, before))
    assert last == pytest.approx(probed[-1], abs=0.1)
    assert f"validation: {last:.3f} bits per character" in out


def test_a_folder_that_holds_a_run_is_not_written_over(finished):
    folder, _ = finished
    code, err = run_here("--out", folder, *TINY, "--steps", 20)
    assert code == 2
    assert err.startswith("error: --out")
    assert "holds a run already" in err
    assert err.count("\n") == 1


def test_resume_needs_the_settings_of_the_run(finished):
    folder, _ = finished
    code, err = run_here("--out", folder, *TINY, "--steps", 20, "--resume", "--seed", 5)
    assert code == 2
    assert "seed was 0" in err


def test_a_resumed_run_has_the_curves_of_an_uninterrupted_one(finished, start, tmp_path):
    folder, _ = finished
    cache = str(folder.parent / "cache")
    arguments = ["--out", tmp_path / "cut", *TINY, "--steps", 20]
    command = start(*arguments, GEOMON_CACHE=cache)
    for line in command.lines:  # a checkpoint at every step; stopped in the middle
        if line.startswith("step 16:"):
            command.process.send_signal(signal.SIGKILL)
            break
    assert command.end()[0] == -signal.SIGKILL
    assert len(read(tmp_path / "cut")) == 2
    code, _, err = start(*arguments, "--resume", GEOMON_CACHE=cache).end()
    assert code == 0, err
    whole, cut = read(folder), read(tmp_path / "cut")
    assert len(cut.runs) == 2
    assert [r.step for r in cut] == [r.step for r in whole]
    for one, other in zip(whole, cut, strict=True):
        for tag, value in one.values.items():
            if not tag.startswith("geomon/") and math.isfinite(value):
                assert other.values[tag] == value, (one.step, tag)


def test_ctrl_c_keeps_every_reading_and_ends_as_lightning_ends(start, tmp_path):
    command = start("--out", tmp_path / "run", *TINY, "--steps", 100_000)
    shown = []
    for line in command.lines:
        if line.startswith("step "):
            shown.append(int(line.split()[1].rstrip(":")))
        if len(shown) == 3:
            command.process.send_signal(signal.SIGINT)
            break
    code, out, err = command.end()
    assert f"interrupted: {tmp_path / 'run'} keeps every reading" in out
    assert code == 1  # Lightning's own code for an interrupt
    assert "Traceback" not in err
    assert [r.step for r in read(tmp_path / "run")][:3] == shown == [0, 16, 48]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no/such/file"], "no/such/file"),
        (["--data", "pyproject.toml"], "too short: text, "),
        (["--resume"], "no checkpoint and no settings"),
        (["--out", "pyproject.toml/run"], "cannot be written"),
        (["--heads", "3"], "cannot be shared among --heads 3"),
        (["--context", "100000"], "choose at most 8192"),
        (["--precision", "foo"], "check --accelerator, --devices, --strategy, --precision"),
        pytest.param(
            ["--accelerator", "gpu"], "check --accelerator",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (["--accelerator", "foo"], "check --accelerator"),
        (["--devices", "foo"], "check --accelerator, --devices"),
        (["--strategy", "foo"], "check --accelerator"),
        (["--budget", "5"], "between 0 and 1"),
        (["--budget", "much"], "or '1%' for one per cent"),
        (["--budget", "nan"], "between 0 and 1"),
        (["--learning-rate", "nan"], "is no number"),
        (["--vocabulary", "100"], "too few for all bytes: give 257 to 65,536"),
        (["--minutes", "0"], "give a number above 0"),
        (["--minutes", "nan"], "give a number above 0"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_clear_line(arguments, message, tmp_path):
    rest = [] if "--out" in arguments else ["--out", tmp_path / "x"]
    code, err = run_here("--preset", "cpu", *rest, *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", [b"", b"torn", "half"])
def test_a_checkpoint_that_cannot_be_read_gets_one_clear_line(finished, tmp_path, content):
    folder, _ = finished
    copy = shutil.copytree(folder, tmp_path / "copy")
    last = copy / "checkpoints" / "last.ckpt"
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    code, err = run_here("--out", copy, *TINY, "--steps", 20, "--resume")
    assert code == 2, err
    assert "cannot be read" in err
    assert "--resume starts over" in err
    assert err.count("\n") == 1


def test_a_full_disk_in_the_middle_of_training_gets_one_clear_line(start, tmp_path):
    arguments = ["--out", tmp_path / "run", *TINY, "--steps", 20, "--logger", "csv"]
    code, _, err = start(*arguments, file_size=100_000).end()
    assert code == 2, err
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert "make room, then go on with --resume --out" in last
    assert "Traceback" not in err


_WITHOUT = """
import runpy, sys
names, out = sys.argv[1:]
sys.modules |= dict.fromkeys(names.split(","))
for name in names.split(","):
    sys.argv[1:] = ["--out", out, *(["--logger", name] if name == "wandb" else [])]
    try:
        runpy.run_module("recipes.enwik8", run_name="__main__")
    except SystemExit as end:
        assert end.code == 2, end.code
"""


@pytest.mark.parametrize(
    "names",
    # Loggers are looked for after seconds of imports: one process is asked for both.
    ["typer", "lightning", "transformers", "matplotlib", "pooch", "tensorboard,wandb"],
)
def test_each_missing_extra_gets_one_clear_line(tmp_path, names):
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, names, str(tmp_path / "x")], cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    for name, line in zip(names.split(","), lines, strict=True):
        assert line.startswith(f"error: {name} not installed: pip install 'geomon[all]'")
    assert not (tmp_path / "x").exists()
