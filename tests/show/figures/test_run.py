"""The figure of a run and the cards of loggers, by their data: what they draw, where, and how."""

import math
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from msgspec.structs import replace
from tagged import TEXTS, alert_of, reading_of, with_values

from geomon.note import Note
from geomon.record import Readings
from geomon.show.colours import NOTHING
from geomon.show.figures import as_image, card, geometry_figure, save
from geomon.show.panels import (
    NotMeasuredError,
    depth_panel,
    dimension_panel,
    head_panels,
    map_panel,
    measured_heads,
)


def panels(figure):
    """The axes that are panels, without colour bars."""
    return [axes for axes in figure.axes if axes.get_title(loc="left")]


def words(figure):
    return " | ".join(text.get_text() for axes in figure.axes for text in axes.texts)


def lines(axes, points):
    return [line for line in axes.lines if len(line.get_xdata()) == points]


def labelled(axes, start):
    return next(line for line in axes.lines if str(line.get_label()).startswith(start))


def lopsided(steps=(0, 4, 32), layers=3, heads=5):
    """A run of which no two values are equal: step, layer, head and metric are in each."""
    readings = []
    for place, step in enumerate(steps):
        values = {}
        for layer in range(layers + 1):
            base = 0.01 * place + 0.1 * layer
            values[f"anisotropy/layer_{layer:02d}"] = 0.05 + base
            if layer:
                values[f"attention_entropy/layer_{layer:02d}"] = 2 + base
            for head in range(heads if layer else 0):
                sign = -1 if head == 0 else 1
                values[f"qk_cosine/layer_{layer:02d}/head_{head}"] = sign * (
                    base + 0.001 * (head + 1)
                )
        for number, name in enumerate(("twonn/mean", "twonn_distinct/mean", "gride/mean/k32")):
            values[name] = 5.0 + place + 0.1 * number
            values[f"{name}/margin"] = 0.5 + 0.01 * number
        values["gride/mean/k1"] = 50.0
        readings.append(reading_of(values, step, notes=["note"]))
    return Readings([{"model": "Synthetic", "metrics": TEXTS}], readings)


def with_all(readings, values):
    return Readings(readings.runs, [with_values(r, r.values | values) for r in readings])


def single_profile(profile):
    """A run of one reading with these values of a metric by layer."""
    values = {f"twonn/layer_{layer:02d}": value for layer, value in enumerate(profile)}
    return Readings([], [reading_of(values)])


# -- the figure of a run ---------------------------------------------------------------------------


def test_each_caption_stands_over_its_own_data():
    expected = {
        "intrinsic dimension, mean over layers": ("intrinsic dimension", [5.0, 6.0, 7.0]),
        "anisotropy over depth": ("anisotropy", [0.05, 0.15, 0.25, 0.35]),
        "cosine of mean query and mean key by head": ("cosine of mean query", None),
        "attention entropy by layer": ("attention entropy", [2.1, 2.11, 2.12]),
    }
    figure = geometry_figure(lopsided(), title="a run")
    found = panels(figure)
    titles = [axes.get_title(loc="left") for axes in found]
    assert [title.split("   ")[0] for title in titles] == [f"$\\bf{{{x}}}$" for x in "abcd"]
    assert [title.split("   ")[1] for title in titles] == list(expected)
    for axes, (label, values) in zip(found, expected.values(), strict=True):
        assert axes.get_ylabel().startswith(label)
        if values is not None:
            assert any(list(line.get_ydata()) == pytest.approx(values) for line in axes.lines)
    for axes in (found[0], found[2], found[3]):
        assert axes.get_xlabel() == "training step (logarithmic)"
    assert found[1].get_xlabel() == "layer (0 = what enters the first block)"
    assert figure.get_suptitle() == "a run"
    assert not geometry_figure(lopsided()).get_suptitle()


def test_the_dimension_has_its_variants_the_largest_scale_and_the_peak_in_words(make_readings):
    readings = make_readings()
    dimension = panels(geometry_figure(readings))[0]
    paper = labelled(dimension, "intrinsic dimension: peak 7.4 at step 256")
    distinct = labelled(dimension, "intrinsic dimension, d")
    assert list(paper.get_ydata()) == readings.series("twonn/mean")[1]
    assert list(distinct.get_ydata()) == readings.series("twonn_distinct/mean")[1]
    assert labelled(dimension, "intrinsic dimension by scale, scale 32")
    assert len(dimension.collections) == 2  # a band for each variant
    falling = make_readings(curves={"twonn/mean": [9, 8, 7, 6, 5, 4, 3, 2.5, 2]})
    assert not any("peak" in line.name for line in dimension_panel(falling).lines)


