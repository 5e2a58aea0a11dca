"""Values do not depend on settings of the training that round the factors of products."""

import pytest
import torch
from short_products import ShortProducts
from whole_layer import ROWS, normal, whole_layer

from geomon import METRICS, MORE_METRICS
from geomon.kernels.neighbours import nearest
from geomon.kernels.spectrum import spectrum
from geomon.metrics import Evaluator
from geomon.metrics.jackknife import margin

ALL = METRICS | MORE_METRICS


@pytest.mark.parametrize("by_hand", [False, True])
def test_every_metric_is_the_same(by_hand):
    evaluator = Evaluator(ALL, 1, strict=not by_hand)
    plain = evaluator.measure_layer(whole_layer(by_hand=by_hand), ROWS)
    with ShortProducts():
        short = evaluator.measure_layer(whole_layer(by_hand=by_hand), ROWS)
    assert short.parts.keys() == plain.parts.keys()
    for name, splits in plain.parts.items():
        for part, value in splits[0].items():
            assert short.parts[name][0][part] == pytest.approx(
                value, rel=1e-6, abs=1e-7, nan_ok=True
            ), (name, part)
    for name, parts in plain.without.items():
        for part, values in parts.items():
            found, expected = margin(short.without[name][part]), margin(values)
            # In float32 in part: a margin needs few digits.
            assert found == pytest.approx(expected, rel=1e-2, abs=1e-9, nan_ok=True), (name, part)


def test_settings_of_the_new_interface_end_nothing():
    rows = normal(300, 40)
    plain = spectrum(rows)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert torch.equal(spectrum(rows), plain)
        nearest(rows, k=4)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
