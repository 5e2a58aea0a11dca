import math
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from geomon.analysis.alerts import (
    HEALTHY_RESUMES,
    HEALTHY_STEPS,
    RULES,
    Alert,
    AlertWatch,
    first_alerts,
)
from geomon.note import Note
from geomon.record import RaisedAlert, Readings
from support.readings import reading_of


def find_alerts(readings, names=RULES):
    """The alerts of a run, in order."""
    watch = AlertWatch(names)
    return [alert for reading in readings for alert in watch.add(reading)]


def healthy(step, layers=4, heads=2, **changed):
    """A reading of the recipe's kind: `layer_03` values of each metric may be changed."""
    values = {"twonn/mean": 5.0 + 0.1 * step}
    for layer in range(layers + 1):
        place = f"layer_{layer:02d}"
        values |= {f"effective_rank/{place}": 10.0 + layer, f"massive_share/{place}": 0.0}
        values[f"anisotropy/{place}"] = 0.1 + 0.05 * layer
        for head in range(heads if layer else 0):
            values[f"attention_entropy_normalised/{place}/head_{head}"] = 0.6
            values[f"max_logit/{place}/head_{head}"] = 20.0
    assert changed.keys() <= values.keys()
    return reading_of(values | changed, step)


# One change of a reading that each rule is for, at the limit and beyond it.
FAULTS = [
    ("logit_growth", "max_logit/layer_03/head_1", 1000.0, 1001.0,
     "largest attention score 1,001, above 1,000"),
    ("rank_collapse", "effective_rank/layer_03", 1.1, 1.09,
     "effective rank 1.09, below 1.1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tag", "within", "beyond", "words"), FAULTS)
def test_each_rule_finds_its_fault_where_it_is(name, tag, within, beyond, words):
    run = [healthy(0), healthy(1, **{tag: within}), healthy(2, **{tag: beyond})]
    (alert,) = find_alerts(run, RULES)
    place = "layer 3, head 1" if "head" in tag else "layer 3"
    assert (alert.name, alert.step, alert.where) == (name, 2, place)
    assert alert.words().startswith(f"{name.replace('_', ' ')} ({place}): {words}; ")
    # A language model that is trained further may have it from the start: that is no alert.
    assert find_alerts(healthy(step, **{tag: beyond}) for step in range(4)) == []


def test_an_alert_is_raised_again_at_four_times_as_much():
    tags = [f"effective_rank/layer_{n:02d}" for n in range(1, 7)]
    run = [healthy(step, layers=6, **dict.fromkeys(tags[:step], 1.05)) for step in range(7)]
    found = find_alerts(run)
    assert [(alert.step, alert.where) for alert in found] == [
        (1, "layer 1"), (4, "layer 1; layer 2; layer 3 and 1 more"),
    ]  # fmt: skip
    assert replace(found[1], layers=found[1].layers[:3]).where == "layer 1; layer 2; layer 3"


