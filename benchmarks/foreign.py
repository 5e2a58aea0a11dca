"""Adds one line to the training of other code bases' models.

PYTHONPATH=tests python -W ignore -m benchmarks.foreign

Each model of an installed code base trains one step with and without a `Monitor`. Outputs, loss and
gradients must be bit-identical, and modules, functions and switches must be unchanged. The values
are compared with a second pass without geomon: a dispatch mode computes in float64 the entropy and
the largest weight of every softmax over a last dimension, and the norm of the mean and the variance
of every tensor with at least two dimensions. Each value that geomon reports at a layer must equal
one of these to 1e-5, and each missing value must have a reason.

Each model runs in a process of its own, with a time limit. The packages are not dependencies of
geomon: install them with `pip install --no-deps` next to torch in a separate environment.
"""

import contextlib
import importlib
import io
import math
import multiprocessing
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.timing import print_table
from geomon import METRICS, Monitor, every, read, select
from geomon.capture.tokens import sampling
from geomon.record.columns import Column, Stacks
from support.fingerprint import fingerprint

SEQUENCES, LENGTH, WIDTH, DEPTH, HEADS, WORDS = 3, 32, 64, 3, 4, 50
TOLERANCE = 1e-5
TIME_LIMIT = 150
# Compared metrics and parts.
BY_HEAD = (("attention_entropy", ""), ("attention_extremes", "max"))
OF_ROWS = (("drift_norm", ""), ("variance", ""))

Built = tuple[nn.Module, tuple[Any, ...]]
Case = Callable[[], Built]


def _words() -> Tensor:
    return torch.randint(0, WORDS, (SEQUENCES, LENGTH))


def _pictures(size: int = 32) -> Tensor:
    return torch.randn(SEQUENCES, 3, size, size)


def _vectors(*shape: int) -> Tensor:
    return torch.randn(SEQUENCES, *(shape or (LENGTH, WIDTH)))


def _make(place: str, **options: Any) -> Any:
    """Call a function or class of a package by its full name; options may be such calls."""
    module, _, name = place.rpartition(".")
    made = {key: each() if isinstance(each, partial) else each for key, each in options.items()}
    return getattr(importlib.import_module(module), name)(**made)


def _case(place: str, *inputs: Callable[[], Any], **options: Any) -> Case:
    """Describe a model by its class name and options, and the inputs of one step."""
    return lambda: (_make(place, **options), tuple(make() for make in inputs))


def _vit(name: str, kind: str = "ViT", **options: Any) -> Case:
    """Describe a vision transformer of vit-pytorch."""
    return _case(
        f"vit_pytorch.{name}.{kind}", _pictures, image_size=32, patch_size=8, num_classes=5,
        dim=WIDTH, depth=DEPTH, heads=HEADS, mlp_dim=128, **options,
    )  # fmt: skip


def _timm(name: str, size: int = 32, **options: Any) -> Case:
    """Describe a model of timm."""
    return _case(
        "timm.create_model", lambda: _pictures(size), model_name=name, img_size=size,
        num_classes=5, **options,
    )  # fmt: skip


def _x_transformers(kind: str, **options: Any) -> Case:
    """Describe a stack of x-transformers, with embeddings around it."""
    layers = partial(_make, f"x_transformers.{kind}", dim=WIDTH, depth=DEPTH, heads=HEADS)
    return _case(
        "x_transformers.TransformerWrapper", _words, num_tokens=WORDS, max_seq_len=LENGTH,
        attn_layers=partial(layers, **options),
    )  # fmt: skip


def _soft_moe() -> Built:
    model = _vit("vit")()[0]
    for _, forward in model.transformer.layers:
        forward.net = _make("soft_moe_pytorch.SoftMoE", dim=WIDTH, num_experts=2, seq_len=17)
    return model, (_pictures(),)


