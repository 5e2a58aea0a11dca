"""`python -m recipes.digits`: which findings on text hold for images."""

import sys
import time
from pathlib import Path
from typing import Annotated

from recipes.enwik8.extras import explain_missing

if missing := explain_missing("sklearn", "matplotlib", "typer"):
    print(missing, file=sys.stderr)
    sys.exit(2)

import typer
from typer import Option

from geomon.show.figures import save
from recipes.digits.claims import PER_IMAGE, claims
from recipes.digits.figure import draw
from recipes.digits.findings import Training, load_training
from recipes.digits.model import CONVOLUTIONAL, MIXER, TRANSFORMER
from recipes.digits.train import PER_IMAGE as FOLDER_PER_IMAGE
from recipes.digits.train import Settings, train
from recipes.study import (
    RunError,
    estimate,
    new_folder,
    run_side_by_side,
    save_claims,
    seconds_on_two_cores,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: Annotated[int, Option(min=1, help="Trainings of each network.")] = 3,
    out: Annotated[
        Path | None,
        Option(help="Folder of the records; one that was begun is gone on with. Default: new."),
    ] = None,
    steps: Annotated[int, Option(min=2, help="Updates of a training.")] = 300,
    batch: Annotated[int, Option(min=2, help="Images in a batch.")] = 64,
    layers: Annotated[int, Option(min=3, help="Blocks of each network.")] = 6,
    width: Annotated[int, Option(min=2, help="Width; maps have half as many channels.")] = 64,
    heads: Annotated[int, Option(min=1, help="Heads of an attention.")] = 4,
    processes: Annotated[int, Option(min=1, help="Trainings side by side.")] = 2,
) -> None:
    """Train a transformer, a mixer and a convolutional network on digits, and watch them."""
    if width % (2 * heads):
        typer.echo(
            f"error: --width {width} cannot be shared among --heads {heads}: choose a multiple of "
            f"{2 * heads}",
            err=True,
        )
        raise typer.Exit(2)
    folder = new_folder("digits") if out is None else out
    settings = Settings(steps, batch, layers, width, heads)
    kinds = (TRANSFORMER, MIXER, CONVOLUTIONAL)
    folders = {kind: [folder / kind / f"seed_{seed}" for seed in range(seeds)] for kind in kinds}
    jobs = [(kind, settings, seed, folders[kind][seed]) for seed in range(seeds) for kind in kinds]
    print(f"{len(jobs)} trainings; geomon watch {jobs[0][-1]} shows the first", flush=True)
    try:
        run_side_by_side(train, jobs, processes=processes, report=_report)
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    trainings = {kind: list(map(load_training, folders[kind])) for kind in kinds}
    trainings[PER_IMAGE] = [
        load_training(each / FOLDER_PER_IMAGE) for each in folders[CONVOLUTIONAL]
    ]
    save(draw(trainings, head_width=width // heads), folder / "digits.png")
    found = claims(
        trainings,
        head_width=width // heads,
        differs=f"{layers} blocks of width {width}, {steps} updates on 1,437 images of 8 x 8 "
        "pixels (published: large models on ImageNet, and MultiBERT for queries and keys)",
        seconds=seconds_on_two_cores([each for kind in kinds for each in folders[kind]]),
    )
    save_claims(found, folder)
    _show_trainings(trainings)
    for claim in found:
        mean = claim.measured
        print(f"  {claim.verdict:9}  {claim.name}: {mean.mean:.3g} (95 % margin {mean.margin:.2g})")
    print(f"figure: {folder / 'digits.png'}")


def _report(done: int, count: int) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {done} of {count} trainings done", flush=True)


def _show_trainings(trainings: dict[str, list[Training]]) -> None:
    print()
    for kind, found in trainings.items():
        accuracy = estimate([each.accuracy for each in found]).mean
        cosines = [f"{sum(values) / len(values):.2f}" for values in _columns(found)]
        print(f"  {kind}: accuracy {accuracy:.1%}; mean cosine by layer {' '.join(cosines)}")
    print()


def _columns(found: list[Training]) -> list[tuple[float, ...]]:
    """The mean cosines of all trainings, layer by layer."""
    return list(zip(*(each.profile("cosine") for each in found), strict=True))


if __name__ == "__main__":
    app(prog_name="python -m recipes.digits")
