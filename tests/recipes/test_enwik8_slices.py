"""A run on subwords, made piece by piece: each slice ends by its minutes and is resumed."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import Forks

from geomon import read

ROOT = Path(__file__).parent.parent.parent
TINY = [
    "--preset", "base", "--layers", "2", "--width", "32", "--heads", "2", "--context", "32",
    "--batch", "16", "--steps", "20", "--vocabulary", "300", "--accelerator", "cpu",
    "--precision", "32-true", "--logger", "csv",
]  # fmt: skip
PREPARATION = """
import lightning.pytorch.loggers, matplotlib.backends.backend_agg
import transformers.models.gpt2.modeling_gpt2
import recipes.enwik8.__main__, recipes.enwik8.train
"""
SHORT = ["--minutes", "0.0001"]  # one step, whatever the machine


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefgh", k=drawn.randint(2, 9))) for _ in range(500)]
    path.write_text("\n".join(" ".join(drawn.choices(words, k=12)) for _ in range(6000)))
    return path


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """Runs the command on the text in a folder, and returns what it printed."""
    forks, errors = Forks(PREPARATION), tmp_path_factory.mktemp("errors") / "stderr"

    def finished(folder: Path, *arguments: object) -> str:
        reader, writer = os.pipe()
        with errors.open("w") as file:
            process = forks.start(
                "recipes.enwik8", "--out", folder, *TINY, *arguments,
                environment=os.environ | {"ENWIK8": ""}, stdout=writer, stderr=file.fileno(),
            )  # fmt: skip
        os.close(writer)
        with open(reader) as lines:
            out = lines.read()
        assert process.wait(400) == 0, errors.read_text()
        return out

    yield finished
    forks.close()


@pytest.fixture(scope="module")
def whole(run, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, run(folder, "--data", text)


@pytest.fixture(scope="module")
def sliced(run, text, tmp_path_factory):
    """Three slices: the folder, and what each printed."""
    folder = tmp_path_factory.mktemp("sliced") / "run"
    first = run(folder, "--data", text, *SHORT)
    made = (folder / "text" / "ids.npy").stat().st_mtime_ns
    second = run(folder, "--resume", *SHORT)
    third = run(folder, "--resume")
    assert (folder / "text" / "ids.npy").stat().st_mtime_ns == made
    return folder, [first, second, third]


def slice_line(out):
    (line,) = [line for line in out.splitlines() if line.startswith("slice: ")]
    return line


def test_slices_say_what_they_did_and_how_to_go_on(sliced):
    folder, printed = sliced
    first, second, third = map(slice_line, printed)
    each = 16 * 32
    assert "steps 0 to 1 of 20 " in first
    assert f"; {each} of {20 * each:,} tokens trained; " in first
    assert "steps 1 to 2 of 20 " in second
    assert "steps 2 to 20 of 20 " in third
    assert f"; {20 * each:,} of {20 * each:,} tokens trained; " in third
    for line in (first, second):
        assert f"go on with --resume --out {folder}" in line
        assert "nats per token" in line
    assert "go on" not in third


def test_an_uninterrupted_run_is_no_slice(whole):
    _, out = whole
    assert "slice: " not in out


def test_slices_give_the_weights_of_an_uninterrupted_run(whole, sliced):
    one, other = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        for folder, _ in (whole, sliced)
    )
    assert one["global_step"] == other["global_step"] == 20
    assert one["lr_schedulers"] == other["lr_schedulers"]
    for name, weights in one["state_dict"].items():
        assert torch.equal(weights, other["state_dict"][name]), name


def test_slices_give_one_record(whole, sliced):
    readings, uninterrupted = (read(folder) for folder, _ in (sliced, whole))
    assert [reading.step for reading in uninterrupted] == [0, 16, 20]
    # Each slice reads once more at its end.
    steps = [reading.step for reading in readings]
    assert steps == sorted(set(steps))
    assert {0, 1, 2, 20} <= set(steps)
    assert len(readings.runs) == 3
    last, expected = readings[-1].values, uninterrupted[-1].values
    for tag in ("twonn/mean", "training/probe_loss", "training/validation/nats_per_token"):
        assert last[tag] == expected[tag]


def test_the_loss_is_shown_per_token_and_per_byte(whole):
    folder, out = whole
    (line,) = [line for line in out.splitlines() if "validation: " in line]
    words = line.split()
    nats, bits = float(words[1]), float(words[5])
    assert line.strip() == f"validation: {nats:.3f} nats per token, {bits:.3f} bits per byte."
    made = json.loads((folder / "text" / "corpus.json").read_text())
    ratio = made["tokens"][1] / made["bytes"][1]
    assert bits == pytest.approx(nats * ratio / torch.tensor(2.0).log().item(), abs=2e-3)
    assert "300 subwords" in out.splitlines()[0]


def test_a_run_that_has_ended_is_not_said_to_be_trained_on(whole, run, tmp_path):
    folder, _ = whole
    copy = shutil.copytree(folder, tmp_path / "copy")
    out = run(copy, "--resume")
    assert "slice: " not in out
    assert "bits per byte" in out


def test_another_text_is_refused_on_a_resume(sliced, tmp_path):
    folder, _ = sliced
    other = tmp_path / "other"
    other.write_text("something else " * 20_000)
    done = subprocess.run(
        [sys.executable, "-m", "recipes.enwik8", "--out", folder, *TINY, "--resume",
         "--data", other],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "needs the text of the earlier run" in line
