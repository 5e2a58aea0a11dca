"""Readings on an accelerator; skipped if there is none."""

import gc
from contextlib import nullcontext

import pytest
import torch

from geomon import METRICS, MORE_METRICS, Memory, Monitor
from geomon.capture.attending.fused import read_sdpa
from geomon.capture.attending.max_logit import max_logits_of_call
from geomon.kernels.neighbours import nearest
from geomon.metrics import Evaluator
from geomon.record.columns import margin
from support import models
from support.whole_layer import ROWS, whole_layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def reduced_precision():
    """Round float32 products to TF32 or bfloat16, as many trainings do."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def untouched():
    """The memory of the device is what it was."""
    gc.collect()
    taken = torch.cuda.memory_allocated()
    yield
    gc.collect()
    # The libraries keep a workspace for each stream.
    assert torch.cuda.memory_allocated() <= taken + 100e6


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.usefixtures("reduced_precision", "untouched")
def test_every_metric_of_a_layer_agrees_with_the_host(by_hand):
    layer, metrics = whole_layer(by_hand=by_hand), METRICS | MORE_METRICS
    state = torch.cuda.get_rng_state()
    host, device = (
        Evaluator(metrics, 1, strict=not by_hand, keeps_arrays=True).measure_layer(one, ROWS)
        for one in (layer, layer.to(torch.device("cuda")))
    )
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert device.failed == host.failed
    assert device.without_margin == host.without_margin == {}
    assert device.parts.keys() == host.parts.keys()
    for name, parts in host.parts.items():
        of_heads = name.startswith(("attention_", "score_"))
        close = {"rel": 1e-4, "abs": 1e-5} if of_heads else {"rel": 1e-8, "abs": 1e-10}
        for part, values in parts.items():
            found = device.parts[name][part]
            assert found[:, 0] == pytest.approx(values[:, 0], nan_ok=True, **close), (name, part)
            if values.ndim == 2:
                found, want = margin(found[0, 1:]), margin(values[0, 1:])
                assert found == pytest.approx(want, rel=1e-2, abs=1e-9, nan_ok=True), (name, part)


@pytest.mark.usefixtures("reduced_precision")
def test_reduced_precision_never_enters_a_distance_or_the_largest_logit():
    rows = (normal(15, 1, 256) + 0.01 * normal(15, 40, 256, seed=1)).flatten(0, 1)
    device, host = nearest(rows.cuda(), k=4), nearest(rows, k=4)
    assert torch.equal(device.indices.cpu(), host.indices)
    torch.testing.assert_close(device.distances.cpu(), host.distances, rtol=1e-12, atol=0)
    query, key = normal(2, 4, 64, 64), normal(2, 4, 64, 64, seed=1)
    found, expected = (
        max_logits_of_call(read_sdpa(dict(zip(("query", "key"), pair, strict=True))))
        for pair in ((query.cuda(), key.cuda()), (query, key))
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


def trained(**options):
    """Readings of a short training on the device, its weights and its random state.

    It is not watched without options.
    """
    torch.manual_seed(0)
    model, memory = models.PlainDecoder(dropout=0.1).cuda(), Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = {
        "sinks": [memory], "strict": True, "metrics": METRICS, "tokens": 256, "directory": None,
        "schedule": lambda step: True, **options,
    }  # fmt: skip
    with Monitor(model, **watched) if options else nullcontext() as monitor:
        for step in range(4):
            with monitor(step) if options else nullcontext():
                loss = model(models.batch(32, seed=step).cuda()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return memory.readings, weights, torch.cuda.get_rng_state()


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("probe", [None, models.batch(32)])
def test_readings_on_the_device_are_those_on_the_host_and_the_training_is_the_same(
    background, probe
):
    _, *alone = trained()
    on_host, *host = trained(device="cpu", background=background, probe=probe)
    on_device, *device = trained(device="auto", background=background, probe=probe)
    for own, other, unwatched in zip(host, device, alone, strict=True):
        assert torch.equal(own, unwatched)
        assert torch.equal(other, unwatched)
    assert [r.step for r in on_device] == [r.step for r in on_host] == [0, 1, 2, 3]
    for host, device in zip(on_host, on_device, strict=True):
        for one, other in zip(device.notes, host.notes, strict=True):
            assert (one.kind, one.text, one.layers) == (other.kind, other.text, other.layers)
            assert one.numbers == pytest.approx(other.numbers, rel=1e-4)
        for tag, value in host.values.items():
            if tag.startswith("geomon/"):
                continue
            close = 1e-2 if tag.endswith("margin") else 1e-4
            assert device.values[tag] == pytest.approx(value, rel=close, abs=1e-5, nan_ok=True), tag


def graphed(watch, **options):
    """Losses of a training that captures its step in a CUDA graph after two steps, five times.

    A monitor is entered in the steps before each capture, and "inside" or "outside" of it as well.
    """
    torch.manual_seed(0)
    model, losses = models.PlainDecoder().cuda(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, side = models.batch(256).cuda(), torch.cuda.Stream()
    watched = {"sinks": [], "directory": None, "schedule": lambda step: True, "tokens": 2048}

    def update(step, monitor):
        with monitor(step) if monitor is not None else nullcontext():
            loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    with Monitor(model, **watched | options) if watch else nullcontext() as monitor:
        for first in range(0, 20, 4):
            side.wait_stream(torch.cuda.current_stream())
            for step in (first, first + 1):
                inputs.copy_(models.batch(256, seed=step))
                with torch.cuda.stream(side):
                    losses.append(update(step, monitor).item())
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with (
                monitor(first + 2) if watch == "outside" else nullcontext(),
                torch.cuda.graph(graph),
            ):
                loss = update(first + 2, monitor if watch == "inside" else None)
            for step in (first + 2, first + 3):
                inputs.copy_(models.batch(256, seed=step))
                graph.replay()
                losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"device": "auto"}, {"background": False}])
@pytest.mark.parametrize("watch", ["before", "inside", "outside"])
def test_a_step_that_is_captured_in_a_graph_is_the_same(watch, options):
    assert graphed(watch, **options) == graphed("")
