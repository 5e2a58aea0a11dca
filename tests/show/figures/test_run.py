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
from geomon.show.figures import as_image, geometry_figure, heads_figure, profile_figure, save
from geomon.show.figures.panels import colour_range, head_tables, spread_steps


def panels(figure):
    """The axes that are panels, without colour bars."""
    return [axes for axes in figure.axes if axes.get_title(loc="left")]


def words(figure):
    return " | ".join(text.get_text() for axes in figure.axes for text in axes.texts)


def lines(axes, points):
    return [line for line in axes.lines if len(line.get_xdata()) == points]


def labelled(axes, start):
    return next(line for line in axes.lines if str(line.get_label()).startswith(start))


def test_the_picture_shows_both_variants_and_a_scale_with_step_zero_in_its_place(make_readings):
    readings = make_readings()
    dimension = panels(geometry_figure(readings))[0]
    paper, distinct = (
        labelled(dimension, "intrinsic dimension"),
        labelled(dimension, "intrinsic dimension, d"),
    )
    assert list(paper.get_xdata()) == [reading.step for reading in readings]
    assert list(distinct.get_ydata()) == readings.series("twonn_distinct/mean")[1]
    assert labelled(dimension, "intrinsic dimension by scale, scale 32")
    assert "peak 7.4 at step 256" in paper.get_label()
    assert len(dimension.collections) == 2  # a band for each variant
    assert dimension.get_xlim()[0] < 0  # step 0 lies inside
    assert next(tick.get_text() for tick in dimension.get_xticklabels()) == "0"


@pytest.mark.parametrize(("distinct", "scale"), [(32.0, "log"), (4.0, "linear")])
def test_the_dimension_is_logarithmic_only_where_variants_lie_far_apart(
    make_readings, distinct, scale
):
    readings = make_readings(curves={"twonn_distinct/mean": [distinct] * 9}, without=["gride"])
    assert panels(geometry_figure(readings))[0].get_yscale() == scale


def test_no_peak_is_marked_on_a_curve_that_only_falls(make_readings):
    readings = make_readings(curves={"twonn/mean": [9, 8, 7, 6, 5, 4, 3, 2.5, 2]})
    assert (
        "peak"
        not in labelled(panels(geometry_figure(readings))[0], "intrinsic dimension").get_label()
    )


def test_one_line_per_head_and_per_layer_and_the_mean_size(make_readings):
    readings = make_readings(layers=3, heads=5)
    _, _, heads, entropy = panels(geometry_figure(readings))
    mean = labelled(heads, "mean size")
    assert mean.get_ydata()[-1] == pytest.approx(0.7)
    assert len(lines(heads, len(readings))) == 3 * 5 + 2  # with the mean and its white edge
    assert len(lines(entropy, len(readings))) == 3


def test_the_profile_is_drawn_at_the_first_and_the_last_step(make_readings):
    readings = make_readings()
    profile = panels(geometry_figure(readings))[1]
    drawn = [list(line.get_ydata()) for line in profile.lines]
    assert len(drawn) <= 7
    for reading, line in ((readings[0], drawn[0]), (readings[-1], drawn[-1])):
        assert line == [reading.values[f"anisotropy/layer_{layer:02d}"] for layer in range(5)]


@pytest.mark.parametrize(
    ("profile", "low", "high"),
    [
        ([2.5, 2, 4, 3], 0, 4),
        ([30.0, 2, 4, 3], 0, 4),
        ([0.5, -0.02, 0.05, 0.01], -0.02, 0.05),
        ([0.1, -0.02, 0.05, 0.01], -0.02, 0.1),
    ],
)
def test_layer_0_leaves_the_axis_where_it_would_flatten_the_blocks(profile, low, high):
    figure = profile_figure(single_profile(profile), "twonn")
    (axes, *_) = figure.axes
    bottom, top = axes.get_ylim()
    assert low - 0.2 * (high - low) <= bottom <= low
    assert high <= top < high + 0.2 * (high - low)
    assert (f"↑ layer 0: {profile[0]:.3g}" in words(figure)) == (profile[0] > high)
    assert list(axes.lines[0].get_ydata()) == profile  # nothing is taken away


def test_layer_0_stays_beside_blocks_that_are_all_0():
    figure = profile_figure(single_profile([0.4, 0.0, 0.0]), "twonn")
    assert figure.axes[0].get_ylim()[1] > 0.4
    assert "↑" not in words(figure)


