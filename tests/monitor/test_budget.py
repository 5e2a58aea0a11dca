import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomon.monitor.budget import Budget


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
