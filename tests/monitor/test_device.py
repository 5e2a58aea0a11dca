"""Rows are measured on a device, which tests/support/hardware.py pretends."""

import contextlib
import ctypes
import math
import types

import pytest
import threadpoolctl
import torch
from torch import nn

from geomon import Monitor, read, select
from geomon.capture.snapshot import HOST, Layer
from geomon.monitor.device import MeasuringDevice
from support.hardware import DEVICE, Accelerator
from support.measuring import watching
from support.models import PlainDecoder, batch

NAME = str(DEVICE)
FEW = select("anisotropy", "twonn", "within_variance", "qk_cosine", "attention_entropy")


def run(directory=None, *, steps=2, sequences=16, layers=2, **options):
    """The readings of a short training, of a few metrics by default."""
    torch.manual_seed(0)
    model = PlainDecoder(layers=layers)
    few = {"metrics": FEW, "tokens": 128, "splits": 2, "device": "auto", "background": False}
    monitor, memory = watching(model, directory=directory, **(few | options))
    for step in range(steps):
        with monitor(step):
            model(batch(sequences, 16, seed=step))
    monitor.close()
    return memory.readings


def without_cost(reading):
    return {tag: x for tag, x in reading.values.items() if not tag.startswith("geomon/")}


def assert_same_values(one, other):
    one, other = without_cost(one), without_cost(other)
    assert one.keys() == other.keys()
    for tag, value in one.items():
        wide = tag.endswith("margin")  # a part of it is computed in float32
        assert other[tag] == pytest.approx(
            value, rel=1e-2 if wide else 1e-6, abs=1e-7, nan_ok=True
        ), tag


# -- the option ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *(
            (name, r"^device must be 'auto' .*got [^\n]*$")
            for name in ("gpu", "cuda:x", "", None, [])
        ),
        ("cuda:99", r"^device='cuda:99' cannot be used[^\n]*use 'cpu'$"),
        ("meta", r"^device='meta' cannot be used[^\n]*use 'cpu'$"),
    ],
)  # fmt: skip
def test_a_device_that_is_not_there_is_refused_before_the_training(name, words):
    with pytest.raises(ValueError, match=words):
        Monitor(PlainDecoder(), directory=None, device=name)


def test_a_device_of_torch_stands_for_its_name(tmp_path):
    run(tmp_path, steps=1, device=torch.device("cpu"))
    assert read(tmp_path).runs[0]["device"] == "cpu"


def pretend(monkeypatch, **functions):
    """Measure on the pretended device, whose module of torch has some functions."""
    monkeypatch.setattr(torch, DEVICE.type, types.SimpleNamespace(**functions), raising=False)
    monkeypatch.setattr(MeasuringDevice, "device", DEVICE)


# -- measuring on a device -------------------------------------------------------------------------


def test_a_named_device_measures_and_gives_the_same_values(tmp_path):
    options = {"metrics": FEW | select("alpha", "local_dimension"), "layers": 1}
    on_host = run(**options)
    with Accelerator() as accelerator:
        on_device = run(tmp_path, device=NAME, **options)
    assert accelerator.launches > 1000
    assert [reading.words() for reading in on_device] == [reading.words() for reading in on_host]
    for one, other in zip(on_host, on_device, strict=True):
        assert_same_values(one, other)
    assert read(tmp_path).runs[0]["device"] == NAME


def test_a_device_measures_in_turn_whatever_the_host_could_do_at_once():
    with Accelerator(), threadpoolctl.threadpool_limits(2, user_api="openmp"):
        (reading,) = run(metrics=["anisotropy"], steps=1, sequences=2, splits=1, device=NAME)
    assert math.isfinite(reading.values["anisotropy/mean"])  # other threads see no such device


def test_without_memory_for_it_a_reading_is_measured_on_the_host(monkeypatch):
    on_host = run(steps=1)

    # 10 + 45 - 52 MB: what the training took before it takes again
    free = {"mem_get_info": lambda device: (10e6, 80e6), "memory_reserved": lambda device: 45e6}
    with Accelerator():
        pretend(monkeypatch, **free, max_memory_allocated=lambda device: 52e6)
        (reading,) = run(steps=1)
    (note,) = set(reading.words()) - set(on_host[0].words())
    assert note.startswith("measured on the host: measuring a layer takes up to 1,0")
    assert "leaves 3 MB of meta" in note
    assert_same_values(on_host[0], reading)


def test_copies_that_are_on_their_way_to_the_host_are_waited_for(monkeypatch):
    """Copies from CUDA are queued; until they are made, rows hold another reading or nothing."""
    done, event = [], types.SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(MeasuringDevice, "mark_ready", lambda self: event)
    metrics = {"m": lambda hidden: float(done.append("measured") is None)}
    run(steps=1, sequences=4, splits=1, metrics=metrics)
    assert done == ["waited", *["measured"] * 3]


