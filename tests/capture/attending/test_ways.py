"""Attention written in many ways: its weights, masks and largest scores equal the model's.

Each way is a function of queries, keys and values, [sequences, heads, length, width]. It is held
against all scores of its own queries and keys in float64.
"""

import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

from geomon import NoteKind, describe, measure, select
from support.fingerprint import fingerprint
from support.models import Running
from support.watched import (
    HEADS,
    Block,
    attend_by_hand,
    blocks_of,
    check_blocks,
    check_scores,
    look,
    notes,
    scores_of,
)

sdpa = F.scaled_dot_product_attention
SEQUENCES, LENGTH, WIDTH = 3, 8, 64
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
ALL = torch.ones_like(CAUSAL)
GENERATOR = torch.Generator().manual_seed(0)
SOME = torch.rand(SEQUENCES, 1, LENGTH, LENGTH, generator=GENERATOR) > 0.3
SOME[..., 0] = True
BIAS = 0.3 * torch.randn(1, HEADS, LENGTH, LENGTH, generator=GENERATOR)
DISTANCE = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(params=[1, 200], ids=["row by row", "in blocks"], autouse=True)
def _blocks(request, monkeypatch):
    """The largest score is computed block by block, as large batches are."""
    module = "geomon.capture.attending.max_logit"
    monkeypatch.setattr(f"{module}._BLOCK_ON_HOST", request.param)
    monkeypatch.setattr(f"{module}._FEWEST_QUERIES", 1 if request.param == 1 else 3)


def check(attend, visible, *, shape=(SEQUENCES, LENGTH, WIDTH), heads=HEADS, key_heads=None,
          **options):  # fmt: skip
    """Hold the layers of two blocks against their own queries and keys."""
    model = blocks_of(attend, shape[-1], heads=heads, key_heads=key_heads)
    seen = look(model, torch.randn(shape))
    check_blocks(seen, model, visible, **options)
    return seen


# -- by torch's own function -----------------------------------------------------------------------


def folded_by_function(q, k, v):
    given = (x.flatten(0, 1) for x in (q, k, v))
    return sdpa(*given, attn_mask=CAUSAL).unflatten(0, (-1, HEADS))


def grouped_by_function(q, k, v):
    q, k, v = (x.unflatten(1, (2, 2)) for x in (q, k, v))
    return sdpa(q, k, v, is_causal=True).flatten(1, 2)


def repeated(attend):
    """Keys that were repeated are given once."""

    def repeating(q, k, v):
        return attend(q, *(x.repeat_interleave(2, dim=1) for x in (k, v)))

    return repeating


def widened(q, k, v):
    """As torch does on an accelerator: heads are padded to a multiple of 8."""
    wide = (F.pad(x, (0, 4)) for x in (q, k, v))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(*wide, scale=0.5)[0][..., : q.shape[-1]]


def in_parts(q, k, v):
    given = ((q[:, :, rows], k, v, CAUSAL[rows]) for rows in torch.arange(LENGTH).chunk(2))
    return torch.cat([sdpa(*each) for each in given], dim=2)


def added(visible, bias=0.0):
    return torch.where(visible, bias, -1e9)


# A function, and what it does: the keys that are visible, and what is done to scores.
BY_FUNCTION = {
    "all keys": (sdpa, ALL, {}),
    "causal": (functools.partial(sdpa, is_causal=True), CAUSAL, {}),
    "another scale": (functools.partial(sdpa, is_causal=True, scale=2), CAUSAL, {"scale": 2}),
    "a scale of none": (functools.partial(sdpa, scale=0.0), ALL, {"scale": 0.0}),
    "a negative scale": (functools.partial(sdpa, scale=-0.7), ALL, {"scale": -0.7}),
    "a mask of truth": (functools.partial(sdpa, attn_mask=SOME), SOME, {}),
    "a mask that is added": (functools.partial(sdpa, attn_mask=added(SOME)), SOME, {}),
    "a mask and a bias": (
        functools.partial(sdpa, attn_mask=added(SOME, BIAS)), SOME, {"bias": BIAS}
    ),
    "a mask of two dimensions": (functools.partial(sdpa, attn_mask=CAUSAL), CAUSAL, {}),
    "fewer keys": (
        functools.partial(sdpa, attn_mask=CAUSAL, enable_gqa=True), CAUSAL, {"key_heads": 2}
    ),
    "folded": (folded_by_function, CAUSAL, {}),
    "grouped": (grouped_by_function, CAUSAL, {}),
    "repeated keys": (repeated(sdpa), ALL, {"key_heads": 2}),
    "repeated keys, by hand": (repeated(attend_by_hand), ALL, {"key_heads": 2}),
    "widened with zeros": (widened, ALL, {"scale": 0.5, "shape": (2, LENGTH, 16)}),
}  # fmt: skip


