import copy
import inspect
import json
import math
import pickle
import re

import pytest
import torch

from geomon import METRICS, Memory, Monitor, at_last, geometry, measure, select
from geomon.monitor.options import MonitorOptions, declared
from support.models import PlainDecoder, batch


def cloud(tokens=600, width=16, seed=0):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def test_every_metric_that_the_inputs_allow():
    values = geometry(cloud(), torch.arange(600) % 50)
    names = {tag.split("/")[0] for tag in values}
    # Heads, weights, and the layer before, are not given.
    heads = ("qk", "attention", "query", "key", "max", "head")
    others = (*heads, "weight", "expert", "norm_growth", "residual", "update", "unmoved")
    assert names == {name for name in METRICS if not name.startswith(others)}
    assert values["cosine/null"] == pytest.approx(0, abs=0.01)  # that of noise
    assert all(math.isfinite(value) for value in values.values()), values


def test_input_is_unchanged_and_results_are_the_same_twice():
    rows = cloud()
    before = rows.clone()
    state = torch.random.get_rng_state()
    assert geometry(rows) == geometry(rows)
    assert torch.equal(rows, before)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_batches_have_a_deviation():
    values = geometry(cloud(1000), tokens=400)
    assert values["twonn/n"] == 400
    assert values["twonn/std"] > 0
    for options in ({}, {"tokens": 2000}, {"queries": None}):
        values = geometry(cloud(1000), **options)
        assert values["twonn/n"] == 1000
        assert "twonn/std" not in values


def test_a_function_of_views_is_a_metric():
    assert geometry(cloud(), metrics={"rows": lambda hidden: 1.0 * len(hidden)}) == {"rows": 600}


def test_rows_that_are_not_finite_are_left_out():
    rows = cloud()
    spoilt = torch.cat([rows, torch.full((5, 16), math.nan), torch.full((3, 16), math.inf)])
    assert geometry(spoilt)["twonn/n"] == 600
    assert geometry(spoilt).notes == ("8 of 608 rows that are not finite were left out",)
    assert geometry(spoilt)["anisotropy"] == pytest.approx(geometry(rows)["anisotropy"])


IDS = torch.arange(600) % 50


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ((torch.randn(3),), {}, r"hidden states \[tokens, width\], got \[3\]"),
        ((torch.randn(2, 3, 4),), {}, r"got \[2, 3, 4\]"),
        ((torch.randn(2, 3),), {}, "at least 3 finite rows, got 2 of 2"),
        ((torch.empty(0, 3),), {}, "at least 3 finite rows"),
        ((torch.full((9, 2), math.nan),), {}, "at least 3 finite rows, got 0 of 9"),
        ((cloud(), IDS, IDS[:-1]), {}, "expected 600 positions, one for each row"),
        ((cloud(), IDS[:-1]), {}, "expected 600 token_ids, one for each row"),
        ((cloud(),), {"sequences": IDS[:-1]}, "expected 600 sequences, one for each row"),
        ((cloud(), IDS * 0.5), {}, "expected token_ids as whole numbers, got 0.5 at row 1"),
        *(((cloud(),), {"tokens": x}, "tokens must be a whole number of at least 3, got")
          for x in (0, 2, 2.5, True, "9")),
        *(((cloud(),), {"seed": x}, "seed must be a whole number") for x in (1.5, "a", True)),
        ((cloud(),), {"queries": 2}, "queries must be a whole number of at least 3"),
        ((cloud(),), {"metrics": select("twonn_distinct")}, "none of the metrics"),
        *(((cloud().double() * x,), {}, r"between 2\^-200 and 2\^200, got .*e.* scale the rows")
          for x in (1e-300, 1e-62, 1e61, 1e300)),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(given, options, words):
    with pytest.raises(ValueError, match=words):
        geometry(*given, **options)


@pytest.mark.parametrize(
    ("largest", "is_taken"),
    [(2.0**199, True), (2.0**200, False), (2.0**-201, True), (2.0**-202, False)],
)
def test_numbers_are_taken_as_far_as_their_fourth_powers_fit(largest, is_taken):
    rows, metrics = torch.zeros(3, 2).double(), {"width": lambda hidden: 1.0 * hidden.shape[1]}
    rows[1, 1] = -largest
    if is_taken:
        assert geometry(rows, metrics=metrics) == {"width": 2.0}
    else:
        with pytest.raises(ValueError, match=r"scale the rows$"):
            geometry(rows, metrics=metrics)


