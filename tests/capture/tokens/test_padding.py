import itertools
from collections.abc import Callable

import pytest
import torch
from models import batch
from referee import sampled
from specimens import built
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend
from watched import blocks_of, look, notes, scores_of
from zoo import ZOO

from geomon import describe, measure, select
from geomon.capture import Window
from geomon.capture.snapshot import NotSeenError, Snapshot
from geomon.capture.tokens.padding import HIDDEN_KEYS, Padding, hidden_keys, named_tensors


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
    name = "src_key_padding_mask" if inverted else "attention_mask"
    for form in (mask, mask[:, None, None]):
        padding = Padding()
        padding.take_arguments(nn.Module(), (), {name: form, "mask": ~mask.bool()})
        assert padding.valid((1, 3)).tolist() == [valid]
        assert padding.valid((3, 1)).T.tolist() == [valid]
        assert padding.source((1, 3)) == name
    for other in ({name: mask[0]}, {"mask": mask}):
        padding = Padding()
        padding.take_arguments(nn.Module(), (), other)
        assert padding.valid((1, 3)) is None


def test_a_mask_of_as_many_sequences_as_tokens_is_turned_with_the_hidden_states():
    padding, mask = Padding(), torch.tensor([[True, False], [True, True]])
    padding.take_arguments(nn.Module(), (), {"attention_mask": mask})
    assert torch.equal(padding.valid((2, 2)), mask)
    assert torch.equal(padding.valid((2, 2), turned=True), mask.T)


def test_keys_that_no_query_sees_are_hidden():
    seen = torch.tensor([[[[1, 0, 0], [1, 1, 0]]]])
    for mask in (seen, seen.bool(), torch.where(seen.bool(), 0.0, -1e9)):
        assert hidden_keys(mask).tolist() == [[False, False, True]]
    assert not hidden_keys(-torch.ones(1, 1, 2, 3)).any()  # a bias
    far = torch.tensor([0.0, -60.0]).expand(1, 1, 2, 2)
    assert hidden_keys(far).tolist() == [[False, True]]
    assert not hidden_keys(far, are_scores=True).any()
    assert not hidden_keys(far.expand(1, 2, 2, 2)).any()


ROLES = {
    "attention_mask": "", "decoder_attention_mask": "", "key_padding_mask": "",
    "src_key_padding_mask": "", "tgt_key_padding_mask": "", "encoder_attention_mask": "key",
    "memory_key_padding_mask": "key", "encoder_padding_mask": "key",
}  # fmt: skip


@pytest.mark.parametrize(("name", "role"), ROLES.items())
def test_masks_are_of_the_tokens_themselves_or_of_those_that_they_attend_to(name, role):
    padding, real = Padding(), torch.tensor([[True, True, False]])
    padding.take_arguments(nn.Module(), (), {name: ~real if "padding" in name else real})
    assert torch.equal(padding.valid((1, 3), role), real)
    assert padding.valid((1, 3), "" if role else "key") is None
    padding = Padding()
    padding.take_arguments(nn.Module(), (), {name: torch.full((1, 3), "padding" in name)})
    said = [note.words().partition(":")[0] for note in padding.notes((1, 3), "")]
    assert said == [f"{name} leaves no token"] * (not role)


@pytest.mark.parametrize("name", ["tgt_mask", "decoder_mask", "trg_mask", "target_mask", "a_mask"])
def test_of_what_is_given_to_several_stacks_the_first_takes_all_but_what_is_of_a_decoder(name):
    for first in (True, False):
        padding = Padding(first=first)
        padding.take_arguments(nn.Module(), (), {name: torch.tensor([[True, False]])}, shared=True)
        for shape in ((1, 2), (2, 1)):
            assert len(padding.notes(shape, "")) == (first and name == "a_mask")


def test_without_a_signature_the_arguments_by_name_are_known():
    module, mask = nn.Module(), torch.ones(2, 3)
    module.forward = torch.relu  # of C
    assert [*named_tensors(module, (mask,), {"attention_mask": mask})] == [("attention_mask", mask)]


# -- what one pass tells -------------------------------------------------------------------------


def fused(q: Tensor, k: Tensor, v: Tensor, hides: Tensor | None) -> Tensor:
    """Attention over the tokens that are no padding, or over all earlier ones."""
    return attend(q, k, v, attn_mask=hides, is_causal=hides is None)


def by_hand(q: Tensor, k: Tensor, v: Tensor, hides: Tensor | None) -> Tensor:
    scores = scores_of(q, k)
    return (scores if hides is None else scores.masked_fill(~hides, -1e9)).softmax(-1) @ v


