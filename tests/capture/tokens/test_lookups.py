"""Which token ids, sequences and positions the rows are of, where a model has more than one table.

Each model is run with what a plain language model does not have: tables that are given other
integers of the tokens' shape, several rows for one token, sequences in the second dimension, tokens
that a block is not given.
"""

import pytest
import torch
import watched
from models import VOCABULARY, PlainBlock, transformer
from torch import Tensor, nn
from torch.nn import functional as F

from geomon import measure
from geomon.capture import Window

WIDTH, STREAMS = 32, 4


class Model(nn.Module):
    """A decoder whose parts its children replace."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.states: list[Tensor] = []

    def block(self) -> nn.Module:
        return PlainBlock(WIDTH, 4, 0.0)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids)

    def apart(self, state: Tensor) -> Tensor:
        """A state as [batch, length, width], or with its streams before the width."""
        return state

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        self.states = [x]
        for block in self.blocks:
            x = block(x)
            self.states.append(x)
        return self.head(x)


class Hashed(Model):
    """A second table is given hashes of two tokens, which vary more than tokens do."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Embedding(4999, WIDTH)

    def embed(self, ids: Tensor) -> Tensor:
        before = F.pad(ids, (1, 0))[:, :-1]
        return self.tokens(ids) + self.pairs((ids * 131 + before * 977) % 4999)


class Asking(Hashed):
    """Takes ids alone, in a dict or beside what has no storage; no module has the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, given: Tensor | dict[str, Tensor], graph: Tensor | None = None) -> Tensor:
        self.head = lambda x: x @ self.tokens.weight.T
        return super().forward(given["words"] if isinstance(given, dict) else given)


class Placed(Model):
    """Positions are given for every sequence: there may be more of them than words."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(400, WIDTH)

    def embed(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).expand_as(ids)
        return self.places(places) + self.tokens(ids)


class Ahead(Model):
    """Blocks that predict further tokens are given the tokens before those, by the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = nn.ModuleList(nn.ModuleList([PlainBlock(WIDTH, 4, 0.0)]) for _ in range(3))
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1] - 3
        logits = super().forward(ids[:, :length])
        x = self.states[-1]
        for depth, (block,) in enumerate(self.ahead, 1):
            x = block(self.join(torch.cat([x, self.tokens(ids[:, depth : depth + length])], -1)))
            logits = logits + self.head(x)
        return logits


class Copying(Model):
    """Writes into its ids when they were looked up."""

    def embed(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        ids.fill_(0)
        return x


class Beside(Model):
    """A stack of its own looks up other words of the same shape by the table of the words."""

    def forward(self, ids: Tensor) -> Tensor:
        self.tokens(ids.flip(1)).sum()
        return super().forward(ids)


def words(sequences: int, length: int, count: int = VOCABULARY, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, count, (sequences, length), generator=generator)


class Paired(nn.Embedding):
    """A table that returns something beside its rows."""

    def forward(self, ids):
        return super().forward(ids), None


class OfPairs(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = Paired(VOCABULARY, WIDTH)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids)[0]


class Held(nn.Module):
    """Holds a table and looks its rows up without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table.weight) * 2


class Holding(Model):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = Held()


