"""Small language models whose passes are timed."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    T5Config,
)

VOCABULARY = 256


class Sizes(NamedTuple):
    """Sizes of a model."""

    layers: int
    width: int
    length: int

    @property
    def heads(self) -> int:
        """Number of heads: at least 4, and 64 wide if there are more."""
        return max(4, self.width // 64)


class _ByHand(nn.Module):
    """A block as nanoGPT writes it, with attention by hand."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the outputs of attention and of the two matrices."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * k.shape[-1] ** -0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        y = (weights @ v).transpose(1, 2).contiguous().view(batch, length, width)
        x = x + self.out(y)
        return x + self.mlp(self.norm_2(x))


class _NanoGPT(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(sizes.length, width)
        self.blocks = nn.ModuleList(_ByHand(width, sizes.heads) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _gpt2(sizes: Sizes, attention: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=sizes.length, n_embd=sizes.width,
            n_layer=sizes.layers, n_head=sizes.heads, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False,
        ),
        attn_implementation=attention,
    )  # fmt: skip


def _llama(sizes: Sizes, attention: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=VOCABULARY, max_position_embeddings=sizes.length, hidden_size=sizes.width,
            num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, use_cache=False,
            num_key_value_heads=sizes.heads // 2, intermediate_size=3 * sizes.width,
            bos_token_id=None, eos_token_id=None,
        ),
        attn_implementation=attention,
    )  # fmt: skip


def _t5(sizes: Sizes, attention: str) -> nn.Module:
    """Half of the layers are the encoder's."""
    return AutoModelForSeq2SeqLM.from_config(
        T5Config(
            vocab_size=VOCABULARY, d_model=sizes.width, d_kv=sizes.width // sizes.heads,
            d_ff=3 * sizes.width, num_layers=sizes.layers // 2, num_heads=sizes.heads,
            num_decoder_layers=sizes.layers - sizes.layers // 2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, use_cache=False,
        ),
        attn_implementation=attention,
    )  # fmt: skip


def _compiled(sizes: Sizes, attention: str) -> nn.Module:
    model = _gpt2(sizes, attention)
    for block in model.transformer.h:
        block.compile(backend="eager")
    return model


MODELS: dict[str, Callable[[Sizes], nn.Module]] = {
    "GPT-2, sdpa": lambda sizes: _gpt2(sizes, "sdpa"),
    "GPT-2, eager": lambda sizes: _gpt2(sizes, "eager"),
    "Llama, sdpa": lambda sizes: _llama(sizes, "sdpa"),
    "Llama, eager": lambda sizes: _llama(sizes, "eager"),
    "nanoGPT, by hand": _NanoGPT,
    "T5, eager": lambda sizes: _t5(sizes, "eager"),
    "GPT-2, compiled blocks": lambda sizes: _compiled(sizes, "sdpa"),
}


def make(name: str, sizes: Sizes, sequences: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Make a model, and a batch for it.

    Args:
        name: A key of `MODELS`.
        sizes: Its sizes.
        sequences: Number of sequences in the batch.
    """
    torch.manual_seed(0)
    model = MODELS[name](sizes).train()
    ids = torch.randint(3, VOCABULARY, (sequences, sizes.length))
    return model, {"input_ids": ids} | ({"labels": ids} if name.startswith("T5") else {})
