"""Contracts that every metric keeps; the tests find the metrics by themselves."""

import math

import numpy as np
import pytest
import torch
from models import PlainDecoder, batch

from geomon import METRICS, MORE_METRICS, geometry, measure
from geomon.capture.snapshot import CAPTURED, Layer
from geomon.kernels import dimension
from geomon.kernels.baselines import gaussian_like
from geomon.kernels.dimension import twonn_censored
from geomon.metrics import Evaluator
from geomon.metrics.between_layers import BetweenLayers
from geomon.metrics.between_readings import BetweenReadings
from geomon.metrics.evaluate import sources_of
from geomon.metrics.table import check_metrics
from geomon.metrics.views import DERIVED, LayerViews, captured_views, is_view, parameters

ALL = METRICS | MORE_METRICS
# Metrics that one reading has no value of.
OF_SEVERAL = {n for n, metric in ALL.items() if isinstance(metric.function, BetweenReadings)}
# Metrics that consist of parts, without a value of their own.
OF_PARTS = {"gride", "attention_extremes", "token_frequency"}


@pytest.fixture(scope="module")
def values():
    torch.manual_seed(0)
    return measure(PlainDecoder(), batch(64, 32), tokens=1024, metrics=ALL, queries=None)


@pytest.mark.parametrize("name", ALL)
def test_every_metric_reads_known_views_and_says_what_it_is(name):
    metric = ALL[name]
    asked = parameters(metric)
    assert asked
    assert all(map(is_view, asked))
    assert metric.text.title != name
    assert metric.text.meaning.endswith(".")


@pytest.mark.parametrize("name", [name for name in ALL if name not in OF_SEVERAL])
def test_every_metric_comes_out_for_a_plain_decoder(name, values):
    own = {tag: value for tag, value in values.items() if tag.split("/")[0] == name}
    assert len(own) > 3
    assert all(math.isfinite(value) for value in own.values()), own


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("anisotropy", 0, 1),
        ("cosine", -1, 1),
        ("drift_norm", 0, math.inf),
        ("variance", 0, math.inf),
        ("mean_square_norm", 0, math.inf),
        ("twonn", 0, math.inf),
        ("twonn_distinct", 0, math.inf),
        ("qk_cosine", -1, 1),
        ("attention_entropy", 0, math.log(32)),
        ("attention_entropy_normalised", 0, 1),
        ("twonn_gaussian", 0, math.inf),
        ("anisotropy_no_sinks", 0, 1),
        ("sink_share", 0, 1),
        ("variance_shares", 0, 2),
        ("effective_rank", 1, 32),
        ("participation_ratio", 1, 32),
        ("within_variance", 0, math.inf),
        ("query_mean_norm", 0, math.inf),
        ("query_cosine", -1, 1),
        ("key_cosine", -1, 1),
        ("query_anisotropy", 0, 1),
        ("key_anisotropy", 0, 1),
        ("attention_sink", 0, 1),
        ("neighbour_overlap", 0, 1),
        ("alpha", 0, math.inf),
        ("alpha_last", 0, math.inf),
        ("effective_rank_last", 1, 32),
        ("local_dimension", 0, math.inf),
        ("local_anisotropy", 1 / 63, 1),
        ("local_cosine", -1 / 63, 1),
        ("qk_cosine_concatenated", -1, 1),
        ("cosine_centred", -1, 1),
        ("cosine_within", -1, 1),
        ("cosine_between", -1, 1),
        ("mean_query_share", 0, math.inf),
        ("score_spread", 0, math.inf),
    ],
)
def test_values_are_in_the_range_that_the_docstring_states(name, low, high, values):
    for tag, value in values.items():
        if tag.split("/")[0] == name and tag.count("/") == 1:
            assert low <= value <= high + 1e-9, tag


def test_moments_add_up(values):
    for layer in range(4):
        drift = values[f"drift_norm/layer_{layer:02d}"]
        spread = values[f"variance/layer_{layer:02d}"]
        square = values[f"mean_square_norm/layer_{layer:02d}"]
        # Over two batches the mean of M is not the square of the mean norm: close, not equal.
        assert drift**2 + spread == pytest.approx(square, rel=2e-3)


