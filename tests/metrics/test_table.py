"""Metrics of the table against references on the raw rows, and what the table refuses."""

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch

from geomon import METRICS, MORE_METRICS, Metric, MetricText, at_last, geometry
from geomon.metrics import Evaluator, check_metrics
from support import definitions as by_book
from support import samples
from support.kernels import (
    effective_rank,
    isotropic_anisotropy,
    isotropic_cosine_quantile,
    isotropic_spectrum,
)
from support.measuring import Layer, LayerViews, Sizes

ALL = METRICS | MORE_METRICS


@pytest.mark.parametrize(
    ("metrics", "error", "words"),
    [
        (["twon"], ValueError, r"no metric is called 'twon' \(did you mean 'twonn'"),
        ("twonn", TypeError, r"write \['twonn'\]"),
        ([], ValueError, "metrics is empty"),
        (["twonn", 3], TypeError, "a list of names"),
        ({"a/b": lambda hidden: 0.0}, ValueError, "cannot name a metric"),
        ({"mine": 3}, TypeError, "expected a function of views"),
        ({"mine": lambda hiden: 0.0}, ValueError, "asks for 'hiden', which is not a view"),
        ({"mine": lambda: 0.0}, ValueError, "reads no view"),
    ],
)
def test_metrics_are_checked(metrics, error, words):
    assert list(check_metrics(("twonn", "cosine"))) == ["twonn", "cosine"]
    with pytest.raises(error, match=words):
        check_metrics(metrics)


