"""Sequences that lie behind one another in a row: where they begin, and by what that is known."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from support.models import PlainDecoder, Running, batch, transformer
from support.watched import Block, in_order, look, notes

LENGTHS = [3, 5, 1, 7]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
NUMBERS = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))


def in_turn(model, x, **given):
    for layer in model.layers:
        x = layer(x)
    return x


def blocks(width=8):
    """Blocks that are told positions under any name, and do nothing with them."""
    kinds = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2))
    return Running(in_turn, layers=nn.ModuleList(kinds))


# Arguments beside the hidden states of [rows, 16] tokens, and the sequence of each of them.
NAMES = ("position_ids", "positions", "input_pos", "pos", "pos_ids", "position_indices")
TWO = torch.stack([POSITIONS, torch.arange(16)])
FAR = torch.zeros(16, dtype=torch.int64) + 3
TOLD = [
    *(({name: POSITIONS[None]}, 1, NUMBERS) for name in NAMES),
    ({"position_ids": POSITIONS}, 1, NUMBERS),
    ({"position_ids": POSITIONS.int()}, 1, NUMBERS),
    ({"more": {"pos": POSITIONS}}, 1, NUMBERS),
    ({"position_ids": TWO}, 2, torch.cat([NUMBERS, torch.full((16,), 4)])),
    # Arguments that divide nothing: one sequence, another shape, rows of a picture, no positions.
    *(({"position_ids": x}, 1, torch.zeros(16)) for x in
      (torch.arange(16), TWO, torch.arange(12), torch.arange(16).flip(0), torch.arange(16) // 4,
       FAR, 0 * FAR, POSITIONS[None, None], POSITIONS.float(), POSITIONS.bool())),
    *(({name: POSITIONS}, 1, torch.zeros(16)) for name in
      ("positive", "x_pos", "col_position_ids")),
    ({"position_embeddings": torch.ones(1, 16)}, 1, torch.zeros(16)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "rows", "numbers"), TOLD)
def test_positions_that_begin_anew_begin_a_sequence(given, rows, numbers):
    seen = look(blocks(), torch.randn(rows, 16, 8), **given)
    is_packed = numbers.max() >= rows
    places = TWO[:rows].flatten() if is_packed else torch.arange(16)
    for layer in seen.snapshot().layers:
        sequences, positions = in_order(layer, "sequences", "positions")
        assert sequences.tolist() == numbers.tolist()
        assert positions.tolist() == places.tolist()
    said = [text for text in notes(seen) if "separated by" in text]
    assert len(said) == is_packed
    assert not said or any(name in said[0] for name in NAMES)


@pytest.mark.parametrize("rows", [1, 3])
def test_sequences_of_hidden_states_that_are_length_first_are_those_of_the_positions(rows):
    given, ids = torch.stack([POSITIONS, *[torch.arange(16)] * (rows - 1)]), batch(rows, 16)
    embed = PlainDecoder().tokens
    model = Running(
        lambda m, ids, position_ids: m.blocks(m.embed(ids).transpose(0, 1), pos=position_ids),
        embed=embed, blocks=blocks(32),
    )  # fmt: skip
    for layer in look(model, ids, position_ids=given).snapshot().layers:
        views = in_order(layer, "sequences", "positions", "token_ids")
        sequences = torch.cat([NUMBERS, *(torch.full((16,), 4 + row) for row in range(rows - 1))])
        for found, expected in zip(views, (sequences, given.flatten(), ids.flatten()), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("filled", [0, 1])
def test_positions_of_padding_may_be_any(side, filled):
    order = slice(None, None, -1 if side == "right" else 1)
    padding = torch.full((3,), filled)
    real = torch.cat([torch.zeros(3), torch.ones(16)][order])[None]
    for own, numbers in ((POSITIONS, NUMBERS), (torch.arange(16), 0 * NUMBERS)):
        given = torch.cat([padding, own][order])[None]
        seen = look(blocks(), torch.randn(1, 19, 8), position_ids=given, attention_mask=real)
        sequences, positions = in_order(seen.snapshot().layers[1], "sequences", "positions")
        assert torch.equal(sequences - sequences[0], numbers)
        assert numbers.max() == 0 or torch.equal(positions, POSITIONS)


def with_image(model, ids, patches):
    """A text and the patches of an image in one row; their positions begin anew."""
    places = torch.cat([torch.arange(ids.shape[1]), torch.arange(patches.shape[1])])
    x = torch.cat([model.tokens(ids), patches], dim=1) + model.places(places)
    return model.encoder(x, position_ids=places.expand(len(ids), -1))


@pytest.mark.parametrize("rows", [1, 3])
def test_an_image_behind_a_text_is_of_the_same_sequence(rows):
    plain = PlainDecoder()
    model = Running(
        with_image, tokens=plain.tokens, places=plain.places,
        encoder=Running(in_turn, layers=plain.blocks),
    )  # fmt: skip
    snapshot = look(model, batch(rows, 10), patches=torch.randn(rows, 6, 32)).snapshot()
    for layer in snapshot.layers:
        assert layer.captured["sequences"].unique().tolist() == [*range(rows)]
        assert layer.captured["positions"].max() == 15
    assert not any(note.kind == "packed sequences" for note in snapshot.info.notes)
    both = torch.cat([torch.arange(10), torch.arange(6)]).expand(rows, -1)
    packed = look(transformer("gpt2"), batch(rows, 16), position_ids=both).snapshot()
    assert any(note.kind == "packed sequences" for note in packed.info.notes)


def test_tokens_without_a_batch_are_told_apart_by_their_positions():
    for layer in look(blocks(), torch.randn(16, 8), position_ids=POSITIONS).snapshot().layers:
        sequences, positions = in_order(layer, "sequences", "positions")
        assert torch.equal(sequences, NUMBERS)
        assert torch.equal(positions, POSITIONS)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_packed_batch_reads_as_its_sequences_do(name):
    """The attention of transformers keeps them apart by positions: hidden states are the same."""
    model, ids = transformer(name), batch(1, 16)
    packed = look(model, ids, position_ids=POSITIONS[None], use_cache=False)
    parts = ids[0].split(LENGTHS)
    padded = nn.utils.rnn.pad_sequence(parts, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(part) for part in parts], batch_first=True)
    alone = look(model, padded, attention_mask=mask)
    for pair in zip(packed.snapshot().layers, alone.snapshot().layers, strict=True):
        views = [
            [*in_order(layer, "sequences", "positions", "token_ids", "hidden"),
             layer.captured["last_positions"], layer.captured["last_token_ids"]]
            for layer in pair
        ]  # fmt: skip
        for one, other in zip(*views, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    for view in ("query_sequences", "key_sequences"):
        found = packed.snapshot().layers[1].captured[view]
        assert torch.equal(found.sort().values, NUMBERS)
    assert any("separated by position_ids" in text for text in notes(packed))
    assert not any("separated by" in text for text in notes(alone))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_goes_across_packed_sequences_is_said(attention):
    """With a cache of keys, transformers makes no mask of the positions."""
    model, ids = transformer("llama", attention), batch(2, 16)
    positions = POSITIONS[None].expand(2, 16)
    own = (NUMBERS[:, None] == NUMBERS).tril()[None, None].expand(2, 1, 16, 16)
    own = torch.zeros(own.shape).masked_fill(~own, -torch.inf)  # eager attention adds its mask
    for given, across in (({}, True), ({"attention_mask": own}, False)):
        said = notes(look(model, ids, position_ids=positions, use_cache=True, **given))
        assert any("see keys of other sequences" in text for text in said) == across


def test_keys_beside_those_of_the_tokens_are_no_keys_of_other_sequences():
    """Registers that every token sees: masks are compared with tokens only if both are as many."""
    own = (NUMBERS[:, None] == NUMBERS).tril()
    mask = torch.cat([torch.ones(16, 5, dtype=torch.bool), own], dim=1)

    def with_registers(q, k, v):
        k, v = (torch.cat([torch.ones(*x.shape[:2], 5, x.shape[3]), x], dim=2) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    body = PlainDecoder(block=lambda: Block(with_registers, 32))
    model = Running(lambda m, ids, position_ids: m.body(ids), body=body)
    said = notes(look(model, batch(2, 16), position_ids=POSITIONS[None].expand(2, 16)))
    assert any("separated by position_ids" in text for text in said)
    assert not any("see keys of other sequences" in text for text in said)


RISING, LEFT = torch.arange(16), torch.arange(16) >= 4  # a mask of padding before the tokens
STARTS, REPEATS = "position_ids starts at 7, and in no row at 0", "position_ids repeats positions"
ODD_PLACES = {
    "from elsewhere": ((RISING + 7)[None], None, STARTS),
    "from elsewhere in each row": (torch.stack([RISING + 7, RISING + 70]), None, STARTS),
    "from elsewhere behind padding": (torch.where(LEFT, RISING + 3, 9)[None], LEFT, STARTS),
    "from elsewhere in two tokens behind padding": (
        torch.where(RISING >= 14, RISING - 7, 9)[None], RISING >= 14, STARTS
    ),
    "all the same": (torch.zeros(1, 16, dtype=torch.int64), None, REPEATS),
    # Healthy positions.
    "from 0": (RISING[None], None, ""),
    "from 0 in some row": (torch.stack([RISING + 7, RISING]), None, ""),
    "behind the padding token, as of RoBERTa": ((RISING + 2)[None], None, ""),
    "from 0 behind padding": ((RISING - 4).clamp(min=0)[None], LEFT, ""),
    "from 1 at padding, as a generation makes them": (
        torch.where(LEFT, RISING - 4, 1)[None], LEFT, ""
    ),
    "from 0 at padding": (RISING[None], LEFT, ""),
    "several sequences": (POSITIONS[None], None, ""),
    "places in a picture": (torch.arange(16)[None] // 4, None, ""),
    "backwards": ((RISING + 7).flip(0)[None], None, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD_PLACES)
def test_positions_that_start_elsewhere_or_repeat_are_said(case):
    positions, mask, said = ODD_PLACES[case]
    given = {"position_ids": positions}
    if mask is not None:
        given["attention_mask"] = mask.long().expand(len(positions), -1)
    found = notes(look(blocks(), torch.randn(len(positions), 16, 8), **given))
    odd = [text for text in found if text.startswith("position_ids ")]
    assert [text[: len(said)] for text in odd] == ([said] if said else [])