def single_profile(profile):
    """A run of one reading with these values of a metric by layer."""
    values = {f"twonn/layer_{layer:02d}": value for layer, value in enumerate(profile)}
    return Readings([], [reading_of(values)])


def test_steps_are_spread_evenly_in_their_logarithm():
    assert spread_steps([5, 3]) == [3, 5]
    spread = spread_steps(list(range(10_001)))
    assert spread[0] == 0
    assert spread[-1] == 10_000
    ratios = np.diff(np.log1p(spread))
    assert ratios.max() < 1.5 * ratios.min()


def test_what_was_not_measured_is_said(make_readings):
    missing = ["twonn", "twonn_distinct", "gride", "anisotropy", "qk_cosine", "attention_entropy"]
    for readings in (make_readings(without=missing), Readings([], [])):
        figure = geometry_figure(readings)
        as_image(figure)
        assert words(figure).count("not measured") == 4


@pytest.mark.parametrize(
    ("steps", "layers", "heads"), [((0,), 2, 1), ((0, 16), 48, 64), ((500, 700, 900), 2, 3)]
)
def test_every_size_of_run_is_drawn(make_readings, steps, layers, heads):
    image = as_image(geometry_figure(make_readings(steps, layers=layers, heads=heads), title="run"))
    assert image.std() > 5


def test_values_that_are_not_numbers_leave_gaps(make_readings):
    readings = make_readings()
    broken = dict.fromkeys(readings[3].values.keys() - {"geomon/seconds"}, math.nan)
    holed = [with_values(r, broken) if r.step == 64 else r for r in readings]
    figure = geometry_figure(Readings(readings.runs, holed))
    as_image(figure)
    assert 64 not in labelled(panels(figure)[0], "intrinsic dimension").get_xdata()
    empty = [
        with_values(r, dict.fromkeys(r.values.keys() - {"geomon/seconds"}, math.nan))
        for r in readings
    ]
    assert words(geometry_figure(Readings([], empty))).count("not measured") == 4


def test_a_matrix_of_heads_is_centred_on_zero_for_cosines(make_readings):
    reading = make_readings()[8]
    image = heads_figure(reading, "qk_cosine").axes[0].images[0]
    assert (image.norm.vmin, image.norm.vmax) == (-1, 1)
    assert np.asarray(image.get_array()).shape == (4, 4)
    entropy = heads_figure(reading, "attention_entropy").axes[0].images[0]
    assert (entropy.norm.vmin, entropy.norm.vmax) == pytest.approx((2.0, 2.75))


def test_values_of_heads_stand_by_layer_and_head():
    values = {
        f"q/layer_{layer:02d}/head_{head}": 10.0 * layer + head
        for layer in (1, 2)
        for head in range(3)
    }
    reading = reading_of(values)
    layers, tables = head_tables([reading], "q")
    assert (layers, tables.tolist()) == ([1, 2], [[[10, 11, 12], [20, 21, 22]]])
    assert head_tables([reading], "other")[0] == []


def test_values_are_written_into_small_matrices_only(make_readings):
    small = heads_figure(make_readings()[8], "qk_cosine")
    assert words(small).split(" | ")[:2] == ["−0.70", "0.70"]
    large = heads_figure(make_readings((0,), layers=24, heads=16)[0], "qk_cosine")
    assert words(large) == ""
    assert "not measured" in words(heads_figure(make_readings()[0], "qk_dot"))


def test_images_are_pixels_and_files_are_written(make_readings, tmp_path):
    figure = profile_figure(make_readings())
    image = as_image(figure)
    assert image.dtype == np.uint8
    height, width, channels = image.shape
    assert channels == 3
    assert width > height > 200
    path = save(figure, tmp_path / "new" / "profile.png")
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="xyz"):
        save(figure, tmp_path / "profile.xyz")


def test_nothing_of_matplotlib_is_changed(make_readings):
    before = dict(matplotlib.rcParams)
    as_image(geometry_figure(make_readings()))
    assert dict(matplotlib.rcParams) == before


def test_pyplot_is_never_loaded():
    code = "import sys, geomon.show.figures; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- what is drawn, by its data ------------------------------------------------------------------


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


