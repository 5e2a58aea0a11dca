import pytest
import torch
from models import PlainDecoder, batch, transformer
from torch import nn

from geomon import describe


def rows(model, inputs=None, **kwargs) -> dict[str, str]:
    return dict(describe(model, inputs, **kwargs).rows)


def test_it_prints_in_aligned_columns_without_running_the_model():
    model = transformer("gpt2")
    model.forward = None
    assert str(describe(transformer("gpt2"))) == "\n".join(
        [
            "GPT2LMHeadModel: 3 blocks watched",
            "blocks          transformer.h.0 to transformer.h.2",
            "hidden states   layer 0 enters the first block, layers 1 to 3 leave the blocks",
            "attention       4 heads of width 8, seen as it runs",
            "Q, K projected  attn.c_attn, with V",
            "token ids       inputs of transformer.wte and transformer.wpe",
            "padding         left out, going by attention_mask",
            "routes          shown by one pass: describe(model, inputs)",
        ]
    )
    assert repr(describe(transformer("gpt2"))) == str(describe(transformer("gpt2")))


def test_one_pass_shows_how_attention_is_seen():
    model = transformer("llama")
    shown = rows(model, batch())
    assert shown["attention"].startswith("4 heads of width 8, 2 key heads, through torch's")
    assert shown["Q, K projected"] == "self_attn.q_proj and self_attn.k_proj"
    assert "routes" not in shown
    assert rows(PlainDecoder(), batch())["Q, K projected"] == "c_attn, with V"
    assert rows(PlainDecoder())["attention"] == "4 heads of width 8, seen as it runs"
    shown = rows(PlainDecoder(), batch())
    assert shown["attention"].endswith("torch's scaled_dot_product_attention")


def test_padding_is_among_what_one_pass_shows():
    mask = torch.ones(8, 32, dtype=torch.long)
    mask[0, 16:] = 0
    shown = rows(transformer("gpt2"), {"input_ids": batch(), "attention_mask": mask})
    assert shown["note"] == "padding, 6% of the tokens, was left out"


def test_stacks_are_described_one_after_the_other():
    model = nn.Transformer(32, 4, 2, 3, 64, batch_first=True)
    described = describe(model)
    assert (
        described.title
        == "Transformer: 2 blocks of the encoder and 3 blocks of the decoder watched"
    )
    labels = [label for label, _ in described.rows]
    assert labels.index("encoder") < labels.index("decoder") < labels.index("  cross-attention")
    shown = dict(described.rows)
    assert shown["  attention"] == "4 heads of width 8, seen as it runs"
    assert shown["  Q, K projected"] == "multihead_attn, by in_proj_weight"
    assert "tgt_key_padding_mask" in shown["padding"]
    inputs = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    found = [text for label, text in describe(model, inputs).rows if "projected" in label]
    assert found == ["self_attn, by in_proj_weight"] * 2 + ["multihead_attn, by in_proj_weight"]


def test_what_cannot_be_seen_is_shown_with_its_reason():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
            self.num_heads = 2

        def forward(self, x):
            weights = (self.q_proj(x) @ self.k_proj(x).mT).exp()
            return x + weights @ x / weights.sum(-1, keepdim=True)

    model = nn.Sequential(Block(), Block())
    assert rows(model)["attention"] == "2 heads of width 4, seen as it runs"
    shown = describe(model, torch.randn(2, 5, 8))
    lines = [text for label, text in shown.rows if label == "not seen"]
    assert any("no attention was seen in the block" in line for line in lines)
    assert any("no embedding outside the blocks" in line for line in lines)
    assert dict(shown.rows)["token ids"].startswith("none:")
    assert rows(model)["padding"].startswith("no mask of a known name")
    assert dict(shown.rows)["padding"].startswith("none in this pass")
    assert max(map(len, str(shown).splitlines())) <= 100


def test_hidden_states_alone_and_blocks_that_are_left_out():
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8)

    model = nn.Module()
    model.layers = nn.ModuleList([Mixing(), Mixing()])
    assert rows(model)["attention"] == "none in these blocks, by name: hidden states only"
    assert "routes" not in rows(model)
    model.decoder = PlainDecoder(width=8, heads=2)
    assert rows(model)["not watched"].startswith("2 blocks layers.#: ")
    named = rows(model, blocks=r"decoder\.blocks\.0")
    assert named["blocks"] == "decoder.blocks.0"
    assert named["hidden states"].endswith("what leaves it is a layer for each call")
    with pytest.raises(ValueError, match="no module's name matches"):
        describe(model, blocks="nothing")


class Mixer(nn.Module):
    """Called attention as RWKV's is, and none: neither queries and keys nor a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.receptance = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.receptance(x).sigmoid() * self.key(x).cumsum(dim=1)


class MixerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Mixer()

    def forward(self, x):
        return x + self.attention(x)


class ByOtherNames(nn.Module):
    """Attention in a block without a module for it, and with projections of unknown names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + (self.one(x) @ self.other(x).mT).softmax(-1) @ x


def test_what_is_only_called_attention_is_said_before_and_after_a_pass():
    model = nn.Sequential(MixerBlock(), MixerBlock())
    assert rows(model)["attention"].startswith("a module is called so, and has no projections")
    shown = rows(model, torch.randn(2, 5, 8))
    assert shown["attention"].startswith("none was seen")
    assert "Q, K projected" not in shown


def test_attention_without_a_name_is_shown_by_a_pass():
    model = nn.Sequential(ByOtherNames(), ByOtherNames())
    assert rows(model)["attention"] == "none in these blocks, by name: hidden states only"
    shown = rows(model, torch.randn(2, 5, 8))
    assert shown["attention"] == "by hand: its scores are seen at the softmax"


def test_heads_that_are_modules_are_counted():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(32, 8) for _ in range(3))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n_head, self.heads = 4, nn.ModuleList(Head() for _ in range(4))

    text = str(describe(nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(3))})))
    assert "blocks.0 to blocks.2" in text
    assert "4 heads of width 8, each a module" in text
