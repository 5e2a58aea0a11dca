import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.monitor.planning.budget import Budget


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def started(share, tokens=4096):
    clock = Clock()
    budget = Budget(share, tokens, clock=clock)
    budget.begin()
    return budget, clock


def test_without_a_limit_everything_is_afforded_and_no_row_left_out():
    budget, _ = started(None)
    assert budget.affords(1e9)
    assert budget.choose_rows(12)
    assert budget.rows == 4096
    assert not budget.limited


def test_what_was_spent_before_the_first_step_is_no_part_of_the_share():
    budget = Budget(None, 4096)
    budget.spend(100.0)
    with budget.charge():
        time.sleep(0.05)
        budget.spend(50.0)
        budget.begin()
        time.sleep(0.01)
    assert 0 < budget.overhead <= 1
    assert budget.spent < 0.05


def test_nothing_is_afforded_before_time_has_passed():
    budget, clock = started(0.01)
    assert not budget.affords(0.1)
    clock.now = 10.1  # a fifth of the share is kept back
    assert not budget.affords(0.1)
    clock.now = 12.6
    assert budget.affords(0.1)
    budget.spend(0.1)
    assert not budget.affords(0.1)
    assert budget.overhead == pytest.approx(0.1 / 12.6)
    assert math.isnan(Budget(0.1, 10).overhead)


@given(
    share=st.floats(0.001, 0.2),
    costs=st.lists(st.floats(1e-4, 3.0), min_size=1, max_size=30),
    step=st.floats(1e-3, 2.0),
)
def test_who_asks_first_stays_within_the_share(share, costs, step):
    budget, clock = started(share)
    for cost in costs:
        for _ in range(1000):
            clock.now += step
            if budget.affords(cost):
                budget.spend(cost)
                clock.now += cost
                break
        assert budget.overhead <= share * (1 + 1e-9)


def test_costs_of_other_rows_are_guessed_from_the_nearest_known_and_never_too_low():
    budget, _ = started(0.01)
    assert budget.layer_cost(512) == 0
    budget.learn(512, 1.0)
    assert budget.layer_cost(1024) == 4
    assert budget.layer_cost(256) == 0.5
    budget.learn(2048, 5.0)
    assert budget.layer_cost(4096) == 20
    budget.learn(512, 2.0)
    assert budget.layer_cost(512) == 1.5


@pytest.mark.parametrize(
    ("layer_cost", "rows"), [(0.001, 4096), (0.09, 4096), (0.11, 2048), (0.3, 1024), (100.0, 256)]
)
def test_rows_are_halved_until_a_hundred_steps_pay_for_a_reading(layer_cost, rows):
    budget, clock = started(0.01)
    budget.learn(4096, layer_cost)
    for _ in range(11):
        budget.count_step()
        clock.now += 1.0
    # A step is a second: a hundred of them allow one, ten layers a tenth of it each.
    assert budget.choose_rows(10)
    assert budget.rows == rows


def test_rows_wait_until_the_time_of_a_step_is_known_and_seldom_move():
    budget, clock = started(0.01)
    budget.learn(4096, 0.3)
    assert not budget.choose_rows(10)
    assert budget.rows == 4096
    for _ in range(11):
        budget.count_step()
        clock.now += 1.0
    assert budget.choose_rows(10)
    assert budget.rows == 1024
    budget.learn(1024, 0.175)  # (0.3 / 4 is what was guessed) dearer, within the tolerance
    assert budget.choose_rows(10)
    assert budget.rows == 1024
    for _ in range(9):
        budget.learn(1024, 0.4)
    assert budget.choose_rows(10)
    assert budget.rows == 512
    for _ in range(9):
        budget.learn(512, 0.001)
        budget.learn(1024, 0.002)
    assert budget.choose_rows(10)
    assert budget.rows == 1024


def test_time_that_is_spent_adds_up():
    budget, clock = started(0.01)
    clock.now = 1000.0
    for seconds in (3.0, 1.0, 0.5):
        budget.spend(seconds)
    assert budget.spent == 4.5
    assert budget.overhead == pytest.approx(4.5e-3)


@settings(deadline=None)
@given(
    share=st.floats(0.001, 0.2),
    costs=st.lists(st.floats(1e-4, 3.0), min_size=2, max_size=30),
    step=st.floats(1e-3, 2.0),
)
def test_the_sum_of_what_was_afforded_stays_within_the_share(share, costs, step):
    """By a sum of the test's own: an account that forgets would say of itself that it holds."""
    budget, clock = started(share)
    spent = 0.0
    for cost in costs:
        for _ in range(1000):
            clock.now += step
            if budget.affords(cost):
                budget.spend(cost)
                clock.now += cost
                spent += cost
                break
        assert spent <= share * clock.now * (1 + 1e-9)
        assert budget.spent == pytest.approx(spent)


def test_a_reading_is_put_off_until_its_cost_and_a_second_one_fit():
    budget, clock = started(0.1)
    budget.learn(4096, 0.5)
    budget.learn_capture(1.0)
    budget.spend(1.0)
    for _ in range(11):
        budget.count_step()
    clock.now = 110.0  # eleven steps of ten seconds, of which a tenth is 10 a step
    # 0.08 * 110 = 8.8 is planned with; 1 is spent, and 2 * (1 + 4 * 0.5) = 6 are needed.
    assert budget.decide(4) == (True, 4096, 0)
    budget.spend(4.0)
    # 5 + 6 - 8.8 = 2.2 is missing: 27.5 seconds at 8 %, which are three steps.
    assert budget.decide(4) == (False, 4096, 3)
    assert budget.reading_cost(4) == 3.0


def test_rows_are_chosen_by_the_time_of_training_alone():
    """What geomon takes is no training: a step is half a second here, and not one."""
    budget, clock = started(0.01)
    budget.learn(4096, 0.045)  # ten layers: 0.45, of the 0.5 that a hundred steps allow
    for _ in range(11):
        budget.count_step()
    clock.now = 11.0
    budget.spend(5.5)
    assert budget.choose_rows(10)
    assert budget.rows == 4096
    other, clock = started(0.01)
    other.learn(4096, 0.055)
    for _ in range(11):
        other.count_step()
    clock.now = 11.0
    other.spend(5.5)
    assert other.choose_rows(10)
    assert other.rows == 2048


def test_a_reading_that_costs_just_what_is_allowed_keeps_its_rows():
    budget, clock = started(0.5)
    budget.learn(4096, 5.0)
    for _ in range(11):
        budget.count_step()
    clock.now = 11.0  # a hundred steps of a second allow fifty, and ten layers cost fifty
    assert budget.choose_rows(10)
    assert budget.rows == 4096