class AnyName(nn.Module):
    """Takes a mask under any name; its attention may hide what `real` says is padding."""

    def __init__(self, way: Callable[..., Tensor] = fused) -> None:
        super().__init__()
        self.blocks = blocks_of(lambda q, k, v: way(q, k, v, next(self.masks)))
        self.tokens, self.hides = nn.Embedding(50, 32), [None]

    def hide(self, *real: Tensor | None) -> "AnyName":
        """Hide these keys in all blocks, or one mask in each."""
        self.hides = [x if x is None or x.ndim != 2 else x[:, None, None, :] for x in real]
        return self

    def forward(self, ids: Tensor, **given: Tensor) -> Tensor:
        self.masks = itertools.cycle(self.hides)
        return self.blocks(self.tokens(ids))


LENGTHS = torch.tensor([32, 20, 27, 9, 32, 14, 31, 25])
PAD = 0


def padded_batch(side: str = "right") -> tuple[Tensor, Tensor]:
    """Token ids, and True where they are no padding."""
    real = torch.arange(32) < LENGTHS[:, None]
    real = real if side == "right" else real.flip(1)
    return batch().clamp(min=1).masked_fill(~real, PAD), real


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
    "float": lambda mask: mask.float(),
    "additive": lambda mask: torch.zeros(mask.shape).masked_fill(~mask, -1e9)[:, None, None, :],
}


@pytest.mark.parametrize("way", [fused, by_hand])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mask", "labels"])
def test_the_keys_that_attention_hides_are_padding_whatever_the_model_is_given(name, form, way):
    ids, real = padded_batch("left" if name == "mask" else "right")
    seen = look(AnyName(way).hide(real), ids, **{name: FORMS[form](~real)})
    assert torch.equal(kept(seen), real.flatten().nonzero().squeeze(1))
    said = f"padding, 26 % of the tokens, was left out, going by {HIDDEN_KEYS}"
    assert notes(seen) == [said]
    assert seen.padding("") == HIDDEN_KEYS


@pytest.mark.parametrize("name", ["mask", "src_padding", "lengths", "x_len"])
def test_what_may_say_where_padding_is_and_is_not_read_is_named(name):
    ids, real = padded_batch()
    seen = look(AnyName(), ids, **{name: LENGTHS if "len" in name else real})
    assert len(kept(seen)) == ids.numel()
    (note,) = notes(seen)
    assert note.startswith(f"padding may be counted: {name} may mark it")
    alike = torch.full_like(LENGTHS, 32) if "len" in name else torch.ones_like(real)
    everything = torch.ones_like(ids)
    for given in ({name: alike}, {name: real, "attention_mask": everything}):
        assert notes(look(AnyName(), ids, **given)) == []


OTHERS = ("labels", "token_type_ids", "loss_mask", "prompt_mask", "special_tokens_mask", "chosen")


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_of_zeros_and_ones_say_nothing(name):
    ids, real = batch(), torch.arange(32) >= LENGTHS[:, None] // 2
    for model in (AnyName(), AnyName().hide(torch.ones_like(real))):
        plain = look(model, ids, rows=100).snapshot()
        for given in (real, real.long(), real.long().masked_fill(~real, -100)):
            seen = look(model, ids, rows=100, **{name: given})
            assert_equal(seen.snapshot(), plain)
            assert notes(seen) == []
            assert seen.padding("") is None


@pytest.mark.parametrize("way", [fused, by_hand])
def test_padding_that_is_known_after_the_pass_leaves_fewer_rows_and_no_padding(way):
    ids, real = padded_batch()
    left = kept(look(AnyName(way).hide(real), ids, rows=100))
    assert 50 < len(left) < 100
    assert real.flatten()[left].all()
    assert len(kept(look(AnyName(way).hide(real), ids, rows=100, attention_mask=real))) == 100


@pytest.mark.parametrize("way", [fused, by_hand])
def test_padding_between_tokens_is_left_out(way):
    """A text of its own length, padded, with an image behind it."""
    real = torch.ones(8, 32, dtype=torch.bool)
    real[:, :20] = torch.arange(20) < LENGTHS[:, None] // 2
    seen = look(AnyName(way).hide(real), batch())
    assert torch.equal(kept(seen), real.flatten().nonzero().squeeze(1))


@pytest.mark.parametrize("way", [fused, by_hand])
def test_keys_that_one_layer_alone_hides_are_tokens(way):
    """Sparse attention chooses keys anew at each layer."""
    model, real = AnyName(way), padded_batch()[1]
    other = real.roll(11, 1)
    seen = look(model.hide(real, other), batch())
    assert torch.equal(kept(seen), (real | other).flatten().nonzero().squeeze(1))


