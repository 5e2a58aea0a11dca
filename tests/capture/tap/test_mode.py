"""The mode that sees operators: when it is open, and what it shows to whom."""

import threading

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _len_torch_dispatch_stack as open_modes

from geomon.capture.tap import AttentionWeights, DepartedError, Known, Learner, Plan, Tap
from geomon.capture.tap.operators import plain_arguments
from geomon.capture.tap.plan import Step

X = torch.randn(2, 4, 5, 8)
aten = torch.ops.aten


class Told:
    """An observer that lists what it is told."""

    def __init__(self, fails=()):
        self.said, self.errors, self.fails = [], [], fails

    def _note(self, name, *given):
        self.said.append((name, *given))
        if name in self.fails:
            raise ZeroDivisionError(name)

    def on_fused(self, route, given):
        self._note("fused", route, given)

    def on_fused_output(self, route, given, result):
        self._note("output", route, given, result)

    def on_softmax(self, scores, dim, *, logarithm):
        self._note("softmax", scores, dim, logarithm)

    def on_choice(self, scores, chosen):
        self._note("choice", scores, chosen)

    def on_head_outputs(self, shown):
        self._note("heads", shown)

    def on_failure(self, error):
        self.errors.append(str(error))

    @property
    def names(self):
        return [name for name, *_ in self.said]


def attending():
    """Attend, choose and weigh once each."""
    return F.scaled_dot_product_attention(X, X, X), X.topk(2), X.softmax(-1), X.log_softmax(1)


EVERY = ["fused", "choice", "softmax", "softmax"]


@pytest.mark.parametrize("grad", [True, False])
def test_attention_choices_and_softmaxes_are_shown_with_their_arguments(grad):
    told = Told()
    with torch.set_grad_enabled(grad), Tap(told).seeing():
        _, (_, chosen), *_ = attending()
    assert told.names == EVERY
    (_, route, given), (_, scores, found), (_, own, dim, logarithm), last = told.said
    assert route == "sdpa"
    assert [given[name] is X for name in ("query", "key", "value")] == [True] * 3
    assert (scores is X, found is chosen) == (True, True)
    assert (own is X, dim % 4, logarithm) == (True, 3, False)
    assert last[1] is X
    assert last[2:] == (1, True)
    assert told.errors == []


def test_a_body_in_another_ends_nothing_and_a_rest_is_over_with_a_word():
    told, before = Told(), open_modes()
    tap = Tap(told)
    assert not tap.is_open
    with tap.seeing():
        with tap.seeing():
            assert (tap.is_open, open_modes()) == (True, before + 1)
        assert tap.is_open
        tap.rest()
        assert (tap.is_open, open_modes()) == (False, before)
        attending()
        assert told.said == []
        tap.rest()  # twice is once
        tap.go_on()
        tap.go_on()
        assert (tap.is_open, open_modes()) == (True, before + 1)
        with tap.suspended():
            assert (tap.is_open, open_modes()) == (False, before)
            attending()
        assert tap.is_open
        assert told.said == []
        tap.rest()
        with tap.suspended():
            attending()
        assert not tap.is_open  # as it was before
        with tap.seeing():
            X.softmax(-1)
        assert told.names == ["softmax"]
        assert tap.is_open
    assert (tap.is_open, open_modes()) == (False, before)
    tap.go_on()  # outside of any body
    assert (tap.is_open, open_modes()) == (False, before)


def test_a_body_that_fails_leaves_no_mode():
    tap, before = Tap(Told()), open_modes()
    with pytest.raises(ZeroDivisionError), tap.seeing(), tap.suspended():
        raise ZeroDivisionError
    assert (tap.is_open, open_modes()) == (False, before)


def test_nothing_is_seen_behind_a_close_even_inside_of_a_body():
    told, before = Told(), open_modes()
    tap = Tap(told)
    with tap.seeing():
        tap.sight = Learner()
        tap.close()
        assert tap.sight is None
        attending()
        tap.rest()
        tap.go_on()
        assert open_modes() == before
    tap.close()
    with tap.seeing():
        assert open_modes() == before
    assert told.said == []


