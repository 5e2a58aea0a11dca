import pytest

from geomon import every
from geomon.distributed.group import Ranks
from geomon.monitor.budget import Budget
from geomon.monitor.planner import Agenda


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def agenda(share=None, ranks=None, agree=lambda value: value):
    clock = Clock()
    budget = Budget(share, 1024, clock=clock)
    budget.begin()
    made = Agenda(every(10), budget, ranks or Ranks(), agree, tokens=1024, layers=lambda: 4)
    return made, budget, clock


def made_at(plan, steps, source="inline", busy=False):
    """Steps at which a reading is made, each asked about twice as the Trainer's callback does."""
    made = []
    for step in steps:
        plan.go_to(step)
        answers = [
            plan.wants(step, force=False) and plan.admits(step, source, force=False, busy=busy)
            for _ in range(2)
        ]
        assert answers[0] == answers[1]
        if answers[0]:
            plan.take(step, source)
            made.append(step)
        assert not plan.wants(step, force=False) or not plan.admits(
            step, source, force=False, busy=busy
        )
    return made


def test_what_is_due_is_made_once():
    plan, _, _ = agenda()
    assert made_at(plan, [0, 0, 1, 9, 10, 10, 11, 20]) == [0, 10, 20]


def test_a_step_that_is_jumped_over_is_made_at_the_next():
    plan, _, _ = agenda()
    assert made_at(plan, range(0, 50, 4)) == [0, 12, 20, 32, 40]
    assert made_at(plan, [95]) == [95]  # four were passed over: one reading


def test_going_to_the_same_step_is_no_step():
    plan, budget, clock = agenda(share=0.5)
    assert plan.go_to(3)
    assert not plan.go_to(3)
    budget.learn(1024, 0.1)
    clock.now = 1.0
    assert budget.rows(4) is None  # one step is known, not ten


def test_sources_are_kept_apart_and_what_is_recorded_is_not_made_again():
    plan, _, _ = agenda()
    plan.recorded = {(10, "inline")}
    assert made_at(plan, [0, 10], "inline") == [0]
    assert made_at(plan, [10], "probe") == [10]


def test_without_a_line_every_rank_makes_what_the_first_one_has_recorded():
    # Only the first rank has a record: were it alone to pass a probe over, the others would wait.
    plan, _, _ = agenda(ranks=Ranks(0, 2))
    plan.recorded = {(10, "probe")}
    assert made_at(plan, [10], "probe") == [10]


def test_what_cannot_be_paid_is_owed_until_it_can():
    plan, budget, clock = agenda(share=0.1)
    assert made_at(plan, [0]) == [0]  # what the first costs is not known
    budget.spend(1.0)
    budget.learn(1024, 0.25)
    made = []
    for step in range(1, 100):
        clock.now += 1.0
        made += made_at(plan, [step])
    # Due at 10; then 1 s is spent, and two readings of 1 s want 3 s of a tenth of the time, less a
    # fifth in reserve.
    assert made[0] == 38
    assert plan.wants(50, force=True)


def test_a_reading_that_is_not_finished_puts_the_next_off():
    plan, _, clock = agenda(share=0.1)
    clock.now = 100.0
    assert made_at(plan, [0, 10], busy=True) == []
    assert made_at(plan, [11]) == [11]


def test_forced_readings_need_no_budget_and_are_made_once():
    plan, budget, _ = agenda(share=0.01)
    budget.learn(1024, 100.0)
    assert plan.admits(7, "inline", force=True, busy=True)
    plan.take(7, "inline")
    assert not plan.admits(7, "inline", force=True, busy=True)
    assert not plan.affords_reading()


class Linked(Ranks):
    linked = True


@pytest.mark.parametrize("first", [(True, 512, 0), (False, 512, 5)])
def test_linked_ranks_do_what_the_first_one_decides(first):
    asked = []

    def agree(value):
        asked.append(value)
        return first

    plan, budget, clock = agenda(share=0.5, ranks=Linked(1, 2), agree=agree)
    clock.now = 1000.0
    budget.learn(1024, 0.01)
    assert made_at(plan, [10]) == ([10] if first[0] else [])
    assert plan.rows == 512
    if not first[0]:
        count = len(asked)
        assert made_at(plan, [11, 12, 13, 14]) == []
        assert len(asked) == count  # nothing is said before the step that the first one named
        assert made_at(plan, [15]) == []
        assert len(asked) > count
