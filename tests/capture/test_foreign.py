"""Blocks with code that nobody here wrote are seen as they are, and left as they are."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from geomon import Monitor, describe, every, measure, read
from support.models import PlainDecoder, Running, batch, run_blocks
from support.watched import (
    Attention,
    Block,
    check_blocks,
    check_hidden,
    check_projected,
    check_same,
    look,
    notes,
    scores_of,
    states_of,
    window,
)

HEADS, WIDTH, LENGTH = 4, 32, 16
IDS = batch(8, LENGTH)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
LENGTHS = torch.tensor([16, 9, 12, 5, 16, 7, 3, 11])
REAL = torch.arange(LENGTH) < LENGTHS[:, None]
ROWS_ALONE = {"views": {"hidden"}}
MIX = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5


def causally(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def weights_of(q, k):
    return scores_of(q, k).masked_fill(~CAUSAL, -torch.inf).softmax(-1)


def by_hand(q, k, v):
    return weights_of(q, k) @ v


def by_head(values):
    return values.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def decoder(attend=causally, run=run_blocks, **parts):
    """A decoder whose head is a final norm."""
    torch.manual_seed(0)
    parts = {"block": lambda: Block(attend, WIDTH), "head": nn.LayerNorm(WIDTH), **parts}
    return PlainDecoder(run=run, **parts)


def branch():
    """A block without its residual."""
    norm, attention = nn.LayerNorm(WIDTH), Attention(causally, WIDTH)
    return Running(lambda m, x: m.attention(m.norm(x)), norm=norm, attention=attention)


# -- what is asked of modules ----------------------------------------------------------------------


class Refusing:
    """A config that raises what it likes for what differs between the layers."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(f"{name} differs between the layers")


@pytest.mark.parametrize("place", ["block", "model"])
def test_a_config_may_raise_any_error(place):
    model = decoder()
    for module in (model,) if place == "model" else model.blocks:
        module.config = Refusing()
    for block in model.blocks:
        del block.attention.num_heads
    assert "3 blocks" in str(describe(model))
    values = measure(model, IDS, metrics=["qk_cosine", "mean_square_norm"])
    assert f"qk_cosine/layer_01/head_{HEADS - 1}" in values
    assert f"qk_cosine/layer_01/head_{HEADS}" not in values


# -- what runs beside ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("within", [False, True])
def test_a_frozen_encoder_keeps_its_fused_path(within, tmp_path):
    """It leaves zeros where there is padding, which a student learns from."""
    student, teacher = (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, dropout=0.0), 2
        )
        for _ in range(2)
    )
    teacher.eval()
    given = {"src": torch.randn(8, LENGTH, WIDTH), "src_key_padding_mask": ~REAL}
    with torch.no_grad():
        plain = teacher(**given)
    assert not plain[~REAL[:, : plain.shape[1]]].any()
    watched = teacher if within else student
    with Monitor(watched, directory=tmp_path, schedule=every(1))(0):
        with torch.no_grad():
            found = teacher(**given)
        if not within:
            student(given["src"])
    assert torch.equal(found, plain)
    with Monitor(watched, directory=tmp_path / "probe", schedule=every(1)) as monitor:
        monitor.probe(0, given)
    assert "attention_entropy/mean" in read(tmp_path / "probe")[0].values
    (reading,) = read(tmp_path)
    assert any("measure by a probe" in note for note in reading.words()) == within
    assert all(math.isfinite(x) for x in reading.column("weight_norm").layers[1:])


# -- which attention is the block's ----------------------------------------------------------------


@torch.library.custom_op("geomon_tests::unpadded", mutates_args=())
def unpadded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, causal: bool,
) -> torch.Tensor:  # fmt: skip
    """Attention of sequences behind one another, [tokens, heads, width], as FlashAttention's."""
    parts = [x.split(cu_seqlens_q.diff().tolist()) for x in (q, k, v)]
    made = (
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in each), is_causal=causal)
        for each in zip(*parts, strict=True)
    )
    return torch.cat([x.transpose(0, 1) for x in made])


