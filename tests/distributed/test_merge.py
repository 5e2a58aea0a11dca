"""Parts of a layer that several ranks or batches have become the layer that one process has.

The tests cut a layer as each way of training in parallel does: rows (sequence parallel), heads
(tensor parallel), blocks (pipeline parallel) or batches (data parallel). They join the parts again,
and compare the result with the layer before the cut.
"""

import itertools
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon import METRICS, MORE_METRICS
from geomon.capture.snapshot import CAPTURED, Layer, Part
from geomon.distributed import merge_layers
from geomon.distributed.joining import attention_shape
from geomon.distributed.merge import subsample_attention
from geomon.kernels.attention import attention_rows, scores_of
from geomon.record.columns import tagged
from support.hardware import DEVICE, Accelerator
from support.measuring import Evaluator, check_metrics
from support.whole_layer import LENGTH, SEQUENCES, whole_layer

OTHER_FORMS = "ranks or batches captured it in different forms"
NOT_ON_ALL = "it is known for the rows of some ranks or batches, but not for others"
OTHER_ROWS = "its heads are on several ranks, which did not keep the same rows"


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(captured, missing=None, **part):
    """A layer, or a part of it."""
    return Layer(1, "block", captured, missing or {}, part=Part(**part))


def check(found, views, missing=None):
    """The views are equal to the bit, others may be there; exactly these reasons are given."""
    for name, expected in views.items():
        given = found.captured[name]
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
        else:
            assert given == expected, name
    assert found.missing == (missing or {})
    assert not found.missing.keys() & found.captured.keys()
    assert (found.index, found.name) == (1, "block")


# -- a reading -------------------------------------------------------------------------------------


def sequences_of(whole, first, end):
    """The layer of a rank whose batch has only some of the sequences, numbered from 0."""
    numbers = {"tokens": "sequences", "queries": "query_sequences", "keys": "key_sequences"}
    captured = dict(whole.captured)
    for name, view in CAPTURED.items():
        values = captured.get(name)
        if view.rows in numbers:
            number = whole.captured[f"last_{numbers[view.rows]}" if view.source == "last"
                                    else numbers[view.rows]]  # fmt: skip
            captured[name] = values[(first <= number) & (number < end)]
        elif view.rows == "sequences" and values is not None and len(values) > 1:
            captured[name] = values[first:end]
        if view.merge == "numbers":
            captured[name] = captured[name] - first
    share = (end - first) / SEQUENCES
    captured["expert_counts"] = whole.captured["expert_counts"] * share
    captured["head_outputs"] = whole.captured["head_outputs"] * share
    captured["max_logits"] = whole.captured["max_logits"] - first
    return replace(whole, captured=captured)


def values_of(whole):
    """Every value, margin and number of a head in a reading of one layer, by tag."""
    evaluator = Evaluator(check_metrics(METRICS | MORE_METRICS), 1, strict=True)
    return tagged(evaluator.evaluate([whole], SEQUENCES * LENGTH).stacks)


@pytest.mark.parametrize("ends", [(8,), (4, 12)])
def test_ranks_with_batches_of_their_own_give_the_reading_of_one_process(ends):
    whole = whole_layer()
    parts = [sequences_of(whole, a, b) for a, b in pairwise([0, *ends, SEQUENCES])]
    found, expected = values_of(merge_layers(parts)), values_of(whole)
    assert found.keys() == expected.keys()
    assert len(found) > 100
    for tag, value in expected.items():
        assert found[tag] == pytest.approx(value, rel=1e-12, nan_ok=True), tag


# -- rows that ranks with the same tokens share ----------------------------------------------------

ROWS, WIDTH = 7, 4
HIDDEN, IDS = drawn(ROWS, WIDTH), torch.arange(ROWS) + 50


def rows_of_rank(*rows, tokens=0, elsewhere=False, prefix="", views=("hidden", "token_ids")):
    """A rank with some rows of the layer, which knows their indices in the whole."""
    index = torch.tensor(rows)
    whole = {"hidden": HIDDEN, "token_ids": IDS}
    captured = {f"{prefix}{view}": whole[view][index] for view in views}
    numbered = {f"{prefix}rows": index}
    return layer(captured, **numbered, tokens=tokens, tokens_elsewhere=elsewhere)