def test_each_caption_stands_over_its_own_data():
    expected = {
        "Intrinsic dimension, mean over layers": ("intrinsic dimension", [5.0, 6.0, 7.0]),
        "Anisotropy over depth": ("anisotropy", [0.05, 0.15, 0.25, 0.35]),
        "Cosine of mean query and mean key by head": ("cosine of mean query", None),
        "Attention entropy by layer": ("attention entropy", [2.1, 2.11, 2.12]),
    }
    found = panels(geometry_figure(lopsided(), title="a run"))
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
    assert geometry_figure(lopsided(), title="a run").get_suptitle() == "a run"
    assert not geometry_figure(lopsided()).get_suptitle()


def test_every_head_of_every_layer_is_a_line_of_its_own_in_the_colour_of_its_layer():
    readings = lopsided()
    heads = panels(geometry_figure(readings))[2]
    thin = lines(heads, 3)[: 3 * 5]
    colours = {}
    for number, line in enumerate(thin):
        layer, head = number // 5 + 1, number % 5
        tag = f"qk_cosine/layer_{layer:02d}/head_{head}"
        assert list(line.get_ydata()) == [reading.values[tag] for reading in readings], tag
        assert list(line.get_xdata()) == [0, 4, 32]
        colours.setdefault(layer, set()).add(line.get_color())
    assert all(len(of_layer) == 1 for of_layer in colours.values())
    assert len(set.union(*colours.values())) == 3
    # The same colours as those of the layers beside them, and as those on the bar.
    entropy = lines(panels(geometry_figure(readings))[3], 3)
    assert [line.get_color() for line in entropy] == [min(colours[layer]) for layer in (1, 2, 3)]
    for layer, line in enumerate(entropy, start=1):
        tag = f"attention_entropy/layer_{layer:02d}"
        assert list(line.get_ydata()) == [reading.values[tag] for reading in readings]
    mean = labelled(heads, "mean size").get_ydata()
    size = [np.mean([abs(v) for t, v in r.values.items() if "head_" in t]) for r in readings]
    assert list(mean) == pytest.approx(size)


def bar_of(figure, label):
    """Names on a colour bar from below, and its colours."""
    (axes,) = [a for a in figure.axes if a.get_ylabel() == label]
    order = np.argsort(axes.get_yticks())
    names = [axes.get_yticklabels()[index].get_text() for index in order]
    (mesh,) = [c for c in axes.collections if c.get_array() is not None and c.get_array().size > 1]
    return names, [tuple(colour) for colour in mesh.to_rgba(mesh.get_array().ravel())]


def test_colour_bars_name_steps_and_layers_in_the_colours_of_their_lines():
    readings = lopsided(steps=(0, 4, 32, 100))
    figure = geometry_figure(readings)
    as_image(figure)
    names, colours = bar_of(figure, "step")
    profile = panels(figure)[1]
    assert names == ["0", "4", "32", "100"]
    assert len(profile.lines) == 4
    for line, reading, colour in zip(profile.lines, readings, colours, strict=True):
        assert list(line.get_ydata()) == [
            reading.values[f"anisotropy/layer_{n:02d}"] for n in range(4)
        ]
        assert tuple(line.get_color()) == pytest.approx(colour)
    names, colours = bar_of(figure, "layer (c and d)")
    assert names == ["1", "2", "3"]
    for line, colour in zip(lines(panels(figure)[3], 4), colours, strict=True):
        assert tuple(line.get_color()) == pytest.approx(colour)


def test_a_colour_bar_of_many_names_every_other_one():
    readings = lopsided(steps=(0, 4), layers=30, heads=1)
    names, colours = bar_of(geometry_figure(readings), "layer (c and d)")
    assert names == [str(layer) for layer in range(1, 31, 3)]
    assert len(colours) == 30


def test_a_band_is_the_interval():
    readings = lopsided()
    dimension = panels(geometry_figure(readings))[0]
    tags = ("twonn/mean", "twonn_distinct/mean", "gride/mean/k32")
    assert len(dimension.collections) == 3
    for band, tag in zip(dimension.collections, tags, strict=True):
        corners = band.get_paths()[0].vertices
        for reading in readings:
            at_step = corners[corners[:, 0] == reading.step, 1]
            value, margin = reading.values[tag], reading.values[f"{tag}/margin"]
            ends = (value - margin, value + margin)
            assert (at_step.min(), at_step.max()) == pytest.approx(ends)
    colours = [tuple(band.get_facecolor()[0][:3]) for band in dimension.collections]
    for colour, start in zip(
        colours,
        ("intrinsic dimension", "intrinsic dimension, d", "intrinsic dimension by"),
        strict=True,
    ):
        assert colour == pytest.approx(
            matplotlib.colors.to_rgb(labelled(dimension, start).get_color())
        )


