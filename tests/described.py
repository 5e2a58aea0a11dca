"""The models that README and docs/describe.md describe."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, T5Config

_SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def described() -> dict[str, nn.Module]:
    """A small model of each kind, by a title."""
    torch.manual_seed(0)
    return {
        "A decoder with grouped queries": AutoModelForCausalLM.from_config(
            LlamaConfig(**_SIZES, num_hidden_layers=3, num_key_value_heads=2)
        ),
        "An encoder and a decoder": AutoModelForSeq2SeqLM.from_config(
            T5Config(vocab_size=50, d_model=32, d_ff=64, num_layers=3, num_heads=4, d_kv=8,
                     decoder_start_token_id=0)
        ),
    }  # fmt: skip
