"""Classes of token frequency: thirds of the rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import few_examples, generator, seeds, zipf

from geomon.kernels.frequency import frequency_classes, moments_by_frequency


@pytest.mark.parametrize("types", [40, 3000])
def test_classes_are_thirds_of_the_rows_in_the_order_of_frequency(types):
    ids = zipf(4096, types)
    classes, count = frequency_classes(ids).numpy(), np.bincount(ids.numpy())[ids.numpy()]
    assert count[classes == 0].max() < count[classes == 1].min()
    assert count[classes == 1].max() < count[classes == 2].min()
    # A level of frequency is not cut: the most frequent type is a fifth of the rows.
    sizes = np.bincount(classes, minlength=3) / 4096
    assert sizes == pytest.approx([1 / 3] * 3, abs=0.12)


def test_types_that_come_equally_often_are_in_one_class():
    assert frequency_classes(torch.arange(30) % 6).tolist() == [1] * 30
    assert frequency_classes(torch.tensor([4])).tolist() == [1]
    found = moments_by_frequency(torch.ones(30, 2), torch.arange(30) % 6)
    assert [part.rows.item() for part in found] == [0, 30, 0]
    assert found[0].norm.isnan()
    assert found[1].types.item() == 6


@few_examples
@given(seed=seeds, tokens=st.integers(1, 60), types=st.integers(1, 12))
def test_classes_follow_the_rows_and_not_their_order_or_the_names(seed, tokens, types):
    ids = zipf(tokens, types, seed)
    order = torch.randperm(tokens, generator=generator(seed))
    classes = frequency_classes(ids)
    assert torch.equal(frequency_classes(ids[order]), classes[order])
    assert torch.equal(frequency_classes(900 - 7 * ids), classes)
    assert torch.equal(frequency_classes(ids.repeat(3)), classes.repeat(3))
    assert set(classes.tolist()) <= {0, 1, 2}


def test_bad_token_ids_are_refused():
    with pytest.raises(ValueError, match="a token id for each of 3 rows, integers"):
        frequency_classes(torch.ones(3))
    with pytest.raises(ValueError, match="a token id for each of 3 rows"):
        moments_by_frequency(torch.ones(3, 2), torch.arange(4))
