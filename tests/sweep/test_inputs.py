import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from geomon.sweep import Checkpoint
from geomon.sweep.inputs import InputError, InputSize, digest, make_inputs
from geomon.sweep.models import load_model

FILE = Checkpoint("a", 0, __file__)
WORDS = ("red", "green", "blue", "black", "white")


def small(words):
    return nn.Sequential(nn.Embedding(words, 4), nn.Linear(4, 4))


@given(st.binary(min_size=1, max_size=400), st.integers(1, 8), st.integers(1, 20))
@settings(deadline=None)
def test_windows_of_bytes_are_stretches_of_the_text_that_do_not_overlap(text, sequences, length):
    inputs = make_inputs(small(256), FILE, text, InputSize(sequences, length, 0))
    windows = [bytes(row) for row in inputs.batch.tolist()]
    at = 0
    for window in windows:
        at = text.index(window, at) + len(window)  # each after the one before
    longest = min(length, len(text))
    assert {len(window) for window in windows} == {longest}
    assert len(windows) == min(sequences, len(text) // longest)
    assert any("no more without overlap" in note for note in inputs.notes) == (
        len(windows) < sequences
    )


def test_few_tokens_are_the_distinct_bytes_in_ascending_order():
    named = small(256)
    named.config = types.SimpleNamespace(vocab_size=3)  # its first table may be of positions
    for model in (small(3), named):
        inputs = make_inputs(model, FILE, b"habbah", InputSize(1, 6, 0))
        assert inputs.batch.tolist() == [[2, 0, 1, 1, 0, 2]]
        assert "ascending order" in inputs.notes[0]
    with pytest.raises(InputError, match="3 distinct bytes, and the model 2 tokens"):
        make_inputs(small(2), FILE, b"habbah", InputSize(1, 6, 0))


@pytest.mark.parametrize(
    ("model", "text", "words"),
    [
        (small(256), None, "--text FILE"),
        (small(256), b"", "is empty"),
        (nn.Linear(2, 2), b"abc", "no table of embeddings"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(model, text, words):
    with pytest.raises(InputError, match=words) as caught:
        make_inputs(model, FILE, text, InputSize(1, 6, 0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "config", "shape"),
    [
        ("pixel_values", {}, (3, 224, 224)),
        ("pixel_values", {"image_size": 8, "num_channels": 1}, (1, 8, 8)),
        ("pixel_values", {"image_size": (8, 12)}, (3, 8, 12)),
        ("input_values", {}, (32_000,)),
        ("input_values", {"num_mel_bins": 16, "max_length": 40}, (40, 16)),
        ("input_features", {"num_mel_bins": 16, "max_source_positions": 24}, (16, 48)),
        ("input_features", {"input_feat_per_channel": 9, "max_source_positions": 24}, (48, 9)),
        ("input_features", {"input_feat_per_channel": 9, "max_source_positions": 6000}, (400, 9)),
    ],
)
def test_images_and_sounds_have_the_models_size_mean_0_and_deviation_1(name, config, shape):
    model, axes = small(2), [-1] if len(shape) == 1 else [-2, -1]
    model.config = types.SimpleNamespace(is_encoder_decoder=False, **config)
    model.main_input_name = name
    drawn = make_inputs(model, Checkpoint("a", 0, "a"), None, InputSize(5, 6, 0)).batch[name]
    assert drawn.shape == (5, *shape)
    deviation, mean = torch.std_mean(drawn, dim=axes)
    torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-5)
    torch.testing.assert_close(deviation, torch.ones_like(mean), rtol=1e-5, atol=0)
    for axis in axes:  # neighbours are alike, as in a photograph
        assert (drawn * drawn.roll(1, axis)).mean() > 0.2  # of white noise: 0.00 ± 0.03


def test_to_a_model_of_images_a_text_is_said_not_to_be_read():
    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8,
    )  # fmt: skip
    model, checkpoint = ViTModel(config), Checkpoint("a", 0, "a")
    with pytest.raises(InputError, match="ViTModel reads images and no text: leave"):
        make_inputs(model, checkpoint, b"abc", InputSize(1, 6, 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer of words beside it, which adds a token before and one after."""
    path = tmp_path_factory.mktemp("model")
    table = {word: number for number, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    config = BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=12,
    )  # fmt: skip
    BertModel(config).save_pretrained(path)
    return path


# Words of a text, and its windows of 12 tokens, what the model can read, without overlap.
@pytest.mark.parametrize(("words", "count"), [(5, 1), (40, 3), (45, 3), (46, 4), (4000, 4)])
def test_windows_of_a_tokenizer_are_evenly_spread_over_the_text(folder, words, count):
    checkpoint = Checkpoint("model", 0, str(folder))
    model, notes = load_model(checkpoint, None)
    assert notes == []
    generator = torch.Generator().manual_seed(words)
    text = " ".join(WORDS[n] for n in torch.randint(5, (words,), generator=generator))
    inputs = make_inputs(model, checkpoint, text.encode(), InputSize(4, 50, 0))
    ids, stretch = inputs.batch["input_ids"], len(text) // count
    parts = [text[n * stretch : (n + 1) * stretch].split() for n in range(count)]
    shortest = min(12, min(map(len, parts)) + 2)
    expected = [
        [1, *(WORDS.index(w) + 3 if w in WORDS else 0 for w in part[: shortest - 2]), 2]
        for part in parts
    ]
    assert ids.tolist() == expected
    few = f"{count} of 4 sequences: the text holds no more without overlap"
    assert inputs.notes == ([few] if count < 4 else [])


def test_an_adapter_has_the_tokenizer_of_its_model_unless_one_stands_beside_it(folder, tmp_path):
    model, text = BertModel.from_pretrained(folder), b"red green red green green red \xff"
    ids = [
        make_inputs(model, Checkpoint("a", 0, own, base=base), text, InputSize(1, 5, 0)).batch
        for own, base in ((str(folder), None), (str(tmp_path), str(folder)), (str(folder), "none"))
    ]
    assert [given["input_ids"].tolist() for given in ids] == [[[1, 3, 4, 3, 2]]] * 3


def test_a_text_without_words_is_empty(folder):
    model = BertModel.from_pretrained(folder)
    with pytest.raises(InputError, match="is empty"):
        make_inputs(model, Checkpoint("model", 0, str(folder)), b" \n", InputSize(1, 6, 0))


@pytest.mark.parametrize(("given", "start"), [(7, 7), (None, 0)])
def test_a_decoder_beside_an_encoder_has_the_text_that_follows(tmp_path, given, start):
    config = T5Config(
        vocab_size=256, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
        decoder_start_token_id=given, n_positions=10, max_position_embeddings=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    text = bytes(range(250))
    inputs = make_inputs(model, Checkpoint("t5", 0, str(tmp_path)), text, InputSize(3, 64, 0))
    assert inputs.batch["input_ids"].tolist() == [[*text[n : n + 10]] for n in (0, 115, 230)]
    following = [[start, *text[n + 10 : n + 19]] for n in (0, 115, 230)]
    assert inputs.batch["decoder_input_ids"].tolist() == following
    assert inputs.batch["use_cache"] is False


def test_weights_that_are_missing_are_no_random_ones(folder, tmp_path):
    model = BertModel.from_pretrained(folder)
    weights = model.state_dict()
    del weights["pooler.dense.weight"]  # a head
    model.save_pretrained(tmp_path, state_dict=weights)
    load_model(Checkpoint("model", 0, str(tmp_path)), None)
    for part in ("weight", "bias"):
        del weights[f"encoder.layer.0.output.dense.{part}"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"lacks 2 of .* BertModel, such as .*output\.dense\.bias"):
        load_model(Checkpoint("model", 0, str(tmp_path)), None)


def test_the_digest_tells_inputs_apart():
    ids = torch.arange(6).reshape(2, 3)
    different = [
        ids, ids.reshape(3, 2), ids.int(), ids + 1, {"input_ids": ids}, {"labels": ids}, (ids,),
        [ids, None], (ids, ids), {"input_ids": ids, "use_cache": False},
        len, max,
    ]  # fmt: skip
    assert len({digest(value) for value in different}) == len(different)
    assert digest({"a": ids.clone()}) == digest({"a": ids})
    # It stands in records: by it a scan that was ended goes on.
    assert digest({"a": ids}) == "fdd66728367135ae1958a3838d322afe"
    assert digest(ids.t().t()) == digest(ids)
    one, again = (lambda model: model(ids) for _ in range(2))  # as another process has it
    assert digest(one) == digest(again) != digest(len)
