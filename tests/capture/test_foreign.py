"""What code that nobody here wrote does in its blocks: seen as it is, and left as it is."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from geomon import Monitor, describe, every, measure

HEADS, WIDTH, LENGTH = 4, 32, 16


def by_head(values):
    return values.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Block(nn.Module):
    """Attends causally, and keeps the queries and keys that it attends with."""

    def __init__(self):
        super().__init__()
        self.norm, self.num_heads = nn.LayerNorm(WIDTH), HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def queries_and_keys(self, y):
        return self.q_proj(y), self.k_proj(y)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def branch(self, x):
        y = self.norm(x)
        self.q, self.k = self.queries_and_keys(y)
        mixed = self.attend(by_head(self.q), by_head(self.k), by_head(self.v_proj(y)))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        return x + self.branch(x)


class Model(nn.Module):
    def __init__(self, kind=Block, blocks=3):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.final_norm = nn.Embedding(100, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(blocks))

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids):
        return self.final_norm(self.run(self.embed(ids)))


def ids(sequences=8):
    return torch.randint(100, (sequences, LENGTH), generator=torch.Generator().manual_seed(1))


def by_layer(values, metric, layers=3):
    return [values.get(f"{metric}/layer_{layer:02d}") for layer in range(1, layers + 1)]


# -- what is asked of modules ----------------------------------------------------------------------


def trained(build, directory):
    """Losses and buffers of some steps of which each is read, or none."""
    torch.manual_seed(0)
    model = build()
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    monitor = None if directory is None else Monitor(model, directory=directory, schedule=every(1))
    for step in range(3):
        x = torch.randn(4, LENGTH, WIDTH)
        with contextlib.nullcontext() if monitor is None else monitor(step):
            loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if monitor is not None:
        monitor.close()
    return losses, [buffer.clone() for buffer in model.buffers()]


class Counting(nn.Module):
    """A parametrisation that is another one at each access."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, weight):
        self.count += self.training
        return weight * (1 + 0.01 * self.count)


class Asked(nn.Module):
    """A projection whose weight is a property that counts how often it is asked for."""

    def __init__(self, given, made):
        super().__init__()
        self.kept = nn.Parameter(torch.randn(made, given) / given**0.5)
        self.register_buffer("count", torch.zeros(()))

    @property
    def weight(self):
        return self.kept * (1 + 0.01 * self.count.add_(1))

    def forward(self, x):
        return F.linear(x, self.weight)


def encoder(change):
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, dropout=0.0), 2
    )
    for layer in model.layers:
        change(layer)
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: encoder(lambda layer: spectral_norm(layer.linear1)),
        lambda: encoder(lambda layer: spectral_norm(layer.self_attn, "in_proj_weight")),
        lambda: encoder(
            lambda layer: parametrize.register_parametrization(layer.linear2, "weight", Counting())
        ),
        lambda: encoder(lambda layer: setattr(layer, "linear1", Asked(WIDTH, 64))),
    ],
)
def test_weights_that_change_when_they_are_asked_for_are_not_asked_for(build, tmp_path):
    (losses, buffers), (others, watched) = trained(build, None), trained(build, tmp_path)
    assert losses == others
    assert all(map(torch.equal, buffers, watched))
    assert buffers


class Refusing:
    """A config that raises what it likes for what differs between the layers."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"{name} differs between the layers")


@pytest.mark.parametrize("place", ["block", "model"])
def test_a_config_may_raise_any_error(place):
    model = Model()
    for module in (model,) if place == "model" else model.layers:
        module.config = Refusing()
    for layer in model.layers:
        del layer.num_heads
    assert "3 blocks" in str(describe(model))
    values = measure(model, ids(), metrics=["qk_cosine", "mean_square_norm"])
    assert f"qk_cosine/layer_01/head_{HEADS - 1}" in values
    assert f"qk_cosine/layer_01/head_{HEADS}" not in values


# -- what a block returns --------------------------------------------------------------------------


WRAPPED = {
    "tuple in a tuple": (lambda x, mask: ((x, None), mask), lambda state: state[0][0]),
    "dict in a tuple": (lambda x, mask: (mask, {"hidden": x}), lambda state: state[1]["hidden"]),
    "list in a dict": (lambda x, mask: {"of": [mask, x]}, lambda state: state["of"][1]),
}


@pytest.mark.parametrize("way", WRAPPED)
def test_hidden_states_are_found_however_deep_they_lie(way):
    wrap, unwrap = WRAPPED[way]

    class Wrapping(Block):
        def forward(self, state):
            x = super().forward(unwrap(state))
            self.norms = x.detach().square().sum(-1).mean().item()
            return wrap(x, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    class Wrapped(Model):
        def run(self, x):
            return unwrap(super().run(wrap(x, torch.ones(1, 1, dtype=torch.bool))))

    model = Wrapped(Wrapping)
    values = measure(model, ids(), metrics=["mean_square_norm"])
    model(ids())
    assert by_layer(values, "mean_square_norm") == pytest.approx([x.norms for x in model.layers])
    assert list(values.notes) == []


# -- what runs beside ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("within", [False, True])
def test_a_frozen_encoder_keeps_its_fused_path(within, tmp_path):
    """It leaves zeros where there is padding, which a student learns from."""
    student, teacher = encoder(lambda layer: None), encoder(lambda layer: None).eval()
    x = torch.randn(4, LENGTH, WIDTH)
    padding = (torch.arange(LENGTH) >= torch.tensor([9, 5, 7, 8])[:, None]).expand(4, LENGTH)

    def step():
        with torch.no_grad():
            return teacher(x, src_key_padding_mask=padding)

    plain = step()
    assert not plain[padding[:, : plain.shape[1]]].any()
    watched = teacher if within else student
    with Monitor(watched, directory=tmp_path, schedule=every(1))(0):
        found = step()
        if not within:
            student(x)
    assert found.shape == plain.shape
    assert torch.equal(found, plain)
    with Monitor(watched, directory=tmp_path / "probe", schedule=every(1)) as monitor:
        values = monitor.probe(0, {"src": x, "src_key_padding_mask": padding})
        assert values is None or "attention_entropy/mean" in values.values
    assert torch.equal(step(), plain)
