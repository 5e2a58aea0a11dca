import functools
import gc
import threading
from contextlib import contextmanager, nullcontext, suppress

import pytest
import torch
from torch import nn

from geomon import Memory, Monitor, every, select
from geomon.capture import private
from geomon.capture.calling import calls, patches
from geomon.capture.calling.patches import (
    Patch,
    end_extra_passes,
    extra_pass_begun,
    in_extra_pass,
    records_gradients,
    replace,
    run_eagerly,
    subclasses,
    without_fast_path,
)
from geomon.monitor import CallbackSession
from support.fingerprint import fingerprint, random_state
from support.mishaps import Interrupting, files
from support.models import PlainDecoder, batch


class Switch:
    on = False


def patch():
    """A patch that turns a switch on, and the switch."""
    switch = Switch()
    switch.on = False
    return Patch(lambda undo: replace(undo, switch, "on", True)), switch


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


def test_each_holder_is_released_alone_and_unknown_ones_are_ignored():
    change, switch = patch()
    first, second, third = [], [], []  # which are equal
    for holder in (first, second, third):
        change.hold(holder)
    change.release(second, [])
    assert [*map(id, change.holders)] == [id(first), id(third)]
    assert switch.on
    change.release(first, third)
    assert change.holders == ()
    assert not switch.on
    change.release(first)
    assert not switch.on


def test_changes_are_undone_in_reverse_and_made_again_after_a_suspension():
    told = []

    def apply(undo):
        for number in (1, 2, 3):
            undo(lambda number=number: told.append(-number))
            told.append(number)

    change = Patch(apply)
    with change.held(), change.held():
        assert told == [1, 2, 3]
        with change.suspended():
            assert told == [1, 2, 3, -3, -2, -1]
        assert told[6:] == [1, 2, 3]
    assert told[9:] == [-3, -2, -1]


def test_suspensions_may_end_in_any_order():
    change, switch = patch()
    first, second = change.suspended(), change.suspended()
    with change.held():
        for suspension in (first, second):
            suspension.__enter__()
        first.__exit__(None, None, None)
        assert not switch.on
        second.__exit__(None, None, None)
        assert switch.on


def test_a_suspension_left_by_ctrl_c_ends_with_the_last_holder():
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


def test_a_body_left_by_ctrl_c_ends_with_the_last_window(other_locks):
    """At any line of it, and of the switch that it turns."""

    def holds(at):
        interrupting = Interrupting(files("capture/calling/patches.py"), at)
        with suppress(KeyboardInterrupt), interrupting, run_eagerly.held(), extra_pass_begun():
            pass
        end_extra_passes()
        assert stance() == "default", at
        assert not in_extra_pass()
        return len(interrupting.lines)

    for at in range(1, holds(-1) + 1):
        holds(at)


def test_what_a_body_of_another_thread_holds_is_left_to_it():
    begun, may_end = threading.Event(), threading.Event()

    def hold():
        with without_fast_path.held(), run_eagerly.held():
            begun.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    end_extra_passes()
    assert not torch.backends.mha.get_fastpath_enabled()
    assert stance() == "force_eager"
    may_end.set()
    thread.join()
    assert torch.backends.mha.get_fastpath_enabled()
    assert stance() == "default"


@pytest.mark.parametrize("trained", [True, False])
def test_an_extra_pass_knows_whether_the_training_recorded_gradients_before_it(trained):
    with torch.set_grad_enabled(trained):
        assert records_gradients() == trained
        with extra_pass_begun(), torch.set_grad_enabled(not trained):
            assert in_extra_pass()
            assert records_gradients() == trained
            with extra_pass_begun():
                assert records_gradients() != trained
            assert records_gradients() == trained
        assert not in_extra_pass()
        assert records_gradients() == trained


@pytest.mark.parametrize("is_allowed", [True, False])
def test_the_fused_path_of_torch_is_as_it_was(is_allowed):
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(is_allowed)
    with without_fast_path.held():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled() == is_allowed
    torch.backends.mha.set_fastpath_enabled(before)


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


class Marked(torch.Tensor):
    """A tensor of a class of the training's own."""


class Holder:
    """A window, which sees no operators while it is suspended."""

    def __init__(self):
        self.told = []

    @contextmanager
    def suspended(self):
        self.told.append("rests")
        yield
        self.told.append("goes on")


def own_new(kind, *given, **named):
    """As another tool may make tensors."""
    return torch._C.TensorBase.__new__(kind, *given, **named)


@pytest.mark.parametrize("others", ["none", "before", "since"])
def test_classes_of_tensors_are_made_while_windows_rest_unless_another_makes_them(others):
    holders, told = [Holder(), Holder()], ["rests", "goes on"]
    values = torch.ones(2)
    if others == "before":
        torch.Tensor.__new__ = staticmethod(own_new)
    with subclasses.held(holders[0]), subclasses.held(holders[1]):
        made = Marked(values)
        assert type(made) is Marked
        assert torch.equal(made.as_subclass(torch.Tensor), values)
        assert torch.Tensor([2.0]).item() == 2
        if others == "since":
            torch.Tensor.__new__ = staticmethod(own_new)
    assert [holder.told for holder in holders] == [[] if others == "before" else told * 2] * 2
    assert ("__new__" in vars(torch.Tensor)) == (others != "none")
    if others != "none":
        assert vars(torch.Tensor)["__new__"].__func__ is own_new
        del torch.Tensor.__new__
    Marked(values)
    assert [holder.told for holder in holders] == [[] if others == "before" else told * 2] * 2


