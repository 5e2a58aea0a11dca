"""Sequences that lie behind one another in a row: where they begin, and by what that is known."""

import pytest
import torch
from models import PlainDecoder, batch, transformer
from torch import nn

from geomon.capture import Window, find_anatomy
from geomon.capture.snapshot import CAPTURED, Snapshot
from geomon.capture.tokens.boundaries import GivenPlaces, find_places, find_sequences

LENGTHS = [3, 5, 1, 7]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
NUMBERS = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))


def find(values, rows=1, length=16, *, valid=None):
    return find_sequences([GivenPlaces("given", values)], rows, length, valid)


@pytest.mark.parametrize("values", [POSITIONS, POSITIONS[None], POSITIONS.int()])
def test_positions_that_begin_anew_begin_a_sequence(values):
    found = find(values)
    assert torch.equal(found.numbers, NUMBERS[None])
    assert torch.equal(found.places, POSITIONS[None])
    assert found.source == "given"


def test_several_rows_hold_several_sequences_each():
    found = find(torch.stack([POSITIONS, torch.arange(16)]), rows=2)
    assert torch.equal(found.numbers, torch.stack([NUMBERS, torch.full((16,), 4)]))


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(16),  # one sequence
        torch.arange(16)[None].expand(2, 16),  # of another number of rows
        torch.arange(12),
        torch.arange(16).flip(0),
        torch.arange(16) // 4,  # rows of a picture
        torch.zeros(16, dtype=torch.int64) + 3,
        torch.zeros(16, dtype=torch.int64),  # no positions are told
    ],
)
def test_what_says_nothing_divides_nothing(values):
    assert find(values) is None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("filled", [0, 1])
def test_positions_of_padding_may_be_any(side, filled):
    padding = torch.full((3,), filled)
    values = [padding, POSITIONS] if side == "left" else [POSITIONS, padding]
    tokens = torch.cat([torch.ones_like(part) for part in values]).bool()
    tokens[: 3 if side == "left" else None][-3:] = False
    found = find(torch.cat(values)[None], length=19, valid=tokens[None])
    assert torch.equal(found.places[tokens[None]], POSITIONS)
    numbers = found.numbers[tokens[None]]
    assert torch.equal(numbers - numbers[0], NUMBERS)
    one = torch.cat([padding, torch.arange(16)] if side == "left" else [torch.arange(16), padding])
    assert find(one[None], length=19, valid=tokens[None]) is None


class Taking(nn.Module):
    def forward(self, ids, position_ids=None, more=None, **kwargs): ...


def test_arguments_are_found_by_name_wherever_they_are():
    given = find_places(Taking(), (torch.ones(2, 3), POSITIONS), {"more": {"pos": POSITIONS}})
    assert [one.name for one in given] == ["position_ids", "pos"]
    for name in ("position_ids", "positions", "input_pos", "pos", "pos_ids", "position_indices"):
        assert [one.name for one in find_places(Taking(), (), {name: POSITIONS})] == [name]
    others = {
        "positive": POSITIONS,
        "x_pos": POSITIONS,
        "col_position_ids": POSITIONS,
        "position_embeddings": torch.ones(1, 16),
        "position_ids": POSITIONS[None, None],  # of an axis of a picture or film
        "positions": POSITIONS.float(),  # angles
        "pos_ids": POSITIONS.bool(),  # a mask
    }
    assert find_places(Taking(), (), others) == []


def look(model, ids, **given) -> Snapshot:
    with torch.no_grad(), Window(find_anatomy(model), set(CAPTURED), rows=1000, seed=0) as seen:
        model.eval()(ids, **given)
    return seen.snapshot()


class WithImage(PlainDecoder):
    """A text and the patches of an image in one row; their positions begin anew."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Blocks(self.blocks)
        del self.blocks

    def forward(self, ids, patches):
        places = torch.cat([torch.arange(ids.shape[1]), torch.arange(patches.shape[1])])
        x = torch.cat([self.tokens(ids), patches], dim=1) + self.places(places)
        return self.encoder(x, position_ids=places.expand(len(ids), -1))


class Blocks(nn.Module):
    def __init__(self, blocks) -> None:
        super().__init__()
        self.layers = blocks

    def forward(self, x, position_ids):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("rows", [1, 3])
def test_an_image_behind_a_text_is_of_the_same_sequence(rows):
    snapshot = look(WithImage(), batch(rows, 10), patches=torch.randn(rows, 6, 32))
    for layer in snapshot.layers:
        assert layer.captured["sequences"].unique().tolist() == [*range(rows)]
        assert layer.captured["positions"].max() == 15
    assert not any(note.kind == "packed sequences" for note in snapshot.info.notes)
    both = torch.cat([torch.arange(10), torch.arange(6)]).expand(rows, -1)
    packed = look(transformer("gpt2"), batch(rows, 16), position_ids=both)
    assert any(note.kind == "packed sequences" for note in packed.info.notes)


def test_tokens_without_a_batch_are_told_apart_by_their_positions():
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
    for layer in look(Blocks(blocks), torch.randn(16, 8), position_ids=POSITIONS).layers:
        places = 1000 * layer.captured["sequences"] + layer.captured["positions"]
        assert torch.equal(places.sort().values, 1000 * NUMBERS + POSITIONS)


def by_sequence(snapshot: Snapshot, depth: int) -> list[torch.Tensor]:
    """Views of a layer in the order of the sequences and the places in them."""
    seen = snapshot.layers[depth].captured
    order = (1000 * seen["sequences"] + seen["positions"]).argsort()
    rows = [seen[view][order] for view in ("sequences", "positions", "token_ids", "hidden")]
    return [*rows, seen["last_positions"], seen["last_token_ids"]]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_packed_batch_reads_as_its_sequences_do(name):
    """The attention of transformers keeps them apart by positions: hidden states are the same."""
    model, ids = transformer(name), batch(1, 16)
    packed = look(model, ids, position_ids=POSITIONS[None], use_cache=False)
    parts = ids[0].split(LENGTHS)
    padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(part) for part in parts], batch_first=True)
    alone = look(model, padded, attention_mask=mask)
    for depth in range(4):
        for one, other in zip(by_sequence(packed, depth), by_sequence(alone, depth), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for view in ("query_sequences", "key_sequences"):
        found = packed.layers[1].captured[view]
        assert torch.equal(found.sort().values, NUMBERS)
    assert any("separated by position_ids" in note.words() for note in packed.info.notes)
    assert not any("separated by" in note.words() for note in alone.info.notes)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_goes_across_packed_sequences_is_said(attention):
    """With a cache of keys, transformers makes no mask of the positions."""
    model, ids = transformer("llama", attention), batch(2, 16)
    positions = POSITIONS[None].expand(2, 16)
    own = (NUMBERS[:, None] == NUMBERS).tril()[None, None].expand(2, 1, 16, 16)
    own = torch.zeros(own.shape).masked_fill(~own, -torch.inf)  # eager attention adds its mask
    for given, across in (({}, True), ({"attention_mask": own}, False)):
        notes = look(model, ids, position_ids=positions, use_cache=True, **given).info.notes
        assert any("see keys of other sequences" in note.words() for note in notes) == across
