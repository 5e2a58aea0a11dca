"""A model of the zoo: how to build and call it, and the paths of its parts.

Nothing of geomon is imported here: this is the reference that geomon is held against.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 50

# -- layouts of projections: [..., width] to query [..., heads, head width] and key --------------

Split = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def thirds(fused: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor]:
    """[q | k | v]: GPT-2, MPT, nanoGPT, timm; with fewer key heads Phi-3 and Starcoder's first."""
    parts = fused.unflatten(-1, (heads + 2 * key_heads, -1))
    return parts[..., :heads, :], parts[..., heads : heads + key_heads, :]


def per_head(fused: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor]:
    """[q | k | v] of head 0, then of head 1, ...: GPT-NeoX, BLOOM, Falcon with ALiBi."""
    parts = fused.unflatten(-1, (heads, 3, -1))
    return parts[..., 0, :], parts[..., 1, :]


def per_group(fused: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor]:
    """The queries of a group, then its key and its value: Falcon."""
    parts = fused.unflatten(-1, (key_heads, heads // key_heads + 2, -1))
    return parts[..., :-2, :].flatten(-3, -2), parts[..., -2, :]


def quarters(fused: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor]:
    """[q | v | k] four times, each with a quarter of the heads: CodeGen."""
    query, _, key = fused.unflatten(-1, (4, 3, heads // 4, -1)).unbind(dim=-3)
    return query.flatten(-3, -2), key.flatten(-3, -2)


def alone(output: Tensor, heads: int) -> Tensor:
    """A projection of its own, as most have."""
    return output.unflatten(-1, (heads, -1))


def gated(output: Tensor, heads: int) -> Tensor:
    """[q | gate] of each head: Qwen3-Next."""
    return alone(output, heads).chunk(2, dim=-1)[0]


def halves(output: Tensor, heads: int) -> Tensor:
    """[k | v]: cross-attention of GPT-2."""
    return alone(output.chunk(2, dim=-1)[0], heads)


def as_turned(part: Tensor) -> Tensor:
    """Numbers that are turned in pairs of neighbours, as they stand afterwards: DeepSeek."""
    return part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def turned_behind(own: int) -> Callable[[Tensor, int], Tensor]:
    """Queries whose rotated part follows a part that is not rotated."""

    def queries(output: Tensor, heads: int) -> Tensor:
        parts = alone(output, heads)
        return torch.cat([parts[..., :own], as_turned(parts[..., own:])], dim=-1)

    return queries


# -- routes: from attention implementations to where attention goes through ----------------------

INTERFACE = {"sdpa": "sdpa", "eager": "softmax"}
EAGER_INTERFACE = {"eager": "softmax"}  # no fused attention has a softcap or sinks
SDPA = {"sdpa": "sdpa", "eager": "softmax"}
NOT_FUSED = {"sdpa": "softmax", "eager": "softmax"}  # values or keys have other sizes
SDPA_ALONE = {"sdpa": "sdpa"}
BY_HAND = {"eager": "softmax"}
NONE = {"eager": "none"}

# -- what geomon says where it has not got a view ------------------------------------------------

NOT_BEFORE = "the layer before was not seen, or has other rows or another width"
NO_TOKENS = "no embedding outside the blocks received integers of the hidden states' shape"
SEVERAL_PRODUCTS = (
    "attention is written out by hand: its scores are the sum of {count} products, and it is "
    "not clear which of them multiplies queries and keys"
)
NOT_TRACED = "its queries and keys were not traced back to products of tokens with weights"
CHUNKS = (
    "attention is not rebuilt here: a softmax over 5 numbers was seen, but they are not known "
    "to be products of queries with all keys: they may be features (linear attention), chunks of "
    "keys or experts"
)
SEVERAL = (
    "attention is not rebuilt here: it takes several softmaxes (landmarks, chunks, both "
    "dimensions), and none of them is the attention itself"
)
AS_ATTENDED = ": Q and K as attended are used instead"
OF_SCORES = ("query", "key", "bias", "scale", "softcap", "sink")


def lacking(reason: str, *views: str, stacks: tuple[str, ...] = ("",)) -> dict:
    """Views that are missing for a reason, as `Specimen.uncovered` has them."""
    return {(stack, view): reason for stack in stacks for view in views}


# -- specimens -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """One stack of blocks, or the cross-attention of one.

    Attributes:
        blocks: Path of the list of blocks in the model; "*" stands for every child in turn.
        attention: Name of the output that holds the eager model's attention probabilities; or
            "in <path>" for the module of a block that holds or returns them.
        query: Path in the block of the module that projects to queries (or to all); None if no
            module does: then Q and K as attended are used.
        key: Path in the block of the module that projects to keys; None if `query` makes all.
        holder: Path in the block of the module that holds the weights of queries and of keys, as
            "q" and "k", [width, heads, head width], and has no modules for them.
        shared: Path of the module that makes the latent, and the part of keys that all heads share.
        own_width: Width of the other part, which each head has of its own.
        split: How the output of a fused projection is laid out.
        query_of: How queries stand in the output of a projection of their own.
        key_of: How keys stand in the output of a projection of their own.
        heads: Query heads.
        key_heads: Key heads.
        attending: Depths of the blocks that attend; None for all.
        length_first: Whether hidden states are [length, sequences, width].
        windows: Whether the projections have their rows in another order than the hidden states.
    """

    blocks: str
    attention: str | None = "attentions"
    query: str | None = None
    key: str | None = None
    holder: str | None = None
    shared: str | None = None
    own_width: int | None = None
    split: Split = thirds
    query_of: Callable[[Tensor, int], Tensor] = alone
    key_of: Callable[[Tensor, int], Tensor] = alone
    heads: int = 4
    key_heads: int = 4
    attending: tuple[int, ...] | None = None
    length_first: bool = False
    windows: bool = False

    def blocks_in(self, model: nn.Module) -> list[nn.Module]:
        """The blocks, in order."""
        first, star, rest = self.blocks.partition(".*.")
        if not star:
            return list(model.get_submodule(first).children())
        return [
            block
            for stage in model.get_submodule(first).children()
            for block in stage.get_submodule(rest).children()
        ]

    def attending_in(self, model: nn.Module) -> dict[int, nn.Module]:
        """The blocks that attend, by depth."""
        blocks = self.blocks_in(model)
        depths = range(1, len(blocks) + 1) if self.attending is None else self.attending
        return {depth: blocks[depth - 1] for depth in depths}


@dataclass(frozen=True)
class Specimen:
    """A model of the zoo.

    Attributes:
        name: Name in the table.
        build: Takes an attention implementation and returns a model.
        inputs: The keyword arguments of a call, padded if the model takes a mask.
        stacks: Stacks by the name that geomon should give them; "" if there is only one.
        routes: Route of the attention by implementation: "sdpa", "softmax" (by hand) or "none".
        padding: Takes the inputs and returns the mask of real tokens of each stack that has one.
        own_attention: By implementation, a function from projected query and key ([sequences,
            length, heads, head width]) and the inputs to attention probabilities, if they differ
            from the eager model's.
        uncovered: (stack, view) -> the reason that geomon gives for not having it.
        notes: Notes that geomon should give, except the share of padding.
        remark: Remark in the table.
    """

    name: str
    build: Callable[[str], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    stacks: Mapping[str, Stack]
    routes: Mapping[str, str]
    padding: Callable[[dict[str, Any]], dict[str, Tensor]] = lambda inputs: {}
    own_attention: Mapping[str, Callable[[Tensor, Tensor, dict[str, Any]], Tensor]] = field(
        default_factory=dict
    )
    uncovered: Mapping[tuple[str, str], str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    remark: str = ""


def built(specimen: Specimen, implementation: str, *, dropout: float = 0.0) -> nn.Module:
    """The model in eval mode, with the same weights at each call.

    They are large enough to make attention uneven: what random initialisation gives is so close to
    uniform that a wrong mask or a wrong head would pass.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = specimen.build(implementation).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                fan_in = parameter.numel() / len(parameter) if parameter.ndim > 1 else 100
                parameter.add_(torch.randn_like(parameter), alpha=fan_in**-0.5)
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "attention_probs_dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, dropout)
    return model


# -- inputs --------------------------------------------------------------------------------------

SEQUENCES, LENGTH = 3, 14
PADDING_MASKS = (
    "attention_mask", "decoder_attention_mask", "src_key_padding_mask", "tgt_key_padding_mask",
    "memory_key_padding_mask",
)  # fmt: skip


def inputs_of(specimen: Specimen, *, padded: bool) -> dict[str, Any]:
    """The inputs of a specimen, with its padding masks or without."""
    inputs = specimen.inputs()
    return inputs if padded else {n: v for n, v in inputs.items() if n not in PADDING_MASKS}


def noise(*shape: int) -> Tensor:
    """A Gaussian tensor, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def ids(length: int = LENGTH, seed: int = 0) -> Tensor:
    """Token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (SEQUENCES, length), generator=generator)


def mask(length: int, short: int) -> Tensor:
    """One whole sequence, one padded on the right by `short`, one on the left by 2."""
    real = torch.ones(SEQUENCES, length, dtype=torch.long)
    real[1, length - short :] = 0
    real[2, :2] = 0
    return real


def tokens() -> dict[str, Any]:
    """Make the inputs of a language model."""
    return {"input_ids": ids(), "attention_mask": mask(LENGTH, 5)}


def both_tokens() -> dict[str, Any]:
    """Make the inputs of an encoder and a decoder."""
    return tokens() | {
        "decoder_input_ids": ids(10, seed=1),
        "decoder_attention_mask": mask(10, 3),
    }


def images(size: int = 16) -> dict[str, Any]:
    """Make the inputs of a vision model."""
    return {"pixel_values": noise(2, 3, size, size)}


def sound() -> dict[str, Any]:
    """Make the inputs of a speech model: 400 samples, the second recording shorter."""
    real = torch.ones(2, 400, dtype=torch.long)
    real[1, 250:] = 0
    return {"input_values": noise(2, 400), "attention_mask": real}


def spectrogram() -> dict[str, Any]:
    """Make the inputs of Whisper."""
    return {"input_features": noise(2, 8, 28), "decoder_input_ids": ids(10)[:2]}


def one_mask(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Real tokens of a model with one stack."""
    return {"": inputs["attention_mask"].bool()}


def two_masks(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Real tokens of a model with an encoder and a decoder."""
    decoder = inputs["decoder_attention_mask"].bool()
    return {"encoder": inputs["attention_mask"].bool(), "decoder": decoder, "cross": decoder}


def frames(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Real frames of samples that pass two convolutions (8 by 4, 4 by 4)."""
    lengths, count = inputs["attention_mask"].sum(dim=1), 400
    for kernel, stride in ((8, 4), (4, 4)):
        lengths, count = (lengths - kernel) // stride + 1, (count - kernel) // stride + 1
    return {"": torch.arange(count) < lengths[:, None]}