def test_derived_views_come_down_to_captured_ones():
    for name in DERIVED:
        assert captured_views([name]) <= CAPTURED.keys()
        assert captured_views([name])
    assert Evaluator({"m": METRICS["attention_entropy"]}, 1).views == {
        "query", "key", "visible", "scale", "bias", "softcap", "sink", "scores",
    }  # fmt: skip


def test_a_metric_may_have_options_with_defaults():
    def norm(hidden, *, order=2.0):
        return hidden.norm(p=order, dim=-1).mean()

    assert check_metrics({"norm": norm})["norm"].function is norm


def test_shares_add_up(values):
    for layer in range(4):
        place = f"layer_{layer:02d}"
        within, of_variance, whole = (
            values[f"{name}/{place}"] for name in ("within_variance", "variance_shares", "variance")
        )
        shares = {
            part: values[f"variance_shares/{place}/{part}"]
            for part in ("mean", "between", "within", "between_variance")
        }
        assert within + shares.pop("between_variance") == pytest.approx(whole)
        assert of_variance == pytest.approx(within / whole)
        assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_metrics_of_shared_views_agree_with_numpy_on_the_raw_rows(offset):
    # Each reads a view that is made once for several: a view that is given to the wrong one shows.
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(600, 20, generator=generator) + offset
    ids = torch.randint(0, 25, (600,), generator=generator)
    query = 2 * torch.randn(600, 4, 6, generator=generator) + 1
    key = torch.randn(600, 2, 6, generator=generator) - torch.arange(6.0)
    captured = {"hidden": rows, "token_ids": ids, "projected_query": query, "projected_key": key}
    views = LayerViews(Layer(1, "block", captured))

    def got(name):
        return views.apply(ALL[name])

    x, q, k = (part.double().numpy() for part in (rows, query, key))
    types = [x[ids.numpy() == t] for t in np.unique(ids.numpy())]
    spread = np.array([np.square(part - part.mean(axis=0)).sum() for part in types])
    count = np.array([len(part) for part in types])
    total, within = x.var(axis=0).sum(), spread.sum() / (600 - len(types))
    if offset:
        naive = rows.square().sum(dim=1).mean() - rows.mean(dim=0).square().sum()
        assert abs(naive.item() / total - 1) > 0.1
    assert got("variance").item() == pytest.approx(total, rel=1e-9)
    assert got("within_variance").item() == pytest.approx(within, rel=1e-9)
    between = got("variance_shares")["between_variance"]
    assert between.item() == pytest.approx(total - within, rel=1e-7)
    v = spread / (count - 1)
    m = np.array([np.square(part.mean(axis=0)).sum() for part in types]) - v / count
    kept = count >= 10
    slope = np.polyfit((m - m.mean())[kept], v[kept], 1)[0]
    assert got("norm_variance_slope")[""].item() == pytest.approx(slope, rel=1e-5)

    mean_q, mean_k = q.mean(axis=0), k.mean(axis=0)
    faced = mean_k.repeat(2, axis=0)  # two query heads to a key head
    dot = (mean_q * faced).sum(axis=1)
    norms = np.linalg.norm(mean_q, axis=1), np.linalg.norm(mean_k, axis=1)
    np.testing.assert_allclose(got("query_mean_norm"), norms[0], rtol=1e-12)
    np.testing.assert_allclose(got("key_mean_norm"), norms[1], rtol=1e-12)
    np.testing.assert_allclose(got("qk_dot"), dot, rtol=1e-12)
    np.testing.assert_allclose(got("qk_cosine"), dot / norms[0] / norms[1].repeat(2), rtol=1e-12)


