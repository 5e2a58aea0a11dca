"""The largest logit: where it is computed, and in which precision."""

import math
from collections import Counter

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import geomon
from geomon.capture.attending.attention import Arguments
from geomon.capture.attending.fused import read_sdpa
from geomon.capture.attending.max_logit import max_logits_of_call
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
SOME = torch.rand(5, 1, 37, 37, generator=GENERATOR) > 0.6
SOME[0, 0, :9] = False  # rows that see nothing
BIAS = 3 * torch.randn(1, 4, 37, 37, generator=GENERATOR)


@pytest.mark.parametrize("block", [1, 3000, 1 << 20])
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
    query = torch.randn(5, 4, 37, 8, generator=GENERATOR) + 30
    key = torch.randn(5, 2, 37, 8, generator=GENERATOR)
    scores = 0.3 * query.double() @ key.double().repeat_interleave(2, dim=1).mT
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores + (BIAS if mask is BIAS else 0)
    seen = torch.ones(37, 37, dtype=torch.bool).tril(0 if causal else 37)
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