def over_some_tokens(m, states):
    """By an operator whose queries are other tokens than the block's: it is refused."""
    rows = torch.cat([states[..., 1, :]] * 2).flatten(0, 1).unflatten(-1, (HEADS, -1))
    ends = torch.tensor([0, len(rows)], dtype=torch.int32)
    mixed = unpadded(rows.relu(), rows, rows, ends, ends, True)
    return mixed[: len(rows) // 2].flatten(1).view(states[..., 1, :].shape)


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


# Other attentions in a block, to states [batch, token, 2, width].
MIXES = {
    "each token, its own states": lambda m, states: fused(
        m.asks.expand(*states.shape[:2], -1, -1), states, states
    )[..., 0, :],
    "each token, its own projected states": lambda m, states: fused(
        m.one(states[..., 1:, :]), m.other(states), states
    )[..., 0, :],
    "all tokens": lambda m, states: fused(
        *(by_head(make(states[..., 1, :])) for make in (m.one, m.other, nn.Identity()))
    ).transpose(1, 2).flatten(2),
    "all tokens, by hand": lambda m, states: (
        (m.one(states[..., 1, :]) @ m.other(states[..., 1, :]).mT).softmax(-1) @ states[..., 1, :]
    ),
    "some tokens": over_some_tokens,
}  # fmt: skip


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("attend", [causally, by_hand])
@pytest.mark.parametrize("mix", MIXES)
def test_attention_outside_the_block_s_own_module_is_not_taken_for_it(mix, attend, before):
    def mixing(m, x):
        if before:
            x = x + MIXES[mix](m, torch.stack([x, x], dim=-2))
        y = x + m.attention(x)
        return y if before else y + MIXES[mix](m, torch.stack([x, y], dim=-2))

    def block():
        one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        asks = nn.Parameter(torch.randn(1, WIDTH))
        own = Attention(attend, WIDTH)
        return Running(mixing, attention=own, one=one, other=other, asks=asks)

    model = decoder(block=block)
    seen = look(model, IDS)
    check_blocks(seen, model.blocks, CAUSAL)
    for layer, own in zip(seen.snapshot().layers[1:], model.blocks, strict=True):
        check_projected(layer, own.attention)


def test_attention_among_the_tokens_of_another_stream_is_the_block_s_own():
    """By hand, of a stream with other tokens than the hidden states that are measured."""
    x, others = torch.randn(8, LENGTH, WIDTH), torch.randn(8, 7, WIDTH)

    def block():
        return Running(
            lambda m, x, others: x + m.attention(others).mean(1, keepdim=True),
            attention=Attention(lambda q, k, v: scores_of(q, k).softmax(-1) @ v, WIDTH),
        )

    def run(model, x, others):
        for block in model.blocks:
            x = block(x, others)
        return x

    model = Running(run, blocks=nn.ModuleList(block() for _ in range(2)))
    seen = look(model, x, others)
    check_blocks(seen, model.blocks, torch.ones(7, 7, dtype=torch.bool))


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
    "in a buffer": (lambda w: torch.empty(w.shape).copy_(w), False),
    "with dropout of an accelerator": (lambda w: torch.native_dropout(w, 0.1, True)[0], False),
    "divided by a number of each head": (lambda w: w / torch.ones(HEADS, 1, 1), False),
    "chosen": (lambda w: torch.where(torch.ones(LENGTH, LENGTH).bool().tril(), w, 0.0), False),
    "joined": (lambda w: torch.cat([w[:, :1], w[:, 1:]], 1), False),
    "picked": (lambda w: w[:, torch.arange(HEADS)], False),
    "picked along a dimension": (lambda w: w.index_select(1, torch.arange(HEADS)), False),
    "widened and cut again": (lambda w: F.pad(w, (0, 1))[..., :-1], False),
    "repeated": (lambda w: w.repeat(1, 1, 1, 1), False),
    "without NaN, by where": (lambda w: torch.where(w.isnan(), torch.zeros_like(w), w), False),
    "without NaN, by a product": (lambda w: w * ~w.isnan(), False),
    "without NaN, in place": (lambda w: w.clone().index_put_((w.isnan(),), torch.zeros(())), False),
    "finite alone": (lambda w: torch.where(w.isfinite(), w, 0.0), False),
    "no number but itself": (lambda w: torch.where(w != w, 0.0, w), False),
    "above a number": (lambda w: torch.where(w > 0.2, w, 0.0), True),
    "at the largest": (lambda w: (w == w.amax(-1, keepdim=True)).to(w.dtype), True),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("use", USES)
def test_weights_that_are_changed_before_they_are_used_are_said(use, grad):
    change, is_said = USES[use]
    model = decoder(lambda q, k, v: change(weights_of(q, k)) @ v)
    with torch.set_grad_enabled(grad), window(model) as seen:
        model(IDS)
    assert any("changes the softmax weights" in note for note in notes(seen)) == is_said


@pytest.mark.parametrize(("change", "is_said"), [USES["as they are"], USES["sharpened"]])
def test_a_derivative_of_the_weights_is_no_change_of_them(change, is_said):
    model = decoder(lambda q, k, v: change(weights_of(q, k)) @ v)
    x = torch.randn(8, LENGTH, WIDTH)
    with window(model) as seen:
        torch.func.jvp(lambda x: run_blocks(model, x), (x,), (torch.ones_like(x),))
    assert any("changes the softmax weights" in note for note in notes(seen)) == is_said


def test_the_weights_of_another_softmax_are_not_those_of_attention():
    def by_logarithm(q, k, v):
        mixed = scores_of(q, k).log_softmax(-1).exp() @ v
        rows = mixed.transpose(1, 2).flatten(2)
        return mixed + by_head(rows.softmax(-1).square() @ rows.mT @ rows)

    assert notes(look(decoder(by_logarithm), IDS)) == []


# Numbers made of all queries.
NUMBERS = {
    "a number added": lambda q: q.abs().amax() + 1e-6,
    "two added": lambda q: q.amax() + q.amax(),
    "a parameter added": lambda q: q.square().sum() + torch.ones((), requires_grad=True),
    "joined": lambda q: torch.stack([q.amax(), q.amin()]).mean() + 9,
    "chosen": lambda q: torch.where(q.mean() > 0, q.amax(), q.amin()) + 9,
}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_tensor_of_no_dimension_is_followed_as_any_other(number):
    model = decoder(lambda q, k, v: by_hand(q / NUMBERS[number](q), k, v))
    seen = look(model, IDS)
    assert notes(seen) == []
    for layer, block in zip(seen.snapshot().layers[1:], model.blocks, strict=True):
        check_projected(layer, block.attention)


@pytest.mark.parametrize("early", [False, True], ids=["heads unpadded", "tokens unpadded"])
def test_attention_without_padding_is_that_of_the_tokens(early):
    """Padding is taken out of queries and keys, or of the rows that are projected to them."""
    ends = F.pad(LENGTHS.cumsum(0), (1, 0)).int()
    where = REAL.flatten().nonzero().squeeze(1)

    def branch(m, x):
        rows = x.flatten(0, 1)[where] if early else x
        parts = [make(rows) for make in (m.q_proj, m.k_proj, m.v_proj)]
        parts = parts if early else [part.flatten(0, 1)[where] for part in parts]
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in parts)
        m.query, m.key = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
        mixed = unpadded(q, k, v, ends, ends, True).flatten(1)
        return torch.zeros(REAL.numel(), WIDTH).index_copy(0, where, mixed).view(x.shape)

    def block():
        made = Block(causally, WIDTH)
        made.attention.forward = branch.__get__(made.attention)
        return made

    body = decoder(block=block)
    model = Running(lambda m, ids, attention_mask: m.body(ids), body=body)
    numbers = torch.arange(8).repeat_interleave(LENGTHS)
    order = torch.arange(len(where))
    seen = look(model, IDS, attention_mask=REAL)
    check_blocks(seen, body.blocks, (numbers == numbers[:, None]) & (order <= order[:, None]))
    states = states_of(model, IDS, REAL, blocks=body.blocks)
    for layer, state in zip(seen.snapshot().layers, states, strict=True):
        place = layer.captured["sequences"], layer.captured["positions"]
        assert torch.equal(layer.captured["hidden"], state[place])
        assert len(place[0]) == REAL.sum()
    for layer, block in zip(seen.snapshot().layers[1:], body.blocks, strict=True):
        for which in ("query", "key"):
            rows = getattr(block.attention, which)[0].transpose(0, 1)
            places = LENGTH * layer.captured[f"{which}_sequences"] + layer.captured["positions"]
            assert torch.equal(layer.captured[f"projected_{which}"][places.argsort()], rows)


