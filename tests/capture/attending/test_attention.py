import pytest
import torch
from short_products import ShortProducts
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from geomon.capture.attending.attention import (
    NotUnderstoodError,
    SoftmaxCall,
    read_call,
    read_scores,
    record_call,
)
from geomon.capture.attending.fused import read_flash, read_sdpa
from geomon.capture.attending.rules import FlexRule, PlaceRule
from geomon.capture.tokens.sampling import RowSampler

LOWER = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 4, 6, 6)


def views(mask=None, valid=None, keys=6, given=None, **changes):
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, keys, 8)
    arguments = {"query": query, "key": key, "attn_mask": mask} | (given or {})
    call = record_call(RowSampler(100, 0), read_sdpa(arguments)._replace(**changes))
    assert torch.equal(call.given.query, query)  # all that there is, in order
    assert torch.equal(call.given.key, key)
    return read_call(call, valid)


def test_a_mask_for_other_keys_is_refused():
    with pytest.raises(NotUnderstoodError, match=r"mask covers 9 keys, but there are 6"):
        views(mask=torch.zeros(2, 1, 6, 9))


def test_scale_and_softcap_are_as_given():
    assert views()["scale"] == pytest.approx(8**-0.5)
    assert views(given={"scale": 0.5})["scale"] == 0.5
    assert (views()["softcap"], views()["sink"]) == (None, None)
    assert views(softcap=50.0)["softcap"] == 50.0


def test_a_mask_of_integers_is_refused():
    with pytest.raises(NotUnderstoodError, match="neither boolean nor additive"):
        views(mask=torch.ones(1, 1, 6, 6, dtype=torch.int64))


def test_nested_and_odd_queries_are_refused():
    for query in (torch.randn(2, 6, 8), None):
        with pytest.raises(NotUnderstoodError, match="not a plain 4-dimensional tensor"):
            read_sdpa({"query": query, "key": query})


def test_what_a_compiler_traces_with_is_refused():
    with FakeTensorMode():
        fake = torch.empty(2, 4, 6, 8)
    with FunctionalTensorMode():
        functional = FunctionalTensor.to_functional(torch.empty(2, 4, 6, 8))
    for query, kind in ((fake, "FakeTensor"), (functional, "FunctionalTensor")):
        with pytest.raises(NotUnderstoodError, match=f"queries are a {kind}"):
            read_flash({"q": query, "k": query})


@pytest.mark.parametrize(
    "name", ["alibi_slopes", "block_table", "page_table", "seqused_k", "attn_bias", "qv"]
)
def test_an_option_of_flash_attention_that_changes_scores_is_refused(name):
    query = torch.randn(2, 6, 4, 8)
    assert read_flash({"q": query, "k": query, name: None}).rule.keys == 6
    with pytest.raises(NotUnderstoodError, match=f"was given {name}"):
        read_flash({"q": query, "k": query, name: torch.ones(4)})


ENDS, MORE = torch.tensor([0, 2, 6]), torch.tensor([0, 3, 6])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"causal": True}, {"right": 0}),
        ({"is_causal": True}, {"right": 0}),
        ({"window_size": (3, 1)}, {"left": 3, "right": 1}),
        ({"window_size": [-1, 0]}, {"right": 0}),
        ({"window_size": (3, 1), "causal": True}, {"left": 3, "right": 0}),
        ({"window_size_left": 2}, {"left": 2}),
        ({"window_size_left": 0, "window_size_right": 4}, {"left": 0, "right": 4}),
        ({"softmax_scale": 0.25}, {"scale": 0.25}),
        ({"scale": 2}, {"scale": 2.0}),
        ({"softcap": 30.0}, {"softcap": 30.0}),
        ({"softcap": 0.0}, {}),
    ],
)
def test_options_of_flash_attention_are_read_by_all_their_names(given, expected):
    query, key = torch.randn(2, 6, 4, 8, requires_grad=True), torch.randn(2, 9, 2, 8)
    found = read_flash({"q": query, "k": key, **given})
    assert torch.equal(found.query, query.transpose(1, 2))
    assert torch.equal(found.key, key.transpose(1, 2))
    assert not found.query.requires_grad
    assert (found.mask, found.causal) == (None, False)
    assert (found.rule.keys, found.rule.offset, found.rule.ends) == (9, 3, None)
    whole = {"left": None, "right": None, "scale": 8**-0.5, "softcap": None} | expected
    assert (found.rule.left, found.rule.right) == (whole["left"], whole["right"])
    assert (found.scale, found.softcap) == (whole["scale"], whole["softcap"])


