"""Layers compared with the ones before them, against sets of neighbours found by brute force."""

import math

import pytest
import torch
from definitions import overlap
from measuring import seen
from samples import normal

from geomon import select
from geomon.capture.snapshot import Layer
from geomon.distributed.packing import pack, unpack
from geomon.kernels.groups import group_sequences
from geomon.metrics import Evaluator, check_metrics
from geomon.metrics.between_layers import BetweenLayers, Comparison, compare_near_rows
from geomon.metrics.jackknife import margin
from geomon.metrics.views import LayerViews, spread_rows

OVERLAP = select("neighbour_overlap")


def made(rows, index=1, stack="", positions=None, **more):
    positions = torch.arange(len(rows)) if positions is None else positions
    return Layer(
        index, f"{stack}.{index}", {"hidden": rows, "positions": positions, **more}, stack=stack
    )


def evaluated(*layers, rows=None, batches=1):
    size = rows or len(layers[0].captured["hidden"])
    return seen(Evaluator(OVERLAP, batches).evaluate(layers, size))


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_it_is_the_share_of_the_ten_nearest_that_stay(noise):
    before = normal(300, 8)
    after = 50 - 3 * (before + noise * normal(300, 8, seed=1))
    values = evaluated(made(before, 0), made(after, 1), made(after, 2)).values
    expected = overlap(before, after).mean()
    assert values["neighbour_overlap/layer_01"] == pytest.approx(expected)
    assert values["neighbour_overlap/layer_01/n"] == 300
    assert values["neighbour_overlap/layer_02"] == 1
    assert "neighbour_overlap/layer_00" not in values
    assert values["neighbour_overlap/mean"] == pytest.approx((expected + 1) / 2)


def test_copies_at_either_layer_are_left_out_of_both():
    before, after = normal(300, 6), normal(300, 6) + 0.4 * normal(300, 6, seed=1)
    before[100:160] = before[:60]
    after[200:230] = after[30:60]
    unique = torch.cat([torch.arange(100), torch.arange(160, 200), torch.arange(230, 300)])
    values = evaluated(made(before, 0), made(after, 1)).values
    # The ten nearest are looked for among the sixteen nearest that are known at each layer.
    assert 150 < values["neighbour_overlap/layer_01/n"] <= len(unique)
    expected = overlap(before, after, unique).mean()
    assert values["neighbour_overlap/layer_01"] == pytest.approx(expected, abs=0.01)


def test_of_many_rows_1024_evenly_spread_ones_are_compared():
    before, after = normal(1500, 5), normal(1500, 5) + 0.2 * normal(1500, 5, seed=1)
    values = evaluated(made(before, 0), made(after, 1)).values
    some = spread_rows(torch.arange(1500), 1024)
    expected = overlap(before, after)[some].mean()
    assert values["neighbour_overlap/layer_01"] == pytest.approx(expected)
    kept = LayerViews(made(after)).apply(OVERLAP["neighbour_overlap"])
    assert kept.near.shape == (1024, 24)
    parts = (*kept[:4], kept.groups.of)
    assert sum(part.numel() * part.element_size() for part in parts) < 200_000  # at any width


def test_batches_of_rows_are_compared_each_with_its_own():
    before, after = normal(400, 5), normal(400, 5) + 0.5 * normal(400, 5, seed=1)
    values = evaluated(made(before, 0), made(after, 1), rows=200, batches=2).values
    each = [overlap(before[cut], after[cut]).mean() for cut in (slice(200), slice(200, 400))]
    assert values["neighbour_overlap/layer_01"] == pytest.approx(sum(each) / 2)
    assert values["neighbour_overlap/layer_01/std"] == pytest.approx(
        abs(each[0] - each[1]) / 2**0.5, rel=1e-4
    )


def test_without_a_group_the_value_is_that_of_the_rows_of_the_others():
    sequences = torch.arange(320) // 20
    before, after = normal(320, 5), normal(320, 5) + 0.5 * normal(320, 5, seed=1)
    layers = [made(rows, n, sequences=sequences) for n, rows in enumerate((before, after))]
    kept = [LayerViews(layer).apply(OVERLAP["neighbour_overlap"]) for layer in layers]
    found = compare_near_rows(*kept).without
    shares, groups = overlap(before, after), group_sequences(sequences).numpy()
    want = [shares[groups != group].mean() for group in range(8)]
    assert found == pytest.approx(want)
    values = evaluated(*layers).values
    assert values["neighbour_overlap/layer_01/margin"] == pytest.approx(margin(want))
    assert values["neighbour_overlap/mean/margin"] == pytest.approx(margin(want))
    unknown = evaluated(made(before, 0), made(after, 1)).values
    assert not any(tag.endswith("margin") for tag in unknown)


def test_layers_measured_on_several_ranks_are_compared_where_values_come_together():
    layers = [made(normal(100, 4, seed=n // 2), n) for n in range(4)]
    evaluator = Evaluator(OVERLAP, 1)
    measured = [evaluator.measure_layer(layer, 100) for layer in layers]
    sent = unpack(pack(measured))
    one, other = (seen(evaluator.combine(each, 100)) for each in (measured, sent))
    assert one.values == other.values
    assert one.values["neighbour_overlap/layer_01"] == 1
    assert one.values["neighbour_overlap/layer_02"] < 0.5
    assert one == seen(evaluator.combine(measured, 100))  # nothing was used up


def test_stacks_are_compared_each_by_itself():
    rows = normal(100, 4)
    layers = [made(rows, n, stack) for stack in ("encoder", "decoder") for n in (0, 1)]
    values = evaluated(*layers).values
    assert values["neighbour_overlap/encoder_layer_01"] == 1
    assert values["neighbour_overlap/decoder_layer_01"] == 1
    assert not any("layer_00" in tag for tag in values)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (made(normal(100, 4), 1, positions=torch.arange(100).flip(0)), "not the tokens"),
        (made(normal(99, 4), 1), "not the tokens"),
        (made(normal(100, 4)[:9].repeat(12, 1)[:100], 1), "copies of others"),
        (Layer(1, "block", {}, {"hidden": "skipped"}), "'hidden' is missing: skipped"),
    ],
)
def test_what_cannot_be_compared_is_missing_and_said(after, words):
    found = evaluated(made(normal(100, 4), 0), after, made(normal(100, 4), 2))
    assert math.isnan(found.values["neighbour_overlap/layer_01"])
    assert any(words in note and "layer 1" in note for note in found.notes)


def test_a_comparison_of_ones_own_and_one_that_fails():
    def compare(before, after):
        if before == after:
            raise ZeroDivisionError("equal")
        return Comparison({"": after / before}, [])

    def keep(total_variance):
        return float(total_variance)

    growth = BetweenLayers(keep, compare)
    metrics = check_metrics({"growth": growth})
    rows = normal(60, 4)
    layers = [made(rows, 0), made(2 * rows, 1), made(2 * rows, 2)]
    found = seen(Evaluator(metrics, 1).evaluate(layers, 60))
    assert found.values["growth/layer_01"] == pytest.approx(4)
    assert math.isnan(found.values["growth/layer_02"])
    assert math.isnan(found.values["growth/mean"])
    assert any("equal" in note for note in found.notes)
    with pytest.raises(ZeroDivisionError):
        Evaluator(metrics, 1, strict=True).evaluate(layers, 60)
