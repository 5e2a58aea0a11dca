"""`python -m recipes.encoder_decoder`: anisotropy over depth, with and without the causal mask."""

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
from recipes.encoder_decoder.claims import claims, table
from recipes.encoder_decoder.figure import draw
from recipes.encoder_decoder.model import Size
from recipes.encoder_decoder.train import KINDS, PROBE_CHARACTERS, Training, train
from recipes.enwik8.data import DataError, load
from recipes.study import RunError, new_folder, run_side_by_side, save_claims, verdict_lines

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: Annotated[int, Option(min=1, help="Number of seeds: 0, 1, ...")] = 3,
    out: Annotated[
        Path | None,
        Option(help="Folder; what is complete there is kept. Default: runs/encoder_decoder, ..."),
    ] = None,
    data: Annotated[
        str | None, Option(help="enwik8 or a prefix of it, as `make enwik8` takes it.")
    ] = None,
    layers: Annotated[int, Option(min=3, help="Blocks of each model.")] = 6,
    width: Annotated[int, Option(min=2, help="Width of the hidden states.")] = 48,
    heads: Annotated[int, Option(min=1, help="Heads of each attention.")] = 4,
    context: Annotated[int, Option(min=2, max=4096, help="Characters in a window.")] = 32,
    batch: Annotated[int, Option(min=1, help="Windows in a batch.")] = 16,
    steps: Annotated[int, Option(min=1, help="Optimizer updates.")] = 400,
    processes: Annotated[int, Option(min=1, help="Trainings side by side.")] = 2,
) -> None:
    """Compare the anisotropy over depth of decoders and encoders that are otherwise alike."""
    try:
        if width % heads:
            raise RunError(f"--width {width} cannot be shared among --heads {heads}: choose others")
        corpus = load(data, minimum=20 * (PROBE_CHARACTERS + context))
        print(f"text: {corpus.source}", flush=True)
        folder = out or new_folder("encoder_decoder")
        training = Training(Size(layers, width, heads, context), steps, batch)
        run_side_by_side(
            train,
            [
                (name, training, corpus, seed, folder / f"seed_{seed}" / name)
                for seed in range(seeds)
                for name in KINDS
            ],
            processes=processes,
            report=lambda done, of: print(f"training {done} of {of} is complete", flush=True),
        )
        found = claims(folder)
        save_claims(found, folder)
        picture = save(draw(folder), folder / "encoder_decoder.png")
    except (DataError, RunError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    print("\n".join(["", *table(folder), "", *verdict_lines(found)]))
    print(f"\nfigure: {picture}\nrecords: {folder}/seed_*/*; look at one with geomon watch")


if __name__ == "__main__":
    app(prog_name="python -m recipes.encoder_decoder")
