"""Intervals: which metrics have them, and that they are those of the halves."""

import math

import pytest
import torch
from models import PlainDecoder, batch

from geomon import METRICS, MORE_METRICS, geometry, measure, with_interval
from geomon.capture import Window, find_anatomy
from geomon.capture.snapshot import CAPTURED, ROW_VIEWS, Layer
from geomon.kernels.attention import AttentionRows
from geomon.kernels.half_samples import half_samples, margin, row_mean_differences, without_places
from geomon.kernels.moments import drift_norm
from geomon.metrics import Evaluator, select
from geomon.metrics.between_layers import BetweenLayers
from geomon.metrics.between_readings import BetweenReadings
from geomon.metrics.cautions import cautions
from geomon.metrics.intervals import DIFFERENCES, by_part, cut_of, differences_of
from geomon.metrics.views import DERIVED, LayerViews, captured_views, parameters

# Metrics without an interval: of single rows, an extreme, or a few types or eigenvalues.
WITHOUT = {
    "sink_share", "max_logit", "attention_median", "twonn_gaussian", "norm_variance_slope",
    "alpha", "alpha_last", "attention_sequence_min",
}  # fmt: skip
# Metrics that one reading has no value of: their intervals are asked for in test_between_readings.
OF_SEVERAL = {name for name, m in MORE_METRICS.items() if isinstance(m, BetweenReadings)}


