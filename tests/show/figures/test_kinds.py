"""Figures by kind: what a run can give, what they show, and what they say where it cannot."""

import numpy as np
import pytest
import torch
from tagged import with_values
from typer.testing import CliRunner

from geomon.analysis.queries_keys import chance_limit, queries_and_keys
from geomon.cli import make_app
from geomon.kernels.baselines import isotropic_cosine_magnitude
from geomon.kernels.token_types import token_types
from geomon.record import Readings, Record, read, tags
from geomon.record.arrays import ArrayPlace
from geomon.show import commands
from geomon.show.colours import BLUE, GREY, VERMILLION
from geomon.show.figures import KINDS, as_image, draw, page
from geomon.show.figures.run import title_of
from geomon.show.panels import NotMeasuredError

LAYERS, HEADS, WIDTH, ROWS = 4, 4, 8, 6
STEPS = (0, 16, 128, 1500)


def more_values(progress: float) -> dict[str, float]:
    """What the synthetic runs of other tests lack."""
    found = {"attention_entropy/null": 3.1, "qk_cosine/null_magnitude": 0.3}
    found["training/loss"] = 5 - 3 * progress
    for layer in range(LAYERS + 1):
        shares = {"mean": 0.2 + 0.1 * layer * progress, "between": 0.3}
        shares["within"] = 1 - sum(shares.values())
        for part, value in shares.items():
            found[tags.layer_tag("variance_shares", layer, part)] = value
        found[tags.layer_tag("variance_shares", layer)] = 0.5
        found |= {tags.layer_tag(n, layer): 0.1 * (layer + 1) for n in ("drift_norm", "twonn")}
        found[tags.layer_tag("cosine", layer)] = (0.1, 0.3, 0.2, 0.4, 0.5)[layer]
        found[tags.layer_tag("variance", layer)] = 10.0
    for scale in (2, 4, 8):
        found[tags.mean_tag("gride", f"k{scale}")] = 3.0 + scale
    return found


def arrays_at(progress: float) -> dict[ArrayPlace, np.ndarray]:
    """Mean queries and keys of head h of layer l at a planted angle, growing."""
    generator = np.random.default_rng(3)
    found = {}
    for layer in range(LAYERS + 1):
        eigenvalues = np.sort(generator.exponential(size=WIDTH))[::-1]
        counts = generator.integers(10, 40, 12)
        found |= {
            ArrayPlace("", "eigenvalues", layer): eigenvalues,
            ArrayPlace("", "type_ids", layer): np.arange(12),
            ArrayPlace("", "type_rows", layer): counts,
            ArrayPlace("", "type_square_of_mean", layer): 5 + generator.random(12),
            ArrayPlace("", "type_scatter", layer): counts * (2 + generator.random(12)),
        }
        if layer == 0:
            continue
        angles = np.pi * (np.arange(HEADS) + HEADS * (layer - 1)) / (HEADS * LAYERS)
        query = np.zeros((HEADS, WIDTH))
        key = np.zeros((HEADS // 2, WIDTH))  # two query heads share a key head
        key[:, 0] = 1 + progress
        query[:, 0], query[:, 1] = np.cos(angles), np.sin(angles)
        query *= 1 + 2 * progress
        found[ArrayPlace("", "mean_query", layer)] = query.astype(np.float32)
        found[ArrayPlace("", "mean_key", layer)] = key.astype(np.float32)
        for name, mean in (("queries", query), ("keys", key)):
            noise = 0.3 * generator.standard_normal((ROWS, *mean.shape))
            found[ArrayPlace("", name, layer)] = (mean + noise).astype(np.float16)
    return found


def write_run(folder, readings: Readings, *, with_arrays: bool = True) -> Readings:
    record = Record(folder)
    facts = {"model": "Synthetic", "parameters": 1_234_567, "layers": ["block"] * LAYERS}
    record.begin(readings[0].step, facts | readings.runs[0])
    last = max(readings[-1].step, 1)
    for reading in readings:
        progress = reading.step / last
        whole = with_values(reading, {**more_values(progress), **reading.values})
        record.write(whole)
        if with_arrays:
            record.write_arrays(whole, arrays_at(progress))
    record.close()
    return read(folder)


@pytest.fixture
def run(make_readings, tmp_path):
    return write_run(tmp_path, make_readings(STEPS, layers=LAYERS, heads=HEADS))


def words_of(figure) -> str:
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    return " | ".join([figure.get_suptitle(), *titles, *texts])


def small(figure) -> np.ndarray:
    figure.dpi = 45
    return as_image(figure)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_drawn_and_can_be_for_a_dark_page(run, kind):
    assert "not measured" not in words_of(draw(kind, run))
    with page(dark=True):
        image = small(draw(kind, run))
    assert image.std() > 5
    assert image[0, 0].max() < 30
    assert (image.min(axis=2) > 150).any()  # what is written is light


@pytest.mark.parametrize("kind", ["heads", "cosines"])
def test_large_models_are_drawn(make_readings, kind):
    figure = draw(kind, make_readings((0, 16), layers=30, heads=20))
    assert len([axes for axes in figure.axes if axes.get_visible()]) <= 13
    assert "12 of 30 layers" in words_of(figure) or kind == "heads"


def test_the_commands_know_all_kinds():
    assert tuple(KINDS) == commands._KINDS


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "run"])
def test_a_run_that_cannot_give_a_figure_says_what_was_not_measured(make_readings, kind):
    bare = make_readings(
        without=["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy"]
    )
    for readings in (bare, Readings([], [])):
        with pytest.raises(NotMeasuredError) as raised:
            draw(kind, readings)
        text = str(raised.value)
        assert "not measured" in text or "stand beside the record" in text or "layers" in text
        assert "\n" not in text


