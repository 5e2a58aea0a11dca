"""Models that differ in their mask alone, and claims that follow from their profiles."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tagged import reading_of
from typer.testing import CliRunner

from geomon import read, select
from geomon.one_shot import measure
from geomon.record import Record
from recipes.encoder_decoder.__main__ import app
from recipes.encoder_decoder.claims import claims, deviations, relative_range, table
from recipes.encoder_decoder.model import Kind, Size, Transformer
from recipes.encoder_decoder.train import KINDS, adamw, objective
from recipes.enwik8.data import ENWIK8
from recipes.study import load_claims, mark_finished

TINY = Size(layers=3, width=16, heads=2, context=16)
CHARACTERS = torch.randint(20, (2, 16), generator=torch.Generator().manual_seed(0))


def model(kind: Kind) -> Transformer:
    torch.manual_seed(0)
    return Transformer(20, TINY, kind)


@pytest.mark.parametrize("name", KINDS)
def test_a_decoder_alone_is_blind_to_what_follows(name):
    network = model(KINDS[name])
    changed = CHARACTERS.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 20
    moved = (network(changed) - network(CHARACTERS)).abs().amax((0, 2)) > 1e-6
    assert moved[8:].any()
    assert bool(moved[:8].any()) == (not KINDS[name].causal)


@pytest.mark.parametrize(("name", "uniform"), [("decoder", False), ("decoder_uniform", True)])
def test_attention_is_uniform_where_it_should_be(name, uniform):
    metrics = select("attention_entropy_normalised")
    values = measure(model(KINDS[name]), CHARACTERS, metrics=metrics)
    entropy = values["attention_entropy_normalised/mean"]
    assert (entropy > 1 - 1e-6) == uniform


def test_a_masked_model_is_asked_for_about_15_per_cent_and_sees_none_of_them():
    network = model(KINDS["encoder"])
    windows = torch.randint(20, (200, 17), generator=torch.Generator().manual_seed(1))
    seen = []
    network.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    loss = objective(network, windows, torch.Generator().manual_seed(2))
    masked = seen[0] == network.mask_id
    assert masked.float().mean() == pytest.approx(0.15, abs=0.02)
    assert torch.equal(seen[0][~masked], windows[:, :-1][~masked])
    logits = network(seen[0])[masked]
    expected = -F.log_softmax(logits, 1).gather(1, windows[:, :-1][masked][:, None]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_causal_model_is_asked_for_the_next_character():
    network = model(KINDS["decoder"])
    windows = torch.randint(20, (3, 17), generator=torch.Generator().manual_seed(1))
    logits = F.log_softmax(network(windows[:, :16]), 2)
    expected = -logits.gather(2, windows[:, 1:, None]).mean()
    loss = objective(network, windows, torch.Generator())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_weight_decay_is_for_matrices():
    groups = adamw(model(KINDS["encoder"]), 1e-3).param_groups
    assert {len(p.shape) for p in groups[0]["params"]} == {2}
    assert {len(p.shape) for p in groups[1]["params"]} == {1}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


profiles = st.lists(
    st.lists(st.floats(0.1, 1), min_size=3, max_size=3), min_size=2, max_size=5
)  # fmt: skip


@settings(deadline=None)
@given(profiles, st.floats(0.1, 10))
def test_deviations_do_not_see_what_is_common(curves, factor):
    plain = deviations(curves)
    assert len(plain) == len(curves)
    assert all(each >= 0 for each in plain)
    moved = [[value + place for place, value in enumerate(curve)] for curve in curves]
    assert deviations(moved) == pytest.approx(plain, abs=1e-9)
    assert deviations([curves[0]] * 3) == pytest.approx([0, 0, 0], abs=1e-12)
    scaled = [factor * value for value in curves[0]]
    assert relative_range(scaled) == pytest.approx(relative_range(curves[0]))


# -- claims, from records of known shape -----------------------------------------------------------

BELL = [0.2, 0.4, 0.6, 0.8, 0.6, 0.4, 0.2]
LEVEL = [0.15, 0.15, 0.16, 0.16, 0.16, 0.15, 0.15]


def values_of(layers: list[float], cosine: float) -> dict[str, float]:
    found = {"training/held_out_loss": 2.0, "anisotropy/final_norm_layer_06": layers[-1]}
    for layer, value in enumerate(layers):
        found[f"anisotropy/layer_{layer:02d}"] = value
        found[f"anisotropy_no_sinks/layer_{layer:02d}"] = value
        found[f"cosine/layer_{layer:02d}"] = cosine
    return found


def write(folder, ends: dict[str, tuple[list[float], float]], seeds: int = 3) -> None:
    start = reading_of(values_of([0.1] * 7, 0.0), 0)
    for seed in range(seeds):
        for name, (layers, cosine) in ends.items():
            path = folder / f"seed_{seed}" / name
            apart = 0.05 if name == "decoder" else 0.001
            own = [value + apart * (layer == 2 * seed + 1) for layer, value in enumerate(layers)]
            record = Record(path)
            record.begin(0, {})
            record.write(start)
            record.write(reading_of(values_of(own, cosine), 8))
            record.close()
            mark_finished(path, {}, 3.0)


def test_records_as_published_agree_with_every_claim(tmp_path):
    kinds = {"encoder": (LEVEL, 0.1), "decoder_uniform": (LEVEL, 0.1)}
    write(tmp_path, {"decoder": (BELL, 0.5), **kinds})
    found = claims(tmp_path)
    assert {each.name: each.verdict for each in found if each.verdict != "agrees"} == {}
    assert len({each.name for each in found}) == len(found) == 14
    assert {each.seconds for each in found} == {3 * 3 * 3.0 / 2}


def test_records_of_the_opposite_disagree(tmp_path):
    bowl = [0.9 - value for value in BELL]
    kinds = {"encoder": (BELL, 0.1), "decoder_uniform": (BELL, 0.5)}
    write(tmp_path, {"decoder": (bowl, 0.1), **kinds})
    verdicts = {each.name: each.verdict for each in claims(tmp_path)}
    for name in (
        "decoder_bell", "decoder_bell_after_final_norm", "decoder_bell_without_massive_rows",
        "decoder_peak_in_the_middle", "encoder_flat", "encoder_flat_over_blocks",
        "attention_makes_the_bell", "attention_raises_the_cosine",
    ):  # fmt: skip
        assert verdicts[name] == "disagrees", name


def test_one_seed_decides_nothing(tmp_path):
    write(tmp_path, dict.fromkeys(KINDS, (BELL, 0.5)), seeds=1)
    found = claims(tmp_path)
    assert {each.verdict for each in found} == {"undecided"}
    assert "encoders_consistent" not in {each.name for each in found}
    assert {each.measured.margin for each in found} == {math.inf}
    assert len(table(tmp_path)) == 2 + len(KINDS)


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "prefix"
    letters = torch.randint(97, 123, (180_000,), generator=torch.Generator().manual_seed(0))
    path.write_bytes(ENWIK8.head + bytes(letters.tolist()))
    return path


def run(*arguments: object):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_the_command_leaves_records_claims_and_a_picture_and_repeats_nothing(text, tmp_path):
    sizes = ["--layers", 3, "--width", 16, "--heads", 2, "--context", 16, "--batch", 2]
    common = ["--data", text, "--out", tmp_path / "o", "--seeds", 1, "--processes", 1, *sizes]
    result = run(*common, "--steps", 2)
    assert result.exit_code == 0, result.output
    assert "undecided  decoder_bell:" in result.output
    folders = [tmp_path / "o" / "seed_0" / name for name in KINDS]
    for folder in folders:
        readings = read(folder)
        assert [each.step for each in readings] == [0, 2]
        assert all(each.values["training/held_out_loss"] > 2 for each in readings)
        assert len(readings.layers("anisotropy")) == 4
    assert {each.name for each in load_claims(tmp_path / "o")} >= {"decoder_bell", "encoder_flat"}
    assert (tmp_path / "o" / "encoder_decoder.png").stat().st_size > 20_000

    before = {folder: (folder / "readings.jsonl").stat().st_mtime_ns for folder in folders}
    finished = json.loads((folders[0] / "finished.json").read_text())
    (folders[1] / "finished.json").unlink()  # as if it had been ended before its last step
    assert run(*common, "--steps", 2).exit_code == 0
    after = {folder: (folder / "readings.jsonl").stat().st_mtime_ns for folder in folders}
    assert [folder for folder in folders if before[folder] != after[folder]] == [folders[1]]
    assert [path.name for path in folders[1].glob("readings*")] == ["readings.jsonl"]

    other = run(*common, "--steps", 3)
    assert other.exit_code == 2
    assert "holds a training with another steps" in other.stderr
    assert other.stderr.count("\n") == 1
    assert json.loads((folders[0] / "finished.json").read_text()) == finished


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--width", 10, "--heads", 4], "--width 10 cannot be shared among --heads 4"),
        (["--data", "/nowhere"], "/nowhere does not exist"),
    ],
)
def test_what_cannot_be_run_is_one_line(arguments, words, tmp_path):
    result = run("--out", tmp_path, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