# -- what stands between blocks --------------------------------------------------------------------


def looped(times=4):
    """Runs its blocks again and again, each time on what they made and on the first input."""

    def run(model, x):
        first = x
        for _ in range(times):
            x = model.core(model.norm(x + first))
        return x

    core = Running(run_blocks, blocks=decoder().blocks)
    return decoder(run=run, layers=0, core=core, norm=nn.LayerNorm(WIDTH))


@pytest.mark.parametrize("grad", [False, True])
def test_each_call_of_blocks_in_a_loop_is_a_layer(grad):
    model = looped()
    with torch.set_grad_enabled(grad), window(model) as seen:
        model(IDS)
    made = [x for n, x in enumerate(states_of(model, IDS, blocks=model.core.blocks)) if n % 4]
    assert len(seen.snapshot().layers) == 13
    for depth, state in enumerate(made, 1):
        check_hidden(seen, depth, state)
        assert "query" in seen.snapshot().layers[depth].captured
    assert not any("ran 4 times" in note or "something other" in note for note in notes(seen))
    alone = look(model, IDS, options=ROWS_ALONE)
    assert any("the blocks ran 4 times: the first" in note for note in notes(alone))


def test_passes_on_inputs_of_their_own_are_counted_and_said():
    model = decoder()
    two = Running(lambda m, one, other: m.encoder(one).mean() * m.encoder(other).mean(),
                  encoder=model)  # fmt: skip
    found, expected = look(two, IDS, IDS[:3]), look(model, IDS)
    check_same(found.snapshot(), expected.snapshot())
    assert any("the blocks ran 2 times: the first run is measured" in n for n in notes(found))
    assert not any("the blocks ran" in note for note in notes(expected))


