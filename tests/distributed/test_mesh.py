"""The places of ranks in a mesh, in words and in numbers; no rank is started."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from geomon.distributed.mesh import Mesh, RankPlace, find_place


def tensor(rank, *ranks, **more):
    return RankPlace(rank, tensor=ranks, **more)


def stage(rank, *ranks, stages=(0,), of=2, names=None, **more):
    blocks = tuple({"": tuple(each)} for each in names) if names else ()
    return RankPlace(rank, pipeline=ranks, stages=stages, num_stages=of, blocks=blocks, **more)


SQUARE = Mesh(  # two stages of two shards: ranks 0 and 1 run the first, 2 and 3 the second
    tuple(
        stage(rank, rank % 2, rank % 2 + 2, tensor=(rank // 2 * 2, rank // 2 * 2 + 1))
        for rank in range(4)
    )
)
PAIRS = Mesh(tuple(tensor(rank, rank // 2 * 2, rank // 2 * 2 + 1) for rank in range(4)))
CROSSED = Mesh((tensor(0, 0, 2), tensor(1, 1, 3), tensor(2, 0, 2), tensor(3, 1, 3)))
THREE = Mesh(tuple(RankPlace(rank) for rank in range(3)))
PIPELINE = Mesh((
    stage(0, 0, 1, stages=(0, 2), of=4, names=[["a.0", "a.1"], ["b.0"]]),
    stage(1, 0, 1, stages=(1, 3), of=4, names=[["a.2"], ["b.1", "b.2"]]),
))  # fmt: skip
FROM_0 = Mesh((
    stage(0, 0, 1, names=[["h.0", "h.1"]]), stage(1, 0, 1, stages=(1,), names=[["h.0"]]),
))  # fmt: skip
SAME, OTHER = stage(0, 0, 1, names=[["h.0"]]), stage(1, 0, 1, names=[["h.0", "h.1"]])
BUILT = "rank 1 was built with other layers than rank 0 (in a pipeline, pass the schedule"
# Places; shard, number of shards, whether the model is whole, and the part in words.
PLACES = [
    (RankPlace(3), (0, 1, True), "the whole model"),
    (tensor(5, 4, 5), (1, 2, False), "shard 1 of 2 of the weights"),
    (stage(1, 0, 1, stages=(1,)), (0, 1, False), "stage 1 of 2 (from 0)"),
    (stage(1, 0, 1, stages=(1, 3), of=4), (0, 1, False), "stages 1 and 3 of 4 (from 0)"),
    (stage(0, 0, stages=(0, 1)), (0, 1, True), "the whole model"),
    (
        stage(2, 0, 2, tensor=(2, 3)), (0, 2, False),
        "stage 0 of 2 (from 0), shard 0 of 2 of the weights",
    ),
]  # fmt: skip
# Places, numbers of ranks, and the dimensions of their mesh.
WORDS = [
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
]  # fmt: skip
# Which ranks have the same tokens, where blocks are and what they are called, where ranks differ.
FACTS = {
    "one rank": (lambda: (Mesh().data_ranks, Mesh().difference(), Mesh().blocks_around(0, "")),
                 ((0,), None, (0, 0))),
    "the place of one": (lambda: Mesh().places, (RankPlace(0, stages=(0,), num_stages=1),)),
    "equal ones": (lambda: len({Mesh(), Mesh(), RankPlace(2), RankPlace(2)}), 2),
    "three": (lambda: THREE.data_ranks, (0, 1, 2)),
    "pairs": (lambda: (PAIRS.data_ranks, PAIRS.data_size), ((0, 0, 1, 1), 2)),
    "crossed": (lambda: (CROSSED.data_ranks, CROSSED.data_size), ((0, 1, 0, 1), 2)),
    "a square": (lambda: SQUARE.data_ranks, (0, 0, 0, 0)),
    "blocks": (PIPELINE.block_names, ["a.0", "a.1", "a.2", "b.0", "b.1", "b.2"]),
    "blocks around": (
        lambda: [PIPELINE.blocks_around(number, "") for number in range(4)],
        [(0, 4), (2, 3), (3, 2), (4, 0)],
    ),
    "of another stack": (lambda: PIPELINE.blocks_around(1, "decoder"), (0, 0)),
    "no clash": (lambda: (PIPELINE.difference(), PIPELINE.names_clash("")), (None, False)),
    "each stage counts from 0": (
        lambda: (FROM_0.names_clash(""), FROM_0.block_names()),
        (True, ["stage_0.h.0", "stage_0.h.1", "stage_1.h.0"]),
    ),
    "the same": (lambda: Mesh((SAME, SAME)).difference(), None),
    "others": (lambda: Mesh((SAME, OTHER)).difference()[: len(BUILT)], BUILT),
    "more": (
        lambda: Mesh((SAME, stage(1, 0, 1, of=3))).difference(),
        "rank 1 was built with 3 stages, but rank 0 with 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("place", "numbers", "part"), PLACES)
def test_a_rank_knows_which_part_of_the_model_it_has(place, numbers, part):
    assert (place.shard, place.shards, place.is_whole) == numbers
    assert place.part() == part
    said = f"only the part of the model on rank {place.rank} is measured: {part}"
    assert [note.words() for note in place.notes_alone()] == [said] * (not place.is_whole)


def of_mesh(ranks, at, names=None, *, placements=(), hidden=False):
    """A module with a parameter that is sharded over a mesh, at a place in it."""
    mesh = SimpleNamespace(
        mesh=torch.tensor(ranks), ndim=torch.tensor(ranks).ndim, mesh_dim_names=names,
        get_coordinate=lambda: at,
    )  # fmt: skip
    weight = nn.Parameter(torch.zeros(3))
    if hidden:  # as DDP keeps it
        weight._st_info = SimpleNamespace(mesh=mesh, placements=placements)
    else:
        weight.device_mesh, weight.placements = mesh, placements
    module = nn.Linear(2, 2)
    module.weight = weight
    return module


SQUARE_OF_RANKS = [[0, 1], [2, 3]]
# Modules; the ranks that share them, and the name of that dimension.
SHARED = [
    ([nn.Linear(2, 2)], (), ""),
    ([of_mesh([0, 2], (1,), ("tp",))], (0, 2), "tp"),
    ([of_mesh([0, 2], (1,))], (0, 2), ""),
    ([of_mesh([0, 2], (1,), ("tp",), hidden=True)], (0, 2), "tp"),
    ([of_mesh([2], (0,), ("tp",))], (), ""),
    ([of_mesh([0, 1], None, ("tp",))], (), ""),  # of other ranks
    ([of_mesh(SQUARE_OF_RANKS, (1, 0), ("a", "b"))], (0, 1, 2, 3), "a, b"),
    ([of_mesh([0, 2], (1,), ("a",)), of_mesh([0, 1, 2], (2,), ("b",))], (0, 1, 2), "b"),
    ([of_mesh([0, 1, 2], (2,), ("b",)), of_mesh([0, 2], (1,), ("a",))], (0, 1, 2), "b"),
]


@pytest.mark.parametrize(("parts", "ranks", "name"), SHARED, ids=range(len(SHARED)))
def test_a_rank_finds_those_that_share_its_weights_and_its_pipeline(
    monkeypatch, parts, ranks, name
):
    assert find_place(parts) == RankPlace()  # alone
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [2, group])
    assert find_place(parts) == RankPlace(2, tensor=ranks, tensor_name=name)
    stages = [SimpleNamespace(stage_index=n, group=7, num_stages=5) for n in (1, 3)]
    found = find_place(parts, stages)
    assert found == RankPlace(2, ranks, name, pipeline=(2, 7), stages=(1, 3), num_stages=5)


@pytest.mark.parametrize(("place", "ranks", "words"), WORDS)
def test_the_dimensions_of_a_mesh_are_said(place, ranks, words):
    assert place.words(ranks) == words
    assert Mesh((place,) * ranks).words() == words


@pytest.mark.parametrize("name", FACTS)
def test_a_mesh_tells_which_ranks_share_tokens_and_blocks(name):
    ask, expected = FACTS[name]
    assert ask() == expected
