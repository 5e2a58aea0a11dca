"""What ranks agree on: each is a thread, and values are exchanged at a barrier."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from geomon.capture.snapshot import Layer, MeanLoss, Part, PassInfo, Snapshot
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


def connected(size, mesh=None):
    exchange = Exchange(size)
    return [ThreadRank(rank, size, exchange, mesh) for rank in range(size)]


def together(seen, about=(7, "train"), mesh=None, groups=None, **options):
    """What each rank gets, or the error that it ends in."""
    size = len(seen)
    groups = groups or connected(size, mesh)
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


def layers_of(found):
    """All layers, by depth, of what the ranks have been given."""
    return found[0].interleave([[merge_layers(parts) for parts in one.parts] for one in found])


def rows_of(found):
    """The rows of all layers."""
    return [layer.captured["hidden"][:, 0].tolist() for layer in layers_of(found)]


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
        "rank 1 reads step 5 probe but rank 0 reads it train: build the monitor with the same "
        "options on every rank"
    }
    found = together([[snapshot(1.0)], [snapshot(1.0)], [snapshot(1.0, layers=2)]])
    assert {str(error).partition(":")[0] for error in found} == {
        "rank 2 has 2 layers, from 'blocks.0' to 'blocks.1', but rank 0 has 3, from 'blocks.0' "
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
    found = together([[snapshot(1.0, batch="x")]] * 2, same_inputs=True)
    assert rows_of(found)[0] == [1.0]
    assert not kinds(found)
    found = together([[snapshot(1.0, batch="x")], [snapshot(2.0, batch="y")]], same_inputs=True)
    assert (rows_of(found)[0], kinds(found)) == ([1.0], ["probes differ"])
    assert found[0].info.tokens == 1


def test_the_same_tokens_on_several_ranks_count_once():
    found = together([[snapshot(1.0, batch=b)] for b in ("x", "y", "x", "x")])
    assert rows_of(found)[0] == [1.0, 1.0]
    (note,) = found[0].info.notes
    assert note.text.startswith("rank 2 had the same tokens as rank 0 (and 1 other ranks alike)")
    found = together([[snapshot(1.0, batch=b)] for b in ("x", "x")])
    assert "rank 1 had the same tokens as rank 0: they are" in found[0].info.notes[0].text
    assert found[0].info.notes[0].kind == "ranks with the same tokens"
    for others, same in (("yy", True), ("yz", False), (("", ""), False)):  # of two passes each
        seen = [[snapshot(1.0, batch="x"), snapshot(2.0, batch=other)] for other in others]
        assert kinds(together(seen)) == ["ranks with the same tokens"] * same


@pytest.mark.parametrize(("same_inputs", "rows"), [(False, 10), (True, 5)])
def test_the_next_reading_takes_more_rows_of_each_where_several_had_the_same(same_inputs, rows):
    groups = connected(2)
    together([[snapshot(1.0, batch="x")]] * 2, groups=groups, same_inputs=same_inputs)
    assert [group.rows_of(10) for group in groups] == [rows] * 2


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
    some = snapshot(1.0)
    some.layers[1] = Layer(1, "blocks.1", {}, {"hidden": "skipped"})
    found = together([[some], [snapshot(2.0)]])
    assert rows_of(found) == [[1.0, 2.0], [102.0], [201.0, 202.0]]
    assert [(note.kind, note.words()) for note in found[0].info.notes] == [
        ("no hidden at blocks.1 of some ranks", "rank 0: blocks.1: no hidden was seen: skipped")
    ]


def test_losses_are_weighted_by_their_sequences_and_passes_are_joined():
    losses = [MeanLoss(1.0, 1), MeanLoss(2.0, 3)]
    found = together([[snapshot(1.0, loss=loss)] for loss in losses])
    assert found[0].info.loss == MeanLoss(1.75, 4)
    note = Note("padding", "half is padding")
    two = [
        snapshot(1.0, loss=losses[0], batch="a"),
        snapshot(2.0, 3.0, loss=losses[1], batch="b", notes=[note]),
    ]
    alone = gather(two, (0, "train"), RankGroup(), rows=9, queries=8)
    assert [merge_layers(p).captured["hidden"][:, 0].tolist() for p in alone.parts] == [
        [100 * i + v for v in (1, 2, 3)] for i in range(3)
    ]
    said = Note("padding", "batch 1: half is padding")
    assert alone.info == PassInfo(3, "train", "float32", [said], MeanLoss(1.75, 4), "a and b")
    said = Note("padding", "batch 1: half is padding (and 1 other batches alike)")
    alone = gather([*two, two[1]], (0, "train"), RankGroup(), rows=9, queries=8)
    assert alone.info.notes == [said]
    alone = gather([two[1]] * 2, (0, "train"), RankGroup(), rows=9, queries=8)
    assert alone.info.notes == [note]


def test_ranks_of_one_model_with_other_tokens_are_named():
    mesh = Mesh(tuple(RankPlace(rank, tensor=(0, 1)) for rank in range(2)))
    found = together([[snapshot(1.0, batch="a 1")], [snapshot(1.0, batch="b 1")]], mesh=mesh)
    assert "rank 1 received other tokens than rank 0, although they" in found[0].info.notes[-1].text
    assert rows_of(found)[0] == [1.0]
    note = Note("padding", "half is padding")
    seen = [[snapshot(1.0, batch="a 1")], [snapshot(1.0, batch="a 2", notes=[note])]]
    assert [each.text for each in together(seen, mesh=mesh)[0].info.notes] == [
        "rank 1: half is padding"
    ]


PAIRS = Mesh(
    tuple(RankPlace(rank, tensor=(0, 3) if rank in (0, 3) else (1, 2)) for rank in range(4))
)


def test_rows_come_in_the_order_of_their_tokens_whichever_rank_gives_them():
    note = Note("padding", "half is padding")
    seen = [[snapshot(value, notes=[note])] for value in (1.0, 2.0, 2.0, 1.0)]
    found = together(seen, mesh=PAIRS)
    assert rows_of(found) == [[100 * i + 1, 100 * i + 2] for i in range(3)]
    assert found[0].info.notes == [note]
    lacking = dict.fromkeys(("hidden", "last_hidden"), "skipped")
    for one in (0, 2):  # the other one with the same tokens gives
        layers = seen[one][0].layers
        layers[:] = [replace(each, captured={}, missing=lacking) for each in layers]
    assert rows_of(together(seen, mesh=PAIRS)) == [[100 * i + 1, 100 * i + 2] for i in range(3)]


@pytest.mark.parametrize("cut", [([2, 0], [3, 1]), ([0, 1, 2, 3],) * 2], ids=["rows", "heads"])
def test_of_what_ranks_with_the_same_tokens_have_each_part_is_given_once(cut):
    def part_of(rank):
        number, same = torch.tensor(cut[rank]), cut[0] == cut[1]
        views = {"hidden": number[:, None].float(), "projected_query": torch.ones(4, 1, 2) * rank}
        part = Part(
            rows=number, start=() if same else (2 * rank,), heads={"projected_query": (2 * rank,)}
        )
        return Snapshot(
            [Layer(i, f"blocks.{i}", views, {}, part=part) for i in range(3)],
            PassInfo(len(number), "train", "float32"),
        )

    mesh = Mesh(tuple(RankPlace(rank, tensor=(0, 1)) for rank in range(2)))
    for layer in layers_of(found := together([[part_of(0)], [part_of(1)]], mesh=mesh)):
        assert layer.captured["hidden"].flatten().tolist() == [0, 1, 2, 3]
        assert layer.captured["projected_query"][0, :, 0].tolist() == [0, 1]
    assert found[0].info.tokens == 4


def stage(*depths, rows, later, batch=""):
    """Layers of a stage of a pipeline: a later one does not know the tokens of its rows."""
    number = torch.tensor(rows)
    views = {"hidden": number[:, None].float()} | ({} if later else {"token_ids": number + 50})
    views |= {f"last_{view}": values for view, values in views.items()}
    part = Part(rows=number, last_rows=number, tokens_elsewhere=later)
    layers = [Layer(depth, f"blocks.{depth}", views, {}, part=part) for depth in depths]
    return [Snapshot(layers, PassInfo(len(rows), "train", "float32", batch=batch))]


@pytest.mark.parametrize("pipelines", [1, 2])
def test_later_stages_of_a_pipeline_learn_the_tokens_of_their_rows_from_the_first(pipelines):
    """Of two pipelines with the same tokens one is measured; the first stages are on ranks 1, 3."""
    mesh = Mesh(tuple(
        RankPlace(rank, pipeline=(rank // 2 * 2, rank // 2 * 2 + 1), stages=(1 - rank % 2,),
                  num_stages=2)
        for rank in range(2 * pipelines)
    ))  # fmt: skip
    first = stage(0, 1, rows=[2, 0, 1], later=False, batch="x")
    later = stage(2, 3, rows=[1, 5, 0], later=True)
    later[0].info.notes.append(Note("padding", "half is padding", layers=(8,)))
    first[0].info.notes.append(Note("padding", "half is padding", layers=(1,)))
    found = together([later, first] * pipelines, mesh=mesh)
    for depth, layer in enumerate(layers_of(found)):
        rows = [2, 0, 1] if depth < 2 else [1, 0]
        for prefix in ("", "last_"):
            assert layer.captured[f"{prefix}hidden"].flatten().tolist() == rows
            assert layer.captured[f"{prefix}token_ids"].tolist() == [row + 50 for row in rows]
    assert found[0].info.tokens == 3
    padding, *same = found[0].info.notes
    assert padding == Note("padding", "half is padding", layers=(1, 8))
    said = [note.text.partition(":")[0] for note in same]
    assert said == ["rank 3 had the same tokens as rank 1"] * (pipelines - 1)
