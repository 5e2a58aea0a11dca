import pytest
import torch
from torch import nn

from geomon.capture.calling.batch import call_of_batch


class Net(nn.Module):
    def forward(self, ids, /, labels=None, *, weights=None):
        return ids


class Two(nn.Module):
    def forward(self, ids, mask, labels=None):
        return ids


class All(nn.Module):
    def forward(self, *parts, **more):
        return parts


@pytest.mark.parametrize("batch", [[1, 2], {"ids": 1}])
def test_where_nothing_has_a_forward_a_function_is_asked_for(batch):
    model = nn.ModuleList([nn.Identity()])
    with pytest.raises(
        TypeError, match="ModuleList nor the modules around its blocks have a forward"
    ):
        call_of_batch(model, [model], batch)


def test_the_first_module_around_the_blocks_that_has_a_forward_is_called():
    inner = Net()
    model = nn.ModuleDict({"net": inner})
    assert call_of_batch(model, [model, inner], torch.ones(2)).module is inner


@pytest.mark.parametrize(
    ("model", "batch", "args", "kwargs", "left_out"),
    [
        (Net(), 7, (7,), {}, ""),
        (Net(), {"labels": 1, "weights": 2}, (), {"labels": 1, "weights": 2}, ""),
        (Net(), {"labels": 1, "ids": 2, 3: 4}, (), {"labels": 1}, "ids, 3"),  # ids has no name
        (Net(), {"other": 1}, ({"other": 1},), {}, ""),
        (All(), {"other": 1}, (), {"other": 1}, ""),
        (Net(), (1, 2, 3), (1,), {}, "part 2, part 3 of 3"),
        (Two(), [1, 2, 3], (1, 2), {}, "part 3 of 3"),
        (Two(), [1, 2], (1, 2), {}, ""),
        (All(), (1, 2, 3), (1, 2, 3), {}, ""),
    ],
)
def test_a_batch_is_given_as_the_forward_takes_it(model, batch, args, kwargs, left_out):
    call = call_of_batch(model, [model], batch)
    assert (call.module, call.args, call.kwargs, call.left_out) == (model, args, kwargs, left_out)


def test_of_a_compiled_model_the_forward_inside_says_what_it_takes():
    model = torch.compile(Two(), backend="eager")
    call = call_of_batch(model, [model], {"ids": 1, "mask": 2, "more": 3})
    assert (call.module, call.kwargs, call.left_out) == (model, {"ids": 1, "mask": 2}, "more")