@pytest.mark.parametrize("way", BY_FUNCTION)
def test_attention_by_function(way):
    attend, visible, options = BY_FUNCTION[way]
    check(attend, visible, **options)


def test_one_causal_query_sees_the_first_key_alone():
    """As torch has it, however many keys there are."""
    earlier = torch.randn(SEQUENCES, HEADS, 5, WIDTH // HEADS)

    def behind(q, k, v):
        k, v = (torch.cat([earlier, each], 2) for each in (k, v))
        return sdpa(q, k, v, is_causal=True)

    first = torch.arange(6)[None] == 0
    check(behind, first, shape=(SEQUENCES, 1, WIDTH), earlier=earlier)


# -- flex attention --------------------------------------------------------------------------------

ALLOWED = torch.rand(SEQUENCES, HEADS, LENGTH, LENGTH, generator=GENERATOR) > 0.5
ALLOWED[..., 0] = True


DOCUMENTS = torch.arange(LENGTH) // torch.tensor([3, 4, 8])[:, None]


def by_flex(q, k, v, *, mask=None, **options):
    heads = HEADS if mask is allowed else None
    block = mask and flex.create_block_mask(mask, len(q), heads, LENGTH, LENGTH, device="cpu")
    return flex.flex_attention(q, k, v, block_mask=block, enable_gqa=True, **options)


def allowed(b, h, i, j):
    return ALLOWED[b, h, i, j]


def causally(b, h, i, j):
    return i >= j


def within_documents(b, h, i, j):
    return (i >= j) & (DOCUMENTS[b, i] == DOCUMENTS[b, j])


def by_distance(score, b, h, i, j):
    return score - SLOPES[h] * (i - j)


SLOPES = 0.1 * (torch.arange(HEADS) + 1)
FALLING = -SLOPES[:, None, None] * DISTANCE[None]
SAME_DOCUMENT = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])[:, None]
BY_FLEX = {
    "all": (by_flex, ALL, {}),
    "another scale": (functools.partial(by_flex, scale=0.3), ALL, {"scale": 0.3}),
    "documents": (
        functools.partial(by_flex, mask=within_documents), SAME_DOCUMENT & CAUSAL, {"key_heads": 2}
    ),
    "documents in one row": (
        functools.partial(by_flex, mask=within_documents), SAME_DOCUMENT[:1] & CAUSAL,
        {"shape": (1, LENGTH, WIDTH)},
    ),
    "a mask of each head": (functools.partial(by_flex, mask=allowed), ALLOWED, {}),
    "a bias": (
        functools.partial(by_flex, mask=causally, score_mod=by_distance), CAUSAL, {"bias": FALLING}
    ),
}  # fmt: skip


@pytest.mark.parametrize("_blocks", [100], indirect=True)
@pytest.mark.parametrize("way", BY_FLEX)
def test_flex_attention(way):
    torch.compiler.reset()
    attend, visible, options = BY_FLEX[way]
    assert not any("compiled" in note for note in notes(check(attend, visible, **options)))


# -- operators of flash attention ------------------------------------------------------------------

LIBRARY = torch.library.Library("geomon_ways", "DEF")
OPTIONS = (
    "bool causal=False, bool is_causal=False, int[]? window_size=None, int window_size_left=-1, "
    "int window_size_right=-1, float? softmax_scale=None, float? scale=None, float softcap=0.0, "
    "Tensor? alibi_slopes=None, Tensor? block_table=None, Tensor? page_table=None, "
    "Tensor? seqused_k=None, Tensor? attn_bias=None, Tensor? qv=None"
)
ENDS = ("cu_seqlens_{}", "cu_seq_{}", "cum_seq_{}")
LIBRARY.define(f"forward(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> Tensor")
for number, ends in enumerate(ENDS):
    named = f"Tensor {ends.format('q')}, Tensor? {ends.format('k')}=None"
    LIBRARY.define(f"packed_{number}(Tensor query, Tensor key, Tensor value, {named}, {OPTIONS})"
                   " -> Tensor")  # fmt: skip


def by_definition(q, k, v, *rest, names=(), **options):
    """It stands for an operator of a package, which needs an accelerator."""
    options = dict(zip(names[3:], rest, strict=False)) | options
    options = {name: x for name, x in options.items() if x is not None}
    ends = [x for x in options.values() if isinstance(x, torch.Tensor)]
    given = {name: x for name, x in options.items() if not isinstance(x, torch.Tensor)}
    if q.ndim == 3:  # packed
        of = [x.tolist() for x in (ends[0], ends[-1])]
        parts = [
            by_definition(q[None, a:b], k[None, c:d], v[None, c:d], **given)[0]
            for a, b, c, d in zip(of[0], of[0][1:], of[1], of[1][1:], strict=False)
        ]
        return torch.cat([*parts, torch.zeros_like(q[sum(map(len, parts)) :])])
    sides = [given.get(f"window_size_{side}", -1) for side in ("left", "right")]
    left, right = (None if side < 0 else side for side in given.get("window_size") or sides)
    right = 0 if given.get("causal") or given.get("is_causal") else right
    scale = next((given[x] for x in ("softmax_scale", "scale") if x in given), q.shape[-1] ** -0.5)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if cap := given.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~within(left, right, q.shape[1], k.shape[1]), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(), v)


