"""The planner on simulated trainings: which steps are read or checked, and what that costs.

A `Run` simulates a whole training on a clock of its own. Single decisions are tested step by step,
on a planner from `planner_of`.
"""

import itertools
import math
import re

import pytest

from geomon import every, log_spaced
from geomon.distributed import RankGroup, RanksLostError
from geomon.monitor import Account, Due, Planner

# -- whole trainings -------------------------------------------------------------------------------


class Clock:
    """A clock in seconds that stands still unless a test moves it."""

    now = 0.0

    def __call__(self):
        return self.now


class Run:
    """A simulated training: each step takes a second, and readings and checks delay it further.

    The first reading takes 2.2 times as long as the others, because it loads libraries. Tests may
    change the attributes before they call `train`.

    Args:
        steps: Number of steps.
        reading: Seconds of a reading.
        check: Seconds of a check. Defaults to 0.2.
        schedule: Schedule of the readings. Defaults to None, so that they fill the budget.
        budget: Share of the time for readings and checks. Defaults to 0.05.
        checks: Schedule of the checks. Defaults to "auto".

    Attributes:
        knows_end: Whether the planner is told the last step.
        reads_end: Whether the training asks for a reading of its last step.
        begin: First step.
        earlier_readings: Number of readings before that step, if the run is resumed.
        seconds_of_step: Seconds of single steps, if not one.
        seconds_of_reading: Seconds of single readings by number, from 0.
        busy_steps: Steps at which a reading is still being measured in the background.
        read, checked: Steps that were read and checked.
        notes: Notes on the plan.
    """

    def __init__(self, steps, reading, *, check=0.2, schedule=None, budget=0.05, checks="auto"):
        self.steps, self.reading, self.check = steps, reading, check
        self.knows_end = self.reads_end = True
        self.begin = self.earlier_readings = 0
        self.seconds_of_step, self.seconds_of_reading = {}, {0: 2.2 * reading}
        self.busy_steps = ()
        self.clock = Clock()
        self.account = Account(self.clock)
        self.planner = Planner(schedule, budget, checks, RankGroup(), self.account, source="inline")
        self.read, self.checked, self.notes = [], [], []

    def train(self):
        """Run all steps; return the run."""
        last = self.steps - 1
        self.planner.purse.end = last if self.knows_end else None
        self.account.begin()
        self.planner.begin(self.begin, self.earlier_readings)
        for step in range(self.begin, self.steps):
            self.planner.advance(step, busy=step in self.busy_steps)
            note = self.planner.explain_few()
            self.notes += [] if note is None else [note.words()]
            asks = self.knows_end and self.reads_end and step == last
            with self.account.charge():
                self._look(step, self.planner.due(force=asks))
            self.clock.now += self.seconds_of_step.get(step, 1.0)
        return self

    def _look(self, step, due):
        if due is Due.READING:
            self.planner.mark_read("inline")
            self.clock.now += self.seconds_of_reading.get(len(self.read), self.reading)
            self.read.append(step)
        elif due is Due.CHECK:
            self.clock.now += self.check
            self.planner.checks.mark(self.check)
            self.checked.append(step)

    @property
    def share(self):
        """Share of the time that readings and checks took."""
        return self.account.overhead

    @property
    def share_of_checks(self):
        return self.check * len(self.checked) / self.clock.now

    @property
    def largest_gap(self):
        """Most steps between two readings."""
        return max(after - before for before, after in itertools.pairwise(self.read))

    @property
    def largest_ratio(self):
        """Largest ratio of the steps of two readings, from step 100 on."""
        late = [max(step, 100) for step in self.read]
        return max(after / before for before, after in itertools.pairwise(late))


def run_of_unknown_length(steps, reading, **options):
    run = Run(steps, reading, **options)
    run.knows_end = False
    return run


def resumed(begin, steps, reading, *, earlier_readings=20):
    run = Run(steps, reading)
    run.begin, run.earlier_readings = begin, earlier_readings
    return run


