"""Names of torch that are nobody's promise: without them a training is untouched and seen."""

import importlib.util
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from geomon.capture import private
from support.measuring import train
from support.models import PlainDecoder, batch
from support.watched import notes, window


def _without_names() -> dict[str, object]:
    """Map each private name to its substitute in a release of torch that has none of them."""
    spec = importlib.util.spec_from_file_location("bare", private.__file__)
    bare = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib, "import_module", lambda name: object())
        spec.loader.exec_module(bare)
    own = {name: value for name, value in vars(private).items() if not name.startswith("_")}
    instead = {name: getattr(bare, name) for name in own if own[name] is not getattr(bare, name)}
    assert len(bare.MISSING) == len(instead) - 1  # MISSING itself is among them
    return instead


INSTEAD = _without_names()


@pytest.mark.parametrize("name", [*sorted(INSTEAD), "all of them"])
def test_without_a_private_name_a_training_is_untouched_and_seen_as_before(monkeypatch, name):
    def weights(around):
        torch.manual_seed(0)
        model = PlainDecoder(dropout=0.1)
        windows = [around(model) for _ in range(2)]
        train(model, lambda step: model(batch(seed=step)).logsumexp(-1).mean(), range(2),
              windows.__getitem__)  # fmt: skip
        return [*model.parameters()], windows[-1]

    expected, _ = weights(nullcontext)
    for each in INSTEAD if name == "all of them" else [name]:
        monkeypatch.setattr(private, each, INSTEAD[each])
    found, seen = weights(window)
    assert all(map(torch.equal, found, expected))
    assert all("query" in layer.captured for layer in seen.snapshot().layers[1:])
    assert any(" lacks " in note for note in notes(seen)) == (name in ("MISSING", "all of them"))
    assert _len_torch_dispatch_stack() == 0
