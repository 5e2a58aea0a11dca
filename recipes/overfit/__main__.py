"""`python -m recipes.overfit`: where the geometry turns when a model learns few texts by heart."""

import sys
from typing import Annotated

from recipes.enwik8.extras import explain_missing

if missing := explain_missing():
    print(missing, file=sys.stderr)
    sys.exit(2)

import typer
from typer import Option

from geomon.show.figures import save
from recipes.encoder_decoder.model import Size
from recipes.enwik8.data import load
from recipes.overfit.claims import claims, table
from recipes.overfit.figure import draw
from recipes.overfit.train import TEXTS, Training, train
from recipes.study import RunError, new_folder, train_kinds
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
    layers: Annotated[int, Option(min=1, help="Blocks of the model.")] = 3,
    width: Width = 64,
    heads: Heads = 4,
    context: Context = 32,
    batch: Batch = 16,
    steps: Steps = 300,
    few: Annotated[int, Option(min=2, help="Characters of the few texts.")] = 4096,
    distance: Annotated[int, Option(min=1, help="Steps between two readings.")] = 20,
    processes: Processes = 2,
) -> None:
    """Train on few texts and on plenty, and compare where the geometry and the loss turn."""
    with one_line_errors():
        check_heads(width, heads)
        if few <= context:
            raise RunError(f"--few {few} holds no window of --context {context}: give more")
        corpus = load(data, minimum=max(200_000, 20 * (context + 1), 2 * few))
        print(f"text: {corpus.source}", flush=True)
        folder = out or new_folder("overfit")
        training = Training(Size(layers, width, heads, context), steps, batch, few, distance)
        train_kinds(
            train, TEXTS, training, corpus,
            seeds=seeds, folder=folder, processes=processes, report=print_progress(),
        )  # fmt: skip
        picture = save(draw(folder), folder / "overfit.png")
        leave_results(claims(folder), folder, figures=[picture], table=table(folder))


if __name__ == "__main__":
    app(prog_name="python -m recipes.overfit")
