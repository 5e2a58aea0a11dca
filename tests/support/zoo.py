"""A zoo of small random models: each entry of the table of architectures.

Everything here was read off the models' own code by hand.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from support import plain_models as plain
from support.specimens import (
    BY_HAND,
    CHUNKS,
    EAGER_INTERFACE,
    INTERFACE,
    LENGTH,
    NO_TOKENS,
    NONE,
    NOT_BEFORE,
    NOT_FUSED,
    NOT_TRACED,
    OF_SCORES,
    SDPA,
    SDPA_ALONE,
    SEQUENCES,
    SEVERAL,
    SEVERAL_PRODUCTS,
    VOCABULARY,
    Specimen,
    Stack,
    both_tokens,
    frames,
    gated,
    halves,
    ids,
    images,
    lacking,
    mask,
    noise,
    one_mask,
    per_group,
    per_head,
    quarters,
    sound,
    spectrogram,
    tokens,
    turned_behind,
    two_masks,
)

# -- decoders of transformers --------------------------------------------------------------------

_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64, **_NO_IDS,
}  # fmt: skip
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 8}
_GPT = {
    "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, **_NO_IDS
}  # fmt: skip
_SEPARATE = {"query": "self_attn.q_proj", "key": "self_attn.k_proj"}
_WITHOUT_IDS = lacking(NO_TOKENS, "token_ids")
_IN_STAGES = _WITHOUT_IDS | lacking(NOT_BEFORE, "additions")


def _hf(model: str, configuration: str, **arguments: Any) -> Callable[[str], nn.Module]:
    """A maker of a transformers model with the attention implementation that it is given."""

    def build(implementation: str) -> nn.Module:
        made = getattr(transformers, configuration)(**arguments)
        return getattr(transformers, model)._from_config(made, attn_implementation=implementation)

    return build


def _decoder(
    name: str, prefix: str, stack: Stack, routes: Mapping[str, str] = INTERFACE, **arguments: Any
) -> Specimen:
    build = _hf(f"{prefix}ForCausalLM", f"{prefix}Config", **arguments)
    return Specimen(name, build, tokens, {"": stack}, routes, one_mask)


def _llama_like(
    name: str, prefix: str, routes: Mapping[str, str] = INTERFACE, **arguments: Any
) -> Specimen:
    stack = Stack("model.layers", **_SEPARATE, key_heads=arguments.get("num_key_value_heads", 2))
    return _decoder(name, prefix, stack, routes, **(_GROUPED | arguments))


def _falcon(key_heads: int, **arguments: Any) -> dict[str, Any]:
    split = per_head if arguments.get("alibi") else per_group
    return {
        "prefix": "Falcon",
        "stack": Stack(
            "transformer.h", query="self_attention.query_key_value", split=split,
            key_heads=key_heads,
        ),
        "routes": SDPA, **_SMALL, **arguments,
    }  # fmt: skip


def _alibi_attention(query: Tensor, key: Tensor, inputs: dict[str, Any]) -> Tensor:
    """softmax((q k + slope x place) / sqrt(d)), places counted without padding, in bfloat16."""
    length = query.shape[1]
    real = inputs.get("attention_mask", torch.ones(query.shape[:2], dtype=torch.long))
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]).bfloat16()
    places = ((real.cumsum(dim=1) - 1) * real).bfloat16()
    bias = (slopes[None, :, None] * places[:, None, :]).float()[:, :, None, :]
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) + bias
    seen = torch.ones(length, length).tril().bool() & real.bool()[:, None, None, :]
    return (scores * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf).softmax(dim=-1)


_ALIBI = _decoder("", **_falcon(4, multi_query=False, alibi=True, parallel_attn=False))

DECODERS = [
    Specimen(
        "GPT-2", _hf("GPT2LMHeadModel", "GPT2Config", **_GPT), tokens,
        {"": Stack("transformer.h", query="attn.c_attn")}, INTERFACE, one_mask,
    ),
    _decoder(
        "GPT-NeoX (Pythia)", "GPTNeoX",
        Stack("gpt_neox.layers", query="attention.query_key_value", split=per_head), **_SMALL,
    ),
    _decoder(
        "GPT-J", "GPTJ", Stack("transformer.h", query="attn.q_proj", key="attn.k_proj"),
        BY_HAND, **_GPT, rotary_dim=4,
    ),
    _decoder(
        "GPT-Neo (local attention)", "GPTNeo",
        Stack("transformer.h", query="attn.attention.q_proj", key="attn.attention.k_proj"),
        BY_HAND, vocab_size=VOCABULARY, hidden_size=32, num_layers=4, num_heads=4,
        attention_types=[[["global", "local"], 2]], window_size=6, max_position_embeddings=64,
        intermediate_size=48, **_NO_IDS,
    ),
    _decoder(
        "CodeGen", "CodeGen", Stack("transformer.h", query="attn.qkv_proj", split=quarters),
        BY_HAND, **_GPT, n_ctx=64, rotary_dim=4,
    ),
    _decoder(
        "GPT-BigCode (multi-query)", "GPTBigCode",
        Stack("transformer.h", query="attn.c_attn", key_heads=1), **_GPT, multi_query=True,
    ),
    _decoder(
        "BLOOM (ALiBi)", "Bloom",
        Stack("transformer.h", query="self_attention.query_key_value", split=per_head),
        BY_HAND, vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4, **_NO_IDS,
    ),
    _decoder("Falcon (multi-query)", **_falcon(1, multi_query=True) | {"routes": NOT_FUSED}),
    _decoder("Falcon (grouped)", **_falcon(2, num_kv_heads=2, new_decoder_architecture=True)),
    Specimen(
        "Falcon (ALiBi)", _ALIBI.build, tokens, _ALIBI.stacks, SDPA, one_mask,
        own_attention={"sdpa": _alibi_attention},
        remark="transformers' eager attention adds ALiBi twice: each implementation is held "
        "against itself",
    ),
    _decoder(
        "MPT (ALiBi)", "Mpt", Stack("transformer.blocks", query="attn.Wqkv"), BY_HAND,
        d_model=32, n_heads=4, n_layers=3, expansion_ratio=2, max_seq_len=64,
        vocab_size=VOCABULARY, **_NO_IDS,
    ),
    _decoder(
        "OPT", "OPT", Stack("model.decoder.layers", **_SEPARATE),
        **_SMALL | {"pad_token_id": 0}, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0,
    ),
    _llama_like("Llama", "Llama"),
    _llama_like("Mistral (sliding window)", "Mistral", sliding_window=6),
    _llama_like("Mixtral (experts)", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    _llama_like("Qwen2", "Qwen2"),
    _llama_like(
        "Qwen2-MoE", "Qwen2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    _llama_like("Qwen3", "Qwen3"),
    _llama_like(
        "Gemma 2 (softcap)", "Gemma2", EAGER_INTERFACE, sliding_window=6,
        query_pre_attn_scalar=8, attn_logit_softcapping=2.0,
    ),
    Specimen(
        "Gemma 3 (sliding window)",
        _hf("Gemma3ForCausalLM", "Gemma3TextConfig", **_GROUPED, sliding_window=6,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
        tokens, {"": Stack("model.layers", **_SEPARATE, key_heads=2)}, INTERFACE, one_mask,
    ),
    _llama_like(
        "GPT-OSS (sinks, experts)", "GptOss", EAGER_INTERFACE, sliding_window=6,
        num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    Specimen(
        "Llama 4 (chunks, experts)",
        _hf("Llama4ForCausalLM", "Llama4TextConfig", **_GROUPED, intermediate_size_mlp=48,
            num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=8,
            interleave_moe_layer_step=2),
        tokens, {"": Stack("model.layers", **_SEPARATE, key_heads=2)}, INTERFACE, one_mask,
    ),
    _llama_like("Phi", "Phi", num_key_value_heads=4),
    _decoder(
        "Phi-3", "Phi3", Stack("model.layers", query="self_attn.qkv_proj", key_heads=2),
        **{k: v for k, v in _GROUPED.items() if k != "head_dim"} | {"pad_token_id": 0},
    ),
    _llama_like("OLMo 2", "Olmo2"),
    _llama_like("OLMoE", "Olmoe", num_experts=4, num_experts_per_tok=2),
    _llama_like("StableLM", "StableLm"),
    _llama_like("Starcoder2", "Starcoder2", sliding_window=6),
    _llama_like("Granite", "Granite", attention_multiplier=0.2),
    _llama_like("Cohere", "Cohere", use_qk_norm=True),
    _decoder(
        "DeepSeek-V3 (latent attention)", "DeepseekV3",
        Stack(
            "model.layers", query="self_attn.q_b_proj", key="self_attn.kv_b_proj",
            shared="self_attn.kv_a_proj_with_mqa", own_width=8, query_of=turned_behind(8),
        ),
        NOT_FUSED, **_SMALL, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
    _decoder(
        "Qwen3-Next (hybrid, gated)", "Qwen3Next",
        Stack("model.layers", **_SEPARATE, query_of=gated, key_heads=2, attending=(2, 4)),
        **_GROUPED | {"num_hidden_layers": 4}, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    _decoder(
        "LFM2 (hybrid)", "Lfm2", Stack("model.layers", **_SEPARATE, key_heads=2, attending=(2, 4)),
        **{k: v for k, v in _GROUPED.items() if k != "head_dim"} | {"num_hidden_layers": 4},
        layer_types=["conv", "full_attention"] * 2,
    ),
    Specimen(
        "Mamba",
        _hf("MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=32,
            state_size=4, num_hidden_layers=3, use_mambapy=False, **_NO_IDS),
        lambda: {"input_ids": ids()},
        {"": Stack("backbone.layers", None)}, NONE,
        remark="no attention",
    ),
]  # fmt: skip

# -- encoders of transformers --------------------------------------------------------------------

_ENCODER = {**_SMALL, "pad_token_id": 0}


def _encoder(
    name: str, prefix: str, query: str, key: str, routes: Mapping[str, str] = INTERFACE,
    blocks: str = "encoder.layer", **arguments: Any,
) -> Specimen:  # fmt: skip
    return Specimen(
        name, _hf(f"{prefix}Model", f"{prefix}Config", **(_ENCODER | arguments)), tokens,
        {"": Stack(blocks, query=query, key=key)}, routes, one_mask,
    )  # fmt: skip


_BERT = ("attention.self.query", "attention.self.key")
_UNSEEN = {"": Stack("encoder.layer", None, *_BERT)}

ENCODERS = [
    _encoder("BERT", "Bert", *_BERT),
    _encoder("RoBERTa", "Roberta", *_BERT),
    _encoder("ELECTRA", "Electra", *_BERT, embedding_size=16),
    _encoder(
        "ALBERT (shared layers)", "Albert", "attention.query", "attention.key", embedding_size=16,
        blocks="encoder.albert_layer_groups.0.albert_layers",
    ),
    replace(
        _encoder(
            "DeBERTa-v2", "DebertaV2", "attention.self.query_proj", "attention.self.key_proj",
            BY_HAND, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8,
        ),
        uncovered=lacking(SEVERAL_PRODUCTS.format(count=3), *OF_SCORES),
    ),
    _encoder(
        "DistilBERT", "DistilBert", "attention.q_lin", "attention.k_lin",
        blocks="transformer.layer", dim=32, n_layers=3, n_heads=4, hidden_dim=48,
    ),
    Specimen(
        "Longformer (chunks)", _hf("LongformerModel", "LongformerConfig", **_ENCODER,
                                   attention_window=4),
        lambda: {"input_ids": ids(16), "attention_mask": mask(16, 5)}, _UNSEEN, NONE, one_mask,
        uncovered=lacking(CHUNKS, *OF_SCORES, "scores", "visible", "max_logits", "head_outputs")
        | lacking(NOT_TRACED, "projected_query", "projected_key"),
    ),
    Specimen(
        "Nystromformer (landmarks)", _hf("NystromformerModel", "NystromformerConfig", **_ENCODER,
                                         num_landmarks=4, segment_means_seq_len=16),
        lambda: {"input_ids": ids(16)}, _UNSEEN, NONE,
        uncovered=lacking(SEVERAL, *OF_SCORES, "scores", "visible", "max_logits", "head_outputs")
        | lacking(NOT_TRACED, "projected_query", "projected_key"),
    ),
    Specimen(
        "ModernBERT (local attention)",
        _hf("ModernBertModel", "ModernBertConfig", **_ENCODER, global_attn_every_n_layers=2,
            local_attention=6, cls_token_id=1, sep_token_id=2),
        tokens, {"": Stack("layers", query="attn.Wqkv")}, INTERFACE, one_mask,
    ),
    Specimen(
        "XLNet",
        _hf("XLNetModel", "XLNetConfig", vocab_size=VOCABULARY, d_model=32, n_layer=3, n_head=4,
            d_inner=48, bos_token_id=None, eos_token_id=None),
        tokens, {"": Stack("layer", length_first=True, holder="rel_attn")}, BY_HAND, one_mask,
        uncovered=lacking(SEVERAL_PRODUCTS.format(count=2), *OF_SCORES),
    ),
]  # fmt: skip

# -- encoders with decoders ----------------------------------------------------------------------


def _both(
    name: str, prefix: str, blocks: str, own: tuple[str, str], cross: tuple[str, str],
    **arguments: Any,
) -> Specimen:  # fmt: skip
    encoder, decoder = blocks.format("encoder"), blocks.format("decoder")
    return Specimen(
        name, _hf(f"{prefix}ForConditionalGeneration", f"{prefix}Config", **arguments), both_tokens,
        {
            "encoder": Stack(encoder, "encoder_attentions", *own),
            "decoder": Stack(decoder, "decoder_attentions", *own),
            "cross": Stack(decoder, "cross_attentions", *cross),
        },
        INTERFACE, two_masks,
    )  # fmt: skip


_TWO = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
_OF_BART = (
    "model.{}.layers", ("self_attn.q_proj", "self_attn.k_proj"),
    ("encoder_attn.q_proj", "encoder_attn.k_proj"),
)  # fmt: skip
_WHISPER = _both(
    "Whisper", "Whisper", *_OF_BART, **_TWO, num_mel_bins=8, max_source_positions=14,
    max_target_positions=64, begin_suppress_tokens=None,
)  # fmt: skip

_BERT_GPT2 = {
    "encoder": transformers.BertConfig(**_ENCODER).to_dict(),
    "decoder": transformers.GPT2Config(**_GPT, add_cross_attention=True).to_dict(),
    "decoder_start_token_id": 1, "pad_token_id": 0,
}  # fmt: skip

BOTH = [
    Specimen(
        "BERT to GPT-2", _hf("EncoderDecoderModel", "EncoderDecoderConfig", **_BERT_GPT2),
        both_tokens,
        {
            "encoder": Stack("encoder.encoder.layer", "encoder_attentions", *_BERT),
            "decoder": Stack("decoder.transformer.h", "decoder_attentions", "attn.c_attn"),
            "cross": Stack(
                "decoder.transformer.h", "cross_attentions", "crossattention.q_attn",
                "crossattention.c_attn", key_of=halves,
            ),
        },
        INTERFACE, two_masks,
    ),
    _both(
        "T5 (position bias)", "T5", "{}.block",
        ("layer.0.SelfAttention.q", "layer.0.SelfAttention.k"),
        ("layer.1.EncDecAttention.q", "layer.1.EncDecAttention.k"),
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3,
        num_heads=4, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    ),
    _both("BART", "Bart", *_OF_BART, **_TWO, max_position_embeddings=64),
    Specimen(
        "Whisper", _WHISPER.build, spectrogram, _WHISPER.stacks, INTERFACE,
        uncovered=lacking(NO_TOKENS, "token_ids", stacks=("encoder",)),
    ),
]  # fmt: skip

# -- vision and speech ---------------------------------------------------------------------------

_VISION = {
    "image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
_SPEECH = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "conv_dim": (32, 32), "conv_kernel": (8, 4), "conv_stride": (4, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0, "layerdrop": 0.0, **_NO_IDS, "pad_token_id": 0,
}  # fmt: skip
_ATTENTION = {"query": "attention.q_proj", "key": "attention.k_proj"}


def _vision(name: str, prefix: str, blocks: str, **arguments: Any) -> Specimen:
    return Specimen(
        name, _hf(f"{prefix}Model", f"{prefix}Config", **_VISION, **arguments), images,
        {"": Stack(blocks, **_ATTENTION)}, INTERFACE, uncovered=_WITHOUT_IDS,
    )  # fmt: skip


def _speech(name: str, prefix: str) -> Specimen:
    return Specimen(
        name, _hf(f"{prefix}Model", f"{prefix}Config", **_SPEECH), sound,
        {"": Stack("encoder.layers", **_ATTENTION)}, INTERFACE, frames,
        uncovered=_WITHOUT_IDS,
    )  # fmt: skip


def _tower(name: str) -> Stack:
    return Stack(f"{name}.encoder.layers", f"{name}_output.attentions", **_SEPARATE)


VISION_AND_SPEECH = [
    _vision("ViT", "ViT", "layers"),
    _vision("DeiT", "DeiT", "layers"),
    _vision("DINOv2", "Dinov2", "encoder.layer", mlp_ratio=2),
    Specimen(
        "Swin (windows)",
        _hf("SwinModel", "SwinConfig", image_size=16, patch_size=2, embed_dim=16, depths=[2, 2],
            num_heads=[4, 4], window_size=4),
        images,
        {"": Stack("encoder.layers.*.blocks", "in attention", windows=True, **_ATTENTION)},
        INTERFACE, uncovered=_IN_STAGES, remark="attention within windows of each image",
    ),
    Specimen(
        "SegFormer (fewer keys)",
        _hf("SegformerModel", "SegformerConfig", num_encoder_blocks=2, depths=[2, 2],
            sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3], strides=[2, 2],
            num_attention_heads=[4, 4], mlp_ratios=[2, 2]),
        images, {"": Stack("stages.*.blocks", **_ATTENTION)}, INTERFACE,
        uncovered=_IN_STAGES,
    ),
    Specimen(
        "ConvNeXt",
        _hf("ConvNextModel", "ConvNextConfig", hidden_sizes=[16, 32], depths=[2, 3], num_stages=2),
        images, {"": Stack("encoder.stages.*.layers", None)}, NONE,
        uncovered=_IN_STAGES, remark="no attention",
    ),
    Specimen(
        "ResNet",
        _hf("ResNetModel", "ResNetConfig", embedding_size=16, hidden_sizes=[16, 32],
            depths=[2, 2], layer_type="basic"),
        lambda: images(32), {"": Stack("encoder.stages.*.layers", None)},
        NONE, uncovered=_IN_STAGES, remark="no attention",
    ),
    _speech("wav2vec 2.0", "Wav2Vec2"),
    _speech("HuBERT", "Hubert"),
    Specimen(
        "CLIP (two towers)",
        _hf("CLIPModel", "CLIPConfig", projection_dim=16, vision_config=_VISION,
            text_config={**_ENCODER, "num_hidden_layers": 2, "eos_token_id": 2}),
        lambda: tokens() | {"pixel_values": noise(SEQUENCES, 3, 16, 16)},
        {name: _tower(name) for name in ("text_model", "vision_model")}, INTERFACE,
        lambda inputs: {"text_model": inputs["attention_mask"].bool()},
        uncovered=lacking(NO_TOKENS, "token_ids", stacks=("vision_model",)),
    ),
]  # fmt: skip

_IMAGE = VOCABULARY - 1  # the token that stands for a patch
_LLAVA = {
    "vision_config": transformers.CLIPVisionConfig(**_VISION),
    "text_config": transformers.LlamaConfig(**_GROUPED), "image_token_id": _IMAGE,
    "vision_feature_layer": -1,
}  # fmt: skip


def _captions() -> dict[str, Any]:
    text = ids(24).clamp(max=_IMAGE - 1)
    text[:, 2:18] = _IMAGE
    real = torch.ones_like(text)
    real[1, 20:] = 0
    real[2, :2] = 0
    return {
        "input_ids": text, "attention_mask": real, "pixel_values": noise(SEQUENCES, 3, 16, 16)
    }  # fmt: skip


VISION_AND_SPEECH.append(
    Specimen(
        "LLaVA (vision tower, language model)",
        _hf("LlavaForConditionalGeneration", "LlavaConfig", **_LLAVA), _captions,
        {
            "vision_tower": Stack(
                "model.vision_tower.encoder.layers", "in self_attn", **_SEPARATE
            ),
            "language_model": Stack("model.language_model.layers", **_SEPARATE, key_heads=2),
        },
        INTERFACE, lambda inputs: {"language_model": inputs["attention_mask"].bool()},
        uncovered=lacking(NO_TOKENS, "token_ids", stacks=("vision_tower",)),
    )
)  # fmt: skip

# -- plain torch ---------------------------------------------------------------------------------


def _source() -> dict[str, Any]:
    return {"src": noise(SEQUENCES, LENGTH, 32), "src_key_padding_mask": mask(LENGTH, 5) == 0}


def _target() -> dict[str, Any]:
    real = mask(10, 3)
    real[2] = 1  # a first query that is padding sees nothing at all
    return {
        "tgt": noise(SEQUENCES, 10, 32),
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(10) < 0,
        "tgt_key_padding_mask": real == 0,
        "memory_key_padding_mask": mask(LENGTH, 5) == 0,
    }


def _real(**stacks: str) -> Callable[[dict[str, Any]], dict[str, Tensor]]:
    """Real tokens of each stack: not in the padding mask of that name."""
    return lambda inputs: {
        name.strip("_"): ~inputs[f"{mask}_key_padding_mask"] for name, mask in stacks.items()
    }


def _multihead(blocks: str, path: str = "self_attn", **arguments: Any) -> Stack:
    return Stack(blocks, f"in {path}", query=path, **arguments)


def _torch_encoder(name: str, **arguments: Any) -> Specimen:
    length_first = not arguments.get("batch_first", True)

    def inputs() -> dict[str, Any]:
        given = _source()
        return given | {"src": given["src"].transpose(0, 1)} if length_first else given

    return Specimen(
        name, lambda _: plain.encoder(**arguments), inputs,
        {"": _multihead("layers", length_first=length_first)}, SDPA_ALONE, _real(_="src"),
        uncovered=_WITHOUT_IDS,
    )  # fmt: skip


def _plain(
    name: str, build: Callable[[str], nn.Module], blocks: str, query: str,
    key: str | None = None, key_heads: int = 4,
) -> Specimen:  # fmt: skip
    stack = Stack(blocks, "in attn", query=query, key=key, key_heads=key_heads)
    seen = blocks == "blocks"
    return Specimen(
        name, build, images if seen else lambda: {"idx": ids()}, {"": stack}, SDPA,
        uncovered=_WITHOUT_IDS if seen else {},
    )  # fmt: skip


PLAIN = [
    _torch_encoder("nn.TransformerEncoder"),
    _torch_encoder("nn.TransformerEncoder (norm first)", norm_first=True),
    _torch_encoder("nn.TransformerEncoder (length first)", batch_first=False),
    Specimen(
        "nn.TransformerDecoder", lambda _: plain.decoder(),
        lambda: _target() | {"memory": noise(SEQUENCES, LENGTH, 32) + 1},
        {"": _multihead("layers"), "cross": _multihead("layers", "multihead_attn")}, SDPA_ALONE,
        _real(_="tgt", cross="tgt", memory="memory"), uncovered=_WITHOUT_IDS,
    ),
    Specimen(
        "nn.Transformer", lambda _: plain.both(), lambda: _source() | _target(),
        {
            "encoder": _multihead("encoder.layers"),
            "decoder": _multihead("decoder.layers"),
            "cross": _multihead("decoder.layers", "multihead_attn"),
        },
        SDPA_ALONE, _real(encoder="src", decoder="tgt", cross="tgt"),
        uncovered=lacking(NO_TOKENS, "token_ids", stacks=("encoder", "decoder")),
    ),
    _plain(
        "nanoGPT-like", lambda kind: plain.language_model(plain.CausalSelfAttention, kind),
        "transformer.h", "attn.c_attn",
    ),
    _plain(
        "Llama's own code", lambda kind: plain.language_model(plain.RotaryAttention, kind),
        "transformer.h", "attn.wq", "attn.wk", 2,
    ),
    _plain("timm-like ViT", plain.vision_transformer, "blocks", "attn.qkv"),
]  # fmt: skip

ZOO = {
    specimen.name: specimen
    for specimen in (*DECODERS, *ENCODERS, *BOTH, *VISION_AND_SPEECH, *PLAIN)
}
