"""Parts of a layer on ranks that share it out, put together again: one that was cut on purpose."""

import itertools
from dataclasses import replace

import pytest
import torch

from geomon.capture.snapshot import Layer, Part
from geomon.distributed.merge import join_parts, merge_layers

ROWS, SEQUENCES, QUERIES, KEYS, WIDTH = 7, 2, 3, 5, 4


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_rows(rows, tokens=None, *, elsewhere=False, prefix="", ids=True):
    """Some rows of a layer, whose number is their place in it."""
    whole = drawn(ROWS, WIDTH)
    number = torch.tensor(rows)
    captured = {f"{prefix}hidden": whole[number]}
    if ids:
        captured[f"{prefix}token_ids"] = number + 50
    numbered = {f"{prefix}rows": number}
    part = Part(**numbered, tokens=tokens, tokens_elsewhere=elsewhere)
    return Layer(1, "block", captured, {}, part=part)


@pytest.mark.parametrize("prefix", ["", "last_"])
@pytest.mark.parametrize("cut", [([4, 0, 2], [6, 1, 5, 3]), ([5, 6], [0, 1], [2, 3, 4])])
def test_rows_come_in_the_order_of_their_numbers(cut, prefix):
    found = join_parts([of_rows(rows, prefix=prefix) for rows in cut])
    assert torch.equal(found.captured[f"{prefix}hidden"], drawn(ROWS, WIDTH))
    assert found.captured[f"{prefix}token_ids"].tolist() == list(range(50, 50 + ROWS))
    assert getattr(found.part, f"{prefix}rows").tolist() == list(range(ROWS))


def test_a_view_that_not_all_parts_have_is_left_out():
    found = join_parts([of_rows([0, 1]), of_rows([2], ids=False)])
    assert set(found.captured) == {"hidden"}


def first_stage(rows):
    captured = {"token_ids": torch.tensor(rows) + 50}
    return Layer(0, "block", captured, {}, part=Part(rows=torch.tensor(rows)))


@pytest.mark.parametrize(
    ("known", "kept"),
    [([[0, 1, 2, 3]], [1, 3]), ([[3, 1], [6]], [1, 3]), ([[4], [0]], []), ([[3, 0, 1]], [1, 3])],
)
def test_rows_of_a_later_stage_take_the_ids_that_the_first_one_knows(known, kept):
    later = of_rows([3, 5, 1], elsewhere=True, ids=False)
    found = join_parts([later, *map(first_stage, known)])
    by_number = dict(
        zip(found.part.rows.tolist(), found.captured["token_ids"].tolist(), strict=True)
    )
    assert by_number == {row: row + 50 for row in kept}
    whole = drawn(ROWS, WIDTH)
    assert torch.equal(found.captured["hidden"], whole[found.part.rows])


def test_what_the_first_stage_knows_of_tokens_stands_for_what_a_later_one_does():
    known = Layer(
        0, "block", {"positions": torch.tensor([0, 1])}, {}, part=first_stage([1, 3]).part
    )
    found = join_parts([of_rows([3, 1], elsewhere=True), known])
    assert found.captured.keys() == {"hidden", "positions"}
    assert found.captured["positions"].tolist() == [1, 0]


def attention(heads, key_heads, *, each=2, sequences=SEQUENCES, **more):
    """Some heads of an attention of 4 query and 2 key heads, of width 2."""
    query, key = drawn(SEQUENCES, 4, QUERIES, 2), drawn(SEQUENCES, 2, KEYS, 2, seed=1)
    captured = {
        "query": query[:sequences, list(heads)],
        "key": key[:sequences, list(key_heads)],
        "visible": torch.ones(1, 1, QUERIES, KEYS).bool(),
        "scale": 0.5,
    }
    numbers = {"query": tuple(each * h for h in heads), "key": tuple(each * h for h in key_heads)}
    return Layer(1, "block", captured | more, {}, part=Part(heads=numbers))


@pytest.mark.parametrize(
    "cut",
    [
        [([0, 1], [0]), ([2, 3], [1])],
        [([2, 3], [1]), ([0, 1], [0])],  # in any order
        [([0], [0]), ([1], [0]), ([2], [1]), ([3], [1])],  # a key head on two ranks counts once
        [([0], [0]), ([1, 2], [0, 1]), ([3], [1])],
        [([0, 1], [0]), ([2], [1]), ([3], [1])],
    ],
)
def test_heads_come_in_the_order_of_their_numbers_and_key_heads_of_several_ranks_once(cut):
    found = join_parts([attention(*heads) for heads in cut])
    assert torch.equal(found.captured["query"], drawn(SEQUENCES, 4, QUERIES, 2))
    assert torch.equal(found.captured["key"], drawn(SEQUENCES, 2, KEYS, 2, seed=1))
    assert found.part.heads == {"query": (0, 2, 4, 6), "key": (0, 2)}
    assert (found.captured["scale"], found.captured["visible"].shape[1]) == (0.5, 1)
    assert not found.missing


