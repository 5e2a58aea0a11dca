"""What happens on an accelerator; skipped where there is none."""

import models
import pytest
import torch

from geomon import Memory, Monitor, select
from geomon.kernels.attention import attention_rows
from geomon.kernels.neighbours import nearest, unique_rows
from geomon.kernels.spectrum import leading_share, spectrum
from geomon.kernels.spectrum_summary import summarise_spectrum
from geomon.metrics.table import METRICS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kernel", [spectrum, leading_share, unique_rows])
def test_kernels_of_rows_agree_with_the_host(kernel):
    rows = normal(600, 300) + 3
    torch.testing.assert_close(kernel(rows.cuda()).cpu(), kernel(rows), rtol=1e-9, atol=1e-12)


def test_a_summary_of_the_spectrum_agrees_with_the_host():
    rows = normal(1300, 1100) * torch.arange(1, 1101) ** -0.5 + 3
    device, host = summarise_spectrum(rows.cuda()), summarise_spectrum(rows)
    torch.testing.assert_close(device.eigenvalues.cpu(), host.eigenvalues, rtol=1e-4, atol=0)
    for name in ("anisotropy", "effective_rank", "participation_ratio"):
        found, want = getattr(device, name), getattr(host, name)
        assert found.value.device.type == "cuda"
        torch.testing.assert_close(found.value.cpu(), want.value, rtol=1e-5, atol=0)


def test_neighbours_agree_with_the_host():
    rows = normal(1500, 32) + 10
    on_device, on_host = nearest(rows.cuda(), k=8), nearest(rows, k=8)
    torch.testing.assert_close(on_device.distances.cpu(), on_host.distances, rtol=1e-9, atol=0)


def test_attention_agrees_with_the_host():
    query, key = normal(2, 4, 32, 16), normal(2, 2, 64, 16, seed=1)
    visible = torch.ones(1, 1, 1, 64, dtype=torch.bool)
    device = attention_rows(query.cuda(), key.cuda(), visible.cuda(), 0.25)
    for one, other in zip(device, attention_rows(query, key, visible, 0.25), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("background", [None, False])
def test_a_model_on_the_device_gives_the_readings_of_one_on_the_host(background):
    readings = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model, memory = models.PlainDecoder().to(device), Memory()
        monitor = Monitor(
            model, metrics=METRICS, directory=None, sinks=[memory], tokens=128, strict=True,
            background=background, schedule=lambda step: True,
        )  # fmt: skip
        for step in range(3):
            with monitor(step):
                model(models.batch(seed=step).to(device))
        monitor.close()
        readings.append(memory.readings)
    for host, device in zip(*readings, strict=True):
        for tag in (
            "anisotropy/mean",
            "twonn/mean",
            "qk_cosine/layer_01",
            "attention_entropy/mean",
        ):
            assert device.values[tag] == pytest.approx(host.values[tag], rel=1e-2), tag


def test_training_on_the_device_is_the_same_with_and_without():
    weights = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = models.PlainDecoder(dropout=0.1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = Monitor(model, metrics=select("twonn"), directory=None, tokens=64)
        for step in range(20):
            ids = models.batch(seed=step).cuda()
            if watched:
                with monitor(step):
                    loss = model(ids).square().mean()
            else:
                loss = model(ids).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        monitor.close()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)
