"""The command line: commands that look at a record, and `geomon scan`, which makes a record."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from geomon.advice import to_install
from geomon.record import printable
from geomon.show import add_commands, exit_on_bad_input
from geomon.version import __version__

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command line."""
    try:
        app = make_app()
    except ImportError as error:
        sys.exit(f"the command line needs typer and rich ({error}): {to_install('terminal')}")
    app()


def make_app() -> "typer.Typer":
    """Build the commands.

    Returns:
        The application.

    Raises:
        ImportError: If typer or rich is missing.
    """
    import typer

    app = typer.Typer(
        name="geomon",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    _add_version(app)
    add_commands(app)
    _add_metrics(app)
    _add_scan(app)
    return app


def _add_version(app: "typer.Typer") -> None:
    import typer

    def show(asked: bool) -> None:
        if asked:
            typer.echo(f"geomon {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option("--version", callback=show, is_eager=True, help="Print the version."),
        ] = False,
    ) -> None:
        """Look at geomon's record of a training run, or scan the checkpoints of a model."""


def _add_metrics(app: "typer.Typer") -> None:
    @app.command()
    def metrics() -> None:
        """List the metrics with titles, units and meanings, the default ones first."""
        from rich.console import Console
        from rich.table import Table

        from geomon.metrics import METRICS, MORE_METRICS, check_metrics

        console = Console()
        for which, group in (("by default", METRICS), ("on request", MORE_METRICS)):
            table = Table(title=f"Measured {which}", show_header=False, show_lines=True)
            table.add_column(no_wrap=True)
            for name, metric in check_metrics(group).items():
                unit = f", in {metric.text.unit}" if metric.text.unit else ""
                title = f"[bold]{metric.text.title}[/bold]{unit}"
                lines = filter(None, (title, metric.text.meaning, metric.text.healthy))
                table.add_row(name, "\n".join(lines))
            console.print(table)


def _add_scan(app: "typer.Typer") -> None:
    import typer

    option = typer.Option

    @app.command()
    def scan(
        model: Annotated[
            str,
            typer.Argument(
                help="Folder of a transformers model, of an adapter or of checkpoint-N folders, "
                "name of a model on the hub, or module:function, which builds the model of "
                "*.ckpt files.",
            ),
        ],
        checkpoints: Annotated[
            Path | None, option(help="Folder with checkpoint-N folders or *.ckpt files.")
        ] = None,
        revisions: Annotated[
            str, option(help="Revisions of a model on the hub, separated by commas.")
        ] = "",
        text: Annotated[Path | None, option(help="File with text for a text model.")] = None,
        tokenizer: Annotated[
            str | None,
            option(help="Tokenizer of the text: folder, hub name, or bytes; default: MODEL's."),
        ] = None,
        inputs: Annotated[
            Path | None,
            option(help="File with a batch, saved by torch.save: token ids, or images and sounds."),
        ] = None,
        directory: Annotated[Path, option(help="Folder of the record.")] = Path("scan"),
        sequences: Annotated[int, option(help="Largest number of sequences of the text.")] = 64,
        length: Annotated[int, option(help="Largest number of tokens in a sequence.")] = 128,
        tokens: Annotated[int, option(help="Rows in one split of the estimate.")] = 4096,
        splits: Annotated[int, option(help="Largest number of splits.")] = 1,
        seed: Annotated[int, option(help="Seed of the sampled rows.")] = 0,
        blocks: Annotated[
            str | None, option(help="Pattern of the names of the blocks, if they are not found.")
        ] = None,
        device: Annotated[str | None, option(help="Device of the models, such as cuda.")] = None,
    ) -> None:
        """Read every checkpoint of a model into one record; an interrupted scan resumes."""
        from geomon.monitor import check_count
        from geomon.show import Printer
        from geomon.sweep import find_named, read_inputs
        from geomon.sweep import scan as run

        sys.path.insert(0, "")  # the function that builds a model may be in the working folder
        with exit_on_bad_input():
            check_count("sequences", sequences)
            check_count("length", length)
            names = [name.strip() for name in revisions.split(",") if name.strip()]
            network, found = find_named(model, checkpoints, names)
            sizes = {"sequences": sequences, "length": length}
            batch = read_inputs(model, inputs, text, tokenizer, sizes)
            readings = run(
                network, found, batch, directory=directory, tokens=tokens, splits=splits,
                seed=seed, blocks=blocks, device=device, sinks=[Printer()],
            )  # fmt: skip
            steps = f"{len(readings)} step" + "s" * (len(readings) != 1)
            typer.echo(printable(f"{steps} in {directory}: geomon watch {directory}"))