def test_a_layer_may_take_half_of_the_memory_that_the_training_leaves(monkeypatch):
    """At the first reading a twentieth: gradients are still to come."""
    hidden, width = torch.zeros(100, 10), 10
    needed = 5 * hidden.nbytes + 5 * 8 * width**2 + 10**9  # copies, square matrices, buffers
    layers = [
        Layer(0, "a", {}), Layer(1, "b", {"hidden": hidden, "positions": None}),
        Layer(2, "c", {"token_ids": torch.zeros(500, dtype=torch.int64)}),
    ]  # fmt: skip
    free = [20.0 * needed - 2, 20.0 * needed, 2.0 * needed, 2.0 * needed - 2, -4e6]
    none = dict.fromkeys(("memory_reserved", "max_memory_allocated"), lambda device: 0)
    pretend(monkeypatch, mem_get_info=lambda device: (free.pop(0), 0), **none)
    assert "only 5 % of that" in MeasuringDevice("auto", PlainDecoder()).why_not(layers)
    place = MeasuringDevice("auto", PlainDecoder())
    assert place.why_not(layers) is None
    assert place.why_not(layers) is None
    assert "takes up to 1,000 MB" in place.why_not(layers)
    assert "leaves 0 MB" in place.why_not(layers)  # others have taken what the training had
    monkeypatch.setattr(torch, DEVICE.type, None, raising=False)
    assert place.why_not(layers) is None  # nothing says how much there is


def test_a_device_without_float64_leaves_measuring_to_the_host(monkeypatch):
    class Elsewhere(nn.Module):
        def parameters(self, recurse=True):
            yield types.SimpleNamespace(device=torch.device("mps"))

    place = MeasuringDevice("auto", Elsewhere())
    assert place.device == HOST
    assert place.why_host == "mps does not compute in float64, which distances need"
    assert MeasuringDevice("cpu", Elsewhere()).why_host is None
    assert MeasuringDevice("auto", PlainDecoder()).why_host is None
    not_loaded = MeasuringDevice("auto", PlainDecoder().to("meta"))
    assert (not_loaded.device, not_loaded.why_host) == (HOST, None)
    monkeypatch.setattr(MeasuringDevice, "why_host", "so it is")
    (reading,) = run(metrics=["variance"], steps=1)
    assert "measured on the host: so it is" in reading.words()


def fails_on_the_device(error, from_call=0):
    """A metric that the host alone can measure, and where it was called."""
    seen = []

    def metric(hidden):
        seen.append(hidden.device)
        if hidden.device == DEVICE and len(seen) > from_call:
            raise error
        return hidden.mean()

    return metric, seen


# The metric, where it is called, and why the reading is measured on the host.
FAILING = {
    "memory ends": (
        fails_on_the_device(torch.OutOfMemoryError("tried to allocate too much\nand more"), 1),
        [DEVICE, DEVICE, HOST, HOST],  # the layer is measured again
        "meta does not have enough memory (tried to allocate too much)",
    ),
    "it has no such operation": (
        fails_on_the_device(NotImplementedError("it has no such operation")),
        [DEVICE, HOST, HOST, HOST],
        "m failed on meta (it has no such operation)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_if_a_metric_fails_on_the_device_the_rest_is_measured_on_the_host(name):
    (metric, seen), devices, text = FAILING[name]
    metrics = select("anisotropy", "attention_entropy") | {"m": metric}
    few = {"metrics": metrics, "steps": 1, "sequences": 4, "strict": False}  # without margins
    (on_host,) = run(**few)
    seen.clear()
    with Accelerator():
        (reading,) = run(**few, device=NAME)
    assert seen == devices
    assert set(reading.words()) - set(on_host.words()) == {f"measured on the host: {text}"}
    assert_same_values(on_host, reading)


def test_a_metric_that_fails_everywhere_is_tried_on_the_host_once():
    seen = []

    def nowhere(hidden):
        seen.append(hidden.device)
        raise ValueError("it never works")

    with Accelerator():
        (reading,) = run(metrics={"m": nowhere}, steps=1, splits=1, device=NAME, strict=False)
    assert seen == [DEVICE, HOST, DEVICE, DEVICE]
    assert not any("measured on the host" in note for note in reading.words())


def test_deterministic_algorithms_are_left_to_the_host():
    with Accelerator():
        torch.use_deterministic_algorithms(True)
        try:
            (reading,) = run(metrics=["twonn"], steps=1, device=NAME)
        finally:
            torch.use_deterministic_algorithms(False)
    assert any("use_deterministic_algorithms is on" in note for note in reading.words())
    assert math.isfinite(reading.values["twonn/mean"])


# -- a stream beside the training's ----------------------------------------------------------------


def test_a_thread_that_measures_lets_the_training_capture_graphs(monkeypatch):
    asked = []
    cuda = types.SimpleNamespace(
        cuThreadExchangeStreamCaptureMode=lambda mode: asked.append(mode._obj.value)
    )
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": cuda}.__getitem__)
    place = MeasuringDevice("cpu", PlainDecoder())
    with place.alongside_training(None):  # the model is on the host
        assert asked == []
    with place.alongside_training("an event"):
        assert asked == [1]


def test_the_background_works_on_one_stream_that_waits_for_the_rows(monkeypatch):
    done = []

    def side(device):
        done.append("made")
        return types.SimpleNamespace(
            wait_event=lambda event: done.append(f"waits for {event}"),
            synchronize=lambda: done.append("synchronized"),
        )

    @contextlib.contextmanager
    def entered(stream):
        done.append("entered")
        yield
        done.append("left")

    current = types.SimpleNamespace(record_event=lambda: "the rows")
    pretend(monkeypatch, Stream=side, current_stream=lambda device: current, stream=entered)
    place = MeasuringDevice("auto", PlainDecoder())
    for _ in range(2):
        with place.alongside_training(place.mark_ready()):
            done.append("measured")
    with pytest.raises(KeyError), place.alongside_training("the rows"):
        raise KeyError
    with place.alongside_training(None):
        pass  # the host has no stream
    once = ["entered", "waits for the rows", "measured", "synchronized", "left"]
    assert done == ["made", *once, *once, "entered", "waits for the rows", "synchronized"]
