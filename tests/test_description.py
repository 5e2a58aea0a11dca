import functools

import pytest
import torch
from models import PlainDecoder, batch, transformer
from torch import nn
from watched import ToContext

from geomon import describe


def rows(model, inputs=None, **kwargs) -> dict[str, str]:
    return dict(describe(model, inputs, **kwargs).rows)


def test_it_prints_in_aligned_columns_without_running_the_model():
    model = transformer("gpt2")

    @functools.wraps(model.forward)
    def fails(*given):
        raise AssertionError

    model.forward = fails
    assert str(describe(model)) == "\n".join(
        [
            "GPT2LMHeadModel: 3 blocks watched",
            "blocks          transformer.h.0 to transformer.h.2",
            "hidden states   layer 0 enters the first block, layers 1 to 3 leave the blocks",
            "attention       seen as it runs",
            "Q, K projected  attn.c_attn, with V",
            "token ids       inputs of transformer.wte",
            "padding         left out, by a mask or by keys that attention hides, as a pass shows",
            "routes          shown by one pass: describe(model, inputs)",
        ]
    )
    assert repr(describe(model)) == str(describe(model))


class Block(nn.Module):
    """A residual block around a function of it."""

    def __init__(self, mix, **modules):
        super().__init__()
        self.mix = mix
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return x + self.mix(self, x)


class Looped(PlainDecoder):
    """Its blocks run twice."""

    def forward(self, ids):
        x = self.tokens(ids)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


def test_layers_are_those_that_one_pass_has_shown():
    before = "layer 0 enters the first block, layers 1 to"
    assert rows(PlainDecoder(layers=3), batch())["hidden states"] == f"{before} 3 leave the blocks"
    looped = Looped(layers=3)
    assert rows(looped)["hidden states"] == f"{before} 3 leave the blocks"
    assert rows(looped, batch())["hidden states"] == (
        f"{before} 6 leave the blocks, one for each call"
    )


class Called(nn.Module):
    """Called attention as RWKV's is, and none: neither queries and keys nor a softmax."""

    def __init__(self):
        super().__init__()
        self.key, self.receptance = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.receptance(x).sigmoid() * self.key(x).cumsum(dim=1)


def by_exp(self, x):
    weights = (self.q_proj(x) @ self.k_proj(x).mT).exp()
    return weights @ x / weights.sum(-1, keepdim=True)


def two(mix, *names, **modules):
    """Two blocks with linear layers of these names."""
    return nn.Sequential(
        *(Block(mix, **{name: nn.Linear(8, 8) for name in names}, **modules) for _ in range(2))
    )


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 8) for _ in range(3))


class ToBoth(nn.Module):
    """Two attentions, of which the second is to a context, as diffusers has it."""

    def __init__(self):
        super().__init__()
        self.attn1, self.attn2 = ToContext(), ToContext()

    def forward(self, x, context):
        x = x + self.attn1(x)
        return x + self.attn2(x, context), context


class Several(nn.Sequential):
    def forward(self, *given):
        for block in self:
            given = block(*given)
        return given[0]


X, CONTEXT = torch.randn(2, 5, 8), (torch.randn(2, 5, 32), torch.randn(2, 7, 32))
MASK = {"input_ids": batch(), "attention_mask": (torch.arange(256).view(8, 32) > 15).long()}
NO_NAME = "none under a known name; shown by one pass: describe(model, inputs)"
NAMELESS = two(lambda b, x: (b.one(x) @ b.other(x).mT).softmax(-1) @ x, "one", "other")
CALLED = two(lambda block, x: block.attention(x), attention=Called())
UNSEEN = two(by_exp, "q_proj", "k_proj", num_heads=2)
HEADS = nn.ModuleDict({"blocks": nn.ModuleList(
    Block(None, n_head=4, heads=nn.ModuleList(Head() for _ in range(4))) for _ in range(3)
)})  # fmt: skip


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        (transformer("llama"), batch(), {
            "attention": "4 heads, 2 key heads, through torch's",
            "Q, K projected": "self_attn.q_proj and self_attn.k_proj", "routes": None}),
        (PlainDecoder(), batch(), {
            "attention": "4 heads, through torch's scaled_dot_product_attention",
            "Q, K projected": "c_attn, with V"}),
        (transformer("gpt2"), MASK, {"note": "padding, 6 % of the tokens, was left out"}),
        (UNSEEN, None, {"attention": "seen as it runs",
                        "padding": "left out, by a mask"}),
        (UNSEEN, X, {"attention": "not seen in this pass", "token ids": "none:",
                     "padding": "none in this pass", "not seen": "not seen in the first pass"}),
        (NAMELESS, None, {"attention": NO_NAME, "routes": None}),
        (NAMELESS, X, {"attention": "1 head, by hand: its scores are seen at the softmax"}),
        (CALLED, None, {"attention": "a module has this name, but no query and key projections"}),
        (CALLED, X, {"attention": "none was seen", "Q, K projected": None}),
        (HEADS, None, {"attention": "4 heads, each a module"}),
        (Several(ToBoth(), ToBoth()), CONTEXT, {"attention": "4 heads, through",
                             "further attention": "attn2: to keys of another source, 4 heads"}),
    ],
)  # fmt: skip
def test_rows_say_what_is_known_before_and_after_a_pass(model, inputs, expected):
    shown = describe(model, inputs)
    for label, words in expected.items():
        assert (label in dict(shown.rows)) == (words is not None)
        assert words is None or dict(shown.rows)[label].startswith(words), label
    assert max(map(len, str(shown).splitlines())) <= 100


