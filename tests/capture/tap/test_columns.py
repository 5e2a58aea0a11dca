"""Queries and keys as projected: whatever a model does between its weights and its attention."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from support.models import Running
from support.watched import window

SEQUENCES, LENGTH, WIDTH, HEADS = 3, 10, 32, 4
SIZE = WIDTH // HEADS


class Block(nn.Module):
    """Attention whose queries and keys are made by a function, which says what they are too.

    Args:
        make: Returns queries and keys as attended, [sequences, heads, places, width], and as
            projected, [sequences, places, heads, width] each, of the input and of a generator.
        by_hand: Whether attention is written out.
    """

    def __init__(self, make, by_hand=False):
        super().__init__()
        self.make, self.by_hand = make, by_hand
        self.expected = []
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, *expected = self.make(self, x)
        if not self.expected:
            self.expected = [each.detach().clone() for each in expected]
        value = torch.ones_like(key)
        if self.by_hand:
            group = query.shape[1] // key.shape[1]
            key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
            scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
            mixed = scores.softmax(-1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        mixed = mixed.transpose(1, 2).flatten(2)[..., :WIDTH]
        return x + self.out(F.pad(mixed, (0, WIDTH - mixed.shape[-1]))).reshape(x.shape)


def seen_in(block, x):
    """Return the views that a window captures of the first of two such blocks, and its notes."""
    model = nn.Sequential(block, block)
    with window(model) as seen:
        model(x)
    snapshot = seen.snapshot()
    captured = snapshot.layers[1].captured
    order = captured["sequences"] * LENGTH + captured["positions"]
    return captured, order, [note.words() for note in snapshot.info.notes]


def check(block, x=None):
    x = torch.randn(SEQUENCES, LENGTH, WIDTH) if x is None else x
    captured, order, notes = seen_in(block, x)
    assert not any("as attended are used" in note or "failed" in note for note in notes), notes
    for which, expected in zip(("query", "key"), block.expected, strict=True):
        rows = expected.flatten(0, 1)[order.long()]
        found = captured[f"projected_{which}"]
        assert found.shape == rows.shape
        assert torch.equal(found, rows), which


def rotated(rows, way):
    """[..., places, width] turned by position, as different code bases write it."""
    half = rows.shape[-1] // 2
    angle = torch.arange(rows.shape[-2])[:, None] * 0.3 ** torch.arange(half)
    if way == "halves":
        angle = torch.cat([angle, angle], -1)
        turned = torch.cat([-rows[..., half:], rows[..., :half]], -1)
        return rows * angle.cos() + turned * angle.sin()
    if way == "pairs":
        one, other = rows[..., ::2], rows[..., 1::2]
        first = one * angle.cos() - other * angle.sin()
        second = one * angle.sin() + other * angle.cos()
        return torch.stack([first, second], -1).flatten(-2)
    if way == "two halves":
        one, other = rows.chunk(2, dim=-1)
        first = one * angle.cos() + other * angle.sin()
        return torch.cat([first, one * -angle.sin() + other * angle.cos()], -1)
    if way == "complex":
        pairs = torch.view_as_complex(rows.float().contiguous().unflatten(-1, (-1, 2)))
        turn = torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(rows)
    if way == "a part":
        return torch.cat([rotated(rows[..., :half], "halves"), rows[..., half:]], -1)
    if way == "the last part":
        return torch.cat([rows[..., :half], rotated(rows[..., half:], "two halves")], -1)
    return rows


def fused(order, way, steps):
    """One projection whose output is laid out in some order, and then copied, normed and turned."""

    def make(block, x):
        has(block, weight=linear(WIDTH, 3 * WIDTH))
        shape = {"part": 3, "head": HEADS, "width": SIZE}
        output = block.weight(x)
        parts = output.unflatten(-1, [shape[each] for each in order])
        names = ["sequence", "place", *order]
        parts = parts.permute([names.index(each) for each in
                               ("part", "sequence", "head", "place", "width")])  # fmt: skip
        query, key, _ = parts.unbind(0)
        projected = [each.transpose(1, 2) for each in (query, key)]
        for step in steps:
            query, key = (_STEPS[step](each) for each in (query, key))
        return rotated(query, way), rotated(key, way), *projected

    return make


_STEPS = {
    "copy": lambda x: x.contiguous(),
    "norm": lambda x: F.rms_norm(x, (SIZE,)),
    "layer norm": lambda x: F.layer_norm(x, (SIZE,)),
    "scale": lambda x: x * 0.5,
    "other type": lambda x: x.double().float(),
    "bias": lambda x: x + torch.linspace(0, 1, SIZE),
    "turned memory": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "joined": lambda x: torch.cat([x[:, :1], x[:, 1:]], dim=1),
    "dropped": lambda x: F.dropout(x, 0.0),
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.permutations(["part", "head", "width"]),
    st.sampled_from(
        ["none", "halves", "pairs", "two halves", "complex", "a part", "the last part"]
    ),
    st.lists(st.sampled_from(sorted(_STEPS)), max_size=4),
    st.booleans(),
)
def test_any_layout_is_followed_to_its_columns(order, way, steps, by_hand):
    check(Block(fused(order, way, steps), by_hand=by_hand))


def has(block, **kinds):
    """Make modules of a block at its first call."""
    for name, make in kinds.items():
        if not hasattr(block, name):
            setattr(block, name, make())


def linear(*sizes, **options):
    return lambda: nn.Linear(*sizes, **options)


def heads_of(output, heads=HEADS):
    return output.unflatten(-1, (heads, -1))


def by_low_rank(block, x):
    """An adapter: a module of the widths of the matrix that it is around."""

    def adapter():
        return Running(
            lambda m, x: m.base(x) + m.other(m.one(x)) * 0.5, in_features=WIDTH,
            out_features=WIDTH, base=nn.Linear(WIDTH, WIDTH), one=nn.Linear(WIDTH, 2, bias=False),
            other=nn.Linear(2, WIDTH, bias=False),
        )  # fmt: skip

    has(block, a=adapter, b=adapter)
    outputs = [heads_of(block.a(x)), heads_of(block.b(x))]
    return *(each.transpose(1, 2) for each in outputs), *outputs


def by_two(block, x, keys=WIDTH):
    """Queries and keys of two modules, [sequences, places, heads, width]."""
    has(block, a=linear(WIDTH, WIDTH), b=linear(WIDTH, keys))
    return [each(x).unflatten(-1, (-1, SIZE)) for each in (block.a, block.b)]


def changed_in_place(change):
    """Queries and keys that a function of both changes where they are."""

    def make(block, x):
        outputs = by_two(block, x)
        projected = [each.detach().clone() for each in outputs]
        with torch.no_grad():
            change(*outputs)
        return *(each.transpose(1, 2) for each in outputs), *projected

    return make


@torch.library.custom_op("geomon_tests::turn_", mutates_args=("query", "key"))
def turn_(query: torch.Tensor, key: torch.Tensor) -> None:
    """An operator of another package that changes both in place."""
    query.mul_(0.5)
    key.mul_(2.0)


def with_a_bias_of_its_own(block, x):
    """A bias that is added to the product belongs to it."""
    has(block, a=linear(WIDTH, WIDTH, bias=False), b=linear(WIDTH, WIDTH, bias=False))
    has(block, **{name: lambda: nn.Parameter(torch.randn(WIDTH)) for name in "qk"})
    outputs = [heads_of(block.a(x) + block.q), heads_of(block.b(x).add_(block.k))]
    return *(each.transpose(1, 2) for each in outputs), *outputs


def chosen_in_another_order(block, x):
    """Tokens before the projection, heads and features behind it."""
    query, key = by_two(block, x.index_select(1, torch.arange(LENGTH)))
    query = query.index_select(-1, torch.arange(SIZE).flip(0))
    key = key[:, :, torch.tensor([2, 0, 3, 1])]
    return query.transpose(1, 2), key.transpose(1, 2), query, key


def before_other_keys(block, x):
    """As in a cache that is longer than what is written into it."""
    query, key = by_two(block, x)
    cache = torch.randn(SEQUENCES, HEADS, 4 * LENGTH, SIZE)
    cache[:, :, :LENGTH] = key.transpose(1, 2)
    return query.transpose(1, 2), cache, query, key


def of_channels(block, x):
    """A convolution makes channels; a filter for each follows, and filtered places are added."""
    has(block, a=lambda: nn.Conv1d(WIDTH, 2 * WIDTH, 1),
        b=lambda: nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH),
        places=lambda: nn.Parameter(torch.randn(1, WIDTH, LENGTH + 2)))  # fmt: skip
    made = block.a(x.transpose(1, 2))
    query, key = made.transpose(1, 2).unflatten(-1, (2, HEADS, SIZE)).unbind(2)
    filtered = block.b(F.pad(made[:, :WIDTH], (2, 0)))
    attended, added = (heads_of(each.transpose(1, 2)) for each in (filtered, block.b(block.places)))
    return attended.transpose(1, 2), (key + added).transpose(1, 2), query, key


def by_a_matrix_for_each_head(block, x):
    has(block, **{name: lambda: nn.Parameter(torch.randn(HEADS, WIDTH, SIZE)) for name in "ab"})
    outputs = [(x.flatten(0, 1) @ each).unflatten(1, x.shape[:2]) for each in (block.a, block.b)]
    return *(each.transpose(0, 1) for each in outputs), *(each.movedim(0, 2) for each in outputs)


def with_numbers_of_each_place(block, x):
    """Numbers added to tokens are no bias of the projection."""
    outputs, added = by_two(block, x), torch.linspace(0, 1, LENGTH)[:, None]
    projected = [each.detach().clone() for each in outputs]
    query = heads_of(outputs[0].flatten(2) + added)
    with torch.no_grad():
        outputs[1].flatten(2).add_(added)
    return query.transpose(1, 2), outputs[1].transpose(1, 2), *projected


def place_by_place(block, x):
    """Projected as [places, sequences, width], and as [sequences, width, places]."""
    query, _ = by_two(block, x.transpose(0, 1).contiguous())
    key = torch.bmm(block.b.weight.expand(SEQUENCES, -1, -1), x.mT).mT.unflatten(-1, (HEADS, SIZE))
    asked = query.permute(1, 2, 0, 3).contiguous()
    return asked, key.transpose(1, 2), query.transpose(0, 1), key


def of_two_kinds_of_tokens(block, x):
    """The tokens of a text and of an image have weights of their own, and are joined again."""
    (text, keys), (image, others) = by_two(block, x[:, :4]), by_two(_twin(block), x[:, 4:])
    query, key = torch.cat([text, image], dim=1), torch.cat([keys, others], dim=1)
    return query.transpose(1, 2), key.transpose(1, 2), query, key


def chosen_by_a_condition(block, x):
    """Two projections of all tokens; a condition takes one of them for each token."""
    condition = (torch.arange(LENGTH) % 3 == 0)[:, None, None]
    made = zip(by_two(block, x), by_two(_twin(block), x), strict=True)
    query, key = (torch.where(condition, one, other) for one, other in made)
    return query.transpose(1, 2), key.transpose(1, 2), query, key


def _twin(block):
    has(block, twin=nn.Module)
    return block.twin


def with_what_a_convolution_adds(block, x):
    """To each token something of those before it, by a convolution of both with groups."""
    has(block, blend=lambda: nn.Conv1d(2 * WIDTH, 2 * WIDTH, 3, groups=8))
    query, key = (each.flatten(2) for each in by_two(block, x))
    earlier = F.pad(torch.cat([query, key], dim=-1).transpose(1, 2), (2, 0))
    earlier = block.blend(earlier).transpose(1, 2)
    query, key = heads_of(query + earlier[..., :WIDTH]), heads_of(earlier[..., WIDTH:] + key)
    return query.transpose(1, 2), key.transpose(1, 2), query, key


def with_what_an_adapter_adds(block, x):
    """In place, as it is written where memory is short."""
    by_two(block, x), by_two(_twin(block), x)
    query, key = block.a(x), block.b(x)
    query += block.twin.a(x)
    key += block.twin.b(x)
    query, key = heads_of(query), heads_of(key)
    return query.transpose(1, 2), key.transpose(1, 2), query, key


def in_windows_that_are_shifted(block, x, change=lambda x: x):
    """Tokens are shifted around, changed, cut into windows, and projected there."""
    turned = change(x.roll((3, 1), (1, 0)).flip(1))
    windows = turned.unflatten(1, (2, 5)).flatten(0, 1)
    order = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH)
    order = order.roll((3, 1), (1, 0)).flip(1).flatten().argsort()
    query, key = by_two(block, windows)
    own = (each.flatten(0, 1)[order].unflatten(0, (SEQUENCES, LENGTH)) for each in (query, key))
    return query.transpose(1, 2), key.transpose(1, 2), *own


def behind_another_sublayer(block, x):
    """The projections receive a sum, in which the branch stands first."""
    has(block, first=linear(WIDTH, WIDTH))
    x = block.first(x.softmax(-1)) + x
    query, key = by_two(block, F.rms_norm(x, (WIDTH,)).transpose(0, 1).contiguous())
    asked, keys = (each.permute(1, 2, 0, 3) for each in (query, key))
    return asked, keys, query.transpose(0, 1), key.transpose(0, 1)


def of_wide_heads(block, x):
    """Heads that are wider than the hidden states shared out among them, in one projection."""
    has(block, wide=linear(WIDTH, 3 * HEADS * 24, bias=False))
    query, key, _ = block.wide(x).unflatten(-1, (3, HEADS, 24)).unbind(-3)
    return query.transpose(1, 2), key.transpose(1, 2), query, key


# Changes that leave each token in its place.
KEPT = {
    "normed": lambda x: F.layer_norm(x, (WIDTH,)),
    "normed by their size": lambda x: torch.ops.aten._fused_rms_norm(x, [WIDTH], None, None)[0],
    "normed by features": lambda x: torch.native_batch_norm(
        x.mT, None, None, None, None, True, 0.1, 1e-5
    )[0].mT,
    "normed as a compiler has it": lambda x: torch.ops.aten._native_batch_norm_legit(
        x.mT, None, None, True, 0.1, 1e-5
    )[0].mT,
    "dropped": lambda x: torch.native_dropout(x, 0.0, True)[0],
    "of another type": lambda x: x.double().float(),
    "in a buffer": lambda x: torch.empty(x.shape).copy_(x),
    "repeated": lambda x: x.repeat(1, 1, 1),
}  # fmt: skip


def by_weights_of_eight_bits(block, x):
    """Products of another number format, and by another operator."""
    has(block, **{name: lambda: nn.Buffer(torch.randint(-99, 99, (WIDTH, WIDTH)).char())
                  for name in "ab"})  # fmt: skip
    rows, scales = x.flatten(0, 1).bfloat16(), torch.full((WIDTH,), 0.01).bfloat16()
    query, key = (
        heads_of(torch._weight_int8pack_mm(rows, weight, scales)).unflatten(0, x.shape[:2]).float()
        for weight in (block.a, block.b)
    )
    return query.transpose(1, 2), key.transpose(1, 2), query, key


MASK = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
ORDER = torch.rand(SEQUENCES * HEADS, LENGTH).argsort(dim=1)
EACH = torch.arange(SEQUENCES * HEADS)[:, None]
OTHERS = torch.randn(2, SEQUENCES, HEADS, 3, SIZE)


def by_heads(rows, order):
    """Tokens that each head picks for itself, of rows [sequences, places, heads, width]."""
    picked = rows.transpose(1, 2).flatten(0, 1)[EACH, order]
    return picked.unflatten(0, (SEQUENCES, HEADS))


def picked(rows, index):
    """As padding is taken away, and tokens are put back."""
    return rows[index].unflatten(0, (SEQUENCES, LENGTH)).transpose(1, 2)


# Changes of keys as projected, [sequences, places, heads, width], before they are attended to.
KEYS = {
    "picked by a mask": lambda k: picked(k, MASK),
    "picked by numbers of sequences and places": lambda k: picked(k, MASK.nonzero(as_tuple=True)),
    "widened and cut again": lambda k: F.pad(k.transpose(1, 2), (1, 0, 2, 1))[:, :, 2:-1, 1:],
    "behind kept keys": lambda k: torch.cat([torch.empty(0), OTHERS[0], k.transpose(1, 2)], 2),
    "between other keys": lambda k: torch.cat([OTHERS[0], k.transpose(1, 2), OTHERS[1]], 2),
    "picked by each head": lambda k: by_heads(k, ORDER),
    "picked in the middle": lambda k: k[:, torch.arange(LENGTH)[:, None], torch.arange(HEADS)]
    .transpose(1, 2),
}  # fmt: skip


def with_keys(change):
    """Queries that are attended as projected, and keys that are changed."""

    def make(block, x):
        query, key = by_two(block, x)
        return query.transpose(1, 2), change(key), query, key

    return make


WAYS = [
    by_low_rank, with_a_bias_of_its_own,
    chosen_in_another_order, before_other_keys,    of_channels,
    by_a_matrix_for_each_head, with_numbers_of_each_place, place_by_place,
    of_two_kinds_of_tokens, chosen_by_a_condition, with_what_a_convolution_adds,
    with_what_an_adapter_adds, in_windows_that_are_shifted, behind_another_sublayer,
    of_wide_heads, by_weights_of_eight_bits,
]  # fmt: skip
NAMED = {make.__name__: make for make in WAYS} | {n: with_keys(c) for n, c in KEYS.items()}
NAMED |= {
    f"shifted and {name}": functools.partial(in_windows_that_are_shifted, change=change)
    for name, change in KEPT.items()
}
NAMED["changed in place"] = changed_in_place(lambda query, key: query.mul_(0.5))
NAMED["changed by one operator"] = changed_in_place(turn_)


@pytest.mark.parametrize("grad", [True, False], ids=["", "without gradients"])
@pytest.mark.parametrize("by_hand", [False, True], ids=["fused", "by hand"])
@pytest.mark.parametrize("way", NAMED)
def test_queries_and_keys_are_found_however_they_are_made(way, by_hand, grad):
    block = Block(NAMED[way], by_hand=by_hand)
    block(torch.randn(SEQUENCES, LENGTH, WIDTH))  # which makes its weights
    block.expected = []
    with torch.set_grad_enabled(grad):
        check(block)


@torch.library.custom_op("geomon_tests::turned", mutates_args=())
def turned(values: torch.Tensor) -> torch.Tensor:
    """An operator of another package."""
    return values.flip(-1)


BACKWARDS = torch.arange(LENGTH).flip(0)[:, None, None].expand(SEQUENCES, -1, HEADS, SIZE)


def with_keys_added_in_place(q, k):
    with torch.no_grad():
        q[:, 3:] += turned(k)[:, 3:]
    return q, k


# Mixtures of queries and keys that no longer belong to one projection.
MIXES = {
    "a product of both": lambda q, k: (q * k, k),
    "a gate": lambda q, k: (q * k.sort(dim=-1).values, k),
    "what is added": lambda q, k: (turned(k) + q, k + turned(q)),
    "what is added in place": with_keys_added_in_place,
    "a sum with another": lambda q, k: (q[..., :4] + k[..., :4], k[..., :4]),
    "a part": lambda q, k: (torch.cat([q[..., :4], q[..., 4:].sort(dim=-1).values], dim=-1), k),
    "the same twice": lambda q, k: (torch.cat([q[..., :4], q[..., :4]], dim=-1), k),
    "of the mean of all sequences": lambda q, k: (
        torch.cat([q[..., :4], q.mean(0, keepdim=True).expand_as(q)[..., 4:]], dim=-1), k
    ),
    "as shares": lambda q, k: (q.softmax(dim=-1), k),
    "as logarithms of shares": lambda q, k: (q.log_softmax(dim=-1), k),
    "sorted": lambda q, k: (q.sort(dim=-1).values, k),
    "summed up": lambda q, k: (q.cumsum(dim=1), k),
    "gathered": lambda q, k: (q.gather(1, BACKWARDS), k),
    "scattered": lambda q, k: (torch.zeros(q.shape).scatter(1, BACKWARDS, q), k),
    "by another package": lambda q, k: (turned(q), k),
}  # fmt: skip


@pytest.mark.parametrize("mix", MIXES)
def test_heads_that_mix_projections_are_said_to_be_unknown_and_not_guessed(mix):
    def make(block, x):
        return [each.transpose(1, 2) for each in MIXES[mix](*by_two(block, x))]

    block = Block(make)
    block(torch.randn(SEQUENCES, LENGTH, WIDTH))  # which makes its weights
    _, _, notes = seen_in(block, torch.randn(SEQUENCES, LENGTH, WIDTH))
    said = "Q and K as attended are used instead", "at 70 % of the tokens"
    assert any(said[mix == "what is added in place"] in note for note in notes), notes


def test_heads_may_pick_some_tokens_beside_other_keys():
    def some_beside_others(keys):
        return torch.cat([OTHERS[0], by_heads(keys, ORDER[:, : LENGTH - 3])], 2)

    block = Block(with_keys(some_beside_others))
    block(torch.randn(SEQUENCES, LENGTH, WIDTH))  # which makes its weights
    block.expected = []
    captured, _, notes = seen_in(block, torch.randn(SEQUENCES, LENGTH, WIDTH))
    found, rows = captured["projected_key"], block.expected[1].flatten(0, 1)
    assert len(found) == SEQUENCES * (LENGTH - 3)
    assert (found[:, None] == rows).flatten(2).all(-1).any(1).all()
    assert any("at 30 % of the tokens" in note for note in notes), notes
