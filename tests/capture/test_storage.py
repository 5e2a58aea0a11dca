"""The memory of a tensor identifies it, whatever is wrapped around it."""

import pytest
import torch

from geomon.capture.storage import followed_part, local_shard, send, storage_of

X = torch.arange(12.0).view(3, 4)


def test_tensors_share_their_memory_with_their_views_alone():
    place = storage_of(X)
    assert place == X.data_ptr()
    for view in (X[1:], X.T, X.view(-1)[5:], X.detach(), X.expand(2, 3, 4)):
        assert storage_of(view) == place
    assert storage_of(X.clone()) not in (None, place)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [X.to_sparse, lambda: X.to("meta"), lambda: torch.empty(0),
     lambda: torch.nested.nested_tensor([X, X[:2]]),
     lambda: torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)],
    ids=["sparse", "meta", "empty", "nested", "jagged"],
)  # fmt: skip
def test_tensors_without_memory_of_their_own_have_no_place(make):
    assert storage_of(make()) is None


def test_wrappers_of_derivatives_are_taken_away():
    found = []

    def loss(x):
        doubly = torch.func.grad(lambda y: found.append((y, followed_part(y))) or y.sum())
        doubly(x)
        found.append((x, local_shard(x)))
        return x.sum()

    torch.func.grad(loss)(X)
    for given, inner in found:
        assert given is not inner
        assert type(inner) is torch.Tensor
        assert storage_of(inner) == X.data_ptr()
    assert len(found) == 2
    assert followed_part(X) is local_shard(X) is X


class Sharded(torch.Tensor):
    """Stands for a DTensor: a rank has its first row."""

    gradients = None

    def to_local(self):
        self.gradients = torch.is_grad_enabled()
        return self.as_subclass(torch.Tensor)[:1]


def test_the_part_of_a_rank_is_taken_without_gradients():
    values = X.clone().as_subclass(Sharded)
    for take in (followed_part, local_shard):
        assert torch.equal(take(values), X[:1])
        assert values.gradients is False
    assert storage_of(values) == storage_of(values.as_subclass(torch.Tensor))


def test_numbers_are_sent_to_a_device():
    assert send(X, torch.device("meta")).device.type == "meta"
    assert send(X, torch.device("cpu")) is X
