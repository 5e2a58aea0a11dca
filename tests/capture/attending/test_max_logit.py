"""The largest logit: where it is computed, and in which precision."""

import math
from collections import Counter

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import geomon
from geomon.capture.attending.attention import Arguments
from geomon.capture.attending.fused import read_sdpa
from geomon.capture.attending.max_logit import (
    max_logits_of_call,
    max_logits_of_scores,
    over_rows,
)
from support.hardware import Accelerator
from support.watched import blocks_of


def causal(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def test_it_is_computed_only_where_it_is_asked_for(monkeypatch):
    def fail(*arguments):
        raise AssertionError("was computed")

    monkeypatch.setattr("geomon.capture.recorder.max_logits_of_call", fail)
    values = geomon.measure(
        blocks_of(causal, 16), torch.randn(4, 6, 16), metrics=geomon.select("attention_entropy")
    )
    assert math.isfinite(values["attention_entropy/mean"])


GENERATOR = torch.Generator().manual_seed(0)
SEQUENCES, LENGTH = 3, 19
SOME = torch.rand(SEQUENCES, 1, LENGTH, LENGTH, generator=GENERATOR) > 0.6
SOME[0, 0, :9] = False  # rows that see nothing
BIAS = 3 * torch.randn(1, 4, LENGTH, LENGTH, generator=GENERATOR)


@pytest.mark.parametrize("block", [1, 1500, 1 << 20])
@pytest.mark.parametrize(
    ("mask", "softcap"), [(None, None), (SOME, 2.0), (SOME, None), (BIAS, 2.0)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_each_row_has_its_largest_score_in_whatever_blocks(
    monkeypatch, block, mask, softcap, causal
):
    """Heads share keys, and the last block has fewer sequences and queries."""
    monkeypatch.setattr("geomon.capture.attending.max_logit._BLOCK_ON_HOST", block)
    monkeypatch.setattr("geomon.capture.attending.max_logit._FEWEST_QUERIES", 8)
    query = torch.randn(SEQUENCES, 4, LENGTH, 8, generator=GENERATOR) + 30
    key = torch.randn(SEQUENCES, 2, LENGTH, 8, generator=GENERATOR)
    scores = 0.3 * query.double() @ key.double().repeat_interleave(2, dim=1).mT
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores + (BIAS if mask is BIAS else 0)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(0 if causal else LENGTH)
    seen = seen & (SOME if mask is SOME else True)
    found = max_logits_of_call(Arguments(query, key, mask, causal, 0.3, softcap))
    expected = scores.masked_fill(~seen, -torch.inf).amax(dim=-1).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reduced_precision_of_products_does_not_enter_it(dtype):
    """On a device that rounds float32 products to TF32, as the user's settings can have it."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 2, 16, 32, generator=generator).to(dtype) for _ in range(2))
    expected = max_logits_of_call(read_sdpa({"query": query, "key": key}))
    with Accelerator() as accelerator:
        query, key = map(accelerator.put, (query, key))
        on_device = read_sdpa({"query": query, "key": key})
        found = max_logits_of_call(on_device).cpu()
        assert not accelerator.waits - Counter({"_to_copy": 1})
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class Products(TorchDispatchMode):
    """Keeps the sizes of the products of matrices: [factors, rows, columns]."""

    def __enter__(self):
        self.sizes = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.sizes.append(tuple(found.shape))
        return found


@pytest.mark.parametrize(
    ("sequences", "heads", "queries", "keys", "causal", "sizes"),
    [
        # At most 2 ** 20 scores at a time on the host: whole sequences, or else some queries.
        (2, 4, 256, 512, False, [(8, 256, 512)]),
        (5, 4, 256, 512, False, [(8, 256, 512)] * 2 + [(4, 256, 512)]),
        (2, 4, 512, 1024, False, [(4, 256, 1024)] * 4),
        # Later keys are skipped, in eight parts of the queries, of at least 64 each.
        (1, 1, 1024, 1024, True, [(1, 128, 128 * n) for n in range(1, 9)]),
        (1, 1, 160, 160, True, [(1, 64, 64), (1, 64, 128), (1, 32, 160)]),
        (1, 1, 160, 100, True, [(1, 64, 64), (1, 64, 100), (1, 32, 100)]),
        (1, 1, 64, 64, True, [(1, 64, 64)]),
    ],
)
def test_scores_are_multiplied_in_blocks_and_those_of_later_keys_are_not(
    sequences, heads, queries, keys, causal, sizes
):
    query, key = torch.randn(sequences, heads, queries, 4), torch.randn(sequences, heads, keys, 4)
    with Products() as products:
        max_logits_of_call(Arguments(query, key, None, causal, 1.0))
    assert products.sizes == sizes


@pytest.mark.parametrize("empty", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_without_queries_there_are_no_largest_scores(empty):
    query, key = torch.zeros(empty), torch.zeros(empty[0], 2, 5, empty[3])
    found = max_logits_of_call(Arguments(query, key, None, False, 1.0))
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.full(empty[:3], -torch.inf))
    assert over_rows(found, None).tolist() == [-torch.inf] * 2


def test_rows_of_scores_whose_keys_are_all_masked_have_no_largest_one():
    scores = torch.tensor([[[[1.0, 3.0], [-1e4, -2.0]], [[-1e4, -6e3], [-5e3, -7e3]]]])
    found = max_logits_of_scores(scores.double().requires_grad_())
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert found.tolist() == [[[3.0, -2.0], [-torch.inf, -5e3]]]


def test_padding_has_no_part_in_the_largest_score_of_a_head():
    largest = torch.tensor([[[1.0, 5.0, 2.0], [7.0, 0.0, 4.0]], [[3.0, 9.0, 8.0], [6.0, 9.0, 9.0]]])
    valid = torch.tensor([[True, False, True], [True, False, False]])
    assert over_rows(largest, None).tolist() == [9, 9]
    assert over_rows(largest, valid).tolist() == [3, 7]
    assert over_rows(largest, torch.zeros_like(valid)).tolist() == [-torch.inf] * 2
    assert largest[1, 1, 2] == 9
