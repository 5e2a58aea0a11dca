import math
import subprocess
import sys
from dataclasses import replace

import matplotlib
import numpy as np
import pytest

from geomon.record import Reading, Readings
from geomon.show.figures import as_image, geometry_figure, heads_figure, profile_figure, save
from geomon.show.panels import head_table, layers_and_heads, spread_steps


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
    paper, distinct = labelled(dimension, "twonn,"), labelled(dimension, "twonn_distinct")
    assert list(paper.get_xdata()) == [reading.step for reading in readings]
    assert list(distinct.get_ydata()) == readings.series("twonn_distinct/mean")[1]
    assert labelled(dimension, "gride at scale 32")
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
    assert "peak" not in labelled(panels(geometry_figure(readings))[0], "twonn,").get_label()


def test_one_line_per_head_and_per_layer_and_the_mean_size(make_readings):
    readings = make_readings(layers=3, heads=5)
    _, _, heads, entropy = panels(geometry_figure(readings))
    mean = labelled(heads, "mean |cosine|")
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
    broken = dict.fromkeys(readings[3].values, math.nan)
    holed = [replace(r, values=broken) if r.step == 64 else r for r in readings]
    figure = geometry_figure(Readings([], holed))
    as_image(figure)
    assert 64 not in labelled(panels(figure)[0], "twonn,").get_xdata()
    empty = [replace(r, values=dict.fromkeys(r.values, math.nan)) for r in readings]
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
    reading = Reading(0, 1.0, 0.5, "inline", "train", 64, 1, "float32", values)
    assert layers_and_heads(values, "q") == ([1, 2], 3)
    assert head_table(reading, "q", [1, 2], 3).tolist() == [[10, 11, 12], [20, 21, 22]]
    assert layers_and_heads(values, "other") == ([], 0)


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
