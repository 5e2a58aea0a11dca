import torch
from models import PlainDecoder, batch, transformer
from torch import nn

from geomon.capture import Window, extra_pass, find_anatomy
from geomon.capture.snapshot import CAPTURED, explain_missing


def unseen(model, inputs, views=frozenset(CAPTURED)) -> str | None:
    window = Window(find_anatomy(model), set(views), rows=64, seed=0)
    extra_pass(model, inputs, window)
    return explain_missing(window.snapshot(), views)


class Direct(PlainDecoder):
    """Calls `forward` itself, past every hook."""

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block.forward(x)
        return x


class Unseen(nn.Module):
    """Attention that goes through nothing known."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.num_heads = 2

    def forward(self, x):
        return x + (self.q_proj(x) @ self.k_proj(x).mT).exp() @ x


def test_nothing_to_say_where_all_is_seen():
    assert unseen(PlainDecoder(), batch()) is None
    assert unseen(transformer("bert"), batch()) is None
    assert (
        unseen(nn.Transformer(16, 2, 1, 1, 32, batch_first=True), (torch.randn(2, 5, 16),) * 2)
        is None
    )


def test_the_message_names_layer_cause_and_remedy_in_one_line():
    message = unseen(Direct(), batch())
    for part in (
        "hidden states at blocks.0 (3 of 3 layers)", "called by .forward() directly",
        "measure by a probe", "geomon.describe(model)", "blocks=",
    ):  # fmt: skip
        assert part in message
    assert "\n" not in message
    message = unseen(nn.Sequential(Unseen(), Unseen()), torch.randn(2, 5, 8))
    assert "attention at 0 (2 of 2 layers): no attention was seen" in message
    assert "metrics=select(...)" in message
    assert "hidden states" not in message


def test_only_what_was_asked_for_is_expected():
    model, x = nn.Sequential(Unseen(), Unseen()), torch.randn(2, 5, 8)
    assert unseen(model, x, {"hidden", "positions"}) is None
    assert unseen(model, x, {"projected_query", "projected_key"}) is None
    assert "attention" in unseen(model, x, {"visible"})


def test_single_layers_without_a_source_are_no_fault():
    model = PlainDecoder(width=8, heads=2)
    model.blocks[1] = Unseen()
    assert unseen(model, batch()) is None
    model.forward = lambda ids: model.blocks[0](model.tokens(ids))
    assert unseen(model, batch()) is None
