import itertools
import pickle
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon import Monitor, every, log_spaced
from support.models import PlainDecoder


def fired(schedule, stop):
    return [step for step in range(stop) if schedule(step)]


@settings(deadline=None, max_examples=25)
@given(per_octave=st.integers(1, 8), at_most=st.integers(1, 500))
def test_log_spaced_starts_at_zero_and_never_goes_dark(per_octave, at_most):
    steps = fired(log_spaced(per_octave, at_most, first=1), 3000)
    assert steps[0] == 0
    assert {2**power for power in range(11)} <= set(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) <= at_most


def test_log_spaced_is_even_on_a_log_axis():
    steps = fired(log_spaced(per_octave=4, at_most=10**9, first=1), 5000)
    late = [b / a for a, b in itertools.pairwise(steps) if a > 100]
    assert all(abs(ratio - 2**0.25) < 0.02 for ratio in late)


def test_multiples_are_read_only_where_the_other_steps_lie_apart():
    steps = fired(log_spaced(per_octave=4, at_most=1000), 8001)
    assert 1000 not in steps
    others = fired(log_spaced(per_octave=4, at_most=10**9), 8001)
    assert set(steps) - set(others) == {6000, 7000, 8000}


def test_schedules_survive_pickling_and_say_what_they_are():
    again = pickle.loads(pickle.dumps(log_spaced(2, at_most=50)))
    assert again == log_spaced(2, at_most=50)
    assert repr(every(7)) == "every(steps=7)"
    assert len({every(7), every(7), log_spaced(), log_spaced(2)}) == 2


@pytest.mark.parametrize("steps", [0, -1, 2.5, "10"])
def test_bad_numbers_are_refused(steps):
    with pytest.raises(ValueError, match="1 or more"):
        every(steps)
    for name in ("per_octave", "at_most", "first"):
        with pytest.raises(ValueError, match=f"log_spaced: {name} must be .*1 or more"):
            log_spaced(**{name: steps})


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda step: False, "fires at none of the steps"),
        (lambda step: step == 100_001, "fires at none of the steps"),
        ("100", "expected a function"), (True, "expected a function"), (0, "expected a function"),
        (lambda step: step == 100_000, None), (1, None),
    ],
)  # fmt: skip
def test_a_schedule_that_never_fires_is_refused(schedule, words):
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        Monitor(PlainDecoder(), directory=None, schedule=schedule)


@pytest.mark.parametrize("first", [1, 2, 3, 16, 100])
def test_readings_before_the_first_step_are_left_out_and_the_others_are_the_same(first):
    dense, later = (fired(log_spaced(first=each), 3000) for each in (1, first))
    assert later == [step for step in dense if step == 0 or step >= first]
