"""Transformers in plain torch, as people write them, for the zoo.

Each attention comes in two ways: through `scaled_dot_product_attention`, and written out by hand;
by hand it keeps its probabilities, which are the reference for both.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY = 32, 4, 50


class Attention(nn.Module):
    """Fused or separate projections, rotary or not, causal or not."""

    def __init__(self, *, by_hand: bool, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.by_hand, self.causal = by_hand, causal
        self.drop = nn.Dropout(dropout)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[sequences, heads, length, head width] of each, to the same."""
        if not self.by_hand:
            dropout = self.drop.p if self.training else 0.0
            grouped = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout, is_causal=self.causal, **grouped
            )
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / q.shape[-1] ** 0.5)
        if self.causal:
            length = q.shape[2]
            bias = torch.tril(torch.ones(length, length)).view(1, 1, length, length)
            att = att.masked_fill(bias[:, :, :length, :length] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        self.probabilities = att.detach()
        return self.drop(att) @ v


class CausalSelfAttention(Attention):
    """nanoGPT's: `c_attn` makes [q | k | v]."""

    def __init__(self, *, by_hand: bool, dropout: float = 0.0) -> None:
        super().__init__(by_hand=by_hand, causal=True, dropout=dropout)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        b, t, c = x.shape
        k = k.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        q = q.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        v = v.view(b, t, HEADS, c // HEADS).transpose(1, 2)
        return self.c_proj(self.attend(q, k, v).transpose(1, 2).contiguous().view(b, t, c))


class VisionAttention(Attention):
    """timm's: `qkv` makes [q | k | v], all tokens see all."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__(by_hand=by_hand, causal=False)
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.proj(self.attend(q, k, v).transpose(1, 2).reshape(b, n, c))


class RotaryAttention(Attention):
    """Llama's own code: `wq`, `wk`, fewer key heads, complex rotation."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__(by_hand=by_hand, causal=True)
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, HEADS // 2, WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self._rotated(self.wq(x).view(b, t, self.n_heads, self.head_dim))
        k = self._rotated(self.wk(x).view(b, t, self.n_kv_heads, self.head_dim))
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return self.wo(self.attend(q, k, v).transpose(1, 2).reshape(b, t, -1))

    def _rotated(self, x: Tensor) -> Tensor:
        turns = 100.0 ** -torch.linspace(0, 1, self.head_dim // 2)
        angle = torch.outer(torch.arange(x.shape[1]).float(), turns)[:, None, :]
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


class Block(nn.Module):
    """Pre-norm, as nearly all of them are."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = attention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class LanguageModel(nn.Module):
    """nanoGPT's skeleton, around any attention."""

    def __init__(self, attentions: list[nn.Module]) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(64, WIDTH),
                "h": nn.ModuleList(Block(attention) for attention in attentions),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class VisionTransformer(nn.Module):
    """timm's skeleton: blocks in a Sequential, a class token in front."""

    def __init__(self, attentions: list[nn.Module]) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, WIDTH))
        self.blocks = nn.Sequential(*(Block(attention) for attention in attentions))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.patch_embed(pixel_values).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def language_model(kind: type[Attention], implementation: str) -> nn.Module:
    by_hand = implementation == "eager"
    return LanguageModel([kind(by_hand=by_hand) for _ in range(3)])


def vision_transformer(implementation: str) -> nn.Module:
    by_hand = implementation == "eager"
    return VisionTransformer([VisionAttention(by_hand=by_hand) for _ in range(3)])


_SIZES = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 48, "dropout": 0.0}


def encoder(*, norm_first: bool = False, batch_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(**_SIZES, norm_first=norm_first, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(**_SIZES, batch_first=True), 3)


def both() -> nn.Module:
    return nn.Transformer(
        **_SIZES, num_encoder_layers=2, num_decoder_layers=3, batch_first=True
    )  # fmt: skip
