"""The recipe's command, on models small enough for a test."""

import math
import os
import random
import re
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from geomon import read
from geomon.cli import make_app
from recipes.enwik8.text import spread
from recipes.enwik8.train import PRESETS, Batches, Decoder, bits, main
from support.forks import Forks

SMALL = ["--preset", "cpu", "--layers", "2", "--width", "32", "--heads", "2", "--batch", "16",
         "--steps", "40", "--accelerator", "cpu"]  # fmt: skip
SUBWORDS = [
    "--preset", "base", "--layers", "1", "--width", "32", "--heads", "2", "--context", "32",
    "--batch", "16", "--steps", "20", "--vocabulary", "300", "--precision", "32-true",
    "--accelerator", "cpu", "--logger", "csv",
]  # fmt: skip
ONE_STEP = ["--minutes", "0"]
NO_PICTURES = ["--logger", "csv"]
# The steps of the schedule in a run of forty updates.
READ = [0, 32, 40]
# Nothing listens on port 9: no network, whatever the machine has.
OFFLINE = {"ENWIK8": "", **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")}
PREPARATION = """
import itertools, os
import lightning.pytorch.loggers, torch.utils.tensorboard, matplotlib.backends.backend_agg
import transformers.models.gpt2.modeling_gpt2
from recipes.enwik8 import text, train
# To parse Python's whole library, and to draw a figure, takes as long as a training here.
sources, save = text.sources, train.save
text.sources = lambda library: itertools.islice(sources(library), 20)
train.save = lambda figure, path: save(figure, path) if "DRAWN" in os.environ else path
"""


@pytest.fixture(scope="module")
def start(forks, tmp_path_factory):
    """Start the command in a process that need not import anything."""
    prepared, folder = Forks(PREPARATION, forks), tmp_path_factory.mktemp("start")

    def started(*arguments: object, **more: str) -> Command:
        environment = OFFLINE | {"GEOMON_CACHE": str(folder / "cache")} | more
        return Command(prepared, folder, arguments, environment)

    yield started
    prepared.close()


class Command:
    """The command, running: its process, what it prints as it comes, and its errors at the end."""

    def __init__(self, forks, folder, arguments, environment) -> None:
        self._errors = folder / f"{len(list(folder.iterdir()))}"
        reader, writer = os.pipe()
        with self._errors.open("w") as errors:
            self.process = forks.start(
                "recipes.enwik8", *arguments, environment=os.environ | environment,
                stdout=writer, stderr=errors.fileno(),
            )  # fmt: skip
        os.close(writer)
        self.lines = open(reader)  # noqa: SIM115

    def end(self, code: int = 0) -> str:
        with self.lines:
            out = self.lines.read()
        assert self.process.wait(400) == code, self._errors.read_text()
        return out


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefgh", k=drawn.randint(2, 9))) for _ in range(500)]
    path.write_text("\n".join(" ".join(drawn.choices(words, k=12)) for _ in range(6000)))
    return path


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory):
    """A run without data and without network, and its output."""
    folder = tmp_path_factory.mktemp("recipe") / "run"
    return folder, start("--out", folder, *SMALL, DRAWN="1").end()


def test_without_network_it_names_its_fallback_and_leaves_everything(finished):
    folder, out = finished
    assert re.match(r"text: text that Python .* could not be downloaded", out)
    assert f"40 of 40 steps, {40 * 16 * 64:,} tokens" in out
    assert [int(row) for row in re.findall(r"(?m)^ *(\d+)(?=  )", out)] == READ  # a row for each
    readings = read(folder)
    assert [reading.step for reading in readings] == READ
    losses = [reading.values["training/probe_loss"] for reading in readings]
    assert losses == sorted(losses, reverse=True)  # of each step's own weights
    first = readings[0].training
    assert first["loss"] == pytest.approx(first["probe_loss"], rel=0.05)  # one unit for both
    assert " ".join(out.split()).count("bits/char") == 2
    assert (folder / "geometry.png").stat().st_size > 20_000
    assert list((folder / "tensorboard").glob("events*"))
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert f"weights of the highest intrinsic dimension: {folder / 'peak.pt'}" in out


