"""A loader as probe: its first batches, taken once, and nothing of the training's changed by it."""

import itertools
import logging
import random

import numpy as np
import pytest
import torch
from fingerprint import random_state
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import watching
from models import VOCABULARY, PlainDecoder, batch
from torch import nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from geomon import select
from geomon.distributed import RankGroup
from geomon.monitor.held_out import MOST_BATCHES, HeldOut, first_loader, is_loader

ROWS = torch.cat([batch(4, 16, seed=i) for i in range(12)])  # 48 sequences
SEEN = {"ids": lambda token_ids: token_ids.double().mean()}


def monitor_of(model, loader, **options):
    return watching(model, probe=loader, **{"metrics": SEEN, "tokens": 10_000, **options})


def read_of(loader, model=None, steps=1, **options):
    if model is None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = PlainDecoder()
    monitor, memory = monitor_of(model, loader, **options)
    for step in range(steps):
        monitor.probe(step)
    return list(memory.readings)


def values(reading):
    return {tag: v for tag, v in reading.values.items() if not tag.startswith("geomon/")}


def filled_again():
    """Batches in one tensor, which the loader fills again and again."""
    held = torch.empty(12, 16, dtype=torch.int64)
    for rows in ROWS.split(12):
        yield held.copy_(rows)


@pytest.mark.parametrize(
    "loader", [DataLoader(ROWS, batch_size=7), filled_again()], ids=["ragged", "filled again"]
)
def test_several_batches_are_read_as_one_batch_of_all_is(loader):
    names = ("variance", "anisotropy", "attention_entropy", "qk_cosine", "max_logit")
    options = {"metrics": select(*names)}
    (whole,) = read_of(ROWS, **options)
    (parts,) = read_of(loader, **options)
    assert parts.tokens == whole.tokens == ROWS.numel()
    assert values(parts) == pytest.approx(values(whole), rel=1e-4, abs=1e-6)
    assert "variance/layer_01/margin" in parts.values  # the sequences of all batches are told apart


