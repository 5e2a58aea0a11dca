"""The largest logit: where it is computed, and in which precision."""

import math
from collections import Counter

import pytest
import torch
from accelerator import Accelerator
from torch.nn.functional import scaled_dot_product_attention
from watched import blocks_of

import geomon
from geomon.capture.attending.fused import read_sdpa
from geomon.capture.attending.max_logit import max_logits_of_call


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