class Turned(nn.Module):
    """Fused queries, keys and values of each head beside one another, on [length, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.norm = 4, nn.LayerNorm(WIDTH)
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.query_key_value(self.norm(x)).unflatten(-1, (4, 24)).transpose(0, 1)
        self.query, self.key, _ = fused.chunk(3, dim=-1)
        q, k, v = (part.transpose(1, 2) for part in fused.chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(F.normalize(q, dim=-1), k, v, is_causal=True)
        return x + self.dense(y.permute(2, 0, 1, 3).flatten(2))


class LengthFirst(Model):
    block = Turned

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids).transpose(0, 1).contiguous()

    def apart(self, state: Tensor) -> Tensor:
        return state.transpose(0, 1)


def check(model: Model, seen: Window, ids: Tensor | None, real: Tensor | None = None) -> None:
    """Hold every row to the state [sequence, position] that it says it is, or to a stream of it."""
    layers = seen.snapshot().layers
    assert len(layers) == len(model.states)
    for layer, state in zip(layers, model.states, strict=True):
        found, own = layer.captured, model.apart(state)
        place = found["sequences"], found["positions"]
        own = own if own.ndim == 4 else own[:, :, None]
        assert (own[place] == found["hidden"][:, None]).all(2).any(1).all()
        counts = torch.zeros(own.shape[:2]).index_put(place, torch.ones(()), accumulate=True)
        assert torch.equal(counts, own.shape[2] * (1.0 if real is None else real) + 0 * counts)
        assert ("token_ids" in found) == (ids is not None)
        assert ids is None or torch.equal(found["token_ids"], ids[place])


GRAPH = torch.eye(90, dtype=torch.int64).to_sparse()
ROW_VIEWS = {"views": {"hidden", "token_ids", "positions", "sequences"}}
# A kind of model, how it is given the words, and options of the window.
KINDS = {
    "a table that returns pairs": (OfPairs, lambda ids: (ids,), {}),
    "a table of hashes": (Hashed, lambda ids: (ids,), {}),
    "no output": (Asking, lambda ids: (ids,), {}),
    "beside what has no storage": (Asking, lambda ids: (ids, GRAPH), {}),
    "in a dict": (Asking, lambda ids: ({"words": ids}, GRAPH), {}),
    "a table of places": (Placed, lambda ids: (ids,), {}),
    "a table that is not called": (Holding, lambda ids: (ids,), {}),
    "ids that are written into": (Copying, lambda ids: (ids.clone(),), {}),
    "words that are looked up beside": (Beside, lambda ids: (ids,), {}),
    "length first": (LengthFirst, lambda ids: (ids,), {}),
    "length first, rows alone": (LengthFirst, lambda ids: (ids,), ROW_VIEWS),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 300), (4, 90), (8, 8), (90, 4)])
def test_of_several_tables_that_of_the_words_says_the_token_ids(kind, shape):
    make, given, options = KINDS[kind]
    model, ids = make(), words(*shape, count=20)
    if kind == "ids that are written into":  # a second pass has to be given them anew
        with watched.window(model.eval(), **options) as seen, torch.no_grad():
            model(*given(ids))
    else:
        seen = watched.look(model, *given(ids), options=options)
    check(model, seen, ids)
    assert not any("projected Q and K" in text for text in watched.notes(seen))


@pytest.mark.parametrize("shape", [(5, 12), (8, 8)])
def test_length_first_queries_and_keys_have_the_sequences_of_their_token_ids(shape):
    model, ids = LengthFirst(), words(*shape)
    layers = watched.look(model, ids).snapshot().layers[1:]
    for layer, block in zip(layers, model.blocks, strict=True):
        seen = layer.captured
        place = seen["query_sequences"], seen["positions"]
        torch.testing.assert_close(seen["projected_query"], block.query[place])
        torch.testing.assert_close(seen["projected_key"], block.key[place])
        assert torch.equal(seen["last_token_ids"], ids[:, -1])


def test_length_first_hidden_states_without_token_ids_are_known_by_attention():
    model, x = LengthFirst(), torch.randn(12, 5, WIDTH)
    layer = watched.look(nn.Sequential(*model.blocks), x).snapshot().layers[0]
    place = layer.captured["positions"], layer.captured["sequences"]
    assert torch.equal(layer.captured["hidden"], x[place])
    assert "known only after the pass" in layer.missing["last_hidden"]


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_positions_of_a_batch_of_one_are_no_token_ids(name):
    ids = words(1, 30, count=10)
    for layer in watched.look(transformer(name), ids).snapshot().layers:
        assert torch.equal(layer.captured["token_ids"], ids[0, layer.captured["positions"]])


class Two(Model):
    """Two tables are given integers, and nothing says which are the words."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.head = nn.Embedding(9, WIDTH), nn.Identity()

    def forward(self, ids: Tensor, more: Tensor) -> Tensor:
        self.embed = lambda ids: self.places(more) + self.tokens(ids)
        return super().forward(ids)


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
    first = watched.look(Two(), ids, more).snapshot().layers[0].captured
    place = first["sequences"], first["positions"]
    assert torch.equal(first["token_ids"], (more if may_be else ids)[place])


@pytest.mark.parametrize("seed", range(3))
def test_tokens_that_are_to_be_predicted_are_not_those_of_the_blocks(seed):
    model, ids = Ahead(), words(2, 43, seed=seed)
    seen = watched.look(model, ids, options={"blocks": r"blocks\.\d+"})
    check(model, seen, ids[:, :40])