def endless(drawn):
    """A loader of random batches, from every random state that there is."""
    while True:
        part = int(np.random.randint(5)) + random.randrange(5)
        drawn.append(torch.randint(VOCABULARY, (4, 16)) // (1 + part))
        yield drawn[-1]


def test_a_random_endless_loader_is_drawn_from_once_and_no_random_state_is_changed():
    drawn = []
    before = random_state()
    readings = read_of(endless(drawn), steps=4, tokens=100)
    assert random_state() == before
    assert len(drawn) == 4  # 256 rows; 16 sequences
    assert len({reading.values["ids/layer_01"] for reading in readings}) == 1
    assert {reading.tokens for reading in readings} == {100}


@pytest.mark.parametrize(
    ("tokens", "size", "taken"),
    [(60, 4, 4), (60, 1, 16), (256, 16, 1), (257, 16, 2), (10, 4, 3), (10**6, 1, 64)],
)
def test_batches_are_taken_until_rows_and_sequences_suffice(tokens, size, taken):
    drawn = []
    loader = (drawn.append(n) or batch(size, 16, seed=n) for n in itertools.count())
    (reading,) = read_of(loader, tokens=tokens)
    assert len(drawn) == taken <= MOST_BATCHES
    assert reading.tokens == min(tokens, taken * size * 16)


def test_ranks_that_exchange_nothing_take_one_batch_each(monkeypatch):
    monkeypatch.setattr("geomon.monitor.monitor.find_ranks", lambda: RankGroup(0, 2))
    drawn = []
    (reading,) = read_of(endless(drawn), gather=False)
    assert len(drawn) == 1
    assert reading.tokens == drawn[0].numel()


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global generator"])
@pytest.mark.parametrize(
    ("rows", "size"), [(ROWS, 4), (ROWS.split(4), None)], ids=["rows", "batches"]
)
def test_a_random_sampler_goes_on_as_if_nobody_had_drawn(own, rows, size):
    def orders(watch):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(3) if own else None
        loader = DataLoader(rows, batch_size=size, shuffle=True, generator=generator)
        found = [torch.cat(list(loader))]
        if watch:
            read_of(loader, steps=2)
        return torch.cat([*found, *loader])

    assert torch.equal(orders(True), orders(False))


def test_a_sampler_that_cannot_be_copied_is_drawn_from_itself():
    class Uncopied(SequentialSampler):
        def __deepcopy__(self, memo):
            raise TypeError("holds a file")

    (reading,) = read_of(DataLoader(ROWS, batch_size=8, sampler=Uncopied(ROWS)))
    assert reading.tokens == ROWS.numel()


class Noisy(Dataset):
    """Rows that depend on where they are loaded, and on random numbers there."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        torch.rand(1), np.random.rand(), random.random()
        worker = torch.utils.data.get_worker_info()
        return torch.full((16,), 0 if worker is None else 1 + worker.id)


def test_workers_of_the_training_are_left_to_it():
    loader = DataLoader(Noisy(), batch_size=4, num_workers=2, persistent_workers=True)
    batches = iter(loader)
    assert next(batches)[0, 0] == 1
    before = random_state()
    (reading,) = read_of(loader, tokens=64)
    assert random_state() == before
    assert reading.values["ids/layer_01"] == 1  # loaded by one worker, as by the training's
    assert loader._iterator is batches
    assert len(list(batches)) == 15
    assert vars(loader)["num_workers"] == 2


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = PlainDecoder()

    def forward(self, ids, mask=None, *, scale=1.0):
        assert mask is None
        assert scale == 1.0
        return self.net(ids)


class WithoutForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Labelled()
        self.loss = nn.CrossEntropyLoss()


class OfWholeBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = PlainDecoder()

    def forward(self, batch):
        return self.net(batch["tokens"])


@pytest.mark.parametrize(
    ("model", "batches", "left_out"),
    [
        (Labelled, DataLoader(TensorDataset(ROWS, ROWS[:, 0]), batch_size=8), "part 2 of 2"),
        (Labelled, ({"ids": ROWS, "labels": ROWS} for _ in range(1)), "labels"),
        (Labelled, iter([ROWS]), ""),
        (Labelled, iter([lambda model: model(ROWS)]), ""),
        (WithoutForward, iter([[ROWS, ROWS]]), "part 2 of 2"),
        (OfWholeBatch, iter([{"tokens": ROWS, "labels": ROWS}]), ""),
    ],
    ids=["tuple", "dict", "tensor", "function", "no forward", "whole batch"],
)
def test_the_model_is_given_what_its_forward_takes(model, batches, left_out):
    torch.manual_seed(0)
    (reading,) = read_of(batches, model())
    assert reading.values["ids/layer_01"] == pytest.approx(float(ROWS.double().mean()))
    said = [note for note in reading.words() if "all but" in note]
    assert len(said) == bool(left_out)
    assert all(f"all but {left_out}," in note for note in said)


def broken():
    yield batch(4, 16)
    raise OSError("the disk\nis gone")


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (broken, "ValueError: the loader of the probe failed: OSError: the disk"),
        (
            lambda: iter(()),
            "ValueError: the loader of the probe has no batch: expected held-out batches",
        ),
    ],
)
def test_a_loader_that_fails_or_is_empty_is_one_warning(caplog, loader, message):
    with caplog.at_level(logging.WARNING, "geomon"):
        assert read_of(loader(), steps=3, strict=False) == []
    said = [text for text in caplog.messages if message in text]
    assert len(said) == len(caplog.messages) == 1
    assert "\n" not in said[0]


def test_where_no_block_runs_one_batch_is_taken():
    drawn = []
    loader = (drawn.append(n) or (lambda model: None) for n in itertools.count())
    assert read_of(loader, steps=3, strict=False) == []
    assert drawn == [0]


@pytest.mark.parametrize(
    ("held", "first"),
    [("a", "a"), (None, None), ([], None), ([None, ("a", "b")], "a"), ({"x": [], "y": "a"}, "a")],
)
def test_the_first_of_the_loaders_that_a_trainer_holds_is_found(held, first):
    assert first_loader(held) == first


def test_a_pass_that_fails_is_tried_again_with_the_same_batch(caplog):
    calls = []

    class Fails(PlainDecoder):
        def forward(self, ids):
            calls.append(0)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            return super().forward(ids)

    drawn = []
    readings = read_of(endless(drawn), Fails(), steps=3, tokens=100, strict=False)
    assert [reading.step for reading in readings] == [1, 2]
    assert len(drawn) == 4
    assert readings[0].values["ids/layer_01"] == readings[1].values["ids/layer_01"]
    assert caplog.messages == ["a reading failed and is left out: RuntimeError: out of memory"]


@pytest.mark.parametrize(
    ("probe", "message"),
    [("validation", "give the loader itself"), (None, "give it to the monitor")],
)
def test_validation_is_the_trainers_and_a_loader_the_monitors(probe, message):
    with pytest.raises(ValueError, match=message):
        monitor_of(PlainDecoder(), probe)[0].probe(0, DataLoader(ROWS))


def test_batches_share_the_memory_that_a_reading_may_take():
    options = {"metrics": select("variance"), "max_capture_mb": 0.4}
    (whole,) = read_of(ROWS, **options)
    (parts,) = read_of(DataLoader(ROWS, batch_size=12), **options)
    assert whole.tokens // 2 < parts.tokens <= whole.tokens < ROWS.numel()


class Fields:
    """Stands for a dict, and is none."""

    def keys(self):
        return ["ids"]

    def __iter__(self):
        return iter(self.keys())


def test_arrays_and_what_stands_for_a_dict_are_inputs_of_a_model():
    assert not is_loader(np.zeros((2, 3)))
    assert not is_loader(Fields())


@given(rows=st.lists(st.integers(1, 50), min_size=1, max_size=8), wanted=st.integers(1, 300))
@settings(deadline=None)
def test_rows_are_shared_out_evenly_as_far_as_they_reach(rows, wanted):
    held_out = HeldOut([])
    held_out.rows = rows
    shares = held_out.shares(wanted)
    assert all(1 <= share <= own for share, own in zip(shares, rows, strict=True))
    if wanted >= len(rows):
        assert sum(shares) == min(wanted, sum(rows))
    most = max(shares)
    assert all(share in (own, most, most - 1) for share, own in zip(shares, rows, strict=True))


@pytest.mark.filterwarnings("error::UserWarning")
def test_batches_stay_on_the_host_whatever_the_training_pins():
    loader = DataLoader(TensorDataset(ROWS, ROWS[:, 0]), batch_size=8, pin_memory=True)
    (reading,) = read_of(loader, Labelled())
    assert reading.values["ids/layer_01"] == pytest.approx(float(ROWS.double().mean()))
    assert loader.pin_memory
