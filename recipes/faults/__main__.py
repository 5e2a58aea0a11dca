"""`python -m recipes.faults`: make all trainings, compare the detectors, write the page."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from geomon import read
from geomon.analysis.alerts import find_alerts
from recipes.enwik8.text import load
from recipes.faults.detectors import DETECTORS, OF_MARGINS
from recipes.faults.figure import odds_figure
from recipes.faults.live import live_section, plan_live, read_live, run_live
from recipes.faults.page import Verified, write
from recipes.faults.plan import (
    OTHER_TEXT,
    VERIFICATION,
    plan_odds,
    plan_other_text,
    plan_verification,
)
from recipes.faults.results import (
    evaluate,
    score_full,
    score_trainings,
)
from recipes.faults.training import EACH_STEP, run_job
from recipes.study.drawing import save_small
from recipes.study.experiment import in_processes, one_line_errors
from recipes.study.training import is_finished

# What is compared in the tables of the faults.
_COMPARED = ("loss", "gradient_norm", "geometry")
# One false alarm in so many healthy readings; the last where every 20th step is read.
_STRICT, _FEW = 1e-4, 1e-2


def main(
    small: Annotated[
        bool, typer.Option(help="Two narrow models and a few healthy trainings, in ten minutes.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder; what is complete is kept.")] = None,
    data: Annotated[str | None, typer.Option(help="Text, as `make enwik8` takes it.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Trainings side by side.")] = 2,
    count: Annotated[int, typer.Option(min=2, help="Trainings of each kind and size.")] = 20,
    page: Annotated[
        Path | None, typer.Option(help="The page; warnings.md in the folder by default.")
    ] = None,
    live: Annotated[
        bool, typer.Option(help="Only the runs with all defaults, and their section of the page.")
    ] = False,
) -> None:
    """Put faults into healthy trainings, and measure which numbers notice them, and how early."""
    folder = out or Path("runs") / ("faults-small" if small else "faults")
    with one_line_errors():
        given = load(data)
        sizes = ("narrow",) if small else ("narrow", "wide")
        jobs = [] if live else plan_odds(2 if small else count, sizes)
        if not live:
            jobs += [] if small else plan_other_text(count // 4)
            jobs += plan_verification(1)[::2] if small else plan_verification(9)
        of_users = [] if small and not live else plan_live(1 if small else count // 3, sizes)
        print(f"text: {given.source}\n{len(jobs)} healthy trainings and {len(of_users)} runs with "
              f"all defaults, in {folder}", flush=True)  # fmt: skip
        in_processes(run_job, [(job, given, folder) for job in jobs], processes)
        in_processes(run_live, [(job, given, folder) for job in of_users], processes)
    if live:
        print("\n".join(live_section(read_live(folder))))
    else:
        show(folder, page or folder / "warnings.md")


def show(folder: Path, page: Path) -> None:
    """Measure the odds from the records, and write the page with its picture."""
    scored = score_trainings(folder)
    main_text, other = (
        {
            schedule: [each for each in own if (each.track.number in OTHER_TEXT) == wanted]
            for schedule, own in scored.items()
        }
        for wanted in (False, True)
    )
    every_step = main_text["each step"]
    strict = {name: evaluate(every_step, name, _STRICT) for name in DETECTORS}
    sparse = {
        schedule: {"geometry": evaluate(own, "geometry", _STRICT, limit=1.0)}
        for schedule, own in main_text.items()
    }
    compared = {name: strict[name] for name in _COMPARED} | sparse["each step"]
    healthy = [each for each in every_step if each.fault is None]
    faulty = [each for each in other["each step"] if each.fault is not None]
    others = {
        name: evaluate([*healthy, *faulty], name, _STRICT, limit=result.limit)
        for name, result in compared.items()
    }
    full = score_full(folder)
    of_margins = {
        # A change of phase is one or none: there is no limit to choose.
        name: evaluate(full, name, _FEW, limit=0.5 if name == "phase" else None)
        for name in OF_MARGINS
    }
    page.parent.mkdir(parents=True, exist_ok=True)
    of_users = read_live(folder)
    section = live_section(of_users) if of_users else []
    page.write_text(
        write(compared, strict, sparse, of_margins, others, count_alerts(folder), section)
    )
    picture = save_small(odds_figure(compared), page.parent / "pictures" / "warnings.png")
    print(f"{page}, {picture}")


def count_alerts(folder: Path) -> Verified:
    """Count the alerts of the healthy trainings in which alerts are counted."""
    kinds: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    alerts: Counter[str] = Counter()
    trainings = 0
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        size, _, number = path.name.rpartition("_")
        if int(number) not in VERIFICATION or not is_finished(path / "healthy"):
            continue
        readings = read(path / "healthy" / EACH_STEP)
        found = [alert.name for alert in find_alerts(readings)]
        text = "source code" if int(number) % 2 else "prose"
        trainings += 1
        kinds.update(found)
        for words in (f"{size} models", text):
            steps[words] += len(readings)
            alerts[words] += len(found)
    total = sum(steps.values()) // 2
    stretches = [(words, steps[words], alerts[words]) for words in sorted(steps)]
    return Verified(total, trainings, kinds, stretches)


if __name__ == "__main__":
    typer.run(main)
