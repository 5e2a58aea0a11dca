"""Models of other code bases, with one line added: python -m benchmarks.foreign.

Every code base that is installed trains one step with and without a `Monitor`. The outputs, the
loss and the gradients must be the same bits, and modules, functions and switches as before. The
values are held to a second pass, without geomon, in which a dispatch mode computes in float64 the
entropy and the largest weight of every softmax over a last dimension, and the norm of the mean and
the variance of every tensor of three dimensions or more. What geomon reports at a layer must be one
of these, to 1e-5, and from layer to layer in the order of the pass. What it does not report must
have a reason.

Each model runs in a process of its own, with a time limit. The peers are not dependencies of
geomon: `pip install --no-deps` them beside torch in an environment of its own.
"""

import contextlib
import importlib
import io
import json
import math
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from geomon import METRICS, Monitor, every, read, select
from geomon.record.columns import Column, Stacks

SEQUENCES, LENGTH, WIDTH, DEPTH, HEADS, WORDS = 3, 32, 64, 3, 4, 50
TOLERANCE = 1e-5
TIME_LIMIT = 150
# Metrics and their parts that are compared.
BY_HEAD = (("attention_entropy", ""), ("attention_extremes", "max"))
OF_ROWS = (("drift_norm", ""), ("variance", ""))


def _words() -> Tensor:
    return torch.randint(0, WORDS, (SEQUENCES, LENGTH))


def _pictures(size: int = 32) -> Tensor:
    return torch.randn(SEQUENCES, 3, size, size)


def _vectors(width: int = WIDTH) -> Tensor:
    return torch.randn(SEQUENCES, LENGTH, width)


def _module(name: str) -> Any:
    return importlib.import_module(name)


# Name: the package, the model, and the inputs of one step.
Case = Callable[[], tuple[nn.Module, tuple[Any, ...]]]
CASES: dict[str, Case] = {}


def _case(function: Case) -> Case:
    CASES[function.__name__[1:]] = function
    return function


