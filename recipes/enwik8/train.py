"""One run of the recipe: text, model, training with the monitor, and what it showed."""

import contextlib
import json
import logging
import os
import time
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from geomon import Readings, read
from geomon.analysis import summarise
from geomon.lightning import GeometryMonitor
from geomon.record import FILE_NAME
from geomon.show import geometry_figure, save
from geomon.show.commands import fit_to_terminal
from recipes.enwik8.data import Corpus, load
from recipes.enwik8.extras import explain_missing
from recipes.enwik8.live import LiveView
from recipes.enwik8.model import CharacterDecoder, bits_per_character, nats_per_token
from recipes.enwik8.presets import Preset
from recipes.enwik8.slices import Slice
from recipes.enwik8.subwords import SubwordCorpus, prepare
from recipes.enwik8.windows import CharacterData, spread

# Tokens that a reading looks at, of which it measures 4,096 rows, the paper's least batch:
# rows of more windows are less alike.
PROBE_TOKENS = 8192
# The intervals come from halves of the windows, and need no second batch.
SPLITS = 1

_CHECKPOINTS = "checkpoints"
_SETTINGS = "settings.json"
_TEXT = "text_sha256"
_VALIDATION = "validation/"


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
    budget: str = "auto"
    minutes: float | None = None


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    folder: Path
    readings: Readings
    validation: dict[str, float]  # the loss in each of its units: "bits_per_character"
    overhead: float