SHARES = [
    [(4, 0, 2), (6, 1, 5, 3)],
    *itertools.permutations([(5, 1), (0, 3, 2), (6, 4)]),
]


@pytest.mark.parametrize("prefix", ["", "last_"], ids=["all rows", "last tokens"])
@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_rows_are_in_the_order_of_one_process_whichever_rank_has_them(shares, prefix):
    found = merge_layers([rows_of_rank(*rows, prefix=prefix) for rows in shares])
    check(found, {f"{prefix}hidden": HIDDEN, f"{prefix}token_ids": IDS})
    index = found.part.last_rows if prefix else found.part.rows
    assert (index.tolist(), found.part.tokens) == ([*range(ROWS)], 0)


def test_a_view_that_a_rank_does_not_have_of_its_rows_is_left_out():
    found = merge_layers([rows_of_rank(0, 1), rows_of_rank(2, views=["hidden"])])
    check(found, {"hidden": HIDDEN[:3]})
    assert "token_ids" not in found.captured


def test_ranks_without_indices_have_equal_rows_which_are_taken_once():
    parts = [layer({"hidden": HIDDEN, "precision": 1e-7}, tokens=0)] * 2
    check(merge_layers(parts), {"hidden": HIDDEN, "precision": 1e-7})


def test_a_reason_is_dropped_if_another_rank_has_the_view_and_else_the_first_rank_s_is_kept():
    blind = layer({}, {"hidden": "not run", "query": "not seen"}, tokens=0)
    other = rows_of_rank(0, 1)
    other = replace(other, missing={"query": "another reason"})
    check(merge_layers([blind, other]), {"hidden": HIDDEN[:2]}, {"query": "not seen"})
    check(merge_layers([other, blind]), {"hidden": HIDDEN[:2]}, {"query": "another reason"})


@pytest.mark.parametrize("tokens", [(0, 1), (None, None)], ids=["numbered", "not numbered"])
def test_rows_of_other_tokens_follow_in_the_order_of_the_ranks(tokens):
    found = merge_layers([rows_of_rank(4, tokens=tokens[0]), rows_of_rank(2, tokens=tokens[1])])
    check(found, {"hidden": HIDDEN[[4, 2]], "token_ids": IDS[[4, 2]]})


def test_ranks_with_the_same_tokens_are_joined_before_others_follow():
    ranks = [((1, 3), 0), ((2, 6), 1), ((0,), 0), ((5,), 1)]
    found = merge_layers([rows_of_rank(*rows, tokens=tokens) for rows, tokens in ranks])
    order = [0, 1, 3, 2, 5, 6]
    check(found, {"hidden": HIDDEN[order], "token_ids": IDS[order]})
    assert (found.part.rows.diff() > 0).all()  # no two rows have the same index


def test_indices_of_many_passes_stay_different():
    many = layer({"hidden": drawn(200, 2)}, rows=torch.arange(200))
    assert len(merge_layers([many, many]).part.rows.unique()) == 400
    without = layer({"hidden": drawn(200, 2)})
    assert merge_layers([many, without]).part.rows is None


def test_the_layer_of_a_single_rank_stays_as_it_is():
    own = rows_of_rank(3, 1)
    assert merge_layers([own]) is own


def test_weights_are_equal_on_all_ranks_so_the_first_rank_that_read_them_is_enough():
    nothing, one, other = (
        replace(layer(views), of_weights=True)
        for views in ({}, {"hidden": drawn(3, 2)}, {"hidden": drawn(3, 2, seed=1)})
    )
    assert merge_layers([nothing, one, other]) is one
    assert merge_layers([nothing, nothing]) is nothing


# -- stages of a pipeline --------------------------------------------------------------------------


def test_later_stages_whose_tokens_nobody_knows_keep_their_rows():
    parts = [rows_of_rank(*rows, elsewhere=True, views=["hidden"]) for rows in ((5, 1), (3, 0))]
    found = merge_layers(parts)
    check(found, {"hidden": HIDDEN[[0, 1, 3, 5]]})
    assert found.part.rows.tolist() == [0, 1, 3, 5]


def first_stage(*rows, view="token_ids"):
    """A rank of the first stage, which knows the tokens of some rows; later stages do not."""
    index = torch.tensor(rows)
    return layer({view: IDS[index]}, rows=index, tokens=0)


