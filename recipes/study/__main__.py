"""`python -m recipes.study NAME`: run an experiment; `claims` writes the page of all claims."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer import Option

import recipes
from recipes.enwik8.text import load
from recipes.study.experiment import Experiment, one_line_errors, show, train_all
from recipes.study.page import write_page

Out = Annotated[
    Path | None,
    Option(help="Folder; what is complete there is kept. Default: runs/NAME."),
]  # fmt: skip
Text = Annotated[str | None, Option(help="Text, as `make enwik8` takes it.")]
Processes = Annotated[int, Option(min=1, help="Trainings side by side.")]

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True,
    help="Experiments on the claims of papers.",
)  # fmt: skip


def experiments() -> dict[str, type[Experiment]]:
    """Find all experiments: each folder of recipes/ with a module `experiment` holds one."""
    found = {}
    for path in sorted(Path(recipes.__file__).parent.glob("*/experiment.py")):
        if path.parent.name != "study":
            module = importlib.import_module(f"recipes.{path.parent.name}.experiment")
            found[path.parent.name] = module.EXPERIMENT
    return found


def command_of(experiment: type[Experiment]) -> Callable[..., None]:
    """Make the command of an experiment, whose options are the fields of its class."""

    def command(
        seeds: int, out: Path | None, data: str | None, processes: int, **options: Any
    ) -> None:
        with one_line_errors():
            chosen = experiment(**options)
            chosen.check()
            corpus = None
            if chosen.characters:
                corpus = load(data, minimum=chosen.characters)
                print(f"text: {corpus.source}", flush=True)
            folder = out or Path("runs") / chosen.name
            train_all(chosen, corpus, seeds=seeds, folder=folder, processes=processes)
            show(chosen, folder)

    kinds = get_type_hints(experiment, include_extras=True)
    seeds = Annotated[int, Option(min=1, help="Number of seeds: 0, 1, ...")]
    common: list[tuple[str, Any, Any]] = [
        ("seeds", seeds, experiment.default_seeds), ("out", Out, None), ("data", Text, None),
        ("processes", Processes, 2),
    ]  # fmt: skip
    own = [(field.name, kinds[field.name], field.default) for field in fields(experiment)]  # type: ignore[arg-type]
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, kind, default in common + own
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {name: kind for name, kind, _ in common + own}
    command.__doc__ = inspect.getdoc(experiment)
    return command


@app.command()
def claims(
    runs: Annotated[Path, Option(help="Folder of the experiments.")] = Path("runs"),
    out: Annotated[Path, Option("--out", "-o", help="The page.")] = Path("docs/claims.md"),
) -> None:
    """Write the page of all claims from what the experiments left."""
    with one_line_errors():
        count = write_page(runs, experiments(), out)
    print(f"{count} claims: {out}")


for _name, _experiment in experiments().items():
    app.command(_name)(command_of(_experiment))

if __name__ == "__main__":
    app(prog_name="python -m recipes.study")