def test_memory_that_is_used_again_is_no_loop():
    """Windows without attention see no operator: an address does not tell whose rows lie there."""

    def again(core, x):
        first = x.clone()
        return core(core(x).copy_(first)).copy_(first)

    core = Running(run_blocks, blocks=decoder().blocks)
    model = decoder(run=lambda model, x: again(model.core, x), layers=0, core=core)
    seen = look(model, IDS, options=ROWS_ALONE)
    assert len(seen.snapshot().layers) == 4
    assert any("the blocks ran 2 times" in note for note in notes(seen))


RESIDUALS = {
    "sum": lambda x, y: x + y,
    "branch first": lambda x, y: y + x,
    "dropout": lambda x, y: x + F.dropout(y, 0.1),
    "scaled": lambda x, y: 0.9 * x + 0.5 * y,
    "in place": lambda x, y: y.add_(x),
    "highway": lambda x, y: torch.lerp(x, y, 0.3),
    "projected branch": lambda x, y: x + F.linear(y, MIX),
    "branch through a function": lambda x, y: x + F.gelu(y),
    "normed branch": lambda x, y: x + F.layer_norm(y, (WIDTH,)),
    "norm after": lambda x, y: F.layer_norm(x + y, (WIDTH,)),
    "dropped at random": lambda x, y: torch.where(REAL[..., None], x + y, x),
}


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("way", RESIDUALS)
@torch.no_grad()
def test_a_sum_that_is_made_behind_a_block_is_the_layer(way, norm):
    sums = []

    def run(model, x):
        for block in model.blocks:
            x = RESIDUALS[way](x, block(x))
            sums.append(x.clone())
        return x

    parts = {} if norm else {"head": nn.Identity()}
    model = decoder(run=run, block=branch, **parts)
    with window(model) as seen:
        model(IDS)
    check_hidden(seen, 1, sums[0])
    check_hidden(seen, 2, sums[1])
    last = seen.snapshot().layers[3].captured
    found, right = last["hidden"], sums[2][last["sequences"], last["positions"]]
    assert torch.equal(found, right) == norm
    (said,) = [note for note in notes(seen) if "added outside of them" in note]
    assert ("the last layer is the branch" in said) != norm
    with window(model, **ROWS_ALONE) as alone:
        model(IDS)
    said = any("may be a branch without its residual" in note for note in notes(alone))
    assert said == (way != "in place")  # which no call shows


