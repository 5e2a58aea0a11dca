"""The one model of the experiments is the models that its options name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from recipes.enwik8.train import configuration
from recipes.study.model import Architecture, Transformer
from recipes.study.text import masked_characters, next_characters

SIZES = {"layers": 2, "width": 16, "heads": 2, "context": 16}
CHARACTERS = torch.randint(20, (2, 16), generator=torch.Generator().manual_seed(0))


def model(seed=0, **options) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(nn.Embedding(21, 16), Architecture(**SIZES, **options))


def test_a_causal_pre_norm_model_is_gpt2():
    config = configuration("gpt2", 21, SIZES | {"dropout": 0.0})
    theirs = AutoModelForCausalLM.from_config(config).eval()
    ours = model()
    with torch.no_grad():
        ours.embedding.weight.copy_(theirs.transformer.wte.weight)
        ours.positions.weight.copy_(theirs.transformer.wpe.weight)
        for one, other in zip(ours.blocks, theirs.transformer.h, strict=True):
            attention = one.mixing
            parts = other.attn.c_attn.weight.T.chunk(3)
            for part, weight in zip(
                (attention.query, attention.key, attention.value), parts, strict=True
            ):
                part.weight.copy_(weight)
            attention.out.weight.copy_(other.attn.c_proj.weight.T)
            one.mlp[0].weight.copy_(other.mlp.c_fc.weight.T)
            one.mlp[2].weight.copy_(other.mlp.c_proj.weight.T)
    assert torch.allclose(ours(CHARACTERS), theirs(CHARACTERS).logits, atol=1e-6)
    deviations = {
        name: one.std().item() for name, one in model().named_parameters() if one.ndim == 2
    }
    assert deviations["blocks.0.mlp.0.weight"] == pytest.approx(0.02, rel=0.1)
    assert deviations["blocks.0.mlp.2.weight"] == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_block_is_the_encoder_layer_of_torch(norm):
    architecture = Architecture(**SIZES, causal=False, norm=norm, deviation=0.2)
    torch.manual_seed(0)
    block = Transformer(nn.Embedding(21, 16), architecture).blocks[0]
    theirs = nn.TransformerEncoderLayer(
        16, 2, 64, dropout=0, activation=lambda x: F.gelu(x, approximate="tanh"),
        layer_norm_eps=block.mlp_norm.eps, batch_first=True, norm_first=norm == "pre",
    )  # fmt: skip
    attention = block.mixing
    projections = (attention.query, attention.key, attention.value)
    with torch.no_grad():
        for part in projections:
            part.bias.normal_()
        theirs.self_attn.in_proj_weight.copy_(torch.cat([part.weight for part in projections]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([part.bias for part in projections]))
    theirs.self_attn.out_proj.load_state_dict(attention.out.state_dict())
    theirs.linear1.load_state_dict(block.mlp[0].state_dict())
    theirs.linear2.load_state_dict(block.mlp[2].state_dict())
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
    network = model(causal=False)
    windows = torch.randint(20, (200, 17), generator=torch.Generator().manual_seed(1))
    seen = []
    network.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    loss = masked_characters(network, windows, torch.Generator().manual_seed(2))
    masked = seen[0] == 20
    assert masked.float().mean() == pytest.approx(0.15, abs=0.02)
    assert torch.equal(seen[0][~masked], windows[:, :-1][~masked])
    logits = network(seen[0])[masked]
    expected = -F.log_softmax(logits, 1).gather(1, windows[:, :-1][masked][:, None]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_causal_model_is_asked_for_the_next_character():
    network = model()
    windows = torch.randint(20, (3, 17), generator=torch.Generator().manual_seed(1))
    logits = F.log_softmax(network(windows[:, :16]), 2)
    expected = -logits.gather(2, windows[:, 1:, None]).mean()
    loss = next_characters(network, windows, torch.Generator())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