SIZES: dict[str, Any] = {"dim": WIDTH, "depth": DEPTH, "heads": HEADS}
OF_WORDS: dict[str, Any] = {"num_tokens": WORDS, **SIZES}
LONG: dict[str, Any] = {"max_seq_len": LENGTH, **OF_WORDS}
SMALL = {"patch_size": 8, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
CASES: dict[str, Case] = {
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
    "vit_pytorch.cvt": _case(
        "vit_pytorch.cvt.CvT", _pictures, num_classes=5, s1_emb_dim=16, s2_emb_dim=32,
        s3_emb_dim=64, s3_depth=2, s2_depth=1,
    ),
    "vit_pytorch.pit": _case(
        "vit_pytorch.pit.PiT", _pictures, image_size=32, patch_size=8, dim=32, num_classes=5,
        depth=(1, 2), heads=2, mlp_dim=64,
    ),
    "vit_pytorch.levit": _case(
        "vit_pytorch.levit.LeViT", lambda: _pictures(64), image_size=64, num_classes=5, stages=2,
        dim=(32, 64), depth=2, heads=2, mlp_mult=2,
    ),
    "vit_pytorch.twins_svt": _case(
        "vit_pytorch.twins_svt.TwinsSVT", lambda: _pictures(128), num_classes=5, s1_emb_dim=16,
        s2_emb_dim=32, s3_emb_dim=32, s4_emb_dim=64, s3_depth=1, s1_local_patch_size=2,
        s2_local_patch_size=2, s3_local_patch_size=2, s1_global_k=2, s2_global_k=2, s3_global_k=2,
        s4_global_k=1,
    ),
    "x_transformers.decoder": _x_transformers("Decoder", rotary_pos_emb=True),
    "x_transformers.flash_grouped": _x_transformers(
        "Decoder", attn_flash=True, attn_kv_heads=2, attn_qk_norm=True
    ),
    "x_transformers.sandwich": _x_transformers("Encoder", alibi_pos_bias=True, macaron=True),
    "timm.vit": _timm("vit_tiny_patch16_224", **SMALL),
    "timm.deit_distilled": _timm("deit_tiny_distilled_patch16_224", **SMALL),
    "timm.beit": _timm("beit_base_patch16_224", **SMALL),
    "timm.eva": _timm("eva02_tiny_patch14_224", **SMALL),
    "timm.cait": _timm("cait_xxs24_224", **SMALL),
    "timm.swin": _timm(
        "swin_tiny_patch4_window7_224", 64, window_size=4, embed_dim=16, depths=(2, 2),
        num_heads=(2, 4),
    ),
    "timm.xcit": _timm("xcit_nano_12_p16_224", embed_dim=WIDTH, depth=DEPTH, num_heads=4),
    "timm.mixer": _case(
        "timm.create_model", lambda: _pictures(224), model_name="mixer_s32_224", num_classes=5
    ),
    "torchvision.vit": _case(
        "torchvision.models.vision_transformer.VisionTransformer", _pictures, image_size=32,
        patch_size=8, num_layers=DEPTH, num_heads=HEADS, hidden_dim=WIDTH, mlp_dim=128,
        num_classes=5,
    ),
    "open_clip": _case(
        "open_clip.model.CLIP", _pictures, _words, embed_dim=32,
        vision_cfg={"layers": DEPTH, "width": WIDTH, "head_width": 16, "patch_size": 8,
                    "image_size": 32},
        text_cfg={"context_length": LENGTH, "vocab_size": WORDS, "width": WIDTH, "heads": HEADS,
                  "layers": DEPTH},
    ),
    "diffusers.unet": _case(
        "diffusers.UNet2DConditionModel", lambda: _vectors(4, 8, 8), lambda: torch.tensor(3),
        lambda: _vectors(7, 32), sample_size=8, block_out_channels=(32, 64), layers_per_block=1,
        cross_attention_dim=32, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        attention_head_dim=8, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
    ),
    "diffusers.dit": _case(
        "diffusers.DiTTransformer2DModel", lambda: _vectors(4, 8, 8),
        lambda: torch.tensor([1, 2, 3]), lambda: torch.tensor([0, 1, 2]),
        num_attention_heads=HEADS, attention_head_dim=16, in_channels=4, num_layers=DEPTH,
        sample_size=8, norm_num_groups=4, num_embeds_ada_norm=10, dropout=0.0,
    ),
    "fair_esm": _case(
        "esm.model.esm2.ESM2", lambda: torch.randint(4, 24, (SEQUENCES, LENGTH)),
        num_layers=DEPTH, embed_dim=WIDTH, attention_heads=HEADS,
    ),
    "litgpt": _case(
        "litgpt.model.GPT", _words, config=partial(
            _make, "litgpt.config.Config", name="x", block_size=LENGTH, n_layer=DEPTH,
            n_head=HEADS, n_embd=WIDTH, vocab_size=WORDS, padded_vocab_size=WORDS,
            n_query_groups=2, rotary_percentage=1.0,
        ),
    ),
    "linear_attention_transformer": _case(
        "linear_attention_transformer.LinearAttentionTransformerLM", _words, **LONG
    ),
    "linear_attention_transformer.local": _case(
        "linear_attention_transformer.LinearAttentionTransformerLM", _words, causal=True,
        n_local_attn_heads=2, local_attn_window_size=8, **LONG,
    ),
    "performer": _case("performer_pytorch.PerformerLM", _words, dim_head=16, **LONG),
    "simple_hierarchical_transformer": _case(
        "simple_hierarchical_transformer.HierarchicalTransformer", _words, seq_len=LENGTH,
        dim_head=16, hierarchies=1, window_sizes=None, use_flash_attn=False, **OF_WORDS,
    ),
    "palm_rlhf": _case("palm_rlhf_pytorch.PaLM", _words, dim_head=16, **OF_WORDS),
    "bottleneck_transformer": _case(
        "bottleneck_transformer_pytorch.BottleStack", lambda: _vectors(32, 8, 8), dim=32,
        fmap_size=8, dim_out=64, heads=HEADS, dim_head=16, num_layers=DEPTH, downsample=False,
    ),
    "segformer": _case(
        "segformer_pytorch.Segformer", lambda: _pictures(64), dims=(16, 32, 32, 64),
        heads=(1, 2, 2, 4), num_layers=2, decoder_dim=32, num_classes=4,
    ),
    "perceiver": _case(
        "perceiver_pytorch.PerceiverIO", lambda: _vectors(LENGTH, 32), lambda: None,
        lambda: torch.randn(8, 32), dim=32, queries_dim=32, logits_dim=None, depth=DEPTH,
        num_latents=16, latent_dim=WIDTH, cross_heads=1, latent_heads=HEADS, cross_dim_head=16,
        latent_dim_head=16,
    ),
    "ft_transformer": _case(
        "tab_transformer_pytorch.FTTransformer", lambda: torch.randint(0, 5, (SEQUENCES, 3)),
        lambda: _vectors(4), categories=(5, 6, 7), num_continuous=4, dim_head=16,
        attn_dropout=0.0, ff_dropout=0.0, **SIZES,
    ),
    "rtdl_ft_transformer": _case(
        "rtdl_revisiting_models.FTTransformer", lambda: _vectors(6),
        lambda: torch.randint(0, 4, (SEQUENCES, 2)), n_cont_features=6, cat_cardinalities=[4, 5],
        d_out=1, n_blocks=DEPTH, d_block=WIDTH, attention_n_heads=HEADS, attention_dropout=0.0,
        ffn_d_hidden=None, ffn_d_hidden_multiplier=2, ffn_dropout=0.0, residual_dropout=0.0,
    ),
    "nystrom": _case(
        "nystrom_attention.Nystromformer", _vectors, dim_head=16, num_landmarks=8, **SIZES
    ),
    "linformer": _case("linformer.LinformerLM", _words, seq_len=LENGTH, k=16, **OF_WORDS),
    "axial_attention": _case(
        "axial_attention.AxialImageTransformer", lambda: _vectors(32, 8, 8), dim=32, depth=2,
        heads=HEADS, reversible=False,
    ),
    "conformer": _case("conformer.Conformer", _vectors, dim_head=16, **SIZES),
    "itransformer": _case(
        "iTransformer.iTransformer", lambda: _vectors(24, 12), num_variates=12, lookback_len=24,
        dim_head=16, pred_length=6, use_reversible_instance_norm=False, **SIZES,
    ),
    "x_clip": _case("x_clip.x_clip.TextTransformer", _words, dim_head=16, **LONG),
    "soft_moe": _soft_moe,
    "block_recurrent_transformer": _case(
        "block_recurrent_transformer_pytorch.BlockRecurrentTransformer", _words, dim_head=16,
        block_width=16, recurrent_layers=(), **LONG,
    ),
    "routing_transformer": _case(
        "routing_transformer.RoutingTransformerLM", _words, window_size=8, causal=True, **LONG
    ),
    "sinkhorn_transformer": _case(
        "sinkhorn_transformer.SinkhornTransformerLM", _words, bucket_size=8, **LONG
    ),
    "h_transformer": _case(
        "h_transformer_1d.HTransformer1D", _words, causal=False, dim_head=16, block_size=8, **LONG
    ),
    "mamba": _case(
        "mambapy.mamba.Mamba", _vectors,
        config=partial(_make, "mambapy.mamba.MambaConfig", d_model=WIDTH, n_layers=DEPTH),
    ),
}  # fmt: skip


class Reference(TorchDispatchMode):
    """Metrics of every softmax and every tensor of a pass, computed from the operations' results.

    Attributes:
        attention: For each softmax over keys, its metrics by name, and whether it was fused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention: list[dict[str, float]] = []
        self._rows: list[tuple[dict[str, float], dict[str, float] | None]] = []
        self._maps: set[float] = set()

    @property
    def rows(self) -> list[dict[str, float]]:
        """Metrics of tensors as rows; feature maps of convolutions count only by channel."""
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
            self.attention.append(_of_weights(_weights(function, args, kwargs)))
        elif name == "exp" and result.ndim >= 3:
            self.attention.append(_of_weights(result))
        # Inputs of operations count too, as no operation returns the first one.
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


def _weights(function: Any, args: Any, kwargs: Any) -> Tensor:
    """Compute the weights of a fused attention in float64 from its inputs."""
    names = (argument.name for argument in function._schema.arguments)
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (given[name].double() for name in ("query", "key", "value"))
    mask = given.get("attn_mask", given.get("attn_bias"))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    return torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, mask, 0.0, given.get("is_causal", False), scale=given.get("scale"),
        enable_gqa=True,
    )[1]  # fmt: skip


def _of_weights(weights: Tensor) -> dict[str, float]:
    weights = weights.detach().double()
    entropy = torch.special.entr(weights).sum(dim=-1)
    # Rows that see a single key are left out, because their largest weight is always 1.
    largest = weights.amax(dim=-1)[(weights > 0).sum(dim=-1) > 1]
    return {
        "attention_entropy": float(entropy.mean()),
        "attention_extremes/max": float(largest.mean()),
    }


def _numbers(result: Any) -> list[Tensor]:
    """Collect the floating-point tensors in a model's output, also in objects that hold them."""
    leaves = [
        inner
        for leaf in tree_leaves(result)
        for inner in (leaf, *tree_leaves(getattr(leaf, "__dict__", {})))
    ]
    return [one for one in leaves if isinstance(one, Tensor) and one.is_floating_point()]


def _step(model: nn.Module, inputs: tuple[Any, ...], around: Any) -> list[Tensor]:
    """Return outputs and gradients of one step."""
    torch.manual_seed(1)
    model.zero_grad()
    with around:
        outputs = _numbers(model(*inputs))
    sum(one.square().mean() for one in outputs if one.requires_grad).backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*(one.detach() for one in outputs), *grads]


