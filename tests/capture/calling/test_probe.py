import time
from collections import UserDict
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from geomon.capture.calling.patches import in_extra_pass
from geomon.capture.calling.probe import extra_pass
from geomon.capture.snapshot import MeanLoss

SEEN = []  # what a module keeps of its own is as before the pass


@pytest.fixture(autouse=True)
def _nothing_seen():
    SEEN.clear()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, y=None):
        assert not self.training
        assert in_extra_pass()
        assert not torch.is_grad_enabled()
        SEEN.append((x, y))
        return x * self.scale


ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


def window(entered):
    @contextmanager
    def opened():
        entered.append("in")
        yield
        entered.append("out")

    return opened()


@pytest.mark.parametrize(
    ("inputs", "batched", "given", "left_out"),
    [
        (ONE, False, (ONE, None), ""),
        ({"x": ONE, "y": TWO}, False, (ONE, TWO), ""),
        (UserDict(x=ONE, y=TWO), False, (ONE, TWO), ""),
        ([ONE, TWO], False, (ONE, TWO), ""),
        (lambda model: model(TWO), False, (TWO, None), ""),
        (lambda model: model(TWO), True, (TWO, None), ""),
        ({"x": ONE, "z": TWO}, True, (ONE, None), "z"),
        ((ONE, TWO), True, (ONE, None), "part 2 of 2"),
        (ONE, True, (ONE, None), ""),
    ],
)
def test_the_model_runs_once_on_inputs_and_on_batches(inputs, batched, given, left_out):
    model, entered = Net(), []
    found = extra_pass(model, inputs, window(entered), around=[model] if batched else None)
    ((x, y),) = SEEN
    assert torch.equal(x, given[0])
    assert y is given[1] is None or torch.equal(y, given[1])
    assert (found.left_out, found.loss, entered) == (left_out, None, ["in", "out"])
    assert 0 <= found.seconds < time.perf_counter()  # no point in time
    assert model.training
    assert not in_extra_pass()


def test_the_loss_is_computed_of_outputs_and_inputs_behind_the_window():
    model, entered = Net(), []

    def loss(outputs, inputs):
        assert entered == ["in", "out"]
        assert not torch.is_grad_enabled()
        return MeanLoss(float(outputs.sum() + inputs["x"].sum()), 1)

    found = extra_pass(model, {"x": ONE}, window(entered), loss=loss)
    assert found.loss == MeanLoss(4.0, 1)


def test_a_function_is_called_with_what_it_is_to_be_given():
    model, entered = Net(), []
    extra_pass(model, lambda own: own[0](TWO), window(entered), given=[model])
    assert torch.equal(SEEN[0][0], TWO)
