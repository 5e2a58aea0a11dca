"""Values do not depend on settings of the training that round the factors of products."""

import pytest
from short_products import ShortProducts
from whole_layer import ROWS, whole_layer

from geomon import METRICS, MORE_METRICS
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