# Heads whose attention is on one key, of 4 in each of 4 layers.
COLLAPSES = {
    "five heads in two layers": ([(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)], True),
    "a quarter of the heads": ([(1, 0), (1, 1), (2, 0), (3, 0)], False),
    "all heads of a layer, as where they copy": ([(2, head) for head in range(4)], False),
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_entropy_collapses_if_many_heads_of_several_layers_attend_to_one_key(name):
    heads, is_said = COLLAPSES[name]
    entropy = "attention_entropy_normalised/layer_{:02d}/head_{}"
    low = {entropy.format(*place): 0.049 for place in heads}
    limit = {entropy.format(*place): 0.05 for place in heads}
    run = [healthy(0, heads=4), healthy(1, heads=4, **limit), healthy(2, heads=4, **low)]
    assert [(alert.name, alert.step) for alert in find_alerts(run)] == (
        [("entropy_collapse", 2)] if is_said else []
    )
    if is_said:
        (alert,) = find_alerts(run)
        assert alert.words().startswith(
            "entropy collapse (layer 1, head 0 and 4 more): at 4.90 % of uniform, below 5 %; "
            "at layer 1, head 0; layer 1, head 1; layer 1, head 2 and 2 more; "
            "5 heads attend to nearly one key; "
        )


def test_logits_are_an_alert_again_at_four_times_as_much_and_the_largest_comes_first():
    scores = [20, 1200, 1300, 4790, 4800, 20, 19190, 19200, math.nan]
    tags = {"max_logit/layer_01/head_0": 1, "max_logit/layer_04/head_1": 1.01}
    run = [
        healthy(step, **{tag: factor * x for tag, factor in tags.items()})
        for step, x in enumerate(scores)
    ]
    found = find_alerts(run)
    assert [alert.step for alert in found] == [1, 4, 7]
    assert {alert.heads for alert in found} == {((4, 1), (1, 0))}


def test_a_rank_of_rows_that_are_massive_is_no_collapse():
    low, massive = {"effective_rank/layer_02": 1.05}, {"massive_share/layer_02": 0.5}
    assert [a.name for a in find_alerts([healthy(0), healthy(1, **low)])] == ["rank_collapse"]
    assert find_alerts([healthy(0), healthy(1, **low, **massive)]) == []


def test_rows_that_are_not_finite_are_an_alert_from_the_first_reading_on():
    text = "hidden states{where}: {lost} of {rows} rows are not finite and were left out"
    lost = [
        Note("rows not finite", text, layers=layers, numbers={"lost": count, "rows": 512})
        for layers, count in (((3,), 20), ((1, 2), 320))
    ]
    run = [reading_of({}, 0, notes=["another note", *lost]), reading_of({}, 1, notes=lost)]
    (alert,) = find_alerts(run)
    assert (alert.name, alert.layers) == ("not_finite", (1, 2))
    assert "not finite (layer 1 and 1 more): 320 of 512 rows are not finite;" in alert.words()


def test_the_stacks_of_a_model_are_watched_each_by_itself():
    ranks = {f"effective_rank/{stack}_layer_02": 9.0 for stack in ("encoder", "decoder")}
    found = find_alerts([reading_of(ranks, 0), reading_of(dict.fromkeys(ranks, 1.05), 1)])
    assert [(alert.stack, alert.layers) for alert in found] == [
        ("encoder", (2,)), ("decoder", (2,)),
    ]  # fmt: skip
    assert found[1].words().startswith("decoder: rank collapse (layer 2): ")


def raised(*alerts):
    """A run without readings, with alerts."""
    lines = [RaisedAlert(alert.step, 0.0, "check", alert.note()) for alert in alerts]
    return Readings([], [], raised=lines)


def test_alerts_are_data():
    (alert,) = find_alerts([healthy(0), healthy(8, **{"max_logit/layer_03/head_1": 1304.0})])
    note = alert.note()
    assert (note.kind, note.heads, note.numbers["largest"]) == ("logit_growth", ((3, 1),), 1304.0)
    assert note.words() == (
        "logit growth (layer 3, head 1): largest attention score 1,304, above 1,000; "
        f"{note.advice}; {RULES['logit_growth'].odds} (geomon alerts logit_growth)"
    )
    (first,) = first_alerts(raised(alert, alert))
    assert (first.alert.kind, first.step, first.total) == ("logit growth", 8, 2)


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (["rank_colapse"], ValueError, r"'rank_colapse' \(did you mean 'rank_collapse'\?\)"),
        (
            [3],
            ValueError,
            "no alert is called 3; there are not_finite, loss_not_finite, loss_jump",
        ),
        ("rank_collapse", TypeError, r'write \["rank_collapse"\]'),
        (None, TypeError, "a sequence of names"),
    ],
)
def test_names_are_checked(names, error, words):
    with pytest.raises(error, match=words):
        AlertWatch(names)


def test_each_alert_has_a_section_to_which_its_note_leads():
    text = (DOCS / "alerts.md").read_text()
    assert {name for name in RULES if f"\n## {name}\n" not in text} == set()


DOCS = Path(__file__).parents[2] / "docs"


def test_how_often_alerts_are_false_is_what_the_page_counts():
    page = (DOCS / "warnings.md").read_text()
    assert f"with {HEALTHY_STEPS:,} steps read" in page
    counted = re.findall(r"(\w+) (\d+)", page.partition("\nBy kind: ")[2].partition(".")[0])
    said = {name: rule.false_alarms for name, rule in RULES.items() if rule.false_alarms}
    assert {name: int(count) for name, count in counted} == said
    assert f"{HEALTHY_RESUMES:,} readings were compared" in (DOCS / "alerts.md").read_text()


def jumping(**jumps):
    """A healthy run of 60 readings from step 1,000 on in which values jump at given readings."""
    run = []
    for n in range(60):
        noise = np.random.default_rng(n)
        run.append(reading_of({
            f"max_logit/layer_{layer:02d}/head_{head}": 20 + noise.standard_normal()
            + 60 * (n >= jumps.get(f"layer_{layer:02d}_head_{head}", 60))
            for layer in (1, 2) for head in (0, 1)
        }, 1000 + n))  # fmt: skip
    return run


@pytest.fixture(scope="module")
def left_band():
    """Two alerts: of a value, and of four as three more have followed it."""
    places = {"layer_02_head_1": 50, "layer_01_head_0": 51, "layer_01_head_1": 52,
              "layer_02_head_0": 52}  # fmt: skip
    return find_alerts(jumping(**places), ["left_band"])


