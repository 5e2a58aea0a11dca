"""Small transformers drawn at random, with what `measure` must find in them.

Every model has its forward written out a second time, in float64 and in plain matrix products, from
the same weights (`_expected`). Only tokens that no mask hides count.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Draw:
    """A model, its inputs, and the values that it must give.

    Attributes:
        model: The model.
        inputs: What `measure` is given.
        expected: Values by tag.
        tolerance: Largest relative and absolute difference that rounding explains.
        words: What was drawn.
    """

    model: nn.Module
    inputs: Any
    expected: dict[str, float]
    tolerance: float
    words: str


@dataclass
class Form:
    """The choices of one model."""

    width: int
    heads: int
    key_heads: int
    depth: int
    attention: str  # "fused", "by hand", "module", "layer"
    norm: str  # "pre", "post", "none"
    causal: bool
    bias: bool  # of the projections
    slope: bool  # a bias of the scores by distance
    packed: bool  # queries, keys and values from one projection
    scale: float
    padding: str  # "", "left", "right"
    mask: str  # type of the mask: "bool", "int64", "float"
    dtype: torch.dtype
    sequences: int
    length: int
    words: int


class Attention(nn.Module):
    """Attention in one of several forms."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        width = form.width // form.heads
        outputs = (form.width, width * form.key_heads, width * form.key_heads)
        if form.packed:
            self.qkv = nn.Linear(form.width, sum(outputs), bias=form.bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(form.width, out, bias=form.bias) for out in outputs
            )
        self.out = nn.Linear(form.width, form.width, bias=form.bias)
        self.outputs = outputs

    def forward(self, x: Tensor, visible: Tensor, bias: Tensor | None) -> Tensor:
        """Mix the tokens that each token sees."""
        form = self.form
        if form.packed:
            parts = self.qkv(x).split(self.outputs, dim=-1)
        else:
            parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        width = form.width // form.heads
        q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
        repeat = form.heads // form.key_heads
        if form.attention == "fused":
            if repeat > 1:
                k, v = (one.repeat_interleave(repeat, dim=1) for one in (k, v))
            mask: Tensor | None = visible
            if bias is not None:
                mask = bias.masked_fill(~visible, -math.inf)
            elif form.causal and not form.padding:
                mask = None
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=form.scale
            )
        else:
            if repeat > 1:
                k, v = (one.repeat_interleave(repeat, dim=1) for one in (k, v))
            scores = q @ k.transpose(-1, -2) * form.scale
            if bias is not None:
                scores = scores + bias
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
            out = scores.softmax(dim=-1) @ v
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a network, with norms before, after or nowhere."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        if form.attention == "module":
            self.attention: nn.Module = nn.MultiheadAttention(
                form.width, form.heads, bias=form.bias, batch_first=True
            )
        else:
            self.attention = Attention(form)
        kind = nn.Identity if form.norm == "none" else nn.LayerNorm
        self.first, self.second = (kind(form.width) for _ in range(2))
        self.up, self.down = nn.Linear(form.width, 48), nn.Linear(48, form.width)

    def attend(self, x: Tensor, visible: Tensor, bias: Tensor | None) -> Tensor:
        """Call the attention with the arguments of its form."""
        if self.form.attention != "module":
            return self.attention(x, visible, bias)
        mask = ~visible.expand(len(x), self.form.heads, x.shape[1], -1).flatten(0, 1)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    def forward(self, x: Tensor, visible: Tensor, bias: Tensor | None) -> Tensor:
        """Add what attention and network give to the stream."""
        if self.form.norm == "post":
            x = self.first(x + self.attend(x, visible, bias))
            return self.second(x + self.down(F.gelu(self.up(x))))
        x = x + self.attend(self.first(x), visible, bias)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(nn.Module):
    """Embeddings, blocks and a head; extra columns of a batch are taken and ignored."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(form.words, form.width)
        self.places = nn.Embedding(form.length, form.width)
        if form.attention == "layer":
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    form.width, form.heads, 48, 0.0, "gelu", batch_first=True,
                    norm_first=form.norm == "pre", bias=form.bias,
                )
                for _ in range(form.depth)
            )  # fmt: skip
        else:
            self.layers = nn.ModuleList(Block(form) for _ in range(form.depth))
        self.head = nn.Linear(form.width, form.words)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **columns: Any
    ) -> Tensor:
        """Compute the logits of every token."""
        form = self.form
        x = self.embed(input_ids) + self.places.weight
        visible, bias = _visible(form, attention_mask), _bias(form)
        bias = None if bias is None else bias.to(x.dtype)
        for layer in self.layers:
            if form.attention == "layer":
                mask = ~_visible(form, None)[0, 0].expand(form.length, form.length)
                pad = None if attention_mask is None else attention_mask.float() == 0
                x = layer(x, src_mask=mask, src_key_padding_mask=pad)
            else:
                x = layer(x, visible, bias)
        return self.head(x)


def _visible(form: Form, mask: Tensor | None) -> Tensor:
    """Mark the keys that each query sees, [1 or sequences, 1, length or 1, length]."""
    visible = torch.ones(1, 1, form.length, form.length, dtype=torch.bool)
    if form.causal:
        visible = visible.tril()
    if mask is not None:
        visible = visible & (mask.float() != 0)[:, None, None]
        # A query of padding on the left would see nothing at all.
        visible = visible | torch.eye(form.length, dtype=torch.bool)
    return visible


def _bias(form: Form) -> Tensor | None:
    if not form.slope:
        return None
    place = torch.arange(form.length, dtype=torch.float64)
    slope = torch.tensor([2.0 ** -(head + 1) for head in range(form.heads)], dtype=torch.float64)
    return -slope[:, None, None] * (place[:, None] - place).abs()


def draw_model(seed: int) -> Draw:
    """Draw a model, its inputs and the values that `measure` must give.

    Args:
        seed: Seed of all that is drawn.
    """
    rng = np.random.default_rng(seed)
    attention = str(rng.choice(["fused", "by hand", "module", "layer"]))
    own = attention in ("fused", "by hand")
    heads = int(rng.choice([1, 2, 4]))
    width = heads * int(rng.choice([4, 8, 16]))
    form = Form(
        width=width,
        heads=heads,
        key_heads=int(rng.choice([h for h in (1, 2, 4) if heads % h == 0])) if own else heads,
        depth=int(rng.integers(1, 5)),
        attention=attention,
        norm=str(rng.choice(["pre", "post", "none"] if attention != "layer" else ["pre", "post"])),
        causal=bool(rng.random() < 0.5),
        bias=bool(rng.random() < 0.5),
        slope=bool(own and rng.random() < 0.3),
        packed=bool(rng.random() < 0.4),
        scale=(width // heads) ** -0.5 if rng.random() < 0.7 or not own else 0.7,
        padding=str(rng.choice(["", "left", "right"])),
        mask=str(rng.choice(["bool", "int64", "float"])),
        dtype=[torch.float32, torch.float32, torch.float64, torch.bfloat16][rng.integers(4)],
        sequences=int(rng.integers(2, 6)),
        length=int(rng.integers(4, 24)),
        words=int(rng.integers(3, 40)),
    )
    torch.manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Model(form)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(float(rng.uniform(0.7, 2)))
        ids = torch.randint(0, form.words, (form.sequences, form.length))
    model = model.to(form.dtype)
    mask = None
    if form.padding:
        lengths = torch.tensor(rng.integers(2, form.length + 1, form.sequences))
        lengths[0] = form.length
        place = torch.arange(form.length)
        mask = place < lengths[:, None]
        mask = mask.flip(1) if form.padding == "left" else mask
        mask = mask.to(
            {"bool": torch.bool, "int64": torch.int64, "float": torch.float32}[form.mask]
        )
    columns = {"labels": ids, "idx": list(range(form.sequences))} if rng.random() < 0.3 else {}
    inputs: Any = {"input_ids": ids, **columns}
    if mask is not None:
        inputs["attention_mask"] = mask
    elif not columns:
        inputs = [inputs, ids, (ids,), lambda m: m(ids)][rng.integers(4)]
    tolerance = {torch.float32: 2e-4, torch.float64: 1e-5, torch.bfloat16: 0.3}[form.dtype]
    with torch.no_grad():
        expected = _expected(model, ids, mask)
    return Draw(model, inputs, expected, tolerance, str(form)[5:-1])


def _expected(model: Model, ids: Tensor, mask: Tensor | None) -> dict[str, float]:
    form = model.form
    w = {name: value.detach().double() for name, value in model.state_dict().items()}
    kept = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.float() != 0
    visible = _visible(form, mask).expand(form.sequences, form.heads, -1, -1)
    if form.attention == "layer" and mask is not None:
        visible = _visible(form, None) & kept[:, None, None]
        visible = visible.expand(form.sequences, form.heads, -1, -1)
    bias = _bias(form)
    x = w["embed.weight"][ids] + w["places.weight"]
    found = _of_rows(x[kept], 0)
    for depth in range(form.depth):
        x = _block(w, f"layers.{depth}.", form, x, visible, bias, kept, depth + 1, found)
        found |= _of_rows(x[kept], depth + 1)
    return found


def _norm(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    if f"{name}.weight" not in w:
        return x
    x = x - x.mean(dim=-1, keepdim=True)
    x = x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def _block(
    w: dict[str, Tensor], at: str, form: Form, x: Tensor, visible: Tensor, bias: Tensor | None,
    kept: Tensor, depth: int, found: dict[str, float],
) -> Tensor:  # fmt: skip
    names = ("norm1", "norm2", "linear1", "linear2", "self_attn")
    if form.attention != "layer":
        names = ("first", "second", "up", "down", "attention")
    first, second, up, down, attention = (at + name for name in names)
    entering = x if form.norm == "post" else _norm(w, first, x)
    q, k, v = _projections(w, attention, form, entering)
    found |= _of_means(q[kept], k[kept], form.width // form.heads, depth)
    width = form.width // form.heads
    q, k, v = (one.unflatten(-1, (-1, width)).transpose(1, 2) for one in (q, k, v))
    repeat = form.heads // form.key_heads
    k, v = (one.repeat_interleave(repeat, dim=1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) * form.scale + (0 if bias is None else bias)
    scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.softmax(dim=-1)
    found |= _of_attention(weights, scores, visible, kept, depth)
    out = torch.nan_to_num(weights) @ v
    name = f"{attention}.out" if form.attention in ("fused", "by hand") else f"{attention}.out_proj"
    x = x + _linear(w, name, out.transpose(1, 2).flatten(2))
    if form.norm == "post":
        x = _norm(w, first, x)
        return _norm(w, second, x + _linear(w, down, F.gelu(_linear(w, up, x))))
    return x + _linear(w, down, F.gelu(_linear(w, up, _norm(w, second, x))))


def _projections(w: dict[str, Tensor], at: str, form: Form, x: Tensor) -> tuple[Tensor, ...]:
    keys = form.width // form.heads * form.key_heads
    if form.attention in ("module", "layer"):
        bias = w.get(f"{at}.in_proj_bias", 0)
        return (x @ w[f"{at}.in_proj_weight"].T + bias).split(form.width, dim=-1)
    if form.packed:
        return _linear(w, f"{at}.qkv", x).split((form.width, keys, keys), dim=-1)
    return tuple(_linear(w, f"{at}.{name}_proj", x) for name in "qkv")


def _of_rows(rows: Tensor, depth: int) -> dict[str, float]:
    mean = rows.mean(dim=0)
    centred = rows - mean
    energy = torch.linalg.svdvals(centred).square()
    unit = rows / rows.norm(dim=1, keepdim=True)
    apart = ~torch.eye(len(rows), dtype=torch.bool)
    place = f"layer_{depth:02d}"
    return {
        f"drift_norm/{place}": float(mean.norm()),
        f"variance/{place}": float(centred.square().sum() / len(rows)),
        f"anisotropy/{place}": float(energy[0] / energy.sum()),
        f"cosine/{place}": float((unit @ unit.T)[apart].mean()),
    }


def _of_means(q: Tensor, k: Tensor, width: int, depth: int) -> dict[str, float]:
    place = f"layer_{depth:02d}"
    query, key = (one.mean(dim=0).unflatten(0, (-1, width)) for one in (q, k))
    facing = key.repeat_interleave(len(query) // len(key), dim=0)
    dot = (query * facing).sum(dim=1)
    by_head = {
        "query_mean_norm": query.norm(dim=1),
        "key_mean_norm": key.norm(dim=1),
        "qk_dot": dot,
        "qk_cosine": dot / (query.norm(dim=1) * facing.norm(dim=1)),
    }
    return {
        f"{name}/{place}/head_{head}": float(value)
        for name, values in by_head.items()
        for head, value in enumerate(values)
    }


def _of_attention(
    weights: Tensor, scores: Tensor, visible: Tensor, kept: Tensor, depth: int
) -> dict[str, float]:
    place = f"layer_{depth:02d}"
    found = {}
    for head in range(weights.shape[1]):
        own, seen = weights[:, head][kept], visible[:, head][kept]
        entropy = torch.special.entr(own).sum(dim=-1)
        several = seen.sum(dim=-1) > 1
        first = own.gather(1, seen.int().argmax(dim=1, keepdim=True))
        values = {
            "attention_entropy": entropy.mean(),
            "attention_entropy_normalised": (
                entropy[several] / seen[several].sum(dim=-1).double().log()
            ).mean(),
            "attention_extremes/max": own[several].amax(dim=-1).mean(),
            "attention_sink": first[several].mean(),
            "max_logit": scores[:, head][kept][seen].max(),
        }
        for name, value in values.items():
            metric, slash, part = name.partition("/")
            found[f"{metric}/{place}{slash}{part}/head_{head}"] = float(value)
    return found