def made(rows, precision=2.0**-23, **more):
    return LayerViews(Layer(1, "block", {"hidden": rows, "precision": precision, **more}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_rounding_is_the_distance_that_rounding_alone_makes(dtype, scale):
    """Against a measurement: rows rounded to a type, and the rows before."""
    rows = scale * torch.randn(3000, 24, generator=torch.Generator().manual_seed(0)).double()
    rounded = rows.to(dtype).double()
    neighbours = torch.cdist(rounded, rounded).topk(2, largest=False).values[:, 1]
    error = (rounded - rows).square().sum(dim=1).mean()
    # Two rows are rounded, each by itself.
    measured = (2 * error).sqrt() / neighbours.median()
    found = made(rounded, torch.finfo(dtype).eps)["rounding"]
    # The spacing of a type is the same over an octave: up to twice what it is relative to a number.
    assert measured.item() < found < 2.5 * measured.item()


# Rows and columns, and the null of each metric, measured once on noise that is always the same.
NULLS = [
    # Only some of so many rows have their neighbours searched: 1.1 d / sqrt(rows) is 0.026.
    ("twonn", (16_384, 3), {"null": 3.029548, "null_std": 0.0238190}),
    ("twonn", (40, 3), {"null": 3.181605, "null_std": 0.6611496}),
    ("twonn", (100, 5), {"null": 5.058547, "null_std": 0.5718869}),
    ("twonn", (99, 5), {"null": 5.058547, "null_std": 0.5718869}),  # as of 2^(53/8) rows
    ("local_dimension", (300, 10), {"null": 8.352888}),
    ("local_anisotropy", (300, 10), {"null": 0.1749354}),
    ("local_dimension", (63, 4), {"null": 4.173787}),
    ("local_dimension", (64, 4), {"null": 4.013293}),
    ("local_anisotropy", (1100, 3), {"null": 0.4215506}),
    ("alpha", (100, 40), {"null": 1.079217}),
]


@pytest.mark.parametrize(("name", "sizes", "null"), NULLS)
def test_the_nulls_of_noise_are_the_same_in_every_run(name, sizes, null):
    assert ALL[name].null(Sizes(*sizes)) == pytest.approx(null, rel=1e-5)


def test_parts_of_the_dimension_say_what_it_stands_on():
    rows = samples.normal(400, 5, seed=6)
    rows[300:] = rows[:100]  # a quarter are copies
    ids, positions = torch.arange(400) % 20, torch.arange(400) % 8
    views = made(rows, token_ids=ids, positions=positions)
    parts, distinct = (views.apply(METRICS[name]) for name in ("twonn", "twonn_distinct"))
    near = by_book.distances(np.unique(rows.numpy(), axis=0))
    expected = {"n": 300, "duplicates": 0.25, "rounding": views["rounding"]}
    for name, discard in (("", "0.1"), ("discard_0", "0"), ("discard_80", "0.8")):
        expected[name] = by_book.twonn(near, discard)
    assert {name: float(parts[name]) for name in expected} == pytest.approx(expected, rel=1e-9)
    # A row for each pair, and of chosen rows that are copies of one another one.
    chosen = views["distinct"]
    contents, pairs = (
        {tuple(row) for row in rows[chosen].tolist()},
        {*zip(ids.tolist(), positions.tolist(), strict=True)},
    )
    assert len(contents) == len(chosen) <= len(pairs)
    assert (distinct["n"], distinct["repeated"]) == (len(chosen), 1 - len(chosen) / 400)


def test_large_scales_stand_on_256_evenly_spread_rows():
    rows = samples.normal(1000, 4, seed=8)
    views = made(rows)
    distances, spread = torch.cdist(rows, rows).sort(dim=1).values[:, 1:65], views["far_rows"]
    assert len(spread) == 256
    assert torch.bincount(spread // 125).sub(32).abs().max() <= 1
    torch.testing.assert_close(views["far_neighbours"], distances[spread], rtol=1e-9, atol=1e-12)
    assert views["neighbours"].shape == (1000, 16)
    assert made(rows[:100])["far_neighbours"].shape == (100, 64)


@pytest.mark.parametrize("name", ["local_dimension", "local_anisotropy"])
@pytest.mark.parametrize("rows", [300, 40])
def test_the_nulls_of_neighbourhoods_are_those_of_noise(rows, name):
    draws = 1600 // rows
    found = [
        geometry(samples.normal(rows, 10, seed=n).float(), metrics={name: ALL[name]})
        for n in range(draws)
    ]
    values = np.array([one[name] for one in found])
    error = 4 * values.std(ddof=1) / draws**0.5 + 0.02 * abs(values.mean())
    assert found[0][f"{name}/null"] == pytest.approx(values.mean(), abs=error)


def norm(hidden):
    return hidden.norm()


@pytest.mark.parametrize(
    "metric",
    [
        METRICS["twonn"], Metric(norm, MetricText("Norm"), has_margin=False),
        Metric(norm, MetricText("Norm"), reads=("spectrum",), rows="last", degrees=3),
    ],
)  # fmt: skip
def test_a_copy_of_a_metric_is_the_metric(metric):
    for copied in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
        assert (copied is metric) == (metric is METRICS["twonn"])
        assert vars(copied) == vars(metric)


def told(hidden):
    """Size of all rows,
    in one number.

    More of it.
    """
    return hidden.norm()


class Told:
    """A metric that is an object."""

    def __call__(self, hidden):
        return hidden.norm()


def test_a_metric_of_one_s_own_is_told_by_its_docstring_and_at_last_tokens_it_says_so():
    own = check_metrics({"told": told, "norm": norm, "object": Told()})
    assert [(name, each.text.title, each.text.meaning) for name, each in own.items()] == [
        ("told", "told", "Size of all rows, in one number."), ("norm", "norm", ""),
        ("object", "object", ""),
    ]  # fmt: skip
    assert all(each.text.is_charted for each in own.values())
    cosine, last = METRICS["cosine"], at_last(METRICS["cosine"], at_least=5)
    assert last.text.title == f"{cosine.text.title}, last tokens"
    assert last.text.meaning == f"At the last token of each sequence: {cosine.text.meaning}"
    assert (last.text.null, last.null, last.rows, last.at_least) == ("", None, "last", 5)
    assert (last.text.unit, last.function) == (cosine.text.unit, cosine.function)
    assert at_last(told).text.title == "told, last tokens"
    assert (at_last(told).at_least, at_last(told).has_margin) == (2, True)


def test_what_measurements_share_cannot_be_changed_by_one_of_them():
    evaluator = Evaluator(check_metrics(["within_variance"]), 1, strict=True)
    assert evaluator.evaluate([], 4).stacks == {}
    types = made(torch.eye(2), token_ids=torch.zeros(2).long())["token_types"]
    assert float(types.within_variance) == pytest.approx(1)
    for each in (evaluator, evaluator.metrics["within_variance"], types):
        name = dataclasses.fields(each)[0].name
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            setattr(each, name, getattr(each, name))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cosine", {"null": 0.0, "isotropic_pair": isotropic_cosine_quantile(12)}),
        ("cosine_centred", {"null": -1 / 99}),
        ("anisotropy", {"null": isotropic_anisotropy(100, 12)}),
        ("effective_rank_last", {"null": effective_rank(isotropic_spectrum(8, 12)).item()}),
        ("variance_shares", {"null": 1.0, "null_mean": 1 / 100, "null_between": 0.0}),
        ("mean_query_share", {"null": (1 / 4 + 1 / 16) / 2}),
        ("attention_entropy", {"null": (math.log(4) + math.log(16)) / 2}),
        ("qk_cosine", {"null_magnitude": 0.5}),  # of width 3
    ],
)
def test_nulls_in_closed_form(name, expected):
    sizes = Sizes(100, 12, (2, 3), (4, 16), (math.log(4), math.log(16)), 8)
    assert ALL[name].null(sizes) == pytest.approx(expected)
    assert ALL[name].null(Sizes(0, 0)) == {}  # of no size


@pytest.mark.parametrize(
    ("name", "least", "fewer"),
    [
        ("anisotropy", Sizes(3, 2), [Sizes(2, 2), Sizes(3, 1)]),
        ("alpha_last", Sizes(0, 40, sequences=2), [Sizes(90, 40, sequences=1)]),
        ("mean_query_share", Sizes(3, 2, queries=(1,)), [Sizes(3, 2, queries=(5, 0))]),
    ],
)
def test_nulls_begin_at_the_fewest_rows_that_have_one(name, least, fewer):
    assert ALL[name].null(least).keys() == {"null"}
    assert [ALL[name].null(sizes) for sizes in fewer] == [{}] * len(fewer)