def _vit(name: str, kind: str = "ViT", **options: Any) -> Case:
    """A vision transformer of vit-pytorch."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        common = {
            "image_size": 32, "patch_size": 8, "num_classes": 5, "dim": WIDTH, "depth": DEPTH,
            "heads": HEADS, "mlp_dim": 128,
        }  # fmt: skip
        common |= options
        common = {key: value for key, value in common.items() if value is not None}
        return getattr(_module(f"vit_pytorch.{name}"), kind)(**common), (_pictures(),)

    return build


CASES |= {
    "vit_pytorch.vit": _vit("vit"),
    "vit_pytorch.simple_vit": _vit("simple_vit", "SimpleViT"),
    "vit_pytorch.deepvit": _vit("deepvit", "DeepViT"),
    "vit_pytorch.cait": _vit("cait", "CaiT", cls_depth=2),
    "vit_pytorch.simple_vit_with_qk_norm": _vit("simple_vit_with_qk_norm", "SimpleViT"),
    "vit_pytorch.vit_with_patch_dropout": _vit("vit_with_patch_dropout"),
    "vit_pytorch.parallel_vit": _vit("parallel_vit"),
    "vit_pytorch.learnable_memory_vit": _vit("learnable_memory_vit"),
    "vit_pytorch.vit_for_small_dataset": _vit("vit_for_small_dataset"),
    "vit_pytorch.normalized_vit": _vit("normalized_vit", "nViT"),
    "vit_pytorch.na_vit": _vit("na_vit", "NaViT"),
    "vit_pytorch.cvt": lambda: (
        _module("vit_pytorch.cvt").CvT(
            num_classes=5, s1_emb_dim=16, s2_emb_dim=32, s3_emb_dim=64, s3_depth=2, s2_depth=1,
        ), (_pictures(),),
    ),
    "vit_pytorch.pit": lambda: (
        _module("vit_pytorch.pit").PiT(
            image_size=32, patch_size=8, dim=32, num_classes=5, depth=(1, 2), heads=2, mlp_dim=64,
        ), (_pictures(),),
    ),
    "vit_pytorch.levit": lambda: (
        _module("vit_pytorch.levit").LeViT(
            image_size=64, num_classes=5, stages=2, dim=(32, 64), depth=2, heads=2, mlp_mult=2,
        ), (_pictures(64),),
    ),
    "vit_pytorch.twins_svt": lambda: (
        _module("vit_pytorch.twins_svt").TwinsSVT(
            num_classes=5, s1_emb_dim=16, s2_emb_dim=32, s3_emb_dim=32, s4_emb_dim=64,
            s3_depth=1, s1_local_patch_size=2, s2_local_patch_size=2, s3_local_patch_size=2,
            s1_global_k=2, s2_global_k=2, s3_global_k=2, s4_global_k=1,
        ), (_pictures(128),),
    ),
}  # fmt: skip


@_case
def _x_transformers_decoder() -> tuple[nn.Module, tuple[Any, ...]]:
    x = _module("x_transformers")
    layers = x.Decoder(dim=WIDTH, depth=DEPTH, heads=HEADS, rotary_pos_emb=True)
    model = x.TransformerWrapper(num_tokens=WORDS, max_seq_len=LENGTH, attn_layers=layers)
    return model, (_words(),)


@_case
def _x_transformers_flash_grouped() -> tuple[nn.Module, tuple[Any, ...]]:
    x = _module("x_transformers")
    layers = x.Decoder(
        dim=WIDTH, depth=DEPTH, heads=HEADS, attn_flash=True, attn_kv_heads=2, attn_qk_norm=True
    )
    model = x.TransformerWrapper(num_tokens=WORDS, max_seq_len=LENGTH, attn_layers=layers)
    return model, (_words(),)


@_case
def _x_transformers_encoder_sandwich() -> tuple[nn.Module, tuple[Any, ...]]:
    x = _module("x_transformers")
    layers = x.Encoder(dim=WIDTH, depth=DEPTH, heads=HEADS, alibi_pos_bias=True, macaron=True)
    model = x.TransformerWrapper(num_tokens=WORDS, max_seq_len=LENGTH, attn_layers=layers)
    return model, (_words(),)


def _image_model(name: str, size: int = 32, **options: Any) -> Case:
    """A model of timm."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        model = _module("timm").create_model(name, img_size=size, num_classes=5, **options)
        return model, (_pictures(size),)

    return build


SMALL = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
CASES |= {
    "timm.vit": _image_model("vit_tiny_patch16_224", patch_size=8, **SMALL),
    "timm.deit_distilled": _image_model("deit_tiny_distilled_patch16_224", patch_size=8, **SMALL),
    "timm.beit": _image_model("beit_base_patch16_224", patch_size=8, **SMALL),
    "timm.eva": _image_model("eva02_tiny_patch14_224", patch_size=8, **SMALL),
    "timm.swin": _image_model(
        "swin_tiny_patch4_window7_224", 64, window_size=4, embed_dim=16, depths=(2, 2),
        num_heads=(2, 4),
    ),
    "timm.xcit": _image_model("xcit_nano_12_p16_224", embed_dim=WIDTH, depth=DEPTH, num_heads=4),
    "timm.mixer": lambda: (
        _module("timm").create_model("mixer_s32_224", num_classes=5), (_pictures(224),)
    ),
    "timm.cait": _image_model("cait_xxs24_224", patch_size=8, **SMALL),
}  # fmt: skip


@_case
def _torchvision_vit() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("torchvision.models.vision_transformer").VisionTransformer
    return kind(32, 8, DEPTH, HEADS, WIDTH, 128, num_classes=5), (_pictures(),)


