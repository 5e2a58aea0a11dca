import math
import random

import numpy as np
import pytest
import torch
from fingerprint import random_state
from measuring import SOURCES, Layer, PassInfo, Sizes, Snapshot, evaluate

from geomon import at_last, select
from geomon.metrics import Evaluator, LayerValues, check_metrics


def snapshot(*hidden: torch.Tensor, **captured) -> Snapshot:
    layers = [
        Layer(
            i, f"layer {i}", {"hidden": h, "precision": 1e-7, **captured},
            sources=SOURCES if i else frozenset({"hidden"}),
        )
        for i, h in enumerate(hidden)
    ]  # fmt: skip
    return Snapshot(layers, PassInfo(len(hidden[0]), "eval", "float32"))


def values(metrics, seen, rows=4, splits=2, **kwargs):
    return evaluate(seen, metrics, rows=rows, splits=splits, **kwargs).values


def test_value_is_the_mean_over_batches_and_std_their_deviation():
    hidden = torch.arange(12.0)[:, None]
    found = values({"m": lambda hidden: hidden.mean()}, snapshot(hidden, hidden))
    assert found["m/layer_01"] == 3.5  # batches 0..3 and 4..7; the rest is left out
    assert found["m/layer_01/std"] == pytest.approx(math.sqrt(8.0))
    assert found["m/mean/std"] == pytest.approx(math.sqrt(8.0))
    found = values({"m": lambda hidden: hidden.mean().log()}, snapshot(hidden - 9, hidden - 9))
    assert math.isnan(found["m/layer_01/std"])  # negative in one of the splits
    assert values({"m": lambda hidden: {1: hidden.mean()}}, snapshot(hidden))["m/layer_00/1"] == 3.5


def test_a_metric_that_draws_random_numbers_leaves_those_of_the_training():
    def draws(hidden):
        return torch.rand(1) + np.random.rand() + random.random()

    before = random_state()
    values({"m": draws}, snapshot(torch.ones(4, 1)))
    assert random_state() == before


def test_heads_have_mean_extremes_and_each():
    seen = snapshot(torch.zeros(4, 1), torch.zeros(4, 1), query=torch.tensor([1.0, 5.0, math.nan]))
    found = values({"m": lambda query: query}, seen)
    assert math.isnan(found.pop("m/layer_01/head_2"))
    assert found == {
        "m/layer_01": 3.0, "m/layer_01/min": 1.0, "m/layer_01/max": 5.0,
        "m/layer_01/head_0": 1.0, "m/layer_01/head_1": 5.0,
        "m/mean": 3.0, "m/mean/min": 1.0, "m/mean/max": 5.0,
    }  # fmt: skip


def test_a_layer_that_was_not_seen_has_no_part_in_the_mean_one_that_failed_has():
    def fails_at_two(hidden):
        if hidden[0, 0] == 2:
            raise ValueError("two")
        return hidden.mean()

    seen = snapshot(*(torch.full((4, 1), float(v)) for v in (0, 1, 2, 3)))
    result = evaluate(seen, {"m": fails_at_two}, rows=4, splits=1)
    assert math.isnan(result.values["m/layer_02"])
    assert math.isnan(result.values["m/mean"])
    assert [note.words() for note in result.notes] == ["m, layer 2: two"]
    with pytest.raises(ValueError, match="two"):
        values({"m": fails_at_two}, seen, strict=True)

    seen.layers[2] = Layer(2, "two", {}, {"hidden": "it was skipped"})
    result = evaluate(seen, {"m": fails_at_two}, rows=4, splits=1)
    assert math.isnan(result.values["m/layer_02"])
    assert result.values["m/mean"] == 2
    assert "it was skipped" in result.notes[0].words()


def test_metrics_do_not_run_under_autocast_nor_autograd():
    seen = snapshot(torch.ones(4, 4), torch.ones(4, 4, requires_grad=True))
    dtypes = []

    def product(hidden):
        result = hidden @ hidden.T
        dtypes.append((result.dtype, result.requires_grad))
        return result.sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        values({"m": product}, seen)
    assert set(dtypes) == {(torch.float32, False)}


def test_a_result_of_the_wrong_shape_is_said():
    result = evaluate(snapshot(torch.ones(4, 2)), {"m": lambda hidden: hidden}, rows=4, splits=1)
    assert (
        "a scalar, a vector [heads] or a dict of these, got shape [4, 2]" in result.notes[0].words()
    )


def test_stacks_are_named_apart_and_have_their_own_means():
    layers = [
        Layer(i, f"{stack} {i}", {"hidden": torch.full((4, 1), value)}, stack=stack)
        for stack, start in (("encoder", 1.0), ("decoder", 10.0))
        for i, value in enumerate((start, start + 1, start + 2))
    ]
    cross = Layer(1, "cross 1", {"query": torch.ones(2)}, stack="cross",
                  sources=frozenset({"attention"}))  # fmt: skip
    seen = Snapshot([*layers, cross], PassInfo(4, "eval", "float32"))
    metrics = {"m": lambda hidden: hidden.mean(), "q": lambda query: query.mean()}
    result = evaluate(seen, metrics, rows=4, splits=1)
    assert result.values["m/encoder_layer_02"] == 3
    assert result.values["m/encoder_mean"] == 2.5
    assert result.values["m/decoder_mean"] == 11.5
    assert result.values["q/cross_layer_01"] == 1
    assert not any(tag.startswith("m/cross") or tag == "m/mean" for tag in result.values)
    assert all(note.words().startswith(("encoder: q", "decoder: q")) for note in result.notes)


