import math
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from accelerator import DEVICE, Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from geomon.capture.snapshot import Layer
from geomon.distributed import (
    RankFailedError,
    RankGroup,
    RanksLostError,
    find_ranks,
    join_ranks,
    merge_layers,
)
from geomon.distributed.merge import attention_shape, subsample_attention
from geomon.distributed.packing import pack, unpack
from geomon.kernels.attention import attention_rows, scores_of

WIDTH, HEADS, HEAD_WIDTH = 6, 4, 3


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(captured, missing=None, **kwargs) -> Layer:
    return Layer(1, "blocks.0", captured, missing or {}, **kwargs)


def rows_layer(hidden) -> Layer:
    return layer_of(
        {"hidden": hidden, "token_ids": torch.arange(len(hidden)), "precision": 1e-7},
        {"positions": "why not"},
    )


def attention_layer(seed, sequences, queries, keys, *, grid=None, bias=None, **more) -> Layer:
    causal = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    return layer_of(
        {
            "query": drawn(seed, sequences, HEADS, queries, HEAD_WIDTH),
            "key": drawn(seed + 1, sequences, 2, keys, HEAD_WIDTH),
            "visible": causal.expand(sequences, 1, -1, -1) if grid is None else grid,
            "bias": bias,
            "scale": 0.5,
            **more,
        }
    )


# -- shares ----------------------------------------------------------------------------------------


@given(rows=st.integers(0, 10_000), size=st.integers(1, 64))
def test_the_shares_of_the_rows_are_all_the_rows_and_alike(rows, size):
    shares = [RankGroup(rank, size, object()).rows_of(rows) for rank in range(size)]
    assert sum(shares) == rows
    assert max(shares) - min(shares) <= 1


def test_ranks_that_give_no_rows_leave_theirs_to_the_others():
    group = RankGroup(1, 6, object())
    group.share_rows_among(4)
    assert group.rows_of(10) == 3
    group.share_rows_among(6)
    assert group.rows_of(10) == 2


# -- the union -------------------------------------------------------------------------------------


@given(cuts=st.lists(st.integers(0, 40), max_size=5))
def test_rows_of_any_ragged_split_are_the_rows(cuts):
    hidden = drawn(0, 40, WIDTH)
    edges = [0, *sorted(cuts), 40]
    parts = [rows_layer(hidden[a:b]) for a, b in pairwise(edges)]
    whole = merge_layers(parts)
    assert torch.equal(whole.captured["hidden"], hidden)
    assert len(whole.captured["token_ids"]) == 40
    assert whole.captured["precision"] == 1e-7
    assert whole.missing == {"positions": "why not"}
    assert (whole.index, whole.name) == (1, "blocks.0")


@pytest.mark.parametrize("turned", [False, True])
def test_a_rank_that_saw_nothing_gives_nothing(turned):
    nothing = layer_of({}, dict.fromkeys(("hidden", "token_ids", "precision"), "not run"))
    parts = [nothing, rows_layer(drawn(0, 5, WIDTH))]
    whole = merge_layers(parts[::-1] if turned else parts)
    assert torch.equal(whole.captured["hidden"], parts[1].captured["hidden"])
    assert whole.missing == {"positions": "why not"}
    assert merge_layers([nothing, layer_of({}, {"hidden": "lost"})]).missing == nothing.missing


@pytest.mark.parametrize(
    "other",
    [
        rows_layer(drawn(0, 5, WIDTH + 1)),
        rows_layer(drawn(0, 5, WIDTH).double()),
        layer_of(rows_layer(drawn(0, 5, WIDTH)).captured | {"precision": 1e-3}),
    ],
    ids=["width", "dtype", "precision"],
)
def test_what_ranks_hold_in_different_forms_is_missing_and_said(other):
    whole = merge_layers([rows_layer(drawn(0, 5, WIDTH)), other])
    assert not whole.captured
    assert whole.missing["hidden"] == "ranks or batches captured it in different forms"


@pytest.mark.parametrize("turned", [False, True])
def test_what_one_rank_does_not_know_of_its_rows_takes_nothing_else_away(turned):
    known = rows_layer(drawn(0, 5, WIDTH))
    other = layer_of({"hidden": drawn(1, 5, WIDTH), "precision": 1e-7})
    parts = [other, known] if turned else [known, other]
    whole = merge_layers(parts)
    rows = torch.cat([part.captured["hidden"] for part in parts])
    assert torch.equal(whole.captured["hidden"], rows)
    assert whole.captured.keys() == {"hidden", "precision"}
    assert whole.missing["token_ids"].startswith("it is known for the rows of some ranks")


def test_sequences_of_several_passes_are_numbered_on():
    numbers = [torch.tensor(each, dtype=torch.int64) for each in ([0, 2, 1], [], [1, 0, 0])]
    names = ("sequences", "last_sequences", "query_sequences", "key_sequences")
    whole = merge_layers([layer_of(dict.fromkeys(names, each)) for each in numbers])
    assert all(whole.captured[name].tolist() == [0, 2, 1, 4, 3, 3] for name in names)


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
        attention_layer(6, 2, 5, 5, bias=drawn(9, 1, HEADS, 5, 5)),
        attention_layer(8, 0, 5, 9),
    ]
    whole = merge_layers(parts)
    assert whole.captured["query"].shape == (8, HEADS, 5, HEAD_WIDTH)
    assert whole.captured["key"].shape == (8, 2, 7, HEAD_WIDTH)
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