def test_a_mask_that_hides_one_place_of_all_sequences_is_of_the_attention():
    before = torch.ones(32, 32, dtype=torch.bool).tril(-1)  # nothing sees the last token
    before[0, 0] = True
    seen = look(AnyName().hide(before[None, None]), batch())
    assert len(kept(seen)) == 8 * 32
    assert notes(seen) == []
    before[:, 28:] = False
    assert len(kept(look(AnyName().hide(before[None, None]), batch()))) == 8 * 28


@pytest.mark.parametrize("name", ["attention_mask", "key_padding_mask"])
def test_a_mask_that_leaves_no_token_is_not_believed_and_said(name):
    ids = batch()
    nothing = torch.zeros_like(ids) if name == "attention_mask" else torch.ones_like(ids).bool()
    seen = look(AnyName(), ids, **{name: nothing})
    assert len(kept(seen)) == ids.numel()
    assert notes(seen) == [f"{name} leaves no token: it is not read as a padding mask"]
    hidden = look(AnyName().hide(torch.zeros_like(ids).bool()), ids)
    assert len(kept(hidden)) == ids.numel()


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


# -- encoders and decoders -----------------------------------------------------------------------


T5 = "T5 (position bias)"


def test_labels_of_minus_100_tell_the_padding_of_a_decoder():
    model, (ids, real) = built(ZOO[T5], "sdpa"), padded_batch()
    labels = batch(length=16, seed=4).clamp(min=3)
    lengths = torch.tensor([16, 3, 9, 12, 16, 1, 7, 10])
    labels[torch.arange(16) >= lengths[:, None]] = -100
    given = {"input_ids": ids, "attention_mask": real.long(), "labels": labels}
    seen = look(model, **given)
    expected = torch.arange(16) < lengths[:, None] + 1  # the start token and the labels
    assert torch.equal(kept(seen, "decoder"), expected.flatten().nonzero().squeeze(1))
    assert seen.padding("decoder") == "labels of -100"
    for layer in [x for x in seen.snapshot().layers if x.stack == "decoder"][1:]:
        assert layer.captured["visible"].any(-1).any(1).sum() == expected.sum()
        assert len(layer.captured["projected_query"]) == expected.sum()
    assert len(kept(seen, "encoder")) == real.sum()
    shown = dict(describe(model, given).rows)["padding"]
    assert "of the decoder left out, going by labels of -100" in shown


@pytest.mark.parametrize("decodes", [True, False])
def test_of_a_decoder_the_start_and_all_up_to_the_last_label_are_tokens(decodes):
    padding, none = Padding(decodes=decodes), -100
    labels = torch.tensor([[5, none, 6, none, none], [none] * 5])
    padding.take_arguments(nn.Module(), (), {"labels": labels})
    expected = torch.arange(5) < torch.tensor([[4], [1]])
    assert torch.equal(padding.valid((2, 5)), expected) if decodes else not padding.valid((2, 5))


def test_describe_says_what_the_padding_was_known_by():
    ids, real = padded_batch()

    class Named(AnyName):
        def forward(self, ids, pad_mask=None):
            return super().forward(ids)

    model = Named().hide(real)
    assert "as a pass shows" in dict(describe(model).rows)["padding"]
    shown = dict(describe(model, (ids, ~real)).rows)["padding"]
    assert shown == "left out, going by the keys that attention hides from every query"
    shown = dict(describe(model.hide(None), batch()).rows)["padding"]
    assert shown.startswith("none in this pass")


@pytest.mark.parametrize("way", [fused, by_hand])
def test_padding_that_is_inferred_after_the_pass_is_not_in_the_largest_logit(way):
    """It is computed while queries are alive, and padding may be known only later."""
    ids, real = padded_batch()
    model = AnyName(way).hide(real)
    own = model.blocks[0].attention
    with torch.no_grad():  # the queries of padding are the largest: W_q stretches them most
        model.tokens.weight[PAD] = 100 * torch.linalg.svd(own.q_proj.weight).Vh[0]
    named, other = (
        measure(model, {"ids": ids, name: real}, metrics=select("max_logit"))
        for name in ("attention_mask", "which_count")
    )
    assert other == pytest.approx(named)
    with torch.no_grad():
        model(ids)
    scores = scores_of(own.query.double(), own.key.double())
    scores = scores.masked_fill(~real[:, None, None], -torch.inf)
    tokens = scores.masked_fill(~real[:, None, :, None], -torch.inf).amax(dim=(0, 2, 3))
    assert (scores.amax(dim=(0, 2, 3)) > tokens * 1.01).any()
    found = [other[f"max_logit/layer_01/head_{head}"] for head in range(4)]
    assert found == pytest.approx(tokens.tolist(), rel=1e-5)
