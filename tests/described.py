"""The models that README and docs/describe.md describe."""

import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    LlamaConfig,
    T5Config,
)

_SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def described() -> dict[str, nn.Module]:
    """A small model of each kind, by a title."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return {
        "A decoder with grouped queries": AutoModelForCausalLM.from_config(
            LlamaConfig(**_SIZES, num_hidden_layers=3, num_key_value_heads=2)
        ),
        "An encoder and a decoder": AutoModelForSeq2SeqLM.from_config(
            T5Config(vocab_size=50, d_model=32, d_ff=64, num_layers=3, num_heads=4, d_kv=8,
                     decoder_start_token_id=0)
        ),
        "One block that is called for every layer": AutoModel.from_config(
            AlbertConfig(**_SIZES, embedding_size=16, num_hidden_layers=4)
        ),
        "Attention written out by hand, one fused projection": AutoModelForCausalLM.from_config(
            BloomConfig(vocab_size=50, hidden_size=32, n_layer=3, n_head=4)
        ),
        "Plain torch": nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
    }  # fmt: skip
