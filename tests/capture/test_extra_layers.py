"""Layers that are no blocks: the final norm, and the two matrices."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

from geomon import Monitor, geometry, measure, select
from geomon.capture import extra_pass
from geomon.distributed import merge_layers
from support.models import PlainDecoder, Running, batch, run_blocks, transformer
from support.plain_models import encoder
from support.specimens import built
from support.watched import window
from support.zoo import ZOO

ANISOTROPY = select("anisotropy")


EXTRA = ("final_norm", "embedding", "unembedding")


def layers(model: nn.Module, inputs, extra=EXTRA, rows: int = 100_000) -> dict:
    views = {"hidden", "token_ids", "positions", "sequences"}
    seen = window(model, rows, views=views, extra_layers=extra)
    extra_pass(model, inputs, seen)
    return {f"{x.stack}/{x.index}": x for x in seen.snapshot().layers}


def of_transformers(name):
    """The states of a stack of transformers, and where they should be."""
    model, ids = transformer(name), batch()
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["attention_mask"][1, 20:] = 0
    states = model.eval()(**given, output_hidden_states=True).hidden_states
    return model, given, dict(zip(("/0", "/1", "/2", "final_norm/3"), states, strict=True))


def of_t5():
    """Each stack has its own final norm."""
    model, ids = built(ZOO["T5 (position bias)"], "sdpa"), batch().clamp(min=1)
    given = {"input_ids": ids, "decoder_input_ids": ids[:, :10]}
    whole = model(**given, output_hidden_states=True)
    return model, given, {
        "encoder.final_norm/2": whole.encoder_hidden_states[-1],
        "decoder.final_norm/3": whole.decoder_hidden_states[-1],
    }  # fmt: skip


def of_early_exits():
    """A norm that every block is read by is final behind the last, as one head for all layers."""

    def run(model, x):
        for block in model.blocks:
            x = block(x)
            model.kept = model.norm(x)
        return model.kept

    model = PlainDecoder(run=run, norm=nn.LayerNorm(32)).eval()
    model(batch())
    return model, batch(), {"final_norm/3": model.kept}


class FusedNorm(nn.LayerNorm):
    """A norm that hands its input on, as kernels do that add a residual."""

    def forward(self, x):
        return super().forward(x), x


def with_two_norms():
    """Two norms receive the last hidden states: the first one counts."""

    def run(model, x):
        model.kept, x = model.norm(run_blocks(model, x))
        return model.kept + model.other(x)

    norm, other = FusedNorm(32), nn.LayerNorm(32, elementwise_affine=False)
    nn.init.constant_(norm.weight, 3.0)
    model = PlainDecoder(run=run, norm=norm, other=other).eval()
    model(batch())
    return model, batch(), {"final_norm/3": model.kept}


def of_torch(batch_first):
    model = encoder(norm_first=True, batch_first=batch_first).eval()
    model.norm, x = nn.LayerNorm(32), torch.randn(5, 12, 32)
    states = model(x)
    return model, x, {"final_norm/3": states if batch_first else states.transpose(0, 1)}


MODELS = {
    **{name: functools.partial(of_transformers, name) for name in ("gpt2", "llama", "mistral")},
    "T5": of_t5, "early exits": of_early_exits, "two norms": with_two_norms,
    "torch": lambda: of_torch(batch_first=True),
    "torch, length first": lambda: of_torch(batch_first=False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_final_norm_is_what_the_model_computes(name):
    model, given, expected = MODELS[name]()
    found = layers(model, given)
    for place, states in expected.items():
        seen = found[place].captured
        rows = states.detach()[seen["sequences"], seen["positions"]]
        torch.testing.assert_close(seen["hidden"], rows, atol=1e-5, rtol=0)
        padded = isinstance(given, dict) and "attention_mask" in given
        assert len(rows) == (given["attention_mask"].sum() if padded else states[..., 0].numel())


def norm_of_something_else():
    """Frees what the last block gave, and norms another tensor of its shape, at its address."""

    def run(model, x):
        x = model.dense(run_blocks(model, x))
        x = nn.functional.gelu(x)
        return model.norm(x * 2)

    return PlainDecoder(run=run, dense=nn.Linear(32, 32), norm=nn.LayerNorm(32))


@pytest.mark.parametrize(
    "model",
    [lambda: transformer("bert"), PlainDecoder, norm_of_something_else],
    ids=["blocks that end in a norm", "no norm", "norm of something else"],
)
def test_a_model_without_a_final_norm_says_why(model):
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


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["embedding"], "embedding: no embedding table was found outside"),
        ("unembedding", "one output for each row of an embedding table"),
    ],
)
def test_a_model_without_the_matrices_says_so(extra, words):
    with pytest.raises(RuntimeError, match=words):
        measure(encoder(), torch.randn(4, 8, 32), metrics=ANISOTROPY, extra_layers=extra)


def test_several_ranks_take_a_matrix_once():
    model, ids = PlainDecoder(), batch()
    one = layers(model, ids, rows=20)["embedding/0"]
    other = dataclasses.replace(one, captured={}, missing={"hidden": "why"})
    for parts in ([one, one], [other, one]):
        assert torch.equal(merge_layers(parts).captured["hidden"], one.captured["hidden"])


def test_names_are_checked():
    for given, words in (["normed"], "got 'normed'"), ([3], "got 3"), ("norm", "got 'norm'"):
        with pytest.raises(ValueError, match=f"final_norm, embedding, unembedding, {words}"):
            Monitor(PlainDecoder(), directory=None, extra_layers=given)


def test_matrices_of_a_model_that_was_not_run_are_not_measured():
    with window(PlainDecoder(), views={"hidden"}, extra_layers=EXTRA) as seen:
        pass
    last = seen.snapshot().layers[-1]
    assert (last.stack, last.index, last.captured) == ("final_norm", 3, {})
    assert "not run while the window was open" in last.missing["hidden"]


class Apart(torch.Tensor):
    """A weight that ranks share out."""

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


def test_the_share_of_an_adapter_in_a_matrix_is_noted():
    def beside(base):
        """Around a matrix, and of its widths."""
        widths = {"in_features": base.in_features, "out_features": base.out_features}
        more = nn.Parameter(torch.ones(2))
        return Running(lambda m, x: m.base(x) * m.more.sum(), base=base, more=more, **widths)

    model = PlainDecoder()
    asked = {"metrics": select("variance"), "extra_layers": ("unembedding",)}
    assert not any("adapter" in note for note in measure(model, batch(), **asked).notes)
    model.head = beside(model.head)
    assert any(
        "unembedding: these are the rows" in note for note in measure(model, batch(), **asked).notes
    )
    plain = measure(model, batch(), metrics=select("variance"))
    assert not any("adapter" in note for note in plain.notes)


@pytest.mark.parametrize("calls", [True, False])
def test_token_ids_are_known_where_something_around_the_table_takes_them(calls):
    def around(m, ids):
        """Trains some rows of a table apart, and may never call it."""
        if calls:
            return m.table(ids) + m.more
        return nn.functional.embedding(ids, m.table.weight + m.more)

    model = PlainDecoder()
    model.tokens = Running(around, table=model.tokens, more=nn.Parameter(torch.zeros(32)))
    seen = layers(model, batch(), extra=())["/1"].captured
    assert torch.equal(seen["token_ids"], batch()[seen["sequences"], seen["positions"]])
