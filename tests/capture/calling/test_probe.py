"""One pass more: what the model is given of inputs and of batches."""

import time
from collections import UserDict
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from geomon.capture import extra_pass

SEEN = []  # what a module keeps of its own is as before the pass


@pytest.fixture(autouse=True)
def _nothing_seen():
    SEEN.clear()


class Recording(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def note(self, *args, **kwargs):
        assert not self.training
        assert not torch.is_grad_enabled()
        SEEN.append((args, kwargs))
        return self.scale * 2


class Net(Recording):
    def forward(self, ids, /, labels=None, *, weights=None):
        named = {"labels": labels, "weights": weights}
        return self.note(ids, **{name: x for name, x in named.items() if x is not None})


class Two(Recording):
    def forward(self, ids, mask, labels=None):
        return self.note(ids, mask, *([] if labels is None else [labels]))


class Named(Recording):
    def forward(self, labels=None, weights=None):
        return self.note(labels, weights)


class All(Recording):
    def forward(self, *parts, **more):
        return self.note(*parts, **more)


@contextmanager
def window(entered):
    entered.append("in")
    yield
    entered.append("out")


NAMES = {"other": 1}
# A model, what it is given, whether that is a batch; arguments and keywords that it takes.
GIVEN = [
    (Net, 7, False, (7,), {}, ""),
    (All, {"x": 7, "y": 8}, False, (), {"x": 7, "y": 8}, ""),
    (All, UserDict(x=7, y=8), False, (), {"x": 7, "y": 8}, ""),
    (All, [7, 8], False, (7, 8), {}, ""),
    (All, lambda model: model(7), False, (7,), {}, ""),
    (All, lambda model: model(7), True, (7,), {}, ""),
    (Net, 7, True, (7,), {}, ""),
    (Named, {"labels": 1, "weights": 2}, True, (1, 2), {}, ""),
    (Named, {"labels": 1, "ids": 2, 3: 4}, True, (1, None), {}, "ids, 3"),
    (Net, NAMES, True, (NAMES,), {}, ""),  # no name is one of its own
    (All, NAMES, True, (), NAMES, ""),
    (Net, (1, 2, 3), True, (1,), {}, "part 2, part 3 of 3"),
    (Two, [1, 2, 3], True, (1, 2), {}, "part 3 of 3"),
    (Two, [1, 2], True, (1, 2), {}, ""),
    (All, (1, 2, 3), True, (1, 2, 3), {}, ""),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("kind", "inputs", "batched", "args", "kwargs", "left_out"), GIVEN)
def test_the_model_runs_once_as_its_forward_takes_it(
    kind, inputs, batched, args, kwargs, left_out, compiled
):
    inner, entered = kind(), []
    inner.forward = torch.compiler.disable(inner.forward)
    model = torch.compile(inner, backend="eager") if compiled else inner
    found = extra_pass(model, inputs, window(entered), around=[model] if batched else None)
    assert [(args, kwargs)] == SEEN
    assert (found.left_out, found.loss, entered) == (left_out, None, ["in", "out"])
    assert 0 <= found.seconds < time.perf_counter()  # no point in time
    assert inner.training


def test_a_model_without_parameters_runs_on_the_host():
    values = torch.ones(2)
    found = extra_pass(nn.Identity(), values, window([]), loss=lambda out, given: (out, given))
    assert all(each.device.type == "cpu" for each in found.loss)


@pytest.mark.parametrize("batch", [[1, 2], {"ids": 1}])
def test_the_first_module_around_the_blocks_that_has_a_forward_is_called(batch):
    inner = All()
    model = nn.ModuleDict({"net": inner})
    extra_pass(model, batch, window([]), around=[model, inner])
    assert [((1, 2), {}) if isinstance(batch, list) else ((), {"ids": 1})] == SEEN
    with pytest.raises(
        TypeError, match="neither ModuleDict nor the modules around its blocks have a forward"
    ):
        extra_pass(model, batch, window([]), around=[model])


def test_the_loss_is_computed_of_outputs_and_inputs_behind_the_window():
    entered = []

    def loss(outputs, inputs):
        assert entered == ["in", "out"]
        assert not torch.is_grad_enabled()
        return outputs.item(), inputs["x"]

    found = extra_pass(All(), {"x": 7}, window(entered), loss=loss)
    assert found.loss == (2.0, 7)


def test_a_function_is_called_with_what_it_is_to_be_given():
    model = Net()
    extra_pass(model, lambda own: own[0](7), window([]), given=[model])
    assert SEEN == [((7,), {})]
