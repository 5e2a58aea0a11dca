"""`python -m recipes.enwik8`: pretrain a decoder on enwik8 or other text and watch its geometry."""

import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from recipes.enwik8.extras import explain_missing

if missing := explain_missing():
    print(missing, file=sys.stderr)
    sys.exit(2)

import typer
from torch.cuda import is_available as has_cuda
from typer import Option

from geomon.lightning import GeometryMonitor
from recipes.enwik8.data import DataError
from recipes.enwik8.presets import PRESETS, Preset, preset_for_hardware
from recipes.enwik8.subwords import FEWEST, MOST
from recipes.enwik8.train import Machine, RecipeError, Settings, show, train

# Lightning starts the other ranks with the environment of the first: one folder for all of them.
_FOLDER_OF_ALL_RANKS = "GEOMON_RECIPE_FOLDER"

_DATA = (
    "Any text, a prefix of enwik8 for instance: raw, .gz, .bz2, .xz or .zip. Default: the file "
    "that the environment variable ENWIK8 names; else, for characters, a download or the text that "
    "Python carries, and for subwords the installed packages."
)
_PRESET = "Default: that of the preset."

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    data: Annotated[str | None, Option(help=_DATA)] = None,
    text: Annotated[
        Literal["bytes", "clean"], Option(help="All bytes, or prose without markup and media.")
    ] = "bytes",
    preset: Annotated[
        Literal["cpu", "small", "base"] | None, Option(help="Sizes; by the hardware if not given.")
    ] = None,
    arch: Annotated[
        Literal["gpt2", "llama"], Option(help="Decoder of the transformers library.")
    ] = "gpt2",
    layers: Annotated[int | None, Option(min=1, help=f"Blocks. {_PRESET}")] = None,
    width: Annotated[
        int | None, Option(min=1, help=f"Width of the hidden states. {_PRESET}")
    ] = None,
    heads: Annotated[int | None, Option(min=1, help=f"Heads of each attention. {_PRESET}")] = None,
    context: Annotated[int | None, Option(min=2, help=f"Tokens in a window. {_PRESET}")] = None,
    batch: Annotated[int | None, Option(min=1, help=f"Windows in a batch. {_PRESET}")] = None,
    steps: Annotated[int | None, Option(min=1, help=f"Optimizer updates. {_PRESET}")] = None,
    learning_rate: Annotated[float | None, Option(help=f"Highest learning rate. {_PRESET}")] = None,
    dropout: Annotated[
        float | None, Option(min=0, max=0.99, help=f"Share of dropout. {_PRESET}")
    ] = None,
    precision: Annotated[
        str | None, Option(help=f"Precision, as Lightning names it: bf16-mixed. {_PRESET}")
    ] = None,
    vocabulary: Annotated[
        int | None,
        Option(min=0, max=MOST, help=f"Subwords to train; 0 for characters. {_PRESET}"),
    ] = None,
    compile: Annotated[
        bool | None,
        Option("--compile/--no-compile", help="Compile each block. Default: base does on CUDA."),
    ] = None,
    accelerator: Annotated[str, Option(help="As Lightning names it: cpu, gpu, mps.")] = "auto",
    devices: Annotated[str, Option(help="Number of devices.")] = "auto",
    strategy: Annotated[
        str, Option(help="Of several devices, as Lightning names it: ddp.")
    ] = "auto",
    seed: Annotated[
        int, Option(min=0, max=2**32 - 1, help="Seed of weights, windows and sampled rows.")
    ] = 0,
    out: Annotated[
        Path | None, Option(help="Folder of the run. Default: runs/enwik8, runs/enwik8-2, ...")
    ] = None,
    budget: Annotated[
        str, Option(help="Largest share of the run's time for geomon, 0.05 or 5%, its default.")
    ] = "auto",
    resume: Annotated[
        bool, Option("--resume", help="Go on from the last checkpoint in --out.")
    ] = False,
    minutes: Annotated[
        float | None,
        Option(
            help="End after so many minutes with a checkpoint; --resume goes on. Default: never."
        ),
    ] = None,
    logger: Annotated[
        Literal["tensorboard", "wandb", "csv"], Option(help="Where curves are shown.")
    ] = "tensorboard",
) -> None:
    """Pretrain a decoder on enwik8 or other text and watch its geometry live."""
    try:
        _check_numbers(
            budget=budget, learning_rate=learning_rate, vocabulary=vocabulary, minutes=minutes
        )
        sizes = _override(
            PRESETS[preset or preset_for_hardware()],
            layers=layers, width=width, heads=heads, context=context, batch=batch, steps=steps,
            learning_rate=learning_rate, dropout=dropout, precision=precision,
            vocabulary=vocabulary,
        )  # fmt: skip
        if compile is None:
            compile = sizes.compiled and accelerator in ("auto", "gpu", "cuda") and has_cuda()
        result = train(
            Settings(arch, text, seed, sizes),
            Machine(accelerator, devices, strategy, compile, logger, budget, minutes),
            folder=out or _new_folder(resume=resume),
            data=data,
            resume=resume,
        )
    except (DataError, RecipeError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    if os.environ.get("LOCAL_RANK", "0") == "0":
        show(result)


def _check_numbers(
    *, budget: str, learning_rate: float | None, vocabulary: int | None, minutes: float | None
) -> None:
    """Raise a `RecipeError` for what no run can have, before anything is loaded."""
    try:
        GeometryMonitor(budget=budget)
    except ValueError as error:
        raise RecipeError(f"--budget: {error}") from error
    if learning_rate is not None and not 0 <= learning_rate < math.inf:
        raise RecipeError(
            f"--learning-rate {learning_rate} is no number from 0: give one like 0.001"
        )
    if vocabulary and vocabulary < FEWEST:
        raise RecipeError(
            f"--vocabulary {vocabulary} is too few for all bytes: give {FEWEST} to {MOST:,}, or 0 "
            "for characters"
        )
    if minutes is not None and not 0 < minutes < math.inf:
        raise RecipeError(f"--minutes {minutes} is no time: give a number above 0, like 5")


def _override(preset: Preset, **sizes: Any) -> Preset:
    """The preset with the sizes that were given.

    Raises:
        RecipeError: Heads that do not share the width evenly.
    """
    chosen = replace(preset, **{name: size for name, size in sizes.items() if size is not None})
    chosen = replace(chosen, vocabulary=chosen.vocabulary or None)  # 0 stands for characters
    if chosen.width % chosen.heads:
        raise RecipeError(
            f"--width {chosen.width} cannot be shared among --heads {chosen.heads}: choose heads "
            "that divide it"
        )
    return chosen


def _new_folder(*, resume: bool) -> Path:
    """The first free of runs/enwik8, runs/enwik8-2, ...; for a resume the last that is not."""
    if chosen := os.environ.get(_FOLDER_OF_ALL_RANKS):
        return Path(chosen)
    names = [Path("runs/enwik8"), *(Path(f"runs/enwik8-{number}") for number in range(2, 10_000))]
    free = next(index for index, name in enumerate(names) if not name.exists())
    folder = names[max(0, free - 1)] if resume else names[free]
    os.environ[_FOLDER_OF_ALL_RANKS] = str(folder)
    return folder


if __name__ == "__main__":
    app(prog_name="python -m recipes.enwik8")