def test_a_band_does_not_reach_zero_on_a_logarithmic_axis(make_readings):
    readings = make_readings(error=40.0, without=["gride"])
    dimension = panels(geometry_figure(readings))[0]
    assert dimension.get_yscale() == "log"
    lowest = min(band.get_paths()[0].vertices[:, 1].min() for band in dimension.collections)
    assert lowest == pytest.approx(0.1)


def test_a_matrix_has_layers_downwards_and_heads_to_the_right():
    reading = lopsided()[2]
    axes = heads_figure(reading, "qk_cosine").axes[0]
    table = np.asarray(axes.images[0].get_array())
    assert table.shape == (3, 5)
    for row in range(3):
        for head in range(5):
            assert table[row, head] == reading.values[f"qk_cosine/layer_{row + 1:02d}/head_{head}"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2", "3", "4"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "2", "3"]
    assert axes.get_title(loc="left") == "step 32"
    for text in axes.texts:
        column, row = text.get_position()
        assert text.get_text() == f"{table[row, column]:.2f}".replace("-", "−")
    assert len(axes.texts) == 15
    top, bottom = axes.get_ylim()[::-1]
    assert top < bottom  # layer 1 is above layer 2


def test_a_large_matrix_names_at_most_sixteen_layers_and_heads(make_readings):
    reading = make_readings((0,), layers=40, heads=20)[0]
    axes = heads_figure(reading, "qk_cosine").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        str(layer) for layer in range(1, 41, 3)
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        str(head) for head in range(0, 20, 2)
    ]


def test_the_colours_of_a_matrix_are_around_zero_where_signs_differ():
    assert colour_range(np.array([[-0.3, 0.2]]), "qk_cosine")[1:] == (-1.0, 1.0)
    assert colour_range(np.array([[0.3, 0.2]]), "key_cosine")[0] == "RdBu_r"
    assert colour_range(np.array([[-3.0, 2.0]]), "qk_dot") == ("RdBu_r", -3.0, 3.0)
    assert colour_range(np.array([[-3.0, 5.0]]), "qk_dot") == ("RdBu_r", -5.0, 5.0)
    assert colour_range(np.array([[3.0, np.nan, 5.0]]), "entropy") == ("cividis", 3.0, 5.0)
    assert colour_range(np.array([[0.0, 5.0]]), "entropy") == ("cividis", 0.0, 5.0)


def test_words_on_a_matrix_are_dark_on_light_and_light_on_dark():
    values = {"q_cosine/layer_01/head_0": -1.0, "q_cosine/layer_01/head_1": 0.0}
    reading = reading_of(values, 0, "inline")
    texts = heads_figure(reading, "q_cosine").axes[0].texts
    assert [text.get_color() for text in texts] == ["white", "black"]
    holed = with_values(reading, {**values, "q_cosine/layer_01/head_1": math.nan})
    assert len(heads_figure(holed, "q_cosine").axes[0].texts) == 1


def test_the_peak_is_marked_where_it_is(make_readings):
    dimension = panels(geometry_figure(make_readings()))[0]
    (dot,) = lines(dimension, 1)
    assert (list(dot.get_xdata()), list(dot.get_ydata())) == ([256], [7.4])
    assert dot.get_color() == labelled(dimension, "intrinsic dimension").get_color()
    rising = {"twonn/mean": [2, 3, 4, 5, 6, 7, 8, 9, 11]}
    assert not lines(panels(geometry_figure(make_readings(curves=rising)))[0], 1)


def test_the_largest_scale_is_the_largest_by_number():
    readings = lopsided()
    more = {"gride/mean/k4": 9.0, "gride/mean/n": 9.0}
    readings = Readings(readings.runs, [with_values(r, {**r.values, **more}) for r in readings])
    dimension = panels(geometry_figure(readings))[0]
    assert list(labelled(dimension, "intrinsic dimension by").get_ydata()) == [
        5.2,
        6.2,
        7.2,
    ]


