"""Padding is found in masks, in labels, and in the tokens that attention hides."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from geomon import describe, measure, select
from geomon.capture import Window
from support.models import Running, batch
from support.referee import sampled
from support.specimens import built
from support.watched import Block, blocks_of, look, notes, scores_of
from support.zoo import ZOO


def fused(q: Tensor, k: Tensor, v: Tensor, hides: Tensor | None) -> Tensor:
    """Attention over the tokens that are no padding, or over all earlier ones."""
    return attend(q, k, v, attn_mask=hides, is_causal=hides is None)


def by_hand(q: Tensor, k: Tensor, v: Tensor, hides: Tensor | None) -> Tensor:
    scores = scores_of(q, k)
    return (scores if hides is None else scores.masked_fill(~hides, -1e9)).softmax(-1) @ v


WAYS = pytest.mark.parametrize("way", [fused, by_hand])


def any_name(*real: Tensor | None, way: Callable[..., Tensor] = fused, kind=Running) -> nn.Module:
    """Takes a mask under any name; attention hides all but these keys, by a mask for each block."""
    hides = [x if x is None or x.ndim != 2 else x[:, None, None, :] for x in real or [None]]

    def run(m, ids, **given):
        m.masks = itertools.cycle(hides)
        return m.blocks(m.tokens(ids))

    model = kind(run, tokens=nn.Embedding(50, 32))
    model.blocks = blocks_of(lambda q, k, v: way(q, k, v, next(model.masks)))
    return model


LENGTHS = torch.tensor([32, 20, 27, 9, 32, 14, 31, 25])
RIGHT = torch.arange(32) < LENGTHS[:, None]
LEFT, IDS, ALL = RIGHT.flip(1), batch().clamp(min=1), torch.ones(8, 32, dtype=torch.bool)
HIDDEN = "the keys that attention hides from every query"
PAD = 0


def kept(seen: Window, stack: str = "", index: int = 1) -> list[int]:
    seen.snapshot()
    return sampled(seen, stack, index).rows.sort().values.tolist()


def places(real: Tensor) -> list[int]:
    return real.flatten().nonzero().squeeze(1).tolist()


def added(real: Tensor, lowest: float = -1e4, highest: float = 0.0) -> Tensor:
    return torch.full(real.shape, highest).masked_fill(~real, lowest)


# -- what masks say ------------------------------------------------------------------------------

GLOBAL = added(RIGHT, -3e4).index_fill(1, torch.tensor([0]), 3e4)  # a global token
# Masks under a name, the tokens that they leave, and whether they are taken for padding.
MASKS = [
    *((name, mask, RIGHT, True) for name in ("attention_mask", "decoder_attention_mask")
      for mask in (RIGHT, RIGHT.float(), RIGHT.long(), added(RIGHT), GLOBAL, RIGHT[:, None],
                   RIGHT[:, None, None])),
    *((name, mask, LEFT, True) for name in
      ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask") for mask in
      (~LEFT, added(LEFT, -torch.inf), ~LEFT[:, None, None])),
    ("attention_mask", added(ALL), ALL, True),
    ("attention_mask", RIGHT[0], ALL, False),  # of no sequence
    ("encoder_attention_mask", RIGHT, ALL, False),  # of other tokens, which these attend to
    ("memory_key_padding_mask", ~RIGHT, ALL, False),
    ("encoder_padding_mask", ~RIGHT, ALL, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mask", "real", "known"), MASKS)
def test_masks_say_where_tokens_are_in_several_ways(name, mask, real, known):
    seen = look(any_name(), IDS, **{name: mask})
    assert kept(seen) == places(real)
    assert seen.padding("") == (name if known else None)
    assert not any("may be counted" in text for text in notes(seen))  # its meaning is known


def test_a_mask_that_is_given_by_its_place_has_the_name_that_the_models_own_forward_gives_it():
    """As a library leaves it that replaces the forward pass of a single model."""
    model = any_name()
    model.forward = lambda ids, attention_mask: model.run(model, ids)
    seen = look(model, IDS, RIGHT)
    assert kept(seen) == places(RIGHT)
    assert seen.padding("") == "attention_mask"


class MaskedBlock(Block):
    """Takes a mask that the model made, and does without it."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