@_case
def _open_clip() -> tuple[nn.Module, tuple[Any, ...]]:
    clip = _module("open_clip.model")
    vision = clip.CLIPVisionCfg(
        layers=DEPTH, width=WIDTH, head_width=16, patch_size=8, image_size=32
    )
    text = clip.CLIPTextCfg(
        context_length=LENGTH, vocab_size=WORDS, width=WIDTH, heads=HEADS, layers=DEPTH
    )
    return clip.CLIP(32, vision, text), (_pictures(), _words())


@_case
def _diffusers_unet() -> tuple[nn.Module, tuple[Any, ...]]:
    model = _module("diffusers").UNet2DConditionModel(
        sample_size=8, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=8,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    inputs = torch.randn(SEQUENCES, 4, 8, 8), torch.tensor(3), torch.randn(SEQUENCES, 7, 32)
    return model, inputs


@_case
def _diffusers_dit() -> tuple[nn.Module, tuple[Any, ...]]:
    model = _module("diffusers").DiTTransformer2DModel(
        num_attention_heads=HEADS, attention_head_dim=16, in_channels=4, num_layers=DEPTH,
        sample_size=8, norm_num_groups=4, num_embeds_ada_norm=10, dropout=0.0,
    )  # fmt: skip
    inputs = torch.randn(SEQUENCES, 4, 8, 8), torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2])
    return model, inputs


@_case
def _fair_esm() -> tuple[nn.Module, tuple[Any, ...]]:
    alphabet = _module("esm.data").Alphabet.from_architecture("ESM-1b")
    kind = _module("esm.model.esm2").ESM2
    model = kind(num_layers=DEPTH, embed_dim=WIDTH, attention_heads=HEADS, alphabet=alphabet)
    return model, (torch.randint(4, 24, (SEQUENCES, LENGTH)),)


@_case
def _torchtune_llama() -> tuple[nn.Module, tuple[Any, ...]]:
    llama = _module("torchtune.models.llama3").llama3
    model = llama(
        vocab_size=WORDS, num_layers=DEPTH, num_heads=HEADS, num_kv_heads=2, embed_dim=WIDTH,
        max_seq_len=LENGTH, intermediate_dim=128,
    )  # fmt: skip
    return model, (_words(),)


@_case
def _litgpt() -> tuple[nn.Module, tuple[Any, ...]]:
    config = _module("litgpt.config").Config(
        name="x", block_size=LENGTH, n_layer=DEPTH, n_head=HEADS, n_embd=WIDTH, vocab_size=WORDS,
        padded_vocab_size=WORDS, n_query_groups=2, rotary_percentage=1.0,
    )  # fmt: skip
    return _module("litgpt.model").GPT(config), (_words(),)


@_case
def _linear_attention_transformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("linear_attention_transformer").LinearAttentionTransformerLM
    model = kind(num_tokens=WORDS, dim=WIDTH, heads=HEADS, depth=DEPTH, max_seq_len=LENGTH)
    return model, (_words(),)


@_case
def _linear_attention_transformer_local() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("linear_attention_transformer").LinearAttentionTransformerLM
    model = kind(
        num_tokens=WORDS, dim=WIDTH, heads=HEADS, depth=DEPTH, max_seq_len=LENGTH, causal=True,
        n_local_attn_heads=2, local_attn_window_size=8,
    )  # fmt: skip
    return model, (_words(),)


@_case
def _performer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("performer_pytorch").PerformerLM
    model = kind(
        num_tokens=WORDS, max_seq_len=LENGTH, dim=WIDTH, depth=DEPTH, heads=HEADS, dim_head=16
    )
    return model, (_words(),)


@_case
def _memorizing_transformers() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("memorizing_transformers_pytorch").MemorizingTransformer
    model = kind(num_tokens=WORDS, dim=WIDTH, heads=HEADS, dim_head=16, depth=DEPTH,
                 memorizing_layers=(), xl_memory_layers=())  # fmt: skip
    return model, (_words(),)


