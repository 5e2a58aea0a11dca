import functools
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from geomon import Monitor, describe, read
from geomon.metrics import searched_by
from support.models import PlainDecoder, Running, batch, run_blocks, transformer
from support.watched import ToContext


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
            f"neighbours      searched on the host by {searched_by(torch.device('cpu'))}",
            "routes          shown by one pass: describe(model, inputs)",
        ]
    )
    assert repr(describe(model)) == str(describe(model))
    with pytest.raises(AttributeError):
        describe(model).title = "another"


def run_twice(model, x):
    return run_blocks(model, run_blocks(model, x))


def number_and_place(model, values):
    """A model of number series, which embeds positions alone."""
    return values[..., None].expand(-1, -1, 32) + model.places(torch.arange(values.shape[1]))


def summed(**modules):
    """Four embedding tables next to the blocks; the first embeds the tokens."""
    return PlainDecoder(kinds=nn.Embedding(2, 32), others=nn.Embedding(2, 32), **modules)


def by_exp(self, x):
    weights = (self.q_proj(x) @ self.k_proj(x).mT).exp()
    return weights @ x / weights.sum(-1, keepdim=True)


def linear(*names, width=8):
    """Linear layers by name."""
    return {name: nn.Linear(width, 8) for name in names}


def two(mix, *names, **modules):
    """Two residual blocks around a function, with linear layers of these names."""
    return nn.Sequential(
        *(Running(lambda self, x: x + mix(self, x), **linear(*names), **modules) for _ in range(2))
    )


def attend_to_both(self, x, context):
    """Two attentions, the second to a context, as diffusers has it."""
    x = x + self.attn1(x)
    return x + self.attn2(x, context)


def run_with_context(self, x, context):
    for block in self.blocks:
        x = block(x, context)
    return x


X, CONTEXT = torch.randn(2, 5, 8), (torch.randn(2, 5, 32), torch.randn(2, 7, 32))
MASK = {"input_ids": batch(), "attention_mask": (torch.arange(256).view(8, 32) > 15).long()}
NO_NAME = "none under a known name; shown by one pass: describe(model, inputs)"
NAMELESS = two(lambda b, x: (b.one(x) @ b.other(x).mT).softmax(-1) @ x, "one", "other")
# Called attention as RWKV's is, and none: neither queries and keys nor a softmax.
CALLED = two(lambda block, x: block.attention(x), attention=Running(
    lambda self, x: self.receptance(x).sigmoid() * self.key(x).cumsum(dim=1),
    **linear("key", "receptance"),
))  # fmt: skip
BY_PRODUCT = two(lambda b, x: (x @ x.mT).softmax(-1) @ x, "one")  # without weights
# Blocks that are lists of an attention and a layer after it.
LISTS = nn.ModuleDict({"layers": nn.ModuleList(
    nn.ModuleList([Running(None, **linear("q_proj", "k_proj")), nn.Linear(8, 8)]) for _ in range(2)
)})  # fmt: skip
UNSEEN = two(by_exp, "q_proj", "k_proj", num_heads=2)
HEADS = nn.ModuleDict({"blocks": nn.ModuleList(
    Running(None, n_head=4, heads=nn.ModuleList(
        Running(None, **linear("query", "key", "value", width=32)) for _ in range(4)
    )) for _ in range(3)
)})  # fmt: skip
TO_BOTH = Running(run_with_context, blocks=nn.ModuleList(
    Running(attend_to_both, attn1=ToContext(), attn2=ToContext()) for _ in range(2)
))  # fmt: skip
LOOPED, HEADLESS = PlainDecoder(run=run_twice), summed(head=nn.Identity())
UNEVEN = nn.Sequential(*(nn.TransformerEncoderLayer(16, heads, 32) for heads in (2, 4, 4)))
LEAVE = "layer 0 enters the first block, layers 1 to"


