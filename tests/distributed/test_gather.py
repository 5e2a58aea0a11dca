import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from geomon.capture.snapshot import Layer
from geomon.distributed import (
    RankFailedError,
    RankGroup,
    RanksLostError,
    find_ranks,
    join_ranks,
)
from geomon.distributed.mesh import Mesh, RankPlace
from geomon.distributed.packing import pack, unpack

# -- shares ----------------------------------------------------------------------------------------


@given(rows=st.integers(0, 10_000), size=st.integers(1, 64))
def test_the_shares_of_the_rows_are_all_the_rows_and_alike(rows, size):
    shares = [RankGroup(rank, size, object()).rows_of(rows) for rank in range(size)]
    assert sum(shares) == rows
    assert max(shares) - min(shares) <= 1


def test_ranks_that_give_no_rows_leave_theirs_to_the_others():
    group = RankGroup(1, 6, object())
    group.share_rows_among(4)
    assert group.rows_of(10) == 3
    group.share_rows_among(6)
    assert group.rows_of(10) == 2


def test_a_rank_that_exchanges_nothing_is_alone_with_its_rows():
    alone, with_others = RankGroup(2, 4), RankGroup(2, 4, object())
    for group, counts, rows in ((alone, (1, 0, 0, 1, 0), 10), (with_others, (4, 2, 2, 4, 3), 2)):
        own = group.members, group.place, group.data_rank, group.data_size, group.data_rank_of(3)
        assert own == counts
        assert (group.rank, group.size, group.own.rank) == (2, 4, 2)
        assert group.rows_of(10) == rows
    assert RankGroup(2, 4, mesh=Mesh((RankPlace(2, num_stages=5),))).own.num_stages == 5
    for size in (1, 2, 3):
        assert [RankGroup(rank, size).own.rank for rank in range(size)] == [*range(size)]
    alone.share_rows_among(3)
    assert alone.rows_of(10) == 10
    assert alone.all_gather("a") == alone.gather("a") == alone.all_to_all(("a",)) == ["a"]
    assert alone.broadcast("a") == "a"
    assert alone.meet(3, "a") == ["a"]
    assert alone.why_not_connected is None


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("a rank is gone. Details\nfollow"), (RanksLostError, "^a rank is gone$")),
        (ValueError("not to be sent. Ever"), (ValueError, r"^not to be sent\. Ever$")),
    ],
)
def test_an_exchange_that_fails_is_a_lost_rank_unless_the_value_is_at_fault(
    monkeypatch, error, raised
):
    def fails(*given, group):
        raise error

    monkeypatch.setattr(dist, "all_gather_object", fails)
    with pytest.raises(raised[0], match=raised[1]):
        RankGroup(0, 2, object()).all_gather("one")


@pytest.mark.parametrize(("asked", "limit"), [(60, 60), (1000, 300)])
def test_ranks_that_cannot_be_connected_are_left_alone_with_a_warning(
    monkeypatch, caplog, asked, limit
):
    """At most half of the time is waited that torch waits, which is 600 s if it is not known."""
    given = {}

    def refuse(**options):
        given.update(options)
        raise RuntimeError("no such backend")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "new_group", refuse)
    place = RankPlace(1, stages=(1,), num_stages=2)
    group = join_ranks(place, {"tokens": 3}, timeout=asked)
    assert (group.rank, group.size, group.connected, group.own) == (1, 3, False, place)
    assert given["timeout"].total_seconds() == limit
    assert (given["backend"], given["group_desc"]) == ("gloo", "geomon")
    (said,) = caplog.messages
    assert "no gloo group could be made" in said
    assert said.endswith("(no such backend)")


# -- what ranks say to one another -----------------------------------------------------------------


class Answers(RankGroup):
    """A rank whose collectives answer what the test says, one after another."""

    def __init__(self, *answers):
        super().__init__(0, 2, object())
        self.answers = list(answers)

    def all_gather(self, value):
        return [value, self.answers.pop(0)]


def test_a_rank_that_is_ahead_waits_and_one_that_is_behind_leaves_its_reading_out():
    ahead = Answers((4, "c"), (8, "b"), (9, "a"))
    assert ahead.meet(9, "own") == ["own", "a"]
    assert not ahead.answers
    with pytest.raises(RankFailedError, match="rank 1 reads step 9 but rank 0 reads step 4"):
        Answers((9, "a")).meet(4, "own")


def test_a_rank_waits_for_the_others_no_longer_than_the_limit_in_a_whole_reading(monkeypatch):
    """Late at each exchange, by less than the limit: it held the training up at every reading."""
    monkeypatch.setattr(dist, "all_gather_object", lambda *args, group: time.sleep(0.4))
    ranks = RankGroup(0, 2, object(), timeout=1.0)
    for _ in range(3):
        ranks.begin_reading()
        ranks.all_gather("one")
        ranks.all_gather("another")
    with pytest.raises(RanksLostError, match="no answer within the 1 s of a reading"):
        ranks.all_gather("a third")
    assert not ranks.connected


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_a_parcel_comes_back_as_it_was():
    rows, missing = drawn(7, 6), {"positions": "why not"}
    layer = Layer(1, "blocks.0", {"hidden": rows, "token_ids": torch.arange(7)}, missing)
    tensors = {
        "empty": torch.empty(0, 3), "turned": drawn(3, 5).t(), "half": drawn(5).bfloat16(),
        "flags": torch.tensor([True, False, True]), "scalar": torch.tensor(3.0).double(),
    }  # fmt: skip
    found, plain, words = unpack(pack([layer, tensors, ("a", None, 0.5)]))
    assert torch.equal(found.captured["hidden"], rows)
    assert found.missing == missing
    for name, value in tensors.items():
        assert plain[name].dtype == value.dtype
        assert torch.equal(plain[name], value)
    assert words == ("a", None, 0.5)


def test_one_process_is_connected_to_nothing_and_refuses_nothing():
    assert (find_ranks().rank, find_ranks().size) == (0, 1)
    assert not join_ranks().connected
