"""The one model of the experiments is the models that its options name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from recipes.enwik8.train import configuration
from recipes.study.model import Architecture, Transformer
from recipes.study.text import masked_characters, next_characters
from support.samples import generator

SIZES = {"layers": 2, "width": 16, "heads": 2, "context": 16}
CHARACTERS = torch.randint(20, (2, 16), generator=torch.Generator().manual_seed(0))


def model(seed=0, **options) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(nn.Embedding(21, 16), Architecture(**SIZES, **options))


def test_a_causal_pre_norm_model_is_gpt2():
    config = configuration("gpt2", 21, SIZES | {"dropout": 0.0})
    theirs, ours = AutoModelForCausalLM.from_config(config).eval(), model()
    wanted = {
        "embedding.weight": theirs.transformer.wte.weight,
        "positions.weight": theirs.transformer.wpe.weight,
    }
    for number, block in enumerate(theirs.transformer.h):
        parts = [*block.attn.c_attn.weight.T.chunk(3), block.attn.c_proj.weight.T]
        names = [*(f"mixing.{name}" for name in ("query", "key", "value", "out")), "mlp.0", "mlp.2"]
        parts += [block.mlp.c_fc.weight.T, block.mlp.c_proj.weight.T]
        for name, part in zip(names, parts, strict=True):
            wanted[f"blocks.{number}.{name}.weight"] = part
    ours.load_state_dict(ours.state_dict() | wanted)
    assert torch.allclose(ours(CHARACTERS), theirs(CHARACTERS).logits, atol=1e-6)
    deviations = [model().blocks[0].mlp[place].weight.std().item() for place in (0, 2)]
    assert deviations == pytest.approx([0.02, 0.01], rel=0.1)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_block_is_the_encoder_layer_of_torch(norm):
    block = model(causal=False, norm=norm, deviation=0.2).blocks[0]
    theirs = nn.TransformerEncoderLayer(
        16, 2, 64, dropout=0, activation=lambda x: F.gelu(x, approximate="tanh"),
        layer_norm_eps=block.mlp_norm.eps, batch_first=True, norm_first=norm == "pre",
    )  # fmt: skip
    attention, own = block.mixing, theirs.self_attn
    projections = (attention.query, attention.key, attention.value)
    with torch.no_grad():
        for part in projections:
            part.bias.normal_()
        own.in_proj_weight.copy_(torch.cat([part.weight for part in projections]))
        own.in_proj_bias.copy_(torch.cat([part.bias for part in projections]))
    theirs_and_ours = {own.out_proj: attention.out, theirs.linear1: block.mlp[0],
                       theirs.linear2: block.mlp[2]}  # fmt: skip
    for part, of_ours in theirs_and_ours.items():
        part.load_state_dict(of_ours.state_dict())
    hidden = torch.randn(3, 12, 16)
    assert torch.allclose(block(hidden), theirs(hidden), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "causal"),
    [
        ({}, True), ({"alibi": True}, True), ({"mixing": "uniform"}, True),
        ({"causal": False, "alibi": True}, False), ({"causal": False}, False),
        ({"causal": False, "mixing": "perceptron"}, False),
    ],
)  # fmt: skip
def test_a_causal_model_alone_is_blind_to_what_follows(options, causal):
    network = model(deviation=0.2, **options)
    changed = CHARACTERS.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 20
    moved = (network(changed) - network(CHARACTERS)).abs().amax((0, 2)) > 1e-6
    assert moved[8:].any()
    assert bool(moved[:8].any()) == (not causal)


def test_a_masked_model_is_asked_for_about_15_per_cent_and_sees_none_of_them():
    network, windows = model(causal=False), torch.randint(20, (200, 17), generator=generator(1))
    seen, asked = [], windows[:, :-1]
    network.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    loss = masked_characters(network, windows, generator(2))
    masked = seen[0] == 20
    assert masked.float().mean() == pytest.approx(0.15, abs=0.02)
    assert torch.equal(seen[0][~masked], asked[~masked])
    expected = F.cross_entropy(network(seen[0])[masked], asked[masked])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_causal_model_is_asked_for_the_next_character():
    network, windows = model(), torch.randint(20, (3, 17), generator=generator(1))
    expected = F.cross_entropy(network(windows[:, :16]).flatten(0, 1), windows[:, 1:].flatten())
    loss = next_characters(network, windows, torch.Generator())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
