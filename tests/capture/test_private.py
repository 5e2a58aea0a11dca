"""Names of torch that are nobody's promise: without them a training is untouched and seen."""

import importlib.util
from contextlib import nullcontext

import pytest
import torch
from models import PlainDecoder, batch
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from watched import window

from geomon.capture import private


def _without_names() -> dict[str, object]:
    """What stands for each private name in a release of torch that has none of them."""
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
    def train(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = PlainDecoder(dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            with window(model) if watched else nullcontext() as seen:
                loss = model(batch(seed=step)).logsumexp(-1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if watched:
            assert all("query" in layer.captured for layer in seen.snapshot().layers[1:])
            lost = [note.words() for note in seen.snapshot().info.notes]
            assert any(" lacks " in note for note in lost) == (name in ("MISSING", "all of them"))
        return [parameter.detach().clone() for parameter in model.parameters()]

    expected = train(watched=False)
    for each in INSTEAD if name == "all of them" else [name]:
        monkeypatch.setattr(private, each, INSTEAD[each])
    assert all(map(torch.equal, train(watched=True), expected))
    assert _len_torch_dispatch_stack() == 0
