"""The share of the variance of scores that the mean query makes; its value: test_attention.py."""

import math

import numpy as np
import pytest
import torch
from mathematics import mean_query_share, query_variances
from whole_layer import normal

MASKS = ["all", "causal", "by sequence", "by head"]


def attention(sequences=5, heads=4, key_heads=2, queries=6, keys=9, width=3, seed=0):
    query = normal(sequences, heads, queries, width, seed=seed) + 0.7
    key = normal(sequences, key_heads, keys, width, seed=seed + 1) - 0.4
    return query, key


def mask(kind, sequences=5, heads=4, queries=6, keys=9):
    """Visible pairs; the last mask hides all keys from one query, and all but one from another."""
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if kind == "causal":
        return seen.tril(diagonal=keys - queries - 2)
    if kind == "by sequence":
        used = torch.arange(sequences) + keys - sequences + 1
        return (torch.arange(keys) < used[:, None])[:, None, None].expand(-1, 1, queries, -1)
    if kind == "by head":
        seen = torch.rand(1, heads, queries, keys, generator=torch.Generator().manual_seed(3)) > 0.4
        seen[:, :, 2] = False
        seen[:, :, 4] = torch.arange(keys) == 1
    return seen


def variances(query, key, visible, groups=1):
    group = torch.arange(len(query)) * groups // len(query)
    return query_variances(query, key, visible, group, groups)


def share(query, key, visible):
    return mean_query_share(variances(query, key, visible))


@pytest.mark.parametrize("anything", [1e12, math.inf, math.nan])
def test_keys_that_no_query_sees_may_be_anything(anything):
    query, key = attention()
    visible = mask("by sequence")
    unseen = ~visible.any(dim=(1, 2))
    other = key.masked_fill(unseen[:, None, :, None], anything)
    want, found = share(query, key, visible), share(query, other, visible)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=0)


def test_a_constant_on_all_keys_and_a_scale_change_nothing():
    (query, key), visible = attention(), mask("causal")
    want = share(query, key, visible)
    torch.testing.assert_close(share(query, key + 1e3, visible), want, rtol=1e-3, atol=0)
    torch.testing.assert_close(share(5 * query, key / 7, visible), want, rtol=1e-5, atol=0)


def test_a_mask_without_leading_dimensions_counts_for_all_sequences_and_heads():
    query, key = attention(sequences=16)
    seen = mask("causal")
    want = variances(query, key, seen, 8)
    every = seen.expand(16, 4, 6, 9)
    for given_mask in (seen[0], seen[0, 0], every, every.contiguous()):
        got = variances(query, key, given_mask, 8)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="expected visible that broadcasts to"):
        variances(query, key, seen[0, 0, :4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alike", ["all keys", "keys of a sequence", "keys of a document"])
def test_where_scores_do_not_vary_the_mean_query_has_no_share(dtype, alike):
    """Keys that are equal where they are seen vary by rounding alone: no 1e15 of it."""
    query, key = (part.to(dtype) for part in attention(sequences=16, queries=12, keys=12))
    visible = mask("causal", 16, 4, 12, 12)
    if alike == "all keys":
        key[:] = key[:1, :, :1].clone()
    elif alike == "keys of a sequence":
        key[:] = key[:, :, :1].clone()
    else:
        document = torch.arange(12) // 4
        visible = visible & (document[:, None] == document)
        key = key[:, :, 4 * document]
    key[:, 1, 0] += 1.0  # the second key head has scores that do vary
    found = variances(query, key, visible, 8)
    for each in (found, *map(found.without, range(8))):
        assert mean_query_share(each).isnan().tolist() == [True, True, False, False]


def test_queries_that_are_zero_in_the_mean_have_a_share_of_one_over_their_number():
    found = []
    for seed in range(60):
        query = normal(8, 3, 5, 16, seed=seed)
        key = normal(8, 3, 20, 16, seed=seed + 1000) + 3
        found.append(share(query, key, mask("all", keys=20, queries=5)).mean().item())
    error = np.std(found, ddof=1) / math.sqrt(len(found))
    assert abs(np.mean(found) - 1 / 40) < 4 * error
    assert error < 0.2 / 40