@pytest.mark.parametrize(
    ("known", "kept"),
    [
        ([(0, 1, 2, 3)], [3, 1]),
        ([(3, 0, 1)], [3, 1]),
        ([(3, 1), (6,)], [3, 1]),
        ([(4,), (0,)], []),
    ],
)
def test_a_later_stage_keeps_the_rows_whose_tokens_the_first_stage_knows(known, kept):
    later = rows_of_rank(3, 5, 1, elsewhere=True, views=["hidden"])
    found = merge_layers([later, *(first_stage(*rows) for rows in known)])
    check(found, {"hidden": HIDDEN[kept], "token_ids": IDS[kept]})
    assert found.part.rows.tolist() == kept


def test_tokens_of_the_first_stage_replace_those_of_a_later_stage():
    later = rows_of_rank(3, 1, elsewhere=True)
    found = merge_layers([later, first_stage(1, 3, view="positions")])
    check(found, {"hidden": HIDDEN[[3, 1]], "positions": IDS[[3, 1]]})
    assert "token_ids" not in found.captured


def test_a_view_of_tokens_that_only_some_ranks_of_the_first_stage_know_is_left_out():
    later = rows_of_rank(3, 1, elsewhere=True, views=["hidden"])
    both = replace(first_stage(1), captured={"token_ids": IDS[[1]], "positions": IDS[[1]]})
    found = merge_layers([later, first_stage(3), both])
    check(found, {"hidden": HIDDEN[[3, 1]], "token_ids": IDS[[3, 1]]})
    assert "positions" not in found.captured


def test_a_stage_that_knows_its_tokens_keeps_all_rows():
    found = merge_layers([rows_of_rank(3, 1), first_stage(1)])
    check(found, {"hidden": HIDDEN[[3, 1]], "token_ids": IDS[[3, 1]]})


# -- heads that ranks with the same tokens share ---------------------------------------------------

FEW, QUERIES, KEYS = 2, 3, 5  # sequences, queries and keys
QUERY, KEY = drawn(FEW, 4, QUERIES, 2), drawn(FEW, 2, KEYS, 2, seed=1)
PROJECTED = drawn(ROWS, 4, 2, seed=3)


def heads_of_rank(queries, keys, *, sequences=FEW, **more):
    """A rank with some of 4 query heads and 2 key heads, of width 2."""
    captured = {
        "query": QUERY[:sequences, list(queries)], "key": KEY[:sequences, list(keys)],
        "visible": torch.ones(1, 1, QUERIES, KEYS).bool(), "scale": 0.5,
    }  # fmt: skip
    features = {"query": tuple(2 * h for h in queries), "key": tuple(2 * h for h in keys)}
    return layer(captured | more, heads=features, tokens=0)


def projections_of_rank(*heads, rows=ROWS):
    views = ("projected_query", "projected_key")
    captured = dict.fromkeys(views, PROJECTED[:rows, list(heads)])
    return layer(captured, heads=dict.fromkeys(views, heads), tokens=0)


@pytest.mark.parametrize(
    "cut",
    [
        [([0, 1], [0]), ([2, 3], [1])],
        [([2, 3], [1]), ([0, 1], [0])],
        [([0], [0]), ([1], [0]), ([2], [1]), ([3], [1])],
        [([0], [0]), ([1, 2], [0, 1]), ([3], [1])],
        [([0, 1], [0]), ([2], [1]), ([3], [1])],
    ],
    ids=str,
)
def test_heads_are_in_order_and_key_heads_that_several_ranks_hold_are_taken_once(cut):
    found = merge_layers([heads_of_rank(*heads) for heads in cut])
    check(found, {"query": QUERY, "key": KEY, "scale": 0.5})
    assert found.part.heads == {"query": (0, 2, 4, 6), "key": (0, 2)}


@pytest.mark.parametrize(
    ("cut", "keys"),
    [
        # Query head 1 would have key head 0 in one process, but has key head 1 here.
        ([([0, 1], [0, 1]), ([2, 3], [0, 1])], [0, 1, 0, 1]),
        # Three query heads cannot share two key heads evenly.
        ([([0, 1], [0]), ([2], [0, 1])], [0, 0, 1]),
    ],
    ids=["in turn", "unevenly"],
)
def test_all_copies_of_key_heads_are_kept_if_query_heads_share_them_in_another_way(cut, keys):
    found = merge_layers([heads_of_rank(*heads) for heads in cut])
    check(found, {"key": KEY[:, keys]})
    assert found.part.heads["key"] == tuple(2 * head for head in keys)


