"""Ranks agree on a reading: each is a thread, and values are exchanged at a barrier."""

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
    """All ranks lay their values down here, and take everybody's."""

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
    """The layers that each rank receives, or the error that it raises."""
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
    """All layers that the ranks have been given, by depth."""
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


def of_batch(batch, *values, **more):
    return [snapshot(*(values or (1.0,)), batch=batch, **more)]


def without_mask():
    """Attention that cannot be shared out."""
    broken = snapshot(1.0)
    query = torch.ones(2, 2, 40, 3)
    broken.layers[1].captured.update(query=query, key=query, visible="no mask")
    return broken


def unseen(index=None):
    """A snapshot in which one layer, or each, was not seen."""
    found = snapshot(1.0)
    for i in range(3) if index is None else [index]:
        found.layers[i] = Layer(i, f"blocks.{i}", {}, {"hidden": "skipped"})
    return found if index is not None else replace(found, info=PassInfo(0, "", ""))


STEP, BOOM = {"about": [(5, "train"), (5, "probe")]}, ValueError("boom")
FEWER = [snapshot(1.0, layers=2)]
# Snapshots of ranks, options; the error that each rank raises.
REFUSED = {
    "one fails": ([[snapshot(1.0)], BOOM, [snapshot(1.0)]], {}, "rank 1: ValueError: boom"),
    "two fail": (
        [BOOM, [snapshot(1.0)], OSError()], {}, "rank 0: ValueError: boom (and 1 other ranks)"
    ),
    "passes of other layers": (
        [[snapshot(1.0), *FEWER], [snapshot(3.0)]], {},
        "rank 0: ValueError: the batches of a reading have different layers (3, 2 of them): "
        "expected batches on which the model runs the same blocks",
    ),
    "another source": (
        [[snapshot(1.0)]] * 2, STEP,
        "rank 1 reads step 5 probe but rank 0 reads it train: build the monitor with the same "
        "options on every rank",
    ),
    "other layers": (
        [[snapshot(1.0)], [snapshot(1.0)], FEWER], {},
        "rank 2 has 2 layers, from 'blocks.0' to 'blocks.1', but rank 0 has 3, from 'blocks.0' "
        "to 'blocks.2': ranks that have the same blocks must run the same ones, or use "
        "gather=False",
    ),
    "three fail": (
        [BOOM, BOOM, OSError()], {}, "rank 0: ValueError: boom (and 2 other ranks)"
    ),
    "no share can be taken": (
        [[snapshot(1.0)], [without_mask()]], {},
        "rank 1: TypeError: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_raises_the_error_of_one_that_has_nothing_and_none_waits(name):
    seen, options, words = REFUSED[name]
    found = together(seen, **options)
    assert all(isinstance(error, RankFailedError) for error in found)
    said = [str(error) for error in found]
    if words.endswith(": "):  # then torch says why
        said = [each[: len(words)] for each in said]
    assert said == [words] * len(seen)


def test_one_process_raises_its_own_error():
    for error in (OSError("own"), [snapshot(1.0), *FEWER]):
        with pytest.raises((OSError, ValueError), match=r"own|different layers"):
            gather(error, (0, "train"), RankGroup(), rows=9, queries=8)


NOTE, ALIKE = Note("padding", "half is padding", layers=(1,)), " (and 1 other ranks alike)"
OTHERS = (
    "rank 1 received other tokens than rank 0, although they share one model: their rows and heads "
    "do not belong together. Look at the data loader: ranks of one tensor-parallel group need the "
    "same batches"
)


def same(rank, other, more=""):
    return (
        f"rank {rank} had the same tokens as rank {other}{more}: they are counted once, and if the "
        "ranks share heads (in a tensor-parallel model without DTensors), only the heads of rank "
        f"{other} were measured. If each rank should have tokens of its own, look at the data "
        "loader"
    )


TWO = Mesh(tuple(RankPlace(rank, tensor=(0, 1)) for rank in range(2)))
LOSSES = [MeanLoss(1.0, 1), MeanLoss(2.0, 3)]
# Snapshots of ranks, options; rows of layer 1, kind of the note if there is one, and its words.
SAID = {
    "copies": ([of_batch("x")] * 2, {"same_inputs": True}, [1], [], ""),
    "copies that differ": (
        [of_batch("x"), of_batch("y", 2.0)], {"same_inputs": True}, [1], ["probes differ"],
        "the ranks probe with different inputs: rank 0's were measured",
    ),
    "the same tokens on two": (
        [of_batch("x")] * 2, {}, [1], ["ranks with the same tokens"],
        same(1, 0),
    ),
    "the same tokens on some": (
        [of_batch(b) for b in ("x", "y", "x", "x")], {}, [1, 1], ["ranks with the same tokens"],
        same(2, 0, ALIKE),
    ),
    "the same tokens on ranks but the first": (
        [of_batch(b, i) for i, b in enumerate("xyzy")], {}, [0, 1, 2],
        ["ranks with the same tokens"], same(3, 1),
    ),
    "two passes each, the same": (
        [[*of_batch("x"), *of_batch("y", 2.0)]] * 2, {}, [1, 2], ["ranks with the same tokens"],
        same(1, 0),
    ),
    "two passes each, one the same": (
        [[*of_batch("x"), *of_batch(b, 2.0)] for b in "yz"], {}, [1, 2, 1, 2], [], ""
    ),
    "two passes each, one unknown": (
        [[*of_batch("x"), *of_batch("", 2.0)]] * 2, {}, [1, 2, 1, 2], [], ""
    ),
    "other modes": (
        [of_batch(""), of_batch("", mode="eval")], {}, [1, 1], ["modes"],
        "some ranks were in train mode and some in eval mode",
    ),
    "a note of all": (
        [of_batch("", notes=[NOTE])] * 2, {}, [1, 1], ["padding"], "half is padding"
    ),
    "a note of some": (
        [of_batch(""), *[of_batch("", notes=[NOTE])] * 2], {}, [1, 1, 1], ["padding"],
        f"rank 1: half is padding{ALIKE}",
    ),
    "one saw nothing": (
        [[unseen()], of_batch("", 1.0, 2.0)], {}, [1, 2], ["not seen on some ranks"],
        "rank 0: nothing was seen: skipped",
    ),
    "one did not see a layer": (
        [[unseen(1)], of_batch("", 2.0)], {}, [2], ["not seen on some ranks"],
        "rank 0: blocks.1: no hidden was seen: skipped",
    ),
    "one model, other tokens": (
        [of_batch("a 1"), of_batch("b 1")], {"mesh": TWO}, [1], ["other tokens"], OTHERS
    ),
    "one model, a note of one": (
        [of_batch("a 1"), of_batch("a 2", notes=[NOTE])], {"mesh": TWO}, [1], ["padding"],
        "rank 1: half is padding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_rows_of_all_ranks_are_measured_and_what_is_odd_is_said(name):
    seen, options, rows, of_kinds, words = SAID[name]
    found = together(seen, **options)
    assert rows_of(found)[1] == [100 + row for row in rows]
    info = found[0].info
    assert (found[0].empty, info.mode) == (False, "train")
    assert kinds(found) == of_kinds
    assert [note.words() for note in info.notes] == [words] * bool(words)


def test_checksums_of_the_tokens_are_those_of_all_or_none():
    for given, joined in ((("p", "q"), "p-q"), (("q", "p"), "q-p"), (("p", ""), "")):
        plain = [snapshot(1.0 + rank) for rank in range(2)]
        ranks = [
            [replace(one, info=replace(one.info, token_ids=ids))]
            for one, ids in zip(plain, given, strict=True)
        ]
        assert {each.info.token_ids for each in together(ranks)} == {joined}
        passes = [one for (one,) in ranks]
        alone = gather(passes, (0, "train"), RankGroup(), rows=9, queries=8).info
        assert (alone.token_ids, alone.batch) == (joined, "")


def test_if_no_rank_saw_anything_the_reading_is_empty():
    found = together([[unseen()], [unseen()]])
    assert (found[0].empty, found[0].info.tokens) == (True, 0)


@pytest.mark.parametrize(("same_inputs", "rows"), [(False, 10), (True, 5)])
def test_the_next_reading_takes_more_rows_of_each_where_several_had_the_same(same_inputs, rows):
    groups = connected(2)
    together([of_batch("x")] * 2, groups=groups, same_inputs=same_inputs)
    assert [group.rows_of(10) for group in groups] == [rows] * 2


def test_losses_are_weighted_by_their_sequences_and_passes_are_joined():
    found = together([of_batch("", loss=loss) for loss in LOSSES])
    assert found[0].info.loss == MeanLoss(1.75, 4)
    one, other = (
        of_batch("a", loss=LOSSES[0]),
        of_batch("b", 2.0, 3.0, loss=LOSSES[1], notes=[NOTE]),
    )
    for passes, said in (
        ([*one, *other], "batch 1: half is padding"),
        ([*one, *other, *other], "batch 1: half is padding (and 1 other batches alike)"),
        ([*other] * 2, "half is padding"),
    ):
        alone = gather(passes, (0, "train"), RankGroup(), rows=9, queries=8)
        assert [note.text for note in alone.info.notes] == [said]
    alone = gather([*one, *other], (0, "train"), RankGroup(), rows=9, queries=8)
    assert [merge_layers(p).captured["hidden"][:, 0].tolist() for p in alone.parts] == [
        [100 * i + v for v in (1, 2, 3)] for i in range(3)
    ]
    info = alone.info
    assert (info.tokens, info.loss, info.batch) == (3, MeanLoss(1.75, 4), "a and b")


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
def test_each_part_that_ranks_with_the_same_tokens_share_is_sent_once(cut):
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
    """Only one of two pipelines with the same tokens is measured; ranks 1, 3 have first stages."""
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