def test_stacks_are_described_one_after_the_other():
    model = nn.Transformer(32, 4, 2, 3, 64, batch_first=True)
    title, *rows = str(describe(model)).splitlines()
    assert title == "Transformer: 2 blocks of the encoder and 3 blocks of the decoder watched"
    assert "  attention        seen as it runs" in rows
    assert "  Q, K projected   multihead_attn, by in_proj_weight" in rows
    attends = "4 heads, through torch's scaled_dot_product_attention"
    ids = "no embedding outside the blocks received integers of"
    none = "no embedding outside the blocks; metrics of token types are missing"
    assert str(describe(model, CONTEXT)).splitlines() == [
        title,
        "encoder",
        "  blocks           encoder.layers.0 to encoder.layers.1",
        "  hidden states    layer 0 enters the first block, layers 1 to 2 leave the blocks",
        f"  attention        {attends}",
        "  Q, K projected   self_attn, by in_proj_weight",
        "decoder",
        "  blocks           decoder.layers.0 to decoder.layers.2",
        "  hidden states    layer 0 enters the first block, layers 1 to 3 leave the blocks",
        f"  attention        {attends}",
        "  Q, K projected   self_attn, by in_proj_weight",
        f"  cross-attention  {attends}",
        "  Q, K projected   multihead_attn, by in_proj_weight",
        f"token ids          none: {none}",
        "padding            none in this pass, going by its arguments and by attention: "
        "all rows count",
        f"not seen           token ids of the encoder: {ids}",
        "                   the hidden states' shape",
        f"not seen           token ids of the decoder: {ids}",
        "                   the hidden states' shape",
    ]


class Summed(PlainDecoder):
    """Has four tables beside the blocks, of which the first is given the tokens."""

    def __init__(self):
        super().__init__()
        self.kinds, self.others = nn.Embedding(2, 32), nn.Embedding(2, 32)


def test_of_the_tables_a_pass_shows_those_that_are_given_the_tokens():
    found = [rows(Summed(), inputs)["token ids"] for inputs in (None, batch())]
    assert found == ["inputs of tokens", "inputs of tokens"]  # which has a row for each output
    headless = Summed()
    headless.head = nn.Identity()
    found = [rows(headless, inputs)["token ids"] for inputs in (None, batch())]
    open_still = "inputs of one of tokens, places, kinds and 1 more, as one pass shows"
    assert found == [open_still, "inputs of tokens"]


def test_tables_that_are_given_no_tokens_are_none_of_them():
    """As in models of series of numbers, where positions alone are embedded."""

    class OfNumbers(PlainDecoder):
        def forward(self, values):
            x = values[..., None].expand(-1, -1, 32)
            x = x + self.places(torch.arange(values.shape[1]))
            for block in self.blocks:
                x = block(x)
            return x

    found = rows(OfNumbers(), torch.randn(8, 32))["token ids"]
    assert found.startswith("none were seen in the pass")


def test_blocks_that_are_left_out_or_chosen():
    model = nn.Module()
    model.layers = two(None, "linear")
    model.decoder = PlainDecoder(width=8, heads=2)
    assert rows(model)["not watched"].startswith("2 blocks layers.#: ")
    named = rows(model, blocks=r"decoder\.blocks\.0")
    assert named["blocks"] == "decoder.blocks.0"
    assert named["hidden states"].endswith("its output is a layer for each call")
    with pytest.raises(ValueError, match="no module's full name matches"):
        describe(model, blocks="nothing")


def test_blocks_with_other_numbers_of_heads_have_both_ends_named():
    model = nn.Sequential(*(nn.TransformerEncoderLayer(16, heads, 32) for heads in (2, 4, 4)))
    shown = dict(describe(model, torch.randn(3, 5, 16)).rows)["attention"]
    assert shown.startswith("2 to 4 heads, through torch's")