def test_the_weights_of_the_highest_dimension_are_kept(finished):
    """At a fresh start in a folder of its own the last of the highest readings leaves its file."""
    folder, _ = finished
    dimensions = read(folder).series("twonn/mean")
    highest = max(zip(*dimensions, strict=True), key=lambda point: point[1])[0]
    kept = torch.load(folder / "peak.pt", weights_only=True)
    last = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    same = all(torch.equal(kept[name], last[f"network.{name}"]) for name in kept)
    assert same == (highest == 40)


def test_a_checkpoint_is_scanned_by_the_name_of_its_class(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(torch.randint(50, (64, 32)), "batch.pt")
    checkpoints = str(finished[0] / "checkpoints")
    given = ["--checkpoints", checkpoints, "--inputs", "batch.pt", "--device", "cpu"]
    found = CliRunner().invoke(make_app(), ["scan", "recipes.enwik8.train:Decoder", *given])
    assert found.exit_code == 0, found.output
    assert [reading.step for reading in read("scan")] == [40]


def values_of(readings):
    """Values measured at one look, by step; NaN equals NaN, and two looks depend on the machine."""
    others = ("geomon/", "update_size/", "unmoved/")
    return {
        each.step: {tag: repr(x) for tag, x in each.values.items() if not tag.startswith(others)}
        for each in readings
    }


def test_a_resumed_run_has_the_curves_of_an_uninterrupted_one(finished, start, tmp_path):
    command = start("--out", tmp_path / "cut", *SMALL, *NO_PICTURES)
    next(line for line in command.lines if line.split()[:1] == ["32"])
    command.process.send_signal(signal.SIGKILL)  # a checkpoint at every fourth step
    command.end(-signal.SIGKILL)
    assert len(read(tmp_path / "cut")) == 2
    start("--out", tmp_path / "cut", "--resume", "--accelerator", "cpu", *NO_PICTURES).end()
    cut = read(tmp_path / "cut")
    assert len(cut.runs) == 2
    assert values_of(cut) == values_of(read(finished[0]))


def test_ctrl_c_keeps_every_reading(start, tmp_path):
    command = start("--out", tmp_path / "run", *SMALL, *NO_PICTURES, "--steps", 100_000)
    next(line for line in command.lines if line.split()[:1] == ["40"])
    command.process.send_signal(signal.SIGINT)
    command.end(1)  # Lightning's own code for an interrupt
    assert [reading.step for reading in read(tmp_path / "run")][:3] == READ


def test_slices_give_the_weights_and_the_record_of_an_uninterrupted_run(start, text, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    start("--out", whole, "--data", text, *SUBWORDS).end()
    again = ["--resume", "--accelerator", "cpu", "--logger", "csv"]
    slices = [["--data", text, *SUBWORDS, *ONE_STEP], [*again, *ONE_STEP], again, again]
    for arguments, done in zip(slices, (1, 2, 20, 20), strict=True):
        out = start("--out", folder, *arguments).end()
        assert f"{done} of 20 steps, {done * 16 * 32:,} tokens" in out
        assert ("--resume goes on" in out) == (done < 20)
    one, other = (
        torch.load(each / "checkpoints" / "last.ckpt", weights_only=True)
        for each in (whole, folder)
    )
    assert (one["global_step"], one["lr_schedulers"]) == (20, other["lr_schedulers"])
    torch.testing.assert_close(one["state_dict"], other["state_dict"], rtol=0, atol=0)
    readings, uninterrupted = read(folder), read(whole)
    # Each slice reads at its begin and its end; what is read between depends on the time.
    assert {reading.step for reading in readings} >= {0, 1, 2, 20}
    assert values_of(readings)[20] == values_of(uninterrupted)[20]


# -- bad input -------------------------------------------------------------------------------------


def error_of(*arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main([str(each) for each in arguments])
    message = str(caught.value)
    assert re.fullmatch("error: [^\n]+", message)
    return message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no/such/file"], "no/such/file"),
        (["--data", "pyproject.toml"], "too short: text, "),
        (["--resume"], "there is no "),
        (["--heads", "3"], "must be divisible by num_heads"),
        (["--context", "100000"], "or a shorter --context"),
        (["--precision", "foo"], "'foo'"),
        (["--accelerator", "foo"], "accelerator"),
        (["--budget", "5"], "between 0 and 1"),
        (["--budget", "much"], "or '1%' for one per cent"),
        (["--vocabulary", "100"], "give 257 to 65536, or 0 for characters"),
    ],
)
def test_bad_input_gets_one_clear_line(arguments, message, text, tmp_path, monkeypatch):
    monkeypatch.setenv("ENWIK8", str(text))
    assert message in error_of("--preset", "cpu", "--out", tmp_path / "x", *arguments)


def test_a_run_is_not_written_over_and_goes_on_with_its_settings_and_its_text(
    finished, text, monkeypatch
):
    folder, _ = finished
    assert "holds a run" in error_of("--out", folder, *SMALL)
    assert "seed was 0" in error_of("--out", folder, "--resume", "--seed", 5)
    assert "data was None" in error_of("--out", folder, "--resume", "--data", text)
    monkeypatch.setenv("ENWIK8", str(text))
    assert "needs the text of the run" in error_of("--out", folder, "--resume")


# -- model and batches -----------------------------------------------------------------------------

TINY = PRESETS["cpu"] | {
    "layers": 2, "width": 16, "heads": 2, "context": 8, "batch": 4, "steps": 5, "warmup": 2,
    "arch": "gpt2", "tokens": 200, "bytes_per_token": 1.0, "seed": 0,
}  # fmt: skip


def model_of(**settings):
    torch.manual_seed(0)
    return Decoder(**(TINY | settings)).eval()


def logged_by(model, windows):
    logged = {}
    model.log = lambda name, value, **options: logged.update({name: value.item()})
    return model.training_step(windows, 0).item(), logged


def test_the_loss_is_logged_in_bits_per_character_or_per_byte():
    windows = torch.randint(200, (4, 9))
    loss, logged = logged_by(model_of(), windows)
    model, probe = model_of(), windows[:, :-1]
    with torch.no_grad():
        logits = model(probe)
    # A reading gives it for windows: for all their characters but the first.
    expected = logged_by(model_of(), probe)[1]["train/bits_per_character"]
    assert bits(logits, probe).item() == pytest.approx(expected, rel=1e-5)
    nats = F.nll_loss(logits.log_softmax(2).flatten(0, 1), windows[:, 1:].flatten()).item()
    assert loss == pytest.approx(nats / math.log(2), rel=1e-5)
    assert logged == {"train/bits_per_character": pytest.approx(loss, rel=1e-5)}
    loss, logged = logged_by(model_of(vocabulary=300, bytes_per_token=4.0), windows)
    assert loss == pytest.approx(nats / math.log(2) / 4, rel=1e-5)
    assert logged == {"train/bits_per_byte": pytest.approx(loss, rel=1e-5)}


def test_only_matrices_decay_and_the_rate_warms_up_and_falls_to_a_tenth():
    model = model_of(steps=40, warmup=10)
    (optimizer,), (plan,) = model.configure_optimizers()
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay == {id(each): 0.1 * (each.ndim > 1) for each in model.parameters()}
    assert plan["interval"] == "step"
    assert plan["scheduler"].base_lrs == [TINY["learning_rate"]] * 2
    rate, _ = plan["scheduler"].lr_lambdas
    falling = 0.1 + 0.9 * (1 + np.cos(np.pi * np.arange(30) / 30)) / 2
    np.testing.assert_allclose(
        [rate(step) for step in range(40)], [*np.arange(1, 11) / 10, *falling]
    )


IDS = np.random.default_rng(0).integers(0, 200, 20_000).astype(np.uint8)


def trained_on(*, rank=0, step=0, seed=0):
    model = SimpleNamespace(hparams=TINY | {"seed": seed}, global_rank=rank, global_step=step)
    batches = Batches(IDS, model)
    assert len(batches) == TINY["steps"]  # Lightning counts the batches before a resume too
    return torch.cat(list(batches))


def test_training_windows_are_pieces_of_the_text_and_others_on_each_rank_and_seed():
    first = trained_on()
    assert (first.shape, first.dtype) == ((20, 9), torch.int64)
    assert all(bytes(window.tolist()) in IDS.tobytes() for window in first)
    seen = [first, trained_on(rank=1), trained_on(rank=2), trained_on(seed=1)]
    assert len(torch.cat(seen).unique(dim=0)) == 80
    assert torch.equal(trained_on(step=2), first[2 * TINY["batch"] :])


def test_windows_are_spread_from_the_first_character_to_the_last():
    found = spread(np.arange(100, dtype=np.uint8), 10, 4)
    assert found[:, [0, -1]].tolist() == [[0, 9], [30, 39], [60, 69], [90, 99]]
