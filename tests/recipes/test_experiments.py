"""Every experiment leaves records, claims and pictures, and repeats nothing that is complete."""

import inspect
import subprocess

import pytest
import torch
import typer
from typer.testing import CliRunner

from geomon import read
from recipes.study.__main__ import app, experiments
from recipes.study.claim import load_results
from recipes.study.experiment import in_processes

SMALL = ["--width", "16", "--heads", "2"]
TINY = {
    "decoder": [*SMALL, "--context", "16", "--batch", "2", "--steps", "8", "--warmup", "1",
                "--windows", "64", "--rows", "256", "--first", "4"],
    "encoder_decoder": [*SMALL, "--layers", "3", "--context", "16", "--batch", "2", "--steps", "2"],
    "overfit": [*SMALL, "--layers", "1", "--context", "16", "--batch", "2", "--steps", "3",
                "--distance", "2", "--few", "100"],
    "digits": [*SMALL, "--layers", "3", "--batch", "8", "--steps", "3"],
    "grokking": ["--modulus", "23", "--steps", "4", "--interval", "2", "--batch", "32",
                 "--controls", "3"],
    "bias_drift": [*SMALL, "--trained-width", "16", "--sequences", "2", "--length", "8",
                   "--directions", "2", "--steps", "2"],
}  # fmt: skip
# Numbers of trainings from two seeds.
TRAININGS = {
    "decoder": 2, "encoder_decoder": 6, "overfit": 4, "digits": 6, "grokking": 5, "bias_drift": 8,
}  # fmt: skip


def run(*arguments: object):
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Random letters."""
    path = tmp_path_factory.mktemp("text") / "letters"
    letters = torch.randint(97, 123, (410_000,), generator=torch.Generator().manual_seed(0))
    path.write_bytes(bytes(letters.tolist()))
    return path


@pytest.fixture(scope="module", params=TINY)
def finished(request, text, tmp_path_factory):
    """The name of an experiment, its arguments, and what its command has printed."""
    name = request.param
    common = ["--data", text, "--seeds", 2, "--processes", 1, *TINY[name]]
    arguments = [name, *common, "--out", tmp_path_factory.mktemp(name)]
    if name == "decoder":  # a single training, since each process has to import everything
        with pytest.MonkeyPatch.context() as here:
            here.setattr("recipes.study.experiment.fit", None)
            here.setattr("recipes.study.__main__.show", lambda experiment, folder: None)
            first = run(*arguments, "--seeds", 1, "--processes", 2)
        assert first.exit_code == 0, first.output
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return name, arguments, done.output


def test_every_experiment_is_tried_here():
    assert set(experiments()) == set(TINY)


@pytest.mark.filterwarnings("ignore:.*sequences")
def test_the_command_leaves_records_claims_and_pictures(finished):
    name, arguments, out = finished
    folder = arguments[-1]
    assert f"{TRAININGS[name]} of {TRAININGS[name]} trainings are complete" in out
    assert len([*folder.glob("seed_*/*/finished.json")]) == TRAININGS[name]
    for picture in folder.glob("*.png"):
        assert 10_000 < picture.stat().st_size < 200_000
        assert f"figure: {picture}" in out
    results = load_results(folder)
    assert results.experiment == name
    names = [claim.name for claim in results.claims]
    assert len(set(names)) == len(names) > 1
    for claim in results.claims:
        assert f"{claim.verdict:<9}  {claim.name}: " in out
        of_controls = "grokking" in name and "control" in claim.quantity
        assert claim.repeated != "seed" or of_controls or len(claim.values) <= 2


def values_of(path):
    """Values of the last reading."""
    found = read(path)[-1].values
    return {tag: value for tag, value in found.items() if not tag.startswith("geomon/")}


@pytest.mark.filterwarnings("ignore:.*sequences")
def test_what_is_complete_is_not_repeated_and_what_was_broken_off_is_the_same_again(
    finished, monkeypatch
):
    # Pictures were drawn once above, and take half of the time.
    monkeypatch.setattr("recipes.study.experiment.save_small", lambda figure, path: path)
    _, arguments, _ = finished
    folder = arguments[-1]
    broken = sorted(folder.glob("seed_*/*/finished.json"))[0]
    records = sorted(folder.glob("**/readings.jsonl"))
    before = {path: path.stat().st_mtime_ns for path in records}
    of_broken = {path: values_of(path) for path in records if broken.parent in path.parents}
    broken.unlink()  # as if it had been ended before its last step
    assert run(*arguments).exit_code == 0
    for path, values in of_broken.items():  # also where another process found them
        assert values_of(path) == pytest.approx(values, rel=1e-3, nan_ok=True)
    changed = {path for path in records if path.stat().st_mtime_ns != before[path]}
    assert changed == of_broken.keys()
    assert not list(folder.glob("**/readings.1.jsonl"))


def test_a_folder_of_other_settings_is_refused(finished):
    _, arguments, _ = finished
    other = run(*arguments, "--steps", 9)
    assert (other.exit_code, other.stderr.count("\n")) == (2, 1)
    assert "holds a training with another steps: choose another folder" in other.stderr


def test_calls_are_made_side_by_side(tmp_path, capsys):
    """Each of two calls waits for what the other one writes."""
    wait = "touch $0; for i in $(seq 3000); do test -e $1 && exit 0; sleep 0.01; done; exit 1"
    one, other = tmp_path / "one", tmp_path / "other"
    calls = [(["sh", "-c", wait, *both],) for both in ((one, other), (other, one))]
    in_processes(subprocess.check_call, calls, 2)
    assert "2 of 2 trainings are complete" in capsys.readouterr().out
    with pytest.raises(subprocess.CalledProcessError):
        in_processes(subprocess.check_call, [(["false"],), (["true"],)], 2)


@pytest.mark.parametrize("name", TINY)
def test_every_option_says_what_it_is(name):
    command = typer.main.get_command(app).commands[name]
    assert command.help == inspect.getdoc(experiments()[name])
    helps = [option.help for option in command.params]
    assert all(words and words.endswith((".", "...")) for words in helps)
    assert len(set(helps)) == len(helps)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decoder", "--width", 10, "--heads", 4], "--width 10 cannot be shared among --heads 4"),
        (["encoder_decoder", "--data", "nowhere"], "nowhere cannot be read"),
        (["overfit", "--few", 20], "--few 20 holds no window of --context 32"),
        (["digits", "--heads", 3], "choose a multiple of 6"),
        (["bias_drift", "--width", 30, "--heads", 4], "--width 30 and --trained-width 256 cannot"),
        (["decoder", "--warmup", 900], "--warmup 900 leaves nothing of --steps 750"),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments, words, tmp_path):
    done = run(*arguments, "--out", tmp_path)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
