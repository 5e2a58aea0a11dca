"""Parts of a snapshot: layers of views, places of rows, and the reasons for missing views."""

from fractions import Fraction

import pytest
import torch

from geomon.capture.snapshot import (
    CAPTURED,
    HOST,
    Layer,
    Part,
    PassInfo,
    Snapshot,
    at_places,
    concat_heads,
    cover_all,
    explain_missing,
    note_on_layers,
    query_places,
    queue_copy,
    sources_shared_by,
    views_of,
    whole_sequences,
)
from geomon.note_kinds import NoteKind
from support.hardware import DEVICE, Accelerator

BLOCK = frozenset({"hidden", "last", "attention", "projection", "weights", "moves", "routing"})


def layer(captured=(), missing=None, *, index=1, name="h.0", sources=BLOCK, **others) -> Layer:
    """A layer whose views, named only, have no numbers."""
    return Layer(index, name, dict.fromkeys(captured), missing or {}, sources=sources, **others)


# -- which views there are -------------------------------------------------------------------------


def test_a_source_has_its_own_views_and_one_way_to_be_shared():
    assert sources_shared_by("rows") == {"hidden", "last"}
    assert sources_shared_by("heads") == {"attention", "projection"}
    assert sources_shared_by("whole") == {"weights", "moves", "routing"}
    assert views_of("projection") == (
        "projected_query", "projected_key", "query_sequences", "key_sequences"
    )  # fmt: skip
    assert [view.removeprefix("last_") for view in views_of("last")] == [*views_of("hidden")]


def test_a_layer_may_have_the_views_of_its_sources_unless_they_need_a_block_or_a_batch():
    every, hidden = layer().views, frozenset({"hidden"})
    assert every == frozenset(CAPTURED)
    assert every - layer(sources=BLOCK - {"weights"}).views == {
        "additions", "last_additions", "weight_norms"
    }  # fmt: skip
    first = layer(index=0, sources=hidden).views
    assert first == {"hidden", "token_ids", "positions", "sequences", "precision"}
    assert layer(sources=hidden, of_weights=True).views == {"hidden", "precision"}


def test_a_layer_is_narrowed_to_some_sources():
    found = layer(("hidden", "last_hidden", "query", "weight_norms"), {"key": "why"}).only(
        frozenset({"last", "attention", "unheard of"})
    )
    assert set(found.captured) == {"last_hidden", "query"}
    assert found.sources == {"last", "attention"}
    assert found.missing == {"key": "why"}


def test_a_layer_is_moved_to_a_device_and_back_unless_it_is_there():
    numbers = torch.arange(3.0)
    here = Layer(1, "h.0", {"hidden": numbers, "scale": 0.5})
    assert here.devices == {HOST}
    assert here.to(HOST) is here
    with Accelerator():
        there = here.to(DEVICE)
        assert there.devices == {DEVICE}
        assert there.to(DEVICE) is there
        again = there.to(HOST)
        assert again.devices == {HOST}
    assert torch.equal(again.captured["hidden"], numbers)
    assert again.captured["scale"] == 0.5
    assert queue_copy(numbers, HOST) is numbers


@pytest.mark.parametrize(
    ("layers", "is_empty"),
    [
        ([], True),
        ([layer()], True),
        ([layer(("token_ids", "positions"))], True),
        ([layer(("token_ids", "hidden"))], False),
        ([layer(), layer(("visible",))], False),
        ([layer(("hidden",), of_weights=True)], True),
    ],
)
def test_a_snapshot_is_empty_if_no_block_was_seen(layers, is_empty):
    assert Snapshot(layers, PassInfo(0, "", "")).is_empty is is_empty


def test_a_part_is_the_whole_layer_unless_said_otherwise():
    part = Part()
    assert (part.rows, part.last_rows, part.start, part.tokens) == (None, None, (), None)
    assert part.heads == {}
    assert part.tokens_elsewhere is False
    assert Layer(0, "embeddings", {}).part == part


# -- words -----------------------------------------------------------------------------------------


def test_a_note_on_layers_names_its_subject_its_layers_and_the_reason():
    note = note_on_layers(NoteKind.SIDE_BY_SIDE, "spread", "it is odd", iter((2, 3)), "encoder")
    assert note.words() == "encoder: spread, layer 2, 3: it is odd"
    assert note.key == "encoder: blocks side by side: spread: it is odd"
    assert note.layers == (2, 3)
    other = note_on_layers(NoteKind.SIDE_BY_SIDE, "spread", "it is odd", [1])
    assert other.words() == "spread, layer 1: it is odd"


