"""Margins: every metric without a group of sequences, against the metric on the other rows."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch

from geomon import MetricText, measure, select
from geomon.metrics import METRICS, MORE_METRICS, Evaluator, Metric, check_metrics
from support import definitions as by_book
from support import samples
from support.kernels import row_additions
from support.measuring import Layer, LayerViews, NoMarginError, ViewsWithout, groups_of, margin
from support.models import PlainDecoder, batch
from support.samples import generator

EVERY = METRICS | MORE_METRICS
SEQUENCES, LENGTH, WIDTH, HEADS = 24, 20, 12, 2
# To first order in what is left out: the mean and the directions are those of all rows.
FIRST_ORDER = {
    "anisotropy", "anisotropy_without_massive", "effective_rank", "participation_ratio",
    "massive_share", "query_anisotropy", "key_anisotropy", "effective_rank_last",
}  # fmt: skip
# With the rows' neighbours among all rows, which are tested below; noisy ones; no margin at all.
OTHERS = {
    "twonn", "twonn_distinct", "gride", "local_dimension", "local_anisotropy", "alpha",
    "alpha_last", "max_logit", "head_output_norm", "weight_norm", "update_size", "unmoved",
    "expert_load",
}  # fmt: skip


def layer(offset: float = 0.0, seed: int = 0, sequences: int = SEQUENCES) -> Layer:
    """Rows of sequences that differ, with all that a window captures."""
    source = generator(seed)
    normal = functools.partial(torch.randn, generator=source)
    number = torch.arange(sequences).repeat_interleave(LENGTH)
    ids = torch.randint(0, 6, (len(number),), generator=source)
    rows = normal(sequences, WIDTH)[number] * 0.5 + normal(len(number), WIDTH)
    rows = rows * torch.linspace(2.0, 0.5, WIDTH) + offset + samples.normal(6, WIDTH).float()[ids]
    captured = {
        "hidden": rows, "token_ids": ids, "positions": torch.arange(LENGTH).repeat(sequences),
        "sequences": number, "precision": 1e-7,
        "additions": row_additions(rows - normal(len(number), WIDTH), rows),
    }  # fmt: skip
    captured |= {
        f"last_{name}": view[LENGTH - 1 :: LENGTH] if torch.is_tensor(view) else view
        for name, view in captured.items()
    }
    for name in ("query", "key"):
        captured[name] = normal(sequences, HEADS, LENGTH, 4)
        near = rows[:, :4, None].transpose(1, 2)
        captured[f"projected_{name}"] = normal(len(number), HEADS, 4) + near
        captured[f"{name}_sequences"] = number
    captured |= {
        "visible": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril(), "bias": None,
        "scale": 0.5, "softcap": None, "sink": None, "max_logits": torch.ones(HEADS),
    }  # fmt: skip
    return Layer(1, "block", captured)


def remaining(whole: Layer, group: int) -> LayerViews:
    """The views of a layer that never had the rows of a group."""
    numbers = (torch.arange(SEQUENCES), whole.captured["sequences"])
    stay = {len(each): groups_of(each).of != group for each in numbers}
    captured = {
        name: view[stay[len(view)]] if torch.is_tensor(view) and len(view) in stay else view
        for name, view in whole.captured.items()
    }
    return LayerViews(Layer(1, "block", captured))


def flat(value):
    """Numbers of a metric's value, by part and head."""
    parts = value if isinstance(value, dict) else {"": value}
    return {name: np.ravel(torch.as_tensor(part).double()) for name, part in parts.items()}


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("name", [name for name in EVERY if name not in OTHERS])
def test_without_a_group_a_metric_is_that_of_the_other_rows(name, offset):
    whole, metric = layer(offset), EVERY[name]
    close = 0.03 if name in FIRST_ORDER else 1e-6
    for group in (0, 5):
        views = ViewsWithout(LayerViews(whole), group), remaining(whole, group)
        got, want = (
            flat((one.last if metric.rows == "last" else one).apply(metric)) for one in views
        )
        assert got.keys() == want.keys()
        for part in got.keys() - metric.without_margin:
            np.testing.assert_allclose(got[part], want[part], rtol=close, atol=close * 1e-2)


def test_a_view_that_has_no_form_without_a_group_is_named():
    without = ViewsWithout(LayerViews(layer(), given={"queries": 300}), 3)
    for name in ("nearest", "members", "distinct_rows", "max_logits", "head_outputs"):
        with pytest.raises(NoMarginError, match=name):
            without[name]


def test_a_bias_of_each_sequence_stays_with_it():
    biases = torch.randn(SEQUENCES, HEADS, LENGTH, LENGTH)
    given = Layer(1, "block", layer().captured | {"bias": biases})
    stay = groups_of(torch.arange(SEQUENCES)).of != 3
    assert torch.equal(ViewsWithout(LayerViews(given), 3)["bias"], biases[stay])


