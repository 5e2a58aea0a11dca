"""Later looks go along what the first one understood, and never see anything else than it."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from geomon.capture import Plans, find_anatomy
from geomon.capture.snapshot import CAPTURED
from geomon.capture.window import Window
from support.models import Running
from support.referee import check_same
from support.watched import attend_by_hand, blocks_of, scores_of, window

LENGTH = 12
CAUSAL = torch.ones(LENGTH, LENGTH).tril().bool()
SHAPES = [(3, LENGTH, 32), (3, LENGTH, 32), (2, LENGTH, 32), (3, LENGTH, 32), (2, LENGTH, 32)]


class Looks:
    """Passes of a model, each under a window that knows what the earlier ones understood."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.anatomy, self.plans = model, find_anatomy(model), Plans()

    def __call__(self, *given, **options):
        """Hold what is seen against a window that knows nothing; return the layers of both."""
        snapshots = []
        for plans in (self.plans, Plans()):
            torch.manual_seed(1)
            seen = Window(self.anatomy, set(CAPTURED), rows=1000, seed=0, plans=plans, **options)
            with torch.no_grad(), seen:
                self.model(*given)
            snapshots.append(seen.snapshot())
        return snapshots

    def same(self, *given):
        check_same(*self(*given))


# -- what changes from pass to pass is read each time ---------------------------------------------


def fused(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


def by_hand(q, k, v, *, mask=CAUSAL, scale=None):
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


CHANGES = {
    "a flag": [functools.partial(fused, is_causal=causal) for causal in (True, False, True)],
    "a scale": [functools.partial(fused, scale=scale) for scale in (0.5, 2.0, 0.1)],
    "a mask": [functools.partial(fused, attn_mask=CAUSAL.roll(n, 1)) for n in range(3)],
    "a mask by hand": [
        functools.partial(by_hand, mask=CAUSAL.roll(n, 1) | CAUSAL) for n in range(3)
    ],
    "a learned scale": [
        functools.partial(by_hand, scale=torch.tensor(scale)) for scale in (0.5, 2.0, 0.1)
    ],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:1] * 5], ids=["of any shape", "of one shape"])
def test_arguments_are_those_of_each_pass(change, shapes):
    model = blocks_of(fused)
    look = Looks(model)
    for shape, attend in zip(shapes, itertools.cycle(CHANGES[change]), strict=False):
        for block in model:
            block.attention.attend = attend
        look.same(torch.randn(shape))


def test_blocks_of_one_class_are_known_one_by_one():
    model = blocks_of(fused)
    model[1].attention.attend = functools.partial(fused, is_causal=True)
    look = Looks(model)
    for _ in range(3):
        (first, second), _ = (x.layers[1:] for x in look(torch.randn(SHAPES[0])))
        visible = [x.captured["visible"].expand(-1, -1, LENGTH, -1)[0, 0] for x in (first, second)]
        assert torch.equal(visible[0], torch.ones_like(CAUSAL))
        assert torch.equal(visible[1], CAUSAL)


def in_any_order(q, k, v):
    """An order of keys that is another one in each pass."""
    order = torch.randperm(k.shape[2])
    return fused(q, k[:, :, order], v[:, :, order])


def changed_in_place(q, k, v):
    q, k = q.clone(), k.clone()
    q[..., :4], k[..., 4:] = k[..., 4:] * 2, q[..., :4] + 1
    return attend_by_hand(q, k, v)


def joined_to_earlier(q, k, v):
    return fused(q, torch.cat([k[:, :, :3], k], 2), torch.cat([v[:, :, :3], v], 2))


@pytest.mark.parametrize(
    "attend", [in_any_order, changed_in_place, joined_to_earlier, attend_by_hand, fused]
)
def test_numbers_are_those_of_each_pass(attend):
    look = Looks(blocks_of(attend))
    for shape in SHAPES:
        look.same(torch.randn(shape))


