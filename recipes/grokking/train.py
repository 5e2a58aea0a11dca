"""One training on a part of the table, with geomon's callback on it."""

import logging
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from geomon import every, select
from geomon.lightning import GeometryMonitor
from recipes.grokking.data import LENGTH, Pairs, split, table
from recipes.grokking.data import select as select_pairs
from recipes.grokking.model import HELD_OUT_ACCURACY, TRAINING_ACCURACY, Answerer
from recipes.study import begin_training, finish_training

# Folder of the readings of held-out pairs, inside that of a training.
HELD_OUT = "held_out"

# Accuracy on held-out pairs at which a training ends.
_SOLVED = 0.99


def local_dimension(local_dimensions: Tensor) -> Tensor:
    """Mean over tokens of TwoNN on the 64 nearest rows of each.

    The metric of that name brings an interval over sequences, which costs as much again. Here the
    interval over seeds is asked for.
    """
    return local_dimensions.mean()


METRICS = select("effective_rank_last") | {"local_dimension": local_dimension}


@dataclass(frozen=True)
class Settings:
    """Everything that all trainings of the experiment share.

    Attributes:
        modulus: Number that the remainders are of.
        steps: Largest number of optimizer updates.
        reading_interval: Number of steps from a reading to the next.
        batch: Number of pairs in a batch.
        weight_decay: Weight decay of AdamW.
        probed: Number of pairs that a reading looks at; the same for all, as ranks depend on it.
        layers: Number of blocks.
        width: Width of the hidden states.
        heads: Number of heads.
    """

    modulus: int
    steps: int
    reading_interval: int
    batch: int
    weight_decay: float
    probed: int
    layers: int = 2
    width: int = 128
    heads: int = 4


def train(settings: Settings, fraction: float, seed: int, folder: Path) -> None:
    """Train until held-out pairs are answered; nothing is done where the record is complete.

    The training pairs are read into the folder, held-out ones into a folder in it.

    Args:
        settings: What all trainings share.
        fraction: Share of the pairs to train on.
        seed: Seed of the split, the weights and the batches.
        folder: Folder of the record.
    """
    of_this = {**asdict(settings), "fraction": fraction, "seed": seed}
    began = begin_training(folder, of_this)
    if began is None:
        return
    _quieten()
    train_pairs, held_out_pairs = split(table(settings.modulus), fraction, seed)
    L.seed_everything(seed, verbose=False)
    model = Answerer(
        settings.modulus, width=settings.width, heads=settings.heads, layers=settings.layers,
        weight_decay=settings.weight_decay,
    )  # fmt: skip
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=settings.steps, gradient_clip_val=1.0,
        val_check_interval=settings.reading_interval, check_val_every_n_epoch=None,
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            _stop_when_solved(),
            _monitor(train_pairs, settings, settings.reading_interval, folder),
            _monitor(held_out_pairs, settings, 5 * settings.reading_interval, folder / HELD_OUT),
        ],
    )  # fmt: skip
    trainer.fit(
        model,
        _batches(train_pairs, settings.batch, settings.steps),
        [_at_once(select_pairs(train_pairs, slice(1024))), _at_once(held_out_pairs)],
    )
    finish_training(folder, of_this, began)


def _monitor(pairs: Pairs, settings: Settings, interval: int, folder: Path) -> GeometryMonitor:
    """The callback, on the same pairs at every reading."""
    return GeometryMonitor(
        metrics=METRICS,
        probe=pairs.tokens[: settings.probed],
        schedule=every(interval),
        budget=None,  # runs are compared step by step
        tokens=settings.probed * LENGTH,
        batches=1,
        directory=folder,
        log=(TRAINING_ACCURACY, HELD_OUT_ACCURACY),
    )


def _stop_when_solved() -> EarlyStopping:
    return EarlyStopping(
        HELD_OUT_ACCURACY, mode="max", stopping_threshold=_SOLVED, patience=1_000_000_000
    )


def _batches(pairs: Pairs, batch: int, steps: int) -> DataLoader[tuple[Tensor, ...]]:
    """Batches drawn with replacement, as many as there are steps."""
    data = TensorDataset(*pairs)
    drawn = RandomSampler(data, replacement=True, num_samples=batch * steps)
    return DataLoader(data, sampler=BatchSampler(drawn, batch, drop_last=True), batch_size=None)


def _at_once(pairs: Pairs) -> DataLoader[tuple[Tensor, ...]]:
    """All pairs as one batch."""
    return DataLoader(TensorDataset(*pairs), batch_size=len(pairs.answers))


def _quieten() -> None:
    """Lightning's advice is for those who write the script."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for advice in ("does not have many workers", "LeafSpec", "smaller than the logging interval"):
        warnings.filterwarnings("ignore", f".*{advice}.*")
