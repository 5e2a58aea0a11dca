"""What goes wrong is a warning; a strict monitor raises it."""

import pytest

from geomon.distributed import RankFailedError, RanksLostError
from geomon.monitor.warnings import Warnings


class Connected:
    connected = True

    def __init__(self, rank=0):
        self.rank = rank

    def disconnect(self):
        self.connected = False


@pytest.mark.parametrize(
    ("error", "words"),
    [(ValueError("no"), "ValueError: no"), (RankFailedError("rank 1: OSError"), "rank 1: OSError")],
)
def test_a_reading_that_fails_is_said_once_with_its_reason(caplog, error, words):
    warnings = Warnings(Connected(), strict=False)
    for _ in range(2):
        with warnings.guard():
            raise error
    assert caplog.messages == [f"a reading failed and is left out: {words}"]


def test_a_rank_that_does_not_answer_is_left_alone_and_a_strict_one_raises(caplog):
    group = Connected()
    with Warnings(group, strict=False).guard():
        raise RanksLostError("no answer")
    assert not group.connected
    assert "rank 0 lost the other ranks (no answer)" in caplog.text
    assert "left out" not in caplog.text
    group = Connected()
    with pytest.raises(RanksLostError), Warnings(group, strict=True).guard():
        raise RanksLostError("no answer")
    assert not group.connected


def test_of_connected_ranks_the_first_one_warns_and_each_one_that_is_alone(caplog):
    group = Connected(rank=1)
    warnings = Warnings(group, strict=False)
    warnings.warn("together")
    group.disconnect()
    warnings.warn("alone")
    assert caplog.messages == ["alone"]
