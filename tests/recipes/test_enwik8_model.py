"""What the recipe's model is trained by and what it logs, without a run."""

import math

import numpy as np
import pytest
import torch

from recipes.enwik8 import presets
from recipes.enwik8.model import CharacterDecoder, bits_per_byte, bits_per_character
from recipes.enwik8.presets import Preset, preset_for_hardware

TINY = Preset(2, 16, 2, 12, 4, 40, 10, 1e-2, 0.0, "32-true")
SYMBOLS = 7


@pytest.fixture
def model():
    torch.manual_seed(0)
    return CharacterDecoder("gpt2", SYMBOLS, TINY).eval()


@pytest.fixture
def windows():
    return torch.randint(SYMBOLS, (4, TINY.context + 1), generator=torch.Generator().manual_seed(1))


def nats(model, windows):
    """Mean cross-entropy of each next character, by numpy."""
    with torch.no_grad():
        logits = model(windows[:, :-1]).double().numpy()
    chosen = np.take_along_axis(logits, windows[:, 1:, None].numpy(), axis=2)[..., 0]
    return float((np.log(np.exp(logits).sum(axis=2)) - chosen).mean())


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_bits_per_character_are_the_nats_over_ln_2(model, windows, step):
    logged = {}
    model.log = lambda name, value, **options: logged.update({name: value.item()})
    loss = getattr(model, step)(windows, 0)
    expected = nats(model, windows)
    name = f"{step.removesuffix('_step').replace('training', 'train')}/bits_per_character"
    assert logged == {name: pytest.approx(expected / math.log(2), rel=1e-5)}
    # A model that knows nothing needs log2 of the number of symbols.
    assert logged[name] == pytest.approx(math.log2(SYMBOLS), abs=0.1)
    if loss is not None:
        assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert (loss is None) == (step == "validation_step")


@pytest.mark.parametrize(("step", "per_byte"), [("training_step", 0.5), ("validation_step", 0.25)])
def test_subwords_are_logged_in_nats_per_token_and_in_bits_per_byte(windows, step, per_byte):
    model = CharacterDecoder("gpt2", SYMBOLS, TINY, tokens_per_byte=(0.5, 0.25)).eval()
    logged = {}
    model.log = lambda name, value, **options: logged.update({name: value.item()})
    getattr(model, step)(windows, 0)
    expected = nats(model, windows)
    part = {"training_step": "train", "validation_step": "validation"}[step]
    assert logged == {
        f"{part}/nats_per_token": pytest.approx(expected, rel=1e-5),
        f"{part}/bits_per_byte": pytest.approx(expected * per_byte / math.log(2), rel=1e-5),
    }


def test_bits_per_byte_by_hand():
    # Two tokens of 4 bytes each; 3 and 5 bits are 8 bits for 8 bytes.
    nats_per_token = torch.tensor([3.0, 5.0]).mean() * math.log(2)
    assert bits_per_byte(nats_per_token, 2 / 8).item() == pytest.approx(1)
    # Each byte a token, and 256 as likely: 8 bits.
    assert bits_per_byte(torch.tensor(math.log(256)), 1.0).item() == pytest.approx(8)


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_each_block_is_compiled_by_itself(arch, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compiled.append(type(module).__name__)
    )
    CharacterDecoder(arch, SYMBOLS, TINY, compiled=True)
    assert compiled == [{"gpt2": "GPT2Block", "llama": "LlamaDecoderLayer"}[arch]] * TINY.layers


def test_gradients_of_a_fused_optimizer_are_clipped(model):
    model._fused = True
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.configure_gradient_clipping(None, 1.0, None)
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    assert torch.stack(norms).norm().item() == pytest.approx(1, rel=1e-3)


def test_the_bits_of_a_probe_are_those_of_the_characters_that_its_windows_hold(model, windows):
    probe = windows[:, :-1]  # of the context's length: its first character is not predicted
    with torch.no_grad():
        found = bits_per_character(model(probe), probe)
    assert found.item() == pytest.approx(nats(model, probe) / math.log(2), rel=1e-5)


def test_only_matrices_decay_and_every_parameter_is_trained(model):
    (optimizer,) = [model.configure_optimizers()["optimizer"]]
    decay = {
        id(parameter): group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert len(decay) == sum(len(group["params"]) for group in optimizer.param_groups)
    named = dict(model.named_parameters())
    assert decay.keys() == {id(parameter) for parameter in named.values()}
    for name, parameter in named.items():
        vector = name.endswith("bias") or ".ln_" in name
        assert decay[id(parameter)] == (0.0 if vector else 0.1), name
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.95)] * 2


def test_the_learning_rate_changes_with_every_step_and_not_with_every_epoch(model):
    given = model.configure_optimizers()
    optimizer, plan = given["optimizer"], given["lr_scheduler"]
    assert plan["interval"] == "step"
    rates = []
    for _ in range(TINY.steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        plan["scheduler"].step()
    assert all(one == other for one, other in rates)
    found = np.array(rates)[:, 0] / TINY.learning_rate
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 10)  # the warm-up, in a line
    steps = np.arange(TINY.steps - 10) / (TINY.steps - 10)
    np.testing.assert_allclose(found[10:], 0.1 + 0.9 * (1 + np.cos(np.pi * steps)) / 2)


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_dropout_context_and_sizes_arrive_in_the_network(arch):
    preset = Preset(3, 24, 4, 20, 8, 10, 1, 1e-3, 0.25, "32-true")
    model = CharacterDecoder(arch, 11, preset)
    config = model.network.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (3, 4)
    assert (config.hidden_size, config.vocab_size, config.max_position_embeddings) == (24, 11, 20)
    if arch == "llama":
        assert (config.attention_dropout, config.intermediate_size) == (0.25, 64)
    else:
        assert (config.attn_pdrop, config.resid_pdrop, config.embd_pdrop) == (0.25,) * 3
    assert (config.bos_token_id, config.eos_token_id) == (None, None)
    assert model(torch.zeros(2, 20, dtype=torch.long)).shape == (2, 20, 11)


@pytest.mark.parametrize(("available", "name"), [(False, "cpu"), (True, "small")])
def test_the_preset_is_chosen_by_the_hardware(monkeypatch, available, name):
    monkeypatch.setattr(presets.torch.cuda, "is_available", lambda: available)
    assert preset_for_hardware() == name
