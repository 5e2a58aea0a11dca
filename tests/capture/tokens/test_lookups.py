"""The token ids, sequences and positions of rows, if a model has more than one table.

Each model is run with what a plain language model does not have: tables that are given other
integers of the tokens' shape, several rows for one token, sequences in the second dimension, tokens
that a block is not given.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from geomon import measure
from geomon.capture import Window
from support.models import VOCABULARY, PlainBlock, PlainDecoder, Running, transformer
from support.watched import (
    Block,
    attend_by_hand,
    by_place,
    check_scores,
    look,
    notes,
    states_of,
    window,
)

WIDTH, STREAMS = 32, 4


def words(sequences: int, length: int, count: int = VOCABULARY, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, count, (sequences, length), generator=generator)


def table(rows: int = VOCABULARY) -> nn.Embedding:
    return nn.Embedding(rows, WIDTH)


def decoder(embed=lambda model, ids: model.tokens(ids), layers: int = 2, **parts) -> PlainDecoder:
    torch.manual_seed(0)
    return PlainDecoder(layers=layers, embed=embed, **parts)


class Paired(nn.Embedding):
    """A table that returns more than its rows."""

    def forward(self, ids):
        return super().forward(ids), None


class PartOfWords(nn.Embedding):
    """A table of the first words, as one of several ranks has it: the others are replaced."""

    def forward(self, ids):
        own = ids < self.num_embeddings
        return super().forward(ids.where(own, 0)) * own[..., None]


class ProductEmbedding(nn.Linear):
    """A table that multiplies its weight with one-hot vectors."""

    def forward(self, ids):
        return F.one_hot(ids, self.in_features).float() @ self.weight.T


def hashed(**parts) -> PlainDecoder:
    """A second table is given hashes of two tokens, which vary more than tokens do."""

    def embed(model, ids):
        before = F.pad(ids, (1, 0))[:, :-1]
        return model.tokens(ids) + model.pairs((ids * 131 + before * 977) % 4999)

    return decoder(embed, pairs=table(4999), **parts)


def asking() -> nn.Module:
    """Takes ids alone, in a dict or with a tensor without storage; no module has the vocabulary."""
    return Running(
        lambda m, given, graph=None: m.inner(given["words"] if isinstance(given, dict) else given),
        inner=hashed(head=nn.Identity()),
    )


def placed() -> PlainDecoder:
    """Positions are given for every sequence: there may be more of them than words."""
    return decoder(
        lambda m, ids: m.places(torch.arange(ids.shape[1]).expand_as(ids)) + m.tokens(ids),
        places=table(400),
    )


def holding(make=decoder) -> PlainDecoder:
    """A module holds a table and looks its rows up without calling it."""
    return make(tokens=Running(lambda m, ids: F.embedding(ids, m.table.weight) * 2, table=table()))


def copying(model, ids):
    """Writes into the ids when they were looked up."""
    x = model.tokens(ids)
    ids.fill_(0)
    return x


def turned(m, x):
    """Fused queries, keys and values, head by head, on [length, batch, width]."""
    fused = m.query_key_value(m.norm(x)).unflatten(-1, (4, 24)).transpose(0, 1)
    m.query, m.key, _ = fused.chunk(3, dim=-1)
    q, k, v = (part.transpose(1, 2) for part in fused.chunk(3, dim=-1))
    y = F.scaled_dot_product_attention(F.normalize(q, dim=-1), k, v, is_causal=True)
    return x + m.dense(y.permute(2, 0, 1, 3).flatten(2))


def length_first() -> PlainDecoder:
    def block():
        return Running(
            turned, num_heads=4, norm=nn.LayerNorm(WIDTH),
            query_key_value=nn.Linear(WIDTH, 3 * WIDTH), dense=nn.Linear(WIDTH, WIDTH),
        )  # fmt: skip

    return decoder(lambda m, ids: m.tokens(ids).transpose(0, 1).contiguous(), block=block)


def check(
    seen: Window, states: list[Tensor], ids: Tensor | None, real: Tensor | float = 1.0
) -> None:
    """Hold every row to the state that it says it is, or to a stream of it.

    States are [sequences, length, width], or have their streams before the width.
    """
    for layer, state in zip(seen.snapshot().layers, states, strict=True):
        found, own = layer.captured, state if state.ndim == 4 else state[:, :, None]
        place = found["sequences"], found["positions"]
        assert (own[place] == found["hidden"][:, None]).all(2).any(1).all()
        counts = torch.zeros(own.shape[:2]).index_put(place, torch.ones(()), accumulate=True)
        assert torch.equal(counts, own.shape[2] * real + 0 * counts)
        assert ("token_ids" in found) == (ids is not None)
        assert ids is None or torch.equal(found["token_ids"], ids[place])


GRAPH = torch.eye(90, dtype=torch.int64).to_sparse()
ROW_VIEWS = {"views": {"hidden", "token_ids", "positions", "sequences"}}
# A kind of model, how it is given the words, and options of the window.
KINDS = {
    "a table that returns pairs": (
        lambda: decoder(lambda m, ids: m.tokens(ids)[0], tokens=Paired(VOCABULARY, WIDTH)),
        lambda ids: (ids,), {},
    ),
    "a table of a part of the words": (
        lambda: decoder(tokens=PartOfWords(8, WIDTH)), lambda ids: (ids,), {},
    ),
    "a table that is a product": (
        lambda: decoder(tokens=ProductEmbedding(VOCABULARY, WIDTH)), lambda ids: (ids,), {},
    ),
    "a table of hashes": (hashed, lambda ids: (ids,), {}),
    "no output": (asking, lambda ids: (ids,), {}),
    "beside what has no storage": (asking, lambda ids: (ids, GRAPH), {}),
    "in a dict": (asking, lambda ids: ({"words": ids}, GRAPH), {}),
    "a table of places": (placed, lambda ids: (ids,), {}),
    "a table that is not called": (holding, lambda ids: (ids,), {}),
    "such a table and one of hashes": (lambda: holding(hashed), lambda ids: (ids,), {}),
    "ids that are written into": (lambda: decoder(copying), lambda ids: (ids.clone(),), {}),
    "words that are looked up beside": (
        lambda: decoder(lambda m, ids: (m.tokens(ids.flip(1)), m.tokens(ids))[1]),
        lambda ids: (ids,), {},
    ),
    "length first": (length_first, lambda ids: (ids,), {}),
    "length first, rows alone": (length_first, lambda ids: (ids,), ROW_VIEWS),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 300), (4, 90), (8, 8), (90, 4)])
def test_the_table_of_words_shows_the_token_ids_among_several_tables(kind, shape):
    make, given, options = KINDS[kind]
    model, ids = make(), words(*shape, count=20)
    states = states_of(model, *given(ids), blocks=getattr(model, "inner", model).blocks)
    with window(model, **options) as seen, torch.no_grad():
        model(*given(ids))
    first = kind.startswith("length first")
    check(seen, [x.transpose(0, 1) for x in states] if first else states, ids)
    assert not any("projected Q and K" in text for text in notes(seen))


@pytest.mark.parametrize("shape", [(5, 12), (8, 8)])
def test_length_first_queries_and_keys_have_the_sequences_of_their_token_ids(shape):
    model, ids = length_first(), words(*shape)
    layers = look(model, ids).snapshot().layers[1:]
    for layer, block in zip(layers, model.blocks, strict=True):
        seen = layer.captured
        place = seen["query_sequences"], seen["positions"]
        torch.testing.assert_close(seen["projected_query"], block.query[place])
        torch.testing.assert_close(seen["projected_key"], block.key[place])
        assert torch.equal(seen["last_token_ids"], ids[:, -1])


def test_length_first_hidden_states_without_token_ids_are_known_by_attention():
    x = torch.randn(12, 5, WIDTH)
    layer = look(nn.Sequential(*length_first().blocks), x).snapshot().layers[0]
    place = layer.captured["positions"], layer.captured["sequences"]
    assert torch.equal(layer.captured["hidden"], x[place])
    assert "known only after the pass" in layer.missing["last_hidden"]


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_positions_of_a_batch_of_one_are_no_token_ids(name):
    ids = words(1, 30, count=10)
    for layer in look(transformer(name), ids).snapshot().layers:
        assert torch.equal(layer.captured["token_ids"], ids[0, layer.captured["positions"]])


def two(model, ids, more):
    """Two tables are given integers, and nothing says which are the words."""
    return model.body(model.places(more) + model.tokens(ids))


# Integers beside words that are all the same, and whether they may be token ids.
INTEGERS = [
    ([[0, 1, 2], [7, 3, 5]], False),  # of the steps within sequences half are by one
    ([[0, 1, 5], [7, 3, 5]], True),
    ([[0, 1, 2], [0, 1, 2]], False),
    ([[5, 4, 3]], True),
    ([[3], [4]], True),
]


@pytest.mark.parametrize(("more", "may_be"), INTEGERS)
def test_positions_are_integers_of_which_half_are_one_more_than_the_one_before(more, may_be):
    more = torch.tensor(more)
    ids = torch.zeros_like(more) + 4
    model = Running(two, tokens=table(), places=table(9), body=nn.Sequential(*decoder().blocks))
    first = look(model, ids, more).snapshot().layers[0].captured
    place = first["sequences"], first["positions"]
    assert torch.equal(first["token_ids"], (more if may_be else ids)[place])


def ahead(model, ids):
    """Blocks that predict further tokens are given the tokens before those, by the same table."""
    length = ids.shape[1] - 3
    x = model.body(ids[:, :length])
    for depth, (block,) in enumerate(model.ahead, 1):
        x = block(model.join(torch.cat([x, model.body.tokens(ids[:, depth : depth + length])], -1)))
    return model.head(x)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_that_are_to_be_predicted_are_not_those_of_the_blocks(seed):
    more = nn.ModuleList(nn.ModuleList([PlainBlock(WIDTH, 4, 0.0)]) for _ in range(3))
    model = Running(
        ahead, body=decoder(head=nn.Identity()), ahead=more, join=nn.Linear(2 * WIDTH, WIDTH),
        head=nn.Linear(WIDTH, VOCABULARY),
    )  # fmt: skip
    ids = words(2, 43, seed=seed)
    seen = look(model, ids, options={"blocks": r"body\.blocks\.\d+"})
    check(seen, states_of(model, ids, blocks=model.body.blocks), ids[:, :40])


def translate(model, source, target):
    """Both sentences are embedded before the first block runs."""
    tables = [(model.source, source), (model.target, target)]
    given = [table(ids) for table, ids in tables[:: -1 if model.target_first else 1]]
    model.given = given[::-1] if model.target_first else given
    return model.head(model.both(*model.given))


@pytest.mark.parametrize("target_first", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("counts", [(45, 25), (25, 45)])
@pytest.mark.parametrize("options", [{}, ROW_VIEWS], ids=["", "rows alone"])
def test_two_sentences_of_one_length_are_told_apart(shared, target_first, counts, options):
    source = table()
    target = source if shared else table(80)
    model = Running(
        translate, target_first=target_first, source=source, target=target,
        both=nn.Transformer(WIDTH, 4, 2, 2, 64, dropout=0.0, batch_first=True),
        head=nn.Linear(WIDTH, target.num_embeddings),
    )  # fmt: skip
    sentences = words(4, 24, counts[0]), words(4, 24, counts[1], seed=1)
    layers = by_place(look(model, *sentences, options=options).snapshot())
    for stack, ids, given in zip(("encoder", "decoder"), sentences, model.given, strict=True):
        first = layers[stack, 0].captured
        place = first["sequences"], first["positions"]
        assert torch.equal(first["hidden"], given[place])
        assert torch.equal(first["token_ids"], ids[place])


# -- several rows for one token ------------------------------------------------------------------


# From hidden states to [batch, length, streams, width], and back.
LAYOUTS = {
    "last": (lambda x: x, lambda x: x),
    "first": (lambda x: x.movedim(0, 2), lambda x: x.movedim(2, 0)),
    "inner": (
        lambda x: x.unflatten(0, (-1, STREAMS)).movedim(1, 2),
        lambda x: x.movedim(2, 1).flatten(0, 1),
    ),
    "outer": (
        lambda x: x.unflatten(0, (STREAMS, -1)).movedim(0, 2),
        lambda x: x.movedim(2, 0).flatten(0, 1),
    ),
}


def streaming(layout: str, attend) -> PlainDecoder:
    """Each block reads a mixture of streams and writes to each of them."""
    apart, together = LAYOUTS[layout]

    def write(m, x):
        read = torch.einsum("btsd,s->btd", apart(x), m.reads)
        return together(apart(x) + (m.inner(read) - read)[:, :, None] * m.writes[:, None])

    def block():
        reads, writes = (nn.Parameter(torch.rand(STREAMS)) for _ in range(2))
        return Running(write, inner=Block(attend, WIDTH), reads=reads, writes=writes)

    return decoder(
        lambda m, ids: together(m.tokens(ids)[:, :, None].repeat(1, 1, STREAMS, 1)).contiguous(),
        block=block,
    )


@pytest.mark.parametrize("attend", [attend_by_hand, F.scaled_dot_product_attention])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_streams_are_rows_of_one_token_of_one_sequence(layout, attend):
    model, ids = streaming(layout, attend), words(6, 16)
    seen = look(model, ids)
    for layer, block in zip(seen.snapshot().layers[1:], model.blocks, strict=True):
        check_scores(layer, block.inner.attention, torch.ones(16, 16, dtype=torch.bool))
    check(seen, [LAYOUTS[layout][0](x) for x in states_of(model, ids)], ids)
    (note,) = [text for text in notes(seen) if "streams of hidden states" in text]
    assert note.startswith("hidden states, layer 0, 1, 2: the model has 4 streams")
    assert measure(model, words(10, 16))["twonn/layer_01/sequences"] == 10


def alternate(m, x):
    """Streams that come first; attention is given one of them."""
    made = m.inner(x[0])
    return torch.cat([made[None], x[1:] + 0.1 * (made - x[0])])


def spread(m, given):
    """Streams that are made of the first one."""
    x = given if given.is_floating_point() else m.tokens(given)
    return torch.stack([x, *(made(x) for made in m.others)])


@pytest.mark.parametrize("sequences", [1, STREAMS, 6])
@pytest.mark.parametrize("with_ids", [True, False])
def test_streams_that_come_first_keep_padding_and_sequences(with_ids, sequences):
    others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STREAMS - 1))
    body = decoder(
        spread, block=lambda: Running(alternate, inner=PlainBlock(WIDTH, 4, 0.0)), others=others
    )
    model, ids = Running(lambda m, x, attention_mask: m.body(x), body=body), words(sequences, 16)
    real = torch.arange(16) < torch.tensor([16, 5, 9, 12, 1, 16])[:sequences, None]
    real[0, 7:] = False
    given = ids if with_ids else body.tokens(ids).detach()
    seen = look(model, given, attention_mask=real.long())
    states = [x.movedim(0, 2) for x in states_of(body, given)]
    check(seen, states, ids if with_ids else None, real)
    layers = seen.snapshot().layers
    assert [len(x.captured["projected_query"]) for x in layers[1:]] == [real.sum()] * 2
    texts = notes(seen)
    assert any("the model has 4 streams of hidden states" in text for text in texts)
    assert any(text.startswith("padding, ") for text in texts)


# -- tokens that blocks are not given --------------------------------------------------------------


@pytest.mark.parametrize(("layers", "depths"), [(4, {1, 3}), (4, {1, 2, 3}), (3, {1, 2})])
def test_places_of_routed_tokens_are_unknown(layers, depths):
    """Every second block, or every one but the first, is given half of the tokens.

    The output of a block is freed, and the next one gets the same memory if it can be had.
    """

    def run(model, x):
        freed = 0
        for depth, block in enumerate(model.blocks):
            if depth not in depths:
                x = block(x)
                continue
            chosen = x[..., depth].topk(x.shape[1] // 2, dim=1).indices.sort(dim=1).values
            index = chosen[..., None].expand(-1, -1, WIDTH)
            given = x.gather(1, index)
            left = [given := given.clone() for _ in range(500) if given.data_ptr() != freed]
            made = block(given)
            x, freed = x.scatter(1, index, made), made.data_ptr()
            del left, made
        return x

    seen = look(decoder(layers=layers, run=run), words(4, 16))
    for layer in seen.snapshot().layers:
        routed = layer.index - 1 in depths
        assert len(layer.captured["hidden"]) == (32 if routed else 64)
        for view in ("positions", "last_hidden"):
            assert (view in layer.captured) != routed
            assert not routed or "routed past it" in layer.missing[view]
        assert "sequences" in layer.captured
    numbers = ", ".join(str(depth + 1) for depth in sorted(depths))
    told = [text for text in notes(seen) if "routed past it" in text]
    assert told[0].startswith(f"hidden states, layer {numbers}: ")