def test_a_row_keeps_its_two_nearest_and_passes_over_the_group_for_the_others():
    whole = layer()
    views = LayerViews(whole, given={"queries": 300})
    rows, of = whole.captured["hidden"].double(), views["groups"].of
    apart = torch.cdist(rows, rows)
    apart.fill_diagonal_(math.inf)
    for group in (1, 7):
        without, asked = ViewsWithout(views, group), views["query_rows"]
        near = apart[asked[of[asked] != group]]
        two = near.sort(dim=1).values[:, :2]
        torch.testing.assert_close(without["two_nearest"], two, rtol=1e-5, atol=0)
        others = near[:, of != group].sort(dim=1).values[:, :12]
        torch.testing.assert_close(without["neighbours"][:, :12], others, rtol=1e-5, atol=0)
        two = two.numpy()
        wanted = (len(two) - 1) / np.log(two[:, 1] / two[:, 0]).sum()
        assert flat(without.apply(METRICS["gride"]))["k1"] == pytest.approx(wanted, rel=1e-5)
        found = flat(without.apply(METRICS["twonn"]))[""]
        assert found == pytest.approx(by_book.twonn(two), rel=1e-5)


def test_the_margin_is_that_of_the_jackknife():
    values = np.array([1.0, 4.0, 2.0, 8.0, 5.0, 7.0, 1.0, 3.0])
    expected = by_book.margin(values)
    for scale in (1.0, 1e-200, 1e200):  # whose squares float64 does not hold
        assert margin([*scale * values]) == pytest.approx(scale * expected)
    assert margin([*1e12 + values]) == pytest.approx(expected, rel=1e-3)
    assert math.isnan(margin([]))
    assert math.isnan(margin([1.0, math.nan] * 4))


def measured(metrics, whole: Layer, rows: int = 10_000, batches: int = 1, strict: bool = True):
    result = Evaluator(check_metrics(metrics), batches, strict=strict).evaluate([whole], rows)
    return result.stacks[""], [note.words() for note in result.notes]


@pytest.mark.parametrize("name", [name for name in EVERY if EVERY[name].each_group])
def test_all_groups_at_once_have_the_margins_of_one_after_another(name):
    def margins(metric):
        column = measured({name: metric}, layer(1.0, sequences=48))[0][name]
        return {part: each.margin_at(1) for part, each in {"": column, **column.parts}.items()}

    expected = margins(dataclasses.replace(EVERY[name], each_group=None))
    assert np.isfinite(list(expected.values())).any()
    assert margins(EVERY[name]) == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_the_mean_over_layers_has_the_margin_of_means_without_each_group():
    evaluator, captured = Evaluator(check_metrics(["variance"]), 1, strict=True), layer().captured
    both = [Layer(index, "block", captured) for index in (1, 2)]
    column = evaluator.evaluate(both, 10_000).stacks[""]["variance"]
    # Equal layers: the mean is as uncertain as each of them, and not less by the root of two.
    margins = [column.margin_at(1), column.margin_at(2)]
    assert margins == pytest.approx([column.mean_margin] * 2)


@pytest.mark.parametrize("left_out", ["sequences", ""])
def test_unknown_or_few_sequences_make_no_margin(left_out):
    captured = {n: view for n, view in layer(sequences=7).captured.items() if n != left_out}
    columns, notes = measured(["variance", "twonn"], Layer(1, "rows", captured))
    assert not columns["variance"].margin
    assert math.isfinite(columns["variance"].at(1))
    assert any("no 95 % intervals" in note for note in notes) == (not left_out)


def whole_only(error):
    """A metric that needs the rows of all groups."""

    def metric(hidden):
        if len(hidden) < SEQUENCES * LENGTH:
            raise error("by design")
        return 1.0

    return metric


@pytest.mark.parametrize(
    ("error", "strict"), [(torch.OutOfMemoryError, False), (RuntimeError, True)]
)
def test_memory_that_ends_in_a_margin_is_no_fault_of_the_metric_and_a_strict_one_raises(
    error, strict
):
    with pytest.raises(error, match="by design"):
        measured({"whole": whole_only(error)}, layer(), strict=strict)


def test_keys_that_were_not_seen_cost_no_margin_of_queries():
    whole = layer()
    names = ("hidden", "projected_query", "query_sequences", "sequences")
    some = Layer(1, "block", {name: whole.captured[name] for name in names})
    metrics = {"norm": lambda projected_query: projected_query.square().mean()}
    found, expected = (measured(metrics, one)[0]["norm"].margin_at(1) for one in (some, whole))
    assert found == expected > 0


def test_an_extreme_has_no_margin_and_a_failure_without_rows_costs_the_margin_alone():
    metrics = {
        "peak": Metric(lambda hidden: hidden.norm(dim=1).max(), MetricText("Largest norm"),
                       has_margin=False),
        "whole": whole_only(RuntimeError), "max_logit": METRICS["max_logit"],
        "named": lambda hidden, unique_rows: hidden[unique_rows].mean(),
    }  # fmt: skip
    columns, notes = measured(metrics, layer(), strict=False)
    assert [(math.isfinite(each.at(1)), bool(each.margin)) for each in columns.values()] == [
        (True, False)
    ] * 4
    assert any("by design" in note for note in notes)


