import itertools
from contextlib import suppress

import pytest
import torch
from interrupting import Interrupting, files

from geomon.capture.calling.patches import Patch, replace, run_eagerly, without_fast_path


class Switch:
    on = False


def patch():
    """A patch that turns a switch on, and the switch."""
    switch = Switch()
    switch.on = False
    return Patch(lambda undo: replace(undo, switch, "on", True)), switch


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_holder_undoes_the_change_in_whatever_order_they_leave(order):
    change, switch = patch()
    holders = [object() for _ in range(3)]
    for holder in holders:
        change.hold(holder)
        assert switch.on
    assert change.holders == tuple(holders)
    for place in order:
        assert switch.on
        change.release(holders[place])
    assert not switch.on
    change.release(holders[0])  # holds nothing any more
    assert not switch.on


def test_a_change_is_suspended_for_all_who_hold_it_and_is_back_after_the_last_of_them():
    change, switch = patch()
    with change.held():
        with change.suspended():
            assert not switch.on
            with change.suspended(), change.held():
                assert not switch.on
            assert not switch.on
        assert switch.on
        with change.suspended():
            switch.on = "changed by another"
        assert switch.on is True
        switch.on = "changed by another"
    assert switch.on == "changed by another"


def test_what_ctrl_c_leaves_of_a_suspension_ends_with_the_last_holder():
    """At any line of it; that the holder itself leaves is up to who holds it."""

    def suspends(at):
        change, switch = patch()
        change.hold(change)
        interrupting = Interrupting(files("capture/calling/patches.py"), at)
        with suppress(KeyboardInterrupt), interrupting, change.suspended():
            pass
        change.release(change)
        assert not switch.on
        with change.held():
            assert switch.on
        assert not switch.on
        return len(interrupting.lines)

    for at in range(1, suspends(-1) + 1):
        suspends(at)


@pytest.mark.parametrize("before", [True, False])
def test_the_fast_path_of_encoders_is_closed_and_as_it_was_afterwards(before):
    torch.backends.mha.set_fastpath_enabled(before)
    try:
        with without_fast_path.held():
            assert not torch.backends.mha.get_fastpath_enabled()
            with without_fast_path.suspended():
                assert torch.backends.mha.get_fastpath_enabled() == before
        assert torch.backends.mha.get_fastpath_enabled() == before
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def stance():
    return torch._dynamo.eval_frame._stance.stance


def test_compiled_functions_run_eagerly_unless_somebody_has_said_otherwise_since():
    with run_eagerly.held():
        assert stance() == "force_eager"
    assert stance() == "default"
    with run_eagerly.held():
        torch.compiler.set_stance("eager_on_recompile")
    assert stance() == "eager_on_recompile"
    torch.compiler.set_stance("default")
