"""`python -m recipes.isotropic_cosine`: which cosine is large, at which width."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from recipes.enwik8.extras import explain_missing

if missing := explain_missing():
    print(missing, file=sys.stderr)
    sys.exit(2)

import typer
from typer import Option

from geomon.show import save
from recipes.enwik8.data import DataError, load
from recipes.isotropic_cosine.claims import level_claims, quantile_claims
from recipes.isotropic_cosine.figure import draw
from recipes.isotropic_cosine.levels import Level, levels
from recipes.isotropic_cosine.simulate import ROWS, load_quantiles, simulate
from recipes.isotropic_cosine.train import TOKENS, preset, train
from recipes.study import (
    Claim,
    RunError,
    call,
    new_folder,
    run_side_by_side,
    save_claims,
    seconds_on_two_cores,
)

WIDTHS = (16, 32, 64, 128, 256, 512, 768, 1024, 2048, 4096, 8192)
TRAINED = (32, 64, 128)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: Annotated[int, Option(min=1, help="Number of repetitions.")] = 3,
    out: Annotated[
        Path | None, Option(help="Folder; what it holds already is not made again.")
    ] = None,
    run: Annotated[
        list[Path] | None,
        Option(help="Folder of a run to draw in place of short trainings; may be repeated."),
    ] = None,
    rows: Annotated[int, Option(min=50, help="Rows of which all pairs are taken.")] = ROWS,
    width: Annotated[
        list[int] | None, Option(min=32, help="Widths of the decoders; default 32, 64, 128.")
    ] = None,
    steps: Annotated[int, Option(min=1, help="Steps of each decoder.")] = 150,
    data: Annotated[str | None, Option(help="Text, as for recipes.enwik8.")] = None,
    processes: Annotated[int, Option(min=1, help="Side by side.")] = 2,
) -> None:
    """Simulate the cosine between isotropic rows, and draw watched models beside its curve."""
    try:
        folder = out or new_folder("isotropic_cosine")
        folder.mkdir(parents=True, exist_ok=True)
        claims = study(
            folder, seeds=seeds, runs=run, rows=rows, widths=tuple(width or TRAINED), steps=steps,
            data=data, processes=processes,
        )  # fmt: skip
    except (DataError, RunError, OSError, ValueError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    for claim in claims:
        measured = claim.measured
        typer.echo(f"{claim.verdict:<10} {claim.name}: {measured.mean:.4f} ± {measured.margin:.4f}")
    typer.echo(f"figure: {folder / 'figure.png'}\nclaims: {folder / 'claims.json'}")


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
    """Simulate, train where no run is given, and write the figure and the claims.

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
    began = time.perf_counter()
    run_side_by_side(call, jobs, processes=processes, report=_reporter(began))
    found = [load_quantiles(each) for each in folders]
    made = [*folders, *(place for places in trained.values() for place in places)]
    seconds = seconds_on_two_cores(made)
    claims = quantile_claims(found[0][0], [quantiles for _, quantiles in found], seconds)
    for width, places in trained.items():
        ways: list[list[Level]] = [levels(place) for place in places]
        claims += level_claims(width, ways, seconds)
        watched += ways
    save_claims(claims, folder)
    save(draw([quantiles for _, quantiles in found], watched), folder / "figure.png")
    return claims


def _reporter(began: float) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        typer.echo(f"{done} of {total} parts, {time.perf_counter() - began:.0f} s")

    return report


if __name__ == "__main__":
    app(prog_name="python -m recipes.isotropic_cosine")