for name in ("forward", "packed_0", "packed_1", "packed_2"):
    arguments = getattr(torch.ops.geomon_ways, name).default._schema.arguments
    stands_for = functools.partial(by_definition, names=[each.name for each in arguments])
    LIBRARY.impl(name, stands_for, "CPU")
FLASH = torch.ops.geomon_ways


def by_flash(q, k, v, **options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return FLASH.forward(q, k, v, **options).transpose(1, 2)


def within(left, right, queries=LENGTH, keys=LENGTH):
    """Keys that are seen with a window to both sides, at the end of the keys."""
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (distance <= (math.inf if left is None else left)) & (
        -distance <= (math.inf if right is None else right)
    )


# Options, and the keys to the left and to the right that are seen.
BY_FLASH = [
    ({}, (None, None), {}),
    ({"causal": True}, (None, 0), {}),
    ({"is_causal": True}, (None, 0), {}),
    ({"window_size": (3, 1)}, (3, 1), {}),
    ({"window_size": [-1, 0]}, (None, 0), {}),
    ({"window_size": (3, 1), "causal": True}, (3, 0), {}),
    ({"window_size_left": 2}, (2, None), {}),
    ({"window_size_left": 0, "window_size_right": 4}, (0, 4), {}),
    ({"softmax_scale": 0.3}, (None, None), {"scale": 0.3}),
    ({"scale": 2.0}, (None, None), {"scale": 2.0}),
    ({"softcap": 0.5, "causal": True}, (None, 0), {"softcap": 0.5}),
    ({"softcap": 0.0}, (None, None), {}),
]  # fmt: skip


@pytest.mark.parametrize("_blocks", [100], indirect=True)
@pytest.mark.parametrize(
    ("attend", "words"),
    [
        (functools.partial(by_flash, causal=True), "through a function of flash attention"),
        (functools.partial(by_flex, mask=causally), "through torch's flex_attention"),
    ],
)
def test_attention_is_described_and_nothing_is_left_behind(attend, words):
    torch.compiler.reset()
    model, x = blocks_of(attend), torch.randn(SEQUENCES, LENGTH, 32)
    before = fingerprint(model)
    assert words in str(describe(model, x))
    assert fingerprint(model) == before


@pytest.mark.parametrize(("options", "window", "expected"), BY_FLASH)
def test_options_of_flash_attention_are_read_by_all_their_names(options, window, expected):
    check(functools.partial(by_flash, **options), within(*window), **expected)


@pytest.mark.parametrize("window", [(None, None), (None, 0), (1, 0), (2, 1)])
def test_with_more_keys_than_queries_these_stand_at_the_end(window):
    """As with a cache: the keys of earlier tokens come first."""
    earlier = torch.randn(SEQUENCES, HEADS, 5, WIDTH // HEADS)

    def behind(q, k, v):
        k, v = (torch.cat([earlier, each], 2) for each in (k, v))
        return by_flash(q, k, v, window_size=[-1 if side is None else side for side in window])

    check(behind, within(*window, keys=LENGTH + 5), earlier=earlier)


@pytest.mark.parametrize("window", [(None, None), (1, 0)])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("extra", [0, 2])
def test_packed_sequences_see_themselves_alone(number, window, extra):
    """`extra` keys of earlier passes come first in each sequence."""
    lengths = [5, 1, 12, 6]
    ends = torch.tensor([0, *lengths, 0]).cumsum(0).int()  # the last one twice
    keys = torch.tensor([0, *(n + extra for n in lengths), 0]).cumsum(0).int()
    earlier = torch.randn(1, HEADS, extra, WIDTH // HEADS)

    def with_earlier(k):
        return torch.cat([x for part in k.split(lengths, 2) for x in (earlier, part)], 2)

    def packed(q, k, v):
        q, k = (x[0].transpose(0, 1) for x in (q, with_earlier(k)))
        own = {} if not extra else {ENDS[number].format("k"): keys}
        sides = [-1 if side is None else side for side in window]
        attend = getattr(FLASH, f"packed_{number}")
        return attend(q, k, k, ends, **own, window_size=sides).transpose(0, 1)[None]

    visible = torch.block_diag(*(within(*window, n, n + extra).float() for n in lengths)).bool()
    model = blocks_of(packed, WIDTH)
    seen = look(model, torch.randn(1, sum(lengths), WIDTH))
    for block in model:
        block.attention.key = with_earlier(block.attention.key)
    check_blocks(seen, model, visible)
    starts = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    snapshot = seen.snapshot()
    assert torch.equal(snapshot.layers[1].captured["sequences"].sort().values, starts)
    (packed_by,) = [note for note in snapshot.info.notes if note.kind is NoteKind.PACKED]
    assert packed_by.numbers == {"source": "attention"}


@pytest.mark.parametrize(
    "name", ["alibi_slopes", "block_table", "page_table", "seqused_k", "attn_bias", "qv"]
)
def test_an_option_of_flash_attention_that_changes_scores_is_refused(name):
    model = blocks_of(functools.partial(by_flash, **{name: torch.ones(4)}))
    layer = look(model, torch.randn(SEQUENCES, LENGTH, 32)).snapshot().layers[1]
    assert f"was given {name}" in layer.missing["visible"]


# -- by hand ---------------------------------------------------------------------------------------


def causal(scores):
    return scores.masked_fill(~CAUSAL, -1e9)


def grouped(q, k, v):
    q, k, v = q.unflatten(1, (2, 2)), k.unflatten(1, (2, 2)), v.unflatten(1, (2, 2))
    weights = torch.einsum("bgrid,bgrjd->bgrij", q, k).div(math.sqrt(q.shape[-1]))
    return (causal(weights).softmax(-1) @ v).flatten(1, 2)


def transposed(q, k, v):
    scores = scores_of(k, q).masked_fill(~CAUSAL.T, -1e9)
    return scores.softmax(dim=-2).transpose(-1, -2) @ v


def folded(q, k, v):
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(q.shape[-1] ** -0.5).masked_fill_(~CAUSAL, -1e9)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, HEADS))


def by_logarithm(q, k, v):
    return causal(scores_of(q, k)).log_softmax(-1).exp() @ v


BY_HAND = {"groups": grouped, "transposed": transposed, "folded": folded, "logarithm": by_logarithm}


@pytest.mark.parametrize("width", [WIDTH, HEADS * LENGTH], ids=["", "as wide as long"])
@pytest.mark.parametrize("way", BY_HAND)
def test_attention_by_hand_of_any_shape(way, width):
    check(BY_HAND[way], CAUSAL, shape=(SEQUENCES, LENGTH, width))


def test_scores_of_one_sequence_and_one_head_may_have_two_dimensions():
    def flat(q, k, v):
        return (causal(scores_of(q[0, 0], k[0, 0])).softmax(-1) @ v[0, 0])[None, None]

    check(flat, CAUSAL, shape=(1, LENGTH, 32), heads=1)


def with_another(m, x):
    """All tokens attend once more, outside of the attention's own module."""
    x = m.inner(x)
    heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    return x + sdpa(heads, heads, heads).transpose(1, 2).flatten(2)


def test_attention_behind_the_attention_of_a_block_is_not_taken_for_it():
    model = nn.Sequential(*(Running(with_another, inner=Block(sdpa, WIDTH)) for _ in range(2)))
    seen = look(model, torch.randn(SEQUENCES, LENGTH, WIDTH))
    for layer, block in zip(seen.snapshot().layers[1:], model, strict=True):
        check_scores(layer, block.inner.attention, ALL)


# -- rows that are not sampled ---------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("way", [by_logarithm, BY_FUNCTION["causal"][0], in_parts])
def test_a_reading_has_the_logit_of_a_row_that_is_not_sampled(way, grad):
    """One query in a hundred sequences has a logit that is far larger."""
    model, x = blocks_of(way, 16), torch.randn(100, LENGTH, 16)
    x[77, 5] *= 40
    with torch.set_grad_enabled(grad):
        model(x)
        values = measure(model, x, metrics=select("max_logit"), tokens=36)
    for depth, block in enumerate(model, 1):
        own = block.attention
        scores = scores_of(own.query.double(), own.key.double()).masked_fill(~CAUSAL, -torch.inf)
        found = [values[f"max_logit/layer_{depth:02d}/head_{head}"] for head in range(HEADS)]
        assert found == pytest.approx(scores.amax((0, 2, 3)).tolist(), rel=1e-5)
        assert max(found) > 100


def test_a_row_that_sees_no_key_has_none():
    mask = ALL.clone()
    mask[1] = False

    def by_hand(q, k, v):
        return scores_of(q, k).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num() @ v

    for attend in (functools.partial(sdpa, attn_mask=mask), by_hand):
        assert not any("failed" in text for text in notes(check(attend, mask)))
