"""The recipe's readings lie where something happens."""

import pickle
from itertools import pairwise

import pytest

from recipes.enwik8.schedule import ReadingSteps


@pytest.mark.parametrize("steps", [1, 6, 40, 300, 1500, 5000, 20_000])
def test_a_run_of_any_length_is_read_at_its_beginning_and_without_gaps(steps):
    due = [step for step in range(steps) if ReadingSteps(steps)(step)]
    assert due[0] == 0
    assert all(late <= 2 * early for early, late in pairwise(due[1:]))
    assert due[-1] >= 0.4 * steps or steps < 6


def test_it_survives_pickling_as_callbacks_do():
    assert pickle.loads(pickle.dumps(ReadingSteps(300))) == ReadingSteps(300)
