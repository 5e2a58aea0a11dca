"""A look holds few tensors of a training, and not for long."""

import gc
import weakref

import pytest
import torch

from geomon import Monitor, select
from support.models import PlainDecoder, transformer

LONG = 16 * 32 * 32 // 4  # numbers of a quarter of the rows of a hidden state


def long_tensors(model) -> list[tuple[int, ...]]:
    """Shapes of the long tensors that are alive and are none of the model's."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    own |= {id(p.grad) for p in model.parameters()}
    every = (x for x in gc.get_objects() if isinstance(x, torch.Tensor))
    return [tuple(x.shape) for x in every if x.numel() >= LONG and id(x) not in own]


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


LOOKS = {
    "reading": {"schedule": lambda step: True},
    "check": {"schedule": lambda step: step == 0, "checks": lambda step: True},
    "probe": {"schedule": lambda step: True, "probe": torch.randint(0, 50, (16, 32))},
    "validation": {"schedule": lambda step: True, "probe": [torch.randint(0, 50, (16, 32))]},
    "in the background": {"schedule": lambda step: True, "background": True},
}


@pytest.mark.parametrize(
    ("kind", "look"),
    [*(("plain", look) for look in LOOKS), ("by hand", "reading"), ("llama", "reading")],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of modules whose objects are listed
def test_rows_are_released_before_the_next_step_and_no_tensor_waits_for_the_collector(
    without_collector, kind, look
):
    torch.manual_seed(0)
    model = {
        "plain": PlainDecoder,
        "by hand": lambda: transformer("gpt2", "eager"),
        "llama": lambda: transformer("llama"),
    }[kind]()
    few = select("variance", "attention_entropy", "max_logit", "qk_dot", "head_output_norm")
    # Numbers of weights are kept from look to look, unless nobody asks how far they moved.
    monitor = Monitor(model, metrics=few, directory=None, tokens=256, alerts=(), **LOOKS[look])
    left = []
    for step in range(3):
        ids = torch.randint(0, 50, (16, 32))
        with monitor(step):
            output = model(ids)
            loss = getattr(output, "logits", output).square().mean()
        loss.backward()
        del output, loss
        if look == "in the background":
            monitor.advance(step + 1)
            monitor._executor.finish()
            monitor.outbox.publish(wait=False)
        left.append(long_tensors(model))
    monitor.close()
    assert left == [[]] * 3


@pytest.mark.parametrize("look", ["reading", "check"])
def test_inputs_that_an_alert_may_show_are_released_with_the_look(without_collector, look):
    model = PlainDecoder(width=8, layers=2, heads=2)
    options = {"metrics": ["variance", "max_logit"], "directory": None, "on_alert": print}
    with Monitor(model, **options | LOOKS[look]) as monitor:
        for step in range(2):
            ids = torch.randint(0, 50, (4, 8))
            left = weakref.ref(ids)
            with torch.no_grad(), monitor(step):
                model(ids)
            del ids
            assert left() is None
