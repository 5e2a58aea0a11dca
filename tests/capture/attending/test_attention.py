"""Read what is added to scores, and refuse calls that cannot be rebuilt."""

import dataclasses

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from geomon.capture.attending.attention import (
    Arguments,
    AttentionCall,
    NotUnderstoodError,
    SoftmaxCall,
    at_sampled_rows,
    read_call,
    read_calls,
    record_call,
    split_mask,
)
from geomon.capture.attending.rules import FlexRule, PlaceRule
from geomon.capture.tokens.sampling import RowSampler
from support.hardware import ShortProducts
from support.watched import HEADS, blocks_of, look

LENGTH = 6
SINKS = torch.arange(float(HEADS))[:, None, None]
GENERATOR = torch.Generator().manual_seed(0)
OTHERS = torch.randn(2, HEADS, LENGTH, 1, generator=GENERATOR)
BIAS = torch.rand(HEADS, LENGTH, LENGTH, generator=GENERATOR)


def first_layer(attend):
    model = blocks_of(attend)
    layer = look(model, torch.randn(2, LENGTH, 32)).snapshot().layers[1]
    return layer, model[0].attention


@pytest.mark.parametrize("kind", ["a sink", "another number in each row", "no scale"])
def test_a_key_that_is_joined_to_scores_is_a_sink_if_it_is_one_number_of_a_head(kind):
    def joining(q, k, v):
        scores = q @ k.mT * 0.25
        scores = 3 * torch.tanh(scores / 3) if kind == "no scale" else scores
        joined = SINKS.expand(len(q), HEADS, LENGTH, 1)
        joined = OTHERS if kind.startswith("another") else joined
        moved = torch.cat([scores, joined], -1)
        moved = moved - moved.max(-1, keepdim=True).values
        return moved.softmax(-1)[..., :-1] @ v

    views = first_layer(joining)[0].captured
    assert ("sink" in views and views["sink"] is not None) == (kind == "a sink")
    if kind == "a sink":
        torch.testing.assert_close(views["sink"], SINKS.flatten())
        assert views["scale"] == pytest.approx(0.25)
        assert views["bias"] is None
    else:
        assert views["scores"].shape == (2, HEADS, LENGTH, LENGTH + 1)


def by_hand(q, k, v):
    return ((q.double() @ k.double().mT / 4).float() + BIAS).softmax(-1) @ v.float()


def thrice(score, b, h, i, j):
    return 3 * score


def by_flex(q, k, v):
    torch.compiler.reset()
    return flex.flex_attention(q.float(), k.float(), v.float(), score_mod=thrice)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("rounded", "attend"),
    [
        (ShortProducts, by_hand),  # what a training may have set, which rounds its own products
        (lambda: torch.autocast("cpu"), by_hand),
        (lambda: torch.autocast("cpu"), by_flex),
    ],
)
def test_biases_of_scores_are_found_whatever_rounds_the_training_s_products(rounded, attend):
    with rounded():
        layer, own = first_layer(attend)
    query, key = own.query.double(), own.key.double()
    expected = BIAS if attend is by_hand else 2 * query @ key.mT / 8**0.5
    found = layer.captured["bias"].double()
    torch.testing.assert_close(found, expected.double().expand_as(found), rtol=1e-5, atol=1e-5)


# -- sampled queries -------------------------------------------------------------------------------


def some_queries() -> RowSampler:
    """Draws 3 of 5 queries in 4 of 6 sequences."""
    sampler = RowSampler(100, 0)
    sampler.limit(12)
    return sampler


@pytest.mark.parametrize(
    ("sampler", "drawn"), [(some_queries(), (4, 3)), (RowSampler(100, 0), (6, 5))]
)
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 9), (1, 1, 5, 9), (6, 1, 1, 9), (6, 4, 5, 9), (1, 4, 5, 1), (6, 1, 5, 1)],
)
def test_sampled_queries_keep_their_own_rows_of_a_mask(shape, sampler, drawn):
    """As they are at the call: what is given may be written into later."""
    mask = torch.rand(shape, generator=GENERATOR) > 0.5
    query, key = torch.randn(6, 4, 5, 8), torch.randn(6, 2, 9, 8)
    given = Arguments(query, key, mask, True, 0.5)
    call = record_call(sampler, given)
    whole, kept, asked = (x.clone() for x in (mask.expand(6, 4, 5, 9), key, query))
    for values in (query, key, mask):
        values.zero_()
    assert (*call.sequences.shape, *call.places.shape[1:]) == drawn
    assert call.shape == (6, 5)
    views = read_call(call, None)
    visible = views["visible"].expand(drawn[0], 4, drawn[1], 9)
    for number, sequence in enumerate(call.sequences.tolist()):
        assert torch.equal(views["key"][number], kept[sequence])
        for row, place in enumerate(call.places[number].tolist()):
            assert torch.equal(views["query"][number, :, row], asked[sequence, :, place])
            earlier = torch.arange(9) <= place
            assert torch.equal(visible[number, :, row], whole[sequence, :, place] & earlier)
    scores = torch.randn(6, 4, 5, 9)
    found = at_sampled_rows(scores.requires_grad_(), call.sequences, call.places)
    assert not found.requires_grad
    expected = scores[call.sequences[:, None], :, call.places].transpose(1, 2)
    assert torch.equal(found, expected)


