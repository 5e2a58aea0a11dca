"""Tokens in one row that attention tells apart, and calls of fused attention that fail."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from geomon import describe, measure, select
from geomon.capture.attending.attention import NotUnderstoodError
from geomon.capture.attending.fused import read_flash, read_flex, read_output, read_sdpa
from support.fingerprint import fingerprint
from support.models import PlainDecoder, Running
from support.watched import blocks_of, check_scores, look, window

HEADS, WIDTH, LENGTH = 4, 32, 24
BREAK = 7  # token that ends a document

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def decoder(attend) -> PlainDecoder:
    """All tokens are in one row; queries, keys and values are [tokens, heads, width]."""

    def run(m, x):
        given = [make(m.norm(x)).unflatten(-1, (-1, 8)) for make in (m.q_proj, m.k_proj, m.v_proj)]
        m.query, m.key, _ = (part.transpose(0, 1)[None] for part in given)
        return x + m.o_proj(attend(*given).flatten(-2))

    def block():
        wide = {name: nn.Linear(WIDTH, WIDTH) for name in ("q_proj", "o_proj")}
        narrow = {name: nn.Linear(WIDTH, WIDTH // 2) for name in ("k_proj", "v_proj")}
        return Running(run, num_heads=HEADS, norm=nn.LayerNorm(WIDTH), **wide, **narrow)

    torch.compiler.reset()
    return PlainDecoder(embed=lambda model, ids: model.tokens(ids).flatten(0, -2), block=block)


def tokens() -> Tensor:
    ids = torch.randint(8, 50, (16, LENGTH))
    ids[:, 9], ids[1, 15] = BREAK, BREAK
    return ids


def test_packed_sequences_are_told_apart_by_what_attention_hides():
    ids = tokens().flatten()
    which = (ids == BREAK).cumsum(0)  # a break is the first token of the next document
    order = torch.arange(len(ids))

    def by_flex(*given):
        def mask(b, h, i, j):
            return (i >= j) & (which[i] == which[j])

        block = flex.create_block_mask(mask, 1, None, len(ids), len(ids), device="cpu")
        q, k, v = (part.transpose(0, 1)[None] for part in given)
        found = flex.flex_attention(q, k, v, block_mask=block, enable_gqa=True)
        return found[0].transpose(0, 1)

    model = decoder(by_flex)
    visible = (order <= order[:, None]) & (which[:, None] == which)
    for layer, block in zip(look(model, ids).snapshot().layers[1:], model.blocks, strict=True):
        check_scores(layer, block, visible)
    metrics = select("variance", "attention_entropy")
    values = measure(model, ids, metrics=metrics, tokens=len(ids))
    assert "variance/layer_01/margin" in values  # from the documents


def test_tokens_in_one_row_are_told_apart_as_attention_takes_them():
    def unflattened(*given):
        q, k, v = (part.unflatten(0, (-1, LENGTH)).transpose(1, 2) for part in given)
        attend = nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    model, ids = decoder(unflattened), tokens()
    first = look(model, ids).snapshot().layers[0].captured
    assert torch.equal(first["token_ids"], ids[first["sequences"], first["positions"]])
    metrics = select("variance", "twonn_distinct", "attention_entropy")
    values = measure(model, ids, metrics=metrics, tokens=ids.numel())
    assert "variance/layer_01/margin" in values
    distinct = len({(int(token), place) for row in ids for place, token in enumerate(row)})
    assert values["twonn_distinct/layer_00/n"] <= distinct


def test_an_error_in_compiled_flex_attention_leaves_nothing_behind(failures):
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, backend="eager")
    model, prints = blocks_of(compiled, key_heads=2), []  # without enable_gqa
    for around in (nullcontext(), window(model)):
        with torch.no_grad(), pytest.raises(Exception, match="same number of heads"), around:
            model(torch.randn(2, LENGTH, WIDTH))
        prints.append(fingerprint(model))
    assert prints[0] == prints[1]
    failures.clear()


LIBRARY = torch.library.Library("geomon_heads_first", "DEF")
LIBRARY.define("forward(Tensor q, Tensor k, Tensor v) -> Tensor")
LIBRARY.impl("forward", lambda q, k, v: torch.zeros_like(q), "CPU")


def test_an_operator_of_another_package_with_heads_before_queries_is_refused():
    model = blocks_of(torch.ops.geomon_heads_first.forward)
    assert "queries, but the block has" in str(describe(model, torch.randn(3, LENGTH, WIDTH)))


# -- what is read of a call ------------------------------------------------------------------------

QUERY, KEY = torch.randn(2, 4, 6, 9, requires_grad=True), torch.randn(2, 2, 5, 9)
MASK = torch.rand(6, 5) > 0.5


@pytest.mark.parametrize(
    ("options", "causal", "scale", "shape"),
    [
        ({}, False, 1 / 3, None),
        ({"is_causal": True, "scale": 0.0}, True, 0.0, None),
        ({"is_causal": True, "attn_mask": MASK}, False, 1 / 3, (1, 1, 6, 5)),
        ({"is_causal": False, "attn_bias": MASK[None], "scale": 2.0}, False, 2.0, (1, 1, 6, 5)),
        ({"attn_mask": MASK[None, None]}, False, 1 / 3, (1, 1, 6, 5)),
        ({"attn_mask": MASK[:, :1]}, False, 1 / 3, (1, 1, 6, 1)),
        ({"attn_mask": None, "attn_bias": MASK}, False, 1 / 3, (1, 1, 6, 5)),
    ],
)
def test_torch_s_own_attention_is_read_as_it_was_given(options, causal, scale, shape):
    given = read_sdpa({"query": QUERY, "key": KEY, **options})
    assert torch.equal(given.query, QUERY)
    assert torch.equal(given.key, KEY)
    assert not given.query.requires_grad
    assert (given.causal, given.softcap, given.rule) == (causal, None, None)
    assert given.scale == pytest.approx(scale)
    assert (None if given.mask is None else (*given.mask.shape,)) == shape
    if shape:
        assert torch.equal(given.mask, MASK[None, None, :, : shape[3]])


@pytest.mark.parametrize(
    ("read", "name", "values", "words"),
    [
        (read_sdpa, "query", QUERY[0], "the query are not a plain 4-dimensional tensor"),
        (read_sdpa, "key", KEY[0], "the key are not a plain 4-dimensional tensor"),
        (read_sdpa, "key", None, "the key are not a plain 4-dimensional tensor"),
        (read_sdpa, "attn_mask", MASK[:, :3], "the mask covers 3 keys, but there are 5"),
        (read_flex, "key", KEY[0], "the key are not a plain 4-dimensional tensor"),
        (read_flash, "query", QUERY[0], "the queries are not a plain 4-dimensional tensor"),
        (read_flash, "key", KEY[0], "the keys are not a plain 4-dimensional tensor"),
    ],
)
def test_calls_that_are_not_understood_say_why(read, name, values, words):
    with pytest.raises(NotUnderstoodError) as raised:
        read({"query": QUERY, "key": KEY, name: values})
    assert str(raised.value) == words


VALUE, OUTPUT = torch.randn(2, 4, 6, 3, requires_grad=True), torch.randn(2, 4, 6, 3)


@pytest.mark.parametrize("is_tuple", [False, True])
@pytest.mark.parametrize(
    ("route", "name", "shown"),
    [
        ("sdpa", "value", lambda x: x),
        ("flex", "value", lambda x: x),
        ("flash", "v", lambda x: x.transpose(1, 2)),
        ("flash", "value", lambda x: x[:1].transpose(1, 2)[0]),  # packed
    ],
)
def test_values_and_output_are_read_with_heads_before_places(route, name, shown, is_tuple):
    result = (shown(OUTPUT), torch.zeros(3)) if is_tuple else shown(OUTPUT)
    value, output = read_output(route, {name: shown(VALUE)}, result)
    assert torch.equal(value, VALUE[: len(value)])
    assert torch.equal(output, OUTPUT[: len(output)])
    assert len(value) == len(output) == (1 if shown(OUTPUT).ndim == 3 else 2)
    assert not value.requires_grad


@pytest.mark.parametrize("name", ["dropout_p", "dropout", "p_dropout"])
def test_the_output_of_attention_with_dropout_proves_nothing(name):
    given = {"value": VALUE}
    assert read_output("sdpa", given | {name: 0.1}, OUTPUT) is None
    assert read_output("sdpa", given | {name: 0.0}, OUTPUT) is not None
