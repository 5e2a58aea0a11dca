"""Calls are seen without anything on the model; the model's own names and copies are its own."""

import copy
import pickle
import threading

import pytest
import torch
from fingerprint import fingerprint, random_state
from interrupting import Interrupting, files
from models import PlainDecoder, batch, transformer
from torch import nn
from torch.utils.checkpoint import checkpoint

from geomon import Memory, Monitor, every, measure, select
from geomon.capture import Window, extra_pass, find_anatomy
from geomon.capture.calling import calls, patches
from geomon.capture.calling.calls import FirstCall
from geomon.capture.calling.patches import in_extra_pass
from geomon.capture.recorder import AttentionRecorder
from geomon.capture.snapshot import CAPTURED

FEW = select("variance", "attention_entropy", "qk_cosine")
NAMES = (
    "mask", "route", "module_", "stack", "step", "options", "observer", "layer", "names", "args",
    "kwargs", "action", "model", "output", "shape", "heads", "notify", "function",
)  # fmt: skip


def window(model, **kwargs):
    return Window(find_anatomy(model), set(CAPTURED), rows=64, seed=0, **kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_the_batch_may_have_any_name(name):
    """transformers passes what it does not know on to every module and attention call."""
    model = transformer("llama").train()
    inputs = {"input_ids": batch(), name: torch.zeros(3)}
    expected = model(**inputs).logits
    with window(model) as seen:
        assert torch.equal(model(**inputs).logits, expected)
    snapshot = seen.snapshot()
    assert all("query" in layer.captured for layer in snapshot.layers[1:])
    assert not snapshot.info.notes
    assert measure(model, inputs, tokens=64) == pytest.approx(
        measure(model, {"input_ids": batch()}, tokens=64), nan_ok=True
    )


@pytest.mark.parametrize("place", ["on_fused", "on_softmax", "before_call", "after_call"])
def test_an_error_of_its_own_never_reaches_the_model(monkeypatch, place):
    model, ids = transformer("gpt2", "eager" if place == "on_softmax" else "sdpa").eval(), batch()
    expected = model(ids).logits
    what = {"before_call": "_on_block", "after_call": "_on_block_left"}.get(place, place)

    def broken(*args, **kwargs):
        raise RuntimeError("of its own")

    owner = AttentionRecorder if place.startswith("on_") else Window
    monkeypatch.setattr(owner, what, broken)
    with window(model) as seen:
        assert torch.equal(model(ids).logits, expected)
    assert any("of its own" in note.words() for note in seen.snapshot().info.notes)


# -- copies --------------------------------------------------------------------------------------


def test_a_copy_made_anywhere_in_a_forward_has_nothing_of_the_window():
    model, copies = PlainDecoder(), []
    before = fingerprint(model)["hooks"]

    def copies_itself(*call):
        copies.append(copy.deepcopy(model))
        copies.append(pickle.loads(pickle.dumps(model)))

    inside = model.blocks[1].mlp[1]  # in the block, which is watched
    handle = inside.register_forward_hook(copies_itself)
    handle.remove()
    run = inside.forward
    with window(model) as seen:
        inside.forward = lambda x: (delattr(inside, "forward"), copies_itself(), run(x))[-1]
        output = model(batch())
    assert len(seen.snapshot().layers[3].captured["hidden"])
    assert len(copies) == 2
    for one in copies:
        assert fingerprint(one)["hooks"] == before
        assert torch.equal(one(batch()), output)


def test_the_arguments_are_seen_as_the_modules_own_hooks_leave_them():
    model, ids = PlainDecoder(), batch()
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    block.register_forward_hook(lambda module, args, output: output * 3)
    with window(model) as seen, torch.no_grad():
        model(ids)
    entered, left = (seen.snapshot().layers[i].captured["hidden"] for i in (0, 1))
    block._forward_pre_hooks.clear()
    block._forward_hooks.clear()
    with window(model) as plain, torch.no_grad():
        model(ids)
    assert torch.equal(entered, 2 * plain.snapshot().layers[0].captured["hidden"])
    assert not torch.equal(left, plain.snapshot().layers[1].captured["hidden"])


# -- Ctrl-C at every line ------------------------------------------------------------------------

PARTS = files(
    "capture/window.py", "capture/calling/patches.py", "capture/calling/calls.py",
    "capture/tap/mode.py", "capture/calling/probe.py", "capture/unchanged.py", "monitor/monitor.py",
    "monitor/callback.py",
)  # fmt: skip


def due_step(kind, model, ids, folder):
    """One due step, and what is left to call afterwards."""
    options = {"metrics": select("variance"), "tokens": 16, "directory": None, "sinks": [Memory()]}
    if kind == "session":
        from geomon.monitor import CallbackSession

        session = CallbackSession({**options, "schedule": every(1)}, "test")
        session.start(model, 0, folder, [])

        def step():
            session.open_at_call(0)
            model(ids)
            session.close()

        return step, session.finish
    monitor = Monitor(model, schedule=every(1), **options)

    def step():
        if kind == "probe":
            monitor.probe(0, ids)
        else:
            with monitor(0):
                model(ids)

    return step, monitor.close


@pytest.fixture
def other_locks(monkeypatch):
    """Locks for this test alone: a line where a `with` ends counts here, and keeps its lock.

    Between the end of the lines inside and the release Python looks at no signal.
    """
    for module in (calls, patches):
        for patch in vars(module).values():
            if isinstance(patch, patches.Patch):
                monkeypatch.setattr(patch, "_lock", threading.RLock())


@pytest.mark.parametrize("kind", ["inline", "probe", "session"])
def test_ctrl_c_at_any_line_of_a_due_step_leaves_nothing(kind, tmp_path, other_locks):
    torch.manual_seed(0)
    model, ids = PlainDecoder(width=8, layers=1, heads=2).train(), batch(1, 4)
    model.register_buffer("seen", torch.zeros(1))
    before, random = fingerprint(model), random_state()
    step, _ = due_step(kind, model, ids, tmp_path)
    with Interrupting(PARTS, at=-1) as whole:
        step()
    last = {line: at for at, line in enumerate(whole.lines, 1)}
    assert len(last) > 200
    alive = []  # a monitor that is collected runs lines of its own
    for at in sorted(last.values()):
        step, close = due_step(kind, model, ids, tmp_path)
        alive.append(close)
        with Interrupting(PARTS, at), pytest.raises(KeyboardInterrupt):
            step()
        close()
        assert fingerprint(model) == before, whole.lines[at - 1]
        assert not in_extra_pass()
        if kind == "probe":
            assert random_state() == random, at
    step, close = due_step(kind, model, ids, tmp_path)
    step()
    close()


def test_another_thread_of_the_program_has_its_own_window_after_ctrl_c():
    def look():
        with window(model) as seen, torch.no_grad():
            model(batch(1, 4))
        found.append(seen.snapshot())

    model, found = PlainDecoder(width=8, layers=1, heads=2), []
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert found


# -- nothing that a pass of the monitor's own writes stays --------------------------------------


class Writes(nn.Module):
    """A head that writes, in its forward pass, whatever a module can write."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("range", torch.full((4,), torch.nan))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("empty", None)
        self.norm = nn.BatchNorm1d(50)
        self.calls, self.scale = 0, 1.0
        self.kept = torch.ones(3)

    def forward(self, ids):
        out = self.inner(ids)
        self.norm.train()(out.flatten(0, 1))
        self.count += 1
        self.range.data.copy_(torch.arange(4.0))  # unseen by the version of the tensor
        self.table = torch.ones(ids.shape[1])  # another object
        self.empty = torch.ones(1)
        self.register_buffer("grown", torch.ones(7), persistent=False)
        self.calls += 1
        self.scale *= 0.5
        self.kept[0] = 9
        self.cache = torch.ones(5)
        return out


def state_of(model):
    found = {}
    for name, module in model.named_modules():
        for kind in (module._buffers, vars(module)):
            for key, value in kind.items():
                if isinstance(value, torch.Tensor):
                    found[name, key] = (id(value), value.numpy().tobytes())
                elif isinstance(value, int | float | None) and key != "training":
                    found[name, key] = value
        found[name, "transient"] = sorted(module._non_persistent_buffers_set)
        found[name, "order"] = list(module._buffers)
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_a_probe_leaves_buffers_and_attributes_as_they_were(fails):
    model = Writes(PlainDecoder()).train()
    kept = [*model.buffers()], model.kept  # as long as their addresses are compared
    before, random = state_of(model), random_state()

    def inputs(model):
        model(batch())
        if fails:
            raise RuntimeError("in the pass")

    try:
        extra_pass(model, inputs, window(model))
    except RuntimeError:
        assert fails
    assert state_of(model) == before
    assert random_state() == random
    model(batch())
    assert state_of(model) != before
    assert kept


@pytest.mark.parametrize("source", ["probe", "inline"])
def test_parameters_without_values_end_nothing_and_are_said_once(caplog, source):
    class Lazy(PlainDecoder):
        def __init__(self):
            super().__init__()
            self.head = nn.LazyLinear(50)

    torch.manual_seed(0)
    plain = Lazy()
    torch.manual_seed(0)
    model, memory = Lazy(), Memory()
    monitor = Monitor(
        model, metrics=FEW, schedule=every(1), tokens=64, directory=None, sinks=[memory],
        probe=batch() if source == "probe" else None,
    )  # fmt: skip
    for step in range(3):
        torch.manual_seed(step)  # the first forward draws the values
        with monitor(step):
            out = model(batch())
        torch.manual_seed(step)
        assert torch.equal(out, plain(batch()))
    monitor.close()
    assert [r.step for r in memory.readings] == ([1, 2] if source == "probe" else [0, 1, 2])
    said = [record for record in caplog.records if "no values yet" in record.getMessage()]
    assert len(said) == (source == "probe")
    with pytest.raises(ValueError, match=r"head.weight has no values yet"):
        measure(Lazy(), batch())


def test_a_recomputation_is_not_the_first_call_that_is_waited_for():
    block = nn.Linear(3, 3)
    kept = checkpoint(block, torch.ones(2, 3, requires_grad=True), use_reentrant=False)
    seen = []
    first = FirstCall((block,), lambda: seen.append("before"), seen.append, lambda: None)
    first.begin()
    try:
        kept.sum().backward()  # runs the block again
        assert seen == []
        block(torch.ones(2, 3))
        assert seen == ["before", None]
    finally:
        first.end()


def test_a_call_with_gradients_goes_before_earlier_ones_without():
    block, seen = nn.Linear(3, 3), []
    first = FirstCall(
        (block,),
        lambda: seen.append("before"),
        seen.append,
        lambda: seen.append("between"),
    )
    first.begin()
    try:
        with torch.no_grad():
            for _ in range(3):  # of these the first counts until a better one comes
                block(torch.ones(2, 3))
        assert first.came
        assert seen == ["before", "between"]
        for _ in range(2):
            block(torch.ones(2, 3))
        assert seen == ["before", "between", "before", None]
    finally:
        first.end()


def test_a_call_without_gradients_that_fails_is_the_end():
    block, seen = nn.Linear(3, 3), []
    first = FirstCall((block,), lambda: None, seen.append, lambda: seen.append("between"))
    first.begin()
    try:
        with torch.no_grad(), pytest.raises(RuntimeError):
            block(torch.ones(2, 4))
        block(torch.ones(2, 3))
        assert [type(one) for one in seen] == [RuntimeError]
    finally:
        first.end()
