"""Which token ids, sequences and positions the rows are of, where a model has more than one table.

Each model is run with what a plain language model does not have: tables that are given other
integers of the tokens' shape, several rows for one token, sequences in the second dimension, tokens
that a block is not given.
"""

from typing import Any

import pytest
import torch
import watched
from models import VOCABULARY, PlainBlock, transformer
from torch import Tensor, nn
from torch.nn import functional as F

from geomon import measure
from geomon.capture import Window, find_anatomy
from geomon.capture.snapshot import CAPTURED, Layer, Snapshot
from geomon.capture.tokens.token_ids import Lookup, no_positions

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


def look(model: nn.Module, *inputs: Any, **options: Any) -> Snapshot:
    return watched.look(model, *inputs, **options).snapshot()


def words(sequences: int, length: int, count: int = VOCABULARY, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, count, (sequences, length), generator=generator)


def check_rows(snapshot: Snapshot, ids: Tensor, states: list[Tensor], stack: str = "") -> None:
    """Hold every row to the state [sequence, position] that it says it is."""
    layers = [layer for layer in snapshot.layers if layer.stack == stack]
    assert len(layers) == len(states)
    for layer, state in zip(layers, states, strict=True):
        seen = layer.captured
        place = seen["sequences"], seen["positions"]
        assert len(seen["hidden"]) == state[..., 0].numel()
        torch.testing.assert_close(seen["hidden"], state[place])
        assert torch.equal(seen["token_ids"], ids[place])


def test_arguments_of_a_model_may_be_sparse_or_lie_in_a_dict():
    """What else a model is given costs nothing of what is seen of the tokens."""
    ids, graph = words(4, 90, count=20), torch.eye(90, dtype=torch.int64).to_sparse()
    for given in ((ids, graph), ({"words": ids},), ({"words": ids}, graph)):
        model = Asking()
        check_rows(look(model, *given), ids, model.states)


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


@pytest.mark.parametrize("kind", [OfPairs, Hashed, Asking, Placed, Holding])
@pytest.mark.parametrize("shape", [(1, 300), (4, 90)])
def test_of_several_tables_that_of_the_words_says_the_token_ids(kind, shape):
    model, ids = kind(), words(*shape, count=20)
    for layer in look(model, ids).layers:
        seen = layer.captured
        assert torch.equal(seen["token_ids"], ids[seen["sequences"], seen["positions"]])


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_positions_of_a_batch_of_one_are_no_token_ids(name):
    ids = words(1, 30, count=10)
    for layer in look(transformer(name), ids).layers:
        assert torch.equal(layer.captured["token_ids"], ids[0, layer.captured["positions"]])


@pytest.mark.parametrize("seed", range(5))
def test_tokens_that_are_to_be_predicted_are_not_those_of_the_blocks(seed):
    model, ids = Ahead(), words(2, 43, seed=seed)
    with (
        torch.no_grad(),
        Window(find_anatomy(model, r"blocks\.\d+"), set(CAPTURED), rows=1000, seed=0) as seen,
    ):
        model(ids)
    snapshot = seen.snapshot()
    check_rows(snapshot, ids[:, :40], model.states)


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
def test_two_sentences_of_one_length_are_told_apart(shared, target_first, counts):
    model = Translator(shared=shared, target_first=target_first)
    sentences = words(4, 24, counts[0]), words(4, 24, counts[1], seed=1)
    snapshot = look(model, *sentences)
    for stack, ids, given in zip(("encoder", "decoder"), sentences, model.given, strict=True):
        first = next(layer for layer in snapshot.layers if layer.stack == stack)
        place = first.captured["sequences"], first.captured["positions"]
        assert torch.equal(first.captured["hidden"], given[place])
        assert torch.equal(first.captured["token_ids"], ids[place])


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


