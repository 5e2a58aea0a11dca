import math
import time

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
        ranks.all_gather("one")
        ranks.all_gather("another")
    with pytest.raises(RanksLostError, match="no answer within the 1 s of a reading"):
        ranks.all_gather("a third")
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