# -- queries and keys ------------------------------------------------------------------------------


def test_the_most_similar_and_the_most_opposite_head_are_found(run):
    for words in (words_of(draw("means", run)), words_of(draw("clouds", run))):
        assert "most similar head\nlayer 1, head 0, cosine +1.00" in words
        assert "most opposite head\nlayer 4, head 3, cosine −0.98" in words
    assert words.count(": cosine +1.00") == words.count(": cosine −0.98") == 4
    assert "from step 0 (open) to step 1,500 (filled)" in words_of(draw("means", run))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_left_out(run, bad):
    for step in run.folder.steps("probe"):
        arrays = arrays_at(step / STEPS[-1])
        arrays["", "queries", 1][0, 0] = bad
        arrays["", "mean_query", 2][1] = bad
        run.folder.write(step, "probe", arrays)
    for kind in ("means", "clouds"):
        small(draw(kind, run))


def test_a_figure_and_a_summary_count_the_same_heads(run):
    """Of isotropic directions one head in twenty lies outside its own band of 95 %."""
    last = run[-1]
    cosines = 2 * [0.9, -0.9, 0.8, 0.75, 0.6, -0.6, 0.4, -0.2]
    names = [f"qk_cosine/layer_{n:02d}/head_{h}" for n in range(1, 5) for h in range(4)]
    values = dict(last.values) | dict(zip(names, cosines, strict=True))
    values["qk_cosine/null_magnitude"] = isotropic_cosine_magnitude(16)
    readings = Readings([], [*run.readings[:-1], with_values(last, values)])
    figure = draw("cosines", readings)
    found = queries_and_keys(readings)
    counts = [len(found.of(each)) for each in ("similar", "opposite", "chance")]
    assert counts == [6, 2, 8]
    assert sum(abs(value) > chance_limit(16) for value in cosines) == 12
    assert (
        f"Of 16 heads {counts[0]} are similar at the end (orange), {counts[1]} opposite (blue), "
        f"{counts[2]} within the band of chance (5 % over all heads, ±{found.limit:.2f})"
    ) in words_of(figure)
    lines = [line for axes in figure.axes for line in axes.lines if len(line.get_xdata()) == 4]
    for colour, count in zip((VERMILLION, BLUE, GREY), counts, strict=True):
        assert sum(line.get_color() == colour for line in lines) == count
    (band,) = figure.axes[0].patches
    assert band.get_y() + band.get_height() == pytest.approx(found.limit)