def train(
    settings: Settings, machine: Machine, *, folder: Path, data: str | None, resume: bool
) -> Result:
    """Train, watch and show.

    Raises:
        RecipeError: The folder holds another run, or none to resume.
        DataError: The text cannot be used.
    """
    began = time.monotonic()
    _quieten()
    check_machine(machine)
    check_folder(folder, settings, resume=resume)
    preset = settings.preset
    check_context(preset.context)
    with _plain_errors(folder):
        corpus = _corpus(settings, folder, data=data, resume=resume)
    print(f"text: {_described(corpus)}", flush=True)
    text_sha256 = corpus.sha256()
    last = folder / _CHECKPOINTS / "last.ckpt"
    if resume:
        check_text(folder, text_sha256)
        if not last.is_file():
            print("no checkpoint yet: the run starts over at step 0", flush=True)
    L.seed_everything(settings.seed, verbose=False)
    with _plain_errors(folder):
        model = CharacterDecoder(
            settings.arch, corpus.vocabulary_size, preset, compiled=machine.compiled,
            tokens_per_byte=corpus.tokens_per_byte if isinstance(corpus, SubwordCorpus) else None,
        )  # fmt: skip
    print(_introduction(settings, machine, model, folder), flush=True)
    history = _history(folder)
    live = LiveView(history, model.loss_name)
    validation = _VALIDATION + model.loss_name
    monitor = GeometryMonitor(
        probe=probe_windows(corpus, preset.context),
        # a validation at every reading, without a pass of its own
        probe_loss=nats_per_token if preset.vocabulary else bits_per_character,
        splits=SPLITS,
        directory=folder,
        sinks=[live],
        log=(validation,),
        budget=machine.budget,
        seed=settings.seed,
    )
    deadline = None if machine.minutes is None else began + 60 * machine.minutes
    part = Slice(last, every=max(1, preset.steps // 10), deadline=deadline)
    keep_settings(folder, settings, text_sha256)
    try:
        trainer = _trainer(settings, machine, folder, callbacks=[monitor, live, part])
    except Exception as error:  # each accelerator, strategy and logger has its own kinds
        raise RecipeError(
            f"{_first_sentence(error)}: check --accelerator, --devices, --strategy, --precision "
            "and --logger"
        ) from error
    data_module = CharacterData(corpus, preset, seed=settings.seed)
    try:
        with _plain_errors(folder):
            trainer.fit(model, data_module, ckpt_path=last if resume and last.is_file() else None)
            if validation not in trainer.callback_metrics:  # resumed after the last update
                trainer.validate(model, data_module, verbose=False)
    except SystemExit:  # Lightning's way out after Ctrl-C
        print(_interrupted(folder, last), flush=True)
        raise
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trained = part.last > part.first
    if trainer.is_global_zero and trained and (resume or part.last < preset.steps):
        print(_progress(part, preset, trainer.world_size, metrics, model.loss_name, folder))
    held_out = {
        name.removeprefix(_VALIDATION): value
        for name, value in metrics.items()
        if name.startswith(_VALIDATION)
    }
    return Result(folder, read(folder), held_out, monitor.overhead)


def show(result: Result) -> None:
    """The figure, and the run in words."""
    figure = result.folder / "geometry.png"
    save(geometry_figure(result.readings), figure)
    print()
    for sentence in summarise(result.readings):
        print(fit_to_terminal(sentence, indent="  "))
    print(f"  validation: {_losses(result.validation)}.")
    print(f"figure: {figure}\nrecord: {result.folder / FILE_NAME}")
    if (result.folder / "tensorboard").is_dir():
        print(f"curves: tensorboard --logdir {result.folder}")


def probe_windows(corpus: Corpus | SubwordCorpus, context: int) -> Any:
    """Held-out windows that every reading looks at, so that readings compare."""
    return spread(corpus.validation, context, PROBE_TOKENS // context)


def check_folder(folder: Path, settings: Settings, *, resume: bool) -> None:
    """Raise a `RecipeError` where the folder does not fit what is asked."""
    if not resume:
        if (folder / FILE_NAME).exists():
            raise RecipeError(
                f"--out {folder} holds a run already: go on with it by --resume, or choose another "
                "folder"
            )
        return
    last = folder / _CHECKPOINTS / "last.ckpt"
    if last.is_file() and not zipfile.is_zipfile(last):  # the directory stands at the end
        raise RecipeError(
            f"{last} is no whole checkpoint and cannot be read: delete it, and --resume starts over"
        )
    if not (folder / _SETTINGS).is_file():
        raise RecipeError(
            f"--resume found no checkpoint and no settings in {folder}: give the folder of an "
            "earlier run by --out, or leave --resume out"
        )
    earlier = _earlier(folder)
    now = asdict(settings)
    differing = [
        f"{name} was {earlier.get(name)}" for name in now if earlier.get(name) != now[name]
    ]
    if differing:
        raise RecipeError(
            f"--resume in {folder} needs the settings of the earlier run: {'; '.join(differing)}"
        )


def check_text(folder: Path, sha256: str) -> None:
    """Raise a `RecipeError` where the text is not the one that the run has begun with."""
    earlier = _earlier(folder).get(_TEXT)
    if earlier not in (None, sha256):
        raise RecipeError(
            f"--resume in {folder} needs the text of the earlier run, whose sha256 is "
            f"{str(earlier)[:12]}..., and this text has {sha256[:12]}...: give that one by --data"
        )


def check_context(context: int) -> None:
    """Raise a `RecipeError` where no window of the context fits into a probe."""
    if context > PROBE_TOKENS:
        raise RecipeError(
            f"--context {context} is longer than the {PROBE_TOKENS:,} tokens that a reading looks "
            f"at: choose at most {PROBE_TOKENS}"
        )


def check_machine(machine: Machine) -> None:
    """Raise a `RecipeError` where the logger is not installed."""
    modules = {"tensorboard": ["tensorboard"], "wandb": ["wandb"]}
    missing = explain_missing(*modules[machine.logger]) if machine.logger in modules else None
    if missing is not None:
        raise RecipeError(f"{missing.removeprefix('error: ')}, or choose --logger csv")


def _earlier(folder: Path) -> dict[str, Any]:
    """The settings that a run was begun with.

    Raises:
        RecipeError: They cannot be read.
    """
    path = folder / _SETTINGS
    try:
        earlier = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path} cannot be read ({error}): choose another folder") from error
    if not isinstance(earlier, dict):
        raise RecipeError(f"{path} holds no settings of a run: choose another folder")
    return earlier


def _history(folder: Path) -> Readings:
    """The run so far; empty if there is no record or the record is about to be put aside."""
    try:
        return read(folder)
    except (OSError, ValueError):
        return Readings([], [])


def _first_sentence(error: BaseException) -> str:
    """The beginning of a message, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.partition(". ")[0].rstrip(".")[:300]


@contextlib.contextmanager
def _plain_errors(folder: Path) -> Iterator[None]:
    """Turn what the machine lacks in the middle of a run into a `RecipeError`.

    Raises:
        RecipeError: The memory or the disk is full.
    """
    go_on = f"then go on with --resume --out {folder}"
    try:
        yield
    except OSError as error:
        raise RecipeError(
            f"{folder} could not be written or read ({_first_sentence(error)}): make room, {go_on}"
        ) from error
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if "PytorchStreamWriter" in text or "file write failed" in text:
            raise RecipeError(f"{folder} could not be written: make room, {go_on}") from error
        out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if out_of_memory or "allocate memory" in text:
            raise RecipeError(
                "the memory does not suffice: choose a smaller --batch, --context or --width"
            ) from error
        raise


def keep_settings(folder: Path, settings: Settings, text_sha256: str) -> None:
    """Write what `--resume` compares with."""
    content = {**asdict(settings), _TEXT: text_sha256}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _SETTINGS).write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise RecipeError(
            f"--out {folder} cannot be written ({error.strerror}): choose another folder"
        ) from error


def _trainer(
    settings: Settings, machine: Machine, folder: Path, *, callbacks: list[Any]
) -> L.Trainer:
    steps = settings.preset.steps
    return L.Trainer(
        accelerator=machine.accelerator,
        devices=machine.devices,
        strategy=machine.strategy,
        precision=settings.preset.precision,  # type: ignore[arg-type]
        max_steps=steps,
        max_epochs=1,
        val_check_interval=steps,  # at the end, over all windows; before that readings validate
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        use_distributed_sampler=False,
        enable_model_summary=False,
        enable_checkpointing=False,  # a Slice saves
        default_root_dir=folder,
        logger=_logger(machine.logger, folder),
        callbacks=callbacks,
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
        f"{preset.context} {_unit(preset)}, {preset.precision}{', compiled' * machine.compiled}, "
        f"logs in {folder}"
    )


def _corpus(
    settings: Settings, folder: Path, *, data: str | None, resume: bool
) -> Corpus | SubwordCorpus:
    """The text of the run, as characters or subwords."""
    preset = settings.preset
    minimum = 20 * (PROBE_TOKENS + preset.context)
    if preset.vocabulary is None:
        return load(data, text=settings.text, minimum=minimum)
    # Lightning starts the other ranks when the first has made the text.
    reuse = resume or os.environ.get("LOCAL_RANK", "0") != "0"
    return prepare(
        data, text=settings.text, vocabulary=preset.vocabulary, folder=folder, reuse=reuse,
        minimum=minimum,
    )  # fmt: skip


def _described(corpus: Corpus | SubwordCorpus) -> str:
    if isinstance(corpus, Corpus):
        return f"{corpus.source}; {corpus.vocabulary_size} distinct characters"
    each = sum(corpus.sizes) / corpus.tokens
    return (
        f"{corpus.source}; {corpus.vocabulary_size:,} subwords, {corpus.tokens:,} tokens of "
        f"{each:.2f} bytes"
    )


def _unit(preset: Preset) -> str:
    return "characters" if preset.vocabulary is None else "tokens"


def _losses(losses: Mapping[str, float]) -> str:
    """Losses in words: "3.412 nats per token, 1.299 bits per byte"."""
    return ", ".join(f"{value:.3f} {name.replace('_', ' ')}" for name, value in losses.items())


def _progress(
    part: Slice, preset: Preset, devices: int, metrics: Mapping[str, float], loss_name: str,
    folder: Path,
) -> str:  # fmt: skip
    """What a slice did, and how to go on if steps are left."""
    each = preset.batch * preset.context * devices  # tokens of a step
    shown = {name: metrics.get(f"{name}/{loss_name}") for name in ("train", "validation")}
    losses = [f"{name} {_losses({loss_name: x})}" for name, x in shown.items() if x is not None]
    line = (
        f"slice: steps {part.first:,} to {part.last:,} of {preset.steps:,} in {part.seconds:.0f} "
        f"s; {part.last * each:,} of {preset.steps * each:,} {_unit(preset)} trained; "
        f"{', '.join(losses)}"
    )
    if part.last < preset.steps:
        line += f"; go on with --resume --out {folder} and the same options"
    return line


def _interrupted(folder: Path, last: Path) -> str:
    again = "go on with" if last.is_file() else "no checkpoint yet, start over with"
    return f"interrupted: {folder} keeps every reading; {again} --resume --out {folder}"


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
