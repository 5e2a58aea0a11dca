import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.monitor.planning.budget import ALWAYS_MADE, Budget


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def started(share, last=None):
    clock = Clock()
    budget = Budget(share, clock=clock)
    budget.begin(0)
    budget.expect_end(last)
    return budget, clock


def train(budget, clock, steps, *, cost, step_time=1.0, every=1):
    """Train for a number of steps, reading what is due and may be made; the steps that were."""
    made = []
    for step in range(steps):
        budget.move_to(step)
        if step % every == 0 and budget.decide(len(made)).paid:
            budget.count_reading()
            budget.spend(cost)
            clock.now += cost
            made.append(step)
        clock.now += step_time
    return made


def test_what_was_spent_before_the_first_step_is_no_part_of_the_share():
    budget = Budget(None)
    assert (budget.spent, budget.left_out) == (0, 0)
    budget.spend(100.0)
    with budget.charge():
        time.sleep(0.05)
        budget.spend(50.0)
        budget.begin(0)
        time.sleep(0.01)
    assert 0 < budget.overhead <= 1
    assert budget.spent < 0.05
    assert math.isnan(Budget(0.1).overhead)


def test_time_inside_of_a_charge_counts_once_and_what_is_left_out_not_at_all(monkeypatch):
    now = Clock()
    monkeypatch.setattr(time, "perf_counter", now)
    budget = Budget(None)
    budget.begin(0)
    now.now += 1.0
    for _ in range(2):
        with budget.charge():
            now.now += 5.0
            budget.spend(2.0)
            budget.leave_out(1.0)
            with budget.charge():
                now.now += 0.5
    assert (budget.spent, budget.left_out) == (2 * 4.5, 2.0)


@pytest.mark.parametrize("last", [None, 20, 100_000])
@pytest.mark.parametrize(("share", "made"), [(0.01, ALWAYS_MADE), (None, 20)])
def test_the_first_eight_readings_are_made_whatever_they_cost_and_all_without_a_limit(
    last, share, made
):
    budget, clock = started(share, last)
    assert budget.limited == (share is not None)
    assert train(budget, clock, 20, cost=1000.0) == list(range(made))


@settings(deadline=None, max_examples=30)
@given(
    share=st.floats(0.01, 0.3),
    cost=st.floats(0.05, 20.0),
    step_time=st.floats(0.01, 2.0),
    every=st.sampled_from([1, 7, 50]),
    known=st.booleans(),
)
def test_beyond_those_the_share_is_held_by_the_end(share, cost, step_time, every, known):
    """By a sum of the test's own: an account that forgets would say of itself that it holds."""
    steps = 2000
    budget, clock = started(share, steps if known else None)
    made = train(budget, clock, steps, cost=cost, step_time=step_time, every=every)
    spent = cost * len(made)
    assert budget.spent == pytest.approx(spent)
    assert len(made) <= ALWAYS_MADE or spent <= share * clock.now * (1 + 1e-6)
    assert budget.overhead == pytest.approx(spent / clock.now)


@settings(deadline=None, max_examples=8)
@given(share=st.floats(0.01, 0.2), cost=st.floats(0.5, 10.0))
def test_of_a_known_length_the_beginning_is_dense_and_the_end_is_not_dark(share, cost):
    steps = 20_000
    known = train(*started(share, steps), steps, cost=cost, every=5)
    elapsed = train(*started(share), steps, cost=cost, every=5)
    early = [sum(step < steps // 10 for step in made) for made in (known, elapsed)]
    assert early[0] > early[1] or early[0] == steps // 50  # all that is due
    affordable = share * steps / cost
    if len(known) > ALWAYS_MADE and affordable > 100:  # the last quarter of it comes with time
        late = sum(step > steps // 2 for step in known)
        assert late >= 0.1 * affordable


@pytest.mark.parametrize("last", [None, 40], ids=["no end", "beyond the end"])
@pytest.mark.parametrize("first", [0, 5000])
def test_a_reading_waits_until_it_and_another_one_fit(first, last):
    budget, clock = started(0.1)
    budget.begin(first)
    budget.expect_end(None if last is None else first + last)
    budget.spend(8.0)
    for _ in range(8):
        budget.count_reading()
    budget.move_to(first + 50)
    clock.now = 58.0  # a step is a second
    # 8 are spent, and two more take 10 of a tenth: 100 seconds, of which 42 are missing.
    assert budget.decide(8) == (False, 42)
    clock.now = 99.5
    assert budget.decide(8) == (False, 1)
    clock.now = 100.0
    assert budget.decide(8) == (True, 0)


def test_what_a_process_has_not_read_yet_costs_nothing_that_is_known():
    """A run that is taken up: its record holds more than eight readings."""
    budget, clock = started(0.01)
    clock.now = 1.0
    budget.spend(0.5)
    assert budget.decide(100) == (True, 0)
    budget.count_reading()
    budget.move_to(1)
    assert budget.decide(101) == (False, 298)  # 0.5 + 2 * 0.5 of a hundredth, in steps of 0.5 s


@pytest.mark.parametrize(("step", "wait"), [(9, 83), (10, 58)])
def test_from_the_tenth_step_on_the_time_to_come_counts(step, wait):
    """Three quarters of it at once: 67.5 of the 82 seconds that are missing, in quarters."""
    budget, clock = started(0.1, last=100)
    budget.spend(8.0)
    for _ in range(8):
        budget.count_reading()
    budget.move_to(step)
    clock.now = 8.0 + step
    assert budget.decide(8) == (False, wait)


@pytest.mark.parametrize("last", [None, 600])
def test_a_run_that_is_taken_up_again_counts_from_its_own_first_step(last):
    def made_from(first):
        clock = Clock()
        budget = Budget(0.1, clock=clock)
        budget.begin(first)
        budget.expect_end(None if last is None else first + last)
        steps, waits = [], []
        for step in range(600):
            budget.move_to(first + step)
            decision = budget.decide(len(steps))
            waits.append(decision.wait)
            if decision.paid:
                budget.count_reading()
                budget.spend(2.0)
                clock.now += 2.0
                steps.append(step)
            clock.now += 1.0
        return steps, waits

    assert made_from(7_000) == made_from(0)
    assert len(made_from(0)[0]) > ALWAYS_MADE