# -- Ctrl-C at every line ------------------------------------------------------------------------

# Files that switch something of the process on and off, and those that call them.
SWITCHING = files(
    "capture/window.py", "capture/guard.py", "capture/observer.py", "capture/operator_watch.py",
    "capture/pass_recorder.py", "capture/watched_calls.py", "capture/calling/patches.py",
    "capture/calling/calls.py", "capture/tap/mode.py", "capture/modes.py",
)  # fmt: skip
PARTS = SWITCHING | files(
    "capture/calling/probe.py", "capture/unchanged.py", "monitor/monitor.py", "monitor/callback.py"
)


def kinds_of_tokens(token_ids):
    """A metric whose window follows the ids to the blocks."""
    return float(len(token_ids.unique()))


def due_step(probes, follows, model, ids, folder):
    """One due step, of a session or of a probe, and what is left to call afterwards."""
    metrics = select("variance") | ({"kinds": kinds_of_tokens} if follows else {})
    options = {
        "metrics": metrics, "tokens": 16, "directory": None, "sinks": [Memory()],
        "schedule": every(1),
    }  # fmt: skip
    if probes:
        monitor = Monitor(model, **options)
        return lambda: monitor.probe(0, ids), monitor.close
    session = CallbackSession(options, "test")
    session.start(model, 0, folder, [])

    def step():
        session.open_at_call(0)
        model(ids)
        session.close()

    return step, session.finish


@pytest.fixture
def other_locks(monkeypatch):
    """Locks for this test alone: a line where a `with` ends counts here, and keeps its lock.

    So it keeps torch's switch of tensor functions, which is therefore not touched here. Between the
    end of the lines inside and the release Python looks at no signal.
    """
    for module in (calls, patches):
        for patch in vars(module).values():
            if isinstance(patch, patches.Patch):
                monkeypatch.setattr(patch, "_lock", threading.RLock())
    monkeypatch.setattr(private, "without_functions", nullcontext)


@pytest.mark.parametrize(
    ("probes", "follows"), [(False, False), (True, False), (False, True)],
    ids=["inline", "probe", "inline, tokens followed"],
)  # fmt: skip
def test_ctrl_c_at_any_line_of_a_due_step_leaves_nothing(probes, follows, tmp_path, other_locks):
    torch.manual_seed(0)
    model, ids = PlainDecoder(width=8, layers=1, heads=2).train(), batch(1, 4)
    model.register_buffer("seen", torch.zeros(1))
    model.blocks[0].register_forward_pre_hook(lambda *given: None)
    before, random = fingerprint(model), random_state()
    parts = SWITCHING if follows else PARTS
    due_step(probes, follows, model, ids, tmp_path)[0]()  # after which what is cached is known
    step, _ = due_step(probes, follows, model, ids, tmp_path)
    gc.collect()  # monitors of other tests, whose lines would count here
    with Interrupting(parts, at=-1) as whole:
        step()
    last = {line: at for at, line in enumerate(whole.lines, 1)}
    assert len(last) > 200
    alive = []  # a monitor that is collected runs lines of its own
    for at in sorted(last.values()):
        step, close = due_step(probes, follows, model, ids, tmp_path)
        alive.append(close)
        with Interrupting(parts, at), pytest.raises(KeyboardInterrupt):
            step()
        close()
        assert fingerprint(model) == before, whole.lines[at - 1]
        assert not in_extra_pass()
        assert stance() == "default", whole.lines[at - 1]
        assert torch.backends.mha.get_fastpath_enabled()
        if probes:
            assert random_state() == random, at
    step, close = due_step(probes, follows, model, ids, tmp_path)
    step()
    close()


COMPILED = torch.compile(torch.sin, backend="eager")


@pytest.mark.parametrize(
    ("held", "is_found"),
    [
        (COMPILED, True),
        (functools.partial(COMPILED), True),
        (functools.partial(map, COMPILED), True),
        (functools.partial(sorted, [2, 1], key=COMPILED), True),
        ((lambda inner: lambda *x: inner(*x, out=None))(COMPILED), True),
        ((lambda inner: lambda *x: inner(*x, out=None))(torch.sin), False),
        (torch.compiler.disable(torch.sin), False),
        (functools.partial(map, torch.sin), False),
    ],
)
def test_modules_that_reach_a_compiled_function_are_found(held, is_found):
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    module.activation = held
    assert calls.compiled_in([module, other], inside=True) == ({id(module)} if is_found else set())


def test_a_class_that_holds_a_compiled_function_is_found():
    module = type("Holding", (nn.Linear,), {"activation": COMPILED})(2, 2)
    assert calls.compiled_in([module, nn.Linear(2, 2)], inside=True) == {id(module)}