@_case
def _simple_hierarchical_transformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("simple_hierarchical_transformer").HierarchicalTransformer
    model = kind(num_tokens=WORDS, dim=WIDTH, depth=DEPTH, seq_len=LENGTH, heads=HEADS,
                 dim_head=16, hierarchies=1, window_sizes=None, use_flash_attn=False)  # fmt: skip
    return model, (_words(),)


@_case
def _palm_rlhf() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("palm_rlhf_pytorch").PaLM
    model = kind(num_tokens=WORDS, dim=WIDTH, depth=DEPTH, heads=HEADS, dim_head=16)
    return model, (_words(),)


@_case
def _bottleneck_transformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("bottleneck_transformer_pytorch").BottleStack
    model = kind(dim=32, fmap_size=8, dim_out=64, heads=HEADS, dim_head=16, num_layers=DEPTH,
                 downsample=False)  # fmt: skip
    return model, (torch.randn(SEQUENCES, 32, 8, 8),)


@_case
def _segformer() -> tuple[nn.Module, tuple[Any, ...]]:
    model = _module("segformer_pytorch").Segformer(
        dims=(16, 32, 32, 64), heads=(1, 2, 2, 4), num_layers=2, decoder_dim=32, num_classes=4
    )
    return model, (_pictures(64),)


@_case
def _perceiver() -> tuple[nn.Module, tuple[Any, ...]]:
    model = _module("perceiver_pytorch").PerceiverIO(
        dim=32, queries_dim=32, logits_dim=None, depth=DEPTH, num_latents=16, latent_dim=WIDTH,
        cross_heads=1, latent_heads=HEADS, cross_dim_head=16, latent_dim_head=16,
    )  # fmt: skip
    return model, (_vectors(32), None, torch.randn(8, 32))


@_case
def _ft_transformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("tab_transformer_pytorch").FTTransformer
    model = kind(categories=(5, 6, 7), num_continuous=4, dim=WIDTH, depth=DEPTH, heads=HEADS,
                 dim_head=16, attn_dropout=0.0, ff_dropout=0.0)  # fmt: skip
    return model, (torch.randint(0, 5, (SEQUENCES, 3)), torch.randn(SEQUENCES, 4))