class Translator(nn.Module):
    """Both sentences are embedded before the first block runs."""

    def __init__(self, *, shared: bool, target_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.target_first = target_first
        self.source = nn.Embedding(VOCABULARY, WIDTH)
        self.target = self.source if shared else nn.Embedding(80, WIDTH)
        self.both = nn.Transformer(WIDTH, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, self.target.num_embeddings)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        tables = [(self.source, source), (self.target, target)]
        given = [table(ids) for table, ids in tables[:: -1 if self.target_first else 1]]
        self.given = given[::-1] if self.target_first else given
        return self.head(self.both(*self.given))


@pytest.mark.parametrize("target_first", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("counts", [(45, 25), (25, 45)])
@pytest.mark.parametrize("options", [{}, ROW_VIEWS], ids=["", "rows alone"])
def test_two_sentences_of_one_length_are_told_apart(shared, target_first, counts, options):
    model = Translator(shared=shared, target_first=target_first)
    sentences = words(4, 24, counts[0]), words(4, 24, counts[1], seed=1)
    layers = watched.by_place(watched.look(model, *sentences, options=options).snapshot())
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


class StreamBlock(PlainBlock):
    """Reads a mixture of streams and writes to each of them."""

    def __init__(self, layout: str) -> None:
        super().__init__(WIDTH, 4, 0.0)
        self.layout = layout
        self.read, self.write = nn.Parameter(torch.rand(STREAMS)), nn.Parameter(torch.rand(STREAMS))

    def forward(self, x: Tensor) -> Tensor:
        apart, together = LAYOUTS[self.layout]
        read = torch.einsum("btsd,s->btd", apart(x), self.read)
        made = super().forward(read) - read
        return together(apart(x) + made[:, :, None] * self.write[:, None])


class Streams(Model):
    def __init__(self, layout: str) -> None:
        self.layout = layout
        super().__init__()

    def block(self) -> nn.Module:
        return StreamBlock(self.layout)

    def embed(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)[:, :, None].expand(-1, -1, STREAMS, -1)
        return LAYOUTS[self.layout][1](x).contiguous()

    def apart(self, state: Tensor) -> Tensor:
        return LAYOUTS[self.layout][0](state)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_streams_are_rows_of_one_token_of_one_sequence(layout):
    model, ids = Streams(layout), words(6, 16)
    seen = watched.look(model, ids)
    check(model, seen, ids)
    (note,) = [text for text in watched.notes(seen) if "streams of hidden states" in text]
    assert note.startswith("hidden states, layer 0, 1, 2: the model has 4 streams")
    assert measure(model, words(10, 16))["twonn/layer_01/sequences"] == 10


class AlternatingBlock(PlainBlock):
    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x[0])
        return torch.cat([made[None], x[1:] + 0.1 * (made - x[0])])


class Alternating(Model):
    """Streams that come first; attention is given one of them, the others are made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STREAMS - 1))

    def block(self) -> nn.Module:
        return AlternatingBlock(WIDTH, 4, 0.0)

    def embed(self, given: Tensor) -> Tensor:
        x = given if given.is_floating_point() else self.tokens(given)
        return torch.stack([x, *(made(x) for made in self.others)])

    def apart(self, state: Tensor) -> Tensor:
        return state.movedim(0, 2)

    def forward(self, given: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(given)


@pytest.mark.parametrize("sequences", [1, STREAMS, 6])
@pytest.mark.parametrize("with_ids", [True, False])
def test_streams_that_come_first_keep_padding_and_sequences(with_ids, sequences):
    model, ids = Alternating(), words(sequences, 16)
    real = torch.arange(16) < torch.tensor([16, 5, 9, 12, 1, 16])[:sequences, None]
    real[0, 7:] = False
    given = ids if with_ids else model.tokens(ids).detach()
    seen = watched.look(model, given, real.long())
    check(model, seen, ids if with_ids else None, real)
    layers = seen.snapshot().layers
    assert [len(x.captured["projected_query"]) for x in layers[1:]] == [real.sum()] * 2
    texts = watched.notes(seen)
    assert any("the model has 4 streams of hidden states" in text for text in texts)
    assert any(text.startswith("padding, ") for text in texts)


# -- tokens that blocks are not given --------------------------------------------------------------


class Routed(Model):
    """Every second block, or every one but the first, is given half of the tokens."""

    def __init__(self, depths: set[int]) -> None:
        super().__init__(layers=4)
        self.depths = depths

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for depth, block in enumerate(self.blocks):
            if depth not in self.depths:
                x = block(x)
                continue
            chosen = x[..., depth].topk(ids.shape[1] // 2, dim=1).indices.sort(dim=1).values
            index = chosen[..., None].expand(-1, -1, WIDTH)
            x = x.scatter(1, index, block(x.gather(1, index)))
        return self.head(x)


@pytest.mark.parametrize("depths", [{1, 3}, {1, 2, 3}])
def test_of_routed_tokens_nobody_says_which_they_are(depths):
    seen = watched.look(Routed(depths), words(4, 16))
    for layer in seen.snapshot().layers:
        routed = layer.index - 1 in depths
        assert len(layer.captured["hidden"]) == (32 if routed else 64)
        for view in ("positions", "last_hidden"):
            assert (view in layer.captured) != routed
            assert not routed or "routed past it" in layer.missing[view]
        assert "sequences" in layer.captured
    numbers = ", ".join(str(depth + 1) for depth in sorted(depths))
    told = [text for text in watched.notes(seen) if "routed past it" in text]
    assert told[0].startswith(f"hidden states, layer {numbers}: ")
