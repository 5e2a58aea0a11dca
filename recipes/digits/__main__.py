"""`python -m recipes.digits`: which findings on text hold for images."""

import sys
from collections.abc import Iterator
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
    seconds_on_two_cores,
)
from recipes.study.command import (
    Out,
    Processes,
    SeedCount,
    leave_results,
    one_line_errors,
    print_progress,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: SeedCount = 3,
    out: Out = None,
    steps: Annotated[int, Option(min=2, help="Updates of a training.")] = 300,
    batch: Annotated[int, Option(min=2, help="Images in a batch.")] = 64,
    layers: Annotated[int, Option(min=3, help="Blocks of each network.")] = 6,
    width: Annotated[int, Option(min=2, help="Width; maps have half as many channels.")] = 64,
    heads: Annotated[int, Option(min=1, help="Heads of an attention.")] = 4,
    processes: Processes = 2,
) -> None:
    """Train a transformer, a mixer and a convolutional network on digits, and watch them."""
    with one_line_errors():
        if width % (2 * heads):
            raise RunError(
                f"--width {width} cannot be shared among --heads {heads}: choose a multiple of "
                f"{2 * heads}"
            )
    folder = new_folder("digits") if out is None else out
    settings = Settings(steps, batch, layers, width, heads)
    kinds = (TRANSFORMER, MIXER, CONVOLUTIONAL)
    folders = {kind: [folder / kind / f"seed_{seed}" for seed in range(seeds)] for kind in kinds}
    jobs = [(kind, settings, seed, folders[kind][seed]) for seed in range(seeds) for kind in kinds]
    print(f"{len(jobs)} trainings; geomon watch {jobs[0][-1]} shows the first", flush=True)
    with one_line_errors():
        run_side_by_side(train, jobs, processes=processes, report=print_progress())
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
    leave_results(
        found, folder, figures=[folder / "digits.png"], table=_table_of_trainings(trainings)
    )


def _table_of_trainings(trainings: dict[str, list[Training]]) -> Iterator[str]:
    for kind, found in trainings.items():
        accuracy = estimate([each.accuracy for each in found]).mean
        cosines = [f"{sum(values) / len(values):.2f}" for values in _columns(found)]
        yield f"{kind}: accuracy {accuracy:.1%}; mean cosine by layer {' '.join(cosines)}"


def _columns(found: list[Training]) -> list[tuple[float, ...]]:
    """The mean cosines of all trainings, layer by layer."""
    return list(zip(*(each.profile("cosine") for each in found), strict=True))


if __name__ == "__main__":
    app(prog_name="python -m recipes.digits")