def stack(seen, *, blocks=3, name="", view="hidden", reason=None, sources=BLOCK) -> list[Layer]:
    """The input and some blocks of a stack; the ones in `seen` show a view."""
    return [
        layer(
            (view,) if index in seen else (),
            {view: reason} if reason and index not in seen else {},
            index=index,
            name=f"{name or 'h'}.{index - 1}" if index else "input",
            stack=name,
            sources=sources if index else frozenset({"hidden"}),
        )
        for index in range(blocks + 1)
    ]


LEAD = "not seen in the first pass that was watched: "
REMEDY = (
    ". print(geomon.describe(model)) shows what is expected in which module; blocks=... names "
    "other blocks, metrics=select(...) leaves out what cannot be seen"
)
# Layers, views that are read, and what is said of them.
MISSING = {
    "the first block": (stack({0, 1}), ["hidden"], None),
    "the input alone": (
        stack({0}, reason="no call"), ["hidden"], "hidden states at h.0 (3 of 3 layers): no call",
    ),
    "hidden states before all else": (
        stack(set(), blocks=1), ["visible", "hidden"], "hidden states at h.0: it was not seen",
    ),
    "views that nobody reads": (stack(set()), ["weight_norms", "expert_counts"], None),
    "two sources": (
        stack({1, 2, 3}), ["projected_key", "key", "last_hidden"],
        "hidden states of the last tokens at h.0 (3 of 3 layers): it was not seen; "
        "attention at h.0 (3 of 3 layers): it was not seen; "
        "queries and keys as projected at h.0 (3 of 3 layers): it was not seen",
    ),
    "one of two stacks": (
        [*stack({1}, name="encoder"), *stack({0}, name="decoder", reason="not run")], ["hidden"],
        "hidden states at decoder.0 (3 of 3 layers): not run",
    ),
    "two reasons": (
        [*stack(set(), blocks=1, reason="one"),
         *(layer((), {"hidden": "two"}, index=index, name=f"h.{index - 1}") for index in (2, 3))],
        ["hidden"],
        "hidden states at h.0 (1 of 3 layers): one; hidden states at h.1 (2 of 3 layers): two",
    ),
    "layers without the source": (
        stack(set(), view="visible", sources=frozenset({"hidden", "last"})), ["visible"], None,
    ),
    "a matrix": (
        [*stack({1}), layer((), {"hidden": "no table"}, index=0, name="embedding",
                            stack="embedding", sources=frozenset({"hidden"}), of_weights=True)],
        ["hidden"], "hidden states at embedding: no table",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSING)
def test_what_no_layer_of_a_stack_shows_is_said_with_layers_and_reason(case):
    layers, views, said = MISSING[case]
    found = explain_missing(Snapshot(layers, PassInfo(0, "", "")), views)
    assert found == (said and f"{LEAD}{said}{REMEDY}")


# -- places of queries -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "length", "count"),
    [(4096, 64, 64), (4096, 512, 8), (4096, 513, 8), (4096, 1024, 8), (4096, 1025, 7),
     (4096, 4096, 2), (4096, 4097, 1), (4096, 9000, 1), (3, 2, 3), (1, 5, 1)],
)  # fmt: skip
def test_up_to_eight_sequences_keep_all_keys_if_these_are_twice_the_rows(rows, length, count):
    assert whole_sequences(rows, length) == count