@pytest.mark.parametrize(("distinct", "scale"), [(32.0, "log"), (4.0, "linear")])
def test_the_dimension_is_logarithmic_only_where_variants_lie_far_apart(
    make_readings, distinct, scale
):
    readings = make_readings(curves={"twonn_distinct/mean": [distinct] * 9}, without=["gride"])
    axes = panels(geometry_figure(readings))[0]
    assert axes.get_yscale() == scale
    assert ("logarithmic" in axes.get_ylabel()) == (scale == "log")


def test_a_band_is_the_interval_and_above_0_on_a_logarithmic_axis(make_readings):
    readings = lopsided()
    tags = ("twonn/mean", "twonn_distinct/mean", "gride/mean/k32")
    for line, tag in zip(dimension_panel(readings).lines, tags, strict=True):
        for place, reading in enumerate(readings):
            value, margin = reading.values[tag], reading.values[f"{tag}/margin"]
            assert (line.low[place], line.high[place]) == (value - margin, value + margin)
    far = dimension_panel(make_readings(error=40.0, without=["gride"]))
    assert far.is_logarithmic
    assert min(min(line.low) for line in far.lines) == pytest.approx(0.1)


def test_every_head_is_a_line_in_the_colour_of_its_layer_and_so_is_every_layer():
    readings = lopsided()
    figure = geometry_figure(readings)
    heads, entropy = panels(figure)[2:]
    thin = lines(heads, 3)[: 3 * 5]
    colours = {}
    for number, line in enumerate(thin):
        layer, head = number // 5 + 1, number % 5
        tag = f"qk_cosine/layer_{layer:02d}/head_{head}"
        assert list(line.get_ydata()) == [reading.values[tag] for reading in readings], tag
        colours.setdefault(layer, set()).add(line.get_color())
    assert len(set.union(*colours.values())) == len(colours) == 3
    of_layers = lines(entropy, 3)
    assert [line.get_color() for line in of_layers] == [min(colours[layer]) for layer in (1, 2, 3)]
    for layer, line in enumerate(of_layers, start=1):
        tag = f"attention_entropy/layer_{layer:02d}"
        assert list(line.get_ydata()) == [reading.values[tag] for reading in readings]
    size = [np.mean([abs(v) for t, v in r.values.items() if "head_" in t]) for r in readings]
    mean = labelled(heads, "mean size")
    assert list(mean.get_ydata()) == pytest.approx(size)
    assert mean.get_linewidth() > thin[0].get_linewidth()
    names, shown = bar_of(figure, "layer (c and d)")
    assert names == ["1", "2", "3"]
    assert shown == [matplotlib.colors.to_rgba(min(of_layer)) for of_layer in colours.values()]


def bar_of(figure, label):
    """Names on a colour bar from below, and its colours."""
    (axes,) = [a for a in figure.axes if a.get_ylabel() == label]
    order = np.argsort(axes.get_yticks())
    names = [axes.get_yticklabels()[index].get_text() for index in order]
    (mesh,) = [c for c in axes.collections if c.get_array() is not None and c.get_array().size > 1]
    return names, [tuple(colour) for colour in mesh.to_rgba(mesh.get_array().ravel())]


def test_of_more_heads_than_lines_can_be_told_apart_shares_are_drawn():
    readings = lopsided(layers=4, heads=17)
    panel = panels(geometry_figure(readings))[2]
    assert len(lines(panel, 3)) == 3  # the median under each band, and the mean
    heads = [v for t, v in readings[-1].values.items() if "qk_cosine" in t and "head_" in t]
    for band, shares in zip(panel.collections, ((5, 95), (25, 75)), strict=True):
        at = band.get_paths()[0].vertices
        last = at[at[:, 0] == readings[-1].step, 1]
        assert sorted({round(v, 9) for v in last}) == pytest.approx(np.percentile(heads, shares))
    assert panel.get_title("left").endswith("all heads")


@pytest.mark.parametrize(("null", "seen"), [(6.0, True), (500.0, False), (-1.0, False)])
def test_noise_is_a_line_where_it_lies_within_the_panel(null, seen):
    readings = with_all(lopsided(), {"twonn/null": null, "anisotropy/null": null / 50})
    dimension, profile, *_ = panels(geometry_figure(readings))
    level = [line for line in dimension.lines if list(line.get_ydata()) == [null, null]]
    assert bool(level) == seen
    if seen:
        assert "Gaussian noise: 6" in [text.get_text() for text in dimension.texts]
        assert any(list(line.get_ydata()) == [0.12, 0.12] for line in profile.lines)
        assert "isotropic noise: 0.12" in [text.get_text() for text in profile.texts]


