"""Norms of a block's weights and loads of its experts: as counted by hand, and nothing changed."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from geomon.capture.shards import TensorPlace
from support.models import PlainDecoder, Running, batch
from support.specimens import built
from support.watched import look, window
from support.zoo import ZOO


def mixtral():
    return built(ZOO["Mixtral (experts)"], "sdpa")


def norms(seen, depth=1):
    return seen.snapshot().layers[depth].captured["weight_norms"]


def loads(seen):
    return [layer.captured.get("expert_counts") for layer in seen.snapshot().layers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 3.0, 0.0])
def test_norms_are_those_of_the_singular_values_of_each_matrix(factor, dtype):
    model = PlainDecoder().to(dtype)
    model.blocks[1].c_proj.weight.data.mul_(factor)
    seen = look(model, batch())
    for depth, block in enumerate(model.blocks, 1):
        wanted = {
            name.removesuffix(".weight"): np.linalg.svd(p.detach().numpy(), compute_uv=False)
            for name, p in block.named_parameters()
            if p.ndim == 2
        }
        expected = {name: np.sqrt((values**2).sum()) for name, values in wanted.items()}
        assert norms(seen, depth) == pytest.approx(expected, rel=1e-5)
    assert "weight_norms" not in seen.snapshot().layers[0].captured


@pytest.mark.parametrize("stacked", [True, False])
def test_experts_have_one_norm_however_they_are_held(stacked):
    weights = torch.randn(3, 32, 32) / 6
    each = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in weights)
    for expert, weight in zip(each, weights, strict=True):
        expert.weight.data.copy_(weight)
    model = PlainDecoder()
    if stacked:
        together = nn.Parameter(weights)
        model.blocks[0].mlp = Running(lambda m, x: x @ m.all.mT.sum(0), all=together)
    else:
        model.blocks[0].mlp = Running(lambda m, x: sum(one(x) for one in m.each), each=each)
    found = sum(v**2 for n, v in norms(look(model, batch())).items() if "mlp" in n)
    assert found == pytest.approx(float(weights.square().sum()), rel=1e-5)


class Counting(nn.Module):
    """A parametrisation that is another one at each access."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, weight):
        self.count += self.training
        return weight * (1 + 0.01 * self.count)


class Asked(nn.Linear):
    """A projection whose weight is a property that counts how often it is asked for."""

    def __init__(self):
        super().__init__(64, 32)
        self.kept = self._parameters.pop("weight")
        self.register_buffer("count", torch.zeros(()))

    weight = property(lambda self: self.kept * (1 + 0.01 * self.count.add_(1)))


@pytest.mark.parametrize(
    "change",
    [
        lambda block: parametrizations.spectral_norm(block.linear1),
        lambda block: parametrizations.spectral_norm(block.self_attn, "in_proj_weight"),
        lambda block: parametrize.register_parametrization(block.linear2, "weight", Counting()),
        lambda block: setattr(block, "linear2", Asked()),
    ],
)
def test_a_weight_that_is_made_at_each_access_is_not_made_for_training(change):
    options = {"batch_first": True, "dropout": 0.0}
    model = PlainDecoder(block=lambda: nn.TransformerEncoderLayer(32, 4, 64, **options))
    for block in model.blocks:
        change(block)
    twin = copy.deepcopy(model)
    with window(model) as seen:
        found = model(batch())
    assert torch.equal(found, twin(batch()))
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    assert "self_attn.out_proj" in norms(seen)


def test_the_norm_of_a_weight_that_is_made_is_that_of_the_made_one():
    model = PlainDecoder().train()
    layer = parametrizations.spectral_norm(model.blocks[0].c_attn)
    with window(model) as seen:
        model(batch())
    layer.eval()
    assert norms(seen)["c_attn"] == pytest.approx(layer.weight.detach().norm().item(), rel=0.1)


@pytest.mark.parametrize("way", ["sharded", "shared out"])
def test_weights_that_a_rank_has_in_part_are_left_out_and_said(way):
    model = PlainDecoder()
    if way == "sharded":
        weight = next(p for p in model.blocks[0].parameters() if p.ndim == 2)
        weight.to_local = lambda: weight[:1]
    place = TensorPlace(0, 2) if way == "shared out" else TensorPlace()
    with window(model, place=place) as seen:
        model(batch())
    layer = seen.snapshot().layers[1]
    assert "weight_norms" not in layer.captured
    assert "they may be sharded" in layer.missing["weight_norms"]
    assert ("weight_norms" in seen.snapshot().layers[2].captured) is (way == "sharded")