@pytest.mark.parametrize(("count", "each", "length"), [(17, 4, 10), (33, 3, 7), (5, 10, 10)])
def test_sampled_queries_are_spread_and_shifted_in_each_eighth(count, each, length):
    numbers = torch.tensor([0, 1, 3, count - 1])
    shifts = max(1, count // 8)
    expected = [
        [
            int((order + (number % shifts + Fraction(1, 2)) / shifts) * length / each)
            for order in range(each)
        ]
        for number in numbers.tolist()
    ]
    found = query_places(numbers, count, each, length)
    assert found.tolist() == expected
    assert found.dtype == torch.int64
    assert cover_all(found, length) == (each == length)


def test_places_cover_all_if_they_are_every_position_in_order():
    every = torch.arange(4).expand(2, -1)
    assert cover_all(every, 4)
    assert not cover_all(every, 5)
    assert not cover_all(every.flip(1), 4)
    assert not cover_all(torch.stack([every[0], every[0].roll(1)]), 4)
    assert not cover_all(every.to("meta"), 4)


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("places", [[[0, 1, 2, 3]] * 3, [[3, 1], [0, 2], [2, 2]]])
def test_rows_are_taken_at_the_places_of_each_sequence(sequences, places):
    values = torch.randn(sequences, 2, 4, 5, requires_grad=True)
    found = at_places(values, torch.tensor(places))
    whole = values.detach().expand(3, -1, -1, -1)
    assert not found.requires_grad
    assert found.is_contiguous()
    for each, own, at in zip(found, whole, places, strict=True):
        assert torch.equal(each, own[:, at])
    found.zero_()
    assert values.all()  # a copy


# -- heads that are apart --------------------------------------------------------------------------


def group(heads, **others):
    """Views of a group of heads, whose numbers tell the group."""
    views = {"query": torch.full((2, heads, 3, 4), float(heads)),
             "key": torch.full((2, 1, 5, 4), float(heads)),
             "max_logits": torch.full((heads,), float(heads)), "scale": 0.5}  # fmt: skip
    return views | others, {}


DIFFER = "its heads (modules of a list, or on several ranks) differ in their {}"


def test_one_group_of_heads_is_taken_as_it_is_in_mappings_of_its_own():
    captured, missing = {"scale": 0.5}, {"query": "why"}
    found = concat_heads([(captured, missing)])
    assert found == (captured, missing)
    assert found[0] is not captured
    assert found[1] is not missing


def test_views_of_groups_of_heads_stand_side_by_side_in_their_dimension():
    found, missing = concat_heads([group(2), group(3)])
    assert missing == {}
    heads = [2.0, 2.0, 3.0, 3.0, 3.0]
    assert found["query"].shape == (2, 5, 3, 4)
    assert found["query"][1, :, 2, 3].tolist() == heads
    assert found["key"][1, :, 4, 0].tolist() == [2.0, 3.0]
    assert found["max_logits"].tolist() == heads
    assert found["scale"] == 0.5


@pytest.mark.parametrize("view", ["scale", "softcap"])
def test_heads_that_differ_in_a_number_are_not_joined(view):
    found, missing = concat_heads([group(2, **{view: 1.0}), group(3, **{view: 2.0})])
    assert found == {}
    assert missing == dict.fromkeys({**group(2)[0], view: 0}, DIFFER.format(view))


def test_sinks_of_some_heads_alone_are_not_joined_and_of_none_are_none():
    found, _ = concat_heads([group(2, sink=None), group(3, sink=None)])
    assert found["sink"] is None
    assert found["query"].shape[1] == 5
    _, missing = concat_heads([group(2, sink=None), group(3, sink=torch.ones(3))])
    assert missing["query"] == DIFFER.format("sink")


def test_a_view_that_some_heads_lack_is_missing_for_the_first_reason():
    first, (second, _), third = group(2), group(3), group(1)
    del second["max_logits"]
    reasons = {"max_logits": "too large", "key": "unknown"}
    given = [first, (second, reasons), (third[0], {"key": "not seen"})]
    found, missing = concat_heads(given)
    assert missing == {"max_logits": "too large", "key": "unknown"}
    assert set(found) == {"query", "scale"}
    found, missing = concat_heads([first, (second, {})])
    assert missing == {}
    assert "max_logits" not in found


def test_a_mask_that_all_heads_share_stays_one_and_others_are_given_to_each_head():
    causal, full = torch.ones(1, 1, 3, 3).tril().bool(), torch.ones(1, 1, 3, 3).bool()
    found, _ = concat_heads([group(2, visible=causal), group(3, visible=causal.clone())])
    assert torch.equal(found["visible"], causal)
    found, _ = concat_heads([group(2, visible=causal), group(3, visible=full)])
    assert found["visible"].shape == (1, 5, 3, 3)
    for head, expected in enumerate([causal] * 2 + [full] * 3):
        assert torch.equal(found["visible"][:, head], expected[:, 0])


def test_a_bias_of_some_heads_alone_is_zero_for_the_others_and_has_the_larger_sides():
    bias = torch.arange(1.0, 13).view(2, 2, 3, 1)
    found, _ = concat_heads([group(3, bias=None), group(2, bias=bias)])
    assert found["bias"].shape == (2, 5, 3, 1)
    assert torch.equal(found["bias"], torch.cat([torch.zeros(2, 3, 3, 1), bias], 1))
    wide = torch.full((1, 1, 1, 5), 2.0)
    found, _ = concat_heads([group(2, bias=bias), group(1, bias=wide)])
    assert torch.equal(found["bias"][:, :2], bias.expand(-1, -1, -1, 5))
    assert torch.equal(found["bias"][:, 2:], wide.expand(2, -1, 3, -1))


def test_heads_whose_queries_were_not_seen_are_counted_by_their_scores():
    causal, full = torch.ones(1, 1, 3, 3).tril().bool(), torch.ones(1, 1, 3, 3).bool()
    groups = [({"scores": torch.ones(2, n, 3, 3), "visible": mask}, {})
              for n, mask in ((2, causal), (3, full))]  # fmt: skip
    found, _ = concat_heads(groups)
    assert found["scores"].shape == (2, 5, 3, 3)
    assert found["visible"].shape == (1, 5, 3, 3)