@pytest.mark.parametrize("distinct", [5.0, 40.0])  # a linear axis, and a logarithmic one
def test_no_line_is_covered_by_the_legend(distinct):
    readings = [
        with_values(r, r.values | {"twonn_distinct/mean": distinct, "training/loss": 5 - r.step})
        for r in lopsided()
    ]
    figure = geometry_figure(Readings([], readings), title="Takes height from the panels")
    figure.draw_without_rendering()
    (loss,) = next(axes for axes in figure.axes if "loss" in axes.get_ylabel()).lines
    for panel, others in ((panels(figure)[0], [loss]), (panels(figure)[2], [])):
        bottom = panel.get_legend().get_frame().get_window_extent().y0
        for line in (*panel.lines, *others):
            assert line.get_window_extent().y1 < bottom


@pytest.mark.parametrize(
    ("steps", "ticks"),
    [
        ((0, 1, 32), ["0", "1", "10"]),
        ((0, 4, 32), ["0", "4", "10"]),
        ((0, 16, 1500), ["0", "16", "100", "1,000"]),
        ((0, 80, 1500), ["0", "100", "1,000"]),
        ((500, 700, 900), ["900"]),
        ((50, 700, 2000), ["50", "100", "1,000"]),
    ],
)
def test_the_axis_of_steps_has_powers_of_ten_and_all_steps_inside(steps, ticks):
    axes = panels(geometry_figure(lopsided(steps=steps)))[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ticks
    assert axes.get_xscale() == "log"
    left, right = axes.get_xlim()
    places = list(axes.lines[0].get_xdata())
    assert left < places[0] < places[-1] < right
    assert places[1:] == list(steps[1:])
    assert places[0] == steps[0] or places[0] == pytest.approx(steps[1] / 2.8, rel=0.02)


def test_an_alert_is_a_line_at_its_step_and_the_legend_says_which(make_readings):
    readings = list(make_readings())
    notes = (alert_of("rank_collapse", "down to 1.2"), Note("a note", "a note"))
    readings[4] = replace(readings[4], notes=notes)
    readings[6] = replace(readings[6], notes=(alert_of("logit_growth", "130"),))
    figure = geometry_figure(Readings([], readings))
    for panel in (panels(figure)[index] for index in (0, 2, 3)):
        at = {line.get_xdata()[0] for line in panel.lines if line.get_color() == "#A8488A"}
        assert at == {128, 512}
    shown = [text.get_text() for text in panels(figure)[0].get_legend().get_texts()]
    assert "alert at step 128: rank collapse (first of 2)" in shown
    profile = panels(figure)[1]
    assert not [line for line in profile.lines if line.get_color() == "#A8488A"]


def test_what_was_not_measured_is_said(make_readings):
    missing = ["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy"]
    empty = [
        with_values(r, dict.fromkeys(r.values.keys() - {"geomon/seconds"}, math.nan))
        for r in make_readings()
    ]
    for readings in (make_readings(without=missing), Readings([], []), Readings([], empty)):
        figure = geometry_figure(readings)
        as_image(figure)
        assert words(figure).count("not measured") == 4


@pytest.mark.parametrize(
    ("steps", "layers", "heads"),
    [((0,), 2, 1), ((7,), 3, 5), ((0, 16), 48, 64), ((500, 700, 900), 2, 3)],
)
def test_every_size_of_run_is_drawn(make_readings, steps, layers, heads):
    figure = geometry_figure(make_readings(steps, layers=layers, heads=heads), title="run")
    assert as_image(figure).std() > 5
    if len(steps) == 1:  # as dots
        assert {line.get_marker() for line in lines(panels(figure)[3], 1)} == {"o"}


# -- cards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "low", "high"),
    [
        ([30.0, 2, math.inf, 3], 0, 3),
        ([2.5, 2, 4, 3], 0, 4),
        ([30.0, 2, 4, 3], 0, 4),
        ([0.5, -0.02, 0.05, 0.01], -0.02, 0.05),
        ([0.1, -0.02, 0.05, 0.01], -0.02, 0.1),
        ([0.4, 0.0, 0.0], 0, 0.4),  # stays beside blocks that are all 0
    ],
)
def test_layer_0_leaves_the_axis_where_it_would_flatten_the_blocks(profile, low, high):
    figure = card(depth_panel(single_profile(profile), "twonn"))
    (axes, *_) = figure.axes
    bottom, top = axes.get_ylim()
    assert low - 0.2 * (high - low) <= bottom <= low
    assert high <= top < high + 0.2 * (high - low)
    assert (f"↑ layer 0: {profile[0]:.3g}" in words(figure)) == (profile[0] > high)
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), profile)  # nothing is taken away