@pytest.mark.parametrize(
    ("steps", "reading", "fewest", "gap", "ratio"),
    [
        (400, 1.0, 14, 50, 1.4), (400, 2.5, 5, 170, 2.3), (1_500, 2.5, 22, 130, 1.5),
        (1_500, 7.0, 7, 450, 2.5), (2_000, 7.0, 10, 400, 2.0), (10_000, 2.5, 75, 250, 1.4),
        (10_000, 7.0, 36, 600, 1.8), (100_000, 2.5, 300, 1_520, 1.4),
    ],
)  # fmt: skip
def test_readings_of_a_run_of_known_length_fill_the_budget_without_long_gaps(
    steps, reading, fewest, gap, ratio
):
    run = Run(steps, reading).train()
    assert 0.03 < run.share <= 0.0505
    assert fewest <= len(run.read) <= 500
    assert run.largest_gap <= gap
    assert run.largest_ratio <= ratio  # dense at first, while curves move fast
    assert (run.read[0], run.read[-1]) == (0, steps - 1)


@pytest.mark.parametrize("reading", [0.5, 2.5, 7.0])
@pytest.mark.parametrize("steps", [300, 1_500, 10_000])
def test_a_run_of_unknown_length_spends_as_if_it_were_a_little_longer(steps, reading):
    run = run_of_unknown_length(steps, reading).train()
    until_eleven_fit = min(11 * reading / 0.05, 2_000)  # a short run is planned as one of these
    assert run.share <= 0.05 * max(1.1, 1.05 * until_eleven_fit / steps)
    assert run.largest_ratio <= 2.5
    gap = max(run.largest_gap, steps - run.read[-1])
    assert gap <= max(55 * reading, 0.039 * steps, 60)


def troubled():
    """A run whose first step compiles, with a slow reading, and one that takes ten steps."""
    run = Run(400, 2.0)
    run.seconds_of_reading[3], run.seconds_of_step[0] = 9.0, 31.0
    run.busy_steps = range(50, 60)
    return run


