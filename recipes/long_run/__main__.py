"""`python -m recipes.long_run`: write the page of a longer training from its record."""

import sys
from pathlib import Path
from typing import Annotated

from recipes.enwik8.extras import explain_missing

if missing := explain_missing("matplotlib", "typer"):
    print(missing, file=sys.stderr)
    sys.exit(2)

import typer
from typer import Argument, Option

from geomon import read
from recipes.long_run.changes import DEMO_STEPS
from recipes.long_run.figure import long_run_figure
from recipes.long_run.page import planned_steps, render
from recipes.study.pictures import save_small

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    folder: Annotated[Path, Argument(help="Folder of a run of the recipe enwik8.")] = Path(
        "runs/long_run"
    ),
    out: Annotated[Path, Option("--out", "-o", help="The page.")] = Path("docs/long_run.md"),
    picture: Annotated[Path, Option(help="Its picture.")] = Path("docs/pictures/long_run.png"),
) -> None:
    """Write the page of a longer training, and its picture, from the record."""
    try:
        readings = read(folder)
        if not len(readings) or readings[-1].step <= DEMO_STEPS:
            raise ValueError(
                f"{folder} holds no reading after step {DEMO_STEPS}, where the demo ends"
            )
        save_small(long_run_figure(readings), picture)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(readings, planned=planned_steps(folder), page=out, picture=picture))
    except (OSError, ValueError) as error:
        advice = f"train first: make enwik8 ARGS='--steps 12000 --out {folder}' (an hour)"
        typer.echo(f"error: {' '.join(str(error).split())}; {advice}", err=True)
        raise typer.Exit(2) from error
    print(f"page: {out}\npicture: {picture}")


if __name__ == "__main__":
    app(prog_name="python -m recipes.long_run")
