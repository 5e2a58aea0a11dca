"""`python -m recipes.grokking`: does geometry foretell that a model generalises?"""

import math
import sys
from typing import Annotated

from recipes.enwik8.extras import explain_missing

if missing := explain_missing("lightning", "matplotlib", "typer"):
    print(missing, file=sys.stderr)
    sys.exit(2)

import typer
from typer import Option

from geomon.show.figures import save
from recipes.grokking.claims import claims
from recipes.grokking.figure import draw
from recipes.grokking.leads import CURVES, MARGINS, Course, false_alarms, leads, load_course
from recipes.grokking.train import Settings, train
from recipes.study import estimate_share, new_folder, run_side_by_side, seconds_on_two_cores
from recipes.study.command import (
    Out,
    Processes,
    SeedCount,
    leave_results,
    one_line_errors,
    print_progress,
)

GENERALISES, CONTROL = "generalises", "control"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: SeedCount = 3,
    out: Out = None,
    modulus: Annotated[int, Option(min=5, help="Number that the remainders are of.")] = 59,
    steps: Annotated[int, Option(min=1, help="Most updates of a training.")] = 3500,
    interval: Annotated[int, Option(min=1, help="Steps from a reading to the next.")] = 100,
    batch: Annotated[int, Option(min=1, help="Pairs in a batch.")] = 128,
    weight_decay: Annotated[float, Option(min=0, help="Weight decay of AdamW.")] = 1.0,
    fraction: Annotated[
        float, Option(min=0.01, max=0.99, help="Share of the pairs to train on.")
    ] = 0.5,
    control_fraction: Annotated[
        float, Option(min=0.01, max=0.99, help="The same for runs that are not to generalise.")
    ] = 0.15,
    controls: Annotated[
        int | None,
        Option(min=1, help="Trainings that are not to generalise. Default: as many as --seeds."),
    ] = None,
    processes: Processes = 2,
) -> None:
    """Train on subtraction modulo a number, and watch until held-out pairs are answered."""
    folder = new_folder("grokking") if out is None else out
    settings = Settings(
        modulus, steps, interval, batch, weight_decay, _probed(modulus, control_fraction)
    )
    counts = {GENERALISES: seeds, CONTROL: seeds if controls is None else controls}
    shares = {GENERALISES: fraction, CONTROL: control_fraction}
    folders = {
        kind: [folder / kind / f"seed_{seed}" for seed in range(count)]
        for kind, count in counts.items()
    }
    jobs = [
        (settings, shares[kind], seed, folders[kind][seed])
        for seed in range(max(counts.values()))
        for kind in counts
        if seed < counts[kind]
    ]
    print(f"{len(jobs)} trainings; geomon watch {jobs[0][-1]} shows the first", flush=True)
    with one_line_errors():
        run_side_by_side(train, jobs, processes=processes, report=print_progress())
    runs, others = (list(map(load_course, folders[kind])) for kind in (GENERALISES, CONTROL))
    figure = draw(runs, others, fraction=fraction, control_fraction=control_fraction)
    picture = save(figure, folder / "grokking.png")
    _show_leads(runs, others)
    if any(run.generalised() is not None for run in runs):
        seconds = seconds_on_two_cores([each for kind in folders.values() for each in kind])
        found = claims(runs, others, differs=_differs(settings, fraction), seconds=seconds)
        leave_results(found, folder, figures=[picture])
    else:
        print(f"no training generalised, so no claim is decided\nfigure: {picture}")


def _probed(modulus: int, fraction: float) -> int:
    """Pairs of a reading: all that the control trains on, for a power of two."""
    return 1 << max(0, int(math.log2(fraction * modulus**2)))


def _differs(settings: Settings, fraction: float) -> str:
    return (
        f"modulus {settings.modulus}, batch {settings.batch}, weight decay "
        f"{settings.weight_decay:g} and train fraction {fraction:g} (published: 97, 512, 0.01 and "
        "0.1 to 0.5), so that a run takes minutes"
    )


def _show_leads(runs: list[Course], controls: list[Course]) -> None:
    """The steps of generalisation, and what the rule gives at each margin."""
    solved = [run.generalised() for run in runs]
    print(f"\nhalf of the held-out pairs are answered at steps {solved}")
    best = max(max(c.held_out_accuracy[1:], default=math.nan) for c in controls)
    print(f"the controls answer {best:.1%} at most")
    for name in CURVES:
        for margin in MARGINS:
            line = f"  {name} {margin:4.0%} below the controls: leads"
            line += f" {leads(runs, controls, name, margin)}"
            if len(controls) > 1:
                wrong = estimate_share(false_alarms(controls, name, margin))
                line += f"; false alarms in {wrong.so} of {wrong.count} controls "
                line += f"({wrong.low:.2f} to {wrong.high:.2f})"
            print(line)


if __name__ == "__main__":
    app(prog_name="python -m recipes.grokking")
