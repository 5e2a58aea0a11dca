"""Metrics on an accelerator, or where products are rounded: the values are the same.

The device is pretended (support/hardware.py); tests/test_cuda.py has a real one, where there is.
"""

import contextlib
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from geomon import METRICS, MORE_METRICS
from geomon.metrics import Evaluator, check_metrics
from support.hardware import DEVICE, Accelerator, ShortProducts
from support.measuring import margin
from support.whole_layer import ROWS, whole_layer

ALL = METRICS | MORE_METRICS


def put(layer, accelerator):
    moved = {
        name: accelerator.put(value) if isinstance(value, torch.Tensor) else value
        for name, value in layer.captured.items()
    }
    return replace(layer, captured=moved)


@functools.cache
def measured(where):
    """Values of a layer on the host, on a device, or where products round their factors."""
    evaluator = Evaluator(ALL, 1, strict=True, keeps_arrays=True)
    with Accelerator() if where == "device" else contextlib.nullcontext() as accelerator:
        layer = put(whole_layer(), accelerator) if accelerator else whole_layer()
        with ShortProducts() if where == "short products" else contextlib.nullcontext():
            return evaluator.measure_layer(layer, ROWS)


@pytest.mark.parametrize("where", ["device", "short products"])
@pytest.mark.parametrize("name", ALL)
def test_a_metric_is_that_of_rows_on_the_host(name, where):
    host, device = (measured(each).parts[name] for each in ("host", where))
    # Scores are float32: their products are added up in float64 on a device.
    of_heads = name.startswith(("attention_", "score_"))
    close = {"rtol": 1e-6, "atol": 1e-7} if of_heads else {"rtol": 1e-9, "atol": 1e-12}
    assert host.keys() == device.keys()
    for part, values in host.items():
        np.testing.assert_allclose(device[part][:, 0], values[:, 0], **close)
        if values.ndim == 2:  # in float32 in part: a margin needs few digits
            of_host, of_device = (margin(each[0, 1:]) for each in (values, device[part]))
            np.testing.assert_allclose(of_device, of_host, rtol=1e-2, atol=1e-9)


def test_arrays_of_rows_on_a_device_are_those_of_rows_on_the_host():
    on_host, on_device = measured("host").arrays, measured("device").arrays
    assert on_host.keys() == on_device.keys()
    for name, array in on_host.items():
        np.testing.assert_allclose(on_device[name], array, rtol=1e-3, atol=1e-6)


def test_metrics_are_called_with_views_on_the_device_of_the_rows():
    kinds = set()

    def own(hidden, token_ids, projected_query, query, scores, spectrum, neighbours, axes):
        given = (hidden, token_ids, projected_query, query, scores, spectrum, neighbours, *axes)
        kinds.update(each.device for each in given)
        return hidden.mean()

    with Accelerator() as accelerator:
        layer = put(whole_layer(), accelerator)
        layer.captured["scores"] = whole_layer(by_hand=True).captured["scores"].to(DEVICE)
        Evaluator(check_metrics({"own": own}), 1, strict=True).measure_layer(layer, ROWS)
    assert kinds == {DEVICE}
