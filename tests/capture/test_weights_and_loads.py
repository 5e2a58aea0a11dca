"""Norms of a block's weights and loads of its experts: as counted by hand, and nothing changed."""

import copy

import numpy as np
import pytest
import torch
from models import PlainDecoder, batch
from specimens import built
from torch import nn
from torch.nn.utils import parametrizations
from watched import look, window
from zoo import ZOO

from geomon import Monitor
from geomon.capture.shards import TensorPlace


def mixtral():
    return built(ZOO["Mixtral (experts)"], "sdpa")


def norms(seen, depth=1):
    return seen.snapshot().layers[depth].captured["weight_norms"]


def loads(seen):
    return [layer.captured.get("expert_counts") for layer in seen.snapshot().layers]


def test_norms_are_those_of_the_singular_values_of_each_matrix():
    model = PlainDecoder()
    seen = look(model, batch())
    for depth, block in enumerate(model.blocks, 1):
        wanted = {
            name.removesuffix(".weight"): np.linalg.svd(p.detach().numpy(), compute_uv=False)
            for name, p in block.named_parameters()
            if p.ndim == 2
        }
        found = norms(seen, depth)
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert found[name] == pytest.approx(np.sqrt((values**2).sum()), rel=1e-5)
    assert "weight_norms" not in seen.snapshot().layers[0].captured


@pytest.mark.parametrize("factor", [3.0, 0.0])
def test_a_factor_on_one_matrix_is_one_on_its_norm_alone(factor):
    model = PlainDecoder()
    before = norms(look(model, batch()), 2)
    name, weight = next((n, p) for n, p in model.blocks[1].named_parameters() if p.ndim == 2)
    weight.data.mul_(factor)
    seen = look(model, batch())
    name = name.removesuffix(".weight")
    assert norms(seen, 2) == pytest.approx(before | {name: factor * before[name]}, rel=1e-6)
    assert norms(seen, 1).keys() == before.keys()


def test_experts_have_one_norm_however_they_are_held():
    class Experts(nn.Module):
        def __init__(self, *, stacked):
            super().__init__()
            weights = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)) / 6
            self.all = nn.Parameter(weights) if stacked else None
            count = 0 if stacked else len(weights)
            self.each = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(count))
            for expert, weight in zip(self.each, weights, strict=False):
                expert.weight.data.copy_(weight)

        def forward(self, x):
            if self.all is not None:
                return x @ self.all.mT.sum(0)
            return sum(expert(x) for expert in self.each)

    found = []
    for stacked in (True, False):
        model = PlainDecoder()
        model.blocks[0].mlp = Experts(stacked=stacked)
        found.append(sum(v**2 for n, v in norms(look(model, batch())).items() if "mlp" in n))
    weights = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)) / 6
    assert found == pytest.approx([float(weights.square().sum())] * 2, rel=1e-5)


def test_a_weight_that_is_made_at_each_access_is_not_made_for_training():
    model = PlainDecoder().train()
    layer = parametrizations.spectral_norm(model.blocks[0].c_attn)
    twin = copy.deepcopy(model)
    with window(model) as seen:
        model(batch())
    twin(batch())
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
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
    class Router(nn.Module):
        def forward(self, x):
            x.mean(dim=(0, 2)).topk(3)  # of tokens
            x.flatten(0, 1).T.topk(4)
            x.unflatten(-1, (4, 8)).topk(2)  # in each group
            x[..., :2].topk(1)  # of groups
            x[..., 8:16].topk(2)
            return x

    model = PlainDecoder()
    model.blocks[1].mlp = Router()
    seen = look(model, batch(4, 8))
    counts = loads(seen)
    assert [each is not None for each in counts] == [False, False, True, False]
    assert (len(counts[2]), counts[2].sum()) == (8, 2 * 4 * 8)
    assert {"routing" in layer.sources for layer in seen.snapshot().layers[1:]} == {True, False}


def test_a_lost_expert_and_norms_are_values_of_a_reading_and_the_training_is_the_same():
    ends, values = [], []
    for watched in (True, False):
        model = mixtral().train()
        lost = {"step": 0}

        def without(module, inputs, outputs, lost=lost):
            if lost["step"] < 2:
                return outputs
            scores = outputs[0].index_fill(-1, torch.tensor([1]), -torch.inf)
            weights, experts = scores.softmax(dim=-1).topk(2, dim=-1)
            return outputs[0], weights, experts

        model.model.layers[1].mlp.gate.register_forward_hook(without)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = Monitor(model, directory=None, schedule=1, sinks=()) if watched else None
        for step in range(4):
            lost["step"] = step
            ids = batch(4, 12, seed=step) % 50
            if monitor is None:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            else:
                with monitor(step):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if monitor is not None:
                monitor.advance(step + 1)
                values.append(monitor.latest.columns)
        ends.append((model.state_dict(), torch.get_rng_state()))
    (weights, state), (other, other_state) = ends
    assert all(map(torch.equal, weights.values(), other.values()))
    assert torch.equal(state, other_state)
    load = [columns["expert_load"] for columns in values]
    assert [column.at(2) < 0.4 < column.at(1) for column in load] == [False, False, True, True]
    lost = [column.parts["expert_1"].at(2) for column in load]
    assert (lost[2:], min(lost[:2]) > 0.1) == ([pytest.approx(0.01)] * 2, True)
    norm = values[0]["weight_norm"]
    parts = [part.at(1) for part in norm.parts.values()]
    assert norm.at(1) == pytest.approx(np.linalg.norm(parts))
    assert {"self_attn.q_proj", "mlp.experts.down_proj", "mlp.gate"} <= norm.parts.keys()
    assert norm.parts["mlp.gate"].margin == []
