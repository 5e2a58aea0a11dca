"""The odds of faults that no alert was made for, as Markdown computed from the records."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from geomon import read
from recipes.faults.campaign import HARM, PREFIX, Ran, Seen, read_runs, seen_in
from recipes.faults.detectors import Rate
from recipes.faults.page import per
from recipes.faults.training import BATCHES, EACH_STEP
from recipes.faults.trainings import LENGTH, TRAININGS
from recipes.faults.unseen import FAULT_STEP, UNSEEN, WATCHED_STEPS
from recipes.study.markdown import table

# Steps within which a fault should be noticed: most of them, and those that are everywhere.
SOON = 50
_RECORDS = (EACH_STEP, *BATCHES)
_SETTLED = 200  # from this step on there are bands
_LONGEST = 100  # characters of a sentence

Outcome = tuple[Ran, bool]  # a run with a fault, and whether it did harm


def with_harm(runs: Sequence[Ran]) -> list[Outcome]:
    """List the runs with a fault, each with whether its losses differ from its healthy twin's."""
    twins = {ran.cell.training: ran for ran in runs if ran.cell.what == "plain"}
    return [
        (ran, ran.harm(twins[ran.cell.training]) >= HARM)
        for ran in runs
        if ran.cell.fault is not None
    ]


def noticed(outcomes: Sequence[Outcome], record: str, within: int) -> str:
    """Format how many runs had an alert, "3 of 4"; "-" of none."""
    found = sum(ran.delay(record, within) is not None for ran, _ in outcomes)
    return f"{found} of {len(outcomes)}" if outcomes else "-"


def located(outcomes: Sequence[Outcome], record: str, within: int) -> str:
    """Format in how many of the runs whose alerts named a layer it was the right one."""
    known = [named for ran, _ in outcomes if (named := ran.is_located(record, within)) is not None]
    return f"{sum(known)} of {len(known)}" if known else "-"


_GROUPS: dict[str, Callable[[Ran, bool], bool]] = {
    "all": lambda ran, harm: True,
    "in one block": lambda ran, harm: _is_local(ran),
    "everywhere": lambda ran, harm: not _is_local(ran),
    "with harm": lambda ran, harm: harm,
    "in one block, with harm": lambda ran, harm: harm and _is_local(ran),
}


def _is_local(ran: Ran) -> bool:
    return ran.cell.fault is not None and ran.cell.fault.local


def totals(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Write how many faults of each group were noticed, by record and within how many steps."""
    groups = {name: [one for one in outcomes if belongs(*one)] for name, belongs in _GROUPS.items()}
    head = [f"{name} ({len(own)})" for name, own in groups.items()]
    yield from table(
        ["looked at", "within", *head, "right block"],
        [
            (record, f"{within} steps", *(noticed(own, record, within) for own in groups.values()),
             located(outcomes, record, within))
            for record in _RECORDS for within in (SOON, WATCHED_STEPS)
        ], words=2,
    )  # fmt: skip


def by_fault(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Write for each fault in how many trainings it was noticed, and after how many steps."""
    rows = []
    for name, fault in UNSEEN.items():
        own = [one for one in outcomes if one[0].cell.what == name]
        if own:
            harm = f"{sum(harm for _, harm in own)} of {len(own)}"
            cells = [_with_delay(own, record) for record in _RECORDS]
            rows.append((fault.words, harm, *cells, located(own, EACH_STEP, WATCHED_STEPS)))
    yield from table(["fault", "did harm", *_RECORDS, "right block"], rows)


def _with_delay(outcomes: Sequence[Outcome], record: str) -> str:
    delays = [
        delay for ran, _ in outcomes if (delay := ran.delay(record, WATCHED_STEPS)) is not None
    ]
    after = f" (+{median(delays):.0f})" if delays else ""
    return noticed(outcomes, record, WATCHED_STEPS) + after


def by_run(outcomes: Sequence[Outcome], twins: dict[str, Ran]) -> Iterator[str]:
    """Write each run with a fault: the harm, the steps until an alert, and its sentence."""
    rows = []
    for ran, _ in outcomes:
        fault = ran.cell.fault
        assert fault is not None
        delays = [ran.delay(record) for record in _RECORDS]
        named = ran.is_located(EACH_STEP)
        first = next((seen[0].words for seen in map(ran.seen.get, _RECORDS) if seen), "")
        rows.append(
            (fault.words, TRAININGS[ran.cell.training].words, first[:_LONGEST],
             f"{ran.harm(twins[ran.cell.training]):.2f}",
             *("-" if delay is None else f"+{delay}" for delay in delays),
             "-" if named is None else ("no", "yes")[named])
        )  # fmt: skip
    head = ["fault", "training", "first sentence", "harm", *_RECORDS, "right block"]
    yield from table(head, rows, words=3)


def false_alerts(folder: Path, runs: Sequence[Ran]) -> dict[str, list[tuple[str, str, Seen]]]:
    """List the alerts of healthy steps by record, each with its training and what was changed."""
    found: dict[str, list[tuple[str, str, Seen]]] = {record: [] for record in _RECORDS}
    for record, own in found.items():
        for training in TRAININGS:
            place = folder / training / PREFIX / record
            if place.is_dir():
                own += [(training, PREFIX, seen) for seen in seen_in(read(place))]
        for ran in runs:
            if ran.cell.fault is None:
                own += [(ran.cell.training, ran.cell.what, seen) for seen in ran.seen[record]]
    return found


def healthy(folder: Path, runs: Sequence[Ran]) -> Iterator[str]:
    """Write how often healthy steps had alerts, and all of these alerts."""
    changed = [ran for ran in runs if ran.cell.fault is None]
    trainings = {ran.cell.training for ran in changed}
    steps = len(trainings) * (FAULT_STEP - _SETTLED) + len(changed) * (LENGTH - FAULT_STEP)
    found = false_alerts(folder, runs)
    late = {
        record: [one for one in own if one[2].step >= _SETTLED] for record, own in found.items()
    }
    yield f"{len(changed)} healthy runs, {steps:,} steps from step {_SETTLED} on.\n"
    yield from table(
        ["looked at", f"before step {_SETTLED}", "from there on", "in 10,000 steps"],
        [(record, str(len(found[record]) - len(late[record])), str(len(late[record])),
          per(Rate(len(late[record]), steps), 10_000)) for record in _RECORDS],
    )  # fmt: skip
    yield ""
    yield from (
        f"- {record}, {TRAININGS[training].words}, {what}, step {seen.step}: {seen.words}"
        for record, own in found.items() for training, what, seen in own
    )  # fmt: skip


def write(folder: Path) -> str:
    """Write all tables of a folder of runs."""
    runs = read_runs(folder)
    outcomes = with_harm(runs)
    twins = {ran.cell.training: ran for ran in runs if ran.cell.what == "plain"}
    halves = {
        "All trainings": outcomes,
        "Trainings in which no threshold was chosen": [
            one for one in outcomes if TRAININGS[one[0].cell.training].is_held_out
        ],
    }
    lines = [f"## Faults that no alert was made for ({len(outcomes)})", ""]
    for title, own in halves.items():
        lines += [f"### {title}", "", *totals(own), ""]
    lines += ["### By fault", "", *by_fault(outcomes), ""]
    lines += ["### Each run", "", *by_run(outcomes, twins), ""]
    lines += ["### Healthy runs", "", *healthy(folder, runs), ""]
    return "\n".join(lines)
