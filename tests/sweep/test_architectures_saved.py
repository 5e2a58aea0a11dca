"""Models of every kind, built at random and saved, scanned with inputs of their own kind."""

import math

import pytest
import torch
import transformers as t

from geomon import scan, select
from geomon.record import tags

CHOSEN = select("anisotropy", "qk_cosine")
WORDS = b"the quick brown fox jumps over the lazy dog; " * 60
_ENCODER = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
       "decoder_start_token_id": 0}  # fmt: skip

# Model, stacks, layers of each, and a word of the note on what it was given.
MODELS = {
    "bert": (
        lambda: t.BertForMaskedLM(t.BertConfig(vocab_size=300, **_ENCODER)),
        {"": 3}, "bytes of the text",
    ),
    "gpt2": (
        lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=60, n_positions=32, n_embd=16, n_layer=2, n_head=2,
                bos_token_id=None, eos_token_id=None,
            )
        ),
        {"": 3}, "distinct bytes",
    ),
    "vit": (
        lambda: t.ViTForImageClassification(t.ViTConfig(image_size=32, patch_size=8, **_ENCODER)),
        {"": 3}, "random images",
    ),
    "wav2vec2": (
        lambda: t.Wav2Vec2ForCTC(
            t.Wav2Vec2Config(
                conv_dim=(8,) * 7, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
                **_ENCODER,
            )
        ),
        {"": 3}, "random sounds",
    ),
    "whisper": (
        lambda: t.WhisperForConditionalGeneration(
            t.WhisperConfig(
                d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=60,
                num_mel_bins=8, max_source_positions=32, max_target_positions=16, pad_token_id=0,
                bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            )
        ),
        {"encoder": 3, "decoder": 3}, "tokens of the decoder are random",
    ),
    "ast": (
        lambda: t.ASTForAudioClassification(
            t.ASTConfig(patch_size=8, num_mel_bins=16, max_length=40, **_ENCODER)
        ),
        {"": 3}, "random sounds",
    ),
    "speech_to_text": (
        lambda: t.Speech2TextForConditionalGeneration(
            t.Speech2TextConfig(
                vocab_size=60, d_model=16, encoder_layers=2, decoder_layers=2,
                encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
                decoder_ffn_dim=24, conv_channels=8, input_feat_per_channel=8,
                max_source_positions=24, max_target_positions=16,
            )
        ),
        {"encoder": 3, "decoder": 3}, "tokens of the decoder are random",
    ),
    "t5": (
        lambda: t.T5ForConditionalGeneration(t.T5Config(vocab_size=300, **_T5)),
        {"encoder": 3, "decoder": 3}, "bytes of the text",
    ),
    "byt5": (
        lambda: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=384, tokenizer_class="ByT5Tokenizer", **_T5)
        ),
        {"encoder": 3, "decoder": 3}, "",
    ),
    "canine": (
        lambda: t.CanineModel(
            t.CanineConfig(
                num_hash_buckets=64, max_position_embeddings=256, local_transformer_stride=32,
                **_ENCODER,
            )
        ),
        {"encoder": 3}, "",
    ),
    "resnet": (
        lambda: t.ResNetForImageClassification(
            t.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"
            )
        ),
        {"": 5}, "random images",
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
    is_text = name in ("bert", "gpt2", "t5", "byt5", "canine")
    readings = scan(
        tmp_path / "model", text=tmp_path / "text" if is_text else None, sequences=4, length=24,
        tokens=48, metrics=CHOSEN, directory=tmp_path / "scan",
    )  # fmt: skip
    assert (logging.is_progress_bar_enabled(), logging.get_verbosity()) == shows
    (reading,) = readings
    assert (reading.step, reading.source, reading.mode) == (0, "probe", "eval")
    found = {tag: value for tag, value in reading.values.items() if tag.startswith("anisotropy/")}
    for stack, count in stacks.items():
        for layer in range(count):
            tag = tags.in_stack(tags.layer_tag("anisotropy", layer), stack)
            assert math.isfinite(found[tag]), tag
        assert tags.in_stack(tags.layer_tag("anisotropy", count), stack) not in found
    assert any(word in note for note in reading.words())
    assert not any("left out, because" in note for note in reading.words())