def test_a_pass_that_breaks_off_in_a_block_hides_nothing_of_the_next():
    def run(model, x):
        for block in model.blocks:
            x = x + block(x)
        return x

    model = decoder(run=run, block=branch)
    expected = look(model, IDS).snapshot()
    handle = model.blocks[1].register_forward_pre_hook(lambda *call: 1 / 0)
    with window(model) as seen:
        with pytest.raises(ZeroDivisionError):
            model(IDS)
        handle.remove()
        model(IDS)
    check_same(seen.snapshot(), expected)


def merging(model, x):
    for block in model.blocks:
        x = block(x)[:, ::2] * 1.0
    return x


def normed(model, x):
    for number, block in enumerate(model.blocks):
        x = model.head(block(x)) + 0.1 * number
    return x


def with_skip(join):
    """Each block but the first gets the last one's output, the last one joined to its input."""

    def run(model, x):
        first, second, third = model.blocks
        skip = first(x)
        return third(join(second(skip), skip))

    return run


SKIPS = {
    "concatenated": lambda x, skip: F.linear(torch.cat([x, skip], -1), torch.cat([MIX, MIX], 1)),
    "added": lambda x, skip: x + skip,
    "added as projected": lambda x, skip: x + F.linear(skip, MIX),
    "projected together": lambda x, skip: F.linear(x + skip, MIX),
    "gated": lambda x, skip: skip * F.linear(x, MIX).sigmoid(),
    "chosen": lambda x, skip: torch.where(REAL[..., None], x, skip),
}
# How blocks are run, and words of the only note on what stands between them.
RUNS = {
    "tokens are merged": (merging, None),
    "a norm, and numbers of each layer": (normed, None),
    "from the last on": (lambda m, x: m.blocks[0](m.blocks[1](m.blocks[2](x))), None),
    "from the second on": (lambda m, x: m.blocks[2](m.blocks[0](m.blocks[1](x))), None),
    "side by side": (lambda m, x: x + sum(block(x) for block in m.blocks), "side by side"),
    **{f"a skip, {way}": (with_skip(join), None) for way, join in SKIPS.items()},
}


@pytest.mark.parametrize("way", RUNS)
def test_blocks_are_layers_as_they_are_called_and_what_is_no_residual_is_not_said(way):
    run, words = RUNS[way]
    model = decoder(run=run)
    seen = look(model, IDS)
    states = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, given, out: states.append(out))
    model(IDS)
    for depth, state in enumerate(states, 1):
        check_hidden(seen, depth, state)
    said = [note for note in notes(seen) if "branch" in note or "side" in note]
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
def test_a_block_may_make_tensors_of_any_class(make):
    def making(q, k, v):
        bias = causal_lower_right(LENGTH, LENGTH)
        return F.scaled_dot_product_attention(make(q), k, v, attn_mask=bias)

    model = decoder(making)
    check_blocks(look(model, IDS), model.blocks, CAUSAL)
    assert "__new__" not in vars(torch.Tensor)