def cloud(sequences=20, length=30, width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(sequences, 1, width, generator=generator)
    rows = own + torch.randn(sequences, length, width, generator=generator) + 0.5
    return rows.flatten(0, 1), torch.arange(sequences).repeat_interleave(length)


def test_every_metric_has_an_interval_or_is_known_to_have_none():
    every = METRICS | MORE_METRICS
    compare = BetweenLayers | BetweenReadings
    between = {name for name, metric in every.items() if isinstance(metric, compare)}
    lacking = {name for name, metric in every.items() if differences_of(metric) is None}
    assert lacking - between == WITHOUT
    assert set(DIFFERENCES) <= set(every.values())


@pytest.mark.parametrize("name", sorted(METRICS.keys() - WITHOUT))
def test_an_interval_reads_what_its_metric_reads_and_the_sequences(name):
    sources = captured_views(parameters(METRICS[name]))
    more = captured_views(parameters(DIFFERENCES[METRICS[name]])) - sources
    assert more <= {"sequences", "query_sequences", "key_sequences", "query", "scores", "hidden"}


@pytest.mark.parametrize("name", sorted(MORE_METRICS.keys() - WITHOUT - OF_SEVERAL))
def test_further_metrics_have_margins_at_every_layer_and_of_the_mean(name):
    # Of fewer than 64 sequences the last tokens have no spectrum.
    given = batch(sequences=64, length=15) if name.endswith("_last") else batch(24, 40)
    values = measure(PlainDecoder(), given, tokens=900, metrics=select(name))
    known = [tag for tag in values if tag.endswith("/margin")]
    assert {tag.split("/")[1] for tag in known} >= {"mean", "layer_01", "layer_02", "layer_03"}
    assert all(math.isfinite(values[tag]) and values[tag] >= 0 for tag in known)


def test_a_model_has_margins_at_every_layer_and_of_the_mean():
    values = measure(PlainDecoder(), batch(sequences=24, length=40), tokens=900)
    for name in METRICS.keys() - WITHOUT - {"gride"}:
        layers = [tag for tag in values if tag.startswith(f"{name}/layer_") and tag.count("/") == 1]
        assert layers, name
        for tag in [*layers, f"{name}/mean"]:
            assert values[f"{tag}/margin"] >= 0, tag
    for k in (1, 2, 4, 8, 16, 32):
        assert values[f"gride/mean/k{k}/margin"] > 0
    assert values["twonn/mean/censored/margin"] > 0
    for name in WITHOUT:
        assert not [tag for tag in values if tag.startswith(name + "/") and "/margin" in tag], name


def test_the_interval_of_the_local_dimension_counts_on_other_neighbours():
    """Sequences differ in dimension: the mean over tokens alone is several times too sure."""
    generator = torch.Generator().manual_seed(4)
    kinds = torch.randn(12, 8, generator=generator)

    def draw(seed):
        own = torch.Generator().manual_seed(seed)
        scale = torch.rand(16, 1, 8, generator=own) ** 2
        centre = torch.randn(16, 1, 8, generator=own)
        ids = torch.randint(0, 12, (16, 32), generator=own)
        rows = kinds[ids] + centre + scale * torch.randn(16, 32, 8, generator=own)
        return rows.flatten(0, 1), torch.arange(16).repeat_interleave(32)

    metrics = select("local_dimension")
    found = [
        geometry(rows, sequences=numbers, metrics=metrics) for rows, numbers in map(draw, range(8))
    ]
    values = [one["local_dimension"] for one in found]
    margins = [one["local_dimension/margin"] for one in found]
    spread = 1.96 * torch.tensor(values).std().item()
    assert 0.5 * spread < sum(margins) / len(margins) < 2 * spread


def test_a_margin_is_that_of_the_differences_between_the_halves():
    rows, sequences = cloud()
    halves = half_samples(sequences)
    members = halves.first[:, halves.group]
    want = margin([float(drift_norm(rows[m]) - drift_norm(rows[~m])) for m in members])
    values = geometry(rows, sequences=sequences, metrics=select("drift_norm"))
    assert values["drift_norm/margin"] == pytest.approx(halves.widening * want)


def test_the_mean_over_layers_knows_that_layers_move_together():
    """Two layers that are equal have the margin of one, and not one that is smaller by a root."""
    rows, sequences = cloud()
    captured = {"hidden": rows, "sequences": sequences}
    layers = [Layer(index, "block", captured) for index in (0, 1, 2)]
    values = Evaluator(select("drift_norm"), 1).evaluate(layers, len(rows)).values
    assert values["drift_norm/mean/margin"] == pytest.approx(values["drift_norm/layer_01/margin"])
    opposite = {"hidden": rows.flip(0), "sequences": sequences}
    layers[2] = Layer(2, "block", opposite)
    values = Evaluator(select("drift_norm"), 1).evaluate(layers, len(rows)).values
    assert values["drift_norm/mean/margin"] < values["drift_norm/layer_01/margin"]


def test_no_margin_of_a_mean_of_which_a_layer_has_none():
    rows, sequences = cloud()
    layers = [
        Layer(1, "block", {"hidden": rows, "sequences": sequences}),
        Layer(2, "block", {"hidden": rows}, {"sequences": "packed"}),
    ]
    values = Evaluator(select("cosine"), 1).evaluate(layers, len(rows)).values
    assert "cosine/layer_01/margin" in values
    assert "cosine/layer_02/margin" not in values
    assert "cosine/mean/margin" not in values


def test_splits_of_the_rows_share_their_sequences():
    """Two splits of one batch are no two samples: the margin does not fall by a root of two."""
    generator = torch.Generator().manual_seed(2)
    own = torch.randn(32, 1, 4, generator=generator)
    rows = (own + 0.05 * torch.randn(32, 40, 4, generator=generator) + 1).flatten(0, 1)
    sequences = torch.arange(32).repeat_interleave(40)
    one = geometry(rows, sequences=sequences, metrics=select("drift_norm"))
    two = geometry(rows, sequences=sequences, metrics=select("drift_norm"), tokens=640)
    assert two["drift_norm/margin"] == pytest.approx(one["drift_norm/margin"], rel=0.05)
    assert two["drift_norm/std"] < one["drift_norm/margin"] / 5


@pytest.mark.parametrize("sequences", [4, 7, 8])
def test_too_few_sequences_are_said(sequences):
    rows, numbers = cloud(sequences, 60)
    layer = Layer(1, "block", {"hidden": rows, "sequences": numbers})
    found = Evaluator(select("twonn", "cosine"), 1).evaluate([layer], len(rows))
    said = [note.text for note in found.notes if note.kind == "no intervals"]
    assert bool(said) == (sequences < 8)
    assert any(tag.endswith("/margin") for tag in found.values) == (sequences >= 8)
    if said:
        assert f"8 sequences in a reading, and there are {sequences}" in said[0]


def test_without_sequences_geometry_has_no_margin_and_labels_may_be_any_integers():
    rows, sequences = cloud()
    assert not any("margin" in tag for tag in geometry(rows))
    shuffled = geometry(rows, sequences=sequences * 10**12 - 5)
    assert shuffled == pytest.approx(geometry(rows, sequences=sequences), nan_ok=True)


def widest(hidden):
    return hidden.abs().max()


def test_metrics_of_ones_own_have_no_margin_and_cost_none_unless_they_bring_it():
    rows, sequences = cloud()
    values = geometry(
        rows, sequences=sequences, metrics={"widest": widest, "twonn": METRICS["twonn"]}
    )
    assert "widest/margin" not in values
    assert math.isfinite(values["twonn/margin"])


def test_a_metric_of_ones_own_is_measured_on_halves():
    rows, sequences = cloud()
    halves = half_samples(sequences)
    members = halves.first[:, halves.group]
    want = margin([float(widest(rows[m]) - widest(rows[~m])) for m in members])
    values = geometry(rows, sequences=sequences, metrics={"widest": with_interval(widest)})
    assert values["widest/margin"] == pytest.approx(halves.widening * want)
    assert values["widest"] == widest(rows)
    assert not hasattr(widest, "differences")  # the user's own function stays as it is


def test_with_an_interval_a_metric_may_read_derived_views_and_return_parts_or_heads():
    def parts(spectrum, token_ids):
        return {"": spectrum[0], "mean": spectrum.mean(), "ids": token_ids.double().mean()}

    def of_keys(projected_key, mean_key):
        return projected_key.norm(dim=-1).double().amax(dim=0) + mean_key.sum(dim=1)

    own = {"parts": with_interval(parts), "of_keys": with_interval(of_keys)}
    reference = select("query_mean_norm", "drift_norm")
    again = {f"{name}_again": with_interval(metric) for name, metric in reference.items()}
    values = measure(PlainDecoder(), batch(16, 32), metrics=own | reference | again)
    for tag in ("parts/layer_02", "parts/mean", "parts/layer_00/ids", "parts/mean/mean"):
        assert values[f"{tag}/margin"] > 0
    assert values["of_keys/mean/margin"] > 0
    for name in reference:
        for place in ("layer_01", "mean"):
            want = values[f"{name}/{place}/margin"]
            assert values[f"{name}_again/{place}/margin"] == pytest.approx(want, rel=1e-6)


def test_an_interval_may_be_computed_in_a_way_of_ones_own():
    def own(hidden):
        return hidden.mean()

    def compare(row_sums, halves):
        first = halves.first.double()
        totals, counts = row_sums.rows.sum(dim=(1, 2)), row_sums.counts * row_sums.rows.shape[2]
        return first @ totals / (first @ counts) - (1 - first) @ totals / ((1 - first) @ counts)

    own.differences = compare
    rows, sequences = cloud()
    found = geometry(rows, sequences=sequences, metrics={"own": own})
    again = with_interval(lambda hidden: hidden.mean())
    want = geometry(rows, sequences=sequences, metrics={"own": again})
    assert found["own/margin"] == pytest.approx(want["own/margin"], rel=1e-5)


def test_an_interval_with_halves_of_its_own_is_as_wide_as_it_says():
    """What unequal lengths are worth in another cut says nothing about it."""

    def own(hidden):
        return hidden.mean()

    own.differences = lambda hidden: torch.linspace(-1, 1, 15, dtype=torch.float64)
    assert cut_of(own.differences) is None
    assert {cut_of(function) for function in DIFFERENCES.values()} == {
        "halves", "query_halves", "key_halves", "attention_halves",
    }  # fmt: skip
    rows, sequences = cloud()
    sequences = sequences.clamp(max=int(sequences.max()) // 2)  # the last is half of all
    found = geometry(rows, sequences=sequences, metrics={"own": own})
    assert found["own/margin"] == pytest.approx(margin(own.differences(rows)), rel=1e-6)


def test_an_interval_that_cannot_be_is_refused_at_once():
    def of_weights(attention):
        return attention.maximum.mean(dim=1)

    with pytest.raises(TypeError, match="one that reads attention: give it an attribute"):
        with_interval(of_weights)

    def own(hidden):
        return hidden.mean()

    own.differences = 3
    with pytest.raises(TypeError, match="'differences' of metric 'own' is 3"):
        geometry(torch.ones(9, 2), metrics={"own": own})
    own.differences = lambda hiden: hiden
    with pytest.raises(ValueError, match="the interval of metric 'own' asks for 'hiden'"):
        geometry(torch.ones(9, 2), metrics={"own": own})


def test_an_interval_of_ones_own_that_fails_costs_no_value():
    def own(hidden):
        if len(hidden) < 500:
            raise ValueError("too few rows")
        return hidden.mean()

    rows, sequences = cloud()
    layers = [Layer(1, "block", {"hidden": rows, "sequences": sequences})]
    found = Evaluator({"own": with_interval(own)}, 1).evaluate(layers, len(rows))
    assert math.isfinite(found.values["own/layer_01"])
    assert "own/layer_01/margin" not in found.values
    assert [note.text for note in found.notes] == ["own, layer 1: no interval: too few rows"]


def test_what_attention_rows_have_by_their_place_makes_no_margin():
    """Rows whose entropy is log of the number of keys, as uniform attention has."""
    visible = torch.arange(16)[:, None] + torch.arange(8) * 20 + 40
    keys = torch.arange(200) < visible[:, None, :, None]
    captured = {
        "query": torch.zeros(16, 2, 8, 4), "key": torch.zeros(16, 2, 200, 4), "visible": keys,
        "scale": 1.0, "bias": None, "softcap": None, "sink": None,
    }  # fmt: skip
    layer = Layer(1, "block", captured, sources=frozenset({"attention"}))
    found = Evaluator(select("attention_entropy", "attention_min"), 1).evaluate([layer], 9).values
    assert found["attention_entropy/layer_01"] == pytest.approx(visible.log().mean().item())
    plain = half_samples(torch.arange(16).repeat_interleave(8))
    entropy = visible.flatten().double().log()[None]
    before = row_mean_differences(entropy, entropy > 0, plain)[:, 0]
    assert found["attention_entropy/layer_01/margin"] < 0.5 * margin(before.tolist())


def test_which_of_equal_tokens_stands_for_them_does_not_depend_on_the_order_of_rows():
    rows, sequences = cloud(16, 40, 5)
    ids, positions = torch.arange(640) % 7, torch.arange(640) % 5
    found = []
    for seed in range(3):
        order = torch.randperm(640, generator=torch.Generator().manual_seed(seed))
        values = geometry(
            rows[order], ids[order], positions[order], sequences=sequences[order], seed=seed
        )
        found.append([values["twonn_distinct"], values["twonn_distinct/n"]])
    assert found[1] == pytest.approx(found[0])
    assert found[2] == pytest.approx(found[0])


def test_an_interval_that_fails_costs_no_value(monkeypatch):
    def fails(hidden):
        raise RuntimeError("no half today")

    monkeypatch.setattr("geomon.metrics.intervals.DIFFERENCES", {METRICS["cosine"]: fails})
    rows, sequences = cloud()
    layers = [Layer(n, "block", {"hidden": rows, "sequences": sequences}) for n in (1, 2)]
    found = Evaluator(select("cosine"), 1).evaluate(layers, len(rows))
    assert math.isfinite(found.values["cosine/mean"])
    assert not any("margin" in tag for tag in found.values)
    assert [note.text for note in found.notes] == ["cosine, layer 1, 2: no interval: no half today"]
    with pytest.raises(RuntimeError, match="no half today"):
        Evaluator(select("cosine"), 1, strict=True).evaluate(layers, len(rows))


def test_the_margins_of_scales_are_no_scales():
    values = {"gride/mean/k1": 5.0, "gride/mean/k32": 6.0, "gride/mean/k32/margin": 0.01}
    assert cautions(values) == []


@pytest.mark.parametrize("sequences", [1, 4, 9])
def test_every_metric_is_measured_on_any_number_of_sequences(sequences):
    values = measure(PlainDecoder(), batch(sequences=sequences, length=32), tokens=4096)
    assert any("margin" in tag for tag in values) == (sequences >= 8)
    assert math.isfinite(values["qk_cosine/mean"])


def test_one_head_is_measured_like_many():
    values = measure(PlainDecoder(), batch(sequences=16), tokens=4096, metrics=select("qk_dot"))
    assert values["qk_dot/mean/margin"] > 0


# Held to the metric itself elsewhere, within what their differences leave out.
ROUGH = {
    "query_anisotropy", "key_anisotropy", "twonn", "twonn_distinct", "gride", "anisotropy",
    "anisotropy_no_sinks", "token_frequency", "attention_entropy", "attention_entropy_normalised",
    "attention_max", "attention_min", "attention_sink", "local_dimension", "local_anisotropy",
    "local_cosine", "neighbour_overlap", "effective_rank", "effective_rank_last",
    "participation_ratio",
}  # fmt: skip
ALL = METRICS | MORE_METRICS


@pytest.mark.parametrize("name", sorted(ALL.keys() - WITHOUT - ROUGH - OF_SEVERAL))
def test_differences_are_those_of_the_metric_on_the_sequences_of_each_half(name):
    """The metric itself, asked of a layer that holds the sequences of one half alone."""
    model = PlainDecoder()
    with Window(find_anatomy(model), set(CAPTURED), rows=512, seed=0) as window:
        model(batch(sequences=16, length=32))
    captured = window.snapshot().layers[2].captured
    metric = ALL[name]
    found = by_part(LayerViews(Layer(2, "", captured)).apply(DIFFERENCES[metric]))
    ways = half_samples(torch.arange(16)).first

    def cut(view, value, members):
        if view in ROW_VIEWS:
            return value[members[captured["sequences"]]]
        if view.startswith("projected_"):
            return value[members[captured[view.removeprefix("projected_") + "_sequences"]]]
        if view in ("query_sequences", "key_sequences"):
            return value[members[value]]
        of_sequences = view in ("query", "key") or (view == "visible" and len(value) == 16)
        return value[members] if of_sequences else value

    def half(members):
        chosen = {view: cut(view, value, members) for view, value in captured.items()}
        value = LayerViews(Layer(2, "", chosen)).apply(metric)
        return value if isinstance(value, dict) else {"": value.double().mean()}

    halves = [(half(way), half(~way)) for way in ways]
    assert captured["query"].shape[0] == 16
    for part, differences in found.items():
        want = [float(one[part] - other[part]) for one, other in halves]
        close = 1e-7 + 1e-5 * max(map(abs, want))  # sums of float32 are behind some
        assert differences == pytest.approx(want, rel=1e-4, abs=close), part
        assert max(map(abs, want)) > 1e-6


@pytest.mark.parametrize("alone", [False, True])
def test_intervals_of_attention_are_those_of_each_value_alone(alone):
    """Also where some queries see one key: those count in the entropy and in nothing else."""
    generator = torch.Generator().manual_seed(0)
    heads, rows = 3, 16 * 32
    visible = torch.arange(1, 33).repeat(16).expand(heads, -1).double()
    visible = visible if alone else visible + 1
    values = torch.rand(4, heads, rows, generator=generator, dtype=torch.float64) / visible
    entropy, maximum, first, minimum = values
    attention = AttentionRows(entropy, maximum, first, visible, minimum)
    sequences = torch.arange(16).repeat_interleave(32)
    halves = half_samples(sequences)
    views = {"attention_sequences": sequences, "attention_halves": halves, "attention": attention}
    of_each = {
        "attention_entropy": (entropy, 1),
        "attention_entropy_normalised": (entropy / visible.log(), 2),
        "attention_max": (maximum, 2),
        "attention_min": (minimum, 2),
        "attention_sink": (first, 2),
    }
    every = DERIVED["attention_differences"](
        *(views[name] for name in parameters(DERIVED["attention_differences"]))
    )
    for name, (value, outcomes) in of_each.items():
        chosen = visible >= outcomes
        own = without_places(value, chosen, visible, sequences, halves)
        want = row_mean_differences(own, chosen, halves)
        found = DIFFERENCES[METRICS[name]](every)
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-15)


def rows_with_massive_ones(sequences=16, each=30):
    """Rows of which those of one sequence are alike, some of massive norm, and their sequences."""
    generator = torch.Generator().manual_seed(7)
    numbers = torch.arange(sequences).repeat_interleave(each)
    rows = torch.randn(sequences * each, 6, generator=generator)
    rows += torch.randn(sequences, 6, generator=generator)[numbers]
    massive = torch.arange(len(rows)) % 97 == 50
    rows[massive] *= 200
    order = torch.randperm(len(rows), generator=generator)
    return rows[order], numbers[order], massive[order]


def test_rows_of_massive_norm_count_in_the_sequences_that_they_are_of():
    rows, numbers, _ = rows_with_massive_ones()

    def drift(hidden):
        return drift_norm(hidden)

    metrics = select("drift_norm") | {"own": with_interval(drift)}
    values = geometry(rows, sequences=numbers, metrics=metrics)
    assert values["drift_norm/margin"] == pytest.approx(values["own/margin"], rel=1e-9)


def test_without_massive_rows_the_margin_is_that_of_the_others_alone():
    rows, numbers, massive = rows_with_massive_ones()
    whole = geometry(rows, sequences=numbers, metrics=select("anisotropy_no_sinks", "anisotropy"))
    rest = geometry(rows[~massive], sequences=numbers[~massive], metrics=select("anisotropy"))
    assert whole["anisotropy_no_sinks"] == pytest.approx(rest["anisotropy"], rel=1e-6)
    # The lengths of sequences are those of all rows in the one and of the others in the other.
    assert whole["anisotropy_no_sinks/margin"] == pytest.approx(rest["anisotropy/margin"], rel=1e-3)
    assert whole["anisotropy/margin"] > 2 * rest["anisotropy/margin"]


@pytest.mark.parametrize("offset", [2.0**24, 2.0**30])
def test_margins_far_from_the_origin_are_those_near_it(offset):
    """What all rows share is no difference between halves; the shift rounds nothing here."""
    generator = torch.Generator().manual_seed(4)
    sequences, ids = torch.arange(480) // 20, torch.randint(9, (480,), generator=generator)
    kind = {"generator": generator, "dtype": torch.float64}
    own, kinds = torch.randn(24, 6, **kind), torch.randn(9, 6, **kind)
    rows = torch.randn(480, 6, **kind) + own[sequences] + kinds[ids]
    rows[::60] *= 30  # massive rows
    rows = (rows * 2**18).round() / 2**18
    names = (
        "variance", "anisotropy", "anisotropy_no_sinks", "within_variance", "between_variance",
        "within_share", "between_share", "cosine_centred",
    )  # fmt: skip
    near, far = (
        geometry(part, ids, sequences=sequences, metrics=select(*names))
        for part in (rows, rows + offset)
    )
    for name in names:
        assert far[f"{name}/margin"] == pytest.approx(near[f"{name}/margin"], rel=1e-5), name
