"""End to end on trained weights: every number against a forward pass in float64.

`data/recipe_decoder.npz` holds a decoder of 3 layers of width 80 that the recipe trained on enwik8
for 1,500 steps (seed 0), and sequences that it wrote itself. Nothing of geomon is used for what is
expected.
"""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from geomon import METRICS, measure, select
from support import definitions as by_book
from support.watched import states_of

HEADS, LAYERS, TOKENS = 4, 3, 24 * 64
MORE = (
    "participation_ratio", "query_mean_norm", "key_mean_norm", "attention_extremes", "score_spread",
    "mean_query_share", "key_anisotropy",
)  # fmt: skip
MEASURED = METRICS | select(*MORE)


@pytest.fixture(scope="module")
def stored():
    with np.load(Path(__file__).parent / "data" / "recipe_decoder.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def model(stored):
    config = GPT2Config(
        vocab_size=200, n_positions=64, n_embd=80, n_layer=LAYERS, n_head=HEADS,
        activation_function="gelu_pytorch_tanh", bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    weights = {name: torch.from_numpy(v) for name, v in stored.items() if name != "ids"}
    lost, unknown = model.load_state_dict(weights, strict=False)
    assert (lost, unknown) == (["lm_head.weight"], [])  # tied to the embedding
    return model


@pytest.fixture(scope="module")
def values(model, stored):
    ids = torch.from_numpy(stored["ids"]).long()
    return measure(model, ids, metrics=MEASURED, tokens=TOKENS, queries=None)


@pytest.fixture(scope="module")
def forward(model, stored):
    """Views of each layer, in float64: what blocks and projections give in a pass of their own."""
    model, made = copy.deepcopy(model).double(), []
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda module, given, output: made.append(output))
    states = states_of(model, torch.from_numpy(stored["ids"]).long(), blocks=model.transformer.h)
    layers = [{"hidden": state.flatten(0, 1).numpy()} for state in states]
    for layer, output in zip(layers[1:], made, strict=True):
        query, key, _ = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2).numpy() for part in output.split(80, 2)
        )
        scores = query @ key.swapaxes(2, 3) / np.sqrt(20)
        seen = np.where(np.tri(64, dtype=bool), scores, -np.inf)
        layer |= {"query": query, "key": key, "max_logits": seen.max(axis=(0, 2, 3))}
    return layers


def compare(values, definitions, layer, **close):
    """Hold what was measured of a layer to definitions; returns how many they were."""
    wanted = {tag: each for tag, each in definitions.items() if tag.split("/")[0] in MEASURED}
    for tag, value in wanted.items():
        metric, *part = tag.split("/")
        place = "/".join([metric, f"layer_{layer:02d}", *part])
        heads = range(len(value) if np.ndim(value) else 0)
        found = [values[f"{place}/head_{head}"] for head in heads] or values[place]
        assert found == pytest.approx(value, **close), tag
    return len(wanted)


@pytest.mark.parametrize("layer", range(LAYERS + 1))
def test_values_of_hidden_states(forward, stored, values, layer):
    ids = stored["ids"].astype(int).flatten()
    views = {
        "hidden": forward[layer]["hidden"],
        "token_ids": ids,
        "sequences": np.arange(TOKENS) // 64,
    }
    assert compare(values, by_book.of_rows(views), layer, rel=1e-5) >= 20


@pytest.mark.parametrize("layer", range(LAYERS + 1))
def test_the_dimension(forward, values, layer):
    # Equal tokens at equal positions: layer 0 is exact, above it the model's float32 decides what
    # is a copy, so rows that are as good as equal count once.
    rows = forward[layer]["hidden"]
    _, first = np.unique(np.round(rows, 4), axis=0, return_index=True)
    near = by_book.distances(rows[np.sort(first)])[:, :2]
    tag = f"twonn/layer_{layer:02d}"
    assert values[f"{tag}/n"] == len(near)
    assert values[tag] == pytest.approx(by_book.twonn(near), rel=2e-4)
    if layer == 0:  # its margin depends on which of many copies stands for the others
        return
    # Without one of 8 groups of sequences the other rows keep their neighbours.
    group = np.sort(first) // (TOKENS // 8)
    without = [by_book.twonn(near[group != left_out]) for left_out in range(8)]
    margin = by_book.margin(without)
    assert values[f"{tag}/margin"] == pytest.approx(margin, rel=3e-2)  # seven copies, likewise


@pytest.mark.parametrize("layer", range(1, LAYERS + 1))
def test_values_of_heads(forward, values, layer):
    query, key = (
        forward[layer][name].swapaxes(1, 2).reshape(TOKENS, HEADS, -1) for name in ("query", "key")
    )
    wanted = by_book.of_heads(query, key) | {"max_logit": forward[layer]["max_logits"]}
    assert compare(values, wanted, layer, rel=1e-4, abs=1e-5) > 5


def test_attention_of_all_query_rows(forward, model, stored):
    """A sample of the rows is measured by default: here two sequences are measured alone."""
    ids = torch.from_numpy(stored["ids"][[0, 13]]).long()
    values = measure(model, ids, metrics=MEASURED, tokens=128)
    options = {"scale": 20**-0.5, "softcap": None, "bias": None, "sink": None}
    for layer in range(1, LAYERS + 1):
        views = {name: forward[layer][name][[0, 13]] for name in ("query", "key")}
        seen = {"visible": np.tri(64, dtype=bool)}
        wanted = by_book.of_attention(views | options | seen)
        assert compare(values, wanted, layer, rel=1e-5, abs=1e-6) > 5