@_case
def _rtdl_ft_transformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("rtdl_revisiting_models").FTTransformer
    model = kind(
        n_cont_features=6, cat_cardinalities=[4, 5], d_out=1, n_blocks=DEPTH, d_block=WIDTH,
        attention_n_heads=HEADS, attention_dropout=0.0, ffn_d_hidden=None,
        ffn_d_hidden_multiplier=2, ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip
    return model, (torch.randn(SEQUENCES, 6), torch.randint(0, 4, (SEQUENCES, 2)))


@_case
def _nystrom() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("nystrom_attention").Nystromformer
    model = kind(dim=WIDTH, depth=DEPTH, heads=HEADS, dim_head=16, num_landmarks=8)
    return model, (_vectors(),)


@_case
def _linformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("linformer").LinformerLM
    model = kind(num_tokens=WORDS, dim=WIDTH, seq_len=LENGTH, depth=DEPTH, heads=HEADS, k=16)
    return model, (_words(),)


@_case
def _axial_attention() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("axial_attention").AxialImageTransformer
    model = kind(dim=32, depth=2, heads=HEADS, reversible=False)
    return model, (torch.randn(SEQUENCES, 32, 8, 8),)


@_case
def _conformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("conformer").Conformer
    return kind(dim=WIDTH, depth=DEPTH, heads=HEADS, dim_head=16), (_vectors(),)


@_case
def _itransformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("iTransformer").iTransformer
    model = kind(num_variates=12, lookback_len=24, dim=WIDTH, depth=DEPTH, heads=HEADS, dim_head=16,
                 pred_length=6, use_reversible_instance_norm=False)  # fmt: skip
    return model, (torch.randn(SEQUENCES, 24, 12),)


@_case
def _x_clip() -> tuple[nn.Module, tuple[Any, ...]]:
    model = _module("x_clip.x_clip").TextTransformer(
        dim=WIDTH, num_tokens=WORDS, max_seq_len=LENGTH, depth=DEPTH, heads=HEADS, dim_head=16
    )
    return model, (_words(),)


@_case
def _soft_moe() -> tuple[nn.Module, tuple[Any, ...]]:
    model = _vit("vit")()[0]
    kind = _module("soft_moe_pytorch").SoftMoE
    for _, forward in model.transformer.layers:
        forward.net = kind(dim=WIDTH, num_experts=2, seq_len=17)
    return model, (_pictures(),)


@_case
def _block_recurrent_transformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("block_recurrent_transformer_pytorch").BlockRecurrentTransformer
    model = kind(num_tokens=WORDS, dim=WIDTH, depth=DEPTH, dim_head=16, heads=HEADS,
                 max_seq_len=LENGTH, block_width=16, recurrent_layers=())  # fmt: skip
    return model, (_words(),)


@_case
def _torchscale_decoder() -> tuple[nn.Module, tuple[Any, ...]]:
    config = _module("torchscale.architecture.config").DecoderConfig(
        decoder_embed_dim=WIDTH, decoder_attention_heads=HEADS, decoder_ffn_embed_dim=128,
        decoder_layers=DEPTH, vocab_size=WORDS,
    )  # fmt: skip
    embed = nn.Embedding(WORDS, WIDTH)
    return _module("torchscale.architecture.decoder").Decoder(config, embed), (_words(),)


@_case
def _torchscale_retnet() -> tuple[nn.Module, tuple[Any, ...]]:
    config = _module("torchscale.architecture.config").RetNetConfig(
        decoder_embed_dim=WIDTH, decoder_value_embed_dim=WIDTH, decoder_retention_heads=HEADS,
        decoder_ffn_embed_dim=128, decoder_layers=DEPTH, vocab_size=WORDS,
    )  # fmt: skip
    embed = nn.Embedding(WORDS, WIDTH)
    return _module("torchscale.architecture.retnet").RetNetDecoder(config, embed), (_words(),)


@_case
def _routing_transformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("routing_transformer").RoutingTransformerLM
    model = kind(num_tokens=WORDS, dim=WIDTH, heads=HEADS, depth=DEPTH, max_seq_len=LENGTH,
                 window_size=8, causal=True)  # fmt: skip
    return model, (_words(),)


@_case
def _sinkhorn_transformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("sinkhorn_transformer").SinkhornTransformerLM
    model = kind(num_tokens=WORDS, dim=WIDTH, heads=HEADS, depth=DEPTH, max_seq_len=LENGTH,
                 bucket_size=8)  # fmt: skip
    return model, (_words(),)


@_case
def _h_transformer() -> tuple[nn.Module, tuple[Any, ...]]:
    kind = _module("h_transformer_1d").HTransformer1D
    model = kind(num_tokens=WORDS, dim=WIDTH, depth=DEPTH, causal=False, max_seq_len=LENGTH,
                 heads=HEADS, dim_head=16, block_size=8)  # fmt: skip
    return model, (_words(),)


@_case
def _mamba() -> tuple[nn.Module, tuple[Any, ...]]:
    m = _module("mambapy.mamba")
    return m.Mamba(m.MambaConfig(d_model=WIDTH, n_layers=DEPTH)), (_vectors(),)


class Reference(TorchDispatchMode):
    """Numbers of every softmax and every tensor of a pass, computed from what the operations give.

    Attributes:
        attention: For each softmax over keys its metrics by name, and whether it was fused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention: list[dict[str, float]] = []
        self._rows: list[tuple[dict[str, float], dict[str, float] | None]] = []
        self._maps: set[float] = set()

    @property
    def rows(self) -> list[dict[str, float]]:
        """Metrics of tensors as rows; feature maps of convolutions by their channels alone."""
        return [
            own
            for own, by_channel in self._rows
            if by_channel is None or by_channel["variance"] not in self._maps
        ]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if name in ("_softmax", "_safe_softmax"):
            dimension = args[1] % args[0].ndim
            if result.ndim >= 3 and dimension == result.ndim - 1:
                self.attention.append(_of_weights(result))
        elif name.startswith("_scaled_dot_product"):
            self.attention.append(_of_weights(_weights(name, args, kwargs)))
        elif name == "exp" and result.ndim >= 3:
            self.attention.append(_of_weights(result))
        # The inputs of operations too: the first is no operation's result.
        for one in (*args, *(result if isinstance(result, tuple | list) else (result,))):
            if isinstance(one, Tensor) and one.is_floating_point() and one.ndim >= 2:
                self._add_rows(one, in_convolution=name == "convolution")
        return result

    def _add_rows(self, tensor: Tensor, *, in_convolution: bool) -> None:
        if tensor.numel() > 4_000_000 or isinstance(tensor, nn.Parameter):
            return
        by_channel = None
        if tensor.ndim == 4:
            by_channel = _of_rows(tensor.movedim(1, -1).flatten(0, -2))
            self._rows.append((by_channel, None))
            if in_convolution:
                self._maps.add(by_channel["variance"])
        self._rows.append((_of_rows(tensor.flatten(0, -2)), by_channel))


def _of_rows(rows: Tensor) -> dict[str, float]:
    rows = rows.detach().double()
    mean = rows.mean(dim=0)
    spread = (rows - mean).square().sum(dim=1).mean()
    return {"drift_norm": float(mean.norm()), "variance": float(spread)}


def _weights(name: str, args: Any, kwargs: Any) -> Tensor:
    """The weights of a fused attention, in float64 from its inputs."""
    query, key = args[0].double(), args[1].double()
    places = {"flash_attention_for_cpu": (4, 5), "flash_attention": (4, None)}
    causal_at = next((at[0] for end, at in places.items() if name.endswith(end)), 5)
    mask = kwargs.get("attn_mask")
    if mask is None:
        mask = next((x for x in args[3:] if isinstance(x, Tensor)), None)
    causal = kwargs.get("is_causal", args[causal_at] if len(args) > causal_at else False)
    scale = kwargs.get("scale") or query.shape[-1] ** -0.5
    if key.ndim == 4 and key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(-1, -2) * scale
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask.double()
    if causal is True:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(dim=-1)


def _of_weights(weights: Tensor) -> dict[str, float]:
    weights = weights.detach().double()
    entropy = torch.special.entr(weights).sum(dim=-1)
    # Rows that see one key have a largest weight of 1 whatever the model does, and are left out.
    largest = weights.amax(dim=-1)[(weights > 0).sum(dim=-1) > 1]
    return {
        "attention_entropy": float(entropy.mean()),
        "attention_extremes/max": float(largest.mean()),
    }


def _numbers(result: Any) -> list[Tensor]:
    """Every floating-point tensor of what a model returned."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if isinstance(result, dict):
        result = list(result.values())
    elif hasattr(result, "__dict__") and not isinstance(result, tuple | list):
        result = list(vars(result).values())
    if isinstance(result, tuple | list):
        return [one for part in result for one in _numbers(part)]
    return []


def _step(model: nn.Module, inputs: tuple[Any, ...], around: Any) -> list[Tensor]:
    """Outputs and gradients of one step, and the buffers after it."""
    torch.manual_seed(1)
    model.zero_grad()
    with around:
        outputs = _numbers(model(*inputs))
    sum(one.square().mean() for one in outputs if one.requires_grad).backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*(one.detach() for one in outputs), *grads]