def test_projected_heads_are_in_order():
    found = merge_layers([projections_of_rank(2, 3), projections_of_rank(0, 1)])
    check(found, {"projected_query": PROJECTED, "projected_key": PROJECTED})


def test_a_rank_alone_with_attention_keeps_its_heads_and_their_indices():
    found = merge_layers([layer({}, tokens=0), heads_of_rank([1, 2], [0, 1])])
    check(found, {"query": QUERY[:, 1:3], "key": KEY})
    assert found.part.heads == {"query": (2, 4), "key": (0, 2)}


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (heads_of_rank([0, 1], [0]), heads_of_rank([2, 3], [1], sequences=1), OTHER_ROWS),
        (
            heads_of_rank([0, 1], [0]),
            heads_of_rank([2, 3], [1], query=QUERY[:, 2:, :2]), OTHER_ROWS,
        ),
        (projections_of_rank(0, 1), projections_of_rank(2, 3, rows=ROWS - 1), OTHER_ROWS),
        (
            heads_of_rank([0, 1], [0]), heads_of_rank([2, 3], [1], scale=0.25),
            "its heads (modules of a list, or on several ranks) differ in their scale",
        ),
    ],
    ids=["sequences", "queries", "rows", "scale"],
)  # fmt: skip
def test_heads_that_do_not_fit_together_are_missing_with_the_reason(one, other, reason):
    check(merge_layers([one, other]), {}, dict.fromkeys(one.captured, reason))


# -- the block as a whole --------------------------------------------------------------------------


def block_of_rank(tokens, counts, norm=2.0):
    captured = {"weight_norms": {"mlp": norm}, "expert_counts": torch.tensor(counts)}
    return layer(captured, tokens=tokens)


def test_tokens_of_experts_are_counted_over_all_batches_and_weights_are_those_of_the_first_rank():
    found = merge_layers([block_of_rank(0, [1.0, 2.0]), block_of_rank(1, [3.0, 0.0], norm=3.0)])
    check(found, {"expert_counts": torch.tensor([4.0, 2.0]), "weight_norms": {"mlp": 2.0}})


def test_tokens_of_experts_that_two_ranks_have_in_common_count_once():
    counts = block_of_rank(0, [1.0, 2.0])
    views = {"expert_counts": torch.tensor([1.0, 2.0]), "weight_norms": {"mlp": 2.0}}
    check(merge_layers([counts, counts]), views)
    check(merge_layers([layer({}, tokens=0), counts]), views)


# -- batches of their own --------------------------------------------------------------------------


def batch_of_rank(hidden, **more):
    """Rows of a rank with tokens of its own, whose positions are unknown."""
    known = {"token_ids": torch.arange(len(hidden)), "precision": 1e-7}
    return layer({"hidden": hidden} | known | more, UNKNOWN)


UNKNOWN = {"positions": "unknown positions"}
NOTHING = layer({}, dict.fromkeys(("hidden", "token_ids", "precision"), "not run"))


@given(cuts=st.lists(st.integers(0, 40), max_size=5))
def test_batches_of_any_sizes_are_concatenated(cuts):
    hidden = drawn(40, WIDTH)
    parts = [batch_of_rank(hidden[a:b]) for a, b in pairwise([0, *sorted(cuts), 40])]
    ids = torch.cat([part.captured["token_ids"] for part in parts])
    check(merge_layers(parts), {"hidden": hidden, "token_ids": ids, "precision": 1e-7}, UNKNOWN)


@pytest.mark.parametrize("turn", [1, -1], ids=["first", "last"])
def test_a_rank_that_saw_nothing_adds_nothing_and_its_reason_is_dropped(turn):
    found = merge_layers([NOTHING, batch_of_rank(HIDDEN)][::turn])
    check(found, {"hidden": HIDDEN, "precision": 1e-7}, UNKNOWN)


def test_if_no_rank_saw_anything_the_reasons_of_the_first_are_kept():
    found = merge_layers([NOTHING, layer({}, {"hidden": "lost"})])
    check(found, {}, NOTHING.missing)
    assert not found.captured