# -- keys of several sources -----------------------------------------------------------------------


@pytest.mark.parametrize("attend", [fused, by_hand])
@pytest.mark.parametrize("behind", [False, True])
def test_keys_joined_to_those_of_the_tokens_are_left_out_and_padding_is_seen(attend, behind):
    """A decoder whose tokens attend to an encoder's and to one another at once."""
    others, memory = nn.Linear(WIDTH, 2 * WIDTH), torch.randn(8, 5, WIDTH)
    order = slice(None, None, -1 if behind else 1)
    parts = [torch.ones(8, 1, LENGTH, 5, dtype=torch.bool), REAL[:, None, None] & CAUSAL]
    mask = torch.cat(parts[order], dim=3)

    def joined(q, k, v):
        made = map(by_head, others(memory).chunk(2, dim=-1))
        k, v = (torch.cat([one, own][order], 2) for one, own in zip(made, (k, v), strict=True))
        if attend is by_hand:
            return scores_of(q, k).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def run(model, x):
        for block in model.blocks:
            x = block(x, memory)
        return x

    def block():
        return Running(lambda m, x, memory: m.inner(x), inner=Block(joined, WIDTH))

    model = decoder(run=run, block=block)
    seen = look(model, IDS)
    assert any("keys belong to other tokens" in note for note in notes(seen))
    layers = seen.snapshot().layers
    for layer, state in zip(layers, states_of(model, IDS), strict=True):
        place = layer.captured["sequences"], layer.captured["positions"]
        assert torch.equal(layer.captured["hidden"], state[place])
        assert len(place[0]) == REAL.sum()
    for layer, block in zip(layers[1:], model.blocks, strict=True):
        check_projected(layer, block.inner.attention)


def third(x):
    return x[:, ::3]


# Tensors projected to queries and keys, and the share of tokens whose query or key is unknown.
SUBSETS = {
    "keys of every third token": (lambda m, x: (m.q_proj(x), m.k_proj(third(x))), 0),
    "chosen after the projection": (lambda m, x: (m.q_proj(x), third(m.k_proj(x))), 0),
    "picked": (lambda m, x: (m.q_proj(x), m.k_proj(x[:, torch.tensor([5, 0, 9])])), 0),
    "of the first token, a query": (lambda m, x: (m.q_proj(x[:, :1]), m.k_proj(x)), 0),
    "with learned keys": (lambda m, x: (m.q_proj(x), torch.cat([m.keys(x), m.k_proj(x)], 1)), 0),
    "half of them of unknown keys": (
        lambda m, x: (m.q_proj(x), torch.cat([m.k_proj(x[:, :8]), x[:, 8:].cumsum(1)], 1)), 50
    ),
}  # fmt: skip


@pytest.mark.parametrize("subset", SUBSETS)
def test_tokens_are_left_out_if_their_query_or_key_is_unknown_and_not_if_they_have_none(subset):
    check_left_out(subset)


def check_left_out(subset):
    project, percent = SUBSETS[subset]

    def attending(m, x):
        q, k = map(by_head, project(m, x))
        mixed = F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)
        return x + (mixed if mixed.shape == x.shape else mixed.mean(1, keepdim=True))

    def block():
        learned = nn.Parameter(torch.randn(1, 5, WIDTH))
        made = {f"{name}_proj": nn.Linear(WIDTH, WIDTH) for name in "qk"}
        keys = Running(lambda m, x: m.learned.expand(len(x), -1, -1), learned=learned)
        return Running(attending, num_heads=HEADS, keys=keys, **made)

    seen = look(nn.Sequential(block(), block()), torch.randn(8, LENGTH, WIDTH))
    said = [note for note in notes(seen) if "of the tokens, queries or keys" in note]
    assert len(said) == (percent > 0)
    assert all(f"at {percent} % of the tokens" in note for note in said)