# A run, all steps that it reads, its first and last checks, their number, and readings left out.
PLANS = [
    (Run(400, 1.0, check=0.4),
     [0, 12, 24, 36, 52, 72, 96, 124, 156, 192, 232, 272, 316, 361, 399], [32, 73, 382], 10, 0),
    (run_of_unknown_length(300, 2.5), [0, 24, 52, 96, 160, 240], [32, 33, 280], 15, 0),
    (resumed(1000, 1400, 4.0), [1000, 1207, 1399], [1001, 1031, 1384], 20, 0),
    (resumed(1000, 1400, 4.0, earlier_readings=0), [1000, 1139, 1399], [1001, 1031, 1384], 20, 0),
    (Run(1500, 9.0, check=0.6), [0, 48, 268, 787, 1499], [32, 91, 1439], 25, 0),
    (run_of_unknown_length(400, 9.0, check=0.6), [0, 48, 116, 252], [32, 91, 370], 7, 0),
    (Run(400, 2.5, schedule=every(10)), [0, 18, 80, 214, 399], [32, 33, 384], 20, 35),
    (run_of_unknown_length(400, 3.0, schedule=every(10)),
     [0, 10, 28, 68, 138, 238, 365], [32, 33, 392], 21, 33),
    (troubled(), [0, 20, 60, 120, 399], [32, 33, 389], 22, 0),
    (Run(400, 2.0, checks=None, budget=0.1),
     [0, 8, 16, 24, 32, 44, 60, 76, 96, 116, 140, 164, 192, 220, 248, 280, 312, 341, 371, 399],
     [], 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("run", "read", "checked", "checks", "left_out"), PLANS, ids=range(10))
def test_a_run_is_read_and_checked_at_these_steps(run, read, checked, checks, left_out):
    """Whoever changes what is spent, or how it is spread, sees here what becomes of a plan."""
    run.train()
    assert run.read == read
    assert [*run.checked[:2], *run.checked[-1:]] == checked
    assert (len(run.checked), run.planner.left_out) == (checks, left_out)


@pytest.mark.parametrize(
    ("run", "read"),
    [
        (Run(100, 50.0), [0, 40, 99]),
        (Run(400, 20.0), [0, 132, 399]),
        (Run(4, 20.0), [0, 3]),
        (run_of_unknown_length(300, 50.0), [0, 48]),
        (resumed(1_000, 1_100, 50.0, earlier_readings=0), [1000, 1045, 1099]),
        (resumed(1_000, 1_100, 50.0), [1000, 1099]),  # it has enough readings already
    ],
    ids=["short", "longer", "four steps", "unknown length", "begins late", "resumed"],
)
def test_a_run_that_cannot_afford_readings_has_one_at_its_start_in_between_and_at_its_end(
    run, read
):
    assert run.train().read == read


def test_the_last_step_is_read_although_the_training_does_not_ask_for_it():
    run = Run(400, 20.0)
    run.reads_end = False
    assert run.train().read == [0, 132, 399]


# Each run has 2,000 steps and readings of 2.5 seconds. Without a mishap no gap exceeds 130 steps.


def assert_has_no_hole(run, most=130):
    run.train()
    assert run.largest_gap <= most
    assert run.share <= 0.0505
    assert run.read[-1] == 1_999


@pytest.mark.parametrize(
    ("number", "seconds", "gap"), [(0, 12.5, 130), (3, 20.0, 170), (8, 20.0, 170), (12, 20.0, 170)]
)
def test_one_slow_reading_leaves_no_hole(number, seconds, gap):
    run = Run(2_000, 2.5)
    run.seconds_of_reading[number] = seconds
    assert_has_no_hole(run, gap)


def test_two_slow_readings_in_a_row_leave_no_hole():
    run = Run(2_000, 2.5)
    run.seconds_of_reading |= {5: 20.0, 6: 20.0}
    assert_has_no_hole(run, 240)


def test_a_first_step_that_compiles_leaves_no_hole():
    run = Run(2_000, 2.5)
    run.seconds_of_step[0] = 301.0
    assert_has_no_hole(run)


def test_no_reading_is_made_while_another_is_measured_and_that_leaves_no_hole():
    run = Run(2_000, 2.5)
    run.busy_steps = range(500, 560)
    assert_has_no_hole(run)
    assert not set(run.read) & set(run.busy_steps)


def test_a_resumed_run_has_no_hole():
    assert_has_no_hole(resumed(1_000, 2_000, 2.5))


@pytest.mark.parametrize(("earlier_readings", "gap"), [(20, 75), (0, 30)])
def test_a_resumed_run_is_read_as_sparsely_as_before_and_a_late_beginning_densely(
    earlier_readings, gap
):
    run = resumed(1_000, 2_000, 2.5, earlier_readings=earlier_readings).train()
    assert run.read[1] - run.read[0] == gap


def test_a_training_that_does_not_ask_for_its_last_step_has_no_hole():
    run = Run(2_000, 2.5)
    run.reads_end = False
    assert_has_no_hole(run)


def test_without_checks_readings_get_the_whole_budget():
    assert_has_no_hole(Run(2_000, 2.5, checks=None), 110)


@pytest.mark.parametrize(
    ("run", "share"),
    [
        (Run(2_000, 4.8, check=0.5), 0.01),  # at least a fifth of the budget
        (Run(10_000, 2.5), 0.03),  # what 40 readings leave, at most three fifths of the budget
        (run_of_unknown_length(10_000, 2.5), 0.028),
        (Run(10_000, 2.5, budget=0.01), 0.002),
        (Run(10_000, 2.5, schedule=every(100), budget=None), 0.01),
        (Run(2_000, 0.0, schedule=every(10_000), budget=None, check=2.0), 0.01),
    ],
    ids=["few readings", "many readings", "unknown length", "small budget", "schedule", "alone"],
)
def test_checks_fill_their_part_of_the_time_from_step_32_on(run, share):
    run.train()
    assert run.share_of_checks == pytest.approx(share, rel=0.12)
    assert run.checked[0] >= 32


@pytest.mark.parametrize("knows_end", [True, False])
def test_a_budget_postpones_readings_of_a_schedule_and_counts_those_left_out(knows_end):
    run = Run(2_000, 2.5, schedule=every(10))
    run.knows_end = knows_end
    run.train()
    assert run.share <= 0.0505
    assert run.largest_gap <= 150
    assert run.read[:2] == [0, 10]
    # The last reading, if the training asks for it, is the one that was postponed.
    assert 0 <= run.planner.left_out - (200 - len(run.read)) <= 1


def test_without_a_budget_every_reading_of_a_schedule_is_made():
    run = Run(100, 50.0, schedule=every(10), budget=None).train()
    assert run.read == [*range(0, 100, 10), 99]
    assert run.planner.left_out == 0


@pytest.mark.parametrize(("steps", "reading"), [(400, 9.0), (400, 50.0), (1_500, 9.0)])
def test_a_run_with_few_readings_says_how_many_and_which_budget_pays_for_ten(steps, reading):
    run = Run(steps, reading, check=0.6).train()
    count, share, budget = few_readings(run, steps - 1)
    assert abs(count - len(run.read)) <= 1
    assert share == pytest.approx(run.share, abs=0.015)
    assert 9 <= len(Run(steps, reading, check=0.6, budget=budget).train().read) <= 14


@pytest.mark.parametrize(("steps", "reading"), [(400, 9.0), (400, 50.0), (1_500, 9.0)])
def test_a_run_of_unknown_length_says_how_few_readings_fit_into_two_thousand_steps(steps, reading):
    few_readings(run_of_unknown_length(steps, reading, check=0.6).train(), 2_000)


def few_readings(run, until):
    """Return number of readings, share, and budget for ten, which the run's only note names."""
    (note,) = run.notes
    found = re.fullmatch(
        rf"this run can have only (\d+) readings until step {until:,}, "
        rf"(\d+)% of the time, because a reading takes as long as {run.reading:g} steps: "
        r"budget='(\d+)%' pays for 10, .*metrics=.*",
        note,
    )
    assert found, note
    return int(found[1]), int(found[2]) / 100, int(found[3]) / 100


@pytest.mark.parametrize(
    "run",
    [
        Run(1_500, 2.5), Run(1_500, 5.0), Run(400, 50.0, schedule=every(100)),
        resumed(1_000, 1_100, 20.0),
    ],
    ids=["many", "eleven", "schedule", "resumed"],
)  # fmt: skip
def test_a_run_with_ten_readings_or_a_schedule_says_nothing_of_few_readings(run):
    assert run.train().notes == []


# -- the account of the time -----------------------------------------------------------------------


@pytest.fixture
def clock():
    return Clock()


def account_beside_a_thread(clock, *, periods=10, first=100, slower=0.5, pauses=None):
    """Account for periods of 200 steps; a measuring thread slows 60 of them down.

    A step takes a second. The loop looks at its loss after every seventh step and waits for the
    device then, so only sums of steps can be compared. `pauses` are seconds after single steps.
    """
    account, queued = Account(clock), 0.0
    account.begin()
    for step in range(200 * periods):
        is_beside = 0 <= step % 200 - first < 60
        account.step(measuring=is_beside)
        queued += 1.0 + slower * is_beside
        if step % 7 == 6:
            clock.now, queued = clock.now + queued, 0.0
        clock.now += (pauses or {}).get(step, 0.0)
    assert account.charged == 0
    assert account.overhead == pytest.approx(account.spent / clock.now)
    return account


@pytest.mark.parametrize(("first", "spent"), [(0, 266.25766), (100, 280.69759)])
def test_seconds_that_a_measuring_thread_takes_from_steps_are_spent(clock, first, spent):
    account = account_beside_a_thread(clock, first=first)
    assert account.spent == pytest.approx(spent)  # nearly all of the 10 * 60 * 0.5


def test_seconds_of_a_thread_are_known_once_steps_went_without_one(clock):
    account = account_beside_a_thread(clock, periods=1, first=0)
    assert account.spent == pytest.approx(17.898305)  # of 60 * 0.5


# Without the thread, and beside it.
@pytest.mark.parametrize(("step", "spent"), [(50, 38.184075), (120, 73.238609)])
def test_a_checkpoint_of_a_thousand_seconds_is_not_taken_for_a_slow_step(clock, step, spent):
    account = account_beside_a_thread(clock, periods=2, pauses={step: 1000.0})
    assert account.spent == pytest.approx(spent)  # of 2 * 60 * 0.5


def test_a_thread_that_slows_nothing_down_costs_nothing(clock):
    account = account_beside_a_thread(clock, slower=0.0)
    assert account.spent == pytest.approx(0.65637217)


def test_the_planner_tells_the_account_of_steps_beside_a_measuring_thread(clock):
    account = Account(clock)
    planner = Planner(every(10**6), None, None, RankGroup(), account, source="inline")
    account.begin()
    planner.begin(0, 0)
    for step in range(200):
        is_beside = 100 <= step < 150
        planner.advance(step, busy=is_beside)
        clock.now += 1.5 if is_beside else 1.0
    assert account.spent == pytest.approx(25)


def test_charges_inside_charges_count_once_and_time_left_out_does_not_count(clock):
    account = Account(clock)
    assert math.isnan(account.overhead)  # no training yet
    with account.charge():
        clock.now += 4.0  # before the training, so it does not count
        account.begin()
        clock.now += 1.0
        with account.charge():
            clock.now += 2.0
            account.left_out += 0.5
    clock.now += 1.5
    assert account.spent == 2.5
    assert account.overhead == 2.5 / 4.5


# -- single decisions ------------------------------------------------------------------------------


def planner_of(schedule=None, *, budget=None, checks=None, group=None, source="inline"):
    planner = Planner(schedule, budget, checks, group or RankGroup(), Account(), source=source)
    planner.begin(0, 0)
    return planner


def read_at(planner, steps):
    """Advance through steps, and read those at which an inline reading is due; return them."""
    read = []
    for step in steps:
        planner.advance(step)
        assert planner.due() is planner.due()  # asking changes nothing
        if planner.due() is Due.READING:
            planner.mark_read("inline")
            read.append(step)
        assert planner.due() is not Due.READING
    return read


def test_a_step_is_read_once_however_often_it_comes():
    assert read_at(planner_of(every(10)), [0, 0, 1, 9, 10, 10, 11, 20]) == [0, 10, 20]


def test_a_reading_whose_step_is_jumped_over_is_made_at_the_next_step():
    steps = [*range(0, 50, 4), 95]
    assert read_at(planner_of(every(10)), steps) == [0, 12, 20, 32, 40, 95]


def test_after_a_long_jump_only_the_last_ten_thousand_steps_are_asked_about():
    asked = []
    planner = planner_of(lambda step: asked.append(step) is not None)
    planner.advance(0)
    planner.advance(50_000)
    assert asked == [*range(40_000, 50_001)]


def test_step_0_is_read_whatever_the_schedule_says():
    assert read_at(planner_of(lambda step: False), range(3)) == [0]


def test_a_schedule_that_raises_leaves_its_step_unread():
    def fails_at_2(step):
        if step == 2:
            raise OSError("gone")
        return True

    planner = planner_of(fails_at_2)
    planner.advance(1)
    with pytest.raises(OSError, match="gone"):
        planner.advance(2)
    assert planner.due() is Due.NOTHING


def test_a_planner_of_probes_plans_no_inline_readings():
    assert read_at(planner_of(every(10), source="probe"), range(30)) == []


def test_each_source_is_read_once_a_step():
    planner = planner_of(every(10), source="probe")
    planner.advance(10)
    assert planner.due("probe") is Due.READING
    planner.mark_read("probe")
    assert planner.due("probe") is planner.due("probe", force=True) is Due.NOTHING
    assert planner.due("inline") is Due.NOTHING
    assert planner.due("inline", force=True) is Due.READING


def test_a_forced_reading_is_made_at_a_step_that_is_not_due():
    planner = planner_of(every(10), source="probe")
    planner.advance(11)
    assert planner.due("probe") is Due.NOTHING
    assert planner.due("probe", force=True) is Due.READING


@pytest.mark.parametrize(
    ("schedule", "budget"), [(every(10), None), (every(10), 0.001), (None, 0.001)]
)
def test_the_step_after_an_alert_is_read_whatever_schedule_and_budget_say(schedule, budget):
    planner = planner_of(schedule, budget=budget)
    read_at(planner, range(100))
    planner.owe()
    assert read_at(planner, [101, 102]) == [101]


def test_no_reading_is_planned_while_another_is_measured():
    planner = planner_of(budget=0.05)
    planner.advance(0, busy=True)
    assert planner.due() is Due.NOTHING


def test_a_check_looks_at_the_training_forward_and_not_at_a_probe():
    planner = planner_of(every(10_000), checks=every(64))
    read_at(planner, [0])
    planner.advance(64)
    assert planner.due("inline") is Due.CHECK
    assert planner.due("probe") is Due.NOTHING


def test_a_second_check_that_was_asked_for_asks_for_no_third():
    """If every value is strange, a run has twice as many checks, not one at each step."""
    planner, checked = planner_of(every(10_000), checks=every(100)), []
    for step in range(1000):
        planner.advance(step)
        if planner.due() is Due.CHECK:
            planner.checks.mark(0.1)
            planner.checks.ask_again()
            assert planner.due() is Due.NOTHING
            checked.append(step)
    pairs = [(step, step + 1) for step in range(100, 1000, 100)]
    assert checked == [*itertools.chain.from_iterable(pairs)]


@pytest.mark.parametrize(
    ("checks", "due"), [("auto", Due.NOTHING), (every(64), Due.CHECK)], ids=["auto", "schedule"]
)
def test_automatic_checks_wait_for_a_reading_that_is_measured(checks, due):
    planner = planner_of(every(10_000), checks=checks)
    read_at(planner, [0, 63])
    planner.advance(64, busy=True)
    assert planner.due() is due


# -- connected ranks -------------------------------------------------------------------------------


class SecondRank:
    """The group of the second of two connected ranks, which follows the first one's decisions.

    Args:
        decisions: Whether to read, and the next step to decide at, by step. At other steps the
            first rank decides not to read, and to decide again seven steps later.
    """

    connected, members, size = True, 2, 2

    def __init__(self, decisions):
        self.decisions, self.met = decisions, []

    def meet(self, step, decision):
        self.met.append(step)
        return [self.decisions.get(step, (False, step + 7)), decision]


class Deserted(SecondRank):
    """A group whose other rank does not answer."""

    def __init__(self):
        super().__init__({})

    def meet(self, step, decision):
        raise RanksLostError("no answer")


def test_connected_ranks_follow_the_first_rank_and_meet_when_it_says():
    group = SecondRank({0: (True, 5), 5: (True, 8)})
    planner = planner_of(budget=0.05, group=group)
    assert read_at(planner, range(30)) == [0, 5]
    assert group.met == [0, 5, 8, 15, 22, 29]


def test_connected_ranks_meet_about_an_owed_reading_when_the_first_rank_says():
    group = SecondRank({})  # the reading of step 0 is put off again and again
    assert read_at(planner_of(every(100), budget=0.05, group=group), range(30)) == []
    assert group.met == [0, 7, 14, 21, 28]


def test_a_connected_rank_reads_nothing_alone_after_an_alert():
    group = SecondRank({0: (True, 5)})
    planner = planner_of(budget=0.05, group=group)
    read_at(planner, range(30))
    planner.owe()
    assert read_at(planner, range(30, 36)) == []
    assert group.met == [0, 5, 12, 19, 26, 33]  # as without the alert


def test_ranks_need_no_meeting_for_a_schedule_without_a_budget():
    assert read_at(planner_of(log_spaced(), group=Deserted()), range(64)) == [0, 32, 45]


def test_a_rank_whose_first_rank_does_not_answer_reads_nothing():
    planner = planner_of(budget=0.05, group=Deserted())
    with pytest.raises(RanksLostError):
        planner.advance(0)
    assert planner.due() is Due.NOTHING
