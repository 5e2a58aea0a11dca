"""Parts of a layer on ranks, put together again: one that was cut on purpose."""

import itertools
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.capture.snapshot import Layer, Part
from geomon.distributed import merge_layers
from geomon.distributed.merge import attention_shape, subsample_attention
from geomon.kernels.attention import attention_rows, scores_of
from support.hardware import DEVICE, Accelerator

ROWS, SEQUENCES, QUERIES, KEYS, WIDTH = 7, 2, 3, 5, 4
FORMS = "ranks or batches captured it in different forms"
NUMBERS = ("sequences", "last_sequences", "query_sequences", "key_sequences")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HIDDEN, EXPERTS = drawn(ROWS, WIDTH), torch.tensor
QUERY, KEY = drawn(SEQUENCES, 4, QUERIES, 2), drawn(SEQUENCES, 2, KEYS, 2, seed=1)
PROJECTED = drawn(ROWS, 4, 2, seed=3)


def layer(captured, missing=None, **part):
    return Layer(1, "block", captured, missing or {}, part=Part(**part))


def of_rows(*rows, tokens=0, elsewhere=False, prefix="", ids=True, width=WIDTH, **more):
    """Some rows of a layer, whose number is their place in it."""
    number = torch.tensor(rows)
    captured = {f"{prefix}hidden": HIDDEN[number][:, :width]}
    captured |= {f"{prefix}token_ids": number + 50} if ids else {}
    numbered = {f"{prefix}rows": number}
    return layer(captured | more, **numbered, tokens=tokens, tokens_elsewhere=elsewhere)


def first_stage(*rows):
    return layer({"token_ids": torch.tensor(rows) + 50}, rows=torch.tensor(rows), tokens=0)


def whole(*rows, prefix="", ids=True):
    """What rows have to become, in this order."""
    views = {f"{prefix}hidden": HIDDEN[list(rows)]}
    return views | ({f"{prefix}token_ids": [row + 50 for row in rows]} if ids else {})


def heads(queries, keys, *, each=2, sequences=SEQUENCES, **more):
    """Some heads of an attention of 4 query and 2 key heads, of width 2."""
    captured = {
        "query": QUERY[:sequences, list(queries)], "key": KEY[:sequences, list(keys)],
        "visible": torch.ones(1, 1, QUERIES, KEYS).bool(), "scale": 0.5,
    }  # fmt: skip
    numbers = {"query": tuple(each * h for h in queries), "key": tuple(each * h for h in keys)}
    return layer(captured | more, heads=numbers, tokens=0)


def projections(a, b, rows=ROWS):
    views = ("projected_query", "projected_key")
    captured = dict.fromkeys(views, PROJECTED[:rows, [a, b]])
    return layer(captured, heads=dict.fromkeys(views, (a, b)), tokens=0)


def of_block(tokens, counts, scale=1.0):
    captured = {"weight_norms": {"mlp": 2.0 * scale}, "expert_counts": torch.tensor(counts)}
    return layer(captured | {"hidden": HIDDEN[:3]}, tokens=tokens)


def of_rank(hidden, **more):
    """Rows of a rank with tokens of its own."""
    known = {"token_ids": torch.arange(len(hidden)), "precision": 1e-7}
    return layer({"hidden": hidden} | known | more, {"positions": "why not"})


def numbered(*numbers):
    return layer(dict.fromkeys(NUMBERS, torch.tensor(numbers, dtype=torch.int64)))


def by_hand(n):
    captured = {"scores": drawn(n, 4, 4, 3 + n), "visible": torch.ones(1, 1, 1, 3 + n).bool()}
    return layer(captured, {"query": "written by hand"})


def attention_layer(seed, sequences, queries, keys, *, grid=None, bias=None, **more):
    """Attention of a pass with tokens of its own."""
    causal = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    return layer(
        {
            "query": drawn(sequences, 4, queries, 3, seed=seed),
            "key": drawn(sequences, 2, keys, 3, seed=seed + 1),
            "visible": causal.expand(sequences, 1, -1, -1) if grid is None else grid,
            "bias": bias, "scale": 0.5, **more,
        }
    )  # fmt: skip


