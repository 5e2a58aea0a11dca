"""A quick part of the campaigns that `python -m benchmarks.fuzz` runs whole."""

import numpy as np
import pytest

from benchmarks import fuzz
from geomon import geometry


@pytest.mark.parametrize("seed", range(0, 40, 10))
@pytest.mark.filterwarnings("ignore")
def test_random_rows_agree_with_direct_differences(seed):
    assert [fuzz.check_rows(one) for one in range(seed, seed + 10)] == [[]] * 10


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.filterwarnings("ignore")
def test_random_models_agree_with_a_forward_written_out(seed):
    assert fuzz.check_model(seed) == []


def test_a_wrong_value_is_found():
    rows = np.random.default_rng(0).standard_normal((60, 4))
    expected = fuzz.expected_of_rows(rows, None, None)
    values = dict(geometry(rows, metrics=fuzz.OF_ROWS))
    assert fuzz.compare(values, expected, 0, 1e-8, expected["variance"]) == []
    for tag in ("twonn", "gride/k4", "anisotropy", "cosine"):
        wrong = fuzz.compare(values | {tag: values[tag] + 1e-4}, expected, 0, 1e-8, 1.0)
        assert wrong[0].startswith(tag)
        lost = {name: value for name, value in values.items() if name != tag}
        assert fuzz.compare(lost, expected, 0, 1e-8, 1.0) == [f"{tag} is not there"]


def test_a_value_that_no_note_names_is_found():
    values = geometry(np.ones((9, 3)))
    assert fuzz.unnamed(values) == []
    values.notes = ()
    assert {"anisotropy", "twonn"} <= set(fuzz.unnamed(values))
