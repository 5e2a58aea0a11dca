"""What code that nobody here wrote does in its blocks: seen as it is, and left as it is."""

import contextlib
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from geomon import Monitor, describe, every, measure, read

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
    """Runs its blocks one after another, or as a function of the model and of its input says."""

    def __init__(self, kind=Block, blocks=3, run=None):
        super().__init__()
        self.way = run
        torch.manual_seed(0)
        self.embed, self.final_norm = nn.Embedding(100, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(blocks))

    def run(self, x):
        if self.way is not None:
            return self.way(self, x)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids):
        return self.final_norm(self.run(self.embed(ids)))


def norms_of(kept):
    return [x.detach().double().square().sum(-1).mean().item() for x in kept]


def keeping(model, layers=None):
    """What the blocks of a model return from here on, in order."""
    kept = []
    for layer in layers or model.layers:
        layer.register_forward_hook(lambda module, given, out: kept.append(out))
    return kept


def read_of(model, directory, inputs=None):
    """The reading of one step with gradients, and the words of its notes."""
    with Monitor(model, directory=directory, schedule=every(1), sinks=[]) as monitor, monitor(0):
        model(ids() if inputs is None else inputs).sum().backward()
    (reading,) = read(directory)
    return reading, [note.words() for note in reading.notes]


def by_head_of(values, metric, layer):
    return [values[f"{metric}/layer_{layer:02d}/head_{head}"] for head in range(HEADS)]


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
    values = measure(model, ids(), metrics=["mean_square_norm"], tokens=ids().numel())
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
        monitor.probe(0, {"src": x, "src_key_padding_mask": padding})
    assert "attention_entropy/mean" in read(tmp_path / "probe")[0].values
    reading = read(tmp_path)[0]
    hidden = [note for note in reading.notes if "measure by a probe" in note.words()]
    assert bool(hidden) == within
    assert not any("watching a call failed" in note.words() for note in reading.notes)
    assert all(math.isfinite(x) for x in reading.column("weight_norm").layers[1:])
    assert torch.equal(step(), plain)


# -- which attention is the block's ----------------------------------------------------------------


def causal(scores):
    return scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)