def _state(model: nn.Module) -> list[Any]:
    hooks = [name for name in vars(nn.Module()) if name.endswith("hooks")]
    return [
        [[len(getattr(m, name)) for name in hooks] for m in model.modules()],
        [sorted(vars(m)) for m in model.modules()],
        [type(m) for m in model.modules()],
        nn.functional.scaled_dot_product_attention,
        nn.functional.softmax,
        nn.functional.multi_head_attention_forward,
        torch.softmax,
        Tensor.softmax,
        nn.Module.__call__,
        torch.backends.mha.get_fastpath_enabled(),
    ]


def examine(name: str) -> dict[str, Any]:
    """Train one step of a model with and without a monitor, and compare."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    buffers = {key: value.clone() for key, value in model.state_dict().items()}

    def restore() -> None:
        model.load_state_dict(buffers)

    reference = Reference()
    plain = _step(model, inputs, torch.enable_grad())
    restore()
    before = _state(model)
    with tempfile.TemporaryDirectory() as folder:
        try:
            monitor = Monitor(
                model,
                metrics=METRICS | select("attention_extremes"),
                schedule=every(1),
                directory=folder,
            )
        except ValueError as error:
            return {"refused": str(error)}
        said = io.StringIO()
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            watched = _step(model, inputs, monitor(0))
            monitor.close()
        readings = read(folder).readings
        if not readings:
            return {"refused": said.getvalue().strip()[-400:]}
        stacks, notes = readings[-1].stacks, readings[-1].words()
    same = len(plain) == len(watched) and all(map(torch.equal, plain, watched))
    clean = _state(model) == before
    restore()
    _step(model, inputs, reference)
    return {
        "identical": same,
        "clean": clean,
        "notes": notes,
        "softmaxes": len(reference.attention),
        **_compare(stacks, reference),
    }


def _compare(stacks: Stacks, reference: Reference) -> dict[str, Any]:
    """Which layers were seen, which were wrong, and which were missed."""
    found: dict[str, Any] = {}
    for label, metrics, numbers in (
        ("hidden", OF_ROWS, reference.rows),
        ("attention", BY_HEAD, reference.attention),
    ):
        layers: dict[tuple[str, int], dict[str, float]] = {}
        for stack, columns in stacks.items():
            for metric, part in metrics:
                column = columns.get(metric, Column())
                column = column.parts.get(part, Column()) if part else column
                name = f"{metric}/{part}" if part else metric
                for layer, value in zip(column.depths(), column.layers, strict=True):
                    layers.setdefault((stack, layer), {})[name] = value
        seen, wrong, missed, disorder = [], [], [], []
        last: dict[str, int] = {}
        for (stack, layer), own in sorted(layers.items()):
            place = f"{stack}_{layer}" if stack else str(layer)
            if any(map(math.isnan, own.values())):
                missed.append(place)
                continue
            at = [i for i, there in enumerate(numbers) if _agree(own, there)]
            if not at:
                wrong.append(place)
            else:
                seen.append(place)
                after = [i for i in at if i > last.get(stack, -1)]
                if not after:
                    disorder.append(place)
                last[stack] = after[0] if after else at[-1]
        found[label] = {"seen": seen, "wrong": wrong, "missed": missed, "disorder": disorder}
        found[label]["values"] = {f"{s}{n}": own for (s, n), own in layers.items()}
    return found


def _agree(own: dict[str, float], there: dict[str, float]) -> bool:
    return all(
        math.isclose(value, there[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for name, value in own.items()
    )


def _line(name: str, result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"{name}: {result['failed']}"
    if "refused" in result:
        return f"{name}: refused: {result['refused']}"
    parts = [f"{name}:", "same bits" if result["identical"] else "OTHER BITS"]
    parts.append("nothing left" if result["clean"] else "SOMETHING LEFT")
    for label in ("hidden", "attention"):
        found = result[label]
        text = f"{label} {len(found['seen'])} right"
        for kind in ("wrong", "missed", "disorder"):
            if found[kind]:
                text += f", {kind.upper() if kind != 'missed' else kind} {' '.join(found[kind])}"
        parts.append(text)
    return (
        "; ".join(parts)
        + f"; {result['softmaxes']} softmaxes"
        + "".join(f"\n    {note}" for note in result["notes"])
    )


_PAGE = """# Code of others

