"""Layers beside those of the blocks: the final norm, and the two matrices."""

import dataclasses

import pytest
import torch
from models import PlainBlock, PlainDecoder, batch, transformer
from plain_models import encoder
from specimens import built
from torch import nn
from watched import window
from zoo import ZOO

from geomon import Monitor, geometry, measure, select
from geomon.capture import extra_pass
from geomon.distributed import merge_layers

ANISOTROPY = select("anisotropy")


EXTRA = ("final_norm", "embedding", "unembedding")


def layers(model: nn.Module, inputs, extra=EXTRA, rows: int = 100_000) -> dict:
    views = {"hidden", "token_ids", "positions", "sequences"}
    seen = window(model, rows, views=views, extra_layers=extra)
    extra_pass(model, inputs, seen)
    return {f"{x.stack}/{x.index}": x for x in seen.snapshot().layers}


def rows_of(layer, values: torch.Tensor, *, length_first: bool = False) -> torch.Tensor:
    """The rows of a tensor [batch, length, width] that a layer should hold."""
    if length_first:
        values = values.transpose(0, 1)
    return values[layer.captured["sequences"], layer.captured["positions"]].float()


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_layers_and_the_final_norm_are_the_hidden_states_of_transformers(name):
    model, ids = transformer(name).eval(), batch()
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    found = layers(model, given)
    expected = model(**given, output_hidden_states=True).hidden_states
    for place, states in zip(("/0", "/1", "/2", "final_norm/3"), expected, strict=True):
        hidden = found[place].captured["hidden"]
        assert len(hidden) == mask.sum()
        assert torch.allclose(hidden, rows_of(found[place], states.detach()), atol=1e-5)


def test_each_stack_has_its_own_final_norm():
    model, ids = built(ZOO["T5 (position bias)"], "sdpa"), batch().clamp(min=1)
    given = {"input_ids": ids, "decoder_input_ids": ids[:, :10]}
    seen, whole = layers(model, given), model(**given, output_hidden_states=True)
    for place, states in (
        ("encoder.final_norm/2", whole.encoder_hidden_states),
        ("decoder.final_norm/3", whole.decoder_hidden_states),
    ):
        found = seen[place]
        expected = rows_of(found, states[-1].detach())
        assert torch.allclose(found.captured["hidden"], expected, atol=1e-5)


def test_a_norm_that_every_block_is_read_by_is_final_behind_the_last():
    """As in early exits and deep supervision, where one head reads all layers."""

    class Read(PlainDecoder):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(32)

        def forward(self, ids):
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(x)
                kept.append(self.norm(x))
            return self.head(kept[-1])

    kept = []
    found = layers(Read().eval(), batch())["final_norm/3"]
    assert torch.equal(found.captured["hidden"], rows_of(found, kept[-1]))


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_modules_of_either_order(batch_first):
    model = encoder(norm_first=True, batch_first=batch_first).eval()
    model.norm = nn.LayerNorm(model.layers[0].linear1.in_features)
    x = torch.randn(5, 12, 32, generator=torch.Generator().manual_seed(0))
    found = layers(model, x)["final_norm/3"]
    expected = rows_of(found, model(x).detach(), length_first=not batch_first)
    assert len(expected) == 60
    assert torch.allclose(found.captured["hidden"], expected, atol=1e-6)


