"""Saved models of every kind: those of text read a text, all others the batch that is given."""

import math

import pytest
import torch
import transformers as t
from zoo import ZOO

from geomon import scan, select

WORDS = b"the quick brown fox jumps over the lazy dog; " * 60
_SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
CHOSEN = {"tokens": 48, "metrics": select("anisotropy", "qk_cosine")}


def of(kind, configuration, **arguments):
    return lambda: getattr(t, kind)(getattr(t, configuration)(**arguments))


# Model and layers of each stack.
GIVEN = {
    "GPT-2": {"": 4},
    "ViT": {"": 4},
    "wav2vec 2.0": {"": 4},
    "Whisper": {"encoder": 3, "decoder": 4},
    "T5 (position bias)": {"encoder": 3, "decoder": 4},
    "ResNet": {"": 5},
}
OF_TEXT = {
    "BERT": (of("BertForMaskedLM", "BertConfig", vocab_size=256, **_SMALL), {"": 3}),
    "ByT5": (
        of(
            "T5ForConditionalGeneration", "T5Config", d_model=16, d_kv=8, d_ff=24, num_layers=2,
            num_heads=2, decoder_start_token_id=0, vocab_size=384, tokenizer_class="ByT5Tokenizer",
        ),
        {"encoder": 3, "decoder": 3},
    ),
    "CANINE": (
        of(
            "CanineModel", "CanineConfig", num_hash_buckets=64, max_position_embeddings=256,
            local_transformer_stride=32, **_SMALL,
        ),
        {"encoder": 3},
    ),
}  # fmt: skip


def layers_are_measured(reading, stacks):
    assert (reading.step, reading.source, reading.mode) == (0, "probe", "eval")
    found = {stack: reading.stacks[stack]["anisotropy"].layers for stack in stacks}
    assert {stack: sum(map(math.isfinite, each)) for stack, each in found.items()} == stacks
    assert not any("checkpoint is left out" in note for note in reading.words())


@pytest.mark.parametrize("name", GIVEN)
def test_a_saved_model_reads_the_batch_that_is_given_itself_or_in_a_file(tmp_path, name):
    torch.manual_seed(0)
    ZOO[name].build("eager").save_pretrained(tmp_path / "model")
    batch, file = ZOO[name].inputs(), tmp_path / "batch.pt"
    torch.save(batch, file)
    given, of_file = (
        scan(tmp_path / "model", inputs=inputs, directory=tmp_path / folder, **CHOSEN)[0]
        for folder, inputs in (("a", batch), ("b", file))
    )
    layers_are_measured(given, GIVEN[name])
    assert repr(of_file.stacks) == repr(given.stacks)  # as text NaN equals NaN


@pytest.mark.parametrize("name", OF_TEXT)
def test_a_saved_model_of_text_reads_a_text(tmp_path, name):
    build, stacks = OF_TEXT[name]
    torch.manual_seed(0)
    build().save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_bytes(WORDS)
    logging = t.utils.logging
    shows = logging.is_progress_bar_enabled(), logging.get_verbosity()
    (reading,) = scan(
        tmp_path / "model", text=tmp_path / "text", sequences=4, length=24,
        directory=tmp_path / "scan", **CHOSEN,
    )  # fmt: skip
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == shows
    layers_are_measured(reading, stacks)
    of_bytes = any("tokens are the bytes of the text" in note for note in reading.words())
    assert of_bytes == (name == "BERT")  # the tokenizers of ByT5 and CANINE need no file


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ViT", r"ViTModel reads pixel_values, not text: .* \{'pixel_values': ...\}, by"),
        ("wav2vec 2.0", r"reads input_values, not text: .* \(--inputs FILE, a batch saved by"),
        ("Whisper", r"\{'input_features': ..., 'decoder_input_ids': ...\}, by scan\("),
        (
            "GPT-2",
            r"50 tokens and no tokenizer, .* save its tokenizer in its folder, or pass token",
        ),
    ],
)
def test_inputs_that_cannot_be_made_are_asked_for(tmp_path, name, words):
    ZOO[name].build("eager").save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_bytes(WORDS)
    with pytest.raises(ValueError, match=words):
        scan(tmp_path / "model", text=tmp_path / "text", directory=tmp_path / "scan", **CHOSEN)
    assert not (tmp_path / "scan").exists()