@pytest.mark.parametrize("turn", [1, -1], ids=["second", "first"])
def test_a_view_that_a_rank_lacks_is_missing_and_the_others_are_not(turn):
    parts = [batch_of_rank(HIDDEN), layer({"hidden": HIDDEN, "precision": 1e-7}, UNKNOWN)]
    found = merge_layers(parts[::turn])
    views = {"hidden": HIDDEN.repeat(2, 1), "precision": 1e-7}
    check(found, views, {"token_ids": NOT_ON_ALL, **UNKNOWN})


@pytest.mark.parametrize(
    "other",
    [
        batch_of_rank(HIDDEN[:, 1:]),
        batch_of_rank(HIDDEN.double()),
        batch_of_rank(HIDDEN, precision=1e-3),
        batch_of_rank(HIDDEN, token_ids=torch.zeros(ROWS, 2)),
    ],
    ids=["width", "data type of the rows", "precision", "shape of the ids"],
)
def test_rows_of_different_form_are_missing_altogether(other):
    found = merge_layers([batch_of_rank(HIDDEN), other])
    check(found, {}, dict.fromkeys(("hidden", "token_ids", "precision"), OTHER_FORMS))
    assert not found.captured


@pytest.mark.parametrize(
    "view", ["sequences", "last_sequences", "query_sequences", "key_sequences"]
)
def test_sequences_are_numbered_on_from_rank_to_rank(view):
    ranks = [torch.tensor(own, dtype=torch.int64) for own in ([0, 2, 1], [], [1, 0, 0])]
    check(merge_layers([layer({view: own}) for own in ranks]),
          {view: torch.tensor([0, 2, 1, 4, 3, 3])})  # fmt: skip
    other = layer({view: torch.zeros(3, dtype=torch.int32)})
    check(merge_layers([layer({view: ranks[0]}), other]), {}, {view: OTHER_FORMS})


# -- attention over batches of their own -----------------------------------------------------------


def attention_of_rank(seed, sequences, queries, keys, *, grid=None, bias=None, **more):
    """Causal attention of a rank with tokens of its own, or with any other grid of visible keys."""
    causal = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    return layer(
        {
            "query": drawn(sequences, 4, queries, 3, seed=seed),
            "key": drawn(sequences, 2, keys, 3, seed=seed + 1),
            "visible": causal.expand(sequences, 1, -1, -1) if grid is None else grid,
            "bias": bias, "scale": 0.5, **more,
        }
    )  # fmt: skip


def reduced(layer):
    """Rows of attention."""
    names = ("query", "key", "visible", "scale", "bias")
    return attention_rows(scores_of(*(layer.captured[name] for name in names)))


def test_rows_of_attention_are_those_of_each_rank_whatever_its_lengths():
    """Ranks differ in queries and keys; one has a mask for all rows at once, one a bias."""
    parts = [
        attention_of_rank(0, 2, 5, 5),
        attention_of_rank(2, 3, 4, 7),
        attention_of_rank(4, 1, 5, 6, grid=torch.ones(1, 1, 1, 6).bool()),
        attention_of_rank(6, 2, 5, 5, bias=drawn(1, 4, 5, 5, seed=9)),
        attention_of_rank(8, 0, 5, 9),
    ]
    whole = merge_layers(parts)
    assert whole.captured["query"].shape == (8, 4, 5, 3)
    assert whole.captured["key"].shape == (8, 2, 7, 3)  # not the 9 keys of no sequence
    found, expected = reduced(whole), [reduced(part) for part in parts[:-1]]
    is_real = torch.ones(8, 5, dtype=torch.bool)
    is_real[2:5, 4] = False  # the second rank has only 4 queries per sequence
    is_real = is_real.flatten()
    assert not found.visible[:, ~is_real].any()
    for name in found._fields:
        own = torch.cat([getattr(part, name) for part in expected], dim=1)
        torch.testing.assert_close(getattr(found, name)[:, is_real], own)