def test_a_mask_that_only_the_blocks_are_given_is_read():
    def run(m, ids):
        states = m.tokens(ids)
        for block in m.blocks:
            states = block(states, attention_mask=RIGHT)
        return states

    torch.manual_seed(0)
    causal = [MaskedBlock(lambda q, k, v: fused(q, k, v, None), 32) for _ in range(2)]
    seen = look(Running(run, tokens=nn.Embedding(50, 32), blocks=nn.ModuleList(causal)), IDS)
    assert kept(seen) == places(RIGHT)
    assert seen.padding("") == "attention_mask"


def test_a_mask_of_as_many_sequences_as_tokens_is_turned_with_the_hidden_states():
    model, real = nn.TransformerEncoderLayer(32, 4, 64, 0.0), RIGHT[:, -8:]  # length first
    stack = nn.TransformerEncoder(model, 2, enable_nested_tensor=False)
    seen = look(stack, torch.randn(8, 8, 32), src_key_padding_mask=~real)
    assert kept(seen) == places(real.T)


@pytest.mark.parametrize("name", ["mask", "src_padding", "lengths", "x_len"])
def test_arguments_that_may_mark_padding_but_are_not_read_are_named(name):
    seen = look(any_name(), IDS, **{name: LENGTHS if "len" in name else RIGHT})
    assert len(kept(seen)) == IDS.numel()
    (note,) = notes(seen)
    assert note.startswith(f"padding may be counted: {name} may mark it")
    alike = torch.full_like(LENGTHS, 32) if "len" in name else ALL.long()
    for given in ({name: alike}, {name: RIGHT, "attention_mask": ALL.long()}):
        assert notes(look(any_name(), IDS, **given)) == []


OTHERS = ("labels", "token_type_ids", "loss_mask", "prompt_mask", "special_tokens_mask", "chosen")


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_of_zeros_and_ones_say_nothing(name):
    real = torch.arange(32) >= LENGTHS[:, None] // 2
    for model in (any_name(), any_name(ALL)):
        for given in (real, real.long(), real.long().masked_fill(~real, -100)):
            seen = look(model, IDS, **{name: given})
            assert (kept(seen), notes(seen), seen.padding("")) == (places(ALL), [], None)


@pytest.mark.parametrize("name", ["tgt_mask", "decoder_mask", "trg_mask", "target_mask", "a_mask"])
def test_the_first_of_several_stacks_takes_all_arguments_but_those_of_a_decoder(name):
    both = Running(
        lambda m, ids, **given: m.encoder(ids) + m.decoder(ids),
        encoder=any_name(), decoder=any_name(),
    )  # fmt: skip
    said = [text for text in notes(look(both, IDS, **{name: RIGHT})) if name in text]
    assert [text.partition(":")[0] for text in said] == (["encoder"] if name == "a_mask" else [])


@pytest.mark.parametrize("name", ["attention_mask", "key_padding_mask"])
def test_a_mask_that_leaves_no_token_is_not_believed_and_said(name):
    seen = look(any_name(), IDS, **{name: ~ALL if name == "attention_mask" else ALL})
    assert kept(seen) == places(ALL)
    assert notes(seen) == [f"{name} leaves no token: it is not read as a padding mask"]
    assert kept(look(any_name(~ALL), IDS)) == places(ALL)


@pytest.mark.parametrize("name", ["attention_mask", "key_padding_mask"])
def test_a_mask_that_means_the_opposite_of_its_name_gives_no_values_and_says_so(name):
    model, inverted = any_name(RIGHT), ~RIGHT if name == "attention_mask" else RIGHT
    for layer in look(model, IDS, **{name: inverted}).snapshot().layers:
        assert not {"hidden", "visible", "projected_query"} & layer.captured.keys()
        assert f"exactly the tokens that {name} marks as tokens" in layer.missing["hidden"]
    with pytest.raises(RuntimeError, match="its values mean the opposite"):
        measure(model, {"ids": IDS, name: inverted})
    assert kept(look(model, IDS, **{name: ~inverted})) == places(RIGHT)