def test_the_functions_of_flex_attention_are_evaluated_at_sampled_queries():
    def mask(b, h, i, j):
        return (i + j + b) % 3 != 0

    def change(score, b, h, i, j):
        changed = score * 2 + b + h + i - j
        return torch.where(j == 4, -torch.inf, changed)

    query, key = torch.randn(6, 4, 5, 8), torch.randn(6, 2, 9, 8)
    rule = FlexRule(9, query.device, mask, 1, score=change)
    call = record_call(some_queries(), Arguments(query, key, None, False, 0.5, rule=rule))
    views = read_call(call, None)
    b, i = call.sequences[:, None, None, None], call.places[:, None, :, None]
    h, j = torch.arange(4)[:, None, None], torch.arange(9)
    scores = 0.5 * views["query"] @ views["key"].repeat_interleave(2, 1).mT
    visible = (mask(b, h, i, j) & (j != 4)).expand_as(scores)
    assert torch.equal(views["visible"].expand_as(scores), visible)
    bias = (scores + b + h + i - j).masked_fill(~visible, 0)
    torch.testing.assert_close(views["bias"], bias)


# -- calls that are read together ------------------------------------------------------------------

SEQUENCES, KEY_HEADS, WIDTH = 3, 2, 8
PLACES = torch.arange(LENGTH).expand(SEQUENCES, -1)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
ALL = torch.ones_like(CAUSAL)


def random_mask(*heads: int) -> torch.Tensor:
    mask = torch.rand(SEQUENCES, *(heads or (1,)), LENGTH, LENGTH, generator=GENERATOR) > 0.4
    mask[..., 0] = True
    return mask


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.randn(SEQUENCES, HEADS, LENGTH, WIDTH, generator=GENERATOR),
        torch.randn(SEQUENCES, KEY_HEADS, LENGTH, WIDTH, generator=GENERATOR),
    )


def fused(visible=ALL, bias=None, *, mask=None, causal=False, scale=1.0, softcap=None):
    """A call of fused attention, and the views that it makes."""
    given = Arguments(*factors(), mask, causal, scale, softcap)
    call = record_call(RowSampler(1000, 0), given)
    views = {"visible": visible, "bias": bias, "scale": scale, "softcap": softcap, "sink": None}
    return call, {"query": given.query, "key": given.key} | views