NOTHING = layer({}, dict.fromkeys(("hidden", "token_ids", "precision"), "not run"))
ALL, LOGITS = range(ROWS), [[1.0, math.nan, 3.0], [2.0, -5.0, 1.0]]
HEADS = {"query": QUERY, "key": KEY, "scale": 0.5}
SINK = drawn(4)
SAME_SINK = [attention_layer(seed, 2, 5, 5, sink=SINK, softcap=30.0) for seed in (0, 2)]
# Parts; views of the whole, all or some of them; beginnings of reasons for what is missing.
OUTPUTS = torch.tensor([[3.0, 2.0], [0.0, 2.0]], dtype=torch.float64)
MERGES = {
    "rows of two": ([of_rows(4, 0, 2), of_rows(6, 1, 5, 3)], whole(*ALL), {}),
    "rows of three": ([of_rows(5, 6), of_rows(0, 1), of_rows(2, 3, 4)], whole(*ALL), {}),
    "last rows": (
        [of_rows(5, 6, prefix="last_"), of_rows(*range(5), prefix="last_")],
        whole(*ALL, prefix="last_"), {},
    ),
    "a view that not all have": (
        [of_rows(0, 1), of_rows(2, ids=False)], whole(0, 1, 2, ids=False), {}
    ),
    **{
        f"tokens that the first stage knows: {known}": (
            [of_rows(3, 5, 1, elsewhere=True, ids=False), *(first_stage(*each) for each in known)],
            whole(*kept), {},
        )
        for known, kept in (
            ([[0, 1, 2, 3]], [3, 1]), ([[3, 1], [6]], [3, 1]), ([[4], [0]], []),
            ([[3, 0, 1]], [3, 1]),
        )
    },
    "what the first stage knows stands for what a later one does": (
        [of_rows(3, 1, elsewhere=True),
         layer({"positions": torch.tensor([0, 1])}, rows=torch.tensor([1, 3]), tokens=0)],
        whole(3, 1, ids=False) | {"positions": [1, 0]}, {},
    ),
    **{
        f"heads: {cut}": ([heads(*each) for each in cut], HEADS, {})
        for cut in (
            [([0, 1], [0]), ([2, 3], [1])],
            [([2, 3], [1]), ([0, 1], [0])],
            [([0], [0]), ([1], [0]), ([2], [1]), ([3], [1])],
            [([0], [0]), ([1, 2], [0, 1]), ([3], [1])],
            [([0, 1], [0]), ([2], [1]), ([3], [1])],
        )
    },
    "key heads that are shared in another way": (
        [heads([0, 1], [0, 1]), heads([2, 3], [0, 1])], {"key": KEY[:, [0, 1, 0, 1]]}, {}
    ),
    "heads of other rows": (
        [heads([0, 1], [0]), heads([2, 3], [1], sequences=1)], {},
        {"query": "did not keep the same rows"},
    ),
    "heads of another scale": (
        [heads([0, 1], [0]), heads([2, 3], [1], scale=0.25)], {}, {"key": "differ in their scale"}
    ),
    "projected heads": (
        [projections(2, 3), projections(0, 1)],
        {"projected_query": PROJECTED, "projected_key": PROJECTED}, {},
    ),
    "projected heads of other rows": (
        [projections(2, 3, rows=ROWS - 1), projections(0, 1)], {},
        {"projected_key": "did not keep the same rows"},
    ),
    "reasons of what another part has": (
        [layer({}, {"hidden": "not run", "query": "not seen"}, tokens=0), of_rows(0, 1)],
        whole(0, 1), {"query": "not seen"},
    ),
    "the same tokens, and others behind": (
        [of_rows(1, 3), of_rows(2, 6, tokens=1), of_rows(0), of_rows(5, tokens=1)],
        {"hidden": HIDDEN[[0, 1, 3, 2, 5, 6]]}, {},
    ),
    "tokens of each its own": ([of_rows(4, tokens=None), of_rows(2, tokens=None)], whole(4, 2), {}),
    "experts of all tokens, weights once": (
        [of_block(0, [1.0, 2.0]), of_block(1, [3.0, 0.0], scale=1.5)],
        {"expert_counts": [4.0, 2.0], "weight_norms": {"mlp": 2.0}}, {},
    ),
    "experts of the same tokens": (
        [of_block(0, [1.0, 2.0]), of_block(0, [1.0, 2.0])], {"expert_counts": [1.0, 2.0]}, {}
    ),
    "a rank that saw nothing": (
        [NOTHING, of_rank(HIDDEN)], {"hidden": HIDDEN, "precision": 1e-7}, {"positions": "why not"}
    ),
    "a rank that saw nothing, behind": (
        [of_rank(HIDDEN), NOTHING], {"hidden": HIDDEN}, {"positions": "why not"}
    ),
    "no rank saw anything": ([NOTHING, layer({}, {"hidden": "lost"})], {}, NOTHING.missing),
    **{
        f"another {name}": ([of_rank(HIDDEN), other], {}, {"hidden": FORMS, "token_ids": FORMS})
        for name, other in (
            ("width", of_rank(HIDDEN[:, 1:])), ("dtype", of_rank(HIDDEN.double())),
            ("precision", of_rank(HIDDEN, precision=1e-3)),
        )
    },
    **{
        f"a view that rank {rank} does not know": (
            [of_rank(HIDDEN), layer({"hidden": HIDDEN, "precision": 1e-7})][:: 1 if rank else -1],
            {"hidden": HIDDEN.repeat(2, 1), "precision": 1e-7},
            {"token_ids": "it is known for the rows of some ranks"},
        )
        for rank in (0, 1)
    },
    "numbers of sequences go on": (
        [numbered(0, 2, 1), numbered(), numbered(1, 0, 0)],
        {view: [0, 2, 1, 4, 3, 3] for view in NUMBERS}, {},
    ),
    "scores that were written by hand": (
        [by_hand(1), by_hand(2)],
        {"visible": (torch.arange(5) < torch.tensor([[4], [5], [5]]))[:, None, None]},
        {"query": "written by hand"},
    ),
    "the largest logit of any": (
        [attention_layer(n, 2, 5, 5, max_logits=torch.tensor(own)) for n, own in enumerate(LOGITS)],
        {"max_logits": [2.0, -5.0, 3.0]}, {},
    ),
    "the squares of all outputs": (
        [attention_layer(n, 2, 5, 5, head_outputs=OUTPUTS) for n in (1, 2)],
        {"head_outputs": 2 * OUTPUTS}, {},
    ),
    "outputs of heads that one rank lacks": (
        [attention_layer(1, 2, 5, 5), attention_layer(2, 2, 5, 5, head_outputs=OUTPUTS)],
        {"scale": 0.5}, {"head_outputs": "it is known for the rows of some ranks"},
    ),
    "sinks of the layer": (SAME_SINK, {"sink": SINK, "softcap": 30.0}, {}),
    "other sinks": (
        [*SAME_SINK, attention_layer(4, 2, 5, 5, sink=SINK + 1, softcap=30.0)], {},
        {"sink": FORMS, "query": FORMS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGES)
def test_of_parts_one_layer_is_made(name):
    parts, views, missing = MERGES[name]
    found = merge_layers(parts)
    for view, values in views.items():
        given = found.captured[view]
        same = torch.equal(given, values) if isinstance(values, torch.Tensor) else None
        assert same or getattr(given, "tolist", lambda given=given: given)() == values, view
    for view, reason in missing.items():
        assert reason in found.missing[view]
        assert view not in found.captured
    assert not (found.missing and not missing)
    assert (found.index, found.name) == (1, "block")


def test_numbers_of_rows_and_heads_are_those_of_the_whole():
    order = merge_layers(MERGES["rows of two"][0]).part.rows
    assert order.tolist() == [*ALL]
    assert merge_layers([heads([0], [0]), heads([1, 2], [0, 1]), heads([3], [1])]).part.heads == {
        "query": (0, 2, 4, 6), "key": (0, 2),
    }  # fmt: skip
    assert (
        merge_layers(MERGES["the same tokens, and others behind"][0]).part.rows.diff() > 0
    ).all()
    many = layer({"hidden": drawn(200, 2)}, rows=torch.arange(200))
    assert len(merge_layers([many, many]).part.rows.unique()) == 400
    assert merge_layers([many]) is many


def test_of_weights_the_first_that_were_seen_are_taken():
    parts = [
        replace(layer(views), of_weights=True)
        for views in ({}, {"hidden": drawn(3, 2)}, {"hidden": drawn(3, 2, seed=1)})
    ]
    assert merge_layers(parts) is parts[1]
    assert merge_layers(parts[:1] * 2) is parts[0]


def test_every_order_of_the_parts_gives_the_same():
    for order in itertools.permutations([of_rows(5, 1), of_rows(0, 3, 2), of_rows(6, 4)]):
        assert torch.equal(merge_layers(order).captured["hidden"], HIDDEN)


@given(cuts=st.lists(st.integers(0, 40), max_size=5))
def test_rows_of_any_ragged_split_are_the_rows(cuts):
    hidden = drawn(40, WIDTH)
    found = merge_layers([of_rank(hidden[a:b]) for a, b in pairwise([0, *sorted(cuts), 40])])
    assert torch.equal(found.captured["hidden"], hidden)
    assert len(found.captured["token_ids"]) == 40
    assert found.missing == {"positions": "why not"}


# -- the union -------------------------------------------------------------------------------------


def reduced(layer: Layer):
    views = layer.captured
    names = ("query", "key", "visible", "scale", "bias")
    return attention_rows(scores_of(*(views[name] for name in names)))


def test_ragged_attention_is_what_each_rank_would_reduce():
    """Fewer queries, fewer keys, grids for all rows at once, a bias on one rank alone."""
    parts = [
        attention_layer(0, 2, 5, 5),
        attention_layer(2, 3, 4, 7),
        attention_layer(4, 1, 5, 6, grid=torch.rand(1, 1, 1, 6) < 2),
        attention_layer(6, 2, 5, 5, bias=drawn(1, 4, 5, 5, seed=9)),
        attention_layer(8, 0, 5, 9),
    ]
    whole = merge_layers(parts)
    assert whole.captured["query"].shape == (8, 4, 5, 3)
    assert whole.captured["key"].shape == (8, 2, 7, 3)
    found, seen = reduced(whole), []
    for part in parts[:-1]:
        sequences, queries, _ = attention_shape(part)
        rows = torch.zeros(sequences, 5, dtype=torch.bool)
        rows[:, :queries] = True
        seen.append(rows.flatten())
    expected = [reduced(part) for part in parts[:-1]]
    kept = torch.cat(seen)
    assert not found.visible[:, ~kept].any()
    for name in found._fields:
        whole_field = getattr(found, name)[:, kept]
        torch.testing.assert_close(
            whole_field, torch.cat([getattr(part, name) for part in expected], dim=1)
        )


# -- thinning --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=2, max_size=6),
    rows=st.integers(1, 400),
    queries=st.integers(1, 200),
)
def test_all_ranks_together_keep_of_attention_what_one_would(counts, rows, queries):
    length = 16
    layers = [
        attention_layer(10 * rank, count, length, length) for rank, count in enumerate(counts)
    ]
    shapes = [attention_shape(layer) for layer in layers]
    thin = [
        subsample_attention(layer, shapes, rank, rows, queries) for rank, layer in enumerate(layers)
    ]
    kept = [attention_shape(layer) for layer in thin]
    sequences = sum(shape[0] for shape in kept)
    assert sequences == min(sum(counts), max(1, rows // length, min(8, 2 * rows // length)))
    if sequences:
        each = min(length, math.ceil(queries / sequences))
        assert all(shape[1] == each for shape in kept if shape[0])
        assert sequences * each <= queries + sequences
    for layer, whole in zip(thin, layers, strict=True):
        assert layer.captured["visible"].shape[0] == layer.captured["query"].shape[0]
        # Keys and queries of whole sequences, in order, that were the rank's own.
        for key in layer.captured["key"]:
            assert any(torch.equal(key, own) for own in whole.captured["key"])
        if attention_shape(layer)[0]:
            torch.testing.assert_close(reduced(layer).visible, _visible(layer), rtol=0, atol=0)


def _visible(layer: Layer) -> torch.Tensor:
    return layer.captured["visible"].sum(3).expand(-1, 4, -1).transpose(0, 1).flatten(1).double()


def test_thinned_queries_cover_all_positions_alike():
    """Those of two sequences in turn are evenly spread; a causal row sees up to its own place."""
    counts, length = (10, 6), 64
    layers = [attention_layer(rank, count, length, length) for rank, count in enumerate(counts)]
    shapes = [attention_shape(layer) for layer in layers]
    thin = [
        subsample_attention(layer, shapes, n, 10_000, 64).captured for n, layer in enumerate(layers)
    ]
    places = torch.cat([views["visible"].sum(3).flatten() - 1 for views in thin])
    assert places.tolist() == [4, 20, 36, 52, 12, 28, 44, 60] * 8
    alike = attention_layer(0, 10, length, length, grid=torch.ones(1, 1, 1, length).bool())
    thin = subsample_attention(alike, shapes, 0, 10_000, 64).captured
    assert (thin["query"].shape[2], thin["visible"].shape) == (4, (1, 1, 1, length))


def test_layers_are_merged_on_the_device_where_their_rows_are():
    """One pass has a bias and a longer length, the other neither."""
    parts = [
        attention_layer(0, 2, 5, 7, bias=drawn(1, 4, 5, 7, seed=9)),
        attention_layer(3, 3, 4, 6),
    ]
    shapes = [attention_shape(part) for part in parts]

    def merged(parts):
        return merge_layers(
            [subsample_attention(p, shapes, n, 28, 12) for n, p in enumerate(parts)]
        )

    expected = merged(parts).captured
    with Accelerator():
        found = merged([part.to(DEVICE) for part in parts])
        assert found.devices == {DEVICE}
        for name, value in expected.items():
            same = found.captured[name]
            assert same == value if name == "scale" else torch.equal(same.cpu(), value), name
