"""Models of every kind, saved and scanned with inputs of their own kind."""

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


def of_zoo(name):
    return lambda: ZOO[name].build("eager")


def of(kind, configuration, **arguments):
    return lambda: getattr(t, kind)(getattr(t, configuration)(**arguments))


# Model, layers of each stack, and a word of the note on what it was given.
MODELS = {
    "GPT-2": (of_zoo("GPT-2"), {"": 4}, "distinct bytes"),
    "ViT": (of_zoo("ViT"), {"": 4}, "random images (seed 0)"),
    "wav2vec 2.0": (of_zoo("wav2vec 2.0"), {"": 4}, "random sounds (seed 0)"),
    "Whisper": (of_zoo("Whisper"), {"encoder": 3, "decoder": 4}, "of the decoder are random"),
    "T5": (of_zoo("T5 (position bias)"), {"encoder": 3, "decoder": 4}, "distinct bytes"),
    "ResNet": (of_zoo("ResNet"), {"": 5}, "random images (seed 0)"),
    "BERT": (of("BertForMaskedLM", "BertConfig", vocab_size=300, **_SMALL), {"": 3}, "bytes of"),
    "AST": (
        of("ASTModel", "ASTConfig", patch_size=8, num_mel_bins=16, max_length=40, **_SMALL),
        {"": 3}, "random sounds (seed 0)",
    ),
    "Speech2Text": (
        of(
            "Speech2TextForConditionalGeneration", "Speech2TextConfig", vocab_size=60, d_model=16,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, conv_channels=8,
            input_feat_per_channel=8, max_source_positions=24, max_target_positions=16,
        ),
        {"encoder": 3, "decoder": 3}, "tokens of the decoder are random",
    ),
    "ByT5": (
        of(
            "T5ForConditionalGeneration", "T5Config", d_model=16, d_kv=8, d_ff=24, num_layers=2,
            num_heads=2, decoder_start_token_id=0, vocab_size=384, tokenizer_class="ByT5Tokenizer",
        ),
        {"encoder": 3, "decoder": 3}, "",
    ),
    "CANINE": (
        of(
            "CanineModel", "CanineConfig", num_hash_buckets=64, max_position_embeddings=256,
            local_transformer_stride=32, **_SMALL,
        ),
        {"encoder": 3}, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_scanned(tmp_path, name):
    build, stacks, word = MODELS[name]
    torch.manual_seed(0)
    build().save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_bytes(WORDS)
    logging = t.utils.logging
    shows = logging.is_progress_bar_enabled(), logging.get_verbosity()
    is_text = name in ("BERT", "GPT-2", "T5", "ByT5", "CANINE")
    (reading,) = scan(
        tmp_path / "model", text=tmp_path / "text" if is_text else None, sequences=4, length=24,
        tokens=48, metrics=select("anisotropy", "qk_cosine"), directory=tmp_path / "scan",
    )  # fmt: skip
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == shows
    assert (reading.step, reading.source, reading.mode) == (0, "probe", "eval")
    for stack, count in stacks.items():
        found = reading.stacks[stack]["anisotropy"].layers
        assert len(found) == count
        assert all(map(math.isfinite, found))
    assert any(word in note for note in reading.words())
    with_bytes = any("no tokenizer stands beside" in note for note in reading.words())
    assert with_bytes == (name in ("BERT", "GPT-2", "T5"))  # ByT5's and CANINE's need no file
    assert not any("left out, because" in note for note in reading.words())