def made(rows, precision=2.0**-23, **more):
    return LayerViews(Layer(1, "block", {"hidden": rows, "precision": precision, **more}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_rounding_is_the_distance_that_rounding_alone_makes(dtype, scale):
    """Against a measurement: rows rounded to a type, beside the rows that were rounded."""
    rows = scale * torch.randn(3000, 24, generator=torch.Generator().manual_seed(0)).double()
    rounded = rows.to(dtype).double()
    neighbours = torch.cdist(rounded, rounded).topk(2, largest=False).values[:, 1]
    error = (rounded - rows).square().sum(dim=1).mean()
    # Two rows are rounded, each by itself.
    measured = (2 * error).sqrt() / neighbours.median()
    found = made(rounded, torch.finfo(dtype).eps)["rounding"]
    # The spacing of a type is the same over an octave: up to twice what it is relative to a number.
    assert measured.item() < found < 2.5 * measured.item()


def test_rounding_is_a_share_of_the_nearest_distance_and_of_the_spacing():
    rows = torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 1.0], [0.0, 6.0]])
    # Mean square norm (9 + 16 + 10 + 36) / 4; nearest distances 1, 2, 1, 2: the median is 1.
    expected = 0.01 * math.sqrt(71 / 4) / math.sqrt(6) / 1
    assert made(rows, 0.01)["rounding"] == pytest.approx(expected, rel=1e-6)
    assert made(rows, 0.02)["rounding"] == pytest.approx(2 * expected, rel=1e-6)


@pytest.mark.parametrize("width", [2, 5])
def test_the_gaussian_null_is_the_dimension_of_a_gaussian_with_those_rows(width):
    """A curve in `width` directions: the null has the directions and not the curve."""
    generator = torch.Generator().manual_seed(1)
    line = torch.rand(2000, 1, generator=generator).double()
    curve = torch.cat([torch.sin(3 * n * line) for n in range(1, width + 1)], dim=1)
    rows = torch.cat([curve, torch.zeros(2000, 4)], dim=1)
    views = made(rows)
    assert views.apply(METRICS["twonn"])[""].item() < 1.5  # a curve
    null = views.apply(MORE_METRICS["twonn_gaussian"]).item()
    sample = np.random.default_rng(0).multivariate_normal(
        np.zeros(width), np.cov(curve.numpy(), rowvar=False), size=2000
    )
    distances = np.sort(np.linalg.norm(sample[:, None] - sample[None], axis=2), axis=1)[:, 1:3]
    mu = distances[:, 1] / distances[:, 0]
    expected = len(mu) / np.log(mu).sum()
    assert null == pytest.approx(expected, rel=0.15)
    assert null > 1.5


def test_the_gaussian_null_has_as_many_rows_as_are_distinct(monkeypatch):
    """A null of other rows has another bias: copies do not count."""
    asked = []

    def spy(spectrum, count, generator):
        asked.append(count)
        return gaussian_like(spectrum, count, generator)

    monkeypatch.setattr("geomon.metrics.table.gaussian_like", spy)
    rows = torch.randn(150, 6, generator=torch.Generator().manual_seed(2)).double()
    alone = made(rows).apply(MORE_METRICS["twonn_gaussian"]).item()
    # The covariance of the rows stays as it is where each is there equally often.
    copied = made(rows.repeat(8, 1)).apply(MORE_METRICS["twonn_gaussian"]).item()
    assert asked == [150, 150]
    assert copied == pytest.approx(alone, rel=0.02)


# Metrics whose docstring or README states a range, and those that have none.
UNBOUNDED = {
    "norm_variance_slope", "gride", "qk_dot", "key_mean_norm", "max_logit",
    "score_mean", "token_frequency", "attention_extremes",
}  # fmt: skip
RANGES = test_values_are_in_the_range_that_the_docstring_states.pytestmark[0].args[1]


def test_every_metric_has_a_range_or_none():
    assert {name for name, _, _ in RANGES} | UNBOUNDED | OF_SEVERAL == ALL.keys()


@pytest.mark.parametrize(("name", "low", "high"), RANGES)
def test_a_range_is_asked_of_every_layer_and_of_the_mean(name, low, high, values):
    """A metric that is missing is in no range."""
    found = {tag: value for tag, value in values.items() if tag.split("/")[0] == name}
    plain = {tag for tag in found if tag.count("/") == 1}
    layers = {f"{name}/layer_{layer:02d}" for layer in (1, 2, 3)}
    assert plain >= layers | {f"{name}/mean"}
    heads = {tag for tag in found if "/head_" in tag}
    for tag in plain | heads:
        assert low <= found[tag] <= high + 1e-9, tag
    of_attention = bool(sources_of(ALL[name]) & {"attention", "projection"})
    assert bool(heads) == (of_attention and name != "qk_cosine_concatenated")
    of_layers_alone = of_attention or isinstance(ALL[name].function, BetweenLayers)
    assert (f"{name}/layer_00" in plain) != of_layers_alone


