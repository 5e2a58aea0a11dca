"""End to end on trained weights: every number against a forward pass written out in float64.

`data/recipe_decoder.npz` holds a decoder of 3 layers of width 80 that the recipe trained on enwik8
for 1,500 steps (seed 0), and sequences that it wrote itself. Nothing of geomon or of torch is used
for what is expected.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from geomon import METRICS, measure, select

HEADS, LAYERS, TOKENS = 4, 3, 24 * 64
MORE = ("participation_ratio", "query_mean_norm", "key_mean_norm", "attention_extremes")
MEASURED = METRICS | select(*MORE)


@pytest.fixture(scope="module")
def stored():
    with np.load(Path(__file__).parent / "data" / "recipe_decoder.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def values(stored):
    config = GPT2Config(
        vocab_size=200, n_positions=64, n_embd=80, n_layer=LAYERS, n_head=HEADS,
        activation_function="gelu_pytorch_tanh", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    weights = {name: torch.from_numpy(v) for name, v in stored.items() if name != "ids"}
    lost, unknown = model.load_state_dict(weights, strict=False)
    assert (lost, unknown) == (["lm_head.weight"], [])  # tied to the embedding
    ids = torch.from_numpy(stored["ids"]).long()
    return measure(model, ids, metrics=MEASURED, tokens=TOKENS)


def norm(x, stored, name):
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5)
    return x * stored[f"{name}.weight"].astype(float) + stored[f"{name}.bias"].astype(float)


def linear(x, stored, name):
    return x @ stored[f"{name}.weight"].astype(float) + stored[f"{name}.bias"].astype(float)


@pytest.fixture(scope="module")
def forward(stored):
    """Hidden states, queries, keys and attention of each layer, in float64."""
    ids = stored["ids"].astype(int)
    batch, length = ids.shape
    x = stored["transformer.wte.weight"].astype(float)[ids]
    x = x + stored["transformer.wpe.weight"].astype(float)[:length]
    layers = [{"hidden": x.reshape(-1, 80)}]
    future = np.triu(np.ones((length, length), bool), 1)
    for n in range(LAYERS):
        name = f"transformer.h.{n}"
        made = linear(norm(x, stored, f"{name}.ln_1"), stored, f"{name}.attn.c_attn")
        query, key, value = (
            part.reshape(batch, length, HEADS, -1).swapaxes(1, 2) for part in np.split(made, 3, 2)
        )
        scores = query @ key.swapaxes(2, 3) / np.sqrt(20)
        scores = np.where(future, -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=3, keepdims=True))
        weights /= weights.sum(axis=3, keepdims=True)
        mixed = (weights @ value).swapaxes(1, 2).reshape(batch, length, 80)
        x = x + linear(mixed, stored, f"{name}.attn.c_proj")
        inner = linear(norm(x, stored, f"{name}.ln_2"), stored, f"{name}.mlp.c_fc")
        cubic = np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)
        x = x + linear(0.5 * inner * (1 + np.tanh(cubic)), stored, f"{name}.mlp.c_proj")
        layers.append(
            {
                "hidden": x.reshape(-1, 80), "scores": scores, "weights": weights,
                "query": query.swapaxes(0, 1).reshape(HEADS, -1, 20),
                "key": key.swapaxes(0, 1).reshape(HEADS, -1, 20),
            }
        )  # fmt: skip
    return layers


def two_nearest(rows):
    apart = np.sqrt(np.square(rows[:, None] - rows[None]).sum(axis=2))
    np.fill_diagonal(apart, np.inf)
    return np.sort(apart, axis=1)[:, :2]


def fitted(near):
    logs = np.sort(np.log(near[:, 1] / near[:, 0]))
    kept = int(len(logs) * 0.9)
    x, y = logs[:kept], -np.log1p(-np.arange(1, kept + 1) / len(logs))
    return (x * y).sum() / np.square(x).sum()


@pytest.mark.parametrize("layer", range(LAYERS + 1))
def test_values_of_hidden_states(forward, values, layer):
    rows = forward[layer]["hidden"]
    tag, close = f"layer_{layer:02d}", {"rel": 1e-5}
    centred = rows - rows.mean(axis=0)
    eigenvalues = np.linalg.eigvalsh(centred.T @ centred / len(rows))
    shares = eigenvalues / eigenvalues.sum()
    assert values[f"anisotropy/{tag}"] == pytest.approx(shares[-1], **close)
    assert values[f"participation_ratio/{tag}"] == pytest.approx(1 / (shares**2).sum(), **close)
    entropy = -(shares * np.log(shares)).sum()
    assert values[f"effective_rank/{tag}"] == pytest.approx(np.exp(entropy), **close)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    pairs = (unit @ unit.T)[~np.eye(len(rows), dtype=bool)]
    assert values[f"cosine/{tag}"] == pytest.approx(pairs.mean(), **close)
    drift = np.linalg.norm(rows.mean(axis=0))
    assert values[f"drift_norm/{tag}"] == pytest.approx(drift, **close)
    assert values[f"variance/{tag}"] == pytest.approx(np.square(centred).sum(1).mean(), **close)


@pytest.mark.parametrize("layer", range(LAYERS + 1))
def test_the_dimension(forward, values, layer):
    # Equal tokens at equal positions: layer 0 is exact, above it the model's float32 decides what
    # is a copy, so rows that are as good as equal count once.
    rows = forward[layer]["hidden"]
    _, first = np.unique(np.round(rows, 4), axis=0, return_index=True)
    near = two_nearest(rows[np.sort(first)])
    tag = f"twonn/layer_{layer:02d}"
    assert values[f"{tag}/n"] == len(near)
    assert values[tag] == pytest.approx(fitted(near), rel=2e-4)
    if layer == 0:  # its margin depends on which of many copies stands for the others
        return
    # Without one of 8 groups of sequences the other rows keep their neighbours.
    group = np.sort(first) // (TOKENS // 8)
    without = [fitted(near[group != left_out]) for left_out in range(8)]
    margin = 2.3646243 * np.sqrt(7 / 8 * np.square(without - np.mean(without)).sum())
    assert values[f"{tag}/margin"] == pytest.approx(margin, rel=3e-2)  # seven copies, likewise


@pytest.mark.parametrize("layer", range(1, LAYERS + 1))
def test_values_of_heads(forward, values, layer):
    here = forward[layer]
    mean_query, mean_key = here["query"].mean(axis=1), here["key"].mean(axis=1)
    dots = (mean_query * mean_key).sum(axis=1)
    sizes = np.linalg.norm(mean_query, axis=1), np.linalg.norm(mean_key, axis=1)
    top = np.where(np.isfinite(here["scores"]), here["scores"], -np.inf).max(axis=(0, 2, 3))
    for head in range(HEADS):
        tag, close = f"layer_{layer:02d}/head_{head}", {"rel": 1e-4, "abs": 1e-5}
        assert values[f"qk_dot/{tag}"] == pytest.approx(dots[head], **close)
        cosine = dots[head] / (sizes[0][head] * sizes[1][head])
        assert values[f"qk_cosine/{tag}"] == pytest.approx(cosine, **close)
        assert values[f"query_mean_norm/{tag}"] == pytest.approx(sizes[0][head], **close)
        assert values[f"key_mean_norm/{tag}"] == pytest.approx(sizes[1][head], **close)
        assert values[f"max_logit/{tag}"] == pytest.approx(top[head], **close)


def test_attention_of_all_query_rows(forward, stored):
    """A sample of the rows is measured by default: here each sequence is measured by itself."""
    config = GPT2Config(
        vocab_size=200, n_positions=64, n_embd=80, n_layer=LAYERS, n_head=HEADS,
        activation_function="gelu_pytorch_tanh", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    weights = {name: torch.from_numpy(v) for name, v in stored.items() if name != "ids"}
    model.load_state_dict(weights, strict=False)
    for sequence in (0, 13):
        ids = torch.from_numpy(stored["ids"][sequence : sequence + 1]).long()
        found = measure(model, ids, metrics=MEASURED, tokens=64)
        for layer in range(1, LAYERS + 1):
            a = forward[layer]["weights"][sequence]
            entropy = -np.where(a > 0, a * np.log(np.where(a > 0, a, 1)), 0).sum(axis=2)
            for head in range(HEADS):
                tag, close = f"layer_{layer:02d}/head_{head}", {"rel": 1e-5, "abs": 1e-6}
                assert found[f"attention_entropy/{tag}"] == pytest.approx(
                    entropy[head].mean(), **close
                )
                rows = a[head, 1:]  # the first sees one key
                assert found[
                    f"attention_extremes/layer_{layer:02d}/max/head_{head}"
                ] == pytest.approx(rows.max(axis=1).mean(), **close)
                assert found[f"attention_sink/{tag}"] == pytest.approx(rows[:, 0].mean(), **close)
