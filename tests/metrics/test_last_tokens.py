"""Any metric at the last tokens: the same mechanism for views, values, notes and intervals."""

import math

import numpy as np
import pytest
import torch

from geomon import METRICS, MORE_METRICS, Metric, MetricText, at_last
from geomon.distributed import merge_layers
from geomon.metrics import Evaluator, check_metrics
from geomon.metrics.nulls import effective_rank_last
from support.kernels import row_additions
from support.measuring import Layer, LayerViews, MissingViewError, Sizes
from support.whole_layer import normal


def made(rows, last, index=1, **more):
    captured = {
        "hidden": rows, "sequences": torch.arange(len(rows)) % len(last), "precision": 1e-7,
        "last_hidden": last, "last_sequences": torch.arange(len(last)), "last_precision": 1e-7,
    }  # fmt: skip
    return Layer(index, "block", captured | more)


OF_ROWS = [name for name, metric in METRICS.items() if metric.sources == {"hidden"}]


@pytest.mark.parametrize("name", OF_ROWS)
def test_every_metric_of_rows_gives_at_last_what_it_gives_on_these_rows(name):
    rows, last = normal(400, 12), normal(150, 12, seed=1) * torch.arange(1, 13)
    labels = {"token_ids": torch.arange(400) % 7, "positions": torch.arange(400) % 11}
    own = {view: label[:150] for view, label in labels.items()}
    own["additions"] = row_additions(normal(150, 12, seed=2), last)
    both = made(rows, last, **labels, **{f"last_{view}": label for view, label in own.items()})
    found = Evaluator(check_metrics({"m": at_last(METRICS[name])}), 2).measure_layer(both, 100)
    alone = {"hidden": last, "precision": 1e-7, "sequences": torch.arange(150), **own}
    expected = Evaluator(check_metrics({"m": METRICS[name]}), 1).measure_layer(
        Layer(1, "block", alone), 150
    )
    assert found.failed == expected.failed == {}
    # The sequences are not cut into splits.
    wanted = {"n": np.array([[150]]), **expected.parts["m"]}
    assert found.parts["m"].keys() == wanted.keys()
    for part, values in wanted.items():
        np.testing.assert_allclose(found.parts["m"][part], values, err_msg=part)


@pytest.mark.parametrize(
    ("layer", "words", "is_there"),
    [
        (Layer(1, "block", {"hidden": normal(90, 4)}, {"last_hidden": "one stream"}),
         "'last_hidden' is missing: one stream", False),
        (made(normal(90, 4), normal(63, 4)), "fewer than 64 sequences", True),
    ],
)  # fmt: skip
def test_last_tokens_that_are_unknown_or_few_are_missing_with_the_reason(layer, words, is_there):
    rank = MORE_METRICS["effective_rank_last"]
    metrics = check_metrics({"own": at_last(METRICS["cosine"]), "rank": rank})
    result = Evaluator(metrics, 1).evaluate([layer], 90)
    columns = result.stacks[""]
    assert [math.isfinite(columns[name].at(1)) for name in metrics] == [is_there, False]
    assert any(words in note.words() for note in result.notes)


def test_the_fewest_last_tokens_of_a_spectrum_are_enough():
    metrics = check_metrics({"rank": MORE_METRICS["effective_rank_last"]})
    result = Evaluator(metrics, 1).evaluate([made(normal(90, 4), normal(64, 4))], 90)
    assert math.isfinite(result.stacks[""]["rank"].at(1))
    assert not [note for note in result.notes if "fewer than" in note.words()]


def test_the_null_of_a_spectrum_of_last_tokens_is_that_of_as_many_sequences():
    metrics = check_metrics({"rank": MORE_METRICS["effective_rank_last"]})
    layers = [made(normal(200, 12), normal(150, 12, seed=n), index=n) for n in (0, 1)]
    (column,) = Evaluator(metrics, 1).evaluate(layers, 90).stacks[""].values()
    expected = effective_rank_last(Sizes(rows=90, width=12, sequences=150))
    assert column.whole == expected != {}


def test_the_precision_of_last_tokens_is_their_own():
    with pytest.raises(MissingViewError, match="'last_precision' is missing"):
        LayerViews(Layer(1, "block", {"last_hidden": normal(9, 4)})).last["rounding"]


def by_column(hidden):
    return hidden.mean(dim=0)


def test_numbers_for_each_head_stand_beside_the_number_of_sequences():
    own = Metric(by_column, MetricText("Means"), rows="last")
    metrics = check_metrics({"own": at_last(by_column), "alike": own})
    layer = made(normal(90, 4), torch.arange(8.0).reshape(2, 4))
    for column in Evaluator(metrics, 1, strict=True).evaluate([layer], 90).stacks[""].values():
        assert column.by_head() == {(1, head): 2.0 + head for head in range(4)}
        assert column.parts["n"].at(1) == 2
    layer = made(normal(90, 4), torch.ones(1, 4))
    notes = [note.words() for note in Evaluator(metrics, 1).evaluate([layer], 90).notes]
    few = "fewer than 2 sequences in a reading: use larger batches, or a probe with more sequences"
    assert f"own, alike, layer 1: {few}" in notes


def test_last_tokens_of_several_ranks_stand_one_after_another():
    parts = [made(normal(30, 4, seed=n), normal(5 + n, 4, seed=9 + n)) for n in range(3)]
    whole = merge_layers(parts)
    last = torch.cat([part.captured["last_hidden"] for part in parts])
    assert torch.equal(whole.captured["last_hidden"], last)
    assert torch.equal(whole.captured["last_sequences"], torch.arange(18))
    # A rank on which the last tokens are not known costs no row of the others.
    lacking = Layer(1, "block", {"hidden": normal(9, 4)}, {"last_hidden": "too late"})
    assert len(merge_layers([parts[0], lacking]).captured["last_hidden"]) == 5


def test_a_metric_without_rows_is_refused():
    with pytest.raises(ValueError, match="views of rows"):
        at_last(METRICS["qk_cosine"])