def test_nulls_are_of_the_rows_that_were_measured():
    rows = torch.randn(500, 6, generator=torch.Generator().manual_seed(0))
    metrics = select("anisotropy", "twonn")
    for asked, measured in ((100, 100), (500, 500), (4000, 500)):
        found = values(metrics, snapshot(rows, rows), rows=asked, splits=1)
        for name, metric in metrics.items():
            expected = metric.null(Sizes(measured, 6))
            assert expected
            assert {part: found[f"{name}/{part}"] for part in expected} == expected
    copied = torch.cat([rows, rows[:125]])  # a fifth are copies: the null is that of the others
    found = values(metrics, snapshot(copied, copied), rows=625, splits=1)
    assert found["anisotropy/null"] == metrics["anisotropy"].null(Sizes(500, 6))["null"]


def test_the_number_of_sequences_stands_beside_that_of_rows():
    hidden = torch.randn(240, 4, generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(240) % 12
    found = values(select("twonn", "variance"), snapshot(hidden, sequences=numbers), rows=120)
    assert found["twonn/layer_00/n"] == 120  # in one of two splits
    assert found["twonn/layer_00/sequences"] == 12
    assert "variance/layer_00/sequences" not in found
    unknown = values(select("twonn"), snapshot(hidden), rows=120)
    assert not [tag for tag in unknown if tag.endswith("/sequences")]


def test_a_metric_that_changes_its_views_changes_no_other_metric_and_no_second_measurement():
    def changes(hidden, token_ids, precision, spectrum, nearest):
        for view in (hidden, token_ids, spectrum, *nearest):
            view.zero_()
        return float(hidden.sum())

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 4, generator=generator)
    ids = torch.randint(9, (40,), generator=generator)
    seen = snapshot(rows, rows.clone(), token_ids=ids)
    plain = select("effective_rank", "cosine", "within_variance", "twonn")
    expected = values(plain, seen, rows=20)
    for _ in range(2):  # as after a trial of what a layer costs
        found = values({"changes": changes} | plain, seen, rows=20)
        assert found.pop("changes/mean") == 0.0
        assert {t: v for t, v in found.items() if not t.startswith("changes")} == expected


def test_an_object_that_has_no_hash_is_a_metric_as_any():
    class Norm:
        __hash__ = None

        def __call__(self, hidden):
            return hidden.norm()

    own = Norm()
    last = {"last_hidden": torch.eye(3), "last_precision": 1e-7}
    found = values({"all": own, "last": at_last(own)}, snapshot(*[torch.eye(4)] * 2, **last))
    assert found["all/layer_01"] == 2.0
    assert found["last/layer_01"] == pytest.approx(3**0.5)


@pytest.mark.parametrize(
    ("metric", "shape", "said"),
    [
        ("anisotropy", (2049, 1025), True), ("anisotropy", (2048, 1025), False),
        ("anisotropy", (2049, 1024), False), ("cosine", (2049, 1025), False),
    ],
)  # fmt: skip
def test_a_note_says_where_spectra_stand_on_fewer_rows(metric, shape, said):
    measured = LayerValues("", 3, shape, {metric: {"": np.array([[0.5]])}}, sequences=8)
    notes = Evaluator(check_metrics([metric]), 1).combine([measured], shape[0]).notes
    text = "spectra of layers wider than 1024 columns use only 2048 rows, layer 3"
    assert [note.words() for note in notes] == [text] * said


def test_a_layer_without_attention_between_others_is_no_failure_of_its_metrics():
    query = {"query": torch.ones(2)}
    layers = [
        Layer(index, f"layer {index}", views, stack="s", sources=frozenset({source}))
        for index, views, source in (
            (1, query, "attention"), (2, {"hidden": torch.ones(4, 2)}, "hidden"),
            (3, query, "attention"),
        )
    ]  # fmt: skip
    metrics = {"q": lambda query: query, "nan": lambda hidden: math.nan}
    result = Evaluator(check_metrics(metrics), 1, explains=True).evaluate(layers, 4)
    assert math.isnan(result.stacks["s"]["q"].at(2))
    assert result.stacks["s"]["q"].by_head() == {(n, h): 1.0 for n in (1, 3) for h in (0, 1)}
    said = [note.words() for note in result.notes]
    assert said == ["s: nan, layer 2: NaN: the metric returned it"]


@pytest.mark.parametrize(
    "error", [SystemExit("usage: tool FILE"), GeneratorExit(), SystemExit(2), KeyboardInterrupt()]
)
def test_a_metric_that_exits_costs_its_own_values_alone_but_for_ctrl_c(error):
    def leaves(hidden):
        raise error

    seen = snapshot(torch.ones(4, 1), torch.ones(4, 1))
    metrics = {"leaves": leaves, "m": lambda hidden: hidden.mean()}
    if not isinstance(error, KeyboardInterrupt):
        found = evaluate(seen, metrics, rows=4, splits=1)
        assert found.values["m/layer_01"] == 1.0
        assert math.isnan(found.values["leaves/layer_01"])
        assert any(type(error).__name__ in str(note) for note in found.notes)
    with pytest.raises(type(error)):
        evaluate(seen, metrics, rows=4, splits=1, strict=not isinstance(error, KeyboardInterrupt))
