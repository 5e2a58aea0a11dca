"""`python -m recipes.decoder`: train a character decoder from several seeds; decide claims."""

import sys
from dataclasses import replace
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
    train_seeds,
)
from recipes.study import new_folder
from recipes.study.command import (
    Batch,
    Context,
    Heads,
    Out,
    Processes,
    SeedCount,
    Text,
    check_heads,
    leave_results,
    one_line_errors,
    print_progress,
)
from recipes.study.pictures import save_small

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: SeedCount = 3,
    out: Out = None,
    data: Text = None,
    layers: Annotated[int, Option(min=4, help="Blocks of the model.")] = SIZES.layers,
    width: Annotated[int, Option(min=8, help="Width of the hidden states.")] = SIZES.width,
    heads: Heads = SIZES.heads,
    context: Context = SIZES.context,
    batch: Batch = SIZES.batch,
    steps: Annotated[int, Option(min=8, help="Optimizer updates.")] = SIZES.steps,
    warmup: Annotated[
        int, Option(min=1, help="Updates until the learning rate is at its highest.")
    ] = SIZES.warmup,
    windows: Annotated[
        int, Option(min=64, help="Held-out windows that each reading looks at.")
    ] = PROBE_WINDOWS,
    rows: Annotated[int, Option(min=256, help="Rows that each reading measures.")] = ROWS,
    first: Annotated[
        int, Option(min=1, help="First step that is read after step 0.")
    ] = FIRST_READING,
    processes: Processes = 2,
) -> None:
    """Train a character decoder from several seeds and hold the papers' claims against it."""
    with one_line_errors():
        check_heads(width, heads)
        sizes = replace(
            SIZES, layers=layers, width=width, heads=heads, context=context, batch=batch,
            steps=steps, warmup=warmup,
        )  # fmt: skip
        folder = out or new_folder("decoder")
        study = Study(sizes, windows, rows, first)
        train_seeds(
            study, seeds, folder=folder, data=data, processes=processes, report=print_progress()
        )
        claims, unanswered = decoder_claims(folder)
        pictures = [
            save_small(decoder_figure(folder), folder / "decoder.png"),
            save_small(seeds_figure(folder), folder / "decoder_seeds.png"),
        ]
        silent = [f"no value   {name}" for name in unanswered]
        leave_results(claims, folder, figures=pictures, table=silent)


if __name__ == "__main__":
    app(prog_name="python -m recipes.decoder")