@pytest.mark.parametrize("options", [{"seed": 0}, {"seed": 3, "splits": 2}, {"queries": 20}])
def test_a_model_is_measured_as_a_probe_of_a_monitor_measures_it(options):
    model, inputs, memory = PlainDecoder(), batch(8, 24), Memory()
    own = {"metrics": select("twonn", "qk_cosine"), "tokens": 64, "blocks": r"blocks\.[01]"}
    own |= options
    with Monitor(model, directory=None, sinks=[memory], **own) as monitor:
        monitor.probe(0, inputs)
    (reading,) = memory.readings
    expected = {t: x for t, x in reading.values.items() if not t.startswith("geomon/")}
    assert measure(model, inputs, **own) == expected
    assert measure(model, inputs, **own | {"seed": 9}) != expected
    of_monitor = declared(MonitorOptions)
    for function, names in ((measure, own), (geometry, ("metrics", "queries", "seed"))):
        taken = inspect.signature(function).parameters
        for name in names:
            assert taken[name].default == of_monitor[name].default


@pytest.mark.parametrize(("name", "least"), [("tokens", 1), ("splits", 1), ("queries", 3)])
def test_numbers_out_of_range_are_refused_before_the_model_runs(name, least):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least {least}"):
        measure(PlainDecoder(), None, **{name: least - 1})


def test_positions_tell_equal_tokens_apart():
    positions = torch.arange(600) % 7
    both = geometry(cloud(), IDS, positions)
    assert both["twonn_distinct/n"] == 350  # every pair of 50 ids and 7 positions occurs
    assert both["twonn_distinct/repeated"] == pytest.approx(1 - 350 / 600)
    assert geometry(cloud(), IDS)["twonn_distinct/n"] == 50
    assert geometry(cloud(), IDS.float(), positions.tolist()) == both


def test_numbers_of_sequences_give_margins_whatever_they_are():
    numbers = torch.arange(600) // 20
    values = geometry(cloud(), IDS, sequences=numbers)
    assert values["twonn/sequences"] == 30
    assert values["variance/margin"] > 0
    assert geometry(cloud(), IDS, sequences=7.0 * numbers - 1000) == values
    assert "variance/margin" not in geometry(cloud())


HARD = {
    "equal": (torch.ones(50, 4), torch.arange(50) % 3),
    "zero": (torch.zeros(20, 3),),
    "two kinds": (torch.tensor([[1.0, 2.0]] * 5 + [[2.0, 3.0]] * 5), torch.arange(10)),
    "three rows": (cloud(3, 2), torch.arange(3)),
    "a line": (torch.arange(100.0)[:, None],),
    "a grid": (torch.cartesian_prod(torch.arange(10.0), torch.arange(10.0)),),
    "bits": (cloud() > 0,),
    "types of equal norm": (3 * torch.eye(20).repeat(15, 1), torch.arange(300) % 20),
    "one type": (cloud(), torch.zeros(600)),
    "huge": (torch.arange(20.0).double()[:, None] * 2.0**195,),
    "tiny": (cloud().double() * 1e-59, torch.arange(600) % 7),
}


@pytest.mark.parametrize("name", HARD)
def test_every_missing_value_is_named_in_a_note(name):
    values = geometry(*HARD[name])
    missing = [tag for tag, value in values.items() if not math.isfinite(value)]
    named = {word for note in values.notes for word in re.split(r"[,;:]? ", note)}
    named |= {word.rstrip(":;,") for word in named}
    for tag in missing:
        assert {tag, tag.partition("/")[0]} & named, (tag, values.notes)


def test_rows_left_out_and_rows_wanted_are_named():
    assert geometry(cloud(), tokens=1000).notes[0].startswith("600 rows, fewer rows than tokens")
    assert geometry(cloud(), tokens=250).notes[0].startswith("100 rows beyond the last full split")
    assert geometry(cloud(), tokens=300).notes == geometry(cloud()).notes == ()