def test_one_mask_for_all_queries_stays_one_if_all_ranks_have_as_many_queries():
    """Ranks with more keys, or more queries, fill the grid with keys that nobody sees."""
    masks = [torch.ones(1, 1, 1, keys).bool() for keys in (4, 6)]
    same = [attention_of_rank(n, 2, 5, m.shape[3], grid=m) for n, m in enumerate(masks)]
    visible = merge_layers(same).captured["visible"]
    assert visible.sum(3).flatten().tolist() == [4, 4, 6, 6]
    assert visible.shape == (4, 1, 1, 6)
    fewer = attention_of_rank(7, 1, 3, 6, grid=masks[1])
    visible = merge_layers([same[0], fewer]).captured["visible"]
    assert visible.sum(3).squeeze(1).tolist() == [[4] * 5, [4] * 5, [6, 6, 6, 0, 0]]


def test_scores_that_were_written_by_hand_are_joined_without_queries():
    def by_hand(sequences):
        keys = 3 + sequences
        captured = {"scores": drawn(sequences, 4, 4, keys),
                    "visible": torch.ones(1, 1, 1, keys).bool()}  # fmt: skip
        return layer(captured, {"query": "written by hand"})

    found = merge_layers([by_hand(1), by_hand(2)])
    visible = torch.arange(5) < torch.tensor([4, 5, 5])[:, None]
    check(found, {"visible": visible[:, None, None]}, {"query": "written by hand"})
    assert found.captured["scores"].shape == (3, 4, 4, 5)
    assert attention_shape(found) == (3, 4, 5)


def with_numbers(name, *each):
    return [attention_of_rank(n, 2, 5, 5, **{name: own}) for n, own in enumerate(each)]


def test_the_largest_logit_is_that_of_any_rank_and_missing_ones_are_passed_over():
    logits = torch.tensor([[1.0, math.nan, 3.0], [2.0, -5.0, 1.0]])
    found = merge_layers(with_numbers("max_logits", *logits))
    check(found, {"max_logits": torch.tensor([2.0, -5.0, 3.0])})


def test_squared_norms_and_rows_of_outputs_of_heads_are_summed():
    outputs = torch.tensor([[3.0, 2.0], [0.0, 2.0]], dtype=torch.float64)
    found = merge_layers(with_numbers("head_outputs", outputs, 3 * outputs))
    check(found, {"head_outputs": 4 * outputs})


@pytest.mark.parametrize("name", ["max_logits", "head_outputs"])
def test_numbers_of_heads_that_a_rank_lacks_cost_no_other_view_of_attention(name):
    lacking, having = attention_of_rank(1, 2, 5, 5), attention_of_rank(2, 2, 5, 5)
    having = replace(having, captured={**having.captured, name: torch.ones(4, 2)})
    check(merge_layers([lacking, having]), {"scale": 0.5}, {name: NOT_ON_ALL})


def test_sinks_and_caps_are_those_of_the_layer():
    sink = drawn(4)
    parts = [attention_of_rank(seed, 2, 5, 5, sink=sink, softcap=30.0) for seed in (0, 2)]
    check(merge_layers(parts), {"sink": sink, "softcap": 30.0})


@pytest.mark.parametrize(
    "change",
    [
        {"sink": drawn(4) + 1}, {"sink": None}, {"softcap": 20.0}, {"scale": 0.25},
        {"query": drawn(2, 4, 5, 2)}, {"query": drawn(2, 3, 5, 3)},
        {"query": drawn(2, 4, 5, 3).double()},
        {"max_logits": torch.ones(3)}, {"head_outputs": torch.ones(3, 2)},
    ],
    ids=lambda change: f"another {next(iter(change))}",
)  # fmt: skip
def test_attention_of_different_form_is_missing_altogether(change):
    numbers = {"max_logits": torch.ones(4), "head_outputs": torch.ones(4, 2)}
    options = {"sink": drawn(4), "softcap": 30.0, **numbers}
    one, other = attention_of_rank(0, 2, 5, 5, **options), attention_of_rank(2, 2, 5, 5, **options)
    other = replace(other, captured={**other.captured, **change})
    found = merge_layers([one, other])
    check(found, {}, dict.fromkeys(one.captured, OTHER_FORMS))
    assert not found.captured


def test_attention_with_queries_and_attention_by_hand_are_not_joined():
    by_hand = layer({"scores": drawn(1, 4, 4, 5), "visible": torch.ones(1, 1, 1, 5).bool()})
    found = merge_layers([attention_of_rank(0, 2, 4, 5), by_hand])
    names = ("query", "key", "visible", "bias", "scale", "scores")
    check(found, {}, dict.fromkeys(names, OTHER_FORMS))


