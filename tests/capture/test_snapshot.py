import itertools

import pytest
import torch
from models import PlainDecoder, batch, transformer
from torch import nn

from geomon.capture import Window, extra_pass, find_anatomy
from geomon.capture.snapshot import (
    CAPTURED,
    Layer,
    at_places,
    concat_heads,
    explain_missing,
    source_of,
)


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
    assert message.count("layers)") == 1  # where these are not seen, nothing else can be
    message = unseen(nn.Sequential(Unseen(), Unseen()), torch.randn(2, 5, 8))
    assert "attention at 0 (2 of 2 layers): no attention was seen" in message
    assert "metrics=select(...)" in message
    assert "hidden states" not in message


def test_only_what_was_asked_for_is_expected():
    model, x = nn.Sequential(Unseen(), Unseen()), torch.randn(2, 5, 8)
    assert unseen(model, x, {"hidden", "positions"}) is None
    assert "as projected" in unseen(model, x, {"projected_query", "projected_key"})
    assert "attention" in unseen(model, x, {"visible"})


def test_single_layers_without_a_source_are_no_fault():
    model = PlainDecoder(width=8, heads=2)
    model.blocks[1] = Unseen()
    assert unseen(model, batch()) is None
    model.forward = lambda ids: model.blocks[0](model.tokens(ids))
    assert unseen(model, batch()) is None


def heads_of(count, **views):
    """Views of some heads, and no reasons."""
    return {"query": torch.full((2, count, 3, 4), float(count)), **views}, {}


def test_heads_lie_beside_one_another_along_their_own_dimension():
    parts = [
        heads_of(
            count, sink=torch.arange(float(count)), max_logits=torch.zeros(count, 5), scale=0.5,
            query_sequences=torch.arange(6), softcap=8.0,
        )
        for count in (1, 2)
    ]  # fmt: skip
    found, missing = concat_heads(parts)
    assert not missing
    assert found["query"].shape == (2, 3, 3, 4)
    assert found["query"][0, :, 0, 0].tolist() == [1, 2, 2]
    assert found["sink"].tolist() == [0, 0, 1]
    assert found["max_logits"].shape == (3, 5)
    assert (found["scale"], found["softcap"]) == (0.5, 8.0)
    assert found["query_sequences"].tolist() == list(range(6))
    assert concat_heads(parts[:1]) == parts[0]


def test_a_view_that_some_heads_lack_is_missing_and_numbers_that_differ_are_refused():
    one, other = heads_of(1, scale=0.5, sink=torch.ones(1)), heads_of(1, scale=0.25)
    found, missing = concat_heads(
        [(one[0], {"key": "why"}), (heads_of(1, scale=0.5)[0], {"key": "also"})]
    )
    assert set(found) == {"query", "scale"}
    assert missing == {"key": "why"}
    found, missing = concat_heads([one, other])
    assert not found
    assert "differ in their scale" in missing["query"]


ALIKE, OTHER = torch.eye(3).bool()[None, None], torch.ones(1, 1, 3, 3).bool()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (ALIKE, ALIKE.clone(), ALIKE),  # once for all heads
        (ALIKE, OTHER, torch.cat([ALIKE, OTHER, OTHER], 1)),
        (ALIKE, torch.cat([ALIKE, OTHER], 1), torch.cat([ALIKE, ALIKE, OTHER], 1)),
        (
            ALIKE, OTHER[..., :1, :].expand(2, 1, 1, 3),
            torch.cat([ALIKE.expand(2, 1, 3, 3), OTHER.expand(2, 2, 3, 3)], 1),
        ),
        (ALIKE, OTHER[..., :1], torch.cat([ALIKE, OTHER, OTHER], 1)),
        (OTHER.float(), None, torch.tensor([1.0, 0, 0])[None, :, None, None].expand(1, 3, 3, 3)),
        (None, OTHER.float(), torch.tensor([0, 1.0, 1])[None, :, None, None].expand(1, 3, 3, 3)),
    ],
)  # fmt: skip
def test_masks_and_biases_are_given_once_where_all_heads_have_the_same(first, second, expected):
    found, _ = concat_heads([heads_of(1, bias=first), heads_of(2, bias=second)])
    assert torch.equal(found["bias"], expected)


def test_a_layer_keeps_the_views_of_some_sources_and_moves_its_tensors():
    host = torch.device("cpu")
    layer = Layer(
        1, "block", {"hidden": torch.ones(2, 3), "query": torch.ones(2), "scale": 0.5}, {}
    )
    assert layer.devices == {host}
    assert layer.to(host) is layer
    moved = layer.to(torch.device("meta"))
    assert {each.device.type for each in moved.captured.values() if torch.is_tensor(each)} == {
        "meta"
    }
    assert moved.captured["scale"] == 0.5
    kept = layer.only(frozenset({source_of("hidden"), "nothing"}))
    assert set(kept.captured) == {"hidden"}
    assert kept.sources == {source_of("hidden")}


def test_rows_are_taken_at_places_of_each_sequence():
    values = torch.arange(2 * 2 * 4 * 3).reshape(2, 2, 4, 3)
    places = torch.tensor([[0, 3], [2, 2]])
    taken = at_places(values, places)
    assert taken.shape == (2, 2, 2, 3)
    for sequence, row in itertools.product(range(2), range(2)):
        at = places[sequence, row]
        assert torch.equal(taken[sequence, :, row], values[sequence, :, at])
    assert torch.equal(at_places(values[:1], places)[1], values[0][:, [2, 2]])
