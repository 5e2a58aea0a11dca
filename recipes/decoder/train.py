"""Training of one decoder for each seed, two of them side by side, each with a record."""

import json
import logging
import math
import os
import time
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from geomon import Reading, log_spaced, read
from geomon.lightning import GeometryMonitor
from geomon.show import format_line
from recipes.decoder.metrics import DECODER_METRICS
from recipes.enwik8.data import load
from recipes.enwik8.model import CharacterDecoder
from recipes.enwik8.presets import PRESETS, Preset
from recipes.enwik8.windows import CharacterData, spread
from recipes.study import RunError, run_side_by_side, seed_folder, seed_folders

# Windows that every reading looks at: the spectrum of their last tokens needs twice the width.
PROBE_WINDOWS = 256
ROWS = 4096
# Half of the readings on a logarithmic scale lie before this step, and show little that is new.
FIRST_READING = 32
PER_OCTAVE = 2
# Half the length of the recipe enwik8: several seeds in the time of one.
SIZES = replace(PRESETS["cpu"], steps=750, warmup=50)
# Of its hidden states the papers' profiles end with those that the final norm has passed.
EXTRA_LAYERS = ("final_norm",)

_SETTINGS = "settings.json"
_TIMING = "timing.json"


@dataclass(frozen=True)
class Study:
    """What makes the experiment what it is; every seed has the same.

    Attributes:
        sizes: Sizes of model and run.
        windows: Number of held-out windows that a reading looks at.
        rows: Number of rows that a reading measures.
        first: First step that is read after step 0.
    """

    sizes: Preset = SIZES
    windows: int = PROBE_WINDOWS
    rows: int = ROWS
    first: int = FIRST_READING