def test_values_of_heads_stand_by_layer_and_head():
    values = {
        f"q/layer_{layer:02d}/head_{head}": 10.0 * layer + head
        for layer in (1, 2)
        for head in range(3)
    }
    readings = Readings([], [reading_of(values)])
    _, layers, tables = measured_heads(readings, "q")
    assert (layers, tables.tolist()) == ([1, 2], [[[10, 11, 12], [20, 21, 22]]])
    assert head_panels(readings, "other") == {}
    (matrix,) = head_panels(readings, "q").values()
    axes = card(matrix).axes[0]
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {(h, r): f"{10 * (r + 1) + h:.2f}" for r in range(2) for h in range(3)}
    assert axes.get_ylim()[0] < axes.get_ylim()[1]  # the first layer at the bottom, as in maps
    holed = {**values, "q/layer_01/head_1": math.nan}
    (matrix,) = head_panels(Readings([], [reading_of(holed)]), "q").values()
    axes = card(matrix).axes[0]
    assert len(axes.texts) == 5
    assert matplotlib.colors.to_hex(axes.get_facecolor()).upper() == NOTHING


def test_scales_of_heads_are_those_of_cosines_of_uniform_attention_or_of_the_run(make_readings):
    readings = make_readings()
    (cosines,) = head_panels(readings, "qk_cosine").values()
    assert (cosines.low, cosines.high, cosines.is_signed) == (-1, 1, True)
    (entropy,) = head_panels(readings, "attention_entropy").values()
    assert (entropy.low, entropy.high) == pytest.approx((2.0, 3.0))
    (entropy,) = head_panels(
        with_all(readings, {"attention_entropy/null": 4.0}), "attention_entropy"
    ).values()
    assert (entropy.low, entropy.high) == (0.0, 4.0)
    large = make_readings((0,), layers=24, heads=16)
    assert words(card(head_panels(large, "qk_cosine")[0])) == ""


TWONN = {f"twonn/layer_{layer:02d}": [5.0] * 9 for layer in range(3)}


def test_a_map_has_a_column_for_each_step_and_the_scale_of_the_blocks(make_readings):
    curves = TWONN | {"twonn/layer_00": [40.0] * 9, "twonn/layer_02": [5.0] * 8 + [8.0]}
    readings = make_readings(curves=curves, layers=2)
    mesh = card(map_panel(readings, "twonn")).axes[0].collections[0]
    table = np.asarray(mesh.get_array())
    assert table.shape == (3, 9)
    assert table[:, -1].tolist() == [40.0, 5.0, 8.0]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0.0, 8.0)
    edges = mesh.get_coordinates()[0, :, 0]
    steps = [reading.step for reading in readings]
    assert edges[0] > 0
    assert all(
        low < step < high for low, step, high in zip(edges[1:-1], steps[1:], edges[2:], strict=True)
    )
    cosines = {f"cosine/layer_{layer:02d}": 0.25 * abs(layer - 1) for layer in range(4)}
    positive = map_panel(Readings([], [reading_of(cosines)]), "cosine")
    assert (positive.low, positive.high, positive.is_signed) == (0, 0.5, False)
    one = map_panel(make_readings((0,)), "anisotropy")
    assert one.values.shape == (5, 1)
    assert as_image(card(one)).std() > 5
    assert map_panel(Readings([], [reading_of({}, 0, "inline")]), "twonn") is None


# -- files -----------------------------------------------------------------------------------------


def test_images_are_pixels_and_files_are_written(make_readings, tmp_path):
    figure = card(depth_panel(make_readings(), "anisotropy"))
    image = as_image(figure)
    assert image.dtype == np.uint8
    height, width, channels = image.shape
    assert channels == 3
    assert width > height > 200
    path = save(figure, tmp_path / "new" / "profile.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="xyz"):
        save(figure, tmp_path / "profile.xyz")
    assert issubclass(NotMeasuredError, ValueError)


def test_nothing_of_matplotlib_is_changed_and_pyplot_is_never_loaded(make_readings):
    before = dict(matplotlib.rcParams)
    as_image(geometry_figure(make_readings()))
    assert dict(matplotlib.rcParams) == before
    code = "import sys, geomon.show.figures; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