@pytest.mark.parametrize(("null", "seen"), [(6.0, True), (500.0, False), (-1.0, False)])
def test_noise_is_a_line_where_it_lies_within_the_panel(null, seen):
    values = {"twonn/null": null, "anisotropy/null": null / 50}
    readings = Readings([], [with_values(r, r.values | values) for r in lopsided()])
    dimension, profile, *_ = panels(geometry_figure(readings))
    level = [line for line in dimension.lines if list(line.get_ydata()) == [null, null]]
    assert bool(level) == seen
    if seen:
        assert level[0].get_label() == "noise: 6"
        assert any(list(line.get_ydata()) == [0.12, 0.12] for line in profile.lines)
        assert [text.get_text() for text in profile.texts] == ["noise: 0.12"]


@pytest.mark.parametrize("distinct", [5.0, 40.0])  # a linear axis, and a logarithmic one
@pytest.mark.parametrize("factor", [0.5, 1.02, 1.2, 1.35])
def test_no_line_is_covered_by_the_legend(distinct, factor):
    null = factor * max(7.2, distinct)
    values = {"twonn_distinct/mean": distinct, "twonn/null": null}
    readings = [
        with_values(r, r.values | values | {"training/loss": 5 - r.step / 1000}) for r in lopsided()
    ]
    figure = geometry_figure(Readings([], readings), title="Takes height from the panels")
    figure.draw_without_rendering()
    panel = panels(figure)[0]
    level = next(line for line in panel.lines if list(line.get_ydata()) == [null, null])
    (loss,) = next(axes for axes in figure.axes if "loss" in axes.get_ylabel()).lines
    box = panel.get_legend().get_frame().get_window_extent()
    assert box.y1 >= panel.get_window_extent().y1  # nothing shows above it either
    assert box.x0 > panel.get_window_extent().x0 + 1
    bottom = box.y0
    for line in (*panel.lines, level, loss):
        assert line.get_window_extent().y1 < bottom