def test_scores_of_attention_written_by_hand_are_joined():
    reasons = {"query": "written by hand"}
    parts = [
        layer_of(
            {"scores": drawn(n, n, HEADS, 4, 3 + n), "visible": torch.ones(1, 1, 1, 3 + n).bool()},
            reasons,
        )
        for n in (1, 2)
    ]
    whole = merge_layers(parts)
    assert whole.captured["scores"].shape == (3, HEADS, 4, 5)
    assert whole.captured["visible"].shape == (3, 1, 1, 5)
    assert whole.captured["visible"][:, 0, 0].sum(1).tolist() == [4, 5, 5]
    assert whole.missing == reasons
    assert "query" not in whole.captured


def test_the_largest_logit_of_several_passes_is_that_of_any():
    largest = torch.tensor([[1.0, math.nan, 3.0, math.nan], [2.0, -5.0, 1.0, math.nan]])
    parts = [attention_layer(n, 2, 5, 5, max_logits=own) for n, own in enumerate(largest)]
    found = merge_layers(parts).captured["max_logits"]
    torch.testing.assert_close(found, torch.tensor([2.0, -5.0, 3.0, math.nan]), equal_nan=True)


def test_what_belongs_to_the_layer_has_to_be_the_same():
    sink = drawn(0, HEADS)
    parts = [attention_layer(seed, 2, 5, 5, sink=sink, softcap=30.0) for seed in (0, 2)]
    whole = merge_layers(parts)
    assert torch.equal(whole.captured["sink"], sink)
    assert whole.captured["softcap"] == 30.0
    other = attention_layer(4, 2, 5, 5, sink=sink + 1, softcap=30.0, scores=None)
    assert merge_layers([*parts, other]).missing.keys() == other.captured.keys()


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
    assert sequences == min(sum(counts), max(1, rows // length))
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
    return (
        layer.captured["visible"].sum(3).expand(-1, HEADS, -1).transpose(0, 1).flatten(1).double()
    )


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


# -- what ranks say to one another -----------------------------------------------------------------


class Answers(RankGroup):
    """A rank whose collectives answer what the test says, one after another."""

    def __init__(self, *answers):
        super().__init__(0, 2, object())
        self.answers = list(answers)

    def all_gather(self, value):
        return [value, self.answers.pop(0)]


def test_a_rank_that_is_ahead_waits_and_one_that_is_behind_leaves_its_reading_out():
    ahead = Answers((4, "c"), (8, "b"), (9, "a"))
    assert ahead.meet(9, "own") == ["own", "a"]
    assert not ahead.answers
    with pytest.raises(RankFailedError, match="rank 1 reads step 9 but rank 0 reads step 4"):
        Answers((9, "a")).meet(4, "own")


def test_a_rank_waits_for_the_others_no_longer_than_the_limit_in_a_whole_reading(monkeypatch):
    """Late at each exchange, by less than the limit: it held the training up at every reading."""
    monkeypatch.setattr(dist, "all_gather_object", lambda *args, group: time.sleep(0.4))
    ranks = RankGroup(0, 2, object(), timeout=1.0)
    for _ in range(3):
        ranks.begin_reading()
        began = time.monotonic()
        ranks.all_gather("one")
        ranks.all_gather("another")
        assert time.monotonic() - began < 5
    with pytest.raises(RanksLostError, match="no answer within the 1 s of a reading"):
        ranks.all_gather("a third")
    assert time.monotonic() - began < 5
    assert not ranks.connected


def test_a_parcel_comes_back_as_it_was():
    layer = rows_layer(drawn(0, 7, WIDTH))
    tensors = {
        "empty": torch.empty(0, 3), "turned": drawn(1, 3, 5).t(), "half": drawn(2, 5).bfloat16(),
        "flags": torch.tensor([True, False, True]), "scalar": torch.tensor(3.0).double(),
    }  # fmt: skip
    found, plain, words = unpack(pack([layer, tensors, ("a", None, 0.5)]))
    assert torch.equal(found.captured["hidden"], layer.captured["hidden"])
    assert found.missing == layer.missing
    for name, value in tensors.items():
        assert plain[name].dtype == value.dtype
        assert torch.equal(plain[name], value)
    assert words == ("a", None, 0.5)


def test_one_process_is_connected_to_nothing_and_refuses_nothing():
    assert (find_ranks().rank, find_ranks().size) == (0, 1)
    assert not join_ranks().connected


def test_layers_are_merged_on_the_device_where_their_rows_are():
    """One pass has a bias and a longer length, the other neither."""
    parts = [
        attention_layer(0, 2, 5, 7, bias=drawn(9, 1, HEADS, 5, 7)),
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


def test_sinks_that_differ_between_ranks_are_no_one_layer():
    """A learned sink is of the layer: ranks with other ones do not have the same model."""
    attention = {
        "query": torch.ones(1, 2, 4, 3),
        "key": torch.ones(1, 2, 4, 3), "visible": torch.ones(1, 1, 4, 4).bool(), "bias": None,
        "scale": 0.5, "softcap": None,
    }  # fmt: skip
    one, other = (layer_of(attention | {"sink": torch.tensor([1.0, sink])}) for sink in (2.0, 3.0))
    assert torch.equal(merge_layers([one, one]).captured["sink"], torch.tensor([1.0, 2.0]))
    whole = merge_layers([one, other])
    assert not whole.captured
    assert whole.missing["sink"] == "ranks or batches captured it in different forms"
