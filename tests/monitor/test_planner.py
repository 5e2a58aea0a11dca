"""When a step is read: scenarios of runs, with a clock that goes by the costs of each."""

import itertools
import math
from dataclasses import dataclass

import pytest

from geomon import every, log_spaced
from geomon.distributed import RankGroup, RanksLostError
from geomon.monitor.planner import ALWAYS_READ, Account, Due, Planner
from geomon.monitor.schedule import Schedule


class Clock:
    """A clock of seconds that goes on only if a scenario says so."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@dataclass
class Run:
    """A run in steps of one second.

    Attributes:
        steps: Number of steps.
        cost: Seconds of a reading.
        check: Seconds of a check.
        known: Whether the length of the run is known.
        begin: First step.
        compiles: Seconds that the first step takes more.
        first: Seconds that the first reading takes more.
    """

    steps: int
    cost: float
    check: float = 0.2
    known: bool = True
    schedule: Schedule | None = None
    share: float | None = 0.05
    checks: Schedule | str | None = "auto"
    begin: int = 0
    earlier: int = 0
    compiles: float = 0.0
    first: float = 0.0


@dataclass
class Course:
    """What came of a run."""

    read: list[int]
    checked: list[int]
    account: Account
    planner: Planner

    @property
    def largest_gap(self):
        return max(b - a for a, b in zip(self.read, self.read[1:], strict=False))


def follow(run, clock, group=None):
    account = Account(clock)
    planner = Planner(run.schedule, run.share, run.checks, group or RankGroup(), account,
                      source="inline")  # fmt: skip
    last = run.steps - 1
    planner.expect_end(last if run.known else None)
    account.begin()
    planner.begin(run.begin, run.earlier)
    course = Course([], [], account, planner)
    for step in range(run.begin, run.steps):
        planner.advance(step)
        due = planner.due(force=run.known and step == last)
        with account.charge():
            if due is Due.READING:
                planner.mark_read("inline")
                clock.now += run.cost + (0.0 if course.read else run.first)
                course.read.append(step)
            elif due is Due.CHECK:
                clock.now += run.check
                planner.mark_checked(run.check, again=False)
                course.checked.append(step)
        clock.now += 1.0 + (run.compiles if step == run.begin else 0.0)
    return course


def train_beside(clock, *, periods=10, first=100, slower=0.5, rare=None):
    """An account of steps of a second, in periods of 200, 60 of which have a thread beside them.

    After each seventh step the loop looks at its loss, and waits for all steps before.
    """
    account, queued = Account(clock), 0.0
    account.begin()
    for step in range(200 * periods):
        account.step(measuring=0 <= step % 200 - first < 60)
        queued += 1.0 + slower * (0 <= step % 200 - first < 60)
        if step % 7 == 6:
            clock.now, queued = clock.now + queued, 0.0
        clock.now += (rare or {}).get(step, 0.0)
    return account


@pytest.mark.parametrize("first", [0, 100])
def test_what_a_thread_takes_from_the_steps_beside_it_is_spent(clock, first):
    account = train_beside(clock, first=first)
    assert account.charged == 0
    assert account.spent == pytest.approx(300, rel=0.15)
    assert account.overhead == pytest.approx(300 / 2300, rel=0.15)


def test_steps_beside_a_reading_that_is_measured_are_those_of_the_planner(clock):
    account = Account(clock)
    planner = Planner(every(10**6), None, None, RankGroup(), account, source="inline")
    account.begin()
    planner.begin(0, 0)
    for step in range(200):
        planner.advance(step, busy=100 <= step < 150)
        clock.now += 1.5 if 100 <= step < 150 else 1.0
    assert account.spent == pytest.approx(25)


def test_first_steps_are_settled_when_others_are_known(clock):
    account = train_beside(clock, periods=1, first=0)
    assert account.spent == pytest.approx(30, abs=15)  # a look more or less


@pytest.mark.parametrize("at", [50, 120])
def test_what_is_rare_is_not_taken_for_the_thread(clock, at):
    """A checkpoint of a thousand seconds, without and with a thread beside it."""
    account = train_beside(clock, periods=2, rare={at: 1000.0})
    assert account.spent == pytest.approx(60, abs=30)


def test_a_thread_that_takes_nothing_costs_nothing(clock):
    assert train_beside(clock, slower=0.0).overhead < 0.01


# Runs without a schedule, and the fewest readings and the largest gap that they may have.
LIVE = [
    (Run(300, 2.5), 4, 252),
    (Run(1_000, 1.5), 20, 100),
    (Run(2_000, 2.5), 30, 200),
    (Run(2_000, 2.5, first=10.0), 28, 200),
    (Run(2_000, 2.5, compiles=300.0), 30, 200),
    (Run(2_000, 4.8, check=0.5), 15, 200),
    (Run(10_000, 2.5), 80, 400),
    (Run(10_000, 7.0, check=1.0), 40, 1_000),
    (Run(100_000, 1.5), 400, 2_000),
]


@pytest.mark.parametrize(("run", "fewest", "gap"), LIVE)
def test_readings_fill_their_share_of_a_run_whose_length_is_known(run, fewest, gap, clock):
    course = follow(run, clock)
    assert len(course.read) >= fewest
    assert len(course.read) <= 550
    assert course.largest_gap <= gap
    assert course.account.overhead <= 0.0501
    assert course.read[:3] == list(ALWAYS_READ)
    assert course.read[-1] == run.steps - 1
    if run.steps >= 1000 and run.cost < 7:
        assert sum(step < 128 for step in course.read) >= 4


@pytest.mark.parametrize("steps", [2_000, 10_000])
@pytest.mark.parametrize("cost", [0.5, 2.5, 4.8])
def test_a_run_of_unknown_length_is_within_its_share_at_any_end(steps, cost, clock):
    course = follow(Run(steps, cost, known=False), clock)
    assert course.account.overhead <= 0.0501
    assert course.read[:3] == list(ALWAYS_READ)
    paid = [step for step in course.read if step > 48]
    assert paid[0] <= 100 * cost + 60  # as soon as four readings are a twentieth of the time
    gaps = [b - a for a, b in zip(paid, [*paid[1:], steps], strict=True)]
    assert max(gaps) <= max(50 * cost, 0.02 * steps)


def test_the_first_readings_are_made_whatever_they_cost_and_the_last_one_where_it_is_known(clock):
    assert follow(Run(100, 50.0), clock).read == [0, 16, 48, 99]
    assert follow(Run(100, 50.0, known=False), clock).read == [0, 16, 48]
    assert follow(Run(30, 50.0), clock).read == [0, 16, 29]


@pytest.mark.parametrize(
    ("dear", "cost"), [((8,), 12), ((12,), 12), ((3,), 20), ((8,), 20), ((5, 6), 12), ((8, 9), 12)]
)
def test_readings_that_were_dear_leave_no_hole_in_a_run_that_can_pay_for_it(dear, cost, clock):
    account = Account(clock)
    planner = Planner(None, 0.05, None, RankGroup(), account, source="inline")
    planner.expect_end(1_999)
    account.begin()
    planner.begin(0, 0)
    read = []
    for step in range(2_000):
        planner.advance(step)
        with account.charge():
            if planner.due(force=step == 1_999) is Due.READING:
                planner.mark_read("inline")
                clock.now += cost if len(read) in dear else 4.0
                read.append(step)
        clock.now += 1.0
    assert max(b - a for a, b in itertools.pairwise(read)) <= 200
    assert account.overhead <= 0.0505


def test_a_run_that_begins_late_has_its_first_readings_from_there(clock):
    assert follow(Run(1_100, 50.0, begin=1_000), clock).read == [1000, 1016, 1048, 1099]
    resumed = follow(Run(1_100, 50.0, begin=1_000, earlier=20), clock)
    assert resumed.read == [1000, 1099]  # what a reading costs in this process is not known before


def test_a_resumed_run_spreads_its_readings_over_what_is_left(clock):
    course = follow(Run(2_000, 2.5, begin=1_000, earlier=20), clock)
    assert course.account.overhead <= 0.0501
    assert len(course.read) >= 14
    assert course.largest_gap <= 120


def test_checks_take_a_hundredth_of_the_time_and_begin_at_step_32(clock):
    course = follow(Run(2_000, 0.0, check=2.0, schedule=every(10_000), share=None), clock)
    assert course.checked[0] == 32
    assert 2.0 * len(course.checked) <= 0.011 * clock.now
    spaces = {b - a for a, b in zip(course.checked[1:], course.checked[2:], strict=False)}
    assert spaces <= {197, 198, 199, 200}


@pytest.mark.parametrize(
    ("run", "least", "most"),
    [
        (Run(2_000, 4.8), 0.009, 0.011),  # forty readings would take a tenth of the time
        (Run(10_000, 2.5), 0.025, 0.031),
        (Run(10_000, 2.5, known=False), 0.015, 0.031),
        (Run(10_000, 2.5, share=0.01), 0.0019, 0.0062),
        (Run(10_000, 2.5, share=None, schedule=every(100)), 0.009, 0.011),
    ],
)
def test_checks_get_what_forty_readings_leave_of_the_share(run, least, most, clock):
    course = follow(run, clock)
    share = run.check * len(course.checked) / clock.now
    assert least <= share <= most
    assert run.share is None or course.account.overhead <= 1.002 * run.share


def test_a_check_that_was_asked_for_asks_for_no_other():
    """A run in which every value is strange has two checks where it had one."""
    planner = Planner(every(10_000), None, every(100), RankGroup(), Account(), source="inline")
    planner.begin(0, 0)
    made = []
    for step in range(1000):
        planner.advance(step)
        if planner.due() is Due.CHECK:
            planner.mark_checked(0.1, again=True)
            assert planner.due() is Due.NOTHING
            made.append(step)
    assert made == [1, *(step + second for step in range(100, 1000, 100) for second in (0, 1))][1:]


def test_a_schedule_is_followed_and_what_it_costs_is_no_matter(clock):
    course = follow(Run(100, 50.0, schedule=every(10), share=None), clock)
    assert course.read == [*range(0, 100, 10), 99]
    assert course.planner.left_out == 0


@pytest.mark.parametrize("known", [True, False])
def test_what_a_budget_leaves_out_of_a_schedule_is_counted(known, clock):
    run = Run(2_000, 2.5, known=known, schedule=every(10), share=0.05)
    course = follow(run, clock)
    assert course.account.overhead <= 0.0501
    assert course.read[:3] == [0, 10, 20]
    assert course.planner.left_out == 200 - len(course.read)  # a forced one is the one put off
    assert course.largest_gap <= (200 if known else 400)


def planned(schedule=None, share=None, **options):
    planner = Planner(schedule or every(10), share, None, RankGroup(), Account(),
                      source=options.get("source", "inline"))  # fmt: skip
    planner.begin(0, 0)
    return planner


def made_at(planner, steps, source="inline"):
    """Steps at which a reading is made, each asked about twice."""
    made = []
    for step in steps:
        planner.advance(step)
        assert planner.due(source) is planner.due(source)
        if planner.due(source) is Due.READING:
            planner.mark_read(source)
            made.append(step)
        assert planner.due(source) is not Due.READING
    return made


def test_what_is_due_is_made_once():
    assert made_at(planned(), [0, 0, 1, 9, 10, 10, 11, 20]) == [0, 10, 20]


def test_a_step_that_is_jumped_over_is_made_at_the_next():
    planner = planned()
    assert made_at(planner, range(0, 50, 4)) == [0, 12, 20, 32, 40]
    assert made_at(planner, [95]) == [95]  # four were passed over: one reading


def test_of_a_long_jump_the_last_steps_are_asked_about():
    asked = []
    planner = planned(schedule=lambda step: asked.append(step) is not None)
    planner.advance(0)
    planner.advance(50_000)
    assert asked == [*range(40_000, 50_001)]


def test_sources_are_kept_apart_and_a_forced_reading_is_made_at_any_step():
    planner = planned(source="probe")
    planner.advance(10)
    assert planner.due("inline") is Due.NOTHING
    assert planner.due("probe") is Due.READING
    planner.mark_read("probe")
    assert planner.due("probe", force=True) is Due.NOTHING
    assert planner.due("inline", force=True) is Due.READING
    planner.advance(11)
    assert planner.due("probe") is Due.NOTHING
    assert planner.due("probe", force=True) is Due.READING


def test_an_alert_has_the_next_step_read_whatever_the_schedule_and_the_share_say(clock):
    live = Planner(None, 0.001, None, RankGroup(), Account(clock), source="inline")
    for planner in (planned(every(10)), planned(every(10), share=0.001), live):
        made_at(planner, range(100))
        planner.owe()
        clock.now += 1.0
        assert made_at(planner, [101, 102]) == [101]


def test_a_training_that_goes_back_is_read_again(clock):
    planner = planned(every(10))
    assert made_at(planner, range(45)) == [0, 10, 20, 30, 40]
    planner.rewind(15)
    assert made_at(planner, range(15, 45)) == [20, 30, 40]


def test_while_a_reading_is_measured_no_other_is_made(clock):
    planner = Planner(None, 0.05, None, RankGroup(), Account(), source="inline")
    planner.begin(0, 0)
    planner.advance(0, busy=True)
    assert planner.due() is Due.NOTHING


class Meeting:
    """The second of two connected ranks: the first one decides by its own clock."""

    connected, members, size = True, 2, 2

    def __init__(self, decisions):
        self.decisions = decisions
        self.met = []

    def meet(self, step, decision):
        self.met.append(step)
        if self.decisions is None:
            raise RanksLostError("no answer")
        return [self.decisions.get(step, decision._replace(is_made=False, wait=7)), decision]


def test_connected_ranks_do_as_the_first_one_says_and_meet_where_it_says(clock):
    yes = Planner(None, 0.05, None, RankGroup(), Account(), source="inline")._decide(0)
    assert yes.is_made
    group = Meeting({0: yes._replace(wait=5), 5: yes._replace(wait=3)})
    planner = Planner(None, 0.05, None, group, Account(), source="inline")
    planner.begin(0, 0)
    assert made_at(planner, range(30)) == [0, 5]
    assert group.met == [0, 5, 8, 15, 22, 29]
    planner.owe()  # would be this rank's alone
    assert made_at(planner, range(30, 36)) == []


def test_a_rank_that_is_lost_leaves_nothing_due(clock):
    planner = Planner(None, 0.05, None, Meeting(None), Account(), source="inline")
    planner.begin(0, 0)
    with pytest.raises(RanksLostError):
        planner.advance(0)
    assert planner.due() is Due.NOTHING


def test_without_a_limit_a_schedule_of_ranks_needs_no_meeting():
    group = Meeting(None)
    planner = Planner(log_spaced(), None, None, group, Account(), source="inline")
    planner.begin(0, 0)
    assert made_at(planner, range(64)) == [0, 32, 45]


def test_the_account_counts_what_overlaps_once_and_what_is_left_out_not(clock):
    account = Account(clock)
    assert math.isnan(account.overhead)
    with account.charge():
        clock.now += 4.0  # before the training
        account.begin()
        clock.now += 1.0
        with account.charge():
            clock.now += 2.0
            account.leave_out(0.5)
    clock.now += 1.5
    assert account.spent == 2.5
    assert account.overhead == 2.5 / 4.5