@pytest.mark.parametrize(
    ("steps", "ticks", "scale"),
    [
        ((0, 1, 32), ["0", "1", "10"], "symlog"),
        ((0, 4, 32), ["0", "4", "10"], "symlog"),
        ((0, 16, 1500), ["0", "16", "100", "1,000"], "symlog"),
        ((0, 80, 1500), ["0", "100", "1,000"], "symlog"),
        ((500, 700, 900), ["900"], "log"),
        ((50, 700, 2000), ["100", "1,000"], "log"),
    ],
)
def test_the_axis_of_steps_has_powers_of_ten_and_all_steps_inside(steps, ticks, scale):
    axes = panels(geometry_figure(lopsided(steps=steps)))[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ticks
    assert axes.get_xscale() == scale
    left, right = axes.get_xlim()
    assert left < steps[0] < steps[-1] < right
    assert right <= 1.2 * steps[-1]
    assert left >= -0.3 * steps[1] if steps[0] == 0 else left >= steps[0] / 1.2


def test_axes_hold_all_values_and_leave_the_top_to_the_legend():
    dimension, profile, heads, entropy = panels(geometry_figure(lopsided()))
    assert dimension.get_ylim() == pytest.approx((0, 7.2 / 0.69))
    assert profile.get_ylim()[0] == 0
    assert heads.get_ylim() == (-1.05, 1.3)
    assert entropy.get_ylim() == pytest.approx((0, 1.08 * 2.32))
    far = Readings([], [
        with_values(r, r.values | {"twonn_distinct/mean": 40.0}) for r in lopsided()
    ])  # fmt: skip
    low, high = panels(geometry_figure(far))[0].get_ylim()
    assert (low, high) == pytest.approx((4, 4 * 10 ** (1 / 0.69)))


def test_a_profile_with_negative_values_is_drawn_whole():
    values = {f"m/layer_{n:02d}": value for n, value in enumerate((-0.5, 0.2, 0.4))}
    reading = reading_of(values, 7, "inline")
    axes = profile_figure(Readings([], [reading]), "m").axes[0]
    assert axes.get_ylim()[0] < -0.5
    assert list(axes.lines[0].get_xdata()) == [0, 1, 2]
    assert list(axes.lines[0].get_ydata()) == [-0.5, 0.2, 0.4]
    assert axes.get_ylabel() == "m"


def test_a_logarithmic_axis_of_dimensions_names_one_two_three_and_five():
    values = {"twonn_distinct/mean": 60.0}
    far = Readings([], [with_values(r, r.values | values) for r in lopsided()])
    figure = geometry_figure(far)
    as_image(figure)
    axes = panels(figure)[0]
    low, high = axes.get_ylim()
    named = {tick.get_text() for tick in axes.get_yticklabels()}
    assert {"5", "10", "20", "30", "50"} <= named
    assert not {"4", "6", "7", "40", "60"} & named
    assert low < 5 < 60 < high


@pytest.mark.parametrize(("layers", "width"), [(8, 1.8), (9, 1.1)])
def test_lines_of_many_layers_are_thin(layers, width):
    entropy = panels(geometry_figure(lopsided(layers=layers, heads=1)))[3]
    assert {line.get_linewidth() for line in lines(entropy, 3)} == {width}


def test_a_mean_over_heads_is_set_off_from_their_lines():
    panel = panels(geometry_figure(lopsided(layers=4, heads=16)))[2]
    *thin, edge, mean = lines(panel, 3)
    assert {line.get_linewidth() for line in thin} == {1.0}
    assert len(thin) == 4 * 16
    # The mean lies on a white line that sets it off from the others.
    assert edge.get_linewidth() > mean.get_linewidth() > 2
    assert (edge.get_color(), mean.get_color()) == ("white", "black")


def test_of_more_heads_than_lines_can_be_told_apart_shares_are_drawn():
    readings = lopsided(layers=4, heads=17)
    figure = geometry_figure(readings)
    panel = panels(figure)[2]
    assert len(lines(panel, 3)) == 2  # the mean and its edge
    wide, half = panel.collections
    for band, shares in ((wide, (5, 95)), (half, (25, 75))):
        heads = [v for t, v in readings[-1].values.items() if "qk_cosine" in t and "head_" in t]
        assert len(heads) == 4 * 17
        at = band.get_paths()[0].vertices
        last = at[at[:, 0] == readings[-1].step, 1]
        assert sorted({round(v, 9) for v in last}) == pytest.approx(np.percentile(heads, shares))
    assert panel.get_title("left").endswith("all heads")
    assert "layer (c and d)" not in words(figure)


def test_a_run_of_one_reading_is_drawn_as_dots():
    for axes in panels(geometry_figure(lopsided(steps=(7,)))):
        for line in axes.lines:
            if len(line.get_xdata()) == 1:
                assert line.get_marker() == "o"
    assert sum(len(line.get_xdata()) == 1 for line in axes.lines) == 3


def test_the_axis_of_cosines_names_both_ends_and_the_middle():
    heads = panels(geometry_figure(lopsided()))[2]
    assert list(heads.get_yticks()) == [-1, -0.5, 0, 0.5, 1]


def test_the_last_profile_is_the_thickest():
    profile = panels(geometry_figure(lopsided(steps=(0, 4, 32, 100))))[1]
    *earlier, last = [line.get_linewidth() for line in profile.lines]
    assert len(set(earlier)) == 1
    assert last > earlier[0]


def test_an_alert_is_a_line_at_its_step_and_the_legend_says_which(make_readings):
    readings = list(make_readings())
    notes = (alert_of("rank_collapse", "down to 1.2"), Note("a note", "a note"))
    readings[4] = replace(readings[4], notes=notes)
    readings[6] = replace(readings[6], notes=(alert_of("logit_growth", "130"),))
    figure = geometry_figure(Readings([], readings))
    as_image(figure)
    over_training = [panels(figure)[index] for index in (0, 2, 3)]
    for panel in over_training:
        at = {line.get_xdata()[0] for line in panel.lines if line.get_color() == "#A8488A"}
        assert at == {128, 512}
    shown = [text.get_text() for text in panels(figure)[0].get_legend().get_texts()]
    assert "alert at step 128: rank collapse (first of 2)" in shown
    profile = panels(figure)[1]
    assert not [line for line in profile.lines if line.get_color() == "#A8488A"]


@pytest.mark.parametrize("layers", [2, 4])
def test_the_scale_of_entropy_reaches_from_nothing_to_uniform_attention(layers):
    values = {f"attention_entropy/layer_{n:02d}/head_0": 3.0 / n for n in range(1, layers + 1)}
    for null, expected in (
        ({"attention_entropy/null": 4.0}, (0.0, 4.0)),
        ({}, (3.0 / layers, 3.0)),
    ):
        reading = reading_of(values | null, 0, "inline")
        image = heads_figure(reading, "attention_entropy").axes[0].images[0]
        assert (image.norm.vmin, image.norm.vmax) == pytest.approx(expected)
