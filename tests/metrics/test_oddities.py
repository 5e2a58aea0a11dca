"""Layers that differ from all others are named by the first reading, and by `describe`."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from geomon import Monitor, describe
from geomon.metrics.oddities import oddities, traits_of
from support.measuring import Layer
from support.models import PlainBlock, PlainDecoder, batch, configurations
from support.readings import stacks_of

LAYERS, ODD = 5, 3  # of which this one differs
METRICS = ["attention_entropy_normalised", "qk_dot", "within_variance"]


class Block(PlainBlock):
    """A block without dropout whose mask and scale can be chosen."""

    def __init__(self):
        super().__init__(32, 4, 0.0)
        self.scale, self.mask = None, None
        nn.init.normal_(self.c_attn.weight, std=0.5)  # attends to some tokens more than to others

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        mask = None if self.mask is None else self.mask(x.shape[1])
        causal = mask is None
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=self.scale)
        return x + self.c_proj(y.transpose(1, 2).flatten(2))


def decoder(plant=lambda block: None, layers=LAYERS):
    torch.manual_seed(0)
    model = PlainDecoder(layers=layers, block=Block)
    plant(model.blocks[ODD - 1])
    return model


def everything(length):
    return torch.ones(length, length, dtype=torch.bool)


def one_ahead(length):
    return everything(length).tril(1)


def window(length):
    return everything(length).tril() & everything(length).triu(-8)


def sees_all(block):
    block.mask = everything


def sees_one_ahead(block):
    block.mask = one_ahead


def is_scaled(block):
    block.scale = 1.0


def has_no_queries(block):
    nn.init.zeros_(block.c_attn.weight[:32])
    nn.init.zeros_(block.c_attn.bias[:32])


def has_no_keys(block):
    nn.init.zeros_(block.c_attn.weight[32:64])
    nn.init.zeros_(block.c_attn.bias[32:64])


def explodes(block):
    nn.init.normal_(block.c_proj.weight, std=1000.0)


def has_equal_heads(block):
    for start in (0, 32):  # queries, then keys, of heads 1 and 3
        block.c_attn.weight.data[start + 24 : start + 32] = block.c_attn.weight[
            start + 8 : start + 16
        ]
        block.c_attn.bias.data[start + 24 : start + 32] = block.c_attn.bias[start + 8 : start + 16]


def read_once(model, ids, tmp_path):
    """Return the notes of a first reading."""
    with Monitor(model, directory=tmp_path, metrics=METRICS) as monitor:
        with monitor(0):
            model(ids)
        monitor.close()
    return [note.words() for note in monitor.latest.notes]


LATER = "attention sees keys after the query, layer 3; in the other layers it does not"
SCALED = "scores of attention are scaled by 1, layer 3, and in the other layers by 0.354"
LARGER = "times larger than one layer before, layer 3"
UNIFORM = "attention is uniform, layer 3"
PASS = {sees_all: LATER, sees_one_ahead: LATER, is_scaled: SCALED, explodes: LARGER}
EQUAL = "heads attend alike, number for number: layer 3, head 1; layer 3, head 3"
ODDITIES = {**PASS, has_no_queries: UNIFORM, has_no_keys: UNIFORM, has_equal_heads: EQUAL}


def named(notes):
    """Return the notes on oddities."""
    words = (LATER[:34], SCALED[:30], "times larger", "times smaller", "is uniform", "makes up")
    words = (*words, "alike")
    return [note for note in notes if any(each in note for each in words)]


@pytest.mark.parametrize("plant", ODDITIES, ids=lambda plant: plant.__name__)
def test_a_reading_names_the_layer_that_differs(plant, tmp_path):
    (note,) = named(read_once(decoder(plant), batch(16), tmp_path))
    assert ODDITIES[plant] in note


@pytest.mark.parametrize("plant", [sees_all, sees_one_ahead, is_scaled, has_equal_heads])
@pytest.mark.parametrize("checks", [None, 1], ids=["readings", "checks"])
@pytest.mark.parametrize("begins", [0, 2], ids=["odd from the start", "becomes odd"])
def test_a_layer_that_becomes_odd_is_an_alert_within_two_looks(plant, checks, begins):
    model, told = decoder(), []
    schedule = (lambda step: step == 0) if checks else (lambda step: True)
    options = {"metrics": METRICS, "budget": None, "directory": None, "on_alert": told.append}
    with Monitor(model, schedule=schedule, checks=checks, **options) as monitor:
        for step in range(4):
            if step == begins:
                plant(model.blocks[ODD - 1])
            with monitor(step):
                model(batch(8, 32, seed=step))
    # A block that calls other operators is followed anew, at the look after.
    assert [alert.name for alert in told] == ["odd_layer"] * bool(begins)
    assert all(alert.step in (2, 3) for alert in told)
    assert all({*alert.layers, *(layer for layer, _ in alert.heads)} == {ODD} for alert in told)


@pytest.mark.parametrize("plant", PASS, ids=lambda plant: plant.__name__)
def test_describe_names_it_as_far_as_it_shows_without_measuring(plant):
    (note,) = named(text for _, text in describe(decoder(plant), batch(16)).rows)
    assert ODDITIES[plant] in note


@pytest.mark.parametrize("plant", [sees_all, is_scaled, has_no_queries])
def test_nothing_is_odd_if_no_value_is_shared_by_most_layers(plant, tmp_path):
    model = decoder(layers=4)
    for block in model.blocks[::2]:
        plant(block)
    assert named(read_once(model, batch(16), tmp_path)) == []


@pytest.mark.parametrize(("scale", "said"), [
    (None, ""), (8**-0.5, ""),
    (1.0, "all layers scale scores of attention by 1, most models by 0.354"),
    (1 / 8, "all layers scale scores of attention by 0.125, most models by 0.354"),
])  # fmt: skip
def test_describe_says_how_all_layers_scale_scores_if_that_is_unusual(scale, said, tmp_path):
    model = decoder()
    for block in model.blocks:
        block.scale = scale
    found = [text for _, text in describe(model, batch(16)).rows if "scale scores" in text]
    assert found == [said] * bool(said)
    assert named(read_once(model, batch(16), tmp_path)) == []  # some models do so by design


def has_window(block):
    block.mask = window


def scaled_by_depth(model):
    for depth, block in enumerate(model.blocks, 1):
        block.scale = 1 / depth


@pytest.mark.parametrize("change", [
    lambda model: None, lambda model: has_window(model.blocks[1]), scaled_by_depth,
    lambda model: [sees_all(block) for block in model.blocks],
    lambda model: [nn.init.zeros_(block.c_attn.weight) for block in model.blocks],
])  # fmt: skip
def test_designs_in_which_layers_differ_are_not_odd(change, tmp_path):
    model = decoder()
    change(model)
    assert named(read_once(model, batch(16), tmp_path)) == []


DEEP = {
    "gpt2": {"n_layer": 6, "scale_attn_by_inverse_layer_idx": True},
    "llama": {"num_hidden_layers": 6},
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_models_of_transformers_are_not_odd(name, tmp_path):
    config = copy.deepcopy(configurations()[name])
    for key, value in DEEP[name].items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config)
    assert named(read_once(model, batch(16), tmp_path)) == []


def padded(share, kinds):
    ids = torch.arange(512) % (kinds - 1) + 1
    ids[: round(512 * share)] = 0
    return ids[torch.randperm(512, generator=torch.Generator().manual_seed(0))].view(16, 32)


@pytest.mark.parametrize(("share", "kinds", "is_said"), [
    (0.4, 40, True), (0.3, 40, False), (0.4, 8, True), (0.4, 7, False),
])  # fmt: skip
def test_a_token_in_a_third_of_the_rows_may_be_padding(share, kinds, is_said, tmp_path):
    notes = named(read_once(decoder(), padded(share, kinds), tmp_path))
    assert [note.partition(":")[0] for note in notes] == (
        ["token 0 makes up 40 % of the rows"] if is_said else []
    )


def test_the_log_has_the_sentence_itself_beside_the_number_of_notes(tmp_path, caplog):
    read_once(decoder(sees_all), batch(4), tmp_path)
    said = [record.getMessage() for record in caplog.records]
    assert LATER in said
    assert any("notes on how far its values can be trusted" in each for each in said)


# Traits by layer, and the sentence on them.
CAUSAL = {"is_causal": 1.0, "last_key": 5.0}
TRAITS = [
    ([CAUSAL, CAUSAL, {"is_causal": 0.0, "last_key": 5.5}],
     "attention sees keys after the query, layer 2; in the other layers it does not"),
    ([CAUSAL, CAUSAL, {"is_causal": 0.0, "last_key": 5.0}], None),  # fewer keys, as in a window
    ([{"is_causal": 0.0, "last_key": 4.0}, {"is_causal": 0.0, "last_key": 6.0}, CAUSAL], None),
    ([CAUSAL, {"is_causal": 0.0, "last_key": 9.0}], None),  # of two layers, neither is odd
    ([{}, *[CAUSAL] * 3, *[{"is_causal": 0.0, "last_key": 9.0}] * 2],
     "attention sees keys after the query, layer 4, 5; in the other layers it does not"),
    ([{}, *[CAUSAL] * 3, *[{"is_causal": 0.0, "last_key": 9.0}] * 3], None),
    ([{"scale": 0.25, "scale_by_width": 0.5}, *[{"scale": 0.125, "scale_by_width": 1.0}] * 2],
     "scores of attention are scaled by 0.25, layer 0, and in the other layers by 0.125"),
    ([{"scale": 1.0, "scale_by_width": 1.0001}, *[{"scale": 1.0, "scale_by_width": 1.0}] * 2],
     "scores of attention are scaled by 1, layer 0, and in the other layers by 1"),
    ([{"scale": 1.0, "scale_by_width": 1.00004}, *[{"scale": 1.0, "scale_by_width": 1.0}] * 2],
     None),
    ([{"scale": 0.1, "scale_by_width": 1.0}, *[{"scale": 0.2, "scale_by_width": 1.0}] * 2], None),
    ([{"share_of_one": 0.334, "kinds": 8.0, "most_frequent": 7.0}],
     "token 7 makes up 33 % of the rows: if it is padding, pass an attention mask, so that it is "
     "left out"),
    ([{"share_of_one": 1 / 3, "kinds": 8.0, "most_frequent": 7.0}], None),
    ([{"share_of_one": 0.9, "kinds": 7.0, "most_frequent": 7.0}], None),
    ([{"size": 2.0}, {"size": 240.0}, {"size": 500.0}, {"size": 60_000.0}],
     "hidden states up to 120 times larger than one layer before, layer 1, 3"),
    ([{"size": 60_000.0}, {"size": 500.0}, {"size": 250.0}, {"size": 2.0}],
     "hidden states up to 125 times smaller than one layer before, layer 1, 3"),
    ([{"size": 1.0}, {"size": 100.0}, {"size": 1.0}], None),
    ([{"size": 1.0}, {}, {"size": 500.0}, {"size": 0.0}, {"size": 500.0}], None),
]  # fmt: skip


@pytest.mark.parametrize(("traits", "said"), TRAITS)
def test_layers_are_odd_beyond_the_limits(traits, said):
    notes = oddities(dict(enumerate(traits)), {})
    assert [note.words() for note in notes] == [said] * (said is not None)
    assert all(note.is_odd for note in notes)


FLAT = "attention is uniform, layer {}, as with random weights or queries of 0; in most layers it i"
# Normalised entropies by layer, and the layers that are named.
ENTROPIES = [
    ([0.9991, 0.5, 0.5], "0"), ([0.999, 0.5, 0.5], None), ([0.9991, 0.5], None),
    ([0.9991, 0.9995, 0.89, 0.5, 0.5], "0, 1"), ([0.9991, 0.9995, 0.9, 0.5, 0.5], None),
    ([0.9991, 0.9995, 0.5, 0.5], None), ([], None),
]  # fmt: skip


@pytest.mark.parametrize(("entropies", "named"), ENTROPIES)
def test_attention_is_uniform_beside_layers_of_which_most_are_selective(entropies, named):
    tag = "attention_entropy_normalised/layer_{:02d}"
    values = {tag.format(layer): entropy for layer, entropy in enumerate(entropies)}
    notes = oddities({}, stacks_of(values).get("", {}))
    assert [note.words()[:85] for note in notes] == [FLAT.format(named)[:85]] * (named is not None)


# Entropy and product of mean query and mean key of each head, by layer; the end of the sentence.
HEADS = [
    ({1: [(0.5, 2.0), (0.5, 2.0)]}, "layer 1, head 0; layer 1, head 1"),
    ({1: [(0.5, 2.0), (0.4, 1.0), (0.5000001, 2.000001)]}, "layer 1, head 0; layer 1, head 2"),
    ({1: [(0.5, 2.0), (0.500001, 2.0)]}, None), ({1: [(0.5, 2.0), (0.5, 2.00001)]}, None),
    ({1: [(0.5, 2.0)], 2: [(0.5, 2.0)]}, None),
    ({1: [(0.9991, 2.0), (0.9991, 2.0)]}, None), ({1: [(0.999, 2.0), (0.999, 2.0)]}, None),
    ({1: [(0.998, 0.0), (0.998, 0.0)]}, "layer 1, head 0; layer 1, head 1"),
    ({1: [(0.5, float("nan")), (0.5, float("nan"))]}, None),
    ({1: [(0.5, 2.0)] * 2, 2: [(0.3, -1.0)] * 2},
     "layer 1, head 0; layer 1, head 1; layer 2, head 0; layer 2, head 1"),
    ({1: [(0.5, 2.0)] * 2, 2: [(0.3, -1.0)] * 4},
     "layer 1, head 0; layer 1, head 1; layer 2, head 0; layer 2, head 1 and 2 more"),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "named"), HEADS)
def test_heads_of_one_layer_are_alike_to_six_digits(heads, named):
    values = {}
    for layer, pairs in heads.items():
        for head, (entropy, product) in enumerate(pairs):
            values[f"attention_entropy_normalised/layer_{layer:02d}/head_{head}"] = entropy
            values[f"qk_dot/layer_{layer:02d}/head_{head}"] = product
    notes = oddities({}, stacks_of(values)[""])
    said = f"heads attend alike, number for number: {named}"
    assert [note.words() for note in notes] == [said] * (named is not None)


def seen(*rows, heads=2):
    """Visible keys, [sequences, heads, queries, keys], from rows of digits."""
    mask = torch.tensor([[[int(key) for key in row] for row in one] for one in rows]) > 0
    return mask[:, None].expand(-1, heads, -1, -1)


CAUSAL_MASK = ["1000", "1100", "1110", "1111"]
QUERY = torch.zeros(1, 2, 4, 16)
IDS, HIDDEN = torch.tensor([3, 5, 3]), torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 9.0]])
# Captured views, and the traits that they show.
SEEN = [
    ({"visible": seen(CAUSAL_MASK)}, {"keys": 4, "last_key": 2.5, "is_causal": 1.0}),
    ({"visible": seen(["1100", "1110", "0111"])}, {"keys": 4, "last_key": 3.0, "is_causal": 1.0}),
    ({"visible": seen(["1111"] * 4)}, {"keys": 4, "last_key": 4.0, "is_causal": 0.0}),
    ({"visible": seen(["1100", "1100", "1110"])},
     {"keys": 4, "last_key": 7 / 3, "is_causal": 0.0}),
    ({"visible": seen(["1110"])}, {"keys": 4, "last_key": 3.0, "is_causal": 0.0}),
    # A sequence in which a query sees nothing is padded.
    ({"visible": seen(["0000", "1111"], ["1000", "1100"])},
     {"keys": 4, "last_key": 1.5, "is_causal": 1.0}),
    ({"visible": seen(["0000", "1111"])}, {}),
    # A key counts if one head sees it.
    ({"visible": torch.cat([seen(["1000", "1000"]), seen(["0000", "0010"])], dim=1)},
     {"keys": 4, "last_key": 2.0, "is_causal": 1.0}),
    ({"scale": 0.5, "query": QUERY}, {"scale": 0.5, "scale_by_width": 2.0}),
    ({"scale": 1.0, "query": QUERY}, {"scale": 1.0, "scale_by_width": 4.0}),
    ({"scale": 1.0, "query": QUERY, "bias": QUERY}, {}),
    ({"scale": 0.5, "query": QUERY, "bias": QUERY}, {"scale": 0.5, "scale_by_width": 2.0}),
    ({"scale": 0.5}, {}), ({"scale": None, "query": QUERY}, {}),
    ({"token_ids": IDS}, {"kinds": 2, "most_frequent": 3, "share_of_one": 2 / 3}),
    ({"token_ids": IDS[:0]}, {}), ({"hidden": HIDDEN}, {"size": 5.0}), ({"hidden": HIDDEN[:0]}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("captured", "traits"), SEEN)
def test_traits_are_what_the_views_of_a_layer_show(captured, traits):
    assert traits_of(Layer(1, "block", captured)) == pytest.approx(traits)
