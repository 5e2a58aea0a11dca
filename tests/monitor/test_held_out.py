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
from torch.utils.data import DataLoader, Dataset, TensorDataset

from geomon import select
from geomon.distributed import RankGroup
from geomon.monitor.held_out import MOST_BATCHES, HeldOut, is_loader

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


def test_the_global_random_states_are_left_as_they_were_by_a_loader_that_shuffles():
    loader = DataLoader(ROWS, batch_size=4, shuffle=True)
    before = random_state()
    read_of(loader, steps=2)
    assert random_state() == before


class Numbered(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        torch.rand(1), np.random.rand(), random.random()
        return torch.full((16,), index)


def test_a_pass_of_the_owner_over_the_same_loader_goes_on():
    """Persistent workers have one iterator for all passes, which a new pass begins anew."""
    loader = DataLoader(Numbered(), batch_size=4, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    assert next(batches)[0, 0] == 0
    before = random_state()
    (reading,) = read_of(loader, tokens=256)
    assert random_state() == before
    assert reading.values["ids/layer_01"] == pytest.approx(7.5)  # the first 16 rows
    assert [int(rows[0, 0]) for rows in batches] == list(range(4, 64, 4))


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


@pytest.mark.parametrize(
    ("batches", "messages", "steps"),
    [
        (1, ["the loader of the probe failed: OSError: the disk"], [1, 2]),
        (0, ["failed: OSError: the disk", "the loader of the probe has no batch: expected"], []),
    ],
)
def test_a_loader_that_fails_is_a_warning_and_what_it_gave_is_read(
    caplog, batches, messages, steps
):
    def broken():
        yield from [batch(4, 16)] * batches
        raise OSError("the disk\nis gone")

    with caplog.at_level(logging.WARNING, "geomon"):
        found = read_of(broken(), steps=3, strict=False)
    assert [reading.step for reading in found] == steps
    ours = [said for said in caplog.messages if "the loader of the probe" in said]
    for said, message in zip(ours, messages, strict=True):
        assert message in said
        assert "\n" not in said


def test_a_loader_without_batches_is_one_warning(caplog):
    assert read_of(iter(()), steps=3, strict=False) == []
    (said,) = caplog.messages
    assert "the loader of the probe has no batch: expected held-out batches" in said


@pytest.mark.parametrize("kind", ["padded", "images"])
def test_rows_are_counted_by_the_mask_and_are_all_read_where_they_were_guessed(kind):
    """Of padded batches more are taken; an image may have more patches than is expected."""
    if kind == "padded":
        mask = torch.ones(4, 16, dtype=torch.int64)
        mask[:, 4:] = 0
        found = iter([{"ids": batch(4, 16, seed=n), "attention_mask": mask} for n in range(40)])
        monitor, _ = monitor_of(Labelled(), found, tokens=128)
        monitor.probe(0)
        assert len(list(found)) == 32  # 16 rows each
        return

    class OfImages(PlainDecoder):
        def forward(self, images):
            return super().forward(images[:, 0].reshape(2 * len(images), -1).long())

    images = torch.randint(VOCABULARY, (4, 1, 10, 10)).float()
    (reading,) = read_of(iter([images, images]), OfImages(), tokens=10_000)
    assert reading.tokens == 800


def test_where_no_block_runs_batches_are_taken_once():
    drawn = []
    loader = (drawn.append(n) or (lambda model: None) for n in itertools.count())
    assert read_of(loader, steps=3, strict=False) == []
    assert len(drawn) == MOST_BATCHES


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
    [("validation", "so pass inputs or a loader"), (None, "pass it to the monitor")],
)
def test_validation_is_the_trainers_and_a_loader_the_monitors(probe, message):
    with pytest.raises(ValueError, match=message):
        monitor_of(PlainDecoder(), probe)[0].probe(0, DataLoader(ROWS))


def test_batches_share_the_memory_that_a_reading_may_take():
    options = {"metrics": select("variance"), "max_capture_mb": 0.4}
    (whole,) = read_of(ROWS, **options)
    (parts,) = read_of(DataLoader(ROWS, batch_size=12), **options)
    assert whole.tokens // 2 < parts.tokens <= whole.tokens < ROWS.numel()


# -- batches that a trainer's validation draws ----------------------------------------------------


def offered(batches, rows=10_000, taken=None):
    """Held-out batches of one validation; `taken` counts those that were wanted."""
    held_out = HeldOut(rows=rows)
    held_out.begin()
    for one in batches:
        if taken is not None and held_out.takes:
            taken.append(one)
        held_out.offer(one)
    held_out.end()
    return held_out


def test_batches_that_are_offered_are_read_as_those_of_a_loader_are():
    (drawn,) = read_of(DataLoader(ROWS, batch_size=7))
    (kept,) = read_of(offered(ROWS.split(7)))
    assert values(kept) == values(drawn)
    assert kept.tokens == ROWS.numel()


def test_a_validation_that_fills_the_same_tensor_again_or_infers_is_copied():
    class Writes(PlainDecoder):
        def forward(self, ids):
            return super().forward(ids.clamp_(min=0))

    with torch.inference_mode():
        held_out = offered(filled_again())
    (reading,) = read_of(held_out, Writes())
    assert reading.values["ids/layer_01"] == pytest.approx(float(ROWS.double().mean()))


@pytest.mark.parametrize(
    ("of", "rows", "count"),
    [
        ({"shape": (4, 16)}, 60, 4),  # sixteen sequences
        ({"shape": (16, 16)}, 257, 2),
        ({"shape": (1, 2)}, 10**6, MOST_BATCHES),
        ({"shape": (16, 3, 8, 8), "dtype": torch.float32}, 4096, 4),  # images
    ],
    ids=["sequences", "rows", "most", "images"],
)
def test_no_more_is_kept_of_a_validation_than_will_be_read(of, rows, count):
    of, taken = dict(of), []
    shape = of.pop("shape")
    offered((torch.zeros(shape, **{"dtype": torch.int64} | of) for _ in range(100)), rows, taken)
    assert len(taken) == count


def test_only_the_first_validation_that_ends_is_kept():
    held_out = HeldOut(rows=64)
    assert not held_out.is_ready
    held_out.offer(ROWS)  # outside of any
    held_out.begin()
    held_out.offer(ROWS[:4] * 0)
    held_out.begin()  # the one before was broken off
    held_out.offer(ROWS[:20])
    assert not held_out.is_ready
    held_out.end()
    held_out.begin()
    assert not held_out.takes
    held_out.offer(ROWS[20:])
    held_out.end()
    readings = read_of(held_out, steps=2)
    assert held_out.is_ready
    assert [r.values["ids/layer_01"] for r in readings] == [float(ROWS[:20].double().mean())] * 2


def test_a_validation_without_batches_is_one_warning(caplog):
    assert read_of(offered([]), steps=3, strict=False) == []
    (said,) = caplog.messages
    assert "no batch: expected held-out batches" in said


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
    assert sum(shares) == max(wanted, len(rows))
    if wanted > sum(rows):  # each has as many more
        more = wanted / sum(rows)
        assert all(abs(x - more * own) < 8 for x, own in zip(shares, rows, strict=True))
        return
    assert all(1 <= share <= own for share, own in zip(shares, rows, strict=True))
    most = max(shares)
    assert all(share in (own, most, most - 1) for share, own in zip(shares, rows, strict=True))


@pytest.mark.filterwarnings("error::UserWarning")
def test_batches_stay_on_the_host_whatever_the_training_pins():
    loader = DataLoader(TensorDataset(ROWS, ROWS[:, 0]), batch_size=8, pin_memory=True)
    (reading,) = read_of(loader, Labelled())
    assert reading.values["ids/layer_01"] == pytest.approx(float(ROWS.double().mean()))
    assert loader.pin_memory
