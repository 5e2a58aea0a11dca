"""Metrics that compare a layer with itself at the reading before.

What is kept of each layer outlives its reading, so that the next one of the same tokens can be
compared with it: a probe looks at the same tokens at every reading, and nothing else does.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from geomon.metrics.between_layers import (
    NEAR_VIEWS,
    Comparing,
    Comparison,
    compare_near_rows,
    keep_near_rows,
    with_comparison,
)
from geomon.metrics.layer_values import LayerValues
from geomon.metrics.views import MissingViewError, renamed
from geomon.record import tags

# What a metric kept of each split of the rows: by stack and depth of the layer, and by metric.
Kept = Mapping[tuple[str, int], Mapping[str, list[Any]]]

_READING_BEFORE = "this layer at the reading before"
_NOT_KEPT = "the reading before has nothing of this layer to compare with"
_UNKNOWN_TOKENS = (
    "the model has no token ids by which these inputs are known to be those of the reading before: "
    "give fixed inputs to the monitor, Monitor(model, probe=inputs)"
)


class EarlierReading(NamedTuple):
    """What a reading is compared with.

    Attributes:
        kept: What each metric kept of each layer.
        steps: Number of steps from that reading to this one.
        same_inputs: Whether both are known to be of the same inputs, so that tokens without ids are
            the same tokens too.
        why_none: Why there can be no earlier reading; "" where there is one.
    """

    kept: Kept
    steps: int = 0
    same_inputs: bool = False
    why_none: str = ""


# Of one reading by itself, and of readings whose tokens are others each time.
ALONE = EarlierReading({}, why_none="it compares readings of a probe, and this is one by itself")
INLINE = EarlierReading(
    {},
    why_none="inline readings look at other tokens each time: give fixed inputs, probe=inputs",
)


class BetweenReadings(Comparing):
    """A metric that compares each layer with itself at the reading before, of the same probe.

    The first reading has no value of it.
    """


def compare_readings(
    name: str,
    metric: BetweenReadings,
    layers: Sequence[LayerValues],
    earlier: EarlierReading,
    *,
    strict: bool,
) -> list[LayerValues]:
    """Compare what a metric kept of each layer with what it kept at the earlier reading."""

    def compared(layer: LayerValues) -> list[Comparison]:
        if earlier.why_none:
            raise MissingViewError(earlier.why_none)
        if not (layer.has_token_ids or earlier.same_inputs):
            raise MissingViewError(_UNKNOWN_TOKENS)
        before = earlier.kept.get((layer.stack, layer.index), {}).get(name)
        if before is None:
            raise MissingViewError(_NOT_KEPT)
        found = [metric.compare(*pair) for pair in zip(before, layer.kept[name], strict=False)]
        steps = {tags.STEPS: float(earlier.steps)}
        return [Comparison(one.parts | steps, one.without) for one in found]

    return [
        with_comparison(name, layer, partial(compared, layer), strict=strict) for layer in layers
    ]


neighbour_overlap_in_time = BetweenReadings(
    renamed(keep_near_rows, *NEAR_VIEWS, "token_labels", "groups"),
    partial(compare_near_rows, earlier=_READING_BEFORE),
)
