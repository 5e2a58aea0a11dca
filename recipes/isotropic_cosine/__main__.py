"""`python -m recipes.isotropic_cosine`: which cosine is large, at which width."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from recipes.enwik8.extras import explain_missing

if missing := explain_missing():
    print(missing, file=sys.stderr)
    sys.exit(2)

import typer
from typer import Option

from geomon.show import save
from recipes.enwik8.data import load
from recipes.isotropic_cosine.claims import level_claims, quantile_claims
from recipes.isotropic_cosine.figure import draw
from recipes.isotropic_cosine.levels import Level, levels
from recipes.isotropic_cosine.simulate import ROWS, load_quantiles, simulate
from recipes.isotropic_cosine.train import TOKENS, preset, train
from recipes.study import (
    Claim,
    call,
    new_folder,
    run_side_by_side,
    seconds_on_two_cores,
)
from recipes.study.command import (
    Out,
    Processes,
    SeedCount,
    Text,
    leave_results,
    one_line_errors,
    print_progress,
)

WIDTHS = (16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192)
TRAINED = (32, 64, 128)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: SeedCount = 3,
    out: Out = None,
    run: Annotated[
        list[Path] | None,
        Option(help="Folder of a run to draw in place of short trainings; may be repeated."),
    ] = None,
    rows: Annotated[int, Option(min=50, help="Rows of which all pairs are taken.")] = ROWS,
    width: Annotated[
        list[int] | None, Option(min=32, help="Widths of the decoders; default 32, 64, 128.")
    ] = None,
    steps: Annotated[int, Option(min=1, help="Steps of each decoder.")] = 150,
    data: Text = None,
    processes: Processes = 2,
) -> None:
    """Simulate the cosine between isotropic rows, and draw watched models beside its curve."""
    with one_line_errors(ValueError):
        folder = out or new_folder("isotropic_cosine")
        folder.mkdir(parents=True, exist_ok=True)
        claims = study(
            folder, seeds=seeds, runs=run, rows=rows, widths=tuple(width or TRAINED), steps=steps,
            data=data, processes=processes,
        )  # fmt: skip
        leave_results(claims, folder, figures=[folder / "figure.png"])


def study(
    folder: Path,
    *,
    seeds: int,
    runs: Sequence[Path] | None,
    rows: int,
    widths: tuple[int, ...],
    steps: int,
    data: str | None,
    processes: int,
) -> list[Claim]:
    """Simulate, train where no run is given, draw the figure and measure the claims.

    Args:
        folder: Folder of the experiment.
        seeds: Number of repetitions.
        runs: Folders of runs to draw in place of trainings; None to train.
        rows: Number of rows of which all pairs are taken.
        widths: Widths of the decoders.
        steps: Number of steps of each decoder.
        data: Text for the decoders, as for recipes.enwik8.
        processes: Number of processes.
    """
    watched = [levels(each) for each in runs or ()]  # first: what is wrong shows at once
    folders = [folder / f"simulation/seed_{seed}" for seed in range(seeds)]
    jobs: list[tuple[object, ...]] = [
        (simulate, WIDTHS, rows, seed, folders[seed]) for seed in range(seeds)
    ]
    trained = {
        width: [folder / f"decoder_{width}/seed_{seed}" for seed in range(seeds)]
        for width in ([] if runs else widths)
    }
    if trained:
        corpus = load(data, minimum=20 * TOKENS)
        typer.echo(f"text: {corpus.source}")
        jobs += [
            (train, corpus, preset(width, steps), seed, places[seed])
            for width, places in sorted(trained.items(), reverse=True)  # the longest ones first
            for seed in range(seeds)
        ]
    run_side_by_side(call, jobs, processes=processes, report=print_progress())
    found = [load_quantiles(each) for each in folders]
    made = [*folders, *(place for places in trained.values() for place in places)]
    seconds = seconds_on_two_cores(made)
    claims = quantile_claims(found[0][0], [quantiles for _, quantiles in found], seconds)
    for width, places in trained.items():
        ways: list[list[Level]] = [levels(place) for place in places]
        claims += level_claims(width, ways, seconds)
        watched += ways
    save(draw([quantiles for _, quantiles in found], watched), folder / "figure.png")
    return claims


if __name__ == "__main__":
    app(prog_name="python -m recipes.isotropic_cosine")