def test_a_value_that_leaves_its_band_is_an_alert_that_names_it_and_those_that_follow(left_band):
    assert [(each.step, each.heads[:2], each.numbers["count"]) for each in left_band] == [
        (1051, ((2, 1),), 1), (1053, ((2, 1), (1, 0)), 4),
    ]  # fmt: skip
    first, second = left_band
    then = "; then at step 1,052 max_logit of layer 1, head 0, at step 1,053 max_logit of layer "
    assert then in second.words()
    assert second.words().count("at step 1,053") == 1  # of two values, named once
    low, high, value = (f"{first.numbers[name]:.3g}" for name in ("low", "high", "value"))
    line = f"left band (layer 2, head 1): max_logit {value}, expected {low} to {high}"
    assert first.note().lines()[0] == line
    assert "; max_logit/layer_02/head_1 left its band at step 1,051; " in first.words()
    (course,) = first.courses
    assert (course.tag, course.steps) == ("max_logit/layer_02/head_1", (*range(1020, 1052),))
    assert max(course.values[:-2]) < 30 < first.numbers["value"] == pytest.approx(course.values[-1])


def test_alerts_of_one_event_are_one_story(left_band):
    first, second = left_band
    (story,) = first_alerts(raised(first, second))
    assert (story.step, story.total, story.alert.note) == (1051, 2, second.note())
    another = replace(second, step=1058, numbers={**second.numbers, "since": 1058})
    (story,) = first_alerts(raised(first, second, another))
    assert (story.total, story.alert.note) == (3, second.note())
    noted = [reading_of({}, 8, notes=["another note", first.note()])]  # as an older record has it
    assert [each.total for each in first_alerts(Readings([], noted))] == [1]


def test_an_event_after_a_quiet_time_is_another_alert():
    run = jumping(layer_02_head_1=20, layer_01_head_0=50)
    found = find_alerts(run, ["left_band"])
    assert [(alert.step, alert.heads) for alert in found] == [(1021, ((2, 1),)), (1051, ((1, 0),))]


@pytest.mark.parametrize(("again", "said"), [
    ({"layer_02_head_1": 50}, False),  # no worse than at first
    ({"layer_02_head_1": 50, "layer_02_head_0": 50}, True),  # at one place more
])  # fmt: skip
def test_an_event_after_a_quiet_time_is_said_only_if_it_is_worse(again, said):
    run = jumping(layer_02_head_1=20)
    for n, reading in enumerate(run):
        for place, at in again.items():
            layer, head = int(place[6:8]), int(place[-1])
            rows = reading.column("max_logit").heads[layer - reading.column("max_logit").first]
            rows[head] -= 30 * (n >= at)  # less far than the first jump
    found = find_alerts(run, ["left_band"])
    assert [alert.step for alert in found] == [1021, 1051][: 1 + said]


