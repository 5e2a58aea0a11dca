"""Kinds of operators, and what two calls must share to be taken for alike."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from geomon.capture.tap import Known, Plan, Plans, form_of
from geomon.capture.tap.operators import (
    DETACH,
    kind_of,
    on_this_rank,
    op_of,
    plain_arguments,
    tensors_in,
)
from geomon.capture.tap.plan import Step

aten = torch.ops.aten


def called(function) -> tuple:
    """Return operator, arguments and result of the last operator that a function runs."""
    found = []

    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            found.append((func, args, kwargs or {}, result))
            return result

    with torch.no_grad(), Listing():
        function()
    return found[-1]


# -- kinds -----------------------------------------------------------------------------------------

X = torch.randn(2, 3, 4)
KINDS = {
    "a product": (lambda: X[0] @ X[1].T, "", "mm", (), False),
    "a sum": (lambda: X + X, "", "add", (), True),
    "a sum in place": (lambda: X.clone().add_(1), "", "add_", ("self",), True),
    "a result that is given": (lambda: torch.mul(X, 2, out=torch.empty(2, 3, 4)), "", "mul",
                               ("out",), True),
    "a copy into": (lambda: torch.empty(2, 3, 4).copy_(X), "", "copy_", ("self",), True),
    "a cast": (X.double, "", "_to_copy", (), True),
    "repeated": (lambda: X.repeat(2, 1, 1), "", "repeat", (), True),
    "a norm": (lambda: F.layer_norm(X, (4,)), "", "native_layer_norm", (), True),
    "rolled": (lambda: X.roll(1, 1), "", "roll", (), False),
    "a softmax": (lambda: X.softmax(-1), "softmax", "_softmax", (), False),
    "logarithms": (lambda: X.log_softmax(-1), "softmax", "_log_softmax", (), False),
    "a choice": (lambda: X.topk(2), "choice", "topk", (), False),
    "sorted": (X.sort, "", "sort", (), False),
    "fused attention": (lambda: F.scaled_dot_product_attention(*[X[None]] * 3), "sdpa", "", (),
                        False),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_of_an_operator_says_what_it_does(name):
    run, *expected = KINDS[name]
    func, args, kwargs, result = called(run)
    kind = kind_of(func)
    assert [kind.role, kind.name, kind.writes, kind.keeps_places] == expected
    op = op_of(func, (), args, kwargs, result)
    assert op.name == kind.name.removesuffix("_")
    assert op.kind is kind
    assert op.starts == {}
    assert len(op.given) == len(tensors_in([*args, *kwargs.values()]))


def defined(schema: str):
    name = schema.partition("(")[0]
    return getattr(torch.ops.geomon_kinds, name).default


LIBRARY = torch.library.Library("geomon_kinds", "DEF")
# Operators of other packages, and the route by which they attend.
SCHEMAS = {
    "flash_fwd(Tensor q, Tensor k, Tensor v) -> Tensor": "flash",
    "attend(Tensor query, Tensor key, Tensor value, bool causal) -> Tensor": "flash",
    "_scaled_dot_product_own(Tensor query, Tensor key, Tensor value) -> Tensor": "sdpa",
    "only_keys(Tensor q, Tensor k) -> Tensor": "",
    "mixed(Tensor query, Tensor k, Tensor v) -> Tensor": "",
    "topk(Tensor self) -> Tensor": "",
    "fill(Tensor self, Tensor(a!) made) -> ()": "",
}
for each in SCHEMAS:
    LIBRARY.define(each)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_operators_of_other_packages_attend_if_they_take_queries_keys_and_values(schema):
    kind = kind_of(defined(schema))
    assert (kind.role, kind.name, kind.keeps_places) == (SCHEMAS[schema], "", False)
    assert kind.writes == (("made",) if "made" in schema else ())


def test_higher_order_operators_have_no_schema_and_flex_attention_is_known_by_name():
    flex = kind_of(torch.ops.higher_order.flex_attention)
    assert (flex.role, flex.name, flex.writes) == ("flex", "", ())
    given = flex.by_name((1, 2, 3, 4, 5, 6, 7), {})
    assert given == {"query": 1, "key": 2, "value": 3, "score_mod": 4, "block_mask": 5, "scale": 6}
    other = kind_of(torch.ops.higher_order.cond)
    assert (other.role, other.name, other.names, other.writes) == ("", "", (), ())


def test_arguments_are_known_by_name_however_they_are_given():
    kind = kind_of(aten.add.Tensor)
    assert kind.by_name((1, 2), {"alpha": 3}) == {"self": 1, "other": 2, "alpha": 3}
    assert kind.by_name((1,), {"other": 2}) == {"self": 1, "other": 2}


def test_tensors_are_found_in_containers_in_their_order():
    a, b, c, d = (torch.ones(n) for n in range(1, 5))
    found = tensors_in([1, a, "x", [b, None, (c,)], {"d": d, "e": torch.float32}, {1}, object()])
    assert [len(x) for x in found] == [1, 2, 3, 4]


def test_plain_arguments_are_those_without_tensors():
    given = (X, 2, [1, X], (1, "a"), None)
    named = {"of": X, "alpha": 0.5, "dtype": torch.float32, "in": {"a": X}}
    assert plain_arguments(given, named) == (
        (5, 4), [1, 3, 4], ["alpha", "dtype"], [2, (1, "a"), None, 0.5, torch.float32]
    )  # fmt: skip


class Named(NamedTuple):
    """A tuple with names, which is made of arguments one by one."""

    values: torch.Tensor


def test_containers_of_tensors_keep_their_form_on_this_rank():
    starts = {}
    found = on_this_rank([X, (X, 1), {"a": X}, torch.finfo(torch.half)], starts)
    assert [type(x) for x in found] == [torch.Tensor, tuple, dict, torch.finfo]
    assert found[0] is found[1][0] is found[2]["a"] is X
    named = Named(X)
    assert on_this_rank(named, starts) is named
    assert starts == {}


# -- calls that are alike --------------------------------------------------------------------------

# Another second argument, or other named arguments, of `aten.sum` in a later call; whether it is
# taken for the first one, `sum(x, [1, 2], keepdim=True, dtype=None)`.
LATER = {
    "the same": ((X, [1, 2]), {"keepdim": True, "dtype": None}, True),
    "other numbers in a tensor": ((X * 2, [1, 2]), {"keepdim": True, "dtype": None}, True),
    "another dimension": ((X, [1, 0]), {"keepdim": True, "dtype": None}, False),
    "fewer dimensions": ((X, [1]), {"keepdim": True, "dtype": None}, False),
    "a tuple": ((X, (1, 2)), {"keepdim": True, "dtype": None}, False),
    "an integer that is true": ((X, [1, 2]), {"keepdim": 1, "dtype": None}, False),
    "another type": ((X, [1, 2]), {"keepdim": True, "dtype": torch.half}, False),
    "an argument less": ((X, [1, 2]), {"keepdim": True}, False),
    "an argument more": ((X, [1, 2], 1), {"keepdim": True, "dtype": None}, False),
    "another name": ((X, [1, 2]), {"keepdim": True, "out": None}, True),
    "by position": ((X, [1, 2], True), {"dtype": None}, False),
    "a tensor for a number": ((X, X), {"keepdim": True, "dtype": None}, False),
}


@pytest.mark.parametrize("later", LATER)
def test_a_call_goes_on_along_its_plan_if_its_plain_arguments_are_the_same(later):
    args, kwargs, fits = LATER[later]
    plain = plain_arguments((X, [1, 2]), {"keepdim": True, "dtype": None})
    step = Step(aten.sum.dim_IntList, plain, "choice")
    known = Known(Plan((step, step), {}))
    assert known.next(DETACH, (X,), {}) is None  # which is no more than a view
    assert known.next(step.func, args, kwargs) is (step if fits else None)
    assert known.departed is not fits
    assert known.has_left()  # it ended before its plan
    assert known.next(step.func, (X, [1, 2]), {"keepdim": True, "dtype": None}) is (
        step if fits else None
    )
    assert known.has_left() is not fits
    assert known.is_complete is fits
    assert known.next(aten.mul.Tensor, (X, X), {}) is None  # what follows is not compared
    assert known.departed is not fits


def test_a_plan_is_gone_along_in_the_order_of_its_operators():
    idle, shows = Step(aten.mul.Tensor, None), Step(aten.topk.default, None, "choice")
    assert idle.is_idle
    assert not shows.is_idle
    assert not idle._replace(keeps={0: len}).is_idle
    known = Known(Plan((idle, shows), {}, goes_on=True))
    assert known.goes_on
    assert not Known(Plan((), {})).goes_on
    assert Known(Plan((), {})).is_complete
    assert known.next(aten.mul.Tensor, (X, 2), {}) is None
    assert not known.departed
    assert known.next(aten.topk.default, (X, 2), {}) is shows
    assert not known.has_left()
    known.failed = True
    assert known.has_left()
    other = Known(Plan((idle, shows), {}))
    assert other.next(aten.topk.default, (X, 2), {}) is None
    assert other.departed


def test_modules_are_asked_for_only_by_plans_that_keep_their_outputs():
    keep = {3: lambda args, output: output * 2}
    known = Known(Plan((), {1: keep}))
    assert known.sees_modules
    assert not Known(Plan((), {})).sees_modules
    held = Step(aten.topk.default, None, "choice", (lambda held: held[3],))
    known = Known(Plan((held,), {1: keep}))
    for output in (X, X + 1, X + 2):
        known.projected(output, X)
    known.next(aten.topk.default, (X, 2), {})
    assert torch.equal(known.columns(X), (X + 1) * 2)


# -- forms of calls --------------------------------------------------------------------------------

MODULE = nn.Linear(4, 4)
GIVEN = ([X, {"mask": X > 0, "scale": 0.5}, None],)
# Other arguments than these, and whether the call has another form then.
OTHERS = {
    "the same": (GIVEN, False),
    "other numbers": (([X + 1, {"mask": X < 0, "scale": 0.5}, None],), False),
    "a tuple": (((X, {"mask": X > 0, "scale": 0.5}, None),), False),
    "another shape": (([X[:1], {"mask": X > 0, "scale": 0.5}, None],), True),
    "other strides": (([X.mT.contiguous().mT, {"mask": X > 0, "scale": 0.5}, None],), True),
    "another type": (([X.double(), {"mask": X > 0, "scale": 0.5}, None],), True),
    "another class": (([nn.Parameter(X), {"mask": X > 0, "scale": 0.5}, None],), True),
    "no mask": (([X, {"mask": None, "scale": 0.5}, None],), True),
    "another number": (([X, {"mask": X > 0, "scale": 0.25}, None],), True),
    "another name": (([X, {"masks": X > 0, "scale": 0.5}, None],), True),
    "an object": (([X, {"mask": X > 0, "scale": 0.5}, object()],), True),
    "a word": (([X, {"mask": X > 0, "scale": 0.5}, "eager"],), True),
    "true": (([X, {"mask": X > 0, "scale": 0.5}, True],), True),
    "an argument more": ((*GIVEN, None), True),
    "sparse": (([X.to_sparse(), {"mask": X > 0, "scale": 0.5}, None],), True),
}


@pytest.mark.parametrize("other", OTHERS)
def test_calls_have_one_form_if_their_arguments_are_alike_but_for_numbers_in_tensors(other):
    given, is_another = OTHERS[other]
    form = form_of(MODULE, GIVEN, ("views",))
    assert (form_of(MODULE, given, ("views",)) != form) is is_another
    hash(form_of(MODULE, given, ("views",)))


def test_objects_of_one_class_make_one_form():
    first, second = (form_of(MODULE, (X, object()), ()) for _ in range(2))
    assert first == second != form_of(MODULE, (X, []), ())


def test_a_call_has_another_form_in_another_way_of_torch():
    def form(wanted=("views",)):
        return form_of(MODULE, GIVEN, wanted)

    forms = [form(), form(("other views",))]
    with torch.no_grad():
        forms.append(form())
    with torch.inference_mode():
        forms.append(form())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            forms.append(form())
    MODULE.eval()
    forms.append(form())
    MODULE.train()
    assert len(set(forms)) == len(forms) == 7
    assert form() == forms[0]
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        assert form() == forms[0]


# -- plans of a model ------------------------------------------------------------------------------


def test_plans_are_those_of_a_module_and_of_a_form():
    plans, (one, other) = Plans(), (nn.Linear(1, 1), nn.Linear(1, 1))
    first, second, third = (Plan((), {}, goes_on=n > 1) for n in range(3))
    plans.learn(one, "long", first)
    plans.learn(one, "short", second)
    plans.learn(other, "long", third)
    assert plans.of(one, "long") is first
    assert plans.of(one, "short") is second
    assert plans.of(other, "long") is third
    assert plans.of(other, "short") is None
    assert plans.of(nn.Linear(1, 1), "long") is None


def test_a_plan_that_was_left_is_forgotten_and_after_two_departures_none_is_made():
    plans, (one, other) = Plans(), (nn.Linear(1, 1), nn.Linear(1, 1))
    for form in ("long", "short"):
        plans.learn(one, form, Plan((), {}))
    for departures in (1, 2):
        plans.leave(one, "long")
        plans.leave(other, "unheard of")
        assert plans.of(one, "long") is None
        plans.learn(one, "long", Plan((), {}))
        assert (plans.of(one, "long") is None) == (departures == 2)
    assert plans.of(one, "short") is not None
    plans.learn(one, "new", Plan((), {}))
    assert plans.of(one, "new") is None


def test_eight_forms_of_a_block_are_remembered_and_the_oldest_is_forgotten():
    plans, block = Plans(), nn.Linear(1, 1)
    for form in range(8):
        plans.learn(block, form, Plan((), {}))
    assert all(plans.of(block, form) for form in range(8))
    plans.learn(block, 8, Plan((), {}))
    assert [form for form in range(9) if plans.of(block, form)] == [*range(1, 9)]
