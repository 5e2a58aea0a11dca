"""`python -m recipes.encoder_decoder`: anisotropy over depth, with and without the causal mask."""

import sys
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
from recipes.enwik8.data import load
from recipes.study import new_folder, train_kinds
from recipes.study.command import (
    Batch,
    Context,
    Heads,
    Out,
    Processes,
    SeedCount,
    Steps,
    Text,
    Width,
    check_heads,
    leave_results,
    one_line_errors,
    print_progress,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: SeedCount = 3,
    out: Out = None,
    data: Text = None,
    layers: Annotated[int, Option(min=3, help="Blocks of each model.")] = 6,
    width: Width = 48,
    heads: Heads = 4,
    context: Context = 32,
    batch: Batch = 16,
    steps: Steps = 400,
    processes: Processes = 2,
) -> None:
    """Compare the anisotropy over depth of decoders and encoders that are otherwise alike."""
    with one_line_errors():
        check_heads(width, heads)
        corpus = load(data, minimum=20 * (PROBE_CHARACTERS + context))
        print(f"text: {corpus.source}", flush=True)
        folder = out or new_folder("encoder_decoder")
        training = Training(Size(layers, width, heads, context), steps, batch)
        train_kinds(
            train, KINDS, training, corpus,
            seeds=seeds, folder=folder, processes=processes, report=print_progress(),
        )  # fmt: skip
        picture = save(draw(folder), folder / "encoder_decoder.png")
        leave_results(claims(folder), folder, figures=[picture], table=table(folder))


if __name__ == "__main__":
    app(prog_name="python -m recipes.encoder_decoder")