def replace(block):
    block.c_proj = nn.Linear(32, 32)


def adapt(block):
    block.c_proj.down = nn.Linear(32, 2)


def update(block):
    with torch.no_grad():
        block.c_proj.weight.mul_(3)


def compute(block):
    parametrize.register_parametrization(block.c_proj, "weight", Counting())


def freeze(block):
    weight = block.c_proj.weight
    del block.c_proj.weight
    block.c_proj.register_buffer("weight", weight.detach())


def half(block):
    block.c_proj.to(torch.bfloat16).to(torch.float32)


@pytest.mark.parametrize("change", [replace, adapt, update, compute, freeze, half])
def test_weights_that_change_between_looks_are_read_as_they_are_now(change):
    model = PlainDecoder().eval()
    look(model, batch())
    change(model.blocks[1])
    fresh = copy.deepcopy(model)  # a model that was never looked at
    (found, expected) = (norms(look(each, batch()), 2) for each in (model, fresh))
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-6)


def shard(weight):
    """Leave a part, as a parameter of its own."""
    return nn.Parameter(weight.detach().flatten()[:10].clone())


def free(weight):
    """Leave a tensor of the same shape whose memory is gone."""
    gone = nn.Parameter(weight.detach().clone())
    gone.untyped_storage().resize_(0)
    return gone


def mark(weight):
    """Leave a part that claims to have the whole shape, as DTensors do."""

    class Part(torch.Tensor):
        def to_local(self):
            return self

    return nn.Parameter(torch.zeros_like(weight).as_subclass(Part))


@pytest.mark.parametrize("leave", [shard, free, mark])
def test_weights_that_are_gathered_for_the_call_of_their_block_are_read_then(leave):
    model = PlainDecoder().eval()
    expected = [norms(look(model, batch()), depth) for depth in (1, 2)]
    modules = [m for block in model.blocks for m in block.modules() if "weight" in m._parameters]
    whole = {m: m.weight for m in modules}

    def gather(block, *call):
        for each in block.modules():
            if each in whole:
                each._parameters["weight"] = whole[each]

    def scatter(block, *call):
        for each in block.modules():
            if each in whole:
                each._parameters["weight"] = leave(whole[each])

    for block in model.blocks:
        scatter(block)
        block.register_forward_pre_hook(gather)
        block.register_forward_hook(scatter)
    for _ in range(2):
        seen = look(model, batch())
        assert [norms(seen, depth) for depth in (1, 2)] == [pytest.approx(x) for x in expected]


def test_each_pass_that_counts_shows_the_weights_of_its_own_time():
    """A pass without gradients gives way to one with gradients, after an update."""
    model = PlainDecoder()
    with window(model) as seen:
        with torch.no_grad():
            model(batch())
        for block in model.blocks:
            update(block)
        model(batch())
    for depth, block in enumerate(model.blocks, 1):
        now = block.c_proj.weight.detach().norm().item()
        assert norms(seen, depth)["c_proj"] == pytest.approx(now, rel=1e-6)


def test_loads_are_the_choices_of_the_router_counted_by_hand():
    model = mixtral().eval()
    logits = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: logits.append(out[0].detach()))
    ids = batch(3, 7) % 50
    seen = look(model, input_ids=ids, use_cache=False)
    first, *found = loads(seen)
    assert first is None
    for counts, scores in zip(found, logits, strict=False):
        chosen = np.argsort(-scores.numpy(), axis=1)[:, :2]
        assert counts.tolist() == [(chosen == expert).sum() for expert in range(4)]
        assert counts.sum() == 2 * ids.numel()


def test_the_last_choice_counts_and_other_choices_are_not_loads():
    def chooses(m, x):
        x.mean(dim=(0, 2)).topk(3)  # of tokens
        x.flatten(0, 1).T.topk(4)
        x.unflatten(-1, (4, 8)).topk(2)  # in each group
        x[..., :2].topk(1)  # of groups
        x[..., 8:16].topk(2)
        return x

    model = PlainDecoder()
    model.blocks[1].mlp = Running(chooses)
    seen = look(model, batch(4, 8))
    counts = loads(seen)
    assert [each is not None for each in counts] == [False, False, True, False]
    assert (len(counts[2]), counts[2].sum()) == (8, 2 * 4 * 8)
    assert {"routing" in layer.sources for layer in seen.snapshot().layers[1:]} == {True, False}
