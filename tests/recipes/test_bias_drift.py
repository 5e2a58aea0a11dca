"""A block under a common bias: its arithmetic, its records, and the claims that they decide."""

import math
import statistics

import numpy as np
import pytest
import torch
from tagged import reading_of
from torch import nn
from typer.testing import CliRunner

from geomon.record import tags
from recipes.bias_drift.__main__ import app
from recipes.bias_drift.block import KINDS, Stack, draw_direction, draw_inputs, draw_table
from recipes.bias_drift.claims import assertions, block_claims
from recipes.bias_drift.series import INPUT, Series, load_series
from recipes.bias_drift.watch import METRICS, read_levels
from recipes.study import load_claims

WIDTH, HEADS, SEQUENCES, LENGTH = 32, 2, 3, 12
TINY = [
    "--width", "16", "--heads", "2", "--trained-width", "16", "--sequences", "2", "--length", "8",
    "--directions", "1", "--processes", "1", "--steps", "2",
]  # fmt: skip


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = draw_inputs(SEQUENCES, LENGTH, draw_table(500, WIDTH, generator), generator)
    return hidden, draw_direction(WIDTH, generator)


@pytest.mark.parametrize("kind", KINDS)
def test_the_block_is_the_encoder_layer_of_torch(kind):
    torch.manual_seed(0)
    block = Stack(WIDTH, HEADS, kind).block
    theirs = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0, activation="gelu", layer_norm_eps=1e-12,
        batch_first=True, norm_first=kind == "pre_norm",
    )  # fmt: skip
    projections = (block.query, block.key, block.value)
    with torch.no_grad():
        for part in (block.query, block.key, block.widen):
            part.bias.normal_()
        theirs.self_attn.in_proj_weight.copy_(torch.cat([part.weight for part in projections]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([part.bias for part in projections]))
    theirs.self_attn.out_proj.load_state_dict(block.out.state_dict())
    theirs.linear1.load_state_dict(block.widen.state_dict())
    theirs.linear2.load_state_dict(block.narrow.state_dict())
    hidden, direction = draw()
    hidden = hidden + 3 * direction
    assert torch.allclose(block(hidden), theirs(hidden), atol=1e-5)


def direct(stack, hidden):
    """Every metric once more, from all rows, all pairs and all weights of attention."""
    block = stack.block
    entering = hidden if block.kind == "post_norm" else block.attention_norm(hidden)
    output = stack(hidden)
    query, key = (part(entering).unflatten(2, (HEADS, -1)) for part in (block.query, block.key))
    scores = torch.einsum("bihw,bjhw->bhij", query, key) / (WIDTH // HEADS) ** 0.5
    assert torch.allclose(scores[:, 1], block.scores(hidden, 1), atol=1e-6)
    weights = scores.softmax(dim=-1)
    entropy = -(weights * weights.log()).sum(dim=-1)
    found = {
        "cosine/layer_00": pair_cosine(hidden.flatten(0, 1)),
        "cosine/layer_01": pair_cosine(output.flatten(0, 1)),
        "drift_norm/layer_01": output.mean(dim=(0, 1)).norm(),
        "mean_norm/layer_00": hidden.norm(dim=2).mean(),
        "mean_norm/layer_01": output.norm(dim=2).mean(),
        "attention_entropy": entropy.mean(dim=(0, 2)),
        "attention_entropy_normalised": (entropy / math.log(LENGTH)).mean(dim=(0, 2)),
        "attention_extremes/layer_01/max": weights.amax(dim=3).mean(dim=(0, 2)),
        "attention_extremes/layer_01/median": weights.median(dim=3).values.mean(dim=(0, 2)),
        "attention_extremes/layer_01/min": weights.amin(dim=3).mean(dim=(0, 2)),
        "attention_extremes/layer_01/sequence_max": weights.amax(dim=(2, 3)).mean(dim=0),
        "attention_extremes/layer_01/sequence_min": weights.amin(dim=(2, 3)).mean(dim=0),
        "score_mean": scores.mean(dim=(0, 2, 3)),
        "score_spread": scores.var(dim=3, correction=0).mean(dim=(0, 2)).sqrt(),
    }
    means = {}
    for name, rows, layer in (("query", query, block.query), ("key", key, block.key)):
        by_head = rows.flatten(0, 1)
        # Equation 1 of the paper: E Q = W_Q mean(x) + b_Q.
        means[name] = layer(entering.mean(dim=(0, 1))).unflatten(0, (HEADS, -1))
        found[f"{name}_mean_norm"] = means[name].norm(dim=1)
        found[f"{name}_norm"] = by_head.norm(dim=2).mean(dim=0)
        found[f"{name}_cosine"] = torch.stack([pair_cosine(by_head[:, h]) for h in range(HEADS)])
        covariances = [torch.linalg.eigvalsh(by_head[:, h].T.cov()) for h in range(HEADS)]
        found[f"{name}_anisotropy"] = torch.stack([e[-1] / e.sum() for e in covariances])
    found["qk_dot"] = (means["query"] * means["key"]).sum(dim=1)
    found["qk_cosine"] = torch.cosine_similarity(means["query"], means["key"])
    return found


def pair_cosine(rows):
    unit = rows / rows.norm(dim=1, keepdim=True)
    cosines = unit @ unit.T
    count = len(rows)
    return (cosines.sum() - count) / (count * (count - 1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_holds_what_a_direct_computation_gives(kind, tmp_path):
    torch.manual_seed(1)
    stack = Stack(WIDTH, HEADS, kind)
    with torch.no_grad():
        for part in (stack.block.query, stack.block.key):
            part.weight.mul_(20)
            part.bias.normal_()
    hidden, direction = draw(1)
    read_levels(stack, hidden, [direction, -direction], [0.0, 0.3], tmp_path, step=0)
    series, other = load_series(tmp_path)
    assert series.readings[0] == other.readings[0]  # no bias has no direction
    assert series.values("query_mean_norm")[1] != other.values("query_mean_norm")[1]
    assert series.levels == [0, 0.3]
    for level, reading in zip(series.levels, series.readings, strict=True):
        with torch.no_grad():
            expected = direct(stack, hidden + level * direction)
        for name, value in expected.items():
            tag = name if "/" in name else tags.layer_tag(name, 1)
            mean = value.mean().item()
            assert reading.values[tag] == pytest.approx(mean, rel=2e-4, abs=2e-6), (tag, level)
        measured = {tag.split("/")[0] for tag in reading.values} - {"geomon"}
        assert {name.split("/")[0] for name in expected} == METRICS.keys() <= measured
        with torch.no_grad():
            scores = stack.block.scores(hidden + level * direction, 0).numpy()
        middle = series.scores[series.levels.index(level)][1]
        assert middle == pytest.approx(np.quantile(scores, 0.5, method="lower"), abs=1e-5)


def made_up(levels, **profiles):
    """A series with the given values of metrics by level."""
    readings = []
    for index, _ in enumerate(levels):
        values = {}
        for name, profile in profiles.items():
            metric, _, place = name.partition("__")
            layer, part = (int(place), "") if place.isdigit() else (1, place)
            heads = np.atleast_1d(profile[index]).tolist()
            values[tags.layer_tag(metric, layer, part)] = statistics.fmean(heads)
            for head, value in enumerate(heads if not part else ()):
                values[tags.layer_tag(metric, layer, tags.head_part(head))] = value
        readings.append(reading_of(values, 0))
    return Series(list(levels), readings, [[0.0] * 3] * len(levels))


def measure(name, series):
    (one,) = [each for each in assertions(2048, 64) if each.name == name]
    return one.measure(series)


def test_assertions_measure_what_they_say():
    levels = (0.0, 1.0, 8.0)
    series = made_up(
        levels,
        cosine__0=[0.0, 0.5, 0.9], cosine__1=[0.1, 0.45, 0.95],
        mean_norm__0=[0.5, 1.0, 8.0], drift_norm__1=[3.0, 4.0, 4.5],
        score_mean=[[0.0, 0.1], [0.2, -0.2], [0.5, -0.3]],
        attention_extremes__max=[0.01, 0.0102, 0.02],
        attention_entropy_normalised=[1.0, 0.9, 0.8],
        query_cosine=[0.2, 0.3, 0.3], key_cosine=[0.4, 0.3, 0.3],
    )  # fmt: skip
    expected = {
        "output_cosine_above_input": -0.05,
        "norm_of_mean_output_rises": 0.5,
        "norm_has_a_fixed_point": -3.5,
        "scores_leave_zero": 0.35,
        "sign_of_scores_depends_on_the_draw": 0.5,
        "row_maximum_rises": 2.0,
        "weak_at_low_bias": 1.02,
        "entropy_falls": -0.2,
        "queries_and_keys_cosine_without_bias": 0.3,
    }
    for name, value in expected.items():
        assert measure(name, series) == pytest.approx(value), name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run of everything, on text of random letters."""
    folder = tmp_path_factory.mktemp("bias")
    letters = np.random.default_rng(0).choice(list(b"abcdefgh "), 220_000).astype(np.uint8)
    data = folder / "text"
    data.write_bytes(letters.tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.enwik8.data._check", lambda *_: None)  # it is no enwik8
        arguments = ["--out", str(folder / "run"), "--seeds", "2", "--data", str(data), *TINY]
        first = CliRunner().invoke(app, arguments)
        times = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*.jsonl")}
        second = CliRunner().invoke(app, arguments)
    return folder / "run", first, second, times


def test_the_command_leaves_records_a_figure_and_claims(run):
    folder, first, _, times = run
    assert first.exit_code == 0, first.output
    # Two kinds and two seeds, of untrained blocks 9 levels, of trained ones 5.
    assert len(times) == 2 * 2 * (9 + 5)
    assert (folder / "figure.png").stat().st_size > 50_000
    claims = load_claims(folder)
    assert len({claim.name for claim in claims}) == len(claims)
    assert {len(claim.values) for claim in claims} == {2}
    for kind in KINDS:
        whole = [claim.name for claim in claims if claim.name.endswith(f"_{kind}")]
        assert sum(name.endswith(f"_trained_{kind}") for name in whole) == 3
        assert len(whole) == len(assertions(16, 8)) + 3
    (series,) = load_series(folder / "trained_pre_norm/seed_1", 2)
    assert [reading.step for reading in series.readings] == [2] * 5


def test_what_is_complete_is_not_made_again(run):
    _, _, second, times = run
    assert second.exit_code == 0, second.output
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_other_sizes_need_another_folder(run):
    folder, *_ = run
    arguments = ["--out", str(folder), "--seeds", "1", *TINY[:-2], "--steps", "0", "--length", "9"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "another length: choose another folder by --out" in result.stderr
    assert result.stderr.count("\n") == 1


def test_heads_that_do_not_share_the_width_get_one_clear_line(tmp_path):
    result = CliRunner().invoke(app, ["--out", str(tmp_path), "--width", "30", "--heads", "4"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --width 30")
    assert result.stderr.count("\n") == 1


def test_the_mean_norm_after_a_norm_is_an_identity_and_the_norm_of_the_mean_is_not(run):
    """Why both norms of figure 6 are drawn: the first is sqrt(width) whatever the bias."""
    folder, *_ = run
    for series in load_series(folder / "untrained_post_norm/seed_0"):
        assert series.values("mean_norm") == pytest.approx([4.0] * 9, rel=1e-5)
        drift = series.values("drift_norm")
        assert drift[0] < 2 < drift[-1]
        assert series.values("mean_norm", INPUT)[-1] == pytest.approx(128, rel=0.01)


def test_claims_name_the_block_and_its_state():
    series = made_up((0.0, 1.0), **{name: [0.1, 0.2] for name in METRICS if name != "score_mean"},
        score_mean=[[0.1, -0.1]] * 2, cosine__0=[0.0, 0.1], mean_norm__0=[1.0, 1.0],
    )  # fmt: skip
    given = {"tokens": 2048, "head_width": 64, "seconds": 1.0, "differs": "size"}
    claims = block_claims("pre_norm", [[series]] * 3, trained=True, **given)
    assert [claim.name for claim in claims] == [
        "output_cosine_above_input_trained_pre_norm", "score_spread_grows_trained_pre_norm",
        "entropy_falls_trained_pre_norm",
    ]  # fmt: skip
    assert [claim.verdict for claim in claims] == ["agrees", "agrees", "disagrees"]