def softmax(visible=ALL, bias=None, *, scale: float | None = 1.0, made=True):
    """A softmax of scores, and the views that it makes."""
    query, key = factors()
    products = query @ key.repeat_interleave(HEADS // KEY_HEADS, 1).mT
    scores = products * (scale or 1) + (0 if bias is None else bias)
    scores = scores.masked_fill(~visible, -1e9)
    call = SoftmaxCall(
        scores, torch.arange(SEQUENCES), PLACES, (SEQUENCES, LENGTH),
        (query, key) if made else None, scale,
    )  # fmt: skip
    if not made:
        return call, {"scores": scores, "visible": visible}
    views = {"visible": visible, "bias": bias, "scale": scale or 1.0, "softcap": None, "sink": None}
    return call, {"query": query, "key": key} | views


def calls_of_many_forms():
    """Alike ones, which are read together, are not side by side."""
    masks = [random_mask(), random_mask(), random_mask(HEADS)]
    hidden = torch.where(masks[0], 0, -1e9)
    added = [torch.randn(SEQUENCES, HEADS, LENGTH, LENGTH, generator=GENERATOR) for _ in range(4)]
    return [
        fused(masks[0], mask=masks[0], scale=0.1),
        fused(scale=0.2),
        fused(CAUSAL, causal=True, scale=0.3, softcap=4.0),
        softmax(masks[1], scale=0.4),
        fused(masks[1], mask=masks[1], scale=0.5, softcap=5.0),
        fused(masks[2], mask=masks[2], scale=0.6),
        fused(masks[0], mask=hidden, scale=0.7),
        fused(ALL, added[0], mask=added[0], scale=0.8),
        softmax(ALL, added[1], scale=0.9),
        fused(CAUSAL, added[2], mask=added[2], causal=True, scale=1.1),
        fused(CAUSAL, causal=True, scale=1.2),
        softmax(masks[0], made=False),
        softmax(masks[2], added[3].masked_fill(~masks[2], 0), scale=0.4),
        fused(masks[2], mask=masks[2] | False, scale=1.3),
        softmax(masks[1], made=False),
        softmax(ALL, scale=0.9),
    ]


def check_views(found, expected):
    assert found.keys() == expected.keys()
    for name, views in expected.items():
        if not isinstance(views, torch.Tensor):
            assert found[name] == views, name
        elif views.dtype == torch.bool:
            wanted = views.expand(SEQUENCES, HEADS, LENGTH, LENGTH)
            assert torch.equal(found[name].expand_as(wanted), wanted)
        else:
            torch.testing.assert_close(found[name], views.expand_as(found[name]), msg=name)


@pytest.mark.parametrize("padded", [False, True])
def test_calls_are_read_together_as_each_alone(padded):
    valid = None
    made = calls_of_many_forms()
    if padded:
        valid = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
        valid[1, 4:] = False
        for _, expected in made:
            expected["visible"] = expected["visible"] & valid[:, None, :, None]
    for call, expected in made:
        assert torch.equal(call.sequences, torch.arange(SEQUENCES))
        check_views(read_call(call, valid), expected)
    for found, (_, expected) in zip(
        read_calls([call for call, _ in made], valid), made, strict=True
    ):
        check_views(found, expected)


def test_a_call_that_cannot_be_read_keeps_no_other_from_being_read():
    counts = torch.ones(SEQUENCES, 1, LENGTH, LENGTH, dtype=torch.int64)
    calls = [fused(scale=0.1)[0], fused(mask=counts)[0], fused(scale=0.2)[0], fused(mask=counts)[0]]
    first, refused, second, another = read_calls(calls, None)
    assert (first["scale"], second["scale"]) == (0.1, 0.2)
    for error in (refused, another):
        assert isinstance(error, NotUnderstoodError)
        assert str(error) == "the mask has dtype torch.int64: neither boolean nor additive"
        assert error.__traceback__ is None
    with pytest.raises(NotUnderstoodError, match="the mask has dtype"):
        read_call(calls[1], None)


@pytest.mark.parametrize(
    ("scale", "doubtful", "is_refused"),
    [(None, True, True), (None, False, False), (0.5, True, False)],
)
def test_as_many_keys_as_features_are_told_apart_by_a_scale(scale, doubtful, is_refused):
    call, expected = softmax(scale=scale)
    call = dataclasses.replace(call, doubtful=doubtful)
    if not is_refused:
        check_views(read_call(call, None), expected)
        return
    with pytest.raises(NotUnderstoodError) as raised:
        read_call(call, None)
    assert str(raised.value) == (
        "a softmax over 6 numbers was seen, but they are not known to be products of queries with "
        "all keys: they may be features (linear attention), chunks of keys or experts"
    )


# The number that is joined to the scores of one row lies this far from that of the others.
@pytest.mark.parametrize("sink", [0.0, -10.0, 10.0])
@pytest.mark.parametrize(("apart", "is_sink"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("side", [-1, 1])
def test_a_sink_is_one_number_but_for_the_rounding_of_a_short_type(sink, apart, is_sink, side):
    """Within a hundredth of it, or of 1 if it is smaller."""
    call, expected = softmax(scale=0.5)
    joined = torch.full((SEQUENCES, HEADS, LENGTH, 1), sink)
    joined[1, 2, 3] += side * apart * 0.01 * (1 + abs(sink))
    call = dataclasses.replace(call, scores=torch.cat([call.scores, joined], dim=-1))
    assert call.joined
    found = read_call(call, None)
    if is_sink:
        expected["sink"] = torch.full((HEADS,), sink)
        check_views(found, expected)
    else:
        assert torch.equal(found["scores"], call.scores)
        assert found["visible"].all()


def test_a_row_that_sees_no_key_but_the_sink_does_not_say_what_it_is():
    call, _ = softmax(scale=0.5)
    scores = torch.cat([call.scores, torch.full((SEQUENCES, HEADS, LENGTH, 1), 2.0)], dim=-1)
    scores[0, :, 1, :-1], scores[0, :, 1, -1] = -1e9, 7.0  # after a shift of this row alone
    found = read_call(dataclasses.replace(call, scores=scores), None)
    assert found["sink"].tolist() == pytest.approx([2.0] * HEADS)
    assert not found["visible"].expand(SEQUENCES, HEADS, -1, -1)[0, :, 1].any()
    assert found["visible"].expand(SEQUENCES, HEADS, -1, -1)[1:].all()


@pytest.mark.parametrize(("share", "is_bias"), [(0.9, False), (1.1, True)])
def test_what_is_added_to_scores_counts_above_their_rounding(share, is_bias):
    """Eight units of rounding of the largest score; calls that are read together, each alone."""
    calls = [softmax(scale=0.5)[0] for _ in range(3)]
    largest = calls[1].scores.abs().max()
    calls[1].scores[1, 2, 3, 4] += share * 8 * 2**-7 * largest
    calls = [dataclasses.replace(call, scores=call.scores.bfloat16()) for call in calls]
    found = [views["bias"] is not None for views in read_calls(calls, None)]
    assert found == [False, is_bias, False]


def lies_apart(values: torch.Tensor) -> bool:
    """Whether a tensor lies in memory of its own, apart from the heap, which cannot grow."""
    return not values.untyped_storage().resizable()


def test_long_copies_lie_apart_from_the_heap():
    """They outlive what the training allocates around them."""
    query, key = (torch.randn(4, 4, 128, 64).bfloat16() for _ in range(2))
    mask = torch.rand(4, 4, 128, 128) > 0.5
    call = record_call(RowSampler(1000, 0), Arguments(query, key, mask, False, 1.0))
    scores = query.float() @ key.float().mT
    rows = at_sampled_rows(scores, call.sequences, call.places)
    some = at_sampled_rows(scores, torch.tensor([1, 3]), torch.arange(0, 128, 2).expand(2, -1))
    views = read_call(call, None)
    copies = [call.given.query, call.given.key, call.given.mask, rows, some]
    assert all(map(lies_apart, [*copies, views["query"], views["key"]]))
    softmaxes = [
        SoftmaxCall(rows, call.sequences, call.places, (4, 128), (call.given.query, call.given.key))
        for _ in range(2)
    ]
    for read in read_calls(softmaxes, None):
        assert lies_apart(read["query"])
        assert lies_apart(read["key"])
    alone = [dataclasses.replace(each, made_of=None) for each in softmaxes]
    assert all(lies_apart(read["scores"]) for read in read_calls(alone, None))
    assert not lies_apart(scores)


def test_recorded_calls_and_rules_cannot_be_changed():
    rules = PlaceRule(4, SINKS.device), FlexRule(4, SINKS.device, lambda b, h, i, j: i >= j, 1)
    for recorded in (fused()[0], softmax()[0], *rules):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(recorded, dataclasses.fields(recorded)[0].name, None)


def test_a_mask_hides_or_adds():
    assert split_mask(None, 4) == (None, None)
    hidden, bias = split_mask(torch.tensor([[[[True], [False]]]]), 3)
    assert hidden.tolist() == [[[[False] * 3, [True] * 3]]]
    assert bias is None
    added = torch.tensor([[[[0.5, -1e9, 2.0], [-torch.inf, 0.0, -3.0]]]], dtype=torch.bfloat16)
    hidden, bias = split_mask(added, 3)
    assert hidden.tolist() == [[[[False, True, False], [True, False, False]]]]
    assert bias.dtype == torch.float32
    assert bias.tolist() == [[[[0.5, 0.0, 2.0], [0.0, 0.0, -3.0]]]]


def test_recorded_calls_say_their_heads_and_why_queries_are_not_known():
    fused_call, softmax_call = fused()[0], softmax()[0]
    for call in (fused_call, softmax_call):
        assert (call.heads, call.key_heads, call.shape) == (HEADS, KEY_HEADS, (SEQUENCES, LENGTH))
    assert isinstance(fused_call, AttentionCall)
    alone = softmax(made=False)[0]
    assert (alone.heads, alone.key_heads, alone.joined) == (HEADS, HEADS, False)
    by_hand = "attention is written out by hand: "
    assert alone.why_unknown == f"{by_hand}its scores were seen, but not its queries and keys"
    assert softmax_call.why_unknown == f"{by_hand}unknown columns were joined to its scores"
    assert not softmax_call.joined