def test_another_thread_opens_and_ends_nothing():
    told, found = Told(), []
    tap = Tap(told)

    def elsewhere():
        with tap.seeing(), tap.suspended():
            found.append(open_modes())
        tap.rest()
        tap.go_on()

    with tap.seeing():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert tap.is_open
        X.softmax(-1)
        tap.rest()
        thread = threading.Thread(target=tap.go_on)
        thread.start()
        thread.join()
        assert not tap.is_open
    assert found == [0]
    assert told.names == ["softmax"]


@pytest.mark.parametrize("fails", ["fused", "choice", "softmax"])
def test_an_observer_that_fails_is_told_and_the_operators_run(fails):
    told = Told([fails])
    with Tap(told).seeing():
        mixed, best, weights, _ = attending()
    assert torch.equal(mixed, F.scaled_dot_product_attention(X, X, X))
    assert torch.equal(best.values, X.topk(2).values)
    assert torch.equal(weights, X.softmax(-1))
    assert told.names == EVERY
    assert told.errors == [fails] * EVERY.count(fails)


def test_what_a_backward_pass_computes_again_is_not_shown():
    told, x = Told(), X.clone().requires_grad_()
    tap = Tap(told)

    def block(x):
        return x.softmax(-1)

    with tap.seeing():
        made = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        made.sum().backward()
    assert told.names == ["softmax"]


def test_operators_of_inference_are_taken_apart_and_shown():
    told, outside = Told(), X.flatten(1)
    with torch.inference_mode(), Tap(told).seeing():
        found = F.linear(outside, torch.ones(3, 160)).softmax(-1)
    assert told.names == ["softmax"]
    assert torch.equal(found, F.linear(outside, torch.ones(3, 160)).softmax(-1))


# -- along a plan ----------------------------------------------------------------------------------


def test_a_block_that_is_followed_shows_results_of_fused_attention_too():
    told, learner = Told(), Learner()
    learner.start([X], None)
    tap = Tap(told)
    with torch.no_grad(), tap.seeing():
        tap.sight = learner
        made = F.scaled_dot_product_attention(X, X, X)
        (X + 1).softmax(-1)
    assert told.names == ["fused", "output", "softmax"]
    _, route, given, result = told.said[1]
    assert route == "sdpa"
    assert given["query"] is X
    assert result[0] is made
    assert learner.at == 2  # three operators
    assert told.errors == []


def step(func, *args, role="", **others):
    return Step(func, plain_arguments(args, {}), role, **others)


def test_a_block_that_goes_along_its_plan_shows_what_the_plan_names():
    told = Told()
    kept = {}

    def keep(args, result):
        kept["result"] = result
        return result

    weighs = step(aten._softmax.default, X, -1, False, role="softmax", keeps={4: keep},
                  answers=(lambda held: "answer", lambda held: held[4]))  # fmt: skip
    known = Known(Plan((step(aten.add.Tensor, X, 1), weighs), {}))
    tap = Tap(told)
    with torch.no_grad(), tap.seeing():
        tap.sight = known
        weights = (X + 1).softmax(-1)
        X.softmax(-1)  # behind the plan
    assert told.names == ["softmax"]
    assert kept["result"] is weights
    assert (known.columns(X), known.products(X) is weights) == ("answer", True)
    assert not known.has_left()
    with pytest.raises(DepartedError):  # a third question, which the plan does not know
        known.expect(AttentionWeights())
    assert known.departed
    known.forget()
    assert known.is_complete


def test_an_operator_that_cannot_be_compared_leaves_the_plan_and_is_told():
    class Odd:
        def __eq__(self, other):
            raise ZeroDivisionError("no comparison")

        __hash__ = object.__hash__

    def run(*given):
        return given

    told = Told()
    known = Known(Plan((Step(run, ((2, 0), [1], [], [Odd()]), "choice"),), {}))
    args = (X, Odd())
    tap = Tap(told)
    tap.sight = known
    assert tap.__torch_dispatch__(run, (), args)[0] is X
    assert told.errors == ["no comparison"]
    assert known.departed


