"""Metrics of the table against references on the raw rows, and what the table refuses."""

import math

import numpy as np
import pytest
import torch

from geomon import METRICS, MORE_METRICS, geometry
from geomon.capture.snapshot import Layer
from geomon.kernels.baselines import isotropic_cosine_magnitude
from geomon.kernels.dimension import twonn
from geomon.metrics.metric import Sizes
from geomon.metrics.table import check_metrics
from geomon.metrics.views import LayerViews

ALL = METRICS | MORE_METRICS


def test_names_of_metrics_are_checked():
    assert list(check_metrics(("twonn", "cosine"))) == ["twonn", "cosine"]
    with pytest.raises(ValueError, match="no metric is called 'twon'"):
        check_metrics(["twon"])
    with pytest.raises(TypeError, match=r"write \['twonn'\]"):
        check_metrics("twonn")
    with pytest.raises(ValueError, match="metrics is empty"):
        check_metrics([])
    with pytest.raises(TypeError, match="a list of names"):
        check_metrics(["twonn", 3])
    with pytest.raises(ValueError, match="asks for 'hiden', which is no view"):
        check_metrics({"mine": lambda hiden: 0.0})


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
    shares = got("variance_shares")
    assert shares["between_variance"].item() == pytest.approx(total - within, rel=1e-7)
    square = np.square(x).sum(axis=1).mean()
    mean = np.square(x.mean(axis=0)).sum()
    assert got("drift_norm").item() == pytest.approx(math.sqrt(mean), rel=1e-9)
    assert got("mean_square_norm").item() == pytest.approx(square, rel=1e-9)
    assert shares[""].item() == pytest.approx(within / total, rel=1e-7)
    assert shares["mean"].item() == pytest.approx(mean / square, rel=1e-9)
    assert shares["within"].item() == pytest.approx(within / square, rel=1e-7)
    assert shares["between"].item() == pytest.approx((total - within) / square, rel=1e-6)
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


def test_the_deviation_of_the_null_is_that_of_as_many_rows():
    """Where only some of them have their neighbours searched."""
    null = METRICS["twonn"].null(Sizes(16_384, 3))
    assert null["null"] == pytest.approx(3, rel=0.05)
    assert 0.005 < null["null_std"] < 0.1  # 1.1 d / sqrt(rows) is 0.026


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
    found = twonn(views["neighbours"])
    for name in ("censored", "discard_0", "discard_80"):
        assert parts[name] == getattr(found, name)
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
        values.append(twonn(inner).value.item())
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine_centred", {"null": -1 / 99}),
        ("neighbour_overlap", {"null": 10 / 99}),
        ("variance_shares", {"null": 1.0, "null_mean": 1 / 100, "null_between": 0.0}),
        ("mean_query_share", {"null": (1 / 4 + 1 / 16) / 2}),
        ("attention_entropy", {"null": (math.log(4) + math.log(16)) / 2}),
        ("qk_cosine", {"null_magnitude": 0.5}),  # of width 3
        ("qk_cosine_concatenated", {"null_magnitude": isotropic_cosine_magnitude(6)}),
    ],
)
def test_nulls_in_closed_form(name, expected):
    sizes = Sizes(100, 12, (2, 3), (4, 16), (math.log(4), math.log(16)), 8)
    assert ALL[name].null(sizes) == pytest.approx(expected)
    if name.startswith(("qk", "attention", "mean_query")):
        assert not ALL[name].null(Sizes(100, 12))
