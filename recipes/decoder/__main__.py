"""`python -m recipes.decoder`: train a character decoder from several seeds; decide claims."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from recipes.enwik8.extras import explain_missing

if missing := explain_missing():
    print(missing, file=sys.stderr)
    sys.exit(2)

import typer
from typer import Option

from recipes.decoder.claims import decoder_claims
from recipes.decoder.figure import decoder_figure, seeds_figure
from recipes.decoder.train import (
    FIRST_READING,
    PROBE_WINDOWS,
    ROWS,
    SIZES,
    Study,
    StudyError,
    train_seeds,
)
from recipes.enwik8.data import DataError
from recipes.study import save_claims
from recipes.study.pictures import save_small

_SIZE = "Size of the model or the run."
_DEFAULT = Path("runs/decoder")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: Annotated[int, Option(min=1, help="Number of seeds: 0, 1, ...")] = 3,
    out: Annotated[
        Path | None,
        Option(help="Folder; one that exists is gone on with. Default: runs/decoder, -2, ..."),
    ] = None,
    data: Annotated[
        str | None, Option(help="enwik8 or a prefix of it, as for the recipe enwik8.")
    ] = None,
    layers: Annotated[int, Option(min=4, help=_SIZE)] = SIZES.layers,
    width: Annotated[int, Option(min=8, help=_SIZE)] = SIZES.width,
    heads: Annotated[int, Option(min=1, help=_SIZE)] = SIZES.heads,
    context: Annotated[int, Option(min=2, help=_SIZE)] = SIZES.context,
    batch: Annotated[int, Option(min=1, help=_SIZE)] = SIZES.batch,
    steps: Annotated[int, Option(min=8, help=_SIZE)] = SIZES.steps,
    warmup: Annotated[int, Option(min=1, help=_SIZE)] = SIZES.warmup,
    windows: Annotated[
        int, Option(min=64, help="Held-out windows that each reading looks at.")
    ] = PROBE_WINDOWS,
    rows: Annotated[int, Option(min=256, help="Rows that each reading measures.")] = ROWS,
    first: Annotated[
        int, Option(min=1, help="First step that is read after step 0.")
    ] = FIRST_READING,
    workers: Annotated[int, Option(min=1, help="Seeds trained side by side.")] = 2,
) -> None:
    """Train a character decoder from several seeds and hold the papers' claims against it."""
    try:
        if width % heads:
            raise StudyError(f"--heads {heads} do not divide --width {width}: choose heads that do")
        sizes = replace(
            SIZES, layers=layers, width=width, heads=heads, context=context, batch=batch,
            steps=steps, warmup=warmup,
        )  # fmt: skip
        folder = out or _free_folder()
        study = Study(sizes, windows, rows, first)
        train_seeds(study, seeds, folder=folder, data=data, workers=workers)
        claims, unanswered = decoder_claims(folder)
    except (StudyError, DataError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    for claim in claims:
        measured = claim.measured
        print(f"{claim.verdict:<10} {claim.name}: {measured.mean:.3g} ± {measured.margin:.2g}")
    for name in unanswered:
        print(f"no value   {name}")
    print(f"claims: {save_claims(claims, folder)}")
    print(f"figure: {save_small(decoder_figure(folder), folder / 'decoder.png')}")
    print(f"figure: {save_small(seeds_figure(folder), folder / 'decoder_seeds.png')}")


def _free_folder() -> Path:
    """Find the first of runs/decoder, runs/decoder-2, ... that does not exist."""
    folder, number = _DEFAULT, 2
    while folder.exists():
        folder, number = Path(f"{_DEFAULT}-{number}"), number + 1
    return folder


if __name__ == "__main__":
    app(prog_name="python -m recipes.decoder")
