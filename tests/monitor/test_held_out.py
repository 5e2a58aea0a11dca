"""A loader as probe: its first batches, taken once, and nothing of the training's changed by it."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from geomon import Memory, every, select
from geomon.distributed import RankGroup
from geomon.monitor import CallbackSession
from geomon.monitor.held_out import HeldOut
from support.fingerprint import random_state
from support.models import VOCABULARY, PlainDecoder, batch
from support.scenarios import EXTRA, Scenario, Watched, check, probe

ROWS = torch.cat([batch(4, 16, seed=i) for i in range(12)])  # 48 sequences
MEAN = float(ROWS.double().mean())
SEEN = {"metrics": {"ids": lambda token_ids: token_ids.double().mean()}, "tokens": 10_000}
FEW_ROWS, LOADER = "asked for more): with so few, the intrinsic", "the loader of the probe"
FEW = [EXTRA, FEW_ROWS]
MOST = 64  # batches


def values(reading):
    return {
        tag: v for tag, v in reading.values.items() if not tag.startswith(("geomon/", "training/"))
    }


def mean_of(reading):
    return reading.values["ids/layer_01"]


def filled_again():
    """Batches in one tensor, which the loader fills again and again."""
    held = torch.empty(12, 16, dtype=torch.int64)
    for rows in ROWS.split(12):
        yield held.copy_(rows)


class Endless:
    """A loader that counts its batches, in `drawn`."""

    def __init__(self, draw):
        self.draw, self.drawn = draw, 0

    def __iter__(self):
        for number in itertools.count() if self.draw else ():
            self.drawn += 1
            yield self.draw(number)


def at_random(number):
    """A batch from every random state that there is."""
    part = int(np.random.randint(5)) + random.randrange(5)
    return torch.randint(VOCABULARY, (4, 16)) // (1 + part)


def of_size(size):
    return lambda number: batch(size, 16, seed=number)


def padded(number):
    mask = torch.ones(4, 16, dtype=torch.int64)
    mask[:, 4:] = 0
    return {"ids": batch(4, 16, seed=number), "attention_mask": mask}


def of_no_block(number):
    return lambda model: None


def breaks_after(count):
    def draw(number):
        if number == count:
            raise OSError("the disk\nis gone")
        return batch(4, 16)

    return draw


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = PlainDecoder()

    def forward(self, ids, mask=None, *, attention_mask=None, scale=1.0):
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


class OfImages(PlainDecoder):
    def forward(self, images):
        return super().forward(images[:, 0].reshape(2 * len(images), -1).long())


def failing_once():
    """A model that fails at its second call; an extra pass would put a count on itself back."""
    calls, model = itertools.count(), PlainDecoder()
    run = model.forward

    def forward(ids):
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        return run(ids)

    model.forward = forward
    return model


# Batches of each draw, options, and how many batches are taken; steps, rows and warnings.
TAKEN = {
    "until there are enough sequences": (of_size(4), {"tokens": 60}, 4, [0], 60, [EXTRA]),
    "one after another": (of_size(1), {"tokens": 60}, 16, [0], 60, [EXTRA]),
    "one that has enough rows": (of_size(16), {"tokens": 256}, 1, [0], 256, [EXTRA]),
    "until there are enough rows": (of_size(16), {"tokens": 257}, 2, [0], 257, [EXTRA]),
    "few rows": (of_size(4), {"tokens": 10}, 3, [0], 10, [EXTRA, "no 95 %"]),
    "no more than may be kept": (of_size(1), {"tokens": 10**6}, MOST, [0], MOST * 16, FEW),
    "at random, once": (at_random, {"tokens": 100}, 4, [0, 1, 2], 100, [EXTRA]),
    "of ranks that exchange nothing one": (
        at_random, {"tokens": 100, "ranks": lambda: RankGroup(0, 2), "gather": False}, 1, [0], 64,
        [EXTRA, "no 95 %", FEW_ROWS],
    ),
    "rows of a mask": (
        padded, {"tokens": 128, "model": Labelled}, 8, [0], 128, [EXTRA, "padding, 75 %"]
    ),
    "where no block runs": (
        of_no_block, {}, MOST, [], None, [EXTRA, "did not run while the window was open"]
    ),
    "a pass that fails is tried again": (
        at_random, {"tokens": 100, "model": failing_once}, 4, [1, 2], 100,
        [EXTRA, "a reading failed and is left out: RuntimeError: out of memory"],
    ),
    "a loader without batches": (
        None, {}, 0, [], None, [f"{LOADER} has no batch: expected held-out batc"]
    ),
    "a loader that fails": (
        breaks_after(1), {}, 2, [1, 2], 64,
        [f"{LOADER} failed: OSError: the disk", EXTRA, "no 95 %", FEW_ROWS],
    ),
    "a loader that fails at once": (
        breaks_after(0), {}, 1, [], None,
        [f"{LOADER} failed: OSError: the disk", f"{LOADER} has no batch: expected held-out batc"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_batches_are_taken_once_until_rows_and_sequences_suffice(caplog, name):
    draw, options, taken, steps, rows, said = TAKEN[name]
    loader = Endless(draw)
    events = [probe(step) for step in range(1 if steps == [0] else 3)]
    found = {"tokens": [rows] * len(steps)}
    scenario = Scenario(events, steps, SEEN | {"probe": loader} | options, said, found)
    watched = check(scenario, None, caplog)
    assert loader.drawn == taken
    assert len(set(map(mean_of, watched.memory.readings))) == bool(steps)


# Rows of batches, rows that are wanted, and how many each batch gives.
SHARES = [
    ([4], 4, [4]), ([9], 4, [4]), ([4], 9, [9]), ([100, 10, 100], 110, [50, 10, 50]),
    ([100, 10, 100], 111, [51, 10, 50]), ([5, 5, 5, 5], 2, [1, 1, 1, 1]), ([3, 3], 7, [4, 3]),
    ([1, 8, 2], 7, [1, 4, 2]), ([10, 1, 10], 42, [20, 2, 20]), ([2, 2, 2], 4, [2, 1, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "wanted", "shares"), SHARES)
def test_batches_give_as_many_rows_each_as_far_as_they_have_them(rows, wanted, shares):
    held_out = HeldOut([])
    held_out.rows = rows
    assert held_out.shares(wanted) == shares


def read_of(loader, model=PlainDecoder, **options):
    """The reading of a loader, of a model that is always the same."""
    with pytest.MonkeyPatch.context() as patch:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            watched = Watched(None, patch, model=model, probe=loader, **SEEN | options)
        watched.monitor.probe(0)
    (reading,) = watched.memory.readings
    return reading


@pytest.mark.parametrize(
    "loader", [DataLoader(ROWS, batch_size=7), filled_again(), None],
    ids=["ragged", "filled again", "a validation"],
)  # fmt: skip
def test_several_batches_are_read_as_one_batch_of_all_is(tmp_path, loader):
    names = ("variance", "anisotropy", "attention_entropy", "qk_cosine", "max_logit")
    metrics = {"metrics": select(*names)}
    whole = read_of(ROWS, **metrics)
    if loader is None:
        ((parts,), _) = validated(tmp_path, (ROWS.split(7), True), **metrics)
    else:
        parts = read_of(loader, **metrics)
    assert parts.tokens == whole.tokens == ROWS.numel()
    assert values(parts) == pytest.approx(values(whole), rel=1e-4, abs=1e-6)
    assert "variance/layer_01/margin" in parts.values  # the sequences of all batches are told apart


def test_batches_share_the_memory_that_a_reading_may_take():
    options = {"metrics": select("variance"), "max_capture_mb": 0.4}
    whole, parts = (read_of(each, **options) for each in (ROWS, DataLoader(ROWS, batch_size=12)))
    assert whole.tokens // 2 < parts.tokens <= whole.tokens < ROWS.numel()


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
    assert mean_of(read_of(loader, tokens=256)) == pytest.approx(7.5)  # the first 16 rows
    assert [int(rows[0, 0]) for rows in batches] == list(range(4, 64, 4))
    read_of(DataLoader(ROWS, batch_size=4, shuffle=True))
    assert random_state() == before


PINNED = DataLoader(TensorDataset(ROWS, ROWS[:, 0]), batch_size=8, pin_memory=True)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    ("model", "batches", "left_out"),
    [
        (Labelled, PINNED, "part 2 of 2"),  # which stays on the host
        (Labelled, ({"ids": ROWS, "labels": ROWS} for _ in range(1)), "labels"),
        (Labelled, iter([ROWS]), ""),
        (Labelled, iter([lambda model: model(ROWS)]), ""),
        (WithoutForward, iter([[ROWS, ROWS]]), "part 2 of 2"),
        (OfWholeBatch, iter([{"tokens": ROWS, "labels": ROWS}]), ""),
    ],
    ids=["tuple", "dict", "tensor", "function", "no forward", "whole batch"],
)
def test_the_model_is_given_what_its_forward_takes(model, batches, left_out):
    reading = read_of(batches, model)
    assert mean_of(reading) == pytest.approx(MEAN)
    said = [note for note in reading.words() if "all but" in note]
    assert len(said) == bool(left_out)
    assert all(f"all but {left_out}," in note for note in said)


def test_an_image_may_have_more_patches_than_is_expected():
    images = torch.randint(VOCABULARY, (4, 1, 10, 10)).float()
    assert read_of(iter([images, images]), OfImages).tokens == 800


@pytest.mark.parametrize(
    ("given", "message"),
    [("validation", "pass inputs or a loader"), (None, "pass it to the monitor")],
)
def test_validation_is_the_trainers_and_a_loader_the_monitors(caplog, given, message):
    with pytest.raises(ValueError, match=message):
        check(Scenario([probe(0, DataLoader(ROWS))], [], {"probe": given}), None, caplog)


# -- batches that a trainer's validation draws ----------------------------------------------------


def validated(folder, *validations, model=PlainDecoder, **given):
    """Readings after validations, each with whether it ends; how many batches each has kept."""
    memory, kept = Memory(), []
    options = {"probe": "validation", "schedule": every(1), "splits": 1, **SEEN, **given}
    session = CallbackSession(options, "GeometryMonitor")
    torch.manual_seed(0)
    session.start(model(), 0, folder, [memory])
    for step, (batches, ends) in enumerate(validations):
        session.probe(2 * step)
        session.held_out.begin()
        kept.append(0)
        for one in batches:
            kept[-1] += session.held_out.takes
            session.held_out.offer(one)
        if ends:
            session.held_out.end()
        session.probe(2 * step + 1)
    session.finish()
    return list(memory.readings), kept


def test_a_validation_that_fills_the_same_tensor_again_or_infers_is_copied(tmp_path):
    class Writes(PlainDecoder):
        def forward(self, ids):
            return super().forward(ids.clamp_(min=0))

    with torch.inference_mode():
        batches = [rows.clone() for rows in filled_again()]
    ((reading,), _) = validated(tmp_path, (batches, True), model=Writes)
    assert mean_of(reading) == pytest.approx(MEAN)


@pytest.mark.parametrize(
    ("one", "rows", "count"),
    [
        (torch.zeros(4, 16).long(), 60, 4),  # sixteen sequences
        (torch.zeros(16, 16).long(), 257, 2),
        (torch.zeros(1, 2).long(), 10**6, MOST),
        (torch.zeros(16, 3, 8, 8), 4096, 4),  # images
    ],
    ids=["sequences", "rows", "most", "images"],
)
def test_no_more_is_kept_of_a_validation_than_will_be_read(tmp_path, one, rows, count):
    assert validated(tmp_path, ([one] * 100, False), tokens=rows) == ([], [count])


def test_only_the_first_validation_that_ends_is_kept(tmp_path):
    validations = [([ROWS[:4] * 0], False), ([ROWS[:20]], True), ([ROWS[20:]], True)]
    readings, kept = validated(tmp_path, *validations)
    assert kept == [1, 1, 0]
    assert [reading.step for reading in readings] == [3, 4, 5]
    assert set(map(mean_of, readings)) == {float(ROWS[:20].double().mean())}


class Fields:
    """Stands for a dict, and is none."""

    def keys(self):
        return ["ids"]

    def __getitem__(self, name):
        return ROWS

    def __iter__(self):
        return iter(self.keys())


@pytest.mark.parametrize("inputs", [np.zeros((2, 3), dtype=np.int64), Fields()])
def test_arrays_and_what_stands_for_a_dict_are_inputs_and_no_loader(caplog, inputs):
    said = [EXTRA, "a reading failed and is left out: "]  # the model takes neither
    check(Scenario([probe(0, inputs)], [], said=said), None, caplog)