def test_where_key_heads_are_shared_in_another_way_each_rank_keeps_its_own():
    parts = [attention([0, 1], [0, 1]), attention([2, 3], [0, 1])]
    found = join_parts(parts)
    assert found.captured["key"].shape[1] == 4
    assert found.part.heads["key"] == (0, 2, 0, 2)


def test_heads_of_other_rows_do_not_belong_together():
    found = join_parts([attention([0, 1], [0]), attention([2, 3], [1], sequences=1)])
    assert "query" not in found.captured
    assert "did not keep the same rows" in found.missing["query"]
    by_hand = [Layer(1, "block", {"scores": drawn(n, 2, 3, 5)}, {}) for n in (1, 2)]
    assert "did not keep the same rows" in join_parts(by_hand).missing["scores"]
    found = join_parts([attention([0, 1], [0]), attention([2, 3], [1], scale=0.25)])
    assert "query" not in found.captured
    assert "differ in their scale" in found.missing["key"]


def test_projected_heads_are_joined_by_themselves():
    rows = drawn(ROWS, 4, 2, seed=3)
    parts = [
        Layer(
            1, "block",
            {"projected_query": rows[:, [a, b]], "projected_key": rows[:, [a, b]]}, {},
            part=Part(heads={"projected_query": (a, b), "projected_key": (a, b)}),
        )
        for a, b in ((2, 3), (0, 1))
    ]  # fmt: skip
    found = join_parts(parts)
    assert torch.equal(found.captured["projected_query"], rows)
    assert torch.equal(found.captured["projected_key"], rows)
    assert found.part.heads == dict.fromkeys(("projected_query", "projected_key"), (0, 1, 2, 3))
    short = replace(parts[0], captured={v: x[:-1] for v, x in parts[0].captured.items()})
    assert "same rows" in join_parts([short, parts[1]]).missing["projected_key"]


def test_a_reason_stays_only_for_what_no_part_has():
    lacking = Layer(1, "block", {}, {"hidden": "not run", "query": "not seen"})
    found = join_parts([lacking, of_rows([0, 1])])
    assert found.missing == {"query": "not seen"}
    assert torch.equal(found.captured["hidden"], drawn(ROWS, WIDTH)[:2])


def test_parts_of_the_same_tokens_are_joined_before_those_of_others_follow():
    parts = [
        of_rows(rows, tokens) for tokens, rows in ((0, [1, 3]), (1, [2, 6]), (0, [0]), (1, [5]))
    ]
    found = merge_layers(parts)
    order = [0, 1, 3, 2, 5, 6]
    assert torch.equal(found.captured["hidden"], drawn(ROWS, WIDTH)[order])
    assert (found.part.rows.diff() > 0).all()
    many = Layer(1, "block", {"hidden": drawn(200, 2)}, {}, part=Part(rows=torch.arange(200)))
    assert len(merge_layers([many, many]).part.rows.unique()) == 400
    assert merge_layers(parts[:1]) is parts[0]
    unnumbered = [of_rows([row]) for row in (4, 2)]  # each of its own tokens
    assert torch.equal(merge_layers(unnumbered).captured["hidden"], drawn(ROWS, WIDTH)[[4, 2]])


def test_of_weights_the_first_that_were_seen_are_taken():
    parts = [
        Layer(0, "embedding", views, {}, "embedding", of_weights=True)
        for views in ({}, {"hidden": drawn(3, 2)}, {"hidden": drawn(3, 2, seed=1)})
    ]
    assert merge_layers(parts) is parts[1]
    assert merge_layers(parts[:1] * 2) is parts[0]


def test_every_order_of_the_parts_gives_the_same():
    parts = [of_rows([5, 1]), of_rows([0, 3, 2]), of_rows([6, 4])]
    for order in itertools.permutations(parts):
        assert torch.equal(join_parts(order).captured["hidden"], drawn(ROWS, WIDTH))


def of_block(tokens, counts, scale=1.0):
    captured = {
        "weight_norms": {"mlp": 2.0 * scale}, "expert_counts": torch.tensor(counts),
        "hidden": drawn(3, WIDTH),
    }  # fmt: skip
    return Layer(1, "block", captured, {}, part=Part(tokens=tokens))


def test_experts_are_counted_over_all_tokens_and_weights_once():
    found = merge_layers([of_block(0, [1.0, 2.0]), of_block(1, [3.0, 0.0], scale=1.5)])
    assert found.captured["expert_counts"].tolist() == [4.0, 2.0]
    assert found.captured["weight_norms"] == {"mlp": 2.0}
    assert len(found.captured["hidden"]) == 6
    same = merge_layers([of_block(0, [1.0, 2.0]), of_block(0, [1.0, 2.0])])
    assert same.captured["expert_counts"].tolist() == [1.0, 2.0]