@pytest.mark.parametrize("name", ["cu_seqlens_{}", "cu_seq_{}", "cum_seq_{}"])
def test_packed_flash_attention_has_the_ends_of_queries_and_of_keys(name):
    packed = torch.randn(6, 4, 8)
    given = {"query": packed, "key": packed, name.format("q"): ENDS}
    assert [ends.tolist() for ends in read_flash(given).rule.ends] == [[0, 2, 6]] * 2
    found = read_flash(given | {name.format("k"): MORE})
    assert [ends.tolist() for ends in found.rule.ends] == [[0, 2, 6], [0, 3, 6]]
    assert found.query.shape == (1, 4, 6, 8)
    with pytest.raises(NotUnderstoodError, match="the keys are not a plain 3-dimensional tensor"):
        read_flash(given | {"key": packed[None]})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, False, 8**-0.5)),
        ({"is_causal": True}, (None, True, 8**-0.5)),
        ({"is_causal": True, "scale": 2}, (None, True, 2.0)),
        ({"attn_mask": torch.ones(6, 9)}, ((1, 1, 6, 9), False, 8**-0.5)),
        ({"attn_bias": torch.ones(4, 6, 9)}, ((1, 4, 6, 9), False, 8**-0.5)),
        ({"attn_mask": torch.ones(2, 1, 6, 1)}, ((2, 1, 6, 1), False, 8**-0.5)),
    ],
)
def test_options_of_torch_s_attention_are_read(given, expected):
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 9, 8)
    found = read_sdpa({"query": query, "key": key, **given})
    mask = None if found.mask is None else tuple(found.mask.shape)
    assert (mask, found.causal, found.scale) == expected
    one = read_sdpa({"query": query[:, :, :1], "key": key, "is_causal": True})
    assert not one.causal  # a single query sees all keys
    with pytest.raises(NotUnderstoodError, match="the mask covers 8 keys, but there are 9"):
        read_sdpa({"query": query, "key": key, "attn_mask": torch.ones(6, 8)})


def ruled(rule) -> torch.Tensor:
    """What is visible of two sequences under a rule, in four heads."""
    query = torch.randn(2, 4, 6, 8)
    given = read_sdpa({"query": query, "key": query})._replace(rule=rule)
    found = read_call(record_call(RowSampler(100, 0), given), None)["visible"]
    return found.expand(2, 4, 6, 6)


def by_places(mask) -> FlexRule:
    return FlexRule(6, torch.device("cpu"), mask, 4)


OWN = torch.block_diag(*(torch.ones(n, n) for n in (2, 3, 1))).bool()


@pytest.mark.parametrize("left", [None, 1])
@pytest.mark.parametrize("right", [None, 0])
def test_of_packed_sequences_each_sees_itself_alone(left, right):
    ends = torch.tensor([0, 2, 5, 6], dtype=torch.int32)
    found = ruled(PlaceRule(6, torch.device("cpu"), left, right, ends=(ends, ends)))[0, 0]
    expected = OWN if left is None else OWN.triu(-left)
    assert torch.equal(found, expected if right is None else expected.tril())


def test_a_rule_that_takes_one_pair_at_a_time_is_refused():
    with pytest.raises(NotUnderstoodError, match="cannot be evaluated at many places at once"):
        ruled(by_places(lambda b, h, q, k: q >= k if bool(q > 2) else q == k))


@pytest.mark.parametrize(
    ("kind", "known"),
    [("a sink", True), ("another number in each row", False), ("no scale", False)],
)
def test_a_key_that_is_joined_to_scores_is_a_sink_where_it_is_one_number_of_a_head(kind, known):
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    scores, joined = query @ key.mT / 4, torch.arange(4.0)[:, None, None].expand(2, 4, 6, 1)
    if kind == "another number in each row":
        joined = torch.randn(2, 4, 6, 1)
    scale = None if kind == "no scale" else 0.25
    places = torch.arange(6).expand(2, 6)
    moved = torch.cat([scores, joined], -1) - torch.rand(2, 4, 6, 1)  # each row by a number
    call = SoftmaxCall(moved, torch.arange(2), places, (2, 6), made_of=(query, key), scale=scale)
    found = read_scores(call)
    assert ("query" in found) == known
    if known:
        torch.testing.assert_close(found["sink"], torch.arange(4.0))
        assert found["scale"] == pytest.approx(0.25)
        assert found["bias"] is None
    else:
        assert torch.equal(found["scores"], call.scores)


@pytest.fixture(params=["products of short factors", "autocast"])
def rounded(request):
    """What a training may have set, which rounds the factors of its own products."""
    return ShortProducts() if request.param.startswith("p") else torch.autocast("cpu")


def test_what_is_added_to_scores_by_hand_is_found_whatever_rounds_the_training_s_products(rounded):
    query, key, added = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8), torch.rand(4, 6, 6)
    places = torch.arange(6).expand(2, 6)
    scores = (query.double() @ key.double().mT / 4).float() + added
    call = SoftmaxCall(scores, torch.arange(2), places, (2, 6), made_of=(query, key), scale=0.25)
    with rounded:
        found = read_scores(call)
    torch.testing.assert_close(found["bias"], added.expand(2, 4, 6, 6), rtol=1e-5, atol=1e-5)


def test_what_a_rule_makes_of_scores_is_found_whatever_rounds_the_training_s_products(rounded):
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    rule = FlexRule(
        6, torch.device("cpu"), lambda b, h, q, k: q >= k, 4, lambda score, b, h, q, k: 3 * score
    )
    given = read_sdpa({"query": query, "key": key})._replace(rule=rule)
    with rounded:
        found = read_call(record_call(RowSampler(100, 0), given), None)
    expected = 2 * (query.double() @ key.double().mT / 8**0.5).float()
    seen = found["visible"].expand(2, 4, 6, 6)
    torch.testing.assert_close(found["bias"][seen], expected[seen], rtol=1e-5, atol=1e-5)