def examine(name: str) -> dict[str, Any]:
    """Train a model for one step with and without a monitor, and compare."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    buffers = {key: value.clone() for key, value in model.state_dict().items()}

    def restore() -> None:
        model.load_state_dict(buffers)

    sampling.ATTENTION_QUERIES = 10**6  # all of them, as in the reference
    reference = Reference()
    plain = _step(model, inputs, torch.enable_grad())
    restore()
    before = fingerprint(model)
    with tempfile.TemporaryDirectory() as folder:
        try:
            monitor = Monitor(
                model,
                metrics=METRICS | select("attention_extremes"),
                schedule=every(1),
                directory=folder,
            )
        except ValueError as error:
            return {"failed": f"refused: {error}"}
        said = io.StringIO()
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            watched = _step(model, inputs, monitor(0))
            monitor.close()
        readings = read(folder).readings
        if not readings:
            return {"failed": f"refused: {said.getvalue().strip()[-400:]}"}
        stacks, notes = readings[-1].stacks, readings[-1].words()
    same = len(plain) == len(watched) and all(map(torch.equal, plain, watched))
    clean = fingerprint(model) == before
    restore()
    _step(model, inputs, reference)
    return {
        "identical": same,
        "clean": clean,
        "notes": notes,
        **_compare(stacks, reference),
    }


def _compare(stacks: Stacks, reference: Reference) -> dict[str, Any]:
    """List the layers that were seen, wrong, or missed."""
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
        kinds: dict[str, list[str]] = {"right": [], "wrong": [], "missed": []}
        for (stack, layer), own in sorted(layers.items()):
            kind = "right" if any(_agree(own, there) for there in numbers) else "wrong"
            if any(map(math.isnan, own.values())):
                kind = "missed"
            kinds[kind].append(f"{stack}_{layer}" if stack else str(layer))
        found[label] = kinds
    return found


def _agree(own: dict[str, float], there: dict[str, float]) -> bool:
    return all(
        math.isclose(value, there[name], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for name, value in own.items()
    )


# Notes that come from a tiny batch, a random model or inputs without token ids, not from the code.
_OF_THE_INPUTS = (
    "gride runs", "no 95 % intervals", "estimates stand on", "exact copies of others",
    "'token_ids' is missing",
)  # fmt: skip
_LONGEST = 130


def _reasons(notes: list[str]) -> list[str]:
    """List the reasons for missing values; reasons that differ only in numbers appear once."""
    said = [
        textwrap.shorten(note.rpartition("is missing: ")[2], _LONGEST, placeholder=" ...")
        for note in notes
        if not any(words in note for words in _OF_THE_INPUTS)
    ]
    return list({"".join(c for c in text if not c.isdigit()): text for text in said}.values())


def _row(name: str, result: dict[str, Any]) -> list[str]:
    if "failed" in result:
        return [name, result["failed"], "", "", ""]
    counts = (
        ", ".join(f"{len(own)} {kind}" for kind, own in result[label].items() if own) or "none"
        for label in ("hidden", "attention")
    )
    verdict = "wrong" if _is_bad(result) else "right"
    return [name, verdict, *counts, "; ".join(_reasons(result["notes"]))]


def _is_bad(result: dict[str, Any]) -> bool:
    wrong = any(result[label]["wrong"] for label in ("hidden", "attention"))
    return wrong or not (result["identical"] and result["clean"])


def _ask(name: str) -> dict[str, Any]:
    """Examine a model in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as alone:
        try:
            return alone.apply_async(examine, [name]).get(TIME_LIMIT)
        except ModuleNotFoundError as error:
            return {"failed": f"not installed ({error.name})"}
        except multiprocessing.TimeoutError:
            return {"failed": f"died, or not done in {TIME_LIMIT} s"}
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def main(
    only: Annotated[str, typer.Option(help="Names of cases that contain this text.")] = "",
) -> None:
    """Examine every code base that is installed."""
    results: dict[str, dict[str, Any]] = {}

    def rows() -> Iterator[list[str]]:
        for name in (name for name in CASES if only in name):
            results[name] = _ask(name)
            yield _row(name, results[name])

    print_table(
        "Models of other code bases", ("model", "", "hidden states", "attention", ""), rows()
    )
    ran = [name for name, one in results.items() if "failed" not in one]
    bad = [name for name in ran if _is_bad(results[name])]
    print(
        f"\n{len(ran)} of {len(results)} ran; wrong, other bits or something left: {bad or 'none'}"
    )


if __name__ == "__main__":
    typer.run(main)
