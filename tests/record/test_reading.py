import math

import msgspec
import pytest
from tagged import reading_of

from geomon import MetricText, __version__
from geomon.note import Note
from geomon.record import Readings, Record

VALUES = {
    "twonn/encoder_layer_00": 1.0, "twonn/encoder_null": 4.0, "twonn/decoder_layer_01": 5.0,
    "qk_cosine/cross_layer_01/head_2": 7.0, "geomon/seconds": 9.0,
}  # fmt: skip


def test_a_series_draws_itself_with_its_interval():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    run = Readings([], [reading_of({"t/mean": 2.0 + s, "t/mean/margin": 0.5}, s) for s in (0, 4)])
    axes = run["t/mean"].plot(Figure().subplots(), color="red")
    (line,) = axes.lines
    assert (line.get_label(), line.get_color()) == ("t/mean", "red")
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 4], [2.0, 6.0])
    (band,) = axes.collections
    assert {*band.get_paths()[0].vertices[:, 1]} == {1.5, 2.5, 5.5, 6.5}
    assert axes.get_xlabel().startswith("training step")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["t/mean"]
    axes.set_xlim(0, 4096)
    step_0, step_4, step_16, step_64 = axes.transData.transform([(0, 0), (4, 0), (16, 0), (64, 0)])[
        :, 0
    ]
    assert step_64 - step_16 == pytest.approx(step_16 - step_4)
    assert step_16 - step_4 > step_4 - step_0 > 0
    from matplotlib import pyplot

    assert [line.get_label() for line in run["t/mean"].plot().lines] == ["t/mean"]
    pyplot.close()


def test_series_are_in_order_and_without_gaps():
    points = ((0, 1.0), (4, math.nan), (2, 3.0))
    run = Readings([], [reading_of({"t/mean": v, "t/layer_01": v}, step) for step, v in points])
    assert run.series("t/mean") == run.series("t/layer_01") == ([0, 2], [1.0, 3.0])
    assert run.series("geomon/seconds") == ([0, 2, 4], [2.0, 2.0, 2.0])
    with pytest.raises(
        KeyError, match=r"no reading has a value called 't/meen': did you mean 't/m"
    ):
        run.series("t/meen")


def test_layers_are_those_of_the_columns():
    values = {f"q/layer_{layer:02d}/head_{head}": 1.0 for layer in (2, 1) for head in range(3)}
    one = reading_of(values)
    assert one.layers("q") == Readings([], [one]).layers("q") == [1, 2]
    assert one.layers("other") == []
    assert one.value("q/layer_02/head_1") == 1.0
    assert math.isnan(one.value("q/layer_03"))


@pytest.mark.parametrize(
    "wrong", [{"step": -1}, {"time": math.inf}, {"seconds": math.nan}], ids=str
)
def test_a_step_below_0_and_times_that_are_not_finite_are_no_readings(wrong):
    with pytest.raises(ValueError, match="expected a step from 0, and a time and seconds that are"):
        msgspec.structs.replace(reading_of({"t/mean": 1.0}), **wrong)


def test_what_was_recorded_stays_as_it_is(tmp_path):
    one = reading_of({"t/mean": 1.0}, notes=["a"])
    for thing, name in (
        (one, "step"), (one.notes[0], "kind"), (Readings([], [one]), "readings"),
        (MetricText("t"), "title"), (Record(tmp_path).arrays, "path"),
    ):  # fmt: skip
        with pytest.raises(AttributeError):
            setattr(thing, name, getattr(thing, name))


def test_a_line_holds_what_differs_from_the_defaults():
    line = reading_of({"t/layer_00": 1.0}, notes=[Note("a", "b")]).line()
    assert '"notes":[{"kind":"a","text":"b"}]' in line
    assert '"stacks":{"":{"t":{"layers":[1.0]}}}' in line


def test_of_a_record_the_last_run_may_be_of_a_newer_version():
    newer, older = {"geomon": "9999.1"}, {"geomon": "0.0.1"}
    (remark,) = Readings([older, newer], []).remarks()
    assert "newer geomon (9999.1)" in remark
    for others in ([newer, older], [{"geomon": f"{__version__}.0"}], [{}], []):
        assert Readings(others, []).remarks() == []


def test_arrays_are_of_a_record():
    with pytest.raises(FileNotFoundError, match="step 8: these readings are of no record"):
        readings({}).arrays(8)


def readings(values):
    return Readings([{"model": "T"}], [reading_of(values)])


def test_stacks_are_those_of_the_columns():
    assert readings(VALUES).stacks() == ["encoder", "decoder", "cross"]
    assert readings({"twonn/layer_01": 1.0, "geomon/seconds": 1.0}).stacks() == [""]
    assert readings({}).stacks() == [""]
    assert readings(VALUES).series("qk_cosine/cross_layer_01/head_2") == ([0], [7.0])


def test_the_stack_that_predicts_is_shown_first():
    assert readings(VALUES).of_stack()[0].values["twonn/layer_01"] == 5
    both = {f"twonn/{stack}_layer_01": n for n, stack in enumerate(("text_model", "vision_model"))}
    assert readings(both).of_stack()[0].values["twonn/layer_01"] == 0


def test_a_model_with_one_stack_is_left_as_it_is():
    plain = readings({"twonn/layer_01": 1.0})
    assert plain.of_stack() is plain
    assert plain.of_stack("") is plain
    with pytest.raises(ValueError, match="the model has one stack"):
        plain.of_stack("encoder")
    with pytest.raises(ValueError, match="no stack is called 'x': 'encoder', 'decoder', 'cross'"):
        readings(VALUES).of_stack("x")


def test_notes_are_data_and_their_words_are_made():
    layers = Note("a", "{lost} of {rows} rows are lost{where}", "encoder", (1, 2),
                  numbers={"lost": 3, "rows": 8})  # fmt: skip
    alert = Note("b", "as {it} is", advice="do something")
    one = reading_of({}, notes=[layers, alert])
    assert one.words() == ["encoder: 3 of 8 rows are lost, layer 1, 2", "as {it} is"]
    assert [note.is_alert for note in one.notes] == [False, True]


def test_texts_of_metrics_are_those_of_the_last_description_that_has_them():
    runs = [
        {"metrics": 5},
        {"metrics": {"own": 5, "a": {"title": "old"}, "b": {"title": "B", "parts": {"n": "rows"}}}},
    ]
    run = Readings([*runs, {"metrics": {"a": {"title": "A", "unit": "nats"}}}, {}], [])
    assert (run.text_of("a").title, run.text_of("a").unit) == ("A", "nats")
    assert run.text_of("b").parts == {"n": "rows"}
    assert run.text_of("own").title == "own"
