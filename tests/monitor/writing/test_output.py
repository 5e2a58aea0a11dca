"""What goes wrong is a warning; a strict monitor raises it."""

import pytest

from geomon.distributed import RanksLostError
from geomon.monitor.writing.output import Warnings


class Connected:
    rank = 0
    connected = True

    def disconnect(self):
        self.connected = False


def test_a_rank_that_does_not_answer_is_left_alone_and_a_strict_one_raises(caplog):
    group = Connected()
    with Warnings(group, strict=False).guard():
        raise RanksLostError("no answer")
    assert not group.connected
    assert "rank 0 lost the other ranks (no answer)" in caplog.text
    group = Connected()
    with pytest.raises(RanksLostError), Warnings(group, strict=True).guard():
        raise RanksLostError("no answer")
    assert not group.connected