@pytest.mark.parametrize("way", ["train", "gradients", "autocast"])
def test_a_pass_in_another_way_is_known_by_itself(way):
    model = blocks_of(fused)
    look, x = Looks(model), torch.randn(SHAPES[0])
    for number in range(4):
        model.train(way == "train" and number % 2 == 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast" and number % 2 == 0):
            look.same(x.requires_grad_(way == "gradients" and number % 2 == 0))


# -- a block that runs otherwise ------------------------------------------------------------------


def otherwise(q, k, v):
    return attend_by_hand(q * 2, k, v)


def queries(snapshot) -> list[bool]:
    return ["query" in layer.captured for layer in snapshot.layers[1:]]


def test_a_pass_that_runs_otherwise_is_not_guessed_and_then_understood():
    model = blocks_of(attend_by_hand)
    look, x = Looks(model), torch.randn(SHAPES[0])
    look.same(x)
    ways = [otherwise, attend_by_hand, otherwise, attend_by_hand, otherwise]
    lost = []
    for attend in ways:
        model[1].attention.attend = attend
        found, expected = look(x)
        assert queries(expected) == [True, True]
        lost.append(not queries(found)[1])
        if lost[-1]:
            assert "other operators" in found.layers[2].missing["query"]
            assert torch.equal(
                found.layers[2].captured["hidden"], expected.layers[2].captured["hidden"]
            )
        else:
            check_same(found, expected)
    # It left its plan twice; from then on it is followed each time.
    assert lost == [True, False, True, False, False]


def test_a_pass_that_ends_before_its_plan_is_said():
    def run(m, x):
        return m.inner(x) if m.attends else m.inner.mlp(x)

    def block():
        return Running(run, inner=blocks_of(fused)[0], attends=True)

    model = nn.Sequential(block(), block())
    look, x = Looks(model), torch.randn(SHAPES[0])
    look.same(x)
    model[1].attends = False
    found, _ = look(x)
    assert "other operators" in found.layers[2].missing["query"]
    look.same(x)


@pytest.mark.parametrize("attend", [fused, attend_by_hand])
@pytest.mark.parametrize("first", ["earlier keys", "own keys"])
def test_keys_that_a_block_keeps_from_pass_to_pass_are_counted_anew(attend, first):
    """No argument of any operator says that there are more keys than before."""
    kept = [torch.randn(3, 4, 5, 8)] * 2

    def joined(q, k, v):
        def join(x):
            return torch.cat([kept[0], x] if first == "earlier keys" else [x, kept[0]], 2)

        return attend(q, join(k), join(v))

    look, x = Looks(blocks_of(joined)), torch.randn(SHAPES[0])
    look.same(x)
    kept[0] = torch.randn(3, 4, 9, 8)
    found, expected = look(x)
    if all(queries(found)):
        check_same(found, expected)
    else:
        assert all("other operators" in layer.missing["query"] for layer in found.layers[1:])
    look.same(x)


def test_attention_that_comes_only_at_times_is_said_then():
    def run(m, x):
        x = m.inner(x)
        return x + (fused(x[:, None], x[:, None], x[:, None])[:, 0] if m.twice else 0)

    def block():
        return Running(run, inner=blocks_of(fused)[0], twice=False)

    model = nn.Sequential(block(), block())
    look, x = Looks(model), torch.randn(SHAPES[0])
    look.same(x)
    for part in model:
        part.twice = True
    look(x)
    look.same(x)


def test_each_of_many_lengths_is_understood():
    look = Looks(blocks_of(fused))
    for length in (*range(3, 16), *range(3, 16)):
        look.same(torch.randn(2, length, 32))


# -- what proves itself ---------------------------------------------------------------------------

LIBRARY = torch.library.Library("geomon_plans", "DEF")
LIBRARY.define("wrong(Tensor query, Tensor key, Tensor value, bool is_causal=False) -> Tensor")


def wrong(q, k, v, is_causal=False):
    """Attention to keys whose features are turned round."""
    q, k, v = (x.transpose(1, 2) for x in (q, k.flip(-1), v))
    return attend_by_hand(q, k, v).transpose(1, 2)


LIBRARY.impl("wrong", wrong, "CPU")


def test_attention_that_is_not_what_its_operator_says_is_refused():
    def attend(q, k, v):
        given = (x.transpose(1, 2) for x in (q, k, v))
        return torch.ops.geomon_plans.wrong(*given).transpose(1, 2)

    look = Looks(blocks_of(attend))
    for _ in range(3):
        found, _ = look(torch.randn(SHAPES[0]))
        assert "gives another output" in found.layers[1].missing["query"]


def test_a_router_is_known_with_its_choice():
    def run(m, x):
        x = m.inner(x)
        best = m.router(x).softmax(-1).topk(2, -1)
        return x + best.values.sum(-1, keepdim=True)

    def block():
        return Running(run, inner=blocks_of(fused)[0], router=nn.Linear(32, 6))

    look = Looks(nn.Sequential(block(), block()))
    for shape in SHAPES:
        look.same(torch.randn(shape))


def test_scores_of_two_products_stay_unclear():
    def attend(q, k, v):
        return (scores_of(q, k) + q @ k.flip(2).transpose(-1, -2)).softmax(-1) @ v

    look = Looks(blocks_of(attend))
    for _ in range(3):
        look.same(torch.randn(SHAPES[0]))


def test_windows_that_share_nothing_know_nothing_of_each_other():
    model, x = blocks_of(attend_by_hand), torch.randn(SHAPES[0])
    for attend in (attend_by_hand, otherwise):
        for block in model:
            block.attention.attend = attend
        with torch.no_grad(), window(model) as seen:
            model(x)
        assert queries(seen.snapshot()) == [True, True]