# -- a share of the attention ----------------------------------------------------------------------


def subsampled(layers, rows, queries):
    """The share of the attention that each rank keeps."""
    shapes = [attention_shape(layer) for layer in layers]
    return [
        subsample_attention(layer, shapes, rank, rows, queries) for rank, layer in enumerate(layers)
    ]


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=2, max_size=6),
    rows=st.integers(1, 400),
    queries=st.integers(1, 200),
)
def test_all_ranks_together_keep_as_much_attention_as_one_process(counts, rows, queries):
    length = 16
    layers = [
        attention_of_rank(10 * rank, count, length, length) for rank, count in enumerate(counts)
    ]
    thin = subsampled(layers, rows, queries)
    kept = [attention_shape(layer) for layer in thin]
    sequences = sum(shape[0] for shape in kept)
    assert sequences == min(sum(counts), max(1, rows // length, min(8, 2 * rows // length)))
    if sequences:
        each = min(length, math.ceil(queries / sequences))
        assert all(shape[1] == each for shape in kept if shape[0])
    for layer, whole in zip(thin, layers, strict=True):
        assert len({len(layer.captured[name]) for name in ("query", "key", "visible")}) == 1
        # The rank's own sequences, with all of their keys.
        for key in layer.captured["key"]:
            assert any(torch.equal(key, own) for own in whole.captured["key"])
        if attention_shape(layer)[0]:
            # Each query sees as many keys as its row of the mask says.
            seen = layer.captured["visible"].sum(3).expand(-1, 4, -1).transpose(0, 1).flatten(1)
            torch.testing.assert_close(reduced(layer).visible, seen.double(), rtol=0, atol=0)


def test_sequences_are_kept_evenly_over_all_ranks():
    layers = [attention_of_rank(10 * rank, count, 16, 16) for rank, count in enumerate((4, 4, 8))]
    kept = [attention_shape(layer)[0] for layer in subsampled(layers, 8 * 16, 1000)]
    assert kept == [2, 2, 4]


def test_keys_of_the_longest_rank_count_for_how_many_sequences_are_kept():
    layers = [attention_of_rank(0, 8, 4, 4), attention_of_rank(2, 8, 32, 32)]
    kept = subsampled(layers, 64, 1000)
    assert sum(attention_shape(layer)[0] for layer in kept) == 4  # two times 64 rows of 32 keys


def test_sampled_queries_are_spread_evenly_over_all_positions():
    """Two sequences in turn take every eighth position; a causal row shows its own position."""
    counts, length = (10, 6), 64
    layers = [attention_of_rank(rank, count, length, length) for rank, count in enumerate(counts)]
    thin = subsampled(layers, 10_000, 64)
    places = torch.cat([layer.captured["visible"].sum(3).flatten() - 1 for layer in thin])
    assert places.tolist() == [4, 20, 36, 52, 12, 28, 44, 60] * 8


def test_a_mask_for_all_queries_and_sequences_is_kept_as_it_is():
    length = 64
    mask = torch.ones(1, 1, 1, length).bool()
    layers = [attention_of_rank(0, count, length, length, grid=mask) for count in (10, 6)]
    views = subsampled(layers, 10_000, 64)[0].captured
    assert (views["query"].shape[2], views["visible"].shape) == (4, (1, 1, 1, length))


def test_a_rank_alone_keeps_all_that_it_sampled():
    own = attention_of_rank(0, 4, 16, 16)
    assert subsampled([own], 16, 4) == [own]


def test_layers_are_merged_on_the_device_where_their_rows_are():
    """One rank has a bias and longer sequences, the other has neither."""
    parts = [
        attention_of_rank(0, 2, 5, 7, bias=drawn(1, 4, 5, 7, seed=9)),
        attention_of_rank(3, 3, 4, 6),
    ]
    expected = merge_layers(subsampled(parts, 28, 12)).captured
    with Accelerator():
        found = merge_layers(subsampled([part.to(DEVICE) for part in parts], 28, 12))
        assert found.devices == {DEVICE}
        for name, value in expected.items():
            same = found.captured[name]
            assert same == value if name == "scale" else torch.equal(same.cpu(), value), name
