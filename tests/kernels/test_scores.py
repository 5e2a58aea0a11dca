"""The share of the variance of scores that the mean query makes; its value: test_attention.py."""

import math

import numpy as np
import pytest
import torch

from support.kernels import mean_query_share, query_variances
from support.whole_layer import normal

SEQUENCES, HEADS, QUERIES, KEYS = 5, 4, 6, 9
CAUSAL = torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool).tril(diagonal=KEYS - QUERIES - 2)


def attention(sequences=SEQUENCES, heads=HEADS, key_heads=2, queries=QUERIES, keys=KEYS, width=3):
    query = normal(sequences, heads, queries, width) + 0.7
    return query, normal(sequences, key_heads, keys, width, seed=1) - 0.4


def variances(query, key, visible, groups=1):
    group = torch.arange(len(query)) * groups // len(query)
    return query_variances(query, key, visible, group, groups)


def share(query, key, visible):
    return mean_query_share(variances(query, key, visible))


@pytest.mark.parametrize("anything", [1e12, math.inf, math.nan])
def test_keys_that_no_query_sees_may_be_anything(anything):
    query, key = attention()
    seen = torch.arange(KEYS) < torch.arange(KEYS - SEQUENCES + 1, KEYS + 1)[:, None]
    visible = seen[:, None, None].expand(-1, 1, QUERIES, -1)
    other = key.masked_fill(~seen[:, None, :, None], anything)
    want, found = share(query, key, visible), share(query, other, visible)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=0)


def test_a_constant_on_all_keys_and_a_scale_change_nothing():
    query, key = attention()
    want = share(query, key, CAUSAL)
    torch.testing.assert_close(share(query, key + 1e3, CAUSAL), want, rtol=1e-3, atol=0)
    torch.testing.assert_close(share(5 * query, key / 7, CAUSAL), want, rtol=1e-5, atol=0)


def test_a_mask_without_leading_dimensions_counts_for_all_sequences_and_heads():
    query, key = attention(sequences=16)
    want, every = variances(query, key, CAUSAL, 8), CAUSAL.expand(16, HEADS, -1, -1)
    for given_mask in (CAUSAL[0], CAUSAL[0, 0], every, every.contiguous()):
        got = variances(query, key, given_mask, 8)
        torch.testing.assert_close([*got], [*want], rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="expected visible that broadcasts to"):
        variances(query, key, CAUSAL[0, 0, :4])


DOCUMENT = torch.arange(12) // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("equal", "seen"),
    [
        (lambda key: key[:1, :, :1], True),  # all keys
        (lambda key: key[:, :, :1], True),  # those of a sequence
        (lambda key: key[:, :, 4 * DOCUMENT], DOCUMENT[:, None] == DOCUMENT),
    ],
    ids=["all keys", "keys of a sequence", "keys of a document"],
)
def test_the_mean_query_has_no_share_if_scores_do_not_vary(dtype, equal, seen):
    """Keys that are equal where they are seen vary by rounding alone: no 1e15 of it."""
    query, key = (part.to(dtype) for part in attention(sequences=16, queries=12, keys=12))
    visible = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril(diagonal=-2) & seen
    key = equal(key).expand_as(key).clone()
    key[:, 1, 0] += 1.0  # the second key head has scores that do vary
    found = variances(query, key, visible, 8)
    for each in (found, *map(found.without, range(8))):
        assert mean_query_share(each).isnan().tolist() == [True, True, False, False]


def test_queries_that_are_zero_in_the_mean_have_a_share_of_one_over_their_number():
    every = torch.ones(1, 1, 5, 20, dtype=torch.bool)
    found = [
        share(normal(8, 3, 5, 16, seed=n), normal(8, 3, 20, 16, seed=n + 1000) + 3, every).mean()
        for n in range(60)
    ]
    error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found) - 1 / 40) < 4 * error < 0.8 / 40