class NormOfSomethingElse(nn.Module):
    """Frees what the last block gave, and norms another tensor of its shape, at its address."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(90, 32)
        self.blocks = nn.ModuleList(PlainBlock(32, 4, 0.0) for _ in range(2))
        self.dense, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.dense(x)
        x = torch.nn.functional.gelu(x)
        return self.norm(x * 2)


@pytest.mark.parametrize(
    "model",
    [lambda: transformer("bert"), PlainDecoder, NormOfSomethingElse],
    ids=["blocks that end in a norm", "no norm", "norm of something else"],
)
def test_where_there_is_none_the_reason_is_said(model):
    made = model()
    found = layers(made, {"input_ids": batch()} if hasattr(made, "config") else batch())
    stack = next(layer for layer in found.values() if layer.stack == "final_norm")
    assert not stack.captured
    assert "received the output of the last block" in stack.missing["hidden"]
    with pytest.raises(RuntimeError, match="hidden states at final_norm: no module outside"):
        measure(made, batch(), metrics=ANISOTROPY, extra_layers=["final_norm"])


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_the_weights_and_no_table_of_places(tied):
    model, ids = PlainDecoder(length=200), batch()  # more places than tokens
    if tied:
        model.head.weight = model.tokens.weight
    seen = layers(model, ids)
    embedding, output = seen["embedding/0"], seen["unembedding/0"]
    assert torch.equal(embedding.captured["hidden"], model.tokens.weight.detach())
    assert torch.equal(output.captured["hidden"], model.head.weight.detach())
    assert embedding.captured["precision"] == torch.finfo(torch.float32).eps


def test_a_large_matrix_is_sampled():
    model, ids = PlainDecoder(), batch()
    found = layers(model, ids, rows=17)["embedding/0"].captured["hidden"]
    places = (model.tokens.weight.detach()[:, None] == found).all(dim=2).float().argmax(dim=0)
    assert len(places.unique()) == 17


def test_matrices_are_measured_as_plain_rows_and_asked_nothing_of_tokens():
    model, ids = transformer("gpt2"), batch()
    values = measure(model, ids, extra_layers=["embedding", "unembedding", "final_norm"])
    plain = geometry(model.transformer.wte.weight)
    for metric in ("anisotropy", "cosine", "twonn", "drift_norm"):
        assert values[f"{metric}/embedding_layer_00"] == pytest.approx(plain[metric], rel=1e-9)
    of_matrix = {tag.split("/")[0] for tag in values if "embedding_" in tag}
    assert "anisotropy" in of_matrix
    assert not of_matrix & {"twonn_distinct", "within_variance", "attention_entropy"}
    assert not [note for note in values.notes if "embedding" in note and "missing" in note]
    without = measure(model, ids)
    assert {tag: values[tag] for tag in without} == pytest.approx(without, nan_ok=True)
    assert len(values) > len(without)


def test_a_model_without_the_matrices_says_so():
    model = encoder()
    x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match="embedding: no embedding table was found outside"):
        measure(model, x, metrics=ANISOTROPY, extra_layers=["embedding"])
    with pytest.raises(RuntimeError, match="one output for each row of an embedding table"):
        measure(model, x, metrics=ANISOTROPY, extra_layers="unembedding")


def test_of_several_ranks_a_matrix_is_taken_once():
    model, ids = PlainDecoder(), batch()
    one = layers(model, ids, rows=20)["embedding/0"]
    other = dataclasses.replace(one, captured={}, missing={"hidden": "why"})
    for parts in ([one, one], [other, one]):
        assert torch.equal(merge_layers(parts).captured["hidden"], one.captured["hidden"])


def test_names_are_checked():
    for given, words in (["normed"], "got 'normed'"), ([3], "got 3"), ("norm", "got 'norm'"):
        with pytest.raises(ValueError, match=f"final_norm, embedding, unembedding, {words}"):
            Monitor(PlainDecoder(), directory=None, extra_layers=given)


def test_of_a_model_that_was_not_run_no_matrix_is_measured():
    with window(PlainDecoder(), views={"hidden"}, extra_layers=EXTRA) as seen:
        pass
    last = seen.snapshot().layers[-1]
    assert (last.stack, last.index, last.captured) == ("final_norm", 3, {})
    assert "not run while the window was open" in last.missing["hidden"]


def test_of_two_norms_that_are_given_the_last_hidden_states_the_first_counts():
    class Twice(PlainDecoder):
        def __init__(self):
            super().__init__()
            self.norm, self.other = nn.LayerNorm(32), nn.LayerNorm(32, elementwise_affine=False)
            nn.init.constant_(self.norm.weight, 3.0)

        def forward(self, ids):
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(x)
            self.normed = self.norm(x)
            return self.head(self.normed + self.other(x))

    model = Twice().eval()
    model(batch())
    found = layers(model, batch())["final_norm/3"]
    assert torch.equal(found.captured["hidden"], rows_of(found, model.normed.detach()))
    assert found.name == "norm"


class Apart(torch.Tensor):
    """A weight of which a rank has a part."""

    def to_local(self):
        return self


class Opaque(torch.Tensor):
    """A weight whose class has no code for taking rows, as quantised ones may be."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.index_select, torch.Tensor.__getitem__):
            raise NotImplementedError(str(function))
        return super().__torch_function__(function, types, args, kwargs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Opaque, "its weight, of class Opaque, does not give its rows (NotImplementedError)"),
        (Apart, "its weight is not a matrix on this rank (it may be sharded)"),
    ],
)
def test_a_weight_that_gives_no_rows_is_missing_alone(kind, reason):
    model = PlainDecoder()
    model.head.weight = nn.Parameter(model.head.weight.detach().as_subclass(kind))
    seen = layers(model, batch())
    views = ("hidden", "token_ids", "positions", "sequences", "precision")
    assert seen["unembedding/0"].missing == dict.fromkeys(views, reason)
    assert seen["embedding/0"].missing == seen["/3"].missing == {}


def test_what_an_adapter_adds_to_a_matrix_is_said():
    class Beside(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.more = base, nn.Parameter(torch.ones(2))
            self.in_features, self.out_features = base.in_features, base.out_features

        def forward(self, x):
            return self.base(x) * self.more.sum()

    model = PlainDecoder()
    asked = {"metrics": select("variance"), "extra_layers": ("unembedding",)}
    assert not any("adapter" in note for note in measure(model, batch(), **asked).notes)
    model.head = Beside(model.head)
    assert any(
        "unembedding: these are the rows" in note for note in measure(model, batch(), **asked).notes
    )
    plain = measure(model, batch(), metrics=select("variance"))
    assert not any("adapter" in note for note in plain.notes)


@pytest.mark.parametrize("calls", [True, False])
def test_token_ids_are_known_where_something_around_the_table_takes_them(calls):
    class Around(nn.Module):
        """Trains some rows of a table apart, and may never call it."""

        def __init__(self, table):
            super().__init__()
            self.table, self.more = table, nn.Parameter(torch.zeros(table.embedding_dim))

        def forward(self, ids):
            if calls:
                return self.table(ids) + self.more
            return nn.functional.embedding(ids, self.table.weight + self.more)

    model = PlainDecoder()
    model.tokens = Around(model.tokens)
    seen = layers(model, batch(), extra=())["/1"].captured
    assert torch.equal(seen["token_ids"], batch()[seen["sequences"], seen["positions"]])
