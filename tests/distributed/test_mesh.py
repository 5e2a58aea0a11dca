"""The places of ranks in a mesh, in words and in numbers; no rank is started."""

import pytest

from geomon.distributed.mesh import Mesh, RankPlace


def tensor(rank, *ranks, **more):
    return RankPlace(rank, tensor=ranks, **more)


def stage(rank, *ranks, stages=(0,), of=2, names=None, **more):
    blocks = tuple({"": tuple(each)} for each in names) if names else ()
    return RankPlace(rank, pipeline=ranks, stages=stages, num_stages=of, blocks=blocks, **more)


@pytest.mark.parametrize(
    ("place", "shard", "shards", "is_whole", "part"),
    [
        (RankPlace(3), 0, 1, True, "the whole model"),
        (tensor(5, 4, 5), 1, 2, False, "shard 1 of 2 of the weights"),
        (stage(1, 0, 1, stages=(1,)), 0, 1, False, "stage 1 of 2 (from 0)"),
        (stage(1, 0, 1, stages=(1, 3), of=4), 0, 1, False, "stages 1 and 3 of 4 (from 0)"),
        (stage(0, 0, stages=(0, 1)), 0, 1, True, "the whole model"),
        (
            stage(2, 0, 2, tensor=(2, 3)), 0, 2, False,
            "stage 0 of 2 (from 0), shard 0 of 2 of the weights",
        ),
    ],
)  # fmt: skip
def test_a_rank_knows_which_part_of_the_model_it_has(place, shard, shards, is_whole, part):
    assert (place.shard, place.shards, place.is_whole) == (shard, shards, is_whole)
    assert place.part() == part
    notes = [note.words() for note in place.notes_alone()]
    said = f"only the part of the model on rank {place.rank} is measured: {part}"
    assert notes == ([] if is_whole else [said])


@pytest.mark.parametrize(
    ("place", "ranks", "words"),
    [
        (RankPlace(), 1, "1 rank"),
        (RankPlace(), 4, "4 ranks: 4 data"),
        (tensor(0, 0, 1), 2, "2 ranks: 2 tensor"),
        (tensor(0, 0, 1, tensor_name="tp"), 4, "4 ranks: 2 data x 2 tensor (tp)"),
        (stage(0, 0, 1), 2, "2 ranks: 2 pipeline"),
        (stage(0, 0, 1, of=4), 4, "4 ranks: 2 data x 2 pipeline (4 stages)"),
        (
            stage(0, 0, 4, tensor=(0, 1), tensor_name="tp"), 8,
            "8 ranks: 2 data x 2 pipeline x 2 tensor (tp)",
        ),
    ],
)  # fmt: skip
def test_the_dimensions_of_a_mesh_are_said(place, ranks, words):
    assert place.words(ranks) == words
    assert Mesh((place,) * ranks).words() == words


def test_ranks_that_share_one_model_have_the_same_tokens():
    assert Mesh().data_ranks == (0,)
    assert Mesh().places == (RankPlace(0, stages=(0,), num_stages=1),)
    assert (Mesh().difference(), Mesh().blocks_around(0, "")) == (None, (0, 0))
    assert Mesh(tuple(RankPlace(rank) for rank in range(3))).data_ranks == (0, 1, 2)
    pairs = tuple(tensor(rank, rank // 2 * 2, rank // 2 * 2 + 1) for rank in range(4))
    assert (Mesh(pairs).data_ranks, Mesh(pairs).data_size) == ((0, 0, 1, 1), 2)
    # Two stages of two shards: ranks 0 and 1 run the first, 2 and 3 the second.
    square = tuple(
        stage(rank, rank % 2, rank % 2 + 2, tensor=(rank // 2 * 2, rank // 2 * 2 + 1))
        for rank in range(4)
    )
    assert Mesh(square).data_ranks == (0, 0, 0, 0)
    crossed = (tensor(0, 0, 2), tensor(1, 1, 3), tensor(2, 0, 2), tensor(3, 1, 3))
    assert (Mesh(crossed).data_ranks, Mesh(crossed).data_size) == ((0, 1, 0, 1), 2)


PIPELINE = Mesh((
    stage(0, 0, 1, stages=(0, 2), of=4, names=[["a.0", "a.1"], ["b.0"]]),
    stage(1, 0, 1, stages=(1, 3), of=4, names=[["a.2"], ["b.1", "b.2"]]),
))  # fmt: skip


def test_blocks_are_listed_stage_by_stage():
    assert PIPELINE.block_names() == ["a.0", "a.1", "a.2", "b.0", "b.1", "b.2"]
    assert [PIPELINE.blocks_around(number, "") for number in range(4)] == [
        (0, 4), (2, 3), (3, 2), (4, 0),
    ]  # fmt: skip
    assert PIPELINE.blocks_around(1, "decoder") == (0, 0)
    assert PIPELINE.difference() is None
    assert not PIPELINE.names_clash("")


def test_where_each_stage_counts_from_0_its_number_stands_before_the_names():
    mesh = Mesh((
        stage(0, 0, 1, names=[["h.0", "h.1"]]), stage(1, 0, 1, stages=(1,), names=[["h.0"]]),
    ))  # fmt: skip
    assert mesh.names_clash("")
    assert mesh.block_names() == ["stage_0.h.0", "stage_0.h.1", "stage_1.h.0"]


def test_ranks_that_were_built_with_other_layers_are_named():
    same = stage(0, 0, 1, names=[["h.0"]])
    other = stage(1, 0, 1, names=[["h.0", "h.1"]])
    assert Mesh((same, same)).difference() is None
    assert (
        Mesh((same, other))
        .difference()
        .startswith(
            "rank 1 was built with other layers than rank 0 (in a pipeline, pass the schedule"
        )
    )
    more = stage(1, 0, 1, of=3)
    assert Mesh((same, more)).difference() == ("rank 1 was built with 3 stages, but rank 0 with 2")
