from tagged import TEXTS, reading_of

from geomon.analysis import curve_of, mean_abs_over_heads
from geomon.record import FILE_NAME, Readings
from geomon.show.terminal import history
from geomon.show.terminal.charts import Line, thin_line
from geomon.show.terminal.history import Watched
from geomon.show.terminal.quantities import Quantity, contents_of


def take(run):
    look = run.look()
    if look is not None:
        run.take(look)
    return look


def test_curves_are_extracted_once_for_each_new_reading(make_readings, tmp_path, monkeypatch):
    readings = make_readings()
    seen = []
    extract = Quantity.curve

    def counted(self, new, layer=None):
        seen.append(len(list(new)))
        return extract(self, new, layer)

    monkeypatch.setattr(Quantity, "curve", counted)
    run = Watched(tmp_path)
    quantities = [Quantity("twonn", has_mean=True), Quantity("qk_cosine", is_signed=True)]
    for count, reading in enumerate(readings, 1):
        with (tmp_path / FILE_NAME).open("a") as file:
            file.write(reading.line() + "\n")
        take(run)
        for _ in range(3):
            curves = [run.curve(quantity) for quantity in quantities]
        assert len(curves[0]) == count
    assert seen == [1, 1] * len(readings)
    assert curves[0] == curve_of(readings, "twonn")
    assert curves[1] == mean_abs_over_heads(readings, "qk_cosine")
    assert take(run) is None


def test_a_reading_that_comes_again_begins_the_curves_anew(make_readings, tmp_path):
    readings = make_readings()
    path = tmp_path / FILE_NAME
    lines = [reading.line() + "\n" for reading in readings]
    path.write_text("".join(lines[:5]))
    run, twonn = Watched(tmp_path), Quantity("twonn", has_mean=True)
    take(run)
    assert len(run.curve(twonn)) == 5
    with path.open("a") as file:
        file.write('{"run": {}}\n' + lines[3].replace('"mean":5.0', '"mean":9.5'))
    take(run)
    assert run.curve(twonn).values[3] == 9.5
    assert len(run.curve(twonn)) == 5


def test_few_points_of_a_long_curve_are_drawn_and_none_of_its_extremes_is_lost():
    values = [float(n % 7) for n in range(5000)]
    values[1234], values[4321] = 100.0, -50.0
    line = Line([float(n) for n in range(5000)], values, [0.1] * 5000, (0, 0, 0))
    thinned = thin_line(line, 80)
    assert len(thinned.xs) <= 4 * 80
    assert (max(thinned.values), min(thinned.values)) == (100.0, -50.0)
    assert (thinned.xs[0], thinned.xs[-1]) == (0.0, 4999.0)
    assert thinned.xs == sorted(thinned.xs)
    assert all(values[int(x)] == value for x, value in zip(thinned.xs, thinned.values, strict=True))


def test_a_folder_that_cannot_be_read_now_is_tried_again(make_readings, tmp_path, monkeypatch):
    path = tmp_path / FILE_NAME
    path.write_text(make_readings()[0].line() + "\n")
    run = Watched(tmp_path)

    def fails(self):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(history.Follower, "look", fails)
        assert "Permission denied" in take(run).trouble
        assert take(run) is None
    assert take(run).trouble == ""
    assert len(run.selected) == 1


def test_what_can_be_shown_is_listed_what_charts_show_first():
    names = [
        "own/mean", "gride/mean/k1", "gride/mean/k32", "gride/layer_01/k32", "twonn/mean",
        "twonn/mean/margin", "twonn/layer_01/n", "twonn/null", "qk_cosine/layer_01/head_0",
        "training/loss", "geomon/overhead", "anisotropy/layer_01",
    ]  # fmt: skip
    run = Readings([{"metrics": TEXTS}], [reading_of(dict.fromkeys(names, 1.0))])
    contents = contents_of(run, run.metrics)
    assert [quantity.title() for quantity in contents.quantities] == [
        "intrinsic dimension",
        "intrinsic dimension by scale, scale 32, mean over layers",
        "anisotropy, mean over layers",
        "cosine of mean query and mean key, size, mean over heads",
        "own",
        "training loss",
        "geomon's overhead",
        "geomon's seconds",
    ]
    assert contents.with_heads == ["qk_cosine"]