What `python -m benchmarks.foreign` saw of models of other code bases, as they are installed from
the registry, with one line added to their training step. A value counts as *right* where a second
pass in float64, without geomon, gives the same number to 1e-5; of {ran} models that ran, {bad} had
a wrong value, other bits or something left behind. What is *missed* has a reason in the notes of
the reading.

| model | hidden states | attention | not seen, and why |
| --- | --- | --- | --- |
{rows}

Refused when the monitor is built or at its first reading, with the way out in the message (mostly:
the blocks lie in lists of lists, and `blocks=...` names them): {refused}.
"""

# Notes of a tiny batch, of a random model and of inputs without token ids, which say nothing of the
# code.
_OF_THE_INPUTS = (
    "gride runs", "no 95 % intervals", "estimates stand on", "exact copies of others",
    "'token_ids' is missing",
)  # fmt: skip
_LONGEST = 160


def _write_page(path: Path, results: dict[str, dict[str, Any]], counts: dict[str, int]) -> None:
    rows = []
    for name, result in sorted(results.items()):
        if "identical" not in result:
            continue
        found = [result[label] for label in ("hidden", "attention")]
        cells = [
            f"{len(own['seen'])} right"
            + "".join(f", {len(own[x])} {x}" for x in ("wrong", "missed") if own[x])
            for own in found
        ]
        reasons = dict.fromkeys(
            textwrap.shorten(
                note.replace("|", "/").rpartition("is missing: ")[2], _LONGEST, placeholder=" ..."
            )
            for note in result["notes"]
            if not any(words in note for words in _OF_THE_INPUTS)
        )
        rows.append(f"| {name} | {' | '.join(cells)} | {'; '.join(reasons)} |")
    refused = ", ".join(sorted(name for name, result in results.items() if "refused" in result))
    path.write_text(_PAGE.format(rows="\n".join(rows), refused=refused, **counts))


def main(
    only: Annotated[str, typer.Option(help="Names of cases that contain this text.")] = "",
    alone: Annotated[str, typer.Option(hidden=True)] = "",
    values: Annotated[bool, typer.Option(help="Print the values of every layer too.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write what was seen as a page.")] = None,
) -> None:
    """Examine every code base that is installed."""
    if alone:
        try:
            result = examine(alone)
        except ModuleNotFoundError as error:
            result = {"failed": f"not installed ({error.name})"}
        except Exception as error:
            result = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(result))
        return
    counts: dict[str, int] = {}
    results: dict[str, dict[str, Any]] = {}
    for name in CASES:
        if only not in name:
            continue
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.foreign", "--alone", name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
            )
            result = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            result = {"failed": f"HANGS: not done in {TIME_LIMIT} s"}
        except (IndexError, json.JSONDecodeError):
            result = {"failed": f"DIED: {done.stderr[-300:]}"}
        results[name] = result
        print(_line(name, result), flush=True)
        if values and "hidden" in result:
            print(json.dumps({k: result[k]["values"] for k in ("hidden", "attention")}))
        for kind in ("failed", "refused"):
            counts[kind] = counts.get(kind, 0) + (kind in result)
        if "identical" in result:
            counts["ran"] = counts.get("ran", 0) + 1
            bad = not (result["identical"] and result["clean"])
            bad = bad or any(result[x]["wrong"] for x in ("hidden", "attention"))
            counts["bad"] = counts.get("bad", 0) + bad
    print(counts)
    if page is not None:
        _write_page(page, results, counts)


if __name__ == "__main__":
    typer.run(main)