def test_what_geometry_returns_is_a_dict_with_notes():
    values = geometry(torch.ones(50, 4))
    plain = dict(values)
    assert isinstance(values, dict)
    for other in (
        pickle.loads(pickle.dumps(values)), copy.copy(values), copy.deepcopy(values), values.copy()
    ):  # fmt: skip
        assert type(other) is type(values)
        assert other.notes == values.notes
        assert other.keys() == plain.keys()
        assert repr(other) == repr(values)
    assert json.dumps(values) == json.dumps(plain)
    assert repr(values).split("\n") == [repr(plain), *(f"note: {n}" for n in values.notes)]
    assert repr(geometry(cloud())) == repr(dict(geometry(cloud())))


def test_measure_hands_on_the_notes_of_the_pass_and_of_the_values():
    def gone(hidden):
        return math.nan

    values = measure(
        PlainDecoder(), batch(4, 8), metrics=select("massive_share", "gride") | {"gone": gone},
        queries=None,
    )  # fmt: skip
    notes = "\n".join(values.notes)
    assert math.isnan(values["gone/layer_01"])
    assert "gone, layer 0, 1, 2, 3: NaN: the metric returned it" in notes
    assert math.isnan(values["gride/mean/k32"])
    assert "gride/k16, gride/k32, layer 0, 1, 2, 3: NaN: scale k takes 2k + 1 rows" in notes
    with pytest.raises(ZeroDivisionError):
        measure(PlainDecoder(), batch(4, 8), metrics={"broken": lambda hidden: 1 / 0})


def fill(model, lowest):
    for parameter in model.parameters():
        parameter.data.fill_(lowest)


# Causes of numbers that are not finite: a model, and the layers of hidden states that it spoils.
SPOILT = {
    "all weights": (lambda model: fill(model, math.nan), [0, 1, 2, 3]),
    "one block": (lambda model: fill(model.blocks[1].mlp, math.nan), [2, 3]),
    "infinite": (lambda model: fill(model.blocks[1].mlp[2], math.inf), [2, 3]),
    "queries alone": (lambda model: fill(model.blocks[1].c_attn, math.nan), [2, 3]),
    "the table of last tokens": (lambda model: fill(model.places, math.nan), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_of_a_layer_without_finite_rows_the_notes_say_that_and_give_no_other_reason(spoilt):
    """Whatever the metric reads, also of heads and of last tokens."""
    spoil, layers = SPOILT[spoilt]
    model = PlainDecoder()
    spoil(model)
    last = {f"{name}_last": at_last(METRICS[name]) for name in ("cosine", "variance")}
    values = measure(model, batch(), metrics=METRICS | last)
    shown = ", ".join(map(str, layers))
    (rows,) = (note for note in values.notes if note.startswith("hidden states"))
    assert rows == f"hidden states, layer {shown}: 256 of 256 rows are not finite and were left out"
    false = r"division|more tokens|larger batch|[eE]xpected|Error|NaN:|sequences in a reading|few"
    own = (note for note in values.notes if re.search(rf"layer.* {layers[-1]}\b", note))
    assert not [note for note in own if re.search(false, note)]
    for name in METRICS.keys() & {"twonn", "variance", "qk_cosine", "attention_entropy"}:
        assert not math.isfinite(values[f"{name}/layer_03"])
        assert not math.isfinite(values.get(f"{name}/mean", math.nan)) or "head" in name
    heads = "qk_cosine, qk_dot, layer"
    assert any(heads in note and "not all of these are finite" in note for note in values.notes)


def test_a_notebook_shows_a_table_of_means_and_no_thousand_values():
    values = measure(PlainDecoder(), batch(), metrics=select("twonn", "cosine", "variance_shares"))
    page = values._repr_html_()
    assert page.count("<tr>") == 3  # a part named "mean" of a layer is no mean over layers
    mean, margin = values["cosine/mean"], values["cosine/mean/margin"]
    assert f"<td>cosine/mean</td><td>{mean:.4g} ± {margin:.2g}</td>" in page
    assert f"3 of {len(values)} values" in page
    rows = geometry(torch.randn(50, 8), metrics=select("cosine"))
    assert "<td>cosine</td>" in rows._repr_html_()
    assert all(f"<li>{note}</li>" in page for note in values.notes)