def test_metrics_that_are_named_for_a_part_read_that_part():
    """Each beside its neighbour in the table, on values of which no two are equal."""
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(300, 4, 6, generator=generator) + 2
    key = 3 * torch.randn(300, 2, 6, generator=generator) - 1
    views = made(torch.randn(300, 8, generator=generator), projected_query=query, projected_key=key)
    for name, rows in (("query", query), ("key", key)):
        unit = torch.nn.functional.normalize(rows.double(), dim=-1).transpose(0, 1)
        pairs = (unit @ unit.transpose(1, 2)).sum(dim=(1, 2)) - 300
        cosine = views.apply(ALL[f"{name}_cosine"])
        torch.testing.assert_close(cosine, pairs / (300 * 299), rtol=1e-6, atol=1e-9)
        centred = (rows - rows.mean(dim=0)).double().transpose(0, 1)
        squares = torch.linalg.svdvals(centred).square()
        share = squares[:, 0] / squares.sum(dim=1)
        torch.testing.assert_close(views.apply(ALL[f"{name}_anisotropy"]), share, rtol=1e-5, atol=0)


def test_parts_of_the_dimension_say_what_it_stands_on():
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(400, 5, generator=generator).double()
    rows[300:] = rows[:100]  # a quarter are copies
    ids, positions = torch.arange(400) % 20, torch.arange(400) % 8
    views = made(rows, token_ids=ids, positions=positions)
    parts = views.apply(METRICS["twonn"])
    assert (parts["n"], parts["duplicates"]) == (300, pytest.approx(0.25))
    assert parts["rounding"] == views["rounding"]
    assert parts["censored"] == twonn_censored(views["neighbours"]).value
    distinct = views.apply(METRICS["twonn_distinct"])
    # A row for each pair, and of chosen rows that are copies of one another one.
    pairs = len(set(zip(ids.tolist(), positions.tolist(), strict=True)))
    chosen = views["distinct"]
    contents = {tuple(row) for row in rows[chosen].tolist()}
    assert len(contents) == len(chosen) <= pairs
    assert (distinct["n"], distinct["repeated"]) == (len(chosen), 1 - len(chosen) / 400)
    assert list(views.apply(METRICS["gride"])) == [f"k{2**n}" for n in range(6)]