@pytest.mark.parametrize("layers", [1, 2, 13])
def test_the_title_of_few_and_of_many_layers_stays_inside(make_readings, tmp_path, layers):
    figure = draw("cosines", write_run(tmp_path, make_readings((0, 8), layers=layers, heads=8)))
    figure.draw_without_rendering()
    title, label = (text.get_window_extent() for text in (figure._suptitle, figure._supylabel))
    assert title.x0 > 0
    assert title.x1 < figure.bbox.x1
    assert label.y1 < title.y0


# -- other figures ---------------------------------------------------------------------------------


def test_the_line_through_token_types_is_that_of_the_metric(make_readings, tmp_path):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (400,), generator=generator)
    scale = 1 + torch.arange(9)[ids, None] / 3
    hidden = scale * torch.randn(400, 6, generator=generator) + ids[:, None] / 5
    found = token_types(hidden, ids)
    fit = found.norm_variance_slope()
    run = write_run(tmp_path, make_readings((0,)), with_arrays=False)
    arrays = {"type_ids": ids.unique(), "type_rows": found.rows, "type_square_of_mean": found.m}
    arrays["type_scatter"] = found.scatter
    run.folder.write(0, "probe", {ArrayPlace("", n, 1): a.numpy() for n, a in arrays.items()})
    figure = draw("norms", run)
    words = f"{words_of(figure)} {figure.axes[0].get_xlabel()}".replace("−", "-")
    assert f"slope {fit.slope.item():+.2f}, R² {fit.r_squared.item():.2f}" in words
    assert f"Q varies by {100 * fit.q_variation.item():.0f} %" in words
    assert f"{int(fit.types)} token types" in words


@pytest.mark.parametrize(
    ("kind", "metric", "words"),
    [
        ("map", "anisotropi", r"anisotropi: not measured in this run: did you mean anisotropy"),
        ("map", "zzz", r"not measured in this run; .*twonn, .* were$"),
        ("heads", "twonn", r"twonn of single heads: not measured in this run; .*qk_cosine"),
        ("cosines", "qk_cosin", r"did you mean qk_cosine"),
    ],
)
def test_a_metric_that_is_not_there_is_answered_by_those_that_are(run, kind, metric, words):
    with pytest.raises(NotMeasuredError, match=words):
        draw(kind, run, metric)


@pytest.mark.parametrize("rows", [9, 20])  # too few of each type; all types alike
def test_where_types_give_no_line_none_is_said(run, rows):
    alike = {"type_rows": rows, "type_square_of_mean": 5.0, "type_scatter": 40.0}
    for step in run.folder.steps("probe"):
        arrays = arrays_at(step / STEPS[-1])
        for layer in range(LAYERS + 1):
            arrays |= {ArrayPlace("", name, layer): np.full(12, x) for name, x in alike.items()}
        run.folder.write(step, "probe", arrays)
    figure = draw("norms", run)
    assert ("fewer than 3 token types come 10 times" in words_of(figure)) == (rows < 10)
    assert figure.axes[0].get_title("left").endswith("Layer 0, step 1,500")
    assert "slope" not in figure.axes[0].get_xlabel()


def test_p_values_stand_over_training(run):
    correlation, p_values = draw("drift", run).axes
    assert "Pearson" in correlation.texts[-1].get_text()
    assert " least possible with 5 layers: 0.017" in [each.get_text() for each in p_values.texts]
    labels = [label.get_text() for label in p_values.get_xticklabels()]
    assert (p_values.get_xscale(), labels) == ("log", ["0", "16", "100", "1,000"])


def test_shares_of_a_layer_sum_to_one(run):
    panel = next(axes for axes in draw("norms", run).axes if "Parts of Q" in axes.get_title("left"))
    bars = panel.patches
    heights = np.array([bar.get_height() for bar in bars]).reshape(3, LAYERS + 1)
    assert heights.sum(axis=0) == pytest.approx(np.ones(LAYERS + 1))