def weights_of(q, k):
    return causal(q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


class Attention(Block):
    """An attention alone, without its residual."""

    def __init__(self, *, by_hand):
        super().__init__()
        self.by_hand = by_hand

    def attend(self, q, k, v):
        self.weights = weights_of(q, k)
        return self.weights @ v if self.by_hand else super().attend(q, k, v)

    def forward(self, x):
        return self.branch(x)


def over_states(block, states):
    """[batch, token, 2, width]: each token asks its own two states."""
    asks = block.asks.expand(*states.shape[:2], -1, -1)
    return F.scaled_dot_product_attention(asks, states, states)[..., 0, :]


def over_projected_states(block, states):
    q, k = block.one(states[..., 1:, :]), block.other(states)
    return F.scaled_dot_product_attention(q, k, states)[..., 0, :]


def over_all_tokens(block, states):
    """Not over depth: over all tokens, from outside the attention's own module."""
    x = states[..., 1, :]
    q, k = (by_head(each(x)) for each in (block.one, block.other))
    return F.scaled_dot_product_attention(q, k, by_head(x)).transpose(1, 2).flatten(2)


def by_hand_over_all_tokens(block, states):
    x = states[..., 1, :]
    return (block.one(x) @ block.other(x).mT).softmax(-1) @ x


def over_some_tokens(block, states):
    """By an operator whose queries are other tokens than those of the block: it is refused."""
    rows = torch.cat([states[..., 1, :]] * 2).flatten(0, 1).unflatten(-1, (HEADS, -1))
    ends = torch.tensor([0, len(rows)], dtype=torch.int32)
    mixed = unpadded(rows.relu(), rows, rows, ends, ends, True)
    return mixed[: len(rows) // 2].flatten(1).view(states[..., 1, :].shape)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    "mix",
    [
        over_states,
        over_projected_states,
        over_all_tokens,
        by_hand_over_all_tokens,
        over_some_tokens,
    ],
)
def test_attention_outside_the_block_s_own_module_is_not_taken_for_it(mix, by_hand, before):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention(by_hand=by_hand)
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.asks = nn.Parameter(torch.randn(1, WIDTH))

        def forward(self, x):
            if before:
                x = x + mix(self, torch.stack([x, x], dim=-2))
            y = x + self.attention(x)
            return y if before else y + mix(self, torch.stack([x, y], dim=-2))

    model = Model(Mixing)
    values = measure(model, ids(), metrics=["attention_entropy", "qk_cosine", "max_logit"])
    model(ids())
    assert not any(f"head_{HEADS}" in name for name in values)
    for number, layer in enumerate(model.layers, 1):
        own = layer.attention
        entropy = torch.special.entr(own.weights.double()).sum(-1).mean((0, 2))
        means = (by_head(each).detach().double().mean((0, 2)) for each in (own.q, own.k))
        cosines = F.cosine_similarity(*means, dim=1)
        scores = causal(by_head(own.q) @ by_head(own.k).mT / (WIDTH // HEADS) ** 0.5)
        largest = scores.amax((0, 2, 3))
        for metric, right in (
            ("attention_entropy", entropy), ("qk_cosine", cosines), ("max_logit", largest),
        ):  # fmt: skip
            assert by_head_of(values, metric, number) == pytest.approx(right.tolist(), abs=1e-5)


def straight_through(weights):
    hard = F.one_hot(weights.argmax(-1), weights.shape[-1]).to(weights.dtype)
    return hard + weights - weights.detach()


def scattered(weights):
    top = weights.topk(2, dim=-1)
    return torch.zeros_like(weights).scatter(-1, top.indices, top.values)


USES = {
    "straight through": (straight_through, True),
    "one-hot alone": (lambda w: F.one_hot(w.argmax(-1), w.shape[-1]).to(w.dtype), True),
    "the largest two": (scattered, True),
    "sharpened": (lambda w: w**2 / (w**2).sum(-1, keepdim=True), True),
    "mixed over heads": (lambda w: torch.einsum("hg,bhqk->bgqk", torch.eye(HEADS) + 0.1, w), False),
    "as they are": (lambda w: w, False),
    "in half precision and back": (lambda w: w.half().float(), False),
    "with dropout": (lambda w: F.dropout(w, 0.1), False),
    "hidden again": (lambda w: w.masked_fill(torch.eye(LENGTH).triu(1).bool(), 0), False),
    "by a mask of heads": (lambda w: w * torch.ones(HEADS, 1, 1), False),
    "without NaN": (torch.nan_to_num, False),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("use", USES)
def test_weights_that_are_changed_before_they_are_used_are_said(use, grad, tmp_path):
    change, is_said = USES[use]

    class Changing(Block):
        def attend(self, q, k, v):
            return change(weights_of(q, k)) @ v

    model = Model(Changing)
    if grad:
        _, notes = read_of(model, tmp_path)
    else:
        notes = list(measure(model, ids(), metrics=["attention_entropy"]).notes)
    assert any("changes the softmax weights" in note for note in notes) == is_said, notes


@torch.library.custom_op("geomon_tests::unpadded", mutates_args=())
def unpadded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, causal: bool,
) -> torch.Tensor:  # fmt: skip
    """Attention of sequences behind one another, [tokens, heads, width], as FlashAttention's."""
    out = torch.empty_like(q)
    for start, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        one = (x[start:end].transpose(0, 1) for x in (q, k, v))
        out[start:end] = F.scaled_dot_product_attention(*one, is_causal=causal).transpose(0, 1)
    return out


@pytest.mark.parametrize("early", [False, True], ids=["heads unpadded", "tokens unpadded"])
def test_attention_without_padding_is_that_of_the_tokens(early):
    """Padding is taken out of queries and keys, or of what is projected to them."""
    mask = torch.arange(LENGTH) < torch.tensor([16, 9, 12, 5, 16, 7, 3, 11])[:, None]
    ends = F.pad(mask.sum(1).cumsum(0), (1, 0)).int()

    class Unpadded(Block):
        packs = False

        def branch(self, x):
            if not self.packs:
                return super().branch(x)
            y = self.norm(x)
            where = mask.flatten().nonzero().squeeze(1)
            rows = y.flatten(0, 1)[where] if early else y
            parts = [p(rows) for p in (self.q_proj, self.k_proj, self.v_proj)]
            parts = [(p if early else p.flatten(0, 1)[where]).unflatten(-1, (HEADS, -1))
                     for p in parts]  # fmt: skip
            mixed = unpadded(*parts, ends, ends, True)
            out = torch.zeros(mask.numel(), WIDTH).index_copy(0, where, mixed.flatten(1))
            return self.o_proj(out.view(x.shape))

        def attend(self, q, k, v):
            seen = mask[:, None, None] & torch.ones(LENGTH, LENGTH).tril().bool()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    class Padded(Model):
        def forward(self, ids, attention_mask=None):
            return super().forward(ids)

    model = Padded(Unpadded)
    metrics = ["attention_entropy", "qk_cosine", "query_mean_norm", "mean_square_norm"]
    batch = {"ids": ids(), "attention_mask": mask}
    expected = measure(model, batch, metrics=metrics)
    Unpadded.packs = True
    found = measure(model, batch, metrics=metrics)
    # Queries in one row have no sequences that a margin could leave out.
    without = {name for name in expected if re.fullmatch("attention_entropy.*margin", name)}
    assert found.keys() == expected.keys() - without
    right = {name: expected[name] for name in found}
    assert {name: found[name] for name in found} == pytest.approx(right, abs=1e-4, rel=1e-4)


# -- what stands between blocks --------------------------------------------------------------------


class Looped(Model):
    """Runs its blocks again and again, each time on what they made and on the first input."""

    class Core(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def __init__(self):
        super().__init__()
        self.core = self.Core(self.layers)
        del self.layers

    def run(self, x):
        first = x
        for _ in range(4):
            x = self.core(self.final_norm(x + first))
        return x


@pytest.mark.parametrize("grad", [False, True])
def test_each_call_of_blocks_in_a_loop_is_a_layer(grad, tmp_path):
    model = Looped()
    kept = keeping(model, model.core.layers)
    if grad:
        reading, notes = read_of(model, tmp_path)
        values = reading.values
    else:
        found = measure(model, ids(), metrics=["mean_square_norm", "attention_entropy"])
        values, notes = found, list(found.notes)
    assert by_layer(values, "mean_square_norm", 12) == pytest.approx(norms_of(kept), rel=1e-5)
    assert "attention_entropy/layer_12/head_0" in values
    assert not any("ran 4 times" in note or "something other" in note for note in notes)
    alone = measure(model, ids(), metrics=["mean_square_norm"])
    assert any("the blocks ran 4 times: the first" in note for note in alone.notes)


def test_passes_on_inputs_of_their_own_are_counted_and_said():
    batch = {"one": ids(), "other": ids(3)}
    model, wrapped = Model(), nn.Module()
    wrapped.encoder = model
    wrapped.forward = lambda one, other: model(one).mean() * model(other).mean()
    found = measure(wrapped, batch, metrics=["mean_square_norm", "attention_entropy"])
    expected = measure(model, ids(), metrics=["mean_square_norm", "attention_entropy"])
    assert by_layer(found, "mean_square_norm") == by_layer(expected, "mean_square_norm")
    assert any("the blocks ran 2 times: the first run is measured" in n for n in found.notes)
    assert not any("the blocks ran" in note for note in expected.notes)


@torch.no_grad()
def test_memory_that_is_used_again_is_no_loop():
    """Windows without attention see no operator: an address says nothing of what lies there."""

    class Again(Looped):
        def run(self, x):
            first = x.clone()
            for _ in range(2):
                made = self.core(x)
                x = made.copy_(first)
            return x

    found = measure(Again(), ids(), metrics=["mean_square_norm"])
    assert by_layer(found, "mean_square_norm", 4)[3] is None
    assert any("the blocks ran 2 times" in note for note in found.notes)


RESIDUALS = {
    "sum": lambda x, y: x + y,
    "branch first": lambda x, y: y + x,
    "dropout": lambda x, y: x + F.dropout(y, 0.1),
    "scaled": lambda x, y: 0.9 * x + 0.5 * y,
    "in place": lambda x, y: y.add_(x),
    "highway": lambda x, y: torch.lerp(x, y, 0.3),
}


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("way", RESIDUALS)
@torch.no_grad()
def test_a_sum_that_is_made_behind_a_block_is_the_layer(way, norm):
    class Branch(Block):
        def forward(self, x):
            return self.branch(x)

    kept = []

    class Outside(Model):
        def run(self, x):
            kept.clear()
            for layer in self.layers:
                x = RESIDUALS[way](x, layer(x))
                kept.append(x.clone())
            return x

        def forward(self, ids):
            x = self.run(self.embed(ids))
            return self.final_norm(x) if norm else F.layer_norm(x, (WIDTH,))

    model = Outside(Branch)
    torch.manual_seed(1)
    values = measure(model, ids(), metrics=["mean_square_norm", "attention_entropy"])
    found, right = by_layer(values, "mean_square_norm"), norms_of(kept)
    said = [note for note in values.notes if "added outside of them" in note]
    assert len(said) == 1
    assert found[:2] == pytest.approx(right[:2], rel=1e-5)
    assert (found[2] == pytest.approx(right[2], rel=1e-5)) == norm
    assert ("the last layer is the branch" in said[0]) != norm
    alone = measure(model, ids(), metrics=["mean_square_norm"])
    said = any("may be a branch without its residual" in note for note in alone.notes)
    assert said == (way != "in place")  # which no call shows


def test_a_pass_that_breaks_off_in_a_block_hides_nothing_of_the_next(tmp_path):
    class Breaking(Block):
        def forward(self, x):
            if model.breaks:
                raise RuntimeError("by design")
            return self.branch(x)

    class Outside(Model):
        def run(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    model = Outside(Breaking)
    model.breaks = True
    with Monitor(model, directory=tmp_path, schedule=every(1), sinks=[]) as monitor, monitor(0):
        with pytest.raises(RuntimeError, match="by design"):
            model(ids())
        model.breaks = False
        model(ids())
    (reading,) = read(tmp_path)
    expected = measure(model, ids(), metrics=["mean_square_norm", "attention_entropy"])
    found = by_layer(reading.values, "mean_square_norm")
    assert found == pytest.approx(by_layer(expected, "mean_square_norm"), rel=1e-5)


def merging(model, x):
    for layer in model.layers:
        x = layer(x)[:, ::2] * 1.0
    return x


def normed(model, x):
    for number, layer in enumerate(model.layers):
        x = model.final_norm(layer(x)) + 0.1 * number
    return x


def in_order(*order):
    def run(model, x):
        for number in order:
            x = model.layers[number](x)
        return x

    return run


def side_by_side(model, x):
    return x + sum(layer(x) for layer in model.layers)


# How blocks are run, and words of the only note on what stands between them.
RUNS = {
    "tokens are merged": (merging, None),
    "a norm, and numbers of each layer": (normed, None),
    "from the last on": (in_order(2, 1, 0), None),
    "from the second on": (in_order(1, 0, 2), None),
    "side by side": (side_by_side, "side by side"),
}


@pytest.mark.parametrize("way", RUNS)
def test_blocks_are_layers_as_they_are_called_and_what_is_no_residual_is_not_said(way):
    run, words = RUNS[way]
    model = Model(run=run)
    kept = keeping(model)
    metrics = ["mean_square_norm", "max_logit"]
    values = measure(model, ids(), metrics=metrics, tokens=ids().numel())
    assert by_layer(values, "mean_square_norm") == pytest.approx(norms_of(kept), rel=1e-5)
    said = [note for note in values.notes if "branch" in note or "side" in note]
    assert len(said) == (words is not None)
    assert not said or (words in said[0] and "added outside" not in said[0])


# -- classes of tensors ----------------------------------------------------------------------------


class Marked(torch.Tensor):
    """A tensor as others make them."""


class Tagged(torch.Tensor):
    @staticmethod
    def __new__(cls, values, tag):
        return super().__new__(cls, values)

    def __init__(self, values, tag):
        self.tag = tag


@pytest.mark.parametrize(
    "make",
    [
        lambda q: Marked(q).as_subclass(torch.Tensor),
        lambda q: q + Marked(q.tolist()).as_subclass(torch.Tensor) * 0,
        lambda q: q + 0 * Marked(*q.shape).as_subclass(torch.Tensor).fill_(1),
        lambda q: Tagged(q, "a").as_subclass(torch.Tensor),
        lambda q: q * nn.Parameter(torch.ones(())),
        lambda q: q.as_subclass(Marked).as_subclass(torch.Tensor),
    ],
)
def test_a_block_may_make_tensors_of_any_class(make, tmp_path):
    class Making(Block):
        def attend(self, q, k, v):
            bias = causal_lower_right(LENGTH, LENGTH)
            return F.scaled_dot_product_attention(make(q), k, v, attn_mask=bias)

    model = Model(Making)
    with torch.no_grad():
        plain = model(ids())
        with Monitor(model, directory=tmp_path, schedule=every(1), sinks=[]) as monitor, monitor(0):
            assert torch.equal(model(ids()), plain)
    values = read(tmp_path)[0].values
    for number, layer in enumerate(model.layers, 1):
        entropy = torch.special.entr(weights_of(by_head(layer.q), by_head(layer.k)).double())
        right = entropy.sum(-1).mean((0, 2)).tolist()
        assert by_head_of(values, "attention_entropy", number) == pytest.approx(right, abs=1e-5)
    assert "__new__" not in vars(torch.Tensor)


# -- keys of several sources -----------------------------------------------------------------------


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("behind", [False, True])
def test_keys_joined_to_those_of_the_tokens_are_left_out_and_padding_is_seen(by_hand, behind):
    """A decoder whose tokens attend to those of an encoder and to one another at once."""
    sizes = torch.tensor([16, 9, 12, 5, 16, 7, 3, 11])
    real = torch.arange(LENGTH) < sizes[:, None]
    others = torch.ones(8, 5, dtype=torch.bool)

    class Joined(Block):
        def __init__(self):
            super().__init__()
            self.memory_k, self.memory_v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, memory):
            self.memory = memory
            return super().forward(x)

        def attend(self, q, k, v):
            join = [self.memory_k(self.memory), self.memory_v(self.memory)]
            seen = real[:, None, None] & torch.ones(LENGTH, LENGTH).tril().bool()
            parts = [others[:, None, None].expand(-1, 1, LENGTH, -1), seen]
            order = slice(None, None, -1 if behind else 1)
            k, v = (torch.cat([by_head(m), own][order], 2)
                    for m, own in zip(join, (k, v), strict=True))  # fmt: skip
            mask = torch.cat(parts[order], dim=3)
            if by_hand:
                scores = q @ k.mT / q.shape[-1] ** 0.5
                return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    class Decoder(Model):
        def forward(self, ids, memory):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x, memory)
            return self.final_norm(x)

    model, kept = Decoder(Joined), []
    for layer in model.layers:
        layer.register_forward_hook(
            lambda module, given, out: kept.append([x[real] for x in (out, module.q, module.k)])
        )
    memory = torch.randn(8, 5, WIDTH)
    values = measure(
        model, {"ids": ids(), "memory": memory},
        metrics=["mean_square_norm", "qk_cosine", "attention_entropy"],
    )  # fmt: skip
    assert by_layer(values, "mean_square_norm") == pytest.approx(
        norms_of([out for out, *_ in kept]), rel=1e-5
    )
    assert any("keys belong to other tokens" in note for note in values.notes)
    for number, (_, *asked) in enumerate(kept, 1):
        means = (each.detach().unflatten(-1, (HEADS, -1)).double().mean(0) for each in asked)
        right = F.cosine_similarity(*means, dim=1).tolist()
        assert by_head_of(values, "qk_cosine", number) == pytest.approx(right, abs=1e-5)


# -- streams ---------------------------------------------------------------------------------------


LAYOUTS = {
    "behind tokens": (lambda x: x[:, :, None].repeat(1, 1, 4, 1), lambda x: x.mean(2), 2),
    "first": (lambda x: x.repeat(4, 1, 1, 1), lambda x: x.mean(0), 0),
    "beside sequences": (lambda x: x.repeat_interleave(4, 0),
                         lambda x: x.unflatten(0, (-1, 4)).mean(1), None),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_attention_of_one_of_several_streams_is_that_of_the_tokens(layout, by_hand):
    spread, join, dim = LAYOUTS[layout]
    entropies = []

    class Streamed(Block):
        def attend(self, q, k, v):
            weights = weights_of(q, k)
            entropies.append(torch.special.entr(weights.double()).sum(-1).mean((0, 2)).tolist())
            return weights @ v if by_hand else super().attend(q, k, v)

        def forward(self, x):
            made = self.branch(join(x))
            return x + (made.repeat_interleave(4, 0) if dim is None else made.unsqueeze(dim))

    class Model4(Model):
        def run(self, x):
            return join(super().run(spread(x)))

    values = measure(Model4(Streamed), ids(), metrics=["mean_square_norm", "attention_entropy"])
    for number, right in enumerate(entropies, 1):
        assert by_head_of(values, "attention_entropy", number) == pytest.approx(right, abs=1e-5)
