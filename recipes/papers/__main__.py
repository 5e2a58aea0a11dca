"""`python -m recipes.papers DIR`: draw the figures of single papers, of the record of any run."""

from pathlib import Path
from typing import Annotated

import typer

from geomon import read
from recipes.papers.arrays import MissingError
from recipes.papers.layers import drift_figure, norms_figure, spectra_figure
from recipes.papers.queries_keys import clouds_figure, means_figure, stability_figure
from recipes.study.drawing import save_small
from recipes.study.experiment import one_line_errors

OF_A_RUN = {
    "means": means_figure, "clouds": clouds_figure, "drift": drift_figure, "norms": norms_figure,
    "spectra": spectra_figure,
}  # fmt: skip

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    directories: Annotated[
        list[Path],
        typer.Argument(help="Folder of a run; folders of several for the figure stability.",
                       metavar="DIR..."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the figures. Default: papers/ in the first DIR.")
    ] = None,
    stack: Annotated[
        str | None, typer.Option(help="Which stack of a model with several: encoder, decoder.")
    ] = None,
) -> None:  # fmt: skip
    """Draw every figure that the first run can give, and stability of all runs."""
    with one_line_errors(ValueError):
        names = [path.name for path in directories]
        names = names if len({*names}) == len(names) else list(map(str, directories))
        runs = {
            name: read(path).of_stack(stack) for name, path in zip(names, directories, strict=True)
        }
    folder, first = out or directories[0] / "papers", next(iter(runs.values()))
    for name in (*OF_A_RUN, "stability"):
        try:
            figure = OF_A_RUN[name](first) if name in OF_A_RUN else stability_figure(runs)
            path = save_small(figure, folder / f"{name}.png")
        except MissingError as error:
            typer.echo(f"no {name}: {error}")
        else:
            typer.echo(f"wrote {path}")


if __name__ == "__main__":
    app(prog_name="python -m recipes.papers")
