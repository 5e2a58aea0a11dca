import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import PlainBlock, PlainDecoder, batch, transformer
from referee import sampled
from torch import Tensor, nn
from transformers import (
    AutoModelForSeq2SeqLM,
    T5Config,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from geomon import describe, measure, select
from geomon.capture import Window, find_anatomy, padding_arguments
from geomon.capture.snapshot import CAPTURED, NotSeenError, Snapshot
from geomon.capture.tokens.padding import GivenMask, end_runs, find_padding_masks, infer_padding


@pytest.mark.parametrize(
    ("mask", "inverted", "valid"),
    [
        (torch.tensor([[1, 1, 0]]), False, [True, True, False]),
        (torch.tensor([[1.0, 1.0, 0.0]]), False, [True, True, False]),
        (torch.tensor([[0.0, 0.0, -1e4]]), False, [True, True, False]),
        (torch.tensor([[0.0, 0.0, 0.0]]), False, [True, True, True]),
        (torch.tensor([[3e4, 0.0, -3e4]]), False, [True, True, False]),  # a global token
        (torch.tensor([[False, False, True]]), True, [True, True, False]),
        (torch.tensor([[0.0, 0.0, -torch.inf]]), True, [True, True, False]),
    ],
)
def test_masks_say_where_tokens_are_in_several_ways(mask, inverted, valid):
    module = nn.Module()
    name = "src_key_padding_mask" if inverted else "attention_mask"
    assert find_padding_masks(module, (), {name: mask, "mask": mask})[name].tolist() == [valid]
    assert find_padding_masks(module, (), {name: mask[0]}) == {}


def test_padding_arguments_are_those_of_the_modules_around_the_blocks():
    both = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    assert padding_arguments(find_anatomy(transformer("gpt2"))) == (["attention_mask"], [])
    known, possible = padding_arguments(find_anatomy(both))
    assert known == ["src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask"]
    assert possible == ["src_mask", "tgt_mask", "memory_mask", "mask"]
    assert padding_arguments(find_anatomy(both.encoder))[0] == ["src_key_padding_mask"]


# -- what one pass tells -------------------------------------------------------------------------


class MaskedBlock(PlainBlock):
    """Attention over the tokens that are no padding, or over all earlier ones."""

    hides: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.hides, is_causal=self.hides is None
        )
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class ByHand(MaskedBlock):
    """The same, written out."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.hides is not None:
            scores = scores.masked_fill(~self.hides, -1e9)
        x = x + self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class AnyName(PlainDecoder):
    """Takes a mask under any name; its attention may hide what `real` says is padding."""

    def __init__(self, block: type[MaskedBlock] = MaskedBlock) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block(32, 4, 0.0) for _ in range(3))

    def hide(self, real: Tensor | None) -> "AnyName":
        for block in self.blocks:
            block.hides = None if real is None else real[:, None, None, :]
        return self

    def forward(self, ids: Tensor, **given: Tensor) -> Tensor:
        return super().forward(ids)


LENGTHS = torch.tensor([32, 20, 27, 9, 32, 14, 31, 25])
PAD = 0


def padded_batch(side: str = "right") -> tuple[Tensor, Tensor]:
    """Token ids, and True where they are no padding."""
    real = torch.arange(32) < LENGTHS[:, None]
    real = real if side == "right" else real.flip(1)
    return batch().clamp(min=1).masked_fill(~real, PAD), real


def look(model: nn.Module, *inputs: Tensor, rows: int = 10_000, **given: Tensor) -> Window:
    model.eval()
    with torch.no_grad():
        plain = model(*inputs, **given)
        with Window(find_anatomy(model), set(CAPTURED), rows=rows, seed=0) as seen:
            watched = model(*inputs, **given)
    if isinstance(plain, Tensor):
        assert torch.equal(watched, plain)
    return seen


def kept(seen: Window, stack: str = "", index: int = 1) -> Tensor:
    seen.snapshot()
    return sampled(seen, stack, index).rows.sort().values


def assert_equal(one: Snapshot, other: Snapshot) -> None:
    for a, b in zip(one.layers, other.layers, strict=True):
        assert a.captured.keys() == b.captured.keys()
        for view in ("hidden", "token_ids", "projected_query", "projected_key", "visible"):
            assert (view in a.captured) == (view in b.captured)
            assert view not in a.captured or torch.equal(a.captured[view], b.captured[view])


FORMS = {
    "bool": lambda mask: mask,
    "int": lambda mask: mask.long(),
    "float": lambda mask: mask.float(),
    "wide": lambda mask: mask[:, None, None, :],
    "additive": lambda mask: torch.zeros(mask.shape).masked_fill(~mask, -1e9)[:, None, None, :],
}
NAMES = (
    "mask", "padding_mask", "pad_mask", "attn_mask", "src_mask", "input_mask", "x_mask",
    "src_padding", "valid",
)  # fmt: skip


@pytest.mark.parametrize("hides", [True, False], ids=["hidden keys", "causal"])
@pytest.mark.parametrize("inverted", [True, False], ids=["of padding", "of tokens"])
@pytest.mark.parametrize("name", NAMES)
def test_a_mask_under_any_name_counts_whichever_value_means_padding(name, inverted, hides):
    ids, real = padded_batch("left" if name == "src_mask" else "right")
    model = AnyName().hide(real if hides else None)
    for form, convert in FORMS.items():
        if form == "additive" and inverted:
            continue
        seen = look(model, ids, **{name: convert(~real if inverted else real)})
        assert torch.equal(kept(seen), real.flatten().nonzero().squeeze(1)), form
        texts = [note.words() for note in seen.snapshot().info.notes]
        assert texts == [f"padding, 26% of the tokens, was left out, going by {name}"]
        assert seen.padding("") == name


@pytest.mark.parametrize("rows", [60, 100, 10_000])
def test_what_is_told_late_leaves_the_rows_that_a_mask_of_known_name_leaves(rows):
    ids, real = padded_batch()
    for model in (AnyName().hide(real), AnyName(ByHand).hide(real)):
        known = look(model, ids, rows=rows, attention_mask=real).snapshot()
        assert len(known.layers[1].captured["hidden"]) == min(rows, int(real.sum()))
        assert known.info.tokens == min(rows, int(real.sum()))
        for other in ({"mask": real}, {"pad_mask": ~real}, {}):
            assert_equal(look(model, ids, rows=rows, **other).snapshot(), known)


def test_padding_that_nothing_foretells_leaves_fewer_rows_and_no_padding():
    """Continuous inputs and no argument: the keys that attention hides are all there is."""
    _, real = padded_batch()
    model = AnyName().hide(real)
    stack = nn.ModuleDict({"blocks": model.blocks})
    x = torch.randn(8, 32, 32)
    seen = Window(find_anatomy(stack), set(CAPTURED), rows=100, seed=0)
    with torch.no_grad(), seen:
        for block in model.blocks:
            x = block(x)
    left = kept(seen)
    assert 50 < len(left) < 100
    assert real.flatten()[left].all()
    note = "padding, 26% of the tokens, was left out, going by the keys that attention hides"
    assert any(note in n.words() for n in seen.snapshot().info.notes)


NOT_PADDING = {
    "labels": lambda real: torch.arange(32) % 3 == 0,
    "token_type_ids": lambda real: torch.arange(32) >= LENGTHS[:, None] // 2,
    "segment_ids": lambda real: torch.arange(32) >= LENGTHS[:, None] // 2,
    "loss_mask": lambda real: torch.arange(32) >= LENGTHS[:, None] // 2,
    "prompt_mask": lambda real: torch.arange(32) < LENGTHS[:, None] // 2,
    "mask": lambda real: torch.arange(32) >= LENGTHS[:, None] // 2,  # a prompt's, by its ids
    "input_mask": lambda real: torch.rand(8, 32, generator=torch.Generator().manual_seed(0)) < 0.3,
    "special_tokens_mask": lambda real: torch.arange(32) == 31,
}


@pytest.mark.parametrize("name", NOT_PADDING)
@pytest.mark.parametrize("form", ["bool", "int", "float"])
def test_other_arguments_of_zeros_and_ones_are_not_taken_for_padding(name, form):
    ids, real = batch(), torch.ones(8, 32, dtype=torch.bool)
    given = {name: FORMS[form](NOT_PADDING[name](real).expand(8, -1))}
    for model in (AnyName(), AnyName().hide(real)):
        for rows in (100, 10_000):
            plain = look(model, ids, rows=rows)
            seen = look(model, ids, rows=rows, **given)
            assert_equal(seen.snapshot(), plain.snapshot())
            assert seen.snapshot().info.notes == []
            assert seen.padding("") is None


def test_the_keys_that_attention_hides_go_before_the_look_of_an_argument():
    ids, real = padded_batch()
    prompts = torch.arange(32) >= (LENGTHS[:, None] // 2)
    seen = look(AnyName().hide(real), ids, mask=prompts)
    assert torch.equal(kept(seen), real.flatten().nonzero().squeeze(1))
    assert seen.padding("") == "the keys that attention hides from every query"


@pytest.mark.parametrize("name", ["attention_mask", "key_padding_mask"])
def test_a_mask_that_means_the_opposite_of_its_name_gives_no_values_and_says_so(name):
    ids, real = padded_batch()
    model = AnyName().hide(real)
    inverted = ~real if name == "attention_mask" else real
    snapshot = look(model, ids, **{name: inverted}).snapshot()
    for layer in snapshot.layers:
        assert not {"hidden", "visible", "projected_query"} & layer.captured.keys()
        assert f"exactly the tokens that {name} marks as tokens" in layer.missing["hidden"]
    with pytest.raises(NotSeenError, match="its values mean the opposite"):
        measure(model, {"ids": ids, name: inverted})
    right = look(model, ids, **{name: ~inverted}).snapshot()
    assert len(right.layers[1].captured["hidden"]) == real.sum()


def test_padding_that_nothing_tells_is_counted_and_said_once():
    ids, _ = padded_batch()
    for side in (ids, ids.flip(1)):
        seen = look(AnyName(), side)
        (note,) = seen.snapshot().info.notes
        assert note.kind == "padding could not be recognised"
        assert "26% of the tokens are one token id at the ends" in note.words()
        assert len(kept(seen)) == ids.numel()
    assert look(AnyName(), batch()).snapshot().info.notes == []
    assert look(AnyName(), ids, attention_mask=torch.ones_like(ids)).snapshot().info.notes == []


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=6),
    left=st.booleans(),
    inverted=st.booleans(),
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 10_000),
    seen=st.booleans(),
    with_ids=st.booleans(),
)
def test_any_lengths_and_either_side_are_told(lengths, left, inverted, name, seed, seen, with_ids):
    real = torch.arange(12) < torch.tensor(lengths)[:, None]
    real = real.flip(1) if left else real
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 30, real.shape, generator=generator).masked_fill(~real, PAD)
    mask = GivenMask(name, ~real if inverted else real, shared=False)
    # Without token ids and without attention a name alone says which value is padding.
    if not seen and not with_ids:
        inverted = "pad" in name
        mask = mask._replace(values=~real if inverted else real)
    told = infer_padding([mask], ids if with_ids else None, ~real if seen else None)
    if real.all():
        assert told is None
    elif seen or len(ids[~real]) < real.sum():
        assert told is not None
        assert torch.equal(told.valid, real)


def test_a_causal_mask_with_as_many_sequences_as_positions_is_no_padding():
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    for values in (causal, ~causal, causal.float()):
        assert infer_padding([GivenMask("mask", values, shared=False)], None, None) is None


def test_what_a_mask_hides_in_all_sequences_alike_is_padding_only_if_it_looks_like_it():
    hidden = torch.zeros(4, 8, dtype=torch.bool)
    hidden[:, 7] = True  # a strictly causal mask: nothing sees the last token
    assert infer_padding([], batch(4, 8), hidden) is None
    assert infer_padding([], None, hidden) is None
    padded = batch(4, 8).clamp(min=1)
    padded[:, 5:] = 0
    hidden[:, 5:] = True
    assert infer_padding([], batch(4, 8), hidden) is None
    for ids in (padded, None):
        told = infer_padding([], ids, hidden)
        assert told is not None
        assert torch.equal(told.valid, ~hidden)


@pytest.mark.parametrize("shape", [(4, 1), (1, 9), (3, 9)])
def test_runs_at_the_ends_need_unequal_lengths(shape):
    assert end_runs(torch.zeros(shape, dtype=torch.long)) is None


# -- encoders and decoders -----------------------------------------------------------------------


def sequence_to_sequence(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids, real = padded_batch()
    if name == "t5":
        configuration = T5Config(
            vocab_size=50, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8,
            decoder_start_token_id=0, dropout_rate=0.0,
        )  # fmt: skip
        model = AutoModelForSeq2SeqLM.from_config(configuration)
        return model, {"input_ids": ids, "attention_mask": real.long()}
    configuration = WhisperConfig(
        vocab_size=50, num_mel_bins=8, d_model=32, encoder_layers=2, encoder_attention_heads=4,
        decoder_layers=2, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_source_positions=14, max_target_positions=40, pad_token_id=1, bos_token_id=1,
        eos_token_id=1, decoder_start_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(configuration), {"input_features": torch.randn(8, 8, 28)}


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_labels_of_minus_100_tell_the_padding_of_a_decoder(name):
    model, inputs = sequence_to_sequence(name)
    _, real = padded_batch()
    labels = batch(length=16, seed=4).clamp(min=3)
    lengths = torch.tensor([16, 3, 9, 12, 16, 1, 7, 10])
    labels[torch.arange(16) >= lengths[:, None]] = -100
    seen = look(model, **inputs, labels=labels)
    expected = torch.arange(16) < lengths[:, None] + 1  # the start token and the labels
    assert torch.equal(kept(seen, "decoder"), expected.flatten().nonzero().squeeze(1))
    assert seen.padding("decoder") == "labels of -100"
    decoder = [x for x in seen.snapshot().layers if x.stack == "decoder"]
    for layer in decoder[1:]:
        assert layer.captured["visible"].any(-1).any(1).sum() == expected.sum()
        assert len(layer.captured["projected_query"]) == expected.sum()
    if name == "t5":
        assert len(kept(seen, "encoder")) == real.sum()
    shown = dict(describe(model, {**inputs, "labels": labels}).rows)["padding"]
    assert "of the decoder left out, going by labels of -100" in shown


def test_describe_says_what_the_padding_was_known_by():
    ids, real = padded_batch()

    class Named(AnyName):
        def forward(self, ids, pad_mask=None):
            return super().forward(ids)

    model = Named().hide(real)
    assert "what pad_mask means" in dict(describe(model).rows)["padding"]
    shown = dict(describe(model, (ids, ~real)).rows)["padding"]
    assert shown == "left out, going by pad_mask"
    shown = dict(describe(model, ids).rows)["padding"]
    assert shown == "left out, going by the keys that attention hides from every query"
    shown = dict(describe(model.hide(None), batch()).rows)["padding"]
    assert shown.startswith("none in this pass")


@pytest.mark.parametrize("block", [MaskedBlock, ByHand])
def test_padding_that_is_inferred_after_the_pass_is_not_in_the_largest_logit(block):
    """It is computed while queries are alive, and padding may be known only later."""
    ids, real = padded_batch()
    model = AnyName(block).hide(real)
    with torch.no_grad():  # the queries of padding are the largest: W_q stretches them most
        weight = model.blocks[0].c_attn.weight
        weight *= 10
        model.tokens.weight[PAD] = 100 * torch.linalg.svd(weight[:32]).Vh[0]
    named, other = (
        measure(model, {"ids": ids, name: real}, metrics=select("max_logit"))
        for name in ("attention_mask", "which_count")
    )
    assert other == pytest.approx(named)
    own = model.blocks[0]
    x = own.ln_1(model.tokens(ids) + model.places(torch.arange(32)))
    q, k = (part.unflatten(-1, (4, -1)).double() for part in own.c_attn(x).chunk(3, dim=-1)[:2])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)
    scores = scores.masked_fill(~real[:, None, None], -math.inf)
    tokens = scores.masked_fill(~real[:, None, :, None], -math.inf).amax(dim=(0, 2, 3))
    assert (scores.amax(dim=(0, 2, 3)) > tokens * 1.01).any()
    found = [other[f"max_logit/layer_01/head_{head}"] for head in range(4)]
    assert found == pytest.approx(tokens.tolist(), rel=1e-5)
