"""Which text, and which part of it, the recipe trains on, validates on and probes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipes.enwik8.data import Corpus
from recipes.enwik8.presets import Preset
from recipes.enwik8.train import PROBE_TOKENS, probe_windows
from recipes.enwik8.windows import CharacterData, spread

PRESET = Preset(2, 16, 2, 8, 4, 5, 1, 1e-3, 0.0, "32-true")
# The parts share no symbol: a window says by itself where it is from.
TRAIN, VALIDATION, TEST = range(100), range(100, 160), range(160, 200)


def part(symbols, count):
    random = np.random.default_rng(symbols[0])
    return random.choice(np.array(symbols, np.uint8), count)


@pytest.fixture
def corpus():
    return Corpus(
        "synthetic", bytes(range(200)), part(TRAIN, 20_000), part(VALIDATION, 9000), part(TEST, 900)
    )


def data(corpus, *, rank=0, step=0, seed=0, **told):
    found = CharacterData(corpus, PRESET, seed=seed, **told)
    found.trainer = SimpleNamespace(global_rank=rank, global_step=step)
    return found


def trained_on(corpus, **told):
    return torch.cat(list(data(corpus, **told).train_dataloader()))


def test_training_validation_and_probe_are_of_their_own_part_of_the_text(corpus):
    trained = trained_on(corpus)
    validated = torch.cat(list(data(corpus, validation=10).val_dataloader()))
    probed = probe_windows(corpus, PRESET.context)
    for windows, symbols in ((trained, TRAIN), (validated, VALIDATION), (probed, VALIDATION)):
        assert set(windows.flatten().tolist()) <= set(symbols)
        assert windows.dtype == torch.int64
    # One longer than the context, for the next character; of a probe the last one is read.
    assert (trained.shape, validated.shape) == ((20, 9), (10, 9))
    assert probed.shape == (PROBE_TOKENS // 8, 8)


def test_training_windows_are_pieces_of_the_text(corpus):
    text = corpus.train.tobytes()
    windows = trained_on(corpus)
    assert all(bytes(window.tolist()) in text for window in windows)
    assert len({tuple(window.tolist()) for window in windows}) == 20


def test_a_rank_and_a_seed_of_its_own_see_other_windows(corpus):
    first, again = trained_on(corpus), trained_on(corpus)
    assert torch.equal(first, again)
    others = [trained_on(corpus, rank=rank) for rank in (1, 2)] + [trained_on(corpus, seed=1)]
    seen = [{tuple(window.tolist()) for window in windows} for windows in (first, *others)]
    for index, one in enumerate(seen):
        for other in seen[index + 1 :]:
            assert not one & other


def test_a_resumed_run_goes_on_with_the_windows_it_had_not_seen(corpus):
    whole = trained_on(corpus)
    assert torch.equal(trained_on(corpus, step=2), whole[2 * PRESET.batch :])
    # Lightning counts the batches before the resume too.
    assert len(data(corpus, step=2).train_dataloader()) == PRESET.steps


def test_windows_are_spread_from_the_first_character_to_the_last():
    ids = np.arange(100, dtype=np.uint8)
    assert spread(ids, 10, 4)[:, 0].tolist() == [0, 30, 60, 90]
    assert spread(ids, 10, 4)[:, -1].tolist() == [9, 39, 69, 99]
    assert spread(ids, 100, 1).tolist() == [list(range(100))]
    with pytest.raises(ValueError, match="100 tokens, fewer than one window of 101"):
        spread(ids, 101, 1)