CASES = [
        (PlainDecoder(layers=3), batch(), {"hidden states": f"{LEAVE} 3 leave the blocks"}),
        (LOOPED, None, {"hidden states": f"{LEAVE} 3 leave the blocks"}),
        (LOOPED, batch(),
         {"hidden states": f"{LEAVE} 6 leave the blocks, one for each call"}),
        # One table has a row for each output.
        *((summed(), inputs, {"token ids": "inputs of tokens."}) for inputs in (None, batch())),
        (HEADLESS, None, {
            "token ids": "inputs of one of tokens, places, kinds and 1 more, as one pass shows"}),
        (HEADLESS, batch(), {"token ids": "inputs of tokens."}),
        (PlainDecoder(embed=number_and_place), torch.randn(8, 32),
         {"token ids": "none were seen in the pass"}),
        (UNEVEN, torch.randn(3, 5, 16), {"attention": "2 to 4 heads, through torch's"}),
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
        (TO_BOTH, CONTEXT, {
            "attention": "4 heads, through",
            "further attention": "attn2: to keys of another source, 4 heads"}),
        (BY_PRODUCT, X, {"Q, K projected": "not found in this pass"}),
        (LISTS, None, {"hidden states": "layers 0 to 1 enter the blocks, which are lists of"}),
        (TO_BOTH, None, {"further attention": "attn2: seen as it runs"}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "inputs", "expected"), CASES)
def test_rows_say_what_is_known_before_and_after_a_pass(model, inputs, expected):
    shown = describe(model, inputs)
    for label, words in expected.items():
        assert (label in dict(shown.rows)) == (words is not None)
        assert words is None or f"{dict(shown.rows)[label]}.".startswith(words), label
    assert max(map(len, str(shown).splitlines())) <= 100


def test_stacks_are_described_one_after_the_other():
    model = nn.Transformer(32, 4, 2, 3, 64, batch_first=True)
    title, *lines = str(describe(model)).splitlines()
    assert title == "Transformer: 2 blocks of the encoder and 3 blocks of the decoder watched"
    assert "  attention        seen as it runs" in lines
    assert "  Q, K projected   multihead_attn, by in_proj_weight" in lines
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
        f"neighbours         searched on the host by {searched_by(torch.device('cpu'))}",
        f"not seen           token ids of the encoder: {ids}",
        "                   the hidden states' shape",
        f"not seen           token ids of the decoder: {ids}",
        "                   the hidden states' shape",
    ]


APPROVED = Path(__file__).parent / "data" / "descriptions.txt"


def test_whole_descriptions_are_as_approved():
    """After a change that is meant: `APPROVE=1 pytest tests/test_description.py`; look at it."""
    pages = [str(describe(model, inputs)) for model, inputs, _ in CASES]
    text = "\n\n".join(pages).replace(searched_by(torch.device("cpu")), "...") + "\n"
    if "APPROVE" in os.environ:
        APPROVED.write_text(text)
    assert text.split("\n\n") == APPROVED.read_text().split("\n\n")


def test_a_hybrid_says_how_many_of_its_blocks_attend():
    def block(*, attends):
        names = ("q_proj", "k_proj") if attends else ("in_proj", "out_proj")
        return Running(len, **{name: nn.Linear(8, 8) for name in names})

    blocks = [block(attends=attends) for attends in (True, False, True)]
    rows = dict(describe(Running(len, blocks=nn.ModuleList(blocks))).rows)
    assert rows["attention"] == "in 2 of 3 blocks, seen as it runs"


def test_blocks_that_are_left_out_or_chosen():
    model = nn.Module()
    model.layers = two(None, "linear")
    model.decoder = PlainDecoder(width=8, heads=2)
    assert dict(describe(model).rows)["not watched"].startswith("2 blocks layers.#: ")
    named = dict(describe(model, blocks=r"decoder\.blocks\.0").rows)
    assert named["blocks"] == "decoder.blocks.0"
    assert named["hidden states"].endswith("its output is a layer for each call")
    with pytest.raises(ValueError, match="no module's full name matches"):
        describe(model, blocks="nothing")


def cloned(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def shared(model):
    model.lm_head.weight = model.model.embed_tokens.weight


TIES = [
    ("gpt2", lambda model: None, None),
    ("gpt2", cloned, "tie_word_embeddings is True, but embedding and unembedding are two weights"),
    ("llama", lambda model: None, None),
    ("llama", shared, "tie_word_embeddings is False, but embedding and unembedding are one weight"),
]


@pytest.mark.parametrize(("name", "change", "said"), TIES)
def test_weights_that_are_tied_by_name_alone_are_noted(name, change, said, tmp_path):
    model = transformer(name)
    change(model)
    found = [text for _, text in describe(model).rows if "unembedding" in text]
    with Monitor(model, directory=tmp_path, metrics=["variance"]) as monitor, monitor(0):
        model(batch())
    found += [note.words() for note in read(tmp_path)[0].notes if "unembedding" in note.words()]
    assert found == ([said] * 2 if said else [])