# -- what attention hides ------------------------------------------------------------------------

FORMS = {
    "bool": lambda mask: mask,
    "float": lambda mask: mask.float(),
    "additive": lambda mask: added(~mask, -1e9)[:, None, None, :],
}


@WAYS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mask", "labels"])
def test_the_keys_that_attention_hides_are_padding_whatever_the_model_is_given(name, form, way):
    real = LEFT if name == "mask" else RIGHT
    seen = look(any_name(real, way=way), IDS, **{name: FORMS[form](~real)})
    assert kept(seen) == places(real)
    assert notes(seen) == [f"padding, 26 % of the tokens, was left out, going by {HIDDEN}"]
    assert seen.padding("") == HIDDEN


@WAYS
def test_padding_that_is_known_after_the_pass_leaves_fewer_rows_and_no_padding(way):
    left = kept(look(any_name(RIGHT, way=way), IDS, rows=100))
    assert 50 < len(left) < 100
    assert set(left) <= set(places(RIGHT))
    assert len(kept(look(any_name(RIGHT, way=way), IDS, rows=100, attention_mask=RIGHT))) == 100


OTHER = RIGHT.roll(11, 1)
BETWEEN = torch.cat([torch.arange(20) < LENGTHS[:, None] // 2, ALL[:, 20:]], dim=1)
BEFORE = ALL[0].expand(32, 32).tril(-1) | (torch.arange(1024).view(32, 32) == 0)
# Keys that the attention of each layer leaves -> tokens.
LEAVES = {
    "between tokens, as before an image": ([BETWEEN], BETWEEN),
    "by one layer alone, as sparse attention": ([RIGHT, OTHER], RIGHT | OTHER),
    "one place of all sequences": ([BEFORE[None, None]], ALL),
    "two places of all": ([(BEFORE & (torch.arange(32) < 30))[None, None]],
                          (torch.arange(32) < 30).expand(8, -1)),
}  # fmt: skip


@WAYS
@pytest.mark.parametrize("case", LEAVES)
def test_keys_that_no_query_of_any_layer_sees_are_padding(case, way):
    hides, real = LEAVES[case]
    seen = look(any_name(*hides, way=way), IDS)
    assert kept(seen) == places(real)
    assert bool(notes(seen)) == (real is not ALL and not real.all())


@pytest.mark.parametrize(
    ("heads", "lowest", "hides"), [(1, -60, True), (2, -60, False), (2, -1e4, True)]
)
def test_a_bias_of_each_head_hides_only_what_no_score_reaches(heads, lowest, hides):
    model, bias = any_name(), added(RIGHT, lowest)[:, None, None].expand(-1, heads, -1, -1)
    model.blocks = blocks_of(lambda q, k, v: fused(q, k, v, bias), heads=2)
    assert kept(look(model, IDS)) == places(RIGHT if hides else ALL)


# -- encoders and decoders -----------------------------------------------------------------------


def test_labels_of_minus_100_tell_the_padding_of_a_decoder():
    model = built(ZOO["T5 (position bias)"], "sdpa")
    labels = batch(length=16, seed=4).clamp(min=3)
    lengths = torch.tensor([16, 3, 9, 12, 16, 1, 0, 10])
    labels[torch.arange(16) >= lengths[:, None]] = -100
    labels[1, 1] = -100  # between labels: a token
    given = {"input_ids": IDS, "attention_mask": RIGHT.long(), "labels": labels}
    seen = look(model, **given)
    expected = torch.arange(16) < lengths[:, None] + 1  # the start token and the labels
    assert kept(seen, "decoder") == places(expected)
    assert seen.padding("decoder") == "labels of -100"
    for layer in [x for x in seen.snapshot().layers if x.stack == "decoder"][1:]:
        assert layer.captured["visible"].any(-1).any(1).sum() == expected.sum()
        assert len(layer.captured["projected_query"]) == expected.sum()
    assert kept(seen, "encoder") == places(RIGHT)
    shown = dict(describe(model, given).rows)["padding"]
    assert "of the decoder left out, going by labels of -100" in shown


def merged(name: str, *, given: bool) -> nn.Module:
    """A decoder whose one attention has keys of its own tokens and of the encoder's."""

    def attending(m, x, **states):
        rows = [x, *states.values()]
        q, *kv = (
            m.q_proj(x),
            torch.cat([*map(m.k_proj, rows)], 1),
            torch.cat([*map(m.v_proj, rows)], 1),
        )
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in (q, *kv))
        order = torch.arange(x.shape[1])
        sees = order[:, None] >= torch.cat([order, *(0 * order[: y.shape[1]] for y in rows[1:])])
        return x + attend(q, k, v, attn_mask=sees).transpose(1, 2).flatten(2)

    def block():
        return Running(attending, **{f"{x}_proj": nn.Linear(32, 32) for x in "qkv"})

    def run(m, ids, labels=None):
        x = states = m.tokens(ids)
        for each in m.encoder:
            states = each(states)
        for each in m.decoder:
            x = each(x, **({name: states} if given else {}))
        return x

    stacks = {name: nn.ModuleList(block() for _ in range(2)) for name in ("encoder", "decoder")}
    return Running(run, tokens=nn.Embedding(50, 32), **stacks)


@pytest.mark.parametrize("name", ["encoder_hidden_states", "memory", "encoder_output"])
@pytest.mark.parametrize("given", [True, False])
def test_labels_tell_the_padding_of_a_stack_that_is_given_the_states_of_another(name, given):
    """Whatever its attention is called; labels of other stacks may leave out a prompt."""
    labels = IDS.masked_fill(~RIGHT, -100)
    seen = look(merged(name, given=given), IDS, labels=labels)
    shifted = torch.arange(32) < LENGTHS[:, None] + 1
    assert kept(seen, "decoder") == places(shifted if given else ALL)
    assert kept(seen, "encoder") == places(ALL)
    said = [text for text in notes(seen) if "padding" in text or "leaves no token" in text]
    assert [text.partition(":")[0] for text in said] == (["decoder"] if given else [])
    complete = notes(look(merged(name, given=given), IDS, labels=IDS))
    assert not [text for text in complete if "padding" in text or "leaves no token" in text]


def test_describe_says_what_the_padding_was_known_by():
    class Named(Running):
        def forward(self, ids, pad_mask=None):
            return self.run(self, ids)

    model = any_name(RIGHT, kind=Named)
    assert "as a pass shows" in dict(describe(model).rows)["padding"]
    shown = dict(describe(model, (IDS, ~RIGHT)).rows)["padding"]
    assert shown == f"left out, going by {HIDDEN}"
    shown = dict(describe(any_name(kind=Named), IDS).rows)["padding"]
    assert shown.startswith("none in this pass")


@WAYS
def test_padding_that_is_inferred_after_the_pass_is_not_in_the_largest_logit(way):
    """It is computed while queries are alive, and padding may be known only later."""
    model, ids = any_name(RIGHT, way=way), IDS.masked_fill(~RIGHT, PAD)
    own = model.blocks[0].attention
    with torch.no_grad():  # the queries of padding are the largest: W_q stretches them most
        model.tokens.weight[PAD] = 100 * torch.linalg.svd(own.q_proj.weight).Vh[0]
    named, other = (
        measure(model, {"ids": ids, name: RIGHT}, metrics=select("max_logit"))
        for name in ("attention_mask", "which_count")
    )
    assert other == pytest.approx(named)
    with torch.no_grad():
        model(ids)
    scores = scores_of(own.query.double(), own.key.double())
    scores = scores.masked_fill(~RIGHT[:, None, None], -torch.inf)
    tokens = scores.masked_fill(~RIGHT[:, None, :, None], -torch.inf).amax(dim=(0, 2, 3))
    assert (scores.amax(dim=(0, 2, 3)) > tokens * 1.01).any()
    found = [other[f"max_logit/layer_01/head_{head}"] for head in range(4)]
    assert found == pytest.approx(tokens.tolist(), rel=1e-5)
