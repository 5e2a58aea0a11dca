"""One run of the recipe: text, model, training with the monitor, and what it showed."""

import json
import logging
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from geomon import Readings, log_spaced, read
from geomon.analysis import summarise
from geomon.lightning import GeometryMonitor
from geomon.record import FILE_NAME
from geomon.show import geometry_figure, save
from recipes.enwik8.data import Corpus, load
from recipes.enwik8.live import LiveView
from recipes.enwik8.model import CharacterDecoder
from recipes.enwik8.presets import Preset
from recipes.enwik8.windows import CharacterData, spread

# Two batches of 4,096: the paper's least, twice, for a deviation. Under a budget fewer, or the look
# at step 0 alone would take half a per cent of the first 500 steps.
PROBE_TOKENS = 8192
FRUGAL_PROBE_TOKENS = 2048
BATCHES = 2

_CHECKPOINTS = "checkpoints"
_SETTINGS = "settings.json"


class RecipeError(ValueError):
    """The run cannot be made as asked; one line says what was given, expected, and to do."""


@dataclass(frozen=True)
class Settings:
    """Everything that makes a run what it is; a resumed run has the same."""

    arch: str
    text: Literal["bytes", "clean"]
    seed: int
    preset: Preset


@dataclass(frozen=True)
class Machine:
    """How a run is carried out; may differ when it is resumed."""

    accelerator: str
    devices: str
    strategy: str
    compiled: bool
    logger: str
    budget: float | None = None


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    folder: Path
    readings: Readings
    bits_per_character: float
    overhead: float


def train(
    settings: Settings, machine: Machine, *, folder: Path, data: str | None, resume: bool
) -> Result:
    """Train, watch and show.

    Raises:
        RecipeError: The folder holds another run, or none to resume.
        DataError: The text cannot be used.
    """
    _quieten()
    check_folder(folder, settings, resume=resume)
    preset = settings.preset
    corpus = load(data, text=settings.text, minimum=20 * (PROBE_TOKENS + preset.context))
    print(f"text: {corpus.source}; {corpus.vocabulary_size} distinct characters", flush=True)
    L.seed_everything(settings.seed, verbose=False)
    model = CharacterDecoder(
        settings.arch, corpus.vocabulary_size, preset, compiled=machine.compiled
    )
    print(_introduction(settings, machine, model, folder), flush=True)
    history = list(read(folder)) if (folder / FILE_NAME).is_file() else []
    live = LiveView(history)
    monitor = GeometryMonitor(
        probe=probe_windows(corpus, preset.context, machine.budget),
        schedule=log_spaced(),
        batches=BATCHES,
        directory=folder,
        sinks=[live],
        budget=machine.budget,
        seed=settings.seed,
    )
    trainer = _trainer(settings, machine, folder, callbacks=[monitor, live])
    keep_settings(folder, settings)
    last = folder / _CHECKPOINTS / "last.ckpt"
    try:
        trainer.fit(
            model,
            CharacterData(corpus, preset, seed=settings.seed),
            ckpt_path=last if resume else None,
        )
    except SystemExit:  # Lightning's way out after Ctrl-C
        print(_interrupted(folder, last), flush=True)
        raise
    bits = float(trainer.callback_metrics["validation/bits_per_character"])
    return Result(folder, read(folder), bits, monitor.overhead)


def show(result: Result) -> None:
    """The figure, and the run in words."""
    figure = result.folder / "geometry.png"
    save(geometry_figure(result.readings), figure)
    print()
    for sentence in summarise(result.readings):
        print(f"  {sentence}")
    print(f"  validation: {result.bits_per_character:.3f} bits per character.")
    print(f"figure: {figure}\nrecord: {result.folder / FILE_NAME}")
    if (result.folder / "tensorboard").is_dir():
        print(f"curves: tensorboard --logdir {result.folder}")


def probe_windows(corpus: Corpus, context: int, budget: float | None) -> Any:
    """Held-out windows that every reading looks at, so that readings compare."""
    tokens = PROBE_TOKENS if budget is None else FRUGAL_PROBE_TOKENS
    return spread(corpus.validation, context, tokens // context)


def check_folder(folder: Path, settings: Settings, *, resume: bool) -> None:
    """Raise a `RecipeError` where the folder does not fit what is asked."""
    if not resume:
        if (folder / FILE_NAME).exists():
            raise RecipeError(
                f"--out {folder} holds a run already: go on with it by --resume, or choose another "
                "folder"
            )
        return
    if not (folder / _CHECKPOINTS / "last.ckpt").is_file():
        raise RecipeError(
            f"--resume found no checkpoint in {folder / _CHECKPOINTS}: give the folder of an "
            "earlier run by --out, or leave --resume out"
        )
    earlier = json.loads((folder / _SETTINGS).read_text())
    now = asdict(settings)
    differing = [
        f"{name} was {earlier.get(name)}" for name in now if earlier.get(name) != now[name]
    ]
    if differing:
        raise RecipeError(
            f"--resume in {folder} needs the settings of the earlier run: {'; '.join(differing)}"
        )


def keep_settings(folder: Path, settings: Settings) -> None:
    """Write what `--resume` compares with."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _SETTINGS).write_text(json.dumps(asdict(settings), indent=2) + "\n")
    except OSError as error:
        raise RecipeError(
            f"--out {folder} cannot be written ({error.strerror}): choose another folder"
        ) from error


def _trainer(
    settings: Settings, machine: Machine, folder: Path, *, callbacks: list[Any]
) -> L.Trainer:
    steps = settings.preset.steps
    often = max(1, steps // 10)
    checkpoint = ModelCheckpoint(
        folder / _CHECKPOINTS, save_last=True, save_top_k=0, every_n_train_steps=often
    )
    return L.Trainer(
        accelerator=machine.accelerator,
        devices=machine.devices,
        strategy=machine.strategy,
        precision=settings.preset.precision,  # type: ignore[arg-type]
        max_steps=steps,
        max_epochs=1,
        val_check_interval=min(often, steps),
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        use_distributed_sampler=False,
        enable_model_summary=False,
        default_root_dir=folder,
        logger=_logger(machine.logger, folder),
        callbacks=[*callbacks, checkpoint],
    )


def _logger(name: str, folder: Path) -> Logger:
    if name == "tensorboard":
        return TensorBoardLogger(folder, name="", version="tensorboard")
    if name == "csv":
        return CSVLogger(folder, name="", version="csv")
    if name == "wandb":
        return WandbLogger(name=folder.name, project="geomon-enwik8", save_dir=folder)
    raise RecipeError(f"--logger {name!r} is not known: expected tensorboard, wandb or csv")


def _introduction(
    settings: Settings, machine: Machine, model: CharacterDecoder, folder: Path
) -> str:
    preset = settings.preset
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"model: {settings.arch}, {preset.layers} layers of width {preset.width}, {preset.heads} "
        f"heads, {parameters:,} parameters; {preset.steps} steps of {preset.batch} x "
        f"{preset.context} characters, {preset.precision}, logs in {folder}"
    )


def _interrupted(folder: Path, last: Path) -> str:
    kept = f"interrupted: {folder} keeps every reading"
    return f"{kept}; go on with --resume --out {folder}" if last.is_file() else kept


def _quieten() -> None:
    """Lightning's and transformers' advice is for those who write the script."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for advice in (
        "does not have many workers",
        "smaller than the logging interval",
        "Checkpoint directory",
        "LeafSpec",
        "resuming from",
    ):
        warnings.filterwarnings("ignore", f".*{advice}.*")