# -- what is learned -------------------------------------------------------------------------------


class Asking(Told):
    """An observer that asks where scores come from."""

    def __init__(self, sight):
        super().__init__()
        self.sight, self.weights = sight, AttentionWeights()

    def on_softmax(self, scores, dim, *, logarithm):
        sight = self.sight
        self.columns = [sight.columns(each) for each in self.heads]
        self.products, self.scale = sight.products(scores), sight.scale(scores)
        self.counts = sight.token_counts(self.made[0])
        sight.expect(self.weights)


def attended(sight, x, q, k, *, by_module):
    """Run a block that attends by hand, and ask about it."""
    told = Asking(sight)
    tap = Tap(told)
    with torch.no_grad(), tap.seeing():
        tap.sight = sight
        sight.start([x], x)
        query, key = x @ q, x @ k
        if by_module:  # which project in their own way
            tap.rest()
            key = x @ (k * 2)
            sight.projected(query, x, 12)
            sight.projected(key, x, 24)
            tap.go_on()
        told.made = query, key
        told.heads = [made.view(1, 15, 4, 3).transpose(1, 2) for made in (query, key)]
        ((query @ key.T) * 0.25).softmax(-1).square() @ x
    assert told.errors == []
    return told


@pytest.mark.parametrize("by_module", [False, True])
def test_a_later_call_gets_the_answers_of_the_first_with_its_own_numbers(by_module):
    x, y, q, k = torch.randn(15, 8), torch.randn(15, 8), torch.randn(8, 12), torch.randn(8, 12)
    learner = Learner()
    found = [attended(learner, x, q, k, by_module=by_module)]
    plan = learner.plan()
    assert [step.func for step in plan.steps[:2]] == [aten.mm.default] * 2
    known = Known(plan)
    assert known.sees_modules is by_module  # the first of all operators is no module
    assert not known.goes_on
    found.append(attended(known, y, q, k, by_module=by_module))
    assert not known.has_left()
    for told in found:
        firsts = (12, 24) if by_module else (0, 0)
        for columns, projected, first in zip(told.columns, told.made, firsts, strict=True):
            assert columns.numbers == tuple(first + n for n in (0, 3, 6, 9))
            assert torch.equal(columns.projections[0].by_token[0], projected)
            assert columns.tokens.tolist() == [[*range(15)]]
        (product,) = told.products
        assert torch.equal(product.left, told.made[0])
        assert torch.equal(product.right, told.made[1].T)
        assert (product.factor, told.scale, told.counts) == (1.0, 0.25, [15])
        assert told.weights.changed is True


def test_no_plan_is_made_of_a_call_that_failed_or_read_numbers():
    x = torch.randn(15, 8)

    def learned(spoil):
        learner = Learner()
        with torch.no_grad(), Tap(Told()) as tap:
            tap.sight = learner
            learner.start([x], x)
            spoil(learner)
        return learner.plan()

    assert learned(lambda learner: x + 1) is not None
    assert learned(lambda learner: setattr(learner, "failed", True)) is None
    assert learned(lambda learner: learner.scale(x * torch.tensor(0.5))) is None
    weight, picks = torch.ones(8, 15), torch.arange(15)
    for rows, is_made in ((slice(None), True), (picks, False)):
        plan = learned(
            lambda learner, rows=rows: learner.columns((x @ weight)[rows].view(1, 15, 5, 3))
        )
        assert (plan is not None) is is_made


def test_plans_end_with_the_last_operator_at_which_anything_is_to_be_done():
    x = torch.randn(15, 8)
    learner = Learner()
    with torch.no_grad(), Tap(Told()) as tap:
        tap.sight = learner
        learner.start([x], x)
        y = x * 2
        y.softmax(-1)
        (y + 1).mul_(3)
    steps = learner.plan().steps
    assert [step.func for step in steps] == [aten.mul.Tensor, aten._softmax.default]
    assert [step.role for step in steps] == ["", "softmax"]
