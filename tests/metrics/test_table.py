"""Contracts that every metric keeps; the tests find the metrics by themselves."""

import inspect
import math

import numpy as np
import pytest
import torch
from models import PlainDecoder, batch

from geomon import METRICS, MORE_METRICS, measure
from geomon.capture.snapshot import CAPTURED, Layer
from geomon.metrics import Evaluator
from geomon.metrics.table import check_metrics
from geomon.metrics.views import DERIVED, LayerViews, captured_views, parameters

ALL = METRICS | MORE_METRICS


@pytest.fixture(scope="module")
def values():
    torch.manual_seed(0)
    return measure(PlainDecoder(), batch(64, 32), tokens=1024, metrics=ALL)


@pytest.mark.parametrize("name", ALL)
def test_every_metric_reads_known_views_and_says_what_it_is(name):
    metric = ALL[name]
    asked = parameters(metric)
    assert asked
    assert set(asked) <= CAPTURED.keys() | DERIVED.keys()
    assert inspect.getdoc(metric)


@pytest.mark.parametrize("name", ALL)
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
        ("attention_max", 1 / 32, 1),
        ("attention_min", 0, 0.5),
        ("attention_median", 0, 0.5),
        ("twonn_gaussian", 0, math.inf),
        ("anisotropy_no_sinks", 0, 1),
        ("sink_share", 0, 1),
        ("effective_rank", 1, 32),
        ("participation_ratio", 1, 32),
        ("within_variance", 0, math.inf),
        ("query_mean_norm", 0, math.inf),
        ("query_cosine", -1, 1),
        ("key_cosine", -1, 1),
        ("query_anisotropy", 0, 1),
        ("key_anisotropy", 0, 1),
        ("attention_sink", 0, 1),
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

    assert check_metrics({"norm": norm}) == {"norm": norm}


def test_variance_is_what_lies_within_and_between_token_types(values):
    for layer in range(4):
        within, between, whole = (
            values[f"{name}/layer_{layer:02d}"]
            for name in ("within_variance", "between_variance", "variance")
        )
        assert within + between == pytest.approx(whole)


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
        return views.apply(METRICS[name])

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
    assert got("between_variance").item() == pytest.approx(total - within, rel=1e-7)
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
