import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from geomon.capture.tap.unseen import unseen


def compute():
    return (torch.ones(3) * 2).sum()


def test_modes_of_the_training_see_no_operator():
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append("function")
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append("operator")
            return function(*args, **(kwargs or {}))

    with Functions(), Operators():
        with unseen():
            compute()
        assert not seen
        compute()
    assert set(seen) == {"function", "operator"}


def test_subclasses_see_no_operator():
    class Counting(torch.Tensor):
        seen = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.seen += 1
            return super().__torch_function__(function, types, args, kwargs or {})

    tensor = torch.ones(3).as_subclass(Counting)
    with unseen():
        tensor + 1
    assert not Counting.seen
    tensor + 1
    assert Counting.seen


def test_transforms_of_torch_func_are_left():
    drawn = []

    def draw(x):
        with unseen():  # vmap refuses random numbers
            drawn.append(torch.rand(4))
        return x * 2

    torch.testing.assert_close(torch.func.vmap(draw)(torch.ones(3)), torch.full((3,), 2.0))
    assert drawn[0].shape == (4,)
