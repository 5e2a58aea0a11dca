"""When a step is read: scenarios of runs, with a clock that goes by the costs of each."""

import itertools
import math
import re
from typing import NamedTuple

import pytest

from geomon import every, log_spaced
from geomon.distributed import RankGroup, RanksLostError
from geomon.monitor.planner import Account, Due, Planner


class Clock:
    """A clock of seconds that goes on only if a scenario says so."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


class Outcome(NamedTuple):
    """What came of a run: steps read and checked, its share, readings left out, and a note."""

    read: list
    checked: list
    share: float
    checks_share: float
    left_out: int
    note: str

    @property
    def gap(self):
        return max(after - before for before, after in itertools.pairwise(self.read))

    @property
    def ratio(self):
        """The largest ratio of the steps of two readings, after the first hundred steps."""
        late = [max(step, 100) for step in self.read]
        return max(after / before for before, after in itertools.pairwise(late))


def train(
    steps, cost, *, check=0.2, known=True, schedule=None, share=0.05, checks="auto", begin=0,
    earlier=0, compiles=0.0, dear=(), dear_cost=0.0, first=2.2, busy=(), ends_reading=True,
):  # fmt: skip
    """A run in steps of one second; a reading and a check take some, `dear` readings more."""
    clock = Clock()
    account = Account(clock)
    planner = Planner(schedule, share, checks, RankGroup(), account, source="inline")
    last, read, checked, notes = steps - 1, [], [], []
    planner.purse.end = last if known else None
    account.begin()
    planner.begin(begin, earlier)
    for step in range(begin, steps):
        planner.advance(step, busy=step in busy)
        notes += filter(None, [planner.explain_few()])
        due = planner.due(force=known and ends_reading and step == last)
        with account.charge():
            if due is Due.READING:
                planner.mark_read("inline")
                usual = cost if read else first * cost  # it loads libraries
                clock.now += dear_cost if len(read) in dear else usual
                read.append(step)
            elif due is Due.CHECK:
                clock.now += check
                planner.checks.mark(check)
                checked.append(step)
        clock.now += 1.0 + (compiles if step == begin else 0.0)
    assert len(notes) <= 1
    return Outcome(
        read, checked, account.overhead, check * len(checked) / clock.now, planner.left_out,
        notes[0].words() if notes else "",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "cost", "fewest", "gap", "ratio"),
    [
        (400, 1.0, 14, 50, 1.4), (400, 2.5, 5, 170, 2.3), (1_500, 2.5, 22, 130, 1.5),
        (1_500, 7.0, 7, 450, 2.5), (2_000, 7.0, 10, 400, 2.0), (10_000, 2.5, 75, 250, 1.4),
        (10_000, 7.0, 36, 600, 1.8), (100_000, 2.5, 300, 1_520, 1.4),
    ],
)  # fmt: skip
def test_a_run_of_known_length_is_dense_at_first_and_never_unread_for_long(
    steps, cost, fewest, gap, ratio
):
    run = train(steps, cost)
    assert 0.03 < run.share <= 0.0505
    assert fewest <= len(run.read) <= 500
    assert run.gap <= gap
    assert run.ratio <= ratio
    assert (run.read[0], run.read[-1]) == (0, steps - 1)


@pytest.mark.parametrize("cost", [0.5, 2.5, 7.0])
@pytest.mark.parametrize("steps", [300, 1_500, 10_000])
def test_a_run_of_unknown_length_is_read_as_densely(steps, cost):
    """Its share is that of a run that is a little longer, or of one with about 11 readings."""
    run = train(steps, cost, known=False)
    fitting = min(11 * cost / 0.05, 2_000)
    assert run.share <= 0.05 * max(1.1, 1.05 * fitting / steps)
    assert run.ratio <= 2.5
    assert max(run.gap, steps - run.read[-1]) <= max(55 * cost, 0.039 * steps, 60)


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({"steps": 100, "cost": 50.0}, [0, 40, 99]),
        ({"steps": 400, "cost": 20.0}, [0, 132, 399]),
        ({"steps": 400, "cost": 20.0, "ends_reading": False}, [0, 132, 399]),
        ({"steps": 4, "cost": 20.0}, [0, 3]),
        ({"steps": 1_100, "cost": 50.0, "begin": 1_000}, [1000, 1045, 1099]),
        ({"steps": 1_100, "cost": 50.0, "begin": 1_000, "earlier": 20}, [1000, 1099]),
        ({"steps": 300, "cost": 50.0, "known": False}, [0, 48]),
    ],
)
def test_a_run_that_can_pay_for_nothing_is_read_at_its_start_once_between_and_at_its_end(
    options, read
):
    assert train(**options).read == read


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"dear": [0], "dear_cost": 12.5}, 130), ({"compiles": 300.0}, 130),
        *(({"dear": [number], "dear_cost": 20.0}, 170) for number in (3, 8, 12)),
        ({"dear": [5, 6], "dear_cost": 20.0}, 240),
        ({"busy": range(500, 560)}, 130), ({"begin": 1_000, "earlier": 20}, 130),
        ({"ends_reading": False}, 130), ({"checks": None}, 110),
    ],
)  # fmt: skip
def test_nothing_that_happens_once_leaves_a_hole(options, most):
    run = train(2_000, 2.5, **options)
    assert run.gap <= most
    assert run.share <= 0.0505
    assert not set(run.read) & set(options.get("busy", ()))
    assert run.read[-1] == 1_999


@pytest.mark.parametrize(
    ("steps", "cost", "options", "share"),
    [
        (2_000, 4.8, {"check": 0.5}, 0.01),  # a fifth of the share
        (10_000, 2.5, {}, 0.03),  # what 40 readings leave of it, at most three fifths
        (10_000, 2.5, {"known": False}, 0.028),
        (10_000, 2.5, {"share": 0.01}, 0.002),
        (10_000, 2.5, {"schedule": every(100), "share": None}, 0.01),
        (2_000, 0.0, {"schedule": every(10_000), "share": None, "check": 2.0}, 0.01),
    ],
)
def test_checks_fill_their_part_of_the_time(steps, cost, options, share):
    run = train(steps, cost, **options)
    assert run.checks_share == pytest.approx(share, rel=0.12)
    assert run.checked[0] >= 32


@pytest.mark.parametrize("known", [True, False])
def test_a_schedule_within_a_share_is_put_off_and_what_is_left_out_is_counted(known):
    run = train(2_000, 2.5, schedule=every(10), known=known)
    assert run.share <= 0.0505
    assert run.gap <= 150
    assert run.read[:2] == [0, 10]
    assert 0 <= run.left_out - (200 - len(run.read)) <= 1  # a forced one is the one put off
    free = train(100, 50.0, schedule=every(10), share=None)
    assert (free.read, free.left_out) == ([*range(0, 100, 10), 99], 0)


@pytest.mark.parametrize(("steps", "cost"), [(400, 9.0), (400, 50.0), (1_500, 9.0)])
@pytest.mark.parametrize("known", [True, False])
def test_a_run_that_can_have_few_readings_says_how_many_and_what_pays_for_ten(steps, cost, known):
    run = train(steps, cost, known=known, check=0.6)
    end = f"{steps - 1:,}" if known else "2,000"
    found = re.fullmatch(
        rf"this run can have only (\d+) readings until step {end}, "
        rf"(\d+)% of the time, because a reading takes as long as {cost:g} steps: "
        r"budget='(\d+%)' pays for 10, .*metrics=.*",
        run.note,
    )
    assert found, run.note
    if known:
        assert abs(int(found[1]) - len(run.read)) <= 1
        assert float(found[2]) == pytest.approx(100 * run.share, abs=1.5)
        budget = int(found[3].rstrip("%")) / 100
        more = train(steps, cost, known=known, check=0.6, share=budget)
        assert 9 <= len(more.read) <= 14


@pytest.mark.parametrize(
    "options",
    [{"steps": 1_500, "cost": 2.5}, {"steps": 400, "cost": 50.0, "schedule": every(100)},
     {"steps": 1_100, "cost": 20.0, "begin": 1_000, "earlier": 20}],
)  # fmt: skip
def test_a_run_with_ten_readings_or_a_schedule_says_nothing(options):
    assert not train(**options).note


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
            account.left_out += 0.5
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
        return [self.decisions.get(step, (False, step + 7)), decision]


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
            planner.checks.mark(0.1)
            planner.checks.ask_again()
            assert planner.due() is Due.NOTHING
            made.append(step)
    assert made == [1, *(step + second for step in range(100, 1000, 100) for second in (0, 1))][1:]


def test_checks_wait_until_nothing_is_being_measured_unless_they_have_a_schedule(clock):
    for checks, due in (("auto", Due.NOTHING), (every(64), Due.CHECK)):
        planner = planned(every(10_000), checks=checks)
        made_at(planner, [0, 63])
        planner.advance(64, busy=True)
        assert planner.due() is due


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
    group = Meeting({0: (True, 5), 5: (True, 8)})
    planner = planned(share=0.05, group=group)
    assert made_at(planner, range(30)) == [0, 5]
    assert group.met == [0, 5, 8, 15, 22, 29]
    planner.owe()  # would be this rank's alone
    assert made_at(planner, range(30, 36)) == []
    planner = planned(share=0.05, group=Meeting(None))
    with pytest.raises(RanksLostError):
        planner.advance(0)
    assert planner.due() is Due.NOTHING
