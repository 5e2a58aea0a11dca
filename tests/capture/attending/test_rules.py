"""Calls of fused attention that only a compiler or an accelerator makes; heads of a rank."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed.tensor import Shard
from torch.nn.functional import scaled_dot_product_attention

from geomon.capture.attending.attention import NotUnderstoodError, read_call, record_call
from geomon.capture.attending.fused import read_flash, read_sdpa
from geomon.capture.attending.rules import FlexRule, PlaceRule
from geomon.capture.shards import TensorPlace
from geomon.capture.tokens.sampling import RowSampler
from support.watched import attend_by_hand, blocks_of, look


def test_a_rule_that_takes_one_pair_at_a_time_is_refused():
    query = torch.randn(2, 4, 6, 8)
    rule = FlexRule(6, query.device, lambda b, h, q, k: q >= k if bool(q > 2) else q == k, 4)
    given = read_sdpa({"query": query, "key": query})._replace(rule=rule)
    with pytest.raises(NotUnderstoodError, match="cannot be evaluated at many places at once"):
        read_call(record_call(RowSampler(100, 0), given), None)


def test_tensors_of_a_compiler_and_other_shapes_are_refused():
    with FakeTensorMode():
        fake = torch.empty(2, 4, 6, 8)
    with FunctionalTensorMode():
        functional = FunctionalTensor.to_functional(torch.empty(2, 4, 6, 8))
    packed = torch.randn(6, 4, 8)
    for given, words in (
        ({"q": fake, "k": fake}, "queries are a FakeTensor"),
        ({"q": functional, "k": functional}, "queries are a FunctionalTensor"),
        ({"q": packed, "k": packed}, "queries are not a plain 4-dimensional tensor"),
        ({"q": packed, "k": packed[None], "cu_seqlens_q": torch.tensor([0, 2, 6])},
         "keys are not a plain 3-dimensional tensor"),
    ):  # fmt: skip
        with pytest.raises(NotUnderstoodError, match=words):
            read_flash(given)


@pytest.mark.parametrize("attend", [scaled_dot_product_attention, attend_by_hand])
def test_heads_of_a_rank_are_numbered_by_the_features_that_make_them(attend):
    model = blocks_of(lambda q, k, v: attend(q, *(x.repeat_interleave(2, 1) for x in (k, v))),
                      key_heads=2)  # fmt: skip
    seen = look(model, torch.randn(2, 6, 32), options={"place": TensorPlace(0, 2)})
    numbers = {"query": (0, 8, 16, 24), "key": (0, 8)}
    numbers |= {f"projected_{name}": heads for name, heads in numbers.items()}
    assert [layer.part.heads for layer in seen.snapshot().layers[1:]] == [numbers] * 2


def split(shape, dim):
    """A double of a DTensor on two ranks; this rank has the first half."""
    whole = torch.randn(shape)
    whole.to_local = lambda: whole.chunk(2, dim)[0]
    whole.placements = (Shard(dim),)
    whole.device_mesh = SimpleNamespace(get_coordinate=lambda: (0,), size=lambda dim: 2)
    return whole


PACKED = {"cu_seqlens_q": torch.tensor([0, 2, 6])}


@pytest.mark.parametrize(
    ("read", "names", "shape", "heads", "options"),
    [
        (read_sdpa, ("query", "key"), (2, 4, 6, 8), 1, {}),
        (read_flash, ("q", "k"), (2, 6, 4, 8), 2, {}),
        (read_flash, ("q", "k"), (6, 4, 8), 1, PACKED),
    ],
)
def test_ranks_may_share_out_heads_and_nothing_else(read, names, shape, heads, options):
    given = read(dict.fromkeys(names, split(shape, heads)) | options)
    assert given.query.shape[1] == given.key.shape[1] == 2
    with pytest.raises(NotUnderstoodError, match="are on several ranks"):
        read(dict.fromkeys(names, split(shape, 0)) | options)


@pytest.mark.parametrize("name", ["attn_mask", "attn_bias"])  # as operators call it
def test_this_ranks_part_of_a_mask_is_taken(name):
    query, own = torch.randn(2, 4, 6, 8), torch.ones(6, 6, dtype=torch.bool).tril()
    mask = torch.ones(6, 8)
    mask.to_local = lambda: own  # as a DTensor has it
    given = read_sdpa({"query": query, "key": query, name: mask})
    views = read_call(record_call(RowSampler(100, 0), given), None)
    assert torch.equal(views["visible"], own.expand_as(views["visible"]))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(6, 8), "mask covers 8 keys, but there are 6"),
        (torch.ones(6, 6, dtype=torch.int64), "neither boolean nor additive"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, words):
    query = torch.randn(2, 4, 6, 8)
    sampler, given = RowSampler(100, 0), {"query": query, "key": query, "attn_mask": mask}
    with pytest.raises(NotUnderstoodError, match=words):
        read_call(record_call(sampler, read_sdpa(given)), None)


@pytest.mark.parametrize("documents", [[0, 1], [0, 0], [0, 0, 1, 1, 1, 2], [5]])
def test_a_rule_says_which_tokens_do_not_see_the_token_before_them(documents):
    place = torch.tensor(documents)
    rule = FlexRule(
        len(documents), place.device, lambda b, h, q, k: (place[q] == place[k]) & (k <= q), 1
    )
    starts = [n == 0 or documents[n] != documents[n - 1] for n in range(len(documents))]
    assert rule.begins(len(documents)).tolist() == starts


CPU = torch.device("cpu")


@pytest.mark.parametrize(("keys", "queries"), [(7, 7), (9, 5), (5, 9)])
@pytest.mark.parametrize("sides", [*itertools.product([None, 0, 1, 4], repeat=2)])
def test_a_window_reaches_from_its_first_to_its_last_visible_key(sides, keys, queries):
    left, right = sides
    rule = PlaceRule(keys, CPU, left=left, right=right, offset=keys - queries)
    seen = rule.visible(torch.arange(2), torch.arange(queries).expand(2, -1))
    assert seen.shape == (2, 1, queries, keys)
    expected = [
        [
            (left is None or key >= query + keys - queries - left)
            and (right is None or key <= query + keys - queries + right)
            for key in range(keys)
        ]
        for query in range(queries)
    ]
    assert seen[0, 0].tolist() == seen[1, 0].tolist() == expected
    for first, stop in itertools.combinations(range(queries + 1), 2):
        begin, end = rule.reach(slice(first, stop))
        assert 0 <= begin < end <= keys
        some = seen[0, 0, first:stop].any(dim=0).nonzero().flatten().tolist()
        if some:
            assert (begin, end) == (some[0], some[-1] + 1)


def test_any_query_of_a_packed_row_may_see_all_keys():
    ends = torch.tensor([0, 2, 6])
    rule = PlaceRule(6, CPU, left=1, right=0, ends=(ends, ends))
    assert rule.reach(slice(3, 4)) == (0, 6)
    assert FlexRule(6, CPU, lambda b, h, q, k: q == k, 1).reach(slice(3, 4)) == (0, 6)


@pytest.mark.parametrize(
    ("ends", "length", "begins"),
    [
        ([0, 2, 6], 6, [0, 2]),
        ([0, 2, 6, 6, 6], 6, [0, 2]),  # a buffer of ends, padded with the last one
        ([0, 1, 2], 5, [0, 1, 2]),  # behind which tokens are padding
        ([0, 9], 4, [0]),
        (None, 4, [0]),
        (None, 0, []),
    ],
)
def test_packed_sequences_begin_where_the_one_before_ends(ends, length, begins):
    ends = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    rule = PlaceRule(length, CPU, ends=None if ends is None else (ends, ends))
    assert rule.begins(length).nonzero().flatten().tolist() == begins
    assert rule.begins(length).shape == (length,)


def test_queries_behind_the_last_packed_sequence_see_nothing():
    queries, keys = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 5])
    rule = PlaceRule(7, CPU, ends=(queries, keys))
    assert rule.visible(torch.zeros(1, dtype=torch.int64), torch.arange(5)[None])[
        0, 0
    ].tolist() == [
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]


def test_functions_of_flex_attention_get_scores_and_the_places_of_queries_and_keys():
    def change(score, b, h, i, j):
        return score + 1000 * b + 100 * h + 10 * i + j

    rule = FlexRule(4, CPU, lambda b, h, i, j: (i + j + b + h) % 2 == 0, 3, score=change)
    sequences, places = torch.tensor([2, 0]), torch.tensor([[1, 5, 6], [0, 2, 3]])
    scores = torch.rand(2, 5, 3, 4)
    changed = rule.changed(scores, sequences, places)
    seen = rule.visible(sequences, places)
    assert seen.shape == (2, 3, 3, 4)
    for b, h, i, j in itertools.product(range(2), range(5), range(3), range(4)):
        place, sequence = int(places[b, i]), int(sequences[b])
        added = 1000 * sequence + 100 * h + 10 * place + j
        assert changed[b, h, i, j].item() == pytest.approx(scores[b, h, i, j].item() + added)
        if h < 3:
            assert seen[b, h, i, j].item() == ((place + j + sequence + h) % 2 == 0)
    assert FlexRule(4, CPU, lambda b, h, i, j: i == j, 1).changed is None
    assert PlaceRule(4, CPU).changed is None
