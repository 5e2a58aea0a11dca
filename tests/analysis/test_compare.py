"""Two runs that differ: at which layer they do."""

import pytest

from geomon.analysis.differences import compare
from geomon.record import Readings
from geomon.show.comparison import describe_differences
from support.readings import reading_of

BEFORE = (0.92, 0.69, 0.67, 0.64)


def run_of(entropies, margin):
    values = {"attention_entropy_normalised/mean": sum(entropies) / len(entropies)}
    for layer, value in enumerate(entropies, 1):
        tag = f"attention_entropy_normalised/layer_{layer:02d}"
        values[tag] = value
        values |= {f"{tag}/margin": margin} if margin else {}
    if margin:
        values["attention_entropy_normalised/mean/margin"] = margin / 2
    return Readings([], [reading_of(values, 100)])


@pytest.mark.parametrize(("entropies", "margin", "said"), [
    ((0.92, 0.69, 0.05, 0.64), 0.02, "most at layer 3: 0.67 -> 0.05"),  # the mean differs
    ((0.92, 0.69, 0.05, 0.64), 0.0, "most at layer 3: 0.67 -> 0.05"),  # its error is unknown
    ((0.99, 0.90, 0.05, 0.97), 0.02, "layer 3: 0.67 -> 0.05, lower by 0.62"),  # the mean agrees
    (BEFORE, 0.02, ""),
])  # fmt: skip
def test_the_layer_at_fault_is_named(entropies, margin, said):
    found = compare(run_of(BEFORE, margin), run_of(entropies, margin))
    lines = "\n".join(describe_differences(found, ("a", "b")))
    assert said in lines
    assert bool(said) == ("layer" in lines)
