"""The default dtype and device are the user's: readings do not depend on them."""

import functools
from contextlib import contextmanager

import pytest
import torch

from geomon import Memory, Monitor, every, geometry, measure
from support.models import PlainDecoder, batch, transformer


@contextmanager
def defaults(dtype=torch.float32, device=None):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


OTHERS = [
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
    {"dtype": torch.float64},
    {"device": "meta"},
]
identified = pytest.mark.parametrize("others", OTHERS, ids=lambda others: str([*others.values()]))


@functools.cache
def reading(name, dtype=torch.float32, device=None):
    """All metrics of a model in float32 on the CPU, run and measured under other defaults.

    There are more sequences, rows and queries than are kept of any of them.
    """
    torch.manual_seed(0)
    model, ids = PlainDecoder() if name == "plain" else transformer(name), batch(24, 48)
    given = {"ids": ids} if name == "plain" else {"input_ids": ids, "attention_mask": ids > 3}
    memory = Memory()
    with defaults(dtype, device):
        monitor = Monitor(
            model, schedule=every(1), tokens=300, directory=None, sinks=[memory], strict=True
        )
        with monitor(0):
            model(**given)
        monitor.close()
    (found,) = memory.readings
    return {tag: value.hex() for tag, value in found.values.items() if "geomon/" not in tag}


@identified
@pytest.mark.parametrize("name", ["plain", "llama"])
def test_readings_do_not_depend_on_the_defaults(name, others):
    found = reading(name, **others)
    assert found == reading(name)
    assert len(found) > 100


@identified
def test_one_look_does_not_depend_on_the_defaults(others):
    model, ids = PlainDecoder().eval(), batch(8, 32)
    rows = torch.randn(400, 8, generator=torch.Generator().manual_seed(0)).numpy()
    expected = measure(model, ids), geometry(rows), geometry(rows.tolist(), [1, 2] * 200)
    with defaults(**others):
        found = measure(model, ids), geometry(rows), geometry(rows.tolist(), [1, 2] * 200)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=0, abs=0, nan_ok=True)
