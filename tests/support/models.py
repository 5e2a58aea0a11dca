"""Small models that tests share: one from transformers by each route, and plain torch ones.

transformers is imported only when a model needs it: a process with a plain model starts sooner.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 50

_SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@functools.cache
def configurations() -> dict[str, Any]:
    from transformers import BertConfig, GPT2Config, LlamaConfig, MistralConfig

    return {
        "gpt2": GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=3, n_head=4,
            bos_token_id=None, eos_token_id=None,
        ),
        "llama": LlamaConfig(**_SMALL, num_key_value_heads=2, max_position_embeddings=64),
        "mistral": MistralConfig(
            **_SMALL, num_key_value_heads=2, max_position_embeddings=64, sliding_window=8
        ),
        "bert": BertConfig(**_SMALL, max_position_embeddings=64),
    }  # fmt: skip


def transformer(name: str, attention: str = "sdpa") -> nn.Module:
    from transformers import AutoModel, AutoModelForCausalLM

    torch.manual_seed(0)
    kind = AutoModel if name == "bert" else AutoModelForCausalLM
    # The model keeps the configuration and writes the attention into it: each has one of its own.
    given = copy.deepcopy(configurations()[name])
    return kind.from_config(given, attn_implementation=attention)


class PlainBlock(nn.Module):
    """A pre-norm block as people write it: fused projection, scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.n_head, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        causal = mask is None
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=causal)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + F.dropout(self.mlp(self.ln_2(x)), self.dropout, self.training)


class Running(nn.Module):
    """Runs a function of itself and of its inputs; what it holds is given by name."""

    def __init__(self, run: Callable[..., Any], /, **held: Any) -> None:
        super().__init__()
        self.run = run
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.run(self, *given, **named)


def embed_tokens(model: nn.Module, ids: Tensor) -> Tensor:
    return model.tokens(ids) + model.places(torch.arange(ids.shape[1], device=ids.device))


def run_blocks(model: nn.Module, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


class PlainDecoder(nn.Module):
    """A decoder of plain blocks, whose parts may be others.

    Args:
        width: Width of the hidden states.
        layers: Number of blocks.
        heads: Number of attention heads.
        length: Largest number of tokens.
        dropout: Dropout rate of the blocks.
        block: Makes each of the blocks.
        embed: From the model and its ids to what enters the first block.
        run: From the model and these hidden states to what enters the head.
        held: Modules by name, further ones or in place of its own.
    """

    def __init__(
        self, width: int = 32, layers: int = 3, heads: int = 4, length: int = 64,
        dropout: float = 0.0, *, block: Callable[[], nn.Module] | None = None,
        embed: Callable[[Any, Tensor], Tensor] = embed_tokens,
        run: Callable[[Any, Tensor], Tensor] = run_blocks, **held: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed, self.run = embed, run
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        block = block or functools.partial(PlainBlock, width, heads, dropout)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)
        for name, module in held.items():
            setattr(self, name, module)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.run(self, self.embed(self, ids)))


def batch(sequences: int = 8, length: int = 32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (sequences, length), generator=generator)
