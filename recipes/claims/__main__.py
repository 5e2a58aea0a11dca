"""`python -m recipes.claims`: write the page of all claims from what the experiments left."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import recipes
from recipes.claims.collect import CollectError, collect, experiments_in, newest_folders
from recipes.claims.page import render

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    folders: Annotated[
        list[Path] | None,
        Argument(help="Folders with claims.json. Default: of each experiment in runs/ the newest."),
    ] = None,
    out: Annotated[Path, Option("--out", "-o", help="The page.")] = Path("docs/claims.md"),
) -> None:
    """Write the page of all claims from what the experiments left."""
    own = Path(recipes.__file__).parent
    try:
        chosen = folders or newest_folders(Path("runs"))
        if not chosen:
            raise CollectError("runs/ holds no claims: run an experiment first, make decoder")
        collection = collect(chosen, experiments_in(own))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(collection, page=out, top=own.parent))
    except (CollectError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    for name in collection.missing:
        print(f"not run: make {name}")
    print(f"{len(collection.claims)} claims: {out}")


if __name__ == "__main__":
    app(prog_name="python -m recipes.claims")
