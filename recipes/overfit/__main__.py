"""`python -m recipes.overfit`: where the geometry turns when a model learns few texts by heart."""

import sys
from pathlib import Path
from typing import Annotated

from recipes.enwik8.extras import explain_missing

if missing := explain_missing():
    print(missing, file=sys.stderr)
    sys.exit(2)

import typer
from typer import Option

from geomon.show.figures import save
from recipes.encoder_decoder.model import Size
from recipes.enwik8.data import DataError, load
from recipes.overfit.claims import claims, table
from recipes.overfit.figure import draw
from recipes.overfit.train import TEXTS, Training, train
from recipes.study import RunError, new_folder, run_side_by_side, save_claims, verdict_lines

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: Annotated[int, Option(min=1, help="Number of seeds: 0, 1, ...")] = 3,
    out: Annotated[
        Path | None,
        Option(help="Folder; what is complete there is kept. Default: runs/overfit, ..."),
    ] = None,
    data: Annotated[
        str | None, Option(help="enwik8 or a prefix of it, as `make enwik8` takes it.")
    ] = None,
    layers: Annotated[int, Option(min=1, help="Blocks of the model.")] = 3,
    width: Annotated[int, Option(min=2, help="Width of the hidden states.")] = 64,
    heads: Annotated[int, Option(min=1, help="Heads of each attention.")] = 4,
    context: Annotated[int, Option(min=2, max=4096, help="Characters in a window.")] = 32,
    batch: Annotated[int, Option(min=1, help="Windows in a batch.")] = 16,
    steps: Annotated[int, Option(min=1, help="Optimizer updates.")] = 300,
    few: Annotated[int, Option(min=2, help="Characters of the few texts.")] = 4096,
    distance: Annotated[int, Option(min=1, help="Steps between two readings.")] = 20,
    processes: Annotated[int, Option(min=1, help="Trainings side by side.")] = 2,
) -> None:
    """Train on few texts and on plenty, and compare where the geometry and the loss turn."""
    try:
        if width % heads:
            raise RunError(f"--width {width} cannot be shared among --heads {heads}: choose others")
        if few <= context:
            raise RunError(f"--few {few} holds no window of --context {context}: give more")
        corpus = load(data, minimum=max(200_000, 20 * (context + 1), 2 * few))
        print(f"text: {corpus.source}", flush=True)
        folder = out or new_folder("overfit")
        training = Training(Size(layers, width, heads, context), steps, batch, few, distance)
        run_side_by_side(
            train,
            [
                (name, training, corpus, seed, folder / f"seed_{seed}" / name)
                for seed in range(seeds)
                for name in TEXTS
            ],
            processes=processes,
            report=lambda done, of: print(f"training {done} of {of} is complete", flush=True),
        )
        found = claims(folder)
        save_claims(found, folder)
        picture = save(draw(folder), folder / "overfit.png")
    except (DataError, RunError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    print("\n".join(["", *table(folder), "", *verdict_lines(found)]))
    print(f"\nfigure: {picture}\nrecords: {folder}/seed_*/*; look at one with geomon watch")


if __name__ == "__main__":
    app(prog_name="python -m recipes.overfit")
