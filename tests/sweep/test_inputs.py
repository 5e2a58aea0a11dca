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
)

from geomon.sweep import Checkpoint
from geomon.sweep.inputs import make_inputs
from geomon.sweep.models import load_checkpoint

FILE = Checkpoint("a", 0, __file__)
WORDS = ("red", "green", "blue", "black", "white")


def small(words):
    return nn.Sequential(nn.Embedding(words, 4), nn.Linear(4, 4))


@given(
    st.binary(min_size=1, max_size=400).filter(bytes.strip), st.integers(1, 8), st.integers(1, 20)
)
@settings(deadline=None)
def test_windows_of_bytes_are_stretches_of_the_text_that_do_not_overlap(text, sequences, length):
    windows, notes = make_inputs(small(256), FILE, text, sequences, length)
    windows, at, longest = [bytes(row) for row in windows.tolist()], 0, min(length, len(text))
    for window in windows:
        at = text.index(window, at) + len(window)  # each after the one before
    assert {len(window) for window in windows} == {longest}
    assert len(windows) == min(sequences, len(text) // longest)
    assert any("no more without overlap" in note for note in notes) == (len(windows) < sequences)


@pytest.mark.parametrize(
    ("model", "text", "words"),
    [
        (small(256), None, "--text FILE"),
        (small(256), b" \n", "is empty"),
        (
            small(50),
            b"abc",
            r"50 tokens and no tokenizer, so it is unknown which characters .* pass token ids",
        ),
        (nn.Linear(2, 2), b"abc", r"no tokens and no tokenizer.*inputs=BATCH\) \(--inputs FILE"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(model, text, words):
    with pytest.raises(ValueError, match=words) as caught:
        make_inputs(model, FILE, text, 1, 6)
    assert "\n" not in str(caught.value)


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
    model, notes = load_checkpoint(checkpoint, None)
    assert notes == []
    generator = torch.Generator().manual_seed(words)
    text = " ".join(WORDS[n] for n in torch.randint(5, (words,), generator=generator))
    batch, notes = make_inputs(model, checkpoint, text.encode(), 4, 50)
    ids, stretch = batch["input_ids"], len(text) // count
    parts = [text[n * stretch : (n + 1) * stretch].split() for n in range(count)]
    shortest = min(12, min(map(len, parts)) + 2)
    expected = [
        [1, *(WORDS.index(w) + 3 if w in WORDS else 0 for w in part[: shortest - 2]), 2]
        for part in parts
    ]
    assert ids.tolist() == expected
    few = f"{count} of 4 sequences: the text has no more without overlap"
    assert notes == ([few] if count < 4 else [])


def test_an_adapter_has_the_tokenizer_of_its_model_unless_one_stands_beside_it(folder, tmp_path):
    model, text = BertModel.from_pretrained(folder), b"red green red green green red \xff"
    ids = [
        make_inputs(model, Checkpoint("a", 0, own, base=base), text, 1, 5)[0]
        for own, base in ((str(folder), None), (str(tmp_path), str(folder)), (str(folder), "none"))
    ]
    assert [given["input_ids"].tolist() for given in ids] == [[[1, 3, 4, 3, 2]]] * 3


@pytest.mark.parametrize(
    ("given", "start", "longest"),
    [
        (7, 7, {"n_positions": 10}), (None, 0, {"n_positions": 10}),
        (7, 7, {"n_positions": 11, "max_target_positions": 10}),
    ],
)  # fmt: skip
def test_a_decoder_beside_an_encoder_has_the_text_that_follows(tmp_path, given, start, longest):
    config = T5Config(
        vocab_size=256, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
        decoder_start_token_id=given, max_position_embeddings=0, **longest,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    text = bytes(range(250))
    batch, _ = make_inputs(model, Checkpoint("t5", 0, str(tmp_path)), text, 3, 64)
    assert batch["input_ids"].tolist() == [[*text[n : n + 10]] for n in (0, 115, 230)]
    following = [[start, *text[n + 10 : n + 19]] for n in (0, 115, 230)]
    assert batch["decoder_input_ids"].tolist() == following
    assert batch["use_cache"] is False


def test_weights_that_are_missing_are_no_random_ones(folder, tmp_path):
    model, checkpoint = BertModel.from_pretrained(folder), Checkpoint("model", 0, str(tmp_path))
    weights = model.state_dict()
    del weights["pooler.dense.weight"]  # a head
    model.save_pretrained(tmp_path, state_dict=weights)
    load_checkpoint(checkpoint, None)
    block = "encoder.layer.0.output.dense"
    some = {name: weight for name, weight in weights.items() if not name.startswith(block)}
    model.save_pretrained(tmp_path, state_dict=some)
    with pytest.raises(ValueError, match=r"lacks 2 of .* BertModel, such as .*output\.dense\.bias"):
        load_checkpoint(checkpoint, None)
