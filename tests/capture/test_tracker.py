"""The pass that counts, however often and by whom the blocks are called."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from geomon.capture import Plans
from support.models import PlainDecoder, Running, batch, embed_tokens, run_blocks
from support.watched import blocks_of, check_hidden, check_same, notes, window

IDS = [batch(3, 8, seed=seed) for seed in range(3)]


def masked(model, ids, attention_mask):
    """Embed, and run the blocks in a module of their own."""
    return model.core(embed_tokens(model, ids))


def with_core(run=masked, blocks=None):
    """A model whose blocks are run by a module inside of it."""
    torch.manual_seed(0)
    core = Running(run_blocks, blocks=blocks or PlainDecoder().blocks)
    return Running(run, core=core, tokens=nn.Embedding(64, 32), places=nn.Embedding(64, 32)).eval()


MASK = torch.arange(8) < torch.tensor([[8], [5], [7]])


def alone(model, ids, **given):
    """Return the snapshot of a single pass that records gradients."""
    with window(model) as seen:
        model(ids, **given)
    return seen.snapshot()


def passes(model, *calls):
    """Open a window around calls of a model, with gradients if their names say so."""
    with window(model) as seen:
        for ids, grad in calls:
            with torch.set_grad_enabled(grad == "grad"):
                model(ids)
    return seen


A, B, C = IDS
# Calls of a model in one window, the one that counts, and how often its kind is said to have run.
ORDERS = {
    "once": ([(A, "")], A, 1),
    "twice": ([(A, ""), (B, "")], A, 2),
    "three times": ([(A, ""), (B, ""), (C, "")], A, 3),
    "before the training": ([(A, ""), (B, "grad")], B, 1),
    "before and behind the training": ([(A, ""), (B, "grad"), (C, "")], B, 1),
    "twice before the training": ([(A, ""), (B, ""), (C, "grad")], C, 1),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_first_pass_counts_but_gives_way_to_one_with_gradients(order):
    calls, counts, times = ORDERS[order]
    model = PlainDecoder()
    seen = passes(model, *calls)
    check_same(seen.snapshot(), alone(model, counts))
    said = [text for text in notes(seen) if "the blocks ran" in text]
    assert len(said) == (times > 1)
    assert all(f"the blocks ran {times} times" in text for text in said)


def test_once_a_pass_with_gradients_and_attention_is_over_the_rest_costs_nothing():
    model, seconds = PlainDecoder(), []
    with window(model) as seen:
        for grad in (False, True, True):
            with torch.set_grad_enabled(grad):
                model(A)
            seconds.append(seen.seconds)
    assert seconds[0] < seconds[1] == seconds[2]
    check_same(seen.snapshot(), alone(model, A))


def broken(model, at):
    """Make a module fail at its next call."""

    def fail(*call):
        handle.remove()
        raise ZeroDivisionError

    handle = model.get_submodule(at).register_forward_pre_hook(fail)


def turned(model, ids):
    """A model whose blocks have the places first, as many as there are sequences."""
    return model.core(embed_tokens(model, ids).transpose(0, 1))


# Where a pass breaks off (of all blocks, the second), in a block that is known or new.
BREAKS = [("1", True), ("1.attention", False), ("1.mlp", False), ("1.mlp", True)]


@pytest.mark.parametrize("run", [masked, turned])
@pytest.mark.parametrize(("at", "known"), BREAKS)
def test_a_pass_that_breaks_off_gives_way_to_the_next(at, known, run):
    model = with_core(run, nn.ModuleList(blocks_of(F.scaled_dot_product_attention)))
    ids, others = (A, B) if run is masked else (batch(8, 8), batch(8, 8, seed=1))
    given = {"attention_mask": MASK} if run is masked else {}
    plans = Plans()
    if known:
        with window(model, plans=plans):
            model(ids, **given)
    with window(model, plans=plans) as seen:
        broken(model, f"core.blocks.{at}")
        with pytest.raises(ZeroDivisionError):
            model(others, **{name: torch.ones_like(MASK) for name in given})
        model(ids, **given)
    check_same(seen.snapshot(), alone(model, ids, **given))
    assert not any("the blocks ran" in text for text in notes(seen))


@pytest.mark.parametrize("at", ["encoder.layers.1", "decoder.layers.1", "decoder.layers.1.linear1"])
def test_no_stack_is_left_over_from_a_pass_that_breaks_off(at):
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
    others, given = torch.randn(2, 3, 7, 32), torch.randn(2, 3, 5, 32)
    broken(model, at)
    with window(model) as seen:
        with pytest.raises(ZeroDivisionError):
            model(*others)
        model(*given)
    with window(model) as plain:
        model(*given)
    check_same(seen.snapshot(), plain.snapshot())


@pytest.mark.parametrize("at", ["0", "2"])
def test_blocks_that_are_tried_again_inside_of_a_pass_have_its_tokens(at):
    def tries(model, ids, attention_mask):
        x = embed_tokens(model, ids)
        try:
            return model.core(x)
        except ZeroDivisionError:
            return model.core(x)

    model = with_core(tries)
    plain = alone(model, A, attention_mask=MASK)
    assert len(plain.layers[0].captured["token_ids"]) == MASK.sum()
    broken(model, f"core.blocks.{at}")
    check_same(alone(model, A, attention_mask=MASK), plain)


def test_what_is_written_into_an_output_outside_of_the_model_is_a_pass_of_its_own():
    """Operators outside are not seen, so that its address does not tell whose rows lie there."""
    model = blocks_of(F.scaled_dot_product_attention)
    x, other = torch.randn(3, 8, 32), torch.randn(3, 8, 32)
    with torch.no_grad(), window(model) as seen:
        made = model(x)
        model(made.copy_(other))
    assert len(seen.snapshot().layers) == 3
    with torch.no_grad(), window(model) as once:
        model(x)
    check_same(seen.snapshot(), once.snapshot())


def test_attention_behind_a_model_without_any_is_still_seen():
    """The window closes early only if its blocks have shown what it waits for."""
    parts = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(2)))
    head = blocks_of(F.scaled_dot_product_attention)[0]
    model = Running(lambda m, x: m.head(m.parts(x)), parts=parts, head=head)
    with window(model) as seen:
        model(torch.randn(3, 8, 32))
    assert any("may be the wrong blocks" in text for text in notes(seen))


def by_the_step(model, ids):
    x = embed_tokens(model, ids)
    for block in model.blocks:
        x = block(x)
    return x


def test_if_nobody_calls_the_model_the_first_call_of_each_block_counts():
    model = PlainDecoder().eval()
    states = [embed_tokens(model, A)]
    for block in model.blocks:
        states.append(block(states[-1]))
    with window(model) as seen:
        by_the_step(model, A)
        by_the_step(model, B)
    for depth, state in enumerate(states):
        check_hidden(seen, depth, state)
    assert len(seen.snapshot().layers) == 4


def past(model, ids):
    """Call `forward` of the module that runs the blocks directly."""
    return model.core.forward(embed_tokens(model, ids))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("way", ["by itself", "by another", "by its owner"])
def test_a_pass_past_its_owner_ends_with_the_module_around_it(way, times):
    inner = with_core(masked if way == "by its owner" else past)
    given = (MASK,) if way == "by its owner" else ()
    model = Running(lambda m, *batches: [m.inner(x, *given) for x in batches], inner=inner)
    states = [embed_tokens(inner, A)]
    for block in inner.core.blocks:
        states.append(block(states[-1]))
    with torch.no_grad(), window(inner if way == "by itself" else model) as seen:
        if way == "by itself":
            for ids in IDS[:times]:
                inner(ids)
        else:
            model(*IDS[:times])
    assert len(seen.snapshot().layers) == 4
    for depth, state in enumerate(states):
        check_hidden(seen, depth, state)
    ids = seen.snapshot().layers[0].captured
    assert torch.equal(ids["token_ids"], A[ids["sequences"], ids["positions"]])
    said = [text for text in notes(seen) if "the blocks ran" in text]
    assert ["ran 2 times" in text for text in said] == [True] * (times == 2 and way != "by itself")


def test_generation_shows_its_first_pass():
    model = PlainDecoder().eval()
    with torch.no_grad(), window(model) as seen:
        ids = A
        for _ in range(3):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    check_same(seen.snapshot(), alone(model, A))
    assert any("the blocks ran 3 times" in text for text in notes(seen))


def test_arguments_of_the_model_are_kept_if_they_are_asked_for():
    model = with_core()
    for keeps in (True, False):
        with window(model, keep_inputs=keeps) as seen:
            model(A, attention_mask=MASK)
            model(B, attention_mask=MASK)
        assert (seen.inputs is None) is not keeps
        if keeps:
            (ids,), named = seen.inputs
            assert ids is A
            assert named["attention_mask"] is MASK
            assert named.keys() == {"attention_mask"}
