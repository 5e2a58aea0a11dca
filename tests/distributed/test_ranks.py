"""What ranks agree on: each is a thread, and values are exchanged at a barrier."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from geomon.capture.snapshot import Layer, MeanLoss, PassInfo, Snapshot
from geomon.distributed.gather import gather
from geomon.distributed.group import RankFailedError, RankGroup
from geomon.distributed.merge import merge_layers
from geomon.distributed.mesh import Mesh, RankPlace
from geomon.note import Note


class Exchange:
    """A place where all ranks lay their values down and take those of all."""

    def __init__(self, size):
        self.values = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def __call__(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class ThreadRank(RankGroup):
    def __init__(self, rank, size, exchange, mesh=None):
        super().__init__(rank, size, process_group=exchange, mesh=mesh)
        self.exchange = exchange

    def all_gather(self, value):
        return self.exchange(self.rank, value)

    def all_to_all(self, parcels):
        assert len(parcels) == self.size
        return [sent[self.rank] for sent in self.exchange(self.rank, parcels)]


def together(seen, about=(7, "train"), mesh=None, **options):
    """What each rank gets, or the error that it ends in."""
    size = len(seen)
    exchange = Exchange(size)
    groups = [ThreadRank(rank, size, exchange, mesh) for rank in range(size)]
    each = about if isinstance(about, list) else [about] * size

    def run(rank):
        try:
            return gather(seen[rank], each[rank], groups[rank], rows=100, queries=8, **options)
        except RankFailedError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def layer(index, values, name="", **more):
    hidden = torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 2).clone()
    return Layer(index, name or f"blocks.{index}", {"hidden": hidden}, {}, **more)


def snapshot(*values, layers=3, mode="train", batch="", notes=(), loss=None):
    """The same rows at each layer, plus 100 for each layer."""
    found = [layer(i, [100 * i + v for v in values]) for i in range(layers)]
    return Snapshot(found, PassInfo(len(values), mode, "float32", list(notes), loss, batch))


def rows_of(found):
    """The rows of all layers, by depth, of what the ranks have been given."""
    merged = [[merge_layers(parts).captured["hidden"][:, 0].tolist() for parts in one.parts]
              for one in found]  # fmt: skip
    return found[0].interleave(merged)


def kinds(found):
    return [note.kind for note in found[0].info.notes]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_rank_measures_some_layers_with_the_rows_of_all(size):
    found = together([[snapshot(*range(10 * rank, 10 * rank + rank + 1))] for rank in range(size)])
    rows = [value for rank in range(size) for value in range(10 * rank, 10 * rank + rank + 1)]
    assert rows_of(found) == [[100 * i + row for row in rows] for i in range(3)]
    for rank, one in enumerate(found):
        assert len(one.parts) == len(range(rank, 3, size))
        assert (one.count, one.info.tokens, one.empty) == (3, len(rows), False)
        assert (one.info.mode, one.info.dtype, one.info.notes) == ("train", "float32", [])


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        ({1: ValueError("boom")}, "rank 1: ValueError: boom"),
        ({0: ValueError("boom"), 2: OSError()}, "rank 0: ValueError: boom (and 1 other ranks)"),
    ],
)
def test_where_a_rank_has_nothing_every_rank_says_so(failing, words):
    found = together([failing.get(rank, [snapshot(1.0)]) for rank in range(3)])
    assert [str(error) for error in found] == [words] * 3


def test_passes_that_cannot_be_joined_are_no_reason_to_wait():
    with pytest.raises(ValueError, match=r"different layers \(3, 2 of them\)"):
        gather(
            [snapshot(1.0), snapshot(1.0, layers=2)], (0, "train"), RankGroup(), rows=9, queries=8
        )
    found = together([[snapshot(1.0), snapshot(2.0, layers=2)], [snapshot(3.0)]])
    assert {str(error).partition(" have")[0] for error in found} == {
        "rank 0: ValueError: the batches of a reading"
    }


def test_ranks_that_read_something_else_are_named():
    found = together([[snapshot(1.0)]] * 2, about=[(5, "train"), (5, "probe")])
    assert {str(error) for error in found} == {
        "rank 1 reads step 5 probe where rank 0 reads it train: every rank builds the monitor with "
        "the same options"
    }
    found = together([[snapshot(1.0)], [snapshot(1.0)], [snapshot(1.0, layers=2)]])
    assert {str(error).partition(":")[0] for error in found} == {
        "rank 2 has 2 layers, from 'blocks.0' to 'blocks.1', where rank 0 has 3, from 'blocks.0' "
        "to 'blocks.2'"
    }


def test_a_rank_that_cannot_take_its_share_leaves_nobody_waiting():
    broken = snapshot(1.0)
    query = torch.ones(2, 2, 40, 3)
    broken.layers[1].captured.update(query=query, key=query, visible="no mask")
    found = together([[snapshot(1.0)], [broken]])
    assert all(isinstance(error, RankFailedError) for error in found)
    assert {str(error).partition(" ")[0] for error in found} == {"rank"}
    assert all(str(error).startswith("rank 1: ") for error in found)


def test_one_process_raises_its_own_error():
    with pytest.raises(OSError, match="own"):
        gather(OSError("own"), (0, "train"), RankGroup(), rows=9, queries=8)


def test_of_copies_the_first_is_measured_and_a_note_says_where_they_differ():
    found = together([[snapshot(1.0)], [snapshot(1.0)]], copies=True)
    assert rows_of(found)[0] == [1.0]
    assert not kinds(found)
    found = together([[snapshot(1.0)], [snapshot(2.0)]], copies=True)
    assert (rows_of(found)[0], kinds(found)) == ([1.0], ["probes differ"])
    assert found[0].info.tokens == 1


def test_the_same_tokens_on_several_ranks_count_once():
    found = together([[snapshot(1.0, batch=b)] for b in ("x", "y", "x", "x")])
    assert rows_of(found)[0] == [1.0, 1.0]
    (note,) = found[0].info.notes
    assert note.text.startswith("rank 2 had the same tokens as rank 0 (and 1 other ranks alike)")
    found = together([[snapshot(1.0, batch=b)] for b in ("x", "x")])
    assert "rank 1 had the same tokens as rank 0: they are" in found[0].info.notes[0].text


def test_modes_that_differ_and_notes_of_some_ranks_are_said():
    assert kinds(together([[snapshot(1.0)], [snapshot(1.0, mode="eval")]])) == ["modes"]
    note = Note("padding", "half is padding", layers=(1,))
    found = together([[snapshot(1.0, notes=[note])], [snapshot(2.0, notes=[note])]])
    assert found[0].info.notes == [note]
    found = together([[snapshot(1.0)], *[[snapshot(2.0, notes=[note])]] * 2])
    assert [each.text for each in found[0].info.notes] == [
        "rank 1: half is padding (and 1 other ranks alike)"
    ]


def test_what_a_rank_has_not_seen_is_taken_from_the_others_and_said():
    empty = Snapshot(
        [Layer(i, f"blocks.{i}", {}, {"hidden": "it was not run"}) for i in range(3)],
        PassInfo(0, "", ""),
    )
    found = together([[empty], [snapshot(1.0, 2.0)]])
    assert rows_of(found)[1] == [101.0, 102.0]
    assert (found[0].empty, found[0].info.tokens, found[0].info.mode) == (False, 2, "train")
    assert [note.text for note in found[0].info.notes] == [
        "rank 0: nothing was seen: it was not run"
    ]
    found = together([[empty], [empty]])
    assert found[0].empty
    assert found[0].info.tokens == 0


def test_losses_are_weighted_by_their_sequences_and_passes_are_joined():
    losses = [MeanLoss(1.0, 1), MeanLoss(2.0, 3)]
    found = together([[snapshot(1.0, loss=loss)] for loss in losses])
    assert found[0].info.loss == MeanLoss(1.75, 4)
    two = [snapshot(1.0, loss=losses[0], batch="a"), snapshot(2.0, 3.0, loss=losses[1], batch="b")]
    alone = gather(two, (0, "train"), RankGroup(), rows=9, queries=8)
    assert [merge_layers(p).captured["hidden"][:, 0].tolist() for p in alone.parts] == [
        [100 * i + v for v in (1, 2, 3)] for i in range(3)
    ]
    assert (alone.info.tokens, alone.info.loss) == (3, MeanLoss(1.75, 4))


def test_ranks_of_one_model_with_other_tokens_are_named():
    mesh = Mesh(tuple(RankPlace(rank, tensor=(0, 1)) for rank in range(2)))
    found = together([[snapshot(1.0, batch="a 1")], [snapshot(1.0, batch="b 1")]], mesh=mesh)
    assert "rank 1 was given other tokens than rank 0, with which" in found[0].info.notes[-1].text
    assert rows_of(found)[0] == [1.0]
    found = together([[snapshot(1.0, batch="a 1")], [snapshot(1.0, batch="a 2")]], mesh=mesh)
    assert not kinds(found)
