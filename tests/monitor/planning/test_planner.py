import pytest

from geomon import every
from geomon.distributed import RankGroup, RanksLostError
from geomon.monitor.planning.budget import ALWAYS_MADE, Budget, Decision
from geomon.monitor.planning.planner import ReadingPlanner


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make_planner(share=None, group=None, source="inline", schedule=None):
    clock = Clock()
    budget = Budget(share, clock=clock)
    budget.begin(0)
    planner = ReadingPlanner(schedule or every(10), budget, group or RankGroup(), source=source)
    return planner, budget, clock


def made_at(planner, steps, source="inline", busy=False):
    """Steps at which a reading is made, each asked about twice as the Trainer's callback does."""
    made = []
    for step in steps:
        if planner.advance(step):
            planner.settle(busy=busy)
            assert not planner.advance(step)
        answers = [planner.is_due(step, source, force=False) for _ in range(2)]
        assert answers[0] == answers[1]
        if answers[0]:
            planner.mark_read(step, source)
            made.append(step)
        assert not planner.is_due(step, source, force=False)
    return made


def test_steps_long_ago_are_forgotten():
    planner, *_ = make_planner()
    for step in range(10_001):
        planner.mark_read(step, "inline")
    assert [planner.is_read(step, "inline") for step in (0, 1, 10_000)] == [False, True, True]


def test_what_is_due_is_made_once():
    planner, _, _ = make_planner()
    assert made_at(planner, [0, 0, 1, 9, 10, 10, 11, 20]) == [0, 10, 20]


def test_a_step_that_is_jumped_over_is_made_at_the_next():
    planner, _, _ = make_planner()
    assert made_at(planner, range(0, 50, 4)) == [0, 12, 20, 32, 40]
    assert made_at(planner, [95]) == [95]  # four were passed over: one reading


def test_of_a_long_jump_the_last_steps_are_asked_about():
    asked = []
    planner, *_ = make_planner(schedule=lambda step: asked.append(step) is not None)
    planner.advance(0)
    planner.advance(50_000)
    assert asked == [*range(40_000, 50_001)]


def test_what_is_due_between_the_last_watched_step_and_the_first_is_owed():
    planner, _, _ = make_planner()
    planner.resume(9)
    assert made_at(planner, [12, 13]) == [12]
    planner, _, _ = make_planner()
    planner.resume(11)
    assert made_at(planner, [12, 13, 20]) == [20]


def test_sources_are_kept_apart_and_what_is_recorded_is_not_made_again():
    planner, _, _ = make_planner()
    planner.skip_recorded({(10, "inline")})
    assert made_at(planner, [0, 10], "inline") == [0]
    planner, _, _ = make_planner(source="probe")
    planner.skip_recorded({(10, "inline")})
    assert made_at(planner, [10], "probe") == [10]


def test_ranks_that_are_not_connected_make_what_the_first_one_has_recorded():
    # Only the first rank has a record: were it alone to pass a probe over, the others would wait.
    planner, _, _ = make_planner(group=RankGroup(0, 2), source="probe")
    planner.skip_recorded({(10, "probe")})
    assert planner.is_recorded(10, "probe")
    assert made_at(planner, [10], "probe") == [10]


def test_what_cannot_be_paid_is_owed_until_it_can():
    planner, budget, clock = make_planner(share=0.1)
    made = []
    for step in range(200):
        if now := made_at(planner, [step]):
            budget.spend(2.0)
            made += now
        clock.now += 1.0
    # Eight in any case. Then 16 s are spent, and two readings of 2 s want a tenth of 200 s.
    assert made == [*range(0, 80, 10)]
    clock.now = 200.0
    assert made_at(planner, [201]) == [201]  # owed since step 80
    assert planner.is_due(200, "inline", force=True)


def test_where_the_end_is_known_more_are_made_early():
    made = []
    for last in (None, 1000):
        planner, budget, clock = make_planner(share=0.1)
        budget.expect_end(last)
        made.append(0)
        for step in range(300):
            clock.now = float(step)
            if made_at(planner, [step]):
                budget.spend(2.0)
                made[-1] += 1
    assert made[1] > made[0] > ALWAYS_MADE


def test_readings_of_an_earlier_start_are_among_the_first_eight():
    planner, budget, clock = make_planner(share=0.01)
    planner.skip_recorded({(step, "inline") for step in (*range(1, ALWAYS_MADE), 20)})
    assert made_at(planner, [10]) == [10]  # what the first one costs is not known
    budget.spend(1.0)
    assert made_at(planner, [11, 20, 21]) == []
    clock.now = 1000.0
    assert made_at(planner, [22]) == []  # nothing was due, or it is recorded
    clock.now = 0.0
    assert made_at(planner, [30, 40]) == []


def test_a_reading_that_is_not_finished_puts_the_next_off():
    planner, _, clock = make_planner(share=0.1)
    clock.now = 100.0
    assert made_at(planner, [0, 10], busy=True) == []
    assert made_at(planner, [11]) == [11]


def test_forced_readings_need_no_budget_and_are_made_once():
    planner, _, _ = make_planner(share=0.01)
    planner.advance(7)
    planner.settle(busy=True)
    assert planner.is_due(7, "inline", force=True)
    planner.mark_read(7, "inline")
    assert not planner.is_due(7, "inline", force=True)


class FirstRank(RankGroup):
    """The second of two ranks; the first one decides as the test says."""

    def __init__(self, decision):
        super().__init__(1, 2, process_group=object())
        self.decision, self.asked = decision, []

    def meet(self, step, value):
        assert isinstance(value, Decision)  # one's own, which does not count
        self.asked.append(step)
        if self.decision is None:
            raise RanksLostError("no answer")
        return [self.decision, value]


def test_where_no_decision_comes_nothing_is_read():
    planner, *_ = make_planner(share=0.5, group=FirstRank(None))
    planner.advance(10)
    with pytest.raises(RanksLostError):
        planner.settle(busy=False)
    assert not planner.is_due(10, "inline", force=False)


@pytest.mark.parametrize("decision", [Decision(True, 0), Decision(False, 5)])
def test_connected_ranks_do_what_the_first_one_decides(decision):
    group = FirstRank(decision)
    planner, _, clock = make_planner(share=0.5, group=group)
    clock.now = 1000.0
    assert made_at(planner, [10]) == ([10] if decision.paid else [])
    if not decision.paid:
        # Nothing is exchanged before the step that the first one named.
        assert made_at(planner, [11, 12, 13, 14, 15]) == []
        assert group.asked == [10, 15]
