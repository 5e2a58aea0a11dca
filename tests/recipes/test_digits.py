"""The recipe digits: its networks, what is read off its records, and the command in a few steps."""

import math

import pytest
import torch
from typer.testing import CliRunner

from geomon import read
from recipes.digits.__main__ import app
from recipes.digits.data import load
from recipes.digits.findings import load_training
from recipes.digits.model import CONVOLUTIONAL, OneVectorPerImage, build
from recipes.study import load_claims

TINY = [
    "--seeds", "2", "--steps", "3", "--layers", "3", "--batch", "8", "--width", "16",
    "--heads", "2", "--processes", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The command's folder."""
    folder = tmp_path_factory.mktemp("digits")
    result = CliRunner().invoke(app, [*TINY, "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def test_every_image_is_trained_on_or_held_out():
    train, held_out = load(seed=1)
    assert (len(train.digits), len(held_out.digits)) == (1437, 360)
    pixels = torch.cat([train.pixels, held_out.pixels])
    assert (pixels.min(), pixels.max()) == (0, 1)
    other = load(seed=2)[1]
    assert not torch.equal(other.pixels, held_out.pixels)


@pytest.mark.parametrize("kind", ["transformer", "mixer", "convolutional"])
def test_every_network_learns_a_batch(kind):
    images, _ = load(seed=0)
    torch.manual_seed(0)
    model = build(kind, layers=2, width=32, heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(model(images.pixels[:32]), images.digits[:32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.5  # a guess among ten costs 2.3
    assert losses[-1] < losses[0] / 3


def test_an_unknown_network_is_refused():
    with pytest.raises(ValueError, match="expected one of transformer, mixer, convolutional"):
        build("perceptron", layers=1, width=8, heads=1)


def test_the_vector_of_an_image_holds_its_maps():
    torch.manual_seed(0)
    model = build(CONVOLUTIONAL, layers=2, width=16, heads=1).eval()
    pixels = load(seed=0)[1].pixels[:3]
    maps = model.embedding(pixels)
    for block in model.blocks:
        maps = block(maps)
    vectors = OneVectorPerImage(model)(pixels)
    assert vectors.shape == (3, 1, 8 * 64)
    assert torch.equal(vectors[:, 0], maps.flatten(1))


def test_maps_are_read_by_place_and_by_image(folder):
    by_place = read(folder / "convolutional" / "seed_0")[0]
    by_image = read(folder / "convolutional" / "seed_0" / "per_image")[0]
    assert (by_place.tokens, by_image.tokens) == (4096, 360)
    # The mean over images of a vector holds the mean of each place, and all means of places hold
    # that of the whole map.
    drift = by_image.values["drift_norm/layer_03"] / 8
    assert drift >= by_place.values["drift_norm/layer_03"] * 0.98


def test_the_command_leaves_records_claims_and_a_figure(folder):
    assert (folder / "digits.png").stat().st_size > 20_000
    transformer = load_training(folder / "transformer" / "seed_1")
    assert len(transformer.profile("cosine")) == 4
    heads = transformer.heads("qk_cosine")
    assert set(heads) == {(layer, head) for layer in (1, 2, 3) for head in (0, 1)}
    mean = math.fsum(abs(values[-1]) for values in heads.values()) / 6
    assert transformer.alignment()[-1] == pytest.approx(mean)
    claims = {claim.name: claim for claim in load_claims(folder)}
    assert len(claims) == 13
    entropies = transformer.layers("attention_entropy").values()
    largest = max(curve[-1] - curve[0] for curve in entropies)
    assert claims["vision_entropy_decays_at_every_layer"].values[1] == pytest.approx(largest)
    values = transformer.last.values
    cosines = [values[f"cosine/layer_0{layer}"] for layer in range(4)]
    bar = values["cosine/isotropic_pair"]
    assert claims["vision_transformer_anisotropic"].values[1] == pytest.approx(max(cosines) / bar)


def test_a_finished_training_is_not_made_again(folder):
    record = folder / "mixer" / "seed_0" / "readings.jsonl"
    before = record.read_bytes()
    again = CliRunner().invoke(app, [*TINY, "--out", str(folder)])
    assert again.exit_code == 0, again.output
    assert record.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--steps", "4"], "another steps"), (["--heads", "3"], "choose a multiple of 6")],
)
def test_bad_input_gets_one_clear_line(folder, arguments, message):
    result = CliRunner().invoke(app, [*TINY, "--out", str(folder), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
