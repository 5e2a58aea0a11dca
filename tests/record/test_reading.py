import math

import msgspec
import pytest

from geomon import MetricText, __version__
from geomon.note import Note
from geomon.record import Course, Readings
from support.readings import raised_of, reading_of

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


def readings(values, **fields):
    return Readings([{"model": "T"}], [reading_of(values, **fields)])


POINTS = Readings(
    [],
    [
        reading_of({"t/mean": v, "t/layer_01": v}, step)
        for step, v in ((0, 1.0), (4, math.nan), (2, 3.0))
    ],
)
HEADS = readings({f"q/layer_{layer:02d}/head_{head}": 1.0 for layer in (2, 1) for head in range(3)})
STACKS, PLAIN, NONE = readings(VALUES), readings({"twonn/layer_01": 1.0}), readings({})
TOWERS = {f"twonn/{stack}_layer_01": n for n, stack in enumerate(("text_model", "vision_model"))}
NOTES = [
    Note(
        "a", "{lost} of {rows} rows are lost{where}", "encoder", (1, 2), (), {"lost": 3, "rows": 8}
    ),
    Note("b", "as {it} is", advice="do something"),
]
NOTED = reading_of({}, notes=NOTES)
METRICS = Readings(
    [
        {"metrics": 5},
        {"metrics": {"own": 5, "a": {"title": "old"}, "b": {"title": "B", "parts": {"n": "rows"}}}},
        {"metrics": {"a": {"title": "A", "unit": "nats"}}}, {},
    ],
    [],
)  # fmt: skip
NEWER, OLDER = {"geomon": "9999.1"}, {"geomon": "0.0.1"}
LEFT_OUT = "The budget left out 12 readings that were due: a larger budget= makes more of them."
# Questions to readings, and their answers.
ANSWERS = {
    "a series in order and without gaps": (lambda: POINTS.series("t/mean"), ([0, 2], [1.0, 3.0])),
    "of a layer": (lambda: POINTS.series("t/layer_01"), ([0, 2], [1.0, 3.0])),
    "of the run": (lambda: POINTS.series("geomon/seconds"), ([0, 2, 4], [2.0, 2.0, 2.0])),
    "of a head of a stack": (
        lambda: STACKS.series("qk_cosine/cross_layer_01/head_2"),
        ([0], [7.0]),
    ),
    "layers of the columns": (lambda: HEADS.layers("q"), [1, 2]),
    "layers of a reading": (lambda: HEADS[0].layers("q"), [1, 2]),
    "layers of no column": (lambda: HEADS[0].layers("other"), []),
    "a value": (lambda: HEADS[0].value("q/layer_02/head_1"), 1.0),
    "a value that is not there": (lambda: math.isnan(HEADS[0].value("q/layer_03")), True),
    "stacks of the columns": (STACKS.stacks, ["encoder", "decoder", "cross"]),
    "one stack": (PLAIN.stacks, [""]),
    "no stack": (NONE.stacks, [""]),
    "the stack that predicts": (lambda: STACKS.of_stack()[0].values["twonn/layer_01"], 5),
    "text before pictures": (lambda: readings(TOWERS).of_stack()[0].values["twonn/layer_01"], 0),
    "a model with one stack": (lambda: PLAIN.of_stack() is PLAIN is PLAIN.of_stack(""), True),
    "notes in words": (NOTED.words, ["encoder: 3 of 8 rows are lost, layer 1, 2", "as {it} is"]),
    "alerts among notes": (lambda: [note.is_alert for note in NOTED.notes], [False, True]),
    "a newer version": (
        lambda: [
            "newer geomon (9999.1)" in each for each in Readings([OLDER, NEWER], []).remarks()
        ],
        [True],
    ),
    **{
        f"versions {runs}": (Readings(runs, []).remarks, [])
        for runs in ([NEWER, OLDER], [{"geomon": f"{__version__}.0"}], [{}], [])
    },
    **{
        f"what the budget left out: {counts}": (
            lambda counts=counts: Readings(
                [], [reading_of({}, step, left_out=count) for step, count in enumerate(counts)]
            ).remarks(),
            said,
        )
        for counts, said in (((), []), ((0,), []), ((3, 0), []), ((3, 12), [LEFT_OUT]))
    },
    **{
        f"a null for charts: {label}": (
            lambda null=null: MetricText("dimension", null=null).null_label,
            label,
        )
        for null, label in (
            ("an isotropic Gaussian of as many rows", "isotropic Gaussian"),
            ("", "noise"),
        )
    },
    "texts of the last that has them": (
        lambda: (METRICS.text_of("a").title, METRICS.text_of("a").unit),
        ("A", "nats"),
    ),
    "texts of an earlier one": (lambda: METRICS.text_of("b").parts, {"n": "rows"}),
    "texts of none": (lambda: METRICS.text_of("own").title, "own"),
    "a line of notes": (
        lambda: (
            '"notes":[{"kind":"a","text":"b"}]' in reading_of({}, notes=[Note("a", "b")]).line()
        ),
        True,
    ),
    "a line of columns": (
        lambda: '"stacks":{"":{"t":{"layers":[1.0]}}}' in reading_of({"t/layer_00": 1.0}).line(),
        True,
    ),
}
# Questions that are refused, the error and its words.
REFUSED = {
    "a tag": (
        lambda: POINTS.series("t/meen"),
        KeyError,
        r"no reading has a value called 't/meen': did you mean 't/m",
    ),
    "a stack of one": (lambda: PLAIN.of_stack("encoder"), ValueError, "the model has one stack"),
    "a stack": (
        lambda: STACKS.of_stack("x"),
        ValueError,
        "no stack is called 'x': 'encoder', 'decoder', 'cross'",
    ),
    "arrays of no record": (
        lambda: NONE.arrays(8),
        FileNotFoundError,
        "no arrays of step 8: these readings have no record",
    ),
    **{
        f"{wrong}": (
            lambda wrong=wrong: msgspec.structs.replace(PLAIN[0], **wrong),
            ValueError,
            "expected a step from 0, and a time and seconds that are",
        )
        for wrong in ({"step": -1}, {"time": math.inf}, {"seconds": math.nan})
    },
    **{
        f"to change {name}": (
            lambda thing=thing, name=name: setattr(thing, name, None),
            AttributeError,
            "immutable|cannot assign",
        )
        for thing, name in (
            (NOTED, "step"),
            (NOTES[0], "kind"),
            (NONE, "readings"),
            (MetricText("t"), "title"),
            (POINTS["t/mean"], "steps"),
            (Course("t", (0,), (1.0,)), "tag"),
            (raised_of("left_band", 3), "step"),
        )
    },
}