def check_streams(layer: Layer, apart: Tensor, ids: Tensor | None) -> None:
    """Hold each row to one of the streams of its token, [batch, length, streams, width]."""
    seen = layer.captured
    place = seen["sequences"], seen["positions"]
    difference = (apart[place] - seen["hidden"][:, None]).abs().amax(dim=2)
    assert (difference.amin(dim=1) == 0).all()
    assert ("token_ids" in seen) == (ids is not None)
    assert ids is None or torch.equal(seen["token_ids"], ids[place])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_streams_are_rows_of_one_token_of_one_sequence(layout):
    model, ids = Streams(layout), words(6, 16)
    snapshot = look(model, ids)
    for layer, state in zip(snapshot.layers, model.states, strict=True):
        check_streams(layer, LAYOUTS[layout][0](state), ids)
        counts = torch.bincount(layer.captured["sequences"] * 16 + layer.captured["positions"])
        assert (counts == STREAMS).all()
        assert len(counts) == 6 * 16
    (note,) = [n.words() for n in snapshot.info.notes if "streams of hidden states" in n.words()]
    assert note.startswith("hidden states, layer 0, 1, 2: the model has 4 streams")


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

    def forward(self, given: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(given)


@pytest.mark.parametrize("sequences", [1, STREAMS, 6])
@pytest.mark.parametrize("with_ids", [True, False])
def test_streams_that_come_first_keep_padding_and_sequences(with_ids, sequences):
    model, ids = Alternating(), words(sequences, 16)
    real = torch.arange(16) < torch.tensor([16, 5, 9, 12, 1, 16])[:sequences, None]
    real[0, 7:] = False
    given = ids if with_ids else model.tokens(ids).detach()
    snapshot = look(model, given, real.long())
    for layer, state in zip(snapshot.layers, model.states, strict=True):
        check_streams(layer, state.movedim(0, 2), ids if with_ids else None)
        seen = layer.captured
        assert len(seen["hidden"]) == STREAMS * real.sum()
        assert real[seen["sequences"], seen["positions"]].all()
        if layer.index:
            assert len(seen["projected_query"]) == real.sum()
    texts = [note.words() for note in snapshot.info.notes]
    assert any("the model has 4 streams of hidden states" in text for text in texts)
    assert any(text.startswith("padding, ") for text in texts)


def test_margins_do_not_count_streams_as_sequences():
    ids = words(10, 16)
    values = measure(Streams("inner"), ids)
    assert values["twonn/layer_01/sequences"] == 10


ROW_VIEWS = {"hidden", "token_ids", "positions", "sequences"}


def rows_alone(model: nn.Module, *inputs: Tensor) -> Snapshot:
    """What a window sees for metrics of hidden states and token types alone."""
    model.eval()
    with torch.no_grad(), Window(find_anatomy(model), ROW_VIEWS, rows=10_000, seed=0) as seen:
        model(*inputs)
    return seen.snapshot()


def test_metrics_without_attention_have_the_ids_of_as_many_sequences_as_tokens():
    """The shape does not tell [length, batch] from [batch, length]."""
    model, ids = LengthFirst(), words(8, 8)
    check_rows(rows_alone(model, ids), ids, [state.transpose(0, 1) for state in model.states])


@pytest.mark.parametrize("target_first", [False, True])
def test_metrics_without_attention_have_the_ids_of_each_stack(target_first):
    model = Translator(shared=True, target_first=target_first)
    sentences = words(4, 24, 45), words(4, 24, 25, seed=1)
    snapshot = rows_alone(model, *sentences)
    for stack, ids in zip(("encoder", "decoder"), sentences, strict=True):
        first = next(layer for layer in snapshot.layers if layer.stack == stack)
        place = first.captured["sequences"], first.captured["positions"]
        assert torch.equal(first.captured["token_ids"], ids[place])


# -- sequences in the second dimension -------------------------------------------------------------


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
    def block(self) -> nn.Module:
        return Turned()

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids).transpose(0, 1).contiguous()


@pytest.mark.parametrize("shape", [(5, 12), (8, 8), (1, 20), (12, 5)])
def test_length_first_hidden_states_have_the_sequences_of_their_token_ids(shape):
    model, ids = LengthFirst(), words(*shape)
    snapshot = look(model, ids)
    check_rows(snapshot, ids, [state.transpose(0, 1) for state in model.states])
    for layer, block in zip(snapshot.layers[1:], model.blocks, strict=True):
        seen = layer.captured
        place = seen["query_sequences"], seen["positions"]
        torch.testing.assert_close(seen["projected_query"], block.query[place])
        torch.testing.assert_close(seen["projected_key"], block.key[place])
        assert torch.equal(seen["last_token_ids"], ids[:, -1])
    assert not any("projected Q and K" in note.words() for note in snapshot.info.notes)


def test_length_first_hidden_states_without_token_ids_are_known_by_attention():
    model, x = LengthFirst(), torch.randn(12, 5, WIDTH)
    stack = nn.Sequential(*model.blocks)
    layer = look(stack, x).layers[0]
    place = layer.captured["positions"], layer.captured["sequences"]
    assert torch.equal(layer.captured["hidden"], x[place])
    assert "known only after the pass" in layer.missing["last_hidden"]


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
    snapshot = look(Routed(depths), words(4, 16))
    for layer in snapshot.layers:
        routed = layer.index - 1 in depths
        assert len(layer.captured["hidden"]) == (32 if routed else 64)
        for view in ("positions", "last_hidden"):
            assert (view in layer.captured) != routed
            assert not routed or "routed past it" in layer.missing[view]
        assert "sequences" in layer.captured
    numbers = ", ".join(str(depth + 1) for depth in sorted(depths))
    told = [note.words() for note in snapshot.info.notes if "routed past it" in note.words()]
    assert told[0].startswith(f"hidden states, layer {numbers}: ")


# -- the parts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "is_free"),
    [
        (torch.tensor(3), True), (torch.tensor([3]), True), (torch.tensor([[3], [4]]), True),
        (torch.tensor([3, 4]), False), (torch.tensor([3, 9]), True), (torch.arange(9), False),
        (torch.arange(3).expand(2, 3), False), (torch.tensor([[0, 1, 2], [7, 3, 5]]), False),
        (torch.tensor([[0, 1, 5], [7, 3, 5]]), True), (torch.tensor([5, 4, 3]), True),
    ],
)  # fmt: skip
def test_positions_are_integers_of_which_half_are_one_more_than_the_one_before(ids, is_free):
    assert no_positions(Lookup(ids, nn.Embedding(9, 2))) is is_free