FIXED = {
    "logit_growth": {"max_logit/layer_03/head_1": 1300.0},
    "rank_collapse": {"effective_rank/layer_03": 1.05},
    "entropy_collapse": {
        f"attention_entropy_normalised/layer_{layer:02d}/head_{head}": 0.01
        for layer in (2, 3) for head in (0, 1)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_limit_sends_to_the_matrix_that_left_its_band_before(name):
    matrix = "weight_norm/layer_02/q_proj"
    run = [
        reading_of(
            healthy(n).values
            | {matrix: 3.0 + (n >= 30)}
            | (FIXED[name] if n >= 33 else {}),
            1000 + n,
        )
        for n in range(40)
    ]  # fmt: skip
    alerts = find_alerts(run)
    assert [alert.name for alert in alerts][:2] == ["left_band", name]
    first = "look first at weight_norm/q_proj of layer 2, out of its band at step 1,031; then at "
    assert all(alert.advice.startswith(first) for alert in alerts if alert.name == name)
    (alone,) = find_alerts(run, [name])
    assert alone.advice == RULES[name].advice


LONG = {"heads": tuple((10 + n, 11) for n in range(40)), "step": 123_456}
NUMBERS = {
    "logit_growth": {"largest": 123_456.0, "limit": 1000.0},
    "rank_collapse": {"lowest": 1.05, "limit": 1.1},
    "entropy_collapse": {"count": 40, "limit": 5.0, "lowest": 4.9},
    "not_finite": {"lost": 16_384, "rows": 16_384},
    "loss_not_finite": {"name": "training_loss", "value": "-inf"},
    "loss_jump": {"name": "training_loss", "value": 12.31, "low": 1.234, "high": 1.456},
    "same_batch": {"before": 123_400},
    "odd_layer": {"kind": "another scale of the scores"},
    "unmoved_weights": {"count": 128, "plural": "s", "steps": 4_000, "names": "w, " * 40},
    "left_band": {"metric": "attention entropy", "value": 0.0512, "low": 0.612, "high": 0.724,
                  "since": 123_400, "then": "; then " + "more, " * 20, "tag": "a/b"},
    "scatter_growth": {"factor": 1.44, "readings": 20},
    "changed_at_resume": {"metric": "attention entropy", "value": 0.497, "before": 0.342,
                          "last": 123_400, "usual": "", "then": ""},
}  # fmt: skip


OF_NO_STACK = ("loss_not_finite", "loss_jump", "same_batch", "unmoved_weights")


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("stack", ["", "text_encoder"])
def test_the_first_line_of_an_alert_is_short_and_loses_nothing(name, stack):
    if stack and name in OF_NO_STACK:
        pytest.skip("a rule that names no stack")
    alert = Alert(name, stack=stack, numbers=NUMBERS[name], advice=RULES[name].advice, **LONG)
    line, more = alert.note().lines("alert at step 123,456: ")
    assert len(line) <= 100
    assert (name.replace("_", " ") in line, "..." in line) == (True, False)
    assert RULES[name].advice in more
    assert f"(geomon alerts {name})" in more


def test_a_line_that_is_too_long_goes_on_behind():
    note = Note("odd", "word " * 40 + "end", more="advice")
    line, more = note.lines("opening: ")
    assert len(line) <= 100
    words = f"{line.removesuffix('...')} {more.removeprefix('... ')}".split()
    assert words == ["opening:", *["word"] * 40, "end;", "advice"]
    assert Note("odd", "word").lines() == ("word", "")


def test_growing_scatter_of_all_values_is_an_alert_without_a_place():
    run = [
        reading_of({
            f"qk_dot/layer_01/head_{head}": value * (1 if n < 60 else 2.5)
            for head, value in enumerate(np.random.default_rng(n).standard_normal(40))
        }, 1000 + n)
        for n in range(100)
    ]  # fmt: skip
    (alert,) = find_alerts(run, ["scatter_growth"])
    factor = alert.numbers["factor"]
    assert (1060 < alert.step < 1080, alert.where) == (True, "")
    assert 1.49 < factor < 1.65  # the limit, and little more: 2.5 is reached over twenty readings
    assert f"all values scatter {factor:.1f} times as far as before; " in alert.words()


def with_batches(text, start=0):
    """Readings of consecutive steps whose batches are letters, with "?" for unknown token ids."""
    return [
        replace_batch(reading_of({}, step, source="inline"), letter)
        for step, letter in enumerate(text, start)
    ]


def replace_batch(reading, letter):
    return msgspec.structs.replace(reading, batch=letter.replace("?", ""))


@pytest.mark.parametrize(("text", "found"), [
    ("abcc", [(3, 2)]),
    ("abccc", [(3, 2)]),  # said once
    ("abccdee", [(3, 2)]),  # once more is hardly worse
    ("abbccddee", [(2, 1), (8, 7)]),
    ("aaaa", []),  # the whole data set is one batch
    ("abab", []),  # the data come again in the same order
    ("abcabcc", []),  # as if two looks were one round of the data apart
    ("a??b", []),
])  # fmt: skip
def test_a_batch_that_comes_again_at_the_next_look_is_an_alert(text, found):
    alerts = find_alerts(with_batches(text), ["same_batch"])
    assert [(alert.step, alert.numbers["before"]) for alert in alerts] == found
    assert all("token ids of step" in alert.words() for alert in alerts)


@pytest.mark.parametrize(("text", "found"), [
    ("ab", [(3, 0)]), ("cab", [(3, 2)]), ("dab", []), ("?a", [(4, 0)]),
])  # fmt: skip
def test_a_resumed_run_that_begins_with_an_earlier_batch_is_an_alert(text, found):
    watch = AlertWatch(["same_batch"])
    for reading in with_batches("abc"):
        watch.recall(reading)
    alerts = [alert for each in with_batches(text, 3) for alert in watch.add(each)]
    assert [(alert.step, alert.numbers["before"]) for alert in alerts] == found


def test_probes_have_the_same_batch_on_purpose():
    run = [replace_batch(reading_of({}, n), x) for n, x in enumerate("abbb")]
    assert find_alerts(run, ["same_batch"]) == []


@pytest.mark.parametrize(("earlier", "later", "is_said"), [
    ("inline", "check", True), ("check", "inline", True), ("inline", "inline", True),
    ("probe", "probe", True), ("probe", "check", False),  # other tokens
])  # fmt: skip
def test_a_change_at_a_resume_is_an_alert(earlier, later, is_said):
    watch = AlertWatch()
    watch.recall(msgspec.structs.replace(healthy(0), source=earlier))
    tag, low = "effective_rank/layer_03", 1.05
    reading = msgspec.structs.replace(healthy(8, **{tag: low}), source=later)
    assert [alert.name for alert in watch.add(reading)] == ["rank_collapse"] * is_said
