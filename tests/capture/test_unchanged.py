"""What an extra pass changes in a model is put back."""

import sys

import pytest
import torch
from torch import nn

from geomon.capture.unchanged import left_unchanged


class Counting(nn.Module):
    """Writes into everything that a forward pass may write into."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.scale = 1.5
        self.table = torch.arange(4.0)
        self.names = ["kept"]
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scale = 2.5
        self.table[0] = 99
        self.table = torch.arange(8.0)
        self.longest = x.shape[0]
        self.seen += 1
        return x


def test_numbers_and_tensors_that_are_attributes_are_put_back():
    model = Counting()
    table = model.table
    with left_unchanged(model):
        model(torch.ones(2))
        assert model.calls == 1
    assert (model.calls, model.scale) == (0, 1.5)
    assert model.table is table
    assert torch.equal(table, torch.arange(4.0))
    assert not hasattr(model, "longest")
    assert torch.equal(model.seen, torch.zeros(3))


def test_other_attributes_are_the_models_own():
    model = Counting()
    with left_unchanged(model):
        model.names = ["changed"]
    assert model.names == ["changed"]


@pytest.mark.parametrize("how", ["normal", "exception"])
def test_parameters_that_fsdp_gathered_are_sharded_again(how, monkeypatch):
    """Of several ranks it is tested with FSDP itself; here, that it is asked for at all."""

    class Sharded(nn.Module):
        asked = 0

        def reshard(self) -> None:
            Sharded.asked += 1

    class Nothing(nn.Module): ...

    stand_in = type(sys)("torch.distributed.fsdp")
    stand_in.FSDPModule, stand_in.FullyShardedDataParallel = Sharded, Nothing
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", stand_in)
    model = nn.Sequential(Sharded(), nn.Linear(2, 2))
    try:
        with left_unchanged(model):
            if how == "exception":
                raise RuntimeError
    except RuntimeError:
        pass
    assert Sharded.asked > 0
