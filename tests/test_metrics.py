"""Contracts that every metric keeps; the tests find the metrics by themselves."""

import inspect
import math

import pytest
import torch
from models import PlainDecoder, batch

from geomon import METRICS, MORE_METRICS, measure
from geomon.layer import CAPTURED, DERIVED, captured_views, parameters
from geomon.metrics import check_metrics, views_of

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
    assert views_of({"m": METRICS["attention_entropy"]}) == {
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
