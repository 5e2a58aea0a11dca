import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from geomon.capture.storage import followed_part, local_shard, storage_of


class Sharded(torch.Tensor):
    """A tensor with a part on this rank."""

    def to_local(self):
        assert not torch.is_grad_enabled()
        return self.part


def sharded(part):
    found = torch.zeros(4, 3).as_subclass(Sharded)
    found.part = part
    return found


def test_a_plain_tensor_is_its_own_part():
    for values in (torch.ones(3), nn.Parameter(torch.ones(3))):
        assert local_shard(values) is values is followed_part(values)


def test_of_a_sharded_tensor_the_part_that_is_here_is_taken():
    part = torch.ones(2, 3)
    assert local_shard(sharded(part)) is part is followed_part(sharded(part))
    assert storage_of(sharded(part)) == part.data_ptr()


def test_a_collective_is_waited_for_only_where_its_numbers_are_wanted():
    inner = torch.ones(2)
    underway = AsyncCollectiveTensor(inner)
    assert followed_part(underway) is inner
    assert not underway.completed
    found = local_shard(underway)
    assert underway.completed
    assert torch.equal(found, inner)


def test_what_transforms_wrap_around_a_tensor_is_taken_away():
    seen = []

    def function(x):
        seen.append(local_shard(x))
        return (x * 2).sum()

    given = torch.ones(3)
    torch.func.grad(lambda x: torch.func.grad(function)(x).sum())(given)
    assert seen[0].data_ptr() == given.data_ptr()


def test_views_lie_in_the_memory_of_the_whole_and_what_has_none_says_so():
    whole = torch.ones(4, 3)
    assert storage_of(whole[2:]) == storage_of(whole.T) == whole.data_ptr()
    assert storage_of(torch.ones(4, 3)) != storage_of(whole)
    assert storage_of(whole.to_sparse()) is None
    assert storage_of(torch.ones(2, device="meta")) is None
    assert storage_of(torch.ones(0)) is None