class PrintedLines:
    """Sink that prints one line for each reading.

    Args:
        name: What stands before each line.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._readings: list[Reading] = []

    def write(self, reading: Reading) -> None:
        """Print a reading."""
        self._readings.append(reading)
        print(f"{self._name}: {format_line(reading, self._readings)}", flush=True)

    def close(self) -> None:
        """Close nothing."""


def train_seeds(
    study: Study,
    seeds: int,
    *,
    folder: Path,
    data: str | None = None,
    processes: int = 2,
    report: Callable[[int, int], object] = lambda done, count: None,
) -> None:
    """Train one model for each seed; records that are complete are kept, others gone on with.

    Args:
        study: Sizes.
        seeds: Number of seeds, which are 0, 1, ...
        folder: Folder of the experiment.
        data: File with the text; None for that of the recipe `enwik8`.
        processes: Number of processes; each uses one thread.
        report: Function that is called with the number of finished seeds and of all that were
            missing.

    Raises:
        RunError: The folder holds an experiment of other sizes.
    """
    _keep_settings(folder, study)
    missing = [s for s in range(seeds) if not is_complete(seed_folder(folder, s), study.sizes)]
    if not missing:
        return
    load(data, text="bytes", minimum=_characters(study))  # downloaded once, before the processes
    run_side_by_side(
        train_seed,
        [(study, seed, folder, data) for seed in missing],
        processes=min(processes, len(missing)),
        report=report,
    )


def is_complete(folder: Path, sizes: Preset) -> bool:
    """Return whether a folder holds the record of a whole run."""
    try:
        return bool(max((r.step for r in read(folder)), default=-1) >= sizes.steps)
    except (OSError, ValueError):
        return False


def train_seed(study: Study, seed: int, folder: Path, data: str | None) -> None:
    """Train the model of one seed and record its geometry.

    Args:
        study: Sizes.
        seed: Seed of weights and windows.
        folder: Folder of the experiment.
        data: File with the text; None for that of the recipe `enwik8`.
    """
    begun = time.process_time()
    torch.set_num_threads(1)
    _quieten()
    sizes, own = study.sizes, seed_folder(folder, seed)
    corpus = load(data, text="bytes", minimum=_characters(study))
    L.seed_everything(seed, verbose=False)
    model = CharacterDecoder("gpt2", corpus.vocabulary_size, sizes)
    monitor = GeometryMonitor(
        metrics=DECODER_METRICS,
        probe=spread(corpus.validation, sizes.context, study.windows),
        schedule=log_spaced(per_octave=PER_OCTAVE, first=study.first),
        tokens=study.rows,
        batches=1,
        extra_layers=EXTRA_LAYERS,
        directory=own,
        log=("validation/bits_per_character",),
        sinks=[PrintedLines(own.name)],
        budget=None,  # every seed is read at the same steps
        pictures=False,
        alerts=(),
    )
    often = max(1, sizes.steps // 10)
    checkpoints = own / "checkpoints"
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=sizes.steps,
        max_epochs=1,
        val_check_interval=often,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=own,
        logger=False,
        callbacks=[
            monitor,
            ModelCheckpoint(checkpoints, save_last=True, save_top_k=0, every_n_train_steps=often),
        ],
    )
    data_module = CharacterData(corpus, sizes, seed=seed)
    trainer.fit(model, data_module, ckpt_path=_resumable(checkpoints / "last.ckpt", sizes.steps))
    _add_seconds(own, time.process_time() - begun)


def seconds_taken(seeds: Sequence[Path], cores: int = 2) -> float:
    """Compute the time that the training of all seeds takes on cores that do nothing else.

    Args:
        seeds: Folders of the seeds, in order.
        cores: Number of cores, each of which trains one seed at a time.

    Returns:
        Seconds; NaN where the processor time of a seed is unknown.
    """
    free_at = [0.0] * cores
    for seconds in map(_seconds_of, seeds):
        free_at[free_at.index(min(free_at))] += seconds
    return max(free_at) if all(map(math.isfinite, free_at)) else math.nan


def load_study(folder: Path) -> Study:
    """Read what the experiment in a folder is.

    Raises:
        RunError: The folder holds no experiment.
    """
    try:
        settings = json.loads((folder / _SETTINGS).read_text())
        return Study(**{**settings, "sizes": Preset(**settings["sizes"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(
            f"{folder} holds no run of this experiment: begin with make decoder"
        ) from error


def complete_seeds(folder: Path) -> list[Path]:
    """List the folders of the seeds whose record is complete, in order.

    Raises:
        RunError: The folder holds no experiment, or no seed is complete.
    """
    sizes = load_study(folder).sizes
    complete = [path for path in seed_folders(folder) if is_complete(path, sizes)]
    if not complete:
        raise RunError(
            f"{folder} has no complete seed: go on with make decoder ARGS='--out {folder}'"
        )
    return complete


def _characters(study: Study) -> int:
    """Fewest characters of a text whose twentieth holds the windows that are looked at."""
    return 20 * (study.windows + 1) * study.sizes.context


def _keep_settings(folder: Path, study: Study) -> None:
    if (folder / _SETTINGS).exists() and load_study(folder) != study:
        raise RunError(
            f"--out {folder} holds this experiment with other sizes: choose another folder, or the "
            "same sizes"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _SETTINGS).write_text(json.dumps(asdict(study), indent=2) + "\n")


def _seconds_of(folder: Path) -> float:
    """Processor time that the training of a seed took so far, in seconds; NaN where unknown."""
    try:
        return float(json.loads((folder / _TIMING).read_text())["processor_seconds"])
    except (OSError, ValueError, KeyError):
        return math.nan


def _resumable(checkpoint: Path, steps: int) -> Path | None:
    """Return a checkpoint from which there is something to train; None to start at step 0.

    The run may have been ended after its last step and before its last reading.
    """
    if not zipfile.is_zipfile(checkpoint):  # none, or one that was not written to its end
        return None
    state = torch.load(checkpoint, map_location="cpu", weights_only=False)
    return checkpoint if state["global_step"] < steps else None


def _add_seconds(folder: Path, seconds: float) -> None:
    before = _seconds_of(folder)
    total = seconds + (before if math.isfinite(before) else 0.0)
    (folder / _TIMING).write_text(json.dumps({"processor_seconds": total}) + "\n")


def _quieten() -> None:
    """Lightning's advice is for those who write the script."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for advice in ("does not have many workers", "Checkpoint directory", "LeafSpec"):
        warnings.filterwarnings("ignore", f".*{advice}.*")
