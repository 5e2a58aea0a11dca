"""Sets up the parts of a monitor that ranks must agree about: their group, plan and record."""

import dataclasses
import os

from geomon.capture import Anatomy, ModelParts
from geomon.distributed import Mesh, RankGroup, find_place, find_ranks, join_ranks
from geomon.failures import failures
from geomon.monitor.options import AUTO, MonitorOptions
from geomon.monitor.planner import DEFAULT_SHARE, Account, Planner
from geomon.monitor.schedule import Schedule, first_steps, log_spaced
from geomon.monitor.warnings import Warnings
from geomon.record import Record


def connect(options: MonitorOptions, parts: ModelParts, anatomy: Anatomy) -> RankGroup:
    """Return the ranks, connected if built with the same options (then a collective)."""
    blocks: list[dict[str, tuple[str, ...]]] = [{} for _ in parts.modules]
    for stack in anatomy.stacks:
        blocks[stack.part][stack.name] = tuple(block.name for block in stack.blocks)
    place = find_place(parts.modules, parts.stages)
    place = dataclasses.replace(place, blocks=tuple(blocks))
    ranks = find_ranks()
    if ranks.size == 1 or not options["gather"]:
        ranks.mesh = Mesh((place,))
        return ranks
    schedule = options["schedule"]
    compared = {
        "schedule": first_steps(schedule) if callable(schedule) else None,
        "metrics": list(options["metrics"]),
        "probe": options["probe"] is not None,
        **{name: options[name] for name in ("tokens", "splits", "queries", "budget", "seed")},
    }
    return join_ranks(place, compared, timeout=options["rank_timeout"])


def make_planner(
    options: MonitorOptions,
    group: RankGroup,
    account: Account,
    warnings: Warnings,
    *,
    can_check: bool,
) -> Planner:
    """Make the planner for a schedule, a share of the time, or both.

    `can_check` says whether alerts watch any metric that is measured.
    """
    schedule, budget = options["schedule"], options["budget"]
    source = "inline" if options["probe"] is None else "probe"
    # All ranks make a probe's passes, at the same steps.
    agree = group.members == group.size or source == "inline"
    if not agree and budget not in (AUTO, None):
        raise ValueError(
            "a budget needs one decision for all ranks, which is possible only if their rows "
            "are gathered: use gather=True, or budget=None"
        )
    share = DEFAULT_SHARE if schedule is None and agree else None
    share = share if budget == AUTO else budget  # type: ignore[assignment]
    if schedule is None and share is None:
        schedule = log_spaced()
    if schedule is not None:
        schedule = _guard_schedule("schedule", schedule, warnings)  # type: ignore[arg-type]
    checks: Schedule | str | None = None
    # A single rank makes checks, so it must have the whole model.
    if source == "inline" and can_check and group.rank == 0 and group.own.is_whole:
        checks = _checks_of(options, warnings)
    return Planner(schedule, share, checks, group, account, source=source)


def open_record(
    directory: str | os.PathLike[str] | None, group: RankGroup, warnings: Warnings
) -> Record | None:
    """Make the record on the first rank; if that fails, all ranks raise the same error."""
    record: Record | None = None
    failure: ValueError | None = None
    if directory is not None and group.rank == 0:
        try:
            record = Record(directory)
        except failures(ValueError) as error:
            failure = error
    with warnings.guard():
        failure = group.broadcast(failure)
    if failure is not None:
        raise failure
    return record


def _checks_of(options: MonitorOptions, warnings: Warnings) -> Schedule | str | None:
    """Return when alerts ask for checks."""
    asked = options["checks"] if options["alerts"] else None
    return _guard_schedule("checks", asked, warnings) if callable(asked) else asked  # type: ignore[return-value]


def _guard_schedule(option: str, schedule: Schedule, warnings: Warnings) -> Schedule:
    """Wrap a schedule so that a step is not due if the schedule raises an error for it."""

    def guarded(step: int) -> bool:
        due: list[bool] = []
        warnings.attempt(
            lambda: due.append(schedule(step)),
            f"the function passed as {option} failed: steps at which it fails are not read",
            once=True,
        )
        return any(due)

    return guarded


__all__ = ["connect", "make_planner", "open_record"]
