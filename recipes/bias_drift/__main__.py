"""`python -m recipes.bias_drift`: a block under a common bias of its input."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from recipes.enwik8.extras import explain_missing

if missing := explain_missing():
    print(missing, file=sys.stderr)
    sys.exit(2)

import typer
from typer import Option

from geomon.show import save
from recipes.bias_drift.block import KINDS, Kind
from recipes.bias_drift.claims import block_claims
from recipes.bias_drift.figure import Seeds, draw
from recipes.bias_drift.series import load_series
from recipes.bias_drift.watch import Sizes, watch_trained, watch_untrained
from recipes.enwik8.data import load
from recipes.study import (
    Claim,
    RunError,
    call,
    new_folder,
    run_side_by_side,
    seconds_on_two_cores,
)
from recipes.study.command import (
    Out,
    Processes,
    SeedCount,
    Text,
    leave_results,
    one_line_errors,
    print_progress,
)

_DEFAULT = Sizes()

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seeds: SeedCount = 3,
    out: Out = None,
    width: Annotated[int, Option(min=2, help="Width of the untrained block.")] = _DEFAULT.width,
    heads: Annotated[int, Option(min=1, help="Heads of the untrained block.")] = _DEFAULT.heads,
    sequences: Annotated[int, Option(min=1, help="Sequences.")] = _DEFAULT.sequences,
    length: Annotated[int, Option(min=2, help="Tokens of a sequence.")] = _DEFAULT.length,
    directions: Annotated[int, Option(min=1, help="Directions of the bias.")] = _DEFAULT.directions,
    trained_width: Annotated[
        int, Option(min=2, help="Width of the trained block.")
    ] = _DEFAULT.trained_width,
    steps: Annotated[
        int, Option(min=0, help="Steps of its training; 0 leaves it out.")
    ] = _DEFAULT.steps,
    data: Text = None,
    processes: Processes = 2,
) -> None:
    """Read untrained and trained blocks as the bias of their input grows."""
    with one_line_errors():
        sizes = Sizes(width, heads, sequences, length, directions, trained_width, steps)
        check_heads(sizes)
        folder = out or new_folder("bias_drift")
        claims = study(folder, sizes, seeds=seeds, data=data, processes=processes)
        leave_results(claims, folder, figures=[folder / "figure.png"])


def check_heads(sizes: Sizes) -> None:
    """Raise a `RunError` where heads do not share a width evenly.

    Args:
        sizes: Sizes of the blocks.
    """
    if sizes.width % sizes.heads or sizes.trained_width % (sizes.width // sizes.heads):
        raise RunError(
            f"--width {sizes.width} and --trained-width {sizes.trained_width} cannot both be "
            f"divided into heads as wide as those of --heads {sizes.heads}: choose heads that "
            "divide the first, and multiples of their width"
        )


def study(
    folder: Path, sizes: Sizes, *, seeds: int, data: str | None, processes: int
) -> list[Claim]:
    """Read all blocks, draw the figure and measure the claims.

    Args:
        folder: Folder of the experiment.
        sizes: Sizes of the blocks and of what they are given.
        seeds: Number of initialisations.
        data: Text for the training, as for recipes.enwik8.
        processes: Number of processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    untrained = {
        kind: [folder / f"untrained_{kind}/seed_{seed}" for seed in range(seeds)] for kind in KINDS
    }
    trained = {
        kind: [folder / f"trained_{kind}/seed_{seed}" for seed in range(seeds * bool(sizes.steps))]
        for kind in KINDS
    }
    jobs: list[tuple[object, ...]] = [
        (watch_untrained, kind, seed, sizes, place)
        for kind, places in untrained.items()
        for seed, place in enumerate(places)
    ]
    if sizes.steps:
        corpus = load(data)
        typer.echo(f"text: {corpus.source}")
        jobs += [
            (watch_trained, kind, seed, sizes, corpus, place)
            for kind, places in trained.items()
            for seed, place in enumerate(places)
        ]
    run_side_by_side(call, jobs, processes=processes, report=print_progress())
    return show(folder, sizes, untrained, trained)


def show(
    folder: Path,
    sizes: Sizes,
    untrained: Mapping[Kind, Sequence[Path]],
    trained: Mapping[Kind, Sequence[Path]],
) -> list[Claim]:
    """Draw the figure and measure the claims from the records.

    Args:
        folder: Folder of the experiment.
        sizes: Sizes of the blocks and of what they were given.
        untrained: Folders of the untrained blocks, one for each seed.
        trained: Folders of the trained blocks; none where there was no training.
    """
    tokens, head_width = sizes.sequences * sizes.length, sizes.width // sizes.heads
    seconds = seconds_on_two_cores(
        place for places in [*untrained.values(), *trained.values()] for place in places
    )
    inputs = f"{sizes.sequences} sequences of {sizes.length} tokens in place of 16 of 512"
    training = (
        f"one block of width {sizes.trained_width} after {sizes.steps} steps of filling in masked "
        f"characters, {inputs}"
    )
    start = {kind: [load_series(place) for place in places] for kind, places in untrained.items()}
    states: dict[Kind, tuple[Seeds, Seeds]] = {
        kind: (
            [load_series(place) for place in places],
            [load_series(place, sizes.steps) for place in places],
        )
        for kind, places in trained.items()
        if places
    }
    claims: list[Claim] = []
    for kind, seeds in start.items():
        known: list[tuple[Seeds, bool, str]] = [(seeds, False, inputs)]
        if kind in states:
            known.append((states[kind][1], True, training))
        for series, is_trained, differs in known:
            claims += block_claims(
                kind, series, tokens=tokens, head_width=head_width, trained=is_trained,
                seconds=seconds, differs=differs,
            )  # fmt: skip
    save(draw(start, states, sizes.length), folder / "figure.png")
    return claims


if __name__ == "__main__":
    app(prog_name="python -m recipes.bias_drift")