def test_a_metric_that_fails_without_the_first_group_is_not_called_for_the_others():
    called = []

    def fails(hidden):
        called.append(len(hidden))
        return whole_only(RuntimeError)(hidden)

    measured({"whole": fails}, layer(), strict=False)
    assert called == [SEQUENCES * LENGTH, SEQUENCES * LENGTH * 7 // 8]


def test_a_value_that_is_missing_with_all_rows_has_no_note_on_its_margin():
    columns, notes = measured({"none": lambda hidden: hidden.mean() * math.nan}, layer())
    assert math.isnan(columns["none"].at(1))
    assert notes == []


@pytest.mark.parametrize(("tokens", "is_said"), [(127, True), (128, False)])
def test_a_margin_that_attention_lacks_for_few_sequences_is_said(tokens, is_said):
    """Rows are of all 16 sequences of 32 tokens, queries of 8 if twice the rows are enough."""
    metrics = select("anisotropy", "attention_entropy")
    found = measure(PlainDecoder(), batch(16), metrics=metrics, tokens=tokens)
    said = [note for note in found.notes if "no 95 % intervals for attention_entropy" in note]
    assert bool(said) == is_said
    assert ("attention_entropy/mean/margin" in found) != is_said
    assert "anisotropy/mean/margin" in found


def clusters(size: int, seed: int) -> Layer:
    """Rows of 16 sequences in clusters of near-copies, most of them small and a few of a size."""
    sizes = torch.tensor([4] * 200 + [size] * 24)
    centre = torch.arange(len(sizes)).repeat_interleave(sizes)
    rows = samples.normal(len(sizes), 16, seed=seed)[centre]
    rows = (rows + 1e-4 * samples.normal(len(centre), 16, seed=seed + 1)).float()
    order = torch.randperm(len(centre), generator=generator(seed))
    captured = {"hidden": rows[order], "sequences": torch.arange(len(centre)) % 16}
    return Layer(1, "block", captured)


def test_a_scale_that_meets_the_size_of_clusters_has_a_value_and_no_margin():
    """Few rows decide there: from sample to sample the value jumps between 4 and 14."""
    columns, notes = measured({"gride": METRICS["gride"]}, clusters(8, 0))
    scales = columns["gride"].parts
    assert math.isfinite(scales["k8"].at(1))
    with_margin = {scale for scale in scales if scale[0] == "k" and scales[scale].margin}
    assert with_margin == {"k1", "k2", "k4", "k16", "k32"} & {*scales}
    (said,) = [note for note in notes if "no margin" in note]
    assert said.startswith("gride/k8, layer 1: no margin: the scale is about the size of clusters")
    columns, notes = measured({"gride": METRICS["gride"]}, layer())
    assert all(scale.margin for scale in columns["gride"].parts.values())
    assert not any("no margin" in note for note in notes)


@pytest.mark.parametrize("name", ["local_dimension", "local_anisotropy"])
def test_margins_of_neighbourhoods_that_share_rows_are_wide_enough(name):
    """With the members as they were, margins were a third of the scatter."""
    found = [measured({name: EVERY[name]}, layer(0.0, seed, sequences=32))[0] for seed in range(24)]
    scatter = 1.96 * np.std([columns[name].at(1) for columns in found], ddof=1)
    assert np.mean([columns[name].margin_at(1) for columns in found]) > 0.8 * scatter


def test_fewer_degrees_of_freedom_widen_a_margin():
    plain = METRICS["variance"]
    metrics = {"wide": dataclasses.replace(plain, degrees=3), "plain": plain}
    wide, plain = measured(metrics, layer())[0].values()
    ratios = wide.margin_at(1) / plain.margin_at(1), wide.mean_margin / plain.mean_margin
    assert ratios == pytest.approx((3.1824 / 2.3646,) * 2, rel=1e-4)


def test_the_margin_over_several_splits_is_that_of_their_means_without_each_group():
    """The same groups of sequences in every split."""
    whole = layer(1.0, sequences=48)
    order = torch.randperm(48 * LENGTH, generator=generator(0))
    captured = {n: whole.captured[n][order] for n in ("hidden", "sequences")}
    column = measured(["mean_square_norm"], Layer(1, "block", captured), 480, 2)[0]
    squares, of = captured["hidden"].double().square().sum(1), groups_of(captured["sequences"]).of
    without = [
        np.mean([squares[cut][of[cut] != group].mean() for cut in (slice(480), slice(480, 960))])
        for group in range(8)
    ]
    assert column["mean_square_norm"].margin_at(1) == pytest.approx(margin(without))
