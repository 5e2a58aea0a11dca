"""When a step is read: scenarios of runs, with a clock that goes by the costs of each."""

import itertools
import math
from types import SimpleNamespace

import pytest

from geomon import every, log_spaced
from geomon.distributed import RankGroup, RanksLostError
from geomon.monitor.planner import ALWAYS_READ, Account, Due, Planner


class Clock:
    """A clock of seconds that goes on only if a scenario says so."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


# A run in steps of one second, and what has to come of it.
RUN = {
    "check": 0.2,  # seconds of a check
    "known": True,  # whether the length of the run is known
    "schedule": None,
    "share": 0.05,
    "checks": "auto",
    "begin": 0,  # first step
    "earlier": 0,
    "compiles": 0.0,  # seconds that the first step takes more
    "dear": {},  # seconds of some readings, by their number
    "reads": None,  # all steps that are read
    "first": None,  # the first of them
    "fewest": 0,  # fewest readings
    "gap": math.inf,  # largest gap between two of them
    "checks_take": (0, 1),  # least and largest share of the time that checks take
}
LIVE = {"steps": 2_000, "cost": 2.5, "first": list(ALWAYS_READ), "gap": 200}
DEAR = dict(LIVE, cost=4.0, checks=None, first=None)
RUNS = {
    "short": dict(LIVE, steps=300, fewest=4, gap=252),
    "of a thousand steps": dict(LIVE, steps=1_000, cost=1.5, fewest=20, gap=100),
    "of two thousand": dict(LIVE, fewest=30),
    "the first reading is dear": dict(LIVE, dear={0: 12.5}, fewest=28),
    "the first step compiles": dict(LIVE, compiles=300.0, fewest=30),
    "dear readings": dict(LIVE, cost=4.8, check=0.5, fewest=15, checks_take=(0.009, 0.011)),
    "long": dict(LIVE, steps=10_000, fewest=80, gap=400, checks_take=(0.025, 0.031)),
    "long and dear": dict(LIVE, steps=10_000, cost=7.0, check=1.0, fewest=40, gap=1_000),
    "very long": dict(LIVE, steps=100_000, cost=1.5, fewest=400, gap=2_000),
    "a small share": dict(LIVE, steps=10_000, share=0.01, gap=2_000, checks_take=(0.0019, 0.0062)),
    **{
        f"of {steps} steps, nobody knows, {cost}": dict(
            LIVE,
            steps=steps,
            cost=cost,
            known=False,
            gap=max(50 * cost, 0.02 * steps, 60 + 99 * cost),
        )
        for steps in (2_000, 10_000)
        for cost in (0.5, 2.5, 4.8)
    },
    "checks of a run of unknown length": dict(
        LIVE, steps=10_000, known=False, gap=400, checks_take=(0.015, 0.031)
    ),
    "only the first are paid for, and the last": dict(
        RUN, steps=100, cost=50.0, reads=[0, 16, 48, 99]
    ),
    "only the first are paid for": dict(RUN, steps=100, cost=50.0, known=False, reads=[0, 16, 48]),
    "it ends before the third": dict(RUN, steps=30, cost=50.0, reads=[0, 16, 29]),
    "begins late": dict(RUN, steps=1_100, cost=50.0, begin=1_000, reads=[1000, 1016, 1048, 1099]),
    "goes on, and no cost is known": dict(
        RUN, steps=1_100, cost=50.0, begin=1_000, earlier=20, reads=[1000, 1099]
    ),
    "goes on": dict(RUN, steps=2_000, cost=2.5, begin=1_000, earlier=20, fewest=14, gap=120),
    **{
        f"readings {dear} cost {cost}": dict(DEAR, dear=dict.fromkeys(dear, cost))
        for dear, cost in [
            ((8,), 12),
            ((12,), 12),
            ((3,), 20),
            ((8,), 20),
            ((5, 6), 12),
            ((8, 9), 12),
        ]
    },
    "a schedule, whatever it costs": dict(
        RUN, steps=100, cost=50.0, schedule=every(10), share=None, reads=[*range(0, 100, 10), 99]
    ),
    "checks beside a schedule": dict(
        RUN, steps=10_000, cost=2.5, schedule=every(100), share=None, checks_take=(0.009, 0.011)
    ),
    "a schedule within a share": dict(LIVE, schedule=every(10), first=[0, 10, 20]),
    "a schedule within a share, nobody knows": dict(
        LIVE, schedule=every(10), known=False, first=[0, 10, 20], gap=400
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_readings_and_checks_fill_their_share_of_a_run(name, clock):
    run, account = SimpleNamespace(**RUN | RUNS[name]), Account(clock)
    planner = Planner(
        run.schedule, run.share, run.checks, RankGroup(), account, source="inline"
    )  # fmt: skip
    last, read, checked = run.steps - 1, [], []
    planner.expect_end(last if run.known else None)
    account.begin()
    planner.begin(run.begin, run.earlier)
    for step in range(run.begin, run.steps):
        planner.advance(step)
        due = planner.due(force=run.known and step == last)
        with account.charge():
            if due is Due.READING:
                planner.mark_read("inline")
                clock.now += run.dear.get(len(read), run.cost)
                read.append(step)
            elif due is Due.CHECK:
                clock.now += run.check
                planner.mark_checked(run.check)
                checked.append(step)
        clock.now += 1.0 + (run.compiles if step == run.begin else 0.0)
    if run.share is not None and run.reads is None:
        assert account.overhead <= 1.01 * run.share
    assert run.reads in (None, read)
    assert run.first in (None, read[:3])
    assert run.fewest <= len(read) <= 550
    assert max(b - a for a, b in itertools.pairwise(read)) <= run.gap
    assert run.checks_take[0] <= run.check * len(checked) / clock.now <= run.checks_take[1]
    assert run.checks is None or not checked or checked[0] >= 32
    if name == "of two thousand":
        assert sum(step < 128 for step in read) >= 4
    if run.schedule == every(10):  # a forced one is the one put off
        assert planner.left_out == (0 if run.share is None else 200 - len(read))


def test_checks_alone_begin_at_step_32_and_are_evenly_spaced(clock):
    account = Account(clock)
    planner = Planner(every(10_000), None, "auto", RankGroup(), account, source="inline")
    account.begin()
    planner.begin(0, 0)
    checked = []
    for step in range(2_000):
        planner.advance(step)
        if planner.due() is Due.CHECK:
            with account.charge():
                clock.now += 2.0
            planner.mark_checked(2.0)
            checked.append(step)
        clock.now += 1.0
    assert checked[0] == 32
    assert {b - a for a, b in itertools.pairwise(checked[1:])} <= {197, 198, 199, 200}


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


@pytest.mark.parametrize(
    ("run", "spent", "within"),
    [
        ({"first": 0}, 300, 45),
        ({"first": 100}, 300, 45),
        ({"periods": 1, "first": 0}, 30, 15),  # settled when others are known
        ({"periods": 2, "rare": {50: 1000.0}}, 60, 30),  # a checkpoint of a thousand seconds
        ({"periods": 2, "rare": {120: 1000.0}}, 60, 30),  # with a thread beside it
        ({"slower": 0.0}, 0, 20),
    ],
)
def test_what_a_thread_takes_from_the_steps_beside_it_is_spent(clock, run, spent, within):
    account = train_beside(clock, **run)
    assert account.charged == 0
    assert account.spent == pytest.approx(spent, abs=within)
    assert account.overhead == pytest.approx(account.spent / clock.now)


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


# -- one step after another ------------------------------------------------------------------------


def planned(schedule=None, share=None, checks=None, group=None, source="inline"):
    planner = Planner(schedule, share, checks, group or RankGroup(), Account(), source=source)
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


class Meeting:
    """The second of two connected ranks: the first one decides by its own clock."""

    connected, members, size = True, 2, 2

    def __init__(self, decisions):
        self.decisions, self.met = decisions, []

    def meet(self, step, decision):
        self.met.append(step)
        if self.decisions is None:
            raise RanksLostError("no answer")
        return [self.decisions.get(step, decision._replace(is_made=False, wait=7)), decision]


@pytest.mark.parametrize(
    ("options", "steps", "made"),
    [
        ({"schedule": every(10)}, [0, 0, 1, 9, 10, 10, 11, 20], [0, 10, 20]),  # once
        ({"schedule": every(10)}, [*range(0, 50, 4), 95], [0, 12, 20, 32, 40, 95]),  # jumped over
        ({"schedule": every(10), "source": "probe"}, range(30), []),  # of another source
        # Without a limit a schedule of ranks needs no meeting.
        ({"schedule": log_spaced(), "group": Meeting(None)}, range(64), [0, 32, 45]),
    ],
)
def test_what_is_due_is_made_once(options, steps, made):
    assert made_at(planned(**options), steps) == made


def test_of_a_long_jump_the_last_steps_are_asked_about():
    asked = []
    planner = planned(schedule=lambda step: asked.append(step) is not None)
    planner.advance(0)
    planner.advance(50_000)
    assert asked == [*range(40_000, 50_001)]


def test_sources_are_kept_apart_and_a_forced_reading_is_made_at_any_step():
    planner, found = planned(every(10), source="probe"), []
    for step in (10, 11):
        planner.advance(step)
        for source, force in (("inline", False), ("probe", False), ("probe", True)):
            found.append(planner.due(source, force=force))
            if found[-1] is Due.READING:
                planner.mark_read(source)
        found.append(planner.due("inline", force=True))
    read, nothing = Due.READING, Due.NOTHING
    assert found == [nothing, read, nothing, read, nothing, nothing, read, read]


@pytest.mark.parametrize(
    ("schedule", "share"), [(every(10), None), (every(10), 0.001), (None, 0.001)]
)
def test_an_alert_has_the_next_step_read_whatever_the_schedule_and_the_share_say(schedule, share):
    planner = planned(schedule, share)
    made_at(planner, range(100))
    planner.owe()
    assert made_at(planner, [101, 102]) == [101]


def test_a_check_that_was_asked_for_asks_for_no_other():
    """A run in which every value is strange has two checks where it had one."""
    planner, made = planned(every(10_000), checks=every(100)), []
    for step in range(1000):
        planner.advance(step)
        if planner.due() is Due.CHECK:
            planner.mark_checked(0.1)
            planner.check_again()
            assert planner.due() is Due.NOTHING
            made.append(step)
    assert made == [1, *(step + second for step in range(100, 1000, 100) for second in (0, 1))][1:]


def test_checks_wait_until_nothing_is_being_measured_unless_they_have_a_schedule(clock):
    for checks, due in (("auto", Due.NOTHING), (every(64), Due.CHECK)):
        planner = planned(every(10_000), checks=checks)
        made_at(planner, [0, 63])
        planner.advance(64, busy=True)
        assert planner.due() is due


def test_a_training_that_goes_back_is_read_again():
    planner = planned(every(10))
    assert made_at(planner, range(45)) == [0, 10, 20, 30, 40]
    planner.rewind(15)
    assert made_at(planner, range(15, 45)) == [20, 30, 40]


def test_while_a_reading_is_measured_no_other_is_made_and_steps_beside_it_are_known(clock):
    planner, account = planned(share=0.05), Account(clock)
    planner.advance(0, busy=True)
    assert planner.due() is Due.NOTHING
    planner = Planner(every(10**6), None, None, RankGroup(), account, source="inline")
    account.begin()
    planner.begin(0, 0)
    for step in range(200):
        planner.advance(step, busy=100 <= step < 150)
        clock.now += 1.5 if 100 <= step < 150 else 1.0
    assert account.spent == pytest.approx(25)


def test_connected_ranks_do_as_the_first_one_says_and_meet_where_it_says():
    yes = planned(share=0.05)._decide(0)
    assert yes.is_made
    group = Meeting({0: yes._replace(wait=5), 5: yes._replace(wait=3)})
    planner = planned(share=0.05, group=group)
    assert made_at(planner, range(30)) == [0, 5]
    assert group.met == [0, 5, 8, 15, 22, 29]
    planner.owe()  # would be this rank's alone
    assert made_at(planner, range(30, 36)) == []
    planner = planned(share=0.05, group=Meeting(None))
    with pytest.raises(RanksLostError):
        planner.advance(0)
    assert planner.due() is Due.NOTHING