def test_spectra_are_shares_of_the_whole_variance(run):
    panel = draw("spectra", run).axes[0]
    expected = run.arrays(1500)["eigenvalues/layer_00"]
    total = max(10.0, expected.sum())
    np.testing.assert_allclose(panel.lines[0].get_ydata(), expected / total)
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")


def test_the_title_says_model_size_steps_and_loss(run, make_readings):
    assert title_of(run) == (
        "Synthetic, 1.23 million parameters, 4 blocks, steps 0 to 1,500, training loss 5.00 → 2.00"
    )
    assert draw("run", run).get_suptitle() == title_of(run)
    acting = Readings([{"model": "a\x1b[2J\u202e$b^$", "layers": 3}], make_readings((0,)).readings)
    assert title_of(acting).isprintable()
    small(draw("run", acting))
    assert title_of(Readings([], [])) is None
    losses = [a for a in draw("run", run).axes if "training loss" in a.get_ylabel()]
    assert list(losses[0].lines[0].get_ydata()) == run.series("training/loss")[1]
    assert losses[0].get_ylabel() == "training loss (dash-dotted)"


@pytest.mark.parametrize("on_probe", [False, True])
def test_a_loss_that_ends_before_the_run_says_so_or_gives_way_to_one_that_does_not(run, on_probe):
    # The loss of the training is that of the batch after a reading: after the last there is none.
    def without_batch(reading):
        values = dict(reading.values)
        if on_probe:
            values["training/probe_loss"] = 7.0 - reading.step / 1000
        if reading is run[-1]:
            del values["training/loss"]
        return with_values(reading, values)

    shorter = Readings(run.runs, [without_batch(reading) for reading in run])
    drawn = [axes for axes in draw("run", shorter).axes if "dash-dotted" in axes.get_ylabel()]
    (axes,) = drawn
    steps = list(axes.lines[0].get_xdata())
    if on_probe:
        assert axes.get_ylabel() == "loss on the probe (dash-dotted)"
        assert len(steps) == len(STEPS)
        assert title_of(shorter).endswith("steps 0 to 1,500, loss on the probe 7.00 → 5.50")
    else:
        assert axes.get_ylabel() == "training loss (dash-dotted, known to step 128)"
        assert len(steps) == len(STEPS) - 1
        assert title_of(shorter).endswith(", training loss 5.00 → 4.74 (step 128)")


# -- the command -----------------------------------------------------------------------------------


def invoke(*arguments):
    return CliRunner().invoke(make_app(), ["figure", *map(str, arguments)])


def test_figures_are_written_by_kind(run, tmp_path):
    result = invoke(tmp_path, "--kind", "drift", "--kind", "map", "--metric", "cosine", "--dark")
    assert result.stdout.splitlines() == [
        f"wrote {tmp_path / 'figures' / 'drift_dark.png'}",
        f"wrote {tmp_path / 'figures' / 'map_cosine_dark.png'}",
    ]
    other = tmp_path / "else.svg"
    assert invoke(tmp_path, "--kind", "profiles", "--out", other).exit_code == 0
    assert "<svg" in other.read_text()[:1000]


def test_all_draws_what_the_run_can_give_and_says_the_rest_in_a_line(
    make_readings, tmp_path, monkeypatch
):
    def save(figure, path):
        path.parent.mkdir(exist_ok=True)
        path.touch()

    monkeypatch.setattr("geomon.show.figures.save", save)
    write_run(tmp_path, make_readings(without=["qk_cosine"]), with_arrays=False)
    result = invoke(tmp_path, "--all")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) == len(KINDS)
    missing = [line.split(":")[0] for line in lines if line.startswith("no ")]
    assert missing == ["no cosines", "no means", "no clouds", "no stability", "no spectra"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kind", "nothing"], "no figure is called 'nothing': there are run, dimension"),
        (
            ["--kind", "drift", "--metric", "cosine"],
            "'drift' takes no metric: profiles, map, heads",
        ),
        (["--kind", "means"], "no mean queries and keys stand beside the record"),
    ],
)
def test_bad_input_is_one_clear_line(make_readings, tmp_path, arguments, words):
    write_run(tmp_path, make_readings(STEPS), with_arrays=False)
    result = invoke(tmp_path, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
