"""Windows of a corpus: random ones to train on, evenly spread ones to validate and to probe."""

from collections.abc import Iterator

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from recipes.enwik8.data import Corpus
from recipes.enwik8.presets import Preset
from recipes.enwik8.subwords import SubwordCorpus

Ids = NDArray[np.uint8] | NDArray[np.uint16]


class Windows(Dataset[Tensor]):
    """Windows of `length` tokens at given places.

    Args:
        ids: The text, one id per token.
        length: Of a window.
    """

    def __init__(self, ids: Ids, length: int) -> None:
        self._ids = torch.from_numpy(ids)
        self._length = length

    def __len__(self) -> int:
        """Number of places at which a window can begin."""
        return len(self._ids) - self._length + 1

    def __getitem__(self, place: int) -> Tensor:
        """The window that begins at `place`, int64."""
        return self._ids[place : place + self._length].long()


class RandomPlaces(Sampler[int]):
    """The places of a whole run, drawn once by the seed: a resumed run goes on where it was.

    Its length stays that of the whole run: Lightning counts the batches before the resume too.

    Args:
        places: Number of places to draw from.
        count: Windows of the whole run.
        seed: Of the draw.
        skip: Windows that were trained on before.
    """

    def __init__(self, places: int, *, count: int, seed: int, skip: int = 0) -> None:
        self._places, self._count, self._seed, self._skip = places, count, seed, skip

    def __len__(self) -> int:
        """Windows of the whole run."""
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Places, from the first that was not trained on."""
        generator = torch.Generator().manual_seed(self._seed)
        places = torch.randint(self._places, (self._count,), generator=generator)
        return iter(places[self._skip :].tolist())


class CharacterData(L.LightningDataModule):
    """Random windows to train on, fixed ones to validate on; one token longer than the context.

    Args:
        corpus: The text.
        preset: Context, batch and steps.
        seed: Of the training windows; every rank draws its own.
        validation: Number of validation windows.
    """

    def __init__(
        self, corpus: Corpus | SubwordCorpus, preset: Preset, *, seed: int, validation: int = 512
    ) -> None:
        super().__init__()
        self._corpus, self._preset, self._seed, self._validation = corpus, preset, seed, validation

    def train_dataloader(self) -> DataLoader[Tensor]:
        """All batches of the run, without those before a resume."""
        assert self.trainer is not None
        preset = self._preset
        windows = Windows(self._corpus.train, preset.context + 1)
        places = RandomPlaces(
            len(windows),
            count=preset.batch * preset.steps,
            seed=self._seed + 1_000_003 * self.trainer.global_rank,
            skip=preset.batch * self.trainer.global_step,
        )
        return DataLoader(windows, batch_size=preset.batch, sampler=places)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Windows evenly spread over the validation text."""
        windows = spread(self._corpus.validation, self._preset.context + 1, self._validation)
        return DataLoader(windows, batch_size=self._preset.batch)  # type: ignore[arg-type]


def spread(ids: Ids, length: int, count: int) -> Tensor:
    """`count` windows of `length`, evenly spread over the text, [count, length].

    Raises:
        ValueError: The text is shorter than one window.
    """
    if len(ids) < length:
        raise ValueError(
            f"the text has {len(ids)} tokens, fewer than one window of {length}: give more "
            "text, or a shorter --context"
        )
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return torch.stack([torch.from_numpy(ids[start : start + length]).long() for start in starts])