def test_large_scales_stand_on_256_evenly_spread_rows():
    rows = torch.randn(1000, 4, generator=torch.Generator().manual_seed(8)).double()
    views = made(rows)
    assert views["far_neighbours"].shape == (256, 64)
    distances = torch.cdist(rows, rows).sort(dim=1).values[:, 1:65]
    spread = views["far_rows"]
    assert torch.bincount(spread // 125).sub(32).abs().max() <= 1
    torch.testing.assert_close(views["far_neighbours"], distances[spread], rtol=1e-9, atol=1e-12)
    assert views["neighbours"].shape == (1000, 16)
    few = made(rows[:100])
    assert few["far_neighbours"].shape == (100, 64)


def test_neighbourhoods_are_the_64_nearest_of_256_tokens_without_copies_and_themselves():
    rows = torch.randn(700, 12, generator=torch.Generator().manual_seed(9)).double()
    views = made(torch.cat([rows, rows[:70]]))
    assert views["members"].shape == (256, 64)
    apart = torch.cdist(rows, rows).fill_diagonal_(math.inf)
    members = apart.topk(64, largest=False).indices
    values, shares, cosines = [], [], []
    for index in views["far_rows"].tolist():
        own = rows[members[index]]
        inner = torch.cdist(own, own).fill_diagonal_(math.inf).topk(2, largest=False).values
        values.append(dimension.twonn(inner).item())
        centred = own - own.mean(dim=0)
        squares = torch.linalg.svdvals(centred).square()
        shares.append((squares[0] / squares.sum()).item())
        unit = torch.nn.functional.normalize(centred, dim=1)
        cosines.append((((unit @ unit.T).sum() - 64) / 64 / 63).item())
    found = views.apply(MORE_METRICS["local_dimension"])
    assert found[""].item() == pytest.approx(np.mean(values))
    assert found["spread"].item() == pytest.approx(np.std(values, ddof=1))
    assert found["n"] == 256
    assert views.apply(MORE_METRICS["local_anisotropy"]).item() == pytest.approx(np.mean(shares))
    assert views.apply(MORE_METRICS["local_cosine"]).item() == pytest.approx(np.mean(cosines))


@pytest.mark.parametrize("rows", [300, 40])
def test_the_nulls_of_neighbourhoods_are_those_of_noise(rows):
    generator = torch.Generator().manual_seed(10)
    names = ("local_dimension", "local_anisotropy", "local_cosine")
    metrics = {name: ALL[name] for name in names}
    draws = 1600 // rows
    found = [
        geometry(torch.randn(rows, 10, generator=generator), metrics=metrics) for _ in range(draws)
    ]
    for name in names:
        values = np.array([one[name] for one in found])
        error = 4 * values.std(ddof=1) / draws**0.5 + 0.02 * abs(values.mean())
        assert found[0][f"{name}/null"] == pytest.approx(values.mean(), abs=error)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_neighbourhoods_of_too_few_rows_are_explained(count):
    rows = torch.randn(count, 5, generator=torch.Generator().manual_seed(11)).repeat(5, 1)
    values = geometry(rows, metrics={"local_dimension": ALL["local_dimension"]})
    assert math.isnan(values["local_dimension"])
    assert any("rows differ from one another" in note for note in values.notes)


def test_any_discard_is_a_metric_of_ones_own():
    # As in docs/metrics.md, which says with which published values each discard compares.
    def twonn_20(neighbours, duplicates):
        value = dimension.twonn(neighbours, discard=0.8)
        return {"": value, "n": len(neighbours), "duplicates": duplicates}

    rows = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)).double()
    values = geometry(rows, metrics=METRICS | {"twonn_20": twonn_20})
    apart = (rows[:, None] - rows).norm(dim=2)
    mu = apart.sort(dim=1).values[:, 1:3].log().diff(dim=1)[:, 0].sort().values
    kept = 100
    y = -torch.log1p(-torch.arange(1, kept + 1).double() / 500)
    expected = (mu[:kept] * y).sum() / mu[:kept].square().sum()
    assert values["twonn_20"] == pytest.approx(expected.item(), rel=1e-6)
    assert values["twonn_20"] != pytest.approx(values["twonn"], rel=1e-3)
    assert values["twonn_20/n"] == 500


def test_the_order_of_the_rows_changes_no_value():
    """Copies of rows among others of their token and of another one, as at layer 0."""
    generator = torch.Generator().manual_seed(12)
    rows = torch.randn(240, 6, generator=generator)
    rows[120:200] = rows[:80]
    ids, positions = torch.arange(240) % 7, torch.arange(240) % 5
    sequences = torch.arange(240) // 20
    metrics = {name: metric for name, metric in ALL.items() if not name.startswith("neighbour_")}
    found = [
        geometry(rows, ids, positions, sequences=sequences, metrics=metrics, seed=seed)
        for seed in range(3)
    ]
    # Not of margins: of copies one stands for all, and its sequence is another in another order.
    finite = {tag for tag, value in found[0].items() if math.isfinite(value)}
    known = {tag for tag in finite if not tag.endswith("margin")}
    assert {"twonn", "twonn_distinct/n", "gride/k32"} <= known
    for other in found[1:]:
        for tag in known:
            # A random sample with the layer's covariance, whose last digit decides its directions.
            loose = 1e-2 if tag.startswith("twonn_gaussian") else 1e-6
            assert other[tag] == pytest.approx(found[0][tag], rel=loose, abs=1e-9), tag