def start(step, **settings):
    return {"from_step": step, **settings}


# Starts of a run, the steps at which its curves break, and what has changed there.
BREAKS = [
    ([start(0, tokens=4096)], []),
    ([start(0, tokens=4096), start(1000, tokens=4096)], []),
    ([start(0, tokens=4096), start(1000, tokens=1024)], [(1000, "tokens 1,024 instead of 4,096")]),
    ([start(0, tokens=9), start(5, tokens=8, seed=3), start(7, tokens=9, seed=4)],
     [(5, "tokens 8 instead of 9"), (7, "tokens 9 instead of 8, seed 4 instead of 3")]),
    ([start(0, seed=1), start(5)], []),  # not known of both
    ([start(0, device="cpu", rate=1), start(5, device="cuda", rate=2)], []),
    ([start(0, queries=None), start(5, queries=1024)], [(5, "queries 1,024 instead of None")]),
    ([start(0, probe="a function"), start(5, probe="inputs 3f")],
     [(5, "probe inputs 3f instead of a function")]),
    ([start(0, layers=["a.0", "a.1"]), start(5, layers=["m.a.0", "m.a.1"])], []),
    ([start(0, layers=["a.0", "a.1"]), start(5, layers=["a.0"])], [(5, "layers 1 instead of 2")]),
    ([start(0, layers=["a.0", "a.1"]), start(5, layers=2)],
     [(5, "layers 2 instead of ['a.0', 'a.1']")]),
    ([start(0, metrics={"a": {}, "b": {}, "c": {}}), start(5, metrics={"b": {"x": 1}, "d": {}})],
     [(5, "without a, without c, with d")]),
    ([start(0, metrics={"a": {}}), start(5, metrics="a")], [(5, "metrics a instead of {'a': {}}")]),
    ([start(0, splits=1), start(9, splits=2), start(5, splits=1) | {"rewound_to": 5}], []),
    ([start(0, splits=1), start(5, splits=2), start(5, splits=3) | {"rewound_to": 5}],
     [(5, "splits 3 instead of 1")]),
    ([{"splits": 1}, {"splits": 2, "from_step": "?"}], [(0, "splits 2 instead of 1")]),
]  # fmt: skip


@pytest.mark.parametrize(("runs", "expected"), BREAKS, ids=range(len(BREAKS)))
def test_curves_break_where_a_run_goes_on_with_other_settings(runs, expected):
    words = [
        f"From step {step:,} on, this run was read with other settings ({changed}): its curves "
        "have a break there."
        for step, changed in expected
    ]
    found = Readings(runs, [])
    steps = [step for step, _ in expected]
    assert [tuple(each) for each in found.breaks] == [*zip(steps, words, strict=True)]
    assert found.remarks() == words


@pytest.mark.parametrize("name", ANSWERS)
def test_readings_answer(name):
    ask, expected = ANSWERS[name]
    assert ask() == expected


@pytest.mark.parametrize("name", REFUSED)
def test_readings_refuse(name):
    ask, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        ask()
