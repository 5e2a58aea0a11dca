"""Snapshots whose rows stay on a device (support/hardware.py): the views are those on the host."""

import pytest
import torch

from support import plain_models
from support.hardware import DEVICE, Accelerator
from support.models import PlainDecoder, batch
from support.watched import check_same, window

MODELS = {
    "fused": (PlainDecoder, (batch(12, 16),), {}),
    "by hand": (
        lambda: plain_models.language_model(plain_models.CausalSelfAttention, "eager"),
        (batch(12, 16),),
        {},
    ),
    "multihead, padded": (
        plain_models.encoder,
        (torch.randn(6, 10, 32, generator=torch.Generator().manual_seed(0)),),
        {"src_key_padding_mask": torch.arange(10) > torch.arange(4, 10)[:, None]},
    ),
}


def look(name, seed=0):
    build, inputs, named = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    extra = ("final_norm", "embedding", "unembedding")
    with torch.no_grad(), window(model, rows=64, seed=seed, extra_layers=extra) as seen:
        model(*inputs, **named)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_views_on_a_device_are_those_on_the_host(name):
    host = look(name).snapshot()
    with Accelerator():
        device = look(name).snapshot(DEVICE)
        check_same(device, host)
        assert all(layer.devices <= {DEVICE} for layer in device.layers)
    assert host.info == device.info
    assert any(layer.captured for layer in host.layers)
